//! `--resume`: which rows of an earlier sweep in the same folder stand, and whether it was the same sweep.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::journal::Journal;
use crate::journal_read::{read_csv, read_jsonl};
use crate::out::note;
use crate::planned::{FILE, Planned, PlannedCell, environments_differ};
use crate::record::Row;

/// What a sweep goes on from.
#[derive(Debug)]
pub(crate) struct Resumed {
    /// The files, which hold the rows taken over.
    pub(crate) journal: Journal,
    /// The rows taken over, by cell.
    pub(crate) taken: BTreeMap<String, Row>,
}

/// Which rows are taken over.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy {
    /// Those of failed cells too.
    pub(crate) keep_failures: bool,
    /// Those of another program, card or arguments too.
    pub(crate) force: bool,
}

/// Whether `dir` holds a sweep to go on with, as opposed to nothing.
pub(crate) fn is_begun(dir: &Path) -> Result<bool> {
    if dir.join(FILE).exists() {
        // Rows that stand in the CSV alone would be lost: they hold no samples to go on from.
        let (jsonl, csv) = (dir.join("sweep.jsonl"), dir.join("sweep.csv"));
        let rows = if jsonl.exists() || !csv.exists() { 0 } else { read_csv(&csv).map_or(1, |rows| rows.len()) };
        ensure!(
            rows == 0,
            "{} is gone, and {} beside it holds {rows} rows; put it back, or run the sweep into another --out",
            jsonl.display(),
            csv.display()
        );
        return Ok(true);
    }
    let earlier = dir.join("sweep.jsonl");
    ensure!(
        !earlier.exists(),
        "{} says which cells were planned, and is missing beside {}; run the sweep into another --out",
        dir.join(FILE).display(),
        earlier.display()
    );
    Ok(false)
}

/// Opens the sweep in `dir` to go on with it as `planned`, which takes over the old one's run. An error names each way in
/// which it was another sweep.
pub(crate) fn resume(dir: &Path, planned: &mut Planned, policy: Policy) -> Result<Resumed> {
    let old = Planned::read(dir)?;
    let mut other = old.differences(planned, ["then", "now"]);
    if old.shard != planned.shard {
        let name = |of: &Planned| of.shard.clone().unwrap_or_else(|| "none".into());
        other.push(format!("shard: {} then, {} now", name(&old), name(planned)));
    }
    let path = dir.join("sweep.jsonl");
    let rows = if path.exists() {
        let read = read_jsonl(&path)?;
        if read.torn {
            note(&format!("{}: the last row was torn; its cell runs again", path.display()));
        }
        read.rows
    } else {
        Vec::new()
    };
    if !other.is_empty() && !policy.force {
        bail!(
            "the sweep in {} is another one:\n  {}\n--force takes its rows all the same; another --out begins a new sweep",
            dir.display(),
            other.join("\n  ")
        );
    }
    if !other.is_empty() && path.exists() {
        keep(&path)?;
    }
    planned.run.clone_from(&old.run);
    let taken = take(rows, &old, planned, policy).with_context(|| path.display().to_string())?;
    let order = planned.cells.iter().filter_map(|cell| taken.get(&cell.cell));
    let journal = Journal::replace(dir, order)?;
    planned.write(dir)?;
    Ok(Resumed { journal, taken })
}

/// Copies the rows of another sweep beside them, under a name that is free.
fn keep(path: &Path) -> Result<()> {
    let name = |n: u32| path.with_extension(format!("jsonl.before-{n}"));
    let kept = (1..=u32::MAX).map(name).find(|kept| kept.symlink_metadata().is_err()).context("no name is free")?;
    std::fs::copy(path, &kept).with_context(|| format!("cannot keep the earlier rows as {}", kept.display()))?;
    note(&format!("the earlier rows are kept as {}", kept.display()));
    Ok(())
}

/// The rows that stand, by the cell of the new plan that they answer. Where a forced plan takes the row of a cell that was
/// measured otherwise, the plan has that cell's own hash: a row is never said to be what it is not.
fn take(rows: Vec<Row>, old: &Planned, planned: &mut Planned, policy: Policy) -> Result<BTreeMap<String, Row>> {
    let of_old: HashMap<&str, &PlannedCell> = old.cells.iter().map(|cell| (cell.cell.as_str(), cell)).collect();
    let ids: HashMap<String, usize> =
        planned.cells.iter().enumerate().map(|(at, cell)| (cell.cell.clone(), at)).collect();
    let configs: HashMap<String, usize> =
        planned.cells.iter().enumerate().map(|(at, cell)| (cell.config.clone(), at)).collect();
    let mut taken: BTreeMap<String, Row> = BTreeMap::new();
    for mut row in rows {
        // Rows without a cell are no part of the grid: plans of the usual models, which are made anew.
        let Some(id) = row.cell.clone() else { continue };
        let Some(cell) = of_old.get(id.as_str()) else {
            bail!("the row of cell {id} is of no cell that {FILE} plans");
        };
        cell.holds(&row)?;
        if row.status.is_failure() && !policy.keep_failures {
            continue;
        }
        let at = ids.get(&id).or_else(|| configs.get(&cell.config).filter(|_| policy.force));
        let Some(at) = at else { continue };
        row.cached = Some(true);
        planned.cells[*at].cell.clone_from(&id);
        if let Some(earlier) = taken.get(&id)
            && !earlier.status.is_failure()
        {
            continue;
        }
        taken.insert(id, row);
    }
    if let Some(first) = taken.values().next()
        && !policy.force
    {
        for row in taken.values() {
            let differ = environments_differ(first, row)?;
            ensure!(differ.is_empty(), "its rows are of several runs: {}", differ.join("; "));
        }
    }
    Ok(taken)
}
