//! The model's parameters on a device.

use crate::checkpoint::Geometry;
use crate::model::state::{self, StateDecl};
use crate::ops::attention::AttnDims;
use crate::ops::gdn_prefill::GdnDims;
use crate::ops::linear::Projection;
use crate::ops::moe::Experts;
use crate::ops::weight::Weight;
use crate::ops::{Numerics, norm};
use crate::tensor::Tensor;

/// A model on a device.
#[derive(Debug)]
pub struct Model {
    pub(super) geometry: Geometry,
    pub(super) numerics: Numerics,
    /// Floats whatever the linear layers are.
    pub(super) embed: Weight,
    /// `None` where the head is the embedding.
    pub(super) head: Option<Weight>,
    pub(super) norm: Tensor,
    pub(super) inv_freq: Tensor,
    pub(super) attention_factor: f32,
    pub(super) layers: Vec<LayerWeights>,
    pub(super) kv_scales: Vec<(f32, f32)>,
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
    pub(super) qkvz: Projection,
    /// Rows of in_proj_b, then of in_proj_a.
    pub(super) ba: Projection,
    pub(super) conv: Tensor,
    pub(super) a_log: Tensor,
    pub(super) dt_bias: Tensor,
    pub(super) norm: Tensor,
    pub(super) out: Weight,
}

#[derive(Debug)]
pub(super) struct AttentionWeights {
    /// Rows of q_proj (a head's queries then its gates), then k_proj, then v_proj.
    pub(super) qkv: Projection,
    pub(super) q_norm: Tensor,
    pub(super) k_norm: Tensor,
    pub(super) out: Weight,
}

#[derive(Debug)]
pub(super) struct DenseWeights {
    /// Rows of gate_proj, then of up_proj.
    pub(super) gate_up: Projection,
    pub(super) down: Weight,
}

#[derive(Debug)]
pub(super) enum MlpWeights {
    Dense(DenseWeights),
    Moe(MoeWeights),
}

#[derive(Debug)]
pub(super) struct MoeWeights {
    pub(super) router: Weight,
    pub(super) experts: Experts,
    pub(super) top_k: usize,
    pub(super) inter: usize,
    pub(super) shared: DenseWeights,
    pub(super) shared_gate: Weight,
}

impl Model {
    /// The dimensions.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The types values are kept in.
    pub fn numerics(&self) -> Numerics {
        self.numerics
    }

    /// What the codes of each layer's keys and values are multiplied by where the KV cache holds codes: the checkpoint's own,
    /// or 1.
    pub fn kv_scales(&self) -> &[(f32, f32)] {
        &self.kv_scales
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
