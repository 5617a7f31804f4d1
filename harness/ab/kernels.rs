//! Kernels side by side: the files that `bench --out` wrote, read back.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use super::{AbArgs, paired};
use crate::failure::Failure;
use crate::gate::criterion::FLOOR_NS;
use crate::gate::key::Difference;
use crate::gate::report::{Kind, Report};
use crate::verdict::{Rule, STEP_FLOOR_MS};

/// A row of kernels.csv, as far as it is read.
#[derive(Debug, Deserialize)]
struct Row {
    kernel: String,
    model: String,
    part: String,
    scheme: String,
    m: u64,
    cache: String,
    median_us: Option<f64>,
    calls: Option<u64>,
    checked: Option<bool>,
    #[serde(default)]
    rustc: String,
    #[serde(default)]
    cargo_flags: String,
    #[serde(default)]
    nvrtc: String,
    #[serde(default)]
    nvrtc_options: String,
}

impl Row {
    /// The compilers behind it and what they were given; empty where an earlier build wrote it.
    fn tools(&self) -> [(&'static str, &str); 4] {
        let Row { rustc, cargo_flags, nvrtc, nvrtc_options, .. } = self;
        [("rustc", rustc), ("cargo flags", cargo_flags), ("NVRTC", nvrtc), ("NVRTC options", nvrtc_options)]
    }

    fn name(&self) -> String {
        let Row { kernel, model, part, scheme, m, cache, .. } = self;
        let words = [kernel.as_str(), model, part, scheme].into_iter().filter(|word| !word.is_empty());
        format!("{} M={m} {cache}", words.collect::<Vec<_>>().join(" "))
    }

    /// us below which a difference is none: a call by itself is a launch, and one of a group the mean of many.
    fn floor(&self) -> f64 {
        if self.calls.is_some_and(|calls| calls > 1) { FLOOR_NS / 1e3 } else { STEP_FLOOR_MS * 1e3 }
    }
}

/// Judges the kernels that every process of both sides timed.
pub(super) fn report(folders: &[Vec<PathBuf>; 2], args: &AbArgs, next: &str) -> Result<Report, Failure> {
    let read_all = |folders: &[PathBuf]| folders.iter().map(|folder| read(folder)).collect::<Result<Vec<Vec<Row>>>>();
    let (bases, candidates) = (read_all(&folders[0])?, read_all(&folders[1])?);
    one_cache(&bases, &candidates)?;
    let mut report = Report::new(String::new(), String::new(), args.judge.threshold, args.judge.strict);
    for ((what, base), (_, candidate)) in bases[0][0].tools().into_iter().zip(candidates[0][0].tools()) {
        if base != candidate && !base.is_empty() && !candidate.is_empty() {
            let (baseline, candidate) = (base.to_owned(), candidate.to_owned());
            report.find(Kind::Note, None, Difference { what, baseline, candidate }.to_string(), None);
        }
    }
    for row in &bases[0] {
        let name = row.name();
        let times = |runs: &[Vec<Row>]| -> Option<Vec<f64>> {
            runs.iter().map(|rows| rows.iter().find(|other| other.name() == name)?.median_us).collect()
        };
        let wrong = bases.iter().chain(&candidates).flatten().any(|r| r.name() == name && r.checked == Some(false));
        if wrong {
            report.find(Kind::Failure, Some(&name), "its result was wrong in some process", None);
            continue;
        }
        match (times(&bases), times(&candidates)) {
            (Some(base), Some(candidate)) => {
                report.cells += 1;
                let rule = Rule { threshold: args.judge.threshold, floor: row.floor() };
                match paired(&base, &candidate, rule) {
                    Ok(comparison) => report.compare(&name, "time", "us", comparison, |_| Some(next.to_owned())),
                    Err(why) => report.find(Kind::Failure, Some(&name), why, None),
                }
            }
            (Some(_), None) => report.find(Kind::Missing, Some(&name), "not timed by every candidate", None),
            (None, _) => report.find(Kind::Note, Some(&name), "not timed by every base", None),
        }
    }
    if report.cells == 0 {
        return Err(anyhow::anyhow!("the two have no kernel in common").into());
    }
    Ok(report)
}

/// Refuses kernels that were not all timed with the same in the cache: they differ for that, whatever the builds.
fn one_cache(bases: &[Vec<Row>], candidates: &[Vec<Row>]) -> Result<()> {
    let of = |runs: &[Vec<Row>]| runs.iter().flatten().map(|row| row.cache.clone()).collect::<BTreeSet<_>>();
    let [base, candidate] = [of(bases), of(candidates)];
    let all: BTreeSet<&String> = base.union(&candidate).collect();
    let named = |caches: &BTreeSet<String>| caches.iter().cloned().collect::<Vec<_>>().join(" and ");
    ensure!(
        all.len() == 1,
        "the base timed its kernels with cache {}, the candidate with {}: two of these are never compared; give both one \
         `bench --cache`",
        named(&base),
        named(&candidate)
    );
    Ok(())
}

/// The rows of the one kernels.csv under `folder`: it lies in a folder of the card's name.
fn read(folder: &Path) -> Result<Vec<Row>> {
    let at = || format!("{} holds no kernels.csv", folder.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(at)? {
        let file = entry.with_context(at)?.path().join("kernels.csv");
        files.extend(file.is_file().then_some(file));
    }
    let [file] = &files[..] else { bail!("{} holds {} files kernels.csv, and not one", folder.display(), files.len()) };
    let mut reader = csv::Reader::from_path(file).with_context(|| format!("cannot open {}", file.display()))?;
    let mut rows = Vec::new();
    for row in reader.deserialize() {
        rows.push(row.with_context(|| format!("{} row {}", file.display(), rows.len() + 1))?);
    }
    ensure!(!rows.is_empty(), "{} holds no rows", file.display());
    Ok(rows)
}
