//! Whether a cell left memory behind: what an idle engine holds must be its weights and the pools it was sized for.

use highwater::engine::Engine;
use highwater::error::{Error, mib};

use crate::record::DRIVERS_OWN_BYTES;

/// Memory outside the slab may grow by this much before it is a leak.
const OUTSIDE_BYTES: i64 = DRIVERS_OWN_BYTES as i64;

/// What the first cell of a worker found outside the slab.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    unattributed: Option<i64>,
}

impl Ledger {
    /// Empties the engine and says in words what is left beyond its weights and pools. An error is a card that does not
    /// answer.
    pub(super) fn left_behind(&mut self, engine: &mut Engine) -> Result<Option<String>, Error> {
        engine.clear();
        let device = engine.runner().device();
        // What the arena holds now is all that the next step's peak can start from.
        device.begin_step();
        let (report, sizing) = (device.report(), engine.sizing());
        if report.transient_peak > 0 {
            let owner = report.owners.first().map(|(owner, _)| owner.to_string()).unwrap_or_default();
            return Ok(Some(format!("{} of the step arena stayed in use ({owner})", size(report.transient_peak))));
        }
        let due = sizing.weights + sizing.kv + sizing.state + sizing.inputs;
        if report.resident_live != due {
            let (held, owner) = (report.resident_live, report.resident_owners.first());
            let owner = owner.map(|(owner, bytes)| format!("{owner} holds {bytes} B, the most")).unwrap_or_default();
            return Ok(Some(format!(
                "the persistent end holds {held} B, {} {} than its weights and pools ({due} B); {owner}",
                size(held.abs_diff(due)),
                if held > due { "more" } else { "less" },
            )));
        }
        let Some(cuda) = device.as_cuda().filter(|cuda| cuda.is_card()) else { return Ok(None) };
        Ok(self.grown(cuda.outside()?.unattributed))
    }

    /// Whether the card's memory in use that nobody accounts for has grown since the first cell.
    fn grown(&mut self, unattributed: i64) -> Option<String> {
        let first = *self.unattributed.get_or_insert(unattributed);
        let grown = unattributed.saturating_sub(first);
        (grown > OUTSIDE_BYTES)
            .then(|| format!("the card's memory in use outside the slab grew by {}", size(grown.unsigned_abs())))
    }
}

fn size(bytes: u64) -> String {
    format!("{bytes} B ({})", mib(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::axis::Cell;
    use crate::cell::{EngineRunner, Workload};
    use crate::record::Row;
    use crate::sweep::Runner as _;
    use crate::target::{Kind, Model, Place, Values};
    use highwater::mem::{End, Layer, Tag};
    use highwater::ops::Numerics;

    #[test]
    fn what_stays_at_either_end_of_the_slab_is_found_and_named() {
        let place = Place::new(None, Some(256 << 20), Kind::Plan).unwrap();
        let values = Values { numerics: Numerics::BF16, fault: None };
        let workload = Workload { output: 3, ..Workload::default() };
        let mut runner = EngineRunner::new(Model { text: "tiny".into(), seed: 0 }, place, values, workload);
        let mut ledger = Ledger::default();
        for chunk in [64, 16] {
            runner.run(&Cell::fixed(chunk, 2, 0), &mut Row::default()).unwrap();
            assert_eq!(ledger.left_behind(runner.loaded().unwrap()).unwrap(), None);
        }
        for (end, words) in
            [(End::Arena, "of the step arena stayed in use"), (End::Persistent, "more than its weights")]
        {
            let engine = runner.loaded().unwrap();
            let kept = engine.runner().device().alloc(end, Tag::new(Layer::Other, "test", "kept"), 100_000).unwrap();
            let left = ledger.left_behind(engine).unwrap().unwrap();
            assert!(left.contains(words) && left.contains("100096 B"), "{left}");
            drop(kept);
            assert_eq!(ledger.left_behind(engine).unwrap(), None);
        }
    }

    #[test]
    fn a_card_s_other_memory_may_move_a_little_and_not_grow() {
        let mut ledger = Ledger::default();
        assert_eq!(ledger.grown(1_114_112), None);
        assert_eq!(ledger.grown(1_114_112 + OUTSIDE_BYTES), None);
        assert_eq!(ledger.grown(-5), None);
        let grown = ledger.grown(1_114_112 + OUTSIDE_BYTES + 1).unwrap();
        assert!(grown.contains("16777217 B (16.0 MiB)"), "{grown}");
    }
}
