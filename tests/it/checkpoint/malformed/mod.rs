//! Malformed checkpoints, one table per kind of file. Each case starts from a valid checkpoint, has one thing wrong,
//! and must be refused with the right variant and a message that names the thing; none may panic.

mod config;
mod header;
mod index;
mod tensors;
mod tokens;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use highwater::checkpoint::Checkpoint;
use highwater::error::Error;

use super::maker::Maker;

/// The variant a case must give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Config,
    Checkpoint,
    Unsupported,
    Io,
}

fn kind(error: &Error) -> Option<Kind> {
    match error {
        Error::Config { .. } => Some(Kind::Config),
        Error::Checkpoint { .. } => Some(Kind::Checkpoint),
        Error::Unsupported { .. } => Some(Kind::Unsupported),
        Error::Io { .. } => Some(Kind::Io),
        _ => None,
    }
}

/// The valid checkpoint a case starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Base {
    Dense,
    Moe,
    Tied,
    Sharded,
}

struct Case {
    name: String,
    base: Base,
    want: Kind,
    /// What the message must hold.
    says: Vec<String>,
    /// Changes the checkpoint before it is written.
    make: Box<dyn Fn(&mut Maker)>,
    /// Changes the folder after.
    bend: Box<dyn Fn(&Path)>,
}

impl Case {
    fn new(name: impl Into<String>, base: Base, want: Kind, says: &[&str]) -> Case {
        Case {
            name: name.into(),
            base,
            want,
            says: says.iter().map(|s| (*s).to_string()).collect(),
            make: Box::new(|_| {}),
            bend: Box::new(|_| {}),
        }
    }

    fn make(mut self, f: impl Fn(&mut Maker) + 'static) -> Case {
        self.make = Box::new(f);
        self
    }

    fn bend(mut self, f: impl Fn(&Path) + 'static) -> Case {
        self.bend = Box::new(f);
        self
    }

    /// `None` if the case does as it must, else what went wrong.
    fn fault(&self) -> Option<String> {
        let mut maker = match self.base {
            Base::Dense | Base::Sharded => Maker::dense(),
            Base::Moe => Maker::moe(),
            Base::Tied => Maker::tied(),
        };
        (self.make)(&mut maker);
        let dir = if self.base == Base::Sharded { maker.write_sharded(3) } else { maker.write() };
        (self.bend)(dir.path());
        let error = match catch_unwind(AssertUnwindSafe(|| Checkpoint::open(dir.path()))) {
            Err(_) => return Some("panicked".into()),
            Ok(Ok(_)) => return Some("opened".into()),
            Ok(Err(error)) => error,
        };
        let text = error.to_string();
        if kind(&error) != Some(self.want) {
            return Some(format!("{error:?}"));
        }
        if text.len() > 2000 || text.contains('\n') {
            return Some(format!("not one short line: {text}"));
        }
        self.says.iter().find(|s| !text.contains(s.as_str())).map(|s| format!("does not say \"{s}\": {text}"))
    }
}

/// Rewrites one file of the folder.
fn rewrite(dir: &Path, name: &str, f: impl FnOnce(Vec<u8>) -> Vec<u8>) {
    let path = dir.join(name);
    fs::write(&path, f(fs::read(&path).unwrap())).unwrap();
}

/// Rewrites one text file by replacing a piece that must be there.
fn replace(dir: &Path, name: &str, from: &str, to: &str) {
    rewrite(dir, name, |bytes| {
        let text = String::from_utf8(bytes).unwrap();
        assert!(text.contains(from), "{name} has no {from}");
        text.replacen(from, to, 1).into_bytes()
    });
}

#[test]
fn every_base_opens_unbent() {
    for base in [Base::Dense, Base::Moe, Base::Tied, Base::Sharded] {
        let fault = Case::new("unbent", base, Kind::Checkpoint, &[]).fault();
        assert_eq!(fault.as_deref(), Some("opened"), "{base:?}");
    }
}

#[test]
#[allow(clippy::print_stdout, reason = "the count is what this test reports")]
fn at_least_200_malformed_checkpoints_are_refused_by_name() {
    let tables = [
        ("config", config::cases()),
        ("header", header::cases()),
        ("index", index::cases()),
        ("tensors", tensors::cases()),
        ("tokens", tokens::cases()),
    ];
    let (mut count, mut faults) = (0, Vec::new());
    for (table, cases) in tables {
        println!("{table}: {} malformed inputs", cases.len());
        count += cases.len();
        faults.extend(cases.iter().filter_map(|c| Some(format!("{table}: {}: {}", c.name, c.fault()?))));
    }
    println!("{count} malformed inputs, {} wrongly handled", faults.len());
    assert!(faults.is_empty(), "{} of {count}:\n{}", faults.len(), faults.join("\n"));
    assert!(count >= 200, "only {count} cases");
}
