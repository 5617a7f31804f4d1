//! The tables beside the plans: the largest chunk that fits each card, and what a decoded token reads. Text out; bytes come
//! from the books and from `crate::traffic`.

use std::fmt::Write as _;

use anyhow::Result;
use highwater::device::cards;
use highwater::ops::Numerics;
use rayon::prelude::*;

use super::book::Book;
use super::file::edge_text;
use super::grid::{BATCHES, CONTEXT};
use crate::frontier::Edge;
use crate::table::{Align, Table, number};
use crate::traffic::{MODULES, Traffic, traffic_of};

/// Tokens in the cache of each sequence once the token is decoded.
pub(crate) const TRAFFIC_CONTEXT: u64 = 1024;

fn batches() -> String {
    BATCHES.map(|batch| batch.to_string()).join(" / ")
}

/// The largest chunk of every recipe on every card, as Markdown.
pub(super) fn frontier(books: &[Book]) -> String {
    let mut text = format!(
        "# The largest chunk that fits\n\nWritten by `highwater replan --update` beside the plans it is from; a test holds it. \
         Tokens of the largest prefill chunk at batch {} and a context of {CONTEXT}, the KV pool holding every sequence \
         whole: `-` does not fit, `+` or more, `all` is every prompt of the batch at once.\n",
        batches()
    );
    for book in books {
        let mut columns = vec![("recipe", Align::Left)];
        columns.extend(book.cards.iter().map(|card| (card.as_str(), Align::Right)));
        let mut table = Table::new(&columns);
        for recipe in &book.recipes {
            let mut row = vec![recipe.clone()];
            for card in &book.cards {
                let edges = BATCHES.map(|batch| match book.edge(recipe, card, batch) {
                    None | Some(Edge::Nothing) => "-".to_owned(),
                    Some(Edge::Whole(_)) => "all".to_owned(),
                    Some(edge) => edge_text(edge),
                });
                // One word where all batches have it.
                let same = edges.iter().all(|edge| *edge == edges[0]) && !edges[0].starts_with(char::is_numeric);
                row.push(if same { edges[0].clone() } else { edges.join(" / ") });
            }
            table.push(row);
        }
        let _ = write!(text, "\n## {}\n\n{}", book.models.join(", "), table.markdown());
    }
    text
}

/// A recipe's traffic at each of [`BATCHES`].
pub(super) struct Reads {
    models: Vec<String>,
    recipe: String,
    steps: Vec<Traffic>,
}

/// What one decode step of every recipe of every book reads.
pub(super) fn traffic(books: &[Book]) -> Result<Vec<Reads>> {
    let jobs: Vec<(&Book, &String)> =
        books.iter().flat_map(|book| book.recipes.iter().map(move |recipe| (book, recipe))).collect();
    jobs.par_iter()
        .map(|(book, recipe)| {
            let source = format!("{}@{recipe}", book.name()).parse::<highwater::checkpoint::ModelRef>()?.open(0)?;
            let steps = traffic_of(&source, Numerics::BF16, &BATCHES, TRAFFIC_CONTEXT)?;
            Ok(Reads { models: book.models.clone(), recipe: (*recipe).clone(), steps })
        })
        .collect()
}

/// Bytes of each module of a decode step, as CSV.
pub(super) fn traffic_csv(reads: &[Reads]) -> String {
    let mut text = String::from("models,recipe,context,batch");
    for (name, _) in MODULES {
        let _ = write!(text, ",{name}_bytes");
    }
    text += ",step_bytes,token_bytes\n";
    for read in reads {
        for (batch, step) in BATCHES.into_iter().zip(&read.steps) {
            let _ = write!(text, "{},{},{TRAFFIC_CONTEXT},{batch}", read.models.join(" "), read.recipe);
            for bytes in step.modules {
                let _ = write!(text, ",{bytes}");
            }
            let _ = writeln!(text, ",{},{}", step.total(), step.per_token());
        }
    }
    text
}

/// Bytes for each token and the TPOT they bound on each card, as Markdown.
pub(super) fn traffic_markdown(books: &[Book], reads: &[Reads]) -> String {
    let mut text = format!(
        "# What a decoded token reads\n\nWritten by `highwater replan --update`; a test holds it. Weights, KV pages and \
         recurrent state that one decode step reads and writes at a context of {TRAFFIC_CONTEXT}, each byte once, from the \
         ops' own costs; activations may stay in cache and are left out; of experts, as many distinct ones as even routing \
         reaches. The first columns are MB for each token at batch {batches}; by module they are in traffic.csv. Under each \
         card is the TPOT in ms that those bytes bound at its data sheet's bandwidth, `-` where the model does not fit it at \
         batch 1: no step is faster, and none is promised to be as fast.\n",
        batches = batches()
    );
    for book in books {
        let tokens = BATCHES.map(|batch| format!("MB, batch {batch}"));
        let mut columns = vec![("recipe", Align::Left)];
        columns.extend(tokens.iter().map(|name| (name.as_str(), Align::Right)));
        columns.extend(book.cards.iter().map(|card| (card.as_str(), Align::Right)));
        let mut table = Table::new(&columns);
        for read in reads.iter().filter(|read| read.models == book.models) {
            let mut row = vec![read.recipe.clone()];
            row.extend(read.steps.iter().map(|step| number(step.per_token() as f64 / 1e6)));
            for card in &book.cards {
                let fits = book.edge(&read.recipe, card, BATCHES[0]).is_some_and(|edge| edge != Edge::Nothing);
                row.push(match cards::find(card) {
                    Ok(spec) if fits => {
                        let bounds = read.steps.iter().map(|step| number(step.bound_ms(&spec.rates)));
                        bounds.collect::<Vec<_>>().join(" / ")
                    }
                    _ => "-".to_owned(),
                });
            }
            table.push(row);
        }
        let _ = write!(text, "\n## {}\n\n{}", book.models.join(", "), table.markdown());
    }
    text
}
