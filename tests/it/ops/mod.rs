//! Ops on the CPU arm against float64 closed forms written here, on a device whose fresh buffers are NaN.
#![allow(unreachable_pub)] // shared by the modules of one test binary

mod activation;
mod attention;
mod conv1d;
pub mod delta_rule;
mod fill;
mod gdn_decode;
mod gdn_prefill;
mod kit;
mod kv_write;
mod linear;
mod linear_quantised;
mod moe;
mod moe_quantised;
mod norm;
mod quantise;
mod rope;
mod rows;
mod sampler;
pub mod weight;
pub mod world;

use std::path::Path;
use std::sync::Arc;

use highwater::device::{Device, DeviceSpec, Pod};
use highwater::error::{Error, Result};
use highwater::mem::{End, Layer, Tag};
use highwater::num::{DType, bf16};
use highwater::ops::batch::Placement;
use highwater::ops::{Batch, Cx, Limits, Meter, Numerics, Span, StepInputs};
use highwater::tensor::{Elem, Tensor, byte_size};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use safetensors::SafeTensors;

/// The slab of a test's device.
pub const SLAB_BYTES: u64 = 1 << 30;

/// What a test's step inputs are allocated for.
pub const LIMITS: Limits = Limits { step_tokens: 2048, batch: 64, context: 4096 };

/// A device that computes, fresh buffers NaN.
pub fn device() -> Arc<Device> {
    Device::cpu_poisoned(DeviceSpec::host(), SLAB_BYTES).unwrap()
}

/// A device that only counts.
pub fn plan() -> Arc<Device> {
    Device::plan(DeviceSpec::host(), SLAB_BYTES)
}

/// A device and what goes with it in a [`Cx`].
pub struct Rig {
    pub device: Arc<Device>,
    pub meter: Meter,
    pub numerics: Numerics,
}

impl Rig {
    pub fn cpu(numerics: Numerics) -> Rig {
        Rig { device: device(), meter: Meter::default(), numerics }
    }

    pub fn plan(numerics: Numerics) -> Rig {
        Rig { device: plan(), meter: Meter::default(), numerics }
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
}

/// Numerics with activations of one type and a state of another.
pub fn numerics(activations: DType, state: DType) -> Numerics {
    Numerics { state, ..if activations == DType::Bf16 { Numerics::BF16 } else { Numerics::F32 } }
}

/// A seeded generator.
pub fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// `n` values that `dtype` holds exactly: the mean of a few uniform ones, about -1 to 1 times `scale`.
pub fn random(rng: &mut ChaCha8Rng, dtype: DType, n: usize, scale: f32) -> Vec<f32> {
    (0..n)
        .map(|_| {
            let sum: f32 = (0..3).map(|_| rng.random_range(-1.0..1.0f32)).sum();
            round(dtype, sum * scale)
        })
        .collect()
}

/// `value` as `dtype` stores it.
pub fn round(dtype: DType, value: f32) -> f32 {
    if dtype == DType::Bf16 { bf16::from_f32(value).to_f32() } else { value }
}

/// A persistent tensor with these values (none on a plan device).
pub fn tensor(cx: &Cx, dtype: DType, shape: &[usize], values: &[f32]) -> Tensor {
    let mut t = empty(cx, dtype, shape);
    assert_eq!(t.len(), values.len());
    match dtype {
        DType::F32 => t.write(0, values).unwrap(),
        DType::Bf16 => {
            t.write(0, &values.iter().map(|v| bf16::from_f32(*v)).collect::<Vec<_>>()).unwrap();
        }
        other => panic!("no values of {other}"),
    }
    t
}

/// A persistent tensor that nobody has written.
pub fn empty(cx: &Cx, dtype: DType, shape: &[usize]) -> Tensor {
    let tag = Tag::new(Layer::Other, "test", "operand");
    let buffer = cx.device.alloc(End::Persistent, tag, byte_size(dtype, shape).unwrap()).unwrap();
    Tensor::new(buffer, dtype, shape).unwrap()
}

/// The elements as f32.
pub fn values(t: &Tensor) -> Vec<f32> {
    fn of<E: Elem>(values: &[E]) -> Vec<f32> {
        values.iter().map(|v| v.to_f32()).collect()
    }
    match t.dtype() {
        DType::F32 => of(&t.read::<f32>().unwrap()),
        DType::Bf16 => of(&t.read::<bf16>().unwrap()),
        other => panic!("no float values of {other}"),
    }
}

/// The raw bytes.
pub fn bytes(t: &Tensor) -> Vec<u8> {
    raw::<u8>(t)
}

fn raw<T: Pod>(t: &Tensor) -> Vec<T> {
    t.read::<T>().unwrap()
}

/// One sequence of a step.
#[derive(Debug, Clone, Copy)]
pub struct Seq {
    pub context: usize,
    pub len: usize,
    pub slot_in: i32,
    pub slot_out: i32,
}

impl Seq {
    /// A sequence that keeps its state in `slot`.
    pub fn new(context: usize, len: usize, slot: i32) -> Seq {
        Seq { context, len, slot_in: slot, slot_out: slot }
    }
}

/// An uploaded step.
pub struct Step {
    inputs: StepInputs,
    spans: Vec<Span>,
    decodes: usize,
}

impl Step {
    /// `seqs` in order, the first `decodes` of which take the decode kernels.
    pub fn new(device: &Arc<Device>, seqs: &[Seq], decodes: usize) -> Step {
        let mut step = Step { inputs: StepInputs::new(device, LIMITS).unwrap(), spans: Vec::new(), decodes };
        step.upload(seqs);
        step
    }

    /// The same inputs with other sequences.
    pub fn upload(&mut self, seqs: &[Seq]) {
        let mut spans = Vec::new();
        let mut places = Vec::new();
        let mut start = 0;
        for seq in seqs {
            spans.push(Span { start, len: seq.len, context: seq.context });
            let pages = (0..(seq.context + seq.len).div_ceil(64) as i32).collect();
            places.push(Placement { slot_in: seq.slot_in, slot_out: seq.slot_out, pages });
            start += seq.len;
        }
        self.inputs.upload(&spans, &places, &vec![0; start], &[]).unwrap();
        self.spans = spans;
    }

    pub fn batch(&self) -> Batch<'_> {
        Batch { spans: &self.spans, decodes: self.decodes, inputs: &self.inputs }
    }
}

/// The step of a case's (context, rows) list, sequence i in slot i.
pub fn step_of(device: &Arc<Device>, spans: &[(usize, usize)], decodes: usize) -> Step {
    let seqs: Vec<Seq> =
        spans.iter().enumerate().map(|(i, &(context, len))| Seq::new(context, len, i as i32)).collect();
    Step::new(device, &seqs, decodes)
}

/// Every value within `abs + rel * |expected|`, and as many of them.
#[track_caller]
pub fn assert_close(what: &str, actual: &[f32], expected: &[f64], abs: f64, rel: f64) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (i, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        let bound = abs + rel * e.abs();
        assert!(
            (f64::from(a) - e).abs() <= bound,
            "{what}: element {i} is {a}, expected {e}, off by {:e}, bound {bound:e}",
            (f64::from(a) - e).abs()
        );
    }
}

/// A shape error of `op` whose text holds each of `parts`.
#[track_caller]
pub fn assert_shape_error<T>(result: Result<T>, op: &str, parts: &[&str]) {
    let Err(error) = result else { panic!("{op} accepted what it must refuse ({parts:?})") };
    assert!(matches!(error, Error::Shape { .. }), "{error}");
    let text = error.to_string();
    assert!(text.starts_with(&format!("{op}: ")), "{text}");
    for part in parts {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}

/// `body` allocates the same on a device that computes and on one that only counts.
#[track_caller]
pub fn assert_plan_counts_the_same(what: &str, numerics: Numerics, body: impl Fn(&Rig)) {
    let [cpu, plan] = [Rig::cpu(numerics), Rig::plan(numerics)].map(|rig| {
        rig.device.begin_step();
        body(&rig);
        format!("{:?}", rig.device.report())
    });
    assert_eq!(cpu, plan, "{what}");
}

/// A fixture file's tensors.
pub struct Fixture(Vec<u8>);

impl Fixture {
    /// `tests/fixtures/{path}`.
    pub fn load(path: &str) -> Fixture {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path);
        Fixture(std::fs::read(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display())))
    }

    /// A tensor's shape.
    pub fn shape(&self, name: &str) -> Vec<usize> {
        SafeTensors::deserialize(&self.0).unwrap().tensor(name).unwrap().shape().to_vec()
    }

    /// An f32 tensor.
    pub fn f32(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let t = file.tensor(name).unwrap();
        assert_eq!(t.dtype(), safetensors::Dtype::F32, "{name}");
        t.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    /// An f32 or f64 tensor, as f64.
    pub fn f64(&self, name: &str) -> Vec<f64> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let t = file.tensor(name).unwrap();
        match t.dtype() {
            safetensors::Dtype::F64 => t.data().as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
            _ => self.f32(name).into_iter().map(f64::from).collect(),
        }
    }
}
