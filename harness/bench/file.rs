//! `kernels.csv` of a card: rows that are measured take the place of the same rows in it, the others stay as they are, each
//! with where it comes from. It is written anew after each row, whole or not at all.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::row::Row;
use crate::hold::{Held, hold};
use crate::planned::replace;

/// The file's name.
pub(crate) const NAME: &str = "kernels.csv";
/// What a row is of: equal in all of these are the same row.
const KEY: [&str; 6] = ["kernel", "model", "part", "scheme", "m", "cache"];

/// The table of a card, held for this process.
#[derive(Debug)]
pub(super) struct File {
    path: PathBuf,
    /// Of this program's rows, then those that only rows of other builds have.
    columns: Vec<String>,
    /// What is there, by `columns`.
    records: Vec<Vec<String>>,
    _held: Held,
}

impl File {
    /// `DIR/CARD/kernels.csv`, and beside it what its columns mean, made now, so that a folder that cannot be written and a
    /// table that cannot be read fail before anything is measured.
    pub(super) fn open(dir: &Path, card: &str, definitions: &str) -> Result<File> {
        let folder = dir.join(card);
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let held = hold(&folder).with_context(|| format!("cannot have {} to write to", folder.display()))?;
        let path = folder.join(NAME);
        let mut file = File { path, columns: fields(&Row::default())?.0, records: Vec::new(), _held: held };
        if file.path.exists() {
            file.read().with_context(|| {
                format!("{} cannot be added to; move it away, or write elsewhere with --out", file.path.display())
            })?;
        }
        let beside = folder.join("kernels.DEFINITIONS.txt");
        replace(&beside, |to| Ok(to.write_all(definitions.as_bytes())?))?;
        file.write()?;
        Ok(file)
    }

    fn read(&mut self) -> Result<()> {
        let mut reader = csv::Reader::from_path(&self.path)?;
        let header = reader.headers()?.clone();
        if header.is_empty() {
            return Ok(());
        }
        let unknown = KEY.iter().find(|name| !header.iter().any(|column| column == **name));
        ensure!(unknown.is_none(), "it is no table of kernels: it has no column `{}`", unknown.unwrap_or(&""));
        let others = header.iter().filter(|name| !self.columns.iter().any(|column| column == name));
        let others: Vec<String> = others.map(str::to_owned).collect();
        self.columns.extend(others);
        for record in reader.records() {
            let record = record?;
            let field = |name: &String| {
                let at = header.iter().position(|column| column == name);
                at.and_then(|at| record.get(at)).unwrap_or_default().to_owned()
            };
            self.records.push(self.columns.iter().map(field).collect());
        }
        Ok(())
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes `row` in the place of the same row where there is one, else after all others.
    pub(super) fn put(&mut self, row: &Row) -> Result<()> {
        let mut record = fields(row)?.1;
        record.resize(self.columns.len(), String::new());
        match self.records.iter().position(|other| self.key(other) == self.key(&record)) {
            Some(at) => self.records[at] = record,
            None => self.records.push(record),
        }
        self.write()
    }

    fn write(&self) -> Result<()> {
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.write_record(&self.columns)?;
        self.records.iter().try_for_each(|record| writer.write_record(record))?;
        let text = writer.into_inner().context("the rows are no CSV")?;
        replace(&self.path, |to| Ok(to.write_all(&text)?))
    }

    fn key<'a>(&self, record: &'a [String]) -> Vec<&'a str> {
        let of = |name: &&str| {
            let at = self.columns.iter().position(|column| column == name);
            at.and_then(|at| record.get(at)).map_or("", String::as_str)
        };
        KEY.iter().map(of).collect()
    }
}

/// The columns of a row, and its fields.
fn fields(row: &Row) -> Result<(Vec<String>, Vec<String>)> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.serialize(row)?;
    let text = writer.into_inner().context("a row is no CSV")?;
    let mut reader = csv::Reader::from_reader(text.as_slice());
    let columns = reader.headers()?.iter().map(str::to_owned).collect();
    let record = reader.records().next().context("a row is no CSV")??;
    Ok((columns, record.iter().map(str::to_owned).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(kernel: &str, m: u64, us: f64, cache: &'static str) -> Row {
        Row { kernel: kernel.into(), m, median_us: Some(us), cache, run: format!("run of {us}"), ..Row::default() }
    }

    fn column(path: &Path, name: &str) -> Vec<String> {
        let mut reader = csv::Reader::from_path(path).unwrap();
        let at = reader.headers().unwrap().iter().position(|column| column == name).unwrap();
        reader.records().map(|record| record.unwrap()[at].to_owned()).collect()
    }

    #[test]
    fn the_file_is_there_from_the_start_and_holds_every_row() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = File::open(dir.path(), "h200", "us: a time\n").unwrap();
        assert!(file.path().ends_with("h200/kernels.csv") && column(file.path(), "kernel").is_empty());
        assert_eq!(std::fs::read_to_string(dir.path().join("h200/kernels.DEFINITIONS.txt")).unwrap(), "us: a time\n");
        file.put(&Row { note: Some("a, \"b\"".into()), ..row("norm", 1, 2.0, "warm") }).unwrap();
        assert_eq!(column(file.path(), "note"), ["a, \"b\""]);
        std::fs::write(dir.path().join("plain"), "").unwrap();
        assert!(File::open(&dir.path().join("plain"), "h200", "").is_err());
    }

    #[test]
    fn rows_take_the_place_of_the_same_rows_and_the_others_stay_with_what_they_say() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("h200/kernels.csv");
        let mut first = File::open(dir.path(), "h200", "").unwrap();
        for row in [row("norm", 1, 2.0, "rotate"), row("norm", 8, 3.0, "rotate"), row("rows", 1, 4.0, "rotate")] {
            first.put(&row).unwrap();
        }
        drop(first);
        // A column of another build is nobody's to drop.
        let text = std::fs::read_to_string(&path).unwrap();
        let widened: Vec<String> = text
            .lines()
            .enumerate()
            .map(|(at, line)| format!("{line},{}", if at == 0 { "old" } else { "kept" }))
            .collect();
        std::fs::write(&path, widened.join("\n")).unwrap();
        let mut second = File::open(dir.path(), "h200", "").unwrap();
        assert_eq!(column(&path, "median_us"), ["2.0", "3.0", "4.0"], "nothing is lost before the first row");
        second.put(&row("norm", 8, 30.0, "rotate")).unwrap();
        second.put(&row("norm", 8, 5.0, "warm")).unwrap();
        assert_eq!(column(&path, "median_us"), ["2.0", "30.0", "4.0", "5.0"]);
        assert_eq!(column(&path, "run"), ["run of 2", "run of 30", "run of 4", "run of 5"]);
        assert_eq!(column(&path, "old"), ["kept", "", "kept", ""]);
        let refused = format!("{:#}", File::open(dir.path(), "h200", "").unwrap_err());
        assert!(refused.contains("another sweep writes into"), "{refused}");
    }

    #[test]
    fn a_table_that_cannot_be_read_is_left_as_it_is() {
        for text in ["a,b\n1,2\n", "kernel,model,part,scheme,m,cache\nnorm,x\n"] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("h200/kernels.csv");
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
            let refused = format!("{:#}", File::open(dir.path(), "h200", "").unwrap_err());
            assert!(refused.contains("cannot be added to; move it away"), "{refused}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
    }
}
