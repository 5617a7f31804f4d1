//! `report`: runs as one HTML page for people, or as a short Markdown summary for a pull request.
//!
//! `load` reads the files and `view` numbers their cells; `page` puts the sections together, each of which is a file of its
//! own (`heat`, `memory`, `curves`, `compare`, `roofline`, `traffic`, `table`). `methods` keeps rows apart that were measured
//! in different ways. `markup` escapes all text and `chart` draws.
//! A section shows what the rows say and leaves out what they do not: nothing is guessed, and every bound on what is shown
//! says how much was left out.

mod chart;
pub(crate) mod cli;
mod compare;
mod curves;
mod heat;
mod load;
mod markdown;
mod markup;
mod memory;
mod methods;
mod page;
mod roofline;
mod table;
mod traffic;
mod view;

use std::path::Path;

use highwater::error::Error;

use self::cli::ReportArgs;
use crate::failure::Failure;
use crate::formats::write_whole;
use crate::out::print;

/// `report`.
pub(crate) fn report(args: &ReportArgs) -> Result<(), Failure> {
    // A slip of the hand must not put a page in the place of a record.
    let endings: &[&str] = if args.markdown { &["md"] } else { &["html", "htm"] };
    if let Some(out) = &args.out {
        let ending = out.extension().and_then(|ending| ending.to_str()).map(str::to_ascii_lowercase);
        if !ending.is_some_and(|ending| endings.contains(&ending.as_str())) {
            let what = format!("{} is not a .{} file", out.display(), endings[0]);
            return Err(Error::Request { param: "--out", what }.into());
        }
    }
    let mut input = load::load(&args.runs, args.traffic.as_deref())?;
    if args.markdown {
        let text = markdown::markdown(&input);
        return match &args.out {
            Some(out) => Ok(write_whole(out, &text)?),
            None => Ok(print(&text)?),
        };
    }
    let out = args.out.as_deref().unwrap_or_else(|| Path::new("report.html"));
    if input.traffic.is_none() {
        input.traffic = traffic::computed(&input);
    }
    let page = page::page(&input);
    write_whole(out, &page)?;
    Ok(print(&format!("{}: {}, {} KiB\n", out.display(), about(&input), page.len() / 1024))?)
}

/// How many cells of how many runs, and how many rows of kernels where there are any.
fn about(input: &load::Input) -> String {
    let cells: usize = input.runs.iter().map(|run| run.rows.len()).sum();
    let runs = format!("{} of {}", view::count(cells, "cell"), view::count(input.runs.len(), "run"));
    match input.kernels.len() {
        0 => runs,
        rows if input.runs.is_empty() => format!("{} of kernels", view::count(rows, "row")),
        rows => format!("{runs}, {} of kernels", view::count(rows, "row")),
    }
}
