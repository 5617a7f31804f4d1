//! Attention's kernels: the decode in parts and their sum, the prefill, and the plain kernel for all else.

use super::grids::{blocks, blocks_y, int};
use crate::device::Arch;
use crate::device::cuda::{Arg, Cuda, Grid, Kernel};
use crate::error::Result;
use crate::num::DType;
use crate::ops::Batch;
use crate::ops::attention::{AttnDims, Tactic};
use crate::ops::batch::PAGE_TOKENS;
use crate::ops::kv_write::KvPages;
use crate::tensor::Tensor;

const OP: &str = "attention";
/// Rows of a tensor-core tile.
const TILE_ROWS: usize = 16;
/// Tokens of a decode's tile.
const DECODE_TOKENS: u32 = 32;

/// How the tensor-core kernels are cut for a card's shared memory.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// Warps of a prefill block, 16 rows each.
    warps: u32,
    /// Pages that a prefill block holds; a decode block holds one more tile than that.
    stages: u32,
}

/// At `head_dim` 256 these take, of a block's most: 198 of 227 KiB, 132 of 163, 99 of 99.
fn cut(arch: Arch) -> Cut {
    match arch {
        Arch::Sm90a | Arch::Sm100a => Cut { warps: 8, stages: 2 },
        Arch::Sm80 => Cut { warps: 8, stages: 1 },
        Arch::Sm86 | Arch::Sm89 | Arch::Sm120a | Arch::Host => Cut { warps: 4, stages: 1 },
    }
}

impl Cut {
    const fn kernel(self, entry: &'static str, head_dim: u32) -> Kernel {
        Kernel::new(OP, entry)
            .define("HEAD_DIM", head_dim as i32)
            .define("PREFILL_WARPS", self.warps as i32)
            .define("TILE_STAGES", self.stages as i32)
    }

    /// Bytes of a prefill block: its queries, and pages of keys and values; codes are widened in one page's room,
    /// under a factor for each row.
    fn prefill_bytes(self, head_dim: u32, codes: bool) -> u32 {
        let (page, pitch) = (PAGE_TOKENS as u32, 2 * (head_dim + 8));
        let rows = 16 * self.warps;
        let (pages, factors) = if codes { (pitch + 2 * head_dim, 4 * rows) } else { (self.stages * 2 * pitch, 0) };
        rows * pitch + page * pages + factors
    }

    /// Bytes of a decode block: 16 queries, their factors, scores of a tile, and tiles of keys and values.
    fn decode_bytes(self, head_dim: u32, codes: bool) -> u32 {
        let pitch = match codes {
            true if head_dim.is_multiple_of(32) => head_dim + 16,
            true => head_dim,
            false => 2 * head_dim + 16,
        };
        16 * (2 * (head_dim + 8) + 4 * (DECODE_TOKENS + 4) + 4) + (self.stages + 1) * 2 * DECODE_TOKENS * pitch
    }
}

/// Every variant the published models need: head_dim 256 for each kind of card, and the plain kernel.
pub(super) fn variants() -> Vec<Kernel> {
    let mut all = vec![Kernel::new(OP, "attend")];
    for arch in [Arch::Sm90a, Arch::Sm80, Arch::Sm89] {
        all.push(cut(arch).kernel("prefill_bf16", 256));
    }
    all
}

/// One call's operands, checked.
pub(crate) struct Call<'a> {
    pub(crate) qkv: &'a Tensor,
    pub(crate) kv: &'a KvPages,
    pub(crate) dims: AttnDims,
    pub(crate) batch: &'a Batch<'a>,
    pub(crate) tactic: Tactic,
    pub(crate) partials: Option<&'a Tensor>,
}

impl Call<'_> {
    /// Launches what the tactic says.
    pub(crate) fn attend(&self, cuda: &Cuda, out: &mut Tensor) -> Result<()> {
        if !self.tactic.tensor_cores {
            return self.plain(cuda, out);
        }
        if self.batch.decodes > 0 {
            self.decode(cuda, out)?;
        }
        if self.batch.prefills().is_empty() { Ok(()) } else { self.prefill(cuda, out) }
    }

    /// What a dot product is multiplied by, in units of log2.
    fn scale(&self) -> f32 {
        (f64::from(self.kv.k_scale) * std::f64::consts::LOG2_E / (self.dims.head_dim as f64).sqrt()) as f32
    }

    fn codes(&self) -> bool {
        self.kv.k.dtype() == DType::U8
    }

    /// Contexts, page table, its columns, pages of the cache, kv heads and the heads of one.
    fn sequences(&self) -> Result<[Arg; 6]> {
        let inputs = self.batch.inputs;
        Ok([
            inputs.contexts.arg(),
            inputs.page_table.arg(),
            int(OP, inputs.page_table.cols())?,
            int(OP, self.kv.pages())?,
            int(OP, self.dims.kv_heads)?,
            int(OP, self.dims.group())?,
        ])
    }

    fn decode(&self, cuda: &Cuda, out: &mut Tensor) -> Result<()> {
        let (dims, decodes, splits) = (self.dims, self.batch.decodes, self.tactic.splits);
        let (cut, head_dim) = (cut(cuda.arch()), dims.head_dim as u32);
        let partials = self.partials.map_or(Arg::NULL, Tensor::arg);
        let [contexts, table, cols, pages, kv_heads, group] = self.sequences()?;
        let [decodes_arg, splits_arg] = [int(OP, decodes)?, int(OP, splits)?];
        let v_scale = Arg::F32(self.kv.v_scale);
        let entry = if self.codes() { "decode_e4m3" } else { "decode_bf16" };
        let pieces = dims.kv_heads * dims.group().div_ceil(TILE_ROWS);
        cuda.launch(
            cut.kernel(entry, head_dim),
            Grid::new([blocks(OP, decodes * splits, 1)?, blocks_y(OP, pieces, 1)?, 1], 128)
                .shared(cut.decode_bytes(head_dim, self.codes())),
            &[
                out.arg(),
                partials,
                self.qkv.arg(),
                self.kv.k.arg(),
                self.kv.v.arg(),
                contexts,
                table,
                cols,
                pages,
                kv_heads,
                group,
                decodes_arg,
                splits_arg,
                int(OP, self.qkv.cols())?,
                Arg::F32(self.scale()),
                v_scale,
            ],
        )?;
        if splits == 1 {
            return Ok(());
        }
        cuda.launch(
            cut.kernel("combine_bf16", head_dim),
            Grid::new([blocks(OP, decodes * dims.heads, 1)?, 1, 1], 512),
            &[out.arg(), partials, contexts, table, cols, pages, kv_heads, group, decodes_arg, splits_arg, v_scale],
        )
    }

    fn prefill(&self, cuda: &Cuda, out: &mut Tensor) -> Result<()> {
        let (dims, batch) = (self.dims, self.batch);
        let (cut, head_dim) = (cut(cuda.arch()), dims.head_dim as u32);
        let rows = TILE_ROWS * cut.warps as usize;
        // What the kernel counts rows in.
        int(OP, batch.tokens() * dims.group() + rows)?;
        let tiles: usize = batch.prefills().iter().map(|span| (span.len * dims.group()).div_ceil(rows)).sum();
        let [contexts, table, cols, pages, kv_heads, group] = self.sequences()?;
        cuda.launch(
            cut.kernel(if self.codes() { "prefill_e4m3" } else { "prefill_bf16" }, head_dim),
            Grid::new([blocks(OP, tiles * dims.kv_heads, 1)?, 1, 1], 32 * cut.warps)
                .shared(cut.prefill_bytes(head_dim, self.codes())),
            &[
                out.arg(),
                self.qkv.arg(),
                self.kv.k.arg(),
                self.kv.v.arg(),
                batch.inputs.starts.arg(),
                contexts,
                table,
                cols,
                pages,
                kv_heads,
                group,
                int(OP, batch.tokens())?,
                int(OP, batch.decodes)?,
                int(OP, batch.prefills().len())?,
                int(OP, self.qkv.cols())?,
                Arg::F32(self.scale()),
                Arg::F32(self.kv.v_scale),
            ],
        )
    }

    fn plain(&self, cuda: &Cuda, out: &mut Tensor) -> Result<()> {
        let (dims, batch) = (self.dims, self.batch);
        let [contexts, table, cols, pages, kv_heads, group] = self.sequences()?;
        cuda.launch(
            Kernel::new(OP, "attend"),
            Grid::new([blocks(OP, batch.tokens(), 1)?, blocks_y(OP, dims.heads, 1)?, 1], 128)
                .shared(8 * dims.head_dim as u32),
            &[
                out.arg(),
                self.qkv.arg(),
                self.kv.k.arg(),
                self.kv.v.arg(),
                batch.inputs.starts.arg(),
                contexts,
                table,
                cols,
                pages,
                kv_heads,
                group,
                int(OP, batch.spans.len())?,
                int(OP, dims.head_dim)?,
                int(OP, self.qkv.cols())?,
                Arg::F32(self.scale()),
                Arg::F32(self.kv.v_scale),
                element(self.qkv.dtype()),
                element(self.kv.k.dtype()),
                element(out.dtype()),
            ],
        )
    }
}

/// The plain kernel's number of an element type.
fn element(dtype: DType) -> Arg {
    Arg::I32(match dtype {
        DType::F32 | DType::I32 => 0,
        DType::Bf16 => 1,
        DType::U8 => 2,
    })
}
