//! What cards this machine has, as the driver tells.
#![allow(unsafe_code)]

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUdevice_attribute as A};
use serde::Serialize;

use super::driver;
use crate::device::spec::Arch;
use crate::error::Result;

/// A card, before anything is allocated on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Card {
    /// Its number: `cuda:N`.
    pub ordinal: u32,
    /// The maker's name.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// What kernels are compiled for; none where this project has none for it.
    pub arch: Option<Arch>,
    /// Multiprocessors.
    pub sms: u32,
    /// Bytes in all.
    pub total_bytes: u64,
    /// Bytes of the L2 cache.
    pub l2_bytes: u64,
    /// Dynamic shared memory a block can opt in to, in bytes.
    pub shared_bytes: u32,
    /// The highest clock of the multiprocessors, kHz.
    pub clock_khz: u32,
    /// The highest clock of the memory, kHz.
    pub memory_clock_khz: u32,
    /// Width of the memory bus, bits.
    pub bus_bits: u32,
    /// The device's own number, as hexadecimal digits.
    pub uuid: String,
    /// Where it is on the PCI bus, as domain:bus:device.function.
    pub pci: String,
}

impl Card {
    /// Whether its tensor cores take FP8.
    pub fn has_fp8(&self) -> bool {
        self.capability >= (8, 9)
    }
}

/// The driver's version as it counts: 13000 for CUDA 13.0.
pub fn driver_version() -> Result<i32> {
    driver::start()?;
    let mut version = 0;
    // SAFETY: `version` is a live integer.
    driver::check(unsafe { sys::cuDriverGetVersion(&raw mut version) }, "cuDriverGetVersion")?;
    Ok(version)
}

/// Every card.
pub fn cards() -> Result<Vec<Card>> {
    (0..driver::start()?).map(card).collect()
}

/// Card `ordinal`.
pub fn card(ordinal: u32) -> Result<Card> {
    let device = driver::device(ordinal)?;
    let get = |which| driver::attribute(device, which);
    let mut name = [0 as std::ffi::c_char; 256];
    // SAFETY: the buffer has the length that is passed.
    driver::check(unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 256, device) }, "cuDeviceGetName")?;
    // SAFETY: the driver ends the name with zero.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let mut total = 0usize;
    // SAFETY: `total` is a live integer.
    driver::check(unsafe { sys::cuDeviceTotalMem_v2(&raw mut total, device) }, "cuDeviceTotalMem")?;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: `uuid` is live and of the driver's own type.
    driver::check(unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) }, "cuDeviceGetUuid")?;
    let mut pci = [0 as std::ffi::c_char; 16];
    // SAFETY: the buffer has the length that is passed.
    driver::check(unsafe { sys::cuDeviceGetPCIBusId(pci.as_mut_ptr(), 16, device) }, "cuDeviceGetPCIBusId")?;
    // SAFETY: the driver ends the address with zero.
    let pci = unsafe { CStr::from_ptr(pci.as_ptr()) }.to_string_lossy().into_owned();
    let capability =
        (get(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?, get(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?);
    Ok(Card {
        ordinal,
        name,
        capability,
        arch: driver::arch_of(capability.0, capability.1).ok(),
        sms: get(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        total_bytes: total as u64,
        l2_bytes: get(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as u64,
        shared_bytes: get(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32,
        clock_khz: get(A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)? as u32,
        memory_clock_khz: get(A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)? as u32,
        bus_bits: get(A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)? as u32,
        uuid: uuid.bytes.iter().fold(String::new(), |text, byte| format!("{text}{:02x}", *byte as u8)),
        pci,
    })
}
