//! What a sweep is going to do, written before it does it: `sweep.plan.json`, the cells in order, by content hash.
//!
//! A reader of a folder knows from it which rows are missing; `--resume` and `merge` know whether they go together.

use std::collections::{BTreeMap, HashSet};
use std::hash::{Hash as _, Hasher as _};
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::axis::Cell;
use crate::group::Group;
use crate::provenance::Fnv1a;
use crate::record::Row;
use crate::shard::{Shard, split};
use crate::sweep::Job;

/// The file's name.
pub(crate) const FILE: &str = "sweep.plan.json";
/// Largest file read back: far above 100,000 cells.
const MAX_BYTES: u64 = 256 << 20;

/// Columns in which all rows of a sweep must agree to be one run: who measured, and how.
const ENVIRONMENT: [&str; 8] =
    ["schema", "method", "binary_hash", "profile", "driver", "cuda", "gpu", "gpu_power_limit_w"];
/// The same where a processor computes; a plan is the same on any.
const PROCESSOR: [&str; 2] = ["cpu", "cores"];
/// Columns that say what all cells of a group are.
const CONFIG: [&str; 18] = [
    "model",
    "layers",
    "recipe",
    "weights_source",
    "device",
    "card",
    "arch",
    "vram_bytes",
    "slab_bytes",
    "overhead_bytes",
    "overhead_kind",
    "dtype",
    "logits_dtype",
    "state_dtype",
    "kv_dtype",
    "act_quant",
    "batch_invariant",
    "fault",
];

/// A sweep's plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Planned {
    /// The run its rows share.
    pub(crate) run: String,
    /// The command line that began it.
    pub(crate) argv: String,
    /// Which part of the sweep the folder's rows are; null for all of it.
    pub(crate) shard: Option<String>,
    /// Groups of cells with one model and one device, by the columns that say which, and who measures them.
    pub(crate) groups: Vec<Map<String, Value>>,
    /// Every cell of the whole sweep, in order.
    pub(crate) cells: Vec<PlannedCell>,
}

/// A cell's line in a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PlannedCell {
    /// Content hash of what the cell is and of the binary that runs it: the row's `cell`.
    pub(crate) cell: String,
    /// The same without the binary and the machine.
    pub(crate) config: String,
    /// Its group, from 0.
    pub(crate) group: usize,
    /// The cell in words.
    pub(crate) name: String,
    /// The part of the sweep that runs it, from 1; null where there are no parts.
    pub(crate) part: Option<usize>,
}

impl Planned {
    /// The plan of `groups`, whose rows begin as `templates`, in order.
    pub(crate) fn of(groups: &[Group], templates: &[Row], shard: Option<Shard>) -> Result<Planned> {
        let sizes: Vec<usize> = groups.iter().map(|group| group.cells.len()).collect();
        let parts = shard.map(|shard| split(&sizes, shard.count));
        let mut planned = Planned {
            run: templates.first().map(|row| row.run.clone()).unwrap_or_default(),
            argv: templates.first().map(|row| row.argv.clone()).unwrap_or_default(),
            shard: shard.map(|shard| shard.to_string()),
            groups: Vec::new(),
            cells: Vec::new(),
        };
        let mut seen = HashSet::new();
        for (number, (group, template)) in groups.iter().zip(templates).enumerate() {
            let columns = shared_columns(template)?;
            let mut config = columns.clone();
            config.retain(|name, _| CONFIG.contains(&name.as_str()));
            for cell in &group.cells {
                let (of_config, of_cell) = hashes(&config, &columns, group, cell, group.model.seed);
                ensure!(seen.insert(of_cell.clone()), "the sweep has the cell {cell} twice; give each value once");
                planned.cells.push(PlannedCell {
                    cell: of_cell,
                    config: of_config,
                    group: number,
                    name: format!("{} {} {cell}", template.model, template.card),
                    part: parts.as_ref().map(|parts| parts[planned.cells.len()]),
                });
            }
            planned.groups.push(columns);
        }
        Ok(planned)
    }

    /// The cells of each group that this folder is to have, in order.
    pub(crate) fn jobs(&self, groups: &[Group], mut taken: BTreeMap<String, Row>) -> Vec<Vec<Job>> {
        let own = self.shard.as_deref().and_then(|shard| shard.parse::<Shard>().ok()).map(|shard| shard.index);
        let mut cells = self.cells.iter();
        let mut jobs = Vec::new();
        for group in groups {
            let mut of_group = Vec::new();
            for (number, (cell, planned)) in group.cells.iter().zip(&mut cells).enumerate() {
                if own.is_none() || planned.part == own {
                    let (id, taken) = (planned.cell.clone(), taken.remove(&planned.cell));
                    of_group.push(Job { number, cell: *cell, id, taken });
                }
            }
            jobs.push(of_group);
        }
        jobs
    }

    /// Writes the plan into `dir`, which is made if need be. The file is there whole or not at all.
    pub(crate) fn write(&self, dir: &Path) -> Result<()> {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create the folder {}", dir.display()))?;
        let text = serde_json::to_string_pretty(self).context("a plan cannot be written as JSON")?;
        replace(&dir.join(FILE), |file| Ok(file.write_all(text.as_bytes())?))
    }

    /// The plan of the sweep in `dir`.
    pub(crate) fn read(dir: &Path) -> Result<Planned> {
        let path = dir.join(FILE);
        let bytes = std::fs::metadata(&path).with_context(|| format!("cannot open {}", path.display()))?.len();
        ensure!(bytes <= MAX_BYTES, "{} has {bytes} B; a plan has at most {MAX_BYTES} B", path.display());
        let text = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let planned: Planned =
            serde_json::from_slice(&text).with_context(|| format!("{} is no plan of a sweep", path.display()))?;
        if let Some(cell) = planned.cells.iter().find(|cell| cell.group >= planned.groups.len()) {
            bail!(
                "{}: cell {} is of group {}, and there are {}",
                path.display(),
                cell.cell,
                cell.group,
                planned.groups.len()
            );
        }
        Ok(planned)
    }

    /// In what `self` differs from `other` so that their rows are not of one run, a line for each; `self` and `other` are
    /// called by `names`. Nothing where they go together.
    pub(crate) fn differences(&self, other: &Planned, names: [&str; 2]) -> Vec<String> {
        let mut found = Vec::new();
        let mut differ = |what: &str, a: &str, b: &str| {
            let line = format!("{what}: {a} {}, {b} {}", names[0], names[1]);
            if !found.contains(&line) {
                found.push(line);
            }
        };
        if self.groups.len() != other.groups.len() {
            let (a, b) = (self.groups.len().to_string(), other.groups.len().to_string());
            differ("groups of cells", &a, &b);
        }
        for (a, b) in self.groups.iter().zip(&other.groups) {
            let mut columns: Vec<&String> = a.keys().chain(b.keys()).collect();
            columns.sort();
            columns.dedup();
            for column in columns {
                let text = |of: &Map<String, Value>| of.get(column).map_or("none".into(), plain);
                if a.get(column) != b.get(column) {
                    differ(column, &text(a), &text(b));
                }
            }
        }
        let configs = |of: &Planned| of.cells.iter().map(|cell| cell.config.clone()).collect::<Vec<_>>();
        if configs(self) != configs(other) {
            let only = |a: &Planned, b: &Planned| {
                let others: HashSet<String> = configs(b).into_iter().collect();
                let only: Vec<&PlannedCell> = a.cells.iter().filter(|cell| !others.contains(&cell.config)).collect();
                let first = only.first().map_or(String::new(), |cell| format!(" ({}, ...)", cell.name));
                format!("{} cells, {} of them only{first}", a.cells.len(), only.len())
            };
            differ("axes and workload", &only(self, other), &only(other, self));
        }
        found
    }
}

/// The columns of a row in which rows of one group must agree.
fn shared_columns(row: &Row) -> Result<Map<String, Value>> {
    let processor = if row.device == "plan" { &[][..] } else { &PROCESSOR[..] };
    let value = serde_json::to_value(row).context("a row cannot be written as JSON")?;
    let Value::Object(mut columns) = value else { bail!("a row is not an object") };
    columns.retain(|name, value| {
        let name = name.as_str();
        let wanted = ENVIRONMENT.contains(&name) || CONFIG.contains(&name) || processor.contains(&name);
        wanted && !value.is_null() && value.as_str() != Some("")
    });
    Ok(columns)
}

/// In which columns two rows cannot be of one run, a line for each. A null goes with anything: a cell that was never run
/// knows less.
pub(crate) fn environments_differ(a: &Row, b: &Row) -> Result<Vec<String>> {
    let (left, right) = (shared_columns(a)?, shared_columns(b)?);
    let columns = ENVIRONMENT.iter().chain(&PROCESSOR);
    let both = columns.filter_map(|name| Some((name, left.get(*name)?, right.get(*name)?)));
    Ok(both.filter(|(_, a, b)| a != b).map(|(name, a, b)| format!("{name}: {} and {}", plain(a), plain(b))).collect())
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// A cell's hashes: of what it is, and of that with all that decides its numbers.
fn hashes(
    config: &Map<String, Value>,
    columns: &Map<String, Value>,
    group: &Group,
    cell: &Cell,
    seed: u64,
) -> (String, String) {
    let hash = |columns: &Map<String, Value>| {
        let mut hash = Fnv1a::default();
        let columns: BTreeMap<&String, String> =
            columns.iter().map(|(name, value)| (name, value.to_string())).collect();
        (format!("{columns:?}"), format!("{:?}", group.workload), format!("{cell:?}"), seed).hash(&mut hash);
        format!("{:016x}", hash.finish())
    };
    (hash(config), hash(columns))
}

/// Writes a file beside `path`, puts it on disk, and gives it that name: whoever looks finds the old one or the new one.
pub(crate) fn replace(path: &Path, write: impl FnOnce(&mut std::fs::File) -> Result<()>) -> Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let beside = path.with_file_name(name);
    let failed = || format!("cannot write {}", path.display());
    let mut file = std::fs::File::create(&beside).with_context(failed)?;
    write(&mut file).with_context(failed)?;
    file.sync_all().with_context(failed)?;
    std::fs::rename(&beside, path).with_context(failed)
}
