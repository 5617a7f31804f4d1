//! The CPU arm of each op, same stem: plain loops with a written summation order.

pub mod activation;
pub mod attention;
pub mod conv1d;
pub mod fill;
pub mod gdn_decode;
pub mod gdn_prefill;
pub mod kv_write;
mod lanes;
pub mod linear;
pub mod moe;
pub mod norm;
pub mod quantise;
pub mod rope;
pub mod rows;
pub mod sampler;
pub mod slots;
pub mod weight;
