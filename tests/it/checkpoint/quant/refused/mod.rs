//! Corrupted and unsupported quantised checkpoints, in tables. Each case starts from a fixture, has one thing wrong, and
//! must be refused, at opening or at the read that meets a value, with a message that names the thing, says what is
//! there and what would be right; none may panic, and none is served.

mod configs;
mod tensors;

use std::panic::{AssertUnwindSafe, catch_unwind};

use highwater::checkpoint::Checkpoint;
use highwater::error::Error;

use super::super::maker::Maker;
use super::{CASES, fixture, read_all};

struct Case {
    name: String,
    base: &'static str,
    /// What the message must hold.
    says: Vec<String>,
    bend: Box<dyn Fn(&mut Maker)>,
}

fn case(name: impl Into<String>, base: &'static str, says: &[&str], bend: impl Fn(&mut Maker) + 'static) -> Case {
    Case { name: name.into(), base, says: says.iter().map(|s| (*s).into()).collect(), bend: Box::new(bend) }
}

impl Case {
    /// What is wrong with how the case was handled, if anything.
    fn fault(&self) -> Option<String> {
        let mut maker = fixture(self.base);
        (self.bend)(&mut maker);
        let dir = maker.write();
        let result = catch_unwind(AssertUnwindSafe(|| Checkpoint::open(dir.path()).and_then(|c| read_all(&c))));
        let error = match result {
            Err(_) => return Some("panicked".into()),
            Ok(Ok(())) => return Some("served".into()),
            Ok(Err(error)) => error,
        };
        let text = error.to_string();
        if !matches!(error, Error::Checkpoint { .. } | Error::Config { .. } | Error::Unsupported { .. }) {
            return Some(format!("{error:?}"));
        }
        // What is read instead, or what would be right.
        let remedies: &[&str] = match &error {
            Error::Unsupported { .. } => &["supported", "quantised to"],
            _ => &[
                "must",
                "at most",
                "asks for",
                "have no tensor",
                "remove",
                "num_experts is",
                "no rule skips",
                "known are",
                "supported are",
                "take ",
                "only ",
            ],
        };
        if !remedies.iter().any(|r| text.contains(r)) {
            return Some(format!("says nothing that would be right: {text}"));
        }
        let here = dir.path().to_str().unwrap();
        let missing = self.says.iter().map(String::as_str).chain([here]).find(|s| !text.contains(s));
        missing.map(|s| format!("does not say {s:?}: {text}"))
    }
}

#[test]
fn every_base_is_served_unbent() {
    for base in CASES {
        assert_eq!(case("unbent", base, &[], |_| {}).fault().as_deref(), Some("served"), "{base}");
    }
}

#[test]
#[allow(clippy::print_stdout, reason = "the count is what this test reports")]
fn at_least_60_corrupted_variants_are_refused_by_name() {
    let (mut count, mut faults) = (0, Vec::new());
    for (table, cases) in [("tensors", tensors::cases()), ("configs", configs::cases())] {
        println!("{table}: {} variants", cases.len());
        count += cases.len();
        faults.extend(cases.iter().filter_map(|c| Some(format!("{table}: {} ({}): {}", c.name, c.base, c.fault()?))));
    }
    println!("{count} corrupted variants, {} wrongly handled", faults.len());
    assert!(faults.is_empty(), "{} of {count}:\n{}", faults.len(), faults.join("\n"));
    assert!(count >= 60, "only {count}");
}
