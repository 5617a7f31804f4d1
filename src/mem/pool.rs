//! The allocator over one slab: two regions that grow towards each other, and the ledger of both.

use super::ledger::Ledger;
use super::region::Region;
use super::report::{self, Report};
use super::tag::{Owner, Tag, TagId, Tags};
use crate::error::OutOfMemory;

/// Offsets and sizes are multiples of this: what a device's own allocator guarantees, and enough for any vector load.
pub const ALIGN_BYTES: u64 = 256;

/// The end of the slab a block comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum End {
    /// Grows up from address 0: what outlives a step.
    Persistent,
    /// Grows down from the top: one step's blocks.
    Arena,
}

/// A range of the slab, from [`Pool::alloc`] to [`Pool::free`]. It is only an address: dropped, it stays allocated.
#[derive(Debug)]
#[must_use = "a block that is dropped stays allocated; give it to Pool::free"]
pub struct Block {
    offset: u64,
    bytes: u64,
    requested: u64,
    node: u32,
    owner: TagId,
    end: End,
}

impl Block {
    /// Bytes from the start of the slab, a multiple of [`ALIGN_BYTES`].
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Its size, padded to [`ALIGN_BYTES`].
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The bytes that were asked for.
    pub fn requested(&self) -> u64 {
        self.requested
    }

    /// The end it came from.
    pub fn end(&self) -> End {
        self.end
    }
}

/// A deterministic allocator of addresses over one slab: the same calls give the same offsets, and as long as everything
/// fits, the slab's size moves no persistent block and no arena block's distance from the top.
#[derive(Debug)]
pub struct Pool {
    capacity: u64,
    /// Indexed by [`End`].
    regions: [Region; 2],
    tags: Tags,
    ledger: Ledger,
}

impl Pool {
    /// A pool over `capacity_bytes`, rounded down to [`ALIGN_BYTES`]. Any value is good, 0 and `u64::MAX` too.
    pub fn new(capacity_bytes: u64) -> Pool {
        Pool {
            capacity: capacity_bytes - capacity_bytes % ALIGN_BYTES,
            regions: [Region::new(), Region::new()],
            tags: Tags::new(),
            ledger: Ledger::new(),
        }
    }

    /// Takes `bytes`, padded up to [`ALIGN_BYTES`]; zero bytes take one unit, so that no two live blocks share an address.
    ///
    /// Goes into a hole of its end that fits well, else past the end's extent into the gap. The bytes of the step's arena
    /// peak stay the arena's until [`Pool::begin_step`]: a persistent block never takes them, or the step just measured
    /// could not run again.
    ///
    /// # Errors
    /// [`OutOfMemory`] if no hole of that end and not what is left of the gap holds it. The pool is then as before.
    pub fn alloc(&mut self, end: End, tag: Tag, bytes: u64) -> Result<Block, OutOfMemory> {
        let room = self.room(end);
        let Some(padded) = bytes.max(1).checked_next_multiple_of(ALIGN_BYTES) else {
            return Err(self.refusal(tag, u64::MAX - u64::MAX % ALIGN_BYTES, room));
        };
        let region = &mut self.regions[end as usize];
        let Some(place) = region.find(padded, room) else {
            return Err(self.refusal(tag, padded, room));
        };
        let owner = self.tags.intern(tag);
        let (node, at) = region.take(place, padded, owner);
        self.ledger.allocated(end, owner, padded, region.extent(), region.live());
        Ok(Block { offset: self.flip(end, at, padded), bytes: padded, requested: bytes, node, owner, end })
    }

    /// Gives a block back. It joins the holes beside it; at the frontier, the extent shrinks.
    ///
    /// # Panics
    /// If the block is visibly another pool's: a bug in the caller, and going on would corrupt the addresses.
    #[expect(clippy::needless_pass_by_value, reason = "a block given back must be gone")]
    pub fn free(&mut self, block: Block) {
        let Block { offset, bytes, node, owner, end, .. } = block;
        let at = self.flip(end, offset, bytes);
        let region = &mut self.regions[end as usize];
        assert!(region.holds(node, owner, at, bytes), "block of {bytes} B at {offset} is not of this pool");
        self.ledger.freed(end, owner, bytes);
        region.give(node);
    }

    /// Starts a step: its peak, the owners at the peak and its largest block start afresh.
    ///
    /// The arena should be empty ([`Pool::arena_live`] is 0). If blocks are still live they stay so, and count as the new
    /// step's own: its peak starts at the present extent, and the report stays exact.
    pub fn begin_step(&mut self) {
        let arena = &self.regions[End::Arena as usize];
        self.ledger.begin_step(arena.extent(), arena.live(), arena.blocks());
    }

    /// What is held now, and the step's peak with its owners.
    pub fn report(&self) -> Report {
        let tags = self.tags.all();
        let [resident, peak] = [self.resident(), self.ledger.peak()];
        Report {
            slab: self.capacity,
            resident,
            transient_peak: peak,
            free: self.capacity - resident - peak,
            resident_live: self.regions[End::Persistent as usize].live(),
            transient_live_peak: self.ledger.live_peak(),
            fragmentation: peak - self.ledger.at_peak().iter().sum::<u64>(),
            largest: self.ledger.largest().map(|(id, bytes)| (self.tags.get(id), bytes)),
            owners: report::owners(tags, self.ledger.at_peak(), peak),
            resident_owners: report::owners(tags, self.ledger.live(End::Persistent), resident),
        }
    }

    /// The slab, in bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Extent of the persistent end, holes included, in bytes.
    pub fn resident(&self) -> u64 {
        self.regions[End::Persistent as usize].extent()
    }

    /// Bytes of live arena blocks.
    pub fn arena_live(&self) -> u64 {
        self.regions[End::Arena as usize].live()
    }

    /// Live bytes of the arena now by tag, its holes as [`Owner::Holes`]; nobody between steps, unless something leaks.
    pub fn arena_owners(&self) -> Vec<(Owner, u64)> {
        report::owners(self.tags.all(), self.ledger.live(End::Arena), self.arena_extent())
    }

    /// Extent of the arena now, holes included, in bytes.
    pub fn arena_extent(&self) -> u64 {
        self.regions[End::Arena as usize].extent()
    }

    /// Bytes between the two extents now.
    pub fn gap(&self) -> u64 {
        self.capacity - self.resident() - self.arena_extent()
    }

    /// How far an end may grow.
    fn room(&self, end: End) -> u64 {
        match end {
            End::Persistent => self.capacity - self.resident() - self.ledger.peak(),
            End::Arena => self.gap(),
        }
    }

    /// Slab offset from region offset and back: the arena is mirrored.
    fn flip(&self, end: End, offset: u64, bytes: u64) -> u64 {
        match end {
            End::Persistent => offset,
            End::Arena => self.capacity.wrapping_sub(offset).wrapping_sub(bytes),
        }
    }

    /// The error for `padded` bytes where `room` were left: the owners sum to `slab - room`.
    fn refusal(&self, tag: Tag, padded: u64, room: u64) -> OutOfMemory {
        let held = [End::Persistent, End::Arena].map(|end| self.ledger.live(end));
        let of = |id: usize| held.iter().filter_map(|live| live.get(id)).sum();
        let live: Vec<u64> = (0..self.tags.all().len()).map(of).collect();
        let extents = self.resident() + self.arena_extent();
        let mut owners: Vec<(String, u64)> = report::owners(self.tags.all(), &live, extents)
            .into_iter()
            .map(|(owner, bytes)| (owner.to_string(), bytes))
            .collect();
        let kept = self.gap() - room;
        if kept > 0 {
            let at = owners.partition_point(|&(_, bytes)| bytes >= kept);
            owners.insert(at, ("(kept for the step's peak)".into(), kept));
        }
        OutOfMemory { tag: tag.to_string(), requested: padded, free: room, slab: self.capacity, owners }
    }
}
