//! Highwater.
pub mod error;
pub mod mem;
