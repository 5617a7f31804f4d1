//! The operations of a forward pass. Each checks its operands, picks a tactic from the card, allocates once, and only
//! then matches on the device; the CPU arm of `ops/X.rs` is `ops/reference/X.rs`.
//!
//! May live here: shape contracts, tactics (pure functions of card and shape), costs, launches. May not: knowledge of
//! models, requests or files.

pub mod activation;
pub mod attention;
pub mod batch;
mod check;
pub mod conv1d;
pub mod cost;
pub mod cx;
pub mod fill;
pub mod gdn_decode;
pub mod gdn_prefill;
pub mod kv_write;
pub mod launch;
pub mod linear;
pub mod moe;
pub mod norm;
pub mod quantise;
pub mod reference;
pub mod rope;
pub mod rows;
pub mod sampler;
pub mod scheme;
pub mod weight;

pub use batch::{Batch, Span, StepInputs};
pub use cost::{Cost, Meter};
pub use cx::{ActQuant, Cx, Limits, Numerics, RouteLog};

pub use crate::with_elem;
