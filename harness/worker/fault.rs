//! Workers broken on purpose: what tests of isolation make happen, at a cell of their choice.

use std::io::Write as _;
use std::time::Duration;

use anyhow::bail;
use highwater::engine::Engine;
use highwater::error::Error;
use highwater::mem::{End, Layer, Tag};

use crate::axis::Cell;

/// What every fault of this file is called by, before its own name.
pub(crate) const PREFIX: &str = "worker-";
/// Bytes of what a leak keeps.
const LEAK_BYTES: u64 = 1 << 20;
/// Bytes of what a noisy worker prints.
const NOISE_BYTES: usize = 1 << 20;

/// How a worker breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The cell panics.
    Panic,
    /// The process aborts, as a panic does where it cannot be caught.
    Abort,
    /// The process is killed by signal 9.
    Kill,
    /// The process is killed, and none can be started after it, as when the card is lost.
    Lost,
    /// The cell never ends.
    Hang,
    /// The cell ends, and memory of it stays.
    Leak,
    /// The card's context fails.
    Sticky,
    /// The cell prints a megabyte to standard output and error, with rubbish in it.
    Noise,
}

const KINDS: [(&str, Kind); 8] = [
    ("worker-panic", Kind::Panic),
    ("worker-abort", Kind::Abort),
    ("worker-kill", Kind::Kill),
    ("worker-lost", Kind::Lost),
    ("worker-hang", Kind::Hang),
    ("worker-leak", Kind::Leak),
    ("worker-sticky", Kind::Sticky),
    ("worker-noise", Kind::Noise),
];

/// A way to break and the cells that do: `worker-kill`, or `worker-kill@chunk=512,batch=2`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    text: String,
    kind: Kind,
    at: [Option<u64>; 3],
}

impl Fault {
    /// The fault of `text`. An error says what there is.
    pub(crate) fn parse(text: &str) -> Result<Fault, Error> {
        let refuse = |what: String| Err(Error::Request { param: "--fault", what });
        let (name, places) = text.split_once('@').unwrap_or((text, ""));
        let Some((_, kind)) = KINDS.iter().find(|(known, _)| *known == name) else {
            return refuse(format!("{name:?} is none of {}", KINDS.map(|(name, _)| name).join(", ")));
        };
        let mut at = [None; 3];
        for place in places.split(',').filter(|place| !place.is_empty()) {
            let (axis, value) = place.split_once('=').unwrap_or((place, ""));
            let axis = ["chunk", "batch", "depth"].iter().position(|known| *known == axis);
            let (Some(axis), Ok(value)) = (axis, value.parse()) else {
                return refuse(format!("{place:?} is no place; write e.g. {name}@chunk=512,batch=2"));
            };
            at[axis] = Some(value);
        }
        Ok(Fault { text: text.to_owned(), kind: *kind, at })
    }

    /// As it was asked for.
    pub(crate) fn name(&self) -> &str {
        &self.text
    }

    /// Whether it happens at `cell`.
    pub(super) fn hits(&self, cell: &Cell) -> bool {
        let values = [cell.chunk, cell.batch, cell.depth];
        self.at.iter().zip(values).all(|(at, value)| at.is_none_or(|at| at == value))
    }

    /// What happens to the worker that is the group's `start`th after the first, before it says that it is ready.
    pub(super) fn at_start(&self, start: u64) -> anyhow::Result<()> {
        if self.kind == Kind::Lost && start > 0 {
            bail!("cuInit answered CUDA_ERROR_NO_DEVICE (a seeded fault)");
        }
        Ok(())
    }

    /// What happens before the cell runs.
    pub(super) fn before(&self) -> Result<(), Error> {
        match self.kind {
            Kind::Panic => panic!("a seeded fault"),
            Kind::Abort => {
                let _ = writeln!(std::io::stderr(), "about to abort (a seeded fault)");
                std::process::abort();
            }
            Kind::Kill | Kind::Lost => super::kill_self(),
            Kind::Hang => loop {
                std::thread::sleep(Duration::from_secs(1));
            },
            Kind::Sticky => {
                let what = "cuStreamSynchronize answered CUDA_ERROR_ILLEGAL_ADDRESS (a seeded fault)".into();
                return Err(Error::Device { what, help: String::new(), sticky: true });
            }
            Kind::Noise => {
                let line = "{\"row\":{\"row\":{\"schema\":4,\"status\":\"ok\"},\"spent\":null}}\n\u{1b}[2J\0";
                let noise = line.repeat(NOISE_BYTES / line.len());
                let _ = std::io::stdout().write_all(noise.as_bytes());
                let _ = std::io::stderr().write_all(noise.as_bytes());
            }
            Kind::Leak => {}
        }
        Ok(())
    }

    /// What happens after it, before the ledger is looked at.
    pub(super) fn after(&self, engine: &Engine) {
        if self.kind == Kind::Leak {
            let tag = Tag::new(Layer::Other, "fault", "leak");
            // Where there is no room left there is nothing to leak.
            std::mem::forget(engine.runner().device().alloc(End::Persistent, tag, LEAK_BYTES));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_happens_where_it_was_asked_for() {
        let cell = |chunk, batch| Cell::fixed(chunk, batch, 0);
        let fault = Fault::parse("worker-kill@chunk=512,batch=2").unwrap();
        assert!(fault.hits(&cell(512, 2)) && !fault.hits(&cell(512, 1)) && !fault.hits(&cell(64, 2)));
        assert!(Fault::parse("worker-panic").unwrap().hits(&cell(1, 1)));
        for (text, words) in [
            ("worker-fly", "worker-kill"),
            ("worker-kill@chunks=1", "worker-kill@chunk=512"),
            ("worker-kill@chunk=x", "no place"),
            ("worker-kill@chunk", "no place"),
        ] {
            let refused = Fault::parse(text).unwrap_err().to_string();
            assert!(refused.contains(words), "{text}: {refused}");
        }
    }
}
