//! `export`: the rows of a run that has ended, in another form.

use anyhow::Context as _;
use highwater::error::Error;

use super::cli::ExportArgs;
use super::write_whole;
use crate::failure::Failure;
use crate::journal_read::read_jsonl;
use crate::out::{note, print};

/// `export`.
pub(crate) fn export(args: &ExportArgs) -> Result<(), Failure> {
    let path = args.run.join("sweep.jsonl");
    if let Some(out) = &args.out {
        let same = |a: &std::path::Path, b: &std::path::Path| Some((a.canonicalize().ok()?, b.canonicalize().ok()?));
        if same(out, &path).is_some_and(|(out, record)| out == record) {
            let what = format!("{} is the record of the run; give another file", out.display());
            return Err(Error::Request { param: "--out", what }.into());
        }
    }
    let read = read_jsonl(&path)
        .with_context(|| format!("{} is no run's folder, or its record is broken", args.run.display()))?;
    if read.torn {
        note(&format!("{}: its last line is torn, and is left out", path.display()));
    }
    let text = args.format.render(&read.rows)?;
    match &args.out {
        Some(out) => write_whole(out, &text)?,
        None => print(&text)?,
    }
    Ok(())
}
