//! The one test binary: a module per area.

mod checkpoint;
mod engine;
mod fixture;
mod golden;
mod harness;
mod mem;
mod ops;
mod plan;
mod tidy;
