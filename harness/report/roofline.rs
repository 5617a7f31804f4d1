//! Kernels: each on the roofline of ceilings measured in the same file, the share of its own ceiling, and a table of all.

use std::fmt::Write as _;

use super::chart::{Bound, Chart, MAX_SERIES, Mark, Scale, Series};
use super::load::Kernel;
use super::markup::Markup;
use super::view::{count, grouped};
use crate::stats::Summary;
use crate::table::{number, shortened};

/// The rows that are ceilings and no kernel.
const CEILING: &str = "ceiling";
/// Most lines of the table.
const MAX_LINES: usize = 5000;

/// The section's body; empty without kernels.
pub(super) fn section(kernels: &[Kernel]) -> Markup {
    let mut out = Markup::new();
    if kernels.is_empty() {
        return out;
    }
    let numbered: Vec<(usize, &Kernel)> = kernels.iter().enumerate().map(|(at, row)| (at + 1, row)).collect();
    out.open("p", &[("class", "note")]);
    out.text(
        "Arithmetic intensity is declared FLOPs by the fewest bytes the call can move. The bounds are what this card was \
         measured to do in the same process: its fastest read, and cuBLASLt's largest products. Smaller reads reach less, so a \
         kernel's own ceiling, that of a call of its bytes, is in the table.",
    );
    out.close("p").open("div", &[("class", "charts")]).line();
    // Kernels stand under ceilings that were measured with the same in the cache.
    for (card, own) in grouped(numbered.iter().copied(), |(_, row)| conditions(row)) {
        let ceilings: Vec<&Kernel> = own.iter().filter(|(_, row)| row.kernel == CEILING).map(|(_, row)| *row).collect();
        let timed: Vec<(usize, &Kernel)> = own.iter().filter(|(_, row)| row.kernel != CEILING).copied().collect();
        if let Some(chart) = roofline(&card, &ceilings, &timed) {
            out.append(&chart.figure());
        }
        out.append(&shares(&card, &timed));
    }
    out.close("div");
    table(&mut out, &numbered);
    out
}

/// The card, and what of their operands its cache held: `h200, rotate`.
fn conditions(row: &Kernel) -> String {
    let parts = [&row.card, &row.cache];
    parts.into_iter().filter(|part| !part.is_empty()).cloned().collect::<Vec<_>>().join(", ")
}

fn name(row: &Kernel) -> String {
    let parts = [&row.kernel, &row.model, &row.part, &row.scheme];
    let mut text = parts.into_iter().filter(|part| !part.is_empty()).cloned().collect::<Vec<_>>().join(" ");
    if let Some(m) = row.m {
        let _ = write!(text, " M={m}");
    }
    shortened(&text, 120)
}

/// Intensity in FLOP a byte and the rate in TFLOP/s, where both are known and not zero.
fn place(row: &Kernel) -> Option<(f64, f64)> {
    let (bytes, flops) = (row.bytes.filter(|n| *n > 0)? as f64, row.flops.filter(|n| *n > 0)? as f64);
    let rate = row.tflop_s.or_else(|| row.median_us.filter(|us| *us > 0.0).map(|us| flops / us / 1e6))?;
    (rate > 0.0).then_some((flops / bytes, rate))
}

fn roofline(card: &str, ceilings: &[&Kernel], timed: &[(usize, &Kernel)]) -> Option<Chart> {
    let mut families = grouped(timed.iter().filter(|(_, row)| place(row).is_some()), |(_, row)| row.kernel.clone());
    if families.is_empty() {
        return None;
    }
    families.sort_by_key(|(_, own)| std::cmp::Reverse(own.len()));
    if families.len() > MAX_SERIES {
        let rest = families.split_off(MAX_SERIES - 1);
        let names: Vec<&str> = rest.iter().map(|(name, _)| name.as_str()).collect();
        let name = format!("others ({})", shortened(&names.join(", "), 80));
        families.push((name, rest.into_iter().flat_map(|(_, own)| own).collect()));
    }
    let series: Vec<Series> = families
        .into_iter()
        .map(|(family, own)| {
            let marks = own.iter().filter_map(|(number_of, row)| {
                let (x, y) = place(row)?;
                let share =
                    row.percent_of_ceiling.map_or(String::new(), |share| format!(", {share:.0} % of its ceiling"));
                let about = format!("{}: {} FLOP/B, {} TFLOP/s{share}", name(row), number(x), number(y));
                let href = format!("#k{number_of}");
                Some(Mark { x, y, interval: None, href, about, full: row.bound_by != "compute" })
            });
            Series { name: family, marks: marks.collect(), line: Vec::new() }
        })
        .collect();
    let xs = || series.iter().flat_map(|s| &s.marks).map(|mark| mark.x);
    let (low, high) = (xs().fold(f64::INFINITY, f64::min), xs().fold(0.0, f64::max));
    let read_gb_s =
        ceilings.iter().filter(|row| row.part.starts_with("read")).filter_map(|row| row.gb_s).fold(0.0, f64::max);
    let mut bounds = Vec::new();
    let mut rates: Vec<(&str, f64)> = ceilings
        .iter()
        .filter(|row| row.flops.is_some_and(|n| n > 0))
        .filter_map(|row| Some((row.part.as_str(), place(row)?.1)))
        .collect();
    rates.sort_by(|a, b| b.1.total_cmp(&a.1));
    let top = rates.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
    let memory = |x: f64| x * read_gb_s / 1000.0;
    if read_gb_s > 0.0 {
        let end = if top > 0.0 { (top / memory(1.0)).clamp(low, high.max(low)) } else { high };
        let line = vec![(low, memory(low)), (end, memory(end))];
        bounds.push(Bound { name: format!("read {} GB/s", number(read_gb_s)), line, label: None });
    }
    for (at, (part, rate)) in rates.into_iter().enumerate() {
        let start = if read_gb_s > 0.0 { (rate / memory(1.0)).clamp(low, high) } else { low };
        let name = format!("{} {} TFLOP/s", shortened(part, 32), number(rate));
        bounds.push(Bound { name, line: vec![(start, rate), (high, rate)], label: Some((high, rate, at > 0)) });
    }
    Some(Chart {
        title: format!("Roofline of {card} (outlines: bound by arithmetic)"),
        x: ("arithmetic intensity, FLOP/B".into(), Scale::Log10),
        y: ("TFLOP/s".into(), Scale::Log10),
        series,
        bounds,
    })
}

/// The share of its own ceiling that each kernel reaches: least, median and most over its rows.
fn shares(card: &str, timed: &[(usize, &Kernel)]) -> Markup {
    let mut out = Markup::new();
    let groups = grouped(timed.iter().filter(|(_, r)| r.percent_of_ceiling.is_some()), |(_, r)| r.kernel.clone());
    if groups.is_empty() {
        return out;
    }
    let mut lines: Vec<(String, Summary, usize)> = groups
        .into_iter()
        .filter_map(|(kernel, own)| {
            let shares: Vec<f64> = own.iter().filter_map(|(_, row)| row.percent_of_ceiling).collect();
            let summary = Summary::of(&shares)?;
            let worst = own.iter().min_by(|(_, a), (_, b)| {
                let of = |row: &Kernel| row.percent_of_ceiling.unwrap_or(f64::INFINITY);
                of(a).total_cmp(&of(b))
            })?;
            Some((kernel, summary, worst.0))
        })
        .collect();
    lines.sort_by(|a, b| a.1.median.total_cmp(&b.1.median));
    out.open("figure", &[("class", "chart list")]);
    out.leaf(
        "figcaption",
        &[],
        &format!("Share of the ceiling on {card}, %: median, and from least to most (dashed: all of it)"),
    );
    for (kernel, summary, worst) in lines {
        let clamp = |share: f64| share.clamp(0.0, 125.0) / 1.25;
        let about = format!(
            "{kernel}: median {:.0} %, from {:.0} to {:.0} %, {} rows; the least is {}",
            summary.median,
            summary.min,
            summary.max,
            summary.count,
            timed.iter().find(|(n, _)| *n == worst).map_or(String::new(), |(_, row)| name(row))
        );
        out.open("a", &[("class", "r value"), ("href", &format!("#k{worst}")), ("aria-label", &about)]);
        out.leaf("span", &[("class", "value-name")], &format!("{kernel} ({})", summary.count));
        let text = format!("{:.0} [{:.0}, {:.0}]", summary.median, summary.min, summary.max);
        out.leaf("span", &[("class", "value-number")], &text);
        out.open("span", &[("class", "track hundred")]);
        out.leaf("span", &[("class", "fill"), ("style", &format!("width:{:.2}%", clamp(summary.median)))], "");
        let style = format!("left:{:.2}%;width:{:.2}%", clamp(summary.min), clamp(summary.max) - clamp(summary.min));
        out.leaf("span", &[("class", "whisker"), ("style", &style)], "");
        out.close("span").close("a");
    }
    out.close("figure").line();
    out
}

fn table(out: &mut Markup, kernels: &[(usize, &Kernel)]) {
    const COLUMNS: [&str; 15] = [
        "#",
        "kernel",
        "model",
        "part",
        "stored",
        "M",
        "cache",
        "\u{b5}s",
        "q1-q3",
        "GB/s",
        "TFLOP/s",
        "% of ceiling",
        "bound by",
        "peer / ours",
        "checked",
    ];
    out.leaf("h3", &[], "All kernels");
    let about = [("class", "scroll tall"), ("role", "region"), ("tabindex", "0"), ("aria-label", "All kernels")];
    out.open("div", &about).open("table", &[("class", "sortable dense")]).open("thead", &[]).open("tr", &[]);
    for column in COLUMNS {
        out.leaf("th", &[("scope", "col")], column);
    }
    out.close("tr").close("thead").open("tbody", &[]).line();
    let of = |value: Option<f64>| value.map_or_else(String::new, number);
    for (at, row) in kernels.iter().take(MAX_LINES) {
        let against =
            row.peer_median_us.zip(row.median_us).filter(|(_, ours)| *ours > 0.0).map(|(peer, ours)| peer / ours);
        out.open("tr", &[("id", &format!("k{at}"))]).leaf("td", &[("class", "n")], &at.to_string());
        for text in [&row.kernel, &row.model, &row.part, &row.scheme] {
            out.leaf("td", &[], &shortened(text, 80));
        }
        let quartiles =
            row.q1_us.zip(row.q3_us).map_or_else(String::new, |(a, b)| format!("{}-{}", number(a), number(b)));
        let m = row.m.map_or_else(String::new, |m| m.to_string());
        out.leaf("td", &[("class", "n")], &m).leaf("td", &[], &shortened(&row.cache, 16));
        let share = row.percent_of_ceiling.map_or_else(String::new, |share| format!("{share:.0}"));
        for text in [of(row.median_us), quartiles, of(row.gb_s), of(row.tflop_s), share] {
            out.leaf("td", &[("class", "n")], &text);
        }
        out.leaf("td", &[], &shortened(&row.bound_by, 16));
        let peer = against.map_or_else(String::new, |ratio| format!("{ratio:.2}"));
        out.leaf("td", &[("class", "n")], &peer);
        let checked = match row.checked {
            Some(true) => "yes",
            Some(false) => "WRONG",
            None if row.kernel == CEILING => "",
            None => "no",
        };
        out.leaf("td", &[], checked).close("tr").line();
    }
    out.close("tbody").close("table").close("div");
    if kernels.len() > MAX_LINES {
        let text = format!("{} in the file.", count(kernels.len() - MAX_LINES, "more row"));
        out.leaf("p", &[("class", "note")], &text);
    }
}

/// `347 kernel timings, all checked`, or what is not.
pub(super) fn summary(kernels: &[Kernel]) -> Option<String> {
    let timed: Vec<&Kernel> = kernels.iter().filter(|row| row.kernel != CEILING).collect();
    if timed.is_empty() {
        return None;
    }
    let wrong = timed.iter().filter(|row| row.checked == Some(false)).count();
    let unchecked = timed.iter().filter(|row| row.checked.is_none()).count();
    Some(match (wrong, unchecked) {
        (0, 0) => "all checked against the CPU arm".into(),
        (0, n) => format!("{n} not checked"),
        (n, _) => format!("{n} WRONG"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(kernel: &str, bytes: u64, flops: u64, us: f64) -> Kernel {
        Kernel {
            kernel: kernel.into(),
            bytes: Some(bytes),
            flops: Some(flops),
            median_us: Some(us),
            gb_s: Some(bytes as f64 / us / 1e3),
            percent_of_ceiling: Some(80.0),
            card: "h200".into(),
            checked: Some(true),
            ..Kernel::default()
        }
    }

    #[test]
    fn kernels_stand_under_the_ceilings_of_their_own_file() {
        let read = Kernel { part: "read 4.00 GiB".into(), ..kernel(CEILING, 4_000_000_000, 0, 1000.0) };
        let product = Kernel { part: "bf16".into(), ..kernel(CEILING, 1_000_000, 2_000_000_000, 4.0) };
        let rows = [read, product, kernel("linear", 1_000_000, 2_000_000, 1.0), kernel("norm", 1000, 0, 1.0)];
        let html = section(&rows).finish();
        assert!(html.contains("read 4000 GB/s") && html.contains("bf16 500.0 TFLOP/s"), "{html}");
        assert!(html.contains("href=\"#k3\"") && html.contains("id=\"k3\"") && html.contains("2.000 FLOP/B"));
        assert!(!html.contains("NaN") && !html.contains("inf"));
        assert_eq!(summary(&rows).unwrap(), "all checked against the CPU arm");
    }

    #[test]
    fn a_kernel_is_not_held_to_a_ceiling_of_another_cache() {
        let with = |cache: &str, rate: f64| {
            let read = Kernel { part: "read 4.00 GiB".into(), ..kernel(CEILING, 1_000_000, 0, 1e3 / rate) };
            [read, kernel("linear", 1_000_000, 2_000_000, 1.0)].map(|row| Kernel { cache: cache.into(), ..row })
        };
        let html = section(&[with("rotate", 4000.0), with("warm", 9000.0)].concat()).finish();
        for (cache, own, other) in [("rotate", 4000, 9000), ("warm", 9000, 4000)] {
            let title = format!("h200, {cache}");
            let chart =
                html.split("Roofline of ").find(|part| part.starts_with(&title) && part.contains(" GB/s")).unwrap();
            assert!(chart.contains(&format!("read {own} GB/s")), "{chart}");
            assert!(!chart.contains(&format!("read {other} GB/s")), "{chart}");
        }
    }

    #[test]
    fn rows_without_any_number_are_in_the_table_alone() {
        let html = section(&[Kernel { kernel: "<x>".into(), ..Kernel::default() }]).finish();
        assert!(html.contains("&lt;x&gt;") && !html.contains("class=\"plot\""));
        assert!(section(&[]).is_empty());
    }
}
