//! A run read back to be compared: its rows, one for each cell, and what makes it unfit to be compared at all.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::gate::key::Key;
use crate::journal_read::{read_csv, read_jsonl};
use crate::record::Row;

/// Rows of a run by what each is of.
#[derive(Debug)]
pub(crate) struct Run {
    /// As the user named it.
    pub(crate) path: PathBuf,
    /// The file its rows are from.
    pub(crate) file: PathBuf,
    /// In the order written; of a cell that was run again, its last row.
    pub(crate) rows: Vec<(Key, Row)>,
    /// What is to be said about the file.
    pub(crate) notes: Vec<String>,
}

impl Run {
    /// Reads a folder's sweep.jsonl, or its sweep.csv where that is all it has, or the file itself.
    pub(crate) fn read(path: &Path) -> Result<Run> {
        let file = if path.is_dir() {
            let file = ["sweep.jsonl", "sweep.csv"].map(|name| path.join(name)).into_iter().find(|f| f.is_file());
            file.with_context(|| format!("{} holds no sweep.jsonl and no sweep.csv", path.display()))?
        } else {
            path.to_owned()
        };
        let mut notes = Vec::new();
        let rows = if has_ending_csv(&file) {
            read_csv(&file)?
        } else {
            let read = read_jsonl(&file)?;
            if read.torn {
                notes.push(format!("{}: the last line was never finished and is left out", file.display()));
            }
            read.rows
        };
        ensure!(!rows.is_empty(), "{} holds no rows", file.display());
        Ok(Run { file, ..Run::of(path, rows, notes) })
    }

    /// Whether its rows are from a CSV, which holds no samples.
    pub(crate) fn is_csv(&self) -> bool {
        has_ending_csv(&self.file)
    }

    /// Whether both are read from one file.
    pub(crate) fn is_the_file_of(&self, other: &Run) -> bool {
        let whole = |run: &Run| run.file.canonicalize().ok();
        whole(self).is_some_and(|file| whole(other) == Some(file))
    }

    /// A run of these rows.
    pub(crate) fn of(path: &Path, rows: Vec<Row>, notes: Vec<String>) -> Run {
        let mut run = Run { path: path.to_owned(), file: path.to_owned(), rows: Vec::new(), notes };
        let mut at: HashMap<Key, usize> = HashMap::new();
        for row in rows {
            let key = Key::of(&row);
            if let Some(&earlier) = at.get(&key) {
                run.rows[earlier].1 = row;
            } else {
                at.insert(key.clone(), run.rows.len());
                run.rows.push((key, row));
            }
        }
        run
    }

    /// Refuses a run that may not be a baseline: one with rows made with a seeded fault.
    pub(crate) fn into_baseline(self) -> Result<Run> {
        let faulty = self.rows.iter().find_map(|(key, row)| Some((key, row.fault.as_ref()?)));
        if let Some((key, fault)) = faulty {
            bail!("{} cannot be a baseline: {key} was measured with --fault {fault}", self.path.display());
        }
        Ok(self)
    }
}

fn has_ending_csv(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "csv")
}

/// Median of each repetition's decode steps in ms. Rows of before that column have their steps in equal parts.
pub(crate) fn passes(row: &Row) -> Vec<f64> {
    if !row.tpot_passes_ms.is_empty() {
        return row.tpot_passes_ms.clone();
    }
    let (steps, repetitions) = (&row.tpot_samples_ms, row.prefill_samples_ms.len());
    if repetitions == 0 || steps.len() % repetitions != 0 {
        return Vec::new();
    }
    let blocks = steps.chunks(steps.len().div_ceil(repetitions).max(1));
    blocks.filter_map(|block| Some(crate::stats::Summary::of(block)?.median)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::ok_row;
    use crate::status::Status;

    #[test]
    fn the_last_row_of_a_cell_is_the_one() {
        let mut first = ok_row(512, 1, 64);
        first.set_status(Status::Lost, "killed");
        let run = Run::of(Path::new("r"), vec![first, ok_row(1024, 1, 64), ok_row(512, 1, 64)], vec![]);
        let statuses: Vec<_> = run.rows.iter().map(|(_, row)| (row.chunk, row.status)).collect();
        assert_eq!(statuses, [(512, Status::Ok), (1024, Status::Ok)]);
    }

    #[test]
    fn faults_are_no_baselines() {
        let faulty = Row { fault: Some("slow-kernel".into()), ..ok_row(512, 1, 64) };
        let run = Run::of(Path::new("r"), vec![faulty], vec![]);
        assert!(run.into_baseline().unwrap_err().to_string().contains("--fault slow-kernel"));
    }

    #[test]
    fn steps_without_medians_are_cut_by_repetition() {
        let mut row = ok_row(512, 1, 64);
        row.tpot_passes_ms.clear();
        (row.prefill_samples_ms, row.tpot_samples_ms) = (vec![9.0; 2], vec![1.0, 2.0, 3.0, 7.0, 8.0, 9.0]);
        assert_eq!(passes(&row), [2.0, 8.0]);
        row.tpot_samples_ms.push(1.0);
        assert!(passes(&row).is_empty(), "unequal repetitions cannot be told apart");
        row.tpot_samples_ms.clear();
        assert!(passes(&row).is_empty());
        row.tpot_passes_ms = vec![5.0];
        assert_eq!(passes(&row), [5.0]);
    }

    #[test]
    fn the_committed_runs_of_a_card_can_be_read() {
        let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/h200");
        for name in ["qwen3.6-27b-fp8-channel-decode", "incident-two-twin"] {
            let run = Run::read(&results.join(name)).unwrap();
            assert!(run.rows.len() >= 2 && run.notes.is_empty(), "{name}");
        }
        let csv = Run::read(&results.join("incident-two-twin/sweep.csv")).unwrap();
        assert!(csv.is_csv() && csv.notes.is_empty());
        let whole = Run::read(&results.join("incident-two-twin")).unwrap();
        assert!(!whole.is_csv() && !whole.is_the_file_of(&csv));
        assert!(whole.is_the_file_of(&Run::read(&results.join("incident-two-twin/sweep.jsonl")).unwrap()));
        let faulty = Run::read(&results.join("incident-one-faulty")).unwrap();
        assert!(faulty.into_baseline().unwrap_err().to_string().contains("full-window-head"));
    }
}
