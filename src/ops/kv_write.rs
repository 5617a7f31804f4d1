//! The paged key/value cache and the write of a step's keys and values into it.
//!
//! A page holds [`PAGE_TOKENS`] tokens of one sequence, `[token, kv head, head_dim]`; a row's slot is its page x 64 + its
//! offset in the page. A negative slot is inert: nothing is written (graph padding). Pages hold floats, or e4m3 codes under
//! two scales of the layer: a value is `code * scale`, its code `e4m3(value / scale)`, to nearest even, saturating.

use std::sync::Arc;

use crate::device::{Arm, Device};
use crate::error::{Error, Result};
use crate::mem::{End, Layer, Tag};
use crate::num::DType;
use crate::ops::attention::AttnDims;
use crate::ops::batch::PAGE_TOKENS;
use crate::ops::cost::{Cost, Unit};
use crate::ops::{Batch, Cx, check, launch, reference};
use crate::tensor::{Tensor, byte_size};

const OP: &str = "kv_write";

/// One layer's keys and values: k and v, each `[pages, 64, kv_heads, head_dim]` of the KV type (u8: e4m3 codes).
#[derive(Debug)]
pub struct KvPages {
    /// Keys, normed and rotated.
    pub k: Tensor,
    /// Values.
    pub v: Tensor,
    /// What the codes of u8 keys are multiplied by; 1 where the pages hold floats.
    pub k_scale: f32,
    /// What the codes of u8 values are multiplied by; 1 where the pages hold floats.
    pub v_scale: f32,
}

impl KvPages {
    /// Allocates `pages` pages at the persistent end, their contents unset, their scales 1.
    pub fn new(device: &Arc<Device>, dtype: DType, pages: usize, dims: AttnDims) -> Result<KvPages> {
        let shape = [pages, PAGE_TOKENS, dims.kv_heads, dims.head_dim];
        let half = |buffer| {
            let block =
                device.alloc(End::Persistent, Tag::new(Layer::Cache, "kv", buffer), byte_size(dtype, &shape)?)?;
            Tensor::new(block, dtype, &shape)
        };
        Ok(KvPages { k: half("k")?, v: half("v")?, k_scale: 1.0, v_scale: 1.0 })
    }

    /// Pages.
    pub fn pages(&self) -> usize {
        self.k.rows()
    }

    pub(super) fn check(&self, op: &'static str, dims: AttnDims, dtype: DType) -> Result<()> {
        let shape = [self.pages(), PAGE_TOKENS, dims.kv_heads, dims.head_dim];
        check::tensor(op, "k", &self.k, dtype, &shape)?;
        check::tensor(op, "v", &self.v, dtype, &shape)?;
        let codes = dtype == DType::U8;
        for (name, scale) in [("k_scale", self.k_scale), ("v_scale", self.v_scale)] {
            if !(scale.is_finite() && scale > 0.0 && (codes || scale == 1.0)) {
                let must = if codes { "finite and positive" } else { "1" };
                return Err(Error::shape(op, format!("{name} is {scale}, of {dtype} pages it must be {must}")));
            }
        }
        Ok(())
    }
}

/// Copies the key and value heads of the fused `qkv` (see [`AttnDims`]) to the step's KV slots, rounded to the KV type or
/// encoded under the pages' scales. Rows with a negative slot are left out; a slot past the last page is an error (on a
/// GPU, which cannot give one, such a row is left out too).
pub fn write(cx: &Cx, qkv: &Tensor, dims: AttnDims, kv: &mut KvPages, batch: &Batch) -> Result<()> {
    dims.check_rows(OP, qkv, batch)?;
    kv.check(OP, dims, cx.numerics.kv)?;
    cx.note(OP, cost(batch.tokens(), dims, qkv.dtype(), kv.k.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => reference::kv_write::write(qkv, dims, kv, &batch.inputs.kv_slots),
        Arm::Cuda(cuda) => launch::kv_write::write(cuda, qkv, dims, kv, &batch.inputs.kv_slots),
        Arm::Plan => Ok(()),
    }
}

/// Keys and values read once as `activations` and written once as `kv`, and the slots. Codes take a division each.
pub fn cost(tokens: usize, dims: AttnDims, activations: DType, kv: DType) -> Cost {
    let elements = (tokens * 2 * dims.kv_cols()) as u64;
    Cost {
        flops: if kv == DType::U8 { elements } else { 0 },
        resident_bytes: elements * kv.bytes(),
        activation_bytes: elements * activations.bytes() + tokens as u64 * DType::I32.bytes(),
        unit: Unit::F32,
    }
}
