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
        let row: Row = serde_json::from_slice(&line).with_context(at)?;
        check(&row).with_context(at)?;
        read.rows.push(row);
    }
    Ok(read)
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
        check(&row).with_context(at)?;
        rows.push(row);
    }
    Ok(rows)
}

/// An error for a row that this build cannot read, or that contradicts itself: nothing is to be concluded from it.
fn check(row: &Row) -> Result<()> {
    ensure!(
        (OLDEST_SCHEMA..=SCHEMA).contains(&row.schema),
        "the row has schema {} and this build reads schemas {OLDEST_SCHEMA} to {SCHEMA}",
        row.schema
    );
    if row.status == Status::Ok {
        row.verify().map_err(|contradiction| anyhow!("the row contradicts itself: {contradiction}"))?;
    }
    Ok(())
}
