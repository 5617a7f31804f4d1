//! The `highwater` binary: a command line over the library's engine, and what it writes.
//!
//! *Asking*: `cli` says what can be asked (`run_args` how a sweep is run, `cell_cli` how a cell is measured); `axis`, `bytes`
//! and `ids` read its values; `target` turns them into a place and a model.
//!
//! *Sweeping*: `group` divides a sweep, `planned` lists its cells, `shard` deals them out to machines and `merge` joins them;
//! `sweep` runs them through `worker` processes, `resume` goes on after a crash, `hold` keeps other sweeps out of the folder,
//! `frontier` bisects. `cell` runs one: `workload` (with `trace`) says what its sequences do, `pass` does it once, `measure`
//! repeats it, `hygiene` throws out what a disturbed card measured, `leak` compares what repetitions took.
//!
//! *Rows*: `record` is a cell's row (`status` how it ended, `owners` who held what), `journal` its files, `provenance` where
//! it comes from, `definitions` what the numbers mean, `stats` how samples are summarised. `formats` writes rows as other
//! tools read them, `table` and `charts` (through `plot`) as people do, and `report` makes a page of runs.
//!
//! *Judging*: `verdict` compares two samples, `gate` two runs, `ab` two builds; `replan` holds the plans of all models on all
//! cards to their baseline, `baseline` finds the one a measured run is held to, `traffic` says what a decoded token reads.
//!
//! *The rest*: `plan`, `inspect`, `synth`, `once` (logits and tokens); `kernels` compiles every kernel, `bench` times them,
//! `doctor` says what this machine can do (`nvml` asks its cards, `calibrate` measures them); `progress` says how long it
//! takes, `failure` is how a verb ends when it cannot go on.

mod ab;
mod axis;
mod baseline;
mod bench;
mod bytes;
mod calibrate;
mod cell;
mod cell_cli;
mod charts;
mod cli;
mod definitions;
mod doctor;
mod edges;
mod failure;
mod formats;
mod frontier;
mod gate;
mod group;
mod hold;
mod hygiene;
mod ids;
mod inspect;
mod journal;
mod journal_read;
mod kernels;
mod leak;
mod logits_file;
mod measure;
mod merge;
mod nvml;
mod once;
mod orphan;
mod out;
mod owners;
mod pass;
mod plan;
mod planned;
mod plot;
mod progress;
mod provenance;
mod record;
mod replan;
mod report;
mod resume;
mod run_args;
mod run_sweep;
mod shard;
mod stats;
mod status;
mod sweep;
mod synth;
mod table;
mod target;
mod trace;
mod traffic;
mod verdict;
mod worker;
mod workload;

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;
use highwater::device::cuda::library;

use crate::cli::{Cli, Verb};
use crate::failure::Failure;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(usage) => {
            // Help and version are "errors" of code 0 here. Nothing can be done if they cannot be printed.
            let _ = usage.print();
            return ExitCode::from(usage.exit_code() as u8);
        }
    };
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let _ = std::io::stderr().write_all(failure.render().as_bytes());
            failure.exit_code()
        }
    }
}

fn run(cli: &Cli) -> Result<(), Failure> {
    // Before anything is loaded.
    cli.cuda.as_deref().map_or(Ok(()), library::set_folder)?;
    match &cli.verb {
        Verb::Sweep(args) => run_sweep::sweep(args),
        Verb::Merge(args) => merge::merge(args),
        Verb::Worker(args) => worker::worker(args),
        Verb::Plan(args) => plan::plan(args),
        Verb::Replan(args) => replan::replan(args),
        Verb::Baseline(args) => baseline::baseline(args),
        Verb::Frontier(args) => edges::frontier(args),
        Verb::Logits(args) => once::logits(args),
        Verb::Generate(args) => once::generate(args),
        Verb::Inspect(args) => inspect::inspect(args),
        Verb::Synth(args) => synth::synth(args),
        Verb::Kernels(args) => kernels::kernels(args),
        Verb::Doctor(args) => doctor::doctor(args),
        Verb::Bench(args) => bench::bench(args),
        Verb::Gate(args) => gate::gate(args),
        Verb::Ab(args) => ab::ab(args),
        Verb::Export(args) => formats::export(args),
        Verb::Report(args) => report::report(args),
    }
}
