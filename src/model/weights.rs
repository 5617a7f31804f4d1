//! The model's parameters on a device, and how they are filled.

use std::sync::Arc;

use crate::checkpoint::{Geometry, Mixer, Mlp, Source};
use crate::device::Device;
use crate::error::Result;
use crate::mem::{End, Layer, Tag};
use crate::model::state::{self, StateDecl};
use crate::num::DType;
use crate::ops::attention::AttnDims;
use crate::ops::gdn_prefill::GdnDims;
use crate::ops::moe::Experts;
use crate::ops::{Cx, Meter, Numerics, norm, rope};
use crate::tensor::{Tensor, byte_size};

/// A model on a device.
#[derive(Debug)]
pub struct Model {
    pub(super) geometry: Geometry,
    pub(super) numerics: Numerics,
    pub(super) embed: Tensor,
    /// `None` where the head is the embedding.
    pub(super) head: Option<Tensor>,
    pub(super) norm: Tensor,
    pub(super) inv_freq: Tensor,
    pub(super) attention_factor: f32,
    pub(super) layers: Vec<LayerWeights>,
}

#[derive(Debug)]
pub(super) struct LayerWeights {
    pub(super) input_norm: Tensor,
    pub(super) post_norm: Tensor,
    pub(super) mixer: MixerWeights,
    pub(super) mlp: MlpWeights,
}

#[derive(Debug)]
pub(super) enum MixerWeights {
    Gdn(GdnWeights),
    Attention(AttentionWeights),
}

#[derive(Debug)]
pub(super) struct GdnWeights {
    /// Rows of in_proj_qkv, then of in_proj_z.
    pub(super) qkvz: Tensor,
    /// Rows of in_proj_b, then of in_proj_a.
    pub(super) ba: Tensor,
    pub(super) conv: Tensor,
    pub(super) a_log: Tensor,
    pub(super) dt_bias: Tensor,
    pub(super) norm: Tensor,
    pub(super) out: Tensor,
}

#[derive(Debug)]
pub(super) struct AttentionWeights {
    /// Rows of q_proj (a head's queries then its gates), then k_proj, then v_proj.
    pub(super) qkv: Tensor,
    pub(super) q_norm: Tensor,
    pub(super) k_norm: Tensor,
    pub(super) out: Tensor,
}

#[derive(Debug)]
pub(super) struct DenseWeights {
    /// Rows of gate_proj, then of up_proj.
    pub(super) gate_up: Tensor,
    pub(super) down: Tensor,
}

#[derive(Debug)]
pub(super) enum MlpWeights {
    Dense(DenseWeights),
    Moe(MoeWeights),
}

#[derive(Debug)]
pub(super) struct MoeWeights {
    pub(super) router: Tensor,
    pub(super) experts: Experts,
    pub(super) top_k: usize,
    pub(super) inter: usize,
    pub(super) shared: DenseWeights,
    pub(super) shared_gate: Tensor,
}

impl Model {
    /// Allocates every parameter at the persistent end of `device` and fills it from `source`. `progress` is called
    /// with (bytes filled, bytes in all).
    pub fn load(
        device: &Arc<Device>,
        source: &Source,
        numerics: Numerics,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Model> {
        let geometry = source.geometry().clone();
        let meter = Meter::default();
        let cx = Cx { device, numerics, layer: Layer::Weights, bound: None, meter: &meter };
        let total = geometry.param_count() * DType::Bf16.bytes();
        let mut loader = Loader { cx, source, done: 0, total, progress };

        let hidden = geometry.hidden;
        let embed = loader.matrix(Layer::Embed, "embed_tokens", &[("embed_tokens.weight", geometry.vocab)], hidden)?;
        let mut layers = Vec::with_capacity(geometry.layers.len());
        for (i, mixer) in geometry.layers.iter().enumerate() {
            layers.push(loader.layer(&geometry, i, *mixer)?);
        }
        let norm = loader.vector(Layer::Norm, "norm", "norm.weight", &[hidden])?;
        let head = if geometry.tied {
            None
        } else {
            Some(loader.matrix(Layer::Head, "lm_head", &[("lm_head.weight", geometry.vocab)], hidden)?)
        };
        let (freqs, attention_factor) = rope::inv_freq(&rotary(&geometry))?;
        let mut inv_freq = loader.alloc(Layer::Attention, "inv_freq", DType::F32, &[freqs.len()])?;
        if device.has_data() {
            inv_freq.host_mut::<f32>()?.copy_from_slice(&freqs);
        }
        Ok(Model { geometry, numerics, embed, head, norm, inv_freq, attention_factor, layers })
    }

    /// The dimensions.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The types values are kept in.
    pub fn numerics(&self) -> Numerics {
        self.numerics
    }

    /// What each sequence keeps between steps.
    pub fn state(&self) -> Vec<StateDecl> {
        state::declare(&self.geometry, self.numerics)
    }

    pub(super) fn attn_dims(&self) -> AttnDims {
        let g = &self.geometry;
        AttnDims { heads: g.heads, kv_heads: g.kv_heads, head_dim: g.head_dim, rotary_dim: g.rotary_dim }
    }

    pub(super) fn gdn_dims(&self) -> GdnDims {
        let g = &self.geometry.gdn;
        GdnDims { key_heads: g.key_heads, value_heads: g.value_heads, key_dim: g.key_dim, value_dim: g.value_dim }
    }

    pub(super) fn gate(&self) -> norm::Gate {
        match self.geometry.gdn.gate {
            crate::checkpoint::Gate::Silu => norm::Gate::Silu,
            crate::checkpoint::Gate::Sigmoid => norm::Gate::Sigmoid,
        }
    }
}

/// The geometry's rotary embedding as the op takes it.
fn rotary(geometry: &Geometry) -> rope::Rope {
    let yarn = geometry.rope.yarn.map(|y| rope::Yarn {
        factor: y.factor,
        original_max_position: y.original_max_position,
        attention_factor: Some(y.attention_factor),
        beta_fast: y.beta_fast,
        beta_slow: y.beta_slow,
        truncate: true,
    });
    rope::Rope { theta: geometry.rope.theta, rotary_dim: geometry.rotary_dim, yarn }
}

struct Loader<'a> {
    cx: Cx<'a>,
    source: &'a Source,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl Loader<'_> {
    fn alloc(&self, layer: Layer, buffer: &'static str, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let bytes = byte_size(dtype, shape)?;
        let block = self.cx.device.alloc(End::Persistent, Tag::new(layer, "weights", buffer), bytes)?;
        Tensor::new(block, dtype, shape)
    }

    /// The stored type of a matrix: bf16 where it was published as bf16 or is computed with in bf16, else f32.
    fn stored(&self, names: &[&str]) -> Result<DType> {
        if self.cx.numerics.activations == DType::Bf16 {
            return Ok(DType::Bf16);
        }
        for name in names {
            if self.source.dtype(name)? == DType::F32 {
                return Ok(DType::F32);
            }
        }
        Ok(DType::Bf16)
    }

    fn fill(&mut self, dst: &mut Tensor, first: usize, rows: usize, name: &str) -> Result<()> {
        self.source.fill(&self.cx, dst, first, rows, name)?;
        self.done += rows as u64 * dst.cols() as u64 * DType::Bf16.bytes();
        (self.progress)(self.done, self.total);
        Ok(())
    }

    /// A matrix `[sum of rows, cols]` whose row blocks are the named parameters.
    fn matrix(&mut self, layer: Layer, buffer: &'static str, parts: &[(&str, usize)], cols: usize) -> Result<Tensor> {
        let names: Vec<&str> = parts.iter().map(|(name, _)| *name).collect();
        let rows = parts.iter().map(|(_, rows)| rows).sum();
        let mut tensor = self.alloc(layer, buffer, self.stored(&names)?, &[rows, cols])?;
        let mut first = 0;
        for (name, rows) in parts {
            self.fill(&mut tensor, first, *rows, name)?;
            first += rows;
        }
        Ok(tensor)
    }

    /// A small parameter, kept in f32.
    fn vector(&mut self, layer: Layer, buffer: &'static str, name: &str, shape: &[usize]) -> Result<Tensor> {
        let mut tensor = self.alloc(layer, buffer, DType::F32, shape)?;
        self.fill(&mut tensor, 0, shape[0], name)?;
        Ok(tensor)
    }

    fn layer(&mut self, geometry: &Geometry, index: usize, mixer: Mixer) -> Result<LayerWeights> {
        let prefix = format!("layers.{index}");
        let hidden = geometry.hidden;
        Ok(LayerWeights {
            input_norm: self.vector(
                Layer::Norm,
                "input_layernorm",
                &format!("{prefix}.input_layernorm.weight"),
                &[hidden],
            )?,
            mixer: match mixer {
                Mixer::Gdn => MixerWeights::Gdn(self.gdn(geometry, &format!("{prefix}.linear_attn"))?),
                Mixer::Attention => MixerWeights::Attention(self.attention(geometry, &format!("{prefix}.self_attn"))?),
            },
            post_norm: self.vector(
                Layer::Norm,
                "post_attention_layernorm",
                &format!("{prefix}.post_attention_layernorm.weight"),
                &[hidden],
            )?,
            mlp: self.mlp(geometry, &format!("{prefix}.mlp"))?,
        })
    }

    fn gdn(&mut self, geometry: &Geometry, at: &str) -> Result<GdnWeights> {
        let (g, hidden, layer) = (geometry.gdn, geometry.hidden, Layer::Gdn);
        let (channels, values, heads) = (g.conv_channels(), g.value_channels(), g.value_heads);
        let name = |part: &str| format!("{at}.{part}");
        Ok(GdnWeights {
            qkvz: self.matrix(
                layer,
                "in_proj_qkvz",
                &[(&name("in_proj_qkv.weight"), channels), (&name("in_proj_z.weight"), values)],
                hidden,
            )?,
            ba: self.matrix(
                layer,
                "in_proj_ba",
                &[(&name("in_proj_b.weight"), heads), (&name("in_proj_a.weight"), heads)],
                hidden,
            )?,
            conv: self.vector(layer, "conv1d", &name("conv1d.weight"), &[channels, g.conv_kernel])?,
            a_log: self.vector(layer, "A_log", &name("A_log"), &[heads])?,
            dt_bias: self.vector(layer, "dt_bias", &name("dt_bias"), &[heads])?,
            norm: self.vector(layer, "norm", &name("norm.weight"), &[g.value_dim])?,
            out: self.matrix(layer, "out_proj", &[(&name("out_proj.weight"), hidden)], values)?,
        })
    }

    fn attention(&mut self, geometry: &Geometry, at: &str) -> Result<AttentionWeights> {
        let (hidden, layer, dim) = (geometry.hidden, Layer::Attention, geometry.head_dim);
        let (queries, keys) = (geometry.heads * dim, geometry.kv_heads * dim);
        let name = |part: &str| format!("{at}.{part}");
        Ok(AttentionWeights {
            qkv: self.matrix(
                layer,
                "qkv_proj",
                &[
                    (&name("q_proj.weight"), 2 * queries),
                    (&name("k_proj.weight"), keys),
                    (&name("v_proj.weight"), keys),
                ],
                hidden,
            )?,
            q_norm: self.vector(layer, "q_norm", &name("q_norm.weight"), &[dim])?,
            k_norm: self.vector(layer, "k_norm", &name("k_norm.weight"), &[dim])?,
            out: self.matrix(layer, "o_proj", &[(&name("o_proj.weight"), hidden)], queries)?,
        })
    }

    fn dense(&mut self, layer: Layer, hidden: usize, inter: usize, at: &str) -> Result<DenseWeights> {
        let name = |part: &str| format!("{at}.{part}");
        Ok(DenseWeights {
            gate_up: self.matrix(
                layer,
                "gate_up_proj",
                &[(&name("gate_proj.weight"), inter), (&name("up_proj.weight"), inter)],
                hidden,
            )?,
            down: self.matrix(layer, "down_proj", &[(&name("down_proj.weight"), hidden)], inter)?,
        })
    }

    fn mlp(&mut self, geometry: &Geometry, at: &str) -> Result<MlpWeights> {
        let hidden = geometry.hidden;
        match geometry.mlp {
            Mlp::Dense { inter } => Ok(MlpWeights::Dense(self.dense(Layer::Mlp, hidden, inter, at)?)),
            Mlp::Moe { experts, top_k, inter, shared_inter } => Ok(MlpWeights::Moe(MoeWeights {
                router: self.matrix(Layer::Moe, "router", &[(&format!("{at}.gate.weight"), experts)], hidden)?,
                experts: self.experts(hidden, experts, inter, at)?,
                top_k,
                inter,
                shared: self.dense(Layer::Moe, hidden, shared_inter, &format!("{at}.shared_expert"))?,
                shared_gate: self.matrix(
                    Layer::Moe,
                    "shared_expert_gate",
                    &[(&format!("{at}.shared_expert_gate.weight"), 1)],
                    hidden,
                )?,
            })),
        }
    }

    /// Every expert resident, each in the slot of its own number.
    fn experts(&mut self, hidden: usize, experts: usize, inter: usize, at: &str) -> Result<Experts> {
        let name = |e: usize, part: &str| format!("{at}.experts.{e}.{part}_proj.weight");
        let dtype = self.stored(&[&name(0, "gate"), &name(0, "up"), &name(0, "down")])?;
        let mut gate_up = self.alloc(Layer::Moe, "experts.gate_up", dtype, &[experts * 2 * inter, hidden])?;
        let mut down = self.alloc(Layer::Moe, "experts.down", dtype, &[experts * hidden, inter])?;
        for e in 0..experts {
            self.fill(&mut gate_up, e * 2 * inter, inter, &name(e, "gate"))?;
            self.fill(&mut gate_up, (e * 2 + 1) * inter, inter, &name(e, "up"))?;
            self.fill(&mut down, e * hidden, hidden, &name(e, "down"))?;
        }
        let mut slots = self.alloc(Layer::Moe, "expert_slots", DType::I32, &[experts])?;
        if self.cx.device.has_data() {
            for (e, slot) in slots.host_mut::<i32>()?.iter_mut().enumerate() {
                *slot = e as i32;
            }
        }
        Ok(Experts {
            gate_up: gate_up.reshape(&[experts, 2 * inter, hidden])?,
            down: down.reshape(&[experts, hidden, inter])?,
            slots,
        })
    }
}
