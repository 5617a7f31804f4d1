//! `replan`: every built-in model is planned on every card again and held to the baseline that is committed, so that a
//! change that makes a card lose its fit fails without a card. `grid` plans (`reach` finds the edges), `book` is what is
//! kept, `file` its text, `diff` what changed, `tables` the tables beside it.

mod book;
mod diff;
mod file;
mod grid;
mod reach;
mod tables;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Args;
use highwater::engine::Fault;
use highwater::error::Error;
use highwater::ops::Numerics;

use self::book::Book;
use self::diff::{Changes, compare};
pub(crate) use self::grid::BATCHES;
use self::grid::Selection;
pub(crate) use self::tables::TRAFFIC_CONTEXT;
use crate::failure::{FAILED, Failure, MORE_MEMORY};
use crate::out::print;

/// `replan`.
#[derive(Debug, Args)]
pub(crate) struct ReplanArgs {
    /// The baseline's folder
    #[arg(value_name = "DIR", default_value = "results/plan")]
    pub(crate) dir: PathBuf,
    /// Write the baseline and its tables anew instead of holding the plans to them
    #[arg(long, conflicts_with_all = ["only", "cards", "fault"])]
    pub(crate) update: bool,
    /// Only what has TEXT in MODEL@RECIPE; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub(crate) only: Vec<String>,
    /// Only this card; may be repeated
    #[arg(long = "card", value_name = "NAME")]
    pub(crate) cards: Vec<String>,
    /// A seeded fault of the engine, for tests of this program
    #[arg(long, value_name = "NAME", hide = true)]
    pub(crate) fault: Option<String>,
}

/// What the verb's help says about its ends.
pub(crate) const HELP: &str = "\
Exit codes: 0 the plans are the baseline's; 1 the baseline is older than the program (nothing grew) or cannot be read; \
2 usage; 4 a card lost a fit, or bytes grew. --update writes what is planned now; its diff is for a person to review.";

/// The files of the tables, each written from the books alone or from the ops' own costs.
fn tables(books: &[Book]) -> Result<Vec<(&'static str, String)>> {
    let traffic = tables::traffic(books)?;
    Ok(vec![
        ("frontier.md", tables::frontier(books)),
        ("traffic.csv", tables::traffic_csv(&traffic)),
        ("traffic.md", tables::traffic_markdown(books, &traffic)),
    ])
}

/// `replan`.
pub(crate) fn replan(args: &ReplanArgs) -> Result<(), Failure> {
    let fault = args.fault.as_deref().map(Fault::parse).transpose()?;
    let selection = Selection { only: args.only.clone(), cards: args.cards.clone(), fault };
    if !args.update {
        look(&args.dir)?;
    }
    let begun = Instant::now();
    let books = grid::plan(&selection, Numerics::BF16)?;
    let (recipes, points): (usize, usize) =
        (books.iter().map(|b| b.recipes.len() * b.models.len()).sum(), books.iter().map(|b| b.cells.len()).sum());
    print(&format!(
        "planned {recipes} models on {} cards: {points} points in {:.1} s{}\n",
        books.first().map_or(0, |book| book.cards.len()),
        begun.elapsed().as_secs_f64(),
        fault.map_or_else(String::new, |fault| format!(", with the fault {}", fault.name())),
    ))?;
    if args.update {
        return Ok(update(&args.dir, &books)?);
    }
    let mut changes = Changes::default();
    let mut stale = Vec::new();
    for book in &books {
        check_book(&args.dir, book, &selection, &mut changes, &mut stale)?;
    }
    if !selection.is_partial() {
        for (name, text) in tables(&books)? {
            if read(&args.dir.join(name))?.as_deref() != Some(text.as_str()) {
                stale.push(format!("{name} is not the table of these plans"));
            }
        }
        for name in strangers(&args.dir, &books)? {
            stale.push(format!("{name} is no built-in model's"));
        }
    }
    verdict(&args.dir, &changes, &stale)
}

/// An error where there is nothing to hold the plans to: planning takes its time.
fn look(dir: &Path) -> Result<(), Failure> {
    if !plans(dir)?.is_empty() {
        return Ok(());
    }
    let what = format!("{} holds no plans (MODEL.txt) to hold today's to", dir.display());
    let help = format!(
        "run it at the top of the source tree, or name the folder of the committed plans; `highwater replan {} --update` \
         begins them there",
        dir.display()
    );
    Err(Failure::found(FAILED, what).with_help(&help))
}

/// Compares one book with its file, cut to what was planned.
fn check_book(
    dir: &Path,
    book: &Book,
    selection: &Selection,
    changes: &mut Changes,
    stale: &mut Vec<String>,
) -> Result<()> {
    let path = dir.join(file_name(book));
    let Some(text) = read(&path)? else {
        stale.push(format!("{} is missing: nothing was planned for {} before", path.display(), book.models.join(", ")));
        return Ok(());
    };
    let mut was = file::parse(&text).with_context(|| format!("cannot read {}", path.display()))?;
    if selection.is_partial() {
        was.recipes.retain(|recipe| selection.takes(&was.models, recipe));
        was.cards.retain(|card| selection.cards.is_empty() || book.cards.contains(card));
    }
    let found = compare(&was, book);
    if found.is_empty() && !selection.is_partial() && file::render(book) != text {
        stale.push(format!("{} holds these plans in other words", path.display()));
    }
    changes.append(found);
    Ok(())
}

/// How it ends: a regression, a baseline that is out of date, or well.
fn verdict(dir: &Path, changes: &Changes, stale: &[String]) -> Result<(), Failure> {
    let mut text = changes.text();
    for line in stale {
        let _ = writeln!(text, "out of date: {line}");
    }
    print(&text)?;
    let update = format!("`highwater replan {} --update` writes them; review the diff and commit it", dir.display());
    if changes.is_regression() {
        let what = format!(
            "against {}, fits lost: {}; places where bytes grew: {}",
            dir.display(),
            changes.lost.len(),
            changes.grown.len()
        );
        let help = format!("find the buffers named above; if they are meant to be there, {update}");
        return Err(Failure::found(MORE_MEMORY, what).with_help(&help));
    }
    if !changes.is_empty() || !stale.is_empty() {
        let what = format!("nothing grew, and {} is not what is planned now", dir.display());
        return Err(Failure::found(FAILED, what).with_help(&update));
    }
    print("no difference\n")?;
    Ok(())
}

fn file_name(book: &Book) -> String {
    format!("{}.txt", book.name())
}

/// A file's text; `None` where there is none. A huge one is refused unread.
fn read(path: &Path) -> Result<Option<String>> {
    let file = match std::fs::File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(Error::io(path))?,
    };
    let mut text = String::new();
    file.take(file::MOST_BYTES + 1).read_to_string(&mut text).map_err(Error::io(path))?;
    ensure!(
        text.len() as u64 <= file::MOST_BYTES,
        "{} is longer than {} B; no plan baseline is",
        path.display(),
        file::MOST_BYTES
    );
    Ok(Some(text))
}

/// Files of plans in the folder that belong to no book.
fn strangers(dir: &Path, books: &[Book]) -> Result<Vec<String>> {
    let known: BTreeSet<String> = books.iter().map(file_name).collect();
    Ok(plans(dir)?.difference(&known).cloned().collect())
}

/// Files of plans in the folder; none where there is no such folder.
fn plans(dir: &Path) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    if dir.is_dir() {
        for entry in std::fs::read_dir(dir).map_err(Error::io(dir))? {
            let name = entry.map_err(Error::io(dir))?.file_name().to_string_lossy().into_owned();
            if Path::new(&name).extension().is_some_and(|end| end == "txt") {
                found.insert(name);
            }
        }
    }
    Ok(found)
}

/// Writes every file, each whole or not at all, and says what changed.
fn update(dir: &Path, books: &[Book]) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
    let mut files: Vec<(String, String)> = books.iter().map(|book| (file_name(book), file::render(book))).collect();
    files.extend(tables(books)?.into_iter().map(|(name, text)| (name.to_owned(), text)));
    let mut changes = Changes::default();
    for book in books {
        // What cannot be read is written anew all the same: that is what --update is for.
        if let Some(was) = read(&dir.join(file_name(book))).ok().flatten().and_then(|text| file::parse(&text).ok()) {
            changes.append(compare(&was, book));
        }
    }
    let mut report = changes.text();
    let (mut written, mut bytes) = (0, 0);
    for (name, text) in &files {
        bytes += text.len();
        let path = dir.join(name);
        if read(&path).ok().flatten().as_ref() == Some(text) {
            continue;
        }
        let temporary = dir.join(format!(".{name}.new"));
        std::fs::write(&temporary, text).map_err(Error::io(&temporary))?;
        std::fs::rename(&temporary, &path).map_err(Error::io(&path))?;
        written += 1;
    }
    for name in strangers(dir, books)? {
        let path = dir.join(&name);
        std::fs::remove_file(&path).map_err(Error::io(&path))?;
        let _ = writeln!(report, "removed: {name} is no built-in model's");
    }
    let _ = writeln!(report, "{written} of {} files written to {}, {bytes} B in all", files.len(), dir.display());
    print(&report)
}
