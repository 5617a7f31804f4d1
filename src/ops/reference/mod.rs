//! The CPU arm of each op, same stem: plain loops with a written summation order.

pub mod fill;
pub mod moe;
pub mod sampler;
