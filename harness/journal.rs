//! The files of a sweep: `sweep.csv`, `sweep.jsonl` and `DEFINITIONS.txt` in one folder.
//!
//! All are created before the first cell runs, so a folder that cannot be written fails then and not after an hour, and
//! each row is on disk before the next cell starts. The JSONL file is the record (synced after each row, samples kept);
//! the CSV has the same rows for spreadsheets. An earlier sweep in the folder is never overwritten.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::definitions;
use crate::formats::Writers;
use crate::owners::owners_text;
use crate::planned::{self, replace};
use crate::record::{JSONL_ONLY, Row};

/// Open files of a running sweep.
#[derive(Debug)]
pub(crate) struct Journal {
    csv: csv::Writer<File>,
    csv_path: PathBuf,
    jsonl: File,
    jsonl_path: PathBuf,
    also: Option<Writers>,
}

impl Journal {
    /// Creates `dir` if need be and the files in it; an error if one of them is there already.
    pub(crate) fn create(dir: &Path) -> Result<Journal> {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create the folder {}", dir.display()))?;
        let create = |name: &str| {
            let path = dir.join(name);
            match OpenOptions::new().append(true).create_new(true).open(&path) {
                Ok(file) => Ok((file, path)),
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                    bail!(
                        "{} holds an earlier sweep; give another --out, --resume, or move that one away",
                        path.display()
                    )
                }
                Err(e) => Err(e).with_context(|| format!("cannot create {}", path.display())),
            }
        };
        let (jsonl, jsonl_path) = create("sweep.jsonl")?;
        let (csv, csv_path) = create("sweep.csv")?;
        let definitions_path = dir.join("DEFINITIONS.txt");
        std::fs::write(&definitions_path, definitions::text())
            .with_context(|| format!("cannot write {}", definitions_path.display()))?;
        let mut journal = Journal { csv: csv::Writer::from_writer(csv), csv_path, jsonl, jsonl_path, also: None };
        journal.write_csv(&csv_columns())?;
        Ok(journal)
    }

    /// The same, and every row goes to `also` too.
    pub(crate) fn with(self, also: Writers) -> Journal {
        Journal { also: Some(also), ..self }
    }

    /// Makes `rows` all that `also` holds, whatever it put off, and says which files those are.
    pub(crate) fn finish(&mut self, rows: &[Row]) -> Result<Vec<&'static str>> {
        let Some(also) = &mut self.also else { return Ok(Vec::new()) };
        also.finish(rows)?;
        Ok(also.file_names().collect())
    }

    /// The file of an earlier sweep that `dir` holds, if it holds one.
    pub(crate) fn earlier(dir: &Path) -> Option<PathBuf> {
        let files = [planned::FILE, "sweep.jsonl", "sweep.csv"].map(|name| dir.join(name));
        // A dangling link is there too.
        files.into_iter().find(|path| path.symlink_metadata().is_ok())
    }

    /// An error if `dir` holds an earlier sweep.
    pub(crate) fn refuse_earlier(dir: &Path) -> Result<()> {
        if let Some(path) = Journal::earlier(dir) {
            bail!(
                "{} holds an earlier sweep; --resume goes on with it, another --out begins a new one",
                path.display()
            );
        }
        Ok(())
    }

    /// Makes `rows` all that the files in `dir` hold, at once: a reader, or a crash, finds the old files or the new ones.
    pub(crate) fn replace<'a>(dir: &Path, rows: impl IntoIterator<Item = &'a Row>) -> Result<Journal> {
        let (jsonl_path, csv_path) = (dir.join("sweep.jsonl"), dir.join("sweep.csv"));
        let (mut lines, mut csv) = (Vec::new(), csv::Writer::from_writer(Vec::new()));
        csv.write_record(csv_columns())?;
        for row in rows {
            lines.extend(line(row)?);
            csv.write_record(csv_fields(row)?)?;
        }
        let csv = csv.into_inner().context("rows cannot be written as CSV")?;
        replace(&jsonl_path, |file| Ok(file.write_all(&lines)?))?;
        replace(&csv_path, |file| Ok(file.write_all(&csv)?))?;
        let definitions_path = dir.join("DEFINITIONS.txt");
        std::fs::write(&definitions_path, definitions::text())
            .with_context(|| format!("cannot write {}", definitions_path.display()))?;
        let append = |path: &Path| {
            let file = OpenOptions::new().append(true).open(path);
            file.with_context(|| format!("cannot open {}", path.display()))
        };
        // Rows are written as records, so that no second header comes of it.
        let csv = csv::Writer::from_writer(append(&csv_path)?);
        Ok(Journal { csv, csv_path, jsonl: append(&jsonl_path)?, jsonl_path, also: None })
    }

    /// Puts one row on disk, in both files and in those of other formats.
    pub(crate) fn append(&mut self, row: &Row) -> Result<()> {
        self.jsonl
            .write_all(&line(row)?)
            .and_then(|()| self.jsonl.sync_data())
            .with_context(|| format!("cannot write {}", self.jsonl_path.display()))?;
        self.write_csv(&csv_fields(row)?)?;
        self.also.as_mut().map_or(Ok(()), |also| also.push(row))
    }

    fn write_csv(&mut self, fields: &[String]) -> Result<()> {
        let written = self.csv.write_record(fields).and_then(|()| Ok(self.csv.flush()?));
        written.with_context(|| format!("cannot write {}", self.csv_path.display()))
    }
}

/// A row's line of JSONL.
fn line(row: &Row) -> Result<Vec<u8>> {
    let mut line = serde_json::to_vec(row).context("a row cannot be written as JSON")?;
    line.push(b'\n');
    Ok(line)
}

/// The CSV header: the columns of [`Row`] in order, without the lists of samples.
pub(crate) fn csv_columns() -> Vec<String> {
    let row = serde_json::to_value(Row::default()).expect("a row without values is JSON");
    let columns = row.as_object().expect("a struct is a JSON object").keys();
    columns.filter(|name| !JSONL_ONLY.contains(&name.as_str())).cloned().collect()
}

/// The fields of one row, in the order of [`csv_columns`].
pub(crate) fn csv_fields(row: &Row) -> Result<Vec<String>> {
    use serde_json::Value;
    let value = serde_json::to_value(row).context("a row cannot be written as CSV")?;
    let fields = value.as_object().context("a row is not an object")?;
    let text = |value: &Value| match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(_) => owners_text(&row.owners),
        other => other.to_string(),
    };
    Ok(fields.iter().filter(|(name, _)| !JSONL_ONLY.contains(&name.as_str())).map(|(_, value)| text(value)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal_read::{read_csv, read_jsonl};
    use crate::owners::Owner;
    use crate::record::SCHEMA;
    use crate::record::tests::ok_row;
    use crate::status::Status;

    fn rows() -> Vec<Row> {
        let mut oom = ok_row(8192, 4, 7);
        oom.set_status(Status::Oom, "out of memory: logits; \"quoted\",\nsecond line");
        oom.owners.push(Owner { tag: "a;b=c".into(), bytes: 2 });
        oom.tpot_ms = None;
        oom.fault = Some("true".into());
        oom.git_sha = Some("123456".into());
        vec![ok_row(512, 1, 64), oom, Row { schema: SCHEMA, ..Row::default() }]
    }

    fn without_samples(mut row: Row) -> Row {
        row.prefill_samples_ms.clear();
        row.tpot_samples_ms.clear();
        row.tpot_passes_ms.clear();
        row.stages.clear();
        row
    }

    #[test]
    fn rows_come_back_as_they_were_written() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(&dir.path().join("a/b")).unwrap();
        for row in rows() {
            journal.append(&row).unwrap();
        }
        let read = read_jsonl(&dir.path().join("a/b/sweep.jsonl")).unwrap();
        assert_eq!(read.rows, rows());
        assert!(!read.torn);
        let csv = read_csv(&dir.path().join("a/b/sweep.csv")).unwrap();
        assert_eq!(csv, rows().into_iter().map(without_samples).collect::<Vec<_>>());
    }

    #[test]
    fn each_row_is_on_disk_before_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(dir.path()).unwrap();
        let header = std::fs::read_to_string(dir.path().join("sweep.csv")).unwrap();
        assert!(header.starts_with("schema,method,time,run,cell,") && header.lines().count() == 1);
        for n in 1..=2 {
            journal.append(&ok_row(512, n, 64)).unwrap();
            assert_eq!(read_csv(&dir.path().join("sweep.csv")).unwrap().len(), n as usize);
            assert_eq!(read_jsonl(&dir.path().join("sweep.jsonl")).unwrap().rows.len(), n as usize);
        }
        let definitions = std::fs::read_to_string(dir.path().join("DEFINITIONS.txt")).unwrap();
        assert!(definitions.contains("\nTPOT: "));
    }

    #[test]
    fn nulls_are_empty_in_csv_and_null_in_json_and_never_a_word() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(dir.path()).unwrap();
        let row = Row { schema: SCHEMA, tpot_ms: Some(f64::NAN), ..Row::default() };
        journal.append(&row).unwrap();
        let csv = std::fs::read_to_string(dir.path().join("sweep.csv")).unwrap().to_lowercase();
        let json = std::fs::read_to_string(dir.path().join("sweep.jsonl")).unwrap();
        assert!(
            !csv.contains("nan") && !csv.contains("null") && !csv.contains("none") && !csv.contains("na,"),
            "{csv}"
        );
        assert!(
            json.contains("\"tpot_ms\":null") && json.contains("\"card\":\"\"") && json.contains("\"oom_tag\":null")
        );
        assert_eq!(read_csv(&dir.path().join("sweep.csv")).unwrap()[0].tpot_ms, None);
    }

    #[test]
    fn files_made_anew_have_one_header_and_can_be_added_to() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(dir.path()).unwrap();
        for row in rows() {
            journal.append(&row).unwrap();
        }
        drop(journal);
        let mut journal = Journal::replace(dir.path(), &rows()[1..2]).unwrap();
        journal.append(&rows()[0]).unwrap();
        let wanted = [rows()[1].clone(), rows()[0].clone()];
        assert_eq!(read_jsonl(&dir.path().join("sweep.jsonl")).unwrap().rows, wanted);
        let csv = read_csv(&dir.path().join("sweep.csv")).unwrap();
        assert_eq!(csv, wanted.map(without_samples));
        assert!(!dir.path().join("sweep.jsonl.new").exists());
        assert!(format!("{:#}", Journal::refuse_earlier(dir.path()).unwrap_err()).contains("--resume"));
    }

    #[test]
    fn an_earlier_sweep_is_not_overwritten_and_a_bad_folder_fails_at_once() {
        let dir = tempfile::tempdir().unwrap();
        Journal::create(dir.path()).unwrap().append(&ok_row(1, 1, 1)).unwrap();
        let again = format!("{:#}", Journal::create(dir.path()).unwrap_err());
        assert!(again.contains("earlier sweep") && again.contains("--out"), "{again}");
        assert_eq!(read_csv(&dir.path().join("sweep.csv")).unwrap().len(), 1);
        let file = dir.path().join("sweep.csv/inside");
        assert!(format!("{:#}", Journal::create(&file).unwrap_err()).contains("cannot create the folder"));
    }

    #[test]
    fn a_torn_last_line_loses_that_row_only() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(dir.path()).unwrap();
        journal.append(&ok_row(1, 1, 1)).unwrap();
        journal.append(&ok_row(2, 1, 1)).unwrap();
        let path = dir.path().join("sweep.jsonl");
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 10]).unwrap();
        let read = read_jsonl(&path).unwrap();
        assert_eq!((read.rows.len(), read.rows[0].chunk, read.torn), (1, 1, true));
    }

    #[test]
    fn broken_files_are_named_with_their_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.jsonl");
        let good = serde_json::to_string(&ok_row(1, 1, 1)).unwrap();
        for bad in ["{", "[]", "7", "{\"schema\":3,\"chunk\":-1}", "{\"schema\":3,\"tpot_samples_ms\":[null]}", "\u{0}"]
        {
            std::fs::write(&path, format!("{good}\n\n{bad}\n{good}\n")).unwrap();
            let text = format!("{:#}", read_jsonl(&path).expect_err(bad));
            assert!(text.contains("x.jsonl line 3"), "{text}");
            // An empty list is a row of nulls to the parser.
            if bad != "[]" {
                assert!(text.contains("line 3 column ") && !text.contains(" at line "), "{text}");
                assert!(text.contains("with that line removed"), "{text}");
            }
        }
        let contradicts = Row { free_bytes: Some(6), ..ok_row(1, 1, 1) };
        std::fs::write(&path, format!("{good}\n{}\n", serde_json::to_string(&contradicts).unwrap())).unwrap();
        let text = format!("{:#}", read_jsonl(&path).unwrap_err());
        assert!(
            text.contains("x.jsonl line 2; with that line removed") && text.contains("contradicts itself"),
            "{text}"
        );
        std::fs::write(&path, "[".repeat(100_000) + "\n").unwrap();
        assert!(read_jsonl(&path).is_err());
        std::fs::write(&path, "{\"schema\":1}\n").unwrap();
        assert!(
            format!("{:#}", read_jsonl(&path).unwrap_err()).contains("schema 1 and this build reads schemas 2 to 4")
        );
        std::fs::write(&path, "schema,owners\n3,logits\n").unwrap();
        assert!(format!("{:#}", read_csv(&path).unwrap_err()).contains("row 1"));
        std::fs::write(&path, "schema,owners\n3\n").unwrap();
        assert!(read_csv(&path).is_err());
        assert!(read_csv(&dir.path().join("none.csv")).is_err());
        assert!(format!("{:#}", read_jsonl(Path::new("/dev/zero")).unwrap_err()).contains("no file"));
        assert!(format!("{:#}", read_jsonl(dir.path()).unwrap_err()).contains("no file"));
    }
}
