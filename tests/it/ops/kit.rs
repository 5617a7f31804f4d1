//! What the tests of moe, sampler and fill share: devices, a context, tensors from plain values, seeded numbers.

use std::sync::Arc;

use highwater::device::{Device, DeviceSpec};
use highwater::mem::{End, Layer, Report, Tag};
use highwater::num::philox::{normal4, philox4x32};
use highwater::num::{DType, bf16};
use highwater::ops::{Cx, Limits, Meter, Numerics};
use highwater::tensor::{Tensor, byte_size};

const SLAB_BYTES: u64 = 1 << 30;

/// A device and a meter: what a [`Cx`] borrows.
pub(super) struct Kit {
    pub(super) device: Arc<Device>,
    pub(super) meter: Meter,
    pub(super) numerics: Numerics,
    pub(super) bound: Option<Limits>,
}

impl Kit {
    /// Host memory, every new buffer filled with NaN.
    pub(super) fn cpu(numerics: Numerics) -> Kit {
        let device = Device::cpu_poisoned(DeviceSpec::host(), SLAB_BYTES).unwrap();
        Kit { device, meter: Meter::default(), numerics, bound: None }
    }

    /// Sizes only.
    pub(super) fn plan(numerics: Numerics) -> Kit {
        let device = Device::plan(DeviceSpec::host(), SLAB_BYTES);
        Kit { device, meter: Meter::default(), numerics, bound: None }
    }

    pub(super) fn of(act: DType) -> Numerics {
        if act == DType::Bf16 { Numerics::BF16 } else { Numerics::F32 }
    }

    pub(super) fn cx(&self) -> Cx<'_> {
        Cx {
            device: &self.device,
            numerics: self.numerics,
            layer: Layer::Other,
            bound: self.bound,
            meter: &self.meter,
            routes: None,
        }
    }

    /// A persistent tensor, poisoned on cpu.
    pub(super) fn empty(&self, dtype: DType, shape: &[usize]) -> Tensor {
        let tag = Tag::new(Layer::Other, "test", "operand");
        let bytes = byte_size(dtype, shape).unwrap();
        Tensor::new(self.device.alloc(End::Persistent, tag, bytes).unwrap(), dtype, shape).unwrap()
    }

    /// A persistent tensor of `values`, rounded to `dtype`; only its size on plan.
    pub(super) fn floats(&self, dtype: DType, shape: &[usize], values: &[f32]) -> Tensor {
        let mut tensor = self.empty(dtype, shape);
        assert_eq!(tensor.len(), values.len());
        if self.device.has_data() {
            match dtype {
                DType::F32 => tensor.host_mut::<f32>().unwrap().copy_from_slice(values),
                _ => {
                    for (d, &s) in tensor.host_mut::<bf16>().unwrap().iter_mut().zip(values) {
                        *d = bf16::from_f32(s);
                    }
                }
            }
        }
        tensor
    }

    pub(super) fn ints(&self, shape: &[usize], values: &[i32]) -> Tensor {
        let mut tensor = self.empty(DType::I32, shape);
        if self.device.has_data() {
            tensor.host_mut::<i32>().unwrap().copy_from_slice(values);
        }
        tensor
    }

    /// What `step` takes from the arena.
    pub(super) fn measured<R>(&self, step: impl FnOnce(&Cx) -> R) -> Report {
        self.device.begin_step();
        let _ = step(&self.cx());
        self.device.report()
    }
}

/// The elements as f32.
pub(super) fn values(tensor: &Tensor) -> Vec<f32> {
    match tensor.dtype() {
        DType::F32 => tensor.host::<f32>().unwrap().to_vec(),
        _ => tensor.host::<bf16>().unwrap().iter().map(|v| v.to_f32()).collect(),
    }
}

/// `values` as they are after rounding to `dtype`.
pub(super) fn rounded(dtype: DType, values: &[f32]) -> Vec<f32> {
    if dtype == DType::F32 { values.to_vec() } else { values.iter().map(|&v| bf16::from_f32(v).to_f32()).collect() }
}

/// `n` near-normal values of this standard deviation, fresh for each (seed, stream).
pub(super) fn normals(seed: u32, stream: u32, n: usize, std: f32) -> Vec<f32> {
    let blocks = (0..n.div_ceil(4) as u32).flat_map(|i| normal4(philox4x32([seed, stream], [i, 0, 0, 0x7465_7374])));
    blocks.take(n).map(|v| v * std).collect()
}

/// A stream of 32-bit words.
pub(super) struct Words(u32, u32);

impl Words {
    pub(super) fn new(seed: u32) -> Words {
        Words(seed, 0)
    }

    pub(super) fn next(&mut self) -> u32 {
        self.1 += 1;
        philox4x32([self.0, 0x776f_7264], [self.1, 0, 0, 0])[0]
    }

    /// 0..n.
    pub(super) fn below(&mut self, n: usize) -> usize {
        (u64::from(self.next()) * n as u64 >> 32) as usize
    }

    /// Uniform in [0, 1).
    pub(super) fn unit(&mut self) -> f64 {
        f64::from(self.next()) / 2f64.powi(32)
    }
}

/// Asserts the error's text holds each of `parts`.
pub(super) fn assert_refused<T: std::fmt::Debug>(result: highwater::error::Result<T>, parts: &[&str]) {
    let text = result.expect_err("must be refused").to_string();
    for part in parts {
        assert!(text.contains(part), "`{text}` does not say `{part}`");
    }
}
