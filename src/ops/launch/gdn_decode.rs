//! The gated delta rule of one token: a block per sequence, value head and part of its columns.

use super::grids::{WARP, blocks, blocks_y, int};
use crate::device::cuda::{Arg, Cuda, Grid, Kernel};
use crate::error::{Error, Result};
use crate::num::DType;
use crate::ops::Batch;
use crate::ops::activation::Gates;
use crate::ops::gdn_prefill::{CHUNKED_DIM, GdnDims};
use crate::tensor::Tensor;

const OP: &str = "gdn_decode";
/// Threads of a block, as in kernels/gdn_decode.cu.
const THREADS: u32 = 256;
/// Bytes of a state's row that a block has.
const PART_BYTES: u64 = 128;

/// An entry point by the types of activations and state.
macro_rules! entry {
    ($name:literal, $act:expr, $state:expr) => {
        match ($act == DType::Bf16, $state == DType::Bf16) {
            (true, true) => concat!($name, "_bf16_bf16"),
            (true, false) => concat!($name, "_bf16_f32"),
            (false, true) => concat!($name, "_f32_bf16"),
            (false, false) => concat!($name, "_f32_f32"),
        }
    };
}
pub(super) use entry;

/// The module as the published models use it.
pub(super) fn variants() -> Vec<Kernel> {
    vec![Kernel::new(OP, "step_bf16_f32")]
}

/// The grid of the kernels for heads of any size, `rule` of kernels/lib/gdn.cuh, for `sequences`.
pub(super) fn rule_grid(op: &'static str, dims: GdnDims, sequences: usize) -> Result<Grid> {
    /// Columns of a warp.
    const COLUMNS: usize = 4;
    /// Warps of a block, as many as their shared memory allows: what a block has without asking for more, or at most.
    const WARPS: [usize; 3] = [4, 2, 1];
    const SHARED_BYTES: usize = 48 << 10;
    const MOST_BYTES: usize = 99 << 10;
    let warp_bytes = (COLUMNS + 1) * dims.key_dim * 4;
    if warp_bytes > MOST_BYTES {
        return Err(Error::Unsupported {
            what: format!("{op} with key heads of {} elements", dims.key_dim),
            supported: format!("at most {} on a card", MOST_BYTES / ((COLUMNS + 1) * 4)),
        });
    }
    let warps = WARPS.into_iter().find(|warps| warps * warp_bytes <= SHARED_BYTES).unwrap_or(1);
    let parts = blocks(op, dims.value_dim, warps * COLUMNS)?;
    let grid = [parts, blocks_y(op, dims.value_heads, 1)?, blocks_y(op, sequences, 1)?];
    Ok(Grid::new(grid, (warps * WARP) as u32).shared((warps * warp_bytes) as u32))
}

/// Writes a row of `out` for each of the batch's decodes, and their states.
pub(crate) fn recurrent(
    cuda: &Cuda,
    conv: &Tensor,
    gates: &Gates,
    state: &mut Tensor,
    dims: GdnDims,
    batch: Batch,
    out: &mut Tensor,
) -> Result<()> {
    let (act, kept, inputs) = (conv.dtype(), state.dtype(), batch.inputs);
    let mut args = vec![
        conv.arg(),
        gates.g.arg(),
        gates.beta.arg(),
        state.arg(),
        inputs.contexts.arg(),
        inputs.slot_in.arg(),
        inputs.slot_out.arg(),
        out.arg(),
        int(OP, state.rows())?,
        int(OP, dims.key_heads)?,
        int(OP, dims.value_heads)?,
    ];
    if (dims.key_dim, dims.value_dim) == (CHUNKED_DIM, CHUNKED_DIM) {
        let parts = CHUNKED_DIM as u64 * kept.bytes() / PART_BYTES;
        let grid = [parts as u32, blocks_y(OP, dims.value_heads, 1)?, blocks_y(OP, batch.decodes, 1)?];
        return cuda.launch(Kernel::new(OP, entry!("step", act, kept)), Grid::new(grid, THREADS), &args);
    }
    args.extend::<[Arg; 2]>([int(OP, dims.key_dim)?, int(OP, dims.value_dim)?]);
    cuda.launch(Kernel::new(OP, entry!("any", act, kept)), rule_grid(OP, dims, batch.decodes)?, &args)
}
