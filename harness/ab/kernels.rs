//! Kernels side by side: the files that `bench --out` wrote, read back.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::{AbArgs, paired};
use crate::bench::read::{Timed, find, read};
use crate::failure::Failure;
use crate::gate::kernels::tools_differ;
use crate::gate::report::{Kind, Report};
use crate::verdict::Rule;

/// Judges the kernels that every process of both sides timed.
pub(super) fn report(folders: &[Vec<PathBuf>; 2], args: &AbArgs, next: &str) -> Result<Report, Failure> {
    let read_all =
        |folders: &[PathBuf]| folders.iter().map(|folder| read_one(folder)).collect::<Result<Vec<Vec<Timed>>>>();
    let (bases, candidates) = (read_all(&folders[0])?, read_all(&folders[1])?);
    one_cache(&bases, &candidates)?;
    let mut report = Report::new(String::new(), String::new(), args.judge.threshold, args.judge.strict);
    for difference in tools_differ(&bases[0][0], &candidates[0][0]) {
        report.find(Kind::Note, None, difference.to_string(), None);
    }
    for row in &bases[0] {
        let name = row.name();
        let times = |runs: &[Vec<Timed>]| -> Option<Vec<f64>> {
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
fn one_cache(bases: &[Vec<Timed>], candidates: &[Vec<Timed>]) -> Result<()> {
    let of = |runs: &[Vec<Timed>]| runs.iter().flatten().map(|row| row.cache.clone()).collect::<BTreeSet<_>>();
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

/// The rows of the one table under `folder`: it lies in a folder of the card's name.
fn read_one(folder: &Path) -> Result<Vec<Timed>> {
    let file = find(folder)?.with_context(|| format!("{} holds no kernels.csv", folder.display()))?;
    read(&file)
}
