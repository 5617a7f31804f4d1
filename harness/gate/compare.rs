//! Two runs, cell by cell: which cells are the same, whether they may be compared, and what became of each.

use std::collections::HashMap;

use crate::failure::Failure;
use crate::gate::cli::JudgeArgs;
use crate::gate::clocks::{self, Slower};
use crate::gate::conditions::{self, Words};
use crate::gate::edges::{Edge, edges};
use crate::gate::key::{Key, differences, tools_differ};
use crate::gate::memory::Memory;
use crate::gate::report::{Bytes, Kind, Report};
use crate::gate::runs::{Run, passes};
use crate::gate::{next, notes, outside};
use crate::record::Row;
use crate::status::Status;
use crate::verdict::{Comparison, LEAST_SAMPLES, Rule, Verdict};

/// The seed of every interval: the same rows give the same answer.
const SEED: u64 = 1;

/// What must be alike in two runs' cells.
const CELLS: Words = Words { one: "cell", counted: "cells", alike: "card, driver and method" };

/// What is timed of a cell.
pub(crate) const METRICS: [&str; 2] = ["prefill", "TPOT"];

/// A row's times of one of [`METRICS`], in ms, one for each repetition.
pub(crate) fn samples(row: &Row, metric: &str) -> Vec<f64> {
    if metric == METRICS[0] { row.prefill_samples_ms.clone() } else { passes(row) }
}

/// How runs are compared.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    /// Effects up to this are no regression.
    pub(crate) threshold: f64,
    /// Whether what is undecided ends with a code of its own.
    pub(crate) strict: bool,
    /// Whether runs of other conditions are compared.
    pub(crate) force: bool,
    /// Whether the candidate may lack cells.
    pub(crate) subset: bool,
}

impl Terms {
    /// As the flags ask; `subset` where the candidate may lack cells.
    pub(crate) fn of(judge: &JudgeArgs, subset: bool) -> Terms {
        Terms { threshold: judge.threshold, strict: judge.strict, force: judge.force, subset }
    }
}

/// A cell of both runs.
pub(super) struct Pair<'a> {
    key: &'a Key,
    pub(super) name: String,
    pub(super) base: &'a Row,
    pub(super) candidate: &'a Row,
}

/// Comparisons of a cell's times that were made elsewhere: by cell and metric.
pub(crate) type Times<'a> = &'a dyn Fn(&Key, &'static str) -> Option<Result<Comparison, String>>;

/// Holds `candidate` to `base`. An error is a comparison that is refused.
pub(crate) fn compare(base: &Run, candidate: &Run, terms: Terms) -> Result<Report, Failure> {
    compare_with(base, candidate, terms, None)
}

/// As [`compare`], with times compared by `times` where it is given: the function, and the next command for what it leaves
/// undecided.
pub(crate) fn compare_with(
    base: &Run,
    candidate: &Run,
    terms: Terms,
    times: Option<(Times, &str)>,
) -> Result<Report, Failure> {
    let (from, to) = (base.path.display().to_string(), candidate.path.display().to_string());
    let mut report = Report::new(from, to, terms.threshold, terms.strict);
    let mut matched = matches(base, candidate, &[]);
    if matched.pairs.is_empty() {
        // Perhaps the same cells on another card: then it is the card that differs, and not every cell.
        matched = matches(base, candidate, &["card", "vram"]);
    }
    let pairs: Vec<Pair> = matched
        .pairs
        .iter()
        .map(|(b, c)| {
            let (key, base) = &base.rows[*b];
            Pair { key, name: key.to_string(), base, candidate: &candidate.rows[*c].1 }
        })
        .collect();
    let rows: Vec<(&Row, &Row)> = pairs.iter().map(|pair| (pair.base, pair.candidate)).collect();
    conditions::hold(&rows, [differences, tools_differ], &CELLS, terms, &mut report)?;
    for note in base.notes.iter().chain(&candidate.notes) {
        report.find(Kind::Note, None, note, None);
    }
    let missing = matched.only_base.iter().map(|at| &base.rows[*at]).filter(|(_, row)| !row.status.is_failure());
    for (key, row) in missing {
        let kind = if terms.subset { Kind::Note } else { Kind::Missing };
        let text = format!("{} in the baseline and not in the candidate", row.status.name());
        report.find(kind, Some(&key.to_string()), text, None);
    }
    for (key, row) in matched.only_candidate.iter().map(|at| &candidate.rows[*at]) {
        let kind = if row.status.is_failure() { Kind::Failure } else { Kind::Note };
        report.find(kind, Some(&key.to_string()), format!("{}, and not in the baseline", ended(row)), None);
        find_unaccounted(row, &key.to_string(), &mut report);
    }
    report.cells = pairs.len();
    for (number, pair) in pairs.iter().enumerate() {
        Judged { pair, number: number + 1, base, candidate, terms, times }.judge(&mut report);
    }
    notes::find_unsampled([base, candidate], &pairs, &mut report);
    notes::find(&pairs, &mut report);
    report.frontier = edges(pairs.iter().map(|pair| (pair.key, pair.base, pair.candidate)));
    for edge in report.frontier.clone().iter().filter(|edge| edge.lost()) {
        report.find(Kind::FrontierRegression, None, edge_text(edge), None);
    }
    Ok(report)
}

/// A row whose memory outside the slab is nobody's says nothing of what its cell takes.
fn find_unaccounted(row: &Row, name: &str, report: &mut Report) {
    if let Some(what) = outside::unaccounted(row) {
        report.find(Kind::Failure, Some(name), what, None);
    }
}

fn edge_text(edge: &Edge) -> String {
    format!("the frontier moved: {}", edge.line())
}

/// Rows of the two runs that are the same cell, by place, and those without a twin.
struct Matched {
    pairs: Vec<(usize, usize)>,
    only_base: Vec<usize>,
    only_candidate: Vec<usize>,
}

/// Matches cells, these parts of their keys left out.
fn matches(base: &Run, candidate: &Run, without: &[&str]) -> Matched {
    let keys = |run: &Run| run.rows.iter().map(|(key, _)| key.without(without)).collect::<Vec<Key>>();
    let (base, candidate) = (keys(base), keys(candidate));
    let mut buckets: HashMap<String, Vec<usize>> = HashMap::new();
    for (at, key) in candidate.iter().enumerate() {
        buckets.entry(key.bucket()).or_default().push(at);
    }
    let mut used = vec![false; candidate.len()];
    let mut found = Matched { pairs: Vec::new(), only_base: Vec::new(), only_candidate: Vec::new() };
    for (at, key) in base.iter().enumerate() {
        let free = buckets.get(&key.bucket()).into_iter().flatten().copied();
        let twins = free.filter(|twin| !used[*twin] && key.matches(&candidate[*twin]));
        match twins.max_by_key(|twin| (key.agreement(&candidate[*twin]), std::cmp::Reverse(*twin))) {
            Some(twin) => {
                used[twin] = true;
                found.pairs.push((at, twin));
            }
            None => found.only_base.push(at),
        }
    }
    found.only_candidate = (0..candidate.len()).filter(|at| !used[*at]).collect();
    found
}

/// How a cell ended, in a few words.
fn ended(row: &Row) -> String {
    let name = row.status.name();
    match row.detail.as_deref().and_then(|detail| detail.lines().next()) {
        Some(detail) if row.status != Status::Ok => format!("{name} ({detail})"),
        _ => name.to_owned(),
    }
}

/// A pair with what it is judged by.
struct Judged<'a> {
    pair: &'a Pair<'a>,
    number: usize,
    base: &'a Run,
    candidate: &'a Run,
    terms: Terms,
    times: Option<(Times<'a>, &'a str)>,
}

impl Judged<'_> {
    fn judge(&self, report: &mut Report) {
        let Pair { name, base, candidate, .. } = self.pair;
        if let Some(fault) = &candidate.fault {
            report.find(Kind::Note, Some(name), format!("the candidate was measured with --fault {fault}"), None);
        }
        let (before, after) = (base.status, candidate.status);
        match (before, after) {
            (_, after) if after.is_failure() => report.find(Kind::Failure, Some(name), ended(candidate), None),
            (before, _) if before.is_failure() => {
                let text = format!("{} now; the baseline has no answer: {}", ended(candidate), ended(base));
                report.find(Kind::Note, Some(name), text, None);
            }
            (Status::Ok, Status::Ok) => self.both_ran(report),
            (Status::Ok, after) if after.is_oom() => {
                report.find(Kind::FrontierRegression, Some(name), format!("ok before, now {}", ended(candidate)), None);
            }
            (Status::Ok, _) => {
                report.find(Kind::Failure, Some(name), format!("ok before, now {}", ended(candidate)), None);
            }
            (before, Status::Ok) if before.is_oom() => {
                report.find(Kind::Better, Some(name), format!("{} before, fits now", before.name()), None);
            }
            (before, after) if before.is_oom() && after.is_oom() => {}
            (before, after) if before != after => {
                report.find(
                    Kind::Note,
                    Some(name),
                    format!("{} before, now {}", before.name(), ended(candidate)),
                    None,
                );
            }
            _ => {}
        }
        find_unaccounted(candidate, name, report);
    }

    fn both_ran(&self, report: &mut Report) {
        let Pair { name, base, candidate, .. } = self.pair;
        let memory = Memory::of(base, candidate);
        if memory.grew() {
            report.find(Kind::MemoryRegression, Some(name), memory.line(), None);
        } else if memory.shrank() {
            report.find(Kind::Better, Some(name), format!("less memory: {}", memory.line()), None);
        }
        if !memory.silent.is_empty() {
            let text = format!("the candidate does not say its bytes of {}", memory.silent.join(", "));
            report.find(Kind::Failure, Some(name), text, None);
        }
        let total = |row: &Row| row.resident_bytes.unwrap_or(0).saturating_add(row.transient_peak_bytes.unwrap_or(0));
        let bytes = (total(base), total(candidate));
        let first = report.compared.len();
        self.speed(report);
        let speeds = &report.compared[first..];
        if let Some(trade) = trade(&memory, speeds.iter().map(|s| (s.metric, s.comparison.verdict))) {
            report.find(Kind::Trade, Some(name), trade, None);
        }
        report.bytes.push(Bytes { cell: name.clone(), baseline: bytes.0, candidate: bytes.1, memory });
    }

    fn speed(&self, report: &mut Report) {
        let Pair { name, base, candidate, .. } = self.pair;
        if candidate.checked == Some(false) {
            let text = "its repetitions did not generate the same tokens: the results are wrong, and so is the speed";
            report.find(Kind::Failure, Some(name), text, None);
            return;
        }
        if base.device == "plan" {
            return;
        }
        if let Some((times, next)) = self.times {
            for metric in METRICS {
                let next = || Some(next.to_owned());
                match times(self.pair.key, metric) {
                    Some(Ok(comparison)) => report.compare(name, metric, "ms", comparison, |_| next()),
                    Some(Err(why)) => report.find(Kind::Inconclusive, Some(name), format!("{metric}: {why}"), next()),
                    None => {}
                }
            }
            return;
        }
        if self.base.is_csv() || self.candidate.is_csv() {
            return;
        }
        let unfit = |row: &Row| match (&row.dirty, row.checked) {
            (Some(dirty), _) => Some(format!("is dirty ({dirty})")),
            (None, Some(true)) => None,
            (None, _) => Some("passed no check that its results repeat".to_owned()),
        };
        for (row, whose) in [(*base, "baseline"), (*candidate, "candidate")] {
            if let Some(why) = unfit(row) {
                let text = format!("times are not compared: the {whose} {why}");
                let next = self.next(whose == "baseline", 0, None);
                report.find(Kind::Inconclusive, Some(name), text, next);
                return;
            }
        }
        if let Some((slower, why)) = clocks::apart(base, candidate) {
            let next = self.next(slower == Slower::Baseline, 0, None);
            report.find(Kind::Inconclusive, Some(name), format!("times are not compared: {why}"), next);
            return;
        }
        for (at, metric) in METRICS.into_iter().enumerate() {
            let (before, after) = (samples(base, metric), samples(candidate, metric));
            if before.is_empty() && after.is_empty() {
                continue;
            }
            match Comparison::of(&before, &after, Rule::of_steps(self.terms.threshold), SEED) {
                Ok(comparison) => report.compare(name, metric, "ms", comparison, |comparison| {
                    self.next(rather_the_baseline(&before, &after), at, Some(comparison))
                }),
                Err(why) => {
                    let next = self.next(before.is_empty(), at, None);
                    report.find(Kind::Inconclusive, Some(name), format!("{metric}: {why}"), next);
                }
            }
        }
    }

    /// The command that measures the cell again, in the baseline or the candidate, and the one that compares then; which
    /// program that takes, where the two had different ones. Each metric's command has a folder of its own.
    fn next(&self, baseline: bool, metric: usize, comparison: Option<&Comparison>) -> Option<String> {
        let (row, run) = if baseline { (self.pair.base, self.base) } else { (self.pair.candidate, self.candidate) };
        let folder = next::fresh(&run.path, METRICS.len() * (self.number - 1) + metric + 1);
        let sweep = next::sweep(row, &folder, comparison)?;
        let paths = [self.base.path.as_path(), self.candidate.path.as_path()];
        let hash = row.binary_hash.as_deref().unwrap_or("of no known hash");
        let other = (self.pair.base.binary_hash != self.pair.candidate.binary_hash).then_some(hash);
        Some(next::and_gate(&sweep, &folder, baseline, paths, other.map(|hash| ("sweep", hash))))
    }
}

/// Whether it is the baseline that has to be measured again: it has too few samples, or is the wider of the two.
fn rather_the_baseline(base: &[f64], candidate: &[f64]) -> bool {
    let width = |sample: &[f64]| {
        let interval = crate::stats::Interval::of_median(sample, 0.95, SEED)?;
        Some(interval.high / interval.low)
    };
    if base.len().min(candidate.len()) < LEAST_SAMPLES {
        return base.len() < candidate.len().min(LEAST_SAMPLES);
    }
    width(base) > width(candidate)
}

/// What was gained for what on one cell, where something was.
pub(crate) fn trade<'a>(memory: &Memory, speeds: impl Iterator<Item = (&'a str, Verdict)>) -> Option<String> {
    let (mut gained, mut lost) = (Vec::new(), Vec::new());
    if memory.grew() {
        lost.push("memory");
        if memory.parts.iter().any(|part| part.candidate < part.baseline) {
            gained.push("memory of another part");
        }
    } else if memory.shrank() {
        gained.push("memory");
    }
    for (metric, verdict) in speeds {
        match verdict {
            Verdict::Faster => gained.push(metric),
            Verdict::Slower => lost.push(metric),
            Verdict::Same | Verdict::Inconclusive => {}
        }
    }
    let traded = !gained.is_empty() && !lost.is_empty();
    traded.then(|| format!("gains {} and loses {}", gained.join(" and "), lost.join(" and ")))
}

#[cfg(test)]
#[path = "compare_tests.rs"]
mod tests;
