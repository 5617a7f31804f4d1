//! The one test binary: a module per area.

mod checkpoint;
mod engine;
mod fixture;
mod golden;
mod harness;
mod inspect;
mod mem;
mod ops;
mod plan;
mod tidy;
