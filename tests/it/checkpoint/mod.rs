//! `highwater::checkpoint`: geometries, configs, and checkpoints on disk, valid and malformed.

mod config;
mod disk;
mod fixtures;
mod geometry;
mod maker;
mod malformed;
mod model_ref;
mod mutations;
mod quant;
mod synth;
