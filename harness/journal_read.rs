//! A sweep's files read back: to go on with it, to join it with others, to hold it against what was written.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};

use crate::record::{OLDEST_SCHEMA, Row, SCHEMA};
use crate::status::Status;

/// Longest line read back: far above any row, and a bound on what a broken file makes us hold.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// Rows read back, and whether the last line was torn by a crash while it was written.
#[derive(Debug)]
pub(crate) struct Rows {
    /// Every complete row.
    pub(crate) rows: Vec<Row>,
    /// Whether the file ends in the middle of a row.
    pub(crate) torn: bool,
}

/// The rows of a JSONL file. Only its last line may be incomplete.
pub(crate) fn read_jsonl(path: &Path) -> Result<Rows> {
    let file = open(path)?;
    let mut reader = BufReader::new(file);
    let mut read = Rows { rows: Vec::new(), torn: false };
    for number in 1usize.. {
        let at = || format!("{} line {number}", path.display());
        let mut line = Vec::new();
        reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line).with_context(at)?;
        if line.is_empty() {
            break;
        }
        if line.last() != Some(&b'\n') {
            ensure!((line.len() as u64) < MAX_LINE_BYTES, "{}: longer than {MAX_LINE_BYTES} bytes", at());
            read.torn = true;
            break;
        }
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let row: Row = serde_json::from_slice(&line).map_err(|error| no_row(&at(), &error))?;
        readable(&row).with_context(at)?;
        sound(&row).with_context(|| format!("{}; {WITHOUT}", at()))?;
        read.rows.push(row);
    }
    Ok(read)
}

/// What to do about a line that is no row.
const WITHOUT: &str = "with that line removed the others are read, and a sweep with --resume runs its cell again";

/// What is wrong with a line, where in it, and what to do. The parser is given one line and calls it the first.
fn no_row(at: &str, error: &serde_json::Error) -> anyhow::Error {
    let (text, column) = (error.to_string(), error.column());
    let what = text.strip_suffix(&format!(" at line {} column {column}", error.line())).unwrap_or(&text);
    anyhow!("{at} column {column}: {what}; {WITHOUT}")
}

/// Opens a file to be read to its end, which a pipe or a device may not have.
pub(crate) fn open(path: &Path) -> Result<File> {
    let failed = || format!("cannot open {}", path.display());
    ensure!(std::fs::metadata(path).with_context(failed)?.is_file(), "{} is no file", path.display());
    File::open(path).with_context(failed)
}

/// The rows of a CSV file. It holds no samples.
pub(crate) fn read_csv(path: &Path) -> Result<Vec<Row>> {
    let mut reader = csv::Reader::from_path(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut rows = Vec::new();
    for row in reader.deserialize() {
        let at = || format!("{} row {}", path.display(), rows.len() + 1);
        let row: Row = row.with_context(at)?;
        readable(&row).with_context(at)?;
        sound(&row).with_context(at)?;
        rows.push(row);
    }
    Ok(rows)
}

/// An error for a row that this build cannot read.
fn readable(row: &Row) -> Result<()> {
    ensure!(
        (OLDEST_SCHEMA..=SCHEMA).contains(&row.schema),
        "the row has schema {} and this build reads schemas {OLDEST_SCHEMA} to {SCHEMA}",
        row.schema
    );
    Ok(())
}

/// An error for a row that contradicts itself: nothing is to be concluded from it.
fn sound(row: &Row) -> Result<()> {
    if row.status == Status::Ok {
        row.verify().map_err(|contradiction| anyhow!("the row contradicts itself: {contradiction}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_earlier_builds_are_read_with_nulls_for_what_they_do_not_say() {
        let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/h200");
        let mut read = 0;
        for folder in std::fs::read_dir(results).unwrap().map(|entry| entry.unwrap().path()) {
            if !folder.join("sweep.jsonl").exists() {
                continue;
            }
            let (lines, table) = (folder.join("sweep.jsonl"), folder.join("sweep.csv"));
            let header = csv::Reader::from_path(&table).unwrap().headers().unwrap().clone();
            let rows = read_jsonl(&lines).unwrap().rows;
            for row in rows.iter().chain(&read_csv(&table).unwrap()) {
                let said = [&row.rustc, &row.cargo_flags, &row.nvrtc, &row.nvrtc_options, &row.gpu_pci];
                let names = ["rustc", "cargo_flags", "nvrtc", "nvrtc_options", "gpu_pci"];
                for (name, value) in names.into_iter().zip(said) {
                    let has = header.iter().any(|column| column == name);
                    assert!(has || value.is_none(), "{}: {name}", folder.display());
                }
                read += 1;
            }
        }
        assert!(read > 20, "{read} rows of results/h200");
    }

    #[test]
    fn a_later_build_s_columns_are_no_hindrance() {
        let dir = tempfile::tempdir().unwrap();
        let (lines, table) = (dir.path().join("a.jsonl"), dir.path().join("a.csv"));
        std::fs::write(&lines, format!("{{\"schema\":{SCHEMA},\"rustc\":\"1.95.0\",\"later\":[1]}}\n")).unwrap();
        std::fs::write(&table, format!("schema,rustc,later\n{SCHEMA},1.95.0,x\n")).unwrap();
        for rows in [read_jsonl(&lines).unwrap().rows, read_csv(&table).unwrap()] {
            assert_eq!((rows.len(), rows[0].rustc.as_deref(), &rows[0].nvrtc), (1, Some("1.95.0"), &None));
        }
    }
}
