//! Where parameters come from: a checkpoint's files, or a seed.
//!
//! May live here: turning one named parameter into the rows of a tensor. May not: which tensors a model has.

use std::path::Path;

use half::bf16;

use super::seeded::{Scales, Seeded, init_of};
use crate::checkpoint::{Checkpoint, Dtype, Geometry, ModelRef, Recipe, RowScale, Verdict};
use crate::error::{Error, Result};
use crate::num::{DType, philox};
use crate::ops::scheme::{ActScheme, Scheme};
use crate::ops::fill::Code;
use crate::ops::{Cx, fill};
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
        geometry: Geometry,
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
            ModelRef::Builtin { geometry, recipe } => Ok(Source::Seeded { geometry: *geometry, recipe, seed }),
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

    /// The element type of a parameter as published; seeded ones are bf16.
    pub fn dtype(&self, name: &str) -> Result<DType> {
        match self {
            Source::Disk(checkpoint) => match checkpoint.entry(name) {
                Some(entry) => stored(checkpoint, name, entry.dtype),
                None => Err(missing(checkpoint, name)),
            },
            Source::Seeded { .. } => Ok(DType::Bf16),
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
            // As a bf16 checkpoint would hold it, whatever type it is kept in.
            Source::Seeded { seed, .. } => {
                let init = init_of(name, dst.cols());
                let key = philox::stream_key(*seed, name);
                fill::normal_bf16(cx, dst, first..first + rows, key, 0, init.mean, init.std)
            }
        }
    }
}

impl Source {
    /// How a linear module is stored and how its input is quantised.
    pub fn verdict(&self, module: &str) -> Result<Verdict> {
        match self.seeded() {
            Some(seeded) => seeded.verdict(module),
            None => {
                let dtype = self.dtype(&format!("{module}.weight"))?;
                Ok(Verdict { scheme: Scheme::Plain(dtype), act: ActScheme::None, input_scale: None })
            }
        }
    }

    /// Fills rows `first..first + rows` of `dst` (u8, `[_, K]` for FP8, `[_, K/2]` for NVFP4) with a quantised module's
    /// codes as published. On the plan device the module is looked up and nothing is read.
    pub fn fill_codes(&self, cx: &Cx, dst: &mut Tensor, first: usize, rows: usize, module: &str) -> Result<()> {
        match self.seeded() {
            Some(seeded) => {
                let (key, code) = seeded.codes(module)?;
                let per_byte = code.elements() as usize;
                seeded.fits(dst, module, rows, |[n, k]| [n, k / per_byte])?;
                fill::codes(cx, dst, first..first + rows, key, code)
            }
            None => Err(self.plain(module)),
        }
    }

    /// Fills rows `first..first + rows` of `dst` with a quantised module's block scales: u8 e4m3 codes `[_, K/16]` for
    /// NVFP4, f32 `[_, ceil(K/128)]` for FP8 by block, whose rows are rows of blocks. On the plan device the module is
    /// looked up and nothing is read.
    pub fn fill_scales(&self, cx: &Cx, dst: &mut Tensor, first: usize, rows: usize, module: &str) -> Result<()> {
        match self.seeded() {
            Some(seeded) => match seeded.scales(module)? {
                Scales::E4m3 { key } => {
                    seeded.fits(dst, module, rows, |[n, k]| [n, k / 16])?;
                    fill::codes(cx, dst, first..first + rows, key, Code::ScaleE4m3)
                }
                Scales::F32 { key, exponent } => {
                    seeded.fits(dst, module, rows, |[n, k]| [n.div_ceil(128), k.div_ceil(128)])?;
                    fill::scales(cx, dst, first..first + rows, key, exponent)
                }
            },
            None => Err(self.plain(module)),
        }
    }

    /// The scales of a quantised module's rows: FP8 by tensor or channel, or the global of NVFP4.
    pub fn row_scale(&self, module: &str) -> Result<RowScale> {
        match self.seeded() {
            Some(seeded) => seeded.row_scale(module),
            None => Err(self.plain(module)),
        }
    }

    /// The stored scales of K and V of a layer's FP8 cache, each a multiplier of its codes; `None` where none are stored.
    pub fn kv_scales(&self, layer: usize) -> Result<Option<(f32, f32)>> {
        Ok(self.seeded().and_then(|seeded| seeded.kv_scales(layer)))
    }

    fn seeded(&self) -> Option<Seeded<'_>> {
        match self {
            Source::Disk(_) => None,
            Source::Seeded { geometry, recipe, seed } => Some(Seeded { geometry, recipe, seed: *seed }),
        }
    }

    fn plain(&self, module: &str) -> Error {
        let place = match self {
            Source::Disk(checkpoint) => place(checkpoint),
            Source::Seeded { .. } => Path::new("seeded weights"),
        };
        Error::checkpoint(place, format!("{module} is not quantised, it has no codes and no scales"))
    }
}

impl Seeded<'_> {
    /// A destination must have the module's own rows and width: the stream is numbered by them.
    fn fits(&self, dst: &Tensor, module: &str, rows: usize, of: impl Fn([usize; 2]) -> [usize; 2]) -> Result<()> {
        match self.geometry.linear(module).map(of) {
            Some([n, k]) if n == rows && k == dst.cols() => Ok(()),
            right => Err(Error::shape("load", format!("{module}: {rows} rows of {} for {right:?}", dst.cols()))),
        }
    }
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
    let block = (STAGING_BYTES / row_bytes.max(1)).clamp(1, disk_rows.max(1));
    let mut staging = vec![0u8; block * row_bytes];
    let mut start = 0;
    while start < disk_rows {
        let end = (start + block).min(disk_rows);
        let bytes = &mut staging[..(end - start) * row_bytes];
        checkpoint.read(name, start..end, bytes)?;
        let at = first * cols + start * row_elements;
        let count = (end - start) * row_elements;
        match dst.dtype() {
            DType::F32 => convert(bytes, on_disk, &mut dst.host_mut::<f32>()?[at..at + count], |v| v),
            DType::Bf16 => convert(bytes, on_disk, &mut dst.host_mut::<bf16>()?[at..at + count], bf16::from_f32),
            other => return Err(Error::shape("load", format!("{name}: into {other}, must be f32 or bf16"))),
        }
        start = end;
    }
    Ok(())
}

/// Little-endian bf16 or f32 to `out`; bf16 to bf16 and f32 to f32 are exact, f32 to bf16 rounds to nearest even.
fn convert<T>(bytes: &[u8], from: DType, out: &mut [T], store: impl Fn(f32) -> T) {
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
