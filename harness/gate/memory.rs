//! Two rows' bytes, compared exactly, and who holds the difference.

use highwater::error::mib;
use serde::Serialize;

use crate::record::Row;

/// A part of the ledger that changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Change {
    /// Which part, or whose bytes at the peak.
    pub(crate) part: String,
    /// Bytes in the baseline.
    pub(crate) baseline: u64,
    /// Bytes in the candidate.
    pub(crate) candidate: u64,
}

impl Change {
    fn grew(&self) -> bool {
        self.candidate > self.baseline
    }
}

/// What changed between two rows of one cell.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Memory {
    /// Parts of the ledger: resident ones, and the peak of each phase.
    pub(crate) parts: Vec<Change>,
    /// Owners at the peak, the largest change first.
    pub(crate) owners: Vec<Change>,
    /// Parts that the baseline has and the candidate does not say.
    pub(crate) silent: Vec<&'static str>,
}

impl Memory {
    /// Compares two rows that both ended well, in what the baseline says.
    pub(crate) fn of(base: &Row, candidate: &Row) -> Memory {
        let ledger = |row: &Row| {
            [
                ("weights", row.weights_bytes),
                ("kv", row.kv_bytes),
                ("state", row.state_bytes),
                ("inputs", row.inputs_bytes),
                ("resident", row.resident_bytes),
                ("transient peak", row.transient_peak_bytes),
                ("prefill peak", row.prefill_transient_bytes),
                ("decode peak", row.decode_transient_bytes),
            ]
        };
        let change = |part: &str, baseline: u64, candidate: u64| {
            (baseline != candidate).then(|| Change { part: part.to_owned(), baseline, candidate })
        };
        let (mut parts, mut silent) = (Vec::new(), Vec::new());
        for ((part, baseline), (_, candidate)) in ledger(base).into_iter().zip(ledger(candidate)) {
            match (baseline, candidate) {
                (Some(baseline), Some(candidate)) => parts.extend(change(part, baseline, candidate)),
                (Some(_), None) => silent.push(part),
                (None, _) => {}
            }
        }
        let held = |row: &Row, tag: &str| -> u64 {
            row.owners.iter().filter(|owner| owner.tag == tag).fold(0, |sum, owner| sum.saturating_add(owner.bytes))
        };
        let mut tags: Vec<&str> = base.owners.iter().chain(&candidate.owners).map(|owner| owner.tag.as_str()).collect();
        tags.sort_unstable();
        tags.dedup();
        let mut owners: Vec<Change> =
            tags.into_iter().filter_map(|tag| change(tag, held(base, tag), held(candidate, tag))).collect();
        owners.sort_by_key(|owner| std::cmp::Reverse(owner.candidate.abs_diff(owner.baseline)));
        Memory { parts, owners, silent }
    }

    /// Whether any part of the ledger is larger than it was.
    pub(crate) fn grew(&self) -> bool {
        self.parts.iter().any(Change::grew)
    }

    /// Whether some part is smaller and none is larger.
    pub(crate) fn shrank(&self) -> bool {
        !self.parts.is_empty() && !self.grew()
    }

    /// One line: the parts that changed, and the owners at the peak that account for it, those that grew first.
    pub(crate) fn line(&self) -> String {
        let parts: Vec<String> = self.parts.iter().map(change_text).collect();
        let (grown, shrunk): (Vec<&Change>, Vec<&Change>) = self.owners.iter().partition(|owner| owner.grew());
        let owners: Vec<String> = grown.into_iter().chain(shrunk).map(owner_text).collect();
        let owners = if owners.is_empty() { "no owner at the peak changed".to_owned() } else { owners.join(", ") };
        format!("{}; by owner at the peak: {owners}", parts.join(", "))
    }
}

fn change_text(change: &Change) -> String {
    format!("{} {} ({} -> {} B)", change.part, signed(change), change.baseline, change.candidate)
}

fn owner_text(change: &Change) -> String {
    format!("`{}` {}", change.part, signed(change))
}

fn signed(change: &Change) -> String {
    let sign = if change.grew() { '+' } else { '-' };
    let bytes = change.candidate.abs_diff(change.baseline);
    let shown = if bytes < 1 << 20 { format!("{bytes} B") } else { mib(bytes) };
    format!("{sign}{shown}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owners::Owner;
    use crate::record::tests::ok_row;

    #[test]
    fn equal_bytes_are_no_change() {
        let same = Memory::of(&ok_row(512, 1, 64), &Row { tpot_ms: Some(99.0), ..ok_row(512, 1, 64) });
        assert_eq!((same.grew(), same.shrank(), same), (false, false, Memory::default()));
    }

    #[test]
    fn a_buffer_more_is_named_with_its_bytes_in_one_line() {
        let base = ok_row(512, 1, 64 << 20);
        let mut candidate = ok_row(512, 1, 76 << 20);
        candidate.owners = [("gdn.h", 64 << 20), ("decode.extra", 12 << 20)]
            .map(|(tag, bytes)| Owner { tag: tag.into(), bytes })
            .into();
        let memory = Memory::of(&base, &candidate);
        assert!(memory.grew());
        let line = memory.line();
        assert_eq!(
            line,
            "transient peak +12.0 MiB (67108864 -> 79691776 B); by owner at the peak: `decode.extra` +12.0 MiB"
        );
        let back = Memory::of(&candidate, &base);
        assert!(back.shrank() && back.line().contains("`decode.extra` -12.0 MiB"));
    }

    #[test]
    fn one_byte_of_any_part_or_phase_is_growth_even_where_another_shrank() {
        let base = Row {
            prefill_transient_bytes: Some(64),
            decode_transient_bytes: Some(32),
            state_bytes: Some(0),
            inputs_bytes: Some(0),
            ..ok_row(512, 1, 64)
        };
        let changes: [fn(&mut Row); 4] = [
            |r| r.decode_transient_bytes = Some(33),
            |r| r.state_bytes = Some(1),
            |r| r.kv_bytes = Some(51),
            |r| (r.weights_bytes, r.inputs_bytes) = (Some(899), Some(1)),
        ];
        for change in changes {
            let mut candidate = base.clone();
            change(&mut candidate);
            assert!(Memory::of(&base, &candidate).grew());
        }
        let decode = Memory::of(&base, &Row { decode_transient_bytes: Some(33), ..base.clone() });
        assert_eq!(decode.line(), "decode peak +1 B (32 -> 33 B); by owner at the peak: no owner at the peak changed");
    }

    #[test]
    fn what_the_candidate_does_not_say_is_no_saving() {
        let base = ok_row(512, 1, 64);
        let memory = Memory::of(&base, &Row { kv_bytes: None, ..base.clone() });
        assert_eq!((memory.silent, memory.parts.len()), (vec!["kv"], 0));
        let more = Memory::of(&Row { kv_bytes: None, ..base.clone() }, &base);
        assert_eq!(more, Memory::default());
    }
}
