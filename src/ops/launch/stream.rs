//! Reading and copying as fast as memory goes: the ceilings that benches measure beside the kernels of ops. No model runs
//! these, so they have no op, no reference and no plan.

use crate::device::Device;
use crate::device::cuda::{Arg, Cuda, Grid, Kernel};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

const THREADS: u32 = 256;
const VECTOR_BYTES: u64 = 16;
/// Bytes that a block loads at once: eight vectors a thread.
const TILE_BYTES: u64 = THREADS as u64 * 8 * VECTOR_BYTES;
/// Blocks of a multiprocessor, all of them resident.
const BLOCKS_PER_SM: u32 = 8;

/// Blocks that read `bytes`: the length of [`read`]'s result.
pub fn blocks(device: &Device, bytes: u64) -> u32 {
    bytes.div_ceil(TILE_BYTES).clamp(1, u64::from(device.spec().sms * BLOCKS_PER_SM)) as u32
}

/// Reads `x`, whole vectors of 16 bytes, and writes the exclusive or of what each block read, u32 as i32 `[blocks]`.
pub fn read(device: &Device, x: &Tensor, fold: &mut Tensor) -> Result<()> {
    let (cuda, blocks) = (cuda(device)?, blocks(device, x.bytes()));
    whole_vectors(x)?;
    if fold.len() < blocks as usize {
        return Err(Error::shape("stream", format!("{} results, must be {blocks}", fold.len())));
    }
    let args = [x.arg(), fold.arg(), Arg::I64((x.bytes() / VECTOR_BYTES) as i64)];
    cuda.launch(Kernel::new("stream", "stream_read"), Grid::new([blocks, 1, 1], THREADS), &args)
}

/// Copies `x` to `y`, whole vectors of 16 bytes.
pub fn copy(device: &Device, x: &Tensor, y: &mut Tensor) -> Result<()> {
    whole_vectors(x)?;
    if x.bytes() != y.bytes() {
        return Err(Error::shape("stream", format!("{} B to {} B, must be equal", x.bytes(), y.bytes())));
    }
    let args = [x.arg(), y.arg(), Arg::I64((x.bytes() / VECTOR_BYTES) as i64)];
    let grid = Grid::new([blocks(device, x.bytes()), 1, 1], THREADS);
    cuda(device)?.launch(Kernel::new("stream", "stream_copy"), grid, &args)
}

fn whole_vectors(x: &Tensor) -> Result<()> {
    if x.bytes() % VECTOR_BYTES == 0 {
        return Ok(());
    }
    Err(Error::shape("stream", format!("{} B, must be a multiple of {VECTOR_BYTES}", x.bytes())))
}

fn cuda(device: &Device) -> Result<&Cuda> {
    device.as_cuda().ok_or_else(|| Error::Unsupported {
        what: format!("streaming on {}", device.kind()),
        supported: "a card and its emulation do".into(),
    })
}

/// The file, once.
pub(crate) fn variants() -> Vec<Kernel> {
    vec![Kernel::new("stream", "")]
}
