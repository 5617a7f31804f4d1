//! What there is to know of two whole runs, a line each: what no cell is the worse for by itself.

use highwater::error::mib;

use super::clocks;
use super::compare::Pair;
use super::report::{Kind, Report};
use super::runs::Run;
use crate::record::{DRIVERS_OWN_BYTES, Row};
use crate::status::Status;

/// Adds the notes on all cells that ran in both runs.
pub(super) fn find(pairs: &[Pair], report: &mut Report) {
    let ran = || pairs.iter().filter(|pair| both_ran(pair));
    for line in clocks::held(ran().map(|pair| (pair.base, pair.candidate))) {
        report.find(Kind::Note, None, line, None);
    }
    let others: Vec<&str> =
        ran().filter(|pair| other_tokens(pair.base, pair.candidate)).map(|p| p.name.as_str()).collect();
    if let Some(first) = others.first() {
        let text = format!(
            "{} of {} cells generated other tokens than in the baseline, the first of them {first}: rounding may be why \
             (another order of sums), and so may be a wrong result",
            others.len(),
            ran().count()
        );
        report.find(Kind::Note, None, text, None);
    }
    let grown = report.bytes.iter().filter_map(|bytes| {
        let outside = bytes.memory.outside.as_ref()?;
        Some((outside.little()?, outside.most(), bytes.cell.as_str()))
    });
    let grown: Vec<_> = grown.collect();
    if let Some((most, part, cell)) = grown.iter().max_by_key(|(by, ..)| *by) {
        let text = format!(
            "{} of {} cells take more memory outside the slab, at most {} ({part}, {cell}), which is within the {} that a \
             driver takes by itself",
            grown.len(),
            report.bytes.len(),
            mib(*most),
            mib(DRIVERS_OWN_BYTES)
        );
        report.find(Kind::Note, None, text, None);
    }
}

/// Says once where a run was read from a CSV and so no times are compared: that is no pass, unless there are none to compare.
pub(super) fn find_unsampled(runs: [&Run; 2], pairs: &[Pair], report: &mut Report) {
    let files: Vec<String> = runs.iter().filter(|run| run.is_csv()).map(|run| run.file.display().to_string()).collect();
    let timed = pairs.iter().any(|pair| both_ran(pair) && pair.base.device != "plan");
    if timed && !files.is_empty() {
        let text =
            format!("CSV holds no samples, so no times are compared: give sweep.jsonl for {}", files.join(" and "));
        report.find(Kind::Inconclusive, None, text, None);
    }
}

fn both_ran(pair: &Pair) -> bool {
    pair.base.status == Status::Ok && pair.candidate.status == Status::Ok
}

/// Whether both rows say what they generated from the same weights, and it is not the same. Their types of values are: they
/// are part of what makes them one cell.
fn other_tokens(base: &Row, candidate: &Row) -> bool {
    let both = base.output_hash.as_ref().zip(candidate.output_hash.as_ref());
    base.weights_source == candidate.weights_source && both.is_some_and(|(before, after)| before != after)
}
