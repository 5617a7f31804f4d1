//! Rows of several methods of measuring in one report: they are never compared and never ranked together, and a sentence says
//! which stand apart.

use std::collections::{BTreeMap, BTreeSet};

use super::load::Input;
use super::view::{Cell, count};

/// Runs of one method that are named.
const NAMED: usize = 6;

/// Whether there are rows of several methods.
pub(super) fn several(cells: &[Cell]) -> bool {
    cells.iter().any(|cell| cell.row.method != cells[0].row.method)
}

/// The cells that are ranked: those of the newest method.
pub(super) fn ranked<'a, 'b>(cells: &'a [Cell<'b>]) -> impl Iterator<Item = &'a Cell<'b>> + Clone {
    let newest = cells.iter().map(|cell| cell.row.method).max();
    cells.iter().filter(move |cell| Some(cell.row.method) == newest)
}

/// The method of the cells that are ranked, as the end of a sentence; nothing where all have it.
pub(super) fn of_newest(cells: &[Cell]) -> String {
    let newest = cells.iter().map(|cell| cell.row.method).max().unwrap_or(0);
    if several(cells) { format!(" (method {newest})") } else { String::new() }
}

/// Which cells stand apart and why; `None` where all are of one method.
pub(super) fn apart(input: &Input, cells: &[Cell]) -> Option<String> {
    if !several(cells) {
        return None;
    }
    let mut methods: BTreeMap<u32, (usize, BTreeSet<usize>)> = BTreeMap::new();
    for cell in cells {
        let (cells, runs) = methods.entry(cell.row.method).or_default();
        *cells += 1;
        runs.insert(cell.run);
    }
    let (newest, (newest_cells, _)) = methods.pop_last()?;
    let older = methods.iter().map(|(method, (cells, runs))| {
        let mut names: Vec<&str> = runs.iter().take(NAMED).map(|run| input.runs[*run].label.as_str()).collect();
        let more = runs.len().saturating_sub(NAMED);
        let more_text = format!("{more} more");
        if more > 0 {
            names.push(&more_text);
        }
        format!("{} of method {method} ({})", count(*cells, "cell"), names.join(", "))
    });
    Some(format!(
        "Measured otherwise than the {} of method {newest}, and so neither compared with them nor ranked among them: {}.",
        count(newest_cells, "cell"),
        older.collect::<Vec<_>>().join("; ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Row;
    use crate::record::tests::ok_row;
    use crate::report::compare::pairs;
    use crate::report::load::Run;
    use crate::report::table::summaries;
    use crate::report::view::cells;

    #[test]
    fn rows_of_two_methods_are_no_pair_no_best_and_said_to_stand_apart() {
        let of = |method, prefill_tok_s| Row {
            method,
            prefill_ms: Some(1.0),
            prefill_tok_s: Some(prefill_tok_s),
            ..ok_row(512, 1, 64)
        };
        let run = |label: &str, rows| Run { label: label.into(), rows, torn: false };
        let input = Input {
            runs: vec![
                run("old", vec![of(1, 9000.0)]),
                run("new", vec![of(2, 8000.0)]),
                run("newer", vec![of(2, 8100.0)]),
            ],
            ..Input::default()
        };
        let all = cells(&input);
        let found = pairs(&all);
        assert_eq!(found.iter().map(|pair| (pair.base.number, pair.other.number)).collect::<Vec<_>>(), [(2, 3)]);
        let best: Vec<_> = summaries(&all).into_iter().map(|summary| (summary.setting, summary.prefill_best)).collect();
        assert!(best[0].0.ends_with("method 1") && best[0].1 == Some(9000.0), "{best:?}");
        assert!(best[1].0.ends_with("method 2") && best[1].1 == Some(8100.0), "{best:?}");
        assert_eq!(ranked(&all).map(|cell| cell.number).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(
            apart(&input, &all).unwrap(),
            "Measured otherwise than the 2 cells of method 2, and so neither compared with them nor ranked among them: 1 cell \
             of method 1 (old)."
        );
        let one = Input { runs: vec![run("new", vec![of(2, 1.0)])], ..Input::default() };
        assert!(apart(&one, &cells(&one)).is_none() && !cells(&one)[0].setting.contains("method"));
    }
}
