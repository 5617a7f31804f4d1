//! The OOM frontier of two runs: of each batch and depth, the largest chunk that fits, over the chunks both runs tried.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::gate::key::Key;
use crate::record::Row;
use crate::status::Status;

/// Where one batch and depth stops fitting, in either run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Edge {
    /// What it is of: a cell without its chunk.
    pub(crate) of: String,
    /// The largest chunk that fits in the baseline; null where none does.
    pub(crate) baseline: Option<u64>,
    /// The same in the candidate.
    pub(crate) candidate: Option<u64>,
    /// The largest chunk both tried.
    pub(crate) tried: u64,
}

impl Edge {
    /// Whether the candidate fits less.
    pub(crate) fn lost(&self) -> bool {
        self.candidate < self.baseline
    }

    /// The edge in a line.
    pub(crate) fn line(&self) -> String {
        let chunk = |edge: Option<u64>| match edge {
            None => "none fits".to_owned(),
            Some(chunk) if chunk == self.tried => format!("{chunk} (all that were tried)"),
            Some(chunk) => chunk.to_string(),
        };
        let (baseline, candidate) = (chunk(self.baseline), chunk(self.candidate));
        if self.baseline == self.candidate {
            format!("{}: the largest chunk is {baseline}, as before", self.of)
        } else {
            format!("{}: the largest chunk was {baseline} and is {candidate}", self.of)
        }
    }
}

/// The edges of every batch and depth at which something does not fit in either run.
pub(crate) fn edges<'a>(pairs: impl Iterator<Item = (&'a Key, &'a Row, &'a Row)>) -> Vec<Edge> {
    let mut found: BTreeMap<String, (Edge, bool)> = BTreeMap::new();
    for (key, base, candidate) in pairs {
        let answers = |row: &Row| row.status == Status::Ok || row.status.is_oom();
        if !answers(base) || !answers(candidate) {
            continue;
        }
        // Prompt and pool follow the chunk where nothing fixes them.
        let of = key.without(&["chunk", "prompt", "KV tokens"]).to_string();
        let fresh = || (Edge { of: of.clone(), baseline: None, candidate: None, tried: 0 }, false);
        let (edge, oom) = found.entry(of.clone()).or_insert_with(fresh);
        edge.tried = edge.tried.max(base.chunk);
        let largest = |edge: Option<u64>, row: &Row| edge.max((row.status == Status::Ok).then_some(base.chunk));
        edge.baseline = largest(edge.baseline, base);
        edge.candidate = largest(edge.candidate, candidate);
        *oom |= base.status.is_oom() || candidate.status.is_oom();
    }
    found.into_values().filter(|(_, oom)| *oom).map(|(edge, _)| edge).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::ok_row;

    fn row(chunk: u64, batch: u64, fits: bool) -> Row {
        let mut row = ok_row(chunk, batch, 64);
        if !fits {
            row.set_status(Status::OomPredicted, "x");
        }
        row
    }

    #[test]
    fn each_batch_has_its_edge_and_a_lost_one_is_lost() {
        let fits = |limit: u64| {
            let chunks = [512u64, 1024, 2048];
            let cells = chunks.iter().flat_map(|c| [1, 4].map(|b| (*c, b)));
            cells.map(|(c, b)| row(c, b, c * b <= limit)).collect::<Vec<Row>>()
        };
        let compare = |before: u64, after: u64| {
            let (base, candidate) = (fits(before), fits(after));
            let keys: Vec<Key> = base.iter().map(Key::of).collect();
            edges(keys.iter().zip(base.iter().zip(&candidate)).map(|(k, (a, b))| (k, a, b)))
        };
        let same = compare(4096, 4096);
        assert_eq!(same.len(), 1, "nothing is refused at batch 1: {same:?}");
        assert_eq!((same[0].baseline, same[0].candidate, same[0].lost()), (Some(1024), Some(1024), false));
        let lost = compare(4096, 1024);
        assert_eq!(lost.iter().map(Edge::lost).collect::<Vec<_>>(), [true, true]);
        assert!(
            lost[0].line().ends_with("batch 1 depth 0: the largest chunk was 2048 (all that were tried) and is 1024")
        );
        assert!(lost[1].line().contains("was 1024 and is none fits"));
        let won = compare(1024, 4096);
        assert!(won.iter().all(|edge| !edge.lost()));
    }

    #[test]
    fn a_failed_cell_says_nothing_of_the_edge() {
        let mut failed = row(2048, 1, true);
        failed.set_status(Status::Lost, "killed");
        let (base, oom) = (row(2048, 1, true), row(1024, 1, false));
        let keys = [Key::of(&base), Key::of(&oom)];
        let found = edges([(&keys[0], &base, &failed), (&keys[1], &oom, &oom)].into_iter());
        assert_eq!((found[0].tried, found[0].lost()), (1024, false));
    }
}
