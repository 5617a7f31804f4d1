//! Addresses and who holds them: one slab of N bytes, handed out and taken back by a deterministic [`Pool`].
//!
//! The slab has two ends. [`End::Persistent`] grows up from address 0 and holds what outlives a step: weights, cache
//! pages, state slots, graph inputs. [`End::Arena`] grows down from the top and holds one step's blocks. Each end keeps
//! its blocks inside its own extent, and the gap between the two extents belongs to whichever grows first.
//! The high-water mark of a step is the largest *extent* of the arena, holes included: what the card must have.
//! [`Report`] says what that was and who held it, and always `slab = resident + transient_peak + free`.
//!
//! May live here: offsets, sizes, tags, and the book-keeping of them. The same calls give the same offsets on every
//! device, so nothing here may see data, a device, a driver, time, randomness or a global. Sharing a pool (a lock, freeing
//! on drop) and turning an offset into a pointer belong to `device`; which blocks exist, and at which end, to `ops`,
//! `model` and `engine`.

mod ledger;
mod pool;
mod region;
mod report;
mod tag;

pub use pool::{ALIGN_BYTES, Block, End, Pool};
pub use report::Report;
pub use tag::{Layer, Owner, Tag};
