//! Keys and values to their slots, a block a row.

use super::grids::{THREADS, WARP, blocks, long};
use crate::device::cuda::{Arg, Cuda, Grid, Kernel};
use crate::error::Result;
use crate::num::DType;
use crate::ops::attention::AttnDims;
use crate::ops::batch::PAGE_TOKENS;
use crate::ops::kv_write::KvPages;
use crate::tensor::Tensor;

const OP: &str = "kv_write";
/// Elements a thread takes at a time.
const RUN: usize = 8;

/// The module as every launch here uses it.
pub(super) fn variants() -> Vec<Kernel> {
    vec![Kernel::new(OP, "kv_write_bf16_bf16")]
}

/// Row `t` of `qkv` goes to slot `slots[t]` of each half; slots outside the pages are left out.
pub(crate) fn write(cuda: &Cuda, qkv: &Tensor, dims: AttnDims, kv: &mut KvPages, slots: &Tensor) -> Result<()> {
    let entry = match (qkv.dtype(), kv.k.dtype()) {
        (DType::Bf16, DType::Bf16) => "kv_write_bf16_bf16",
        (DType::Bf16, DType::U8) => "kv_write_bf16_u8",
        (DType::Bf16, _) => "kv_write_bf16_f32",
        (_, DType::Bf16) => "kv_write_f32_bf16",
        (_, DType::U8) => "kv_write_f32_u8",
        _ => "kv_write_f32_f32",
    };
    let cols = dims.kv_cols();
    let threads = (2 * cols / RUN).next_multiple_of(WARP).clamp(WARP, THREADS);
    let grid = Grid::new([blocks(OP, qkv.rows(), 1)?, 1, 1], threads as u32);
    let args = [
        qkv.arg(),
        kv.k.arg(),
        kv.v.arg(),
        slots.arg(),
        long(kv.pages() * PAGE_TOKENS),
        long(qkv.cols()),
        long(dims.k_col()),
        long(cols),
        Arg::F32(kv.k_scale),
        Arg::F32(kv.v_scale),
    ];
    cuda.launch(Kernel::new(OP, entry), grid, &args)
}
