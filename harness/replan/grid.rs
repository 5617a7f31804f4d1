//! What is planned: every built-in geometry, the recipes that are about it, every card, and the chunks and batches kept.
//! Bytes come from the engine's own sizing; nothing here adds any up in its own way.

use anyhow::{Context, Result};
use highwater::checkpoint::{Geometry, Recipe, Source, Verdict, names};
use highwater::device::{Arch, DeviceSpec, cards};
use highwater::engine::{Fault, Sizer, Sizing};
use highwater::error::Error;
use highwater::ops::{Limits, Numerics};
use rayon::prelude::*;

use super::book::{Book, Bytes, Point, Under};
use super::reach::Totals;
use crate::frontier::{Edge, STEP_TOKENS};
use crate::progress::Progress;

/// Tokens of each sequence, prompt and output together.
pub(crate) const CONTEXT: u64 = 8192;
/// Chunks whose bytes are kept.
pub(crate) const CHUNKS: [u64; 3] = [512, 2048, 8192];
/// Batches whose bytes and edges are kept.
pub(crate) const BATCHES: [u64; 3] = [1, 8, 64];
/// The largest chunk an edge is looked for at.
pub(crate) const MOST_CHUNK: u64 = 1 << 16;
/// Tokens each sequence decodes in a cell of `highwater frontier`, whose edges these are.
const OUTPUT_TOKENS: u64 = 2;

/// One geometry under all of its names, and the recipes that are about it.
#[derive(Debug, Clone)]
pub(crate) struct Kind {
    /// The built-in models that differ in name alone.
    pub(crate) models: Vec<String>,
    /// The recipes, in the order of the program's list.
    pub(crate) recipes: Vec<String>,
}

/// Every built-in geometry with the recipes that are about it; those that are not are said by `Recipe::check`.
pub(crate) fn kinds() -> Result<Vec<Kind>> {
    let mut kinds: Vec<(Geometry, Kind)> = Vec::new();
    for name in names() {
        let geometry = Geometry::builtin(name)?;
        let nameless = Geometry { name: String::new(), ..geometry.clone() };
        if let Some((_, kind)) = kinds.iter_mut().find(|(known, _)| *known == nameless) {
            kind.models.push(name.to_owned());
            continue;
        }
        let mut recipes = Vec::new();
        for recipe in Recipe::names() {
            if Recipe::parse(recipe)?.check(&geometry).is_ok() {
                recipes.push(recipe.to_owned());
            }
        }
        kinds.push((nameless, Kind { models: vec![name.to_owned()], recipes }));
    }
    Ok(kinds.into_iter().map(|(_, kind)| kind).collect())
}

/// What of all that is planned.
#[derive(Debug, Clone, Default)]
pub(crate) struct Selection {
    /// Models with one of these in `model@recipe`; all if none is given.
    pub(crate) only: Vec<String>,
    /// Cards; all if none is given.
    pub(crate) cards: Vec<String>,
    /// A fault to plan with.
    pub(crate) fault: Option<Fault>,
}

impl Selection {
    /// Whether anything is left out, or wrong on purpose.
    pub(crate) fn is_partial(&self) -> bool {
        !self.only.is_empty() || !self.cards.is_empty() || self.fault.is_some()
    }

    /// Whether a recipe of a kind is planned.
    pub(crate) fn takes(&self, models: &[String], recipe: &str) -> bool {
        let named = |text: &String| models.iter().any(|model| format!("{model}@{recipe}").contains(text.as_str()));
        self.only.is_empty() || self.only.iter().any(named)
    }

    /// The cards, in the order of the program's list. An error for a name that is none.
    pub(crate) fn specs(&self) -> Result<Vec<DeviceSpec>> {
        let wanted = self.cards.iter().map(|name| cards::find(name)).collect::<Result<Vec<_>, _>>()?;
        if wanted.iter().any(|spec| spec.arch == Arch::Host) {
            let what = "host is this machine, whose sizes are no baseline; name a card".into();
            return Err(Error::Request { param: "--card", what }.into());
        }
        Ok(cards::all()
            .into_iter()
            .filter(|spec| wanted.is_empty() || wanted.iter().any(|w| w.name == spec.name))
            .collect())
    }
}

/// What decides a card's tactics, as far as any op looks: cards that agree share plans. A test plans both of each pair.
fn tactics(spec: &DeviceSpec) -> (Arch, u32) {
    (spec.arch, spec.sms)
}

/// How every linear module is stored: recipes that agree share plans.
fn storage(source: &Source) -> Result<Vec<Verdict>> {
    source.geometry().linears().iter().map(|linear| Ok(source.verdict(&linear.module)?)).collect()
}

/// Recipes of one kind that store every module alike, on cards of like tactics.
struct Job {
    kind: usize,
    recipes: Vec<String>,
    specs: Vec<DeviceSpec>,
}

/// Plans the selection, a book for each kind that has anything in it.
pub(crate) fn plan(selection: &Selection, values: Numerics) -> Result<Vec<Book>> {
    let (kinds, specs) = (kinds()?, selection.specs()?);
    let mut books: Vec<Book> = Vec::new();
    let mut jobs = Vec::new();
    for (index, kind) in kinds.iter().enumerate() {
        let recipes: Vec<String> =
            kind.recipes.iter().filter(|recipe| selection.takes(&kind.models, recipe)).cloned().collect();
        books.push(Book {
            models: kind.models.clone(),
            recipes: recipes.clone(),
            cards: specs.iter().map(|spec| spec.name.to_owned()).collect(),
            ..Book::default()
        });
        let mut alike: Vec<(Vec<Verdict>, Vec<String>)> = Vec::new();
        for recipe in recipes {
            let stored = storage(&open(&kind.models[0], &recipe)?)?;
            match alike.iter_mut().find(|(known, _)| *known == stored) {
                Some((_, recipes)) => recipes.push(recipe),
                None => alike.push((stored, vec![recipe])),
            }
        }
        for (_, recipes) in alike {
            let mut pending = specs.clone();
            while let Some(first) = pending.first().map(tactics) {
                let (same, rest) = pending.into_iter().partition(|spec| tactics(spec) == first);
                jobs.push(Job { kind: index, recipes: recipes.clone(), specs: same });
                pending = rest;
            }
        }
    }
    if jobs.is_empty() {
        let what = format!("no MODEL@RECIPE that is built in has any of {} in it", selection.only.join(", "));
        return Err(Error::Request { param: "--only", what }.into());
    }
    let progress = Progress::rows(jobs.len() as u64);
    let run = |job: &Job| -> Result<Planned> {
        let models = &kinds[job.kind].models;
        let planned = planned(&models[0], job, selection.fault, values)
            .with_context(|| format!("cannot plan {}@{} on {}", models[0], job.recipes[0], job.specs[0].name));
        progress.advance(1);
        planned
    };
    let done: Vec<Planned> = jobs.par_iter().map(run).collect::<Result<_>>()?;
    progress.finish();
    for (job, planned) in jobs.iter().zip(done) {
        let book = &mut books[job.kind];
        for recipe in &job.recipes {
            for (card, edges) in job.specs.iter().zip(&planned.edges) {
                let (recipe, card) = (recipe.clone(), card.name.to_owned());
                for ((batch, chunk), bytes) in &planned.cells {
                    let (recipe, card) = (recipe.clone(), card.clone());
                    book.cells.insert(Point { recipe, card, batch: *batch, chunk: *chunk }, bytes.clone());
                }
                for (batch, edge) in BATCHES.into_iter().zip(edges) {
                    book.edges.insert(Under { recipe: recipe.clone(), card: card.clone(), batch }, *edge);
                }
            }
        }
    }
    books.retain(|book| !book.cells.is_empty());
    Ok(books)
}

fn open(model: &str, recipe: &str) -> Result<Source> {
    Ok(format!("{model}@{recipe}").parse::<highwater::checkpoint::ModelRef>()?.open(0)?)
}

/// What one job found.
struct Planned {
    cells: Vec<((u64, u64), Bytes)>,
    /// For each card, the edge of each batch.
    edges: Vec<[Edge; BATCHES.len()]>,
}

fn planned(model: &str, job: &Job, fault: Option<Fault>, values: Numerics) -> Result<Planned> {
    let source = open(model, &job.recipes[0])?;
    let mut sizer = Sizer::new(&job.specs[0], &source, values)?;
    let mut size = |batch: u64, chunk: u64| -> Result<Sizing> {
        let limits = Limits {
            // A decode step has a row for each sequence, however small the chunk.
            step_tokens: chunk.max(batch) as usize,
            batch: batch as usize,
            context: CONTEXT as usize,
        };
        Ok(sizer.size(limits, batch * CONTEXT, fault)?)
    };
    let mut cells = Vec::new();
    let mut edges = vec![[Edge::Nothing; BATCHES.len()]; job.specs.len()];
    for (index, batch) in BATCHES.into_iter().enumerate() {
        let mut kept = Vec::new();
        let mut totals = Totals::new(|chunk| {
            let sizing = size(batch, chunk)?;
            let total = sizing.total();
            if CHUNKS.contains(&chunk) {
                kept.push(((batch, chunk), bytes(sizing)));
            }
            Ok(total)
        });
        for chunk in CHUNKS {
            totals.at(chunk)?;
        }
        // More rows than all prompts together have cannot be in one step.
        let rows = (batch * (CONTEXT - OUTPUT_TOKENS)).next_multiple_of(STEP_TOKENS);
        let most = MOST_CHUNK.min(rows);
        for (spec, edges) in job.specs.iter().zip(&mut edges) {
            edges[index] = match totals.largest(most, spec.slab_bytes(None))? {
                None => Edge::Nothing,
                Some(chunk) if chunk >= rows => Edge::Whole(chunk),
                Some(chunk) if chunk >= most => Edge::Beyond(chunk),
                Some(chunk) => Edge::Largest(chunk),
            };
        }
        drop(totals);
        cells.extend(kept);
    }
    Ok(Planned { cells, edges })
}

fn bytes(sizing: Sizing) -> Bytes {
    Bytes {
        resident: [sizing.weights, sizing.kv, sizing.state, sizing.inputs],
        transient: sizing.arena,
        owners: sizing.owners.into_iter().map(|(owner, bytes)| (owner.to_string(), bytes)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_model_is_in_one_kind_and_recipes_are_left_out_where_they_are_about_other_models() {
        let kinds = kinds().unwrap();
        let mut models: Vec<&str> = kinds.iter().flat_map(|kind| kind.models.iter().map(String::as_str)).collect();
        models.sort_unstable();
        let mut all: Vec<&str> = names().collect();
        all.sort_unstable();
        assert_eq!(models, all);
        let of = |model: &str| kinds.iter().find(|kind| kind.models.iter().any(|m| m == model)).unwrap();
        assert_eq!(of("qwen3.8-27b").models, ["qwen3.5-27b", "qwen3.6-27b", "qwen3.8-27b"]);
        let has = |model: &str, recipe: &str| of(model).recipes.iter().any(|r| r == recipe);
        assert!(has("qwen3.8-27b", "unsloth-nvfp4") && !has("qwen3.6-35b-a3b", "unsloth-nvfp4"));
        assert!(has("tiny-moe", "unsloth-nvfp4-fast") && !has("tiny", "unsloth-nvfp4-fast"));
        for kind in &kinds {
            for recipe in Recipe::names() {
                let geometry = Geometry::builtin(&kind.models[0]).unwrap();
                let applies = Recipe::parse(recipe).unwrap().check(&geometry).is_ok();
                assert_eq!(kind.recipes.iter().any(|r| r == recipe), applies, "{recipe} of {}", kind.models[0]);
            }
        }
    }

    /// Plans are shared by cards of like tactics and by recipes of like storage: were either to miss something that an op
    /// looks at, one of a pair would have other bytes than the other.
    #[test]
    fn what_shares_a_plan_has_the_same_bytes_when_it_is_planned_alone() {
        let limits = Limits { step_tokens: 512, batch: 64, context: 2048 };
        let size = |spec: &DeviceSpec, model: &str, recipe: &str| {
            let source = open(model, recipe).unwrap();
            let sizing = Sizer::new(spec, &source, Numerics::BF16).unwrap().size(limits, 4096, None).unwrap();
            (storage(&source).unwrap(), bytes(sizing))
        };
        let (all, mut pairs) = (cards::all(), 0);
        for (i, one) in all.iter().enumerate() {
            for other in all[i + 1..].iter().filter(|other| tactics(other) == tactics(one)) {
                for (model, recipe) in [("qwen3.5-9b", "bf16"), ("qwen3.6-35b-a3b:layers=4", "fp8-block")] {
                    let (one, other) = (size(one, model, recipe), size(other, model, recipe));
                    assert_eq!(one.1, other.1, "{model}@{recipe}");
                }
                pairs += 1;
            }
        }
        assert!(pairs >= 4, "{pairs} pairs");
        let spec = &all[0];
        let mut alike = 0;
        for model in ["tiny", "tiny-moe"] {
            let geometry = Geometry::builtin(model).unwrap();
            let recipes: Vec<&str> =
                Recipe::names().filter(|r| Recipe::parse(r).unwrap().check(&geometry).is_ok()).collect();
            let sized: Vec<_> = recipes.iter().map(|recipe| size(spec, model, recipe)).collect();
            for (i, one) in sized.iter().enumerate() {
                for other in sized[i + 1..].iter().filter(|other| other.0 == one.0) {
                    assert_eq!(one.1, other.1);
                    alike += 1;
                }
            }
        }
        assert!(alike >= 6, "{alike} pairs of recipes");
    }
}
