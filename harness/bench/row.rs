//! One row: a kernel on a shape, its times, what they are held against, and where they come from.

use serde::{Serialize, Serializer};

use super::time::Samples;
use super::work::Checked;
use crate::hygiene::Conditions;
use crate::measure::LEVEL;
use crate::provenance::{CardFacts, Provenance};
use crate::stats::{Interval, Summary};
use crate::table::{Align, NULL, Table, number, or_null};

/// Version of the way kernels are timed.
pub(super) const METHOD: u32 = 2;
/// The device whose results the others are checked against.
const REFERENCE: &str = "cpu";
/// The seed of every interval: the same samples give the same one.
const SEED: u64 = 1;

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
    /// The 95 % bootstrap interval of the median.
    pub(super) low_us: Option<f64>,
    pub(super) high_us: Option<f64>,
    pub(super) samples: Option<u64>,
    /// Samples thrown away because the card was disturbed, and what disturbed those that stand, where clean ones were too few.
    pub(super) dirty_samples: Option<u64>,
    pub(super) dirty: Option<String>,
    /// Calls of one sample, and how they were launched.
    pub(super) calls: Option<u64>,
    pub(super) via: &'static str,
    pub(super) bytes: Option<u64>,
    pub(super) flops: Option<u64>,
    /// Operations by the fewest bytes.
    pub(super) flop_per_byte: Option<f64>,
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
    /// Of rounded values: the largest difference, that by the largest value of the CPU arm, and the cosine.
    pub(super) largest_difference: Option<f64>,
    pub(super) relative_difference: Option<f64>,
    pub(super) cosine: Option<f64>,
    /// Tokens drawn to see how often each is, and how far that is from the probabilities.
    pub(super) draws: Option<u64>,
    pub(super) draw_sigma: Option<f64>,
    pub(super) note: Option<String>,
    pub(super) card: String,
    pub(super) arch: String,
    pub(super) device: String,
    pub(super) gpu: Option<String>,
    pub(super) uuid: Option<String>,
    pub(super) pci: Option<String>,
    pub(super) driver: Option<String>,
    pub(super) cuda: Option<String>,
    pub(super) ecc: Option<bool>,
    pub(super) power_limit_w: Option<f64>,
    /// The card while the row was measured.
    pub(super) sm_clock_mhz: Option<f64>,
    pub(super) sm_clock_least_mhz: Option<f64>,
    pub(super) memory_clock_mhz: Option<f64>,
    pub(super) power_w: Option<f64>,
    pub(super) temperature_c: Option<f64>,
    pub(super) throttled: Option<String>,
    pub(super) foreign_processes: Option<u64>,
    pub(super) cpu: Option<String>,
    pub(super) cores: Option<u64>,
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
    /// The samples, a JSON list.
    #[serde(serialize_with = "as_json")]
    pub(super) samples_us: Vec<f64>,
}

/// A field that is itself a list, to a ten-thousandth of a microsecond; empty where there is none.
fn as_json<S: Serializer>(samples: &[f64], to: S) -> Result<S::Ok, S::Error> {
    if samples.is_empty() {
        return to.serialize_str("");
    }
    let rounded: Vec<f64> = samples.iter().map(|us| (us * 1e4).round() / 1e4).collect();
    to.serialize_str(&serde_json::to_string(&rounded).map_err(serde::ser::Error::custom)?)
}

impl Row {
    /// Writes the bytes and operations of one call.
    pub(super) fn set_cost(&mut self, bytes: u64, flops: u64) {
        (self.bytes, self.flops) = (Some(bytes), Some(flops));
        self.flop_per_byte = (bytes > 0).then(|| flops as f64 / bytes as f64);
    }

    /// Writes the times of one call.
    pub(super) fn set_times(&mut self, samples: &Samples) {
        let Some(summary) = Summary::of(&samples.seconds) else { return };
        self.samples_us = samples.seconds.iter().map(|seconds| seconds * 1e6).collect();
        let interval = Interval::of_median(&self.samples_us, LEVEL, SEED);
        (self.low_us, self.high_us) = interval.map(|interval| (interval.low, interval.high)).unzip();
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

    /// Writes how the result agrees with the CPU arm.
    pub(super) fn set_checked(&mut self, checked: &Checked) {
        self.checked = Some(checked.passed());
        (self.check_error, self.check_bound) = (Some(checked.error), Some(checked.bound));
        self.largest_difference = checked.apart.map(|apart| apart.largest);
        self.relative_difference = checked.apart.map(|apart| apart.relative);
        self.cosine = checked.apart.map(|apart| apart.cosine);
        self.draws = checked.drawn.map(|drawn| drawn.draws);
        self.draw_sigma = checked.drawn.map(|drawn| drawn.sigma);
        if let Some(drawn) = checked.drawn.filter(|drawn| !drawn.passed()) {
            self.note = Some(format!("tokens are not drawn as often as they should be: {:.1} sigma", drawn.sigma));
        }
    }

    /// Writes how the card was, and what of the samples that cost.
    pub(super) fn set_conditions(&mut self, conditions: Conditions, samples: &Samples) {
        (self.dirty_samples, self.dirty) = (Some(samples.thrown), samples.dirty.clone());
        self.sm_clock_mhz = conditions.sm_clock_mhz;
        self.sm_clock_least_mhz = conditions.sm_clock_least_mhz;
        self.memory_clock_mhz = conditions.memory_clock_mhz;
        self.power_w = conditions.power_w;
        self.temperature_c = conditions.temperature_c;
        self.throttled = conditions.throttled;
        self.foreign_processes = conditions.foreign_processes;
    }

    /// Writes where the row comes from.
    pub(super) fn stamp(&mut self, provenance: &Provenance, facts: &CardFacts) {
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
        self.gpu.clone_from(&facts.gpu);
        self.cpu.clone_from(&provenance.cpu);
        self.cores = provenance.cores;
    }
}

/// The table for people. A row that was not checked says `no`, unless it is of the reference arm, which checks the others.
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
        ("FLOP/B", Right),
        ("% of ceiling", Right),
        ("bound by", Left),
        ("peer us", Right),
        ("peer / ours", Right),
        ("checked", Left),
        ("dirty", Left),
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
            or_null(row.flop_per_byte.filter(|intensity| *intensity > 0.0), number),
            or_null(row.percent_of_ceiling, |percent| format!("{percent:.0}")),
            or_null(row.bound_by, str::to_owned),
            or_null(row.peer_median_us, number),
            or_null(against, |ratio| format!("{ratio:.2}")),
            match row.checked {
                Some(true) => "yes".into(),
                Some(false) => format!("WRONG by {}", or_null(row.check_error, number)),
                None if row.device == REFERENCE => NULL.into(),
                None => "no".into(),
            },
            or_null(row.dirty.clone(), |dirty| dirty),
            or_null(row.note.clone(), |note| note),
        ]);
    }
    table.without_empty_columns()
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
            ..Row::default()
        };
        row.set_cost(178_000_000, 356_515_840);
        row.set_times(&Samples { seconds: vec![50e-6, 52e-6, 51e-6, 49e-6, 60e-6], ..Samples::default() });
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
        let lines = |device: &str| {
            let text = table(&[Row { checked: None, device: device.into(), ..row.clone() }, row.clone()]).text();
            text.lines().nth(1).unwrap_or_default().trim_end().to_owned()
        };
        assert!(lines("cuda:0").ends_with("no") && lines(REFERENCE).ends_with('-'), "{}", lines(REFERENCE));
    }

    #[test]
    fn samples_are_kept_with_their_interval_and_the_arithmetic_has_its_intensity() {
        let row = row();
        assert_eq!(row.samples_us.len(), 5);
        assert!(row.low_us.unwrap() < 51.0 && row.high_us.unwrap() > 51.0, "{row:?}");
        assert!((row.flop_per_byte.unwrap() - 356_515_840.0 / 178_000_000.0).abs() < 1e-12);
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.serialize(&Row { samples_us: vec![1.25, 0.333_333_3], ..row }).unwrap();
        let text = String::from_utf8(writer.into_inner().unwrap()).unwrap();
        assert!(text.ends_with(",\"[1.25,0.3333]\"\n"), "{text}");
    }

    #[test]
    fn a_disturbed_card_is_a_column() {
        let mut row = row();
        let conditions =
            Conditions { sm_clock_mhz: Some(1725.0), throttled: Some("heat".into()), ..Conditions::default() };
        let samples = Samples { thrown: 16, dirty: Some("heat".into()), ..Samples::default() };
        row.set_conditions(conditions, &samples);
        assert_eq!((row.dirty_samples, row.sm_clock_mhz), (Some(16), Some(1725.0)));
        assert!(table(&[row]).text().contains("heat"));
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
        row.stamp(&provenance, &facts);
        assert_eq!((row.rustc, row.cargo_flags, row.method), (provenance.rustc, provenance.cargo_flags, METHOD));
        assert_eq!((row.cuda, row.uuid, row.pci), (facts.cuda, facts.uuid, facts.pci));
        assert_eq!((row.ecc, row.power_limit_w), (Some(true), Some(700.0)));
        assert_eq!((row.nvrtc, row.nvrtc_options), (facts.nvrtc, facts.nvrtc_options));
    }
}
