//! Pure values: element types and counter-based random numbers.
//!
//! May live here: conversions and bit patterns that are the same on every device, tested over all their values.
//! May not: buffers, devices, anything that allocates.

pub mod dtype;
pub mod elementary;
pub mod philox;

pub use dtype::DType;
pub use half::bf16;
