//! The cells of a report as its sections see them: numbered over all runs, under the setting they share, with intervals.

use highwater::error::mib;

use super::load::Input;
use crate::formats::cell_name;
use crate::record::Row;
use crate::stats::Interval;
use crate::status::Status;
use crate::table::{number, subject};

/// Rows up to which intervals that a row does not hold are made from its samples.
const BOOTSTRAP_ROWS: usize = 1000;
/// Level and seed of those intervals.
const LEVEL: f64 = 0.95;
const SEED: u64 = 0;

/// A time with its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Timing {
    /// Median, ms.
    pub(super) ms: f64,
    /// Ends of its interval, ms, where there is one.
    pub(super) interval: Option<(f64, f64)>,
}

impl Timing {
    fn of(ms: Option<f64>, ends: Option<(f64, f64)>, sample: &[f64], bootstrap: bool) -> Option<Timing> {
        let ms = ms.filter(|ms| ms.is_finite() && *ms > 0.0)?;
        let made = || {
            let interval = bootstrap.then(|| Interval::of_median(sample, LEVEL, SEED)).flatten()?;
            Some((interval.low, interval.high))
        };
        let interval = ends.or_else(made).filter(|(low, high)| *low > 0.0 && low <= high && high.is_finite());
        Some(Timing { ms, interval })
    }

    /// The time, and its interval in brackets.
    pub(super) fn text(&self) -> String {
        match self.interval {
            Some((low, high)) => format!("{} [{}, {}]", number(self.ms), number(low), number(high)),
            None => number(self.ms),
        }
    }
}

/// A row of the report.
#[derive(Debug)]
pub(super) struct Cell<'a> {
    /// Its number over all runs, from 1: its row in the table is `#cN`.
    pub(super) number: usize,
    /// Its run's place in the input.
    pub(super) run: usize,
    /// The row.
    pub(super) row: &'a Row,
    /// Model, recipe, card and whatever else is the same over a grid.
    pub(super) setting: String,
    /// What makes it the same cell in another run; a fault is no part of it.
    pub(super) identity: String,
    /// Prefill.
    pub(super) prefill: Option<Timing>,
    /// Time per output token.
    pub(super) tpot: Option<Timing>,
}

impl Cell<'_> {
    /// The table's row, as a link.
    pub(super) fn href(&self) -> String {
        format!("#c{}", self.number)
    }

    /// Whether it ran or was planned to the end.
    pub(super) fn is_ok(&self) -> bool {
        self.row.status == Status::Ok
    }

    /// `chunk 512, batch 8, depth 0`.
    pub(super) fn place(&self) -> String {
        format!("chunk {}, batch {}, depth {}", self.row.chunk, self.row.batch, self.row.depth)
    }

    /// Prompt tokens per second, with the interval that the prefill's has.
    pub(super) fn prefill_tok_s(&self) -> Option<(f64, Option<(f64, f64)>)> {
        let timing = self.prefill?;
        let speed = self.row.prefill_tok_s.filter(|speed| speed.is_finite() && *speed > 0.0)?;
        let at = |ms: f64| speed * timing.ms / ms;
        Some((speed, timing.interval.map(|(low, high)| (at(high), at(low)))))
    }

    /// All that a reader wants to know of it in one line.
    pub(super) fn about(&self) -> String {
        let row = self.row;
        let mut parts = vec![format!("{}: {}", self.place(), row.status.name())];
        if self.is_ok() {
            if let Some(bytes) = row.transient_peak_bytes {
                parts.push(format!("transient peak {}", mib(bytes)));
            }
            if let Some(owner) = row.owners.first() {
                parts.push(format!("most of it {} {}", short_tag(&owner.tag), mib(owner.bytes)));
            }
            if let Some(bytes) = row.free_bytes {
                parts.push(format!("{} free", mib(bytes)));
            }
            if let Some((speed, _)) = self.prefill_tok_s() {
                parts.push(format!("prefill {} tok/s", number(speed)));
            }
            if let Some(tpot) = self.tpot {
                parts.push(format!("TPOT {} ms", tpot.text()));
            }
        } else {
            parts.push(crate::table::shortened(&why(row), 160));
        }
        parts.join("; ")
    }
}

/// What did not fit, in a few words; for another status its detail's first line.
pub(super) fn why(row: &Row) -> String {
    match (&row.oom_tag, row.oom_requested_bytes, row.oom_short_bytes) {
        (Some(tag), Some(requested), Some(short)) => {
            format!("{tag} needs {}, short by {}", mib(requested), mib(short))
        }
        _ => row.detail.as_deref().and_then(|detail| detail.lines().next()).unwrap_or("").to_owned(),
    }
}

/// A tag at a length that a label bears.
pub(super) fn short_tag(tag: &str) -> String {
    crate::table::shortened(tag, 48)
}

/// Every cell of `input`, runs in order.
pub(super) fn cells(input: &Input) -> Vec<Cell<'_>> {
    let rows = input.runs.iter().map(|run| run.rows.len()).sum::<usize>();
    let mut methods = input.runs.iter().flat_map(|run| run.rows.iter().map(|row| row.method));
    let first = methods.next();
    let several = methods.any(|method| Some(method) != first);
    let all = input.runs.iter().enumerate().flat_map(|(run, of)| of.rows.iter().map(move |row| (run, row)));
    all.enumerate()
        .map(|(at, (run, row))| {
            let bootstrap = rows <= BOOTSTRAP_ROWS;
            let tpot_sample = if row.tpot_passes_ms.len() > 1 { &row.tpot_passes_ms } else { &row.tpot_samples_ms };
            let identity =
                if row.fault.is_none() { cell_name(row) } else { cell_name(&Row { fault: None, ..row.clone() }) };
            let ok = row.status == Status::Ok;
            let of = |ms: Option<f64>, ends, sample: &[f64]| {
                if ok { Timing::of(ms, ends, sample, bootstrap) } else { None }
            };
            Cell {
                number: at + 1,
                run,
                row,
                setting: setting(row, several),
                identity,
                prefill: of(row.prefill_ms, row.prefill_low_ms.zip(row.prefill_high_ms), &row.prefill_samples_ms),
                tpot: of(row.tpot_ms, row.tpot_low_ms.zip(row.tpot_high_ms), tpot_sample),
            }
        })
        .collect()
}

/// What is the same over a grid: model, recipe, card, device, what differs from the usual, and the method where there are
/// several.
fn setting(row: &Row, methods: bool) -> String {
    let mut text = format!("{} on {}", subject(row), row.card);
    let mut part = |part: String| {
        text.push_str(", ");
        text.push_str(&part);
    };
    match row.device.as_str() {
        "cuda" => {}
        "plan" => part("planned".into()),
        other => part(other.to_owned()),
    }
    if let Some(bytes) = row.vram_bytes {
        part(mib(bytes));
    }
    if row.dtype != "bf16" && !row.dtype.is_empty() {
        part(row.dtype.clone());
    }
    if row.kv_dtype != row.dtype && !row.kv_dtype.is_empty() {
        part(format!("KV {}", row.kv_dtype));
    }
    if row.logits_dtype != "f32" && !row.logits_dtype.is_empty() {
        part(format!("logits {}", row.logits_dtype));
    }
    if row.state_dtype != "f32" && !row.state_dtype.is_empty() {
        part(format!("state {}", row.state_dtype));
    }
    if row.act_quant.as_deref() == Some("off") {
        part("activations not quantised".into());
    }
    if row.batch_invariant == Some(true) {
        part("batch-invariant".into());
    }
    if let Some(workload) = row.workload.as_ref().filter(|workload| *workload != "fixed") {
        part(workload.clone());
    }
    if let Some(fault) = &row.fault {
        part(format!("fault {fault}"));
    }
    if methods {
        part(format!("method {}", row.method));
    }
    text
}

/// Items under their keys, keys in the order they are first seen.
pub(super) fn grouped<T, K: Ord + Clone>(
    items: impl IntoIterator<Item = T>,
    key: impl Fn(&T) -> K,
) -> Vec<(K, Vec<T>)> {
    let mut at = std::collections::BTreeMap::new();
    let mut groups: Vec<(K, Vec<T>)> = Vec::new();
    for item in items {
        let own = key(&item);
        let place = *at.entry(own.clone()).or_insert_with(|| {
            groups.push((own, Vec::new()));
            groups.len() - 1
        });
        groups[place].1.push(item);
    }
    groups
}

/// `one cell`, `2 cells`.
pub(super) fn count(n: usize, one: &str) -> String {
    if n == 1 { format!("1 {one}") } else { format!("{n} {one}s") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::ok_row;
    use crate::report::load::Run;

    #[test]
    fn intervals_are_the_row_s_or_else_those_of_its_samples() {
        let held = Row { tpot_low_ms: Some(0.1), tpot_high_ms: Some(0.2), ..ok_row(1, 1, 1) };
        let mut oom = ok_row(1, 1, 1);
        oom.set_status(Status::Oom, "x");
        let faulty = Row { fault: Some("extra-buffer".into()), ..ok_row(1, 1, 1) };
        let input = Input {
            runs: vec![Run { label: "r".into(), rows: vec![held, ok_row(1, 1, 1), oom, faulty], torn: false }],
            ..Input::default()
        };
        let cells = cells(&input);
        assert_eq!(cells[0].tpot.unwrap().interval, Some((0.1, 0.2)));
        let (low, high) = cells[1].tpot.unwrap().interval.unwrap();
        assert!((0.0625..=0.125).contains(&low) && (0.125..=0.5).contains(&high));
        assert_eq!(cells[2].tpot, None);
        assert_eq!(cells[3].identity, cells[1].identity);
        assert!(cells[3].setting.ends_with("fault extra-buffer"));
    }

    #[test]
    fn groups_keep_the_order_of_their_first_item() {
        let groups = grouped(["b1", "a1", "b2"], |item| item.chars().next());
        assert_eq!(groups, [(Some('b'), vec!["b1", "b2"]), (Some('a'), vec!["a1"])]);
    }
}
