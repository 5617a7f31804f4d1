//! The CPU arm of each op, same stem: plain loops with a written summation order.

pub mod attention;
pub mod kv_write;
pub mod linear;
pub mod rope;
pub mod rows;
pub mod activation;
pub mod conv1d;
pub mod gdn_decode;
pub mod gdn_prefill;
mod lanes;
pub mod norm;
pub mod slots;
