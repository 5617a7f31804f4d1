//! `ab`: two builds of this program side by side on one machine. Processes alternate, base, candidate, candidate, base, so
//! that whatever drifts while they run (heat, clocks, company) is in both; each block of four gives one ratio, and the
//! interval is of the median of those.
//!
//! `process` runs one of them and says how it failed; `kernels` reads what `bench` writes. Cells of `sweep` are judged as
//! `gate` judges them, bytes and frontier included.

mod kernels;
mod process;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use highwater::device::cuda::library;

use self::process::Side;
use crate::cli::flat;
use crate::failure::Failure;
use crate::gate::cli::JudgeArgs;
use crate::gate::compare::{METRICS, Terms, compare_with, samples};
use crate::gate::key::Key;
use crate::gate::outside::Outside;
use crate::gate::report::{Kind, Report};
use crate::gate::runs::Run;
use crate::out::note;
use crate::progress::Progress;
use crate::provenance::{Provenance, command_line, file_hash};
use crate::record::Row;
use crate::stats::Summary;
use crate::verdict::{Comparison, LEAST_SAMPLES, Rule};

/// What follows the flags in `ab --help`.
pub(crate) const AB_HELP: &str = "\
  highwater ab --base old/highwater --cand new/highwater -- sweep qwen3.6-27b@fp8-channel --axis batch=1,8
  highwater ab --base old/highwater --cand new/highwater -- bench linear --filter fp8

Verdicts and exit codes are those of gate; the interval is of the median of the blocks' ratios.";

/// The seed of every interval.
const SEED: u64 = 1;
/// Most blocks, and most seconds of one process.
const MOST_BLOCKS: usize = 1000;
const MOST_SECONDS: u64 = 86_400;
/// What is run where nothing is said.
const DEFAULT: [&str; 2] = ["sweep", "tiny@bf16"];

/// `ab`.
#[derive(Debug, Args)]
pub(crate) struct AbArgs {
    /// The program to hold to
    #[arg(long, value_name = "BIN")]
    pub(crate) base: PathBuf,
    /// The program to judge
    #[arg(long, value_name = "BIN")]
    pub(crate) cand: PathBuf,
    /// A word for the base alone, after the others; may be repeated
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    pub(crate) base_arg: Vec<String>,
    /// A word for the candidate alone
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    pub(crate) cand_arg: Vec<String>,
    /// Blocks of four processes
    #[arg(long, value_name = "N", value_parser = flat(blocks), default_value = "12")]
    pub(crate) blocks: usize,
    /// Seconds one process may take
    #[arg(long, value_name = "SECONDS", value_parser = flat(timeout), default_value = "3600")]
    pub(crate) timeout: Duration,
    #[command(flatten)]
    pub(crate) judge: JudgeArgs,
    /// Folder for what each process writes [default: highwater-out/RUN]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// `sweep` or `bench` and its flags [default: sweep tiny@bf16]
    #[arg(last = true, value_name = "VERB ARGS")]
    pub(crate) words: Vec<String>,
}

fn blocks(text: &str) -> Result<usize> {
    let blocks: usize = text.trim().parse().ok().with_context(|| format!("`{text}` is not a number"))?;
    let range = LEAST_SAMPLES..=MOST_BLOCKS;
    ensure!(range.contains(&blocks), "{blocks} is outside {LEAST_SAMPLES} to {MOST_BLOCKS}");
    Ok(blocks)
}

fn timeout(text: &str) -> Result<Duration> {
    let seconds: u64 = text.trim().parse().ok().with_context(|| format!("`{text}` is not a number of seconds"))?;
    ensure!((1..=MOST_SECONDS).contains(&seconds), "{seconds} is outside 1 to {MOST_SECONDS} seconds");
    Ok(Duration::from_secs(seconds))
}

/// What is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    /// Cells of the engine.
    Sweep,
    /// Kernels by themselves.
    Bench,
}

/// The verb and its words. Flags alone, or a model alone, are a sweep's.
fn words(given: &[String]) -> Result<(What, Vec<String>)> {
    let given = if given.is_empty() { DEFAULT.map(str::to_owned).to_vec() } else { given.to_vec() };
    if let Some(out) = given.iter().find(|word| *word == "--out" || word.starts_with("--out=")) {
        bail!("{out} is ab's own: say it before `--`");
    }
    match given[0].as_str() {
        "sweep" => Ok((What::Sweep, given)),
        "bench" => Ok((What::Bench, given)),
        word if word.starts_with('-') => Ok((What::Sweep, [&["sweep".to_owned()], &given[..]].concat())),
        word => bail!("`{word}` cannot be compared; sweep and bench can"),
    }
}

/// `ab`.
pub(crate) fn ab(args: &AbArgs) -> Result<(), Failure> {
    let (what, words) = words(&args.words).map_err(|error| Failure::request("ab", &error))?;
    let provenance = Provenance::gather();
    let out = args.out.clone().unwrap_or_else(|| Path::new("highwater-out").join(&provenance.run));
    std::fs::create_dir_all(&out).with_context(|| format!("cannot create the folder {}", out.display()))?;
    let hash = |path: &Path| file_hash(path).with_context(|| format!("cannot read {}", path.display()));
    let hashes = [hash(&args.base)?, hash(&args.cand)?];
    let sides = [
        Side::new("base", &args.base, &words, &args.base_arg, args.timeout),
        Side::new("candidate", &args.cand, &words, &args.cand_arg, args.timeout),
    ];
    for (side, hash) in sides.iter().zip(&hashes) {
        note(&format!("{}: {} {hash}", side.name, side.program.display()));
    }
    let progress = Progress::rows(4 * args.blocks as u64);
    let mut folders: [Vec<PathBuf>; 2] = Default::default();
    for block in 0..args.blocks {
        for (at, side) in [0usize, 1, 1, 0].into_iter().enumerate() {
            let folder = out.join(format!("{:04}-{}", 4 * block + at + 1, sides[side].name));
            progress.doing(&format!("block {} of {}, {}", block + 1, args.blocks, sides[side].name));
            sides[side].run(&folder)?;
            folders[side].push(folder);
            progress.advance(1);
        }
    }
    progress.finish();
    // The same words again, with three times the blocks.
    let next = next(args, &words, library::folder());
    let mut report = match what {
        What::Sweep => sweeps(&folders, args, &next)?,
        What::Bench => kernels::report(&folders, args, &next)?,
    };
    for ((side, hash), label) in sides.iter().zip(&hashes).zip([&mut report.baseline, &mut report.candidate]) {
        *label = format!("{} {hash}", side.program.display());
    }
    if hashes[0] == hashes[1] {
        let text = if args.base_arg == args.cand_arg { "" } else { ", under other words" };
        report.find(Kind::Note, None, format!("both are the same program{text}"), None);
    }
    report.end(args.judge.json, args.judge.markdown.as_deref())
}

fn next(args: &AbArgs, words: &[String], cuda: Option<&Path>) -> String {
    let (base, cand) = (args.base.display().to_string(), args.cand.display().to_string());
    let blocks = (3 * args.blocks).min(MOST_BLOCKS).to_string();
    let mut line =
        ["highwater", "ab", "--base", &base, "--cand", &cand, "--blocks", &blocks].map(str::to_owned).to_vec();
    line.extend(cuda.map(|folder| format!("{}={}", library::FOLDER_FLAG, folder.display())));
    line.extend(args.base_arg.iter().map(|word| format!("--base-arg={word}")));
    line.extend(args.cand_arg.iter().map(|word| format!("--cand-arg={word}")));
    line.push("--".into());
    line.extend(words.iter().cloned());
    command_line(line.into_iter())
}

/// Reads every sweep and judges the first of either side, by the times of all.
fn sweeps(folders: &[Vec<PathBuf>; 2], args: &AbArgs, next: &str) -> Result<Report, Failure> {
    let read = |folder: &PathBuf| Run::read(folder).with_context(|| format!("{} is no sweep's", folder.display()));
    let mut runs: [Vec<Run>; 2] = Default::default();
    for (runs, folders) in runs.iter_mut().zip(folders) {
        *runs = folders.iter().map(read).collect::<Result<_>>()?;
    }
    let [bases, candidates] = &runs;
    let times = |key: &Key, metric: &'static str| {
        let of = |runs: &[Run]| runs.iter().map(|run| median(row_of(run, key)?, metric)).collect::<Option<Vec<f64>>>();
        match (of(bases), of(candidates)) {
            (Some(base), Some(candidate)) => Some(paired(&base, &candidate, Rule::of_steps(args.judge.threshold))),
            // A cell without decode steps has no TPOT in any run; one without in some runs cannot be paired.
            _ if bases
                .iter()
                .chain(candidates)
                .any(|run| row_of(run, key).and_then(|r| median(r, metric)).is_some()) =>
            {
                Some(Err("not every process measured it".into()))
            }
            _ => None,
        }
    };
    let terms = Terms::of(&args.judge, false);
    let mut report = compare_with(&bases[0], &candidates[0], terms, Some((&times, next)))?;
    for (runs, name) in [(bases, "base"), (candidates, "candidate")] {
        for (number, run) in runs.iter().enumerate().skip(1) {
            for (key, first) in &runs[0].rows {
                let same = row_of(run, key).is_some_and(|row| {
                    row.status == first.status
                        && row.transient_peak_bytes == first.transient_peak_bytes
                        && row.resident_bytes == first.resident_bytes
                        && Outside::of(first, row).is_none_or(|outside| !outside.grew())
                });
                if !same {
                    let text = format!("process {} of the {name} ended otherwise than its first", number + 1);
                    report.find(Kind::Failure, Some(&key.to_string()), text, None);
                }
            }
        }
    }
    Ok(report)
}

fn row_of<'a>(run: &'a Run, key: &Key) -> Option<&'a Row> {
    run.rows.iter().find(|(other, _)| key.matches(other)).map(|(_, row)| row)
}

fn median(row: &Row, metric: &str) -> Option<f64> {
    debug_assert!(METRICS.contains(&metric));
    Summary::of(&samples(row, metric)).map(|summary| summary.median)
}

/// Compares two lists of medians, one of each process in the order they ran: two and two are a block.
fn paired(base: &[f64], candidate: &[f64], rule: Rule) -> Result<Comparison, String> {
    let both: HashMap<&str, &[f64]> = HashMap::from([("base", base), ("candidate", candidate)]);
    if let Some((name, _)) = both.iter().find(|(_, times)| times.iter().any(|time| !time.is_normal() || *time < 0.0)) {
        return Err(format!("a process of the {name} measured a time that is no positive number"));
    }
    let middle = |pair: &[f64]| pair.iter().map(|time| time.ln()).sum::<f64>() / pair.len() as f64;
    let blocks = base.chunks(2).zip(candidate.chunks(2));
    let ratios: Vec<f64> = blocks.map(|(a, b)| (middle(b) - middle(a)).exp()).collect();
    let of_base = Summary::of(base).ok_or("the base measured nothing")?.median;
    Comparison::of_pairs(of_base, &ratios, rule, SEED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Verb};
    use crate::verdict::Verdict;
    use clap::Parser as _;

    #[test]
    fn words_after_the_dashes_are_a_sweep_s_or_a_bench_s() {
        let of = |line: &str| words(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(of("").unwrap(), (What::Sweep, DEFAULT.map(str::to_owned).to_vec()));
        assert_eq!(of("bench linear").unwrap().0, What::Bench);
        assert_eq!(of("--axis chunk=64").unwrap().1[0], "sweep");
        assert!(of("plan tiny").unwrap_err().to_string().contains("`plan` cannot be compared"));
        assert!(of("sweep tiny --out x").unwrap_err().to_string().contains("before `--`"));
        let line = "highwater ab --base a --cand b --cand-arg --fault --cand-arg=slow-kernel -- sweep tiny --output 8";
        let Verb::Ab(args) = Cli::try_parse_from(line.split_whitespace()).unwrap().verb else { panic!("not ab") };
        assert_eq!(args.cand_arg, ["--fault", "slow-kernel"]);
        assert_eq!(args.words, ["sweep", "tiny", "--output", "8"]);
        let again = next(&args, &args.words, Some(Path::new("a toolkit")));
        assert!(again.contains(" '--cuda=a toolkit' --cand-arg"), "{again}");
        let again = next(&args, &args.words, None);
        assert!(
            again.contains("--blocks 36") && again.contains("--cand-arg=--fault --cand-arg=slow-kernel"),
            "{again}"
        );
        assert!(Cli::try_parse_from(again.split_whitespace()).is_ok(), "{again}");
        assert!(Cli::try_parse_from("highwater ab --base a --cand b --blocks 9".split_whitespace()).is_err());
    }

    #[test]
    fn blocks_cancel_drift_and_one_disturbed_process_moves_no_verdict() {
        // Every process is 5 % slower than the one before; A-B-B-A takes that out of the ratio.
        let at = |i: usize| 1.05f64.powi(i as i32);
        let sides = |slower: f64| {
            let (mut a, mut b) = (Vec::new(), Vec::new());
            for block in 0..12 {
                a.extend([at(4 * block), at(4 * block + 3)]);
                b.extend([at(4 * block + 1) * slower, at(4 * block + 2) * slower]);
            }
            (a, b)
        };
        let rule = Rule { threshold: 0.01, floor: 0.0 };
        let verdict = |a: &[f64], b: &[f64]| paired(a, b, rule).unwrap().verdict;
        let (a, b) = sides(1.0);
        assert_eq!(verdict(&a, &b), Verdict::Same);
        let (a, mut b) = sides(1.03);
        assert_eq!(verdict(&a, &b), Verdict::Slower);
        b[7] *= 0.5;
        assert_eq!(verdict(&a, &b), Verdict::Slower);
        assert!(paired(&[1.0, 0.0], &[1.0, 1.0], rule).unwrap_err().contains("of the base"));
    }
}
