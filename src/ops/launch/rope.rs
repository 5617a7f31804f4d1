//! Norm and rotation of heads: a warp a head, a block a row; the blocks of a row share its heads where rows are few.

use super::grids::{WARP, blocks, int, long};
use crate::device::cuda::{Arg, Cuda, Grid, Kernel, entry};
use crate::error::Result;
use crate::ops::attention::AttnDims;
use crate::ops::rope::Operands;
use crate::tensor::Tensor;

const OP: &str = "rope";
/// Shared memory of a block on any card without opting in to more.
const SHARED_BYTES: usize = 48 << 10;
/// Up to so many rows, each warp has one head; with more, a block takes a whole row, so that its angles are made once.
const FEW_ROWS: usize = 256;

/// The module as every launch here uses it.
pub(super) fn variants() -> Vec<Kernel> {
    vec![Kernel::new(OP, "qk_norm_rope_bf16")]
}

/// Norms and rotates the query and key heads of `qkv` in place.
pub(crate) fn qk_norm_rope(
    cuda: &Cuda,
    qkv: &mut Tensor,
    operands: &Operands,
    dims: AttnDims,
    positions: &Tensor,
) -> Result<()> {
    let Operands { q_norm, k_norm, inv_freq, attention_factor, eps } = *operands;
    let AttnDims { heads, kv_heads, head_dim, rotary_dim } = dims;
    let (rows, half) = (qkv.rows(), rotary_dim / 2);
    // Turns, and a head in f32 for each warp; fewer warps where heads are long.
    let turns = half * 2 * size_of::<f32>();
    let head = head_dim * size_of::<f32>();
    let warps = (SHARED_BYTES.saturating_sub(turns) / head).clamp(1, if rows <= FEW_ROWS { 4 } else { 8 });
    let shared = turns + warps * head;
    let y = if rows <= FEW_ROWS { (heads + kv_heads).div_ceil(warps).min(1024) } else { 1 };
    let grid = Grid::new([blocks(OP, rows, 1)?, y as u32, 1], (warps * WARP) as u32).shared(shared as u32);
    let args = [
        qkv.arg(),
        q_norm.arg(),
        k_norm.arg(),
        inv_freq.arg(),
        positions.arg(),
        Arg::F32(attention_factor),
        Arg::F32(eps),
        int(OP, heads)?,
        int(OP, kv_heads)?,
        int(OP, head_dim)?,
        int(OP, half)?,
        long(qkv.cols()),
        int(OP, dims.k_col())?,
    ];
    cuda.launch(Kernel::new(OP, entry!(qkv.dtype(), "qk_norm_rope")), grid, &args)
}
