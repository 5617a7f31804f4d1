//! Time of `Pool::alloc` and `Pool::free`: one call each with 10,000 live blocks, and a decode step's whole pattern.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use highwater::mem::{Block, End, Layer, Pool, Tag};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const LIVE_BLOCKS: usize = 10_000;
/// Calls between two readings of the clock: enough to hide the reading, few enough that about 10,000 blocks stay live.
const CALLS: usize = 256;
const SLAB_BYTES: u64 = 64 << 30;
const ENDS: [(End, &str); 2] = [(End::Persistent, "persistent"), (End::Arena, "arena")];

/// As many tags as a model of both layer kinds uses.
fn tags() -> Vec<Tag> {
    const LAYERS: [Layer; 6] = [Layer::Gdn, Layer::Attention, Layer::Mlp, Layer::Moe, Layer::Norm, Layer::Head];
    const OPS: [&str; 4] = ["prefill", "linear", "rms_norm", "paged_attention"];
    const BUFFERS: [&str; 4] = ["out", "workspace", "scales", "gate_up"];
    let of_layer = |layer| OPS.into_iter().flat_map(move |op| BUFFERS.map(|buffer| Tag::new(layer, op, buffer)));
    LAYERS.into_iter().flat_map(of_layer).collect()
}

/// From a few bytes to 16 MiB, as likely in each doubling.
fn size(rng: &mut ChaCha8Rng) -> u64 {
    let log = rng.random_range(4..24u32);
    rng.random_range(1u64 << log..2 << log)
}

/// A pool with 10,000 live blocks at one end, after each has been replaced ten times over.
struct Churned {
    pool: Pool,
    end: End,
    live: Vec<Block>,
    tags: Vec<Tag>,
    rng: ChaCha8Rng,
}

impl Churned {
    fn new(end: End) -> Churned {
        let mut churned = Churned {
            pool: Pool::new(SLAB_BYTES),
            end,
            live: Vec::new(),
            tags: tags(),
            rng: ChaCha8Rng::seed_from_u64(7),
        };
        churned.alloc(LIVE_BLOCKS);
        for _ in 0..10 * LIVE_BLOCKS / CALLS {
            churned.free(CALLS);
            churned.alloc(CALLS);
        }
        churned
    }

    fn alloc(&mut self, calls: usize) -> Duration {
        let wanted: Vec<(Tag, u64)> =
            (0..calls).map(|_| (self.tags[self.rng.random_range(0..self.tags.len())], size(&mut self.rng))).collect();
        let start = Instant::now();
        for (tag, bytes) in wanted {
            self.live.push(self.pool.alloc(self.end, tag, bytes).expect("the slab is wide"));
        }
        start.elapsed()
    }

    fn free(&mut self, calls: usize) -> Duration {
        let left = self.live.len() - calls;
        for at in left..self.live.len() {
            let other = self.rng.random_range(0..=at);
            self.live.swap(at, other);
        }
        let gone = self.live.split_off(left);
        let start = Instant::now();
        for block in gone {
            self.pool.free(block);
        }
        start.elapsed()
    }
}

/// Time of `calls` calls, given one batch's times of alloc and of free.
fn timed(churned: &mut Churned, calls: u64, pick: impl Fn(Duration, Duration) -> Duration) -> Duration {
    let mut spent = Duration::ZERO;
    let mut left = calls as usize;
    while left > 0 {
        let batch = left.min(CALLS);
        let free = churned.free(batch);
        spent += pick(churned.alloc(batch), free);
        left -= batch;
    }
    spent
}

fn live_10000(c: &mut Criterion) {
    let mut group = c.benchmark_group("pool/live-10000");
    group.throughput(Throughput::Elements(1));
    for (end, name) in ENDS {
        let mut churned = Churned::new(end);
        group.bench_function(format!("alloc/{name}"), |b| b.iter_custom(|n| timed(&mut churned, n, |alloc, _| alloc)));
        group.bench_function(format!("free/{name}"), |b| b.iter_custom(|n| timed(&mut churned, n, |_, free| free)));
        group.bench_function(format!("pair/{name}"), |b| b.iter_custom(|n| timed(&mut churned, n, |a, f| a + f)));
        assert_eq!(churned.live.len(), LIVE_BLOCKS);
    }
    group.finish();
}

/// One block of a step: its tag, its bytes, and how many allocations later it goes.
type Wanted = (Tag, u64, usize);

/// 64 layers of 20 blocks and a head: buffers of a few ops overlap, the residual stays for a whole layer.
fn decode_step() -> Vec<Wanted> {
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let tags = tags();
    let mut step: Vec<Wanted> = (0..64 * 20)
        .map(|i| {
            let tag = tags[(i / 20 % 4) * 16 + i % 16];
            let bytes = rng.random_range(1..=64u64) * 5120;
            (tag, bytes, if i % 20 == 0 { 20 } else { rng.random_range(1..=4) })
        })
        .collect();
    step.extend([(tags[80], 64 * 5120 * 2, 2), (tags[81], 64 * 248_320 * 4, 3), (tags[82], 64 * 4, 1)]);
    step
}

fn step(pool: &mut Pool, wanted: &[Wanted], due: &mut [Vec<Block>]) {
    pool.begin_step();
    for (i, &(tag, bytes, life)) in wanted.iter().enumerate() {
        let block = pool.alloc(End::Arena, tag, bytes).expect("the slab is wide");
        due[i + life].push(block);
        due[i].drain(..).for_each(|block| pool.free(block));
    }
    due[wanted.len()..].iter_mut().flat_map(|due| due.drain(..)).for_each(|block| pool.free(block));
}

fn decode(c: &mut Criterion) {
    let wanted = decode_step();
    let mut group = c.benchmark_group("pool/decode-step");
    group.throughput(Throughput::Elements(wanted.len() as u64));
    let mut due: Vec<Vec<Block>> = (0..wanted.len() + 32).map(|_| Vec::with_capacity(8)).collect();
    let mut pool = Pool::new(SLAB_BYTES);
    group.bench_function("alloc-free", |b| b.iter(|| step(&mut pool, &wanted, &mut due)));
    group.bench_function("report", |b| b.iter(|| black_box(pool.report())));
    group.bench_function("first-step-of-a-pool", |b| {
        b.iter_batched_ref(|| Pool::new(SLAB_BYTES), |pool| step(pool, &wanted, &mut due), BatchSize::SmallInput);
    });
    group.finish();
}

criterion_group!(benches, live_10000, decode);
criterion_main!(benches);
