//! `attend` against a plain softmax in float64, and the same row bit for bit however it came in.

use std::sync::Arc;

use highwater::device::{Device, DeviceSpec};
use highwater::num::{DType, bf16, fp8};
use highwater::ops::attention::{
    AttnDims, Case, PARTIALS_BYTES, attend, cases, cost, part_tokens, tactic, upper_bound,
};
use highwater::ops::batch::PAGE_TOKENS;
use highwater::ops::kv_write::{KvPages, write};
use highwater::ops::{Limits, Meter, Numerics, Span};
use highwater::tensor::Tensor;
use proptest::prelude::{ProptestConfig, prop_assert, prop_assert_eq, proptest};
use rand_chacha::ChaCha8Rng;

use super::world::{
    Step, blank, card, cx, device, limits, message, numerics, on_threads, plan, scatter, stored, tensor, uniform,
};
use super::{bytes, rng};

/// A sequence's fused rows, all positions: what a one-shot prefill would be given.
struct Sequence {
    rows: Vec<f32>,
}

impl Sequence {
    fn new(rng: &mut ChaCha8Rng, dims: AttnDims, tokens: usize, scale: f32) -> Sequence {
        Sequence { rows: uniform(rng, tokens * dims.qkv_cols(), scale) }
    }
}

/// The scales of keys and values that are codes: the tests' values come near the largest code.
const SCALES: (f32, f32) = (0.004, 0.0037);

fn cache(device: &Arc<Device>, case: &Case, pages: usize) -> KvPages {
    let mut kv = KvPages::new(device, case.kv, pages, case.dims).unwrap();
    if case.kv == DType::U8 {
        (kv.k_scale, kv.v_scale) = SCALES;
    }
    kv
}

fn types(case: &Case) -> Numerics {
    Numerics { kv: case.kv, ..numerics(case.dtype) }
}

/// Puts the keys and values of tokens `0..tokens` of a sequence on its pages, by this test's own arithmetic.
fn fill(kv: &mut KvPages, dims: AttnDims, sequence: &Sequence, tokens: usize, pages: &[i32]) {
    let (k_scale, v_scale) = (kv.k_scale, kv.v_scale);
    let halves = [(&mut kv.k, dims.k_col(), k_scale), (&mut kv.v, dims.v_col(), v_scale)];
    for (half, from, scale) in halves {
        let width = dims.kv_heads * dims.head_dim;
        for p in 0..tokens {
            let slot = pages[p / PAGE_TOKENS] as usize * PAGE_TOKENS + p % PAGE_TOKENS;
            let source = &sequence.rows[p * dims.qkv_cols() + from..][..width];
            match half.dtype() {
                DType::U8 => {
                    for (to, &v) in half.host_mut::<u8>().unwrap()[slot * width..].iter_mut().zip(source) {
                        *to = fp8::encode(v / scale);
                    }
                }
                DType::Bf16 => {
                    for (to, &v) in half.host_mut::<bf16>().unwrap()[slot * width..].iter_mut().zip(source) {
                        *to = bf16::from_f32(v);
                    }
                }
                _ => half.host_mut::<f32>().unwrap()[slot * width..][..width].copy_from_slice(source),
            }
        }
    }
}

/// The fused rows of a step, with keys and values made NaN where `queries_only`: attention must read them from the pages.
fn fused(device: &Arc<Device>, case: &Case, sequences: &[Sequence], queries_only: bool) -> Tensor {
    let dims = case.dims;
    let mut values = Vec::new();
    for (&(context, len), sequence) in case.sequences.iter().zip(sequences) {
        for p in context..context + len {
            let mut row = sequence.rows[p * dims.qkv_cols()..(p + 1) * dims.qkv_cols()].to_vec();
            if queries_only {
                row[2 * dims.heads * dims.head_dim..].fill(f32::NAN);
            }
            values.extend(row);
        }
    }
    tensor(device, case.dtype, &[values.len() / dims.qkv_cols(), dims.qkv_cols()], &values)
}

/// Runs a case on its own device, pages scattered by `seed`; the result's rows by sequence.
fn run(case: &Case, sequences: &[Sequence], seed: u64) -> Vec<Vec<u8>> {
    let (device, meter) = (device(), Meter::default());
    let (pages, total) = scatter(&mut rng(seed), &case.sequences);
    let mut kv = cache(&device, case, total);
    for ((&(context, len), sequence), pages) in case.sequences.iter().zip(sequences).zip(&pages) {
        fill(&mut kv, case.dims, sequence, context + len, pages);
    }
    let step = Step::new(&device, limits(&case.sequences), &case.sequences, case.decodes, &pages);
    let qkv = fused(&device, case, sequences, true);
    let out = attend(&cx(&device, &meter, types(case)), &qkv, &kv, case.dims, &step.batch()).unwrap();
    let row_bytes = case.dims.heads * case.dims.head_dim * case.dtype.bytes() as usize;
    let mut rows = bytes(&out).chunks(row_bytes).map(<[u8]>::to_vec).collect::<Vec<_>>().into_iter();
    case.sequences.iter().map(|&(_, len)| rows.by_ref().take(len).flatten().collect()).collect()
}

fn floats(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::Bf16 => bytes.chunks(2).map(|b| f32::from(bf16::from_le_bytes([b[0], b[1]]))).collect(),
        _ => bytes.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

fn random(case: &Case, seed: u64, scale: f32) -> Vec<Sequence> {
    let mut rng = rng(seed);
    case.sequences.iter().map(|&(context, len)| Sequence::new(&mut rng, case.dims, context + len, scale)).collect()
}

/// The row at `position`, head by head, in float64 from the values as they are stored.
fn oracle(case: &Case, sequence: &Sequence, position: usize) -> Vec<f64> {
    let dims = case.dims;
    let (d, cols) = (dims.head_dim, dims.qkv_cols());
    let mut rows = stored(case.dtype, &sequence.rows[..(position + 1) * cols]);
    if case.kv == DType::U8 {
        for (row, from) in rows.chunks_mut(cols).zip(sequence.rows.chunks(cols)) {
            for c in dims.k_col()..cols {
                let scale = if c < dims.v_col() { SCALES.0 } else { SCALES.1 };
                row[c] = fp8::decode(fp8::encode(from[c] / scale)) * scale;
            }
        }
    }
    let rows: Vec<f64> = rows.into_iter().map(f64::from).collect();
    let mut out = Vec::new();
    for h in 0..dims.heads {
        let kv_head = h / (dims.heads / dims.kv_heads);
        let q = &rows[position * cols + h * 2 * d..][..d];
        let key = |p: usize| &rows[p * cols + (2 * dims.heads + kv_head) * d..][..d];
        let value = |p: usize| &rows[p * cols + (2 * dims.heads + dims.kv_heads + kv_head) * d..][..d];
        let scores: Vec<f64> =
            (0..=position).map(|p| q.iter().zip(key(p)).map(|(a, b)| a * b).sum::<f64>() / (d as f64).sqrt()).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for i in 0..d {
            out.push((0..=position).map(|p| weights[p] * value(p)[i]).sum::<f64>() / sum);
        }
    }
    out
}

/// Checks every row of a case; `scale` bounds the inputs, `bound` the error before the store, relative to the values.
fn check(case: &Case, sequences: &[Sequence], scale: f32, bound: f64) {
    for (s, (rows, &(context, len))) in run(case, sequences, 99).iter().zip(&case.sequences).enumerate() {
        let cols = case.dims.heads * case.dims.head_dim;
        for (j, got) in floats(case.dtype, rows).chunks(cols).enumerate() {
            for (i, (want, got)) in oracle(case, &sequences[s], context + j).iter().zip(got).enumerate() {
                let store = if case.dtype == DType::Bf16 { want.abs() / 256.0 } else { 0.0 };
                let error = (f64::from(*got) - want).abs();
                assert!(
                    error <= bound * f64::from(scale) + store,
                    "{}: sequence {s} of {context}+{len}, row {j}, column {i}: {got} for {want}",
                    case.name
                );
            }
        }
    }
}

#[test]
fn every_case_agrees_with_a_plain_softmax() {
    for (i, case) in cases().iter().enumerate() {
        // Scores of a few units, each off by about d roundings of them: 1e-5 of the values.
        let sequences = random(case, i as u64, 1.5);
        check(case, &sequences, 1.5, 1e-5);
    }
}

#[test]
fn scores_in_the_tens_of_thousands_neither_overflow_nor_lose_the_largest() {
    let dims = AttnDims { heads: 2, kv_heads: 1, head_dim: 32, rotary_dim: 8 };
    let case = Case { name: "large", dims, sequences: vec![(70, 70)], decodes: 0, dtype: DType::F32, kv: DType::F32 };
    let sequences = random(&case, 5, 300.0);
    // A score near 4e4 is off by a few ulp of 4e-3, and so is the logarithm of each weight.
    check(&case, &sequences, 300.0, 3e-2);
    for rows in run(&case, &sequences, 1) {
        assert!(floats(DType::F32, &rows).iter().all(|v| v.is_finite()));
    }
}

#[test]
fn equal_scores_give_the_mean_of_the_values() {
    let dims = AttnDims { heads: 1, kv_heads: 1, head_dim: 16, rotary_dim: 4 };
    let case = Case { name: "mean", dims, sequences: vec![(0, 129)], decodes: 0, dtype: DType::F32, kv: DType::F32 };
    let mut sequences = random(&case, 6, 1.0);
    for (p, row) in sequences[0].rows.chunks_mut(dims.qkv_cols()).enumerate() {
        row[..16].fill(0.0);
        row[48..].fill(p as f32);
    }
    for (p, row) in floats(DType::F32, &run(&case, &sequences, 2)[0]).chunks(16).enumerate() {
        let mean = p as f32 / 2.0;
        assert!(row.iter().all(|v| (v - mean).abs() <= mean * 1e-6), "{p}: {row:?}");
    }
}

#[test]
fn a_sequence_is_the_same_alone_and_in_a_ragged_batch_on_any_pages() {
    for case in cases().into_iter().filter(|c| c.sequences.len() > 1) {
        let sequences = random(&case, 11, 1.5);
        let together = run(&case, &sequences, 1);
        for (i, sequence) in sequences.into_iter().enumerate() {
            let decodes = usize::from(i < case.decodes);
            let alone = Case { sequences: vec![case.sequences[i]], decodes, ..case.clone() };
            assert_eq!(run(&alone, &[sequence], 50 + i as u64)[0], together[i], "{}: sequence {i}", case.name);
        }
    }
}

#[test]
fn a_result_does_not_depend_on_the_threads() {
    let case = cases().into_iter().find(|c| c.name == "mixed").unwrap();
    let sequences = random(&case, 12, 1.5);
    assert_eq!(on_threads(1, || run(&case, &sequences, 1)), on_threads(5, || run(&case, &sequences, 1)));
}

/// Prefills one sequence in chunks through `write` and `attend`; the result of every row.
fn prefill(case: &Case, sequence: &Sequence, chunks: &[usize], seed: u64) -> Vec<u8> {
    let tokens: usize = chunks.iter().sum();
    let (device, meter) = (device(), Meter::default());
    let cx = cx(&device, &meter, types(case));
    let (pages, total) = scatter(&mut rng(seed), &[(0, tokens)]);
    let mut kv = cache(&device, case, total);
    let mut rows = Vec::new();
    let mut context = 0;
    for &len in chunks {
        let decodes = usize::from(len == 1 && context > 0);
        let limits = Limits { step_tokens: tokens, batch: 1, context: tokens };
        let step = Step::new(&device, limits, &[(context, len)], decodes, &pages);
        let cols = case.dims.qkv_cols();
        let qkv = tensor(&device, case.dtype, &[len, cols], &sequence.rows[context * cols..(context + len) * cols]);
        write(&cx, &qkv, case.dims, &mut kv, &step.batch()).unwrap();
        rows.extend(bytes(&attend(&cx, &qkv, &kv, case.dims, &step.batch()).unwrap()));
        context += len;
    }
    rows
}

#[test]
fn a_prompt_in_chunks_is_the_prompt_in_one_bit_for_bit() {
    use DType::{Bf16, F32, U8};
    for (dtype, kv, head_dim, kv_heads) in
        [(F32, F32, 32, 2), (Bf16, Bf16, 32, 1), (F32, F32, 256, 1), (Bf16, U8, 16, 3)]
    {
        let dims = AttnDims { heads: 6, kv_heads, head_dim, rotary_dim: 8 };
        let case = Case { name: "chunks", dims, sequences: vec![(0, 200)], decodes: 0, dtype, kv };
        let sequence = &random(&case, 13, 1.5)[0];
        let whole = prefill(&case, sequence, &[200], 1);
        for (seed, chunks) in
            [&[64, 64, 64, 8][..], &[1, 1, 62, 1, 100, 35], &[37, 91, 1, 1, 70], &[199, 1]].into_iter().enumerate()
        {
            assert!(prefill(&case, sequence, chunks, seed as u64) == whole, "{dtype} {kv} {head_dim}: {chunks:?}");
        }
    }
}

#[test]
fn an_inert_sequence_is_zero_and_changes_nothing() {
    let case = cases().into_iter().find(|c| c.name == "mixed").unwrap();
    let sequences = random(&case, 14, 1.5);
    let (device, meter) = (device(), Meter::default());
    let (mut pages, total) = scatter(&mut rng(1), &case.sequences);
    let mut kv = KvPages::new(&device, case.dtype, total, case.dims).unwrap();
    for ((&(context, len), sequence), pages) in case.sequences.iter().zip(&sequences).zip(&pages) {
        fill(&mut kv, case.dims, sequence, context + len, pages);
    }
    pages[1].fill(-1);
    let step = Step::new(&device, limits(&case.sequences), &case.sequences, case.decodes, &pages);
    let qkv = fused(&device, &case, &sequences, true);
    let out = attend(&cx(&device, &meter, numerics(case.dtype)), &qkv, &kv, case.dims, &step.batch()).unwrap();
    let want = run(&case, &sequences, 1);
    let mut rows = bytes(&out).into_iter();
    for (i, want) in want.iter().enumerate() {
        let got: Vec<u8> = rows.by_ref().take(want.len()).collect();
        assert!(if i == 1 { got.iter().all(|&b| b == 0) } else { got == *want }, "sequence {i}");
    }
}

#[test]
fn a_page_outside_the_cache_is_named() {
    let (device, meter) = (device(), Meter::default());
    let dims = AttnDims { heads: 1, kv_heads: 1, head_dim: 16, rotary_dim: 4 };
    let kv = KvPages::new(&device, DType::F32, 4, dims).unwrap();
    let qkv = tensor(&device, DType::F32, &[1, dims.qkv_cols()], &vec![0.0; dims.qkv_cols()]);
    for page in [4, 99, -1] {
        let step = Step::new(&device, limits(&[(64, 1)]), &[(64, 1)], 1, &[vec![3, page]]);
        let said = message(attend(&cx(&device, &meter, numerics(DType::F32)), &qkv, &kv, dims, &step.batch()));
        assert!(said.contains(&format!("page {page}")) && said.contains('4'), "{said}");
    }
}

#[test]
fn operands_that_disagree_are_named_with_their_numbers() {
    for device in [device(), plan()] {
        let meter = Meter::default();
        let cx = cx(&device, &meter, numerics(DType::F32));
        let dims = AttnDims { heads: 4, kv_heads: 2, head_dim: 16, rotary_dim: 4 };
        let limits = Limits { step_tokens: 8, batch: 2, context: 128 };
        let step = Step::new(&device, limits, &[(5, 1), (0, 3)], 1, &[vec![0], vec![1]]);
        let kv = KvPages::new(&device, DType::F32, 2, dims).unwrap();
        let good = blank(&device, DType::F32, &[4, dims.qkv_cols()]);
        let said = message(attend(&cx, &blank(&device, DType::F32, &[4, 9]), &kv, dims, &step.batch()));
        assert!(said.contains("[4, 9]") && said.contains(&dims.qkv_cols().to_string()), "{said}");
        let bf16 = KvPages::new(&device, DType::Bf16, 2, dims).unwrap();
        let said = message(attend(&cx, &good, &bf16, dims, &step.batch()));
        assert!(said.contains("bf16"), "{said}");
        let said = message(attend(&cx, &good, &kv, AttnDims { kv_heads: 3, ..dims }, &step.batch()));
        assert!(said.contains("4 query heads, 3 kv heads"), "{said}");
        let mut late = Step::new(&device, limits, &[(5, 1), (0, 3)], 1, &[vec![0], vec![1]]);
        late.spans[1].context = usize::MAX;
        let said = message(attend(&cx, &good, &kv, dims, &late.batch()));
        assert!(said.contains("128 tokens"), "{said}");
        late.spans[1].context = 0;
        late.decodes = 3;
        message(attend(&cx, &good, &kv, dims, &late.batch()));
        assert!(meter.take().is_empty());
        attend(&cx, &good, &kv, dims, &step.batch()).unwrap_or_else(|e| panic!("{e}"));
    }
}

#[test]
fn plan_and_cpu_allocate_the_same_bytes_and_count_the_same_cost() {
    for case in cases() {
        let rows: usize = case.sequences.iter().map(|&(_, len)| len).sum();
        let (pages, total) = scatter(&mut rng(1), &case.sequences);
        // Limits above the case's: the cut into parts comes from them.
        let limits = Limits { step_tokens: rows, batch: case.sequences.len(), context: 8192 };
        let reports = [device(), plan()].map(|device| {
            let meter = Meter::default();
            let step = Step::new(&device, limits, &case.sequences, case.decodes, &pages);
            let kv = cache(&device, &case, total);
            let qkv = blank(&device, case.dtype, &[rows, case.dims.qkv_cols()]);
            device.begin_step();
            drop(attend(&cx(&device, &meter, types(&case)), &qkv, &kv, case.dims, &step.batch()).unwrap());
            (device.report(), meter.take())
        });
        assert_eq!(reports[0], reports[1], "{}", case.name);
        assert_eq!(reports[0].1[0].cost, cost(case.dims, &step_spans(&case), case.dtype, case.kv));
        let workspace = tactic(&card(), case.dims, case.dtype, case.kv, limits, case.decodes).workspace;
        assert_eq!(workspace > 0, case.decodes > 0 && case.dtype == DType::Bf16, "{}", case.name);
        let out = (rows * case.dims.heads * case.dims.head_dim) as u64 * case.dtype.bytes();
        assert!(reports[0].0.transient_live_peak >= out + workspace, "{}", case.name);
    }
}

fn step_spans(case: &Case) -> Vec<Span> {
    let mut start = 0;
    case.sequences
        .iter()
        .map(|&(context, len)| {
            let span = Span { start, len, context };
            start += len;
            span
        })
        .collect()
}

#[test]
fn the_cost_of_a_prefill_counts_each_visible_pair_once() {
    let dims = AttnDims { heads: 4, kv_heads: 2, head_dim: 16, rotary_dim: 4 };
    let spans = [Span { start: 0, len: 3, context: 5 }];
    let pairs = 6 + 7 + 8;
    let cost = cost(dims, &spans, DType::Bf16, DType::Bf16);
    assert_eq!(cost.flops, 4 * pairs * 64);
    assert_eq!(cost.resident_bytes, 8 * 2 * 32 * 2);
    assert_eq!(cost.activation_bytes, 2 * 3 * 64 * 2);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    #[test]
    fn a_tactic_is_the_engine_s_and_no_step_exceeds_its_bound(
        kv_heads in 1usize..9, group in 1usize..9, head_dim in 1usize..257,
        batch in 1usize..600, context in 1usize..400_000, step_tokens in 1usize..9000, decodes in 0usize..600,
        codes: bool,
    ) {
        let dims = AttnDims { heads: kv_heads * group, kv_heads, head_dim, rotary_dim: 0 };
        let limits = Limits { step_tokens, batch, context };
        let decodes = decodes.min(batch).min(step_tokens);
        let kv = if codes { DType::U8 } else { DType::Bf16 };
        let one = tactic(&card(), dims, DType::Bf16, kv, limits, decodes);
        let other = tactic(&card(), dims, DType::Bf16, kv, limits, 0);
        prop_assert_eq!((one.tensor_cores, one.splits), (other.tensor_cores, other.splits));
        prop_assert_eq!(one.tensor_cores, head_dim % 16 == 0);
        prop_assert!(one.tensor_cores || one.splits == 1);
        prop_assert_eq!(tactic(&card(), dims, DType::F32, kv, limits, decodes).workspace, 0);
        let bound = upper_bound(&card(), dims, DType::Bf16, kv, limits);
        prop_assert!(one.workspace <= bound && bound <= PARTIALS_BYTES);
    }

    #[test]
    fn parts_are_whole_pages_and_never_more_than_there_is_room_for(
        context in 1usize..400_000, share in 0.0f64..1.0, batch in 1usize..600, sms in 1u32..200,
    ) {
        let dims = AttnDims { heads: 16, kv_heads: 2, head_dim: 256, rotary_dim: 64 };
        let limits = Limits { step_tokens: 2048, batch, context };
        let spec = DeviceSpec { sms, ..card() };
        let splits = tactic(&spec, dims, DType::Bf16, DType::Bf16, limits, 1).splits;
        let length = ((context as f64 * share) as usize).max(1);
        let part = part_tokens(length, splits);
        prop_assert!(part >= 128 && part % PAGE_TOKENS == 0);
        prop_assert!(length.div_ceil(part) <= splits);
        // No longer than it must be: as many parts as there may be, or parts of 256 tokens at most.
        prop_assert!(part <= 256 || (part - PAGE_TOKENS) * splits < length);
        prop_assert!(part_tokens(length + 1, splits) >= part);
    }
}
