//! Highwater.
pub mod checkpoint;
pub mod error;
