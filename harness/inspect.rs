//! `inspect`: how each linear module of a model is stored, what is skipped, and all that is wrong; headers only.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::anyhow;
use highwater::checkpoint::{Checkpoint, ModelRef, Module, SkipRule, Survey, synth};
use highwater::error::mib;
use highwater::ops::scheme::{ActScheme, Global, Grain, Scheme};
use serde::Serialize;

use crate::cli::InspectArgs;
use crate::failure::Failure;
use crate::out::print;
use crate::table::{Align, Table};

/// What one JSON object of `--json` holds.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    layers: usize,
    attention_layers: usize,
    /// Bytes of all parameters on disk.
    bytes: u64,
    /// One per distinct scheme of weight and input, the most bytes first.
    verdicts: Vec<Kind>,
    /// The scheme of the head; absent where it is the embedding.
    head: Option<Named>,
    /// Parameters that are no linear module's: embedding, norms, convolutions, decays, KV scales.
    other_bytes: u64,
    /// Attention layers with stored scales of an FP8 KV cache.
    kv_scale_layers: Vec<usize>,
    skipped: Vec<SkippedRule>,
    /// All that is wrong; a model with any does not load.
    faults: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Named {
    scheme: String,
    input: String,
}

#[derive(Debug, Serialize)]
struct Kind {
    #[serde(flatten)]
    name: Named,
    linears: usize,
    bytes: u64,
    /// Rows, columns, how many.
    shapes: Vec<Shape>,
    roles: Vec<Role>,
}

#[derive(Debug, Serialize)]
struct Shape {
    rows: usize,
    cols: usize,
    linears: usize,
}

/// Modules of one name in any layer and expert.
#[derive(Debug, Serialize)]
struct Role {
    #[serde(rename = "role")]
    name: String,
    linears: usize,
    /// As ranges: `0-2,4-6`; empty for the head.
    layers: String,
}

#[derive(Debug, Serialize)]
struct SkippedRule {
    rule: String,
    tensors: usize,
    bytes: u64,
    /// The first by name.
    example: String,
}

/// `inspect`.
pub(crate) fn inspect(args: &InspectArgs) -> Result<(), Failure> {
    let survey = match ModelRef::parse(&args.model)? {
        ModelRef::Folder(folder) => Checkpoint::survey(&folder)?,
        ModelRef::Builtin { geometry, recipe } => synth::survey(&geometry, &recipe)?,
    };
    let report = Report::of(args.model.clone(), &survey);
    if args.json {
        print(&format!("{}\n", serde_json::to_string_pretty(&report)?))?;
    } else {
        print(&report.text())?;
    }
    match report.faults.len() {
        0 => Ok(()),
        1 => Err(anyhow!("one contradiction, listed above: {} does not load", args.model).into()),
        n => Err(anyhow!("{n} contradictions, listed above: {} does not load", args.model).into()),
    }
}

fn scheme_name(scheme: Scheme) -> String {
    match scheme {
        Scheme::Plain(dtype) => dtype.to_string(),
        Scheme::Fp8(Grain::Tensor) => "fp8 tensor".into(),
        Scheme::Fp8(Grain::Channel) => "fp8 channel".into(),
        Scheme::Fp8(Grain::Block) => "fp8 block".into(),
        Scheme::Nvfp4(Global::Multiplies) => "nvfp4, global multiplies".into(),
        Scheme::Nvfp4(Global::Divides) => "nvfp4, global divides".into(),
    }
}

fn input_name(act: ActScheme) -> &'static str {
    match act {
        ActScheme::None => "as it is",
        ActScheme::Fp8Tensor => "fp8 tensor, stored scale",
        ActScheme::Fp8Token => "fp8 token",
        ActScheme::Fp8Group => "fp8 group of 128",
        ActScheme::Nvfp4 => "nvfp4, stored global",
    }
}

impl Named {
    fn of(module: &Module) -> Named {
        Named { scheme: scheme_name(module.scheme), input: input_name(module.act).into() }
    }
}

impl Report {
    fn of(model: String, survey: &Survey) -> Report {
        let mut kinds: Vec<((Scheme, ActScheme), Vec<&Module>)> = Vec::new();
        for module in &survey.modules {
            let kind = (module.scheme, module.act);
            match kinds.iter_mut().find(|(k, _)| *k == kind) {
                Some((_, list)) => list.push(module),
                None => kinds.push((kind, vec![module])),
            }
        }
        let mut verdicts: Vec<Kind> = kinds.iter().map(|(_, modules)| Kind::of(modules)).collect();
        verdicts.sort_by_key(|kind| std::cmp::Reverse(kind.bytes));
        let linear_bytes: u64 = verdicts.iter().map(|kind| kind.bytes).sum();
        let mut skipped: Vec<(SkipRule, SkippedRule)> = Vec::new();
        for s in &survey.skipped {
            let Some((_, all)) = skipped.iter_mut().find(|(rule, _)| *rule == s.rule) else {
                let (rule, example) = (s.rule.to_string(), s.name.clone());
                skipped.push((s.rule, SkippedRule { rule, tensors: 1, bytes: s.bytes, example }));
                continue;
            };
            all.tensors += 1;
            all.bytes += s.bytes;
            if s.name < all.example {
                all.example.clone_from(&s.name);
            }
        }
        Report {
            model,
            layers: survey.geometry.layers.len(),
            attention_layers: survey.geometry.attention_layers(),
            bytes: survey.bytes,
            verdicts,
            head: survey.modules.iter().find(|m| m.name == "lm_head").map(Named::of),
            other_bytes: survey.bytes.saturating_sub(linear_bytes),
            kv_scale_layers: survey.kv_layers.clone(),
            skipped: skipped.into_iter().map(|(_, all)| all).collect(),
            faults: survey.faults.iter().map(ToString::to_string).collect(),
        }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(
            text,
            "{}: {} layers, {} of them attention; {} B ({}) of parameters",
            self.model,
            self.layers,
            self.attention_layers,
            self.bytes,
            mib(self.bytes)
        );
        let mut table = Table::new(&[
            ("weights", Align::Left),
            ("inputs", Align::Left),
            ("linears", Align::Right),
            ("bytes", Align::Right),
            ("", Align::Right),
            ("shapes [N, K] x count", Align::Left),
            ("modules (layers)", Align::Left),
        ]);
        for kind in &self.verdicts {
            let shapes: Vec<String> =
                kind.shapes.iter().map(|s| format!("[{}, {}] x {}", s.rows, s.cols, s.linears)).collect();
            table.push(vec![
                kind.name.scheme.clone(),
                kind.name.input.clone(),
                kind.linears.to_string(),
                kind.bytes.to_string(),
                mib(kind.bytes),
                shapes.join(", "),
                kind.places(),
            ]);
        }
        text.push_str(&table.text());
        let _ = writeln!(text, "other parameters: {} B ({})", self.other_bytes, mib(self.other_bytes));
        match &self.head {
            Some(head) => _ = writeln!(text, "head: {}, inputs {}", head.scheme, head.input),
            None => text.push_str("head: the embedding\n"),
        }
        match self.kv_scale_layers.as_slice() {
            [] => text.push_str("KV scales: none\n"),
            layers => _ = writeln!(text, "KV scales: {} layers ({})", layers.len(), ranges(layers)),
        }
        for s in &self.skipped {
            let more = if s.tensors > 1 { " and more" } else { "" };
            let _ = writeln!(
                text,
                "skipped by rule {}: {} tensors, {} B ({}): {}{more}",
                s.rule,
                s.tensors,
                s.bytes,
                mib(s.bytes),
                s.example
            );
        }
        for fault in &self.faults {
            let _ = writeln!(text, "contradiction: {fault}");
        }
        text
    }
}

impl Kind {
    /// Modules of one verdict, at least one.
    fn of(modules: &[&Module]) -> Kind {
        let mut shapes: BTreeMap<[usize; 2], usize> = BTreeMap::new();
        let mut roles: Vec<(String, usize, Vec<usize>)> = Vec::new();
        for module in modules {
            *shapes.entry([module.rows, module.cols]).or_default() += 1;
            let (role, layer) = role(&module.name);
            let at = roles.iter().position(|(known, ..)| *known == role).unwrap_or_else(|| {
                roles.push((role, 0, Vec::new()));
                roles.len() - 1
            });
            roles[at].1 += 1;
            if let Some(layer) = layer
                && roles[at].2.last() != Some(&layer)
            {
                roles[at].2.push(layer);
            }
        }
        let mut shapes: Vec<Shape> =
            shapes.into_iter().map(|([rows, cols], linears)| Shape { rows, cols, linears }).collect();
        shapes.sort_by_key(|s| std::cmp::Reverse(s.linears));
        Kind {
            name: modules
                .first()
                .map_or_else(|| Named { scheme: String::new(), input: String::new() }, |m| Named::of(m)),
            linears: modules.len(),
            bytes: modules.iter().map(|m| m.bytes).sum(),
            shapes,
            roles: roles
                .into_iter()
                .map(|(name, linears, layers)| Role { name, linears, layers: ranges(&layers) })
                .collect(),
        }
    }
}

impl Kind {
    /// The roles on one line: those of one block and the same layers together.
    fn places(&self) -> String {
        let mut groups: Vec<(&str, Vec<&str>, &str)> = Vec::new();
        for Role { name, layers, .. } in &self.roles {
            let (block, part) = name.rsplit_once('.').unwrap_or(("", name));
            match groups.iter_mut().find(|(b, _, l)| *b == block && *l == layers) {
                Some((_, parts, _)) => parts.push(part),
                None => groups.push((block, vec![part], layers)),
            }
        }
        let one = |(block, parts, layers): &(&str, Vec<&str>, &str)| {
            let parts = if parts.len() == 1 { parts[0].to_owned() } else { format!("{{{}}}", parts.join(",")) };
            let dot = if block.is_empty() { "" } else { "." };
            let layers = if layers.is_empty() { String::new() } else { format!(" ({layers})") };
            format!("{block}{dot}{parts}{layers}")
        };
        groups.iter().map(one).collect::<Vec<_>>().join(", ")
    }
}

/// A module's name without its layer and expert, and its layer: `layers.3.mlp.experts.5.up_proj` is `mlp.experts.up_proj`
/// of layer 3.
fn role(module: &str) -> (String, Option<usize>) {
    let mut parts: Vec<&str> = module.split('.').collect();
    let mut layer = None;
    if let ["layers", number, ..] = parts.as_slice() {
        layer = number.parse().ok();
        parts.drain(..2);
    }
    parts.retain(|part| part.parse::<usize>().is_err());
    (parts.join("."), layer)
}

/// Rising numbers as ranges: `0-2,4-6`. Steps of four, as the layers of one mixer have, are `3-63/4`.
fn ranges(numbers: &[usize]) -> String {
    if let [first, second, .., last] = numbers {
        let step = second - first;
        if step > 1 && numbers.windows(2).all(|w| w[1] - w[0] == step) {
            return format!("{first}-{last}/{step}");
        }
    }
    let mut runs: Vec<[usize; 2]> = Vec::new();
    for n in numbers {
        match runs.last_mut() {
            Some([_, last]) if *last + 1 == *n => *last = *n,
            _ => runs.push([*n, *n]),
        }
    }
    let run = |[a, b]: &[usize; 2]| if a == b { a.to_string() } else { format!("{a}-{b}") };
    let every: Vec<String> = runs.iter().map(run).collect();
    // The layers of the other mixer: runs of one length at one distance.
    if let [first, second, .., last] = runs.as_slice() {
        let (length, step) = (first[1] - first[0], second[0] - first[0]);
        let same = |w: &[[usize; 2]]| w[1][1] - w[1][0] == length && w[1][0] - w[0][0] == step;
        if runs.windows(2).all(same) {
            return format!("{},{}…{}", run(first), run(second), run(last));
        }
    }
    every.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(model: &str) -> Report {
        let ModelRef::Builtin { geometry, recipe } = ModelRef::parse(model).unwrap() else { panic!("{model}") };
        Report::of(model.into(), &synth::survey(&geometry, &recipe).unwrap())
    }

    #[test]
    fn numbers_are_told_as_ranges() {
        assert_eq!(ranges(&[]), "");
        assert_eq!(ranges(&[3]), "3");
        assert_eq!(ranges(&[0, 1, 2, 5]), "0-2,5");
        assert_eq!(ranges(&[3, 7, 11, 15]), "3-15/4");
        assert_eq!(ranges(&[0, 1, 2, 4, 5, 6, 8, 9, 10]), "0-2,4-6…8-10");
        assert_eq!(ranges(&[56, 57, 58]), "56-58");
    }

    #[test]
    fn a_line_per_distinct_verdict() {
        let report = report("qwen3.8-27b@unsloth-nvfp4");
        let line = |scheme: &str| report.verdicts.iter().find(|k| k.name.scheme.starts_with(scheme)).unwrap();
        assert_eq!(report.verdicts.len(), 3);
        assert_eq!((line("nvfp4").linears, line("fp8 channel").linears), (168, 233));
        assert_eq!(line("bf16").linears, 96);
        let roles: Vec<_> = line("bf16").roles.iter().map(|r| r.name.as_str()).collect();
        assert_eq!(roles, ["linear_attn.in_proj_b", "linear_attn.in_proj_a"]);
        let nvfp4: Vec<_> = line("nvfp4").roles.iter().map(|r| (r.name.as_str(), r.layers.as_str())).collect();
        assert!(nvfp4.contains(&("mlp.gate_proj", "0-55")), "{nvfp4:?}");
        assert_eq!(report.head.as_ref().unwrap().scheme, "fp8 channel");
        assert_eq!(report.kv_scale_layers.len(), 16);
        let linears: u64 = report.verdicts.iter().map(|k| k.bytes).sum();
        assert_eq!(linears + report.other_bytes, report.bytes);
        // Codes, scales of 16, and two globals of 4 bytes.
        assert_eq!(line("nvfp4").bytes, 168 * (17_408 * 5120 / 2 + 17_408 * 5120 / 16 + 8));
    }

    #[test]
    fn the_text_says_what_the_json_does() {
        let text = report("qwen3.6-35b-a3b:layers=4@unsloth-nvfp4-fast").text();
        for says in [
            "fp8 channel",
            "nvfp4, global divides",
            "[512, 2048] x",
            "self_attn.{q_proj,k_proj,v_proj,o_proj} (3)",
            "head: fp8 channel",
            "KV scales: 1 layers",
        ] {
            assert!(text.contains(says), "{says}: {text}");
        }
        let tied = report("tiny").text();
        assert!(tied.contains("head: the embedding") && tied.contains("KV scales: none"), "{tied}");
    }
}
