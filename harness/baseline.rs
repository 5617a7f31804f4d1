//! `baseline`: the folder of the baselines that a run may be held to, `CARD/DRIVER-mMETHOD`: numbers of another card, driver
//! or method say nothing about it. Kernels are timed in ways of their own, so theirs is `CARD/DRIVER-kMETHOD`. Says where,
//! reads the run's rows alone, and writes nothing.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use highwater::error::Error;
use serde::Deserialize;

use crate::bench::read::{Timed, find, read};
use crate::failure::Failure;
use crate::out::print;

/// A row is at most this long; a longer line is no row.
const MOST_ROW_BYTES: u64 = 64 << 20;
/// Letters of a part of a path.
const MOST_LETTERS: usize = 64;

/// `baseline`.
#[derive(Debug, Args)]
pub(crate) struct BaselineArgs {
    /// A folder of `sweep --out`, or its sweep.jsonl; or of `bench --out`, or its kernels.csv
    pub(crate) run: PathBuf,
    /// The folder all baselines are in
    #[arg(long = "in", value_name = "DIR", default_value = "results/baselines")]
    pub(crate) dir: PathBuf,
}

/// What of a row decides its baseline.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Measured {
    method: u32,
    device: String,
    card: String,
    driver: Option<String>,
    cpu: Option<String>,
    cores: Option<u64>,
    /// Whether it is a kernel's row.
    #[serde(skip)]
    kernel: bool,
}

impl From<Timed> for Measured {
    fn from(row: Timed) -> Measured {
        let some = |text: String| Some(text).filter(|text| !text.is_empty());
        let device = row.device_kind().to_owned();
        let (driver, cpu) = (some(row.driver), some(row.cpu));
        Measured { method: row.method, device, card: row.card, driver, cpu, cores: row.cores, kernel: true }
    }
}

impl Measured {
    /// `CARD/DRIVER-mMETHOD`, of kernels `CARD/DRIVER-kMETHOD`. What runs on a processor has its name and number of cores for a driver, and a plan has none.
    fn folder(&self) -> Result<PathBuf> {
        let driver = match self.device.as_str() {
            "plan" => "plan".to_owned(),
            "cpu" | "emulated" => {
                let cpu = self.cpu.as_deref().context("a row measured on a processor does not say which (`cpu`)")?;
                format!("{}-x{}", part(cpu)?, self.cores.unwrap_or(0))
            }
            "cuda" => part(self.driver.as_deref().context("a row measured on a card does not say its driver")?)?,
            other => bail!("a row's device is {other:?}; rows are of cuda, cpu, emulated or plan"),
        };
        Ok(Path::new(&part(&self.card)?).join(format!(
            "{driver}-{}{}",
            if self.kernel { 'k' } else { 'm' },
            self.method
        )))
    }
}

/// Text as a part of a path: lower-case letters, digits and points, everything else as single dashes.
fn part(text: &str) -> Result<String> {
    let mut part = String::new();
    for c in text.chars() {
        match c {
            'a'..='z' | '0'..='9' | '.' => part.push(c),
            'A'..='Z' => part.push(c.to_ascii_lowercase()),
            _ if part.is_empty() || part.ends_with('-') => {}
            _ => part.push('-'),
        }
        if part.len() >= MOST_LETTERS {
            break;
        }
    }
    // A part of points alone would name another folder.
    let part = part.trim_matches(['-', '.']).to_owned();
    ensure!(!part.is_empty(), "{text:?} cannot name a folder: it has no letter and no digit");
    Ok(part)
}

/// The folder of a run's rows, all of which must agree.
fn folder_of(rows: impl Iterator<Item = Result<Measured>>) -> Result<PathBuf> {
    let mut folders = BTreeSet::new();
    for row in rows {
        folders.insert(row?.folder()?);
    }
    let list: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
    ensure!(list.len() < 2, "its rows are of several baselines: {}; sweep them apart", list.join(", "));
    folders.pop_first().context("it holds no rows")
}

/// Reads the rows of a run's JSONL. A last line that a killed program left unfinished is left out.
fn rows(path: &Path) -> Result<Vec<Result<Measured>>> {
    let file = std::fs::File::open(path).map_err(Error::io(path))?;
    let mut reader = BufReader::new(file);
    let mut rows = Vec::new();
    loop {
        let mut line = Vec::new();
        let read = reader.by_ref().take(MOST_ROW_BYTES).read_until(b'\n', &mut line).map_err(Error::io(path))?;
        if read == 0 {
            return Ok(rows);
        }
        let number = rows.len() + 1;
        let ended = line.last() == Some(&b'\n');
        match serde_json::from_slice(&line) {
            Ok(row) => rows.push(Ok(row)),
            Err(_) if !ended && (read as u64) < MOST_ROW_BYTES && !rows.is_empty() => return Ok(rows),
            Err(error) => {
                rows.push(Err(error).with_context(|| format!("line {number} is no row")));
                return Ok(rows);
            }
        }
    }
}

/// `baseline`.
pub(crate) fn baseline(args: &BaselineArgs) -> Result<(), Failure> {
    if let Some(table) = find(&args.run)? {
        let folder = folder_of(read(&table)?.into_iter().map(|row| Ok(row.into())))
            .with_context(|| format!("cannot say what {} is held to", table.display()))?;
        print(&format!("{}\n", args.dir.join(folder).display()))?;
        return Ok(());
    }
    let path = if args.run.is_dir() { args.run.join("sweep.jsonl") } else { args.run.clone() };
    let folder = folder_of(rows(&path)?.into_iter())
        .with_context(|| format!("cannot say what {} is held to", path.display()))?;
    print(&format!("{}\n", args.dir.join(folder).display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(device: &str, driver: Option<&str>) -> Measured {
        Measured {
            method: 3,
            device: device.into(),
            card: "rtx-4090".into(),
            driver: driver.map(str::to_owned),
            cpu: Some("AMD EPYC 7B13 64-Core  Processor (v2)".into()),
            cores: Some(16),
            kernel: false,
        }
    }

    #[test]
    fn a_key_is_card_driver_and_method() {
        let text = |row: Measured| row.folder().unwrap().display().to_string();
        assert_eq!(text(row("cuda", Some("580.159.04"))), "rtx-4090/580.159.04-m3");
        assert_eq!(text(row("cpu", None)), "rtx-4090/amd-epyc-7b13-64-core-processor-v2-x16-m3");
        assert_eq!(text(row("plan", None)), "rtx-4090/plan-m3");
        let kernel = Timed {
            device: "cuda:1".into(),
            card: "h200".into(),
            driver: "580.1".into(),
            method: 2,
            ..Timed::default()
        };
        assert_eq!(text(kernel.into()), "h200/580.1-k2");
        assert!(row("cuda", None).folder().unwrap_err().to_string().contains("driver"));
        assert!(row("abacus", None).folder().is_err());
    }

    #[test]
    fn no_name_leaves_the_folder() {
        for (text, wanted) in [
            ("../../etc/passwd", "etc-passwd"),
            ("/root", "root"),
            ("a/../b", "a-..-b"),
            ("..x..", "x"),
            ("NVIDIA H200\n", "nvidia-h200"),
        ] {
            assert_eq!(part(text).unwrap(), wanted, "{text:?}");
            assert!(!part(text).unwrap().contains('/'));
        }
        for text in ["", "..", "---", "/", "\u{661}"] {
            assert!(part(text).is_err(), "{text:?}");
        }
        assert!(part(&"x".repeat(1000)).unwrap().len() <= MOST_LETTERS);
    }

    #[test]
    fn rows_of_two_keys_are_refused_and_of_none_too() {
        let same = [Ok(row("cuda", Some("1.2"))), Ok(row("cuda", Some("1.2")))];
        assert_eq!(folder_of(same.into_iter()).unwrap(), Path::new("rtx-4090/1.2-m3"));
        let two = [Ok(row("cuda", Some("1.2"))), Ok(row("cuda", Some("1.3")))];
        let refused = folder_of(two.into_iter()).unwrap_err().to_string();
        assert!(refused.contains("1.2-m3, rtx-4090/1.3-m3"), "{refused}");
        assert!(folder_of(std::iter::empty()).is_err());
    }

    #[test]
    fn a_torn_last_line_is_left_out_and_a_broken_one_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sweep.jsonl");
        let good = "{\"method\":1,\"device\":\"plan\",\"card\":\"h200\",\"new_column\":[1]}\n";
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            folder_of(rows(&path).unwrap().into_iter())
        };
        assert_eq!(read(&format!("{good}{good}{{\"meth")).unwrap(), Path::new("h200/plan-m1"));
        assert!(read(&format!("{good}garbage\n{good}")).unwrap_err().to_string().contains("line 2"));
        assert!(read("{\"meth").is_err());
        assert!(read("").is_err());
        assert!(rows(&dir.path().join("nothing")).is_err());
    }
}
