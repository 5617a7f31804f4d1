//! A card as a value: what plans, tactics and floors are computed from, whether or not the card is in this machine.

use serde::Serialize;

/// The instruction set a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Arch {
    /// This machine's processor: the CPU arm.
    Host,
    /// Ampere, data centre (A100).
    Sm80,
    /// Ampere, consumer (RTX 30).
    Sm86,
    /// Ada (RTX 40, L40S).
    Sm89,
    /// Hopper (H100, H200), with its `a` instructions (wgmma, TMA, setmaxnreg).
    Sm90a,
    /// Blackwell, data centre (B200), with tcgen05.
    Sm100a,
    /// Blackwell, consumer and workstation (RTX 50, RTX PRO), with block-scaled mma.
    Sm120a,
}

impl std::fmt::Display for Arch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Arch::Host => "host",
            Arch::Sm80 => "sm_80",
            Arch::Sm86 => "sm_86",
            Arch::Sm89 => "sm_89",
            Arch::Sm90a => "sm_90a",
            Arch::Sm100a => "sm_100a",
            Arch::Sm120a => "sm_120a",
        })
    }
}

/// Device memory the driver takes outside the slab: context, modules, cuBLASLt, graphs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Overhead {
    /// Measured on such a card.
    Measured {
        /// Bytes.
        bytes: u64,
        /// The day, as YYYY-MM-DD.
        date: &'static str,
        /// The driver's version.
        driver: &'static str,
    },
    /// Not measured on such a card: a verdict that hangs on it reads `fits if overhead <= X`.
    Assumed {
        /// Bytes.
        bytes: u64,
        /// Where the number comes from.
        reason: &'static str,
    },
}

impl Overhead {
    /// The bytes, measured or assumed.
    pub fn bytes(&self) -> u64 {
        match self {
            Overhead::Measured { bytes, .. } | Overhead::Assumed { bytes, .. } => *bytes,
        }
    }

    /// `measured` or `assumed`.
    pub fn kind(&self) -> &'static str {
        match self {
            Overhead::Measured { .. } => "measured",
            Overhead::Assumed { .. } => "assumed",
        }
    }
}

/// Peak rates from the maker's data sheet, dense, at the advertised boost clock. Floors come from them; a measured
/// ceiling replaces them where a device is there to measure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rates {
    /// Memory bytes per second.
    pub dram: f64,
    /// bf16 operations per second with f32 accumulation (a multiply-add is two).
    pub bf16: f64,
    /// FP8 operations per second with f32 accumulation; the bf16 rate where the card has no FP8.
    pub fp8: f64,
    /// f32 operations per second outside the tensor cores.
    pub f32: f64,
}

/// A card (or this machine) as a value.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeviceSpec {
    /// The name `--card` takes, e.g. `rtx-5090`.
    pub name: &'static str,
    /// The maker's name.
    pub title: &'static str,
    /// What kernels are compiled for.
    pub arch: Arch,
    /// Streaming multiprocessors (cores, for the host).
    pub sms: u32,
    /// Bytes the driver reports as the device's total.
    pub total_bytes: u64,
    /// Bytes outside the slab.
    pub overhead: Overhead,
    /// Peak rates.
    pub rates: Rates,
}

impl DeviceSpec {
    /// The slab that `vram` bytes (the card's total if `None`) leave once the overhead outside it is taken off.
    pub fn slab_bytes(&self, vram: Option<u64>) -> u64 {
        vram.unwrap_or(self.total_bytes).saturating_sub(self.overhead.bytes())
    }

    /// This machine: its memory, its cores, and as overhead the quarter of memory left to everything else.
    ///
    /// The rates are a round estimate per core; they give an order of magnitude to the floors and decide nothing.
    pub fn host() -> DeviceSpec {
        const MEMORY_IF_UNKNOWN: u64 = 8 << 30;
        const DRAM_BYTES_PER_S: f64 = 20e9;
        const F32_FLOPS_PER_CORE: f64 = 32e9;
        let total = std::fs::read_to_string("/proc/meminfo")
            .ok()
            .and_then(|text| {
                let line = text.lines().find(|l| l.starts_with("MemTotal:"))?;
                line.split_whitespace().nth(1)?.parse::<u64>().ok()
            })
            .map_or(MEMORY_IF_UNKNOWN, |kib| kib << 10);
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u32;
        let flops = F32_FLOPS_PER_CORE * f64::from(cores);
        DeviceSpec {
            name: "host",
            title: "this machine's processor",
            arch: Arch::Host,
            sms: cores,
            total_bytes: total,
            overhead: Overhead::Assumed {
                bytes: total / 4,
                reason: "a quarter of memory is left to the system and to this program's own heap",
            },
            rates: Rates { dram: DRAM_BYTES_PER_S, bf16: flops, fp8: flops, f32: flops },
        }
    }
}
