//! config.json and generation_config.json to a [`Geometry`].
//!
//! May live here: which keys are read, from where, their defaults, and which variants are refused by name. May not:
//! tensors, folders, and the relations between numbers (geometry.rs). Defaults are the class defaults of transformers'
//! `Qwen3_5TextConfig` and `Qwen3_5MoeTextConfig`.

use std::path::Path;

use serde_json::Value;

use super::geometry::{
    CONTEXT, CONV_KERNEL, EXPERTS, Gate, Gdn, Geometry, HEAD_DIM, HEADS, HIDDEN, INTER, INTERVAL, LAYERS, Mixer, Mlp,
    Rope, VOCAB, Yarn,
};
use super::json::{Bound, Fields, kind, object, shown};
use super::quant::Quantisation;
use crate::error::{Error, Result};

/// Most bytes of a config.json: a quantisation config that lists every module of the largest model is under 1 MiB.
pub(crate) const CONFIG_LIMIT: u64 = 4 << 20;

/// What is accepted in place of a model type or class that is not.
const SUPPORTED: &str = "supported are the Qwen3.5, 3.6 and 3.8 hybrids: model_type qwen3_5, qwen3_5_text, \
    qwen3_5_moe, qwen3_5_moe_text; class Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, \
    Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration";

/// A config that was read, with what only the tensors on disk can settle.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) geometry: Geometry,
    /// How its weights are stored.
    pub(crate) quantisation: Quantisation,
    /// The tie flag stands inside and outside `text_config` with different values, or inside only: readers disagree.
    pub(crate) tie_unsettled: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    Dense,
    Moe,
}

/// Reads the bytes of a config.json.
pub(crate) fn parse(file: &Path, bytes: &[u8]) -> Result<Parsed> {
    let map = object(file, bytes)?;
    let top = Fields::top(file, &map);
    let nested = top.object("text_config")?;
    let f = nested.as_ref().unwrap_or(&top);
    let family = family(&top, nested.as_ref())?;
    let quantisation = Quantisation::read(&top, nested.as_ref())?;
    refuse_variants(f)?;

    let moe = family == Family::Moe;
    let int = |key: &str, bound: Bound, default: usize| f.int(key, bound).map(|v| v.unwrap_or(default));
    let vocab = int("vocab_size", VOCAB, 248_320)?;
    let head_dim = int("head_dim", HEAD_DIM, 256)?;
    let max_position = int("max_position_embeddings", CONTEXT, 32_768)?;
    let (rope, rotary_dim) = rope(f, head_dim, max_position)?;
    let max_context = match rope.yarn {
        None => max_position,
        Some(y) => extended(f, y)?,
    };
    let gdn = Gdn {
        key_heads: int("linear_num_key_heads", HEADS, 16)?,
        value_heads: int("linear_num_value_heads", HEADS, 32)?,
        key_dim: int("linear_key_head_dim", HEAD_DIM, 128)?,
        value_dim: int("linear_value_head_dim", HEAD_DIM, 128)?,
        conv_kernel: int("linear_conv_kernel_dim", CONV_KERNEL, 4)?,
        gate: gate(f)?,
    };
    let mlp = if moe {
        Mlp::Moe {
            experts: int("num_experts", EXPERTS, 256)?,
            top_k: int("num_experts_per_tok", EXPERTS, 8)?,
            inter: int("moe_intermediate_size", INTER, 512)?,
            shared_inter: int("shared_expert_intermediate_size", INTER, 512)?,
        }
    } else {
        Mlp::Dense { inter: int("intermediate_size", INTER, 12_288)? }
    };
    let outer_tie = top.flag("tie_word_embeddings")?;
    let inner_tie = f.flag("tie_word_embeddings")?;
    let tied = outer_tie.unwrap_or(false);
    let outer_eos = eos(&top, vocab)?;
    let geometry = Geometry {
        name: folder_name(file),
        hidden: int("hidden_size", HIDDEN, if moe { 2048 } else { 4096 })?,
        layers: layers(f, if moe { 40 } else { 32 })?,
        vocab,
        decodable: vocab,
        heads: int("num_attention_heads", HEADS, 16)?,
        kv_heads: int("num_key_value_heads", HEADS, if moe { 2 } else { 4 })?,
        head_dim,
        rotary_dim,
        rope,
        gdn,
        mlp,
        eps: f.float("rms_norm_eps", 1e-12, 0.1)?.unwrap_or(1e-6) as f32,
        tied,
        max_context,
        eos: match outer_eos {
            Some(ids) => ids,
            None => eos(f, vocab)?.unwrap_or_default(),
        },
    };
    geometry.check_relations(file, &f.path(""))?;
    Ok(Parsed { geometry, quantisation, tie_unsettled: inner_tie.unwrap_or(tied) != tied })
}

/// The `eos_token_id` of a generation_config.json, if it has one.
pub(crate) fn generation_eos(file: &Path, bytes: &[u8], vocab: usize) -> Result<Option<Vec<u32>>> {
    let map = object(file, bytes)?;
    eos(&Fields::top(file, &map), vocab)
}

// Folder, class and layout of a checkpoint are independent of each other; only dense or MoE must be said alike throughout.
fn family(top: &Fields<'_>, nested: Option<&Fields<'_>>) -> Result<Family> {
    let mut said: Option<(String, Family)> = None;
    let mut agree = |path: String, family: Family| match &said {
        Some((other, first)) if *first != family => {
            Err(Error::config(top.file(), path, format!("{family:?}, where {other} says {first:?}; they must agree")))
        }
        Some(_) => Ok(()),
        None => {
            said = Some((path, family));
            Ok(())
        }
    };
    for f in [Some(top), nested].into_iter().flatten() {
        match f.text("model_type")? {
            None => {}
            Some("qwen3_5" | "qwen3_5_text") => agree(f.path("model_type"), Family::Dense)?,
            Some("qwen3_5_moe" | "qwen3_5_moe_text") => agree(f.path("model_type"), Family::Moe)?,
            Some(other) => return Err(unsupported(f, "model_type", other)),
        }
    }
    if let Some(list) = top.list("architectures")? {
        for class in list {
            match class.as_str() {
                Some("Qwen3_5ForCausalLM" | "Qwen3_5ForConditionalGeneration") => {
                    agree("architectures".into(), Family::Dense)?;
                }
                Some("Qwen3_5MoeForCausalLM" | "Qwen3_5MoeForConditionalGeneration") => {
                    agree("architectures".into(), Family::Moe)?;
                }
                Some(other) => return Err(unsupported(top, "architectures", other)),
                None => return Err(top.error("architectures", format!("{}; must be a list of strings", kind(class)))),
            }
        }
    }
    said.map(|(_, family)| family)
        .ok_or_else(|| top.error("model_type", format!("absent, and no class in architectures either; {SUPPORTED}")))
}

fn unsupported(f: &Fields<'_>, key: &str, value: &str) -> Error {
    Error::Unsupported {
        what: format!("{}: {} \"{}\"", f.file().display(), f.path(key), shown(value)),
        supported: SUPPORTED.into(),
    }
}

// Variants the class can describe and no published model of the family uses: computing them wrongly would be silent.
fn refuse_variants(f: &Fields<'_>) -> Result<()> {
    let refuse = |key: &str, found: String, supported: &str| {
        Err(Error::Unsupported {
            what: format!("{}: {} {found}", f.file().display(), f.path(key)),
            supported: supported.into(),
        })
    };
    match f.text("hidden_act")? {
        None | Some("silu" | "swish") => {}
        Some(other) => {
            return refuse("hidden_act", format!("\"{}\"", shown(other)), "the MLP's activation is \"silu\"");
        }
    }
    if f.flag("attention_bias")? == Some(true) {
        return refuse("attention_bias", "true".into(), "attention projections have no bias");
    }
    if f.flag("attn_output_gate")? == Some(false) {
        return refuse("attn_output_gate", "false".into(), "attention's output is gated");
    }
    if f.flag("norm_topk_prob")? == Some(false) {
        return refuse(
            "norm_topk_prob",
            "false".into(),
            "the router's weights are renormalised over the chosen experts",
        );
    }
    if f.list("mlp_only_layers")?.is_some_and(|l| !l.is_empty()) {
        return refuse("mlp_only_layers", "with entries".into(), "every layer of a MoE model has experts");
    }
    if let Some(step) = f.int("decoder_sparse_step", LAYERS)?
        && step != 1
    {
        return refuse("decoder_sparse_step", step.to_string(), "every layer of a MoE model has experts (1)");
    }
    Ok(())
}

fn gate(f: &Fields<'_>) -> Result<Gate> {
    match f.text("output_gate_type")? {
        None | Some("swish" | "silu") => Ok(Gate::Silu),
        Some("sigmoid") => Ok(Gate::Sigmoid),
        Some(other) => {
            let what = format!("\"{}\"; must be \"swish\", \"silu\" or \"sigmoid\"", shown(other));
            Err(f.error("output_gate_type", what))
        }
    }
}

fn layers(f: &Fields<'_>, default: usize) -> Result<Vec<Mixer>> {
    let count = f.int("num_hidden_layers", LAYERS)?.unwrap_or(default);
    let interval = f.int("full_attention_interval", INTERVAL)?.unwrap_or(4);
    let Some(list) = f.list("layer_types")? else {
        let mixer = |i: usize| if (i + 1).is_multiple_of(interval) { Mixer::Attention } else { Mixer::Gdn };
        return Ok((0..count).map(mixer).collect());
    };
    if list.len() != count {
        let what = format!("{} entries; must be as many as num_hidden_layers, {count}", list.len());
        return Err(f.error("layer_types", what));
    }
    let mixer = |(i, v): (usize, &Value)| match v.as_str() {
        Some("linear_attention") => Ok(Mixer::Gdn),
        Some("full_attention") => Ok(Mixer::Attention),
        _ => {
            let what = format!("{}; must be \"linear_attention\" or \"full_attention\"", kind(v));
            Err(f.error(&format!("layer_types[{i}]"), what))
        }
    };
    list.iter().enumerate().map(mixer).collect()
}

fn rope(f: &Fields<'_>, head_dim: usize, max_position: usize) -> Result<(Rope, usize)> {
    let params = f.object("rope_parameters")?;
    // The older form is looked at only where the newer one is absent.
    let scaling = if params.is_some() { None } else { f.object("rope_scaling")? };
    let inner = params.as_ref().or(scaling.as_ref());
    if let Some((key, _)) = params.iter().flat_map(Fields::entries).find(|(_, v)| v.is_object()) {
        let what = "an object; one set of numbers for all attention layers is expected";
        return Err(f.error(&format!("rope_parameters.{}", shown(key)), what));
    }
    let float = |key: &str, min: f64, max: f64| match inner.map(|p| p.float(key, min, max)).transpose()? {
        Some(Some(v)) => Ok(Some(v)),
        _ => f.float(key, min, max),
    };
    let theta = float("rope_theta", 1.0, 1e12)?.unwrap_or(10_000.0);
    let partial = float("partial_rotary_factor", 1e-6, 1.0)?.unwrap_or(0.25);
    let rotary_dim = (head_dim as f64 * partial) as usize;
    if rotary_dim < 2 || !rotary_dim.is_multiple_of(2) {
        let what = format!(
            "{partial} of head_dim {head_dim} is {rotary_dim}; must give an even number of dimensions, at least 2"
        );
        return Err(f.error("partial_rotary_factor", what));
    }
    let yarn = match inner {
        None => None,
        Some(r) => {
            let kind = match r.text("rope_type")? {
                Some(kind) => Some(kind),
                None => r.text("type")?,
            };
            match kind {
                // "mrope" is the older name of the default with sections, which are one position for text.
                None | Some("default" | "mrope") => None,
                Some("yarn") => Some(yarn(r, max_position)?),
                Some(other) => {
                    return Err(Error::Unsupported {
                        what: format!("{}: {} \"{}\"", f.file().display(), r.path("rope_type"), shown(other)),
                        supported: "rope_type is \"default\" or \"yarn\"".into(),
                    });
                }
            }
        }
    };
    Ok((Rope { theta, yarn }, rotary_dim))
}

fn yarn(r: &Fields<'_>, max_position: usize) -> Result<Yarn> {
    for key in ["mscale", "mscale_all_dim"] {
        if r.get(key).is_some() {
            return Err(r.error(key, "not part of this family's YaRN; give attention_factor instead"));
        }
    }
    if r.flag("truncate")? == Some(false) {
        return Err(
            r.error("truncate", "false; the bounds of the ramp are whole dimensions in this family: must be true")
        );
    }
    let factor = r
        .float("factor", 1.0, 1024.0)?
        .ok_or_else(|| r.error("factor", "absent; YaRN needs a number from 1 to 1024"))?;
    let original_max_position = r.int("original_max_position_embeddings", CONTEXT)?.unwrap_or(max_position);
    let attention_factor = r.float("attention_factor", 1e-3, 1e3)?.unwrap_or(0.1 * factor.ln() + 1.0);
    let beta_fast = r.float("beta_fast", 1e-3, 1e6)?.unwrap_or(32.0);
    let beta_slow = r.float("beta_slow", 1e-3, 1e6)?.unwrap_or(1.0);
    if beta_fast < beta_slow {
        return Err(r.error("beta_fast", format!("{beta_fast}; must be at least beta_slow, {beta_slow}")));
    }
    Ok(Yarn { factor, original_max_position, attention_factor, beta_fast, beta_slow })
}

fn extended(f: &Fields<'_>, y: Yarn) -> Result<usize> {
    let tokens = (y.original_max_position as f64 * y.factor) as usize;
    if CONTEXT.accepts(tokens) {
        return Ok(tokens);
    }
    let what = format!(
        "{} of original_max_position_embeddings {} is {tokens} tokens; must be {CONTEXT}",
        y.factor, y.original_max_position
    );
    Err(f.error("factor", what))
}

/// One id or a list of them, without repetition, in order.
fn eos(f: &Fields<'_>, vocab: usize) -> Result<Option<Vec<u32>>> {
    const KEY: &str = "eos_token_id";
    let Some(value) = f.get(KEY) else { return Ok(None) };
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    let mut ids = Vec::new();
    for v in list {
        match v.as_u64() {
            Some(id) if id < vocab as u64 => {
                let id = id as u32;
                if !ids.contains(&id) {
                    ids.push(id);
                }
            }
            _ => {
                let what = format!("{}; must be token ids from 0 to {} (vocab_size is {vocab})", kind(v), vocab - 1);
                return Err(f.error(KEY, what));
            }
        }
        if ids.len() > 256 {
            return Err(f.error(KEY, format!("a list of {}; at most 256 ids can end a sequence", list.len())));
        }
    }
    Ok(Some(ids))
}

// A cache folder is called by its commit: the repository's name stands two folders up, as `models--owner--name`.
fn folder_name(file: &Path) -> String {
    let parents = || file.ancestors().skip(1).filter_map(Path::file_name).map(|n| n.to_string_lossy());
    match parents().find_map(|n| n.strip_prefix("models--").map(|n| n.replace("--", "/"))) {
        Some(repository) if parents().nth(1).is_some_and(|n| n == "snapshots") => repository,
        _ => parents().next().map_or_else(|| "checkpoint".into(), |n| shown(&n)),
    }
}
