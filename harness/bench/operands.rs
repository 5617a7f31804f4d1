//! What kernels are timed on: seeded values on the device, none of them zero for long, and the same values again on the
//! reference device for the rows that are checked.

use std::cell::Cell;
use std::ops::Range;

use highwater::device::Arm;
use highwater::error::Result;
use highwater::mem::{End, Tag};
use highwater::num::philox::stream_key;
use highwater::num::{DType, bf16};
use highwater::ops::batch::{PAGE_TOKENS, Placement};
use highwater::ops::fill::{self, Code};
use highwater::ops::scheme::{ActScheme, Grain, Scheme};
use highwater::ops::weight::{InputScale, LinearSpec, Weight};
use highwater::ops::{Batch, Cx, Limits, Span, StepInputs};
use highwater::tensor::{Tensor, byte_size};

/// The stored scale of an input, where there is one: the values are near-normal, so few saturate.
pub(super) const FP8_INPUT_SCALE: f32 = 1.0 / 64.0;
pub(super) const NVFP4_INPUT_GLOBAL: f32 = 256.0;

/// Makes operands, each of another stream of values.
#[derive(Debug)]
pub(super) struct Maker<'a> {
    pub(super) cx: Cx<'a>,
    streams: Cell<u64>,
}

impl<'a> Maker<'a> {
    pub(super) fn new(cx: Cx<'a>) -> Maker<'a> {
        Maker { cx, streams: Cell::new(0) }
    }

    fn key(&self) -> [u32; 2] {
        let stream = self.streams.get();
        self.streams.set(stream + 1);
        stream_key(stream, "bench")
    }

    /// A tensor at the persistent end, unset.
    pub(super) fn empty(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let tag = Tag::new(self.cx.layer, "bench", "operand");
        let buffer = self.cx.device.alloc(End::Persistent, tag, byte_size(dtype, shape)?)?;
        Tensor::new(buffer, dtype, shape)
    }

    /// Near-normal values; of u8, e4m3 codes.
    pub(super) fn normal(&self, dtype: DType, shape: &[usize], mean: f32, std: f32) -> Result<Tensor> {
        let mut tensor = self.empty(dtype, shape)?;
        let rows = 0..tensor.rows();
        match dtype {
            DType::U8 => fill::codes(&self.cx, &mut tensor, rows, self.key(), Code::E4m3)?,
            _ => fill::normal(&self.cx, &mut tensor, rows, self.key(), 0, mean, std)?,
        }
        Ok(tensor)
    }

    /// Activations around 0.
    pub(super) fn activations(&self, shape: &[usize]) -> Result<Tensor> {
        self.normal(self.cx.numerics.activations, shape, 0.0, 1.0)
    }

    /// Log-decays of a delta rule, between log 0.5 and 0.
    pub(super) fn decays(&self, shape: &[usize]) -> Result<Tensor> {
        let mut tensor = self.empty(DType::F32, shape)?;
        let rows = 0..tensor.rows();
        fill::log_uniform(&self.cx, &mut tensor, rows, self.key(), 0, 0.5, 1.0)?;
        Ok(tensor)
    }

    /// Integers.
    pub(super) fn ints(&self, values: &[i32]) -> Result<Tensor> {
        let mut tensor = self.empty(DType::I32, &[values.len()])?;
        tensor.write(0, values)?;
        Ok(tensor)
    }

    /// A weight whose values have a mean square of about 1 / columns.
    pub(super) fn weight(&self, spec: LinearSpec, input: InputScale) -> Result<Weight> {
        let tag = Tag::new(self.cx.layer, "bench", "weight");
        let mut weight = Weight::alloc(self.cx.device, tag, spec, input)?;
        let cols = spec.cols as f32;
        // Root mean squares of codes, and of NVFP4's codes times scales: see checkpoint::seeded.
        let exponent = |rms: f32| -(rms * cols.sqrt()).log2().round() as i32;
        let codes = weight.codes_mut();
        let all = 0..codes.rows();
        match spec.scheme {
            Scheme::Plain(_) => fill::normal(&self.cx, codes, all, self.key(), 0, 0.0, cols.sqrt().recip())?,
            Scheme::Fp8(_) => fill::codes(&self.cx, codes, all, self.key(), Code::E4m3)?,
            Scheme::Nvfp4(_) => fill::codes(&self.cx, codes, all, self.key(), Code::E2m1)?,
        }
        if let Some(scales) = weight.scales_mut() {
            let all = 0..scales.rows();
            match spec.scheme {
                Scheme::Nvfp4(_) => fill::codes(&self.cx, scales, all, self.key(), Code::ScaleE4m3)?,
                _ => fill::scales(&self.cx, scales, all, self.key(), exponent(74.0))?,
            }
        }
        if let Some(rows) = weight.row_scales_mut() {
            let all = 0..rows.rows();
            match spec.scheme {
                Scheme::Fp8(Grain::Tensor) => fill::constant(&self.cx, rows, all, 2f32.powi(exponent(74.0)))?,
                Scheme::Nvfp4(highwater::ops::scheme::Global::Divides) => {
                    fill::constant(&self.cx, rows, all, 2f32.powi(-exponent(668.0)))?;
                }
                Scheme::Nvfp4(_) => fill::constant(&self.cx, rows, all, 2f32.powi(exponent(668.0)))?,
                _ => fill::scales(&self.cx, rows, all, self.key(), exponent(74.0))?,
            }
        }
        Ok(weight)
    }

    /// Steps of `sequences` (context, rows) each, one for each copy: no two share a page or a slot. With the number of
    /// pages and slots that takes.
    pub(super) fn steps(&self, copies: usize, sequences: &[(usize, usize)], decodes: usize) -> Result<Steps> {
        let (mut pages, mut slots) = (0, 0);
        let uploaded = (0..copies).map(|_| self.step(sequences, decodes, &mut pages, &mut slots));
        let uploaded = uploaded.collect::<Result<Vec<_>>>()?;
        Ok(Steps { uploaded, pages: pages as usize, slots: slots as usize })
    }

    fn step(&self, sequences: &[(usize, usize)], decodes: usize, pages: &mut i32, slots: &mut i32) -> Result<Step> {
        let mut start = 0;
        let mut spans = Vec::with_capacity(sequences.len());
        let mut places = Vec::with_capacity(sequences.len());
        for &(context, len) in sequences {
            spans.push(Span { start, len, context });
            start += len;
            let first = *pages;
            *pages += (context + len).div_ceil(PAGE_TOKENS) as i32;
            places.push(Placement { slot_in: *slots, slot_out: *slots, pages: (first..*pages).collect() });
            *slots += 1;
        }
        let context = sequences.iter().map(|(context, len)| context + len).max().unwrap_or(1);
        let mut inputs = StepInputs::new(self.cx.device, Limits { step_tokens: start, batch: spans.len(), context })?;
        inputs.upload(&spans, &places, &vec![0; start], &[])?;
        Ok(Step { spans, decodes, inputs })
    }
}

/// The scale of an input that `act` stores, if any.
pub(super) fn input_scale(act: ActScheme) -> InputScale {
    match act {
        ActScheme::Fp8Tensor => InputScale::One(FP8_INPUT_SCALE),
        ActScheme::Nvfp4 => InputScale::One(NVFP4_INPUT_GLOBAL),
        ActScheme::None | ActScheme::Fp8Token | ActScheme::Fp8Group => InputScale::None,
    }
}

/// Uploaded steps, and what they need together.
#[derive(Debug)]
pub(super) struct Steps {
    uploaded: Vec<Step>,
    pub(super) pages: usize,
    pub(super) slots: usize,
}

#[derive(Debug)]
struct Step {
    spans: Vec<Span>,
    decodes: usize,
    inputs: StepInputs,
}

impl Steps {
    pub(super) fn batch(&self, copy: usize) -> Batch<'_> {
        let Step { spans, decodes, inputs } = &self.uploaded[copy];
        Batch { spans, decodes: *decodes, inputs }
    }
}

/// Rows of a tensor, again on the device of `cx`.
pub(super) fn rows(cx: &Cx, from: &Tensor, rows: Range<usize>) -> Result<Tensor> {
    let mut shape = from.shape().to_vec();
    shape[0] = rows.len();
    let row = from.cols() * from.dtype().bytes() as usize;
    let bytes = from.read_range::<u8>(rows.start * row, rows.len() * row)?;
    let tag = Tag::new(cx.layer, "bench", "checked");
    let mut to =
        Tensor::new(cx.device.alloc(End::Persistent, tag, byte_size(from.dtype(), &shape)?)?, from.dtype(), &shape)?;
    to.write(0, &bytes)?;
    Ok(to)
}

/// All of it.
pub(super) fn whole(cx: &Cx, from: &Tensor) -> Result<Tensor> {
    rows(cx, from, 0..from.rows())
}

/// The first rows of a weight, again on the device of `cx`; of blocks, whole ones.
pub(super) fn part(cx: &Cx, from: &Weight, count: usize) -> Result<Weight> {
    gathered(cx, from, &[0], count)
}

/// The `matrices` of `from`, of `rows` rows each, one after the other on the device of `cx`.
pub(super) fn gathered(cx: &Cx, from: &Weight, matrices: &[usize], rows: usize) -> Result<Weight> {
    let (spec, count) = (*from.spec(), matrices.len() * rows);
    let input = match from.input() {
        InputScale::One(scale) => InputScale::One(*scale),
        InputScale::None => InputScale::None,
        InputScale::Each(scales) => InputScale::Each(whole(cx, scales)?),
    };
    let tag = Tag::new(cx.layer, "bench", "checked");
    let segment_rows = if count % spec.segment_rows == 0 { spec.segment_rows } else { count };
    let mut to = Weight::alloc(cx.device, tag, LinearSpec { rows: count, segment_rows, ..spec }, input)?;
    let copy = |from: Option<&Tensor>, to: Option<&mut Tensor>| -> Result<()> {
        let (Some(from), Some(to)) = (from, to) else { return Ok(()) };
        let bytes = to.bytes() as usize / matrices.len();
        matrices
            .iter()
            .enumerate()
            .try_for_each(|(slot, at)| to.write(slot * bytes, &from.read_range::<u8>(at * bytes, bytes)?))
    };
    copy(Some(from.codes()), Some(to.codes_mut()))?;
    copy(from.scales(), to.scales_mut())?;
    copy(from.row_scales(), to.row_scales_mut())?;
    Ok(to)
}

/// Rows of a float tensor as f32.
pub(super) fn floats(from: &Tensor, rows: Range<usize>) -> Result<Vec<f32>> {
    let (first, count) = (rows.start * from.cols(), rows.len() * from.cols());
    Ok(match from.dtype() {
        DType::Bf16 => from.read_range::<bf16>(first, count)?.into_iter().map(bf16::to_f32).collect(),
        _ => from.read_range::<f32>(first, count)?,
    })
}

/// Whether the device is the reference itself, against which nothing can be checked.
pub(super) fn is_reference(cx: &Cx) -> bool {
    matches!(cx.device.arm(), Arm::Cpu(_))
}
