//! The table of every cell, and the short tables over settings: how many fit, the largest chunk, the best and the worst.

use std::collections::BTreeMap;

use highwater::error::mib;

use super::load::Input;
use super::markup::Markup;
use super::view::{Cell, count, grouped, short_tag, why};
use crate::table::{number, shortened};

/// Most lines of the table of cells. Those that failed or do not fit are never left out for ones that do.
pub(super) const MAX_LINES: usize = 20_000;
/// Most settings of the summary.
pub(super) const MAX_SETTINGS: usize = 200;
/// Longest detail.
const MAX_DETAIL: usize = 300;

/// A setting in short.
pub(super) struct Summary {
    pub(super) setting: String,
    pub(super) cells: usize,
    pub(super) ok: usize,
    pub(super) oom: usize,
    pub(super) failed: usize,
    /// `batch 8: 4096`, for each batch the largest chunk that fits, where a larger one was asked for and does not.
    pub(super) frontier: Vec<String>,
    pub(super) transient_most: Option<u64>,
    /// Transient bytes that a token more of chunk takes, over the steepest pair of neighbouring chunks.
    pub(super) slope: Option<f64>,
    pub(super) prefill_best: Option<f64>,
    pub(super) tpot_best: Option<f64>,
}

/// A summary per setting, in the order they are first seen.
pub(super) fn summaries(cells: &[Cell]) -> Vec<Summary> {
    let one = |(setting, own): (String, Vec<&Cell>)| Summary {
        setting,
        cells: own.len(),
        ok: own.iter().filter(|cell| cell.is_ok()).count(),
        oom: own.iter().filter(|cell| cell.row.status.is_oom()).count(),
        failed: own.iter().filter(|cell| cell.row.status.is_failure()).count(),
        frontier: frontier(&own),
        slope: slope(&own),
        transient_most: own.iter().filter(|c| c.is_ok()).filter_map(|c| c.row.transient_peak_bytes).max(),
        prefill_best: own.iter().filter_map(|cell| cell.prefill_tok_s()).map(|(speed, _)| speed).max_by(f64::total_cmp),
        tpot_best: own.iter().filter_map(|cell| cell.tpot).map(|timing| timing.ms).min_by(f64::total_cmp),
    };
    grouped(cells, |cell| cell.setting.clone()).into_iter().map(one).collect()
}

/// The largest chunk that fits for each depth and batch of which a larger one does not.
fn frontier(cells: &[&Cell]) -> Vec<String> {
    let mut lines: BTreeMap<(u64, u64), (Option<u64>, Option<u64>)> = BTreeMap::new();
    for cell in cells {
        let line = lines.entry((cell.row.depth, cell.row.batch)).or_default();
        if cell.is_ok() {
            line.0 = line.0.max(Some(cell.row.chunk));
        } else if cell.row.status.is_oom() {
            line.1 = Some(line.1.map_or(cell.row.chunk, |least| least.min(cell.row.chunk)));
        }
    }
    let deep = cells.iter().any(|cell| cell.row.depth != cells[0].row.depth);
    lines
        .into_iter()
        .filter_map(|((depth, batch), (fits, least))| {
            let least = least?;
            let at = if deep { format!("depth {depth} batch {batch}") } else { format!("batch {batch}") };
            Some(match fits {
                Some(fits) => format!("{at}: {fits} fits, {least} does not"),
                None => format!("{at}: {least} does not fit"),
            })
        })
        .collect()
}

/// The steepest rise of the transient peak from one chunk to the next of the same batch, depth and workload, in bytes a token.
fn slope(cells: &[&Cell]) -> Option<f64> {
    let mut lines: BTreeMap<_, BTreeMap<u64, u64>> = BTreeMap::new();
    for row in cells.iter().filter(|cell| cell.is_ok()).map(|cell| cell.row) {
        if let Some(peak) = row.transient_peak_bytes {
            lines.entry((row.batch, row.depth, &row.workload)).or_default().insert(row.chunk, peak);
        }
    }
    let rises = lines.values().flat_map(|line| {
        line.iter().zip(line.iter().skip(1)).map(|((c0, p0), (c1, p1))| (*p1 as f64 - *p0 as f64) / (c1 - c0) as f64)
    });
    rises.max_by(f64::total_cmp).filter(|rise| *rise > 0.0)
}

/// A column over settings: its name, whether it holds numbers, and its text.
type Column = (&'static str, bool, fn(&Summary) -> String);

/// The columns in which some setting has a text.
fn summary_columns(summaries: &[Summary]) -> Vec<Column> {
    let all: [Column; 9] = [
        ("cells", true, |s| s.cells.to_string()),
        ("fit", true, |s| s.ok.to_string()),
        ("do not", true, |s| s.oom.to_string()),
        ("failed", true, |s| s.failed.to_string()),
        ("frontier, chunk", false, |s| shortened(&s.frontier.join("; "), MAX_DETAIL)),
        ("transient at most", true, |s| s.transient_most.map_or_else(String::new, mib)),
        ("bytes a token", true, |s| s.slope.map_or_else(String::new, number)),
        ("prefill tok/s at best", true, |s| s.prefill_best.map_or_else(String::new, number)),
        ("TPOT ms at best", true, |s| s.tpot_best.map_or_else(String::new, number)),
    ];
    all.into_iter().filter(|(_, _, of)| summaries.iter().any(|summary| !of(summary).is_empty())).collect()
}

/// The table over settings.
pub(super) fn summary(out: &mut Markup, cells: &[Cell]) {
    let summaries = summaries(cells);
    out.open("div", &[("class", "scroll"), ("role", "region"), ("tabindex", "0"), ("aria-label", "Settings")]);
    let columns = summary_columns(&summaries);
    out.open("table", &[("class", "sortable")]).open("thead", &[]).open("tr", &[]);
    out.leaf("th", &[("scope", "col")], "model and card");
    for (name, ..) in &columns {
        out.leaf("th", &[("scope", "col")], name);
    }
    out.close("tr").close("thead").open("tbody", &[]);
    for summary in summaries.iter().take(MAX_SETTINGS) {
        out.open("tr", &[]).leaf("th", &[("scope", "row")], &summary.setting);
        for (_, is_number, of) in &columns {
            let attrs: &[(&'static str, &str)] = if *is_number { &[("class", "n")] } else { &[] };
            out.leaf("td", attrs, &of(summary));
        }
        out.close("tr").line();
    }
    out.close("tbody").close("table").close("div").line();
    if summaries.len() > MAX_SETTINGS {
        let text = format!("{} not shown.", count(summaries.len() - MAX_SETTINGS, "more setting"));
        out.leaf("p", &[("class", "note")], &text);
    }
}

/// The table of cells.
pub(super) fn section(input: &Input, cells: &[Cell]) -> Markup {
    const COLUMNS: [(&str, &str); 18] = [
        ("#", "n"),
        ("run", "w"),
        ("model and card", "w"),
        ("chunk", "n"),
        ("batch", "n"),
        ("depth", "n"),
        ("prompt", "n"),
        ("output", "n"),
        ("status", "status"),
        ("resident", "n"),
        ("transient", "n"),
        ("free", "n"),
        ("prefill tok/s", "n"),
        ("prefill ms [95 %]", "n"),
        ("TTFT ms", "n"),
        ("TPOT ms [95 %]", "n"),
        ("TPOT floor ms", "n"),
        ("holds most, or why", "w"),
    ];
    let mut out = Markup::new();
    let mut shown: Vec<&Cell> = cells.iter().collect();
    if shown.len() > MAX_LINES {
        shown.sort_by_key(|cell| (cell.is_ok(), cell.number));
        shown.truncate(MAX_LINES);
        shown.sort_by_key(|cell| cell.number);
    }
    out.open("div", &[("class", "scroll tall"), ("role", "region"), ("tabindex", "0"), ("aria-label", "All cells")]);
    out.open("table", &[("class", "sortable cells"), ("id", "all")]).open("thead", &[]).open("tr", &[]);
    // What is the same for all cells stands above, in the summary.
    let one_run = input.runs.len() == 1;
    let one_setting = cells.iter().all(|cell| cell.setting == cells[0].setting);
    let hidden = |at: usize| (at == 1 && one_run) || (at == 2 && one_setting);
    for (_, (name, _)) in COLUMNS.iter().enumerate().filter(|(at, _)| !hidden(*at)) {
        out.leaf("th", &[("scope", "col")], name);
    }
    out.close("tr").close("thead").open("tbody", &[]).line();
    for cell in shown {
        let row = cell.row;
        let number_of = |value: Option<u64>| value.map_or_else(String::new, |value| value.to_string());
        let bytes = |value: Option<u64>| value.map_or_else(String::new, mib);
        let speed = |value: Option<f64>| value.map_or_else(String::new, number);
        let last = match row.owners.first() {
            Some(owner) if cell.is_ok() => format!("{} {}", short_tag(&owner.tag), mib(owner.bytes)),
            _ if row.oom_short_bytes.is_some() => why(row),
            _ => row.detail.clone().unwrap_or_default(),
        };
        let mut last = shortened(&last, MAX_DETAIL);
        if let Some(dirty) = &row.dirty {
            last = format!("{last}; disturbed: {}", shortened(dirty, 80));
        }
        let fields = [
            cell.number.to_string(),
            shortened(&input.runs[cell.run].label, 60),
            cell.setting.clone(),
            row.chunk.to_string(),
            row.batch.to_string(),
            row.depth.to_string(),
            number_of(row.prompt),
            number_of(row.output),
            row.status.name().to_owned(),
            bytes(row.resident_bytes),
            bytes(row.transient_peak_bytes),
            bytes(row.free_bytes),
            speed(cell.prefill_tok_s().map(|(speed, _)| speed)),
            cell.prefill.map_or_else(String::new, |timing| timing.text()),
            speed(row.ttft_ms),
            cell.tpot.map_or_else(String::new, |timing| timing.text()),
            speed(row.floor_tpot_ms),
            last,
        ];
        let class = match row.status {
            _ if cell.is_ok() => "",
            status if status.is_oom() => "is-oom",
            status if status.is_failure() => "is-bad",
            _ => "",
        };
        out.open("tr", &[("id", &format!("c{}", cell.number)), ("class", class)]);
        for (_, (field, (_, class))) in fields.iter().zip(COLUMNS).enumerate().filter(|(at, _)| !hidden(*at)) {
            out.leaf("td", &[("class", class)], field);
        }
        out.close("tr").line();
    }
    out.close("tbody").close("table").close("div");
    if cells.len() > MAX_LINES {
        let text =
            format!("{} that fit are left out; the run's own files have all.", count(cells.len() - MAX_LINES, "cell"));
        out.leaf("p", &[("class", "note")], &text);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::ok_row;
    use crate::report::load::Run;
    use crate::report::view::cells;
    use crate::status::Status;

    #[test]
    fn a_frontier_is_told_where_a_larger_chunk_does_not_fit() {
        let mut rows: Vec<_> =
            [(512, 1), (1024, 1), (512, 2), (1024, 2), (512, 4)].map(|(c, b)| ok_row(c, b, 7)).into();
        rows[3].set_status(Status::Oom, "x");
        rows[4].set_status(Status::OomPredicted, "x");
        let input = Input { runs: vec![Run { label: "r".into(), rows, torn: false }], ..Input::default() };
        let summaries = summaries(&cells(&input));
        assert_eq!(summaries.len(), 1);
        assert_eq!(summaries[0].frontier, ["batch 2: 512 fits, 1024 does not", "batch 4: 512 does not fit"]);
        assert_eq!((summaries[0].cells, summaries[0].ok, summaries[0].oom, summaries[0].failed), (5, 3, 2, 0));
    }

    #[test]
    fn a_table_past_its_bound_keeps_what_failed() {
        let mut rows: Vec<_> = (0..MAX_LINES as u64 + 10).map(|n| ok_row(n + 1, 1, 7)).collect();
        rows.last_mut().unwrap().set_status(Status::Error, "the last one failed");
        let input = Input { runs: vec![Run { label: "r".into(), rows, torn: false }], ..Input::default() };
        let html = section(&input, &cells(&input)).finish();
        assert_eq!(html.matches("<tr id=").count(), MAX_LINES);
        assert!(html.contains("the last one failed") && html.contains("10 cells that fit are left out"));
    }
}
