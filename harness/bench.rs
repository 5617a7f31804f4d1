//! `bench`: the table of kernels. Each is called through its public op, at the shapes of the real models, with cold or warm
//! operands; its time is held against what the card can do at most, measured in the same process, and some rows of its
//! result against the CPU arm.
//!
//! `shapes` says what is timed, `work`, `mixers` and `positions` how it is called and checked, `drawn` whether tokens are drawn
//! as often as they should be, on what `operands` makes; `rig` is where it
//! runs, `cache` what a call finds in the L2, `time` takes the time while `lookout` looks at the card, `ceiling` what it is held
//! against and `limit` what cannot be; `row` is what is written, `file` where, and `read` reads it back.

pub(crate) mod cache;
mod ceiling;
mod drawn;
mod file;
mod limit;
mod lookout;
mod mixers;
mod operands;
mod positions;
pub(crate) mod read;
mod rig;
mod row;
mod shapes;
mod time;
mod work;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::anyhow;
use highwater::device::cuda::info;
use highwater::device::{Device, DeviceSpec, cards};
use highwater::error::{Error, Result, mib};
use highwater::num::DType;
use highwater::ops::Cost;
use highwater::ops::cost::Unit;

use self::cache::Cache;
use self::ceiling::Ceilings;
use self::file::File;
use self::lookout::CardLookout;
use self::operands::Maker;
use self::rig::{Rig, context};
use self::row::Row;
use self::shapes::{Scale, Shape};
use self::time::{SharedLookout, Timing};
use self::work::{Checked, Work};
use crate::cli::{BenchArgs, DeviceChoice, Peer};
use crate::definitions;
use crate::doctor;
use crate::failure::Failure;
use crate::nvml::{CardSource, Management};
use crate::orphan::refuse_orphan;
use crate::out;
use crate::progress::Progress;
use crate::provenance::{CardFacts, Provenance};
use crate::stats;

/// The most that operands and results take on a card.
const CARD_SLAB_BYTES: u64 = 24 << 30;
/// The same in host memory, of which only what is written is taken.
const HOST_SLAB_BYTES: u64 = 8 << 30;
/// A plan's slab, for costs.
const PLAN_SLAB_BYTES: u64 = 1 << 46;
/// Where a card's rows go unless told.
const RESULTS: &str = "results";
/// Ceilings that are rows of their own, where there is a card.
const CEILING: &str = "ceiling";
const READ_MIB: [u64; 4] = [64, 256, 512, 4096];
const COPY_MIB: u64 = 512;

const LEGEND: &str = "\
us: median time of one call, each sample the mean of a group of calls, by CUDA events on a card (one graph a group; the CSV's
    column `via` says where calls were launched one by one) and by the wall clock elsewhere. q1-q3: quartiles. n: samples.
cache: what a call finds of its operands in the L2. rotate: nothing, copies that fill three times the L2 go round. flush:
    nothing, three times the L2 is written before each call, outside of its time; each call is a sample between events of
    its own, about 2 us of which are gaps around the launch, and pushes out of the cache what was written. warm: all that
    it holds. Two of these are never compared, and a row's ceiling is measured under the row's own.
GB/s, TFLOP/s: the least bytes and operations such a call can do, over its time. FLOP/B: arithmetic intensity, those
    operations by those bytes.
% of ceiling: the time of reading as many bytes, or of the arithmetic at cuBLASLt's rate of 8192^3, whichever is longer,
    over the kernel's; both measured in this process. checked: whether some rows agree with the CPU arm; of the CPU arm
    itself nothing is checked.
dirty: what disturbed the card (heat, the power brake or a hardware slowdown held its clocks, another process was on it, or
    its clock was more than 5 % below the row's median) where fewer than half of the row's samples were clean.
";

/// What is said beside the file alone: of columns that the table does not have.
const FILE_LEGEND: &str = "\
check_error: how far the rows that are checked are from the CPU arm, |a - b| / |b| of rounded values, else the share of values
    that differ; at most check_bound. largest_difference, relative_difference, cosine: of rounded values the largest absolute
    difference, that by the largest of the CPU arm's values, and the cosine of the two.
draws, draw_sigma: tokens drawn from one row of logits, and how far the chi-square of their counts is from what the
    probabilities say, as sigmas of a normal; above 6 the sampler is wrong.
low_us, high_us: 95 % bootstrap interval of the median. samples_us: the samples, a JSON list, which `gate` compares.
dirty_samples: samples thrown away because the card was disturbed while they were taken, at most 16 of them at a time.
method: version of the way kernels are timed. 2: the card is looked at while samples are taken, disturbed ones are thrown
    away, and there are three looks at least. 1: groups of calls as above, as many as fit --cap.
ecc, power_limit_w: of the card. clocks, power, temperature, throttled, foreign_processes: of the card while the row was
    measured, every 50 ms: medians of clocks and power, the lowest clock, the highest temperature, all that held clocks down,
    the most other processes.
Rows that were measured later stand in the place of the same rows (kernel, model, part, scheme, m, cache); each says which run
    it is of.
";

/// Where kernels are timed, and where they are checked.
struct Bench {
    rig: Rig,
    /// Looks at the card that the rig runs on.
    lookout: Option<Arc<Mutex<CardLookout>>>,
    cpu: Arc<Device>,
    plan: Arc<Device>,
}

/// What a row of the table is to be.
enum Item {
    Read(u64),
    Copy(u64),
    Product(DType),
    Kernel(Box<Shape>),
}

impl Item {
    fn kernel(&self) -> &'static str {
        if let Item::Kernel(shape) = self { shape.kernel } else { CEILING }
    }

    fn label(&self) -> String {
        match self {
            Item::Read(bytes) => format!("{CEILING} read {}", mib(*bytes)),
            Item::Copy(bytes) => format!("{CEILING} copy {}", mib(*bytes)),
            Item::Product(operands) => format!("{CEILING} cuBLASLt {} {}^3", name_of(*operands), ceiling::PRODUCT),
            Item::Kernel(shape) => shape.label(),
        }
    }
}

/// Operands of a product, as people call them.
fn name_of(operands: DType) -> &'static str {
    if operands == DType::U8 { "fp8" } else { "bf16" }
}

pub(crate) fn bench(args: &BenchArgs) -> Result<(), Failure> {
    let bench = Bench::open(args)?;
    let items = chosen(args, bench.items()?)?;
    if args.list {
        let labels: Vec<String> = items.iter().map(|item| item.label() + "\n").collect();
        return Ok(out::print(&labels.concat())?);
    }
    let name = bench.rig.device.spec().name;
    let dir = args.out.clone().or_else(|| bench.rig.on_card().then(|| PathBuf::from(RESULTS)));
    let mut file = dir.map(|dir| File::open(&dir, name, &definitions())).transpose()?;
    let (provenance, management) = (Provenance::gather(), Management::open().ok());
    let facts = bench.rig.card.as_ref().map(|card| CardFacts::gather(card.ordinal)).unwrap_or_default();
    let driver = doctor::driver_version(management.as_ref());
    let progress = Progress::rows(items.len() as u64);
    let mut ceilings = Ceilings::default();
    let mut rows: Vec<Row> = Vec::new();
    let mut failed = Vec::new();
    for item in &items {
        refuse_orphan()?;
        progress.doing(&item.label());
        let mut row = bench.row(item);
        row.driver.clone_from(&driver);
        match bench.measure(item, args.peer, &mut ceilings, &mut row) {
            Ok(()) if row.checked == Some(false) => failed.push(format!("{}: wrong", item.label())),
            Ok(()) => {}
            Err(error @ Error::Device { sticky: true, .. }) => return Err(error.into()),
            Err(error) => {
                row.note = Some(error.to_string());
                if !matches!(error, Error::Unsupported { .. } | Error::OutOfMemory(_)) {
                    failed.push(format!("{}: {error}", item.label()));
                }
            }
        }
        row.stamp(&provenance, &facts);
        if let Some(file) = &mut file {
            file.put(&row)?;
        }
        rows.push(row);
        progress.advance(1);
    }
    progress.finish();
    out::print(&format!("{}\n{}{LEGEND}", row::table(&rows).text(), bench.about(driver.as_deref())))?;
    if let Some(file) = &file {
        out::note(&format!("wrote {}", file.path().display()));
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(anyhow!("{} of {} rows failed:\n{}", failed.len(), rows.len(), failed.join("\n")).into())
    }
}

/// What the columns of the file mean.
fn definitions() -> String {
    format!("{LEGEND}{FILE_LEGEND}{}", definitions::of_terms(&["build"]))
}

/// The items of the kernels that are named, with the filter's words in their labels.
fn chosen(args: &BenchArgs, items: Vec<Item>) -> Result<Vec<Item>> {
    let mut kernels: Vec<&str> = items.iter().map(Item::kernel).collect();
    kernels.dedup();
    if let Some(unknown) = args.kernels.iter().find(|name| !kernels.contains(&name.as_str())) {
        let what = format!("there is no kernel {unknown:?}; the kernels are {}", kernels.join(", "));
        return Err(Error::Request { param: "KERNEL", what });
    }
    let named = |item: &Item| args.kernels.is_empty() || args.kernels.iter().any(|name| name == item.kernel());
    let filtered = |item: &Item| {
        let label = item.label();
        args.filter.iter().all(|word| label.contains(word.as_str()))
    };
    // A ceiling has no M in its label, and one in its row.
    let is = |item: &Item, label: &String| item.label() == *label || format!("{} M=1", item.label()) == *label;
    if let Some(unknown) = args.rows.iter().find(|label| !items.iter().any(|item| is(item, label))) {
        let what = format!("there is no row {unknown:?}; --list prints the labels");
        return Err(Error::Request { param: "--row", what });
    }
    let listed = |item: &Item| args.rows.is_empty() || args.rows.iter().any(|label| is(item, label));
    let some: Vec<Item> = items.into_iter().filter(|item| named(item) && filtered(item) && listed(item)).collect();
    if some.is_empty() {
        let what = format!("no row has {} in its label; --list prints the labels", args.filter.join(" and "));
        return Err(Error::Request { param: "--filter", what });
    }
    Ok(some)
}

impl Bench {
    fn open(args: &BenchArgs) -> Result<Bench> {
        let first = || info::cards().ok().and_then(|cards| cards.into_iter().next());
        let card = match args.device {
            DeviceChoice::Cuda(ordinal) => Some(info::card(ordinal)?),
            DeviceChoice::Auto => first(),
            DeviceChoice::Cpu | DeviceChoice::Emulated => None,
            DeviceChoice::Plan => {
                let what = "a plan has no time; take cuda:N, cpu or emulated".to_owned();
                return Err(Error::Request { param: "--device", what });
            }
        };
        let cache = cache(args.cache, card.is_some())?;
        let spec = match &card {
            Some(card) => cards::of(card)?,
            None if args.device == DeviceChoice::Emulated => cards::find("h200")?,
            None => DeviceSpec::host(),
        };
        let device = match &card {
            _ if args.list => Device::plan(spec.clone(), PLAN_SLAB_BYTES),
            Some(card) => Device::cuda(spec.clone(), card.ordinal, CARD_SLAB_BYTES.min(spec.slab_bytes(None)))?,
            None if args.device == DeviceChoice::Emulated => Device::emulated(spec.clone(), HOST_SLAB_BYTES)?,
            None => Device::cpu(spec.clone(), HOST_SLAB_BYTES)?,
        };
        let source = card.as_ref().filter(|_| !args.list).and_then(|card| CardSource::open(card.ordinal));
        let lookout = source.map(|source| Arc::new(Mutex::new(CardLookout::new(Box::new(source)))));
        let shared = lookout.clone().map(|lookout| lookout as SharedLookout);
        Ok(Bench {
            rig: Rig { device, card, cache, cap: Duration::from_secs_f32(args.cap), lookout: shared },
            lookout,
            cpu: Device::cpu(spec.clone(), HOST_SLAB_BYTES)?,
            plan: Device::plan(spec, PLAN_SLAB_BYTES),
        })
    }

    fn items(&self) -> Result<Vec<Item>> {
        let mut items = Vec::new();
        if self.rig.on_card() {
            items.extend(READ_MIB.map(|mib| Item::Read(mib << 20)));
            items.extend([Item::Copy(COPY_MIB << 20), Item::Product(DType::Bf16)]);
            if self.rig.has_fp8() {
                items.push(Item::Product(DType::U8));
            }
        }
        let scale = if self.rig.on_card() { &Scale::CARD } else { &Scale::HOST };
        items.extend(shapes::shapes(scale)?.into_iter().map(|shape| Item::Kernel(Box::new(shape))));
        Ok(items)
    }

    fn measure(&self, item: &Item, peer: Option<Peer>, ceilings: &mut Ceilings, row: &mut Row) -> Result<()> {
        let done = |row: &mut Row, timing: &Timing, bytes: u64, flops: u64| {
            row.set_cost(bytes, flops);
            row.rotation_of_l2 = self.rig.rotation_of_l2(bytes);
            (row.calls, row.via) = (Some(timing.calls as u64), timing.via);
            row.set_times(&timing.samples);
            if let Some(lookout) = &self.lookout {
                let lookout = lookout.lock().unwrap_or_else(PoisonError::into_inner);
                row.set_conditions(lookout.conditions(), &timing.samples);
            }
        };
        let mut unit = Unit::F32;
        match item {
            Item::Read(bytes) => done(row, &ceiling::read(&self.rig, *bytes)?, *bytes, 0),
            Item::Copy(bytes) => done(row, &ceiling::copy(&self.rig, *bytes)?, 2 * *bytes, 0),
            Item::Product(operands) => {
                let n = ceiling::PRODUCT;
                let bytes = 2 * n * n * operands.bytes() + n * n * DType::Bf16.bytes();
                unit = if *operands == DType::U8 { Unit::Fp8 } else { Unit::Bf16 };
                done(row, &ceiling::largest_product(&self.rig, *operands)?, bytes, 2 * n * n * n);
            }
            Item::Kernel(shape) => {
                let cost = work::cost(&self.plan, shape)?;
                let bytes = cost.bytes();
                unit = cost.unit;
                let (timing, checked) = self.run(shape, &cost)?;
                done(row, &timing, bytes, cost.flops);
                if let Some(checked) = checked {
                    row.set_checked(&checked);
                }
                if let Some((seconds, bound_by)) = ceilings.seconds(&self.rig, &cost)? {
                    row.set_ceiling(seconds, bound_by);
                }
                if let Some(timing) = peer.map(|Peer::Cublaslt| self.peer(shape)).transpose()?.flatten() {
                    row.peer = Some("cublaslt");
                    row.peer_median_us = Some(timing.median() * 1e6);
                }
            }
        }
        if row.rotation_of_l2.is_some_and(|times| self.rig.cache.is_partly_warm(times)) {
            row.note = Some("so small that some of its operands stay in the cache".into());
        }
        let rates = &self.rig.device.spec().rates;
        if let (Some(card), Some(us), Some(bytes)) = (&self.rig.card, row.median_us, row.bytes) {
            if limit::is_above_memory(self.rig.cache.through_memory(card.l2_bytes, bytes), us, rates) {
                row.note = Some("faster than the memory: its operands are in a cache".into());
                row.checked = Some(false);
            }
            let operations = row.tflop_s.unwrap_or(0.0) * 1e12;
            if limit::is_above_arithmetic(operations, unit, rates, row.sm_clock_mhz, card.clock_khz) {
                row.note = Some("faster than the card's arithmetic: it was not all computed".into());
                row.checked = Some(false);
            }
        }
        Ok(())
    }

    /// Checks a kernel, then times it.
    fn run(&self, shape: &Shape, cost: &Cost) -> Result<(Timing, Option<Checked>)> {
        let copies = self.rig.copies(cost.bytes());
        self.rig.with(|cx| {
            let mut work: Box<dyn Work> = work::build(shape, &Maker::new(*cx), copies)?;
            let checked = if operands::is_reference(cx) {
                None
            } else {
                self.cpu.begin_step();
                Some(work.check(cx, &context(&self.cpu, cx.meter))?)
            };
            drop(work.run(cx, 0)?);
            let floor = cost.floor_seconds(&cx.device.spec().rates);
            Ok((self.rig.watch(cx).time(copies, floor, &mut |copy| work.run(cx, copy))?, checked))
        })
    }

    /// cuBLASLt's time for the same product, where it has one.
    fn peer(&self, shape: &Shape) -> Result<Option<Timing>> {
        let product = shape.product(self.rig.has_fp8()).filter(|_| self.rig.on_card());
        product.map(|product| ceiling::product(&self.rig, product)).transpose()
    }

    /// A row with the columns that the item and the device decide.
    fn row(&self, item: &Item) -> Row {
        let spec = self.rig.device.spec();
        let mut row = Row {
            kernel: item.kernel().into(),
            cache: self.rig.cache.name(),
            card: spec.name.into(),
            arch: spec.arch.to_string(),
            device: self.device_name(),
            ..Row::default()
        };
        match item {
            Item::Kernel(shape) => {
                row.model = shape.model.into();
                row.part.clone_from(&shape.part);
                row.scheme = shape.scheme.into();
                row.m = shape.m as u64;
            }
            other => {
                other.label().trim_start_matches(CEILING).trim_start().clone_into(&mut row.part);
                row.m = 1;
            }
        }
        row
    }

    fn device_name(&self) -> String {
        match &self.rig.card {
            Some(card) => format!("cuda:{}", card.ordinal),
            None if self.rig.device.kind() == "cuda" => "emulated".into(),
            None => self.rig.device.kind().into(),
        }
    }

    fn about(&self, driver: Option<&str>) -> String {
        let spec = self.rig.device.spec();
        let driver = driver.map_or(String::new(), |driver| format!(", driver {driver}"));
        let cache = self.rig.cache.name();
        format!("{}, {} ({}){driver}, cache {cache}\n", spec.title, self.device_name(), spec.arch)
    }
}

/// What is asked for, where that can be had: only a card says how large its L2 is.
fn cache(asked: Option<Cache>, on_card: bool) -> Result<Cache> {
    match asked {
        Some(cache) if cache != Cache::Warm && !on_card => {
            let what = format!("{} is for a card, whose L2 is known; elsewhere operands are warm", cache.name());
            Err(Error::Request { param: "--cache", what })
        }
        Some(cache) => Ok(cache),
        None => Ok(if on_card { Cache::Rotate } else { Cache::Warm }),
    }
}

#[cfg(test)]
mod tests {
    use highwater::device::cuda::info::Card;

    use super::*;

    fn on(l2_bytes: Option<u64>, cache: Cache) -> Bench {
        let spec = cards::find("h200").unwrap();
        let card = l2_bytes.map(|l2_bytes| Card {
            ordinal: 0,
            name: "NVIDIA H200".into(),
            capability: (9, 0),
            arch: Some(spec.arch),
            sms: 132,
            total_bytes: spec.total_bytes,
            l2_bytes,
            shared_bytes: 232_448,
            clock_khz: 1_980_000,
            memory_clock_khz: 3_201_000,
            bus_bits: 6144,
            uuid: String::new(),
            pci: String::new(),
        });
        let plan = Device::plan(spec, PLAN_SLAB_BYTES);
        let rig = Rig { device: Arc::clone(&plan), card, cache, cap: Duration::ZERO, lookout: None };
        Bench { rig, lookout: None, cpu: Arc::clone(&plan), plan }
    }

    #[test]
    fn operands_go_round_on_a_card_alone_and_the_row_says_how_often() {
        let l2 = 60 << 20;
        let cold = on(Some(l2), Cache::Rotate).rig;
        assert_eq!((cold.copies(1 << 20), cold.rotation_of_l2(1 << 20)), (181, Some(181.0 / 60.0)));
        for cache in [Cache::Flush, Cache::Warm] {
            let rig = on(Some(l2), cache).rig;
            assert_eq!((rig.copies(1 << 20), rig.rotation_of_l2(1 << 20)), (1, None));
        }
        assert_eq!(on(None, Cache::Warm).rig.copies(1 << 20), 1);
    }

    #[test]
    fn what_a_card_alone_can_do_is_refused_elsewhere() {
        assert_eq!([true, false].map(|on_card| cache(None, on_card).unwrap()), [Cache::Rotate, Cache::Warm]);
        for asked in [Cache::Rotate, Cache::Flush] {
            assert_eq!(cache(Some(asked), true).unwrap(), asked);
            assert!(cache(Some(asked), false).unwrap_err().to_string().contains("whose L2 is known"));
        }
        assert_eq!(cache(Some(Cache::Warm), false).unwrap(), Cache::Warm);
    }

    #[test]
    fn every_row_of_the_real_models_can_be_built_and_has_a_cost() {
        let bench = on(Some(60 << 20), Cache::Rotate);
        for item in bench.items().unwrap() {
            let Item::Kernel(shape) = &item else { continue };
            let cost = work::cost(&bench.plan, shape).unwrap_or_else(|e| panic!("{}: {e}", item.label()));
            assert!(cost.bytes() > 0, "{}", item.label());
            if shape.label() == "linear qwen3.6-27b gate_up fp8-channel w8a16 M=1" {
                let weight = 34_816 * 5120 + 34_816 * 4;
                assert_eq!((cost.flops, cost.resident_bytes), (2 * 34_816 * 5120, weight));
            }
        }
    }
}
