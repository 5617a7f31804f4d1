//! The page: one HTML file that asks the network for nothing and reads without its script.

use std::collections::BTreeSet;

use super::load::{Input, Run};
use super::markup::Markup;
use super::view::{self, Cell, count};
use super::{compare, curves, heat, memory, methods, roofline, table, traffic};
use crate::definitions::DEFINITIONS;
use crate::record::Row;
use crate::table::{number, shortened};

const STYLE: &str = include_str!("report.css");
const SCRIPT: &str = include_str!("report.js");
/// What a browser is allowed: this page's style, the one script by its hash, and nothing from anywhere.
const POLICY: &str = concat!(
    "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; script-src 'sha256-",
    include_str!("report.js.sha256"),
    "'"
);
/// Longest value of a fact about a run.
const MAX_FACT: usize = 2000;

/// The whole page.
pub(super) fn page(input: &Input) -> String {
    let cells = view::cells(input);
    let sections = [
        (
            "memory",
            "Transient memory by chunk and batch",
            if cells.is_empty() { Markup::new() } else { heat::section(input, &cells) },
        ),
        ("speed", "Prefill and TPOT", curves::section(input, &cells)),
        (
            "owners",
            "Memory by owner at the peak",
            if cells.is_empty() { Markup::new() } else { memory::section(input, &cells) },
        ),
        ("pareto", "Speed against transient memory", curves::pareto(&cells)),
        ("compare", "Runs compared", compare::section(input, &cells)),
        ("kernels", "Kernels", roofline::section(&input.kernels)),
        ("traffic", "Traffic of a decode step", traffic::section(input.traffic.as_ref(), &cells)),
        ("cells", "All cells", if cells.is_empty() { Markup::new() } else { table::section(input, &cells) }),
        ("provenance", "Where the numbers come from", provenance(input)),
        ("definitions", "What the numbers mean", definitions()),
    ];
    let title = title(input, &cells);
    let mut out = Markup::new();
    out.own("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    out.open("meta", &[("http-equiv", "Content-Security-Policy"), ("content", POLICY)]).line();
    out.own("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n");
    out.own("<link rel=\"icon\" href=\"data:,\">\n");
    out.leaf("title", &[], &title).line();
    out.open("style", &[]).own(STYLE).close("style").line().close("head").line().open("body", &[]).line();
    out.leaf("a", &[("class", "skip"), ("href", "#main")], "Skip to the report").line();
    out.open("header", &[]).leaf("h1", &[], &title);
    out.leaf("p", &[("class", "lead")], &lead(input, &cells));
    tiles(&mut out, input, &cells);
    out.close("header").line();
    out.open("nav", &[("aria-label", "Sections")]).open("ul", &[]);
    for (id, name, body) in &sections {
        if !body.is_empty() {
            out.open("li", &[]).leaf("a", &[("href", &format!("#{id}"))], name).close("li");
        }
    }
    out.close("ul").close("nav").line();
    out.open("main", &[("id", "main")]).line();
    if !cells.is_empty() {
        out.open("section", &[("aria-labelledby", "summary")]).leaf("h2", &[("id", "summary")], "Summary");
        table::summary(&mut out, &cells);
        if let Some(apart) = methods::apart(input, &cells) {
            out.leaf("p", &[("class", "note")], &apart);
        }
        out.close("section").line();
    }
    for (id, name, body) in &sections {
        if !body.is_empty() {
            out.open("section", &[("aria-labelledby", id)]).leaf("h2", &[("id", id)], name).line();
            out.append(body).close("section").line();
        }
    }
    out.close("main").line();
    let by = format!("Written by highwater {}. This file is complete in itself.", env!("CARGO_PKG_VERSION"));
    out.leaf("footer", &[], &by).line();
    out.open("script", &[]).own(SCRIPT).close("script").line();
    out.close("body").line().close("html").line();
    out.finish()
}

/// The values of a text column over all cells, in order.
fn values<'a>(cells: &[Cell<'a>], of: impl Fn(&'a Row) -> &'a str) -> Vec<String> {
    let found: BTreeSet<&str> = cells.iter().map(|cell| of(cell.row)).filter(|text| !text.is_empty()).collect();
    found.into_iter().map(|text| shortened(text, 60)).collect()
}

/// A few of many.
fn some(mut values: Vec<String>, most: usize) -> String {
    let more = values.len().saturating_sub(most);
    values.truncate(most);
    let text = values.join(", ");
    if more > 0 { format!("{text} and {more} more") } else { text }
}

fn title(input: &Input, cells: &[Cell]) -> String {
    let mut cards = values(cells, |row| &row.card);
    if cards.is_empty() {
        let found: BTreeSet<&str> = input.kernels.iter().map(|row| row.card.as_str()).collect();
        cards = found.into_iter().map(|card| shortened(card, 60)).collect();
    }
    let models = some(values(cells, |row| row.model.split(':').next().unwrap_or("")), 3);
    let what = if models.is_empty() { "kernels".to_owned() } else { models };
    format!("Highwater: {what} on {}", if cards.is_empty() { "no card".into() } else { some(cards, 3) })
}

fn lead(input: &Input, cells: &[Cell]) -> String {
    let mut times: Vec<&str> = cells.iter().map(|cell| cell.row.time.as_str()).filter(|t| !t.is_empty()).collect();
    times.sort_unstable();
    let mut parts = vec![count(input.runs.len(), "run")];
    if let (Some(first), Some(last)) = (times.first(), times.last()) {
        let (first, last) = (shortened(first, 20), shortened(last, 20));
        parts.push(if first == last { first } else { format!("{first} to {last}") });
    }
    let devices = values(cells, |row| &row.device);
    if !devices.is_empty() {
        let planned = devices == ["plan"];
        parts.push(if planned {
            "planned: sizes only, no times".into()
        } else {
            format!("device {}", some(devices, 4))
        });
    }
    let faults = cells.iter().filter(|cell| cell.row.fault.is_some()).count();
    if faults > 0 {
        parts.push(format!("{} with a seeded fault", count(faults, "cell")));
    }
    let torn = input.runs.iter().filter(|run| run.torn).count();
    if torn > 0 {
        parts.push(format!("{} ends in a torn line, which is left out", count(torn, "record")));
    }
    parts.join(" \u{b7} ")
}

fn tiles(out: &mut Markup, input: &Input, cells: &[Cell]) {
    let failed = cells.iter().filter(|cell| cell.row.status.is_failure()).count();
    let oom = cells.iter().filter(|cell| cell.row.status.is_oom()).count();
    let dirty = cells.iter().filter(|cell| cell.row.dirty.is_some()).count();
    let ok = cells.iter().filter(|cell| cell.is_ok()).count();
    let mut made: Vec<(bool, String, String)> = Vec::new();
    if !cells.is_empty() {
        made.push((false, cells.len().to_string(), "cells".into()));
        made.push((false, ok.to_string(), "fit".into()));
        made.push((oom > 0, oom.to_string(), "do not fit".into()));
        made.push((failed > 0, failed.to_string(), "failed".into()));
    }
    if dirty > 0 {
        made.push((true, dirty.to_string(), "measured on a disturbed card".into()));
    }
    let (ranked, method) = (methods::ranked(cells), methods::of_newest(cells));
    let best = |values: Vec<f64>| values.into_iter().max_by(f64::total_cmp);
    if let Some(speed) = best(ranked.clone().filter_map(Cell::prefill_tok_s).map(|(speed, _)| speed).collect()) {
        made.push((false, number(speed), format!("tok/s, the fastest prefill{method}")));
    }
    if let Some(speed) = best(ranked.clone().filter_map(|cell| Some(-cell.tpot?.ms)).collect()) {
        made.push((false, number(-speed), format!("ms, the least TPOT{method}")));
    }
    if let Some(bytes) = ranked.filter(|c| c.is_ok()).filter_map(|c| c.row.transient_peak_bytes).max() {
        made.push((false, highwater::error::mib(bytes), format!("the largest transient peak{method}")));
    }
    if let Some(text) = roofline::summary(&input.kernels) {
        let timed = input.kernels.iter().filter(|row| row.kernel != "ceiling").count();
        made.push((text.contains("WRONG"), timed.to_string(), format!("kernel timings, {text}")));
    }
    out.open("ul", &[("class", "tiles")]);
    for (alarm, value, text) in made {
        let attrs: &[(&'static str, &str)] = if alarm { &[("class", "alarm")] } else { &[] };
        out.open("li", attrs).leaf("b", &[], &value).text(&text).close("li");
    }
    out.close("ul");
}

/// A fact of a run: what it is called, and its value in a row.
type Fact = (&'static str, fn(&Row) -> Option<String>);

const FACTS: [Fact; 29] = [
    ("command", |row| Some(row.argv.clone())),
    ("run", |row| Some(row.run.clone())),
    ("shard", |row| row.shard.clone()),
    ("taken over by --resume", |row| row.cached.filter(|cached| *cached).map(|_| "some cells".into())),
    ("weights from", |row| row.weights_source.clone()),
    ("version", |row| Some(row.version.clone())),
    ("commit", |row| row.git_sha.clone()),
    ("tree differs from it", |row| row.git_dirty.map(yes)),
    ("binary", |row| row.binary_hash.clone()),
    ("build", |row| Some(row.profile.clone())),
    ("rustc", |row| row.rustc.clone()),
    ("cargo's flags", |row| row.cargo_flags.clone()),
    ("method, schema", |row| Some(format!("{}, {}", row.method, row.schema))),
    ("card taken", |row| Some(row.card.clone())),
    ("GPU", |row| row.gpu.clone()),
    ("GPU uuid", |row| row.gpu_uuid.clone()),
    ("GPU on the PCI bus", |row| row.gpu_pci.clone()),
    ("driver", |row| row.driver.clone()),
    ("CUDA", |row| row.cuda.clone()),
    ("NVRTC", |row| row.nvrtc.clone()),
    ("NVRTC's options", |row| row.nvrtc_options.clone()),
    ("ECC", |row| row.gpu_ecc.map(yes)),
    ("power limit", |row| row.gpu_power_limit_w.map(|watts| format!("{watts} W"))),
    ("overhead outside the slab", |row| {
        let kind = row.overhead_kind.clone().unwrap_or_default();
        row.overhead_bytes.map(|bytes| format!("{} {kind}", highwater::error::mib(bytes)))
    }),
    ("repetitions generated the same tokens", |row| row.checked.map(yes)),
    ("seeded fault", |row| row.fault.clone()),
    ("CPU", |row| row.cpu.clone()),
    ("cores, RAM", |row| Some(format!("{}, {}", row.cores?, highwater::error::mib(row.ram_bytes?)))),
    ("system", |row| row.os.clone()),
];

fn yes(on: bool) -> String {
    if on { "yes" } else { "no" }.into()
}

fn provenance(input: &Input) -> Markup {
    let mut out = Markup::new();
    for run in &input.runs {
        facts(&mut out, run);
    }
    let mut origins: Vec<String> = Vec::new();
    for row in &input.kernels {
        let text = format!(
            "{}, driver {}, run {}, commit {}, binary {}: {}",
            row.card, row.driver, row.run, row.git_sha, row.binary_hash, row.argv
        );
        if origins.len() < 8 && !origins.contains(&text) {
            origins.push(text);
        }
    }
    if !origins.is_empty() {
        out.leaf("h3", &[], "Kernels").open("ul", &[]);
        for text in origins {
            out.leaf("li", &[], &shortened(&text, MAX_FACT));
        }
        out.close("ul");
    }
    out
}

fn facts(out: &mut Markup, run: &Run) {
    out.open("details", &[]).leaf("summary", &[], &format!("{} ({})", run.label, count(run.rows.len(), "cell")));
    out.open("table", &[("class", "facts")]).open("tbody", &[]);
    for (name, of) in FACTS {
        let mut found: BTreeSet<String> = BTreeSet::new();
        for row in &run.rows {
            if found.len() < 8 {
                found.extend(of(row).filter(|text| !text.is_empty()));
            }
        }
        if !found.is_empty() {
            let text = found.into_iter().collect::<Vec<_>>().join(" | ");
            out.open("tr", &[]).leaf("th", &[("scope", "row")], name);
            out.leaf("td", &[], &shortened(&text, MAX_FACT)).close("tr");
        }
    }
    out.close("tbody").close("table").close("details").line();
}

fn definitions() -> Markup {
    let mut out = Markup::new();
    out.open("dl", &[]);
    for definition in DEFINITIONS {
        out.leaf("dt", &[], definition.term).leaf("dd", &[], definition.text).line();
    }
    out.close("dl");
    out
}
