//! One end of the slab, in its own coordinates: offset 0 is the end of the slab it starts from, and it grows away from it.
//!
//! Blocks and holes tile the extent without a gap, and the last piece of it is always a live block. Holes hang in
//! two-level segregated lists: a row per power of two, 32 classes per row (M. Masmano et al., "TLSF: a new dynamic
//! memory allocator for real-time systems", ECRTS 2004). Finding, taking and giving back cost a bounded number of steps,
//! except that a request about to be refused looks through the whole of its own class first. Knows no tags' names, no
//! slab, no policy of who may grow.

use super::pool::ALIGN_BYTES;
use super::tag::TagId;

/// log2 of the classes per row: a class spans at most 1/32 of its smallest size; up to 63 units it holds one size.
const CLASS_BITS: u32 = 5;
const CLASSES_PER_ROW: usize = 1 << CLASS_BITS;
/// Row 0 holds sizes below 32 units, then one row per power of two up to 2^55; a u64 counts fewer than 2^56 units.
const ROWS: usize = (u64::BITS - ALIGN_BYTES.ilog2() - CLASS_BITS + 1) as usize;
/// Holes of its own class that a search looks at, some of them too small: few, to stay fast.
const SCAN: usize = 8;
/// No node.
const NIL: u32 = u32::MAX;

/// A live block or a hole.
#[derive(Debug, Clone, Copy)]
struct Node {
    offset: u64,
    bytes: u64,
    /// Neighbours by address.
    before: u32,
    after: u32,
    /// Neighbours in the list of the hole's class; meaningless for a live block.
    prev: u32,
    next: u32,
    /// `None`: a hole.
    owner: Option<TagId>,
}

/// Where a request goes; good until the region changes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Place {
    /// Into a hole.
    Hole(u32),
    /// Past the last block: the extent grows.
    Frontier,
}

/// One end of the slab. All sizes are bytes, multiples of [`ALIGN_BYTES`].
#[derive(Debug)]
pub(super) struct Region {
    nodes: Vec<Node>,
    /// Numbers of dead nodes, reused last in first out.
    spare: Vec<u32>,
    /// The node that ends the extent.
    tail: u32,
    extent: u64,
    live: u64,
    /// First hole of each class.
    heads: Box<[u32]>,
    /// Bit c of row r: class c of that row has holes.
    classes: [u32; ROWS],
    /// Bit r: row r has holes.
    rows: u64,
}

/// The class of a size; grows with the size.
fn class_of(bytes: u64) -> usize {
    let units = bytes / ALIGN_BYTES;
    if units < CLASSES_PER_ROW as u64 {
        return units as usize;
    }
    let log = units.ilog2();
    let row = (log - CLASS_BITS + 1) as usize;
    let class = (units >> (log - CLASS_BITS)) as usize % CLASSES_PER_ROW;
    row * CLASSES_PER_ROW + class
}

impl Region {
    pub(super) fn new() -> Region {
        Region {
            nodes: Vec::new(),
            spare: Vec::new(),
            tail: NIL,
            extent: 0,
            live: 0,
            heads: vec![NIL; ROWS * CLASSES_PER_ROW].into_boxed_slice(),
            classes: [0; ROWS],
            rows: 0,
        }
    }

    /// Bytes from the region's start to the end of its last live block.
    pub(super) fn extent(&self) -> u64 {
        self.extent
    }

    /// Bytes of live blocks.
    pub(super) fn live(&self) -> u64 {
        self.live
    }

    /// Where `bytes` go: a hole that fits well, else past the frontier if `room` allows, else any hole that fits at all.
    /// As long as `room` suffices the answer does not depend on it, so a larger slab gives the same offsets.
    pub(super) fn find(&self, bytes: u64, room: u64) -> Option<Place> {
        let own = class_of(bytes);
        if let Some(hole) = self.best_of(own, bytes, SCAN) {
            return Some(Place::Hole(hole));
        }
        if let Some(hole) = self.class_from(own + 1).map(|class| self.heads[class]) {
            return Some(Place::Hole(hole));
        }
        if bytes <= room {
            return Some(Place::Frontier);
        }
        self.best_of(own, bytes, usize::MAX).map(Place::Hole)
    }

    /// Takes `bytes` at a place that [`Region::find`] gave for them. Returns the node and its offset.
    pub(super) fn take(&mut self, place: Place, bytes: u64, owner: TagId) -> (u32, u64) {
        self.live += bytes;
        match place {
            Place::Hole(hole) => {
                self.unlink(hole);
                let Node { offset, bytes: found, after, .. } = self.nodes[hole as usize];
                self.nodes[hole as usize].owner = Some(owner);
                if found > bytes {
                    let rest = self.add_node(offset + bytes, found - bytes, None);
                    self.nodes[hole as usize].bytes = bytes;
                    self.join(hole, rest);
                    self.join(rest, after);
                    self.link(rest);
                }
                (hole, offset)
            }
            Place::Frontier => {
                let offset = self.extent;
                let node = self.add_node(offset, bytes, Some(owner));
                self.join(self.tail, node);
                self.tail = node;
                self.extent += bytes;
                (node, offset)
            }
        }
    }

    /// Gives a live block back: it joins the holes beside it, and a hole at the frontier leaves the extent.
    pub(super) fn give(&mut self, block: u32) {
        let Node { bytes, before, after, .. } = self.nodes[block as usize];
        self.live -= bytes;
        self.nodes[block as usize].owner = None;
        let mut hole = block;
        if self.is_hole(before) {
            self.unlink(before);
            self.absorb(before, block);
            hole = before;
        }
        if self.is_hole(after) {
            self.unlink(after);
            self.absorb(hole, after);
        }
        let Node { offset, before, after, .. } = self.nodes[hole as usize];
        if after == NIL {
            self.extent = offset;
            self.tail = before;
            if before != NIL {
                self.nodes[before as usize].after = NIL;
            }
            self.spare.push(hole);
        } else {
            self.link(hole);
        }
    }

    /// Whether `node` is a live block of exactly this owner, offset and size.
    pub(super) fn holds(&self, node: u32, owner: TagId, offset: u64, bytes: u64) -> bool {
        self.nodes.get(node as usize).is_some_and(|n| n.owner == Some(owner) && n.offset == offset && n.bytes == bytes)
    }

    /// Live blocks as (owner, bytes), from the frontier back to the start.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (TagId, u64)> + '_ {
        std::iter::successors(self.nodes.get(self.tail as usize), |n| self.nodes.get(n.before as usize))
            .filter_map(|n| n.owner.map(|owner| (owner, n.bytes)))
    }

    /// The smallest hole of at least `bytes` among the first `scan` of a class; the one nearest the start if several.
    fn best_of(&self, class: usize, bytes: u64, scan: usize) -> Option<u32> {
        let mut best = None;
        let mut at = self.heads[class];
        for _ in 0..scan {
            let Some(node) = self.nodes.get(at as usize) else { break };
            let key = (node.bytes, node.offset);
            if node.bytes >= bytes && best.is_none_or(|(_, least)| key < least) {
                best = Some((at, key));
            }
            at = node.next;
        }
        best.map(|(hole, _)| hole)
    }

    /// The first class from `class` on that has holes.
    fn class_from(&self, class: usize) -> Option<usize> {
        let row = class / CLASSES_PER_ROW;
        let here = self.classes.get(row)? & (u32::MAX << (class % CLASSES_PER_ROW));
        if here != 0 {
            return Some(row * CLASSES_PER_ROW + here.trailing_zeros() as usize);
        }
        let above = self.rows & (u64::MAX << (row + 1));
        if above == 0 {
            return None;
        }
        let row = above.trailing_zeros() as usize;
        Some(row * CLASSES_PER_ROW + self.classes[row].trailing_zeros() as usize)
    }

    fn is_hole(&self, node: u32) -> bool {
        self.nodes.get(node as usize).is_some_and(|n| n.owner.is_none())
    }

    fn add_node(&mut self, offset: u64, bytes: u64, owner: Option<TagId>) -> u32 {
        let node = Node { offset, bytes, before: NIL, after: NIL, prev: NIL, next: NIL, owner };
        if let Some(index) = self.spare.pop() {
            self.nodes[index as usize] = node;
            return index;
        }
        // 2^32 nodes are 160 GiB of book-keeping: the host runs out first.
        let index = u32::try_from(self.nodes.len()).ok().filter(|&i| i != NIL).expect("fewer than 2^32 - 1 pieces");
        self.nodes.push(node);
        index
    }

    /// Makes `after` follow `before` by address; either may be [`NIL`].
    fn join(&mut self, before: u32, after: u32) {
        if before != NIL {
            self.nodes[before as usize].after = after;
        }
        if after != NIL {
            self.nodes[after as usize].before = before;
        }
    }

    /// Adds the piece that follows `hole` by address to it; the piece's node is dead after.
    fn absorb(&mut self, hole: u32, piece: u32) {
        let Node { bytes, after, .. } = self.nodes[piece as usize];
        self.nodes[hole as usize].bytes += bytes;
        self.join(hole, after);
        self.spare.push(piece);
    }

    /// Puts a hole first in the list of its class.
    fn link(&mut self, hole: u32) {
        let class = class_of(self.nodes[hole as usize].bytes);
        let next = std::mem::replace(&mut self.heads[class], hole);
        let node = &mut self.nodes[hole as usize];
        (node.prev, node.next) = (NIL, next);
        if next != NIL {
            self.nodes[next as usize].prev = hole;
        }
        self.classes[class / CLASSES_PER_ROW] |= 1 << (class % CLASSES_PER_ROW);
        self.rows |= 1 << (class / CLASSES_PER_ROW);
    }

    /// Takes a hole out of the list of its class.
    fn unlink(&mut self, hole: u32) {
        let Node { bytes, prev, next, .. } = self.nodes[hole as usize];
        if next != NIL {
            self.nodes[next as usize].prev = prev;
        }
        if prev != NIL {
            self.nodes[prev as usize].next = next;
            return;
        }
        let class = class_of(bytes);
        self.heads[class] = next;
        if next == NIL {
            let row = class / CLASSES_PER_ROW;
            self.classes[row] &= !(1 << (class % CLASSES_PER_ROW));
            if self.classes[row] == 0 {
                self.rows &= !(1 << row);
            }
        }
    }
}
