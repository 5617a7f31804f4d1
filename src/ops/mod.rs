//! The operations of a forward pass. Each checks its operands, picks a tactic from the card, allocates once, and only
//! then matches on the device; the CPU arm of `ops/X.rs` is `ops/reference/X.rs`.
//!
//! May live here: shape contracts, tactics (pure functions of card and shape), costs, launches. May not: knowledge of
//! models, requests or files.

pub mod batch;
pub mod cost;
pub mod cx;
pub mod fill;
pub mod moe;
pub mod reference;
pub mod sampler;

pub use batch::{Batch, Span, StepInputs};
pub use cost::{Cost, Meter};
pub use cx::{Cx, Limits, Numerics};

pub use crate::with_elem;
