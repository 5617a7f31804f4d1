//! The same work must take the same memory each time it is done: a repetition, or a ladder's repeated prompt. Where it does
//! not, this says in one line which work, how many bytes, and who holds them.

use std::collections::HashMap;

use highwater::error::{Error, mib};
use highwater::mem::Report;

use crate::pass::Pass;
use crate::workload::Script;

/// Owners named in the line.
const NAMED: usize = 3;

/// Compares every stage of every pass with the first of its name. All passes are of `script`.
pub(crate) fn check<'a>(script: &Script, passes: impl IntoIterator<Item = &'a Pass>) -> Result<(), Error> {
    let mut firsts: HashMap<&str, &Report> = HashMap::new();
    for pass in passes {
        for (at, report) in pass.stages.iter().enumerate() {
            let Some(report) = report else { continue };
            let name = script.stages.get(at).map_or("the cell", String::as_str);
            let first = *firsts.entry(name).or_insert(report);
            if let Some(what) = difference(name, first, report) {
                return Err(Error::Leak { what });
            }
        }
    }
    Ok(())
}

/// What the later of two runs of the same work took otherwise, if anything.
fn difference(name: &str, first: &Report, later: &Report) -> Option<String> {
    let resident = first.resident != later.resident;
    let (what, before, after) = if resident {
        ("resident", first.resident, later.resident)
    } else if first.transient_peak != later.transient_peak || first.fragmentation != later.fragmentation {
        ("transient", first.transient_peak, later.transient_peak)
    } else {
        return None;
    };
    let owners = if resident {
        grown(&first.resident_owners, &later.resident_owners)
    } else {
        grown(&first.owners, &later.owners)
    };
    let held = later.fragmentation.saturating_sub(first.fragmentation);
    let cause = if held > 0 && owners.iter().all(|(_, more)| *more <= held) { "fragmentation" } else { "a leak" };
    let change = match after.checked_sub(before) {
        Some(0) => "the same extent with other holes".to_owned(),
        Some(more) => format!("{more} B ({}) more", mib(more)),
        None => format!("{} B ({}) less", before - after, mib(before - after)),
    };
    let who: Vec<String> =
        owners.iter().take(NAMED).map(|(owner, more)| format!("`{owner}` holds {more} B more")).collect();
    let who = if who.is_empty() { "no owner holds more".to_owned() } else { who.join(", ") };
    Some(format!("{cause}: {name} took {before} B of {what} memory first and {after} B when repeated, {change}; {who}"))
}

/// Owners that hold more than before, most first.
fn grown<T: PartialEq + ToString>(before: &[(T, u64)], after: &[(T, u64)]) -> Vec<(String, u64)> {
    let held = |owner: &T| before.iter().find(|(other, _)| other == owner).map_or(0, |(_, bytes)| *bytes);
    let mut grown: Vec<(String, u64)> = after
        .iter()
        .filter(|(owner, bytes)| *bytes > held(owner))
        .map(|(owner, bytes)| (owner.to_string(), bytes - held(owner)))
        .collect();
    grown.sort_by_key(|(owner, more)| (std::cmp::Reverse(*more), owner.clone()));
    grown
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater::device::{Device, cards};
    use highwater::mem::{End, Layer, Tag};

    /// The report of a step that took buffers of those bytes.
    fn report(sizes: &[(&'static str, u64)]) -> Report {
        let device = Device::plan(cards::find("h200").unwrap(), 1 << 20);
        device.begin_step();
        let take = |(name, bytes): &(&'static str, u64)| {
            device.alloc(End::Arena, Tag::new(Layer::Other, "test", name), *bytes).unwrap()
        };
        let _held: Vec<_> = sizes.iter().map(take).collect();
        device.report()
    }

    #[test]
    fn a_difference_is_told_by_its_cause() {
        let first = report(&[("x", 512), ("y", 512)]);
        assert_eq!(difference("prompt 32", &first, &first.clone()), None);
        let leaked = report(&[("x", 512), ("y", 1024)]);
        let text = difference("prompt 32", &first, &leaked).unwrap();
        assert!(text.starts_with("a leak: prompt 32 took 1024 B of transient memory first and 1536 B"), "{text}");
        assert!(text.contains("512 B (") && text.ends_with("`other.test.y` holds 512 B more"), "{text}");
        assert!(difference("x", &leaked, &first).unwrap().contains("less; no owner holds more"));
        let resident = Report { resident: first.resident + 256, free: first.free - 256, ..first.clone() };
        assert!(difference("x", &first, &resident).unwrap().contains("of resident memory"));
        let holes = Report { fragmentation: 512, transient_peak: first.transient_peak + 512, ..first.clone() };
        assert!(difference("x", &first, &holes).unwrap().starts_with("fragmentation: x took"));
    }
}
