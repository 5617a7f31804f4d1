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

/// The tags a pool has met. The map is only ever looked up, never walked, so its random order shows nowhere.
#[derive(Debug, Default)]
pub(super) struct Tags {
    ids: HashMap<Tag, TagId>,
    tags: Vec<Tag>,
}

impl Tags {
    pub(super) fn intern(&mut self, tag: Tag) -> TagId {
        *self.ids.entry(tag).or_insert_with(|| {
            self.tags.push(tag);
            self.tags.len() as TagId - 1
        })
    }

    pub(super) fn get(&self, id: TagId) -> Tag {
        self.tags[id as usize]
    }

    /// The tags in order of their numbers, which is the order of the ledger's byte counts.
    pub(super) fn all(&self) -> &[Tag] {
        &self.tags
    }
}

impl Serialize for Layer {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}
