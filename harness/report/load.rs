//! Reads what a report is about: rows of runs, rows of kernels, and a table of traffic. The files are anyone's: each is
//! bounded, and an error names the file and the line.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::journal_read::{Rows, read_csv, read_jsonl};
use crate::record::Row;

/// Largest file that is read, bytes.
const MAX_FILE_BYTES: u64 = 1 << 30;
/// Most rows of cells, and of kernels, that one report holds.
const MAX_ROWS: usize = 100_000;
/// Most rows and columns of a traffic table.
const MAX_TRAFFIC: (usize, usize) = (2000, 24);

/// A run: a sweep's record.
#[derive(Debug)]
pub(super) struct Run {
    /// What it is called in the report: its folder's name, with as many of its parents as tell it from the others.
    pub(super) label: String,
    /// Its rows.
    pub(super) rows: Vec<Row>,
    /// Whether its last row was cut off by a crash.
    pub(super) torn: bool,
}

/// A row of kernels.csv; columns that are missing are nulls.
#[allow(clippy::struct_field_names)] // The columns' own names.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct Kernel {
    pub(super) kernel: String,
    pub(super) model: String,
    pub(super) part: String,
    pub(super) scheme: String,
    pub(super) m: Option<u64>,
    pub(super) cache: String,
    pub(super) median_us: Option<f64>,
    pub(super) q1_us: Option<f64>,
    pub(super) q3_us: Option<f64>,
    pub(super) samples: Option<u64>,
    pub(super) bytes: Option<u64>,
    pub(super) flops: Option<u64>,
    pub(super) gb_s: Option<f64>,
    pub(super) tflop_s: Option<f64>,
    pub(super) percent_of_ceiling: Option<f64>,
    pub(super) bound_by: String,
    pub(super) peer: String,
    pub(super) peer_median_us: Option<f64>,
    pub(super) checked: Option<bool>,
    pub(super) note: String,
    pub(super) card: String,
    pub(super) driver: String,
    pub(super) time: String,
    pub(super) run: String,
    pub(super) git_sha: String,
    pub(super) binary_hash: String,
    pub(super) argv: String,
}

/// A table of any columns.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    /// Its header.
    pub(super) columns: Vec<String>,
    /// Its rows, each as long as the header.
    pub(super) rows: Vec<Vec<String>>,
    /// Rows of the file that are past the bound and left out.
    pub(super) left_out: usize,
}

/// All that a report is about.
#[derive(Debug, Default)]
pub(super) struct Input {
    /// Runs, in the order given, those of one folder by name.
    pub(super) runs: Vec<Run>,
    /// Rows of kernels, of every file that has them.
    pub(super) kernels: Vec<Kernel>,
    /// The traffic table, if there is one.
    pub(super) traffic: Option<Traffic>,
}

/// Reads what was `given`, and `traffic`.
pub(super) fn load(given: &[PathBuf], traffic: Option<&Path>) -> Result<Input> {
    let mut files = Files::default();
    for path in given {
        files.find(path)?;
    }
    let mut input = Input::default();
    let labels = labels(&files.records);
    let mut rows = 0;
    for (file, label) in files.records.iter().zip(labels) {
        bounded(file)?;
        let read =
            if has_ending(file, "csv") { Rows { rows: read_csv(file)?, torn: false } } else { read_jsonl(file)? };
        rows += read.rows.len();
        ensure!(rows <= MAX_ROWS, "more than {MAX_ROWS} cells; make a report of fewer runs");
        input.runs.push(Run { label, rows: read.rows, torn: read.torn });
    }
    for file in &files.kernels {
        input.kernels.extend(read_kernels(file)?);
    }
    ensure!(input.kernels.len() <= MAX_ROWS, "more than {MAX_ROWS} rows of kernels; make a report of fewer folders");
    input.traffic = traffic.map(read_traffic).transpose()?;
    Ok(input)
}

/// The files that are read, each once.
#[derive(Debug, Default)]
struct Files {
    records: Vec<PathBuf>,
    kernels: Vec<PathBuf>,
    seen: BTreeSet<PathBuf>,
}

impl Files {
    /// A file by what it holds; of a folder its own files, or, where it has no record of a run, those of the folders in it.
    fn find(&mut self, path: &Path) -> Result<()> {
        if !path.is_dir() {
            bounded(path).context("give a run's folder, its sweep.jsonl or sweep.csv, or kernels.csv")?;
            match () {
                () if has_ending(path, "jsonl") => self.record(path),
                () if !has_ending(path, "csv") => bail!("{} is neither a .jsonl nor a .csv file", path.display()),
                () if is_of_kernels(path)? => self.kernels(path),
                () => self.record(path),
            }
            return Ok(());
        }
        if self.folder(path) {
            return Ok(());
        }
        let at = || format!("cannot list {}", path.display());
        let mut inside = Vec::new();
        for entry in std::fs::read_dir(path).with_context(at)? {
            inside.push(entry.with_context(at)?.path());
        }
        inside.sort();
        let mut found = path.join("kernels.csv").exists();
        for folder in inside.iter().filter(|path| path.is_dir()) {
            found |= self.folder(folder) || folder.join("kernels.csv").exists();
        }
        ensure!(
            found,
            "{} holds no run: neither sweep.jsonl, sweep.csv nor kernels.csv, nor folders with one of them",
            path.display()
        );
        Ok(())
    }

    /// Takes a folder's own files; whether a record of a run is among them.
    fn folder(&mut self, folder: &Path) -> bool {
        let kernels = folder.join("kernels.csv");
        if kernels.exists() {
            self.kernels(&kernels);
        }
        let record = ["sweep.jsonl", "sweep.csv"].map(|name| folder.join(name)).into_iter().find(|file| file.exists());
        record.inspect(|record| self.record(record)).is_some()
    }

    fn record(&mut self, file: &Path) {
        if self.is_new(file) {
            self.records.push(file.to_owned());
        }
    }

    fn kernels(&mut self, file: &Path) {
        if self.is_new(file) {
            self.kernels.push(file.to_owned());
        }
    }

    fn is_new(&mut self, file: &Path) -> bool {
        self.seen.insert(file.canonicalize().unwrap_or_else(|_| file.to_owned()))
    }
}

fn has_ending(file: &Path, ending: &str) -> bool {
    file.extension().is_some_and(|extension| extension == ending)
}

/// Whether a CSV is one of kernels: its first line names that column.
fn is_of_kernels(file: &Path) -> Result<bool> {
    let at = || format!("cannot read {}", file.display());
    let mut reader = csv::Reader::from_path(file).with_context(at)?;
    Ok(reader.headers().with_context(at)?.iter().any(|column| column == "kernel"))
}

/// A plain file of a size that can be read; not a pipe, which could be waited on for ever.
fn bounded(path: &Path) -> Result<()> {
    let about = std::fs::metadata(path).with_context(|| format!("cannot open {}", path.display()))?;
    ensure!(about.is_file(), "{} is not a plain file", path.display());
    let bytes = about.len();
    ensure!(bytes <= MAX_FILE_BYTES, "{} has {bytes} B; at most {MAX_FILE_BYTES} B are read", path.display());
    Ok(())
}

fn read_kernels(path: &Path) -> Result<Vec<Kernel>> {
    bounded(path)?;
    let mut reader = csv::Reader::from_path(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut rows = Vec::new();
    for row in reader.deserialize() {
        let mut row: Kernel = row.with_context(|| format!("{} row {}", path.display(), rows.len() + 1))?;
        ensure!(rows.len() < MAX_ROWS, "{} has more than {MAX_ROWS} rows", path.display());
        for value in [&mut row.median_us, &mut row.q1_us, &mut row.q3_us, &mut row.gb_s, &mut row.tflop_s] {
            *value = value.filter(|value| value.is_finite() && *value >= 0.0);
        }
        rows.push(row);
    }
    Ok(rows)
}

fn read_traffic(path: &Path) -> Result<Traffic> {
    bounded(path)?;
    let mut reader = csv::Reader::from_path(path).with_context(|| format!("cannot open {}", path.display()))?;
    let at = |n: usize| format!("{} row {n}", path.display());
    let header = reader.headers().with_context(|| at(0))?;
    let columns: Vec<String> = header.iter().map(str::to_owned).collect();
    ensure!(
        columns.len() <= MAX_TRAFFIC.1,
        "{} has {} columns; a table of traffic has at most {}",
        path.display(),
        columns.len(),
        MAX_TRAFFIC.1
    );
    let mut traffic = Traffic { columns, ..Traffic::default() };
    for (n, record) in reader.records().enumerate() {
        let record = record.with_context(|| at(n + 1))?;
        for (column, value) in traffic.columns.iter().zip(&record) {
            let whole = !column.ends_with("_bytes") || value.is_empty() || value.parse::<u64>().is_ok();
            ensure!(whole, "{}: {column} is `{value}`, and must be a number of bytes", at(n + 1));
        }
        if traffic.rows.len() < MAX_TRAFFIC.0 {
            traffic.rows.push(record.iter().map(str::to_owned).collect());
        } else {
            traffic.left_out += 1;
        }
    }
    Ok(traffic)
}

/// A name for each record: its folder's, or its own where it is called otherwise than a sweep's, and as many parents as tell
/// it from the others.
fn labels(records: &[PathBuf]) -> Vec<String> {
    let parts: Vec<Vec<String>> = records
        .iter()
        .map(|record| {
            let whole = record.canonicalize().unwrap_or_else(|_| record.clone());
            let usual = whole.file_stem().is_some_and(|stem| stem == "sweep");
            let named = whole.parent().filter(|_| usual).unwrap_or(&whole);
            named.components().rev().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect()
        })
        .collect();
    let label = |own: &[String], depth: usize| own.iter().take(depth).rev().cloned().collect::<Vec<_>>().join("/");
    parts
        .iter()
        .enumerate()
        .map(|(at, own)| {
            let others = || parts.iter().enumerate().filter(|(other, _)| *other != at);
            let depth = (1..own.len()).find(|depth| others().all(|(_, o)| label(o, *depth) != label(own, *depth)));
            label(own, depth.unwrap_or(own.len()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(dir: &Path, name: &str) -> PathBuf {
        let path = dir.join(name);
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join("sweep.jsonl"), "{\"schema\":4}\n").unwrap();
        path
    }

    #[test]
    fn runs_are_named_by_as_much_of_their_path_as_tells_them_apart() {
        let dir = tempfile::tempdir().unwrap();
        let paths = [run(dir.path(), "a/decode"), run(dir.path(), "b/decode"), run(dir.path(), "b/prefill")];
        let input = load(&paths, None).unwrap();
        let names: Vec<&str> = input.runs.iter().map(|run| run.label.as_str()).collect();
        assert_eq!(names, ["a/decode", "b/decode", "prefill"]);
        let folder = load(&[dir.path().join("b"), paths[1].clone()], None).unwrap();
        assert_eq!(folder.runs.len(), 2, "a run that is given twice is read once");
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error =
            |folder: &Path, traffic: Option<&Path>| format!("{:#}", load(&[folder.into()], traffic).unwrap_err());
        assert!(error(dir.path(), None).contains("holds no run"));
        let none = error(&dir.path().join("none"), None);
        assert!(none.contains("cannot open") && none.contains("give a run's folder"), "{none}");
        std::fs::write(dir.path().join("notes.txt"), "x").unwrap();
        assert!(error(&dir.path().join("notes.txt"), None).contains("neither a .jsonl nor a .csv"));
        let one = run(dir.path(), "one");
        let csv = dir.path().join("traffic.csv");
        assert!(error(&one, Some(&csv)).contains("traffic.csv"));
        std::fs::write(&csv, "a,b\n1,2\n3\n").unwrap();
        assert!(error(&one, Some(&csv)).contains("row 2"));
        std::fs::write(&csv, "a_bytes\nmany\n").unwrap();
        assert!(error(&one, Some(&csv)).contains("row 1: a_bytes is `many`"));
        std::fs::write(one.join("kernels.csv"), "kernel,median_us\nlinear,fast\n").unwrap();
        assert!(error(&one, None).contains("kernels.csv row 1"));
        std::fs::create_dir_all(dir.path().join("odd/sweep.jsonl")).unwrap();
        assert!(error(&dir.path().join("odd"), None).contains("not a plain file"));
    }

    #[test]
    fn files_are_taken_by_what_they_hold_and_a_bench_s_folder_by_the_card_s_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let one = run(dir.path(), "one");
        std::fs::write(one.join("sweep.csv"), "schema,chunk\n4,7\n").unwrap();
        let bench = dir.path().join("bench/h200");
        std::fs::create_dir_all(&bench).unwrap();
        std::fs::write(bench.join("kernels.csv"), "kernel,m\nlinear,8\n").unwrap();
        let of = |paths: &[PathBuf]| {
            let input = load(paths, None).unwrap();
            let runs: Vec<(String, u64)> =
                input.runs.iter().map(|run| (run.label.clone(), run.rows[0].chunk)).collect();
            (runs, input.kernels.len())
        };
        assert_eq!(of(&[one.join("sweep.jsonl")]), (vec![("one".into(), 0)], 0));
        assert_eq!(of(&[one.join("sweep.csv")]), (vec![("one".into(), 7)], 0));
        assert_eq!(of(&[one.clone(), one.join("sweep.jsonl")]).0.len(), 1, "one file is read once");
        assert_eq!(of(&[dir.path().join("bench")]), (vec![], 1));
        assert_eq!(of(&[bench.join("kernels.csv"), bench.clone()]), (vec![], 1));
        assert_eq!(of(&[dir.path().into()]).0.len(), 1, "runs and benches are looked for one folder down");
        std::fs::rename(one.join("sweep.jsonl"), one.join("sweep.old")).unwrap();
        assert_eq!(of(&[one]), (vec![("one".into(), 7)], 0), "all there is");
    }

    #[test]
    fn kernels_of_the_bench_s_own_columns_are_read_with_nulls_for_what_is_empty() {
        let dir = tempfile::tempdir().unwrap();
        let text = "kernel,m,median_us,bound_by,checked,unknown\nlinear,8,1.5,memory,true,x\nceiling,1,NaN,,,\n";
        std::fs::write(dir.path().join("kernels.csv"), text).unwrap();
        let input = load(&[dir.path().into()], None).unwrap();
        let (first, second) = (&input.kernels[0], &input.kernels[1]);
        assert_eq!((first.median_us, first.checked, first.bound_by.as_str()), (Some(1.5), Some(true), "memory"));
        assert_eq!((second.median_us, second.checked, second.flops), (None, None, None));
    }
}
