//! Flags of `sweep` about how it is run, as opposed to what is measured: processes, time, resuming, many machines.

use std::path::PathBuf;

use clap::Args;

use crate::shard::Shard;

/// How a sweep is run.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of the command line")]
pub(crate) struct RunArgs {
    /// Go on with the sweep in --out: finished cells are taken over and marked `cached`, the others run. Starts anew where
    /// DIR is empty or not there
    #[arg(long, requires = "out")]
    pub(crate) resume: bool,
    /// With --resume, take over cells that failed too
    #[arg(long, requires = "resume")]
    pub(crate) keep_failures: bool,
    /// With --resume, go on though the program, the card or the arguments are others than those the sweep began with
    #[arg(long, requires = "resume")]
    pub(crate) force: bool,
    /// Seconds a cell may run before its worker is killed, loading not counted; 0 for no end
    #[arg(long, value_name = "SECONDS", default_value = "3600", value_parser = seconds)]
    pub(crate) cell_timeout: f64,
    /// Run part I of N of the cells, e.g. 1/4; `highwater merge` joins the parts
    #[arg(long, value_name = "I/N", requires = "out", requires = "model")]
    pub(crate) shard: Option<Shard>,
    /// Run cells in this process, without workers
    #[arg(long, hide = true)]
    pub(crate) in_process: bool,
}

/// `merge`.
#[derive(Debug, Args)]
pub(crate) struct MergeArgs {
    /// Folders of a sweep's shards
    #[arg(value_name = "DIR", required = true)]
    pub(crate) dirs: Vec<PathBuf>,
    /// Folder for the whole sweep
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Go on though cells are missing
    #[arg(long)]
    pub(crate) partial: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    const MOST: f64 = 30.0 * 86_400.0;
    let seconds: f64 = text.trim().parse().map_err(|_| format!("`{text}` is not a number of seconds"))?;
    if (0.0..=MOST).contains(&seconds) { Ok(seconds) } else { Err(format!("{seconds} is outside 0 to {MOST} seconds")) }
}
