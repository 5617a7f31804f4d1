//! What `cargo bench` left behind, held to a saved baseline. Criterion prints regressions and ends with 0; this does not.
//!
//! Criterion keeps one folder for each benchmark and in it one for each baseline: `new` is the last run, `base` the run that
//! no flag named, and NAME what `--save-baseline NAME` named. Each holds `benchmark.json` (what it is called),
//! `sample.json` (calls and ns of each sample) and `estimates.json` (statistics of them). `base` is copied from `new` at the
//! end of a plain run, so after one the two are the same file and say nothing: that is looked for.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::failure::Failure;
use crate::gate::next;
use crate::gate::report::{Kind, Report};
use crate::provenance::command_line;
use crate::stats::Summary;
use crate::verdict::{Comparison, Rule};

/// Differences of one call up to this are no regression. A sample is the mean of many calls, so it can be small.
pub(crate) const FLOOR_NS: f64 = 50.0;
/// The last run's folder.
const NEW: &str = "new";
/// Folders below the one named: group, function and value, and what a name with slashes makes of them.
const MOST_DEPTH: usize = 8;
/// Larger files are not criterion's.
const MOST_BYTES: u64 = 16 << 20;
/// The seed of every interval.
const SEED: u64 = 1;

/// `benchmark.json`, as far as it is read.
#[derive(Debug, Deserialize)]
struct Benchmark {
    full_id: String,
}

/// `sample.json`.
#[derive(Debug, Deserialize)]
struct Sample {
    iters: Vec<f64>,
    times: Vec<f64>,
}

/// `estimates.json`, as far as it is read.
#[derive(Debug, Deserialize)]
struct Estimates {
    median: Estimate,
}

#[derive(Debug, Deserialize)]
struct Estimate {
    point_estimate: f64,
}

/// One benchmark's samples under one baseline.
#[derive(Debug)]
struct Measured {
    id: String,
    /// ns of one call, of each sample.
    ns: Vec<f64>,
    /// Seconds of all calls.
    seconds: f64,
}

/// Holds the last run of every benchmark under `folder` to the baseline `saved`.
pub(crate) fn gate(folder: &Path, saved: &str, threshold: f64, strict: bool, subset: bool) -> Result<Report, Failure> {
    if saved == NEW || saved.is_empty() || Path::new(saved).components().count() != 1 || saved.starts_with('.') {
        let what = anyhow::anyhow!("{saved:?}: name what --save-baseline named; `{NEW}` is the last run itself");
        return Err(Failure::request("--baseline", &what));
    }
    let benches = benches(folder, saved)?;
    let of = |baseline: &str| format!("{} ({baseline})", folder.display());
    let mut report = Report::new(of(saved), of(NEW), threshold, strict);
    let lacking = if subset { Kind::Note } else { Kind::Missing };
    for bench in &benches {
        let name = bench.strip_prefix(folder).unwrap_or(bench).display().to_string();
        let (before, after) = (bench.join(saved), bench.join(NEW));
        if !after.is_dir() {
            report.find(lacking, Some(&name), format!("saved as {saved}, and not run since"), None);
            continue;
        }
        if !before.is_dir() {
            report.find(Kind::Note, Some(&name), format!("not in the baseline {saved}"), None);
            continue;
        }
        match read(&before).and_then(|base| Ok((base, read(&after)?))) {
            Err(error) => report.find(Kind::Failure, Some(&name), format!("{error:#}"), None),
            Ok((base, new)) if base.ns == new.ns => {
                let again = ["cargo", "bench", "--", "--exact", &new.id, "--baseline", saved].map(str::to_owned);
                let text =
                    format!("the last run is the one saved as {saved}: it was not run since, or not with --baseline");
                report.find(lacking, Some(&new.id), text, Some(command_line(again.into_iter())));
            }
            Ok((base, new)) => {
                report.cells += 1;
                let rule = Rule { threshold, floor: FLOOR_NS };
                match Comparison::of(&base.ns, &new.ns, rule, SEED) {
                    Ok(comparison) => report.compare(&new.id, "time", "ns", comparison, |comparison| {
                        let seconds = next::seconds(new.seconds, Some(comparison)).to_string();
                        let words = ["cargo", "bench", "--", "--exact", &new.id, "--baseline", saved];
                        let words = words.into_iter().chain(["--measurement-time", &seconds]).map(str::to_owned);
                        Some(command_line(words))
                    }),
                    Err(why) => report.find(Kind::Failure, Some(&new.id), why, None),
                }
            }
        }
    }
    Ok(report)
}

/// Folders of benchmarks, in order. An error where none has the baseline.
fn benches(folder: &Path, saved: &str) -> Result<Vec<PathBuf>> {
    ensure!(folder.is_dir(), "{} is no folder; `cargo bench` writes target/criterion", folder.display());
    let (mut found, mut others) = (Vec::new(), Vec::new());
    let mut pending = vec![(folder.to_owned(), 0)];
    while let Some((dir, depth)) = pending.pop() {
        let at = || format!("cannot read {}", dir.display());
        let mut is_bench = false;
        for entry in fs::read_dir(&dir).with_context(at)? {
            let entry = entry.with_context(at)?;
            // Links are not followed: one to a folder above would never end.
            if !entry.file_type().with_context(at)?.is_dir() {
                continue;
            }
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.path().join("sample.json").exists() || entry.path().join("benchmark.json").exists() {
                is_bench |= name == saved || name == NEW;
                others.push(name);
            } else if name == saved || name == NEW {
                // Half a benchmark: what is missing is said when it is read.
                is_bench |= dir != folder && entry.path().join("estimates.json").exists();
            } else if depth < MOST_DEPTH {
                pending.push((entry.path(), depth + 1));
            }
        }
        if is_bench {
            found.push(dir);
        }
    }
    found.sort();
    if !found.iter().any(|bench| bench.join(saved).is_dir()) {
        others.sort();
        others.dedup();
        others.retain(|name| name != NEW && name != "change");
        let names = if others.is_empty() { "none".to_owned() } else { others.join(", ") };
        bail!(
            "{} holds no benchmark with the baseline {saved} (there are: {names}); `cargo bench -- --save-baseline {saved}` \
             makes one, and `cargo bench -- --baseline {saved}` runs against it",
            folder.display()
        );
    }
    Ok(found)
}

/// Reads a benchmark's samples under one baseline, and holds its files against each other.
fn read(dir: &Path) -> Result<Measured> {
    let Benchmark { full_id: id } = json(&dir.join("benchmark.json"))?;
    let Sample { iters, times } = json(&dir.join("sample.json"))?;
    let Estimates { median } = json(&dir.join("estimates.json"))?;
    let file = dir.join("sample.json");
    ensure!(
        iters.len() == times.len() && !times.is_empty(),
        "{}: {} times for {} counts of calls",
        file.display(),
        times.len(),
        iters.len()
    );
    let odd = iters.iter().zip(&times).find(|(calls, ns)| !(calls.is_finite() && **calls >= 1.0 && ns.is_finite()));
    if let Some((calls, ns)) = odd {
        bail!("{}: {ns} ns for {calls} calls is no time", file.display());
    }
    let ns: Vec<f64> = times.iter().zip(&iters).map(|(ns, calls)| ns / calls).collect();
    let own = Summary::of(&ns).context("no samples")?.median;
    ensure!(
        (own - median.point_estimate).abs() <= 1e-6 * own.abs(),
        "{}: the median of its samples is {own} ns, and estimates.json says {} ns",
        file.display(),
        median.point_estimate
    );
    Ok(Measured { id, ns, seconds: times.iter().sum::<f64>() / 1e9 })
}

fn json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T> {
    let at = || format!("cannot read {}", path.display());
    let mut text = String::new();
    let file = fs::File::open(path).with_context(at)?;
    file.take(MOST_BYTES + 1).read_to_string(&mut text).with_context(at)?;
    ensure!(text.len() as u64 <= MOST_BYTES, "{} is larger than {MOST_BYTES} bytes", path.display());
    serde_json::from_str(&text).with_context(at)
}
