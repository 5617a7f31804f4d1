//! The report in short, as Markdown for a pull request: what was run, what fits, what does not, where the most and the
//! slowest is, and what changed between runs.

use std::fmt::Write as _;

use highwater::error::mib;

use super::compare::{Pair, difference, pairs, ratio_text};
use super::load::Input;
use super::methods;
use super::table::summaries;
use super::view::{self, Cell, count, short_tag, why};
use crate::table::{Align, Table, markdown_text, number, or_null};

/// Most lines of a table.
const MAX_SETTINGS: usize = 30;
const MAX_WORST: usize = 5;
const MAX_BAD: usize = 10;
const MAX_PAIRS: usize = 20;

/// The summary.
pub(super) fn markdown(input: &Input) -> String {
    let cells = view::cells(input);
    let ok = cells.iter().filter(|cell| cell.is_ok()).count();
    let oom = cells.iter().filter(|cell| cell.row.status.is_oom()).count();
    let failed = cells.iter().filter(|cell| cell.row.status.is_failure()).count();
    let mut out = format!(
        "### Highwater: {} in {}\n\n{ok} fit, {oom} do not fit, {failed} failed.\n",
        count(cells.len(), "cell"),
        count(input.runs.len(), "run")
    );
    if let Some(kernels) = super::roofline::summary(&input.kernels) {
        let timed = input.kernels.iter().filter(|row| row.kernel != "ceiling").count();
        let _ = writeln!(out, "\n{} of kernels, {kernels}.", count(timed, "timing"));
    }
    if let Some(apart) = methods::apart(input, &cells) {
        let _ = writeln!(out, "\n{}", markdown_text(&apart));
    }
    settings(&mut out, &cells);
    not_fitting(&mut out, &cells);
    worst(&mut out, &cells);
    compared(&mut out, input, &cells);
    out
}

fn settings(out: &mut String, cells: &[Cell]) {
    if cells.is_empty() {
        return;
    }
    let mut table = Table::new(&[
        ("model and card", Align::Left),
        ("cells", Align::Right),
        ("transient at most", Align::Right),
        ("bytes a token", Align::Right),
        ("prefill tok/s at best", Align::Right),
        ("TPOT ms at best", Align::Right),
        ("OOM frontier, chunk", Align::Left),
    ]);
    let summaries = summaries(cells);
    for summary in summaries.iter().take(MAX_SETTINGS) {
        table.push(vec![
            summary.setting.clone(),
            summary.cells.to_string(),
            or_null(summary.transient_most, mib),
            or_null(summary.slope, number),
            or_null(summary.prefill_best, number),
            or_null(summary.tpot_best, number),
            if summary.frontier.is_empty() { "-".into() } else { summary.frontier.join("; ") },
        ]);
    }
    let _ = write!(out, "\n{}", table.without_empty_columns().markdown());
    more(out, summaries.len(), MAX_SETTINGS, "setting");
}

fn not_fitting(out: &mut String, cells: &[Cell]) {
    let mut bad: Vec<&Cell> = cells.iter().filter(|cell| !cell.is_ok()).collect();
    if bad.is_empty() {
        return;
    }
    // Failures first: an answer that memory does not suffice is expected of some cells.
    bad.sort_by_key(|cell| (!cell.row.status.is_failure(), cell.number));
    let mut table = Table::new(&[("cell", Align::Left), ("status", Align::Left), ("why", Align::Left)]);
    for cell in bad.iter().take(MAX_BAD) {
        let place = format!("{}, {}", cell.setting, cell.place());
        table.push(vec![place, cell.row.status.name().into(), crate::table::shortened(&why(cell.row), 200)]);
    }
    let _ = write!(out, "\nDo not fit or failed:\n\n{}", table.markdown());
    more(out, bad.len(), MAX_BAD, "cell");
}

fn worst(out: &mut String, cells: &[Cell]) {
    let mut by_bytes: Vec<&Cell> =
        methods::ranked(cells).filter(|c| c.is_ok() && c.row.transient_peak_bytes.is_some()).collect();
    by_bytes.sort_by_key(|cell| std::cmp::Reverse(cell.row.transient_peak_bytes));
    if !by_bytes.is_empty() {
        let mut table = Table::new(&[("cell", Align::Left), ("transient", Align::Right), ("holds most", Align::Left)]);
        for cell in by_bytes.iter().take(MAX_WORST) {
            let most = cell.row.owners.first();
            table.push(vec![
                format!("{}, {}", cell.setting, cell.place()),
                or_null(cell.row.transient_peak_bytes, mib),
                or_null(most, |owner| format!("{} {}", short_tag(&owner.tag), mib(owner.bytes))),
            ]);
        }
        let _ = write!(out, "\nThe largest transient peaks:\n\n{}", table.markdown());
    }
    let mut by_floor: Vec<(f64, &Cell)> = methods::ranked(cells)
        .filter_map(|cell| Some((cell.tpot?.ms / cell.row.floor_tpot_ms.filter(|floor| *floor > 0.0)?, cell)))
        .collect();
    by_floor.sort_by(|a, b| b.0.total_cmp(&a.0));
    if !by_floor.is_empty() {
        let mut table = Table::new(&[
            ("cell", Align::Left),
            ("TPOT ms", Align::Right),
            ("floor ms", Align::Right),
            ("ratio", Align::Right),
        ]);
        for (ratio, cell) in by_floor.iter().take(MAX_WORST) {
            table.push(vec![
                format!("{}, {}", cell.setting, cell.place()),
                or_null(cell.tpot, |timing| timing.text()),
                or_null(cell.row.floor_tpot_ms, number),
                format!("{ratio:.2}"),
            ]);
        }
        let _ = write!(out, "\nThe furthest from their floor:\n\n{}", table.markdown());
    }
}

fn compared(out: &mut String, input: &Input, cells: &[Cell]) {
    let mut pairs = pairs(cells);
    if pairs.is_empty() {
        return;
    }
    // What changed the most comes first: another status, bytes, then time.
    pairs.sort_by(|a, b| {
        let of = |pair: &Pair| {
            let status = pair.base.row.status != pair.other.row.status;
            let bytes = pair.transient_difference().unwrap_or(0).unsigned_abs();
            let time = Pair::ratio(pair.base.tpot, pair.other.tpot).map_or(0.0, |(ratio, _)| ratio.ln().abs());
            (status, bytes, time)
        };
        let (a, b) = (of(a), of(b));
        b.0.cmp(&a.0).then(b.1.cmp(&a.1)).then(b.2.total_cmp(&a.2))
    });
    let mut table = Table::new(&[
        ("cell", Align::Left),
        ("run", Align::Left),
        ("against", Align::Left),
        ("status", Align::Left),
        ("prefill ratio", Align::Right),
        ("TPOT ratio", Align::Right),
        ("transient", Align::Right),
    ]);
    for pair in pairs.iter().take(MAX_PAIRS) {
        let (was, is) = (pair.base.row.status, pair.other.row.status);
        table.push(vec![
            format!("{}, {}", pair.other.setting, pair.other.place()),
            input.runs[pair.other.run].label.clone(),
            input.runs[pair.base.run].label.clone(),
            if was == is { is.name().into() } else { format!("{} to {}", was.name(), is.name()) },
            or_null(Pair::ratio(pair.base.prefill, pair.other.prefill), ratio_text),
            or_null(Pair::ratio(pair.base.tpot, pair.other.tpot), ratio_text),
            or_null(pair.transient_difference(), difference),
        ]);
    }
    let _ =
        write!(out, "\nThe same cells in two runs (no verdict; `highwater gate` gives one):\n\n{}", table.markdown());
    more(out, pairs.len(), MAX_PAIRS, "pair");
}

fn more(out: &mut String, all: usize, shown: usize, what: &str) {
    if all > shown {
        let _ = writeln!(out, "\n{} not shown.", count(all - shown, &format!("more {what}")));
    }
}
