//! What a step's memory came to, as a value: sizes in bytes and who held them. No rendering beyond serde's.

use std::cmp::Reverse;

use serde::{Serialize, Serializer};

use super::tag::{Owner, Tag};

/// The slab's bytes after a step. All sizes in bytes, blocks counted with their padding.
///
/// Always `slab = resident + transient_peak + free`, `owners` sum to `transient_peak`, and `resident_owners` to `resident`.
/// Serialises with its field names; owners and the largest block as `{"tag": "gdn.prefill.h", "bytes": 512}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The slab.
    pub slab: u64,
    /// Extent of the persistent end now, holes included.
    pub resident: u64,
    /// Largest extent of the arena since the step began, holes included: what the card must have.
    pub transient_peak: u64,
    /// `slab - resident - transient_peak`.
    pub free: u64,
    /// Live bytes of the persistent end now.
    pub resident_live: u64,
    /// Largest sum of live arena bytes since the step began: a perfect packing would need no less.
    pub transient_live_peak: u64,
    /// Holes inside the arena at the instant `transient_peak` was first reached.
    pub fragmentation: u64,
    /// The step's largest single arena block; the first if several.
    #[serde(serialize_with = "largest_row")]
    pub largest: Option<(Tag, u64)>,
    /// Live arena bytes by tag at the instant `transient_peak` was first reached, holes as [`Owner::Holes`]; largest
    /// first, then by name.
    #[serde(serialize_with = "owner_rows")]
    pub owners: Vec<(Owner, u64)>,
    /// Live bytes by tag of the persistent end now, holes as [`Owner::Holes`]; largest first, then by name.
    #[serde(serialize_with = "owner_rows")]
    pub resident_owners: Vec<(Owner, u64)>,
}

impl Report {
    /// Joins two steps' reports: the one with the larger `transient_peak` (this one if equal), whole, so that its sums
    /// still hold, but `transient_live_peak` and `largest` are the larger of both.
    pub fn merge_peak(&mut self, other: Report) {
        let transient_live_peak = self.transient_live_peak.max(other.transient_live_peak);
        let bytes_of = |largest: Option<(Tag, u64)>| largest.map(|(_, bytes)| bytes);
        let largest = if bytes_of(other.largest) > bytes_of(self.largest) { other.largest } else { self.largest };
        if other.transient_peak > self.transient_peak {
            *self = other;
        }
        self.transient_live_peak = transient_live_peak;
        self.largest = largest;
    }
}

/// Who holds `extent` bytes: `live[i]` of them `tags[i]`, the rest holes. Largest first, then by name; nobody with none.
pub(super) fn owners(tags: &[Tag], live: &[u64], extent: u64) -> Vec<(Owner, u64)> {
    let holes = extent - live.iter().sum::<u64>();
    let mut owners: Vec<(Owner, u64)> = std::iter::zip(tags, live)
        .map(|(&tag, &bytes)| (Owner::Tag(tag), bytes))
        .chain([(Owner::Holes, holes)])
        .filter(|&(_, bytes)| bytes > 0)
        .collect();
    owners.sort_by_cached_key(|(owner, bytes)| (Reverse(*bytes), owner.to_string()));
    owners
}

#[derive(Serialize)]
struct Row<'a, T> {
    tag: &'a T,
    bytes: u64,
}

fn owner_rows<S: Serializer>(owners: &[(Owner, u64)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(owners.iter().map(|(tag, bytes)| Row { tag, bytes: *bytes }))
}

#[expect(clippy::ref_option, reason = "serde's serialize_with hands over a reference to the field")]
fn largest_row<S: Serializer>(largest: &Option<(Tag, u64)>, serializer: S) -> Result<S::Ok, S::Error> {
    largest.as_ref().map(|(tag, bytes)| Row { tag, bytes: *bytes }).serialize(serializer)
}
