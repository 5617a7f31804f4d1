//! The one test binary: a module per area.
#![allow(clippy::print_stdout)] // tests print the figures they hold to a bound
#![allow(clippy::needless_for_each, clippy::precedence, clippy::decimal_bitwise_operands)] // short oracles, hashed seeds

mod ab;
mod bench;
mod cells;
mod checkpoint;
mod cuda;
mod doctor;
mod emulator;
mod engine;
mod fixture;
mod formats;
mod gate;
mod gate_criterion;
mod golden;
mod harness;
mod incidents;
mod inspect;
mod isolation;
mod kernels;
mod mem;
mod nightly;
mod ops;
mod plan;
mod rates;
mod replan;
mod report;
mod results;
mod sanitizer;
mod shards;
mod tidy;
mod verb;
