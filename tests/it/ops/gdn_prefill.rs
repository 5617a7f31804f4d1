//! The chunked delta rule against the recurrence in float64 and against transformers' own (`gdn_ops`).

use highwater::mem::Layer;
use highwater::num::DType;
use highwater::ops::activation::Gates;
use highwater::ops::gdn_prefill::{CHUNK_TOKENS, GdnDims, cases, chunked, cost, tactic, upper_bound};
use highwater::ops::{Batch, Limits, Numerics};
use rand::RngExt;

use super::delta_rule::{Part, Stream, decode_from, one_slot, run, run_cut, state_of};
use super::{
    Fixture, Rig, Seq, Step, assert_close, assert_plan_counts_the_same, assert_shape_error, bytes, empty, numerics,
    plan, random, rng, step_of, tensor, values,
};

/// The bound for f32: of every output and state element, from the recurrence in float64.
const F32_BOUND: f64 = 1e-5;
/// Half a unit in the last place of bf16, relative.
const BF16_ROUNDING: f64 = 1.0 / 256.0;

fn to_f64(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| f64::from(v)).collect()
}

/// An initial state, and the output and final state that transformers' recurrence gives in float64.
type Start = (Vec<f32>, Vec<f64>, Vec<f64>);

/// The sequences of the fixture, each started from zero and from its s0.
fn fixture_sequences() -> Vec<(String, Stream, [Start; 2])> {
    let fixture = Fixture::load("gdn_ops/ops.safetensors");
    let mut all = Vec::new();
    for case in ["c0", "c1", "c2", "c3"] {
        let name = |tensor: &str| format!("{case}/{tensor}");
        let [batch, tokens, heads, dk] = fixture.shape(&name("q"))[..] else { panic!("q has 4 dimensions") };
        let dv = fixture.shape(&name("v"))[3];
        let dims = GdnDims::new(heads, heads, dk, dv);
        let [q, k, v, g, beta, s0] = ["q", "k", "v", "g", "beta", "s0"].map(|t| fixture.f32(&name(t)));
        for b in 0..batch {
            let rows = b * tokens..(b + 1) * tokens;
            let conv = rows
                .clone()
                .flat_map(|r| [(&q, heads * dk), (&k, heads * dk), (&v, heads * dv)].map(|(x, w)| &x[r * w..][..w]))
                .flatten()
                .copied()
                .collect();
            let gate = |x: &[f32]| x[rows.start * heads..rows.end * heads].to_vec();
            let stream = Stream { dims, conv, g: gate(&g), beta: gate(&beta) };
            let expected = ["zero", "s0"].map(|start| {
                let len = dims.state_len();
                let part = |t: &str, n: usize| {
                    fixture.f64(&name(&format!("{start}/recurrent_f64/{t}")))[b * n..][..n].to_vec()
                };
                let initial = if start == "zero" { vec![0.0; len] } else { s0[b * len..][..len].to_vec() };
                (initial, part("out", tokens * dims.out_width()), part("state", len))
            });
            all.push((format!("{case} sequence {b}"), stream, expected));
        }
    }
    all
}

#[test]
fn equals_transformers_recurrence_in_one_shot_and_in_cuts_and_in_decodes() {
    for (name, stream, starts) in fixture_sequences() {
        for (i, (initial, out, state)) in starts.iter().enumerate() {
            let fresh = i == 0;
            for cuts in [vec![], vec![1], vec![64], vec![33, 65, 66], (1..stream.tokens()).collect()] {
                let cuts: Vec<usize> = cuts.into_iter().filter(|&c| c < stream.tokens()).collect();
                let rig = Rig::cpu(Numerics::F32);
                // A fresh sequence must not read its slot: leave the last owner's numbers there.
                let mut slot =
                    one_slot(&rig, stream.dims, &if fresh { vec![7.0; initial.len()] } else { initial.clone() });
                let got = run_cut(&rig, &stream, &cuts, fresh, &mut slot);
                let what = format!("{name}, start {i}, cut at {cuts:?}");
                assert_close(&what, &got, out, F32_BOUND, 0.0);
                assert_close(&what, &values(&slot), state, F32_BOUND, 0.0);
            }
            let rig = Rig::cpu(Numerics::F32);
            let mut slot = one_slot(&rig, stream.dims, initial);
            let got = decode_from(&rig, &stream, 0, &mut slot);
            assert_close(&format!("{name}, start {i}, decoded"), &got, out, F32_BOUND, 0.0);
            assert_close(&format!("{name}, start {i}, decoded"), &values(&slot), state, F32_BOUND, 0.0);
        }
    }
}

#[test]
fn the_test_s_own_recurrence_is_transformers() {
    for (name, stream, starts) in fixture_sequences() {
        for (initial, out, state) in starts {
            let mut own = to_f64(&initial);
            let got = stream.recurrence(&mut own);
            let off = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(off(&got, &out) < 1e-12 && off(&own, &state) < 1e-12, "{name}");
        }
    }
}

/// Whole, in cuts, and prefill followed by decodes, all within `bound` of the recurrence; gives the one-shot output.
fn check_stream(what: &str, stream: &Stream, bound: f64) -> Vec<f32> {
    let initial = random(&mut rng(5), DType::F32, stream.dims.state_len(), 0.3);
    let mut state = to_f64(&initial);
    let out = stream.recurrence(&mut state);
    let tokens = stream.tokens();
    let mut one_shot = Vec::new();
    for cuts in [vec![], vec![tokens / 3, tokens / 2], vec![1, 2, tokens - 1]] {
        let rig = Rig::cpu(Numerics::F32);
        let mut slot = one_slot(&rig, stream.dims, &initial);
        let got = run_cut(&rig, stream, &cuts, false, &mut slot);
        assert_close(&format!("{what}, cut at {cuts:?}"), &got, &out, bound, 0.0);
        assert_close(&format!("{what}, state, cut at {cuts:?}"), &values(&slot), &state, bound, 0.0);
        if cuts.is_empty() {
            one_shot = got;
        } else {
            assert_close(&format!("{what}, cut at {cuts:?} and whole"), &got, &to_f64(&one_shot), bound, 0.0);
        }
    }
    let rig = Rig::cpu(Numerics::F32);
    let mut slot = one_slot(&rig, stream.dims, &initial);
    let prompt = tokens / 2;
    if prompt > 0 {
        let got = run(&rig, &[Part::new(stream, 0, prompt, 0).continued()], 0, &mut slot).remove(0);
        assert_close(what, &got, &out[..got.len()], bound, 0.0);
    }
    let got = decode_from(&rig, stream, prompt, &mut slot);
    assert_close(&format!("{what}, decoded"), &got, &out[prompt * stream.dims.out_width()..], bound, 0.0);
    assert_close(&format!("{what}, decoded state"), &values(&slot), &state, bound, 0.0);
    one_shot
}

#[test]
fn equals_the_recurrence_for_every_head_ratio_and_length() {
    let shapes =
        [GdnDims::new(2, 2, 16, 16), GdnDims::new(2, 4, 16, 24), GdnDims::new(1, 3, 5, 7), GdnDims::new(2, 6, 32, 16)];
    for (i, dims) in shapes.into_iter().enumerate() {
        for tokens in [1, 3, 63, 64, 65, 130, 200] {
            let stream = Stream::random(dims, tokens, DType::F32, 100 + i as u64);
            check_stream(&format!("{dims:?}, {tokens} tokens"), &stream, F32_BOUND);
        }
    }
}

#[test]
fn equals_the_recurrence_at_the_published_head_size() {
    let dims = GdnDims::new(1, 3, 128, 128);
    check_stream("128 x 128", &Stream::random(dims, 150, DType::F32, 9), F32_BOUND);
}

#[test]
fn repeated_keys_and_extreme_betas_and_decays_stay_exact() {
    let dims = GdnDims::new(2, 4, 16, 16);
    let base = Stream::random(dims, 130, DType::F32, 3);
    let key = 2 * 16..4 * 16;
    let same_keys = |beta: f32, g: f32| {
        let mut s = base.clone();
        let first: Vec<f32> = s.conv[key.clone()].to_vec();
        s.conv.chunks_exact_mut(dims.channels()).for_each(|row| row[key.clone()].copy_from_slice(&first));
        s.beta.fill(beta);
        s.g.fill(g);
        s
    };
    check_stream("one key, beta 1, no decay", &same_keys(1.0, 0.0), F32_BOUND);
    check_stream("one key, beta 0.5", &same_keys(0.5, -0.01), F32_BOUND);
    check_stream("beta 0", &same_keys(0.0, -0.1), F32_BOUND);
    let with = |f: &dyn Fn(usize, &mut Stream)| {
        let mut s = base.clone();
        (0..s.g.len()).for_each(|i| f(i, &mut s));
        s
    };
    check_stream("beta 1", &with(&|i, s| s.beta[i] = 1.0), F32_BOUND);
    check_stream("beta 0 or 1", &with(&|i, s| s.beta[i] = (i % 2) as f32), F32_BOUND);
    check_stream("no decay", &with(&|i, s| s.g[i] = 0.0), F32_BOUND);
    check_stream("all forgotten", &with(&|i, s| s.g[i] = -77.0), F32_BOUND);
    // A slow decay after saturated ones: a running sum in f32 would lose its digits.
    check_stream("mixed", &with(&|i, s| s.g[i] = if i / 4 % 3 < 2 { -77.0 } else { -0.01 }), F32_BOUND);
    check_stream(
        "minus infinity",
        &with(&|i, s| s.g[i] = if i % 7 == 0 { f32::NEG_INFINITY } else { -0.1 }),
        F32_BOUND,
    );
    let mut zero = base.clone();
    zero.conv.fill(0.0);
    check_stream("zero rows", &zero, F32_BOUND);
}

#[test]
fn chunks_count_from_the_span_s_start_so_cuts_at_multiples_of_64_change_no_bit() {
    let dims = GdnDims::new(1, 2, 32, 32);
    let stream = Stream::random(dims, 300, DType::F32, 17);
    let one = |cuts: &[usize]| {
        let rig = Rig::cpu(Numerics::F32);
        let mut slot = one_slot(&rig, dims, &vec![0.0; dims.state_len()]);
        let out = run_cut(&rig, &stream, cuts, true, &mut slot);
        (out.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), bytes(&slot))
    };
    let whole = one(&[]);
    assert!(whole == one(&[64, 256]));
    assert!(whole == one(&[128, 192]));
}

#[test]
fn a_ragged_batch_gives_each_sequence_the_bits_it_gets_alone() {
    for (act, kept) in [(DType::F32, DType::F32), (DType::Bf16, DType::F32), (DType::Bf16, DType::Bf16)] {
        let dims = GdnDims::new(2, 4, 16, 24);
        let streams: Vec<Stream> = (0..6).map(|i| Stream::random(dims, 170, act, 50 + i)).collect();
        let parts = [
            Part::new(&streams[0], 20, 21, 3),
            Part::new(&streams[1], 90, 91, 1),
            Part::new(&streams[2], 0, 3, 4),
            Part::new(&streams[3], 64, 130, 0),
            Part::new(&streams[4], 0, 1, 5),
            Part::new(&streams[5], 2, 170, 2),
        ];
        let initial = |i: usize| random(&mut rng(i as u64), kept, dims.state_len(), 0.5);
        let rig = Rig::cpu(numerics(act, kept));
        let mut together = state_of(&rig, dims, 6, initial);
        let out = run(&rig, &parts, 2, &mut together);
        for (i, part) in parts.iter().enumerate() {
            let rig = Rig::cpu(numerics(act, kept));
            let mut alone = state_of(&rig, dims, 6, initial);
            let got = run(&rig, &[*part], usize::from(i < 2), &mut alone);
            let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert!(bits(&got[0]) == bits(&out[i]), "outputs of sequence {i}");
            let slot = bytes(&alone).len() / 6 * part.slot_out as usize
                ..bytes(&alone).len() / 6 * (part.slot_out as usize + 1);
            assert!(bytes(&alone)[slot.clone()] == bytes(&together)[slot], "state of sequence {i}");
        }
    }
}

#[test]
fn slots_are_read_and_written_as_told_and_no_others_change() {
    let dims = GdnDims::new(1, 2, 8, 8);
    let streams: Vec<Stream> = (0..4).map(|i| Stream::random(dims, 70, DType::F32, 80 + i)).collect();
    let initial = |i: usize| random(&mut rng(i as u64), DType::F32, dims.state_len(), 0.5);
    for decode in [false, true] {
        let len = if decode { 1 } else { 66 };
        let part = |i: usize, slot_in, slot_out| Part {
            slot_in,
            slot_out,
            fresh: false,
            ..Part::new(&streams[i], 2, 2 + len, 0)
        };
        // Two sequences fork from slot 1; one is inert; one is in place.
        let parts = [part(0, 1, 4), part(1, 1, 6), part(2, -1, 3), part(3, 2, 2)];
        let rig = Rig::cpu(Numerics::F32);
        let mut state = state_of(&rig, dims, 8, initial);
        let before = values(&state);
        let out = run(&rig, &parts, if decode { 4 } else { 0 }, &mut state);
        let after = values(&state);
        let slot = |of: &[f32], i: usize| of[i * dims.state_len()..][..dims.state_len()].to_vec();
        for untouched in [0, 1, 3, 5, 7] {
            assert_eq!(slot(&before, untouched), slot(&after, untouched), "slot {untouched}");
        }
        for (i, from, to) in [(0, 1, 4), (1, 1, 6), (3, 2, 2)] {
            let whole = &streams[i];
            let tokens = |x: &[f32], width: usize| x[2 * width..(2 + len) * width].to_vec();
            let stream = Stream {
                dims,
                conv: tokens(&whole.conv, dims.channels()),
                g: tokens(&whole.g, 2),
                beta: tokens(&whole.beta, 2),
            };
            let mut expected = to_f64(&slot(&before, from));
            let rows = stream.recurrence(&mut expected);
            assert_close(&format!("sequence {i}"), &out[i], &rows, F32_BOUND, 0.0);
            assert_close(&format!("slot {to}"), &slot(&after, to), &expected, F32_BOUND, 0.0);
        }
        assert!(out[2].iter().all(|v| v.to_bits() == 0), "an inert sequence's rows are zero");
    }
}

#[test]
fn slots_that_clash_or_do_not_exist_are_refused_and_nothing_changes() {
    let dims = GdnDims::new(1, 2, 8, 8);
    let rig = Rig::cpu(Numerics::F32);
    let cx = rig.cx();
    let mut state = state_of(&rig, dims, 3, |i| random(&mut rng(i as u64), DType::F32, dims.state_len(), 0.5));
    let before = bytes(&state);
    let conv = tensor(&cx, DType::F32, &[4, dims.channels()], &vec![0.5; 4 * dims.channels()]);
    let gates = || tensor(&cx, DType::F32, &[4, 2], &[0.0; 8]);
    let gates = Gates { g: gates(), beta: gates() };
    let mut out = empty(&cx, DType::F32, &[4, dims.out_width()]);
    let seq = |slot_in, slot_out| Seq { context: 5, len: 2, slot_in, slot_out };
    for (seqs, parts) in [
        ([seq(0, 3), seq(1, 1)], ["sequence 0 writes slot 3", "there are 3"]),
        ([seq(0, 0), seq(3, 1)], ["sequence 1 reads slot 3", "there are 3"]),
        ([seq(0, -1), seq(1, 1)], ["sequence 0 writes slot -1", "there are 3"]),
        ([seq(0, 2), seq(1, 2)], ["sequences 0 and 1", "slot 2"]),
        ([seq(0, 1), seq(1, 2)], ["sequence 0 writes slot 1", "sequence 1 reads"]),
    ] {
        let step = Step::new(&rig.device, &seqs, 0);
        let result = chunked(&cx, &conv, &gates, &mut state, dims, step.batch(), &mut out);
        assert_shape_error(result, "gdn_prefill", &parts);
        assert!(bytes(&state) == before);
    }
}

#[test]
fn bf16_is_the_recurrence_of_its_inputs_rounded_once() {
    for kept in [DType::F32, DType::Bf16] {
        let dims = GdnDims::new(2, 6, 32, 32);
        let stream = Stream::random(dims, 150, DType::Bf16, 31);
        let initial = random(&mut rng(2), kept, dims.state_len(), 0.5);
        let mut expected = to_f64(&initial);
        let out = stream.recurrence(&mut expected);
        let rig = Rig::cpu(numerics(DType::Bf16, kept));
        let mut slot = one_slot(&rig, dims, &initial);
        let got = run_cut(&rig, &stream, &[], false, &mut slot);
        assert_close("out", &got, &out, F32_BOUND, BF16_ROUNDING);
        let rel = if kept == DType::Bf16 { BF16_ROUNDING } else { 0.0 };
        assert_close("state", &values(&slot), &expected, F32_BOUND, rel);
    }
}

#[test]
fn a_bf16_state_drifts_within_a_few_roundings_over_many_steps() {
    let dims = GdnDims::new(1, 2, 32, 32);
    let mut stream = Stream::random(dims, 256, DType::Bf16, 33);
    let mut rng = rng(4);
    stream.g.iter_mut().for_each(|g| *g = -rng.random::<f32>() * 0.1);
    let mut expected = vec![0.0; dims.state_len()];
    let out = stream.recurrence(&mut expected);
    let rig = Rig::cpu(numerics(DType::Bf16, DType::Bf16));
    let mut slot = one_slot(&rig, dims, &vec![0.0; dims.state_len()]);
    let mut got = run(&rig, &[Part::new(&stream, 0, 100, 0)], 0, &mut slot).remove(0);
    got.extend(decode_from(&rig, &stream, 100, &mut slot));
    // Each token rounds the state once; a decay of about 0.95 keeps some 20 roundings alive, and signs are random.
    let largest = expected.iter().fold(0.0_f64, |m, s| m.max(s.abs()));
    assert_close("state", &values(&slot), &expected, 8.0 * BF16_ROUNDING * largest, 0.0);
    let mean_square = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>();
    let error = mean_square(&mut got.iter().zip(&out).map(|(&g, o)| f64::from(g) - o));
    let ratio = error / mean_square(&mut out.iter().copied());
    assert!(ratio < 1e-4, "normalised mean squared error {ratio:e}");
}

#[test]
fn plan_and_cpu_allocate_the_same_for_every_case() {
    for case in cases().into_iter().filter(|c| c.dims.channels() < 1000) {
        assert_plan_counts_the_same(case.name, numerics(case.dtype, case.state), |rig| {
            let (cx, dims) = (rig.cx(), case.dims);
            let rows = case.spans.iter().map(|s| s.1).sum();
            let conv = cx.activation("test", "conv", &[rows, dims.channels()]).unwrap();
            let gate = || cx.alloc("test", "gate", DType::F32, &[rows, dims.value_heads]).unwrap();
            let gates = Gates { g: gate(), beta: gate() };
            let slots = [case.spans.len(), dims.value_heads, dims.key_dim, dims.value_dim];
            let mut state = empty(&cx, case.state, &slots);
            let mut out = cx.activation("test", "out", &[rows, dims.out_width()]).unwrap();
            let step = step_of(&rig.device, &case.spans, 0);
            chunked(&cx, &conv, &gates, &mut state, dims, step.batch(), &mut out).unwrap();
        });
    }
}

#[test]
fn the_workspace_is_bounded_by_a_constant_and_by_its_upper_bound() {
    let spec = plan();
    let spec = spec.spec();
    let dims = GdnDims::new(16, 48, 128, 128);
    let of = |chunks| tactic(spec, dims, DType::Bf16, DType::F32, chunks);
    // Two triangles of ten tiles in bf16, three numbers a row and four more in f32.
    let chunk = 48 * (2 * 10 * 512 + (3 * 64 + 4) * 4);
    assert_eq!(of(3).workspace, 3 * chunk);
    // 8192 tokens are two pieces of 64 chunks, not one of 126 and one of two.
    assert_eq!((of(128).piece_chunks, of(128).workspace), (64, 64 * chunk));
    assert!(of(1_000_000).workspace <= 64 << 20);
    // A state that is rounded where it is kept straddles pieces in f32.
    let carried = 2 * 4 * dims.state_len() as u64;
    assert_eq!(tactic(spec, dims, DType::Bf16, DType::Bf16, 128).workspace, 64 * chunk + carried);
    assert_eq!(tactic(spec, dims, DType::Bf16, DType::Bf16, 126).workspace, 126 * chunk);
    // Token by token, nothing is held.
    assert_eq!(tactic(spec, dims, DType::F32, DType::F32, 128).workspace, 0);
    assert_eq!(tactic(spec, GdnDims::new(16, 48, 64, 128), DType::Bf16, DType::F32, 128).workspace, 0);

    let small = Limits { step_tokens: 700, batch: 9, context: 4096 };
    let large = Limits { step_tokens: 20_000, batch: 33, context: 40_960 };
    let mut rng = rng(8);
    for (limits, state) in [(small, DType::F32), (small, DType::Bf16), (large, DType::F32), (large, DType::Bf16)] {
        let bound = upper_bound(spec, limits, dims, DType::Bf16, state);
        let mut largest = 0;
        for _ in 0..5_000 {
            let (mut left, mut chunks) = (limits.step_tokens, 0);
            for _ in 0..rng.random_range(1..=limits.batch) {
                let len =
                    if rng.random() { rng.random_range(0..=left) } else { left.min(1 + 64 * rng.random_range(0..3)) };
                chunks += len.div_ceil(CHUNK_TOKENS);
                left -= len;
            }
            let workspace = tactic(spec, dims, DType::Bf16, state, chunks).workspace;
            assert!(workspace <= bound, "{chunks} chunks of {state}");
            largest = largest.max(workspace);
        }
        assert!(largest * 10 >= bound * 9, "{state}: the bound {bound} is far above any step's {largest}");
        assert_eq!(upper_bound(spec, limits, dims, DType::F32, state), 0);
    }
}

#[test]
fn cost_counts_the_chunks_and_the_state() {
    let rig = Rig::plan(Numerics::BF16);
    let dims = GdnDims::new(16, 48, 128, 128);
    let full = step_of(&rig.device, &[(0, 64), (64, 64)], 0);
    let c = cost(dims, full.batch().spans, DType::Bf16, DType::F32);
    // 163,840 operations per token and head at 64 and 128; a fresh state is written, the other read and written.
    assert_eq!(c.flops, 163_840 * 128 * 48);
    assert_eq!(c.resident_bytes, 3 * 48 * 128 * 128 * 4);
    assert_eq!(c.activation_bytes, 128 * (2 * 2 * 16 * 128 + 2 * 2 * 48 * 128 + 8 * 48));
}

#[test]
fn operands_that_disagree_are_named() {
    let rig = Rig::cpu(Numerics::F32);
    let cx = rig.cx();
    let dims = GdnDims::new(1, 2, 4, 8);
    let (rows, spans) = (3, [(0, 3)]);
    let step = step_of(&rig.device, &spans, 0);
    let f32s = |shape: &[usize]| tensor(&cx, DType::F32, shape, &vec![0.5; shape.iter().product()]);
    let check =
        |dims: GdnDims, conv: [usize; 2], gate: [usize; 2], state: [usize; 4], out: [usize; 2], parts: &[&str]| {
            let (gates, mut state, mut out) =
                (Gates { g: f32s(&gate), beta: f32s(&[rows, 2]) }, f32s(&state), f32s(&out));
            let result = chunked(&cx, &f32s(&conv), &gates, &mut state, dims, step.batch(), &mut out);
            assert_shape_error(result, "gdn_prefill", parts);
        };
    let (conv, gate, state, out) = ([rows, 24], [rows, 2], [1, 2, 4, 8], [rows, 16]);
    check(dims, [rows, 23], gate, state, out, &["conv", "[3, 23]", "[3, 24]"]);
    check(dims, conv, [rows, 1], state, out, &["g is", "[3, 1]", "[3, 2]"]);
    check(dims, conv, gate, [1, 2, 8, 4], out, &["state", "[1, 2, 8, 4]", "[1, 2, 4, 8]"]);
    check(dims, conv, gate, state, [rows, 15], &["out", "[3, 15]", "[3, 16]"]);
    check(GdnDims::new(2, 3, 4, 8), conv, gate, state, out, &["value_heads a multiple of key_heads"]);
    check(GdnDims::new(0, 2, 4, 8), conv, gate, state, out, &["must be positive"]);
    check(dims, [4, 24], [4, 2], state, [4, 16], &["beta is", "[3, 2]"]);

    let gates = || Gates { g: f32s(&[4, 2]), beta: f32s(&[4, 2]) };
    let (mut kept, mut four) = (f32s(&state), f32s(&[4, 16]));
    let result = chunked(&cx, &f32s(&[4, 24]), &gates(), &mut kept, dims, step.batch(), &mut four);
    assert_shape_error(result, "gdn_prefill", &["batch has 3 rows", "operands have 4"]);
    let more = Batch { decodes: 2, ..step.batch() };
    let result = chunked(&cx, &f32s(&[3, 24]), &gates(), &mut kept, dims, more, &mut four);
    assert_shape_error(result, "gdn_prefill", &[]);
    let mut bf16_state = empty(&cx, DType::Bf16, &state);
    let gates = Gates { g: f32s(&[3, 2]), beta: f32s(&[3, 2]) };
    let result = chunked(&cx, &f32s(&[3, 24]), &gates, &mut bf16_state, dims, step.batch(), &mut f32s(&[3, 16]));
    assert_shape_error(result, "gdn_prefill", &["state is bf16", "must be f32"]);
}

#[test]
fn the_meter_sees_one_call() {
    let rig = Rig::plan(Numerics::F32);
    let cx = rig.cx().at(Layer::Gdn);
    let dims = GdnDims::new(1, 2, 4, 8);
    let step = step_of(&rig.device, &[(0, 5)], 0);
    let gates = Gates { g: empty(&cx, DType::F32, &[5, 2]), beta: empty(&cx, DType::F32, &[5, 2]) };
    let (conv, mut out) = (empty(&cx, DType::F32, &[5, 24]), empty(&cx, DType::F32, &[5, 16]));
    let mut state = empty(&cx, DType::F32, &[1, 2, 4, 8]);
    chunked(&cx, &conv, &gates, &mut state, dims, step.batch(), &mut out).unwrap();
    let metered = rig.meter.take();
    assert_eq!((metered.len(), metered[0].op, metered[0].calls), (1, "gdn_prefill", 1));
    assert_eq!(metered[0].cost, cost(dims, step.batch().spans, DType::F32, DType::F32));
}
