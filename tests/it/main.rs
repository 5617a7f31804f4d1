//! The one test binary: a module per area.

mod checkpoint;
mod engine;
mod fixture;
mod golden;
mod ops;
mod plan;
mod tidy;
