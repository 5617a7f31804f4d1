//! The Qwen3.5 family (dense and MoE): parameters, per-sequence state, and the forward pass over one ragged step.
//!
//! May live here: which ops run in which order on which weights. May not: requests, schedules, files, device branches.

mod forward;
mod layers;
mod load;
mod state;
mod weights;

pub use forward::{HeadFault, Probe};
pub use layers::LayerState;
pub use state::{StateDecl, StateScope};
pub use weights::Model;
