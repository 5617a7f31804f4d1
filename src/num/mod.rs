//! Pure values: element types, 8- and 4-bit floats and counter-based random numbers.
//!
//! May live here: conversions and bit patterns that are the same on every device, tested over all their values.
//! May not: buffers, devices, anything that allocates.

pub mod dtype;
pub mod elementary;
pub mod fnv;
pub mod fp4;
pub mod fp8;
pub mod philox;

pub use dtype::DType;
pub use half::bf16;
