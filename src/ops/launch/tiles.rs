//! Tiles of kernels/lib/gemm.cuh: which there are, what they take of a card, and which is fastest for a shape by a model of
//! the card. Pure functions of card and shape.

use crate::device::{Arch, DeviceSpec};
use crate::num::DType;
use crate::ops::scheme::{Grain, Scheme};
use crate::ops::weight::{BLOCK, NVFP4_GROUP};

/// How an operand of a tensor-core product is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codes {
    /// bf16.
    Bf16,
    /// e4m3.
    Fp8,
    /// e2m1 with an e4m3 scale for each 16.
    Nvfp4,
}

impl Codes {
    /// Elements in 16 bytes.
    const fn per16(self) -> usize {
        match self {
            Codes::Bf16 => 8,
            Codes::Fp8 => 16,
            Codes::Nvfp4 => 32,
        }
    }

    /// Bytes of `cols` elements with the scales among them.
    fn bytes(self, cols: usize) -> f64 {
        let scales = if self == Codes::Nvfp4 { cols / NVFP4_GROUP } else { 0 };
        (cols * 16 / self.per16() + scales) as f64
    }
}

/// How an operand is stored, with the number kernels/lib/operand.cuh has for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    /// float32.
    F32 = 0,
    /// bf16.
    Bf16 = 1,
    /// e4m3 under one scale, or one for each row.
    Fp8 = 2,
    /// e4m3 under a scale for each block.
    Fp8Block = 3,
    /// e2m1 under an e4m3 scale for each 16.
    Nvfp4 = 4,
}

impl Stored {
    /// Of a weight.
    pub(crate) fn of(scheme: Scheme) -> Stored {
        match scheme {
            Scheme::Plain(dtype) => dtype.into(),
            Scheme::Fp8(Grain::Tensor | Grain::Channel) => Stored::Fp8,
            Scheme::Fp8(Grain::Block) => Stored::Fp8Block,
            Scheme::Nvfp4(_) => Stored::Nvfp4,
        }
    }

    /// What the tensor cores take of it.
    pub(crate) fn codes(self) -> Codes {
        match self {
            Stored::F32 | Stored::Bf16 => Codes::Bf16,
            Stored::Fp8 | Stored::Fp8Block => Codes::Fp8,
            Stored::Nvfp4 => Codes::Nvfp4,
        }
    }
}

impl From<DType> for Stored {
    fn from(dtype: DType) -> Stored {
        if dtype == DType::F32 { Stored::F32 } else { Stored::Bf16 }
    }
}

/// A product's forms: `x` is bf16, or stored as `w` is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Product {
    pub(crate) x: Codes,
    pub(crate) w: Codes,
    /// Whether sums are scaled after every 128 columns.
    pub(crate) blocked: bool,
}

impl Product {
    /// Whether the tensor cores of `arch` take its codes as they are, by `mma.sync`.
    fn is_native(self, arch: Arch) -> bool {
        matches!(arch, Arch::Sm89 | Arch::Sm120a) && self.x == Codes::Fp8
    }
}

/// A tile of kernels/lib/gemm.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tile {
    /// Blocks of 16 weight rows of a warp.
    pub(crate) r: usize,
    /// Blocks of 8 tokens of a warp.
    pub(crate) tm: usize,
    /// Warps along the weight's rows.
    pub(crate) wn: usize,
    /// Warps along the tokens.
    pub(crate) wm: usize,
    /// Warps that split K.
    pub(crate) wk: usize,
    /// Bytes of a weight row in a slice.
    pub(crate) slice: usize,
    /// Stages of the ring.
    pub(crate) stages: usize,
}

/// r, tm, wn, wm, wk, slice. Few tokens first; of the same tokens the widest first. A slice times wk is what is read of a
/// weight row at a time: 128 bytes or more where weights are all there is to read.
const TILES: [[usize; 6]; 12] = [
    [2, 1, 4, 1, 1, 128],
    [1, 1, 4, 1, 2, 64],
    [2, 1, 1, 1, 8, 64],
    [1, 1, 1, 1, 8, 64],
    [2, 4, 4, 1, 1, 64],
    [2, 4, 2, 1, 2, 64],
    [1, 4, 2, 1, 4, 64],
    [2, 8, 4, 1, 1, 64],
    [2, 8, 2, 1, 2, 64],
    [2, 4, 4, 2, 1, 64],
    [2, 8, 4, 2, 1, 64],
    [3, 8, 4, 2, 1, 64],
];

/// Sums of a thread above which a tile of promoted (or doubly decoded) sums would not fit its registers.
const MOST_SUMS: usize = 16;

impl Tile {
    /// Weight rows.
    pub(crate) fn rows(&self) -> usize {
        16 * self.r * self.wn
    }

    /// Tokens.
    pub(crate) fn tokens(&self) -> usize {
        8 * self.tm * self.wm
    }

    /// Threads of a block.
    pub(crate) fn threads(&self) -> usize {
        32 * self.wn * self.wm * self.wk
    }

    /// As `PackedTile` unpacks it.
    pub(crate) fn packed(&self) -> i32 {
        let Tile { r, tm, wn, wm, wk, slice, stages } = *self;
        (r | tm << 4 | wn << 9 | wm << 13 | wk << 17 | (slice / 64) << 21 | stages << 23) as i32
    }

    /// Bytes of one stage: `STAGE_BYTES` of the kernel.
    fn stage_bytes(&self, product: Product) -> usize {
        let ratio = product.w.per16() / product.x.per16();
        let scales = |codes| if codes == Codes::Nvfp4 { self.slice / 8 } else { 0 };
        let slice =
            self.rows() * (self.slice + scales(product.w)) + self.tokens() * (self.slice * ratio + scales(product.x));
        self.wk * slice
    }

    /// Bytes of dynamic shared memory: `SHARED` of the kernel.
    pub(crate) fn shared(&self, product: Product) -> usize {
        let sums = 4 * self.wk * self.tokens() * (self.rows() + 4);
        (self.stages * self.stage_bytes(product)).max(sums)
    }

    /// Blocks that a multiprocessor's registers hold: `BLOCKS_PER_SM` of the kernel.
    fn by_registers(&self, arch: Arch, product: Product) -> usize {
        let native = product.is_native(arch);
        let mmas = if native { 2 } else { product.x.per16() / 4 };
        let sums = 4 * self.r * self.tm * if product.blocked || native { 2 } else { 1 };
        let run = match (sums >= 128, mmas < 4) {
            (true, true) => 1,
            (true, false) => 2,
            (false, _) => mmas.min(4),
        };
        let scales = if product.blocked { 2 * (self.r + self.tm) + 8 } else { 0 };
        let weights = if product.w == Codes::Nvfp4 { 12 } else { 8 } * self.r + 4 * self.r * run;
        let registers = sums + scales + weights + 6 * self.tm.min(2) + 44;
        (65_536 / (self.threads() * registers)).clamp(1, (768 / self.threads()).max(1))
    }
}

/// Most bytes of shared memory of a block; a multiprocessor has one KiB more, and each of its blocks takes one.
pub(crate) fn shared_limit(arch: Arch) -> usize {
    let kib = match arch {
        Arch::Sm80 => 163,
        Arch::Sm90a | Arch::Sm100a => 227,
        Arch::Sm86 | Arch::Sm89 | Arch::Sm120a | Arch::Host => 99,
    };
    kib << 10
}

/// Every tile for a product on an arch, with as many stages as leave room for the blocks that registers allow.
pub(crate) fn tiles(arch: Arch, product: Product) -> impl Iterator<Item = Tile> {
    const STAGES: usize = 4;
    TILES.into_iter().filter_map(move |[r, tm, wn, wm, wk, slice]| {
        let sums = r * tm;
        let crowded = product.blocked || product.x == Codes::Nvfp4;
        // Two sets of sums want their tokens over more warps.
        let over_warps = product.blocked && wn * wm * wk <= 4 && sums >= MOST_SUMS;
        let only_blocked = [r, tm, wn, wm, wk] == [2, 4, 4, 2, 1] && !product.blocked;
        if (crowded && sums > MOST_SUMS) || over_warps || only_blocked {
            return None;
        }
        let tile = Tile { r, tm, wn, wm, wk, slice: if product.blocked { BLOCK } else { slice }, stages: 1 };
        let limit = shared_limit(arch);
        let room = ((limit + 1024) / tile.by_registers(arch, product)).saturating_sub(1024).min(limit);
        let stages = (room / tile.stage_bytes(product)).clamp(2, STAGES);
        let tile = Tile { stages, ..tile };
        (tile.shared(product) <= limit).then_some(tile)
    })
}

/// The tile that takes least time by [`seconds`]; the first of equals. With `one_order`, of those that do not split K among
/// warps: all of them add up in the same order.
pub(crate) fn fastest(
    spec: &DeviceSpec,
    product: Product,
    (tokens, rows, cols): (usize, usize, usize),
    one_order: bool,
) -> Option<Tile> {
    let tiles = tiles(spec.arch, product).filter(|tile| !one_order || tile.wk == 1);
    least(tiles, |tile| seconds(spec, product, tile, tokens, rows, cols))
}

/// The tile that takes least time; the first of equals.
pub(crate) fn least(tiles: impl Iterator<Item = Tile>, time: impl Fn(&Tile) -> f64) -> Option<Tile> {
    tiles
        .map(|tile| (time(&tile), tile))
        .reduce(|best, next| if next.0 < best.0 { next } else { best })
        .map(|(_, tile)| tile)
}

/// Estimated time of a product: the slowest of what it asks of the card, and a tenth of the rest, since they do not overlap
/// entirely. Constants are round numbers of a Hopper card; they only rank tiles.
pub(crate) fn seconds(
    spec: &DeviceSpec,
    product: Product,
    tile: &Tile,
    tokens: usize,
    rows: usize,
    cols: usize,
) -> f64 {
    /// From the last-level cache to one multiprocessor: its share when all read, and the most when it reads alone.
    const SHARE_BYTES_PER_S: f64 = 42e9;
    const ALONE_BYTES_PER_S: f64 = 100e9;
    /// From the request to the arrival of bytes, under load.
    const LATENCY_S: f64 = 1e-6;
    const CLOCK_HZ: f64 = 1.7e9;
    /// Cycles of a multiprocessor's quarter that a warp's mma of 16 x 8 x 16 takes.
    const MMA_CYCLES: f64 = 8.0;
    /// What of the instruction rate is reached.
    const ISSUE: f64 = 0.75;

    let sms = f64::from(spec.sms);
    let (w_row, x_row) = (product.w.bytes(cols), product.x.bytes(cols));
    let (m_tiles, n_tiles) = (tokens.div_ceil(tile.tokens()), rows.div_ceil(tile.rows()));
    let blocks = (m_tiles * n_tiles) as f64;
    let most = (blocks / sms).ceil();
    let block_bytes = tile.rows() as f64 * w_row + tile.tokens().min(tokens) as f64 * x_row;

    let dram = (rows as f64 * w_row + tokens as f64 * x_row + (tokens * rows * 2) as f64) / spec.rates.dram;
    let cache = blocks * block_bytes / (SHARE_BYTES_PER_S * sms);

    // A block's ring can ask for so much at a time, and only so many blocks are there.
    let limit = shared_limit(spec.arch) + 1024;
    let resident = tile.by_registers(spec.arch, product).min(limit / (tile.shared(product) + 1024)).max(1) as f64;
    let ring = (tile.stages - 1) as f64 * tile.wk as f64 * tile.slice as f64 * block_bytes / w_row;
    let rate = (resident.min(most) * ring / LATENCY_S).min(ALONE_BYTES_PER_S);
    let stream = most * (block_bytes / rate + LATENCY_S / resident.min(most));

    // Instructions of a warp for 16 rows by 16 columns of a weight against its tokens.
    let native = product.is_native(spec.arch);
    let decode = |codes, half: bool| match codes {
        Codes::Bf16 => 0.0,
        Codes::Fp8 if native => 0.0,
        Codes::Fp8 if half => 8.0,
        Codes::Fp8 => 18.0,
        Codes::Nvfp4 => 22.0,
    };
    let half = product.x == Codes::Fp8;
    let weights = decode(product.w, half) + 3.0;
    let by_token =
        2.0 + (decode(product.x, half) / 2.0 + 1.0) / tile.r as f64 + if product.blocked { 1.0 } else { 0.0 };
    let mma = if native { MMA_CYCLES / 2.0 } else { MMA_CYCLES };
    let cycles = (weights + by_token * tile.tm as f64).max(mma * tile.tm as f64);
    // One warp a quarter cannot fill its units.
    let warps = resident.min(most) * (tile.threads() / 32) as f64 / 4.0;
    let fill = (warps / 2.0).min(1.0);
    let pieces = most * (tile.rows() / 16 * tile.wm) as f64 * (cols as f64 / 16.0);
    let compute = pieces * cycles / (4.0 * CLOCK_HZ * ISSUE * fill);

    let parts = [dram, cache, stream, compute];
    parts.iter().fold(0.0, |most: f64, part| most.max(*part)) + 0.1 * parts.iter().sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cards;

    fn products() -> Vec<Product> {
        let product = |x, w, blocked| Product { x, w, blocked };
        vec![
            product(Codes::Bf16, Codes::Bf16, false),
            product(Codes::Bf16, Codes::Fp8, false),
            product(Codes::Fp8, Codes::Fp8, false),
            product(Codes::Bf16, Codes::Fp8, true),
            product(Codes::Fp8, Codes::Fp8, true),
            product(Codes::Bf16, Codes::Nvfp4, false),
            product(Codes::Nvfp4, Codes::Nvfp4, false),
        ]
    }

    #[test]
    fn every_card_has_a_tile_that_fits_it_for_every_product_and_shape() {
        for spec in cards::all() {
            for product in products() {
                for tokens in [1, 8, 9, 64, 65, 8192] {
                    for (rows, cols) in [(16, 64), (5120, 17_408), (248_320, 2048)] {
                        for one_order in [false, true] {
                            let tile = fastest(&spec, product, (tokens, rows, cols), one_order).unwrap();
                            assert!(tile.shared(product) <= shared_limit(spec.arch), "{}: {tile:?}", spec.name);
                            assert!(!one_order || tile.wk == 1);
                            assert!(tile.stages >= 2 && tile.threads() <= 1024);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_tile_is_the_fastest_somewhere() {
        let spec = cards::find("h200").unwrap();
        let shapes = [(34_816, 5120), (5120, 17_408), (12_288, 2048), (2048, 4096), (248_320, 2048)];
        let mut unused = TILES.map(|tile| [tile[0], tile[1], tile[2], tile[3], tile[4]]).to_vec();
        for product in products() {
            for (rows, cols) in shapes {
                for tokens in [1, 8, 16, 32, 64, 128, 256, 1024, 8192] {
                    let tile = fastest(&spec, product, (tokens, rows, cols), false).unwrap();
                    unused.retain(|shape| *shape != [tile.r, tile.tm, tile.wn, tile.wm, tile.wk]);
                }
            }
        }
        assert!(unused.is_empty(), "{unused:?}");
    }

    #[test]
    fn one_token_of_a_wide_layer_has_blocks_for_every_multiprocessor_and_a_narrow_one_too() {
        let spec = cards::find("h200").unwrap();
        for product in products() {
            for (rows, cols) in [(34_816, 5120), (5120, 5120), (5120, 17_408), (2048, 2048)] {
                let tile = fastest(&spec, product, (1, rows, cols), false).unwrap();
                assert_eq!(tile.tokens(), 8, "{product:?} {rows} x {cols}");
                assert!(rows.div_ceil(tile.rows()) >= 120, "{product:?} {rows} x {cols}: {tile:?}");
            }
        }
    }
}
