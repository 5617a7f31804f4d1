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

impl Arch {
    /// Every arch of cards, oldest first.
    pub const CARDS: [Arch; 6] = [Arch::Sm80, Arch::Sm86, Arch::Sm89, Arch::Sm90a, Arch::Sm100a, Arch::Sm120a];
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

    /// This machine with all its memory: [`DeviceSpec::host_within`] no budget.
    pub fn host() -> DeviceSpec {
        DeviceSpec::host_within(None)
    }

    /// This machine: the memory this process may use, its cores, and as overhead a quarter of memory, left to everything
    /// else. Under an explicit budget of `vram` bytes the user has done that sum, and the overhead is 64 MiB for this
    /// program's own heap.
    ///
    /// The rates are a round estimate per core; they give an order of magnitude to the floors and decide nothing.
    pub fn host_within(vram: Option<u64>) -> DeviceSpec {
        const HEAP_BYTES: u64 = 64 << 20;
        const MEMORY_IF_UNKNOWN: u64 = 8 << 30;
        const DRAM_BYTES_PER_S: f64 = 20e9;
        const F32_FLOPS_PER_CORE: f64 = 32e9;
        let total = DeviceSpec::host_memory().unwrap_or(MEMORY_IF_UNKNOWN);
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u32;
        let flops = F32_FLOPS_PER_CORE * f64::from(cores);
        DeviceSpec {
            name: "host",
            title: "this machine's processor",
            arch: Arch::Host,
            sms: cores,
            total_bytes: total,
            overhead: match vram {
                None => Overhead::Assumed {
                    bytes: total / 4,
                    reason: "a quarter of memory is left to the system and to this program's own heap",
                },
                Some(_) => Overhead::Assumed {
                    bytes: HEAP_BYTES,
                    reason: "64 MiB of the given memory are left to this program's own heap",
                },
            },
            rates: Rates { dram: DRAM_BYTES_PER_S, bf16: flops, fp8: flops, f32: flops },
        }
    }

    /// Bytes of memory this process may use: the machine's, or the least limit of its control group and of those around
    /// it. `None` where the system says neither.
    pub fn host_memory() -> Option<u64> {
        memory_limit(|path| std::fs::read_to_string(path).ok())
    }
}

/// The least of MemTotal and the memory limits of this process's control groups, versions 2 and 1, up to their root: a
/// group's limit binds the groups inside it. "max" and version 1's huge default do not lower it.
fn memory_limit(read: impl Fn(&str) -> Option<String>) -> Option<u64> {
    let machine = read("/proc/meminfo").and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    });
    let mut least = machine;
    let mut look = |folder: &str, group: &str, file: &str| {
        // A container sees its own group as the root of the mount, whatever the path says: both ends are tried.
        let mut group = group.trim_end_matches('/');
        loop {
            let limit = read(&format!("{folder}{group}/{file}")).and_then(|text| text.trim().parse::<u64>().ok());
            least = least.into_iter().chain(limit).min();
            let Some((outer, _)) = group.rsplit_once('/') else { return };
            group = outer;
        }
    };
    // Lines are ID:CONTROLLERS:PATH; version 2 is the one without controllers.
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    let path = |wanted: &dyn Fn(&str) -> bool| {
        let mut lines = groups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        lines.find(|(controllers, _)| wanted(controllers)).map_or("", |(_, path)| path)
    };
    look("/sys/fs/cgroup", path(&|controllers| controllers.is_empty()), "memory.max");
    let version1 = path(&|controllers| controllers.split(',').any(|c| c == "memory"));
    look("/sys/fs/cgroup/memory", version1, "memory.limit_in_bytes");
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(files: &[(&str, &str)]) -> Option<u64> {
        memory_limit(|path| files.iter().find(|(name, _)| *name == path).map(|(_, text)| (*text).to_owned()))
    }

    #[test]
    fn memory_is_the_least_of_the_machine_s_and_the_control_groups() {
        let machine = ("/proc/meminfo", "MemTotal:       16384000 kB\nMemFree:  1 kB\n");
        assert_eq!(limit(&[]), None);
        assert_eq!(limit(&[("/proc/meminfo", "MemTotal: many kB")]), None);
        assert_eq!(limit(&[("/proc/meminfo", "MemTotal: 18446744073709551615 kB")]), None);
        assert_eq!(limit(&[machine]), Some(16_777_216_000));
        let own = ("/proc/self/cgroup", "0::/a.slice/b.scope\n");
        let unlimited = ("/sys/fs/cgroup/a.slice/b.scope/memory.max", "max\n");
        let outer = ("/sys/fs/cgroup/a.slice/memory.max", "4096000000\n");
        assert_eq!(limit(&[machine, own, unlimited]), Some(16_777_216_000));
        assert_eq!(limit(&[machine, own, unlimited, outer]), Some(4_096_000_000));
        assert_eq!(limit(&[machine, ("/sys/fs/cgroup/memory.max", "1000000\n")]), Some(1_000_000));
        let version1 = ("/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/1\n");
        let root = ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000\n");
        let none = ("/sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(limit(&[machine, version1, none]), Some(16_777_216_000));
        assert_eq!(limit(&[machine, version1, none, root]), Some(2_000_000));
    }

    #[test]
    fn a_given_budget_is_nearly_all_slab_and_memory_as_found_is_not() {
        assert_eq!(DeviceSpec::host_within(Some(4 << 30)).slab_bytes(Some(4 << 30)), (4 << 30) - (64 << 20));
        let all = DeviceSpec::host();
        assert_eq!(all.slab_bytes(None), all.total_bytes - all.total_bytes / 4);
    }
}
