//! What differs between the baseline and the plan of today, as a person reads it: who lost which card, what grew and in
//! which buffer.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use highwater::error::mib;

use super::book::{Book, Bytes, Point, RESIDENT, edge_chunk};
use super::file::edge_text;

/// Lines of one kind that are printed; the rest are counted.
const MOST_LINES: usize = 30;
/// Names of one list that are printed; the rest are counted.
const MOST_NAMES: usize = 4;
/// Buffers of one change that are printed.
const MOST_BUFFERS: usize = 4;

/// How two books differ.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// A card that fitted a larger chunk before.
    pub(crate) lost: Vec<String>,
    /// More bytes at a point.
    pub(crate) grown: Vec<String>,
    /// Fewer bytes, or a larger chunk that fits.
    pub(crate) better: Vec<String>,
    /// The same bytes, held by others.
    pub(crate) moved: Vec<String>,
    /// Models, recipes or cards that one of them has alone.
    pub(crate) only_one: Vec<String>,
}

impl Changes {
    /// Whether a fit was lost or any bytes grew.
    pub(crate) fn is_regression(&self) -> bool {
        !self.lost.is_empty() || !self.grown.is_empty()
    }

    /// Whether nothing differs.
    pub(crate) fn is_empty(&self) -> bool {
        !self.is_regression() && self.better.is_empty() && self.moved.is_empty() && self.only_one.is_empty()
    }

    /// All of it, worst first.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for (name, lines) in [
            ("lost fit", &self.lost),
            ("grown", &self.grown),
            ("only in one", &self.only_one),
            ("better", &self.better),
            ("held by others", &self.moved),
        ] {
            for line in lines.iter().take(MOST_LINES) {
                let _ = writeln!(text, "{name}: {line}");
            }
            if lines.len() > MOST_LINES {
                let _ = writeln!(text, "{name}: and {} more like these", lines.len() - MOST_LINES);
            }
        }
        text
    }

    /// Adds another book's.
    pub(crate) fn append(&mut self, other: Changes) {
        self.lost.extend(other.lost);
        self.grown.extend(other.grown);
        self.better.extend(other.better);
        self.moved.extend(other.moved);
        self.only_one.extend(other.only_one);
    }
}

/// What the points that changed in one way have in common, but for recipe and card.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Alike {
    part: &'static str,
    batch: u64,
    chunk: u64,
    was: u64,
    is: u64,
    buffers: String,
}

/// Compares the plans of one geometry. What `now` leaves out of `was` on purpose is not its business: the caller has cut both
/// to the same models, recipes and cards where it planned a part only.
pub(crate) fn compare(was: &Book, now: &Book) -> Changes {
    let mut changes = Changes::default();
    let model = now.name();
    for (what, was, now) in
        [("model", &was.models, &now.models), ("recipe", &was.recipes, &now.recipes), ("card", &was.cards, &now.cards)]
    {
        for name in now.iter().filter(|name| !was.contains(name)) {
            changes.only_one.push(format!("{model}: {what} {name} is planned and not in the baseline"));
        }
        for name in was.iter().filter(|name| !now.contains(name)) {
            changes.only_one.push(format!("{model}: {what} {name} is in the baseline and no longer planned"));
        }
    }
    let mut alike: BTreeMap<Alike, Vec<&Point>> = BTreeMap::new();
    for (point, bytes) in &now.cells {
        let Some(before) = was.cells.get(point) else { continue };
        for (part, was, is, buffers) in parts(before, bytes) {
            let key = Alike { part, batch: point.batch, chunk: point.chunk, was, is, buffers };
            alike.entry(key).or_default().push(point);
        }
    }
    for (key, points) in &alike {
        let line = line(now, key, points);
        match key.is.cmp(&key.was) {
            std::cmp::Ordering::Greater => changes.grown.push(line),
            std::cmp::Ordering::Less => changes.better.push(line),
            std::cmp::Ordering::Equal => changes.moved.push(line),
        }
    }
    for (key, edge) in &now.edges {
        let Some(before) = was.edges.get(key) else { continue };
        if before == edge {
            continue;
        }
        let mut line = format!(
            "{model}@{} on {}, batch {}: largest chunk {} -> {}",
            key.recipe,
            key.card,
            key.batch,
            edge_text(*before),
            edge_text(*edge)
        );
        if edge_chunk(*edge) >= edge_chunk(*before) {
            changes.better.push(line);
            continue;
        }
        if let Some(evidence) = evidence(was, now, &key.recipe, &key.card, key.batch) {
            line += &evidence;
        }
        changes.lost.push(line);
    }
    changes
}

/// The parts that differ: name, bytes before and now, and what buffers grew or shrank.
fn parts(was: &Bytes, now: &Bytes) -> Vec<(&'static str, u64, u64, String)> {
    let mut parts = Vec::new();
    for (name, (was, is)) in RESIDENT.into_iter().zip(was.resident.into_iter().zip(now.resident)) {
        if was != is {
            parts.push((name, was, is, String::new()));
        }
    }
    if was.transient != now.transient || was.owners != now.owners {
        parts.push(("transient", was.transient, now.transient, buffers(was, now)));
    }
    parts
}

/// The buffers that differ, the largest difference first.
fn buffers(was: &Bytes, now: &Bytes) -> String {
    let mut differences: BTreeMap<&str, i128> = BTreeMap::new();
    for (tag, bytes) in &now.owners {
        *differences.entry(tag).or_default() += i128::from(*bytes);
    }
    for (tag, bytes) in &was.owners {
        *differences.entry(tag).or_default() -= i128::from(*bytes);
    }
    let mut list: Vec<(&str, i128)> = differences.into_iter().filter(|(_, bytes)| *bytes != 0).collect();
    // What grew is what one looks for; where the peak moved, what it left comes after.
    list.sort_by_key(|(tag, bytes)| (-*bytes, *tag));
    let (kept, rest) = list.split_at(list.len().min(MOST_BUFFERS));
    let mut text: Vec<String> = kept.iter().map(|(tag, bytes)| format!("{tag} {bytes:+}")).collect();
    if !rest.is_empty() {
        text.push(format!("{} more", rest.len()));
    }
    text.join(", ")
}

fn line(book: &Book, key: &Alike, points: &[&Point]) -> String {
    let model = book.name();
    // In the order of the program's lists.
    let recipes: Vec<&str> = names(&book.recipes, |name| points.iter().any(|point| point.recipe == *name));
    let cards: Vec<&str> = names(&book.cards, |name| points.iter().any(|point| point.card == *name));
    let buffers = if key.buffers.is_empty() { String::new() } else { format!(": {}", key.buffers) };
    format!(
        "{model}@{} on {}, batch {}, chunk {}: {} {} -> {} B ({}){buffers}",
        some_of(&recipes),
        some_of(&cards),
        key.batch,
        key.chunk,
        key.part,
        key.was,
        key.is,
        change(key.was, key.is),
    )
}

fn names(list: &[String], wanted: impl Fn(&String) -> bool) -> Vec<&str> {
    list.iter().filter(|name| wanted(name)).map(String::as_str).collect()
}

/// A difference in words.
fn change(was: u64, is: u64) -> String {
    let sign = if is >= was { '+' } else { '-' };
    format!("{sign}{}", mib(is.abs_diff(was)))
}

fn some_of(names: &[&str]) -> String {
    if names.len() <= MOST_NAMES {
        return names.join(", ");
    }
    format!("{} and {} more", names[..MOST_NAMES - 1].join(", "), names.len() - (MOST_NAMES - 1))
}

/// Of the kept chunks of a batch that lost its fit, the one that grew the most, and in what.
fn evidence(was: &Book, now: &Book, recipe: &str, card: &str, batch: u64) -> Option<String> {
    let of = |point: &Point| point.recipe == recipe && point.card == card && point.batch == batch;
    let (point, before, bytes) = now
        .cells
        .iter()
        .filter(|(point, _)| of(point))
        .filter_map(|(point, bytes)| Some((point, was.cells.get(point)?, bytes)))
        .max_by_key(|(_, before, bytes)| bytes.total().saturating_sub(before.total()))?;
    let list: Vec<String> = parts(before, bytes)
        .into_iter()
        .map(|(part, was, is, buffers)| {
            let buffers = if buffers.is_empty() { buffers } else { format!(": {buffers}") };
            format!("{part} {was} -> {is} B{buffers}")
        })
        .collect();
    if list.is_empty() {
        return Some("; no kept chunk has other bytes: the card's slab, or a chunk between them".to_owned());
    }
    Some(format!("; at chunk {}, {}", point.chunk, list.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::super::file::tests::sample;
    use super::*;
    use crate::frontier::Edge;

    #[test]
    fn equal_books_differ_in_nothing() {
        let changes = compare(&sample(), &sample());
        assert!(changes.is_empty() && !changes.is_regression() && changes.text().is_empty());
    }

    #[test]
    fn growth_names_model_card_and_buffer_and_is_told_once_for_all_alike() {
        let (was, mut now) = (sample(), sample());
        for (point, bytes) in &mut now.cells {
            if point.chunk == 2048 && point.card != "h-3" {
                bytes.transient += 4096;
                bytes.owners.push(("fault.extra".into(), 4096));
            }
        }
        let changes = compare(&was, &now);
        assert!(changes.is_regression() && changes.lost.is_empty());
        // Two classes of recipes times three batches.
        assert_eq!(changes.grown.len(), 6, "{}", changes.text());
        let line = &changes.grown[0];
        for word in ["m-1@", "on rtx-1, rtx-2", "chunk 2048", "transient", "+4.0 KiB", "fault.extra +4096"] {
            assert!(line.contains(word), "{word}: {line}");
        }
    }

    #[test]
    fn a_lost_fit_says_which_chunk_was_and_is_and_what_grew() {
        let (was, mut now) = (sample(), sample());
        for (key, edge) in &mut now.edges {
            if key.card == "rtx-2" && key.batch == 8 && key.recipe == "bf16" {
                *edge = Edge::Largest(448);
            }
        }
        for (point, bytes) in &mut now.cells {
            if point.card == "rtx-2" && point.batch == 8 && point.chunk == 512 {
                bytes.resident[1] += 64;
            }
        }
        let changes = compare(&was, &now);
        assert_eq!(changes.lost.len(), 1, "{}", changes.text());
        let line = &changes.lost[0];
        for word in ["m-1@bf16 on rtx-2, batch 8: largest chunk 512 -> 448", "at chunk 512, kv 800 -> 864 B"] {
            assert!(line.contains(word), "{word}: {line}");
        }
        // The other way round, everything is better, and that is no regression.
        let changes = compare(&now, &was);
        assert!(!changes.is_regression() && !changes.is_empty());
    }

    #[test]
    fn what_one_side_alone_has_is_said_and_is_no_growth() {
        let (was, mut now) = (sample(), sample());
        now.cells.retain(|point, _| point.card != "h-3");
        now.edges.retain(|key, _| key.card != "h-3");
        now.cards.pop();
        let changes = compare(&was, &now);
        assert!(!changes.is_regression());
        assert_eq!(changes.only_one, ["m-1: card h-3 is in the baseline and no longer planned"]);
        assert_eq!(compare(&now, &was).only_one, ["m-1: card h-3 is planned and not in the baseline"]);
    }

    #[test]
    fn a_hundred_differences_do_not_make_a_hundred_lines() {
        let changes = Changes { grown: (0..100).map(|n| n.to_string()).collect(), ..Changes::default() };
        assert_eq!(changes.text().lines().count(), MOST_LINES + 1);
        assert!(changes.text().contains("70 more"));
    }
}
