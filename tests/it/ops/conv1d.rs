//! The short convolution against its sum in float64 and against transformers' (`gdn_ops`).

use highwater::num::DType;
use highwater::ops::Numerics;
use highwater::ops::conv1d::{Case, cases, causal, cost};
use highwater::tensor::Tensor;

use super::{
    Fixture, Rig, Seq, Step, assert_close, assert_plan_counts_the_same, assert_shape_error, bytes, empty, numerics,
    random, rng, round, step_of, tensor, values,
};

const BOUND: f64 = 1e-5;

/// silu of the sum over one channel's history (oldest first), rounded between and after as `dtype` is.
fn closed_form(history: &[f32], w: &[f32], dtype: DType) -> f64 {
    let inputs = &history[history.len() - w.len()..];
    let sum: f64 = inputs.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
    let sum = if dtype == DType::Bf16 { f64::from(round(dtype, sum as f32)) } else { sum };
    sum / (1.0 + (-sum).exp())
}

/// `[rows, channels]` as the column `c`, after `before`.
fn column(before: &[f32], rows: &[f32], channels: usize, c: usize) -> Vec<f32> {
    before.iter().copied().chain(rows.iter().skip(c).step_by(channels).copied()).collect()
}

/// The sum is rounded to bf16 before SiLU, so a sum next to a tie may land one unit (2^-7) away; SiLU's slope is at
/// most 1.1, and the store rounds once more.
fn relative_bound(dtype: DType) -> f64 {
    if dtype == DType::Bf16 { 1.1 / 128.0 + 1.0 / 256.0 } else { 1e-6 }
}

#[test]
fn every_case_equals_the_sum_in_float64_and_keeps_the_last_inputs() {
    for Case { name, channels, extra, taps, spans, dtype } in cases() {
        let rig = Rig::cpu(numerics(dtype, DType::F32));
        let cx = rig.cx();
        let mut rng = rng(11);
        let kept = taps - 1;
        let rows: usize = spans.iter().map(|s| s.1).sum();
        let fused = random(&mut rng, dtype, rows * (channels + extra), 1.0);
        let w = random(&mut rng, DType::F32, channels * taps, 0.5);
        let before = random(&mut rng, dtype, spans.len() * channels * kept, 1.0);
        let x = tensor(&cx, dtype, &[rows, channels + extra], &fused);
        let weight = tensor(&cx, DType::F32, &[channels, taps], &w);
        let mut state = tensor(&cx, dtype, &[spans.len(), channels, kept], &before);
        let step = step_of(&rig.device, &spans, 0);
        let y = causal(&cx, x.columns(0, channels), &weight, &mut state, step.batch()).unwrap();
        let (y, after) = (values(&y), values(&state));
        let mut start = 0;
        for (i, &(context, len)) in spans.iter().enumerate() {
            for c in 0..channels {
                let slot = (i * channels + c) * kept;
                let old = if context == 0 { vec![0.0; kept] } else { before[slot..][..kept].to_vec() };
                let own = &fused[start * (channels + extra)..(start + len) * (channels + extra)];
                let history = column(&old, own, channels + extra, c);
                let expected: Vec<f64> =
                    (0..len).map(|t| closed_form(&history[..=kept + t], &w[c * taps..][..taps], dtype)).collect();
                let got: Vec<f32> = (0..len).map(|t| y[(start + t) * channels + c]).collect();
                assert_close(&format!("{name} {i}.{c}"), &got, &expected, BOUND, relative_bound(dtype));
                assert_eq!(after[slot..][..kept], history[len..], "{name}: state of sequence {i}, channel {c}");
            }
            start += len;
        }
    }
}

#[test]
fn the_sum_is_rounded_before_silu() {
    let rig = Rig::cpu(Numerics::BF16);
    let cx = rig.cx();
    let (channels, rows) = (16, 64);
    let x = random(&mut rng(41), DType::Bf16, rows * channels, 2.0);
    let w = random(&mut rng(42), DType::F32, channels * 4, 1.0);
    let weight = tensor(&cx, DType::F32, &[channels, 4], &w);
    let mut state = empty(&cx, DType::Bf16, &[1, channels, 3]);
    let step = step_of(&rig.device, &[(0, rows)], 0);
    let xt = tensor(&cx, DType::Bf16, &[rows, channels], &x);
    let y = values(&causal(&cx, xt.view(), &weight, &mut state, step.batch()).unwrap());
    let equal = |between: DType| -> usize {
        let expected = (0..rows * channels).map(|i| {
            let history = column(&[0.0; 3], &x, channels, i % channels);
            closed_form(&history[..4 + i / channels], &w[i % channels * 4..][..4], between)
        });
        expected.zip(&y).filter(|(e, y)| round(DType::Bf16, *e as f32).to_bits() == y.to_bits()).count()
    };
    let (twice, once) = (equal(DType::Bf16), equal(DType::F32));
    assert!(twice >= 1015 && once < 900, "of 1024 values {twice} as rounded twice, {once} as rounded once");
}

/// Transposes `[C, T]` to rows.
fn rows_of(x: &[f32], channels: usize) -> Vec<f32> {
    let tokens = x.len() / channels;
    (0..tokens).flat_map(|t| (0..channels).map(move |c| x[c * tokens + t])).collect()
}

/// The last three of each channel's four.
fn last_three(x: &[f32]) -> Vec<f32> {
    x.chunks_exact(4).flat_map(|c| c[1..].to_vec()).collect()
}

#[test]
fn equals_transformers_for_a_sequence_and_for_one_cached_step() {
    let fixture = Fixture::load("gdn_ops/ops.safetensors");
    let get = |name: &str| fixture.f32(&format!("conv/{name}"));
    let rig = Rig::cpu(Numerics::F32);
    let cx = rig.cx();
    let w = tensor(&cx, DType::F32, &[12, 4], &get("w"));
    let f64s = |x: Vec<f32>| x.into_iter().map(f64::from).collect::<Vec<_>>();

    let x = tensor(&cx, DType::F32, &[9, 12], &rows_of(&get("x"), 12));
    let mut state = empty(&cx, DType::F32, &[1, 12, 3]);
    let step = step_of(&rig.device, &[(0, 9)], 0);
    let y = causal(&cx, x.view(), &w, &mut state, step.batch()).unwrap();
    assert_close("sequence", &values(&y), &f64s(rows_of(&get("out_silu"), 12)), BOUND, 0.0);

    let x = tensor(&cx, DType::F32, &[1, 12], &get("x_step"));
    let mut state = tensor(&cx, DType::F32, &[1, 12, 3], &last_three(&get("state_in")));
    let step = step_of(&rig.device, &[(9, 1)], 1);
    let y = causal(&cx, x.view(), &w, &mut state, step.batch()).unwrap();
    assert_close("step", &values(&y), &f64s(get("step_out_silu")), BOUND, 0.0);
    assert_eq!(values(&state), last_three(&get("state_out")));
}

/// Runs `rows` (of `channels`) as one sequence in slot 0, cut at `cuts`; gives the outputs' bits and the state's bytes.
fn in_cuts(rig: &Rig, rows: &[f32], channels: usize, w: &Tensor, cuts: &[usize]) -> (Vec<u32>, Vec<u8>) {
    let cx = rig.cx();
    let dtype = rig.numerics.activations;
    let mut state = empty(&cx, dtype, &[1, channels, 3]);
    let (mut from, mut out) = (0, Vec::new());
    for &to in cuts {
        let part = &rows[from * channels..to * channels];
        let x = tensor(&cx, dtype, &[to - from, channels], part);
        let decode = usize::from(from > 0 && to == from + 1);
        let step = step_of(&rig.device, &[(from, to - from)], decode);
        let y = causal(&cx, x.view(), w, &mut state, step.batch()).unwrap();
        out.extend(values(&y).iter().map(|v| v.to_bits()));
        from = to;
    }
    (out, bytes(&state))
}

#[test]
fn prompts_of_one_two_and_three_tokens_then_decodes_give_the_bits_of_one_shot() {
    for dtype in [DType::F32, DType::Bf16] {
        let rig = Rig::cpu(numerics(dtype, DType::F32));
        let channels = 5;
        let rows = random(&mut rng(21), dtype, 8 * channels, 1.0);
        let w = tensor(&rig.cx(), DType::F32, &[channels, 4], &random(&mut rng(22), DType::F32, channels * 4, 0.5));
        let whole = in_cuts(&rig, &rows, channels, &w, &[8]);
        for prompt in 1..=3 {
            let cuts: Vec<usize> = (prompt..=8).collect();
            assert!(whole == in_cuts(&rig, &rows, channels, &w, &cuts), "a prompt of {prompt}");
        }
        assert!(whole == in_cuts(&rig, &rows, channels, &w, &[1, 3, 6, 8]));
    }
}

#[test]
fn slots_are_read_and_written_as_told_and_an_inert_sequence_is_zero() {
    let rig = Rig::cpu(Numerics::F32);
    let cx = rig.cx();
    let before = random(&mut rng(1), DType::F32, 6 * 2 * 3, 1.0);
    let mut state = tensor(&cx, DType::F32, &[6, 2, 3], &before);
    let x = random(&mut rng(2), DType::F32, 4 * 2, 1.0);
    let w = tensor(&cx, DType::F32, &[2, 4], &random(&mut rng(3), DType::F32, 8, 1.0));
    let seqs = [
        Seq { context: 4, len: 1, slot_in: 1, slot_out: 3 },
        Seq { context: 4, len: 1, slot_in: -1, slot_out: 0 },
        Seq { context: 0, len: 2, slot_in: 5, slot_out: 5 },
    ];
    let step = Step::new(&rig.device, &seqs, 2);
    let y = causal(&cx, tensor(&cx, DType::F32, &[4, 2], &x).view(), &w, &mut state, step.batch()).unwrap();
    assert!(values(&y)[2..4].iter().all(|v| v.to_bits() == 0));
    assert!(values(&y).iter().all(|v| v.is_finite()));
    let after = values(&state);
    for slot in [0, 1, 2, 4] {
        assert_eq!(before[slot * 6..][..6], after[slot * 6..][..6], "slot {slot}");
    }
    assert_eq!(after[18..24], [before[7], before[8], x[0], before[10], before[11], x[1]]);
    assert_eq!(after[30..36], [0.0, x[4], x[6], 0.0, x[5], x[7]]);

    let clash = [Seq::new(4, 1, 2), Seq::new(4, 1, 2)];
    let step = Step::new(&rig.device, &clash, 2);
    let two = tensor(&cx, DType::F32, &[2, 2], &[0.0; 4]);
    let result = causal(&cx, two.view(), &w, &mut state, step.batch());
    assert_shape_error(result, "conv1d", &["sequences 0 and 1 both write slot 2"]);
    assert_eq!(values(&state), after);
}

#[test]
fn rows_do_not_depend_on_the_batch() {
    let rig = Rig::cpu(Numerics::BF16);
    let cx = rig.cx();
    let (channels, spans) = (33, [(7, 1), (0, 2), (3, 5)]);
    let x = random(&mut rng(5), DType::Bf16, 8 * channels, 1.0);
    let before = random(&mut rng(6), DType::Bf16, 3 * channels * 3, 1.0);
    let w = tensor(&cx, DType::F32, &[channels, 4], &random(&mut rng(7), DType::F32, channels * 4, 0.5));
    let run = |seqs: &[Seq], rows: &[f32]| {
        let mut state = tensor(&cx, DType::Bf16, &[3, channels, 3], &before);
        let x = tensor(&cx, DType::Bf16, &[rows.len() / channels, channels], rows);
        let step = Step::new(&rig.device, seqs, 0);
        let y = causal(&cx, x.view(), &w, &mut state, step.batch()).unwrap();
        (values(&y), values(&state))
    };
    let seqs: Vec<Seq> = spans.iter().enumerate().map(|(i, &(c, n))| Seq::new(c, n, i as i32)).collect();
    let (y, state) = run(&seqs, &x);
    let mut start = 0;
    for (i, seq) in seqs.iter().enumerate() {
        let rows = start * channels..(start + seq.len) * channels;
        start += seq.len;
        let (alone, alone_state) = run(&[*seq], &x[rows.clone()]);
        assert_eq!(alone, y[rows]);
        let slot = i * channels * 3..(i + 1) * channels * 3;
        assert_eq!(alone_state[slot.clone()], state[slot]);
    }
}

#[test]
fn plan_and_cpu_allocate_the_same_and_the_meter_agrees_with_the_cost() {
    for case in cases().into_iter().filter(|c| c.channels < 1000) {
        assert_plan_counts_the_same(case.name, numerics(case.dtype, DType::F32), |rig| {
            let cx = rig.cx();
            let rows = case.spans.iter().map(|s| s.1).sum();
            let x = cx.activation("test", "x", &[rows, case.channels + case.extra]).unwrap();
            let w = empty(&cx, DType::F32, &[case.channels, case.taps]);
            let mut state = empty(&cx, case.dtype, &[case.spans.len(), case.channels, case.taps - 1]);
            let step = step_of(&rig.device, &case.spans, 0);
            let y = causal(&cx, x.columns(0, case.channels), &w, &mut state, step.batch()).unwrap();
            assert_eq!(y.shape(), [rows, case.channels]);
            let metered = rig.meter.take();
            assert_eq!((metered.len(), metered[0].op), (1, "conv1d"));
            assert_eq!(metered[0].cost, cost(step.batch().spans, case.channels, case.taps, case.dtype));
        });
    }
}

#[test]
fn operands_that_disagree_are_named() {
    let rig = Rig::cpu(Numerics::F32);
    let cx = rig.cx();
    let f32s = |shape: &[usize]| tensor(&cx, DType::F32, shape, &vec![0.5; shape.iter().product()]);
    let (x, w, mut state) = (f32s(&[3, 6]), f32s(&[4, 4]), f32s(&[1, 4, 3]));
    let step = step_of(&rig.device, &[(0, 3)], 0);
    let check = |x: highwater::tensor::View, w: &Tensor, state: &mut Tensor, parts: &[&str]| {
        assert_shape_error(causal(&cx, x, w, state, step.batch()), "conv1d", parts);
    };
    check(x.columns(0, 5), &w, &mut state, &["x is", "[3, 5]", "[3, 4]"]);
    check(x.columns(3, 4), &w, &mut state, &["from column 3 of 6"]);
    check(x.columns(usize::MAX, 4), &w, &mut state, &["x is"]);
    check(x.columns(0, 4), &f32s(&[4, 1]), &mut state, &["[4, 1]", "2 taps or more"]);
    check(x.columns(0, 4), &w, &mut f32s(&[1, 4, 4]), &["state", "[1, 4, 4]", "[1, 4, 3]"]);
    let (four_rows, bf16) = (f32s(&[4, 4]), empty(&cx, DType::Bf16, &[3, 4]));
    check(four_rows.view(), &w, &mut state, &["batch has 3 rows", "operands have 4"]);
    check(bf16.view(), &w, &mut state, &["x is bf16", "must be f32"]);
}
