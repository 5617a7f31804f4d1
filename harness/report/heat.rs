//! The heat map: transient bytes by chunk and batch, a grid per run, setting and depth, with the frontier drawn.
//!
//! It is a table: rows are batches, columns chunks, and each cell is a link to its line in the table of all cells. What does
//! not fit is hatched and says so in words; the thick line is the frontier between what fits and what does not.

use std::collections::{BTreeMap, BTreeSet};

use highwater::error::mib;

use super::load::Input;
use super::markup::Markup;
use super::view::{Cell, count, grouped};
use crate::record::Row;
use crate::table::number;

/// Most grids that one report draws.
const MAX_GRIDS: usize = 60;
/// Steps of the colour scale.
const STEPS: usize = 7;

/// The section's body.
pub(super) fn section(input: &Input, cells: &[Cell]) -> Markup {
    let mut out = Markup::new();
    let grids = grouped(cells, |cell| (cell.run, cell.setting.clone(), cell.row.depth));
    let drawn = &grids[..grids.len().min(MAX_GRIDS)];
    let scale = Scale::of(cells);
    out.open("p", &[("class", "note")]);
    out.text(
        "Transient peak: bytes a step needs beyond what is resident. A stronger colour is more, by the logarithm, over the whole page. \
         Below it: prefill and TPOT, where measured. A thick line is the frontier between cells that fit and cells that do \
         not. Each cell leads to its line in the table.",
    );
    out.close("p");
    legend(&mut out);
    out.open("div", &[("class", "grids")]).line();
    for ((run, setting, depth), own) in drawn {
        grid(&mut out, &input.runs[*run].label, setting, *depth, own, &scale);
    }
    out.close("div");
    if grids.len() > MAX_GRIDS {
        let left = count(grids.len() - MAX_GRIDS, "more grid");
        out.leaf("p", &[("class", "note")], &format!("{left} not drawn; their cells are in the table."));
    }
    out
}

/// Where a value stands between the least and the most of the page, by logarithm.
struct Scale {
    low: f64,
    high: f64,
}

impl Scale {
    fn of(cells: &[Cell]) -> Scale {
        let logs = || cells.iter().filter(|c| c.is_ok()).filter_map(|c| c.row.transient_peak_bytes).map(log2);
        Scale { low: logs().fold(f64::INFINITY, f64::min), high: logs().fold(0.0, f64::max) }
    }

    fn class(&self, bytes: u64) -> &'static str {
        const CLASSES: [&str; STEPS] = ["q0", "q1", "q2", "q3", "q4", "q5", "q6"];
        let share = if self.high > self.low { (log2(bytes) - self.low) / (self.high - self.low) } else { 0.3 };
        CLASSES[((share * STEPS as f64) as usize).min(STEPS - 1)]
    }
}

fn log2(bytes: u64) -> f64 {
    (bytes.max(1) as f64).log2()
}

fn legend(out: &mut Markup) {
    out.open("p", &[("class", "key")]);
    out.leaf("span", &[("class", "swatch q0")], "least");
    for class in ["q1", "q2", "q3", "q4", "q5"] {
        out.leaf("span", &[("class", &format!("swatch {class}"))], "");
    }
    out.leaf("span", &[("class", "swatch q6")], "most");
    out.leaf("span", &[("class", "swatch oom")], "does not fit");
    out.leaf("span", &[("class", "swatch bad")], "failed");
    out.leaf("span", &[("class", "swatch edge")], "frontier");
    out.close("p").line();
}

fn grid(out: &mut Markup, run: &str, setting: &str, depth: u64, cells: &[&Cell], scale: &Scale) {
    let mut at: BTreeMap<(u64, u64), &Cell> = BTreeMap::new();
    for cell in cells {
        at.insert((cell.row.batch, cell.row.chunk), cell);
    }
    let hidden = cells.len() - at.len();
    let chunks: BTreeSet<u64> = cells.iter().map(|cell| cell.row.chunk).collect();
    let chunks: Vec<u64> = chunks.into_iter().collect();
    let batches: BTreeSet<u64> = cells.iter().map(|cell| cell.row.batch).collect();
    let batches: Vec<u64> = batches.into_iter().collect();

    out.open("figure", &[("class", "grid")]);
    out.open("figcaption", &[]);
    out.leaf("b", &[], setting);
    let lengths = [same("prompt", cells, |row| row.prompt), same("output", cells, |row| row.output)];
    let mut under = format!("{run}: depth {depth}");
    for length in lengths.into_iter().flatten() {
        under.push_str(", ");
        under.push_str(&length);
    }
    out.leaf("span", &[], &under);
    out.close("figcaption");
    let label = format!("{setting}, depth {depth}: chunk by batch");
    out.open("div", &[("class", "scroll"), ("role", "region"), ("tabindex", "0"), ("aria-label", &label)]);
    out.open("table", &[("class", "heat")]).open("thead", &[]).open("tr", &[]);
    out.leaf("th", &[("scope", "col")], "batch \\ chunk");
    for chunk in &chunks {
        out.leaf("th", &[("scope", "col")], &chunk.to_string());
    }
    out.close("tr").close("thead").open("tbody", &[]);
    for (line, batch) in batches.iter().enumerate() {
        out.open("tr", &[]).leaf("th", &[("scope", "row")], &batch.to_string());
        for (column, chunk) in chunks.iter().enumerate() {
            let Some(cell) = at.get(&(*batch, *chunk)) else {
                out.leaf("td", &[("class", "none")], "·");
                continue;
            };
            let oom_at = |batch: Option<&u64>, chunk: Option<&u64>| {
                let next = batch.zip(chunk).and_then(|(batch, chunk)| at.get(&(*batch, *chunk)));
                cell.is_ok() && next.is_some_and(|next| next.row.status.is_oom())
            };
            let mut class = match cell.row.transient_peak_bytes {
                Some(bytes) if cell.is_ok() => scale.class(bytes),
                _ if cell.row.status.is_oom() => "oom",
                _ => "bad",
            }
            .to_owned();
            if oom_at(Some(batch), chunks.get(column + 1)) {
                class.push_str(" er");
            }
            if oom_at(batches.get(line + 1), Some(chunk)) {
                class.push_str(" eb");
            }
            out.open("td", &[("class", &class)]);
            content(out, cell);
            out.close("td");
        }
        out.close("tr");
    }
    out.close("tbody").close("table").close("div");
    if hidden > 0 {
        let text =
            format!("{} under a later cell of the same chunk and batch; the table has all.", count(hidden, "cell"));
        out.leaf("p", &[("class", "note")], &text);
    }
    out.close("figure").line();
}

fn content(out: &mut Markup, cell: &Cell) {
    out.open("a", &[("href", &cell.href()), ("class", "r"), ("aria-label", &cell.about())]);
    let row = cell.row;
    if cell.is_ok() {
        out.text(&row.transient_peak_bytes.map_or_else(|| "ok".into(), mib));
        if let Some((speed, _)) = cell.prefill_tok_s() {
            out.leaf("small", &[], &format!("{} tok/s", number(speed)));
        }
        if let Some(tpot) = cell.tpot {
            out.leaf("small", &[], &format!("{} ms", number(tpot.ms)));
        }
    } else if row.status.is_oom() {
        out.text("OOM");
        match row.oom_short_bytes {
            Some(short) => out.leaf("small", &[], &format!("short {}", mib(short))),
            None => out.leaf("small", &[], "not tried"),
        };
    } else {
        out.text(row.status.name());
    }
    out.close("a");
}

/// `prompt 32` where all cells agree, `prompt = chunk` where each has its chunk's.
fn same(name: &str, cells: &[&Cell], of: impl Fn(&Row) -> Option<u64>) -> Option<String> {
    let first = of(cells.first()?.row)?;
    if cells.iter().all(|cell| of(cell.row) == Some(first)) {
        return Some(format!("{name} {first}"));
    }
    cells.iter().all(|cell| of(cell.row) == Some(cell.row.chunk)).then(|| format!("{name} = chunk"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::ok_row;
    use crate::report::load::Run;
    use crate::report::view::cells;
    use crate::status::Status;

    fn drawn(rows: Vec<Row>) -> String {
        let input = Input { runs: vec![Run { label: "run".into(), rows, torn: false }], ..Input::default() };
        section(&input, &cells(&input)).finish()
    }

    #[test]
    fn the_frontier_runs_between_what_fits_and_what_does_not() {
        let mut rows: Vec<Row> =
            [(512, 1), (1024, 1), (512, 2), (1024, 2)].map(|(chunk, batch)| ok_row(chunk, batch, chunk << 20)).into();
        rows[3].set_status(Status::OomPredicted, "logits");
        rows[3].oom_short_bytes = Some(3 << 30);
        let html = drawn(rows);
        assert_eq!(html.matches(" er\"").count(), 1, "{html}");
        assert_eq!(html.matches(" eb\"").count(), 1);
        assert!(html.contains("<td class=\"oom\"") && html.contains("OOM<small>short 3.00 GiB</small>"));
        assert!(html.contains("class=\"q0 eb\"") || html.contains("class=\"q6 eb\""), "{html}");
    }

    #[test]
    fn a_failed_cell_is_neither_and_one_that_is_missing_says_so() {
        let mut rows = vec![ok_row(512, 1, 1), ok_row(1024, 2, 1)];
        rows[1].set_status(Status::Timeout, "ran past its time");
        let html = drawn(rows);
        assert!(html.contains("<td class=\"bad\"") && html.contains(">timeout</a>"));
        assert_eq!(html.matches("class=\"none\"").count(), 2);
        assert!(!html.contains(" er\"") && !html.contains(" eb\""));
    }
}
