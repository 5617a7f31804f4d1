//! Who holds how much now, and who held how much when the step's arena was largest. Counts only: no offsets, no names.

use super::pool::End;
use super::tag::TagId;

/// Live bytes by tag for both ends, and the marks of the step under way.
#[derive(Debug)]
pub(super) struct Ledger {
    /// Live bytes by tag number, an entry per end.
    live: [Vec<u64>; 2],
    /// The arena's largest extent of the step.
    peak: u64,
    /// Arena bytes by tag number just after `peak` was reached; stale while `pending`.
    at_peak: Vec<u64>,
    /// The arena's owners have not changed since `peak` was reached: `live` is `at_peak`. Copying waits for a change,
    /// because most peaks are passed by the very next allocation.
    pending: bool,
    /// Largest sum of live arena bytes of the step.
    live_peak: u64,
    largest: Option<(TagId, u64)>,
}

impl Ledger {
    pub(super) fn new() -> Ledger {
        Ledger {
            live: [Vec::new(), Vec::new()],
            peak: 0,
            at_peak: Vec::new(),
            pending: true,
            live_peak: 0,
            largest: None,
        }
    }

    /// Notes a new block; `extent` and `total` are its end's extent and live bytes with the block in it.
    pub(super) fn allocated(&mut self, end: End, owner: TagId, bytes: u64, extent: u64, total: u64) {
        if end == End::Arena {
            if extent > self.peak {
                self.peak = extent;
                self.pending = true;
            } else {
                self.keep_peak();
            }
            self.live_peak = self.live_peak.max(total);
            if self.largest.is_none_or(|(_, most)| bytes > most) {
                self.largest = Some((owner, bytes));
            }
        }
        let live = &mut self.live[end as usize];
        if live.len() <= owner as usize {
            live.resize(owner as usize + 1, 0);
        }
        live[owner as usize] += bytes;
    }

    /// Notes that a block is about to go.
    pub(super) fn freed(&mut self, end: End, owner: TagId, bytes: u64) {
        if end == End::Arena {
            self.keep_peak();
        }
        self.live[end as usize][owner as usize] -= bytes;
    }

    /// Starts the marks afresh from what the arena holds now (nothing, unless blocks were carried over).
    pub(super) fn begin_step(&mut self, extent: u64, total: u64, blocks: impl Iterator<Item = (TagId, u64)>) {
        self.peak = extent;
        self.pending = true;
        self.live_peak = total;
        self.largest = blocks.max_by_key(|&(_, bytes)| bytes);
    }

    /// Live bytes by tag number; tags past the end hold none.
    pub(super) fn live(&self, end: End) -> &[u64] {
        &self.live[end as usize]
    }

    /// The arena's largest extent of the step.
    pub(super) fn peak(&self) -> u64 {
        self.peak
    }

    /// Arena bytes by tag number just after [`Ledger::peak`] was reached.
    pub(super) fn at_peak(&self) -> &[u64] {
        if self.pending { self.live(End::Arena) } else { &self.at_peak }
    }

    pub(super) fn live_peak(&self) -> u64 {
        self.live_peak
    }

    pub(super) fn largest(&self) -> Option<(TagId, u64)> {
        self.largest
    }

    fn keep_peak(&mut self) {
        if self.pending {
            self.at_peak.clone_from(&self.live[End::Arena as usize]);
            self.pending = false;
        }
    }
}
