//! Tables for people: aligned columns on a terminal, Markdown for a pull request. Text in, text out.

use std::fmt::Write as _;

use highwater::error::mib;

use crate::definitions;
use crate::record::Row;
use crate::status::Status;
use crate::verdict::LEAST_SAMPLES;

/// What a null prints as.
pub(crate) const NULL: &str = "-";

/// Where a column's text stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// A header and rows of equal length.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub(crate) fn new(columns: &[(&str, Align)]) -> Table {
        Table { columns: columns.iter().map(|(name, align)| ((*name).to_owned(), *align)).collect(), rows: Vec::new() }
    }

    /// Adds a row; missing fields at its end are nulls, and fields past the last column are dropped.
    pub(crate) fn push(&mut self, fields: Vec<String>) {
        let mut fields = fields;
        fields.resize(self.columns.len(), NULL.to_owned());
        self.rows.push(fields);
    }

    /// Drops the columns that hold nulls only, but never the first.
    pub(crate) fn without_empty_columns(mut self) -> Table {
        for at in (1..self.columns.len()).rev() {
            if self.rows.iter().all(|row| row[at] == NULL) {
                self.columns.remove(at);
                for row in &mut self.rows {
                    row.remove(at);
                }
            }
        }
        self
    }

    /// Columns padded with spaces to their widest field, two spaces apart, no trailing spaces.
    pub(crate) fn text(&self) -> String {
        let widths = self.widths();
        let mut out = String::new();
        for fields in std::iter::once(&self.header()).chain(&self.rows) {
            let mut line = String::new();
            for ((field, (_, align)), width) in fields.iter().zip(&self.columns).zip(&widths) {
                pad(&mut line, &one_line(field), *width, *align);
                line.push_str("  ");
            }
            let _ = writeln!(out, "{}", line.trim_end());
        }
        out
    }

    /// The same table in Markdown; what would be markup in a field is escaped.
    pub(crate) fn markdown(&self) -> String {
        let mut out = String::new();
        let mut line = |fields: &[String]| {
            let fields: Vec<_> = fields.iter().map(|field| markdown_text(field)).collect();
            let _ = writeln!(out, "| {} |", fields.join(" | "));
        };
        line(&self.header());
        let rule: Vec<String> = self
            .columns
            .iter()
            .map(|(_, align)| if *align == Align::Right { "---:" } else { "---" }.to_owned())
            .collect();
        line(&rule);
        for row in &self.rows {
            line(row);
        }
        out
    }

    fn header(&self) -> Vec<String> {
        self.columns.iter().map(|(name, _)| name.clone()).collect()
    }

    fn widths(&self) -> Vec<usize> {
        let mut widths: Vec<usize> = self.columns.iter().map(|(name, _)| name.chars().count()).collect();
        for row in &self.rows {
            for (width, field) in widths.iter_mut().zip(row) {
                *width = (*width).max(one_line(field).chars().count());
            }
        }
        widths
    }
}

fn pad(line: &mut String, field: &str, width: usize, align: Align) {
    let spaces = " ".repeat(width.saturating_sub(field.chars().count()));
    match align {
        Align::Left => line.extend([field, &spaces]),
        Align::Right => line.extend([&spaces, field]),
    }
}

/// The field with control characters (a newline, an escape sequence of a hostile name) as spaces.
fn one_line(field: &str) -> String {
    field.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// `text` on one line of Markdown, as it stands: no part of a name becomes a link, a tag or emphasis.
pub(crate) fn markdown_text(text: &str) -> String {
    let mut out = String::new();
    for c in one_line(text).chars() {
        if matches!(c, '\\' | '`' | '|' | '<' | '>' | '&' | '*' | '[' | ']' | '~') {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

/// A value, or the null.
pub(crate) fn or_null<T>(value: Option<T>, show: impl Fn(T) -> String) -> String {
    value.map_or_else(|| NULL.to_owned(), show)
}

/// A number with four significant digits at least, and no more decimals than they need.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v >= 1000.0 => format!("{value:.0}"),
        v if v >= 100.0 => format!("{value:.1}"),
        v if v >= 10.0 => format!("{value:.2}"),
        v if v >= 0.001 => format!("{value:.3}"),
        _ => format!("{value:.2e}"),
    }
}

/// The terms of [`sweep_table`]'s columns, for the definitions under it.
const SWEEP_TERMS: &[&str] =
    &["chunk", "batch", "depth", "resident", "transient", "free", "prefill tok/s", "TPOT", "TTFT", "workload"];

/// One line per cell: where it is, how it ended, its bytes, its speed. Columns without a value are left out.
pub(crate) fn sweep_table(rows: &[Row]) -> Table {
    use Align::{Left, Right};
    // The usual workload goes without saying where there is no other.
    let workloads = rows.iter().any(|row| row.workload.as_ref().is_some_and(|name| name != "fixed"));
    let mut table = Table::new(&[
        ("model", Left),
        ("device", Left),
        ("card", Left),
        ("KV", Left),
        ("workload", Left),
        ("chunk", Right),
        ("batch", Right),
        ("depth", Right),
        ("status", Left),
        ("resident", Right),
        ("transient", Right),
        ("free", Right),
        ("prefill tok/s", Right),
        ("TTFT ms", Right),
        ("TPOT ms", Right),
        ("q1-q3 ms", Right),
        ("ITL stalled ms", Right),
        ("ITL steady ms", Right),
        ("dirty", Left),
        ("holds most", Left),
        ("why", Left),
    ]);
    for row in rows {
        let quartiles = row.tpot_q1_ms.zip(row.tpot_q3_ms);
        table.push(vec![
            subject(row),
            row.device.clone(),
            row.card.clone(),
            or_null(Some(&row.kv_dtype).filter(|kv| **kv != row.dtype), Clone::clone),
            or_null(row.workload.as_ref().filter(|_| workloads), Clone::clone),
            row.chunk.to_string(),
            row.batch.to_string(),
            row.depth.to_string(),
            row.status.name().to_owned(),
            or_null(row.resident_bytes, mib),
            or_null(row.transient_peak_bytes, mib),
            or_null(row.free_bytes, mib),
            known(row.prefill_tok_s, row.prefill_ms, [row.prefill_low_ms, row.prefill_high_ms], row.prefill_count),
            or_null(row.ttft_ms, number),
            known(row.tpot_ms, row.tpot_ms, [row.tpot_low_ms, row.tpot_high_ms], row.prefill_count),
            or_null(quartiles, |(q1, q3)| format!("{}-{}", number(q1), number(q3))),
            or_null(row.itl_stalled_ms, number),
            or_null(row.itl_steady_ms, number),
            disturbed(row),
            or_null(row.owners.first(), |owner| format!("{} {}", owner.tag, mib(owner.bytes))),
            why(row),
        ]);
    }
    table.without_empty_columns()
}

/// What disturbed the repetitions that stand, and how many were thrown away.
fn disturbed(row: &Row) -> String {
    let thrown = row.dirty_samples.filter(|thrown| *thrown > 0).map(|thrown| format!("{thrown} thrown away"));
    let said: Vec<String> = row.dirty.clone().into_iter().chain(thrown).collect();
    or_null(Some(said).filter(|said| !said.is_empty()), |said| said.join(", "))
}

/// A median and how well it is known: the wider half of its interval, and of how few repetitions where they are few.
fn known(shown: Option<f64>, median: Option<f64>, interval: [Option<f64>; 2], repetitions: Option<u64>) -> String {
    let Some(shown) = shown else { return NULL.to_owned() };
    let mut text = number(shown);
    if let (Some(median), [Some(low), Some(high)]) = (median, interval) {
        let _ = write!(text, " \u{b1}{:.1}%", (high - median).max(median - low) / median * 100.0);
    }
    if let Some(few) = repetitions.filter(|n| *n < LEAST_SAMPLES as u64) {
        let _ = write!(text, " n={few}");
    }
    text
}

/// The definitions of a sweep table's columns.
pub(crate) fn sweep_definitions() -> String {
    definitions::of_terms(SWEEP_TERMS)
}

/// `model@recipe`.
pub(crate) fn subject(row: &Row) -> String {
    if row.recipe.is_empty() { row.model.clone() } else { format!("{}@{}", row.model, row.recipe) }
}

/// What did not fit, in a few words; for a failure its first line.
fn why(row: &Row) -> String {
    match (row.status, &row.oom_tag, row.oom_requested_bytes, row.oom_short_bytes) {
        (Status::Ok, ..) => NULL.to_owned(),
        (_, Some(tag), Some(requested), Some(short)) => {
            format!("{tag} needs {}, short by {}", mib(requested), mib(short))
        }
        _ => or_null(row.detail.as_deref().and_then(|detail| detail.lines().next()), str::to_owned),
    }
}

/// At most `most` characters of `text`; what was longer ends in an ellipsis.
pub(crate) fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some(_) => text.chars().take(most.saturating_sub(1)).chain(['…']).collect(),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::ok_row;
    use highwater::error::OutOfMemory;

    fn table() -> Table {
        let mut table = Table::new(&[("name", Align::Left), ("ms", Align::Right), ("none", Align::Left)]);
        table.push(vec!["a".into(), "10.5".into()]);
        table.push(vec!["long|er".into(), "2".into()]);
        table
    }

    #[test]
    fn columns_align_and_nulls_are_dashes() {
        assert_eq!(table().text(), "name       ms  none\na        10.5  -\nlong|er     2  -\n");
        assert_eq!(table().without_empty_columns().text(), "name       ms\na        10.5\nlong|er     2\n");
    }

    #[test]
    fn markdown_escapes_bars_and_keeps_alignment() {
        assert_eq!(
            table().markdown(),
            "| name | ms | none |\n| --- | ---: | --- |\n| a | 10.5 | - |\n| long\\|er | 2 | - |\n"
        );
    }

    #[test]
    fn hostile_names_are_no_markup_in_markdown() {
        let shown = markdown_text("<script>*a*</script> [x](http://y) `c`\n| \\");
        assert_eq!(shown, "\\<script\\>\\*a\\*\\</script\\> \\[x\\](http://y) \\`c\\` \\| \\\\");
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        let mut table = Table::new(&[("name", Align::Left)]);
        table.push(vec!["a\u{1b}[31m\nb".into()]);
        assert_eq!(table.text(), "name\na [31m b\n");
    }

    #[test]
    fn numbers_have_the_digits_that_matter() {
        let shown = [0.0, 12_345.6, 123.45, 12.345, 1.23456, 0.0123, 0.000_012].map(number);
        assert_eq!(shown, ["0", "12346", "123.5", "12.35", "1.235", "0.012", "1.20e-5"]);
    }

    #[test]
    fn speeds_say_how_well_they_are_known() {
        let shown = |low, high, n| known(Some(200.0), Some(10.0), [low, high], Some(n));
        assert_eq!(shown(Some(9.9), Some(10.3), 40), "200.0 \u{b1}3.0%");
        assert_eq!(shown(Some(9.5), Some(10.3), 4), "200.0 \u{b1}5.0% n=4");
        assert_eq!(shown(None, None, 1), "200.0 n=1");
        assert_eq!(known(None, None, [None; 2], None), NULL);
    }

    #[test]
    fn disturbed_repetitions_are_counted_and_their_cause_is_said() {
        let row = |dirty: Option<&str>, thrown| Row {
            dirty: dirty.map(str::to_owned),
            dirty_samples: Some(thrown),
            ..Row::default()
        };
        assert_eq!(disturbed(&row(None, 0)), NULL);
        assert_eq!(disturbed(&row(None, 3)), "3 thrown away");
        assert_eq!(disturbed(&row(Some("heat"), 9)), "heat, 9 thrown away");
    }

    #[test]
    fn a_sweep_table_shows_an_oom_by_its_buffer_and_its_holder() {
        let mut oom = Row { model: "tiny".into(), recipe: "bf16".into(), chunk: 8192, batch: 1, ..Row::default() };
        oom.set_oom(&OutOfMemory {
            tag: "logits".into(),
            requested: 4 << 30,
            free: 1 << 30,
            slab: 24 << 30,
            owners: vec![("weights".into(), 17 << 30)],
        });
        let text = sweep_table(&[ok_row(512, 1, 64 << 20), oom.clone()]).text();
        let line = text.lines().nth(2).unwrap();
        assert!(line.contains("tiny@bf16") && line.contains("logits needs 4.00 GiB, short by 3.00 GiB"), "{text}");
        assert!(line.contains("weights 17.00 GiB"), "{text}");
        let plans = sweep_table(&[oom]).text();
        assert!(!plans.contains("TPOT"), "a column without a value is left out: {plans}");
    }

    #[test]
    fn the_usual_workload_is_named_beside_another_and_goes_without_saying_alone() {
        let of = |name: &str| Row { workload: Some(name.into()), ..ok_row(512, 1, 64 << 20) };
        let alone = sweep_table(&[of("fixed"), of("fixed")]).text();
        assert!(!alone.contains("workload") && !alone.contains("fixed"), "{alone}");
        let both = sweep_table(&[of("fixed"), of("ladder")]);
        for (at, workload) in ["workload", "fixed", "ladder"].into_iter().enumerate() {
            let (text, markdown) = (both.text(), both.markdown());
            assert!(text.lines().nth(at).unwrap().contains(&format!(" {workload} ")), "{text}");
            // The rule under Markdown's header is a line of its own.
            let line = markdown.lines().nth(if at == 0 { 0 } else { at + 1 }).unwrap();
            assert!(line.contains(&format!("| {workload} |")), "{markdown}");
        }
    }

    #[test]
    fn every_term_of_the_sweep_table_is_defined() {
        assert_eq!(sweep_definitions().lines().count(), SWEEP_TERMS.len());
    }

    #[test]
    fn long_text_ends_in_an_ellipsis_at_a_character() {
        assert_eq!((shortened("äöü", 3), shortened("äöüß", 3)), ("äöü".into(), "äö…".into()));
    }
}
