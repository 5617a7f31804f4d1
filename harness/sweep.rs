//! The loop of a sweep: every cell becomes exactly one row, whatever happens to it, and is on disk before the next begins.
//!
//! What a cell does is a [`Runner`]'s business; this file knows axes, rows and files only.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::SystemTime;

use anyhow::Result;
use highwater::error::Error;

use crate::axis::Cell;
use crate::journal::Journal;
use crate::orphan::refuse_orphan;
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

/// Who turns a cell into a row: a runner here, or a worker process.
pub(crate) trait Answers {
    /// Answers cell `number` of its group, whatever happens to it. The row comes with the run's columns and the axes set.
    fn answer(&mut self, number: usize, cell: &Cell, row: &mut Row);
}

/// Cells run in this process: a panic is caught, and nothing worse.
pub(crate) struct Here<R>(pub(crate) R);

impl<R: Runner> Answers for Here<R> {
    fn answer(&mut self, _: usize, cell: &Cell, row: &mut Row) {
        run_cell(cell, row, &mut self.0);
    }
}

/// A cell of a sweep, and its row where an earlier run has it.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    /// Its number in its group.
    pub(crate) number: usize,
    /// Its place on the axes.
    pub(crate) cell: Cell,
    /// Content hash of what it is.
    pub(crate) id: String,
    /// Its row, taken over and in the journal already.
    pub(crate) taken: Option<Row>,
}

/// Answers `jobs` in order and returns their rows, as many as jobs. `template` has the columns all rows share. Where
/// `skip_dominated`, a cell no smaller on any axis than one that did not fit is not tried. An error is a journal that
/// cannot be written; a cell's own failure is its row.
pub(crate) fn run_cells(
    jobs: Vec<Job>,
    template: &Row,
    skip_dominated: bool,
    answers: &mut dyn Answers,
    journal: &mut Journal,
    progress: &Progress,
) -> Result<Vec<Row>> {
    let mut rows: Vec<Row> = Vec::with_capacity(jobs.len());
    let mut not_fitting: Vec<Cell> = Vec::new();
    for Job { number, cell, id, taken } in jobs {
        progress.doing(&cell.to_string());
        let fresh = taken.is_none();
        let mut row = taken.unwrap_or_else(|| {
            let mut row = Row { cell: Some(id), ..template.clone() };
            cell.stamp(&mut row);
            row
        });
        if fresh {
            refuse_orphan()?;
            match not_fitting.iter().find(|smaller| skip_dominated && cell.dominates(smaller)) {
                Some(smaller) => {
                    let detail = format!("not tried: {smaller} did not fit, and this cell is no smaller on any axis");
                    row.set_status(Status::OomSkippedDominated, &detail);
                }
                None => answers.answer(number, &cell, &mut row),
            }
            if let Err(contradiction) = row.verify() {
                row.set_contradiction(&contradiction);
            }
            row.time = rfc3339_utc(SystemTime::now());
            journal.append(&row)?;
        }
        if matches!(row.status, Status::Oom | Status::OomPredicted) {
            not_fitting.push(cell);
        }
        rows.push(row);
        progress.advance(1);
    }
    Ok(rows)
}

/// Runs one cell in this process and says in its row how it ended. A panic is caught, and the runner is to discard what
/// it has. The row does not contradict itself.
pub(crate) fn run_cell(cell: &Cell, row: &mut Row, runner: &mut dyn Runner) {
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
    if let Err(contradiction) = row.verify() {
        row.set_contradiction(&contradiction);
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
        let cells = cells.iter().map(|(chunk, batch)| Cell::fixed(*chunk, *batch, 7));
        let job = |(number, cell)| Job { number, cell, id: format!("{number:016x}"), taken: None };
        let jobs: Vec<Job> = cells.enumerate().map(job).collect();
        let cells = jobs.clone();
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(dir.path()).unwrap();
        let mut here = Here(Scripted { tried: Vec::new(), discarded: 0 });
        let template = Row { schema: crate::record::SCHEMA, run: "r".into(), ..Row::default() };
        let progress = Progress::cells(cells.len() as u64);
        let rows = run_cells(jobs, &template, skip, &mut here, &mut journal, &progress).unwrap();
        assert_eq!(progress.position(), cells.len() as u64);
        (rows, here.0, dir)
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
