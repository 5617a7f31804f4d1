//! What a decode step reads and writes of what lies on the card: weights, KV pages and recurrent state, by module, as the ops
//! themselves count it; and the TPOT that those bytes bound.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use highwater::checkpoint::Source;
use highwater::device::{Device, Rates, cards};
use highwater::engine::{Runner, sizing};
use highwater::error::{Error, mib};
use highwater::mem::Layer;
use highwater::ops::cost::Metered;
use highwater::ops::{Limits, Numerics};

use crate::table::{Align, Table, number};
use crate::target::Place;

/// A slab nothing fills.
const ENDLESS_BYTES: u64 = 1 << 60;
/// The card whose tactics a step is run under; what is resident is the same on all, as a test says.
const CARD: &str = "h200";

/// The modules told apart, and what of theirs is counted.
pub(crate) const MODULES: [(&str, &str); 9] = [
    ("embed", "rows of the embedding"),
    ("gdn", "weights of the Gated DeltaNet layers"),
    ("gdn_state", "recurrent and convolution state, read and written; the convolution's taps"),
    ("attention", "weights of the attention layers"),
    ("kv", "KV pages read, and the new row written"),
    ("mlp", "weights of dense feed-forward layers"),
    ("moe", "router, distinct experts at even routing, shared expert"),
    ("norm", "norms of the residual"),
    ("head", "the vocabulary's rows and the final norm"),
];

/// The resident bytes of one decode step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Sequences, each with one token decoded.
    pub(crate) batch: u64,
    /// Bytes of each of [`MODULES`].
    pub(crate) modules: [u64; MODULES.len()],
}

impl Traffic {
    /// Bytes of the step.
    pub(crate) fn total(&self) -> u64 {
        self.modules.iter().sum()
    }

    /// Bytes for each token decoded, rounded up.
    pub(crate) fn per_token(&self) -> u64 {
        self.total().div_ceil(self.batch)
    }

    /// The least ms a step takes at a card's memory bandwidth.
    pub(crate) fn bound_ms(&self, rates: &Rates) -> f64 {
        self.total() as f64 / rates.dram * 1e3
    }
}

/// What a decode step of each of `batches` moves, every sequence having `context` tokens once it is done.
pub(crate) fn traffic_of(source: &Source, numerics: Numerics, batches: &[u64], context: u64) -> Result<Vec<Traffic>> {
    let spec = cards::find(CARD)?;
    let mut runner = Runner::load(&Device::plan(spec, ENDLESS_BYTES), source, numerics, &mut |_, _| {})?;
    batches.iter().map(|batch| step(&mut runner, *batch, context)).collect()
}

fn step(runner: &mut Runner, batch: u64, context: u64) -> Result<Traffic> {
    let limits = Limits { step_tokens: batch as usize, batch: batch as usize, context: context as usize };
    let corners = sizing::corners(limits);
    let decode = corners.iter().find(|(_, plan)| plan.decodes as u64 == batch && plan.spans.len() as u64 == batch);
    let (_, decode) = decode.with_context(|| format!("a context of {context} tokens has no decode step"))?;
    runner.allocate(limits, 1, batch as usize + 1)?;
    let metered = runner.run(decode, None, None, None)?.metered;
    runner.release();
    by_module(&metered, batch)
}

fn by_module(metered: &[Metered], batch: u64) -> Result<Traffic> {
    let mut traffic = Traffic { batch, modules: [0; MODULES.len()] };
    for entry in metered.iter().filter(|entry| entry.cost.resident_bytes > 0) {
        let name = match (entry.layer, entry.op) {
            (Layer::Attention, "attention" | "kv_write") => "kv",
            (Layer::Gdn, "gdn_decode" | "gdn_prefill" | "conv1d") => "gdn_state",
            (layer, _) => layer.name(),
        };
        let at = MODULES.iter().position(|(module, _)| *module == name);
        let at = at.with_context(|| format!("{}.{} moves resident bytes and is no module's", entry.layer, entry.op))?;
        traffic.modules[at] += entry.cost.resident_bytes;
    }
    Ok(traffic)
}

/// What `plan --traffic` prints: bytes by module of one decode step, and the TPOT they bound on each place.
pub(crate) fn traffic_text(
    source: &Source,
    places: &[Place],
    numerics: Numerics,
    batch: u64,
    context: u64,
) -> Result<String> {
    let most = source.geometry().max_context as u64;
    if context < 2 || context > most {
        let what = format!("{context} tokens; {} takes from 2 to {most}", source.geometry().name);
        return Err(Error::Request { param: "--context", what }.into());
    }
    let steps = traffic_of(source, numerics, &[batch], context)?;
    let step = steps.first().context("one batch was asked for")?;
    let mut text =
        format!("a decode step at batch {batch}, context {context}, each byte once, from the ops' own costs:\n");
    let mut table = Table::new(&[
        ("module", Align::Left),
        ("bytes", Align::Right),
        ("", Align::Right),
        ("of the step", Align::Right),
        ("what", Align::Left),
    ]);
    for ((name, what), bytes) in MODULES.into_iter().zip(step.modules).filter(|(_, bytes)| *bytes > 0) {
        let share = 100.0 * bytes as f64 / step.total() as f64;
        table.push(vec![name.into(), bytes.to_string(), mib(bytes), format!("{share:.1} %"), what.into()]);
    }
    table.push(vec!["step".into(), step.total().to_string(), mib(step.total()), "100 %".into(), String::new()]);
    table.push(vec!["token".into(), step.per_token().to_string(), mib(step.per_token()), String::new(), String::new()]);
    text += &table.text();
    for place in places {
        let _ = writeln!(
            text,
            "on {} ({} GB/s): TPOT at least {} ms by these bytes",
            place.spec.name,
            number(place.spec.rates.dram / 1e9),
            number(step.bound_ms(&place.spec.rates))
        );
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater::checkpoint::ModelRef;

    fn open(model: &str) -> Source {
        ModelRef::parse(model).unwrap().open(0).unwrap()
    }

    fn of(step: &Traffic, name: &str) -> u64 {
        step.modules[MODULES.iter().position(|(module, _)| *module == name).unwrap()]
    }

    #[test]
    fn weights_are_read_once_and_kv_and_state_by_every_sequence() {
        let source = open("qwen3.5-9b");
        let [one, eight] = traffic_of(&source, Numerics::BF16, &[1, 8], 1024).unwrap().try_into().unwrap();
        for name in ["gdn", "attention", "mlp", "norm", "head"] {
            assert!(of(&one, name) > 0 && of(&one, name) == of(&eight, name), "{name}");
        }
        for name in ["gdn_state", "kv", "embed"] {
            assert!(of(&one, name) > 0 && of(&eight, name) > 7 * of(&one, name), "{name}");
        }
        assert_eq!(of(&one, "moe"), 0);
        // 8 attention layers, K and V of 4 heads of 256 in bf16; 1024 rows read and one written.
        assert_eq!(of(&one, "kv"), 8 * 2 * 4 * 256 * 2 * (1024 + 1));
        // All parameters but the embedding, which a token reads a row of.
        let (weights, embedding) = (17_906_000_000u64, 248_320 * 4096 * 2);
        let read: u64 = ["gdn", "attention", "mlp", "norm", "head"].iter().map(|name| of(&one, name)).sum();
        let difference = read.abs_diff(weights - embedding) as f64 / weights as f64;
        assert!(difference < 0.01, "{read} B of weights read, {weights} B of them, {embedding} B of the embedding");
        assert_eq!(one.total(), one.modules.iter().sum::<u64>());
        assert_eq!(eight.per_token(), eight.total().div_ceil(8));
    }

    #[test]
    fn experts_are_more_the_larger_the_batch_and_never_more_than_all() {
        let source = open("qwen3.6-35b-a3b@fp8-channel");
        let steps = traffic_of(&source, Numerics::BF16, &[1, 8, 64, 4096], 1024).unwrap();
        let moe: Vec<u64> = steps.iter().map(|step| of(step, "moe")).collect();
        assert!(moe.windows(2).all(|pair| pair[0] < pair[1]), "{moe:?}");
        assert!(moe[1] < 8 * moe[0] && moe[3] < 40 << 30, "{moe:?}");
        assert!(steps.iter().all(|step| of(step, "mlp") == 0));
    }

    #[test]
    fn a_context_the_model_has_not_is_refused() {
        let source = open("tiny");
        let refused = traffic_text(&source, &[], Numerics::BF16, 1, 1 << 20).unwrap_err().to_string();
        assert!(refused.contains("--context"), "{refused}");
        assert!(traffic_text(&source, &[], Numerics::BF16, 1, 1).is_err());
    }
}
