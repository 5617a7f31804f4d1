//! The `cuda` group of each bench: a kernel at the real models' shapes on the first card, where there is one, timed by CUDA
//! events. Shapes, operands and calls are those of `highwater bench`. Operands go round past three times the L2 cache, so
//! that each is cold; calls are captured in a graph, so that none waits for the host. Beside each row is the read of as many
//! bytes, and beside products cuBLASLt's.

#[allow(unused_imports)] // its unit tests run with the harness
#[path = "../../harness/bench/cache.rs"]
mod cache;
#[path = "../../harness/bench/mixers.rs"]
mod mixers;
#[path = "../../harness/bench/operands.rs"]
mod operands;
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

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use criterion::{Bencher, Criterion, Throughput};
use highwater::device::cuda::blas::Product;
use highwater::device::cuda::info::{self, Card};
use highwater::device::cuda::{Cuda, Event};
use highwater::device::{Device, cards};
use highwater::error::Result;
use highwater::mem::Layer;
use highwater::num::DType;
use highwater::ops::launch::stream;
use highwater::ops::{Cx, Meter, Numerics};
use highwater::tensor::Tensor;

use cache::Cache;
use operands::Maker;
use shapes::{Scale, Shape};

/// What operands and results take at most.
const SLAB_BYTES: u64 = 24 << 30;
/// A plan's slab, for costs.
const PLAN_SLAB_BYTES: u64 = 1 << 46;
const WARM_UP: Duration = Duration::from_millis(200);
const MEASURED: Duration = Duration::from_secs(1);
const SAMPLES: usize = 20;

/// The first card, opened once.
struct Rig {
    card: Card,
    device: Arc<Device>,
}

fn rig() -> Option<&'static Rig> {
    static RIG: OnceLock<Option<Rig>> = OnceLock::new();
    RIG.get_or_init(|| {
        let card = info::cards().ok()?.into_iter().next()?;
        let spec = cards::of(&card).expect("a card that kernels are written for");
        let slab = SLAB_BYTES.min(spec.slab_bytes(None));
        let device = Device::cuda(spec, card.ordinal, slab).expect("a card");
        Some(Rig { card, device })
    })
    .as_ref()
}

/// Time on the card's compute stream, by events; shown as wall-clock time is.
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
        static WALL: WallTime = WallTime;
        WALL.formatter()
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
    let meter = Meter::default();
    let plan = Device::plan(rig.device.spec().clone(), PLAN_SLAB_BYTES);
    let context =
        |device| Cx { device, numerics: Numerics::BF16, layer: Layer::Other, bound: None, meter: &meter, routes: None };
    let mut group = c.benchmark_group(format!("cuda {}", names.join(" ")));
    let shapes = shapes::shapes(&Scale::CARD).expect("built-in geometries");
    for shape in shapes.into_iter().filter(|shape| names.contains(&shape.kernel)) {
        let planned = cost(&context(&plan), &shape);
        let bytes = match planned {
            Ok(bytes) => bytes,
            Err(error) => {
                println!("{}: {error}", shape.label());
                continue;
            }
        };
        let cx = context(&rig.device);
        let copies = Cache::Rotate.copies(rig.card.l2_bytes, bytes);
        group.throughput(Throughput::Bytes(bytes));
        rig.device.begin_step();
        match work::build(&shape, &Maker::new(cx), copies) {
            Ok(mut work) => {
                group.bench_function(shape.label(), |b| rounds(b, &cx, copies, &mut |copy| work.run(&cx, copy)));
            }
            Err(error) => println!("{}: {error}", shape.label()),
        }
        group.bench_function(format!("{}: read of as many bytes", shape.label()), |b| read(b, &cx, copies, bytes));
        if let Some(product) = shape.product(rig.card.has_fp8()) {
            let label = format!("{}: cublaslt", shape.label());
            group.bench_function(label, |b| multiply(b, &cx, copies, product));
        }
    }
    group.finish();
}

/// The least bytes of one call, by the ops' own account.
fn cost(cx: &Cx, shape: &Shape) -> Result<u64> {
    cx.device.begin_step();
    let mut work = work::build(shape, &Maker::new(*cx), 1)?;
    cx.meter.take();
    drop(work.run(cx, 0)?);
    Ok(cx.meter.take().iter().map(|entry| entry.cost.bytes()).sum())
}

/// Times rounds of the copies: a graph of one round, or its calls one by one where they need the host.
fn rounds(b: &mut Bencher<CudaTime>, cx: &Cx, copies: usize, run: &mut dyn FnMut(usize) -> Result<Vec<Tensor>>) {
    let cuda = cuda();
    drop(run(0).expect("a result"));
    let mut round = || -> Result<()> {
        cx.device.begin_step();
        let results = (0..copies).map(&mut *run).collect::<Result<Vec<_>>>();
        results.map(drop)
    };
    let graph = cuda.capture(&mut round).ok();
    b.iter_custom(|calls| {
        let rounds = calls.div_ceil(copies as u64);
        let begun = CudaTime.start();
        for _ in 0..rounds {
            match &graph {
                Some(graph) => cuda.replay(graph).expect("a replay"),
                None => round().expect("a result"),
            }
        }
        CudaTime.end(begun).mul_f64(calls as f64 / (rounds * copies as u64) as f64)
    });
}

fn read(b: &mut Bencher<CudaTime>, cx: &Cx, copies: usize, bytes: u64) {
    let make = Maker::new(*cx);
    let words = 4 * bytes.div_ceil(16) as usize;
    let xs: Vec<Tensor> = (0..copies).map(|_| make.normal(DType::F32, &[words], 0.0, 1.0).expect("room")).collect();
    let blocks = stream::blocks(cx.device, xs[0].bytes()) as usize;
    let mut fold = make.empty(DType::I32, &[blocks]).expect("room");
    rounds(b, cx, copies, &mut |copy| stream::read(cx.device, &xs[copy], &mut fold).map(|()| Vec::new()));
}

fn multiply(b: &mut Bencher<CudaTime>, cx: &Cx, copies: usize, product: Product) {
    let make = Maker::new(*cx);
    let [m, n, k] = [product.m, product.n, product.k].map(|size| size as usize);
    let each = |shape: &[usize], std: f32| -> Vec<Tensor> {
        (0..copies).map(|_| make.normal(product.operands, shape, 0.0, std).expect("room")).collect()
    };
    let (xs, ws) = (each(&[m, k], 1.0), each(&[n, k], (k as f32).sqrt().recip()));
    rounds(b, cx, copies, &mut |copy| {
        let y = cx.alloc("bench", "y", product.out, &[m, n])?;
        cuda().product(product, xs[copy].arg(), ws[copy].arg(), y.arg())?;
        Ok(vec![y])
    });
}
