//! What benches share: a device, a context, operands, a step; and, in `cuda`, the groups that run on a card.
#![allow(dead_code, unreachable_pub, clippy::print_stdout)] // each bench uses its part, and says what it leaves out

pub mod cuda;
mod throughput;

use std::sync::Arc;

use highwater::device::{Device, DeviceSpec};
use highwater::mem::{End, Layer, Tag};
use highwater::num::{DType, bf16};
use highwater::ops::batch::{PAGE_TOKENS, Placement};
use highwater::ops::{Batch, Cx, Limits, Meter, Numerics, Span, StepInputs};
use highwater::tensor::{Tensor, byte_size};

const SLAB_BYTES: u64 = 1 << 30;

/// A CPU device and what goes with it in a [`Cx`].
pub struct Rig {
    device: Arc<Device>,
    meter: Meter,
    numerics: Numerics,
}

impl Rig {
    pub fn new(activations: DType, state: DType) -> Rig {
        let numerics = Numerics { state, ..if activations == DType::Bf16 { Numerics::BF16 } else { Numerics::F32 } };
        let device = Device::cpu(DeviceSpec::host(), SLAB_BYTES).expect("a slab");
        Rig { device, meter: Meter::default(), numerics }
    }

    pub fn cx(&self) -> Cx<'_> {
        Cx {
            device: &self.device,
            numerics: self.numerics,
            layer: Layer::Other,
            bound: None,
            meter: &self.meter,
            routes: None,
        }
    }

    /// A tensor of values between `from` and `to`, neither zeros nor denormal: those run at another speed.
    pub fn operand(&self, dtype: DType, shape: &[usize], from: f32, to: f32) -> Tensor {
        let value = |i: usize| from + (to - from) * ((i * 2_654_435_761) % 1000) as f32 * 0.001;
        let tag = Tag::new(Layer::Other, "bench", "operand");
        let bytes = byte_size(dtype, shape).expect("a size");
        let buffer = self.device.alloc(End::Persistent, tag, bytes).expect("room");
        let mut t = Tensor::new(buffer, dtype, shape).expect("a shape");
        match dtype {
            DType::Bf16 => {
                for (i, v) in t.host_mut::<bf16>().expect("data").iter_mut().enumerate() {
                    *v = bf16::from_f32(value(i));
                }
            }
            _ => {
                for (i, v) in t.host_mut::<f32>().expect("data").iter_mut().enumerate() {
                    *v = value(i);
                }
            }
        }
        t
    }

    /// A step of (context, rows) sequences, sequence i in slot i.
    pub fn step(&self, sequences: &[(usize, usize)], decodes: usize) -> Step {
        let mut start = 0;
        let spans: Vec<Span> = sequences
            .iter()
            .map(|&(context, len)| {
                start += len;
                Span { start: start - len, len, context }
            })
            .collect();
        let context = spans.iter().map(|s| s.context + s.len).max().expect("a sequence");
        let limits = Limits { step_tokens: start, batch: spans.len(), context };
        let mut inputs = StepInputs::new(&self.device, limits).expect("room");
        let place = |(slot, s): (usize, &Span)| Placement {
            slot_in: slot as i32,
            slot_out: slot as i32,
            pages: (0..(s.context + s.len).div_ceil(PAGE_TOKENS) as i32).collect(),
        };
        let places: Vec<Placement> = spans.iter().enumerate().map(place).collect();
        inputs.upload(&spans, &places, &vec![0; start], &[]).expect("a step");
        Step { inputs, spans, decodes }
    }
}

/// An uploaded step.
pub struct Step {
    inputs: StepInputs,
    spans: Vec<Span>,
    decodes: usize,
}

impl Step {
    pub fn batch(&self) -> Batch<'_> {
        Batch { spans: &self.spans, decodes: self.decodes, inputs: &self.inputs }
    }
}
