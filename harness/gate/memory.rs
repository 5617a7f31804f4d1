//! Two rows' bytes, compared exactly, and who holds the difference.

use highwater::error::mib;
use serde::Serialize;

use super::outside::{self, Outside};
use crate::owners::Owner;
use crate::record::Row;

/// Owners that are named; a peak that moved to another moment has dozens.
const MOST_OWNERS: usize = 5;

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

    fn moved(&self) -> u64 {
        self.candidate.abs_diff(self.baseline)
    }
}

/// What changed between two rows of one cell.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Memory {
    /// Parts of the ledger: resident ones, and the peak of each phase.
    pub(crate) parts: Vec<Change>,
    /// Owners at the peaks that moved, new ones first, then by how much each grew.
    pub(crate) owners: Vec<Change>,
    /// What changed outside the slab, where anything did.
    pub(crate) outside: Option<Outside>,
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
        if outside::said(base) && !outside::said(candidate) {
            silent.push("memory outside the slab");
        }
        let owners = holders(base, candidate);
        Memory { parts, owners, outside: Outside::of(base, candidate), silent }
    }

    /// Whether any part of the slab is larger than it was, to the byte.
    pub(crate) fn slab_grew(&self) -> bool {
        self.parts.iter().any(Change::grew)
    }

    /// Whether that is so, or more lies outside the slab than a driver takes by itself.
    pub(crate) fn grew(&self) -> bool {
        self.slab_grew() || self.outside.as_ref().is_some_and(Outside::grew)
    }

    /// Whether some part is smaller and none is larger.
    pub(crate) fn shrank(&self) -> bool {
        !self.grew() && (!self.parts.is_empty() || self.outside.as_ref().is_some_and(Outside::shrank))
    }

    /// One line: the parts that changed, and who holds the difference at the peak, whoever held nothing before first; then
    /// what changed outside the slab, where that is more than the driver's doing.
    pub(crate) fn line(&self) -> String {
        let outside = self.outside.as_ref().filter(|outside| outside.grew() || outside.shrank()).map(Outside::line);
        let slab = (!self.parts.is_empty()).then(|| self.slab_line());
        slab.into_iter().chain(outside).collect::<Vec<_>>().join("; ")
    }

    fn slab_line(&self) -> String {
        let parts: Vec<String> = self.parts.iter().map(change_text).collect();
        let mut owners: Vec<String> = self.owners.iter().take(MOST_OWNERS).map(owner_text).collect();
        if self.owners.len() > MOST_OWNERS {
            owners.push(format!("and {} more owners", self.owners.len() - MOST_OWNERS));
        }
        let owners = if owners.is_empty() { "no owner at the peak changed".to_owned() } else { owners.join(", ") };
        format!("{}; by owner at the peak: {owners}", parts.join(", "))
    }
}

/// Owners that differ at the peaks that moved: that of the cell, and that of the phase whose peak is the lower one. A peak
/// that moved to another moment has other owners altogether; those that neither peak of the baseline knows come first, then
/// those that grew, the most first, then those that shrank.
fn holders(base: &Row, candidate: &Row) -> Vec<Change> {
    let lesser = |row: &Row| row.prefill_transient_bytes.min(row.decode_transient_bytes);
    let mut lists: Vec<(&[Owner], &[Owner])> = Vec::new();
    if base.transient_peak_bytes != candidate.transient_peak_bytes {
        lists.push((&base.owners, &candidate.owners));
    }
    let known = !base.lesser_owners.is_empty() && !candidate.lesser_owners.is_empty();
    if known && lesser(base) != lesser(candidate) {
        lists.push((&base.lesser_owners, &candidate.lesser_owners));
    }
    let held = |owners: &[Owner], tag: &str| -> u64 {
        owners.iter().filter(|owner| owner.tag == tag).fold(0, |sum, owner| sum.saturating_add(owner.bytes))
    };
    let mut found: Vec<Change> = Vec::new();
    for (before, after) in lists {
        let mut tags: Vec<&str> = before.iter().chain(after).map(|owner| owner.tag.as_str()).collect();
        tags.sort_unstable();
        tags.dedup();
        for tag in tags {
            let change = Change { part: tag.to_owned(), baseline: held(before, tag), candidate: held(after, tag) };
            match found.iter_mut().find(|other| other.part == tag) {
                _ if change.baseline == change.candidate => {}
                // The same buffer at both peaks: once, by its larger change.
                Some(other) if other.moved() < change.moved() => *other = change,
                Some(_) => {}
                None => found.push(change),
            }
        }
    }
    let known = |tag: &str| base.owners.iter().chain(&base.lesser_owners).any(|owner| owner.tag == tag);
    found.sort_by_key(|change| (known(&change.part), !change.grew(), std::cmp::Reverse(change.moved())));
    found
}

fn change_text(change: &Change) -> String {
    let by = signed(change.grew(), change.moved());
    format!("{} {by} ({} -> {} B)", change.part, change.baseline, change.candidate)
}

fn owner_text(change: &Change) -> String {
    format!("`{}` {}", change.part, signed(change.grew(), change.moved()))
}

/// Bytes that are more, or fewer.
pub(super) fn signed(grew: bool, bytes: u64) -> String {
    let sign = if grew { '+' } else { '-' };
    let shown = if bytes < 1 << 20 { format!("{bytes} B") } else { mib(bytes) };
    format!("{sign}{shown}")
}

#[cfg(test)]
mod tests {
    use super::*;
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
    fn whoever_is_new_is_named_first_in_either_phase_and_few_are_named() {
        let owners = |list: &[(&str, u64)]| -> Vec<Owner> {
            list.iter().map(|(tag, bytes)| Owner { tag: (*tag).into(), bytes: *bytes }).collect()
        };
        let base = Row {
            prefill_transient_bytes: Some(64),
            decode_transient_bytes: Some(32),
            lesser_owners: owners(&[("head.logits", 20), ("sampler", 12)]),
            ..ok_row(512, 1, 64)
        };
        let mut candidate = Row {
            decode_transient_bytes: Some(40),
            lesser_owners: owners(&[("head.logits", 20), ("sampler", 12), ("extra", 8)]),
            ..base.clone()
        };
        assert_eq!(
            Memory::of(&base, &candidate).line(),
            "decode peak +8 B (32 -> 40 B); by owner at the peak: `extra` +8 B"
        );
        // The cell's peak is now another moment, with other owners; the new one leads all the same.
        candidate.transient_peak_bytes = Some(70);
        candidate.prefill_transient_bytes = Some(70);
        let many: Vec<(String, u64)> = (0..9).map(|i| (format!("other.{i}"), 6 + i)).collect();
        candidate.owners = owners(&many.iter().map(|(tag, bytes)| (tag.as_str(), *bytes)).collect::<Vec<_>>());
        candidate.owners.extend(owners(&[("head.logits", 60)]));
        let memory = Memory::of(&base, &candidate);
        assert_eq!(memory.owners.len(), 12);
        assert!(memory.line().contains("`other.8` +14 B") && memory.line().ends_with("and 7 more owners"));
        candidate.owners = owners(&[("head.logits", 62), ("extra", 8)]);
        let line = Memory::of(&base, &candidate).line();
        assert!(line.contains("by owner at the peak: `extra` +8 B, `head.logits` +62 B, `gdn.h` -64 B"), "{line}");
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
