//! What is planned and kept: the bytes and the edges of one geometry's recipes on every card. Values only: `grid` plans
//! them, `file` writes and reads them, `diff` compares two of them.

use std::collections::BTreeMap;

use crate::frontier::Edge;

/// Everything planned for one geometry.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Book {
    /// The built-in models that have this geometry, in the order of the program's list.
    pub(crate) models: Vec<String>,
    /// Recipes in the order of the program's list.
    pub(crate) recipes: Vec<String>,
    /// Cards in the order of the program's list.
    pub(crate) cards: Vec<String>,
    /// Bytes of each recipe on each card.
    pub(crate) cells: BTreeMap<Point, Bytes>,
    /// Where each recipe's batches end on each card.
    pub(crate) edges: BTreeMap<Under, Edge>,
}

/// A recipe on a card under one batch and chunk.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Point {
    pub(crate) recipe: String,
    pub(crate) card: String,
    /// Sequences.
    pub(crate) batch: u64,
    /// Prefill token budget of a step.
    pub(crate) chunk: u64,
}

/// A recipe on a card under one batch.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Under {
    pub(crate) recipe: String,
    pub(crate) card: String,
    /// Sequences.
    pub(crate) batch: u64,
}

/// A slab's terms, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Bytes {
    /// Weights, KV pages, state slots and step inputs, in the order of [`RESIDENT`].
    pub(crate) resident: [u64; 4],
    /// The transient arena.
    pub(crate) transient: u64,
    /// Who holds it at its worst instant: largest first, sums to `transient`.
    pub(crate) owners: Vec<(String, u64)>,
}

/// Names of the resident terms.
pub(crate) const RESIDENT: [&str; 4] = ["weights", "kv", "state", "inputs"];

impl Bytes {
    /// What a slab must have.
    pub(crate) fn total(&self) -> u64 {
        self.resident.iter().sum::<u64>() + self.transient
    }
}

impl Book {
    /// The first model's name, which names the file.
    pub(crate) fn name(&self) -> &str {
        self.models.first().map_or("", String::as_str)
    }

    /// The edge of one batch; `None` where it was not planned.
    pub(crate) fn edge(&self, recipe: &str, card: &str, batch: u64) -> Option<Edge> {
        self.edges.get(&Under { recipe: recipe.to_owned(), card: card.to_owned(), batch }).copied()
    }
}

/// The largest chunk of an edge, 0 where none fits.
pub(crate) fn edge_chunk(edge: Edge) -> u64 {
    match edge {
        Edge::Nothing => 0,
        Edge::Largest(chunk) | Edge::Beyond(chunk) | Edge::Whole(chunk) => chunk,
    }
}
