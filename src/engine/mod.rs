//! One synchronous engine, driven by the harness and by the server alike: [`Engine::load`], [`Engine::submit`],
//! [`Engine::step`].
//!
//! May live here: requests, schedules, pages and slots, and the sizing that proves a step fits before it runs. May not:
//! HTTP, text, threads, clocks beyond timing a step.

pub mod cache;
pub mod fault;
pub mod request;
pub mod runner;
pub mod schedule;
pub mod sizing;

mod core;

pub use core::{Engine, Options, StepOut};
pub use fault::Fault;
pub use request::{Finish, Logits, Record, Request, RequestId};
pub use runner::{PromptRows, Runner, StepPlan};
pub use schedule::Policy;
pub use sizing::{KvBudget, Sizer, Sizing};
