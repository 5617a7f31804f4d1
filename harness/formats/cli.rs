//! What can be asked of formats on the command line.

use std::path::PathBuf;

use clap::Args;

use super::Format;

/// The forms of a sweep's rows.
#[derive(Debug, Args)]
pub(crate) struct FormatArgs {
    /// More files in the run's folder, each written before the first cell and after each; a list such as json,md,sql
    #[arg(long = "format", value_name = "FORMATS", value_enum, value_delimiter = ',')]
    pub(crate) formats: Vec<Format>,
}

/// `export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// A run's folder (with sweep.jsonl)
    #[arg(value_name = "RUN")]
    pub(crate) run: PathBuf,
    /// The form
    #[arg(long, value_enum)]
    pub(crate) format: Format,
    /// The file to write, in place of one that is there [default: standard output]
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}
