//! Where parameters come from: a checkpoint's files, or a seed.
//!
//! May live here: turning one named parameter into the rows of a tensor. May not: which tensors a model has.

use std::path::Path;

use half::bf16;

use super::seeded::Seeded;
use crate::checkpoint::{Checkpoint, Dtype, Geometry, ModelRef, Recipe, RowScale, Verdict};
use crate::error::{Error, Result};
use crate::num::DType;
use crate::ops::Cx;
use crate::ops::scheme::{Grain, Scheme};
use crate::tensor::Tensor;

/// Bytes read from a file at once.
const STAGING_BYTES: usize = 8 << 20;

/// A model's parameters, on disk or to be drawn.
#[derive(Debug)]
pub enum Source {
    /// A checkpoint folder, opened and checked.
    Disk(Box<Checkpoint>),
    /// Random values that depend on the seed and each parameter's name alone.
    Seeded {
        /// The dimensions.
        geometry: Box<Geometry>,
        /// How each module is stored.
        recipe: Recipe,
        /// The seed.
        seed: u64,
    },
}

impl ModelRef {
    /// Opens the checkpoint, or takes the built-in geometry with values drawn from `seed`.
    pub fn open(self, seed: u64) -> Result<Source> {
        match self {
            ModelRef::Folder(folder) => Ok(Source::Disk(Box::new(Checkpoint::open(&folder)?))),
            ModelRef::Builtin { geometry, recipe } => Ok(Source::Seeded { geometry, recipe, seed }),
        }
    }
}

impl Source {
    /// The dimensions.
    pub fn geometry(&self) -> &Geometry {
        match self {
            Source::Disk(checkpoint) => checkpoint.geometry(),
            Source::Seeded { geometry, .. } => geometry,
        }
    }

    /// The element type of an unquantised parameter as published; seeded ones are bf16.
    pub fn dtype(&self, name: &str) -> Result<DType> {
        match self {
            Source::Disk(checkpoint) => match checkpoint.entry(name) {
                Some(entry) => stored(checkpoint, name, entry.dtype),
                None => Err(missing(checkpoint, name)),
            },
            Source::Seeded { geometry, recipe, seed } => Seeded::of(geometry, recipe, *seed).dtype(name),
        }
    }

    /// Fills rows `first..first + rows` of `dst` (f32 or bf16) with parameter `name`, whose rows have `dst.cols()`
    /// elements. On the plan device the parameter is looked up and nothing is read.
    pub fn fill(&self, cx: &Cx, dst: &mut Tensor, first: usize, rows: usize, name: &str) -> Result<()> {
        if first + rows > dst.rows() {
            return Err(Error::shape("load", format!("{name}: rows {first}..{} of {}", first + rows, dst.rows())));
        }
        match self {
            Source::Disk(checkpoint) => read(checkpoint, dst, first, rows, name),
            Source::Seeded { geometry, recipe, seed } => {
                Seeded::of(geometry, recipe, *seed).fill(cx, dst, first, rows, name)
            }
        }
    }
}

impl Source {
    /// How a linear module is stored and how its input is quantised.
    pub fn verdict(&self, module: &str) -> Result<Verdict> {
        match self {
            Source::Disk(checkpoint) => checkpoint.verdict(module),
            Source::Seeded { geometry, recipe, seed } => Seeded::of(geometry, recipe, *seed).verdict(module),
        }
    }

    /// Fills rows `first..first + rows` of `dst` (u8, `[_, K]` for FP8, `[_, K/2]` for NVFP4) with a quantised module's
    /// codes as published. On the plan device the module is looked up and nothing is read.
    pub fn fill_codes(&self, cx: &Cx, dst: &mut Tensor, first: usize, rows: usize, module: &str) -> Result<()> {
        match self {
            Source::Disk(checkpoint) => codes(checkpoint, dst, first, rows, module),
            Source::Seeded { geometry, recipe, seed } => {
                Seeded::of(geometry, recipe, *seed).fill_codes(cx, dst, first, rows, module)
            }
        }
    }

    /// Fills rows `first..first + rows` of `dst` with a quantised module's block scales: u8 e4m3 codes `[_, K/16]` for
    /// NVFP4, f32 `[_, ceil(K/128)]` for FP8 by block, whose rows are rows of blocks. On the plan device the module is
    /// looked up and nothing is read.
    pub fn fill_scales(&self, cx: &Cx, dst: &mut Tensor, first: usize, rows: usize, module: &str) -> Result<()> {
        match self {
            Source::Disk(checkpoint) => scales(checkpoint, dst, first, rows, module),
            Source::Seeded { geometry, recipe, seed } => {
                Seeded::of(geometry, recipe, *seed).fill_scales(cx, dst, first, rows, module)
            }
        }
    }

    /// The scales of a quantised module's rows: FP8 by tensor or channel, or the global of NVFP4.
    pub fn row_scale(&self, module: &str) -> Result<RowScale> {
        match self {
            Source::Disk(checkpoint) => checkpoint.row_scale(module),
            Source::Seeded { geometry, recipe, seed } => Seeded::of(geometry, recipe, *seed).row_scale(module),
        }
    }

    /// The stored scales of K and V of a layer's FP8 cache, each a multiplier of its codes; `None` where none are stored.
    pub fn kv_scales(&self, layer: usize) -> Result<Option<(f32, f32)>> {
        match self {
            Source::Disk(checkpoint) => checkpoint.kv_scales(layer),
            Source::Seeded { geometry, recipe, seed } => Ok(Seeded::of(geometry, recipe, *seed).kv_scales(layer)),
        }
    }
}

fn plain(place: &Path, module: &str) -> Error {
    Error::checkpoint(place, format!("{module} is not quantised, it has no codes and no scales"))
}

/// The element type of an unquantised parameter.
fn stored(checkpoint: &Checkpoint, name: &str, dtype: Dtype) -> Result<DType> {
    match dtype {
        Dtype::F32 => Ok(DType::F32),
        Dtype::Bf16 => Ok(DType::Bf16),
        other => Err(Error::checkpoint(place(checkpoint), format!("{name} is {other}, must be BF16 or F32"))),
    }
}

/// What an error names: the folder the files are in.
fn place(checkpoint: &Checkpoint) -> &Path {
    checkpoint.files().first().and_then(|f| f.parent()).unwrap_or(Path::new("checkpoint"))
}

fn missing(checkpoint: &Checkpoint, name: &str) -> Error {
    Error::checkpoint(place(checkpoint), format!("{name} is missing"))
}

fn read(checkpoint: &Checkpoint, dst: &mut Tensor, first: usize, rows: usize, name: &str) -> Result<()> {
    let entry = checkpoint.entry(name).ok_or_else(|| missing(checkpoint, name))?;
    let (cols, on_disk) = (dst.cols(), stored(checkpoint, name, entry.dtype)?);
    let elements: usize = entry.shape.iter().product();
    if elements != rows * cols {
        return Err(Error::checkpoint(
            place(checkpoint),
            format!("{name}: {:?} on disk, {rows} rows of {cols} wanted", entry.shape),
        ));
    }
    if !dst.buffer().device().has_data() {
        return Ok(());
    }
    // A parameter of one row per element (conv1d is [C, 1, W] on disk) has the same first dimension either way.
    let disk_rows = entry.shape.first().copied().unwrap_or(1);
    let row_elements = elements / disk_rows.max(1);
    let row_bytes = row_elements * on_disk.bytes() as usize;
    if on_disk == dst.dtype() {
        let at = first * cols * on_disk.bytes() as usize;
        return by_blocks(dst, at, disk_rows, row_bytes, |range, out| checkpoint.read(name, range, out));
    }
    let block = (STAGING_BYTES / row_bytes.max(1)).clamp(1, disk_rows.max(1));
    let mut staging = vec![0u8; block * row_bytes];
    let mut start = 0;
    while start < disk_rows {
        let end = (start + block).min(disk_rows);
        let at = (first * cols + start * row_elements) as u64 * dst.dtype().bytes();
        let bytes = &mut staging[..(end - start) * row_bytes];
        checkpoint.read(name, start..end, bytes)?;
        let count = (end - start) * row_elements;
        match dst.dtype() {
            DType::F32 => put::<4>(dst, at, count, |out| convert(bytes, on_disk, out, f32::to_le_bytes))?,
            DType::Bf16 => {
                let store = |v| bf16::from_f32(v).to_le_bytes();
                put::<2>(dst, at, count, |out| convert(bytes, on_disk, out, store))?;
            }
            other => return Err(Error::shape("load", format!("{name}: into {other}, must be f32 or bf16"))),
        }
        start = end;
    }
    Ok(())
}

/// Has `fill` write `count` elements of N bytes from byte `at` of a tensor on.
fn put<const N: usize>(dst: &mut Tensor, at: u64, count: usize, fill: impl FnOnce(&mut [[u8; N]])) -> Result<()> {
    dst.buffer_mut().write_with(at, count * N, |bytes| {
        fill(bytes.as_chunks_mut::<N>().0);
        Ok(())
    })
}

/// Little-endian bf16 or f32 to `out`, the other of the two: bf16 to f32 is exact, f32 to bf16 rounds to nearest even.
fn convert<const N: usize>(bytes: &[u8], from: DType, out: &mut [[u8; N]], store: impl Fn(f32) -> [u8; N]) {
    if from == DType::Bf16 {
        for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *o = store(f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16));
        }
    } else {
        for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *o = store(f32::from_le_bytes(*b));
        }
    }
}

/// A linear module's scheme, rows and columns.
fn linear(checkpoint: &Checkpoint, module: &str) -> Result<(Scheme, usize, usize)> {
    let m = checkpoint
        .module(module)
        .ok_or_else(|| Error::checkpoint(place(checkpoint), format!("{module} is not a linear module")))?;
    Ok((m.scheme, m.rows, m.cols))
}

/// A destination must be rows of exactly this type and width; nothing is padded or cut.
fn fits(dst: &Tensor, first: usize, rows: usize, what: &str, expected: (DType, usize, usize)) -> Result<()> {
    let (dtype, have, cols) = expected;
    if dst.dtype() != dtype || dst.cols() != cols || rows != have || first + rows > dst.rows() {
        return Err(Error::shape(
            "load",
            format!(
                "{what} are {dtype} [{have}, {cols}]; {rows} rows from {first} of {} {:?} wanted",
                dst.dtype(),
                dst.shape()
            ),
        ));
    }
    Ok(())
}

fn codes(checkpoint: &Checkpoint, dst: &mut Tensor, first: usize, rows: usize, module: &str) -> Result<()> {
    let (scheme, n, k) = linear(checkpoint, module)?;
    let cols = match scheme {
        Scheme::Nvfp4(_) => k / 2,
        Scheme::Fp8(_) => k,
        Scheme::Plain(_) => return Err(plain(place(checkpoint), module)),
    };
    fits(dst, first, rows, &format!("{module}: codes"), (DType::U8, n, cols))?;
    by_blocks(dst, first * cols, rows, cols, |range, out| checkpoint.read_codes(module, range, out))
}

fn scales(checkpoint: &Checkpoint, dst: &mut Tensor, first: usize, rows: usize, module: &str) -> Result<()> {
    let (scheme, n, k) = linear(checkpoint, module)?;
    match scheme {
        Scheme::Nvfp4(_) => {
            fits(dst, first, rows, &format!("{module}: scales"), (DType::U8, n, k / 16))?;
            let cols = k / 16;
            by_blocks(dst, first * cols, rows, cols, |range, out| checkpoint.read_group_scales(module, range, out))
        }
        Scheme::Fp8(Grain::Block) => {
            let (down, across) = (n.div_ceil(128), k.div_ceil(128));
            fits(dst, first, rows, &format!("{module}: scales of blocks"), (DType::F32, down, across))?;
            if dst.buffer().device().has_data() {
                let at = first * across;
                let values = checkpoint.block_scales(module)?;
                dst.write(at, &values)?;
            }
            Ok(())
        }
        Scheme::Fp8(Grain::Tensor | Grain::Channel) => {
            Err(Error::shape("load", format!("{module}: its scales are of whole rows, it has none of blocks")))
        }
        Scheme::Plain(_) => Err(plain(place(checkpoint), module)),
    }
}

/// `rows` rows of `row_bytes` bytes into `dst`, from byte `first` of it on, a bounded number at once.
fn by_blocks(
    dst: &mut Tensor,
    first: usize,
    rows: usize,
    row_bytes: usize,
    read: impl Fn(std::ops::Range<usize>, &mut [u8]) -> Result<()>,
) -> Result<()> {
    if !dst.buffer().device().has_data() {
        return Ok(());
    }
    let block = (STAGING_BYTES / row_bytes.max(1)).max(1);
    let mut start = 0;
    while start < rows {
        let end = (start + block).min(rows);
        let at = (first + start * row_bytes) as u64;
        dst.buffer_mut().write_with(at, (end - start) * row_bytes, |bytes| read(start..end, bytes))?;
        start = end;
    }
    Ok(())
}
