//! The gated delta rule over prompts: per piece of chunks, what does not depend on the state, then the scan over chunks.

use super::gdn_decode::{entry, rule_grid};
use super::grids::{WARP, blocks_y, int};
use crate::device::cuda::{Arg, Cuda, Grid, Kernel};
use crate::error::Result;
use crate::num::DType;
use crate::ops::Batch;
use crate::ops::activation::Gates;
use crate::ops::gdn_prefill::{CHUNK_BYTES, CHUNK_TOKENS, CHUNKED_DIM, GdnDims, Tactic, chunks};
use crate::tensor::Tensor;

const OP: &str = "gdn_prefill";
/// Threads of a block of `chunk`, as in kernels/gdn_prefill.cu.
const CHUNK_THREADS: u32 = 128;
/// Blocks of `chunk` that a multiprocessor holds: where more are there to run, a block takes all value heads of a key head
/// and forms their common products once.
const CHUNK_BLOCKS: usize = 3;
/// Columns of the state that a warp of `scan` has.
const WARP_COLUMNS: usize = 16;
/// Warps of a block of `scan`. Four share what they read; two share a multiprocessor's shared memory with no one where all
/// blocks run at once on one each.
const SCAN_WARPS: [usize; 2] = [2, 4];

fn kernel(entry: &'static str, warps: usize) -> Kernel {
    Kernel::new(OP, entry).define("SCAN_WARPS", warps as i32)
}

/// The module as the published models use it.
pub(super) fn variants() -> Vec<Kernel> {
    SCAN_WARPS.into_iter().map(|warps| kernel("scan_bf16_f32", warps)).collect()
}

/// Shared memory of a block of `scan`: q and k of two chunks, v and the matrices of one; rows of q, k and v are 16 bytes
/// apart from each other's banks.
const fn scan_shared(warps: usize) -> u32 {
    let row = (CHUNKED_DIM + 8) * 2;
    let v_row = (warps * WARP_COLUMNS + 8) * 2;
    (CHUNK_TOKENS * (4 * row + v_row)) as u32 + CHUNK_BYTES as u32
}

/// A card's limit is 99 KiB of shared memory for a block, the smallest of those with bf16 products.
const _: () = assert!(scan_shared(4) <= 99 << 10);

/// The rows and states of the batch's prefills in chunks: bf16 activations, heads of 128 x 128. `work` is of `tactic`.
pub(crate) fn chunked(
    cuda: &Cuda,
    sms: u32,
    conv: &Tensor,
    gates: &Gates,
    state: &mut Tensor,
    dims: GdnDims,
    batch: Batch,
    out: &mut Tensor,
    tactic: Tactic,
    work: &Tensor,
) -> Result<()> {
    let (spans, inputs, sms) = (batch.prefills(), batch.inputs, sms as usize);
    let chunks = chunks(spans);
    let group = dims.value_heads / dims.key_heads;
    let heads_per_block = if chunks * dims.key_heads >= CHUNK_BLOCKS * sms { group } else { 1 };
    let narrow = spans.len() * dims.value_heads * CHUNKED_DIM / (SCAN_WARPS[0] * WARP_COLUMNS);
    let warps = SCAN_WARPS[usize::from(narrow > sms)];
    let scan = kernel(if state.dtype() == DType::F32 { "scan_bf16_f32" } else { "scan_bf16_bf16" }, warps);
    let columns = (CHUNKED_DIM / (warps * WARP_COLUMNS)) as u32;
    let (heads, sequences) = (blocks_y(OP, dims.value_heads, 1)?, blocks_y(OP, spans.len(), 1)?);
    let scan_grid = Grid::new([columns, heads, sequences], (warps * WARP) as u32).shared(scan_shared(warps));
    let starts = inputs.starts.arg_at(batch.decodes);
    let [tokens, slots] = [int(OP, conv.rows())?, int(OP, state.rows())?];
    let [key_heads, value_heads] = [int(OP, dims.key_heads)?, int(OP, dims.value_heads)?];

    // The state that straddles two pieces is in one place while the next one's is written to the other.
    let piece = tactic.piece_chunks;
    let carried = piece * dims.value_heads * CHUNK_BYTES as usize;
    let carry = |at: usize| {
        let own = state.dtype() == DType::F32;
        if own { Arg::NULL } else { work.arg_at(carried + at % 2 * dims.state_len() * size_of::<f32>()) }
    };
    for (at, first) in (0..chunks).step_by(piece).enumerate() {
        let count = piece.min(chunks - first);
        let grid = [heads / heads_per_block as u32, blocks_y(OP, count, 1)?, 1];
        let args = [
            conv.arg(),
            gates.g.arg(),
            gates.beta.arg(),
            starts,
            work.arg(),
            int(OP, spans.len())?,
            int(OP, first)?,
            tokens,
            key_heads,
            value_heads,
            int(OP, heads_per_block)?,
        ];
        cuda.launch(kernel("chunk_bf16", warps), Grid::new(grid, CHUNK_THREADS), &args)?;
        let args = [
            conv.arg(),
            work.arg(),
            state.arg(),
            carry(at + 1),
            carry(at),
            starts,
            inputs.contexts.arg_at(batch.decodes),
            inputs.slot_in.arg_at(batch.decodes),
            inputs.slot_out.arg_at(batch.decodes),
            out.arg(),
            int(OP, first)?,
            int(OP, count)?,
            tokens,
            slots,
            key_heads,
            value_heads,
        ];
        cuda.launch(scan, scan_grid, &args)?;
    }
    Ok(())
}

/// The same token by token: any activations, heads of any size.
pub(crate) fn by_token(
    cuda: &Cuda,
    conv: &Tensor,
    gates: &Gates,
    state: &mut Tensor,
    dims: GdnDims,
    batch: Batch,
    out: &mut Tensor,
) -> Result<()> {
    let (spans, inputs) = (batch.prefills(), batch.inputs);
    let args = [
        conv.arg(),
        gates.g.arg(),
        gates.beta.arg(),
        state.arg(),
        inputs.starts.arg_at(batch.decodes),
        inputs.contexts.arg_at(batch.decodes),
        inputs.slot_in.arg_at(batch.decodes),
        inputs.slot_out.arg_at(batch.decodes),
        out.arg(),
        int(OP, conv.rows())?,
        int(OP, state.rows())?,
        int(OP, dims.key_heads)?,
        int(OP, dims.value_heads)?,
        int(OP, dims.key_dim)?,
        int(OP, dims.value_dim)?,
    ];
    let entry = entry!("any", conv.dtype(), state.dtype());
    // The file is compiled once for all its kernels: with the values the others are used with.
    cuda.launch(kernel(entry, SCAN_WARPS[1]), rule_grid(OP, dims, spans.len())?, &args)
}
