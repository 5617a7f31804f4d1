//! One process of `ab`: run to its end or to its time, and why it failed if it did.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use highwater::device::cuda::library;

use crate::orphan::tie;

/// What is kept of the end of a process's stderr.
const TAIL_BYTES: usize = 2000;
/// How long stderr is waited for once the process is gone; one of its own children may still hold it.
const DRAIN: Duration = Duration::from_secs(2);
/// How often a process is looked at.
const POLL: Duration = Duration::from_millis(10);

/// A program and its words.
#[derive(Debug)]
pub(super) struct Side {
    /// `base` or `candidate`.
    pub(super) name: &'static str,
    /// The file.
    pub(super) program: PathBuf,
    words: Vec<String>,
    timeout: Duration,
}

impl Side {
    /// The words shared by both sides, and this side's own after them.
    pub(super) fn new(
        name: &'static str,
        program: &Path,
        shared: &[String],
        own: &[String],
        timeout: Duration,
    ) -> Side {
        // A bare name would be looked for on the PATH, and it is this file whose hash is printed.
        let program = if program.components().count() == 1 { Path::new(".").join(program) } else { program.to_owned() };
        Side { name, program, words: [shared, own].concat(), timeout }
    }

    /// Runs it once, writing to `folder`, which must not be there yet. An error if it cannot start, ends other than well, or
    /// does not end.
    pub(super) fn run(&self, folder: &Path) -> Result<()> {
        let whose = || format!("the {} ({})", self.name, self.program.display());
        if folder.exists() {
            bail!("{} is there already; give another --out, or move that one away", folder.display());
        }
        let mut command = Command::new(&self.program);
        command.args(&self.words).arg("--out").arg(folder);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // Not by the flag, which an earlier build does not have; its own words may still say another.
        command.envs(library::folder().map(|named| (library::FOLDER_VARIABLE, named)));
        tie(&mut command);
        let mut child = command.spawn().with_context(|| format!("{} cannot be started", whose()))?;
        let tail = tail_of(&mut child);
        let status = wait(&mut child, self.timeout).with_context(whose)?;
        let said = || {
            let said = tail.recv_timeout(DRAIN).unwrap_or_default();
            let said: String = said.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
            if said.is_empty() { "it said nothing".to_owned() } else { format!("it said: {said}") }
        };
        match status {
            Some(status) if status.success() && !folder.is_dir() => {
                bail!("{} ended well and wrote no {}: it is no highwater", whose(), folder.display())
            }
            Some(status) if status.success() => Ok(()),
            Some(status) => bail!("{} ended with {status}; {}", whose(), said()),
            None => bail!("{} did not end in {} s and was killed; {}", whose(), self.timeout.as_secs(), said()),
        }
    }
}

/// Waits for the end of a process; `None` if it had to be killed.
fn wait(child: &mut Child, timeout: Duration) -> Result<Option<ExitStatus>> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().context("cannot be waited for")? {
            return Ok(Some(status));
        }
        if begun.elapsed() >= timeout {
            child.kill().context("cannot be killed")?;
            child.wait().context("cannot be waited for")?;
            return Ok(None);
        }
        std::thread::sleep(POLL);
    }
}

/// The end of what a process writes to stderr, once it is closed.
fn tail_of(child: &mut Child) -> mpsc::Receiver<String> {
    let (send, receive) = mpsc::channel();
    if let Some(mut stderr) = child.stderr.take() {
        std::thread::spawn(move || {
            let (mut tail, mut block) = (Vec::new(), [0u8; 4096]);
            while let Ok(read @ 1..) = stderr.read(&mut block) {
                tail.extend_from_slice(&block[..read]);
                let excess = tail.len().saturating_sub(TAIL_BYTES);
                tail.drain(..excess);
            }
            // Nobody waits for it where the process ended well.
            let _ = send.send(String::from_utf8_lossy(&tail).into_owned());
        });
    }
    receive
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str, timeout: Duration) -> Result<()> {
        let dir = tempfile::tempdir().unwrap();
        let words = ["-c", script].map(str::to_owned);
        Side::new("candidate", Path::new("/bin/sh"), &words, &[], timeout).run(&dir.path().join("out"))
    }

    #[test]
    fn each_way_to_fail_is_told_apart() {
        let long = Duration::from_secs(60);
        run("mkdir $1", long).unwrap();
        let other = run("exit 0", long).unwrap_err().to_string();
        assert!(other.contains("the candidate (/bin/sh) ended well and wrote no"), "{other}");
        let failed = run("echo 'first'; echo 'second line' >&2; exit 7", long).unwrap_err().to_string();
        assert!(failed.contains("the candidate (/bin/sh) ended with exit status: 7; it said: second line"), "{failed}");
        let begun = Instant::now();
        let hung = run("echo working >&2; exec sleep 600", Duration::from_millis(300)).unwrap_err().to_string();
        assert!(hung.contains("did not end") && hung.contains("working"), "{hung}");
        assert!(begun.elapsed() < Duration::from_secs(30));
        let gone = Side::new("base", Path::new("/no/such/file"), &[], &[], long).run(Path::new("/no/such/out"));
        assert!(format!("{:#}", gone.unwrap_err()).contains("the base (/no/such/file) cannot be started"));
    }

    #[test]
    fn an_endless_stream_of_errors_is_kept_short() {
        let failed = run(
            "i=0; while [ $i -lt 20000 ]; do echo xxxxxxxxxx >&2; i=$((i+1)); done; exit 1",
            Duration::from_secs(60),
        );
        let text = failed.unwrap_err().to_string();
        assert!(text.len() < TAIL_BYTES + 200, "{}", text.len());
    }

    #[test]
    fn a_folder_that_is_there_is_not_written_to() {
        let dir = tempfile::tempdir().unwrap();
        let side = Side::new("base", Path::new("/bin/sh"), &[], &[], Duration::from_secs(1));
        assert!(side.run(dir.path()).unwrap_err().to_string().contains("there already"));
    }
}
