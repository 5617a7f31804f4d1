//! The one test binary: a module per area.

mod checkpoint;
mod engine;
mod fixture;
mod golden;
mod plan;
mod tidy;
