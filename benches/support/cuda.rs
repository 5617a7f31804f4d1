//! The `cuda` group of each bench: a kernel at the real models' shapes on the first card, where there is one, timed by CUDA
//! events. Shapes, operands, calls and ceilings are those of `highwater bench`. Operands go round past three times the L2
//! cache, so that each is cold; calls are captured in a graph, so that none waits for the host. Beside products is
//! cuBLASLt's.

#[allow(unused_imports)] // its unit tests run with the harness
#[path = "../../harness/bench/cache.rs"]
mod cache;
#[path = "../../harness/bench/ceiling.rs"]
mod ceiling;
#[allow(unused_imports)] // its unit tests run with the harness
#[path = "../../harness/bench/drawn.rs"]
mod drawn;
#[path = "../../harness/bench/mixers.rs"]
mod mixers;
#[path = "../../harness/bench/operands.rs"]
mod operands;
#[path = "../../harness/bench/positions.rs"]
mod positions;
#[path = "../../harness/bench/rig.rs"]
mod rig;
#[allow(unused_imports)] // its unit tests run with the harness
#[path = "../../harness/bench/shapes.rs"]
mod shapes;
#[allow(unused_imports)] // its unit tests run with the harness
#[path = "../../harness/stats.rs"]
mod stats;
#[allow(unused_imports)] // its unit tests run with the harness
#[path = "../../harness/bench/time.rs"]
mod time;
#[allow(unused_imports)] // its unit tests run with the harness
#[path = "../../harness/bench/work.rs"]
mod work;

use std::cell::OnceCell;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use criterion::{Bencher, BenchmarkGroup, Criterion, Throughput};
use highwater::device::cuda::info;
use highwater::device::cuda::{Cuda, Event, Graph};
use highwater::device::{Device, cards};
use highwater::error::Result;
use highwater::ops::Cost;
use highwater::tensor::Tensor;

use super::throughput::{Call, Rates};
use cache::Cache;
use ceiling::{Ceilings, Dense};
use operands::Maker;
use rig::Rig;
use shapes::{Scale, Shape};

/// What operands and results take at most.
const SLAB_BYTES: u64 = 24 << 30;
/// A plan's slab, for costs.
const PLAN_SLAB_BYTES: u64 = 1 << 46;
const WARM_UP: Duration = Duration::from_millis(200);
const MEASURED: Duration = Duration::from_secs(1);
const SAMPLES: usize = 20;

/// How rates of the benchmark under way are printed.
static RATES: Rates = Rates::new();

/// The first card, opened once.
fn rig() -> Option<&'static Rig> {
    static RIG: OnceLock<Option<Rig>> = OnceLock::new();
    RIG.get_or_init(|| {
        let card = info::cards().ok()?.into_iter().next()?;
        let spec = cards::of(&card).expect("a card that kernels are written for");
        let slab = SLAB_BYTES.min(spec.slab_bytes(None));
        let device = Device::cuda(spec, card.ordinal, slab).expect("a card");
        Some(Rig { device, card: Some(card), cache: Cache::Rotate, cap: MEASURED, lookout: None })
    })
    .as_ref()
}

/// Time on the card's compute stream, by events; shown as wall-clock time is, its rates beside the card's.
pub struct CudaTime;

impl Measurement for CudaTime {
    type Intermediate = Event;
    type Value = Duration;

    fn start(&self) -> Event {
        cuda().event().expect("an event")
    }

    fn end(&self, begun: Event) -> Duration {
        Duration::from_secs_f64(cuda().event().and_then(|end| end.seconds_since(&begun)).expect("a time"))
    }

    fn add(&self, a: &Duration, b: &Duration) -> Duration {
        *a + *b
    }

    fn zero(&self) -> Duration {
        Duration::ZERO
    }

    fn to_f64(&self, value: &Duration) -> f64 {
        WallTime.to_f64(value)
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        &RATES
    }
}

fn cuda() -> &'static Cuda {
    rig().and_then(|rig| rig.device.as_cuda()).expect("the group runs where there is a card")
}

/// Criterion with that time.
pub fn criterion() -> Criterion<CudaTime> {
    Criterion::default()
        .with_measurement(CudaTime)
        .warm_up_time(WARM_UP)
        .measurement_time(MEASURED)
        .sample_size(SAMPLES)
}

/// Every row of the kernels that are named; a line, where there is no card.
pub fn kernels(c: &mut Criterion<CudaTime>, names: &[&str]) {
    let Some(rig) = rig() else {
        println!("{}: no card, the cuda group is left out", names.join(", "));
        return;
    };
    let plan = Device::plan(rig.device.spec().clone(), PLAN_SLAB_BYTES);
    let mut ceilings = Ceilings::default();
    let mut group = c.benchmark_group(format!("cuda {}", names.join(" ")));
    let shapes = shapes::shapes(&Scale::CARD).expect("built-in geometries");
    for shape in shapes.into_iter().filter(|shape| names.contains(&shape.kernel)) {
        if let Err(error) = rows(&mut group, rig, &plan, &mut ceilings, &shape) {
            println!("{}: {error}", shape.label());
        }
    }
    group.finish();
}

/// A kernel's row, and cuBLASLt's of the same product where it has one.
fn rows(
    group: &mut BenchmarkGroup<CudaTime>,
    rig: &Rig,
    plan: &Arc<Device>,
    ceilings: &mut Ceilings,
    shape: &Shape,
) -> Result<()> {
    let cost = work::cost(plan, shape)?;
    group.throughput(Throughput::Bytes(cost.bytes()));
    rig.with(|cx| {
        let copies = rig.copies(cost.bytes());
        let mut work = work::build(shape, &Maker::new(*cx), copies)?;
        let graph = OnceCell::new();
        group.bench_function(shape.label(), |b| {
            announce(rig, ceilings, &cost);
            rounds(b, rig, copies, &graph, &mut |copy| work.run(cx, copy));
        });
        Ok(())
    })?;
    let Some(product) = shape.product(rig.has_fp8()) else { return Ok(()) };
    rig.with(|cx| {
        let copies = rig.copies(Dense::bytes(product));
        let dense = Dense::new(&Maker::new(*cx), product, copies)?;
        let graph = OnceCell::new();
        group.bench_function(format!("{}: cublaslt", shape.label()), |b| {
            announce(rig, ceilings, &cost);
            rounds(b, rig, copies, &graph, &mut |copy| dense.run(cx, copy));
        });
        Ok(())
    })
}

/// Has what comes printed as calls of this cost; measures their ceiling where no row had it measured before.
fn announce(rig: &Rig, ceilings: &mut Ceilings, cost: &Cost) {
    let ceiling = ceilings.seconds(rig, cost).expect("a ceiling");
    RATES.set(Call { flops: cost.flops, ceiling: ceiling.map(|(seconds, _)| seconds) });
}

/// Times rounds of the copies: a graph of one round, captured once, or its calls one by one where they need the host.
fn rounds(
    b: &mut Bencher<CudaTime>,
    rig: &Rig,
    copies: usize,
    graph: &OnceCell<Option<Graph>>,
    run: &mut dyn FnMut(usize) -> Result<Vec<Tensor>>,
) {
    let cuda = cuda();
    if graph.get().is_none() {
        drop(run(0).expect("a result"));
    }
    let mut round = || -> Result<()> {
        rig.device.begin_step();
        let results = (0..copies).map(&mut *run).collect::<Result<Vec<_>>>();
        results.map(drop)
    };
    let graph = graph.get_or_init(|| cuda.capture(&mut round).ok());
    b.iter_custom(|calls| {
        let rounds = calls.div_ceil(copies as u64);
        let begun = CudaTime.start();
        for _ in 0..rounds {
            match graph {
                Some(graph) => cuda.replay(graph).expect("a replay"),
                None => round().expect("a result"),
            }
        }
        CudaTime.end(begun).mul_f64(calls as f64 / (rounds * copies as u64) as f64)
    });
}
