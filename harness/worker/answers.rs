//! Cells turned into rows by a group's workers: one at a time, replaced when it dies, hangs, panics or leaks.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use crate::axis::Cell;
use crate::progress::Progress;
use crate::record::Row;
use crate::status::Status;
use crate::sweep::Answers;
use crate::worker::process::{Heard, Process};
use crate::worker::protocol::{FromWorker, Request};

/// A worker that has not opened its model after this long does not start.
const START: Duration = Duration::from_secs(120);
/// After as many starts in a row that failed, the rest of the group is lost.
const MOST_FAILED_STARTS: u32 = 3;

/// The workers of one group.
pub(crate) struct Workers<'a> {
    group: usize,
    fingerprint: String,
    words: Vec<OsString>,
    timeout: Option<Duration>,
    progress: &'a Progress,
    process: Option<Process>,
    started: u64,
    failed_starts: u32,
    given_up: Option<String>,
}

impl Workers<'_> {
    /// Of group number `group`, which both sides know by `fingerprint`. `words` are the sweep's own arguments, without the
    /// verb. A cell that runs longer than `timeout` is ended. Nothing is started before the first cell.
    pub(crate) fn new(
        group: usize,
        fingerprint: String,
        words: Vec<OsString>,
        timeout: Option<Duration>,
        progress: &Progress,
    ) -> Workers<'_> {
        Workers {
            group,
            fingerprint,
            words,
            timeout,
            progress,
            process: None,
            started: 0,
            failed_starts: 0,
            given_up: None,
        }
    }

    /// Starts a worker. An error says why none can be had, now and for the rest of the group.
    fn start(&mut self) -> Result<Process, String> {
        loop {
            if let Some(why) = &self.given_up {
                return Err(why.clone());
            }
            match self.try_start() {
                Ok(process) => {
                    self.failed_starts = 0;
                    return Ok(process);
                }
                Err(why) => {
                    self.failed_starts += 1;
                    if self.failed_starts >= MOST_FAILED_STARTS {
                        self.given_up = Some(format!(
                            "no worker process could be started, {MOST_FAILED_STARTS} times in a row: {why}"
                        ));
                    }
                }
            }
        }
    }

    fn try_start(&mut self) -> Result<Process, String> {
        let start = self.started;
        self.started += 1;
        let mut process = Process::start(self.group, start, &self.words).map_err(|error| format!("{error:#}"))?;
        match process.hear(Some(Instant::now() + START)) {
            Heard::Message(FromWorker::Ready { group }) if group == self.fingerprint => Ok(process),
            Heard::Message(_) => Err("it sees other cells, another device or other weights than the sweep; something \
                                      changed since the sweep began"
                .into()),
            Heard::Ended(how) => Err(how),
            Heard::Nothing => Err(format!("it was not ready after {} s; {}", START.as_secs(), process.kill())),
        }
    }

    /// Runs the cell on `process`. The process comes back if it can run another.
    fn run(&mut self, mut process: Process, request: &Request, row: &mut Row) -> Option<Process> {
        if let Err(how) = process.ask(request) {
            row.replaced(&how);
            row.set_status(Status::Lost, &format!("the worker process was gone: {how}"));
            return None;
        }
        let mut begun = Instant::now();
        loop {
            match process.hear(self.timeout.map(|timeout| begun + timeout)) {
                Heard::Message(FromWorker::Loading { done, total }) => {
                    // Loading takes what it takes, as long as it gets on.
                    begun = Instant::now();
                    self.progress.doing(&format!("loading {} %", done * 100 / total.max(1)));
                }
                Heard::Message(FromWorker::Row { row: answer, spent }) => {
                    let (replaced, why) = (row.workers_replaced, row.worker_note.take());
                    *row = *answer;
                    (row.workers_replaced, row.worker_note) = (replaced, why);
                    let Some(why) = spent else { return Some(process) };
                    row.replaced(&why);
                    process.kill();
                    return None;
                }
                Heard::Message(FromWorker::Ready { .. }) => {}
                Heard::Ended(how) => {
                    row.replaced(&how);
                    row.set_status(Status::Lost, &format!("the worker process died while it ran this cell: {how}"));
                    return None;
                }
                Heard::Nothing => {
                    let seconds = self.timeout.unwrap_or_default().as_secs_f32();
                    let how = format!("the cell ran past {seconds} s; {}", process.kill());
                    row.replaced(&how);
                    let help = "raise --cell-timeout if it needs longer";
                    row.set_status(
                        Status::Timeout,
                        &format!("no answer within {seconds} s, and its worker was killed; {help}"),
                    );
                    return None;
                }
            }
        }
    }
}

impl Answers for Workers<'_> {
    fn answer(&mut self, number: usize, _: &Cell, row: &mut Row) {
        row.workers_replaced = Some(0);
        let request = Request { cell: number, row: Box::new(row.clone()) };
        if let Some(process) = &mut self.process
            && let Some(how) = process.gone()
        {
            // Not this cell's doing: it has a new one.
            row.replaced(&format!("between cells: {how}"));
            self.process = None;
        }
        let process = match self.process.take().map_or_else(|| self.start(), Ok) {
            Ok(process) => process,
            Err(why) => {
                row.set_status(Status::Lost, &why);
                return;
            }
        };
        self.process = self.run(process, &request, row);
    }
}
