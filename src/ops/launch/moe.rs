//! Router, experts and shared expert. Experts take one of four paths:
//!
//! | path | where | kernels |
//! |---|---|---|
//! | decode | bf16 activations, few pairs | moe_decode.cu: each expert's weights are streamed once |
//! | Hopper | FP8 by tokens' and weight rows' scales, more pairs | moe_hopper.cu: tiles by Hopper's own instructions |
//! | tiles | bf16 activations, more pairs, or `batch_invariant` | moe_gemm.cu: tiles of an expert's pairs on tensor cores |
//! | any | f32 activations, odd sizes, mixed forms | moe.cu: any form and size, outside the tensor cores |
//!
//! On each path a token's sums have one order, whatever the other tokens; which path it is hangs on their number, unless
//! `batch_invariant` leaves one for all numbers.

use super::grids::{WARP, blocks, blocks_y, flag, int};
use super::moe_hopper::{self, Cut};
use super::tiles::{self, Codes, Product, Stored, Tile};
use crate::device::cuda::{Arg, Cuda, Grid, Kernel, entry};
use crate::device::{DeviceSpec, cards};
use crate::error::Result;
use crate::num::DType;
use crate::ops::moe::{COMBINE, Dims, EXPERTS, Experts, Inputs, Layout, ROUTE, Routing};
use crate::ops::scheme::{ActScheme, Global, Scheme};
use crate::ops::weight::{BLOCK, InputScale, NVFP4_GROUP, Weight};
use crate::tensor::Tensor;

const MODULE: &str = "moe";
const DECODE: &str = "moe_decode";
const TILES: &str = "moe_gemm";

/// Threads of a block of columns in the sums over experts; a thread has 8 columns.
const COMBINE_THREADS: usize = 256;
const COMBINE_COLS: usize = 8 * COMBINE_THREADS;
/// Experts and threads of one block of the sort.
const SORTED_EXPERTS: usize = 2;
const SORT_THREADS: u32 = 1024;
/// Pairs and rows of a tile on the path for anything.
const ANY_PAIRS: usize = 16;
const ANY_ROWS: usize = 64;

/// Shared memory for the rows of x of one pass of decode: 8 rows of 4,096 columns, and room beside them on every card.
const DECODE_ROWS_BYTES: usize = 66 << 10;
/// Pairs of one pass, warps of a block, and rows of a warp's tile.
const DECODE_PAIRS: usize = 8;
const DECODE_WARPS: usize = 8;
const DECODE_TILE: usize = 16;
/// Blocks that decode aims at for each multiprocessor: three for each place, so that the last ones do not matter; more
/// would read, quantise and stage their rows of x again (measured on an H200 at 64 tokens: 12 cost 6 % of a step).
const DECODE_BLOCKS: usize = 7;
/// Decode takes at most this many pairs, and this many for each expert: beyond, an expert's weights would be read again for
/// every eight of its pairs.
const DECODE_MOST_PAIRS: usize = 1024;
const DECODE_PER_EXPERT: usize = 4;
/// Shared memory of a tile's block besides Gemm's: the pairs' rows.
const TILE_SHARED_BYTES: usize = 1024;
/// The published layer.
const PUBLISHED: Dims = Dims { hidden: 2048, inter: 512, experts: 256, top_k: 8 };
/// Up to here one kernel does down and the sum over a token's experts: reading an expert twice costs less than a launch.
const FUSED_TOKENS: usize = 8;

/// An operand of [`experts`].
pub(crate) struct Call<'a> {
    pub(crate) spec: &'a DeviceSpec,
    pub(crate) x: &'a Tensor,
    pub(crate) routing: &'a Routing,
    pub(crate) w: &'a Experts,
    pub(crate) inputs: Inputs,
    pub(crate) dims: Dims,
    /// Experts the weights have room for.
    pub(crate) slots: usize,
    pub(crate) batch_invariant: bool,
}

/// The modules as the published models use them: experts in bf16, FP8 by channel and by block, and NVFP4, their inputs
/// quantised as those checkpoints ask and not at all.
pub(super) fn variants() -> Vec<Kernel> {
    use Stored::{Bf16, Fp8, Fp8Block, Nvfp4};
    let mut all = vec![Kernel::new(MODULE, "combine_bf16"), moe_hopper::kernel("moe_hopper_gate_up")];
    for (w, blocked) in [(Bf16, false), (Fp8, false), (Fp8Block, true), (Nvfp4, false)] {
        all.push(decode_kernel("decode_gate_up", w, blocked));
    }
    let forms =
        [(Bf16, Bf16), (Bf16, Fp8), (Fp8, Fp8), (Bf16, Fp8Block), (Fp8, Fp8Block), (Bf16, Nvfp4), (Nvfp4, Nvfp4)];
    let Dims { hidden, inter, experts, top_k } = PUBLISHED;
    for spec in cards::all() {
        for (x, w) in forms {
            let blocked = w == Fp8Block;
            let product = Product { x: x.codes(), w: w.codes(), blocked };
            for pairs in (0..14).map(|i| top_k << i) {
                for [rows, cols] in [[2 * inter, hidden], [hidden, inter]] {
                    let tile = tile(&spec, product, [pairs, experts, rows, cols]);
                    all.extend(tile.map(|tile| tile_kernel("moe_gemm_down", tile, x, w, blocked)));
                }
            }
        }
    }
    all.sort_unstable();
    all.dedup();
    all
}

/// See [`crate::ops::moe::route`].
pub(crate) fn route(cuda: &Cuda, logits: &Tensor, act: DType, ids: &mut Tensor, weights: &mut Tensor) -> Result<()> {
    const WARPS: usize = 4;
    let (tokens, experts, top_k) = (logits.rows(), logits.cols(), ids.cols());
    let grid = Grid::new([blocks(ROUTE, tokens, WARPS)?, 1, 1], (WARPS * WARP) as u32);
    let [tokens, experts, top_k] = ints(ROUTE, [tokens, experts, top_k])?;
    let rounded = flag(act == DType::Bf16);
    let kernel = Kernel::new(MODULE, entry!(logits.dtype(), "route"));
    cuda.launch(kernel, grid, &[logits.arg(), ids.arg(), weights.arg(), tokens, experts, top_k, rounded])
}

/// See [`crate::ops::moe::combine_shared`].
pub(crate) fn combine_shared(cuda: &Cuda, out: &mut Tensor, shared: &Tensor, gate: &Tensor) -> Result<()> {
    let (tokens, hidden) = (out.rows(), out.cols());
    let grid = combine_grid(COMBINE, tokens, hidden)?;
    let kernel = Kernel::new(MODULE, entry!(out.dtype(), "combine_shared"));
    cuda.launch(kernel, grid, &[out.arg(), shared.arg(), gate.arg(), int(COMBINE, hidden)?])
}

/// See [`crate::ops::moe::experts`]; `workspace` is laid out for blocks of `block_tokens`. Where the CPU arm refuses a
/// pair, here an absent expert's adds nothing, and an id or a slot out of range makes its token's row NaN.
pub(crate) fn experts(
    cuda: &Cuda,
    call: &Call,
    block_tokens: usize,
    workspace: &Tensor,
    out: &mut Tensor,
) -> Result<()> {
    let tokens = call.x.rows();
    let block = |layout| Block { cuda, call, first: 0, tokens, workspace, layout, out };
    let layout = Layout::new(block_tokens.min(tokens), call.dims, call.x.dtype(), call.inputs);
    let whole = block(layout);
    let cut = whole.takes_hopper().then(|| Cut::new(tokens, call.dims, workspace.bytes())).flatten();
    let (block_tokens, layout) = cut.map_or((block_tokens, layout), |cut| (cut.tokens, cut.layout(call.dims)));
    for first in (0..tokens).step_by(block_tokens) {
        let block = Block { first, tokens: block_tokens.min(tokens - first), ..block(layout) };
        match cut {
            Some(cut) => block.hopper(cut)?,
            None => block.run()?,
        }
    }
    Ok(())
}

fn ints<const N: usize>(op: &'static str, values: [usize; N]) -> Result<[Arg; N]> {
    let mut args = [Arg::NULL; N];
    for (arg, value) in args.iter_mut().zip(values) {
        *arg = int(op, value)?;
    }
    Ok(args)
}

fn combine_grid(op: &'static str, tokens: usize, hidden: usize) -> Result<Grid> {
    let threads = hidden.div_ceil(8).min(COMBINE_THREADS).next_multiple_of(WARP) as u32;
    Ok(Grid::new([blocks(op, tokens, 1)?, blocks_y(op, hidden, COMBINE_COLS)?, 1], threads))
}

fn decode_kernel(entry: &'static str, form: Stored, blocked: bool) -> Kernel {
    Kernel::new(DECODE, entry).define("WEIGHT", form as i32).define("BLOCKED", i32::from(blocked))
}

/// One projection of every slot and how its input is quantised.
#[derive(Clone, Copy)]
struct Side<'a> {
    weight: &'a Weight,
    act: ActScheme,
    /// The row of slot 0, rows from one slot to the next, rows of a matrix.
    first: usize,
    stride: usize,
    rows: usize,
}

impl Side<'_> {
    fn form(&self) -> Stored {
        Stored::of(self.weight.spec().scheme)
    }

    fn divides(&self) -> bool {
        self.weight.spec().scheme == Scheme::Nvfp4(Global::Divides)
    }

    fn cols(&self) -> usize {
        self.weight.cols()
    }

    /// Codes, scales, row scales.
    fn buffers(&self) -> [Arg; 3] {
        let of = |t: Option<&Tensor>| t.map_or(Arg::NULL, Tensor::arg);
        [self.weight.codes().arg(), of(self.weight.scales()), of(self.weight.row_scales())]
    }

    /// As the path for Hopper takes it.
    fn stack(&self) -> moe_hopper::Stack {
        let [codes, _, scales] = self.buffers();
        let (rows, first, stride) = (self.weight.rows(), self.first, self.stride);
        moe_hopper::Stack { codes, scales, rows, first, stride }
    }

    /// The stored scale of each slot's input.
    fn stored(&self) -> Arg {
        match (self.weight.input(), self.act) {
            (InputScale::Each(scales), ActScheme::Fp8Tensor | ActScheme::Nvfp4) => scales.arg(),
            _ => Arg::NULL,
        }
    }

    /// Whether one input does for both, the same bits.
    fn shares_input(&self, other: &Side) -> bool {
        self.act == other.act
            && (std::ptr::eq(self.weight, other.weight) || !matches!(self.act, ActScheme::Fp8Tensor | ActScheme::Nvfp4))
    }

    /// Whether scales change along the columns.
    fn blocked(&self) -> bool {
        self.form() == Stored::Fp8Block || self.act == ActScheme::Fp8Group
    }

    /// Columns decode takes at a step, where it takes this form and input.
    fn decode_step(&self) -> Option<usize> {
        match (self.form(), self.act) {
            // A pair of these has no published model, and no kernel.
            (Stored::F32, _) | (Stored::Nvfp4, ActScheme::Fp8Group) => None,
            (Stored::Bf16, _) => Some(32),
            (Stored::Fp8 | Stored::Fp8Block, ActScheme::Fp8Group) => Some(BLOCK),
            (Stored::Fp8 | Stored::Fp8Block, _) => Some(64),
            (Stored::Nvfp4, _) => Some(128),
        }
    }

    fn decodes(&self) -> bool {
        let (cols, bytes) = (self.cols(), self.weight.codes().bytes() / (self.weight.rows() / self.rows) as u64);
        self.decode_step().is_some_and(|step| cols.is_multiple_of(step))
            && decode_pitch(cols) <= DECODE_ROWS_BYTES
            && bytes < 1 << 31
    }

    /// The form of the input in a tile's product, where there is such a product.
    fn tile_input(&self) -> Option<Stored> {
        let (form, cols) = (self.form(), self.cols());
        let input = match (form, self.act) {
            (Stored::F32, _) => None,
            (_, ActScheme::None) => Some(Stored::Bf16),
            (Stored::Fp8 | Stored::Fp8Block, ActScheme::Fp8Tensor | ActScheme::Fp8Token | ActScheme::Fp8Group) => {
                Some(Stored::Fp8)
            }
            (Stored::Nvfp4, ActScheme::Nvfp4) => Some(Stored::Nvfp4),
            _ => None,
        };
        input.filter(|_| cols.is_multiple_of(if form == Stored::Nvfp4 { 4 * NVFP4_GROUP } else { 16 }))
    }
}

/// Bytes of a row in decode's shared memory: an odd multiple of 64.
fn decode_pitch(cols: usize) -> usize {
    (2 * cols).next_multiple_of(64) | 64
}

/// Parts of the columns in decode, by their number alone.
fn decode_splits(cols: usize) -> usize {
    match cols {
        0..1024 => 1,
        1024..2048 => 2,
        _ => 4,
    }
}

/// The tile for `pairs` pairs of `experts` experts with matrices of `rows` rows by `cols` columns that a block takes together:
/// as for a linear layer of all experts' rows and one expert's pairs. None splits the columns among warps, so all add up in
/// one order.
fn tile(spec: &DeviceSpec, product: Product, [pairs, experts, rows, cols]: [usize; 4]) -> Option<Tile> {
    let busy = pairs.min(experts);
    let mean = pairs.div_ceil(busy);
    // An expert in three has more pairs than this.
    let each = mean + mean.isqrt() / 2;
    let limit = tiles::shared_limit(spec.arch);
    let tiles = tiles::tiles(spec.arch, product)
        .filter(|tile| {
            // Slices are where sums of some products are passed on.
            let one_order = tile.wk == 1 && (product.blocked || tile.slice == 64);
            // With widened codes and two sets of sums there are no registers left for addresses.
            one_order && !(product.blocked && product.x == Codes::Bf16 && tile.tokens() > 64)
        })
        .map(|mut tile| {
            while tile.stages > 2 && tile.shared(product) + TILE_SHARED_BYTES > limit {
                tile.stages -= 1;
            }
            tile
        })
        .filter(|tile| tile.shared(product) + TILE_SHARED_BYTES <= limit);
    tiles::least(tiles, |tile| tiles::seconds(spec, product, tile, each, busy * rows, cols))
}

fn tile_kernel(entry: &'static str, tile: Tile, x: Stored, w: Stored, blocked: bool) -> Kernel {
    Kernel::new(TILES, entry)
        .define("TILE", tile.packed())
        .define("MOE_X", x as i32)
        .define("MOE_W", w as i32)
        .define("MOE_BLOCKED", i32::from(blocked))
}

/// Where an input's rows are for a product: rows of the activation type, or codes and scales in the workspace.
#[derive(Debug, Clone, Copy)]
struct Input {
    codes: Arg,
    scales: Arg,
    /// Pairs that share a row.
    per_row: usize,
}

/// One block of tokens.
struct Block<'a> {
    cuda: &'a Cuda,
    call: &'a Call<'a>,
    first: usize,
    tokens: usize,
    workspace: &'a Tensor,
    layout: Layout,
    out: &'a Tensor,
}

impl Block<'_> {
    fn run(&self) -> Result<()> {
        let [gate, up, down] = self.sides();
        let bf16 = self.call.x.dtype() == DType::Bf16;
        let alike = gate.form() == up.form() && gate.divides() == up.divides() && gate.shares_input(&up);
        if bf16 && alike && self.few() && !self.call.batch_invariant && gate.decodes() && down.decodes() {
            return self.decode(gate, up, down);
        }
        self.sort(0)?;
        match (self.tiled(gate, 2 * gate.rows), self.tiled(down, down.rows)) {
            (Some(x), Some(h)) if bf16 && alike => self.tiles([gate, up], x, down, h)?,
            _ => self.any(gate, up, down)?,
        }
        self.combine(0, self.call.dims.hidden)
    }

    /// Few enough pairs for decode.
    fn few(&self) -> bool {
        self.pairs() <= DECODE_MOST_PAIRS.min(DECODE_PER_EXPERT * self.call.dims.experts)
    }

    fn sides(&self) -> [Side<'_>; 3] {
        let Call { w, inputs, dims: Dims { hidden, inter, .. }, .. } = self.call;
        let (inter, hidden) = (*inter, *hidden);
        let side = |weight, act, first, stride, rows| Side { weight, act, first, stride, rows };
        let down = side(&w.down, inputs.h, 0, hidden, hidden);
        match w.gate_up.parts() {
            [gate, up] => [side(gate, inputs.x[0], 0, inter, inter), side(up, inputs.x[1], 0, inter, inter), down],
            parts => {
                let gate = side(&parts[0], inputs.x[0], 0, 2 * inter, inter);
                [gate, Side { first: inter, ..gate }, down]
            }
        }
    }

    fn pairs(&self) -> usize {
        self.tokens * self.call.dims.top_k
    }

    fn piece(&self, at: u64) -> Arg {
        self.workspace.arg_at(at as usize)
    }

    fn ids(&self) -> Arg {
        self.call.routing.ids.arg_at(self.first * self.call.dims.top_k)
    }

    fn mix(&self) -> Arg {
        self.call.routing.weights.arg_at(self.first * self.call.dims.top_k)
    }

    fn x(&self) -> Arg {
        self.call.x.arg_at(self.first * self.call.dims.hidden)
    }

    fn out(&self) -> Arg {
        self.out.arg_at(self.first * self.call.dims.hidden)
    }

    fn table(&self) -> Arg {
        self.call.w.slots.arg()
    }

    /// Experts, slots.
    fn counts(&self) -> Result<[Arg; 2]> {
        ints(EXPERTS, [self.call.dims.experts, self.call.slots])
    }

    /// With `zeros` numbers that are 0 after the offsets.
    fn sort(&self, zeros: usize) -> Result<()> {
        let experts = self.call.dims.experts;
        let grid = Grid::new([blocks(EXPERTS, experts, SORTED_EXPERTS)?, 1, 1], SORT_THREADS);
        let [pairs, experts, zeros] = ints(EXPERTS, [self.pairs(), experts, zeros])?;
        let (sorted, offsets) = (self.piece(self.layout.sorted), self.piece(self.layout.offsets));
        self.cuda.launch(Kernel::new(MODULE, "sort_pairs"), grid, &[self.ids(), sorted, offsets, pairs, experts, zeros])
    }

    /// The sums over experts of `columns` columns from `from` on, which the pairs' outputs are.
    fn combine(&self, from: usize, columns: usize) -> Result<()> {
        let Dims { hidden, top_k, .. } = self.call.dims;
        let grid = combine_grid(EXPERTS, self.tokens, columns)?;
        let kernel = Kernel::new(MODULE, entry!(self.call.x.dtype(), "combine"));
        let out = self.out.arg_at(self.first * hidden + from);
        let [columns, hidden, top_k] = ints(EXPERTS, [columns, hidden, top_k])?;
        let [experts, slots] = self.counts()?;
        let y = self.piece(self.layout.y);
        let args = [y, self.ids(), self.mix(), self.table(), out, columns, hidden, top_k, experts, slots];
        self.cuda.launch(kernel, grid, &args)
    }

    // Hopper.

    /// Whether the path for Hopper takes this call, which `self` has all tokens of.
    fn takes_hopper(&self) -> bool {
        let [gate, up, down] = self.sides();
        let by_rows = |side: &Side| side.form() == Stored::Fp8 && side.act == ActScheme::Fp8Token;
        let forms = self.call.x.dtype() == DType::Bf16 && [gate, up, down].iter().all(by_rows);
        forms
            && !self.few()
            && !self.call.batch_invariant
            && moe_hopper::takes(self.cuda, self.call.spec, self.call.dims)
    }

    fn hopper(&self, cut: Cut) -> Result<()> {
        let Call { spec, dims, slots, .. } = *self.call;
        let [gate, up, down] = self.sides();
        let tickets = cut.tickets(dims);
        self.sort(tickets)?;
        let (sorted, offsets) = (self.piece(self.layout.sorted), self.piece(self.layout.offsets));
        let ticket = |i: usize| self.piece(self.layout.offsets + 4 * (dims.experts + 1 + i) as u64);
        let common = moe_hopper::Common { dims, slots, pairs: self.pairs(), table: self.table(), sorted, offsets };
        let (h, y) = (self.piece(self.layout.h), self.piece(self.layout.y));
        let x = self.quantised(gate, self.x(), dims.top_k, 0)?;
        let stacks = [gate.stack(), up.stack()];
        moe_hopper::gate_up(self.cuda, spec, &common, [x.codes, x.scales], stacks, (h, ticket(0)))?;
        let x = self.quantised(down, h, 1, 2)?;
        for (i, from) in (0..dims.hidden).step_by(cut.columns).enumerate() {
            let columns = cut.columns.min(dims.hidden - from);
            let stack = moe_hopper::Stack { first: down.first + from, ..down.stack() };
            moe_hopper::down(self.cuda, spec, &common, [x.codes, x.scales], stack, (y, ticket(1 + i)), columns)?;
            self.combine(from, columns)?;
        }
        Ok(())
    }

    // Decode.

    fn decode(&self, gate: Side, up: Side, down: Side) -> Result<()> {
        let top_k = self.call.dims.top_k;
        let (h, y) = (self.piece(self.layout.h), self.piece(self.layout.y));
        self.decode_product("decode_gate_up", &[gate, up], DECODE_TILE, self.x(), top_k, h)?;
        if self.tokens <= FUSED_TOKENS {
            return self.decode_down_combine(down, h);
        }
        self.decode_product("decode_down", &[down], 2 * DECODE_TILE, h, 1, y)?;
        self.combine(0, self.call.dims.hidden)
    }

    /// `warp_rows` are the rows that a warp takes at a time, `per_row` the pairs that share a row of the input `x`.
    fn decode_product(
        &self,
        entry: &'static str,
        sides: &[Side],
        warp_rows: usize,
        x: Arg,
        per_row: usize,
        out: Arg,
    ) -> Result<()> {
        let side = sides[0];
        let (pairs, experts) = (self.pairs(), self.call.dims.experts);
        let (cols, splits, pitch) = (side.cols(), decode_splits(side.cols()), decode_pitch(side.cols()));
        let pass = (DECODE_ROWS_BYTES / pitch).clamp(1, DECODE_PAIRS);
        let turns = side.rows.div_ceil(DECODE_WARPS / splits * warp_rows);
        // As many turns in a block as leave enough blocks: they share its rows of x.
        let busy = pairs.min(experts);
        let enough = DECODE_BLOCKS * self.call.spec.sms as usize;
        let per_block = (1..=4).rev().find(|n| busy * turns.div_ceil(*n) >= enough).unwrap_or(1);
        let groups = if side.act == ActScheme::Fp8Group { pass * cols.div_ceil(BLOCK) } else { 0 };
        let partial = 2 * (splits - 1) * (DECODE_WARPS / splits) * 256;
        let shared = pairs.div_ceil(4) * 16 + pass * pitch + 4 * (DECODE_PAIRS + partial + groups);
        let grid = Grid::new(
            [blocks(EXPERTS, turns, per_block)?, blocks_y(EXPERTS, busy, 1)?, 1],
            (WARP * DECODE_WARPS) as u32,
        );
        let [pairs, per_row, rows, cols] = ints(EXPERTS, [pairs, per_row, side.rows, cols])?;
        let [stride, splits, per_block, pass] = ints(EXPERTS, [side.stride, splits, per_block, pass])?;
        let [experts, slots] = self.counts()?;
        let by_pair = flag(self.pairs() <= self.call.dims.experts);
        let mut args = vec![x];
        for side in sides {
            args.extend(side.buffers());
            args.push(int(EXPERTS, side.first)?);
        }
        args.extend([
            out,
            side.stored(),
            Arg::I32(scheme(side.act)),
            per_row,
            self.ids(),
            self.table(),
            pairs,
            by_pair,
        ]);
        args.extend([experts, slots, rows, cols, stride, flag(side.divides()), splits, per_block, pass]);
        args.push(int(EXPERTS, pitch)?);
        self.cuda.launch(decode_kernel(entry, side.form(), side.blocked()), grid.shared(shared as u32), &args)
    }

    fn decode_down_combine(&self, down: Side, h: Arg) -> Result<()> {
        let (cols, pitch) = (down.cols(), decode_pitch(down.cols()));
        let grid = [blocks(EXPERTS, down.rows, 2 * DECODE_TILE)?, blocks_y(EXPERTS, self.tokens, 1)?, 1];
        let shared = DECODE_WARPS * (pitch + 4 * cols.div_ceil(BLOCK));
        let [experts, slots] = self.counts()?;
        let [codes, scales, row_scales] = down.buffers();
        let [first, top_k, rows, cols] = ints(EXPERTS, [down.first, self.call.dims.top_k, down.rows, cols])?;
        let [stride, splits, pitch] = ints(EXPERTS, [down.stride, decode_splits(down.cols()), pitch])?;
        let mut args = vec![h, codes, scales, row_scales, first, self.mix(), self.out(), down.stored()];
        args.extend([Arg::I32(scheme(down.act)), self.ids(), self.table(), top_k, experts, slots, rows, cols]);
        args.extend([stride, flag(down.divides()), splits, pitch]);
        let kernel = decode_kernel("decode_down_combine", down.form(), down.blocked());
        self.cuda.launch(kernel, Grid::new(grid, (WARP * DECODE_WARPS) as u32).shared(shared as u32), &args)
    }

    // Quantised inputs in the workspace.

    /// The input of `side`, which is `rows` (one for `per_row` pairs) or what they quantise to, put where piece `piece` of
    /// the layout's inputs is.
    fn quantised(&self, side: Side, rows: Arg, per_row: usize, piece: usize) -> Result<Input> {
        const WARPS: usize = 8;
        let per_pair = match side.act {
            ActScheme::None => return Ok(Input { codes: rows, scales: Arg::NULL, per_row }),
            ActScheme::Fp8Token | ActScheme::Fp8Group => false,
            ActScheme::Fp8Tensor | ActScheme::Nvfp4 => true,
        };
        let (codes, scales) = self.layout.inputs[piece];
        let (codes, scales) = (self.piece(codes), self.piece(scales));
        // Of an input by token, a row; of one by pair, as many pairs as share a row of x.
        let (count, shared_by) = if per_pair { (self.pairs(), per_row) } else { (self.pairs() / per_row, 1) };
        let grid = Grid::new([blocks(EXPERTS, count, WARPS)?, 1, 1], (WARPS * WARP) as u32);
        let [count, cols, shared_by] = ints(EXPERTS, [count, side.cols(), shared_by])?;
        let [experts, slots] = self.counts()?;
        let scheme = Arg::I32(scheme(side.act));
        let divides = flag(side.divides());
        let mut args = vec![rows, side.stored(), self.ids(), self.table(), codes, scales, scheme, divides];
        args.extend([count, cols, shared_by, experts, slots]);
        let kernel = Kernel::new(MODULE, entry!(self.call.x.dtype(), "quantise_rows"));
        self.cuda.launch(kernel, grid, &args)?;
        Ok(Input { codes, scales, per_row: if per_pair { 1 } else { per_row } })
    }

    // Tiles.

    /// The tile of a product whose blocks take `rows` rows of a slot's, and the form of its input.
    fn tiled(&self, side: Side, rows: usize) -> Option<(Tile, Stored)> {
        let input = side.tile_input()?;
        let product = Product { x: input.codes(), w: side.form().codes(), blocked: side.blocked() };
        let tile = tile(self.call.spec, product, [self.pairs(), self.call.dims.experts, rows, side.cols()])?;
        Some((tile, input))
    }

    fn tiles(&self, [gate, up]: [Side; 2], x_tile: (Tile, Stored), down: Side, h_tile: (Tile, Stored)) -> Result<()> {
        let (h, y) = (self.piece(self.layout.h), self.piece(self.layout.y));
        let x = self.quantised(gate, self.x(), self.call.dims.top_k, 0)?;
        self.tile_product("moe_gemm_gate_up", x_tile, x, &[gate, up], h)?;
        let x = self.quantised(down, h, 1, 2)?;
        self.tile_product("moe_gemm_down", h_tile, x, &[down], y)
    }

    fn tile_product(
        &self,
        entry: &'static str,
        tile: (Tile, Stored),
        x: Input,
        sides: &[Side],
        out: Arg,
    ) -> Result<()> {
        let ((tile, x_form), side) = (tile, sides[0]);
        let (form, experts, pairs) = (side.form(), self.call.dims.experts, self.pairs());
        let product = Product { x: x_form.codes(), w: form.codes(), blocked: side.blocked() };
        let row_tiles = side.rows.div_ceil(tile.rows() / sides.len());
        let grid = [blocks(EXPERTS, (pairs / tile.tokens() + experts) * row_tiles, 1)?, 1, 1];
        let grid = Grid::new(grid, tile.threads() as u32).shared(tile.shared(product) as u32);
        // Scales of groups, of blocks, and of rows or slots.
        let (groups, of_blocks, of_rows) = match side.act {
            ActScheme::None => (Arg::NULL, Arg::NULL, Arg::NULL),
            ActScheme::Fp8Group => (Arg::NULL, x.scales, Arg::NULL),
            ActScheme::Fp8Token => (Arg::NULL, Arg::NULL, x.scales),
            ActScheme::Fp8Tensor => (Arg::NULL, Arg::NULL, side.stored()),
            ActScheme::Nvfp4 => (x.scales, Arg::NULL, side.stored()),
        };
        let by_slot = flag(side.stored() != Arg::NULL);
        let [per_row, stride, rows, cols] = ints(EXPERTS, [x.per_row, side.stride, side.rows, side.cols()])?;
        let [experts, slots] = self.counts()?;
        let (sorted, offsets) = (self.piece(self.layout.sorted), self.piece(self.layout.offsets));
        let mut args = vec![x.codes, groups, of_blocks, of_rows, by_slot, per_row];
        for side in sides {
            args.extend(side.buffers());
            args.push(int(EXPERTS, side.first)?);
        }
        args.extend([stride, self.table(), sorted, offsets, out, rows, cols, flag(side.divides()), experts, slots]);
        self.cuda.launch(tile_kernel(entry, tile, x_form, form, side.blocked()), grid, &args)
    }

    // Anything.

    fn any(&self, gate: Side, up: Side, down: Side) -> Result<()> {
        let Dims { hidden, inter, experts, top_k } = self.call.dims;
        let dtype = self.call.x.dtype();
        let (h, y) = (self.piece(self.layout.h), self.piece(self.layout.y));
        let x = self.quantised(gate, self.x(), top_k, 0)?;
        let x_up = if gate.shares_input(&up) { x } else { self.quantised(up, self.x(), top_k, 1)? };
        let [hidden_arg, inter_arg] = ints(EXPERTS, [hidden, inter])?;
        let [experts_arg, slots] = self.counts()?;
        let tiles = self.pairs() / ANY_PAIRS + experts;
        let grid = |rows: usize| -> Result<Grid> {
            Ok(Grid::new([blocks(EXPERTS, tiles, 1)?, blocks_y(EXPERTS, rows, ANY_ROWS)?, 1], 256))
        };
        let (sorted, offsets) = (self.piece(self.layout.sorted), self.piece(self.layout.offsets));
        let args = [
            self.any_input(gate, x)?,
            self.any_input(up, x_up)?,
            any_matrix(gate)?,
            any_matrix(up)?,
            vec![self.table(), sorted, offsets, h, inter_arg, hidden_arg, experts_arg, slots],
        ];
        self.cuda.launch(Kernel::new(MODULE, entry!(dtype, "any_gate_up")), grid(inter)?, &args.concat())?;
        let x = self.quantised(down, h, 1, 2)?;
        let args = [
            self.any_input(down, x)?,
            any_matrix(down)?,
            vec![self.table(), sorted, offsets, y, hidden_arg, inter_arg, experts_arg, slots],
        ];
        self.cuda.launch(Kernel::new(MODULE, entry!(dtype, "any_down")), grid(hidden)?, &args.concat())
    }

    fn any_input(&self, side: Side, x: Input) -> Result<Vec<Arg>> {
        let plain = if self.call.x.dtype() == DType::Bf16 { Stored::Bf16 } else { Stored::F32 };
        let (form, row_scales) = match side.act {
            ActScheme::None => (plain, Arg::NULL),
            ActScheme::Fp8Tensor => (Stored::Fp8, side.stored()),
            ActScheme::Fp8Token => (Stored::Fp8, x.scales),
            ActScheme::Fp8Group => (Stored::Fp8Block, Arg::NULL),
            ActScheme::Nvfp4 => (Stored::Nvfp4, side.stored()),
        };
        let by_slot = flag(side.stored() != Arg::NULL);
        let per_row = int(EXPERTS, x.per_row)?;
        Ok(vec![x.codes, x.scales, row_scales, Arg::I32(form as i32), flag(side.divides()), per_row, by_slot])
    }
}

/// A matrix as the path for anything takes it.
fn any_matrix(side: Side) -> Result<Vec<Arg>> {
    let [first, stride] = ints(EXPERTS, [side.first, side.stride])?;
    let mut args = side.buffers().to_vec();
    args.extend([Arg::I32(side.form() as i32), flag(side.divides()), first, stride]);
    Ok(args)
}

/// The input schemes of kernels/lib/experts.cuh.
fn scheme(act: ActScheme) -> i32 {
    match act {
        ActScheme::None => 0,
        ActScheme::Fp8Tensor => 1,
        ActScheme::Fp8Token => 2,
        ActScheme::Fp8Group => 3,
        ActScheme::Nvfp4 => 4,
    }
}
