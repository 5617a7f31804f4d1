//! Two tables of kernels, row by row: which are the same, whether they may be compared, and which is slower. What is concluded
//! from samples is `verdict`'s, as it is for sweeps.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::bench::read::{Timed, find, read};
use crate::failure::Failure;
use crate::gate::compare::Terms;
use crate::gate::conditions::{self, Difference, Words, differing};
use crate::gate::next;
use crate::gate::report::{Kind, Report};
use crate::provenance::command_line;
use crate::verdict::{Comparison, Rule};

/// The seed of every interval: the same rows give the same answer.
const SEED: u64 = 1;
/// Seconds a row is measured for where its command does not say.
const ROW_SECONDS: f64 = 1.0;

/// What must be alike in two tables' rows.
const KERNELS: Words = Words { one: "kernel", counted: "rows", alike: "card, driver, method and cache" };

/// The tables of kernels that two paths are or hold; none where both are something else. An error where only one is.
pub(crate) fn files(baseline: &Path, candidate: &Path) -> Result<Option<[PathBuf; 2]>> {
    let (from, to) = (baseline.display(), candidate.display());
    match (find(baseline)?, find(candidate)?) {
        (Some(base), Some(candidate)) => Ok(Some([base, candidate])),
        (None, None) => Ok(None),
        (Some(_), None) => bail!("{from} is a table of kernels, and {to} is none"),
        (None, Some(_)) => bail!("{to} is a table of kernels, and {from} is none"),
    }
}

/// A row of both tables.
struct Pair<'a> {
    name: String,
    base: &'a Timed,
    candidate: &'a Timed,
}

/// Holds the table `files[1]` to `files[0]`, which the user named by `paths`.
pub(crate) fn gate(files: &[PathBuf; 2], paths: [&Path; 2], terms: Terms) -> Result<Report, Failure> {
    let (base, candidate) = (last_of_each(read(&files[0])?), last_of_each(read(&files[1])?));
    compare(&base, &candidate, paths, terms)
}

/// One row for each name: of a row that is there twice, the last.
fn last_of_each(rows: Vec<Timed>) -> Vec<Timed> {
    let mut kept: Vec<Timed> = Vec::new();
    for row in rows {
        match kept.iter().position(|other| other.name() == row.name()) {
            Some(at) => kept[at] = row,
            None => kept.push(row),
        }
    }
    kept
}

fn compare(base: &[Timed], candidate: &[Timed], paths: [&Path; 2], terms: Terms) -> Result<Report, Failure> {
    let [from, to] = paths.map(|path| path.display().to_string());
    let mut report = Report::new(from, to, terms.threshold, terms.strict);
    let mut pairs: Vec<Pair> = Vec::new();
    let (mut lacking, mut used) = (Vec::new(), vec![false; candidate.len()]);
    for base in base {
        // The same kernel with something else in the cache is another condition, and no missing row.
        let same = candidate.iter().position(|row| row.name() == base.name());
        let like = || candidate.iter().position(|row| row.label() == base.label() && row.cache != base.cache);
        match same.or_else(like).filter(|at| !used[*at]) {
            Some(at) => {
                used[at] = true;
                pairs.push(Pair { name: base.name(), base, candidate: &candidate[at] });
            }
            None => lacking.push(base),
        }
    }
    let rows: Vec<(&Timed, &Timed)> = pairs.iter().map(|pair| (pair.base, pair.candidate)).collect();
    conditions::hold(&rows, [differences, tools_differ], &KERNELS, terms, &mut report)?;
    for row in lacking.iter().filter(|row| row.median_us.is_some()) {
        let kind = if terms.subset { Kind::Note } else { Kind::Missing };
        report.find(kind, Some(&row.name()), "in the baseline and not in the candidate", None);
    }
    for row in candidate.iter().zip(&used).filter_map(|(row, used)| (!used).then_some(row)) {
        let kind = if row.checked == Some(false) { Kind::Failure } else { Kind::Note };
        let text = if row.checked == Some(false) { wrong(row) } else { "not in the baseline".to_owned() };
        report.find(kind, Some(&row.name()), text, None);
    }
    for (at, pair) in pairs.iter().enumerate() {
        Judged { pair, number: at + 1, paths, terms }.judge(&mut report);
    }
    Ok(report)
}

/// Where the conditions of two rows differ.
fn differences(base: &Timed, candidate: &Timed) -> Vec<Difference> {
    let said = |text: &str| if text.is_empty() { "not said".to_owned() } else { text.to_owned() };
    let conditions = |row: &Timed| {
        let mut all = vec![
            ("method", row.method.to_string()),
            ("card", said(&row.card)),
            ("device", said(row.device_kind())),
            ("cache", said(&row.cache)),
            ("build", said(&row.profile)),
        ];
        if row.device_kind() == "cuda" {
            all.extend([("driver", said(&row.driver)), ("GPU", said(&row.gpu))]);
            all.extend([("power limit", said(&row.power_limit_w)), ("ECC", said(&row.ecc))]);
        } else {
            all.extend([("CPU", said(&row.cpu)), ("cores", row.cores.map_or_else(|| said(""), |n| n.to_string()))]);
        }
        all
    };
    differing(conditions(base), conditions(candidate))
}

/// Where the compilers behind two rows differ, as far as both say.
pub(crate) fn tools_differ(base: &Timed, candidate: &Timed) -> Vec<Difference> {
    let said =
        base.tools().into_iter().zip(candidate.tools()).filter(|((_, a), (_, b))| !a.is_empty() && !b.is_empty());
    let owned = |(what, tool): (&'static str, &str)| (what, tool.to_owned());
    let (base, candidate) = said.map(|(a, b)| (owned(a), owned(b))).unzip();
    differing(base, candidate)
}

fn wrong(row: &Timed) -> String {
    let note = if row.note.is_empty() { String::new() } else { format!(" ({})", row.note) };
    format!("its result is wrong, and so is its speed{note}")
}

/// A pair with what it is judged by.
struct Judged<'a> {
    pair: &'a Pair<'a>,
    number: usize,
    paths: [&'a Path; 2],
    terms: Terms,
}

impl Judged<'_> {
    fn judge(&self, report: &mut Report) {
        let Pair { name, base, candidate } = self.pair;
        if candidate.checked == Some(false) {
            report.cells += 1;
            report.find(Kind::Failure, Some(name), wrong(candidate), None);
            return;
        }
        match (base.median_us, candidate.median_us) {
            (Some(_), Some(_)) => {}
            (None, None) => return,
            (Some(_), None) => {
                report.cells += 1;
                report.find(Kind::Failure, Some(name), format!("timed before, and not now: {}", candidate.note), None);
                return;
            }
            (None, Some(_)) => {
                report.find(Kind::Note, Some(name), format!("timed now, and not before: {}", base.note), None);
                return;
            }
        }
        report.cells += 1;
        for (row, whose) in [(*base, "baseline"), (*candidate, "candidate")] {
            if let Some(why) = unfit(row) {
                let text = format!("times are not compared: the {whose} {why}");
                report.find(Kind::Inconclusive, Some(name), text, self.next(whose == "baseline", None));
                return;
            }
        }
        let rule = Rule { threshold: self.terms.threshold, floor: base.floor().max(candidate.floor()) };
        match Comparison::of(&base.samples_us, &candidate.samples_us, rule, SEED) {
            Ok(comparison) => report.compare(name, "time", "us", comparison, |comparison| {
                let fewer = comparison.base_samples < comparison.candidate_samples;
                self.next(fewer, Some(comparison))
            }),
            Err(why) => report.find(Kind::Failure, Some(name), why, None),
        }
    }

    /// The command that measures the row again, of the baseline or of the candidate, and the one that compares then.
    fn next(&self, baseline: bool, comparison: Option<&Comparison>) -> Option<String> {
        let Pair { base, candidate, .. } = self.pair;
        let (row, path) = if baseline { (base, self.paths[0]) } else { (candidate, self.paths[1]) };
        if row.device.is_empty() {
            return None;
        }
        let folder = next::fresh(path, self.number);
        let cap = next::seconds(cap(&row.argv), comparison).to_string();
        let (label, cache, out) = (row.label(), row.cache.as_str(), folder.display().to_string());
        let words = ["highwater", "bench", "--row", &label, "--device", &row.device, "--cache", cache, "--cap", &cap];
        let bench = command_line(words.into_iter().chain(["--out", &out]).map(str::to_owned));
        let other = (base.binary_hash != candidate.binary_hash).then_some(("bench", row.binary_hash.as_str()));
        Some(next::and_gate(&bench, &folder, baseline, self.paths, other))
    }
}

/// Why a row's times say nothing.
fn unfit(row: &Timed) -> Option<String> {
    match () {
        () if row.checked == Some(false) => Some(wrong(row)),
        () if !row.dirty.is_empty() => Some(format!("is dirty ({})", row.dirty)),
        () if row.checked.is_none() && row.is_to_be_checked() => Some("passed no correctness check".to_owned()),
        () if row.samples_us.is_empty() => Some("holds no samples: an earlier build wrote it".to_owned()),
        () => None,
    }
}

/// The `--cap` of a command line.
fn cap(argv: &str) -> f64 {
    let mut words = argv.split_whitespace().skip_while(|word| *word != "--cap" && !word.starts_with("--cap="));
    let word = words.next().and_then(|word| word.strip_prefix("--cap=")).or_else(|| words.next());
    word.and_then(|word| word.parse().ok()).filter(|cap: &f64| cap.is_finite() && *cap > 0.0).unwrap_or(ROW_SECONDS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: Terms = Terms { threshold: 0.01, strict: true, force: false, subset: false };

    fn row(m: u64) -> Timed {
        Timed {
            kernel: "norm".into(),
            model: "qwen3.6-27b".into(),
            part: "rms".into(),
            m,
            cache: "rotate".into(),
            median_us: Some(100.0),
            samples_us: (0..20).map(|i| 100.0 + 0.01 * f64::from(i * 7 % 20)).collect(),
            calls: Some(8),
            checked: Some(true),
            method: 2,
            card: "h200".into(),
            device: "cuda:0".into(),
            driver: "580.1".into(),
            argv: "highwater bench --cap 0.5".into(),
            ..Timed::default()
        }
    }

    fn slower(row: Timed, by: f64) -> Timed {
        let samples_us = row.samples_us.iter().map(|us| us * by).collect();
        Timed { samples_us, median_us: row.median_us.map(|us| us * by), ..row }
    }

    fn compared(base: &[Timed], candidate: &[Timed], terms: Terms) -> Result<Report, Failure> {
        compare(base, candidate, [Path::new("a"), Path::new("b")], terms)
    }

    fn judged(base: &[Timed], candidate: &[Timed]) -> (u8, String) {
        let report = compared(base, candidate, TERMS).unwrap();
        (report.exit_code(), report.text())
    }

    #[test]
    fn each_kernel_is_judged_by_its_samples() {
        let (code, text) = judged(&[row(1), row(8)], &[row(1), row(8)]);
        assert!(code == 0 && text.contains("2 SAME"), "{text}");
        let (code, text) = judged(&[row(1), row(8)], &[row(1), slower(row(8), 1.05)]);
        assert!(code == 3 && text.contains("SLOWER: norm qwen3.6-27b rms M=8 rotate: time "), "{text}");
        let (code, text) = judged(&[row(8)], &[slower(row(8), 0.9)]);
        assert!(code == 0 && text.contains("BETTER"), "{text}");
        let few = Timed { samples_us: vec![100.0; 9], ..row(8) };
        let (code, text) = judged(&[row(8)], &[few]);
        assert!(code == 5 && text.contains("9 samples; 10 are needed"), "{text}");
        assert!(
            text.contains("highwater bench --row 'norm qwen3.6-27b rms M=8' --device cuda:0 --cache rotate --cap 1 ")
        );
        assert!(text.contains("highwater gate a b-again-1 --subset"), "{text}");
    }

    #[test]
    fn what_is_not_fit_is_inconclusive_and_what_is_wrong_or_missing_fails() {
        for (odd, words) in [
            (
                Timed { dirty: "3 of 3 repetitions were disturbed: heat".into(), ..row(8) },
                "the candidate is dirty (3 of 3",
            ),
            (Timed { checked: None, ..row(8) }, "passed no correctness check"),
            (Timed { samples_us: Vec::new(), ..row(8) }, "holds no samples"),
        ] {
            let (code, text) = judged(&[row(8)], &[odd]);
            assert!(code == 5 && text.contains("INCONCLUSIVE") && text.contains(words), "{text}");
        }
        let wrong = Timed { checked: Some(false), note: "off by one".into(), ..row(8) };
        let (code, text) = judged(&[row(8)], std::slice::from_ref(&wrong));
        assert!(code == 1 && text.contains("FAILED: norm") && text.contains("off by one"), "{text}");
        let gone = Timed { median_us: None, note: "out of memory".into(), ..row(8) };
        let (code, text) = judged(&[row(8)], &[gone]);
        assert!(code == 1 && text.contains("timed before, and not now: out of memory"), "{text}");
        let (code, text) = judged(&[row(1), row(8)], &[row(1)]);
        assert!(code == 1 && text.contains("MISSING: norm qwen3.6-27b rms M=8"), "{text}");
        let report = compared(&[row(1), row(8)], &[row(1)], Terms { subset: true, ..TERMS }).unwrap();
        assert_eq!(report.exit_code(), 0);
        // A ceiling has nothing to be checked against.
        let ceiling = || Timed { kernel: "ceiling".into(), checked: None, ..row(1) };
        assert_eq!(judged(&[ceiling()], &[ceiling()]).0, 0);
    }

    #[test]
    fn rows_of_other_conditions_are_refused_by_name_unless_somebody_insists() {
        for (other, words) in [
            (
                Timed { card: "rtx-4090".into(), ..row(8) },
                "card: h200 in the baseline, rtx-4090 in the candidate (1 rows)",
            ),
            (Timed { driver: "590.2".into(), ..row(8) }, "driver: 580.1 in the baseline, 590.2"),
            (Timed { method: 3, ..row(8) }, "method: 2 in the baseline, 3"),
            (Timed { cache: "warm".into(), ..row(8) }, "cache: rotate in the baseline, warm"),
            (Timed { device: "emulated".into(), ..row(8) }, "device: cuda in the baseline, emulated"),
        ] {
            let refused = compared(&[row(8)], std::slice::from_ref(&other), TERMS).unwrap_err().render();
            assert!(refused.contains(words), "{refused}");
            let forced = compared(&[row(8)], &[other], Terms { force: true, ..TERMS }).unwrap();
            assert_eq!(forced.exit_code(), 5, "{}", forced.text());
        }
        assert!(compared(&[row(8)], &[row(1)], TERMS).unwrap_err().render().contains("no kernel in common"));
        // Another card of the same kind is the same; another compiler is told.
        let elsewhere = Timed { device: "cuda:3".into(), rustc: "1.95".into(), ..row(8) };
        let report = compared(&[Timed { rustc: "1.88".into(), ..row(8) }], &[elsewhere], TERMS).unwrap();
        assert!(report.exit_code() == 0 && report.text().contains("NOTE: rustc: 1.88"), "{}", report.text());
    }

    #[test]
    fn two_paths_are_both_tables_of_kernels_or_neither() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(at("a/h200")).unwrap();
        std::fs::write(at("a/h200/kernels.csv"), "kernel\nnorm\n").unwrap();
        assert!(files(&at("a"), &at("a/h200")).unwrap().is_some());
        assert!(files(&at("b"), &at("b")).unwrap().is_none());
        assert!(files(&at("a"), &at("b")).unwrap_err().to_string().contains("is a table of kernels, and"));
        assert_eq!([cap("x --cap 2"), cap("x --cap=0.25"), cap("x"), cap("x --cap")], [2.0, 0.25, 1.0, 1.0]);
    }
}
