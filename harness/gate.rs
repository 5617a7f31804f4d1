//! `gate`: a run held to an earlier one, what `cargo bench` left to a saved baseline, or this program to itself.
//!
//! `runs` reads, `key` matches, `conditions` says what may be compared, `compare` judges cell by cell with `memory` (`outside` is what
//! lies beside the slab), `clocks` and `edges`; `notes` says what there is to know of whole runs, `next` is what to run where
//! nothing is concluded, `report` how it all reads and the exit code. `kernels` judges the tables that `bench` writes;
//! `criterion` reads criterion's files; `self_test` measures how often the verdicts are wrong on this machine, and `rates` how
//! well that is known.

pub(crate) mod cli;
mod clocks;
pub(crate) mod compare;
pub(crate) mod conditions;
pub(crate) mod criterion;
mod edges;
pub(crate) mod kernels;
pub(crate) mod key;
pub(crate) mod memory;
mod next;
mod notes;
pub(crate) mod outside;
mod rates;
pub(crate) mod report;
pub(crate) mod runs;
mod self_test;

#[cfg(test)]
mod noise;

use self::cli::GateArgs;
use self::compare::Terms;
use self::runs::Run;
use crate::failure::Failure;

/// `gate`.
pub(crate) fn gate(args: &GateArgs) -> Result<(), Failure> {
    args.check().map_err(|error| Failure::request("gate", &error))?;
    let judge = &args.judge;
    let saved = args.saved.as_deref().unwrap_or("base");
    let report = match (&args.baseline, &args.candidate, &args.criterion, args.self_test) {
        (_, _, _, Some(comparisons)) => return self_test::self_test(args, comparisons),
        (_, _, Some(folder), _) => criterion::gate(folder, saved, judge.threshold, judge.strict, args.subset)?,
        (Some(baseline), Some(candidate), ..) => {
            let terms = Terms::of(judge, args.subset);
            if let Some(files) = kernels::files(baseline, candidate)? {
                kernels::gate(&files, [baseline, candidate], terms)?
            } else {
                let (baseline, mut candidate) = (Run::read(baseline)?.into_baseline()?, Run::read(candidate)?);
                if baseline.is_the_file_of(&candidate) {
                    candidate.notes.push("baseline and candidate are one run: it is held to itself".into());
                }
                compare::compare(&baseline, &candidate, terms)?
            }
        }
        _ => return Err(Failure::request("gate", &anyhow::anyhow!("it takes a baseline and a candidate"))),
    };
    report.end(judge.json, judge.markdown.as_deref())
}
