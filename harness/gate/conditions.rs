//! Whether what two runs measured may be compared at all: rows of other conditions are refused, or told where that is forced,
//! for cells of sweeps and for kernels alike.

use std::collections::BTreeMap;
use std::fmt;

use crate::failure::{FAILED, Failure, UNDECIDED};
use crate::gate::compare::Terms;
use crate::gate::report::{Kind, Report};

/// A condition of measurement on which two rows disagree.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub(crate) struct Difference {
    /// Which.
    pub(crate) what: &'static str,
    /// What the baseline has.
    pub(crate) baseline: String,
    /// What the candidate has.
    pub(crate) candidate: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} in the baseline, {} in the candidate", self.what, self.baseline, self.candidate)
    }
}

/// Conditions of a row, each with its name.
pub(crate) type Conditions = Vec<(&'static str, String)>;

/// Where the conditions that both have differ.
pub(crate) fn differing(base: Conditions, candidate: Conditions) -> Vec<Difference> {
    let both = base.into_iter().zip(candidate).filter(|((what, a), (other, b))| what == other && a != b);
    both.map(|((what, baseline), (_, candidate))| Difference { what, baseline, candidate }).collect()
}

/// What is compared, in words.
pub(crate) struct Words {
    /// What two runs may have in common.
    pub(crate) one: &'static str,
    /// What a condition is counted in.
    pub(crate) counted: &'static str,
    /// What a baseline must be the same in.
    pub(crate) alike: &'static str,
}

/// How two rows' conditions differ.
type Differ<R> = fn(&R, &R) -> Vec<Difference>;

/// Refuses runs that have no row in common, and without `--force` rows whose conditions differ by the first of `differ`; tells
/// what differs by the second.
pub(crate) fn hold<R>(
    pairs: &[(&R, &R)],
    [refused, told]: [Differ<R>; 2],
    words: &Words,
    terms: Terms,
    report: &mut Report,
) -> Result<(), Failure> {
    let (from, to) = (&report.baseline, &report.candidate);
    if pairs.is_empty() {
        return Err(Failure::found(FAILED, format!("{from} and {to} have no {} in common", words.one)));
    }
    let listed = counted(pairs, refused, words.counted);
    if !listed.is_empty() && !terms.force {
        let code = if terms.strict { UNDECIDED } else { FAILED };
        let what = format!("{from} and {to} were not measured alike: {}", listed.join("; "));
        let help = format!("take a baseline of the same {}, or say --force to compare them all the same", words.alike);
        return Err(Failure::found(code, what).with_help(&help));
    }
    for text in listed {
        report.find(Kind::Environment, None, text, None);
    }
    for text in counted(pairs, told, words.counted) {
        report.find(Kind::Note, None, text, None);
    }
    Ok(())
}

/// What differs in the pairs, each once, with the number of them it is of.
fn counted<R>(pairs: &[(&R, &R)], differ: Differ<R>, of: &str) -> Vec<String> {
    let mut found: BTreeMap<Difference, usize> = BTreeMap::new();
    for difference in pairs.iter().flat_map(|(base, candidate)| differ(base, candidate)) {
        *found.entry(difference).or_default() += 1;
    }
    found.iter().map(|(difference, n)| format!("{difference} ({n} {of})")).collect()
}
