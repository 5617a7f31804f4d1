//! The groups of a sweep: cells that share their weights, device and types of values, and so one loaded engine.
//!
//! Arguments in, groups out; nothing is opened or run here. The same arguments give the same groups in the same order on
//! any machine of the same kind, so that two processes can speak of a cell by its number.

use anyhow::Result;
use highwater::ops::Numerics;

use crate::axis::{Cell, Grid};
use crate::cell::Workload;
use crate::cli::SweepArgs;
use crate::failure::Failure;
use crate::target::{Model, Place, Values};
use crate::worker::fault::{Fault as WorkerFault, PREFIX};

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

/// The groups that `args` ask for, in the order they run. Arguments that can never work are a usage error.
pub(crate) fn groups(args: &SweepArgs) -> Result<Vec<Group>, Failure> {
    let axes = if args.model.is_none() && args.axes.is_empty() {
        TINY_AXES.iter().map(|axis| axis.parse()).collect::<Result<_>>()?
    } else {
        args.axes.clone()
    };
    let grid = Grid::new(&axes).map_err(|e| Failure::usage(&e))?;
    let worker_fault = args.numerics.fault.as_deref().filter(|fault| fault.starts_with(PREFIX));
    let worker_fault = worker_fault.map(WorkerFault::parse).transpose()?;
    let values = match worker_fault {
        Some(_) => Values::sound(&args.numerics, Numerics::BF16),
        None => Values::of(&args.numerics, Numerics::BF16)?,
    };
    let text = args.model.clone().unwrap_or_else(|| "tiny@bf16".into());
    Ok(vec![Group {
        model: Model { text, seed: args.numerics.seed },
        place: Place::of(&args.target)?,
        values,
        workload: Workload {
            prompt: args.prompt,
            output: args.output,
            kv_tokens: args.target.budget.kv_tokens,
            context: None,
        },
        worker_fault,
        cells: grid.cells(),
    }])
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
        assert_eq!(found[0].cells[1], Cell { chunk: 64, batch: 1, depth: 0 });
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
    fn an_axis_given_twice_is_refused() {
        assert!(of("sweep tiny --device plan --axis batch=1 --axis batch=2").is_err());
    }
}
