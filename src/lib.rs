//! Highwater.
pub mod error;
