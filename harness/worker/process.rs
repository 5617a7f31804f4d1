//! A worker process as its parent sees it: started, asked, listened to, and ended whatever it does.

use std::ffi::OsString;
use std::io::{BufReader, PipeReader, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::worker::protocol::{FromWorker, Request, read_line, write_line};

/// What is kept of what a worker printed, in bytes.
const TAIL_BYTES: usize = 4096;
/// Lines of it that are quoted.
const TAIL_LINES: usize = 8;
/// How often a worker that says nothing is looked at.
const LOOK: Duration = Duration::from_millis(50);
/// How long a killed worker's last words are waited for.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// How long an idle worker may take to free its card and end.
const GOODBYE: Duration = Duration::from_secs(10);
/// How long a killed worker may take to be gone. One that hangs inside a driver may never be.
const BURIAL: Duration = Duration::from_secs(10);

/// What came of waiting for a worker.
#[derive(Debug)]
pub(super) enum Heard {
    /// It said something.
    Message(FromWorker),
    /// It ended, or wrote what is no message and was killed. In words: how, and what it last printed.
    Ended(String),
    /// It said nothing until the deadline.
    Nothing,
}

/// A running worker. Dropped, it is ended.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    channel: UnixStream,
    messages: Receiver<Result<Option<FromWorker>>>,
    tail: Arc<Mutex<Vec<u8>>>,
    listener: Option<JoinHandle<()>>,
}

impl Process {
    /// Starts this program again as a worker of `group`, the `start`th after the first, with the sweep's own `words`.
    pub(super) fn start(group: usize, start: u64, words: &[OsString]) -> Result<Process> {
        let (ours, theirs) = UnixStream::pair().context("cannot make a channel to a worker process")?;
        let (printed, printer) = std::io::pipe().context("cannot make a pipe to a worker process")?;
        let mut command = Command::new(program()?);
        command.arg0("highwater").args(["worker", "--group", &group.to_string(), "--start", &start.to_string()]);
        command.args(words).stdin(Stdio::from(OwnedFd::from(theirs)));
        command.stdout(printer.try_clone().context("cannot make a pipe to a worker process")?).stderr(printer);
        let child = command.spawn().context("cannot start a worker process")?;
        // The command holds the worker's ends of both, which must close when the worker ends.
        drop(command);
        let (sender, messages) = channel();
        let reading = ours.try_clone().context("cannot listen to a worker process")?;
        std::thread::spawn(move || {
            let mut reader = BufReader::new(reading);
            loop {
                let message = read_line(&mut reader);
                let over = !matches!(message, Ok(Some(_)));
                if sender.send(message).is_err() || over {
                    return;
                }
            }
        });
        let tail = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&tail);
        let listener = Some(std::thread::spawn(move || listen(printed, &kept)));
        Ok(Process { child, channel: ours, messages, tail, listener })
    }

    /// Sends a cell. An error is a worker that ended before; in words.
    pub(super) fn ask(&mut self, request: &Request) -> Result<(), String> {
        match write_line(&mut self.channel, request) {
            Ok(()) => Ok(()),
            Err(_) => Err(self.end()),
        }
    }

    /// Waits until the worker says something, ends, or `deadline` passes.
    pub(super) fn hear(&mut self, deadline: Option<Instant>) -> Heard {
        loop {
            let now = Instant::now();
            let left = deadline.map_or(LOOK, |deadline| deadline.saturating_duration_since(now));
            match self.messages.recv_timeout(left.min(LOOK)) {
                Ok(Ok(Some(message))) => return Heard::Message(message),
                Ok(Err(error)) => return Heard::Ended(format!("{error:#}; {}", self.end())),
                Ok(Ok(None)) | Err(RecvTimeoutError::Disconnected) => return Heard::Ended(self.end()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            // A process that a dead worker left behind may hold its end of the channel open.
            if matches!(self.child.try_wait(), Ok(Some(_)) | Err(_)) {
                return match self.messages.recv_timeout(LOOK) {
                    Ok(Ok(Some(message))) => Heard::Message(message),
                    _ => Heard::Ended(self.end()),
                };
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Heard::Nothing;
            }
        }
    }

    /// Kills the worker if it runs, and says how it ended and what it last printed.
    pub(super) fn end(&mut self) -> String {
        // One that closed its channel is about to end by itself; how it does says more than our signal.
        let how = match self.wait(LAST_WORDS) {
            Some(status) => words(status),
            None => self.kill(),
        };
        let deadline = Instant::now() + LAST_WORDS;
        while self.listener.as_ref().is_some_and(|listener| !listener.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        let tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        match quoted(&tail) {
            tail if tail.is_empty() => how,
            tail => format!("{how}; it last printed: {tail}"),
        }
    }

    /// How the worker ended, if it did.
    pub(super) fn gone(&mut self) -> Option<String> {
        match self.child.try_wait() {
            Ok(None) => None,
            Ok(Some(_)) | Err(_) => Some(self.end()),
        }
    }

    /// Kills the worker, in words.
    pub(super) fn kill(&mut self) -> String {
        let killed = self.child.kill();
        match (self.wait(BURIAL), killed) {
            (Some(_), _) => "it was killed".into(),
            (None, Ok(())) => format!("it was killed and is not gone after {} s", BURIAL.as_secs()),
            (None, Err(error)) => format!("it cannot be killed: {error}"),
        }
    }

    fn wait(&mut self, time: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + time;
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            if Instant::now() >= deadline {
                return None;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.channel.shutdown(std::net::Shutdown::Both);
        if self.wait(GOODBYE).is_none() {
            self.kill();
        }
    }
}

/// This very program, even where its file was replaced since it started.
fn program() -> Result<PathBuf> {
    let own = PathBuf::from("/proc/self/exe");
    if own.exists() { Ok(own) } else { std::env::current_exe().context("cannot find this program's own file") }
}

/// Keeps the last of what is printed, until nobody can print any more.
fn listen(mut printed: PipeReader, kept: &Mutex<Vec<u8>>) {
    let mut block = [0; 8192];
    while let Ok(read @ 1..) = printed.read(&mut block) {
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend_from_slice(&block[..read]);
        let over = kept.len().saturating_sub(TAIL_BYTES);
        kept.drain(..over);
    }
}

/// The last lines on one line, with nothing in it that a terminal or a table would take for its own.
fn quoted(tail: &[u8]) -> String {
    let text = String::from_utf8_lossy(tail);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let last = lines[lines.len().saturating_sub(TAIL_LINES)..].join(" | ");
    last.chars().filter(|c| !c.is_control()).collect()
}

fn words(status: ExitStatus) -> String {
    let name = |signal| match signal {
        1 => " (SIGHUP)",
        2 => " (SIGINT)",
        4 => " (SIGILL)",
        6 => " (SIGABRT)",
        7 => " (SIGBUS)",
        8 => " (SIGFPE)",
        9 => " (SIGKILL: by hand, or by the system for want of memory)",
        11 => " (SIGSEGV)",
        15 => " (SIGTERM)",
        _ => "",
    };
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("it ended by signal {signal}{}", name(signal)),
        (None, Some(code)) => format!("it ended with exit code {code}"),
        (None, None) => "it ended".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_are_bounded_and_safe_to_print() {
        let tail = "one\n\n\u{1b}[2Jtwo\0\r\nthree\n".repeat(9);
        let text = quoted(tail.as_bytes());
        assert!(text.ends_with("one | [2Jtwo | three") && text.split(" | ").count() == TAIL_LINES, "{text}");
        assert!(!text.contains(['\u{1b}', '\0', '\n']));
        assert_eq!(quoted(b"\xff\n \n"), "\u{fffd}");
        assert_eq!(quoted(b""), "");
    }

    #[test]
    fn endings_are_told_in_words() {
        assert_eq!(words(ExitStatus::from_raw(3 << 8)), "it ended with exit code 3");
        assert!(words(ExitStatus::from_raw(9)).contains("signal 9 (SIGKILL"));
        assert_eq!(words(ExitStatus::from_raw(64)), "it ended by signal 64");
    }
}
