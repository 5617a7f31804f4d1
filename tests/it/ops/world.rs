//! Devices, tensors and steps for the tests of ops.

use std::sync::Arc;

use highwater::device::{Device, DeviceSpec, cards};
use highwater::error::Error;
use highwater::mem::{End, Layer, Tag};
use highwater::num::{DType, bf16};
use highwater::ops::batch::{PAGE_TOKENS, Placement};
use highwater::ops::{Batch, Cx, Limits, Meter, Numerics, Span, StepInputs};
use highwater::tensor::{Tensor, byte_size};
use rand::RngExt;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::{SLAB_BYTES, round};

/// The card plans are made for: one with many SMs, so that tactics want workspace.
pub(super) fn card() -> DeviceSpec {
    cards::find("h200").unwrap()
}

/// A host device whose new buffers are NaN.
pub(super) fn device() -> Arc<Device> {
    Device::cpu_poisoned(card(), SLAB_BYTES).unwrap()
}

/// The device without data.
pub(super) fn plan() -> Arc<Device> {
    Device::plan(card(), SLAB_BYTES)
}

/// A context of an attention layer.
pub(super) fn cx<'a>(device: &'a Arc<Device>, meter: &'a Meter, numerics: Numerics) -> Cx<'a> {
    Cx { device, numerics, layer: Layer::Attention, bound: None, meter, routes: None }
}

/// The numerics whose activations are `dtype`.
pub(super) fn numerics(dtype: DType) -> Numerics {
    if dtype == DType::Bf16 { Numerics::BF16 } else { Numerics::F32 }
}

/// `n` values in `-scale..scale`.
pub(super) fn uniform(rng: &mut ChaCha8Rng, n: usize, scale: f32) -> Vec<f32> {
    (0..n).map(|_| rng.random_range(-scale..scale)).collect()
}

/// The values a tensor of `dtype` holds once they are stored.
pub(super) fn stored(dtype: DType, values: &[f32]) -> Vec<f32> {
    values.iter().map(|&v| round(dtype, v)).collect()
}

/// A persistent tensor, filled where the device holds data.
pub fn tensor(device: &Arc<Device>, dtype: DType, shape: &[usize], values: &[f32]) -> Tensor {
    let mut t = blank(device, dtype, shape);
    assert_eq!(t.len(), values.len());
    match dtype {
        DType::F32 => t.write(0, values).unwrap(),
        DType::Bf16 => {
            t.write(0, &values.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>()).unwrap();
        }
        other => panic!("{other}"),
    }
    t
}

/// A persistent tensor of integers.
pub fn ints(device: &Arc<Device>, values: &[i32]) -> Tensor {
    let mut t = blank(device, DType::I32, &[values.len()]);
    t.write(0, values).unwrap();
    t
}

/// A persistent tensor as the device makes it: NaN where it holds data.
pub fn blank(device: &Arc<Device>, dtype: DType, shape: &[usize]) -> Tensor {
    let tag = Tag::new(Layer::Weights, "test", "operand");
    let buffer = device.alloc(End::Persistent, tag, byte_size(dtype, shape).unwrap()).unwrap();
    Tensor::new(buffer, dtype, shape).unwrap()
}

/// The message of a shape error; anything else fails.
pub(super) fn message<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    match result {
        Err(e @ Error::Shape { .. }) => e.to_string(),
        other => panic!("not a shape error: {other:?}"),
    }
}

/// Runs `f` on a pool of `threads`.
pub(super) fn on_threads<T: Send>(threads: usize, f: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(f)
}

/// A step's inputs, uploaded.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) inputs: StepInputs,
    pub(super) spans: Vec<Span>,
    pub(super) decodes: usize,
}

impl Step {
    /// A step of sequences given as (cached tokens, new rows), each on its pages.
    pub(super) fn new(
        device: &Arc<Device>,
        limits: Limits,
        sequences: &[(usize, usize)],
        decodes: usize,
        pages: &[Vec<i32>],
    ) -> Step {
        let mut inputs = StepInputs::new(device, limits).unwrap();
        let mut start = 0;
        let mut spans = Vec::new();
        for &(context, len) in sequences {
            spans.push(Span { start, len, context });
            start += len;
        }
        let places: Vec<Placement> = pages
            .iter()
            .enumerate()
            .map(|(i, pages)| Placement { slot_in: i as i32, slot_out: i as i32, pages: pages.clone() })
            .collect();
        inputs.upload(&spans, &places, &vec![0; start], &[]).unwrap();
        Step { inputs, spans, decodes }
    }

    pub(super) fn batch(&self) -> Batch<'_> {
        Batch { spans: &self.spans, decodes: self.decodes, inputs: &self.inputs }
    }
}

/// Pages for each sequence, drawn without order from as many as they need and a few more; with how many there are.
pub(super) fn scatter(rng: &mut ChaCha8Rng, sequences: &[(usize, usize)]) -> (Vec<Vec<i32>>, usize) {
    const SPARE: usize = 3;
    let needs: Vec<usize> = sequences.iter().map(|&(context, len)| (context + len).div_ceil(PAGE_TOKENS)).collect();
    let total = needs.iter().sum::<usize>() + SPARE;
    let mut free: Vec<i32> = (0..total as i32).collect();
    free.shuffle(rng);
    (needs.iter().map(|&n| free.split_off(free.len() - n)).collect(), total)
}

/// Limits that hold these sequences exactly.
pub(super) fn limits(sequences: &[(usize, usize)]) -> Limits {
    Limits {
        step_tokens: sequences.iter().map(|&(_, len)| len).sum(),
        batch: sequences.len(),
        context: sequences.iter().map(|&(context, len)| context + len).max().unwrap_or(1),
    }
}
