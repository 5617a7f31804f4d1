//! Products with a stored weight: on tensor cores by the tiles of kernels/lib/gemm.cuh, by the vendor's library, or in f32
//! outside them.

use super::grids::{blocks, blocks_y, flag, int, long};
use super::tiles::{self, Codes, Product, Stored, Tile};
use super::{hopper, hopper_few, nvfp4_hopper};
use crate::device::cuda::blas;
use crate::device::cuda::{Arg, Cuda, Grid, Kernel};
use crate::device::{Arch, DeviceSpec, cards};
use crate::error::Result;
use crate::num::DType;
use crate::ops::linear::Shape;
use crate::ops::quantise::{Form, Quantised};
use crate::ops::scheme::{Global, Grain, Scheme};
use crate::ops::weight::{NVFP4_GROUP, Weight};
use crate::tensor::{Tensor, View};

const OP: &str = "linear";

/// One operand as kernels take it.
#[derive(Debug, Clone, Copy)]
struct Operand {
    stored: Stored,
    codes: Arg,
    /// Elements from one row to the next.
    pitch: usize,
    /// Of blocks or groups.
    scales: Arg,
    row_scales: Arg,
    /// For all rows, where `row_scales` is null.
    one: f32,
    segment_rows: usize,
    divides: bool,
    /// Whether every row starts at a multiple of 16 bytes.
    aligned: bool,
}

impl Operand {
    fn dense(stored: Stored, codes: &Tensor, pitch: usize, row_bytes: usize) -> Operand {
        Operand {
            stored,
            codes: codes.arg(),
            pitch,
            scales: Arg::NULL,
            row_scales: Arg::NULL,
            one: 1.0,
            segment_rows: 1,
            divides: false,
            aligned: row_bytes.is_multiple_of(16),
        }
    }

    fn rows(x: View) -> Operand {
        let bytes = x.dtype().bytes() as usize;
        let dense = Operand::dense(x.dtype().into(), x.tensor(), x.pitch(), x.pitch() * bytes);
        Operand { codes: x.arg(), aligned: dense.aligned && (x.from() * bytes).is_multiple_of(16), ..dense }
    }

    fn quantised(x: &Quantised) -> Operand {
        let bytes = x.codes.cols();
        let scales = x.scales.as_ref().map_or(Arg::NULL, Tensor::arg);
        let of = |stored, cols| Operand::dense(stored, &x.codes, cols, bytes);
        match x.form {
            Form::Fp8Tensor(one) => Operand { one, ..of(Stored::Fp8, bytes) },
            Form::Fp8Token => Operand { row_scales: scales, ..of(Stored::Fp8, bytes) },
            Form::Fp8Group => Operand { scales, ..of(Stored::Fp8Block, bytes) },
            Form::Nvfp4(one, sense) => {
                let rows = match x.codes.dtype() {
                    DType::Bf16 => Operand::rows(x.codes.view()),
                    _ => of(Stored::Nvfp4, 2 * bytes),
                };
                Operand { scales, one, divides: sense == Global::Divides, ..rows }
            }
        }
    }

    /// What `one` multiplies by.
    fn factor(&self) -> f32 {
        if self.divides { 1.0 / self.one } else { self.one }
    }

    fn weight(w: &Weight) -> Operand {
        let (spec, cols) = (w.spec(), w.cols());
        let arg = |t: Option<&Tensor>| t.map_or(Arg::NULL, Tensor::arg);
        let (scales, row_scales) = (arg(w.scales()), arg(w.row_scales()));
        let of = |row_bytes| Operand::dense(Stored::of(spec.scheme), w.codes(), cols, row_bytes);
        match spec.scheme {
            Scheme::Plain(dtype) => of(cols * dtype.bytes() as usize),
            Scheme::Fp8(Grain::Tensor | Grain::Channel) => Operand { row_scales, ..of(cols) },
            Scheme::Fp8(Grain::Block) => Operand { scales, segment_rows: spec.segment_rows, ..of(cols) },
            Scheme::Nvfp4(sense) => Operand { scales, row_scales, divides: sense == Global::Divides, ..of(cols / 2) },
        }
    }
}

/// How a product is computed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Path {
    /// By cuBLASLt.
    Vendor,
    /// On tensor cores, a tile for each block.
    Tiles(Product, Tile),
    /// By Hopper's own instructions, tiles of 128 tokens for blocks that stay.
    Hopper,
    /// By the same, rows of the weight against all tokens.
    HopperFew,
    /// By the same, NVFP4 rows of the weight against tiles of so many tokens.
    HopperNvfp4(usize),
    /// In f32 outside the tensor cores.
    Generic,
}

/// What a choice hangs on, the card aside.
#[derive(Debug, Clone, Copy)]
struct Call {
    tokens: usize,
    rows: usize,
    cols: usize,
    x: Stored,
    w: Stored,
    /// Whether each row of `x` has one scale of its own.
    x_row_scales: bool,
    aligned: bool,
    /// What the card has that writes this result.
    has: Has,
}

/// What a card may have besides tensor cores.
#[derive(Debug, Clone, Copy)]
struct Has {
    /// The vendor's library.
    vendor: bool,
    /// Hopper's own instructions, whose kernel writes bf16.
    hopper: bool,
}

/// The path of a call. Under `batch_invariant` it gives sums whose order does not depend on the number of tokens.
fn choose(spec: &DeviceSpec, call: &Call, batch_invariant: bool) -> Path {
    let &Call { tokens, rows, cols, .. } = call;
    let Some(product) = product(call) else { return Path::Generic };
    if product.w == Codes::Bf16 && call.has.vendor && !batch_invariant {
        return Path::Vendor;
    }
    let by_rows = call.x == Stored::Fp8 && call.w == Stored::Fp8;
    if call.has.hopper && by_rows && !batch_invariant {
        return if tokens <= hopper_few::MOST_TOKENS { Path::HopperFew } else { Path::Hopper };
    }
    let widens = call.x == Stored::Bf16 && call.w == Stored::Nvfp4;
    if call.has.hopper && widens && !batch_invariant && nvfp4_hopper::takes(spec, tokens, rows, cols) {
        return Path::HopperNvfp4(nvfp4_hopper::tile(spec, tokens, rows));
    }
    match tiles::fastest(spec, product, (tokens, rows, cols), batch_invariant) {
        Some(tile) => Path::Tiles(product, tile),
        None => Path::Generic,
    }
}

/// The product on tensor cores, where the operands' forms and alignment fit one.
fn product(call: &Call) -> Option<Product> {
    let of = |x, w, blocked| Some(Product { x, w, blocked });
    // NVFP4 scales are copied four at a time.
    let whole = if call.w == Stored::Nvfp4 { 4 * NVFP4_GROUP } else { 1 };
    if !call.aligned || !call.cols.is_multiple_of(whole) {
        return None;
    }
    match (call.x, call.w) {
        (Stored::Bf16, Stored::Bf16) => of(Codes::Bf16, Codes::Bf16, false),
        (Stored::Bf16, Stored::Fp8) => of(Codes::Bf16, Codes::Fp8, false),
        (Stored::Fp8, Stored::Fp8) => of(Codes::Fp8, Codes::Fp8, false),
        (Stored::Bf16, Stored::Fp8Block) => of(Codes::Bf16, Codes::Fp8, true),
        // The kernel's scales of x are then those of blocks, or there are none.
        (Stored::Fp8, Stored::Fp8Block) if !call.x_row_scales => of(Codes::Fp8, Codes::Fp8, true),
        (Stored::Fp8Block, Stored::Fp8 | Stored::Fp8Block) => of(Codes::Fp8, Codes::Fp8, true),
        (Stored::Bf16, Stored::Nvfp4) => of(Codes::Bf16, Codes::Nvfp4, false),
        (Stored::Nvfp4, Stored::Nvfp4) => of(Codes::Nvfp4, Codes::Nvfp4, false),
        _ => None,
    }
}

/// The kernel of a product in tiles.
fn tiled(product: Product, tile: Tile) -> Kernel {
    let (packed, quantised) = (tile.packed(), i32::from(product.x != Codes::Bf16));
    match product.w {
        Codes::Bf16 => Kernel::new("linear", "bf16_gemm").define("TILE", packed),
        Codes::Fp8 => Kernel::new("fp8_gemm", "fp8_gemm")
            .define("TILE", packed)
            .define("FP8_X", quantised)
            .define("FP8_BLOCKED", i32::from(product.blocked)),
        Codes::Nvfp4 => Kernel::new("nvfp4_gemm", "nvfp4_gemm").define("TILE", packed).define("NVFP4_X", quantised),
    }
}

/// Layers of the published models, `[N, K]`.
const PUBLISHED: [[usize; 2]; 10] = [
    [34_816, 5120],
    [5120, 17_408],
    [16_384, 5120],
    [5120, 6144],
    [248_320, 5120],
    [12_288, 2048],
    [2048, 4096],
    [1024, 2048],
    [2048, 512],
    [248_320, 2048],
];

/// The modules that the published models' layers take, from one token to a long prompt, on cards with much shared memory
/// and with little. A card of another size may want another tile, compiled when it does.
pub(super) fn variants() -> Vec<Kernel> {
    let forms = [
        (Stored::Bf16, Stored::Bf16),
        (Stored::Bf16, Stored::Fp8),
        (Stored::Fp8, Stored::Fp8),
        (Stored::Bf16, Stored::Fp8Block),
        (Stored::Fp8Block, Stored::Fp8Block),
        (Stored::Bf16, Stored::Nvfp4),
        (Stored::Nvfp4, Stored::Nvfp4),
    ];
    // What every card of an arch may need: without Hopper's kernel too.
    let has = Has { vendor: true, hopper: false };
    let mut kernels = vec![Kernel::new("linear", "generic_64"), hopper::kernel()];
    kernels.extend(nvfp4_hopper::kernels());
    if let Ok(spec) = cards::find("h200") {
        let cuts = |tokens| PUBLISHED.map(|[rows, _]| hopper_few::cut(&spec, tokens, rows).kernel());
        kernels.extend([1, 8, 32, 64, 128].into_iter().flat_map(cuts));
    }
    for spec in ["h200", "rtx-5090"].into_iter().filter_map(|name| cards::find(name).ok()) {
        for (x, w) in forms {
            for tokens in [1, 8, 32, 64, 512, 8192] {
                for [rows, cols] in PUBLISHED {
                    let call = Call { tokens, rows, cols, x, w, x_row_scales: false, aligned: true, has };
                    for batch_invariant in [false, true] {
                        if let Path::Tiles(product, tile) = choose(&spec, &call, batch_invariant) {
                            kernels.push(tiled(product, tile));
                        }
                    }
                }
            }
        }
    }
    kernels.sort_unstable();
    kernels.dedup();
    kernels
}

/// `x` as it enters the product.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Input<'a> {
    /// f32 or bf16.
    Rows(View<'a>),
    /// Codes and scales.
    Quantised(&'a Quantised),
}

/// Writes `x` times the transpose of `w` to columns `first..first + N` of `y`; the op has checked the shapes.
pub(crate) fn linear(
    cuda: &Cuda,
    spec: &DeviceSpec,
    x: Input,
    shape: &Shape,
    w: &Weight,
    (y, first): (&mut Tensor, usize),
    batch_invariant: bool,
) -> Result<()> {
    let x = match x {
        Input::Rows(x) => Operand::rows(x),
        Input::Quantised(x) => Operand::quantised(x),
    };
    let w = Operand::weight(w);
    let (tokens, rows, cols) = (shape.tokens, shape.w.rows, shape.w.cols);
    let call = Call {
        tokens,
        rows,
        cols,
        x: x.stored,
        w: w.stored,
        x_row_scales: x.row_scales != Arg::NULL,
        aligned: x.aligned && w.aligned,
        has: Has {
            vendor: cuda.blas().is_some(),
            hopper: cuda.has_hopper() && spec.arch == Arch::Sm90a && shape.out == DType::Bf16,
        },
    };
    let out = [y.arg_at(first), long(y.cols()), flag(shape.out == DType::Bf16)];
    let sizes = [int(OP, tokens)?, int(OP, rows)?, int(OP, cols)?];
    match choose(spec, &call, batch_invariant) {
        Path::Vendor => {
            let product = blas::Product {
                m: tokens as u64,
                n: rows as u64,
                k: cols as u64,
                x_pitch: x.pitch as u64,
                y_pitch: y.cols() as u64,
                operands: DType::Bf16,
                out: shape.out,
            };
            cuda.product(product, x.codes, w.codes, out[0])
        }
        Path::Tiles(product, tile) => {
            let count = tokens.div_ceil(tile.tokens()) * rows.div_ceil(tile.rows());
            let grid = Grid::new([blocks(OP, count, 1)?, 1, 1], tile.threads() as u32);
            let args = tile_args(product, &x, &w, cols)?;
            let args = [&args[..], &out, &sizes].concat();
            cuda.launch(tiled(product, tile), grid.shared(tile.shared(product) as u32), &args)
        }
        path @ (Path::Hopper | Path::HopperFew) => {
            let of = |codes, rows, pitch| hopper::Matrix { codes, rows, pitch };
            let operands = [of(x.codes, tokens, x.pitch), of(w.codes, rows, cols)];
            let scales = hopper::Scales { x: x.row_scales, x_of_all: x.one, w: w.row_scales };
            let (to, sizes) = ((out[0], y.cols()), (rows, cols));
            match path {
                Path::Hopper => hopper::product(cuda, spec, &operands, &scales, to, sizes),
                _ => hopper_few::product(cuda, spec, &operands, &scales, to, sizes),
            }
        }
        Path::HopperNvfp4(tile) => {
            let of_x = hopper::Matrix { codes: x.codes, rows: tokens, pitch: 2 * x.pitch };
            let Operand { codes, scales, row_scales: globals, divides, .. } = w;
            let w = nvfp4_hopper::Weight { codes, scales, globals, divides };
            let (to, sizes) = ((out[0], y.cols()), (rows, cols));
            nvfp4_hopper::product(cuda, spec, (&of_x, x.factor()), &w, to, sizes, tile)
        }
        Path::Generic => {
            const ROWS: usize = 64;
            let (entry, per_block) = if tokens <= 8 { ("generic_8", 8) } else { ("generic_64", 64) };
            let grid = Grid::new([blocks(OP, rows, ROWS)?, blocks_y(OP, tokens, per_block)?, 1], 256);
            let args = [&generic_args(&x, &w)?[..], &out, &sizes].concat();
            cuda.launch(Kernel::new("linear", entry), grid, &args)
        }
    }
}

/// The arguments of a tile kernel before the result's.
fn tile_args(product: Product, x: &Operand, w: &Operand, cols: usize) -> Result<Vec<Arg>> {
    let segment = int(OP, w.segment_rows)?;
    let x_bytes = match product.x {
        Codes::Bf16 => 2 * x.pitch,
        Codes::Fp8 => x.pitch,
        Codes::Nvfp4 => x.pitch / 2,
    };
    // The kernel counts in 32 bits within a row.
    let _ = int(OP, cols.max(x_bytes).saturating_mul(4))?;
    let pitch = long(x_bytes);
    Ok(match product.w {
        Codes::Bf16 => vec![x.codes, pitch, w.codes],
        Codes::Fp8 => {
            let x_scales = if x.stored == Stored::Fp8Block { x.scales } else { x.row_scales };
            vec![x.codes, pitch, x_scales, Arg::F32(x.one), w.codes, w.scales, segment, w.row_scales]
        }
        Codes::Nvfp4 => {
            let divides = flag(w.divides);
            vec![x.codes, pitch, x.scales, Arg::F32(x.factor()), w.codes, w.scales, w.row_scales, divides]
        }
    })
}

/// The arguments of the generic kernel before the result's.
fn generic_args(x: &Operand, w: &Operand) -> Result<Vec<Arg>> {
    let number = |stored: Stored| Arg::I32(stored as i32);
    let x_args = [x.codes, long(x.pitch), x.scales, x.row_scales, Arg::F32(x.one), number(x.stored), flag(x.divides)];
    let w_args = [w.codes, w.scales, w.row_scales, int(OP, w.segment_rows)?, number(w.stored), flag(w.divides)];
    Ok([&x_args[..], &w_args].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(x: Stored, w: Stored, cols: usize) -> Call {
        let has = Has { vendor: true, hopper: false };
        Call { tokens: 4, rows: 4096, cols, x, w, x_row_scales: false, aligned: true, has }
    }

    #[test]
    fn what_no_tile_takes_is_computed_outside_the_tensor_cores() {
        let spec = cards::find("h200").unwrap();
        let tiles = |call: &Call| matches!(choose(&spec, call, false), Path::Tiles(..));
        assert!(tiles(&call(Stored::Bf16, Stored::Fp8, 1040)));
        assert!(!tiles(&Call { aligned: false, ..call(Stored::Bf16, Stored::Fp8, 1040) }));
        assert!(tiles(&call(Stored::Bf16, Stored::Nvfp4, 1088)));
        assert!(!tiles(&call(Stored::Bf16, Stored::Nvfp4, 1040)));
        for w in [Stored::F32, Stored::Bf16, Stored::Fp8, Stored::Fp8Block, Stored::Nvfp4] {
            assert_eq!(choose(&spec, &call(Stored::F32, w, 1024), false), Path::Generic);
        }
        // A scale for each token does not fit a product that scales after every block.
        let blocks = call(Stored::Fp8, Stored::Fp8Block, 1024);
        assert!(tiles(&blocks));
        assert!(!tiles(&Call { x_row_scales: true, ..blocks }));
        assert!(!tiles(&call(Stored::Fp8, Stored::Nvfp4, 1024)));
    }

    #[test]
    fn the_vendors_library_takes_bf16_unless_rows_must_not_depend_on_each_other() {
        let spec = cards::find("h200").unwrap();
        let bf16 = call(Stored::Bf16, Stored::Bf16, 1024);
        assert_eq!(choose(&spec, &bf16, false), Path::Vendor);
        assert!(matches!(choose(&spec, &bf16, true), Path::Tiles(..)));
        assert!(matches!(
            choose(&spec, &Call { has: Has { vendor: false, hopper: false }, ..bf16 }, false),
            Path::Tiles(..)
        ));
    }

    #[test]
    fn hopper_takes_many_rows_of_codes_unless_rows_must_not_depend_on_each_other() {
        let spec = cards::find("h200").unwrap();
        let many =
            Call { tokens: 129, has: Has { vendor: true, hopper: true }, ..call(Stored::Fp8, Stored::Fp8, 1024) };
        assert_eq!(choose(&spec, &many, false), Path::Hopper);
        assert!(matches!(choose(&spec, &many, true), Path::Tiles(..)));
        assert_eq!(choose(&spec, &Call { tokens: 128, ..many }, false), Path::HopperFew);
        assert!(matches!(choose(&spec, &Call { tokens: 1, ..many }, true), Path::Tiles(..)));
        assert!(matches!(choose(&spec, &Call { x: Stored::Bf16, ..many }, false), Path::Tiles(..)));
    }

    #[test]
    fn hopper_takes_many_rows_of_bf16_by_nvfp4_in_whole_blocks() {
        let spec = cards::find("h200").unwrap();
        let has = Has { vendor: true, hopper: true };
        let many = Call { tokens: 65, rows: 8192, has, ..call(Stored::Bf16, Stored::Nvfp4, 1024) };
        let taken = |call: &Call, invariant| matches!(choose(&spec, call, invariant), Path::HopperNvfp4(_));
        assert!(taken(&many, false) && !taken(&many, true));
        assert!(!taken(&Call { tokens: 64, ..many }, false));
        assert!(!taken(&Call { cols: 1088, ..many }, false));
        assert!(!taken(&Call { aligned: false, ..many }, false));
        assert!(!taken(&Call { x: Stored::Nvfp4, ..many }, false));
    }

    #[test]
    fn the_published_models_take_few_modules() {
        let count = variants().len();
        assert!((20..=160).contains(&count), "{count}");
    }
}
