//! What a tensor's name on disk means.
//!
//! May live here: prefixes, and the rules by which a tensor is skipped. May not: shapes, dtypes, files.

use std::fmt;

use super::quant::parts::{Part, foreign};

/// Why something on disk is not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SkipRule {
    /// The vision tower: `model.visual.*` or `visual.*`.
    Vision,
    /// The multi-token-prediction layers: `mtp.*`.
    Mtp,
    /// A rotary frequency table saved as a buffer, `*.rotary_emb.inv_freq`: it follows from the config.
    RotaryBuffer,
    /// The scale of the queries of a quantised KV cache, `self_attn.q_scale` or `self_attn.q_proj.q_scale`: attention here
    /// takes queries as they are.
    QueryScale,
    /// A whole `.safetensors` file that is not called `model*`, and that no index lists: not the checkpoint's weights.
    OtherFile,
}

impl fmt::Display for SkipRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SkipRule::Vision => "vision",
            SkipRule::Mtp => "mtp",
            SkipRule::RotaryBuffer => "rotary-buffer",
            SkipRule::QueryScale => "query-scale",
            SkipRule::OtherFile => "other-file",
        })
    }
}

/// What one tensor on disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role<'a> {
    /// Not read.
    Skip(SkipRule),
    /// The parameter of this canonical name, if the model has it.
    Param(&'a str),
    /// All experts' gate and up rows of one layer: `[experts, 2 * inter, hidden]`, gate first.
    FusedGateUp(usize),
    /// All experts' down projections of one layer: `[experts, hidden, inter]`.
    FusedDown(usize),
    /// The FP8 block scales of [`Role::FusedGateUp`].
    FusedGateUpScale(usize),
    /// The FP8 block scales of [`Role::FusedDown`].
    FusedDownScale(usize),
    /// Nothing this crate knows.
    Unknown,
}

/// The prefixes a text model's tensors have, for errors.
pub(crate) const PREFIXES: &str = "\"model.\", \"model.language_model.\" or \"language_model.model.\"";

/// Reads a name as it stands on disk.
pub(crate) fn role(name: &str) -> Role<'_> {
    if name.starts_with("model.visual.") || name.starts_with("visual.") {
        return Role::Skip(SkipRule::Vision);
    }
    if name.starts_with("mtp.") {
        return Role::Skip(SkipRule::Mtp);
    }
    // The head stands outside the text model in every export.
    let head = name.strip_prefix("language_model.").unwrap_or(name);
    if let Some(last) = head.strip_prefix("lm_head.")
        && (Part::by_name(last).is_some() || foreign(last).is_some())
    {
        return Role::Param(head);
    }
    let text = ["model.language_model.", "language_model.model.", "model."].iter().find_map(|p| name.strip_prefix(p));
    match text {
        None => Role::Unknown,
        Some(rest) if rest.starts_with("lm_head.") => Role::Unknown,
        Some(rest) if rest.ends_with("rotary_emb.inv_freq") => Role::Skip(SkipRule::RotaryBuffer),
        Some(rest) if rest.ends_with(".self_attn.q_scale") || rest.ends_with(".self_attn.q_proj.q_scale") => {
            Role::Skip(SkipRule::QueryScale)
        }
        Some(rest) => fused(rest).unwrap_or(Role::Param(rest)),
    }
}

fn fused(rest: &str) -> Option<Role<'_>> {
    let (layer, tail) = rest.strip_prefix("layers.")?.split_once('.')?;
    let index: usize = layer.parse().ok()?;
    // "layers.07" or "layers.+7" is not a second way to write layer 7.
    if index.to_string() != layer {
        return None;
    }
    match tail {
        "mlp.experts.gate_up_proj" => Some(Role::FusedGateUp(index)),
        "mlp.experts.down_proj" => Some(Role::FusedDown(index)),
        "mlp.experts.gate_up_proj_scale_inv" => Some(Role::FusedGateUpScale(index)),
        "mlp.experts.down_proj_scale_inv" => Some(Role::FusedDownScale(index)),
        _ => None,
    }
}

/// The canonical name of a KV scale under any producer's name: `layers.3.self_attn.k_scale`. compressed-tensors writes
/// `self_attn.k_scale` (older versions `self_attn.k_proj.output_scale`), modelopt `self_attn.k_proj.k_scale`.
pub(crate) fn kv_scale(canonical: &str) -> Option<String> {
    let (layer, tail) = canonical.split_once(".self_attn.")?;
    let which = match tail {
        "k_scale" | "k_proj.k_scale" | "k_proj.output_scale" => "k_scale",
        "v_scale" | "v_proj.v_scale" | "v_proj.output_scale" => "v_scale",
        _ => return None,
    };
    Some(format!("{layer}.self_attn.{which}"))
}
