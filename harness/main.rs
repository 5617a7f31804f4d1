//! The `highwater` binary.
#![cfg_attr(not(test), expect(dead_code, reason = "the engine that these modules serve is wired in next"))]

mod axis;
mod bytes;
mod charts;
mod definitions;
mod failure;
mod journal;
mod plot;
mod provenance;
mod record;
mod stats;
mod table;

fn main() {}
