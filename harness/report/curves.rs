//! Curves: prefill speed by chunk and time per output token by batch, with intervals; and what a byte of transient memory
//! buys in speed.

use std::collections::{BTreeMap, BTreeSet};

use highwater::error::mib;

use super::chart::{Chart, MAX_SERIES, Mark, Scale, Series};
use super::load::Input;
use super::markup::Markup;
use super::methods;
use super::view::{Cell, count, grouped};
use crate::table::{number, or_null};

/// Most charts of one kind, and bars of one list.
const MAX_CHARTS: usize = 24;
const MAX_BARS: usize = 24;

/// A value of a cell, with its interval.
type Value = (f64, Option<(f64, f64)>);

/// One kind of curve.
struct Kind {
    title: &'static str,
    x: &'static str,
    y: &'static str,
    /// The cell's place on the axis, and in which line.
    at: fn(&Cell) -> (u64, String),
    value: fn(&Cell) -> Option<Value>,
    /// Whether more is better.
    rising: bool,
}

const PREFILL: Kind = Kind {
    title: "Prefill",
    x: "chunk, tokens",
    y: "prefill, tok/s",
    at: |cell| (cell.row.chunk, format!("batch {}", cell.row.batch)),
    value: |cell| cell.prefill_tok_s(),
    rising: true,
};

const TPOT: Kind = Kind {
    title: "Time per output token",
    x: "batch, sequences",
    y: "TPOT, ms",
    at: |cell| (cell.row.batch, format!("chunk {}", cell.row.chunk)),
    value: |cell| cell.tpot.map(|timing| (timing.ms, timing.interval)),
    rising: false,
};

/// The body of the section on speed; empty where nothing was measured.
pub(super) fn section(input: &Input, cells: &[Cell]) -> Markup {
    let mut out = Markup::new();
    if !cells.iter().any(|cell| cell.prefill.is_some() || cell.tpot.is_some()) {
        return out;
    }
    out.open("p", &[("class", "note")]);
    out.text(
        "Medians; bars are 95 % bootstrap intervals (of a row that holds none, made from its samples). Cells at one chunk or \
         one batch only stand as a list.",
    );
    out.close("p").open("div", &[("class", "charts")]).line();
    for kind in [&PREFILL, &TPOT] {
        curves(&mut out, input, cells, kind);
    }
    out.close("div");
    out
}

fn curves(out: &mut Markup, input: &Input, cells: &[Cell], kind: &Kind) {
    let measured = cells.iter().filter(|cell| (kind.value)(cell).is_some());
    let charts = grouped(measured, |cell| {
        (cell.row.method, cell.row.card.clone(), cell.row.device.clone(), cell.row.depth, cell.row.workload.clone())
    });
    let several = methods::several(cells);
    let mut drawn = 0;
    let mut left = 0;
    for ((method, card, device, depth, _), own) in charts {
        let method = if several { format!(", method {method}") } else { String::new() };
        let title = format!("{} on {card} ({device}), depth {depth}{method}", kind.title);
        // Many lines are drawn apart by setting, which leaves few in each; a list bears more.
        let of = lines(input, &own, kind);
        let places: BTreeSet<u64> = of.iter().flat_map(|(_, at)| at.keys().copied()).collect();
        let apart = of.len() > if places.len() < 2 { MAX_BARS } else { MAX_SERIES };
        let parts: Vec<(String, Vec<&Cell>)> = if apart {
            grouped(own, |cell| cell.setting.clone())
                .into_iter()
                .map(|(setting, own)| (format!("{}: {setting}, depth {depth}", kind.title), own))
                .collect()
        } else {
            vec![(title, own)]
        };
        for (title, own) in parts {
            if drawn == MAX_CHARTS {
                left += 1;
                continue;
            }
            drawn += 1;
            out.append(&one(input, &own, kind, title));
        }
    }
    if left > 0 {
        let text = format!("{} not drawn; their cells are in the table.", count(left, "more chart"));
        out.leaf("p", &[("class", "note")], &text);
    }
}

fn one(input: &Input, cells: &[&Cell], kind: &Kind, title: String) -> Markup {
    let mut lines = lines(input, cells, kind);
    let places: BTreeSet<u64> = lines.iter().flat_map(|(_, at)| at.keys().copied()).collect();
    if places.len() < 2 {
        let only = places.first().copied().unwrap_or(0);
        return bars(&lines, kind, &format!("{title}, {} {only}", kind.x.split(',').next().unwrap_or("")));
    }
    let left = lines.len().saturating_sub(MAX_SERIES);
    lines.truncate(MAX_SERIES);
    let series = lines.into_iter().map(|(name, at)| {
        let marks: Vec<Mark> = at
            .into_iter()
            .filter_map(|(x, cell)| {
                let (y, interval) = (kind.value)(cell)?;
                Some(Mark { x: x as f64, y, interval, href: cell.href(), about: about(&name, cell), full: true })
            })
            .collect();
        Series { line: marks.iter().map(|mark| (mark.x, mark.y)).collect(), name, marks }
    });
    let series = series.collect();
    let title = if left > 0 { format!("{title} ({} not drawn)", count(left, "more line")) } else { title };
    let axes = ((kind.x.to_owned(), Scale::Log2), (kind.y.to_owned(), Scale::Linear));
    Chart { title, x: axes.0, y: axes.1, series, bounds: Vec::new() }.figure()
}

fn about(name: &str, cell: &Cell) -> String {
    let floor = or_null(cell.row.floor_tpot_ms, number);
    let floor = if floor == "-" { String::new() } else { format!("; TPOT floor {floor} ms") };
    format!("{name}: {}{floor}", cell.about())
}

/// Lines by name: what tells them apart, of setting, run and their place.
fn lines<'a, 'b>(input: &Input, cells: &[&'a Cell<'b>], kind: &Kind) -> Vec<(String, BTreeMap<u64, &'a Cell<'b>>)> {
    let key = |cell: &Cell| {
        let run = &input.runs[cell.run].label;
        [cell.setting.clone(), run.clone(), (kind.at)(cell).1]
    };
    let groups = grouped(cells.iter().copied(), |cell| key(cell));
    // A run's name says nothing where every setting has one run.
    let runs = grouped(groups.iter().map(|(key, _)| key), |key| (&key[0], &key[2])).iter().any(|(_, of)| of.len() > 1);
    let varies = |part: usize| groups.iter().any(|(key, _)| key[part] != groups[0].0[part]);
    let shown = [varies(0), runs, varies(2)];
    groups
        .iter()
        .map(|(key, own)| {
            let parts: Vec<&str> = key.iter().zip(shown).filter(|(_, on)| *on).map(|(part, _)| part.as_str()).collect();
            let name = if parts.is_empty() { key[0].clone() } else { parts.join(", ") };
            (name, own.iter().map(|cell| ((kind.at)(cell).0, *cell)).collect())
        })
        .collect()
}

/// Values of cells at one place on the axis: a list of bars with their intervals.
fn bars(lines: &[(String, BTreeMap<u64, &Cell>)], kind: &Kind, title: &str) -> Markup {
    let mut values: Vec<(&str, &Cell, Value)> = lines
        .iter()
        .flat_map(|(name, at)| at.values().filter_map(|cell| Some((name.as_str(), *cell, (kind.value)(cell)?))))
        .collect();
    values.sort_by(|a, b| a.2.0.total_cmp(&b.2.0));
    if kind.rising {
        values.reverse();
    }
    let most = values.iter().map(|(_, _, (value, ends))| ends.map_or(*value, |(_, high)| high)).fold(0.0, f64::max);
    let mut out = Markup::new();
    out.open("figure", &[("class", "chart list")]).leaf("figcaption", &[], &format!("{title}: {}", kind.y));
    for (name, cell, (value, ends)) in values.iter().take(MAX_BARS) {
        let percent = |value: f64| if most > 0.0 { 100.0 * value / most } else { 0.0 };
        out.open("a", &[("class", "r value"), ("href", &cell.href()), ("aria-label", &about(name, cell))]);
        out.leaf("span", &[("class", "value-name")], name);
        out.leaf("span", &[("class", "value-number")], &number(*value));
        out.open("span", &[("class", "track")]);
        out.leaf("span", &[("class", "fill"), ("style", &format!("width:{:.2}%", percent(*value)))], "");
        if let Some((low, high)) = ends {
            let style = format!("left:{:.2}%;width:{:.2}%", percent(*low), percent(high - low));
            out.leaf("span", &[("class", "whisker"), ("style", &style)], "");
        }
        out.close("span").close("a");
    }
    if values.len() > MAX_BARS {
        let text = format!("{} in the table.", count(values.len() - MAX_BARS, "more"));
        out.leaf("p", &[("class", "note")], &text);
    }
    out.close("figure").line();
    out
}

/// The body of the section on speed by transient bytes; empty where nothing was measured.
pub(super) fn pareto(cells: &[Cell]) -> Markup {
    type Speed = fn(&Cell) -> Option<(u64, f64)>;
    let prefill: Speed = |cell| {
        let bytes = cell.row.prefill_transient_bytes.or(cell.row.transient_peak_bytes)?;
        Some((bytes, cell.prefill_tok_s()?.0))
    };
    let decode: Speed = |cell| {
        let bytes = cell.row.decode_transient_bytes.or(cell.row.transient_peak_bytes)?;
        Some((bytes, 1000.0 * cell.row.batch as f64 / cell.tpot?.ms))
    };
    let mut out = Markup::new();
    for (title, y, speed) in
        [("Prefill", "prefill, tok/s", prefill), ("Decode", "decode, tok/s (batch / TPOT)", decode)]
    {
        let measured = cells.iter().filter(|cell| speed(cell).is_some());
        for ((method, card, depth), own) in
            grouped(measured, |cell| (cell.row.method, cell.row.card.clone(), cell.row.depth))
                .into_iter()
                .filter(|(_, own)| own.len() > 1)
                .take(MAX_CHARTS)
        {
            let method = if methods::several(cells) { format!(", method {method}") } else { String::new() };
            let title = format!("{title} on {card}, depth {depth}{method}");
            out.append(&pareto_chart(title, y, &own, speed));
        }
    }
    if out.is_empty() {
        return out;
    }
    let mut section = Markup::new();
    section.open("p", &[("class", "note")]);
    section.text(
        "Transient bytes against speed. Full marks are the cells of their setting that no other beats in both: fewer bytes \
         and more tokens per second; the steps join them.",
    );
    section.close("p").open("div", &[("class", "charts")]).append(&out).close("div");
    section
}

fn pareto_chart(title: String, y: &str, cells: &[&Cell], speed: fn(&Cell) -> Option<(u64, f64)>) -> Markup {
    let mut groups = grouped(cells.iter().copied(), |cell| cell.setting.clone());
    let left = groups.len().saturating_sub(MAX_SERIES);
    groups.truncate(MAX_SERIES);
    let series = groups.into_iter().map(|(name, own)| {
        let mut points: Vec<(u64, f64, &Cell)> =
            own.iter().filter_map(|cell| speed(cell).map(|(bytes, speed)| (bytes, speed, *cell))).collect();
        points.sort_by(|a, b| a.0.cmp(&b.0).then(b.1.total_cmp(&a.1)));
        let unit = f64::from(1 << 20);
        let mut best = 0.0;
        let mut line: Vec<(f64, f64)> = Vec::new();
        let mut marks = Vec::new();
        for (bytes, speed, cell) in points {
            let (x, full) = (bytes as f64 / unit, speed > best);
            if full {
                if best > 0.0 {
                    line.push((x, best));
                }
                best = speed;
                line.push((x, speed));
            }
            let about = format!("{name}, {}: {} tok/s for {}", cell.place(), number(speed), mib(bytes));
            marks.push(Mark { x, y: speed, interval: None, href: cell.href(), about, full });
        }
        Series { name, marks, line }
    });
    let series = series.collect();
    let title = if left > 0 { format!("{title} ({} not drawn)", count(left, "more setting")) } else { title };
    let x = ("transient peak, MiB".into(), Scale::Log10);
    Chart { title, x, y: (y.into(), Scale::Log10), series, bounds: Vec::new() }.figure()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Row;
    use crate::record::tests::ok_row;
    use crate::report::load::Run;
    use crate::report::view::cells;

    fn input(rows: Vec<Row>) -> Input {
        Input { runs: vec![Run { label: "run".into(), rows, torn: false }], ..Input::default() }
    }

    fn timed(chunk: u64, batch: u64, transient: u64, prefill_ms: f64) -> Row {
        let low_high = (Some(prefill_ms * 0.99), Some(prefill_ms * 1.01));
        Row {
            prefill_ms: Some(prefill_ms),
            prefill_low_ms: low_high.0,
            prefill_high_ms: low_high.1,
            prefill_tok_s: Some(1000.0 * chunk as f64 / prefill_ms),
            ..ok_row(chunk, batch, transient)
        }
    }

    #[test]
    fn a_line_per_batch_and_a_list_where_the_axis_has_one_place() {
        let grid = input(vec![timed(512, 1, 1, 10.0), timed(1024, 1, 2, 15.0), timed(512, 8, 3, 11.0)]);
        let html = section(&grid, &cells(&grid)).finish();
        assert!(html.contains("Prefill on host (cpu), depth 0") && html.contains("</svg>batch 8"), "{html}");
        assert_eq!(html.matches("class=\"interval\"").count(), 3 + 3);
        let one = input(vec![timed(512, 1, 1, 10.0)]);
        let html = section(&one, &cells(&one)).finish();
        assert!(html.contains("chart list") && html.contains("class=\"whisker\"") && !html.contains("class=\"plot\""));
        let planned = input(vec![Row { prefill_tok_s: None, tpot_ms: None, ..ok_row(1, 1, 1) }]);
        assert!(section(&planned, &cells(&planned)).is_empty() && pareto(&cells(&planned)).is_empty());
    }

    #[test]
    fn cells_that_another_beats_in_bytes_and_speed_are_outlines() {
        let mut rows = vec![timed(512, 1, 1 << 20, 10.0), timed(1024, 1, 2 << 20, 40.0), timed(2048, 1, 4 << 20, 20.0)];
        for row in &mut rows {
            row.tpot_ms = None;
            row.prefill_transient_bytes = row.transient_peak_bytes;
        }
        let one = input(rows);
        let html = pareto(&cells(&one)).finish();
        assert_eq!(
            (html.matches("class=\"mark full\"").count(), html.matches("class=\"mark\"").count()),
            (2 + 1, 1),
            "{html}"
        );
    }
}
