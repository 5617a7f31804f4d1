//! How a linear layer is stored and how its input is quantised: the two halves of a verdict. Plain values.

use serde::Serialize;

use crate::num::DType;

/// How a weight matrix `[N, K]` is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scheme {
    /// As floats.
    Plain(DType),
    /// e4m3 codes times f32 scales.
    Fp8(Grain),
    /// Pairs of e2m1 codes in a byte, the low nibble first, with an e4m3 scale for each 16 along K and an f32 global.
    Nvfp4(Global),
}

/// What one FP8 weight scale covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Grain {
    /// The whole matrix.
    Tensor,
    /// One row (an output channel).
    Channel,
    /// 128 rows by 128 columns, the last block of either partial.
    Block,
}

/// What an NVFP4 global scale does: `weight_scale_2` of modelopt multiplies, `weight_global_scale` of compressed-tensors
/// divides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Global {
    /// `e2m1 * (scale * global)`.
    Multiplies,
    /// `e2m1 * (scale / global)`.
    Divides,
}

/// How the checkpoint asks for the input of a linear layer to be quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ActScheme {
    /// Not at all.
    None,
    /// To e4m3 by one scale stored with the weight.
    Fp8Tensor,
    /// To e4m3 by a scale per row, from the row's own largest magnitude.
    Fp8Token,
    /// To e4m3 by a scale per row and 128 columns.
    Fp8Group,
    /// To e2m1 by an e4m3 scale for each 16 columns under a global stored with the weight.
    Nvfp4,
}
