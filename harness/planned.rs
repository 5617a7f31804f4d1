//! What a sweep is going to do, written before it does it: `sweep.plan.json`, the cells in order, by content hash.
//!
//! A reader of a folder knows from it which rows are missing; `--resume` and `merge` know whether they go together.

use std::collections::{BTreeMap, HashSet};
use std::hash::{Hash as _, Hasher as _};
use std::io::{Read as _, Write as _};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::axis::Cell;
use crate::group::Group;
use crate::journal_read::open;
use crate::record::Row;
use crate::shard::{Shard, split};
use crate::sweep::Job;
use crate::table::subject;
use crate::workload::{Kind, Workload};
use highwater::num::fnv::Fnv1a;

/// The file's name.
pub(crate) const FILE: &str = "sweep.plan.json";
/// Largest file read back: far above 100,000 cells.
const MAX_BYTES: u64 = 256 << 20;

/// Columns in which all rows of a sweep must agree to be one run: who measured, and how.
const ENVIRONMENT: [&str; 12] = [
    "schema",
    "method",
    "binary_hash",
    "profile",
    "rustc",
    "cargo_flags",
    "nvrtc",
    "nvrtc_options",
    "driver",
    "cuda",
    "gpu",
    "gpu_power_limit_w",
];
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

impl PlannedCell {
    /// An error where `row`, which names this cell, is of other work.
    pub(crate) fn holds(&self, row: &Row) -> Result<()> {
        let Row { chunk, batch, depth, .. } = row;
        let workload = row.workload.as_deref().filter(|workload| *workload != Kind::Fixed.name());
        let what = workload.map_or(String::new(), |workload| format!("{workload} "));
        let said = name(row, &format!("{what}chunk {chunk} batch {batch} depth {depth}"));
        ensure!(said == self.name, "the row of cell {} is of {said}, and {FILE} plans {} there", self.cell, self.name);
        Ok(())
    }
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
            let mut shown = shared_columns(template)?;
            shown.insert("seed".into(), group.model.seed.into());
            let mut columns = shown.clone();
            shown.extend(asked(&group.workload));
            columns.insert(WORKLOAD.into(), format!("{:?}", group.workload).into());
            let mut config = columns.clone();
            config.retain(|name, _| !ENVIRONMENT.contains(&name.as_str()) && !PROCESSOR.contains(&name.as_str()));
            for cell in &group.cells {
                let (of_config, of_cell) = (hash(&config, cell), hash(&columns, cell));
                ensure!(seen.insert(of_cell.clone()), "the sweep has the cell {cell} twice; give each value once");
                planned.cells.push(PlannedCell {
                    cell: of_cell,
                    config: of_config,
                    group: number,
                    name: name(template, &cell.to_string()),
                    part: parts.as_ref().map(|parts| parts[planned.cells.len()]),
                });
            }
            planned.groups.push(shown);
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
        let mut text = Vec::new();
        let read = open(&path)?.take(MAX_BYTES + 1).read_to_end(&mut text);
        read.with_context(|| format!("cannot read {}", path.display()))?;
        ensure!(text.len() as u64 <= MAX_BYTES, "{} is larger than a plan can be, {MAX_BYTES} B", path.display());
        let mut planned: Planned =
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
        planned.name_as_today();
        Ok(planned)
    }

    /// Names the cells of an earlier build's plan, which had neither recipe nor KV type in them, in today's words.
    fn name_as_today(&mut self) {
        for cell in &mut self.cells {
            let text =
                |column: &str| self.groups[cell.group].get(column).and_then(Value::as_str).unwrap_or("").to_owned();
            let [model, recipe, card, dtype, kv_dtype] = ["model", "recipe", "card", "dtype", "kv_dtype"].map(text);
            let earlier = format!("{model} {card} ");
            if let Some(rest) = cell.name.strip_prefix(&earlier).filter(|_| !recipe.is_empty()) {
                cell.name = name(&Row { model, recipe, card, dtype, kv_dtype, ..Row::default() }, rest);
            }
        }
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
            // An earlier build's plan says in one column what was asked; where it was something else the cells' hashes differ.
            if a.contains_key(WORKLOAD) != b.contains_key(WORKLOAD) {
                columns.retain(|column| *column != WORKLOAD && !ASKED.contains(&column.as_str()));
            }
            for column in columns {
                let text = |of: &Map<String, Value>| of.get(column).map_or("none".into(), plain);
                if a.get(column) != b.get(column) {
                    differ(column, &text(a), &text(b));
                }
            }
        }
        let names_of = |of: &Planned| of.cells.iter().map(|cell| (cell.group, cell.name.clone())).collect::<Vec<_>>();
        if names_of(self) != names_of(other) {
            let only = |a: &Planned, b: &Planned| {
                let others: HashSet<(usize, String)> = names_of(b).into_iter().collect();
                let only: Vec<_> = names_of(a).into_iter().filter(|cell| !others.contains(cell)).collect();
                let first = only.first().map_or(String::new(), |(_, name)| format!(", as {name}"));
                format!("{} cells, {} of them only{first}", a.cells.len(), only.len())
            };
            differ("axes", &only(self, other), &only(other, self));
        }
        let hashes_of = |of: &Planned| of.cells.iter().map(|cell| cell.cell.clone()).collect::<Vec<_>>();
        if found.is_empty() && hashes_of(self) != hashes_of(other) {
            found.push(format!(
                "what the cells do: the hashes of the plans' cells differ {} and {}",
                names[0], names[1]
            ));
        }
        found
    }
}

/// What a plan calls a cell: its model, recipe and card, the type of its KV cache where that is not the activations', and
/// `cell`, its workload and axes.
fn name(row: &Row, cell: &str) -> String {
    let kv = if row.kv_dtype == row.dtype { String::new() } else { format!("KV {} ", row.kv_dtype) };
    format!("{} {} {kv}{cell}", subject(row), row.card)
}

/// Columns of what all cells of a group are asked, named as their flags.
const ASKED: [&str; 8] =
    ["prompt", "output", "kv_tokens", "context", "ladder_scale", "precision", "cell_seconds", "repetitions"];
/// The one column of all that, in the program's own notation: a part of the hashes, and of earlier plans.
const WORKLOAD: &str = "workload";

/// The values of [`ASKED`]; what was left to the cell has none.
fn asked(workload: &Workload) -> impl Iterator<Item = (String, Value)> {
    let Workload { prompt, output, kv_tokens, context, ladder_scale, rules } = workload;
    let values: [Value; ASKED.len()] = [
        (*prompt).into(),
        (*output).into(),
        (*kv_tokens).into(),
        (*context).into(),
        (*ladder_scale).into(),
        rules.precision.into(),
        rules.seconds.into(),
        rules.repetitions.into(),
    ];
    ASKED.map(str::to_owned).into_iter().zip(values).filter(|(_, value)| !value.is_null())
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

/// A hash of a cell and of what its group's columns say.
fn hash(columns: &Map<String, Value>, cell: &Cell) -> String {
    let mut hash = Fnv1a::default();
    let columns: BTreeMap<&String, String> = columns.iter().map(|(name, value)| (name, value.to_string())).collect();
    (format!("{columns:?}"), format!("{cell:?}")).hash(&mut hash);
    format!("{:016x}", hash.finish())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Verb};
    use crate::group::groups;
    use crate::target::template;
    use clap::Parser as _;

    fn plan(line: &str, change: impl Fn(&mut Row)) -> (Planned, Vec<Group>) {
        let words = std::iter::once("highwater").chain(line.split_whitespace());
        let Verb::Sweep(args) = Cli::try_parse_from(words).unwrap().verb else { panic!("not a sweep") };
        let groups = groups(&args).unwrap();
        let templates: Vec<Row> = groups
            .iter()
            .map(|group| {
                let source = group.model.open().unwrap();
                let mut row = template(&group.model, &source, &group.place, group.values);
                row.binary_hash = Some("fnv1a64:1".into());
                row.cpu = Some("a cpu".into());
                change(&mut row);
                row
            })
            .collect();
        (Planned::of(&groups, &templates, args.run.shard).unwrap(), groups)
    }

    const LINE: &str = "sweep tiny --device plan --axis chunk=16,64 --axis batch=1,2";

    #[test]
    fn a_plan_comes_back_as_it_was_written_and_broken_ones_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (planned, _) = plan(LINE, |_| {});
        planned.write(&dir.path().join("a/b")).unwrap();
        assert_eq!(Planned::read(&dir.path().join("a/b")).unwrap(), planned);
        assert_eq!(planned.cells.iter().map(|cell| &cell.cell).collect::<HashSet<_>>().len(), 4);
        for text in ["", "{", "[]", "{\"run\":1}", "\0"] {
            std::fs::write(dir.path().join(FILE), text).unwrap();
            let refused = format!("{:#}", Planned::read(dir.path()).unwrap_err());
            assert!(refused.contains("is no plan of a sweep"), "{refused}");
        }
        let mut wrong = planned.clone();
        wrong.cells[3].group = 1;
        std::fs::write(dir.path().join(FILE), serde_json::to_vec(&wrong).unwrap()).unwrap();
        assert!(format!("{:#}", Planned::read(dir.path()).unwrap_err()).contains("group 1"));
        assert!(Planned::read(&dir.path().join("none")).is_err());
    }

    #[test]
    fn each_thing_that_makes_it_another_sweep_is_named_and_changes_the_hashes() {
        let (planned, _) = plan(LINE, |_| {});
        assert_eq!(plan(LINE, |_| {}).0.differences(&planned, ["a", "b"]), Vec::<String>::new());
        let with = |line: &str, change: fn(&mut Row)| {
            let (other, _) = plan(line, change);
            assert!(planned.cells.iter().zip(&other.cells).all(|(a, b)| a.cell != b.cell), "{line}");
            other.differences(&planned, ["now", "then"]).join("; ")
        };
        let binary = with(LINE, |row| row.binary_hash = Some("fnv1a64:2".into()));
        assert_eq!(binary, "binary_hash: fnv1a64:2 now, fnv1a64:1 then");
        for (column, change) in [
            ("driver", (|row| row.driver = Some("595".into())) as fn(&mut Row)),
            ("method", |row| row.method += 1),
            ("schema", |row| row.schema += 1),
            ("gpu", |row| row.gpu = Some("another".into())),
            ("rustc", |row| row.rustc = Some("1.0.0".into())),
            ("cargo_flags", |row| row.cargo_flags = Some("--release".into())),
            ("nvrtc", |row| row.nvrtc = Some("12.9".into())),
            ("nvrtc_options", |row| row.nvrtc_options = Some("-G".into())),
            ("weights_source", |row| row.weights_source = Some("headers:1".into())),
        ] {
            assert!(with(LINE, change).starts_with(&format!("{column}: ")), "{column}");
        }
        for (flag, words) in [
            ("--seed 1", "seed: 1 now, 0 then"),
            ("--output 3", "output: 3 now, 32 then"),
            ("--prompt 9", "prompt: 9 now, none then"),
            ("--precision 1%", "precision: 0.01 now, 0.005 then"),
            ("--cell-seconds 3", "cell_seconds: 3.0 now, 10.0 then"),
            ("--card h100", "card: h100 now, host then"),
            ("--dtype f32", "dtype: f32 now, bf16 then"),
            ("--fault extra-buffer", "fault: extra-buffer now, none then"),
        ] {
            let named = with(&format!("{LINE} {flag}"), |_| {});
            assert!(named.contains(words), "{flag}: {named}");
        }
        let (more, _) = plan("sweep tiny --device plan --axis chunk=16,64,128 --axis batch=1,2", |_| {});
        let named = more.differences(&planned, ["now", "then"]).join("; ");
        assert_eq!(
            named,
            "axes: 6 cells, 2 of them only, as tiny@bf16 host chunk 128 batch 1 depth 0 now, 4 cells, 0 of them only then"
        );
        // A plan is the same on any processor; what one computes is not.
        assert_eq!(plan(LINE, |row| row.cpu = None).0.cells, planned.cells);
        let cpu = LINE.replace("plan", "cpu");
        assert_ne!(plan(&cpu, |row| row.cpu = None).0.cells, plan(&cpu, |_| {}).0.cells);
    }

    #[test]
    fn a_cell_s_name_tells_recipes_and_kv_types_apart_and_earlier_plans_are_named_alike() {
        let axes = "sweep tiny --device plan --axis recipe=bf16,fp8-channel --axis kv-dtype=bf16,fp8 --axis chunk=16";
        let (planned, _) = plan(axes, |_| {});
        let names: Vec<&str> = planned.cells.iter().map(|cell| cell.name.as_str()).collect();
        let told =
            ["tiny@bf16 host ", "tiny@bf16 host KV fp8 ", "tiny@fp8-channel host ", "tiny@fp8-channel host KV fp8 "];
        assert_eq!(names, told.map(|place| format!("{place}chunk 16 batch 1 depth 0")));
        // What earlier builds wrote: no recipe, no KV type, and one column of all that was asked.
        let mut earlier = planned.clone();
        for cell in &mut earlier.cells {
            cell.name = "tiny host chunk 16 batch 1 depth 0".into();
        }
        for group in &mut earlier.groups {
            group.retain(|column, _| !ASKED.contains(&column.as_str()));
            group.insert(WORKLOAD.into(), "Workload { prompt: None }".into());
        }
        let dir = tempfile::tempdir().unwrap();
        earlier.write(dir.path()).unwrap();
        let read = Planned::read(dir.path()).unwrap();
        assert_eq!(read.cells, planned.cells);
        assert_eq!(read.differences(&planned, ["then", "now"]), Vec::<String>::new());
        let row = Row { kv_dtype: "fp8".into(), dtype: "bf16".into(), model: "tiny".into(), ..Row::default() };
        let row = Row { recipe: "bf16".into(), card: "host".into(), chunk: 16, batch: 1, ..row };
        read.cells[1].holds(&row).unwrap();
        let other = format!("{:#}", read.cells[3].holds(&row).unwrap_err());
        assert!(
            other.contains("is of tiny@bf16 host KV fp8 chunk 16") && other.contains("plans tiny@fp8-channel"),
            "{other}"
        );
        // Asked otherwise, by hashes alone.
        let (longer, _) = plan(&format!("{axes} --output 3"), |_| {});
        assert!(read.differences(&longer, ["then", "now"])[0].contains("what the cells do"));
    }

    #[test]
    fn rows_of_two_compilers_are_not_of_one_run_and_a_null_goes_with_any() {
        let row = Row { rustc: Some("1.95.0".into()), nvrtc: Some("13.0".into()), ..Row::default() };
        let differ = |change: fn(&mut Row)| {
            let mut other = row.clone();
            change(&mut other);
            environments_differ(&row, &other).unwrap().join("; ")
        };
        assert_eq!(differ(|other| other.rustc = Some("1.88.0".into())), "rustc: 1.95.0 and 1.88.0");
        assert_eq!(differ(|other| other.nvrtc = Some("13.1".into())), "nvrtc: 13.0 and 13.1");
        assert_eq!(differ(|other| (other.rustc, other.nvrtc) = (None, None)), "");
    }

    #[test]
    fn jobs_are_the_shard_s_own_and_know_the_rows_taken_over() {
        let (whole, groups) = plan(LINE, |_| {});
        let mut ids = Vec::new();
        for shard in ["1/3", "2/3", "3/3"] {
            let (part, _) = plan(&format!("{LINE} --out x --shard {shard}"), |_| {});
            assert_eq!(part.shard.as_deref(), Some(shard));
            assert!(whole.differences(&part, ["a", "b"]).is_empty());
            for job in part.jobs(&groups, BTreeMap::new()).remove(0) {
                assert_eq!(groups[0].cells[job.number], job.cell);
                ids.push(job.id);
            }
        }
        assert_eq!(ids, whole.cells.iter().map(|cell| cell.cell.clone()).collect::<Vec<_>>());
        let row = Row { time: "then".into(), ..Row::default() };
        let jobs = whole.jobs(&groups, BTreeMap::from([(ids[2].clone(), row)])).remove(0);
        let taken: Vec<bool> = jobs.iter().map(|job| job.taken.is_some()).collect();
        assert_eq!(taken, [false, false, true, false]);
    }
}
