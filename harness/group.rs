//! The groups of a sweep: cells that share their weights, device and types of values, and so one loaded engine.
//!
//! Arguments in, groups out; nothing but a trace's file is opened here, and nothing is run. The same arguments give the same groups in the same order on
//! any machine of the same kind, so that two processes can speak of a cell by its number.

use anyhow::Result;
use clap::ValueEnum as _;
use highwater::ops::Numerics;

use crate::axis::{Cell, Grid};
use crate::cli::{KvDtype, SweepArgs};
use crate::failure::Failure;
use crate::target::{Model, Place, Values};
use crate::worker::fault::{Fault as WorkerFault, PREFIX};
use crate::workload::{Script, Workload, kinds as kinds_of};

/// Axes of the tiny model's grid where a sweep names neither a model nor axes.
const TINY_AXES: [&str; 3] = ["chunk=16,64,256", "batch=1,4", "depth=0,128"];

/// Cells that one engine runs, one after another, without loading anything anew.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    /// The model all cells run.
    pub(crate) model: Model,
    /// Where they run.
    pub(crate) place: Place,
    /// The types of values, and the fault if there is one.
    pub(crate) values: Values,
    /// What each cell's sequences do.
    pub(crate) workload: Workload,
    /// How its workers break, for tests of this program.
    pub(crate) worker_fault: Option<WorkerFault>,
    /// The cells, in the order they run.
    pub(crate) cells: Vec<Cell>,
}

/// The groups that `args` ask for, in the order they run: weights and device change as seldom as can be, recipes outermost,
/// then cards, then types of the KV cache. Arguments that can never work are a usage error.
pub(crate) fn groups(args: &SweepArgs) -> Result<Vec<Group>, Failure> {
    let bare = args.model.is_none();
    let axes = if bare && args.axes.is_empty() {
        TINY_AXES.iter().map(|axis| axis.parse()).collect::<Result<_>>()?
    } else {
        args.axes.clone()
    };
    let grid = Grid::new(&axes).map_err(|e| Failure::usage(&e))?;
    let param = if grid.workloads.is_empty() { "--workload" } else { "--axis" };
    let kinds = one_of("workload", &grid.workloads, &args.cell.workloads)?;
    let kinds = kinds_of(&kinds).map_err(|e| Failure::request(param, &e))?;
    let cells = grid.cells(&kinds);
    let workload = Workload {
        prompt: args.prompt,
        output: args.output,
        kv_tokens: args.target.budget.kv_tokens,
        context: None,
        ladder_scale: args.cell.ladder_scale,
        rules: args.cell.rules(bare),
    };
    // A workload that the flags make impossible is found before anything is loaded.
    for kind in &kinds {
        Script::of(&workload, &Cell { workload: *kind, ..Cell::fixed(1, 1, 0) })?;
    }
    let worker_fault = args.numerics.fault.as_deref().filter(|fault| fault.starts_with(PREFIX));
    let worker_fault = worker_fault.map(WorkerFault::parse).transpose()?;
    let models = models(args, &grid.recipes)?;
    let places = places(args, &grid.cards)?;
    let values = values(args, &grid.kv_dtypes, worker_fault.is_some())?;
    let mut groups = Vec::with_capacity(models.len() * places.len() * values.len());
    for model in &models {
        for place in &places {
            groups.extend(values.iter().map(|values| Group {
                model: model.clone(),
                place: place.clone(),
                values: *values,
                workload: workload.clone(),
                worker_fault: worker_fault.clone(),
                cells: cells.clone(),
            }));
        }
    }
    Ok(groups)
}

fn usage(what: String) -> Failure {
    Failure::usage(&anyhow::anyhow!(what))
}

/// The values of an axis, or of the flag of the same name; both is a mistake.
fn one_of(name: &str, axis: &[String], flag: &[String]) -> Result<Vec<String>, Failure> {
    if !axis.is_empty() && !flag.is_empty() {
        return Err(usage(format!("{name} is an axis and --{name} is given too; take one of them")));
    }
    Ok(if axis.is_empty() { flag.to_vec() } else { axis.to_vec() })
}

/// The model by each recipe, or as it is named.
fn models(args: &SweepArgs, recipes: &[String]) -> Result<Vec<Model>, Failure> {
    let text = args.model.clone().unwrap_or_else(|| if recipes.is_empty() { "tiny@bf16" } else { "tiny" }.into());
    let seed = args.numerics.seed;
    if recipes.is_empty() {
        return Ok(vec![Model { text, seed }]);
    }
    if text.contains('@') || std::path::Path::new(&text).exists() {
        let what = "recipe is an axis of built-in geometries named without one, as qwen3.6-27b";
        return Err(usage(format!("{what}; {text} has its own")));
    }
    Ok(recipes.iter().map(|recipe| Model { text: format!("{text}@{recipe}"), seed }).collect())
}

/// The place of each card, or the one that the flags ask for.
fn places(args: &SweepArgs, names: &[String]) -> Result<Vec<Place>, Failure> {
    if names.is_empty() {
        return Ok(vec![Place::of(&args.target)?]);
    }
    one_of("card", names, args.target.card.as_slice())?;
    Ok(names.iter().map(|name| Place::of_axis(&args.target, name)).collect::<Result<_, _>>()?)
}

/// The types of values by each type of the KV cache, or as the flags ask for them.
/// A fault of the worker's is none of the engine's.
fn values(args: &SweepArgs, names: &[String], worker_fault: bool) -> Result<Vec<Values>, Failure> {
    let of = |kv| {
        if worker_fault {
            Ok(Values::sound(&args.numerics, Numerics::BF16, kv))
        } else {
            Values::with_kv(&args.numerics, Numerics::BF16, kv)
        }
    };
    if names.is_empty() {
        return Ok(vec![of(args.numerics.kv_dtype)?]);
    }
    if args.numerics.kv_dtype.is_some() {
        return Err(usage("kv-dtype is an axis and --kv-dtype is given too; take one of them".into()));
    }
    let value = |name: &String| {
        let kv = KvDtype::from_str(name, false)
            .map_err(|_| usage(format!("axis kv-dtype: `{name}` is none of f32, bf16, fp8")))?;
        Ok(of(Some(kv))?)
    };
    names.iter().map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Verb};
    use clap::Parser as _;

    fn of(line: &str) -> Result<Vec<Group>, Failure> {
        let words = std::iter::once("highwater").chain(line.split_whitespace());
        let Verb::Sweep(args) = Cli::try_parse_from(words).unwrap().verb else { panic!("not a sweep") };
        groups(&args)
    }

    #[test]
    fn one_model_on_one_device_is_one_group_with_every_cell() {
        let line = "sweep tiny@bf16 --device plan --axis chunk=16,64 --axis batch=1,2 --output 3 --seed 7";
        let found = of(line).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].cells.len(), 4);
        assert_eq!(found[0].cells[1], Cell::fixed(64, 1, 0));
        assert_eq!((found[0].model.text.as_str(), found[0].model.seed), ("tiny@bf16", 7));
        assert_eq!((found[0].workload.output, found[0].workload.prompt), (3, None));
        assert_eq!(format!("{found:?}"), format!("{:?}", of(line).unwrap()));
    }

    #[test]
    fn the_bare_sweep_has_the_tiny_model_s_own_axes() {
        let found = of("sweep --device cpu").unwrap();
        assert_eq!((found[0].model.text.as_str(), found[0].cells.len()), ("tiny@bf16", 12));
        // An axis given replaces all of them.
        assert_eq!(of("sweep --device cpu --axis chunk=16").unwrap()[0].cells.len(), 1);
    }

    #[test]
    fn recipes_cards_and_kv_types_make_groups_and_workloads_make_cells() {
        let line = "sweep tiny --device plan --axis chunk=16,64 --axis recipe=bf16,fp8-channel --axis card=h200,rtx-4090 \
                    --axis kv-dtype=bf16,fp8 --axis workload=fixed,many-short";
        let found = of(line).unwrap();
        let named: Vec<String> = found
            .iter()
            .map(|group| format!("{} {} {}", group.model.text, group.place.spec.name, group.values.numerics.kv))
            .collect();
        assert_eq!(
            named,
            [
                "tiny@bf16 h200 bf16",
                "tiny@bf16 h200 u8",
                "tiny@bf16 rtx-4090 bf16",
                "tiny@bf16 rtx-4090 u8",
                "tiny@fp8-channel h200 bf16",
                "tiny@fp8-channel h200 u8",
                "tiny@fp8-channel rtx-4090 bf16",
                "tiny@fp8-channel rtx-4090 u8",
            ]
        );
        assert_eq!(found[0].cells.len(), 4);
        assert_eq!(of("sweep --device cpu --axis recipe=bf16").unwrap()[0].model.text, "tiny@bf16");
        assert!((of("sweep --device cpu").unwrap()[0].workload.rules.seconds - 1.0).abs() < 1e-9);
        assert!((of("sweep tiny --device cpu").unwrap()[0].workload.rules.seconds - 10.0).abs() < 1e-9);
    }

    #[test]
    fn what_is_given_twice_or_makes_no_sense_is_refused() {
        for (line, words) in [
            ("sweep tiny@bf16 --axis recipe=bf16,fp8-channel", "tiny@bf16 has its own"),
            ("sweep . --axis recipe=bf16", ". has its own"),
            ("sweep tiny --card h200 --axis card=h200", "take one of them"),
            ("sweep tiny --axis card=rtx-9999", "rtx-5090"),
            ("sweep tiny --kv-dtype fp8 --axis kv-dtype=bf16", "take one of them"),
            ("sweep tiny --axis kv-dtype=fp4", "none of f32, bf16, fp8"),
            ("sweep tiny --workload fixed --axis workload=ladder", "take one of them"),
            ("sweep tiny --workload stairs", "the workloads are fixed, ladder"),
            ("sweep tiny --workload trace:no-such-file", "cannot read the trace no-such-file"),
            ("sweep tiny --workload trace:", "the workloads are"),
            ("sweep tiny --workload many-short --prompt 64", "up to 63"),
            ("sweep tiny --workload mixed --output 4", "at least 9"),
        ] {
            let text = of(line).expect_err(line).render();
            assert!(text.contains(words), "{line}: {text}");
        }
    }

    #[test]
    fn an_axis_given_twice_is_refused() {
        assert!(of("sweep tiny --device plan --axis batch=1 --axis batch=2").is_err());
    }
}
