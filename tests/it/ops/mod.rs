//! The CPU arm of each op against float64, its shape errors, and plan bytes = cpu bytes.

mod fill;
mod kit;
mod moe;
mod sampler;
