//! The flags of a sweep that say what a cell does and how often: workloads, and when repetitions end.

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::cli::{count, flat};
use crate::measure::Rules;

/// Seconds of a cell where a sweep names a model.
const CELL_SECONDS: f64 = 10.0;
/// Seconds of a cell of the bare sweep, which is to be over soon.
const BARE_CELL_SECONDS: f64 = 1.0;

/// What a cell does and how often.
#[derive(Debug, Clone, Args)]
pub(crate) struct CellArgs {
    /// What the sequences do: fixed, ladder, many-short, concurrent-prefill, mixed, or trace:FILE; a list, may be repeated, and
    /// is an axis too [default: fixed]
    #[arg(long = "workload", value_name = "NAME", value_delimiter = ',')]
    pub(crate) workloads: Vec<String>,
    /// What the prompts of a ladder (2048, 6144, 12288, 24576, 2048, 12288 tokens) are divided by
    #[arg(long, value_name = "N", default_value = "1", value_parser = flat(scale))]
    pub(crate) ladder_scale: u64,
    /// Repetitions end once half the 95 % interval of both medians, of prefill and TPOT, is this part of them, e.g. 0.5%
    #[arg(long, value_name = "PERCENT", default_value = "0.5%", value_parser = flat(percent))]
    pub(crate) precision: f64,
    /// No repetition of a cell begins after this long [default: 10, and 1 where no model is named]
    #[arg(long, value_name = "SECONDS", value_parser = flat(seconds))]
    pub(crate) cell_seconds: Option<f64>,
    /// This many repetitions of each cell, whatever their interval, unless the time is up before
    #[arg(long, value_name = "N", value_parser = flat(repetitions))]
    pub(crate) repetitions: Option<u64>,
}

impl CellArgs {
    /// When repetitions end; `bare` where no model is named.
    pub(crate) fn rules(&self, bare: bool) -> Rules {
        let usual = if bare { BARE_CELL_SECONDS } else { CELL_SECONDS };
        Rules { precision: self.precision, seconds: self.cell_seconds.unwrap_or(usual), repetitions: self.repetitions }
    }
}

fn number(text: &str) -> Result<f64> {
    let value: f64 = text.trim().parse().ok().with_context(|| format!("`{text}` is not a number"))?;
    ensure!(value.is_finite(), "`{text}` is not a number");
    Ok(value)
}

/// `0.5%`, or `0.5` of them, as a fraction.
fn percent(text: &str) -> Result<f64> {
    let value = number(text.trim().strip_suffix('%').unwrap_or(text))?;
    ensure!((0.01..=50.0).contains(&value), "{value} % is outside 0.01 % to 50 %");
    Ok(value / 100.0)
}

fn seconds(text: &str) -> Result<f64> {
    let value = number(text)?;
    ensure!((0.0..=86_400.0).contains(&value), "{value} s is outside 0 to 86400");
    Ok(value)
}

fn scale(text: &str) -> Result<u64> {
    count(text, 1, 1 << 16)
}

fn repetitions(text: &str) -> Result<u64> {
    count(text, 1, 100_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percents_and_seconds_are_bounded_numbers() {
        let (percent, seconds, scale, repetitions) = (flat(percent), flat(seconds), flat(scale), flat(repetitions));
        assert_eq!((percent("0.5%"), percent(" 2 "), percent("50%")), (Ok(0.005), Ok(0.02), Ok(0.5)));
        for text in ["0", "0%", "-1", "51", "NaN", "inf", "%", "", "1%%", "half"] {
            percent(text).expect_err(text);
        }
        assert_eq!((seconds("0"), seconds("2.5")), (Ok(0.0), Ok(2.5)));
        for text in ["-1", "NaN", "1e9", "", "1s"] {
            seconds(text).expect_err(text);
        }
        assert!(scale("0").is_err() && scale("64k") == Ok(1 << 16) && repetitions("100001").is_err());
    }
}
