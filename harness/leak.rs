//! The same work must take the same memory each time it is done, a repetition or a ladder's repeated prompt, and a step must
//! leave nothing behind. Where that is not so, this says in one line which work, how many bytes, and who holds them.

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
            if let Some(what) = difference(name, first, report, &pass.left) {
                return Err(Error::Leak { what });
            }
        }
        if !pass.left.is_empty() {
            let what = format!("a leak: the arena is not empty after the last step: {}", holders(&pass.left, "holds"));
            return Err(Error::Leak { what });
        }
    }
    Ok(())
}

/// What the later of two runs of the same work took otherwise, if anything. `left` is what its last step left behind.
fn difference(name: &str, first: &Report, later: &Report, left: &[(String, u64)]) -> Option<String> {
    let resident = first.resident != later.resident;
    let (what, before, after) = if resident {
        ("resident", first.resident, later.resident)
    } else if first.transient_peak != later.transient_peak || first.fragmentation != later.fragmentation {
        ("transient", first.transient_peak, later.transient_peak)
    } else {
        return None;
    };
    // Of what is more, the live part leaked; the rest is holes.
    let live = later.transient_live_peak.saturating_sub(first.transient_live_peak);
    let leaked = resident || (before != after && 2 * live >= after.abs_diff(before));
    let cause = if leaked { "a leak" } else { "fragmentation" };
    let change = match after.checked_sub(before) {
        Some(0) => "the same with other holes".to_owned(),
        Some(more) => format!("{more} B ({}) more", mib(more)),
        None => format!("{} B ({}) less", before - after, mib(before - after)),
    };
    // Owners at the peak say little of two peaks at different instants; what is left after the last step is the cause.
    let who = if resident {
        holders(&grown(&first.resident_owners, &later.resident_owners), "holds more by")
    } else if left.is_empty() {
        "no step left anything behind: its buffers lie otherwise".to_owned()
    } else {
        format!("after the last step {}", holders(left, "still holds"))
    };
    Some(format!("{cause}: {name} took {before} B of {what} memory first and {after} B when repeated, {change}; {who}"))
}

fn holders(owners: &[(String, u64)], verb: &str) -> String {
    let named: Vec<String> =
        owners.iter().take(NAMED).map(|(owner, bytes)| format!("`{owner}` {verb} {bytes} B")).collect();
    if named.is_empty() { "no owner holds more".to_owned() } else { named.join(", ") }
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
        assert_eq!(difference("prompt 32", &first, &first.clone(), &[]), None);
        let leaked = report(&[("x", 512), ("y", 1024)]);
        let left = [("other.test.y".to_owned(), 512)];
        let text = difference("prompt 32", &first, &leaked, &left).unwrap();
        assert!(text.starts_with("a leak: prompt 32 took 1024 B of transient memory first and 1536 B"), "{text}");
        assert!(text.contains("512 B (") && text.ends_with("after the last step `other.test.y` still holds 512 B"));
        let text = difference("x", &leaked, &first, &[]).unwrap();
        assert!(text.contains("less; no step left anything behind"), "{text}");
        let owner = first.owners[0].0;
        let resident = Report {
            resident: first.resident + 256,
            free: first.free - 256,
            resident_owners: vec![(owner, 256)],
            ..first.clone()
        };
        let text = difference("x", &first, &resident, &[]).unwrap();
        assert!(
            text.contains("of resident memory") && text.ends_with(&format!("`{owner}` holds more by 256 B")),
            "{text}"
        );
        let holes = Report { fragmentation: 512, transient_peak: first.transient_peak + 512, ..first.clone() };
        assert!(difference("x", &first, &holes, &[]).unwrap().starts_with("fragmentation: x took"));
        let moved = Report { fragmentation: 512, ..first.clone() };
        let text = difference("x", &first, &moved, &[]).unwrap();
        assert!(text.starts_with("fragmentation: x took") && text.contains("the same with other holes"), "{text}");
    }
}
