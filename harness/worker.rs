//! Worker processes: a group's cells run in a process of their own, which is replaced when it dies.
//!
//! `highwater worker` is this program again, started with the sweep's own arguments and the number of a group, so that both
//! sides have the same cells; only cell numbers and rows pass between them (`protocol`). This file is the worker's side:
//! it runs cells one after another on one engine and ends when its parent does. `process` is a worker as its parent sees
//! it, `answers` turns cells into rows through workers, `ledger` says whether a cell left memory behind, `fault` breaks
//! workers on purpose for tests.

pub(crate) mod answers;
pub(crate) mod fault;
mod ledger;
mod process;
mod protocol;

use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use highwater::checkpoint::Source;
use highwater::error::Error;

use crate::axis::Cell;
use crate::cell::{EngineRunner, Workload, within_context};
use crate::cli::SweepArgs;
use crate::failure::Failure;
use crate::group::{Group, groups};
use crate::record::Row;
use crate::sweep::{Runner, run_cell};
use crate::worker::fault::Fault;
use crate::worker::ledger::Ledger;
pub(crate) use crate::worker::protocol::fingerprint;
use crate::worker::protocol::{FromWorker, Request, read_line, write_line};

/// How long a worker whose parent is gone has to end by itself before it is killed.
const GRACE: Duration = Duration::from_secs(1);

/// `worker`.
#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    /// Number of the group whose cells this process runs
    #[arg(long)]
    group: usize,
    /// How many workers the group has had before this one
    #[arg(long)]
    start: u64,
    #[command(flatten)]
    sweep: SweepArgs,
}

/// `worker`: answers the cells of one group until the other end of its standard input is closed.
pub(crate) fn worker(args: &WorkerArgs) -> Result<(), Failure> {
    // Standard output and error stay free for whatever a library prints: rows have a channel of their own.
    let channel = std::io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from);
    let channel = channel.and_then(|channel| channel.peer_addr().map(|_| channel));
    let mut channel = channel.context("a worker is started by `highwater sweep`, not by hand")?;
    let requests = requests(channel.try_clone().context("cannot watch the sweep that started this worker")?);
    let group = groups(&args.sweep)?.into_iter().nth(args.group).context("the sweep has no such group")?;
    if let Some(fault) = &group.worker_fault {
        fault.at_start(args.start)?;
    }
    let source = group.model.open()?;
    write_line(&mut channel, &FromWorker::Ready { group: fingerprint(&group, &source) })?;

    let mut loading = channel.try_clone().context("cannot report to the sweep that started this worker")?;
    let mut runner = Checked::new(&group, &source);
    // Where this cannot be written the parent is gone, and the next read says so.
    runner.inner.loading = Some(Box::new(move |done, total| {
        let _ = write_line(&mut loading, &FromWorker::Loading { done, total });
    }));
    let mut ledger = Ledger::default();
    for Request { cell: number, row } in requests {
        let cell = group.cells.get(number).context("the group has no such cell")?;
        let (row, spent) = answer(cell, *row, &mut runner, &mut ledger, group.worker_fault.as_ref());
        write_line(&mut channel, &FromWorker::Row { row: Box::new(row), spent })?;
    }
    Ok(())
}

/// One cell's row, and why this process must not run another, if so.
fn answer(
    cell: &Cell,
    mut row: Row,
    runner: &mut Checked,
    ledger: &mut Ledger,
    fault: Option<&Fault>,
) -> (Row, Option<String>) {
    let mut broken = Breaking { inner: runner, fault: fault.filter(|fault| fault.hits(cell)), spent: None };
    run_cell(cell, &mut row, &mut broken);
    if let Some(spent) = broken.spent.take() {
        return (row, Some(spent));
    }
    let Some(engine) = runner.inner.loaded() else { return (row, None) };
    if let Some(fault) = fault.filter(|fault| fault.hits(cell)) {
        fault.after(engine);
    }
    let left = match ledger.left_behind(engine) {
        Ok(left) => left,
        Err(error) => Some(format!("its memory could not be looked at: {error}")),
    };
    (row, left)
}

/// A runner that does what a fault says first, and remembers what makes a process unfit to go on.
struct Breaking<'a, 'b> {
    inner: &'a mut Checked<'b>,
    fault: Option<&'a Fault>,
    spent: Option<String>,
}

impl Runner for Breaking<'_, '_> {
    fn run(&mut self, cell: &Cell, row: &mut Row) -> Result<(), Error> {
        let ran = match self.fault {
            Some(fault) => fault.before().and_then(|()| self.inner.run(cell, row)),
            None => self.inner.run(cell, row),
        };
        if let Err(Error::Device { what, sticky: true, .. }) = &ran {
            self.spent = Some(format!("its card's context failed: {what}"));
        }
        ran
    }

    fn discard(&mut self) {
        self.spent = Some("a cell panicked in it".into());
    }
}

/// An engine runner that first looks whether the cell's context is one the model has.
pub(crate) struct Checked<'a> {
    source: &'a Source,
    workload: &'a Workload,
    inner: EngineRunner,
}

impl<'a> Checked<'a> {
    /// Of `group`, whose model `source` is.
    pub(crate) fn new(group: &'a Group, source: &'a Source) -> Checked<'a> {
        let (model, place) = (group.model.clone(), group.place.clone());
        let inner = EngineRunner::new(model, place, group.values, group.workload.clone());
        Checked { source, workload: &group.workload, inner }
    }
}

impl Runner for Checked<'_> {
    fn run(&mut self, cell: &Cell, row: &mut Row) -> Result<(), Error> {
        within_context(self.source, cell, self.workload)?;
        self.inner.run(cell, row)
    }

    fn discard(&mut self) {
        self.inner.discard();
    }
}

/// The requests as they arrive, until the parent closes its end or dies. Read on a thread of their own, so that a worker
/// whose parent dies while it computes ends too, and does not hold a card for a sweep that is no more.
fn requests(mut channel: UnixStream) -> mpsc::Receiver<Request> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut reader = std::io::BufReader::new(&mut channel);
        while let Ok(Some(request)) = read_line::<Request>(&mut reader) {
            if sender.send(request).is_err() {
                return;
            }
        }
        // An idle worker sees the end of its requests and returns from `main`.
        drop(sender);
        std::thread::sleep(GRACE);
        kill_self();
    });
    receiver
}

/// Ends this process at once, by the signal that cannot be caught: no exit handler of a driver can hang on a busy card.
fn kill_self() {
    let command = format!("kill -9 {}", std::process::id());
    let _ = Command::new("sh").args(["-c", &command]).status();
    std::process::abort();
}
