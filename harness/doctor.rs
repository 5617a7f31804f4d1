//! `doctor`: what this machine can do. The driver, the vendor's libraries and where they are, each card and its state at
//! this moment, a C++ compiler for emulation; and for what is missing, how to get it. `--calibrate` measures a card's
//! memory outside the slab.

use std::fmt::Write as _;
use std::time::SystemTime;

use anyhow::anyhow;
use highwater::device::cuda::info::{self, Card};
use highwater::device::cuda::library::{self, Library};
use highwater::device::cuda::{blas, emulator, nvrtc};
use highwater::error::mib;
use serde::Serialize;

use crate::calibrate;
use crate::cli::{DeviceChoice, DoctorArgs};
use crate::failure::Failure;
use crate::nvml::{Management, Moment};
use crate::out;

#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    /// The driver's own version, and the CUDA version it speaks.
    driver: Option<String>,
    cuda: Option<String>,
    /// Where NVRTC and cuBLASLt are looked for first, if the command line says so.
    folder: Option<String>,
    libraries: Vec<Found>,
    cards: Vec<CardNow>,
    abilities: Vec<Ability>,
    missing: Vec<String>,
}

/// A library, or the sentence that says why not.
#[derive(Debug, Serialize)]
struct Found {
    name: &'static str,
    place: Option<String>,
    version: Option<String>,
    missing: Option<String>,
}

#[derive(Debug, Serialize)]
struct CardNow {
    #[serde(flatten)]
    card: Card,
    now: Option<Moment>,
}

/// One value of `--device`, and whether it works here.
#[derive(Debug, Serialize)]
struct Ability {
    device: String,
    works: bool,
    what: String,
}

pub(crate) fn doctor(args: &DoctorArgs) -> Result<(), Failure> {
    if args.calibrate {
        let DeviceChoice::Cuda(ordinal) = args.device else {
            return Err(anyhow!("only a card has memory outside the slab to measure: --device cuda:N").into());
        };
        let measured = calibrate::measure(ordinal)?;
        let text = if args.json { serde_json::to_string_pretty(&measured)? + "\n" } else { measured.text() };
        return Ok(out::print(&text)?);
    }
    let report = look();
    let text = if args.json { serde_json::to_string_pretty(&report)? + "\n" } else { text(&report) };
    Ok(out::print(&text)?)
}

/// The driver's own version: its management library's word, or the kernel module's.
pub(crate) fn driver_version(management: Option<&Management>) -> Option<String> {
    management.and_then(Management::driver).or_else(|| {
        let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
        let mut words = text.lines().next()?.split_whitespace();
        words
            .find(|word| word.split('.').count() >= 2 && word.bytes().all(|b| b.is_ascii_digit() || b == b'.'))
            .map(str::to_owned)
    })
}

fn look() -> Report {
    let management = Management::open();
    let cuda = info::driver_version();
    let cards = info::cards();
    let found = |library: Library, version: &dyn Fn() -> Option<String>| match library::load(library) {
        Ok(place) => Found { name: library.soname(), place: Some(place), version: version(), missing: None },
        Err(error) => Found { name: library.soname(), place: None, version: None, missing: Some(error.to_string()) },
    };
    let dotted = |(major, minor): (i32, i32)| format!("{major}.{minor}");
    let spoken = cuda.as_ref().ok().map(|version| dotted((version / 1000, version % 1000 / 10)));
    let mut libraries = vec![
        found(Library::Driver, &|| spoken.as_ref().map(|version| format!("CUDA {version}"))),
        found(Library::Nvrtc, &|| Some(dotted(nvrtc::version()))),
        found(Library::CublasLt, &|| blas::version().ok()),
    ];
    libraries.push(Found {
        name: "libnvidia-ml.so.1",
        place: management.is_ok().then(|| "by the loader".to_owned()),
        version: None,
        missing: management.as_ref().err().cloned(),
    });
    let driver = driver_version(management.as_ref().ok());
    let cards: Vec<CardNow> = match &cards {
        Ok(cards) => cards.iter().map(|card| now(card, management.as_ref().ok())).collect(),
        Err(_) => Vec::new(),
    };
    let mut missing: Vec<String> = libraries.iter().filter_map(|library| library.missing.clone()).collect();
    if let (Err(error), true) = (&cuda, libraries[0].missing.is_none()) {
        missing.push(error.to_string());
    } else if cards.is_empty() && cuda.is_ok() {
        missing.push("the driver is there and sees no card; CUDA_VISIBLE_DEVICES may hide it".to_owned());
    }
    let compiler = emulator::unavailable();
    missing.extend(compiler.as_ref().map(ToString::to_string));
    let abilities = abilities(&libraries, &cards, compiler.map(|error| error.to_string()));
    let folder = library::folder().map(|folder| folder.display().to_string());
    Report { version: env!("CARGO_PKG_VERSION"), driver, cuda: spoken, folder, libraries, cards, abilities, missing }
}

fn now(card: &Card, management: Option<&Management>) -> CardNow {
    CardNow { card: card.clone(), now: management.and_then(|management| management.moment(&card.uuid)) }
}

fn abilities(libraries: &[Found], cards: &[CardNow], compiler: Option<String>) -> Vec<Ability> {
    let able = |device: &str, what: &str| Ability { device: device.to_owned(), works: true, what: what.to_owned() };
    let mut list =
        vec![able("plan", "bytes of any model on any card, without data"), able("cpu", "values, by the reference arm")];
    list.push(match compiler {
        None => able("emulated", "values, by the cards' own kernels on this processor; slow"),
        Some(why) => Ability { device: "emulated".into(), works: false, what: why },
    });
    let lacking: Vec<&str> =
        libraries[1..3].iter().filter(|library| library.missing.is_some()).map(|library| library.name).collect();
    for CardNow { card, .. } in cards {
        let device = format!("cuda:{}", card.ordinal);
        let (works, what) = match card.arch {
            None => (false, format!("no kernel is written for capability {}.{}", card.capability.0, card.capability.1)),
            Some(_) if !lacking.is_empty() => (false, format!("{} missing", lacking.join(" and "))),
            Some(arch) => (true, format!("everything, by the kernels for {arch}")),
        };
        list.push(Ability { device, works, what });
    }
    if cards.is_empty() {
        list.push(Ability { device: "cuda:0".into(), works: false, what: "no card".into() });
    }
    list
}

fn text(report: &Report) -> String {
    let mut text = String::new();
    let or = |value: &Option<String>| value.clone().unwrap_or_else(|| "not found".to_owned());
    let _ = writeln!(text, "highwater {}", report.version);
    let _ = writeln!(text, "driver {}, CUDA {}", or(&report.driver), or(&report.cuda));
    text.push_str("\nlibraries\n");
    if let Some(folder) = &report.folder {
        let _ = writeln!(text, "  looked for first in {folder} ({})", library::FOLDER_FLAG);
    }
    for Found { name, place, version, .. } in &report.libraries {
        let version = version.as_ref().map_or(String::new(), |version| format!("{version}, "));
        let _ = match place {
            Some(place) => writeln!(text, "  {name}  {version}{place}"),
            None => writeln!(text, "  {name}  not found"),
        };
    }
    text.push_str("\ncards\n");
    for CardNow { card, now } in &report.cards {
        let _ = writeln!(
            text,
            "  cuda:{}  {}, {} (capability {}.{}), {} SMs, {}, L2 {}, SM {} MHz, memory {} MHz, {}, PCI {}",
            card.ordinal,
            card.name,
            card.arch.map_or("no kernels".to_owned(), |arch| arch.to_string()),
            card.capability.0,
            card.capability.1,
            card.sms,
            mib(card.total_bytes),
            mib(card.l2_bytes),
            card.clock_khz / 1000,
            card.memory_clock_khz / 1000,
            card.uuid,
            card.pci,
        );
        let _ = writeln!(text, "          now: {}", now.as_ref().map_or("unknown".to_owned(), Moment::text));
    }
    if report.cards.is_empty() {
        text.push_str("  none\n");
    }
    text.push_str("\nwhat --device can be here\n");
    for Ability { device, works, what } in &report.abilities {
        let _ = writeln!(text, "  {} {device}: {what}", if *works { "yes" } else { "no " });
    }
    if !report.missing.is_empty() {
        text.push_str("\nmissing\n");
    }
    for sentence in &report.missing {
        let _ = writeln!(text, "  {sentence}");
    }
    text
}

/// The day, as YYYY-MM-DD.
pub(crate) fn today() -> String {
    crate::provenance::rfc3339_utc(SystemTime::now())[..10].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater::device::Arch;

    fn card(arch: Option<Arch>) -> CardNow {
        let card = Card {
            ordinal: 0,
            name: "NVIDIA H200".into(),
            capability: (9, 0),
            arch,
            sms: 132,
            total_bytes: 150_109_880_320,
            l2_bytes: 60 << 20,
            shared_bytes: 232_448,
            clock_khz: 1_980_000,
            memory_clock_khz: 3_201_000,
            bus_bits: 6144,
            uuid: "0123456789abcdef0123456789abcdef".into(),
            pci: "0000:1B:00.0".into(),
        };
        CardNow { card, now: None }
    }

    fn libraries(nvrtc: bool) -> Vec<Found> {
        let found = |name, there: bool| Found {
            name,
            place: there.then(|| "there".to_owned()),
            version: None,
            missing: (!there).then(|| format!("{name} was not found; get it")),
        };
        vec![found("libcuda.so.1", true), found("libnvrtc.so.13", nvrtc), found("libcublasLt.so.13", true)]
    }

    #[test]
    fn a_card_works_with_its_libraries_and_an_arch_that_kernels_are_for() {
        let works = |nvrtc, arch| abilities(&libraries(nvrtc), &[card(arch)], None).pop().unwrap();
        assert!(works(true, Some(Arch::Sm90a)).works);
        let without = works(false, Some(Arch::Sm90a));
        assert!(!without.works && without.what.contains("libnvrtc.so.13"), "{without:?}");
        assert!(!works(true, None).works);
        let none = abilities(&libraries(true), &[], Some("no compiler".into()));
        assert!(none.iter().filter(|a| a.works).map(|a| a.device.as_str()).eq(["plan", "cpu"]), "{none:?}");
    }

    #[test]
    fn a_report_says_what_is_missing_and_how_to_get_it() {
        let libraries = libraries(false);
        let missing = libraries.iter().filter_map(|l| l.missing.clone()).collect();
        let cards = vec![card(Some(Arch::Sm90a))];
        let abilities = abilities(&libraries, &cards, None);
        let report = Report {
            version: "0.1.0",
            driver: Some("580.95".into()),
            cuda: Some("13.0".into()),
            folder: Some("/a/toolkit".into()),
            libraries,
            cards,
            abilities,
            missing,
        };
        let text = text(&report);
        for part in [
            "driver 580.95, CUDA 13.0",
            "libraries\n  looked for first in /a/toolkit (--cuda)\n  libcuda.so.1",
            "cuda:0  NVIDIA H200, sm_90a (capability 9.0), 132 SMs, 139.80 GiB",
            "no  cuda:0: libnvrtc.so.13 missing",
            "missing\n  libnvrtc.so.13 was not found; get it",
        ] {
            assert!(text.contains(part), "{part} is missing in:\n{text}");
        }
    }
}
