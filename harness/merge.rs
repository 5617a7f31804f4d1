//! `merge`: the shards of one sweep made one folder again, in the order of the plan.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::failure::Failure;
use crate::hold::hold;
use crate::journal::Journal;
use crate::journal_read::read_jsonl;
use crate::out::{note, print};
use crate::planned::{FILE, Planned, PlannedCell, environments_differ};
use crate::record::Row;
use crate::run_args::MergeArgs;
use crate::sweep::failures;
use crate::table::{sweep_definitions, sweep_table};

/// Missing cells that are named.
const NAMED: usize = 20;

/// `merge`.
pub(crate) fn merge(args: &MergeArgs) -> Result<(), Failure> {
    let plans = args.dirs.iter().map(|dir| Planned::read(dir)).collect::<Result<Vec<_>>>()?;
    of_one_sweep(args, &plans)?;
    let mut whole = plans[0].clone();
    let mut rows = joined(args, &whole)?;
    let missing: Vec<_> = whole.cells.iter().filter(|cell| !rows.contains_key(&cell.cell)).collect();
    if !missing.is_empty() {
        let part = |part: Option<usize>| part.map_or(String::new(), |part| format!(" (shard {part})"));
        let mut names: Vec<String> =
            missing.iter().take(NAMED).map(|cell| format!("{}{}", cell.name, part(cell.part))).collect();
        if missing.len() > NAMED {
            names.push(format!("and {} more", missing.len() - NAMED));
        }
        let text = format!("{} of {} cells are missing:\n  {}", missing.len(), whole.cells.len(), names.join("\n  "));
        if !args.partial {
            return Err(anyhow::anyhow!(
                "{text}\nrun those shards with --resume, or merge what there is with --partial"
            )
            .into());
        }
        note(&text);
    }
    // One run: the first to begin names it.
    let run = plans.iter().map(|plan| &plan.run).min().cloned().unwrap_or_default();
    whole.run.clone_from(&run);
    whole.shard = None;
    let mut ordered = Vec::with_capacity(rows.len());
    for cell in &whole.cells {
        if let Some(mut row) = rows.remove(&cell.cell) {
            row.run.clone_from(&run);
            ordered.push(row);
        }
    }
    let _held = hold(&args.out)?;
    if let Some(path) = Journal::earlier(&args.out) {
        return Err(anyhow::anyhow!(
            "{} holds an earlier sweep; give another --out, or move that one away",
            path.display()
        )
        .into());
    }
    whole.write(&args.out)?;
    Journal::replace(&args.out, &ordered)?;
    print(&format!("{}\n{}\n", sweep_table(&ordered).text(), sweep_definitions()))?;
    let pictures = crate::charts::write(&ordered, &args.out)?;
    let pictures = pictures.iter().map(|path| path.file_name().unwrap_or_default().to_string_lossy().into_owned());
    let files: Vec<String> = ["sweep.csv", "sweep.jsonl", FILE].map(String::from).into_iter().chain(pictures).collect();
    print(&format!("{}: {}\n", args.out.display(), files.join(", ")))?;
    match failures(&ordered) {
        0 => Ok(()),
        n => Err(anyhow::anyhow!("{n} of {} cells failed; the rows say why", ordered.len()).into()),
    }
}

/// An error that names each way in which `plans` are not of one sweep.
fn of_one_sweep(args: &MergeArgs, plans: &[Planned]) -> Result<()> {
    let name = |at: usize| format!("in {}", args.dirs[at].display());
    for (at, plan) in plans.iter().enumerate().skip(1) {
        let differ = plans[0].differences(plan, [&name(0), &name(at)]);
        ensure!(differ.is_empty(), "these are not shards of one sweep:\n  {}", differ.join("\n  "));
    }
    Ok(())
}

/// Every folder's rows, by cell. The same row may be in two folders; two different rows of one cell may not.
fn joined(args: &MergeArgs, whole: &Planned) -> Result<BTreeMap<String, Row>> {
    let mut rows: BTreeMap<String, (Row, &Path)> = BTreeMap::new();
    let mut first: Option<(Row, &Path)> = None;
    let known: HashMap<&str, &PlannedCell> = whole.cells.iter().map(|cell| (cell.cell.as_str(), cell)).collect();
    for dir in &args.dirs {
        let path = dir.join("sweep.jsonl");
        let read = read_jsonl(&path)?;
        if read.torn {
            note(&format!("{}: the last row was torn and is left out", path.display()));
        }
        for row in read.rows {
            let id = row.cell.clone().with_context(|| format!("{}: a row names no cell", path.display()))?;
            let Some(cell) = known.get(id.as_str()) else {
                bail!("{}: the row of cell {id} is of no cell that {FILE} plans", path.display());
            };
            cell.holds(&row).with_context(|| path.display().to_string())?;
            let (like, of) = first.get_or_insert_with(|| (row.clone(), dir));
            let differ = environments_differ(like, &row)?;
            ensure!(
                differ.is_empty(),
                "rows of {} and of {} are not of one run: {}",
                of.display(),
                dir.display(),
                differ.join("; ")
            );
            match rows.get(&id) {
                Some((earlier, of)) if *earlier != row => {
                    bail!(
                        "{} and {} have different rows of cell {}; leave one of them out",
                        of.display(),
                        dir.display(),
                        cell.name
                    );
                }
                Some(_) => {}
                None => {
                    rows.insert(id, (row, dir));
                }
            }
        }
    }
    Ok(rows.into_iter().map(|(id, (row, _))| (id, row)).collect())
}
