//! The command line of `gate`.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::axis::MAX_TOKENS;
use crate::cli::{DeviceChoice, Numerics, Target, batch, chunk, count, flat, positive};

/// What follows the flags in `gate --help`.
pub(crate) const GATE_HELP: &str = "\
Verdicts: SLOWER and FASTER where the interval of the ratio of medians (99.8 %, bootstrap) does not hold 1 and the effect is \
over the threshold and over an absolute floor (2 us of a step or of a kernel called by itself, 50 ns of a criterion call); \
SAME where the interval lies within them and is known to +-1 % or better; INCONCLUSIVE otherwise, with the next command to \
run. At least 10 repetitions on either side are needed, at SM clocks no more than 5 % apart.

Bytes of the slab and the OOM frontier are exact: any growth is a regression. Memory outside the slab may grow by 16 MiB, \
which a driver takes by itself, and no more than that may be unattributed. A cell that gains memory and loses speed, or the reverse, \
is named a trade. To accept a change, copy the candidate's folder over the baseline's: there is no other blessing.

Exit codes: 0 nothing is worse; 1 a cell failed or is missing, or the runs cannot be compared; 2 usage; 3 slower; 4 more \
memory, or a cell that fitted and does not now (before 3, and both before 1); 5 with --strict: something is inconclusive, or \
the runs' cards, drivers or methods differ.";

/// How two runs are judged, and where that is said: flags of `gate` and of `ab`.
#[derive(Debug, Args)]
pub(crate) struct JudgeArgs {
    /// Effects up to this are no regression
    #[arg(long, value_name = "PERCENT", value_parser = flat(percent), default_value = "1%")]
    pub(crate) threshold: f64,
    /// End with 5 where something is inconclusive or was measured otherwise
    #[arg(long)]
    pub(crate) strict: bool,
    /// Compare what is of other cards, drivers, methods or kinds of build all the same
    #[arg(long)]
    pub(crate) force: bool,
    /// Write the table and the findings as Markdown too
    #[arg(long, value_name = "FILE.md", value_parser = flat(markdown_file))]
    pub(crate) markdown: Option<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// `gate`.
#[derive(Debug, Args)]
pub(crate) struct GateArgs {
    /// The run to hold to: a folder of `sweep --out`, or its sweep.jsonl or sweep.csv; or of `bench --out`, or its kernels.csv
    #[arg(required_unless_present_any = ["criterion", "self_test"], conflicts_with_all = ["criterion", "self_test"])]
    pub(crate) baseline: Option<PathBuf>,
    /// The run to judge
    #[arg(required_unless_present_any = ["criterion", "self_test"])]
    pub(crate) candidate: Option<PathBuf>,
    /// Judge what `cargo bench` left in this folder (target/criterion), which ends with 0 whatever it finds
    #[arg(long, value_name = "DIR", conflicts_with = "self_test")]
    pub(crate) criterion: Option<PathBuf>,
    /// The saved baseline of criterion, as `cargo bench -- --save-baseline NAME` names it [default: base]
    #[arg(long = "baseline", id = "saved", value_name = "NAME")]
    pub(crate) saved: Option<String>,
    #[command(flatten)]
    pub(crate) judge: JudgeArgs,
    /// The candidate holds some of the baseline's cells: those it lacks are no failures
    #[arg(long)]
    pub(crate) subset: bool,
    /// Judge this program on this machine: N comparisons of one build with itself and N with a seeded slowdown of 3 %,
    /// interleaved, and the bytes of each; writes self-test.csv and self-test.json
    #[arg(long, value_name = "N", value_parser = flat(comparisons))]
    pub(crate) self_test: Option<usize>,
    #[command(flatten)]
    pub(crate) probe: ProbeArgs,
}

/// The cell of a self-test. Values that were not named are `None`, so that one named without a self-test is seen.
#[derive(Debug, Args)]
#[command(next_help_heading = "Self-test")]
pub(crate) struct ProbeArgs {
    /// A checkpoint folder, or GEOMETRY[:layers=N][@RECIPE] [default: tiny@bf16]
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<String>,
    /// Prefill token budget of a step [default: 64]
    #[arg(long, value_name = "TOKENS", value_parser = flat(chunk))]
    pub(crate) chunk: Option<u64>,
    /// Sequences [default: 1]
    #[arg(long, value_name = "N", value_parser = flat(batch))]
    pub(crate) batch: Option<u64>,
    /// Tokens of each sequence already in the cache [default: 0]
    #[arg(long, value_name = "TOKENS", value_parser = flat(depth))]
    pub(crate) depth: Option<u64>,
    /// Prompt tokens of each sequence [default: the chunk]
    #[arg(long, value_name = "TOKENS", value_parser = flat(positive))]
    pub(crate) prompt: Option<u64>,
    /// Tokens each sequence generates [default: 16]
    #[arg(long, value_name = "TOKENS", value_parser = flat(outputs))]
    pub(crate) output: Option<u64>,
    /// Repetitions on either side of a comparison [default: 12]
    #[arg(long, value_name = "N", value_parser = flat(repetitions))]
    pub(crate) repetitions: Option<usize>,
    /// Folder of the self-test's files [default: highwater-out/RUN]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) target: Target,
    #[command(flatten)]
    pub(crate) numerics: Numerics,
}

/// What a self-test runs, defaults filled in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    /// Prefill token budget of a step.
    pub(crate) chunk: u64,
    /// Sequences.
    pub(crate) batch: u64,
    /// Tokens of each sequence already in the cache.
    pub(crate) depth: u64,
    /// Prompt tokens of each sequence.
    pub(crate) prompt: u64,
    /// Tokens each sequence generates.
    pub(crate) output: u64,
    /// Repetitions on either side of a comparison.
    pub(crate) repetitions: usize,
}

impl ProbeArgs {
    /// The cell, defaults filled in.
    pub(crate) fn cell(&self) -> Asked {
        let chunk = self.chunk.unwrap_or(64);
        Asked {
            chunk,
            batch: self.batch.unwrap_or(1),
            depth: self.depth.unwrap_or(0),
            prompt: self.prompt.unwrap_or(chunk),
            output: self.output.unwrap_or(16),
            repetitions: self.repetitions.unwrap_or(12),
        }
    }

    /// Whether anything of it is named.
    fn is_named(&self) -> bool {
        let (target, numerics) = (&self.target, &self.numerics);
        let cell = [self.chunk, self.batch, self.depth, self.prompt, self.output, target.budget.vram];
        cell.iter().any(Option::is_some)
            || self.model.is_some()
            || self.repetitions.is_some()
            || self.out.is_some()
            || target.device != DeviceChoice::Auto
            || target.card.is_some()
            || target.budget.kv_tokens.is_some()
            || numerics.dtype.is_some()
            || numerics.kv_dtype.is_some()
            || numerics.act_quant.is_some()
            || numerics.batch_invariant
            || numerics.seed != 0
            || numerics.fault.is_some()
    }
}

impl GateArgs {
    /// Refuses flags of one form of `gate` beside another: they would say something that is not done.
    pub(crate) fn check(&self) -> Result<()> {
        ensure!(
            self.self_test.is_some() || !self.probe.is_named(),
            "the model, the cell, the place and --out are of --self-test alone"
        );
        ensure!(self.criterion.is_some() || self.saved.is_none(), "--baseline is of --criterion alone");
        let runs = self.baseline.is_some();
        ensure!(runs || !self.judge.force, "--force is of two runs");
        ensure!(self.self_test.is_none() || !self.subset, "--subset is of two runs and of --criterion");
        ensure!(
            self.self_test.is_none() || self.judge.markdown.is_none(),
            "--markdown is of two runs and of --criterion"
        );
        Ok(())
    }
}

/// `1%` as 0.01.
pub(crate) fn percent(text: &str) -> Result<f64> {
    let number = text.trim().strip_suffix('%').with_context(|| format!("`{text}` is no percentage such as 1%"))?;
    let value: f64 = number.trim().parse().ok().with_context(|| format!("`{text}` is no percentage such as 1%"))?;
    ensure!(value.is_finite() && (0.0..=100.0).contains(&value), "{text} is outside 0% to 100%");
    Ok(value / 100.0)
}

/// A file for Markdown: a slip of the hand must not put a table in the place of a record.
fn markdown_file(text: &str) -> Result<PathBuf> {
    let path = PathBuf::from(text);
    let named = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("md"));
    ensure!(named, "{text} is not a .md file");
    Ok(path)
}

fn comparisons(text: &str) -> Result<usize> {
    count(text, 1, 10_000).map(|n| n as usize)
}

fn repetitions(text: &str) -> Result<usize> {
    count(text, crate::verdict::LEAST_SAMPLES as u64, 1000).map(|n| n as usize)
}

/// Two tokens at least: the first is the prefill's.
fn outputs(text: &str) -> Result<u64> {
    count(text, 2, MAX_TOKENS)
}

fn depth(text: &str) -> Result<u64> {
    count(text, 0, MAX_TOKENS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Verb};
    use clap::Parser as _;

    fn parse(line: &str) -> Result<GateArgs, clap::Error> {
        let words = std::iter::once("highwater").chain(line.split_whitespace());
        match Cli::try_parse_from(words)?.verb {
            Verb::Gate(args) => Ok(args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_three_forms_are_told_apart() {
        let runs = parse("gate a b --threshold 2.5% --strict").unwrap();
        assert_eq!((runs.judge.threshold, runs.judge.strict, runs.candidate.is_some()), (0.025, true, true));
        let criterion = parse("gate --criterion target/criterion").unwrap();
        assert_eq!((criterion.saved, criterion.baseline), (None, None));
        let probe = parse("gate --self-test 20 --device cpu --model tiny --repetitions 10").unwrap();
        assert_eq!((probe.self_test, probe.probe.repetitions), (Some(20), Some(10)));
        for line in [
            "gate",
            "gate a",
            "gate a b --criterion c",
            "gate a b --self-test 3",
            "gate --criterion c --self-test 3",
            "gate a b --threshold 1",
            "gate a b --threshold -1%",
            "gate a b --threshold NaN%",
            "gate --self-test 0",
            "gate --self-test 9 --repetitions 9",
            "gate --self-test 9 --output 1",
        ] {
            assert_eq!(parse(line).expect_err(line).exit_code(), 2, "{line}");
        }
        for line in [
            "gate a b --model tiny",
            "gate a b --output 9",
            "gate a b --device cpu",
            "gate a b --baseline main",
            "gate --criterion c --force",
            "gate --self-test 9 --subset",
            "gate --self-test 9 --markdown m.md",
        ] {
            assert!(parse(line).unwrap().check().unwrap_err().to_string().contains(" is of ") || line.contains("a b"));
        }
        for line in ["gate a b --force --subset --markdown m.md", "gate --criterion c --baseline main --subset"] {
            parse(line).unwrap().check().unwrap();
        }
    }

    #[test]
    fn the_help_names_the_numbers_of_the_verdicts() {
        use crate::verdict::{LEAST_SAMPLES, LEVEL, MOST_HALF_WIDTH, STEP_FLOOR_MS};
        for text in [
            format!("{} %, bootstrap", LEVEL * 100.0),
            format!("+-{} %", MOST_HALF_WIDTH * 100.0),
            format!("least {LEAST_SAMPLES} repetitions"),
            format!("{} us of a step", STEP_FLOOR_MS * 1e3),
            format!("{} ns of a criterion call", crate::gate::criterion::FLOOR_NS),
            format!("{} % apart", crate::hygiene::CLOCK_DRIFT * 100.0),
            format!("may grow by {} MiB", crate::record::DRIVERS_OWN_BYTES >> 20),
        ] {
            assert!(GATE_HELP.contains(&text), "{text}");
        }
    }
}
