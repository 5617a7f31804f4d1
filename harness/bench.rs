//! `bench`: the table of kernels. Each is called through its public op, at the shapes of the real models, with cold or warm
//! operands; its time is held against what the card can do at most, measured in the same process, and some rows of its
//! result against the CPU arm.
//!
//! `shapes` says what is timed, `work` and `mixers` how it is called and checked, on what `operands` makes; `time` takes the
//! time, `ceiling` what it is held against; `row` is what is written.

mod ceiling;
mod mixers;
mod operands;
mod row;
mod shapes;
mod time;
mod work;

use std::sync::Arc;
use std::time::Duration;

use anyhow::anyhow;
use highwater::device::cuda::info::{self, Card};
use highwater::device::{Device, DeviceSpec, cards};
use highwater::error::{Error, Result, mib};
use highwater::mem::Layer;
use highwater::num::DType;
use highwater::ops::{Cost, Cx, Meter, Numerics};

use self::ceiling::Ceilings;
use self::operands::Maker;
use self::row::{File, Row};
use self::shapes::{Scale, Shape};
use self::time::{Timing, Watch};
use self::work::{Checked, Work};
use crate::cli::{BenchArgs, DeviceChoice, Peer};
use crate::definitions;
use crate::doctor;
use crate::failure::Failure;
use crate::nvml::Management;
use crate::out;
use crate::progress::Progress;
use crate::provenance::{CardFacts, Provenance};

/// The most that operands and results take on a card.
const CARD_SLAB_BYTES: u64 = 24 << 30;
/// The same in host memory, of which only what is written is taken.
const HOST_SLAB_BYTES: u64 = 8 << 30;
/// A plan's slab, for costs.
const PLAN_SLAB_BYTES: u64 = 1 << 46;
/// A group of calls takes this long or longer, so that events are fine enough; and what a launch takes by itself.
const GROUP_SECONDS: f64 = 200e-6;
const LAUNCH_SECONDS: f64 = 2e-6;
/// Faster than the memory's own rate by more than this is a cache's doing.
const ABOVE_MEMORY: f64 = 1.05;
/// Ceilings that are rows of their own, where there is a card.
const CEILING: &str = "ceiling";
const READ_MIB: [u64; 4] = [64, 256, 512, 4096];
const COPY_MIB: u64 = 512;

const LEGEND: &str = "\
us: median time of one call, each sample the mean of a group of calls, by CUDA events on a card (one graph a group; the CSV's
    column `via` says where calls were launched one by one) and by the wall clock elsewhere. q1-q3: quartiles. n: samples.
GB/s, TFLOP/s: the least bytes and operations such a call can do, over its time; cold operands unless --warm.
% of ceiling: the time of reading as many bytes, or of the arithmetic at cuBLASLt's rate of 8192^3, whichever is longer,
    over the kernel's; both measured in this process. checked: whether some rows agree with the CPU arm.
";

/// What is said beside the file alone: of columns that the table does not have.
const FILE_LEGEND: &str = "\
method: version of the way kernels are timed. 1: groups of calls as above, as many as fit --cap.
ecc, power_limit_w, clocks, power, temperature, throttled: of the card, right after the row was measured.
";

/// Where kernels are timed, and where they are checked.
struct Bench {
    device: Arc<Device>,
    cpu: Arc<Device>,
    plan: Arc<Device>,
    meter: Meter,
    card: Option<Card>,
    cold: bool,
    cap: Duration,
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
    let file =
        args.out.as_deref().map(|dir| File::create(dir, bench.device.spec().name, &definitions())).transpose()?;
    let (provenance, management) = (Provenance::gather(), Management::open().ok());
    let facts = bench.card.as_ref().map(|card| CardFacts::gather(card.ordinal)).unwrap_or_default();
    let driver = doctor::driver_version(management.as_ref());
    let progress = Progress::rows(items.len() as u64);
    let mut ceilings = Ceilings::default();
    let mut rows: Vec<Row> = Vec::new();
    let mut failed = Vec::new();
    for item in &items {
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
        let moment = bench.card.as_ref().zip(management.as_ref()).and_then(|(card, nvml)| nvml.moment(&card.uuid));
        row.stamp(&provenance, &facts, moment);
        rows.push(row);
        if let Some(file) = &file {
            file.write(&rows)?;
        }
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
    let some: Vec<Item> = items.into_iter().filter(|item| named(item) && filtered(item)).collect();
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
        Ok(Bench {
            device,
            cpu: Device::cpu(spec.clone(), HOST_SLAB_BYTES)?,
            plan: Device::plan(spec, PLAN_SLAB_BYTES),
            meter: Meter::default(),
            card,
            cold: !args.warm,
            cap: Duration::from_secs_f32(args.cap),
        })
    }

    fn items(&self) -> Result<Vec<Item>> {
        let mut items = Vec::new();
        if self.on_card() {
            items.extend(READ_MIB.map(|mib| Item::Read(mib << 20)));
            items.extend([Item::Copy(COPY_MIB << 20), Item::Product(DType::Bf16)]);
            if self.has_fp8() {
                items.push(Item::Product(DType::U8));
            }
        }
        let scale = if self.on_card() { &Scale::CARD } else { &Scale::HOST };
        items.extend(shapes::shapes(scale)?.into_iter().map(|shape| Item::Kernel(Box::new(shape))));
        Ok(items)
    }

    fn on_card(&self) -> bool {
        self.card.is_some()
    }

    fn has_fp8(&self) -> bool {
        self.card.as_ref().is_some_and(Card::has_fp8)
    }

    fn watch(&self) -> Watch<'_> {
        Watch { device: &self.device, cap: self.cap }
    }

    /// Copies of operands of `bytes` that are gone round.
    fn copies(&self, bytes: u64) -> usize {
        match &self.card {
            Some(card) if self.cold => operands::copies(card.l2_bytes, bytes),
            _ => 1,
        }
    }

    /// Runs `body` in a step of the device.
    fn with<R>(&self, body: impl FnOnce(&Cx) -> Result<R>) -> Result<R> {
        self.device.begin_step();
        body(&self.cx(&self.device))
    }

    fn cx<'a>(&'a self, device: &'a Arc<Device>) -> Cx<'a> {
        Cx { device, numerics: Numerics::BF16, layer: Layer::Other, bound: None, meter: &self.meter, routes: None }
    }

    /// What one call must move and compute at least: every op's own account, summed. The unit is that of most operations.
    fn cost(&self, shape: &Shape) -> Result<Cost> {
        let cx = self.cx(&self.plan);
        self.plan.begin_step();
        let mut work = work::build(shape, &Maker::new(cx), 1)?;
        self.meter.take();
        drop(work.run(&cx, 0)?);
        let costs = self.meter.take();
        let sum = |part: fn(&Cost) -> u64| costs.iter().map(|entry| part(&entry.cost)).sum();
        let main = costs.iter().max_by_key(|entry| entry.cost.flops);
        let Some(main) = main else { return Err(Error::shape("bench", format!("{} has no cost", shape.label()))) };
        Ok(Cost {
            flops: sum(|cost| cost.flops),
            resident_bytes: sum(|cost| cost.resident_bytes),
            activation_bytes: sum(|cost| cost.activation_bytes),
            unit: main.cost.unit,
        })
    }

    fn measure(&self, item: &Item, peer: Option<Peer>, ceilings: &mut Ceilings, row: &mut Row) -> Result<()> {
        let done = |row: &mut Row, timing: &Timing, bytes: u64, flops: u64| {
            (row.bytes, row.flops) = (Some(bytes), Some(flops));
            self.rotation(row, bytes);
            (row.calls, row.via) = (Some(timing.calls as u64), timing.via);
            row.set_times(&timing.seconds);
        };
        match item {
            Item::Read(bytes) => done(row, &ceiling::read(self, *bytes)?, *bytes, 0),
            Item::Copy(bytes) => done(row, &ceiling::copy(self, *bytes)?, 2 * *bytes, 0),
            Item::Product(operands) => {
                let n = ceiling::PRODUCT;
                let bytes = 2 * n * n * operands.bytes() + n * n * DType::Bf16.bytes();
                done(row, &ceiling::largest_product(self, *operands)?, bytes, 2 * n * n * n);
            }
            Item::Kernel(shape) => {
                let cost = self.cost(shape)?;
                let bytes = cost.bytes();
                let (timing, checked) = self.run(shape, &cost)?;
                done(row, &timing, bytes, cost.flops);
                if let Some(checked) = checked {
                    row.checked = Some(checked.passed());
                    (row.check_error, row.check_bound) = (Some(checked.error), Some(checked.bound));
                }
                if let Some((seconds, bound_by)) = ceilings.seconds(self, &cost)? {
                    row.set_ceiling(seconds, bound_by);
                }
                if let Some(timing) = peer.map(|Peer::Cublaslt| self.peer(shape)).transpose()?.flatten() {
                    row.peer = Some("cublaslt");
                    row.peer_median_us = crate::stats::Summary::of(&timing.seconds).map(|s| s.median * 1e6);
                }
            }
        }
        let rate = row.gb_s.unwrap_or(0.0) * 1e9;
        let rates = &self.device.spec().rates;
        if self.on_card() && self.cold && rate > ABOVE_MEMORY * rates.dram {
            row.note = Some("faster than the memory: its operands are in a cache".into());
            row.checked = Some(false);
        }
        // The fastest unit a card has: what is above it was not computed.
        let operations = row.tflop_s.unwrap_or(0.0) * 1e12;
        if self.on_card() && operations > ABOVE_MEMORY * rates.fp8.max(rates.bf16) {
            row.note = Some("faster than the card's arithmetic: it was not all computed".into());
            row.checked = Some(false);
        }
        Ok(())
    }

    /// Checks a kernel, then times it.
    fn run(&self, shape: &Shape, cost: &Cost) -> Result<(Timing, Option<Checked>)> {
        let bytes = cost.bytes();
        let copies = self.copies(bytes);
        let calls = calls(copies, cost.floor_seconds(&self.device.spec().rates));
        self.with(|cx| {
            let mut work: Box<dyn Work> = work::build(shape, &Maker::new(*cx), copies)?;
            let checked = if operands::is_reference(cx) {
                None
            } else {
                self.cpu.begin_step();
                Some(work.check(cx, &self.cx(&self.cpu))?)
            };
            drop(work.run(cx, 0)?);
            Ok((self.watch().time(copies, calls, &mut |copy| work.run(cx, copy))?, checked))
        })
    }

    /// cuBLASLt's time for the same product, where it has one.
    fn peer(&self, shape: &Shape) -> Result<Option<Timing>> {
        let product = shape.product(self.has_fp8()).filter(|_| self.on_card());
        product.map(|product| ceiling::product(self, product)).transpose()
    }

    fn rotation(&self, row: &mut Row, bytes: u64) {
        if let Some(card) = self.card.as_ref().filter(|_| self.cold) {
            row.rotation_of_l2 = Some(self.copies(bytes) as f64 * bytes as f64 / card.l2_bytes.max(1) as f64);
        }
    }

    /// A row with the columns that the item and the device decide.
    fn row(&self, item: &Item) -> Row {
        let spec = self.device.spec();
        let mut row = Row {
            kernel: item.kernel().into(),
            cache: if self.cold && self.on_card() { "cold" } else { "warm" },
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
        match &self.card {
            Some(card) => format!("cuda:{}", card.ordinal),
            None if self.device.kind() == "cuda" => "emulated".into(),
            None => self.device.kind().into(),
        }
    }

    fn about(&self, driver: Option<&str>) -> String {
        let spec = self.device.spec();
        let driver = driver.map_or(String::new(), |driver| format!(", driver {driver}"));
        format!("{}, {} ({}){driver}\n", spec.title, self.device_name(), spec.arch)
    }
}

/// Calls of a group: whole rounds of the copies.
fn calls(copies: usize, floor_seconds: f64) -> usize {
    let wanted = (GROUP_SECONDS / (floor_seconds + LAUNCH_SECONDS)).ceil() as usize;
    copies * wanted.div_ceil(copies).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(l2_bytes: Option<u64>, cold: bool) -> Bench {
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
        Bench {
            device: Arc::clone(&plan),
            cpu: Arc::clone(&plan),
            plan,
            meter: Meter::default(),
            card,
            cold,
            cap: Duration::ZERO,
        }
    }

    #[test]
    fn copies_go_past_twice_the_cache_and_groups_are_whole_rounds() {
        let l2 = 60 << 20;
        let bench = on(Some(l2), true);
        for bytes in [40_000, 1 << 20, 50 << 20, 119 << 20] {
            let copies = bench.copies(bytes);
            assert!(copies as u64 * bytes >= 2 * l2 + bytes, "{bytes}: {copies}");
            assert_eq!(calls(copies, 1e-6) % copies, 0);
        }
        assert_eq!(bench.copies(500 << 20), 1, "larger than the cache: cold by itself");
        assert_eq!(bench.copies(16), operands::MOST_COPIES);
        assert_eq!(on(Some(l2), false).copies(1 << 20), 1);
        assert_eq!(on(None, true).copies(1 << 20), 1);
        assert!(calls(1, 1e-6) > 10 && calls(1, 1.0) == 1);
    }

    #[test]
    fn every_row_of_the_real_models_can_be_built_and_has_a_cost() {
        let bench = on(Some(60 << 20), true);
        for item in bench.items().unwrap() {
            let Item::Kernel(shape) = &item else { continue };
            let cost = bench.cost(shape).unwrap_or_else(|e| panic!("{}: {e}", item.label()));
            assert!(cost.bytes() > 0, "{}", item.label());
            if shape.label() == "linear qwen3.6-27b gate_up fp8-channel w8a16 M=1" {
                let weight = 34_816 * 5120 + 34_816 * 4;
                assert_eq!((cost.flops, cost.resident_bytes), (2 * 34_816 * 5120, weight));
            }
        }
    }
}
