//! What a model is and where its weights are: config.json to [`Geometry`], safetensors headers to entries by canonical
//! name, and the built-in geometries. Everything read here may be hostile; nothing here panics or blocks because of it.
//!
//! | file | may hold |
//! |---|---|
//! | geometry.rs | [`Geometry`], the parameters that follow from it, relations between its numbers |
//! | config.rs | config.json and generation_config.json: keys, defaults, refused variants |
//! | builtin.rs | the built-in geometries, as data |
//! | quant.rs | the verdict per module on how its weight is stored |
//! | json.rs | bounded JSON and typed fields |
//! | header.rs | the header of one safetensors file |
//!
//! Imports `error` only. A device, an arena or a kernel has no place here: bytes go into a slice the caller owns.

mod builtin;
mod config;
mod geometry;
pub mod header;
mod json;
mod quant;

pub use builtin::names;
pub use geometry::{Gate, Gdn, Geometry, Mixer, Mlp, Param, Rope, Yarn};
pub use header::Dtype;
