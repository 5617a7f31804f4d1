//! Which shapes are timed: each kernel at the sizes it has in the real models, from their geometries. Data and the sums
//! that make it; nothing runs here.

use highwater::checkpoint::{Geometry, Mlp};
use highwater::device::cuda::blas::Product;
use highwater::error::Result;
use highwater::num::DType;
use highwater::ops::attention::AttnDims;
use highwater::ops::gdn_prefill::GdnDims;
use highwater::ops::moe;
use highwater::ops::scheme::{ActScheme, Global, Grain, Scheme};

/// How large the steps are.
#[derive(Debug)]
pub(super) struct Scale {
    /// Geometries.
    pub(super) models: &'static [&'static str],
    /// Sequences of a decode step.
    pub(super) decode: &'static [usize],
    /// Rows of a prefill step.
    pub(super) prefill: usize,
    /// (sequences, tokens of each in the cache) of decode attention.
    pub(super) cached: &'static [(usize, usize)],
}

impl Scale {
    /// On a card.
    pub(super) const CARD: Scale = Scale {
        models: &["qwen3.6-27b", "qwen3.6-35b-a3b"],
        decode: &[1, 8, 64],
        prefill: 8192,
        cached: &[(1, 1024), (8, 1024), (64, 1024), (1, 32_768), (64, 4096)],
    };
    /// On this machine's processor.
    pub(super) const HOST: Scale =
        Scale { models: &["tiny", "tiny-moe"], decode: &[1, 8], prefill: 128, cached: &[(1, 128), (8, 100)] };
}

/// A row of the table to be.
#[derive(Debug, Clone)]
pub(super) struct Shape {
    /// The kernel, as the command line names it.
    pub(super) kernel: &'static str,
    /// The geometry.
    pub(super) model: &'static str,
    /// Which of the model's uses.
    pub(super) part: String,
    /// How weights (or KV pages) are stored, where that is a choice.
    pub(super) scheme: &'static str,
    /// Rows or sequences.
    pub(super) m: usize,
    /// What runs.
    pub(super) op: Op,
}

/// What runs, with its sizes.
#[derive(Debug, Clone)]
pub(super) enum Op {
    /// A product, its input quantised first where the scheme says so.
    Linear { n: usize, k: usize, scheme: Scheme, act: ActScheme, out: DType },
    /// Quantising rows.
    Quantise { cols: usize, act: ActScheme },
    /// RMS norm.
    Rms { width: usize },
    /// Residual add, then RMS norm.
    AddRms { width: usize },
    /// The gated norm of a GDN layer.
    Gated { heads: usize, width: usize },
    /// SiLU of the gate times up.
    SiluMul { width: usize },
    /// The causal convolution of one row of each of `m` sequences, or of one sequence of `m` rows.
    Conv { channels: usize, extra: usize, taps: usize, decode: bool },
    /// The delta rule, one row of each of `m` sequences.
    GdnDecode { dims: GdnDims },
    /// The delta rule in chunks, one sequence of `m` rows.
    GdnPrefill { dims: GdnDims },
    /// Attention of one row of each of `m` sequences to `context` cached tokens and itself.
    AttentionDecode { dims: AttnDims, context: usize, kv: DType },
    /// Causal attention of one sequence of `m` rows.
    AttentionPrefill { dims: AttnDims, kv: DType },
    /// Choosing experts.
    Route { experts: usize, top_k: usize },
    /// The routed experts.
    Experts { dims: moe::Dims, scheme: Scheme, act: ActScheme },
    /// Drawing tokens.
    Sample { vocab: usize, decodable: usize, draw: Draw },
    /// Seeded values.
    Fill { cols: usize },
    /// Norms and rotations of queries and keys, one row of each of `m` sequences, or one sequence of `m` rows.
    Rope { dims: AttnDims, theta: f64, decode: bool },
    /// The write of keys and values into the cache, of the same.
    KvWrite { dims: AttnDims, kv: DType, decode: bool },
    /// Rows by index.
    Gather { table: usize, cols: usize },
}

/// How tokens are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Draw {
    /// The largest logit.
    Greedy,
    /// Temperature, top-k 20 and top-p 0.95.
    TopKTopP,
    /// The same after penalties over a thousand tokens.
    Penalties,
}

impl Shape {
    /// What `--filter` looks in.
    pub(super) fn label(&self) -> String {
        let words = [self.kernel, self.model, &self.part, self.scheme, &format!("M={}", self.m)];
        words.into_iter().filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
    }

    /// cuBLASLt's product of the same shape, where it has one: bf16, and where the card has it FP8, under one scale each.
    pub(super) fn product(&self, has_fp8: bool) -> Option<Product> {
        let Op::Linear { n, k, scheme, out, .. } = self.op else { return None };
        let operands = match scheme {
            Scheme::Plain(DType::Bf16) => DType::Bf16,
            Scheme::Fp8(_) if has_fp8 && n % 16 == 0 && k % 16 == 0 => DType::U8,
            _ => return None,
        };
        Some(Product::dense(self.m as u64, n as u64, k as u64, operands, out))
    }
}

type Stored = (&'static str, Scheme, ActScheme);

const PLAIN: Stored = ("bf16", Scheme::Plain(DType::Bf16), ActScheme::None);
/// What every projection is timed in.
const SCHEMES: [Stored; 4] = [
    PLAIN,
    ("fp8-channel", Scheme::Fp8(Grain::Channel), ActScheme::Fp8Token),
    ("fp8-channel w8a16", Scheme::Fp8(Grain::Channel), ActScheme::None),
    ("nvfp4", Scheme::Nvfp4(Global::Divides), ActScheme::None),
];
/// What the widest projection of each model is timed in besides.
const OTHER_SCHEMES: [Stored; 3] = [
    ("fp8-tensor", Scheme::Fp8(Grain::Tensor), ActScheme::Fp8Tensor),
    ("fp8-block", Scheme::Fp8(Grain::Block), ActScheme::Fp8Group),
    ("nvfp4 a4", Scheme::Nvfp4(Global::Divides), ActScheme::Nvfp4),
];

/// Every row, kernel by kernel. Shapes that two models share are listed for the first.
pub(super) fn shapes(scale: &Scale) -> Result<Vec<Shape>> {
    let mut list: Vec<Shape> = Vec::new();
    for model in scale.models {
        let geometry = Geometry::builtin(model)?;
        linears(scale, model, &geometry, &mut list);
        row_wise(scale, model, &geometry, &mut list);
        mixers(scale, model, &geometry, &mut list);
        experts(scale, model, &geometry, &mut list);
        sampler(scale, model, &geometry, &mut list);
        positions(scale, model, &geometry, &mut list);
    }
    let mut seen: Vec<(&'static str, String, usize)> = Vec::new();
    list.retain(|shape| {
        let key = (shape.kernel, format!("{:?} {}", shape.op, shape.scheme), shape.m);
        let new = !seen.contains(&key);
        seen.push(key);
        new
    });
    list.sort_by_key(|shape| shape.kernel);
    Ok(list)
}

fn linears(scale: &Scale, model: &'static str, g: &Geometry, list: &mut Vec<Shape>) {
    let (h, gdn, dims) = (g.hidden, &g.gdn, attention(g));
    let mut parts = vec![
        ("qkvz", gdn.conv_channels() + gdn.value_channels(), h),
        ("ba", 2 * gdn.value_heads, h),
        ("gdn out", h, gdn.value_channels()),
        ("qkv", dims.qkv_cols(), h),
        ("o", h, dims.out_cols()),
    ];
    match g.mlp {
        Mlp::Dense { inter } => parts.extend([("gate_up", 2 * inter, h), ("down", h, inter)]),
        Mlp::Moe { experts, shared_inter, .. } => parts.extend([
            ("router", experts, h),
            ("shared gate_up", 2 * shared_inter, h),
            ("shared down", h, shared_inter),
        ]),
    }
    parts.push(("lm_head", g.vocab, h));
    let widest = parts.iter().filter(|(part, ..)| *part != "lm_head").max_by_key(|(_, n, k)| n * k).map(|p| p.0);
    for (part, n, k) in parts {
        // Published checkpoints keep these as floats.
        let floats = ["ba", "router"].contains(&part);
        let others = if Some(part) == widest { &OTHER_SCHEMES[..] } else { &[] };
        let schemes = if floats { &SCHEMES[..1] } else { &SCHEMES[..] };
        // The head runs on sampled rows only.
        let prefill = (part != "lm_head").then_some(scale.prefill);
        let out = if part == "lm_head" { DType::F32 } else { DType::Bf16 };
        for (scheme, stored, act) in schemes.iter().chain(others).copied() {
            for m in scale.decode.iter().copied().chain(prefill) {
                let op = Op::Linear { n, k, scheme: stored, act, out };
                list.push(Shape { kernel: "linear", model, part: part.into(), scheme, m, op });
            }
        }
    }
}

fn row_wise(scale: &Scale, model: &'static str, g: &Geometry, list: &mut Vec<Shape>) {
    let inter = match g.mlp {
        Mlp::Dense { inter } => inter,
        Mlp::Moe { shared_inter, .. } => shared_inter,
    };
    for m in scale.decode.iter().copied().chain([scale.prefill]) {
        let mut push = |kernel, part: &str, scheme, op| {
            list.push(Shape { kernel, model, part: part.into(), scheme, m, op });
        };
        for (scheme, act) in
            [("fp8 token", ActScheme::Fp8Token), ("fp8 group", ActScheme::Fp8Group), ("nvfp4", ActScheme::Nvfp4)]
        {
            push("quantise", "hidden", scheme, Op::Quantise { cols: g.hidden, act });
        }
        push("norm", "rms", "", Op::Rms { width: g.hidden });
        push("norm", "add_rms", "", Op::AddRms { width: g.hidden });
        push("norm", "gated", "", Op::Gated { heads: g.gdn.value_heads, width: g.gdn.value_dim });
        push("silu_mul", "gate_up", "", Op::SiluMul { width: inter });
    }
    let fill = Op::Fill { cols: g.hidden };
    list.push(Shape { kernel: "fill", model, part: "normal".into(), scheme: "", m: scale.prefill, op: fill });
}

fn mixers(scale: &Scale, model: &'static str, g: &Geometry, list: &mut Vec<Shape>) {
    let gdn = &g.gdn;
    let (channels, extra, taps) = (gdn.conv_channels(), gdn.value_channels(), gdn.conv_kernel);
    let dims = GdnDims::new(gdn.key_heads, gdn.value_heads, gdn.key_dim, gdn.value_dim);
    let mut push = |kernel, part: String, scheme, m, op| list.push(Shape { kernel, model, part, scheme, m, op });
    for m in scale.decode.iter().copied() {
        push("conv1d", "decode".into(), "", m, Op::Conv { channels, extra, taps, decode: true });
        push("gdn_decode", "decode".into(), "", m, Op::GdnDecode { dims });
    }
    push("conv1d", "prefill".into(), "", scale.prefill, Op::Conv { channels, extra, taps, decode: false });
    push("gdn_prefill", "prefill".into(), "", scale.prefill, Op::GdnPrefill { dims });
    let dims = attention(g);
    for (scheme, kv) in [("bf16 kv", DType::Bf16), ("fp8 kv", DType::U8)] {
        for (m, context) in scale.cached.iter().copied() {
            let op = Op::AttentionDecode { dims, context, kv };
            push("attention", format!("decode after {context}"), scheme, m, op);
        }
        push("attention", "prefill".into(), scheme, scale.prefill, Op::AttentionPrefill { dims, kv });
    }
}

fn experts(scale: &Scale, model: &'static str, g: &Geometry, list: &mut Vec<Shape>) {
    let Mlp::Moe { experts, top_k, inter, .. } = g.mlp else { return };
    let dims = moe::Dims { hidden: g.hidden, inter, experts, top_k };
    for m in scale.decode.iter().copied().chain([scale.prefill]) {
        let route = Op::Route { experts, top_k };
        list.push(Shape { kernel: "moe", model, part: "route".into(), scheme: "", m, op: route });
        for (scheme, stored, act) in SCHEMES {
            let op = Op::Experts { dims, scheme: stored, act };
            list.push(Shape { kernel: "moe", model, part: "experts".into(), scheme, m, op });
        }
    }
}

fn sampler(scale: &Scale, model: &'static str, g: &Geometry, list: &mut Vec<Shape>) {
    let draws = [("greedy", Draw::Greedy), ("top-k top-p", Draw::TopKTopP), ("penalties top-k top-p", Draw::Penalties)];
    for (part, draw) in draws {
        for m in scale.decode.iter().copied() {
            let op = Op::Sample { vocab: g.vocab, decodable: g.decodable, draw };
            list.push(Shape { kernel: "sampler", model, part: part.into(), scheme: "", m, op });
        }
    }
}

fn positions(scale: &Scale, model: &'static str, g: &Geometry, list: &mut Vec<Shape>) {
    let (dims, theta) = (attention(g), g.rope.theta);
    let mut push = |kernel, part: &str, scheme, m, op| {
        list.push(Shape { kernel, model, part: part.into(), scheme, m, op });
    };
    for (m, decode) in scale.decode.iter().map(|m| (*m, true)).chain([(scale.prefill, false)]) {
        let step = if decode { "decode" } else { "prefill" };
        push("rope", step, "", m, Op::Rope { dims, theta, decode });
        for (scheme, kv) in [("bf16 kv", DType::Bf16), ("fp8 kv", DType::U8)] {
            push("kv_write", step, scheme, m, Op::KvWrite { dims, kv, decode });
        }
        push("rows", "embedding", "", m, Op::Gather { table: g.vocab, cols: g.hidden });
        if decode {
            // Of more rows than a step has, so that a cache does not hold them all.
            push("rows", "sampled", "", m, Op::Gather { table: 4 * scale.prefill, cols: g.hidden });
        }
    }
}

fn attention(g: &Geometry) -> AttnDims {
    AttnDims { heads: g.heads, kv_heads: g.kv_heads, head_dim: g.head_dim, rotary_dim: g.rotary_dim }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_real_models_sizes_are_there() {
        let list = shapes(&Scale::CARD).unwrap();
        let has = |label: &str| list.iter().any(|shape| shape.label() == label);
        for label in [
            "linear qwen3.6-27b gate_up fp8-channel M=1",
            "linear qwen3.6-27b lm_head nvfp4 M=64",
            "linear qwen3.6-35b-a3b router bf16 M=8192",
            "norm qwen3.6-27b gated M=8192",
            "gdn_prefill qwen3.6-35b-a3b prefill M=8192",
            "attention qwen3.6-27b decode after 32768 fp8 kv M=1",
            "moe qwen3.6-35b-a3b experts nvfp4 M=8",
            "sampler qwen3.6-27b greedy M=64",
            "rope qwen3.6-27b prefill M=8192",
            "kv_write qwen3.6-35b-a3b decode fp8 kv M=64",
            "rows qwen3.6-27b embedding M=8192",
            "rows qwen3.6-27b sampled M=64",
        ] {
            assert!(has(label), "{label}");
        }
        assert!(!list.iter().any(|shape| shape.part == "lm_head" && shape.m == 8192), "the head runs on sampled rows");
        let wide = list.iter().find(|shape| shape.part == "gate_up").unwrap();
        assert!(matches!(wide.op, Op::Linear { n: 34_816, k: 5120, .. }), "{wide:?}");
        let labels: std::collections::BTreeSet<String> = list.iter().map(Shape::label).collect();
        assert_eq!(labels.len(), list.len(), "every row has a label of its own");
    }

    #[test]
    fn every_kernel_is_there_at_both_scales() {
        let kernels = |scale| {
            let list = shapes(scale).unwrap();
            list.iter().map(|shape| shape.kernel).collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!(kernels(&Scale::CARD), kernels(&Scale::HOST));
        assert_eq!(kernels(&Scale::CARD).len(), 14);
    }
}
