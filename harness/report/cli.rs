//! What can be asked of `report` on the command line.

use std::path::PathBuf;

use clap::Args;

/// `report`.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Runs: sweep.jsonl, sweep.csv or kernels.csv, the folder of any of them, or a folder of such folders. Of cells that
    /// several hold, the first is what the others are compared with
    #[arg(required = true, value_name = "RUN")]
    pub(crate) runs: Vec<PathBuf>,
    /// The file to write, in place of one that is there; Markdown goes to standard output without it
    #[arg(long, value_name = "FILE.html", required_unless_present = "markdown")]
    pub(crate) out: Option<PathBuf>,
    /// A short summary in Markdown, for a pull request, instead of the page
    #[arg(long)]
    pub(crate) markdown: bool,
    /// A table of bytes per decoded token by module; without it those of results/plan/traffic.csv are computed for the
    /// runs' built-in models
    #[arg(long, value_name = "FILE.csv")]
    pub(crate) traffic: Option<PathBuf>,
}
