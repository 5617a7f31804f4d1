//! What a source says about one linear module, and what its scales are: the contract between a [`Source`] and the model's
//! loader.
//!
//! A module is named canonically and without `.weight`: `layers.3.mlp.experts.5.gate_proj`, `lm_head`. Its scheme alone
//! says which calls follow:
//!
//! | scheme | calls |
//! |---|---|
//! | `Plain` | [`Source::fill`] of `module.weight` into bf16 or f32 `[N, K]` |
//! | `Fp8(Tensor, Channel)` | [`Source::fill_codes`] into u8 `[N, K]`, [`Source::row_scale`] |
//! | `Fp8(Block)` | [`Source::fill_codes`] into u8 `[N, K]`, [`Source::fill_scales`] into f32 `[ceil(N/128), ceil(K/128)]` |
//! | `Nvfp4` | [`Source::fill_codes`] into u8 `[N, K/2]`, [`Source::fill_scales`] into u8 `[N, K/16]` (e4m3 codes), [`Source::row_scale`] |
//!
//! Destinations are rows of larger tensors: a fused projection, all experts of a layer. Codes and scales arrive as
//! published, their values checked (finite, positive scales; no NaN code); scales published in bf16 arrive as the same
//! values in f32.
//!
//! [`Source`]: super::Source
//! [`Source::fill`]: super::Source::fill
//! [`Source::fill_codes`]: super::Source::fill_codes
//! [`Source::fill_scales`]: super::Source::fill_scales
//! [`Source::row_scale`]: super::Source::row_scale

use serde::Serialize;

use crate::error::{Error, Result};
use crate::ops::scheme::{ActScheme, Scheme};

/// How one linear module is stored, and how its input is to be quantised.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Verdict {
    /// How the weight is stored. `Plain` holds the published float type.
    pub scheme: Scheme,
    /// How the checkpoint asks for the input to be quantised.
    pub act: ActScheme,
    /// The scale stored for the input, as published; finite and positive. Present exactly for
    /// [`ActScheme::Fp8Tensor`], where it multiplies a code (`input_scale`), and [`ActScheme::Nvfp4`], where it is the
    /// global in the sense of the weight's own [`Global`](crate::ops::scheme::Global): modelopt's `input_scale`
    /// multiplies, compressed-tensors' `input_global_scale` divides. Known on every device, the plan's too: whether
    /// parts fuse depends on it.
    pub input_scale: Option<f32>,
}

/// The f32 scale or scales of a module that hold for whole rows.
#[derive(Debug, Clone, PartialEq)]
pub enum RowScale {
    /// One for all rows: an FP8 scale per tensor, an NVFP4 global as published.
    One(f32),
    /// One per row, `[N]`: an FP8 scale per channel.
    Each(Vec<f32>),
}

impl RowScale {
    /// Writes the scale of each row of `rows`; an error where there is not one or one for each.
    pub fn write(&self, module: &str, rows: &mut [f32]) -> Result<()> {
        match self {
            RowScale::One(scale) => rows.fill(*scale),
            RowScale::Each(scales) if scales.len() == rows.len() => rows.copy_from_slice(scales),
            RowScale::Each(scales) => {
                return Err(Error::shape(
                    "load",
                    format!("{module}: {} row scales for {} rows, must be 1 or one each", scales.len(), rows.len()),
                ));
            }
        }
        Ok(())
    }
}
