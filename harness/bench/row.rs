//! One row: a kernel on a shape, its times, what they are held against, and where they come from.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::nvml::Moment;
use crate::provenance::{CardFacts, Provenance};
use crate::stats::Summary;
use crate::table::{Align, Table, number, or_null};

/// Version of the way kernels are timed.
const METHOD: u32 = 1;

/// A row. Fields without a value are empty in the CSV.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Row {
    pub(super) kernel: String,
    pub(super) model: String,
    pub(super) part: String,
    pub(super) scheme: String,
    /// Rows or sequences.
    pub(super) m: u64,
    /// `rotate`, `flush` or `warm`, and how many times the L2 the operands fill that are gone round. (`cold` of earlier files:
    /// gone round past twice the L2.)
    pub(super) cache: &'static str,
    pub(super) rotation_of_l2: Option<f64>,
    pub(super) median_us: Option<f64>,
    pub(super) q1_us: Option<f64>,
    pub(super) q3_us: Option<f64>,
    pub(super) min_us: Option<f64>,
    pub(super) samples: Option<u64>,
    /// Calls of one sample, and how they were launched.
    pub(super) calls: Option<u64>,
    pub(super) via: &'static str,
    pub(super) bytes: Option<u64>,
    pub(super) flops: Option<u64>,
    pub(super) gb_s: Option<f64>,
    pub(super) tflop_s: Option<f64>,
    /// The ceiling of such a call measured in the same process, what sets it, and the share of it reached.
    pub(super) ceiling_us: Option<f64>,
    pub(super) bound_by: Option<&'static str>,
    pub(super) percent_of_ceiling: Option<f64>,
    pub(super) peer: Option<&'static str>,
    pub(super) peer_median_us: Option<f64>,
    /// Whether some rows of the result agree with the CPU arm; empty where that was not looked at.
    pub(super) checked: Option<bool>,
    pub(super) check_error: Option<f64>,
    pub(super) check_bound: Option<f64>,
    pub(super) note: Option<String>,
    pub(super) card: String,
    pub(super) arch: String,
    pub(super) device: String,
    pub(super) uuid: Option<String>,
    pub(super) pci: Option<String>,
    pub(super) driver: Option<String>,
    pub(super) cuda: Option<String>,
    pub(super) ecc: Option<bool>,
    pub(super) power_limit_w: Option<f64>,
    pub(super) sm_clock_mhz: Option<u32>,
    pub(super) memory_clock_mhz: Option<u32>,
    pub(super) power_w: Option<f64>,
    pub(super) temperature_c: Option<u32>,
    /// What held the clocks, joined by `+`.
    pub(super) throttled: Option<String>,
    pub(super) time: String,
    pub(super) run: String,
    pub(super) version: String,
    pub(super) git_sha: Option<String>,
    pub(super) git_dirty: Option<bool>,
    pub(super) binary_hash: Option<String>,
    pub(super) profile: String,
    /// The compiler of this program and what cargo gave it; that of the kernels, where there is a card, and what it was given.
    pub(super) rustc: Option<String>,
    pub(super) cargo_flags: String,
    pub(super) nvrtc: Option<String>,
    pub(super) nvrtc_options: Option<String>,
    /// [`METHOD`] of the writer.
    pub(super) method: u32,
    pub(super) argv: String,
}

impl Row {
    /// Writes the times of one call, in seconds.
    pub(super) fn set_times(&mut self, seconds: &[f64]) {
        let Some(summary) = Summary::of(seconds) else { return };
        let us = |seconds: f64| Some(seconds * 1e6);
        self.median_us = us(summary.median);
        self.q1_us = us(summary.q1);
        self.q3_us = us(summary.q3);
        self.min_us = us(summary.min);
        self.samples = Some(summary.count);
        self.gb_s = self.bytes.map(|bytes| bytes as f64 / summary.median / 1e9);
        self.tflop_s = self.flops.filter(|flops| *flops > 0).map(|flops| flops as f64 / summary.median / 1e12);
    }

    /// Writes the ceiling of one call, in seconds.
    pub(super) fn set_ceiling(&mut self, seconds: f64, bound_by: &'static str) {
        self.ceiling_us = Some(seconds * 1e6);
        self.bound_by = Some(bound_by);
        self.percent_of_ceiling = self.median_us.map(|median| 100.0 * seconds * 1e6 / median);
    }

    /// Writes where the row comes from.
    pub(super) fn stamp(&mut self, provenance: &Provenance, facts: &CardFacts, moment: Option<Moment>) {
        self.method = METHOD;
        self.run.clone_from(&provenance.run);
        self.version.clone_from(&provenance.version);
        self.git_sha.clone_from(&provenance.git_sha);
        self.git_dirty = provenance.git_dirty;
        self.binary_hash.clone_from(&provenance.binary_hash);
        self.profile.clone_from(&provenance.profile);
        self.rustc.clone_from(&provenance.rustc);
        self.cargo_flags.clone_from(&provenance.cargo_flags);
        self.argv.clone_from(&provenance.argv);
        self.time = crate::provenance::rfc3339_utc(std::time::SystemTime::now());
        self.uuid.clone_from(&facts.uuid);
        self.pci.clone_from(&facts.pci);
        self.cuda.clone_from(&facts.cuda);
        self.ecc = facts.ecc;
        self.power_limit_w = facts.power_limit_w;
        self.nvrtc.clone_from(&facts.nvrtc);
        self.nvrtc_options.clone_from(&facts.nvrtc_options);
        let Some(moment) = moment else { return };
        self.sm_clock_mhz = moment.sm_clock_mhz;
        self.memory_clock_mhz = moment.memory_clock_mhz;
        self.power_w = moment.power_w;
        self.temperature_c = moment.temperature_c;
        self.throttled = moment.throttled.map(|reasons| reasons.join("+"));
    }
}

/// The table for people. A row that was not checked says `no`.
pub(super) fn table(rows: &[Row]) -> Table {
    use Align::{Left, Right};
    let mut table = Table::new(&[
        ("kernel", Left),
        ("model", Left),
        ("part", Left),
        ("stored", Left),
        ("M", Right),
        ("us", Right),
        ("q1-q3", Right),
        ("n", Right),
        ("GB/s", Right),
        ("TFLOP/s", Right),
        ("% of ceiling", Right),
        ("bound by", Left),
        ("peer us", Right),
        ("peer / ours", Right),
        ("checked", Left),
        ("note", Left),
    ]);
    for row in rows {
        let quartiles = row.q1_us.zip(row.q3_us);
        let against = row.peer_median_us.zip(row.median_us).map(|(peer, ours)| peer / ours);
        table.push(vec![
            row.kernel.clone(),
            row.model.clone(),
            row.part.clone(),
            row.scheme.clone(),
            row.m.to_string(),
            or_null(row.median_us, number),
            or_null(quartiles, |(q1, q3)| format!("{}-{}", number(q1), number(q3))),
            or_null(row.samples, |n| n.to_string()),
            or_null(row.gb_s, number),
            or_null(row.tflop_s, number),
            or_null(row.percent_of_ceiling, |percent| format!("{percent:.0}")),
            or_null(row.bound_by, str::to_owned),
            or_null(row.peer_median_us, number),
            or_null(against, |ratio| format!("{ratio:.2}")),
            match row.checked {
                Some(true) => "yes".into(),
                Some(false) => format!("WRONG by {}", or_null(row.check_error, number)),
                None => "no".into(),
            },
            or_null(row.note.clone(), |note| note),
        ]);
    }
    table.without_empty_columns()
}

/// The CSV of a run, written anew after each row: what was measured is there, whatever happens next.
#[derive(Debug)]
pub(super) struct File {
    path: PathBuf,
}

impl File {
    /// `DIR/CARD/kernels.csv`, and beside it what its columns mean, made now, so that a folder that cannot be written fails
    /// before anything is measured.
    pub(super) fn create(dir: &Path, card: &str, definitions: &str) -> Result<File> {
        let folder = dir.join(card);
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let path = folder.join("kernels.DEFINITIONS.txt");
        std::fs::write(&path, definitions).with_context(|| format!("cannot write {}", path.display()))?;
        let file = File { path: folder.join("kernels.csv") };
        file.write(&[])?;
        Ok(file)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn write(&self, rows: &[Row]) -> Result<()> {
        let mut writer = csv::Writer::from_writer(Vec::new());
        rows.iter().try_for_each(|row| writer.serialize(row))?;
        let text = writer.into_inner().map_err(|e| anyhow::anyhow!("{e}"))?;
        let beside = self.path.with_extension("csv.partial");
        std::fs::write(&beside, text).with_context(|| format!("cannot write {}", beside.display()))?;
        std::fs::rename(&beside, &self.path).with_context(|| format!("cannot write {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        let mut row = Row {
            kernel: "linear".into(),
            model: "qwen3.6-27b".into(),
            part: "gate_up".into(),
            scheme: "fp8-channel".into(),
            m: 1,
            bytes: Some(178_000_000),
            flops: Some(356_515_840),
            ..Row::default()
        };
        row.set_times(&[50e-6, 52e-6, 51e-6, 49e-6, 60e-6]);
        row
    }

    #[test]
    fn rates_are_of_the_median_and_the_ceiling_is_a_share() {
        let mut row = row();
        assert_eq!((row.median_us, row.samples), (Some(51.0), Some(5)));
        assert!((row.gb_s.unwrap() - 3490.2).abs() < 0.1);
        row.set_ceiling(40.8e-6, "memory");
        assert!((row.percent_of_ceiling.unwrap() - 80.0).abs() < 1e-9);
        row.checked = Some(true);
        row.peer_median_us = Some(102.0);
        let text = table(&[row.clone()]).text();
        assert!(text.contains("fp8-channel  1  51.00") && text.contains("2.00") && text.contains("memory"), "{text}");
        let wrong = Row { checked: Some(false), check_error: Some(1.0), ..row.clone() };
        assert!(table(&[wrong]).text().contains("WRONG by 1.000"));
        assert!(table(&[Row { checked: None, ..row }]).text().contains("no"));
    }

    #[test]
    fn the_file_is_there_from_the_start_and_holds_every_row() {
        let dir = tempfile::tempdir().unwrap();
        let file = File::create(dir.path(), "h200", "us: a time\n").unwrap();
        assert!(file.path().ends_with("h200/kernels.csv") && file.path().is_file());
        assert_eq!(std::fs::read_to_string(dir.path().join("h200/kernels.DEFINITIONS.txt")).unwrap(), "us: a time\n");
        file.write(&[row(), Row { note: Some("a, \"b\"".into()), ..row() }]).unwrap();
        let mut reader = csv::Reader::from_path(file.path()).unwrap();
        let column = reader.headers().unwrap().iter().position(|name| name == "note").unwrap();
        let records: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
        assert_eq!((records.len(), &records[0][column], &records[1][column]), (2, "", "a, \"b\""));
        std::fs::write(dir.path().join("plain"), "").unwrap();
        assert!(File::create(&dir.path().join("plain"), "h200", "").is_err());
    }

    #[test]
    fn a_row_says_which_card_and_which_compilers_it_is_of() {
        let facts = CardFacts {
            cuda: Some("13.0".into()),
            uuid: Some("ab".into()),
            pci: Some("0000:1B:00.0".into()),
            ecc: Some(true),
            power_limit_w: Some(700.0),
            nvrtc: Some("13.0".into()),
            nvrtc_options: Some("--std=c++17".into()),
            ..CardFacts::default()
        };
        let (provenance, mut row) = (Provenance::gather(), row());
        row.stamp(&provenance, &facts, None);
        assert_eq!((row.rustc, row.cargo_flags, row.method), (provenance.rustc, provenance.cargo_flags, METHOD));
        assert_eq!((row.cuda, row.uuid, row.pci), (facts.cuda, facts.uuid, facts.pci));
        assert_eq!((row.ecc, row.power_limit_w), (Some(true), Some(700.0)));
        assert_eq!((row.nvrtc, row.nvrtc_options), (facts.nvrtc, facts.nvrtc_options));
    }
}
