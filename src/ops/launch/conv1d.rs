//! The short convolution: one pass for steps of single rows, else rows first and the state after them.

use super::grids::{blocks, blocks_y, int, long, per16};
use crate::device::cuda::{Arg, Cuda, Grid, Kernel, entry};
use crate::error::Result;
use crate::ops::Batch;
use crate::tensor::{Tensor, View};

const OP: &str = "conv1d";
/// Threads of a block, as in kernels/conv1d.cu.
const THREADS: usize = 128;
/// Blocks a multiprocessor should get before rows are cut no further.
const BLOCKS_PER_SM: usize = 8;
/// Rows of a block: each cut reads `taps - 1` rows again.
const RUNS: [usize; 2] = [8, 64];
/// Taps with a kernel of their own; other numbers share one that reads its inputs one by one.
const COMPILED_TAPS: std::ops::RangeInclusive<usize> = 2..=5;

fn kernel(entry: &'static str, taps: usize) -> Kernel {
    let taps = if COMPILED_TAPS.contains(&taps) { taps as i32 } else { 0 };
    Kernel::new(OP, entry).define("TAPS", taps).no_fma()
}

/// The module as the published models use it: 4 taps.
pub(super) fn variants() -> Vec<Kernel> {
    vec![kernel("step_bf16", 4)]
}

/// Writes every row of `y`, then leaves each sequence's last inputs in its slot of `state`.
pub(crate) fn causal(
    cuda: &Cuda,
    sms: usize,
    x: View,
    w: &Tensor,
    state: &mut Tensor,
    batch: &Batch,
    y: &mut Tensor,
) -> Result<()> {
    let (rows, channels, taps) = (y.rows(), y.cols(), w.cols());
    let (dtype, count, inputs) = (y.dtype(), batch.spans.len(), batch.inputs);
    let per_thread = if channels.is_multiple_of(per16(dtype)) { per16(dtype) } else { 1 };
    let across = blocks(OP, channels, THREADS * per_thread)?;
    let grid = |y| Grid::new([across, y, 1], THREADS as u32);
    let sequences = [
        inputs.starts.arg(),
        inputs.contexts.arg(),
        inputs.slot_in.arg(),
        inputs.slot_out.arg(),
        int(OP, count)?,
        long(state.rows()),
        long(x.pitch()),
        int(OP, channels)?,
        int(OP, taps)?,
    ];
    let operands = [x.arg(), w.arg(), state.arg(), y.arg()];
    if count == rows {
        let step = kernel(entry!(dtype, "step"), taps);
        return cuda.launch(step, grid(blocks_y(OP, rows, 1)?), &[&operands[..], &sequences].concat());
    }
    let wanted = (BLOCKS_PER_SM * sms).div_ceil(across as usize);
    let run = rows.div_ceil(wanted.max(1)).clamp(RUNS[0], RUNS[1]);
    let args = [&operands[..], &sequences, &[int(OP, rows)?, Arg::I32(run as i32)]].concat();
    cuda.launch(kernel(entry!(dtype, "causal"), taps), grid(blocks_y(OP, rows, run)?), &args)?;
    let args = [&operands[..3], &sequences].concat();
    cuda.launch(kernel(entry!(dtype, "keep"), taps), grid(blocks_y(OP, count, 1)?), &args)
}
