//! Per-head RMS norm of queries and keys and their rotary position embedding, in place on the fused projection.
//!
//! Norm: `y = x * rsqrt(mean(x²) + eps) * (1 + w)` over a head. Rotation, of the first `rotary_dim` columns of a head, as
//! pairs `(i, i + rotary_dim/2)` (the half split of GPT-NeoX): by the angle `position * inv_freq[i]`, a product in f32 as
//! the published models compute it, whose sine and cosine are then exact to f32. Gates and values are not touched. One
//! rounding, to the type of `qkv`.

use std::f64::consts::PI;

use crate::device::Arm;
use crate::error::{Error, Result};
use crate::num::DType;
use crate::ops::attention::AttnDims;
use crate::ops::cost::{Cost, Unit};
use crate::ops::{Batch, Cx, check, launch, reference};
use crate::tensor::Tensor;

const OP: &str = "qk_norm_rope";

/// The frequencies of a rotary embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// The base of the frequencies.
    pub theta: f64,
    /// Rotated dimensions of a head, even.
    pub rotary_dim: usize,
    /// The extension beyond the trained context, if any.
    pub yarn: Option<Yarn>,
}

/// YaRN's parameters (Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// How much longer than the trained context.
    pub factor: f64,
    /// The trained context, in tokens.
    pub original_max_position: usize,
    /// What sines and cosines are multiplied by; `0.1 ln(factor) + 1` if not given.
    pub attention_factor: Option<f64>,
    /// Rotations over the trained context above which a dimension keeps its frequency; 32 unless the config says.
    pub beta_fast: f64,
    /// Rotations below which a dimension's frequency is divided by `factor`; 1 unless the config says.
    pub beta_slow: f64,
    /// Whether the two bounds of the ramp are widened to whole dimensions; true unless the config says.
    pub truncate: bool,
}

impl Yarn {
    /// YaRN with the usual bounds.
    pub fn new(factor: f64, original_max_position: usize) -> Yarn {
        Yarn { factor, original_max_position, attention_factor: None, beta_fast: 32.0, beta_slow: 1.0, truncate: true }
    }
}

/// The `rotary_dim / 2` angles per position, in radians, and the factor on sines and cosines.
///
/// `theta^(-2i/rotary_dim)`; under YaRN a blend of it and of it divided by `factor`, by a linear ramp between the dimensions
/// that turn `beta_fast` and `beta_slow` times over the trained context (formula: the YaRN paper, section 3.2, with the
/// bounds of transformers' `_compute_yarn_parameters`). In f64, rounded once. An error where a parameter is out of range.
pub fn inv_freq(rope: &Rope) -> Result<(Vec<f32>, f32)> {
    let err = |what: String| Err(Error::shape("inv_freq", what));
    let Rope { theta, rotary_dim, yarn } = *rope;
    if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) || !theta.is_finite() || theta <= 1.0 {
        return err(format!(
            "theta {theta}, rotary_dim {rotary_dim}; must be finite and above 1, and even and above 0"
        ));
    }
    let half = rotary_dim / 2;
    let dim = rotary_dim as f64;
    let plain = |i: usize| theta.powf(-2.0 * i as f64 / dim);
    let Some(yarn) = yarn else {
        return Ok(((0..half).map(|i| plain(i) as f32).collect(), 1.0));
    };
    let Yarn { factor, original_max_position: trained, beta_fast, beta_slow, .. } = yarn;
    let ordered = beta_slow > 0.0 && beta_fast >= beta_slow && beta_fast.is_finite();
    if !factor.is_finite() || factor < 1.0 || trained == 0 || !ordered {
        return err(format!(
            "yarn factor {factor}, trained context {trained}, beta_fast {beta_fast}, beta_slow {beta_slow}; \
             must be 1 or more, 1 or more, and finite with beta_fast >= beta_slow > 0"
        ));
    }
    let attention_factor = yarn.attention_factor.unwrap_or(0.1 * factor.ln() + 1.0);
    if !attention_factor.is_finite() || attention_factor <= 0.0 {
        return err(format!("yarn attention_factor {attention_factor}; must be finite and above 0"));
    }
    // The (fractional) dimension pair that turns `rotations` times over the trained context.
    let pair = |rotations: f64| dim * (trained as f64 / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (pair(beta_fast), pair(beta_slow));
    if yarn.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    low = low.max(0.0);
    high = high.min(dim - 1.0);
    let width = if high - low == 0.0 { 0.001 } else { high - low };
    let blend = |i: usize| {
        let slow = ((i as f64 - low) / width).clamp(0.0, 1.0);
        plain(i) * (slow / factor + (1.0 - slow))
    };
    Ok(((0..half).map(|i| blend(i) as f32).collect(), attention_factor as f32))
}

/// What a launch takes beside the rows.
pub(crate) struct Operands<'a> {
    pub(crate) q_norm: &'a Tensor,
    pub(crate) k_norm: &'a Tensor,
    pub(crate) inv_freq: &'a Tensor,
    pub(crate) attention_factor: f32,
    pub(crate) eps: f32,
}

/// Norms and rotates the query and key heads of the fused `qkv` (see [`AttnDims`]) in place, at the step's positions.
/// `q_norm` and `k_norm` are f32 `[head_dim]`, `inv_freq` f32 `[rotary_dim / 2]`; sines and cosines are multiplied by
/// `attention_factor`. An error where shapes or types disagree.
pub fn qk_norm_rope(
    cx: &Cx,
    qkv: &mut Tensor,
    q_norm: &Tensor,
    k_norm: &Tensor,
    inv_freq: &Tensor,
    attention_factor: f32,
    eps: f32,
    dims: AttnDims,
    batch: &Batch,
) -> Result<()> {
    dims.check_rows(OP, qkv, batch)?;
    check::tensor(OP, "q_norm", q_norm, DType::F32, &[dims.head_dim])?;
    check::tensor(OP, "k_norm", k_norm, DType::F32, &[dims.head_dim])?;
    check::tensor(OP, "inv_freq", inv_freq, DType::F32, &[dims.rotary_dim / 2])?;
    cx.note(OP, cost(batch.tokens(), dims, qkv.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => reference::rope::qk_norm_rope(
            qkv,
            q_norm,
            k_norm,
            inv_freq,
            attention_factor,
            eps,
            dims,
            &batch.inputs.positions,
        ),
        Arm::Cuda(cuda) => {
            let operands = Operands { q_norm, k_norm, inv_freq, attention_factor, eps };
            launch::rope::qk_norm_rope(cuda, qkv, &operands, dims, &batch.inputs.positions)
        }
        Arm::Plan => Ok(()),
    }
}

/// Queries and keys read and written once. Operations: a square and sum, two products and, of the rotated columns, three
/// more per element.
pub fn cost(tokens: usize, dims: AttnDims, activations: DType) -> Cost {
    let heads = (tokens * (dims.heads + dims.kv_heads)) as u64;
    let (d, rotary) = (dims.head_dim as u64, dims.rotary_dim as u64);
    let weights = (2 * d + rotary / 2) * DType::F32.bytes();
    Cost {
        flops: heads * (4 * d + 3 * rotary),
        resident_bytes: weights,
        activation_bytes: 2 * heads * d * activations.bytes() + tokens as u64 * DType::I32.bytes(),
        unit: Unit::F32,
    }
}
