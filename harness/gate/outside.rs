//! A card's memory outside the slab in two rows: how much more of it is in use and of which part, and whether the ledger
//! holds it. The driver takes some by itself, so that only growth beyond that is one.

use highwater::error::mib;
use serde::Serialize;

use super::memory::signed;
use crate::record::{DRIVERS_OWN_BYTES, Row};

/// Bytes outside the slab of either row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Outside {
    /// All of them in the baseline.
    pub(crate) baseline: i64,
    /// All of them in the candidate.
    pub(crate) candidate: i64,
    /// Parts that changed and by how many bytes, what grew the most first.
    pub(crate) changed: Vec<(&'static str, i64)>,
}

/// The parts of the ledger outside the slab, as far as the row says them.
fn parts(row: &Row) -> [(&'static str, Option<i64>); 5] {
    let signed = |bytes: Option<u64>| bytes.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
    [
        ("context", signed(row.context_bytes)),
        ("modules", signed(row.modules_bytes)),
        ("cuBLASLt", signed(row.blas_bytes)),
        ("graphs", signed(row.graphs_bytes)),
        ("unattributed", row.unattributed_bytes),
    ]
}

/// Whether the row says any of it: only a card's does.
pub(super) fn said(row: &Row) -> bool {
    parts(row).iter().any(|(_, bytes)| bytes.is_some())
}

/// What is wrong with a row of which more is in use, or less, than its parts account for.
pub(super) fn unaccounted(row: &Row) -> Option<String> {
    let bytes = row.unattributed_bytes.filter(|bytes| bytes.unsigned_abs() > DRIVERS_OWN_BYTES)?;
    Some(format!(
        "its ledger does not hold: {} outside the slab are unattributed, and at most {} may be",
        signed(bytes > 0, bytes.unsigned_abs()),
        mib(DRIVERS_OWN_BYTES)
    ))
}

impl Outside {
    /// What changed in the parts that both rows say; `None` where nothing did.
    pub(crate) fn of(base: &Row, candidate: &Row) -> Option<Outside> {
        let both = parts(base).into_iter().zip(parts(candidate));
        let both: Vec<_> = both.filter_map(|((name, a), (_, b))| Some((name, a?, b?))).collect();
        let sum = |of: fn(&(&str, i64, i64)) -> i64| both.iter().map(of).fold(0, i64::saturating_add);
        let mut changed: Vec<(&'static str, i64)> =
            both.iter().map(|(name, a, b)| (*name, b.saturating_sub(*a))).filter(|(_, by)| *by != 0).collect();
        changed.sort_by_key(|(_, by)| std::cmp::Reverse(*by));
        let (baseline, candidate) = (sum(|(_, a, _)| *a), sum(|(_, _, b)| *b));
        (!changed.is_empty()).then_some(Outside { baseline, candidate, changed })
    }

    fn moved(&self) -> i64 {
        self.candidate.saturating_sub(self.baseline)
    }

    /// How many more bytes, where that is no more than the driver takes by itself.
    pub(super) fn little(&self) -> Option<u64> {
        let by = self.moved();
        (by > 0 && by.unsigned_abs() <= DRIVERS_OWN_BYTES).then_some(by.unsigned_abs())
    }

    /// Whether it grew by more than the driver takes by itself.
    pub(crate) fn grew(&self) -> bool {
        self.moved() > 0 && self.moved().unsigned_abs() > DRIVERS_OWN_BYTES
    }

    /// Whether it shrank by as much.
    pub(crate) fn shrank(&self) -> bool {
        self.moved() < 0 && self.moved().unsigned_abs() > DRIVERS_OWN_BYTES
    }

    /// The part that grew the most; where none grew, the one that shrank the least.
    pub(super) fn most(&self) -> &'static str {
        self.changed.first().map_or("none", |(name, _)| name)
    }

    /// One line: how much, and each part that changed, what grew the most first.
    pub(super) fn line(&self) -> String {
        let size = |by: i64| signed(by > 0, by.unsigned_abs());
        let parts: Vec<String> = self.changed.iter().map(|(name, by)| format!("{name} {}", size(*by))).collect();
        let (from, to) = (self.baseline, self.candidate);
        format!("outside the slab {} ({from} -> {to} B): {}", size(self.moved()), parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::memory::Memory;
    use crate::record::tests::ok_row;

    const GIB: u64 = 1 << 30;

    fn row() -> Row {
        Row {
            context_bytes: Some(552_402_944),
            modules_bytes: Some(2 << 20),
            blas_bytes: Some(34 << 20),
            graphs_bytes: Some(2 << 20),
            unattributed_bytes: Some(917_504),
            ..ok_row(512, 1, 64)
        }
    }

    #[test]
    fn growth_beyond_the_driver_s_own_is_growth_and_what_grew_most_leads() {
        let grown = Row { graphs_bytes: Some((2 << 20) + GIB), modules_bytes: Some(GIB), ..row() };
        let memory = Memory::of(&row(), &grown);
        assert!(memory.grew() && !memory.shrank());
        let line = memory.line();
        assert_eq!(
            line,
            "outside the slab +2.00 GiB (593166336 -> 2738552832 B): graphs +1.00 GiB, modules +1022.0 MiB",
        );
        let back = Memory::of(&grown, &row());
        assert!(back.shrank() && back.line().starts_with("outside the slab -2.00 GiB"), "{}", back.line());
        // With growth of the slab it is one line still.
        let both = Memory::of(&row(), &Row { kv_bytes: Some(51), ..grown });
        assert!(
            both.line()
                .starts_with("kv +1 B (50 -> 51 B); by owner at the peak: no owner at the peak changed; outside")
        );
    }

    #[test]
    fn what_the_driver_takes_by_itself_is_no_growth_to_the_byte() {
        let more = |by: u64| Row { graphs_bytes: Some((2 << 20) + by), ..row() };
        let at = Memory::of(&row(), &more(DRIVERS_OWN_BYTES));
        assert_eq!((at.grew(), at.outside.unwrap().little()), (false, Some(DRIVERS_OWN_BYTES)));
        let past = Memory::of(&row(), &more(DRIVERS_OWN_BYTES + 1));
        assert_eq!((past.grew(), past.outside.unwrap().little()), (true, None));
        // The driver moves memory from one part to another, as runs of one card show.
        let moved = Row { context_bytes: Some(552_402_944 + (2 << 20)), blas_bytes: Some(32 << 20), ..row() };
        let moved = Memory::of(&row(), &moved);
        assert_eq!((moved.grew(), moved.shrank(), moved.outside.unwrap().little()), (false, false, None));
        assert_eq!(Memory::of(&row(), &row()), Memory::default());
    }

    #[test]
    fn a_ledger_that_does_not_hold_is_told_and_silence_is_no_saving() {
        for (bytes, said) in [(900 << 20, "+900.0 MiB"), (-(17 << 20), "-17.0 MiB")] {
            let what = unaccounted(&Row { unattributed_bytes: Some(bytes), ..row() }).unwrap();
            assert!(
                what.contains("ledger does not hold") && what.contains(said) && what.contains("16.0 MiB"),
                "{what}"
            );
        }
        assert_eq!(unaccounted(&row()), None);
        assert_eq!(unaccounted(&ok_row(512, 1, 64)), None);
        assert_eq!(Memory::of(&row(), &ok_row(512, 1, 64)).silent, ["memory outside the slab"]);
        assert_eq!(Memory::of(&ok_row(512, 1, 64), &row()), Memory::default());
        let hostile = Row { context_bytes: Some(u64::MAX), graphs_bytes: Some(u64::MAX), ..row() };
        assert!(Memory::of(&row(), &hostile).grew());
    }
}
