//! A linear layer's weight as it lies on the device: its codes, its scales, and what it asks of its input.
//!
//! | scheme | codes | scales | row scales |
//! |---|---|---|---|
//! | `Plain` | bf16 or f32 `[N, K]` | | |
//! | `Fp8(Tensor, Channel)` | u8 `[N, K]` | | f32 `[N]` |
//! | `Fp8(Block)` | u8 `[N, K]` | f32 `[block rows, ceil(K/128)]` | |
//! | `Nvfp4` | u8 `[N, K/2]` | u8 e4m3 `[N, K/16]` | f32 `[N]`: each row's global |
//!
//! A scale that was published once for a matrix is repeated for its rows, so that rows of several matrices can stand in
//! one weight and each keep its own. Values, in f32 and in this order: FP8 `e4m3(code) * scale`; NVFP4
//! `e2m1(code) * (e4m3(scale) / global)` or `e2m1(code) * (e4m3(scale) * global)` by its [`Global`]. Those are the orders
//! of compressed-tensors (`_dequantize`) and of modelopt (`NVFP4QTensor.dequantize`, `FP8QTensor.dequantize`).

use std::sync::Arc;

use serde::Serialize;

use crate::device::{Device, DeviceSpec};
use crate::error::{Error, Result};
use crate::mem::{End, Tag};
use crate::num::DType;
use crate::ops::quantise::Form;
use crate::ops::scheme::{ActScheme, Global, Grain, Scheme};
use crate::ops::{Cx, cx::ActQuant};
use crate::tensor::{Tensor, byte_size};

/// Rows and columns of an FP8 block, and columns of a group of activations.
pub const BLOCK: usize = 128;
/// Columns that share an NVFP4 scale.
pub const NVFP4_GROUP: usize = 16;

const OP: &str = "weight";

/// The form of a weight `[rows, cols]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LinearSpec {
    /// Output features, N; of all experts, where there are several.
    pub rows: usize,
    /// Input features, K.
    pub cols: usize,
    /// How it is stored.
    pub scheme: Scheme,
    /// How its input is to be quantised.
    pub act: ActScheme,
    /// Rows of one matrix of several stacked of the same size: FP8 blocks start anew with each. `rows` where there is
    /// one, or where every matrix but the last has whole blocks.
    pub segment_rows: usize,
}

/// Bytes of each buffer of a weight, unpadded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Layout {
    /// Codes or floats.
    pub codes: u64,
    /// Scales of blocks or groups.
    pub scales: u64,
    /// Scales of rows.
    pub row_scales: u64,
}

impl Layout {
    /// All of them.
    pub fn bytes(&self) -> u64 {
        self.codes + self.scales + self.row_scales
    }
}

/// Element type and shape of each buffer.
struct Shapes {
    codes: (DType, [usize; 2]),
    scales: Option<(DType, [usize; 2])>,
    row_scales: Option<(DType, [usize; 1])>,
}

impl LinearSpec {
    /// One matrix of floats.
    pub fn plain(rows: usize, cols: usize, dtype: DType) -> LinearSpec {
        LinearSpec { rows, cols, scheme: Scheme::Plain(dtype), act: ActScheme::None, segment_rows: rows }
    }

    /// Rows of blocks above row `row`, which is the first of a block: where its row of an FP8 block grid is.
    pub fn block_row(&self, row: usize) -> usize {
        row / self.segment_rows * self.segment_rows.div_ceil(BLOCK) + row % self.segment_rows / BLOCK
    }

    fn shapes(&self) -> Result<Shapes> {
        let LinearSpec { rows, cols, scheme, act, segment_rows } = *self;
        let err = |what: String| Err(Error::shape(OP, format!("[{rows}, {cols}] {scheme:?}: {what}")));
        if rows == 0 || cols == 0 {
            return err("must not be empty".into());
        }
        if segment_rows == 0 || rows % segment_rows != 0 {
            return err(format!("segments of {segment_rows} rows, must divide the rows"));
        }
        if act == ActScheme::Nvfp4 && !matches!(scheme, Scheme::Nvfp4(_)) {
            return err("only an NVFP4 weight takes an NVFP4 input".into());
        }
        Ok(match scheme {
            Scheme::Plain(dtype @ (DType::F32 | DType::Bf16)) => {
                if act != ActScheme::None {
                    return err(format!("input scheme {act:?}, must be None: the weight is not quantised"));
                }
                Shapes { codes: (dtype, [rows, cols]), scales: None, row_scales: None }
            }
            Scheme::Plain(_) => return err("elements must be f32 or bf16".into()),
            Scheme::Fp8(Grain::Tensor | Grain::Channel) => {
                Shapes { codes: (DType::U8, [rows, cols]), scales: None, row_scales: Some((DType::F32, [rows])) }
            }
            Scheme::Fp8(Grain::Block) => {
                let block_rows = rows / segment_rows * segment_rows.div_ceil(BLOCK);
                Shapes {
                    codes: (DType::U8, [rows, cols]),
                    scales: Some((DType::F32, [block_rows, cols.div_ceil(BLOCK)])),
                    row_scales: None,
                }
            }
            Scheme::Nvfp4(_) if cols % NVFP4_GROUP != 0 => {
                return err(format!("columns must be a multiple of {NVFP4_GROUP}"));
            }
            Scheme::Nvfp4(_) => Shapes {
                codes: (DType::U8, [rows, cols / 2]),
                scales: Some((DType::U8, [rows, cols / NVFP4_GROUP])),
                row_scales: Some((DType::F32, [rows])),
            },
        })
    }
}

/// Bytes of a weight's buffers on a card of this spec. Every card so far keeps them as published, row after row.
/// An error where there can be no such weight.
pub fn layout(_spec: &DeviceSpec, weight: &LinearSpec) -> Result<Layout> {
    let shapes = weight.shapes()?;
    let bytes = |(dtype, shape): (DType, [usize; 2])| byte_size(dtype, &shape);
    Ok(Layout {
        codes: bytes(shapes.codes)?,
        scales: shapes.scales.map_or(Ok(0), bytes)?,
        row_scales: shapes.row_scales.map_or(Ok(0), |(dtype, shape)| byte_size(dtype, &shape))?,
    })
}

/// The scale published for a weight's input, in the sense of [`Verdict`](crate::checkpoint::Verdict): a multiplier for
/// FP8, the global for NVFP4.
#[derive(Debug)]
pub enum InputScale {
    /// None: inputs are not quantised, or by their own magnitudes.
    None,
    /// One.
    One(f32),
    /// f32 `[G]`: the rows are G equal groups (experts), each with an input of its own.
    Each(Tensor),
}

/// A linear layer's weight on a device.
#[derive(Debug)]
pub struct Weight {
    spec: LinearSpec,
    codes: Tensor,
    scales: Option<Tensor>,
    row_scales: Option<Tensor>,
    input: InputScale,
}

impl Weight {
    /// Allocates a weight at the persistent end, every buffer under `tag`; the caller fills it.
    pub fn alloc(device: &Arc<Device>, tag: Tag, spec: LinearSpec, input: InputScale) -> Result<Weight> {
        let shapes = spec.shapes()?;
        let buffer = |dtype: DType, shape: &[usize]| {
            Tensor::new(device.alloc(End::Persistent, tag, byte_size(dtype, shape)?)?, dtype, shape)
        };
        let codes = buffer(shapes.codes.0, &shapes.codes.1)?;
        let scales = shapes.scales.map(|(dtype, shape)| buffer(dtype, &shape)).transpose()?;
        let row_scales = shapes.row_scales.map(|(dtype, shape)| buffer(dtype, &shape)).transpose()?;
        check_input(&spec, &input)?;
        Ok(Weight { spec, codes, scales, row_scales, input })
    }

    /// A matrix of floats, `[N, K]` bf16 or f32.
    pub fn plain(matrix: Tensor) -> Result<Weight> {
        let &[rows, cols] = matrix.shape() else {
            return Err(Error::shape(OP, format!("{:?}, must be [rows, columns]", matrix.shape())));
        };
        let spec = LinearSpec::plain(rows, cols, matrix.dtype());
        spec.shapes()?;
        Ok(Weight { spec, codes: matrix, scales: None, row_scales: None, input: InputScale::None })
    }

    /// Its form.
    pub fn spec(&self) -> &LinearSpec {
        &self.spec
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.spec.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.spec.cols
    }

    /// Bytes of its buffers, unpadded; of its input's scales too where each group has one.
    pub fn bytes(&self) -> u64 {
        let input = if let InputScale::Each(scales) = &self.input { Some(scales) } else { None };
        [Some(&self.codes), self.scales.as_ref(), self.row_scales.as_ref(), input]
            .into_iter()
            .flatten()
            .map(Tensor::bytes)
            .sum()
    }

    /// Codes, or floats.
    pub fn codes(&self) -> &Tensor {
        &self.codes
    }

    /// Codes, or floats, to fill.
    pub fn codes_mut(&mut self) -> &mut Tensor {
        &mut self.codes
    }

    /// Scales of blocks or groups.
    pub fn scales(&self) -> Option<&Tensor> {
        self.scales.as_ref()
    }

    /// Scales of blocks or groups, to fill.
    pub fn scales_mut(&mut self) -> Option<&mut Tensor> {
        self.scales.as_mut()
    }

    /// Scales of rows.
    pub fn row_scales(&self) -> Option<&Tensor> {
        self.row_scales.as_ref()
    }

    /// Scales of rows, to fill.
    pub fn row_scales_mut(&mut self) -> Option<&mut Tensor> {
        self.row_scales.as_mut()
    }

    /// The scale of its input.
    pub fn input(&self) -> &InputScale {
        &self.input
    }

    /// How a call under `cx` quantises this weight's input: as the weight asks, or not at all.
    pub fn act(&self, cx: &Cx) -> ActScheme {
        match cx.numerics.act_quant {
            ActQuant::Checkpoint => self.spec.act,
            ActQuant::Off => ActScheme::None,
        }
    }

    /// As [`Weight::act`], with the scale that is stored; `None` for no quantisation. An error where each group of rows
    /// has an input of its own: that is [`experts`](crate::ops::moe::experts)' case.
    pub fn form(&self, cx: &Cx) -> Result<Option<Form>> {
        let act = self.act(cx);
        let one = || match self.input {
            InputScale::One(scale) => Ok(scale),
            _ => Err(Error::shape(OP, format!("input scheme {act:?} needs one input scale for all rows"))),
        };
        Ok(match act {
            ActScheme::None => None,
            ActScheme::Fp8Tensor => Some(Form::Fp8Tensor(one()?)),
            ActScheme::Fp8Token => Some(Form::Fp8Token),
            ActScheme::Fp8Group => Some(Form::Fp8Group),
            ActScheme::Nvfp4 => Some(Form::Nvfp4(one()?, self.global()?)),
        })
    }

    /// The sense of an NVFP4 weight's globals, its input's among them.
    pub fn global(&self) -> Result<Global> {
        match self.spec.scheme {
            Scheme::Nvfp4(global) => Ok(global),
            other => Err(Error::shape(OP, format!("{other:?} has no global scale"))),
        }
    }
}

/// The input's scale is there exactly where the input scheme stores one.
fn check_input(spec: &LinearSpec, input: &InputScale) -> Result<()> {
    let stored = matches!(spec.act, ActScheme::Fp8Tensor | ActScheme::Nvfp4);
    let fits = match input {
        InputScale::None => !stored,
        InputScale::One(scale) => stored && scale.is_finite() && *scale > 0.0,
        InputScale::Each(scales) => {
            let groups = scales.len();
            stored && scales.dtype() == DType::F32 && groups > 0 && spec.rows.is_multiple_of(groups)
        }
    };
    if fits {
        return Ok(());
    }
    let what = match input {
        InputScale::None => "no input scale".to_owned(),
        InputScale::One(scale) => format!("input scale {scale}"),
        InputScale::Each(scales) => format!("input scales {} {:?}", scales.dtype(), scales.shape()),
    };
    let must = if stored { "one positive f32, or one for each equal group of rows" } else { "none" };
    Err(Error::shape(OP, format!("input scheme {:?} of {} rows with {what}, must be {must}", spec.act, spec.rows)))
}
