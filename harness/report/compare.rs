//! The same cell in several runs: ratios of time with an interval, and bytes to the byte.
//!
//! A ratio's interval is the quotient of the ends of both, which is wide on the safe side. No verdict is given here: that is
//! the gate's.

use super::load::Input;
use super::markup::Markup;
use super::methods;
use super::view::{Cell, Timing, count, grouped};
use crate::table::number;

/// Most lines of the table.
const MAX_LINES: usize = 1000;
/// Ratio at either end of the picture's axis, as a power of two.
const SPAN_LOG2: f64 = 1.0;

/// A cell and the same one of the first run that has it.
pub(super) struct Pair<'a, 'b> {
    pub(super) base: &'a Cell<'b>,
    pub(super) other: &'a Cell<'b>,
}

/// A ratio and its interval.
type Ratio = (f64, Option<(f64, f64)>);

impl Pair<'_, '_> {
    /// Time of the other by the base's.
    pub(super) fn ratio(base: Option<Timing>, other: Option<Timing>) -> Option<Ratio> {
        let (base, other) = (base?, other?);
        let ends = base.interval.zip(other.interval);
        Some((other.ms / base.ms, ends.map(|(base, other)| (other.0 / base.1, other.1 / base.0))))
    }

    /// How many bytes of the transient peak the other has more.
    pub(super) fn transient_difference(&self) -> Option<i128> {
        let of = |cell: &Cell| cell.row.transient_peak_bytes.map(i128::from);
        Some(of(self.other)? - of(self.base)?)
    }

    fn resident_difference(&self) -> Option<i128> {
        let of = |cell: &Cell| cell.row.resident_bytes.map(i128::from);
        Some(of(self.other)? - of(self.base)?)
    }
}

/// Every cell that several runs of one method have: each later one beside the first. Of two rows of one cell in a run the
/// later counts.
pub(super) fn pairs<'a, 'b>(cells: &'a [Cell<'b>]) -> Vec<Pair<'a, 'b>> {
    let mut pairs = Vec::new();
    for (_, own) in grouped(cells, |cell| (cell.row.method, cell.identity.as_str())) {
        let latest: Vec<&Cell> = own
            .iter()
            .enumerate()
            .filter(|(at, cell)| own[at + 1..].iter().all(|later| later.run != cell.run))
            .map(|(_, cell)| *cell)
            .collect();
        if let [base, others @ ..] = latest.as_slice() {
            pairs.extend(others.iter().map(|other| Pair { base, other }));
        }
    }
    pairs
}

/// The section's body; empty where no cell is in two runs.
pub(super) fn section(input: &Input, cells: &[Cell]) -> Markup {
    let mut out = Markup::new();
    let pairs = pairs(cells);
    if pairs.is_empty() {
        return out;
    }
    out.open("p", &[("class", "note")]);
    out.text(
        "Each cell beside the same one of the first run that has it: time by time (below 1 is faster), with the quotient of \
         both intervals' ends, and bytes more or fewer. This is no verdict: highwater gate gives one. ",
    );
    out.text(&methods::apart(input, cells).unwrap_or_default());
    out.close("p");
    out.open("div", &[("class", "scroll"), ("role", "region"), ("tabindex", "0"), ("aria-label", "Runs compared")]);
    out.open("table", &[("class", "sortable")]).open("thead", &[]).open("tr", &[]);
    for name in
        ["cell", "run", "against", "status", "prefill ratio", "", "TPOT ratio", "", "transient", "resident", "output"]
    {
        out.leaf("th", &[("scope", "col")], name);
    }
    out.close("tr").close("thead").open("tbody", &[]).line();
    for pair in pairs.iter().take(MAX_LINES) {
        let (base, other) = (pair.base, pair.other);
        out.open("tr", &[]).open("td", &[("class", "w")]);
        out.leaf("a", &[("href", &other.href())], &format!("{}, {}", other.setting, other.place())).close("td");
        out.leaf("td", &[], &input.runs[other.run].label);
        out.open("td", &[]).leaf("a", &[("href", &base.href())], &input.runs[base.run].label).close("td");
        let (was, is) = (base.row.status, other.row.status);
        let status = if was == is { is.name().to_owned() } else { format!("{} \u{2192} {}", was.name(), is.name()) };
        out.leaf("td", &[], &status);
        for ratio in [Pair::ratio(base.prefill, other.prefill), Pair::ratio(base.tpot, other.tpot)] {
            out.leaf("td", &[("class", "n")], &ratio.map_or_else(String::new, ratio_text));
            out.open("td", &[("class", "pic")]);
            if let Some(ratio) = ratio {
                picture(&mut out, ratio);
            }
            out.close("td");
        }
        out.leaf("td", &[("class", "n")], &pair.transient_difference().map_or_else(String::new, difference));
        out.leaf("td", &[("class", "n")], &pair.resident_difference().map_or_else(String::new, difference));
        let same = base.row.output_hash.as_ref().zip(other.row.output_hash.as_ref());
        out.leaf("td", &[], same.map_or("", |(a, b)| if a == b { "same tokens" } else { "other tokens" }));
        out.close("tr").line();
    }
    out.close("tbody").close("table").close("div");
    if pairs.len() > MAX_LINES {
        let text = format!("{} not shown.", count(pairs.len() - MAX_LINES, "more pair"));
        out.leaf("p", &[("class", "note")], &text);
    }
    out
}

/// `0.994 [0.981, 1.007]`.
pub(super) fn ratio_text((ratio, ends): Ratio) -> String {
    match ends {
        Some((low, high)) => format!("{ratio:.3} [{low:.3}, {high:.3}]"),
        None => format!("{ratio:.3}"),
    }
}

/// A difference of bytes with its sign; nothing more or fewer is `0 B`.
pub(super) fn difference(bytes: i128) -> String {
    if bytes == 0 {
        return "0 B".into();
    }
    let size = bytes.unsigned_abs();
    let shown = match size {
        size if size >= 1 << 20 => format!("{} MiB", number(size as f64 / f64::from(1 << 20))),
        size => format!("{size} B"),
    };
    format!("{}{shown}", if bytes > 0 { '+' } else { '\u{2212}' })
}

/// The ratio on an axis from a half to two, with its interval and the line at 1. The number beside it says the same.
fn picture(out: &mut Markup, (ratio, ends): Ratio) {
    let at = |ratio: f64| 60.0 + 56.0 * (ratio.log2() / SPAN_LOG2).clamp(-1.0, 1.0);
    out.open("svg", &[("viewBox", "0 0 120 16"), ("width", "120"), ("height", "16"), ("aria-hidden", "true")]);
    out.leaf("path", &[("class", "axis"), ("d", "M60 0V16")], "");
    if let Some((low, high)) = ends {
        let d = format!("M{:.1} 8H{:.1}", at(low), at(high));
        out.leaf("path", &[("class", "interval"), ("d", &d)], "");
    }
    let mark = at(ratio);
    let class = match ends {
        Some((_, high)) if high < 1.0 => "faster",
        Some((low, _)) if low > 1.0 => "slower",
        _ => "level",
    };
    out.leaf("path", &[("class", class), ("d", &format!("M{:.1} 8a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z", mark - 4.0))], "");
    out.close("svg");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Row;
    use crate::record::tests::ok_row;
    use crate::report::load::Run;
    use crate::report::view::cells;

    #[test]
    fn a_cell_is_held_against_the_first_run_that_has_it() {
        let timed = |tpot: f64, transient| Row {
            tpot_ms: Some(tpot),
            tpot_low_ms: Some(tpot * 0.9),
            tpot_high_ms: Some(tpot * 1.1),
            ..ok_row(512, 1, transient)
        };
        let run = |label: &str, rows| Run { label: label.into(), rows, torn: false };
        let input = Input {
            runs: vec![
                run("one", vec![timed(9.0, 1), timed(10.0, 1 << 20)]),
                run("two", vec![ok_row(8192, 1, 1)]),
                run("three", vec![timed(20.0, 3 << 20)]),
            ],
            ..Input::default()
        };
        let cells = cells(&input);
        let pairs = pairs(&cells);
        assert_eq!(pairs.len(), 1);
        assert_eq!((pairs[0].base.number, pairs[0].other.number), (2, 4));
        assert_eq!(pairs[0].transient_difference(), Some(2 << 20));
        let (ratio, ends) = Pair::ratio(pairs[0].base.tpot, pairs[0].other.tpot).unwrap();
        let (low, high) = ends.unwrap();
        assert!(ratio == 2.0 && (low - 18.0 / 11.0).abs() < 1e-12 && (high - 22.0 / 9.0).abs() < 1e-12);
        let html = section(&input, &cells).finish();
        assert!(
            html.contains("2.000 [1.636, 2.444]") && html.contains("+2.000 MiB") && html.contains("slower"),
            "{html}"
        );
    }

    #[test]
    fn differences_are_exact_below_a_mebibyte_and_signed() {
        assert_eq!([0, 256, -(3 << 20)].map(difference), ["0 B", "+256 B", "\u{2212}3.000 MiB"]);
    }
}
