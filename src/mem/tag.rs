//! Names of blocks: which part of the model, which op, which buffer. No sizes here, and nothing that changes with them.

use std::collections::HashMap;
use std::fmt;

use serde::{Serialize, Serializer};

/// The part of the model that owns a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Layer {
    /// Parameters, as they lie on the device.
    Weights,
    /// KV pages and recurrent state slots.
    Cache,
    /// A step's token ids, positions, page tables and indices.
    Inputs,
    /// Token embedding.
    Embed,
    /// Gated DeltaNet.
    Gdn,
    /// Full attention.
    Attention,
    /// Dense feed-forward.
    Mlp,
    /// Router, experts and shared expert.
    Moe,
    /// Normalisation and the residual.
    Norm,
    /// The head: gathered rows and logits.
    Head,
    /// Sampling.
    Sampler,
    /// Anything else: staging, tests.
    Other,
}

impl Layer {
    /// The lower-case name, as tags and reports print it.
    pub const fn name(self) -> &'static str {
        match self {
            Layer::Weights => "weights",
            Layer::Cache => "cache",
            Layer::Inputs => "inputs",
            Layer::Embed => "embed",
            Layer::Gdn => "gdn",
            Layer::Attention => "attention",
            Layer::Mlp => "mlp",
            Layer::Moe => "moe",
            Layer::Norm => "norm",
            Layer::Head => "head",
            Layer::Sampler => "sampler",
            Layer::Other => "other",
        }
    }
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Who asked for a block. Prints as `layer.op.buffer`, e.g. `gdn.prefill.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag {
    /// The part of the model.
    pub layer: Layer,
    /// The op that allocates.
    pub op: &'static str,
    /// The buffer, in the op's own words.
    pub buffer: &'static str,
}

impl Tag {
    /// The tag `layer.op.buffer`.
    pub const fn new(layer: Layer, op: &'static str, buffer: &'static str) -> Tag {
        Tag { layer, op, buffer }
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.layer, self.op, self.buffer)
    }
}

impl Serialize for Tag {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Who holds bytes of an extent: a tag's live blocks, or nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Owner {
    /// Live blocks of this tag, added up.
    Tag(Tag),
    /// Free bytes inside the extent: the price of fragmentation. Prints as `(holes)`.
    Holes,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Owner::Tag(tag) => tag.fmt(f),
            Owner::Holes => f.write_str("(holes)"),
        }
    }
}

impl Serialize for Owner {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A tag's number in its pool, in order of first use.
pub(super) type TagId = u32;

/// Slots of the table of tags seen lately; a power of two, and several times the tags of a model.
const RECENT: usize = 512;

/// The tags a pool has met. The map is only ever looked up, never walked, so its random order shows nowhere.
#[derive(Debug)]
pub(super) struct Tags {
    ids: HashMap<Tag, TagId>,
    /// By number.
    met: Vec<Tag>,
    /// Tags seen lately, by where their letters lie: the same place is the same tag, which is quicker to see than equal
    /// letters. Another place only takes the way through `ids`, so that addresses decide time and never a number.
    recent: Box<[Option<(Tag, TagId)>]>,
}

impl Tags {
    pub(super) fn new() -> Tags {
        Tags { ids: HashMap::new(), met: Vec::new(), recent: vec![None; RECENT].into_boxed_slice() }
    }

    pub(super) fn intern(&mut self, tag: Tag) -> TagId {
        let slot = slot_of(tag);
        if let Some((seen, id)) = self.recent[slot]
            && seen.layer == tag.layer
            && std::ptr::eq(seen.op, tag.op)
            && std::ptr::eq(seen.buffer, tag.buffer)
        {
            return id;
        }
        let id = *self.ids.entry(tag).or_insert_with(|| {
            self.met.push(tag);
            self.met.len() as TagId - 1
        });
        self.recent[slot] = Some((tag, id));
        id
    }

    pub(super) fn get(&self, id: TagId) -> Tag {
        self.met[id as usize]
    }

    /// The tags in order of their numbers, which is the order of the ledger's byte counts.
    pub(super) fn all(&self) -> &[Tag] {
        &self.met
    }
}

/// Fibonacci hashing of the two addresses and the layer.
fn slot_of(tag: Tag) -> usize {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    let op = (tag.op.as_ptr().addr() as u64).wrapping_mul(GOLDEN);
    let buffer = (tag.buffer.as_ptr().addr() as u64 ^ (tag.layer as u64) << 48).wrapping_mul(GOLDEN);
    ((op.rotate_left(32) ^ buffer) >> (u64::BITS - RECENT.ilog2())) as usize
}

impl Serialize for Layer {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}
