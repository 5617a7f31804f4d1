//! One layer's mixer and MLP over the rows of a step.

use crate::checkpoint::Geometry;
use crate::error::{Error, Result};
use crate::mem::Layer;
use crate::model::weights::{
    AttentionWeights, DenseWeights, GdnWeights, LayerWeights, MixerWeights, MlpWeights, Model, MoeWeights,
};
use crate::ops::kv_write::KvPages;
use crate::ops::linear::Input;
use crate::ops::{
    Batch, Cx, activation, attention, conv1d, gdn_decode, gdn_prefill, kv_write, linear, moe, norm, rope,
};
use crate::tensor::Tensor;

impl Model {
    /// Whether the mixer reads its input as codes by token alone.
    pub(super) fn mixer_takes_codes(cx: &Cx, layer: &LayerWeights) -> Result<bool> {
        match &layer.mixer {
            MixerWeights::Attention(w) => w.qkv.takes_token_codes(cx),
            // Beside qkvz the gates' weights read the rows themselves.
            MixerWeights::Gdn(_) => Ok(false),
        }
    }

    /// Whether the MLP reads its input as codes by token alone.
    pub(super) fn mlp_takes_codes(cx: &Cx, layer: &LayerWeights) -> Result<bool> {
        match &layer.mlp {
            MlpWeights::Dense(w) => w.gate_up.takes_token_codes(cx),
            // The router reads the rows themselves.
            MlpWeights::Moe(_) => Ok(false),
        }
    }

    /// The mixer of one layer: normed rows `[T, H]` in, `[T, H]` to add to the residual out. `state` is the layer's pair
    /// of state tensors.
    pub(super) fn mixer(
        &self,
        cx: Cx,
        layer: &LayerWeights,
        x: Input,
        batch: &Batch,
        state: &mut LayerState,
    ) -> Result<Tensor> {
        match (&layer.mixer, state) {
            (MixerWeights::Gdn(w), LayerState::Gdn { conv, recurrent }) => {
                let x = rows(x)?;
                self.gdn(&cx.at(Layer::Gdn), w, x, batch, conv, recurrent)
            }
            (MixerWeights::Attention(w), LayerState::Attention(kv)) => {
                self.attention(&cx.at(Layer::Attention), w, x, batch, kv)
            }
            _ => unreachable!("state is declared from the same list of layers"),
        }
    }

    fn gdn(
        &self,
        cx: &Cx,
        w: &GdnWeights,
        x: Tensor,
        batch: &Batch,
        conv_state: &mut Tensor,
        recurrent: &mut Tensor,
    ) -> Result<Tensor> {
        let Geometry { gdn, eps, .. } = &self.geometry;
        let (channels, values) = (gdn.conv_channels(), gdn.value_channels());
        let qkvz = linear::project(cx, x.view(), &w.qkvz, "qkvz")?;
        let ba = linear::project(cx, x.view(), &w.ba, "ba")?;
        drop(x);
        let conv = conv1d::causal(cx, qkvz.columns(0, channels), &w.conv, conv_state, *batch)?;
        let gates = activation::gdn_gates(cx, &ba, &w.a_log, &w.dt_bias)?;
        drop(ba);
        let mut out = cx.activation("gdn", "out", &[conv.rows(), values])?;
        gdn_prefill::chunked(cx, &conv, &gates, recurrent, self.gdn_dims(), *batch, &mut out)?;
        gdn_decode::recurrent(cx, &conv, &gates, recurrent, self.gdn_dims(), *batch, &mut out)?;
        drop(conv);
        drop(gates);
        let y = norm::gated(cx, &out, qkvz.columns(channels, values), &w.norm, *eps, self.gate())?;
        drop(out);
        drop(qkvz);
        linear::linear(cx, y.view(), &w.out, "out_proj")
    }

    fn attention(&self, cx: &Cx, w: &AttentionWeights, x: Input, batch: &Batch, kv: &mut KvPages) -> Result<Tensor> {
        let dims = self.attn_dims();
        let mut qkv = linear::project_input(cx, &x, &w.qkv, "qkv")?;
        drop(x);
        rope::qk_norm_rope(
            cx,
            &mut qkv,
            &w.q_norm,
            &w.k_norm,
            &self.inv_freq,
            self.attention_factor,
            self.geometry.eps,
            dims,
            batch,
        )?;
        kv_write::write(cx, &qkv, dims, kv, batch)?;
        let mut out = attention::attend(cx, &qkv, kv, dims, batch)?;
        activation::sigmoid_mul(cx, &mut out, &qkv, dims)?;
        drop(qkv);
        linear::linear(cx, out.view(), &w.out, "o_proj")
    }

    /// The MLP of one layer: normed rows in, `[T, H]` to add to the residual out.
    pub(super) fn mlp(cx: Cx, layer: &LayerWeights, x: Input) -> Result<Tensor> {
        match &layer.mlp {
            MlpWeights::Dense(w) => dense(&cx.at(Layer::Mlp), w, x),
            MlpWeights::Moe(w) => experts(&cx.at(Layer::Moe), w, rows(x)?),
        }
    }
}

/// The rows themselves, for a layer that asked for them.
fn rows(x: Input) -> Result<Tensor> {
    match x {
        Input::Rows(x) => Ok(x),
        Input::Codes(_) => Err(Error::shape("forward", "a layer that reads rows was given codes")),
    }
}

fn dense(cx: &Cx, w: &DenseWeights, x: Input) -> Result<Tensor> {
    let mut gate_up = linear::project_input(cx, &x, &w.gate_up, "gate_up")?;
    drop(x);
    activation::silu_mul(cx, &mut gate_up)?;
    linear::linear(cx, gate_up.columns(0, gate_up.cols() / 2), &w.down, "down_proj")
}

fn experts(cx: &Cx, w: &MoeWeights, x: Tensor) -> Result<Tensor> {
    let logits = linear::linear(cx, x.view(), &w.router, "router")?;
    let routing = moe::route(cx, &logits, w.top_k)?;
    drop(logits);
    if let Some(log) = cx.routes.filter(|_| cx.device.has_data()) {
        log.note(&routing.ids, w.experts.slots.len())?;
    }
    let mut out = moe::experts(cx, &x, &routing, &w.experts, w.inter)?;
    drop(routing);
    let gate = linear::linear(cx, x.view(), &w.shared_gate, "shared_gate")?;
    let shared = dense(cx, &w.shared, Input::Rows(x))?;
    moe::combine_shared(cx, &mut out, &shared, &gate)?;
    Ok(out)
}

/// A layer's state tensors.
#[derive(Debug)]
pub enum LayerState {
    /// K and V pages.
    Attention(KvPages),
    /// The conv window and the recurrent state.
    Gdn {
        /// `[slots, C, W - 1]`.
        conv: Tensor,
        /// `[slots, Hv, dk, dv]`.
        recurrent: Tensor,
    },
}
