//! The loop of a sweep: every cell becomes exactly one row, whatever happens to it, and is on disk before the next begins.
//!
//! What a cell does is a [`Runner`]'s business; this file knows axes, rows and files only.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::SystemTime;

use anyhow::Result;
use highwater::error::Error;

use crate::axis::Cell;
use crate::journal::Journal;
use crate::progress::Progress;
use crate::provenance::rfc3339_utc;
use crate::record::Row;
use crate::status::Status;

/// What runs a cell.
pub(crate) trait Runner {
    /// Runs or plans one cell and fills in its numbers. The row comes with the run's columns and the axes set.
    fn run(&mut self, cell: &Cell, row: &mut Row) -> Result<(), Error>;

    /// Drops whatever the last cell left behind: it panicked, and its state is not to be trusted.
    fn discard(&mut self);
}

/// Runs `cells` in order and returns their rows, as many as cells. `template` has the columns all rows share. Where
/// `skip_dominated`, a cell no smaller on any axis than one that did not fit is not tried. An error is a journal that
/// cannot be written; a cell's own failure is its row.
pub(crate) fn run_cells(
    cells: &[Cell],
    template: &Row,
    skip_dominated: bool,
    runner: &mut dyn Runner,
    journal: &mut Journal,
    progress: &Progress,
) -> Result<Vec<Row>> {
    let mut rows: Vec<Row> = Vec::with_capacity(cells.len());
    let mut not_fitting: Vec<Cell> = Vec::new();
    for cell in cells {
        progress.doing(&cell.to_string());
        let mut row = Row { chunk: cell.chunk, batch: cell.batch, depth: cell.depth, ..template.clone() };
        match not_fitting.iter().find(|smaller| skip_dominated && cell.dominates(smaller)) {
            Some(smaller) => {
                let detail = format!("not tried: {smaller} did not fit, and this cell is no smaller on any axis");
                row.set_status(Status::OomSkippedDominated, &detail);
            }
            None => run_cell(cell, &mut row, runner),
        }
        if let Err(contradiction) = row.verify() {
            row.set_contradiction(&contradiction);
        }
        if matches!(row.status, Status::Oom | Status::OomPredicted) {
            not_fitting.push(*cell);
        }
        row.time = rfc3339_utc(SystemTime::now());
        journal.append(&row)?;
        rows.push(row);
        progress.advance(1);
    }
    Ok(rows)
}

fn run_cell(cell: &Cell, row: &mut Row, runner: &mut dyn Runner) {
    match catch_unwind(AssertUnwindSafe(|| runner.run(cell, row))) {
        Ok(Ok(())) => {
            row.status = Status::Ok;
            row.detail = None;
        }
        Ok(Err(error)) => row.set_error(&error),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            row.set_status(Status::Error, &format!("panicked, which is a bug of this program: {text}"));
            runner.discard();
        }
    }
}

/// How many rows are failures, as opposed to answers. A sweep with one exits with 1.
pub(crate) fn failures(rows: &[Row]) -> usize {
    rows.iter().filter(|row| row.status.is_failure()).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal_read::{read_csv, read_jsonl};
    use crate::record::tests::ok_row;
    use highwater::error::OutOfMemory;

    /// Fits up to 4096 tokens of chunk x batch, and fails in every other way where told.
    struct Scripted {
        tried: Vec<Cell>,
        discarded: usize,
    }

    impl Runner for Scripted {
        fn run(&mut self, cell: &Cell, row: &mut Row) -> Result<(), Error> {
            self.tried.push(*cell);
            match cell.chunk {
                1 => panic!("index {} out of range", cell.batch),
                2 => return Err(Error::shape("linear", "[1, 2] x [3, 4]")),
                3 => return Err(Error::Unsupported { what: "chunk 3".into(), supported: "take 4".into() }),
                _ => {}
            }
            if cell.chunk * cell.batch > 4096 {
                let owners = vec![("weights".into(), 1)];
                return Err(OutOfMemory { tag: "logits".into(), requested: 9, free: 4, slab: 5, owners }.into());
            }
            let shared = row.run.clone();
            *row = Row { run: shared, depth: cell.depth, ..ok_row(cell.chunk, cell.batch, 64) };
            match cell.chunk {
                5 => row.free_bytes = Some(0),
                6 => row.tpot_samples_ms[1] = f64::NAN,
                _ => {}
            }
            Ok(())
        }

        fn discard(&mut self) {
            self.discarded += 1;
        }
    }

    fn sweep(cells: &[(u64, u64)], skip: bool) -> (Vec<Row>, Scripted, tempfile::TempDir) {
        let cells: Vec<Cell> =
            cells.iter().map(|(chunk, batch)| Cell { chunk: *chunk, batch: *batch, depth: 7 }).collect();
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(dir.path()).unwrap();
        let mut runner = Scripted { tried: Vec::new(), discarded: 0 };
        let template = Row { schema: crate::record::SCHEMA, run: "r".into(), ..Row::default() };
        let progress = Progress::cells(cells.len() as u64);
        let rows = run_cells(&cells, &template, skip, &mut runner, &mut journal, &progress).unwrap();
        assert_eq!(progress.position(), cells.len() as u64);
        (rows, runner, dir)
    }

    #[test]
    fn every_cell_is_a_row_whatever_happens_to_it() {
        let (rows, runner, dir) = sweep(&[(1, 1), (2, 1), (3, 1), (5, 1), (6, 1), (8192, 1), (512, 1)], false);
        let statuses: Vec<&str> = rows.iter().map(|row| row.status.name()).collect();
        let wanted = ["error", "error", "unsupported", "error", "error", "oom", "ok"];
        assert_eq!(statuses, wanted);
        assert!(rows[0].detail.as_ref().unwrap().contains("index 1 out of range"));
        assert!(rows[3].detail.as_ref().unwrap().contains("contradicts itself"));
        assert_eq!((runner.discarded, failures(&rows)), (1, 4));
        assert_eq!(read_jsonl(&dir.path().join("sweep.jsonl")).unwrap().rows, rows);
        assert_eq!(read_csv(&dir.path().join("sweep.csv")).unwrap().len(), rows.len());
        assert!(rows.iter().all(|row| row.run == "r" && row.depth == 7 && row.time.ends_with('Z')));
    }

    #[test]
    fn cells_no_smaller_than_one_that_did_not_fit_are_skipped_by_name() {
        let cells = [(4096, 1), (8192, 1), (4096, 2), (8192, 2), (512, 4)];
        let (rows, runner, _dir) = sweep(&cells, true);
        let statuses: Vec<&str> = rows.iter().map(|row| row.status.name()).collect();
        assert_eq!(statuses, ["ok", "oom", "oom", "oom_skipped_dominated", "ok"]);
        assert!(rows[3].detail.as_ref().unwrap().contains("chunk 8192 batch 1 depth 7 did not fit"));
        assert_eq!(runner.tried.len(), 4);
        assert_eq!(failures(&rows), 0);
        let (rows, runner, _dir) = sweep(&cells, false);
        assert_eq!((rows[3].status, runner.tried.len()), (Status::Oom, 5));
    }
}
