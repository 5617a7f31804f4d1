//! Codes and scales of a checked checkpoint, their values checked as they are read.
//!
//! May live here: reading a linear module's parts by its scheme. Headers were checked when the checkpoint was opened, so
//! that opening reads no data; a value that no scheme allows is an error of the read that meets it, naming module and
//! place. May not: tensors of a device (source.rs).

use std::ops::Range;

use half::bf16;

use super::parts::Part;
use rayon::prelude::*;

use crate::checkpoint::account::{Entry, k_scale, v_scale};
use crate::checkpoint::header::Dtype;
use crate::checkpoint::json::shown;
use crate::checkpoint::{Checkpoint, Module, RowScale, Verdict};
use crate::error::{Error, Result};
use crate::ops::scheme::{ActScheme, Global, Grain, Scheme};

const OP: &str = "checkpoint read";

impl Checkpoint {
    /// How a linear module is stored and how its input is to be quantised, with the input's stored scale, which is read
    /// and checked here: 2 or 4 bytes.
    ///
    /// # Errors
    /// [`Error::Shape`] for a name that is no linear module; [`Error::Checkpoint`] for a scale that is not finite and
    /// positive.
    pub fn verdict(&self, module: &str) -> Result<Verdict> {
        let m = self.linear(module)?;
        let part = match (m.act, m.scheme) {
            (ActScheme::Fp8Tensor, _) | (ActScheme::Nvfp4, Scheme::Nvfp4(Global::Multiplies)) => Some(Part::InputScale),
            (ActScheme::Nvfp4, _) => Some(Part::InputGlobal),
            (ActScheme::None | ActScheme::Fp8Token | ActScheme::Fp8Group, _) => None,
        };
        let input_scale = match part {
            Some(part) => Some(self.scalar(module, part)?),
            None => None,
        };
        Ok(Verdict { scheme: m.scheme, act: m.act, input_scale })
    }

    /// The scales of a quantised module's rows: FP8 by tensor or channel, or the NVFP4 global as published.
    ///
    /// # Errors
    /// [`Error::Shape`] for a module that has none; [`Error::Checkpoint`] for a scale that is not finite and positive.
    pub fn row_scale(&self, module: &str) -> Result<RowScale> {
        match self.linear(module)?.scheme {
            Scheme::Fp8(Grain::Tensor) => self.scalar(module, Part::Scale).map(RowScale::One),
            Scheme::Fp8(Grain::Channel) => self.floats(module, Part::Scale).map(RowScale::Each),
            Scheme::Nvfp4(Global::Divides) => self.scalar(module, Part::Global).map(RowScale::One),
            Scheme::Nvfp4(Global::Multiplies) => self.scalar(module, Part::Scale2).map(RowScale::One),
            Scheme::Fp8(Grain::Block) | Scheme::Plain(_) => {
                Err(Error::shape(OP, format!("module {module} has no scales of whole rows")))
            }
        }
    }

    /// Rows of a quantised module's codes: bytes `[rows, K]` for FP8, `[rows, K/2]` for NVFP4, the low nibble first.
    ///
    /// # Errors
    /// As [`Checkpoint::read`], and [`Error::Checkpoint`] for an e4m3 code that is NaN (0x7F, 0xFF).
    pub fn read_codes(&self, module: &str, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
        let m = self.linear(module)?;
        let part = match m.scheme {
            Scheme::Fp8(_) | Scheme::Nvfp4(Global::Multiplies) => Part::Weight,
            Scheme::Nvfp4(Global::Divides) => Part::Packed,
            Scheme::Plain(_) => {
                return Err(Error::shape(OP, format!("module {module} is not quantised, it has no codes")));
            }
        };
        self.read(&format!("{module}.{part}"), rows.clone(), out)?;
        // Any two nibbles are two e2m1 values.
        if matches!(m.scheme, Scheme::Fp8(_))
            && let Some(at) = find(out, |b| b & 0x7F == 0x7F)
        {
            let (row, col) = (rows.start + at / m.cols, at % m.cols);
            let what = format!(
                "code {:#04x} at row {row}, column {col} is NaN in e4m3; a code must be finite: the file is damaged",
                out[at]
            );
            return Err(self.wrong(module, part, &what));
        }
        Ok(())
    }

    /// Rows of an NVFP4 module's block scales: e4m3 codes `[rows, K/16]`.
    ///
    /// # Errors
    /// As [`Checkpoint::read`], and [`Error::Checkpoint`] for a scale that is NaN, negative or zero.
    pub fn read_group_scales(&self, module: &str, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
        let m = self.linear(module)?;
        if !matches!(m.scheme, Scheme::Nvfp4(_)) {
            return Err(Error::shape(OP, format!("module {module} is not NVFP4, it has no scales of 16")));
        }
        self.read(&format!("{module}.{}", Part::Scale), rows.clone(), out)?;
        if let Some(at) = find(out, |b| b == 0 || b >= 0x7F) {
            let groups = m.cols / 16;
            let what = format!(
                "code {:#04x} at row {}, group {} is {} in e4m3; a scale must be finite and above 0",
                out[at],
                rows.start + at / groups,
                at % groups,
                match out[at] {
                    0x7F | 0xFF => "NaN",
                    0 | 0x80 => "zero",
                    _ => "negative",
                }
            );
            return Err(self.wrong(module, Part::Scale, &what));
        }
        Ok(())
    }

    /// An FP8 module's grid of block scales, `[ceil(N/128) * ceil(K/128)]`, row by row.
    ///
    /// # Errors
    /// As [`Checkpoint::read`], and [`Error::Checkpoint`] for a scale that is not finite and positive.
    pub fn block_scales(&self, module: &str) -> Result<Vec<f32>> {
        if self.linear(module)?.scheme != Scheme::Fp8(Grain::Block) {
            return Err(Error::shape(OP, format!("module {module} is not FP8 by block, it has no grid of scales")));
        }
        let part = if self.part(module, Part::Scale).is_some() { Part::Scale } else { Part::ScaleInv };
        self.floats(module, part)
    }

    /// The stored scales of K and V of a layer's FP8 cache, each a multiplier of its codes; `None` where none are stored.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for a scale that is not finite and positive.
    pub fn kv_scales(&self, layer: usize) -> Result<Option<(f32, f32)>> {
        let one = |name: String| -> Result<Option<f32>> {
            match self.entry(&name) {
                Some(entry) => {
                    let values = self.values(&name, entry, &format!("module layers.{layer}.self_attn"))?;
                    Ok(values.first().copied())
                }
                None => Ok(None),
            }
        };
        Ok(one(k_scale(layer))?.zip(one(v_scale(layer))?))
    }

    fn linear(&self, module: &str) -> Result<&Module> {
        self.module(module)
            .ok_or_else(|| Error::shape(OP, format!("\"{}\" is not a linear module of this checkpoint", shown(module))))
    }

    fn part(&self, module: &str, part: Part) -> Option<&Entry> {
        self.entry(&format!("{module}.{part}"))
    }

    fn scalar(&self, module: &str, part: Part) -> Result<f32> {
        let values = self.floats(module, part)?;
        values.first().copied().ok_or_else(|| self.wrong(module, part, "no elements; must be one"))
    }

    /// All of a float part, each finite and positive.
    fn floats(&self, module: &str, part: Part) -> Result<Vec<f32>> {
        let name = format!("{module}.{part}");
        let Some(entry) = self.entry(&name) else {
            return Err(Error::shape(OP, format!("module {module} has no {part}")));
        };
        self.values(&name, entry, &format!("module {module}"))
    }

    fn values(&self, name: &str, entry: &Entry, of: &str) -> Result<Vec<f32>> {
        let mut bytes = vec![0; entry.bytes() as usize];
        self.read(name, 0..entry.rows(), &mut bytes)?;
        let values: Vec<f32> = match entry.dtype {
            Dtype::Bf16 => bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            _ => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        };
        match values.iter().position(|v| !(v.is_finite() && *v > 0.0)) {
            None => Ok(values),
            Some(at) => {
                let what = format!(
                    "{of}: tensor \"{}\": element {at} of {:?} is {}; a scale must be finite and above 0",
                    shown(self.disk_name(entry)),
                    entry.shape,
                    values[at]
                );
                Err(Error::checkpoint(self.file_of(entry), what))
            }
        }
    }

    fn wrong(&self, module: &str, part: Part, what: &str) -> Error {
        match self.part(module, part) {
            Some(entry) => {
                let name = shown(self.disk_name(entry));
                Error::checkpoint(self.file_of(entry), format!("module {module}: tensor \"{name}\": {what}"))
            }
            None => Error::shape(OP, format!("module {module} has no {part}")),
        }
    }
}

/// The first byte that `is_wrong`. Whole stretches are looked through without a branch per byte: most have none.
fn find(bytes: &[u8], is_wrong: impl Fn(u8) -> bool + Sync) -> Option<usize> {
    const STRETCH: usize = 1 << 17;
    let any = |c: &[u8]| c.iter().fold(false, |any, b| any | is_wrong(*b));
    let at = bytes.par_chunks(STRETCH).position_first(any)? * STRETCH;
    bytes[at..].iter().position(|b| is_wrong(*b)).map(|i| at + i)
}
