//! Who holds the memory at the peak: stacked bars of the slab, of the transient peak, and of cells that do not fit.

use std::collections::BTreeMap;

use highwater::error::mib;

use super::load::Input;
use super::markup::Markup;
use super::view::{Cell, count, grouped, short_tag, why};
use crate::owners::Owner;

/// Most bars of one setting, and most settings.
const MAX_BARS: usize = 8;
const MAX_OOM_BARS: usize = 3;
const MAX_GROUPS: usize = 40;
/// Owners that have a colour of their own; the rest of a bar is one segment.
const COLOURS: usize = 7;
/// Most owners of one bar that are told apart.
const MAX_SEGMENTS: usize = 9;

/// A segment of a bar.
struct Segment {
    class: String,
    name: String,
    bytes: u64,
}

/// The section's body.
pub(super) fn section(input: &Input, cells: &[Cell]) -> Markup {
    let mut out = Markup::new();
    out.open("p", &[("class", "note")]);
    out.text(
        "The slab holds what outlives a step (weights, KV pages, state, inputs), the transient peak, and what is free; the \
         second bars take that peak apart by owner at its instant, holes included. Of each setting the cells with the largest \
         peaks; every cell's largest owner is in the table.",
    );
    out.close("p").line();
    let classes = classes(cells);
    let groups = grouped(cells, |cell| (cell.run, cell.setting.clone(), cell.row.depth));
    for ((run, setting, depth), own) in groups.iter().take(MAX_GROUPS) {
        group(&mut out, &format!("{}: {setting}, depth {depth}", input.runs[*run].label), own, &classes);
    }
    if groups.len() > MAX_GROUPS {
        let left = count(groups.len() - MAX_GROUPS, "more setting");
        out.leaf("p", &[("class", "note")], &format!("{left} not drawn; their cells are in the table."));
    }
    out
}

/// The colour of each owner: those that hold the most over all cells have their own.
fn classes(cells: &[Cell]) -> BTreeMap<String, String> {
    let mut held: BTreeMap<&str, u64> = BTreeMap::new();
    for cell in cells.iter().filter(|cell| cell.is_ok()) {
        for owner in cell.row.owners.iter().filter(|owner| !is_holes(owner)) {
            let most = held.entry(&owner.tag).or_default();
            *most = (*most).max(owner.bytes);
        }
    }
    let mut held: Vec<(&str, u64)> = held.into_iter().collect();
    held.sort_by_key(|(tag, bytes)| (std::cmp::Reverse(*bytes), *tag));
    held.into_iter().take(COLOURS).enumerate().map(|(at, (tag, _))| (tag.to_owned(), format!("s{at}"))).collect()
}

fn is_holes(owner: &Owner) -> bool {
    owner.tag == "(holes)"
}

fn group(out: &mut Markup, name: &str, cells: &[&Cell], classes: &BTreeMap<String, String>) {
    let mut ok: Vec<&&Cell> = cells.iter().filter(|cell| cell.is_ok()).collect();
    ok.sort_by_key(|cell| std::cmp::Reverse(cell.row.transient_peak_bytes));
    let oom: Vec<&&Cell> = cells.iter().filter(|c| c.row.oom_short_bytes.is_some()).take(MAX_OOM_BARS).collect();
    if ok.is_empty() && oom.is_empty() {
        return;
    }
    out.open("figure", &[("class", "bars")]).leaf("figcaption", &[], name);
    if let Some(cell) = ok.first() {
        let slab = cell.row.slab_bytes.unwrap_or(0);
        bar(out, cell, "slab", &slab_segments(cell), slab, &mib(slab));
    }
    let largest = ok.first().and_then(|cell| cell.row.transient_peak_bytes).unwrap_or(0);
    ok.truncate(MAX_BARS);
    ok.sort_by_key(|cell| (cell.row.batch, cell.row.chunk));
    for cell in ok {
        let peak = cell.row.transient_peak_bytes.unwrap_or(0);
        let name = format!("chunk {} batch {}", cell.row.chunk, cell.row.batch);
        bar(out, cell, &name, &owner_segments(&cell.row.owners, classes), largest, &mib(peak));
    }
    for cell in oom {
        let short = cell.row.oom_short_bytes.unwrap_or(0);
        let requested = cell.row.oom_requested_bytes.unwrap_or(0);
        let free = cell.row.oom_free_bytes.unwrap_or(0);
        let mut segments = owner_segments(&cell.row.owners, classes);
        let held: u64 = segments.iter().fold(0, |sum, segment| sum.saturating_add(segment.bytes));
        let tag = cell.row.oom_tag.as_deref().unwrap_or("");
        let asked = format!("asked for: {} ({} free)", short_tag(tag), mib(free));
        segments.push(Segment { class: "over".into(), name: asked, bytes: requested });
        let whole = held.saturating_add(requested);
        let name = format!("OOM: chunk {} batch {}", cell.row.chunk, cell.row.batch);
        bar(out, cell, &name, &segments, whole, &format!("short {}", mib(short)));
    }
    out.close("figure").line();
}

fn slab_segments(cell: &Cell) -> Vec<Segment> {
    let row = cell.row;
    let parts = [
        ("s0", "weights", row.weights_bytes),
        ("s2", "KV", row.kv_bytes),
        ("s3", "state", row.state_bytes),
        ("s6", "inputs", row.inputs_bytes),
        ("s1", "transient", row.transient_peak_bytes),
        ("free", "free", row.free_bytes),
    ];
    let segment = |(class, name, bytes): (&str, &str, Option<u64>)| {
        bytes.filter(|bytes| *bytes > 0).map(|bytes| Segment { class: class.into(), name: name.into(), bytes })
    };
    parts.into_iter().filter_map(segment).collect()
}

fn owner_segments(owners: &[Owner], classes: &BTreeMap<String, String>) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    let class = |owner: &Owner| match classes.get(&owner.tag) {
        _ if is_holes(owner) => "holes".to_owned(),
        Some(class) => class.clone(),
        None => "s7".to_owned(),
    };
    for owner in owners.iter().take(MAX_SEGMENTS) {
        segments.push(Segment { class: class(owner), name: short_tag(&owner.tag), bytes: owner.bytes });
    }
    let rest: u64 = owners.iter().skip(MAX_SEGMENTS).fold(0, |sum, owner| sum.saturating_add(owner.bytes));
    if rest > 0 {
        let name = count(owners.len() - MAX_SEGMENTS, "other owner");
        segments.push(Segment { class: "s7".into(), name, bytes: rest });
    }
    segments
}

/// One bar: `whole` is the length of the full width.
fn bar(out: &mut Markup, cell: &Cell, name: &str, segments: &[Segment], whole: u64, total: &str) {
    let held: u64 = segments.iter().fold(0, |sum, segment| sum.saturating_add(segment.bytes));
    let width = if whole == 0 { 0.0 } else { (100.0 * held as f64 / whole as f64).min(100.0) };
    out.open("div", &[("class", "bar-row")]).leaf("span", &[("class", "bar-name")], name);
    out.open("span", &[("class", "track")]);
    out.open("span", &[("class", "bar"), ("style", &format!("width:{width:.2}%"))]);
    for segment in segments {
        let share = 100.0 * segment.bytes as f64 / held.max(1) as f64;
        let label = if cell.is_ok() {
            format!("{}: {} {}, {share:.1} %", name, segment.name, mib(segment.bytes))
        } else {
            format!("{}: {} {}; {}", name, segment.name, mib(segment.bytes), why(cell.row))
        };
        out.open(
            "a",
            &[
                ("href", &cell.href()),
                ("class", &format!("r seg {}", segment.class)),
                ("style", &format!("flex-grow:{share:.3}")),
                ("aria-label", &label),
            ],
        );
        // Text where it has a chance to fit.
        if share * width > 700.0 {
            out.text(&segment.name);
        }
        out.close("a");
    }
    out.close("span").close("span").leaf("span", &[("class", "bar-value")], total).close("div");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Row;
    use crate::record::tests::ok_row;
    use crate::report::load::Run;
    use crate::report::view::cells;
    use highwater::error::OutOfMemory;

    #[test]
    fn a_peak_is_taken_apart_and_what_did_not_fit_stands_behind_what_was_held() {
        let owners =
            vec![Owner { tag: "gdn.h".into(), bytes: 60 << 20 }, Owner { tag: "(holes)".into(), bytes: 4 << 20 }];
        let ok = Row { owners, ..ok_row(512, 1, 64 << 20) };
        let mut oom = Row { chunk: 8192, batch: 1, ..ok.clone() };
        oom.set_oom(&OutOfMemory {
            tag: "logits".into(),
            requested: 4 << 30,
            free: 1 << 30,
            slab: 24 << 30,
            owners: (0..12).map(|n| (format!("w{n}"), 1 << 30)).collect(),
        });
        let input =
            Input { runs: vec![Run { label: "run".into(), rows: vec![ok, oom], torn: false }], ..Input::default() };
        let html = section(&input, &cells(&input)).finish();
        assert!(html.contains("chunk 512 batch 1: gdn.h 60.0 MiB, 93.8 %"), "{html}");
        assert!(html.contains("seg holes") && html.contains("seg free"));
        assert!(html.contains("asked for: logits (1.00 GiB free) 4.00 GiB") && html.contains("3 other owners"));
        assert!(html.contains("short 3.00 GiB"));
    }
}
