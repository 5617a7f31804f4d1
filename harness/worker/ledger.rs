//! Whether a cell left memory behind: what an idle engine holds must be its weights and the pools it was sized for.

use highwater::engine::Engine;
use highwater::error::{Error, mib};

/// Memory outside the slab may grow by this much before it is a leak: what the driver does by itself, in bytes.
const OUTSIDE_BYTES: i64 = 16 << 20;

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
        let unattributed = cuda.outside()?.unattributed;
        let first = *self.unattributed.get_or_insert(unattributed);
        let grown = unattributed.saturating_sub(first);
        Ok((grown > OUTSIDE_BYTES)
            .then(|| format!("the card's memory in use outside the slab grew by {}", size(grown.unsigned_abs()))))
    }
}

fn size(bytes: u64) -> String {
    format!("{bytes} B ({})", mib(bytes))
}
