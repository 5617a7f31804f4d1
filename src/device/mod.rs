//! Where bytes live. A [`Device`] is a card as a value, one memory pool over one slab, and an arm that holds the data or
//! none.
//!
//! May live here: the slab, views of it, card facts, and (the crate's only) `unsafe`. May not: shapes, arithmetic.

pub mod cards;
pub mod cuda;
pub mod host;
pub mod spec;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use host::Pod;
pub use spec::{Arch, DeviceSpec, Overhead, Rates};

use crate::error::{Error, Result};
use crate::mem::{ALIGN_BYTES, Block, End, Owner, Pool, Report, Tag};
use cuda::Cuda;
use host::HostSlab;

/// Who holds the data of a device's buffers.
#[derive(Debug)]
pub enum Arm {
    /// Host memory, reserved lazily: pages are taken when they are first written.
    Cpu(HostSlab),
    /// A card's memory, or what stands in for one.
    Cuda(Cuda),
    /// Nobody: every allocation is made and counted, reading a buffer is [`Error::NoData`].
    Plan,
}

/// One device: its spec, its pool over one slab, and the arm behind it.
#[derive(Debug)]
pub struct Device {
    spec: DeviceSpec,
    pool: Mutex<Pool>,
    arm: Arm,
    poison: bool,
    /// Guard bands that were written.
    overruns: Mutex<Vec<String>>,
}

/// Bytes of a guard band behind each buffer of a guarded device.
const GUARD_BYTES: u64 = ALIGN_BYTES;
/// What a guard band holds.
const GUARD: u8 = 0xA5;
/// What a poisoned buffer holds: NaN in every float type.
const POISON: u8 = 0xFF;

impl Device {
    /// A device whose data lives in host memory. `slab_bytes` of address space are reserved, none of it touched.
    pub fn cpu(spec: DeviceSpec, slab_bytes: u64) -> Result<Arc<Device>> {
        Device::host(spec, slab_bytes, false)
    }

    /// As [`Device::cpu`], and each new buffer is filled with NaN patterns: a value nobody wrote shows in the result.
    pub fn cpu_poisoned(spec: DeviceSpec, slab_bytes: u64) -> Result<Arc<Device>> {
        Device::host(spec, slab_bytes, true)
    }

    fn host(spec: DeviceSpec, slab_bytes: u64, poison: bool) -> Result<Arc<Device>> {
        let arm = Arm::Cpu(HostSlab::reserve(slab_bytes)?);
        Ok(Device::new(spec, slab_bytes, arm, poison))
    }

    fn new(spec: DeviceSpec, slab_bytes: u64, arm: Arm, poison: bool) -> Arc<Device> {
        let pool = Mutex::new(Pool::new(slab_bytes));
        Arc::new(Device { spec, pool, arm, poison, overruns: Mutex::default() })
    }

    /// As [`Device::emulated`], without poison and guard bands: its bytes are a card's.
    pub fn emulated_bare(spec: DeviceSpec, slab_bytes: u64) -> Result<Arc<Device>> {
        let arm = Arm::Cuda(Cuda::emulated(spec.arch, slab_bytes)?);
        Ok(Device::new(spec, slab_bytes, arm, false))
    }

    /// Card `ordinal`, with a slab of `slab_bytes` in one allocation. `spec` is what tactics and plans go by.
    pub fn cuda(spec: DeviceSpec, ordinal: u32, slab_bytes: u64) -> Result<Arc<Device>> {
        Ok(Device::new(spec, slab_bytes, Arm::Cuda(Cuda::open(ordinal, slab_bytes)?), false))
    }

    /// As [`Device::cuda`], each new buffer filled with NaN patterns and followed by a guard band.
    pub fn cuda_guarded(spec: DeviceSpec, ordinal: u32, slab_bytes: u64) -> Result<Arc<Device>> {
        Ok(Device::new(spec, slab_bytes, Arm::Cuda(Cuda::open(ordinal, slab_bytes)?), true))
    }

    /// The CUDA arm without a card: kernels are built for this processor and run on it. Guarded as
    /// [`Device::cuda_guarded`] is.
    pub fn emulated(spec: DeviceSpec, slab_bytes: u64) -> Result<Arc<Device>> {
        let arm = Arm::Cuda(Cuda::emulated(spec.arch, slab_bytes)?);
        Ok(Device::new(spec, slab_bytes, arm, true))
    }

    /// A device with sizes and no data.
    pub fn plan(spec: DeviceSpec, slab_bytes: u64) -> Arc<Device> {
        Device::new(spec, slab_bytes, Arm::Plan, false)
    }

    /// The card.
    pub fn spec(&self) -> &DeviceSpec {
        &self.spec
    }

    /// The arm, to match on in an op once everything is allocated.
    pub fn arm(&self) -> &Arm {
        &self.arm
    }

    /// Whether this device holds data.
    pub fn has_data(&self) -> bool {
        !matches!(self.arm, Arm::Plan)
    }

    /// The CUDA arm, if this is one.
    pub fn as_cuda(&self) -> Option<&Cuda> {
        match &self.arm {
            Arm::Cuda(cuda) => Some(cuda),
            Arm::Cpu(_) | Arm::Plan => None,
        }
    }

    /// The tags of buffers whose guard band was written, since this was last asked.
    pub fn take_overruns(&self) -> Vec<String> {
        std::mem::take(&mut self.overruns.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// `cpu`, `cuda` or `plan`.
    pub fn kind(&self) -> &'static str {
        match self.arm {
            Arm::Cpu(_) => "cpu",
            Arm::Cuda(_) => "cuda",
            Arm::Plan => "plan",
        }
    }

    /// Takes `bytes` from one end of the slab.
    pub fn alloc(self: &Arc<Self>, end: End, tag: Tag, bytes: u64) -> Result<Buffer> {
        let guard = if self.is_guarded() { GUARD_BYTES } else { 0 };
        let block = self.pool().alloc(end, tag, bytes + guard)?;
        let guarded = (guard > 0).then_some(tag);
        let mut buffer = Buffer { device: Arc::clone(self), block: Some(block), bytes, guarded };
        match &self.arm {
            Arm::Cpu(_) if self.poison => buffer.host_mut::<u8>()?.fill(POISON),
            Arm::Cuda(cuda) if self.poison => {
                cuda.fill(buffer.offset(), POISON, bytes)?;
                cuda.fill(buffer.offset() + bytes, GUARD, guard)?;
            }
            _ => {}
        }
        Ok(buffer)
    }

    /// Starts a step: the arena is empty and its peak is counted from here.
    pub fn begin_step(&self) {
        self.pool().begin_step();
    }

    /// What the pool has seen: resident, peak, free, owners.
    pub fn report(&self) -> Report {
        self.pool().report()
    }

    /// What is live in the arena now, by tag: nothing between steps, unless something leaks. Bytes, the largest first.
    pub fn arena_owners(&self) -> Vec<(Owner, u64)> {
        self.pool().arena_owners()
    }

    /// Whether a guard band follows each buffer, which takes bytes that no plan has.
    pub fn is_guarded(&self) -> bool {
        self.poison && matches!(self.arm, Arm::Cuda(_))
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        // The pool's own invariants hold between its calls, so a panic elsewhere leaves it usable.
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A block of a device's slab, freed when dropped.
#[derive(Debug)]
pub struct Buffer {
    device: Arc<Device>,
    block: Option<Block>,
    bytes: u64,
    /// Set where a guard band follows.
    guarded: Option<Tag>,
}

impl Buffer {
    /// The bytes asked for (the pool pads them).
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The offset of the first byte in the slab.
    pub fn offset(&self) -> u64 {
        self.block().offset()
    }

    /// The values, where the device holds data in host memory.
    pub fn host<T: Pod>(&self) -> Result<&[T]> {
        match &self.device.arm {
            Arm::Cpu(slab) => Ok(slab.slice(self.block(), self.bytes)),
            Arm::Cuda(_) | Arm::Plan => Err(self.no_data()),
        }
    }

    /// The values, to write.
    pub fn host_mut<T: Pod>(&mut self) -> Result<&mut [T]> {
        match &self.device.arm {
            Arm::Cpu(slab) => match &mut self.block {
                Some(block) => Ok(slab.slice_mut(block, self.bytes)),
                None => unreachable!("a buffer holds its block until it is dropped"),
            },
            Arm::Cuda(_) | Arm::Plan => Err(self.no_data()),
        }
    }

    /// The address of the first byte on the card; 0 where the buffer is on none.
    pub fn address(&self) -> u64 {
        self.device.as_cuda().map_or(0, |cuda| cuda.address(self.offset()))
    }

    /// Copies `values` to the buffer from byte `at` on, on any device that holds data; nothing on the plan device. On a
    /// card the copy takes its turn among the launches.
    pub fn write<T: Pod>(&mut self, at: u64, values: &[T]) -> Result<()> {
        let bytes = host::bytes_of(values);
        self.check(at, bytes.len() as u64);
        match &self.device.arm {
            Arm::Cpu(_) => {
                self.host_mut::<u8>()?[at as usize..][..bytes.len()].copy_from_slice(bytes);
                Ok(())
            }
            Arm::Cuda(cuda) => cuda.write(self.offset() + at, bytes),
            Arm::Plan => Ok(()),
        }
    }

    /// Has `fill` write `bytes` bytes from byte `at` on: in place on the host, and for a card into pinned memory that is
    /// copied from there. Nothing on the plan device.
    pub fn write_with(&mut self, at: u64, bytes: usize, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        self.check(at, bytes as u64);
        match &self.device.arm {
            Arm::Cpu(_) => fill(&mut self.host_mut::<u8>()?[at as usize..][..bytes]),
            Arm::Cuda(cuda) => cuda.write_with(self.offset() + at, bytes, fill),
            Arm::Plan => Ok(()),
        }
    }

    /// `count` values from byte `at` on. On a card this waits for everything launched before.
    pub fn read<T: Pod>(&self, at: u64, count: usize) -> Result<Vec<T>> {
        self.check(at, (count * size_of::<T>()) as u64);
        match &self.device.arm {
            Arm::Cpu(_) => {
                let bytes = &self.host::<u8>()?[at as usize..][..count * size_of::<T>()];
                Ok(host::values_of(bytes))
            }
            Arm::Cuda(cuda) => {
                let mut bytes = vec![0u8; count * size_of::<T>()];
                cuda.read(self.offset() + at, &mut bytes)?;
                Ok(host::values_of(&bytes))
            }
            Arm::Plan => Err(self.no_data()),
        }
    }

    fn check(&self, at: u64, bytes: u64) {
        let end = at.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "{at} + {bytes} B of a buffer of {} B", self.bytes);
    }

    /// Whether the guard band is whole.
    fn intact(&self, cuda: &Cuda) -> bool {
        let mut guard = [0; GUARD_BYTES as usize];
        // Nothing was written in a dry run, nothing can be read while launches are recorded, and a card that answers nothing
        // any more reports that itself, at the next call.
        cuda.is_recording()
            || cuda.mode() == cuda::Mode::Dry
            || cuda.read(self.offset() + self.bytes, &mut guard).is_err()
            || guard.iter().all(|byte| *byte == GUARD)
    }

    fn block(&self) -> &Block {
        match &self.block {
            Some(block) => block,
            None => unreachable!("a buffer holds its block until it is dropped"),
        }
    }

    fn no_data(&self) -> Error {
        Error::NoData { what: format!("a buffer of {} B", self.bytes) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let (Some(tag), Some(cuda)) = (self.guarded, self.device.as_cuda())
            && !self.intact(cuda)
        {
            let mut overruns = self.device.overruns.lock().unwrap_or_else(PoisonError::into_inner);
            overruns.push(tag.to_string());
        }
        if let Some(block) = self.block.take() {
            self.device.pool().free(block);
        }
    }
}
