//! Ops against float64 closed forms written here, on a poisoned device: a value nobody wrote is a NaN in the result.

mod attention;
mod kv_write;
mod linear;
mod rope;
mod rows;
mod world;
