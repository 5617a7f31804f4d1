//! Highwater: a benchmark harness that watches the high-water mark of device memory, with a small inference engine
//! behind it, for the Qwen3.5/3.6/3.8 hybrids.
//!
//! The rooms, in import order (an arrow back is an error that the test `tidy` finds):
//! [`num`], [`error`] <- [`mem`] <- [`device`] <- [`tensor`] <- [`ops`] <- [`checkpoint`] <- [`model`] <- [`engine`].

pub mod checkpoint;
pub mod device;
pub mod engine;
pub mod error;
pub mod mem;
pub mod model;
pub mod num;
pub mod ops;
pub mod tensor;
