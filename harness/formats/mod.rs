//! The rows of a sweep in the forms that other tools read, written while the sweep runs and from a run that has ended.
//!
//! `rows` has the forms that hold every column (json, jsonl, csv, md, sql), `trackers` those of services that draw a number
//! over commits, `llama_bench` and `vllm` the key names of those programs (`definitions`: what they mean here). `name` is what a cell is called in all of them.
//! A value that is not known is an empty field in CSV, `null` in JSON and `NULL` in SQL, and is never written as a number.

pub(crate) mod cli;
mod definitions;
mod export;
mod llama_bench;
mod name;
mod rows;
mod sample;
mod trackers;
mod vllm;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::ValueEnum;

pub(crate) use self::definitions::FORMATS;
pub(crate) use self::export::export;
pub(crate) use self::name::cell_name;
use crate::planned::replace;
use crate::record::Row;

/// Time that writing may take of a sweep before it is put off: this much, and a tenth of what has passed.
const FREE_TIME: Duration = Duration::from_secs(1);

/// A form of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// One line per cell, columns as in sweep.csv (always written)
    Csv,
    /// An array of rows, samples included
    Json,
    /// One JSON object a line, samples included (always written)
    Jsonl,
    /// A Markdown table for pull requests
    Md,
    /// CREATE TABLE highwater and its rows
    Sql,
    /// Bencher Metric Format
    Bmf,
    /// github-action-benchmark, customSmallerIsBetter
    GhBenchmark,
    /// llama-bench's keys, as JSON
    LlamaBench,
    /// llama-bench's keys, an object a line
    LlamaBenchJsonl,
    /// llama-bench's keys, as table llama_bench
    LlamaBenchSql,
    /// The keys of vllm bench serve and vllm bench latency, an object per cell
    Vllm,
}

impl Format {
    /// The file of a run folder that holds this form.
    pub(crate) fn file_name(self) -> &'static str {
        match self {
            Format::Csv => "sweep.csv",
            Format::Json => "sweep.json",
            Format::Jsonl => "sweep.jsonl",
            Format::Md => "sweep.md",
            Format::Sql => "sweep.sql",
            Format::Bmf => "bmf.json",
            Format::GhBenchmark => "gh-benchmark.json",
            Format::LlamaBench => "llama-bench.json",
            Format::LlamaBenchJsonl => "llama-bench.jsonl",
            Format::LlamaBenchSql => "llama-bench.sql",
            Format::Vllm => "vllm.json",
        }
    }

    /// Whether the journal writes it, row by row.
    fn is_journal(self) -> bool {
        matches!(self, Format::Csv | Format::Jsonl)
    }

    /// `rows` in this form. An error is a number that the form cannot hold.
    pub(crate) fn render(self, rows: &[Row]) -> Result<String> {
        match self {
            Format::Csv => rows::csv(rows),
            Format::Json => rows::json(rows),
            Format::Jsonl => rows::jsonl(rows),
            Format::Md => Ok(rows::markdown(rows)),
            Format::Sql => rows::sql(rows),
            Format::Bmf => trackers::bmf(rows),
            Format::GhBenchmark => trackers::github(rows),
            Format::LlamaBench => llama_bench::json(rows),
            Format::LlamaBenchJsonl => llama_bench::jsonl(rows),
            Format::LlamaBenchSql => llama_bench::sql(rows),
            Format::Vllm => vllm::json(rows),
        }
    }
}

/// The files of a running sweep beside its journal.
#[derive(Debug)]
pub(crate) struct Writers {
    files: Vec<(Format, PathBuf)>,
    rows: Vec<Row>,
    begun: Instant,
    spent: Duration,
}

impl Writers {
    /// Writes every file of `formats` in `dir` without a row, so that one that cannot be written fails before the first cell.
    /// The forms that the journal writes are left to it. `earlier` are the rows of a sweep that goes on. Beside the files, what
    /// their numbers mean is written to `FORMATS.txt`.
    pub(crate) fn create<'a>(
        dir: &Path,
        formats: &[Format],
        earlier: impl IntoIterator<Item = &'a Row>,
    ) -> Result<Writers> {
        let mut files: Vec<(Format, PathBuf)> = Vec::new();
        for format in formats.iter().filter(|format| !format.is_journal()) {
            if files.iter().all(|(known, _)| known != format) {
                files.push((*format, dir.join(format.file_name())));
            }
        }
        let mut writers = Writers { files, rows: Vec::new(), begun: Instant::now(), spent: Duration::ZERO };
        if !writers.files.is_empty() {
            writers.rows.extend(earlier.into_iter().cloned());
            writers.write()?;
            write_whole(&dir.join("FORMATS.txt"), FORMATS)?;
        }
        Ok(writers)
    }

    /// Adds a row and writes the files anew. A file holds every row, so that the time for all grows with the square of
    /// their number: once it is above a second and a tenth of the sweep, rows wait for the next call, or for
    /// [`Writers::finish`]. The journal holds them meanwhile.
    pub(crate) fn push(&mut self, row: &Row) -> Result<()> {
        if self.files.is_empty() {
            return Ok(());
        }
        self.rows.push(row.clone());
        if self.spent > FREE_TIME + self.begun.elapsed() / 10 {
            return Ok(());
        }
        self.write()
    }

    /// Makes `rows` all that the files hold, in this order.
    pub(crate) fn finish(&mut self, rows: &[Row]) -> Result<()> {
        if self.files.is_empty() {
            return Ok(());
        }
        self.rows = rows.to_vec();
        self.write()
    }

    /// The names of the files, for the line that says what a run wrote.
    pub(crate) fn file_names(&self) -> impl Iterator<Item = &'static str> {
        self.files.iter().map(|(format, _)| format.file_name())
    }

    fn write(&mut self) -> Result<()> {
        let begun = Instant::now();
        for (format, path) in &self.files {
            write_whole(path, &format.render(&self.rows)?)?;
        }
        self.spent += begun.elapsed();
        Ok(())
    }
}

/// Puts `text` in the place of the file at `path`: whoever reads it sees the old text or the new one, never a part.
pub(crate) fn write_whole(path: &Path, text: &str) -> Result<()> {
    replace(path, |file| Ok(file.write_all(text.as_bytes())?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests;

    fn ok_row(chunk: u64, batch: u64, transient: u64) -> Row {
        Row { vram_bytes: None, ..tests::ok_row(chunk, batch, transient) }
    }

    #[test]
    fn every_form_is_there_before_the_first_cell_and_holds_each_row_after_it() {
        let dir = tempfile::tempdir().unwrap();
        let all = Format::value_variants();
        let mut writers = Writers::create(dir.path(), &[all, all].concat(), []).unwrap();
        let own: Vec<Format> = all.iter().copied().filter(|format| !format.is_journal()).collect();
        assert_eq!(writers.file_names().count(), own.len(), "a form asked for twice is written once");
        for rows in 0..3u64 {
            let expected: Vec<Row> = (1..=rows).map(|n| ok_row(512 * n, n, 64)).collect();
            for format in &own {
                let text = std::fs::read_to_string(dir.path().join(format.file_name())).unwrap();
                assert_eq!(text, format.render(&expected).unwrap(), "{format:?} after {rows} rows");
            }
            writers.push(&ok_row(512 * (rows + 1), rows + 1, 64)).unwrap();
        }
        let names = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        assert!(names.into_iter().all(|name| !name.contains(".new") && name != "sweep.csv"));
    }

    #[test]
    fn writing_that_takes_too_long_waits_and_is_caught_up() {
        let dir = tempfile::tempdir().unwrap();
        let mut writers = Writers::create(dir.path(), &[Format::Json], []).unwrap();
        writers.spent = Duration::from_secs(3600);
        writers.push(&ok_row(1, 1, 1)).unwrap();
        let rows = || -> Vec<serde_json::Value> {
            serde_json::from_str(&std::fs::read_to_string(dir.path().join("sweep.json")).unwrap()).unwrap()
        };
        assert_eq!(rows().len(), 0);
        writers.finish(&[ok_row(2, 1, 1), ok_row(1, 1, 1)]).unwrap();
        assert_eq!(rows().iter().map(|row| row["chunk"].as_u64()).collect::<Vec<_>>(), [Some(2), Some(1)]);
    }

    #[test]
    fn a_sweep_that_goes_on_begins_with_its_earlier_rows() {
        let dir = tempfile::tempdir().unwrap();
        let mut writers = Writers::create(dir.path(), &[Format::Jsonl, Format::Json], [&ok_row(1, 1, 1)]).unwrap();
        writers.push(&ok_row(2, 1, 1)).unwrap();
        let text = std::fs::read_to_string(dir.path().join("sweep.json")).unwrap();
        let rows: Vec<Row> = serde_json::from_str(&text).unwrap();
        assert_eq!(rows, [ok_row(1, 1, 1), ok_row(2, 1, 1)]);
        assert!(std::fs::read_to_string(dir.path().join("FORMATS.txt")).unwrap().contains("llama-bench: "));
    }

    #[test]
    fn a_folder_that_cannot_be_written_fails_before_the_first_cell() {
        let dir = tempfile::tempdir().unwrap();
        let error = Writers::create(&dir.path().join("none"), &[Format::Sql], []).unwrap_err();
        assert!(format!("{error:#}").contains("sweep.sql"), "{error:#}");
        Writers::create(&dir.path().join("none"), &[Format::Csv], []).unwrap();
    }
}
