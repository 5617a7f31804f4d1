//! What a model is and where its weights are: config.json to [`Geometry`], safetensors headers to entries by canonical
//! name, and the built-in geometries. Everything read here may be hostile; nothing here panics or blocks because of it.
//!
//! | file | may hold |
//! |---|---|
//! | geometry.rs | [`Geometry`], the parameters that follow from it, relations between its numbers |
//! | config.rs | config.json and generation_config.json: keys, defaults, refused variants |
//! | builtin.rs | the built-in geometries, as data |
//! | linears.rs | the linear modules of a geometry, by name |
//! | quant/ | how each linear module is stored: every producer's config, held against the tensors |
//! | json.rs | bounded JSON and typed fields |
//! | header.rs | the header of one safetensors file |
//! | index.rs | which file holds which tensor |
//! | names.rs | what a tensor's name means: prefixes and rules to skip |
//! | tokenizer.rs | how many token ids decode |
//! | folder.rs | which files of a folder make a checkpoint |
//! | account.rs | every tensor matched to a parameter, skipped or refused |
//! | disk.rs | [`Checkpoint`]: open files and positioned reads |
//! | recipe/, recipes/ | [`Recipe`]: how the modules of a geometry without files are stored, as data |
//! | seeded.rs | the values of a model without files |
//! | synth/ | [`Synth`]: a checkpoint with random weights, written to a folder |
//! | source.rs | [`Source`]: parameters from a checkpoint or a seed into tensors |
//! | verdict.rs | what a source says about one linear module |
//! | model_ref.rs | [`ModelRef`]: what a user may write for a model |
//!
//! Reading imports `error` only, and schemes as values: bytes go into a slice the caller owns. source.rs, seeded.rs and
//! synth/ know tensors, streams of random numbers and files.

mod account;
mod builtin;
mod config;
mod disk;
mod folder;
mod geometry;
pub mod header;
pub mod index;
mod json;
mod linears;
mod model_ref;
mod names;
mod quant;
mod recipe;
mod seeded;
mod source;
pub mod synth;
mod tokenizer;
mod verdict;

pub use account::{Entry, Module, Skipped};
pub use builtin::names;
pub use disk::{Checkpoint, Survey};
pub use geometry::{Gate, Gdn, Geometry, Mixer, Mlp, Param, Rope, Yarn};
pub use header::Dtype;
pub use linears::Linear;
pub use model_ref::ModelRef;
pub use names::SkipRule;
pub use recipe::{Published, Recipe};
pub use source::Source;
pub use synth::Synth;
pub use verdict::{RowScale, Verdict};
