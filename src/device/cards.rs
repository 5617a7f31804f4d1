//! The cards `--card` knows, as values: a plan needs nothing from the card itself.
//!
//! `total_bytes` is what the driver reports to a program (`cuDeviceTotalMem`, `cuMemGetInfo`, deviceQuery, PyTorch's
//! `total_memory`) on Linux. It is less than the marketing size and less than nvidia-smi's, and each driver branch
//! keeps a little more or less for itself. Taken here, in this order: a report from a driver of branch 570 or later
//! where one was found; exact bytes before rounded MiB, and of a rounded figure the lower bound; the commonest report;
//! of equals the smallest. The comment on each card says which report that is, and the spread seen where it matters.
//!
//! Rates are the maker's dense peaks at the advertised boost clock. GeForce tensor cores run at half rate when they
//! accumulate in f32, which is the rate meant here. A card that boosts above the advertised clock can beat these by
//! several percent.

use super::cuda::info::Card;
use super::spec::{Arch, DeviceSpec, Overhead, Rates};
use crate::error::{Error, Result};

/// KiB of context per multiprocessor that holds 1536 threads. The driver backs each resident thread with 1 KiB of local
/// memory by default (1.5 MiB per multiprocessor) and the rest of the context grows about as fast.
const CONTEXT_1536_KIB_PER_SM: u64 = 3584;
/// The same for a multiprocessor that holds 2048 threads.
const CONTEXT_2048_KIB_PER_SM: u64 = 4352;
/// MiB for loaded kernels, cuBLASLt and instantiated graphs, above the bare context.
const LIBRARIES_MIB: u64 = 256;

const REASON_1536: &str = "3.5 MiB of CUDA context per SM (free memory in a fresh process was lower by 271 MiB on an \
    RTX 3090, 392 on a 4090, 521 on a 5090, 555 on an RTX PRO 6000), plus 256 MiB for kernels, cuBLASLt and graphs \
    (inference servers report 160 to 205 without graphs); no display attached";
const REASON_2048: &str = "4.25 MiB of CUDA context per SM (free memory in a fresh process was lower by 440 MiB on an \
    A100, 525 on an H100, 527 on an H200; no report found for a B200), plus 256 MiB for kernels, cuBLASLt and graphs \
    (inference servers report 160 to 205 without graphs)";

const fn overhead(arch: Arch, sms: u32) -> Overhead {
    let (kib_per_sm, reason) = match arch {
        Arch::Sm80 | Arch::Sm90a | Arch::Sm100a => (CONTEXT_2048_KIB_PER_SM, REASON_2048),
        Arch::Host | Arch::Sm86 | Arch::Sm89 | Arch::Sm120a => (CONTEXT_1536_KIB_PER_SM, REASON_1536),
    };
    Overhead::Assumed { bytes: ((sms as u64 * kib_per_sm) << 10) + mib(LIBRARIES_MIB), reason }
}

const fn mib(mib: u64) -> u64 {
    mib << 20
}

/// From GB/s and TFLOP/s, as data sheets print them.
const fn rates(dram: f64, bf16: f64, fp8: f64, f32: f64) -> Rates {
    Rates { dram: dram * 1e9, bf16: bf16 * 1e12, fp8: fp8 * 1e12, f32: f32 * 1e12 }
}

const fn card(
    name: &'static str,
    title: &'static str,
    arch: Arch,
    sms: u32,
    total_bytes: u64,
    rates: Rates,
) -> DeviceSpec {
    DeviceSpec { name, title, arch, sms, total_bytes, overhead: overhead(arch, sms), rates }
}

/// A card whose memory outside the slab was measured: what `highwater doctor --calibrate` prints.
const fn measured(mut card: DeviceSpec, bytes: u64, date: &'static str, driver: &'static str) -> DeviceSpec {
    card.overhead = Overhead::Measured { bytes, date, driver };
    card
}

#[rustfmt::skip]
static CARDS: [DeviceSpec; 16] = [
    // llama.cpp, Linux: 24123 MiB, rounded down; 24124 to 24159 also seen, and 24238 on driver 535.
    card("rtx-3090", "NVIDIA GeForce RTX 3090", Arch::Sm86, 82,
        mib(24_123), rates(936.0, 71.0, 71.0, 35.6)),
    // deviceQuery, Linux, CUDA 13.1 driver: exact bytes (15948 MiB); 15944 MiB also seen.
    card("rtx-4060-ti-16g", "NVIDIA GeForce RTX 4060 Ti 16GB", Arch::Sm89, 34,
        16_722_821_120, rates(288.0, 44.1, 88.2, 22.1)),
    // llama.cpp: 15937 MiB, rounded down; PyTorch with CUDA 13.0 shows 15944; driver 550 gave 16072.
    card("rtx-4080-super", "NVIDIA GeForce RTX 4080 SUPER", Arch::Sm89, 80,
        mib(15_937), rates(736.0, 104.4, 208.8, 52.2)),
    // deviceQuery and PyTorch, Linux, driver 580: exact bytes, many reports; up to 24217 MiB on older drivers.
    card("rtx-4090", "NVIDIA GeForce RTX 4090", Arch::Sm89, 128,
        25_250_627_584, rates(1008.0, 165.2, 330.3, 82.6)),
    // llama.cpp, Linux: 15808 MiB, rounded down; 15842 as often, on the same machine.
    card("rtx-5070-ti", "NVIDIA GeForce RTX 5070 Ti", Arch::Sm120a, 70,
        mib(15_808), rates(896.0, 87.9, 175.8, 43.9)),
    // PyTorch, Linux: 15840 MiB rounded to nearest, so 15839.5 at least; one llama.cpp log shows 15880.
    card("rtx-5080", "NVIDIA GeForce RTX 5080", Arch::Sm120a, 84,
        mib(15_840) - mib(1) / 2, rates(960.0, 112.6, 225.1, 56.3)),
    // deviceQuery and PyTorch, Linux, driver 580: exact bytes, many reports; 32077 to 32150 MiB seen, by driver.
    card("rtx-5090", "NVIDIA GeForce RTX 5090", Arch::Sm120a, 170,
        33_668_857_856, rates(1792.0, 209.5, 419.0, 104.8)),
    // PyTorch: 31.3 GiB, no exact report. nvidia-smi's total is the 5090's, so: the 5090's deviceQuery total that
    // prints as 31.3. Rates as the 5090: 232 TFLOP/s of bf16 was measured, so that is not cut; FP8 is taken as uncut.
    card("rtx-5090d", "NVIDIA GeForce RTX 5090 D", Arch::Sm120a, 170,
        33_660_534_784, rates(1792.0, 209.5, 419.0, 104.8)),
    // PyTorch 2.7, CUDA 12.8: 48520 MiB rounded to nearest, so 48519.5 at least. ECC off; with ECC on, 44.43 GiB.
    card("rtx-6000-ada", "NVIDIA RTX 6000 Ada Generation", Arch::Sm89, 142,
        mib(48_520) - mib(1) / 2, rates(960.0, 364.2, 728.5, 91.1)),
    // PyTorch and a profiler, Workstation and Max-Q: exact bytes; 97247 (llama.cpp) and 97250 MiB (Server) also seen.
    // GDDR7 with ECC. Rates: the Workstation edition at 600 W.
    card("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", Arch::Sm120a, 188,
        101_973_491_712, rates(1792.0, 503.8, 1007.6, 126.0)),
    // PyTorch: exact bytes. ECC on, which takes a sixteenth (GDDR6). 45373 MiB on driver 550; up to 45589 seen.
    // bf16 is half of the sheet's 733 with sparsity, as the clock gives; its 362.05 dense is the L40's sparse rate.
    card("l40s", "NVIDIA L40S", Arch::Sm89, 142,
        47_677_177_856, rates(864.0, 366.5, 733.0, 91.6)),
    // deviceQuery and PyTorch, Linux, CUDA 13.0 driver: exact bytes, SXM4 and PCIe; 40339 MiB on driver 535.
    // ECC on; it costs no capacity (HBM). Rates: SXM4.
    card("a100-40g", "NVIDIA A100-SXM4-40GB", Arch::Sm80, 108,
        42_405_855_232, rates(1555.0, 312.0, 312.0, 19.5)),
    // PyTorch, Linux, driver 580: exact bytes, SXM4 and PCIe; 81051 MiB on driver 535. ECC as on the 40 GB card.
    card("a100-80g", "NVIDIA A100-SXM4-80GB", Arch::Sm80, 108,
        85_093_777_408, rates(2039.0, 312.0, 312.0, 19.5)),
    // cudaMemGetInfo and PyTorch, Linux: exact bytes, many reports; up to 81106 MiB on older drivers. SXM5.
    // ECC on; it costs no capacity (HBM).
    card("h100", "NVIDIA H100 80GB HBM3", Arch::Sm90a, 132,
        85_017_493_504, rates(3350.0, 989.5, 1979.0, 67.0)),
    // cuDeviceTotalMem, driver 580.159.04, read here 2026-11-30; a bare context took 552,402,944 B of it. ECC on (HBM: it
    // costs no capacity); 139.72 GiB also seen.
    measured(card("h200", "NVIDIA H200", Arch::Sm90a, 132,
        150_109_880_320, rates(4800.0, 989.5, 1979.0, 67.0)), 617_414_656, "2026-12-01", "580.159.04"),
    // PyTorch, Linux, ECC on: exact bytes; 182620 and, on driver 595, 182624 MiB also seen. Rates: HGX, 1000 W.
    card("b200", "NVIDIA B200", Arch::Sm100a, 148,
        191_503_007_744, rates(7700.0, 2250.0, 4500.0, 75.0)),
];

/// Every card, consumer cards first, each family from small to large. `host` is not among them.
pub fn all() -> Vec<DeviceSpec> {
    CARDS.to_vec()
}

/// The card called `name`: `host`, a card's name, or the name the driver gives it.
///
/// Case and separators do not matter, and `NVIDIA`, `GeForce` and `RTX` may be left out: `RTX 5090`, `rtx5090` and
/// `5090` are one card. An unknown name is an [`Error::Request`] that suggests the nearest name and lists them all.
pub fn find(name: &str) -> Result<DeviceSpec> {
    let wanted = key(name);
    if wanted == HOST {
        return Ok(DeviceSpec::host());
    }
    match CARDS.iter().find(|card| key(card.name) == wanted || key(card.title) == wanted) {
        Some(card) => Ok(card.clone()),
        None => Err(unknown(name, &wanted)),
    }
}

/// The spec of a card in this machine: the known one of its name, else one made from what the driver tells, with rates from
/// its clocks and an assumed overhead.
pub fn of(card: &Card) -> Result<DeviceSpec> {
    if let Ok(known) = find(&card.name) {
        return Ok(known);
    }
    let Some(arch) = card.arch else {
        return Err(Error::Unsupported {
            what: format!("{} of compute capability {}.{}", card.name, card.capability.0, card.capability.1),
            supported: "kernels are written for 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0".into(),
        });
    };
    // Two transfers a clock; multiply-adds of an SM's tensor cores a clock, dense bf16 with f32 sums, and of its lanes.
    let dram = 2e3 * f64::from(card.memory_clock_khz) * f64::from(card.bus_bits) / 8.0;
    let per_sm = |macs: f64| 2e3 * macs * f64::from(card.clock_khz) * f64::from(card.sms);
    let (tensor, fp8, lanes) = match arch {
        Arch::Sm80 => (1024.0, 1024.0, 64.0),
        Arch::Sm90a => (2048.0, 4096.0, 128.0),
        Arch::Sm100a => (4096.0, 8192.0, 128.0),
        Arch::Sm86 => (256.0, 256.0, 128.0),
        Arch::Sm89 | Arch::Sm120a => (256.0, 512.0, 128.0),
        Arch::Host => (0.0, 0.0, 0.0),
    };
    // One leak for each kind of card in the machine: names are static everywhere else.
    let name: &'static str = Box::leak(format!("cuda-{}", key(&card.name)).into_boxed_str());
    let title: &'static str = Box::leak(card.name.clone().into_boxed_str());
    Ok(DeviceSpec {
        name,
        title,
        arch,
        sms: card.sms,
        total_bytes: card.total_bytes,
        overhead: overhead(arch, card.sms),
        rates: Rates { dram, bf16: per_sm(tensor), fp8: per_sm(fp8), f32: per_sm(lanes) },
    })
}

/// What this machine is called among the cards.
pub const HOST: &str = "host";

/// What names are compared by: lower-case letters and digits, without the words that are the same on every card.
fn key(name: &str) -> String {
    let mut key: String = name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect();
    for word in ["nvidia", "geforce", "rtx"] {
        if let Some(rest) = key.strip_prefix(word) {
            key = rest.to_string();
        }
    }
    match key.strip_suffix("gb") {
        Some(rest) => format!("{rest}g"),
        None => key,
    }
}

fn unknown(name: &str, wanted: &str) -> Error {
    /// As much of a wrong name as an error repeats.
    const SHOWN_CHARS: usize = 40;
    let mut shown: String = name.chars().take(SHOWN_CHARS).collect();
    if shown.len() < name.len() {
        shown.push('…');
    }
    let names: Vec<&str> = std::iter::once(HOST).chain(CARDS.iter().map(|card| card.name)).collect();
    let hint = nearest(wanted, &names).map(|name| format!("did you mean {name}? ")).unwrap_or_default();
    let what = format!("no card is called {shown:?}; {hint}the names are {}", names.join(", "));
    Error::Request { param: "card", what }
}

/// The first name that begins with `wanted`, or the one fewest edits away unless that is more than half of `wanted`.
fn nearest<'a>(wanted: &str, names: &[&'a str]) -> Option<&'a str> {
    /// Longer than any card's name by far: nothing is near, and the comparison is quadratic.
    const LONGEST: usize = 64;
    if wanted.len() > LONGEST {
        return None;
    }
    if let Some(name) = names.iter().find(|name| !wanted.is_empty() && key(name).starts_with(wanted)) {
        return Some(name);
    }
    let (edits, name) = names.iter().map(|&name| (edits(wanted, &key(name)), name)).min_by_key(|(edits, _)| *edits)?;
    (2 * edits <= wanted.len()).then_some(name)
}

/// Levenshtein distance in bytes.
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let substitute = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(name: &str) -> String {
        match find(name) {
            Err(Error::Request { param: "card", what }) => what,
            other => panic!("{name:?}: {other:?}"),
        }
    }

    #[test]
    fn names_and_titles_are_unique_and_find_their_own_card() {
        let mut keys = std::collections::HashSet::from([key(HOST)]);
        for card in all() {
            assert!(keys.insert(key(card.name)), "{} collides with another card", card.name);
            // A title may reduce to its own card's key, never to another card's.
            assert!(keys.insert(key(card.title)) || key(card.title) == key(card.name), "{} collides", card.title);
            assert_eq!(find(card.name).unwrap(), card);
            assert_eq!(find(card.title).unwrap(), card);
        }
    }

    #[test]
    fn case_separators_and_family_words_do_not_matter() {
        for (written, name) in [
            ("RTX 5090", "rtx-5090"),
            ("rtx5090", "rtx-5090"),
            ("5090", "rtx-5090"),
            ("GeForce_RTX_5090", "rtx-5090"),
            ("RTX 5090 D", "rtx-5090d"),
            ("4060 Ti 16GB", "rtx-4060-ti-16g"),
            ("4080 Super", "rtx-4080-super"),
            ("6000 Ada", "rtx-6000-ada"),
            ("PRO 6000", "rtx-pro-6000"),
            ("A100-80GB", "a100-80g"),
            (" H100\n", "h100"),
            ("NVIDIA H200", "h200"),
            ("Host", "host"),
        ] {
            assert_eq!(find(written).unwrap().name, name, "{written:?}");
        }
        assert_eq!(find("host").unwrap().arch, Arch::Host);
    }

    #[test]
    fn an_unknown_name_lists_the_names_and_suggests_the_nearest() {
        for (written, suggestion) in [
            ("rtx-5091", "rtx-5090"),
            ("4080", "rtx-4080-super"),
            ("A100", "a100-40g"),
            ("rtx-4060-ti", "rtx-4060-ti-16g"),
            ("h20", "h200"),
            ("hots", "host"),
            ("RTX PRO 6000 D", "rtx-pro-6000"),
        ] {
            let what = message(written);
            assert!(what.contains(&format!("did you mean {suggestion}?")), "{what}");
            assert!(what.contains(&format!("{written:?}")), "{what}");
            assert!(what.contains("the names are host, rtx-3090,") && what.ends_with("b200"), "{what}");
        }
    }

    #[test]
    fn a_hostile_name_is_an_error_of_bounded_size_without_a_suggestion() {
        let longest = all().iter().map(|card| card.name.len()).sum::<usize>() + 400;
        for written in ["", "   ", "rtx", "显卡", "\0\u{7f}", &"5090".repeat(1 << 18), &"é".repeat(1 << 18)] {
            let what = message(written);
            assert!(!what.contains("did you mean"), "{what}");
            assert!(what.len() < longest, "{} bytes", what.len());
        }
    }

    #[test]
    fn totals_are_below_the_marketing_size_and_within_a_tenth_of_it() {
        const GIB: f64 = (1u64 << 30) as f64;
        let marketing_gib = |name: &str| match name {
            "rtx-4060-ti-16g" | "rtx-4080-super" | "rtx-5070-ti" | "rtx-5080" => 16.0,
            "rtx-3090" | "rtx-4090" => 24.0,
            "rtx-5090" | "rtx-5090d" => 32.0,
            "a100-40g" => 40.0,
            "rtx-6000-ada" | "l40s" => 48.0,
            "a100-80g" | "h100" => 80.0,
            "rtx-pro-6000" => 96.0,
            "h200" => 141.0,
            "b200" => 180.0,
            other => panic!("no marketing size for {other}"),
        };
        for card in all() {
            let share = card.total_bytes as f64 / (marketing_gib(card.name) * GIB);
            assert!((0.9..1.0).contains(&share), "{}: {share}", card.name);
        }
    }

    #[test]
    fn overhead_covers_every_reported_context_and_leaves_a_slab() {
        for (name, context_mib) in [
            ("rtx-3090", 271),
            ("rtx-4090", 392),
            ("rtx-5090", 521),
            ("rtx-pro-6000", 555),
            ("a100-80g", 440),
            ("h100", 525),
        ] {
            let bytes = find(name).unwrap().overhead.bytes();
            assert!(bytes >= mib(context_mib + LIBRARIES_MIB), "{name}: {bytes}");
        }
        for card in all() {
            let measured = ["h200"].contains(&card.name);
            assert_eq!(card.overhead.kind(), if measured { "measured" } else { "assumed" }, "{}", card.name);
            assert!((mib(300)..mib(1024)).contains(&card.overhead.bytes()), "{}", card.name);
            assert_eq!(card.slab_bytes(None), card.total_bytes - card.overhead.bytes());
        }
    }

    #[test]
    fn rates_are_positive_and_ordered() {
        for card in all() {
            let Rates { dram, bf16, fp8, f32 } = card.rates;
            assert!(dram > 0.0 && f32 > 0.0 && f32 < bf16 && bf16 <= fp8, "{}: {:?}", card.name, card.rates);
            // FP8 is twice bf16 where there is FP8; Ampere has none.
            let factor = if matches!(card.arch, Arch::Sm80 | Arch::Sm86) { 1.0 } else { 2.0 };
            assert!((fp8 / bf16 / factor - 1.0).abs() < 0.002, "{}: {}", card.name, fp8 / bf16);
            // GeForce: 512 f32-accumulated bf16 operations a clock and SM against 256 f32 ones.
            let geforce = card.title.contains("GeForce");
            assert!(!geforce || (bf16 / f32 / 2.0 - 1.0).abs() < 0.01, "{}: {}", card.name, bf16 / f32);
        }
        let rate = |name: &str| find(name).unwrap().rates;
        assert!(rate("rtx-4060-ti-16g").dram < rate("rtx-4080-super").dram);
        assert!(rate("rtx-5090").dram < rate("a100-80g").dram);
        assert!(rate("a100-80g").dram < rate("h100").dram && rate("h100").dram < rate("h200").dram);
        assert!(rate("h200").bf16 < rate("b200").bf16);
    }
}
