//! FP8 experts of many tokens on Hopper: how a step is cut, and the launches of kernels/moe_hopper.cu.

use super::grids::int;
use super::hopper::Matrix;
use crate::device::cuda::{Arg, Cuda, Grid, Kernel};
use crate::device::{Arch, DeviceSpec};
use crate::error::Result;
use crate::mem::ALIGN_BYTES;
use crate::ops::moe::{Dims, EXPERTS, Layout};

/// The file's stem.
pub(super) const MODULE: &str = "moe_hopper";
/// Weight rows of a tile, most pairs of one, bytes along K of a stage, and the stages of its ring, as the kernel has them.
const ROWS: usize = 256;
const PAIRS: usize = 128;
const TILE_K: usize = 128;
const STAGES: usize = 4;
/// Pairs of one box.
const UNIT: usize = 16;
/// One warp group copies, two multiply.
const THREADS: u32 = 384;
/// The kernel finds an expert by two votes of a warp.
const MOST_EXPERTS: usize = 1024;
/// Down takes no fewer columns at a time: with fewer its launches cost more than they save (measured on an H200).
const LEAST_COLUMNS: usize = 2 * ROWS;

/// The kernel with this entry.
pub(super) const fn kernel(entry: &'static str) -> Kernel {
    Kernel::new(MODULE, entry)
}

/// How a step is cut: blocks of tokens whose experts' weights are read once, in each of which down and the sum over experts
/// take some columns at a time. A pair's activations make room for its outputs once they are codes, so that a block has many
/// more tokens than with both whole.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cut {
    /// Tokens of a block; the last one may be shorter.
    pub(super) tokens: usize,
    /// Columns that down takes at a time, the last time perhaps fewer.
    pub(super) columns: usize,
}

impl Cut {
    /// Blocks of equal size, as few as `bytes` of workspace hold; of those the widest outputs.
    pub(super) fn new(tokens: usize, dims: Dims, bytes: u64) -> Option<Cut> {
        let widths = |parts: usize| dims.hidden.div_ceil(parts).next_multiple_of(ROWS).min(dims.hidden);
        let parts = (dims.hidden / LEAST_COLUMNS).max(1);
        (1..=tokens).find_map(|blocks| {
            let cuts = (1..=parts).map(|parts| Cut { tokens: tokens.div_ceil(blocks), columns: widths(parts) });
            cuts.into_iter().find(|cut| cut.layout(dims).bytes <= bytes)
        })
    }

    /// Launches of down.
    fn parts(&self, dims: Dims) -> usize {
        dims.hidden.div_ceil(self.columns)
    }

    /// Counters of taken tiles: one for each launch. They follow the offsets.
    pub(super) fn tickets(&self, dims: Dims) -> usize {
        1 + self.parts(dims)
    }

    /// A block's workspace. Pairs' activations and outputs are never needed at once.
    pub(super) fn layout(&self, dims: Dims) -> Layout {
        let pairs = self.tokens * dims.top_k;
        let mut bytes = 0;
        let mut take = |piece: usize| {
            let at = bytes;
            bytes += (piece as u64).next_multiple_of(ALIGN_BYTES);
            at
        };
        let sorted = take(4 * pairs);
        let offsets = take(4 * (dims.experts + 1 + self.tickets(dims)));
        let x = (take(self.tokens * dims.hidden), take(4 * self.tokens));
        let h = (take(pairs * dims.inter), take(4 * pairs));
        let both = take(2 * pairs * dims.inter.max(self.columns));
        Layout { sorted, offsets, h: both, y: both, inputs: [x, (0, 0), h], bytes }
    }
}

/// Whether the kernel is there for these sizes; scales are those of tokens and of weight rows.
pub(super) fn takes(cuda: &Cuda, spec: &DeviceSpec, dims: Dims) -> bool {
    let whole = |cols: usize| cols.is_multiple_of(16);
    let is_there = cuda.has_hopper() && spec.arch == Arch::Sm90a;
    is_there && whole(dims.hidden) && whole(dims.inter) && dims.experts <= MOST_EXPERTS
}

/// A stack of matrices, one for each slot.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stack {
    pub(super) codes: Arg,
    pub(super) scales: Arg,
    /// All of them, the first of slot 0, and from one slot to the next.
    pub(super) rows: usize,
    pub(super) first: usize,
    pub(super) stride: usize,
}

/// What both products have in common.
#[derive(Debug, Clone, Copy)]
pub(super) struct Common {
    pub(super) dims: Dims,
    pub(super) slots: usize,
    pub(super) pairs: usize,
    pub(super) table: Arg,
    pub(super) sorted: Arg,
    pub(super) offsets: Arg,
}

/// `out` (bf16, a row a sorted pair) = silu(gate x) up x, of the codes and scales of tokens.
pub(super) fn gate_up(
    cuda: &Cuda,
    spec: &DeviceSpec,
    c: &Common,
    x: [Arg; 2],
    [gate, up]: [Stack; 2],
    (out, ticket): (Arg, Arg),
) -> Result<()> {
    let Dims { hidden, inter, top_k, .. } = c.dims;
    let [top_k, gate_first, up_first] = ints([top_k, gate.first, up.first])?;
    let maps = [map(cuda, gate, hidden)?, map(cuda, up, hidden)?];
    let head = [x[0], x[1], top_k, gate.scales, gate_first, up.scales, up_first];
    let tail = tail(c, gate.stride, (out, ticket), (inter, hidden))?;
    let grid = grid(spec, c, inter.div_ceil(ROWS / 2));
    cuda.launch(kernel("moe_hopper_gate_up"), grid, &[&maps[..], &head, &tail].concat())
}

/// `out` (bf16, `columns` a pair) = `columns` rows of down from its first on, of the codes and scales of sorted pairs.
pub(super) fn down(
    cuda: &Cuda,
    spec: &DeviceSpec,
    c: &Common,
    [codes, scales]: [Arg; 2],
    w: Stack,
    (out, ticket): (Arg, Arg),
    columns: usize,
) -> Result<()> {
    let inter = c.dims.inter;
    let x = Matrix { codes, rows: c.pairs, pitch: inter }.map(cuda, inter, [UNIT, TILE_K])?;
    let [first] = ints([w.first])?;
    let head = [x, map(cuda, w, inter)?, scales, w.scales, first];
    let tail = tail(c, w.stride, (out, ticket), (columns, inter))?;
    let grid = grid(spec, c, columns.div_ceil(ROWS));
    cuda.launch(kernel("moe_hopper_down"), grid, &[&head[..], &tail].concat())
}

fn ints<const N: usize>(values: [usize; N]) -> Result<[Arg; N]> {
    let mut args = [Arg::NULL; N];
    for (arg, value) in args.iter_mut().zip(values) {
        *arg = int(EXPERTS, value)?;
    }
    Ok(args)
}

fn map(cuda: &Cuda, w: Stack, cols: usize) -> Result<Arg> {
    // The kernel counts rows in 32 bits.
    let _ = int(EXPERTS, w.rows)?;
    Matrix { codes: w.codes, rows: w.rows, pitch: cols }.map(cuda, cols, [ROWS / 2, TILE_K])
}

/// The arguments after an entry's own.
fn tail(c: &Common, stride: usize, (out, ticket): (Arg, Arg), (rows, cols): (usize, usize)) -> Result<[Arg; 10]> {
    let [stride, rows, cols, experts, slots] = ints([stride, rows, cols, c.dims.experts, c.slots])?;
    Ok([stride, c.table, c.sorted, c.offsets, out, rows, cols, experts, slots, ticket])
}

/// A block for each multiprocessor that can have a tile of `runs` runs of rows.
fn grid(spec: &DeviceSpec, c: &Common, runs: usize) -> Grid {
    let most = (c.pairs / PAIRS + c.pairs.min(c.dims.experts)).saturating_mul(runs);
    Grid::new([most.min(spec.sms as usize) as u32, 1, 1], THREADS).shared(shared(c.dims.experts) as u32)
}

/// `Shared` and `Tables` of the kernel.
const fn shared(experts: usize) -> usize {
    const STAGE: usize = (ROWS + PAIRS) * TILE_K;
    const OWN: usize = 2 * UNIT * (2 * 128 + 16) + 8 * PAIRS;
    const BARRIERS: usize = 8 * (2 * STAGES + 4);
    STAGES * STAGE + 2 * OWN + BARRIERS + 8 + 4 * (3 * experts + 2)
}

const _: () = assert!(shared(MOST_EXPERTS) <= 227 << 10, "every number of experts has room");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cards;
    use crate::num::DType;
    use crate::ops::moe::{Inputs, tactic};
    use crate::ops::scheme::ActScheme;

    const DIMS: Dims = Dims { hidden: 2048, inter: 512, experts: 256, top_k: 8 };
    const INPUTS: Inputs = Inputs { x: [ActScheme::Fp8Token, ActScheme::None], h: ActScheme::Fp8Token };

    fn cut_of(tokens: usize, dims: Dims) -> Cut {
        let bytes = tactic(&cards::find("h200").unwrap(), tokens, dims, DType::Bf16, INPUTS).workspace;
        let cut = Cut::new(tokens, dims, bytes).unwrap();
        let what = format!("{tokens} of {dims:?}: {cut:?}");
        assert!(cut.layout(dims).bytes <= bytes, "{what}");
        assert!(cut.tokens <= tokens && (cut.columns == dims.hidden || cut.columns.is_multiple_of(ROWS)), "{what}");
        cut
    }

    #[test]
    fn a_long_step_reads_the_experts_once_in_the_workspace_of_a_third_of_it() {
        let cut = cut_of(8192, DIMS);
        assert_eq!((cut.tokens, cut.columns), (8192, 512));
        let cut = cut_of(2048, DIMS);
        assert_eq!((cut.tokens, cut.columns), (2048, 2048));
        // The shape that tests/it/cuda/moe.rs has for this.
        let cut = cut_of(1000, Dims { hidden: 1024, inter: 32, experts: 64, top_k: 64 });
        assert_eq!((cut.tokens, cut.columns), (1000, 512));
    }

    #[test]
    fn every_step_has_a_cut_within_what_is_planned() {
        let others = [
            Dims { hidden: 16, inter: 16, experts: 1, top_k: 1 },
            Dims { hidden: 4096, inter: 1024, experts: 512, top_k: 10 },
            Dims { hidden: 2064, inter: 16, experts: 1024, top_k: 2 },
            Dims { hidden: 256, inter: 4096, experts: 6, top_k: 6 },
        ];
        for dims in others.into_iter().chain([DIMS]) {
            for tokens in [1, 2, 63, 64, 129, 1000, 2816, 2817, 5000, 16_384, 100_000] {
                let _ = cut_of(tokens, dims);
            }
        }
    }
}
