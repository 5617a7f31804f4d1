//! Attention on the CUDA arm. Everything nobody may read is NaN: fresh buffers, the keys and values in qkv, the slots of a
//! page past its sequence's end, and pages that belong to nobody.

use std::sync::Arc;

use highwater::device::{Device, cards};
use highwater::num::{DType, bf16, fp8};
use highwater::ops::attention::{AttnDims, attend, cases, part_tokens};
use highwater::ops::batch::{PAGE_TOKENS, Placement};
use highwater::ops::kv_write::KvPages;
use highwater::ops::{Batch, Cx, Limits, Meter, Numerics, Span, StepInputs};
use rand::seq::SliceRandom;

use super::{Pair, Where, assert_same, place, relative_norm};
use crate::ops::{Rig, SLAB_BYTES, random, rng, tensor, values};

use DType::{Bf16, F32, U8};

/// The scales of codes: the tests' values come near the largest code.
const SCALES: (f32, f32) = (0.006, 0.0071);

/// One call: `sequences` are (cached tokens, new rows), each with its fused rows for all its tokens.
#[derive(Clone)]
struct Job {
    dims: AttnDims,
    sequences: Vec<(usize, usize)>,
    decodes: usize,
    dtype: DType,
    kv: DType,
    rows: Vec<Vec<f32>>,
    /// Sets how many parts a decode may have.
    context: usize,
    /// Which pages the sequences lie on.
    pages: u64,
}

fn dims(heads: usize, kv_heads: usize, head_dim: usize) -> AttnDims {
    AttnDims { heads, kv_heads, head_dim, rotary_dim: 0 }
}

impl Job {
    fn new(dims: AttnDims, sequences: &[(usize, usize)], decodes: usize, dtype: DType, kv: DType) -> Job {
        let mut rng = rng(17 + sequences.len() as u64);
        let rows =
            sequences.iter().map(|&(c, len)| random(&mut rng, dtype, (c + len) * dims.qkv_cols(), 1.0)).collect();
        Job { dims, sequences: sequences.to_vec(), decodes, dtype, kv, rows, context: 8192, pages: 1 }
    }

    /// Sequence `i` with nobody else, its rows from `context` on, elsewhere in the cache.
    fn alone(&self, i: usize, decodes: usize, (context, len): (usize, usize)) -> Job {
        let rows = vec![self.rows[i][..(context + len) * self.dims.qkv_cols()].to_vec()];
        Job { sequences: vec![(context, len)], decodes, rows, pages: 90 + i as u64, ..self.clone() }
    }

    fn tokens(&self) -> usize {
        self.sequences.iter().map(|s| s.1).sum()
    }

    /// Multiply-adds, with what tiles compute in vain. Those of tensor cores are emulated a tile at a time, ten times as
    /// fast as one by one.
    fn work(&self) -> u64 {
        let pairs: usize = self.sequences.iter().map(|&(c, len)| len.next_multiple_of(16) * (c + len + 64)).sum();
        2 * (pairs * self.dims.out_cols()) as u64 / if self.dtype == Bf16 { 10 } else { 1 }
    }

    fn numerics(&self) -> Numerics {
        Numerics { kv: self.kv, ..crate::ops::numerics(self.dtype, F32) }
    }

    fn pair(&self, what: &str) -> Option<Pair> {
        Pair::new(what, self.numerics(), self.work())
    }

    /// Pages drawn without order, and how many there are.
    fn place(&self) -> (Vec<Vec<i32>>, usize) {
        let needs: Vec<usize> = self.sequences.iter().map(|(c, len)| (c + len).div_ceil(PAGE_TOKENS)).collect();
        let total = needs.iter().sum::<usize>() + 3;
        let mut free: Vec<i32> = (0..total as i32).collect();
        free.shuffle(&mut rng(self.pages));
        (needs.iter().map(|&n| free.split_off(free.len() - n)).collect(), total)
    }

    fn cache(&self, device: &Arc<Device>, pages: &[Vec<i32>], total: usize) -> KvPages {
        let mut kv = KvPages::new(device, self.kv, total, self.dims).unwrap();
        if self.kv == U8 {
            (kv.k_scale, kv.v_scale) = SCALES;
        }
        let (width, cols) = (self.dims.kv_cols(), self.dims.qkv_cols());
        for (from, scale, half) in
            [(self.dims.k_col(), kv.k_scale, &mut kv.k), (self.dims.v_col(), kv.v_scale, &mut kv.v)]
        {
            let mut all = vec![f32::NAN; half.len()];
            for (rows, pages) in self.rows.iter().zip(pages) {
                for (p, row) in rows.chunks(cols).enumerate() {
                    let slot = pages[p / PAGE_TOKENS] as usize * PAGE_TOKENS + p % PAGE_TOKENS;
                    all[slot * width..][..width].copy_from_slice(&row[from..from + width]);
                }
            }
            match self.kv {
                F32 => half.write(0, &all).unwrap(),
                Bf16 => half.write(0, &all.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>()).unwrap(),
                _ => half.write(0, &all.iter().map(|&v| fp8::encode(v / scale)).collect::<Vec<_>>()).unwrap(),
            }
        }
        kv
    }

    /// The result, row by row; `touch` may spoil what is on the device before the call.
    fn run(&self, rig: &Rig, touch: impl FnOnce(&mut StepInputs, &mut KvPages)) -> Vec<f32> {
        let (pages, total) = self.place();
        let limits = Limits { step_tokens: self.tokens(), batch: self.sequences.len(), context: self.context };
        let mut inputs = StepInputs::new(&rig.device, limits).unwrap();
        let spans = spans(&self.sequences);
        let places: Vec<Placement> = pages.iter().map(|pages| placement(pages)).collect();
        inputs.upload(&spans, &places, &vec![0; self.tokens()], &[]).unwrap();
        let mut kv = self.cache(&rig.device, &pages, total);
        touch(&mut inputs, &mut kv);
        let cx = Cx { numerics: self.numerics(), ..rig.cx() };
        let qkv = tensor(&cx, self.dtype, &[self.tokens(), self.dims.qkv_cols()], &self.queries());
        let batch = Batch { spans: &spans, decodes: self.decodes, inputs: &inputs };
        values(&attend(&cx, &qkv, &kv, self.dims, &batch).unwrap())
    }

    /// The step's fused rows; keys and values in them are NaN.
    fn queries(&self) -> Vec<f32> {
        let cols = self.dims.qkv_cols();
        let mut queries = Vec::new();
        for (rows, &(context, len)) in self.rows.iter().zip(&self.sequences) {
            for row in rows.chunks(cols).skip(context).take(len) {
                queries.extend(&row[..self.dims.k_col()]);
                queries.extend(vec![f32::NAN; cols - self.dims.k_col()]);
            }
        }
        queries
    }

    /// Each row of the arms' results against each other, in units of the row's largest value.
    ///
    /// f32: scores, weights and sums of up to a few thousand terms in f32 on both arms, off by some 2^-24 of the terms each:
    /// 1e-5. bf16: both arms round the result (2^-9 of a value), the tensor cores' weights are rounded before the values
    /// are added (2^-9 of each term, 2^-12 in half); the terms of a row are about as large as the row. At worst these meet
    /// in one place: one ulp of the row's largest value is 2^-7 of it at most. As a norm, less than half of that.
    #[track_caller]
    fn near(&self, what: &str, cuda: &[f32], cpu: &[f32]) {
        let (norm, worst) = if self.dtype == Bf16 { (1.0 / 256.0, 1.0 / 128.0) } else { (1e-5, 1e-5) };
        assert_eq!(cuda.len(), cpu.len(), "{what}");
        let off = relative_norm(cuda, cpu);
        assert!(off <= norm, "{what}: relative norm {off:e}, bound {norm:e}");
        for (i, (cuda, cpu)) in cuda.chunks(self.dims.head_dim).zip(cpu.chunks(self.dims.head_dim)).enumerate() {
            let largest = cpu.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            for (c, (a, b)) in cuda.iter().zip(cpu).enumerate() {
                let same = a == b || a.is_nan() && b.is_nan();
                let (row, head) = (i / self.dims.heads, i % self.dims.heads);
                assert!(
                    same || f64::from((a - b).abs()) <= worst * f64::from(largest),
                    "{what}: row {row}, head {head}, element {c} is {a} for {b}, of a row up to {largest}"
                );
            }
        }
    }

    #[track_caller]
    fn agrees(&self, what: &str) {
        if let Some(pair) = self.pair(what) {
            let (cpu, cuda) = pair.run(|rig| self.run(rig, |_, _| {}));
            self.near(what, &cuda, &cpu);
        }
    }
}

fn spans(sequences: &[(usize, usize)]) -> Vec<Span> {
    let mut next = 0;
    let span = |&(context, len): &(usize, usize)| {
        next += len;
        Span { start: next - len, len, context }
    };
    sequences.iter().map(span).collect()
}

fn placement(pages: &[i32]) -> Placement {
    Placement { slot_in: 0, slot_out: 0, pages: pages.to_vec() }
}

#[test]
fn every_case_agrees_with_the_cpu_arm() {
    for case in cases() {
        Job::new(case.dims, &case.sequences, case.decodes, case.dtype, case.kv).agrees(case.name);
    }
}

#[test]
fn any_types_and_heads_agree() {
    for (dtype, kv) in [(F32, F32), (F32, Bf16), (F32, U8), (Bf16, F32), (Bf16, Bf16), (Bf16, U8)] {
        // Tensor cores take the multiples of 16 where rows are bf16 and pages are not f32.
        for (heads, kv_heads, head_dim) in [(3, 3, 16), (4, 2, 48), (12, 2, 64), (8, 1, 128), (20, 1, 32), (2, 1, 20)] {
            let job = Job::new(dims(heads, kv_heads, head_dim), &[(130, 1), (63, 1), (0, 20), (60, 70)], 2, dtype, kv);
            job.agrees(&format!("{heads}:{kv_heads} heads of {head_dim}, {dtype} on {kv}"));
        }
    }
    let wide = Job::new(dims(2, 1, 272), &[(70, 1), (0, 66)], 1, Bf16, Bf16);
    wide.agrees("heads wider than tensor cores take");
}

#[test]
fn decodes_agree_at_every_edge_of_a_page_and_of_a_part() {
    // 65 sequences: more than two warps of a prefill's search, too.
    let mut lengths: Vec<usize> = (0..60).map(|i| 1 + i * 7 % 61).collect();
    lengths.extend([63, 64, 65, 127, 128, 129, 255, 256, 257, 900, 2048, 2049, 2500]);
    assert!(part_tokens(129, 32) == 128 && part_tokens(2049, 32) == 192, "edges moved");
    for kv in [Bf16, U8] {
        let decodes: Vec<_> = lengths.iter().map(|&length| (length - 1, 1)).collect();
        let job = Job::new(dims(8, 1, 32), &decodes, decodes.len(), Bf16, kv);
        job.agrees(&format!("decodes on {kv}"));
        let prefills: Vec<_> = decodes.iter().take(65).map(|&(context, _)| (context, 5)).collect();
        Job::new(dims(2, 1, 16), &prefills, 0, Bf16, kv).agrees(&format!("prefills on {kv}"));
        // One part, whatever the length.
        Job { context: 128, ..Job::new(dims(8, 1, 32), &[(126, 1), (63, 1)], 2, Bf16, kv) }.agrees("no parts");
        Job::new(dims(16, 2, 256), &[(300, 1), (64, 1)], 2, Bf16, kv).agrees(&format!("real heads on {kv}"));
    }
}

#[test]
fn large_scores_neither_overflow_nor_lose_the_largest() {
    for (dtype, kv) in [(F32, F32), (Bf16, Bf16)] {
        let mut job = Job::new(dims(2, 1, 32), &[(300, 1), (70, 70)], 1, dtype, kv);
        for rows in &mut job.rows {
            rows.iter_mut().for_each(|v| *v *= 256.0);
        }
        let Some(pair) = job.pair("large") else { continue };
        let (cpu, cuda) = pair.run(|rig| job.run(rig, |_, _| {}));
        // A score near 4e4 is off by a few ulp of 4e-3 and so is the logarithm of each weight; rounding as ever.
        assert!(relative_norm(&cuda, &cpu) <= 1e-2, "{}", relative_norm(&cuda, &cpu));
    }
}

/// What the cuts of each kind of card can be held to here: a card has its own, emulation has all.
fn rigs(numerics: Numerics) -> Vec<(&'static str, Rig)> {
    let rig = |device| Rig { device, meter: Meter::default(), numerics };
    let emulated = |name| (name, rig(Device::emulated(cards::find(name).unwrap(), SLAB_BYTES).unwrap()));
    match place() {
        Where::Card => {
            let device = Device::cuda_guarded(cards::find("h200").unwrap(), 0, SLAB_BYTES).unwrap();
            vec![("card", rig(device))]
        }
        Where::Emulated => ["h200", "a100-80g", "rtx-4090"].map(emulated).into(),
        Where::Nowhere => Vec::new(),
    }
}

#[test]
fn a_prompt_in_chunks_is_the_prompt_in_one_bit_for_bit() {
    for (dtype, kv, heads, kv_heads, head_dim) in
        [(Bf16, Bf16, 6, 1, 32), (Bf16, Bf16, 2, 2, 16), (Bf16, U8, 24, 4, 32), (F32, F32, 2, 1, 16)]
    {
        let job = Job::new(dims(heads, kv_heads, head_dim), &[(0, 200)], 0, dtype, kv);
        let cols = job.dims.out_cols();
        for (card, rig) in rigs(job.numerics()) {
            let what = format!("{heads}:{kv_heads} heads of {head_dim}, {dtype} on {kv}, {card}");
            let whole = job.run(&rig, |_, _| {});
            for chunks in [&[64, 64, 64, 8][..], &[1, 1, 62, 1, 100, 35], &[37, 91, 1, 1, 70], &[199, 1]] {
                let mut at = 0;
                for &len in chunks {
                    let chunk = job.alone(0, 0, (at, len)).run(&rig, |_, _| {});
                    assert_same(&format!("{what}: {chunks:?} at {at}"), &chunk, &whole[at * cols..][..len * cols]);
                    at += len;
                }
            }
            assert!(rig.device.take_overruns().is_empty(), "{what}");
        }
    }
}

#[test]
fn a_sequence_is_the_same_alone_and_in_a_ragged_batch_on_any_pages() {
    let sequences = [(700, 1), (63, 1), (2500, 1), (0, 1), (0, 150), (100, 33), (64, 1)];
    for (dtype, kv) in [(Bf16, Bf16), (Bf16, U8), (F32, F32)] {
        let job = Job::new(dims(8, 2, 16), &sequences, 4, dtype, kv);
        let cols = job.dims.out_cols();
        for (card, rig) in rigs(job.numerics()) {
            let together = job.run(&rig, |_, _| {});
            for (i, span) in spans(&sequences).iter().enumerate() {
                let alone = job.alone(i, usize::from(i < job.decodes), sequences[i]).run(&rig, |_, _| {});
                let what = format!("{dtype} on {kv}, {card}: sequence {i}");
                assert_same(&what, &alone, &together[span.start * cols..][..span.len * cols]);
            }
        }
    }
}

#[test]
fn inert_sequences_are_zero_and_pages_outside_the_cache_are_left_out() {
    let sequences = [(300, 1), (200, 1), (130, 1), (300, 30), (100, 70), (5, 20)];
    for (dtype, kv) in [(Bf16, Bf16), (Bf16, U8), (F32, F32)] {
        let job = Job::new(dims(8, 2, 16), &sequences, 3, dtype, kv);
        let (cols, spans) = (job.dims.out_cols(), spans(&sequences));
        for (card, rig) in rigs(job.numerics()) {
            let what = format!("{dtype} on {kv}, {card}");
            let whole = job.run(&rig, |_, _| {});
            let wild = [i32::MAX, 1 << 20, job.place().1 as i32, i32::MIN, -1];
            for wild in wild {
                let got = job.run(&rig, |inputs, _| {
                    let per_row = inputs.page_table.cols();
                    let mut set = |sequence: usize, page: usize, to: i32| {
                        inputs.page_table.write(sequence * per_row + page, &[to]).unwrap();
                    };
                    set(1, 0, -1);
                    set(3, 0, i32::MIN);
                    // A sequence's last page: the rows on it see what comes before it.
                    set(2, 2, wild);
                    set(4, 2, wild);
                });
                let rows = |s: usize| &got[spans[s].start * cols..][..spans[s].len * cols];
                let before = |s: usize| &whole[spans[s].start * cols..][..spans[s].len * cols];
                assert!(rows(1).iter().chain(rows(3)).all(|&v| v == 0.0), "{what}, {wild}: inert");
                assert_same(&format!("{what}, {wild}: untouched"), rows(0), before(0));
                assert_same(&format!("{what}, {wild}: untouched"), rows(5), before(5));
                assert_same(&format!("{what}, {wild}: page before"), &rows(4)[..28 * cols], &before(4)[..28 * cols]);
                assert!(rows(2).iter().chain(rows(4)).all(|v| v.is_finite()), "{what}, {wild}");
                // Row 28 of sequence 4 is at token 128: the first on the page that is left out.
                assert!(
                    rows(4)[28 * cols..29 * cols] != before(4)[28 * cols..29 * cols],
                    "{what}, {wild}: it was seen"
                );
            }
            assert!(rig.device.take_overruns().is_empty(), "{what}");
        }
    }
}

#[test]
fn a_step_s_numbers_are_not_trusted() {
    let sequences = [(100, 1), (10, 1), (0, 70), (64, 5)];
    for (dtype, kv) in [(Bf16, Bf16), (Bf16, U8), (F32, F32)] {
        let job = Job { context: 256, ..Job::new(dims(4, 2, 16), &sequences, 2, dtype, kv) };
        for (card, rig) in rigs(job.numerics()) {
            for wild in [i32::MAX, i32::MIN, -1, 1 << 20] {
                job.run(&rig, |inputs, _| inputs.contexts.write(0, &[wild; 4]).unwrap());
                job.run(&rig, |inputs, _| inputs.starts.write(0, &[wild; 5]).unwrap());
                job.run(&rig, |inputs, _| inputs.starts.write(2, &[wild]).unwrap());
                job.run(&rig, |inputs, _| inputs.page_table.write(0, &vec![wild; inputs.page_table.len()]).unwrap());
            }
            // Reads outside a buffer end an emulated launch; on a card they would be an error of the next call.
            assert!(rig.device.take_overruns().is_empty(), "{card}");
            assert!(job.run(&rig, |_, _| {}).iter().all(|v| v.is_finite()), "{card}");
        }
    }
}

#[test]
fn every_code_is_widened_exactly() {
    // A row that sees one token only has that token's values; 0x7F and 0xFF are NaN.
    for decodes in [0, 1] {
        let job = Job::new(dims(8, 1, 256), &[(0, 1)], decodes, Bf16, U8);
        let Some(pair) = job.pair("codes") else { return };
        let codes: Vec<u8> = (0..=255).collect();
        let (page, _) = job.place();
        let at = page[0][0] as usize * PAGE_TOKENS * 256;
        let (cpu, cuda) = pair.run(|rig| job.run(rig, |_, kv| kv.v.write(at, &codes).unwrap()));
        let bits = |values: &[f32]| -> Vec<u32> {
            values.iter().map(|v| if v.is_nan() { u32::MAX } else { v.to_bits() }).collect()
        };
        assert_same("values", &bits(&cuda), &bits(&cpu));
        assert_eq!(cpu.iter().filter(|v| v.is_nan()).count(), 16);
    }
    // Two tokens, the query all ones in one place: the score is the key's code there, its weight tells it from others.
    let mut job = Job::new(dims(1, 1, 16), &[(1, 1)], 0, Bf16, U8);
    job.rows[0].fill(0.0);
    let cols = job.dims.qkv_cols();
    job.rows[0][cols + 3] = 1.0;
    job.rows[0][job.dims.v_col()] = 1.0;
    let at = job.place().0[0][0] as usize * PAGE_TOKENS * 16;
    for decodes in [0, 1] {
        job.decodes = decodes;
        let Some(pair) = job.pair("keys") else { return };
        for code in 0..=255u8 {
            let (cpu, cuda) = pair.run(|rig| {
                job.run(rig, |_, kv| {
                    kv.k_scale = 1.0 / 64.0;
                    kv.k.write(at + 3, &[code]).unwrap();
                })
            });
            let (a, b) = (cuda[0], cpu[0]);
            assert!((a - b).abs() <= b.abs() / 100.0 || a.is_nan() && b.is_nan(), "code {code:#x}: {a} for {b}");
            assert_eq!(b.is_nan(), code & 0x7F == 0x7F);
        }
    }
}

#[test]
fn a_captured_decode_follows_what_is_in_device_memory() {
    let lengths = [(64, 1), (700, 1), (2100, 1), (3, 1)];
    for kv in [Bf16, U8] {
        let job = Job::new(dims(8, 2, 16), &lengths, 4, Bf16, kv);
        for (card, rig) in rigs(job.numerics()) {
            let cuda = rig.device.as_cuda().unwrap();
            let (pages, total) = job.place();
            let limits = Limits { step_tokens: 4, batch: 4, context: job.context };
            let mut inputs = StepInputs::new(&rig.device, limits).unwrap();
            let kv_pages = job.cache(&rig.device, &pages, total);
            let cx = Cx { numerics: job.numerics(), ..rig.cx() };
            let qkv = tensor(&cx, job.dtype, &[4, job.dims.qkv_cols()], &job.queries());
            let run = |inputs: &StepInputs, spans: &[Span]| {
                attend(&cx, &qkv, &kv_pages, job.dims, &Batch { spans, decodes: 4, inputs }).unwrap()
            };
            // Captured for four padding sequences, replayed for others.
            let padding = spans(&[(1, 1); 4]);
            inputs.upload(&padding, &vec![placement(&[-1]); 4], &[0; 4], &[]).unwrap();
            let warm = run(&inputs, &padding);
            assert!(values(&warm).iter().all(|&v| v == 0.0));
            drop(warm);
            let mut out = None;
            let graph = cuda.capture(|| {
                out = Some(run(&inputs, &padding));
                Ok(())
            });
            let (graph, out) = (graph.unwrap(), out.unwrap());
            for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 2, 0, 1]] {
                let sequences: Vec<_> = order.iter().map(|&i| lengths[i]).collect();
                let places: Vec<_> = order.iter().map(|&i| placement(&pages[i])).collect();
                inputs.upload(&spans(&sequences), &places, &[0; 4], &[]).unwrap();
                cuda.replay(&graph).unwrap();
                let replayed = values(&out);
                let launched = values(&run(&inputs, &spans(&sequences)));
                assert_same(&format!("{card}, {kv}: {order:?}"), &replayed, &launched);
                assert!(launched.iter().any(|&v| v != 0.0));
            }
        }
    }
}
