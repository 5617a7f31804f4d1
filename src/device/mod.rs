//! Where bytes live. A [`Device`] is a card as a value, one memory pool over one slab, and an arm that holds the data or
//! none.
//!
//! May live here: the slab, views of it, card facts, and (the crate's only) `unsafe`. May not: shapes, arithmetic.

pub mod cards;
pub mod host;
pub mod spec;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use host::Pod;
pub use spec::{Arch, DeviceSpec, Overhead, Rates};

use crate::error::{Error, Result};
use crate::mem::{Block, End, Pool, Report, Tag};
use host::HostSlab;

/// Who holds the data of a device's buffers.
#[derive(Debug)]
pub enum Arm {
    /// Host memory, reserved lazily: pages are taken when they are first written.
    Cpu(HostSlab),
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
}

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
        Ok(Arc::new(Device { spec, pool: Mutex::new(Pool::new(slab_bytes)), arm, poison }))
    }

    /// A device with sizes and no data.
    pub fn plan(spec: DeviceSpec, slab_bytes: u64) -> Arc<Device> {
        Arc::new(Device { spec, pool: Mutex::new(Pool::new(slab_bytes)), arm: Arm::Plan, poison: false })
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

    /// `cpu` or `plan`.
    pub fn kind(&self) -> &'static str {
        match self.arm {
            Arm::Cpu(_) => "cpu",
            Arm::Plan => "plan",
        }
    }

    /// Takes `bytes` from one end of the slab.
    pub fn alloc(self: &Arc<Self>, end: End, tag: Tag, bytes: u64) -> Result<Buffer> {
        let block = self.pool().alloc(end, tag, bytes)?;
        let mut buffer = Buffer { device: Arc::clone(self), block: Some(block), bytes };
        if self.poison {
            buffer.host_mut::<u8>()?.fill(0xFF);
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
            Arm::Plan => Err(self.no_data()),
        }
    }

    /// The values, to write.
    pub fn host_mut<T: Pod>(&mut self) -> Result<&mut [T]> {
        match &self.device.arm {
            Arm::Cpu(slab) => match &mut self.block {
                Some(block) => Ok(slab.slice_mut(block, self.bytes)),
                None => unreachable!("a buffer holds its block until it is dropped"),
            },
            Arm::Plan => Err(self.no_data()),
        }
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
        if let Some(block) = self.block.take() {
            self.device.pool().free(block);
        }
    }
}
