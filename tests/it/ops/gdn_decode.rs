//! The one-token delta rule; its equality with the recurrence over whole streams is tested in `gdn_prefill`.

use highwater::num::DType;
use highwater::ops::activation::Gates;
use highwater::ops::gdn_decode::{Case, cases, cost, recurrent};
use highwater::ops::gdn_prefill::GdnDims;
use highwater::ops::{Batch, Numerics};

use super::delta_rule::{Part, Stream, run, state_of};
use super::{
    Rig, Seq, Step, assert_close, assert_plan_counts_the_same, assert_shape_error, bytes, empty, numerics, random, rng,
    step_of, tensor, values,
};

/// What one token may be off by in f32; bf16 adds half a unit in its last place.
const BOUND: f64 = 1e-5;
const BF16_ROUNDING: f64 = 1.0 / 256.0;

fn rounding(dtype: DType) -> f64 {
    if dtype == DType::Bf16 { BF16_ROUNDING } else { 0.0 }
}

#[test]
fn every_case_equals_the_recurrence() {
    for Case { name, dims, batch, dtype, state } in cases() {
        // One sequence of a large case is enough: the others are the same code on other rows.
        let batch = if dims.state_len() > 100_000 { 1 } else { batch };
        let rig = Rig::cpu(numerics(dtype, state));
        let streams: Vec<Stream> = (0..batch).map(|i| Stream::random(dims, 1, dtype, 7 + i as u64)).collect();
        let parts: Vec<Part> =
            streams.iter().enumerate().map(|(i, s)| Part::new(s, 0, 1, (batch - 1 - i) as i32).continued()).collect();
        let initial = |slot: usize| random(&mut rng(slot as u64), state, dims.state_len(), 0.3);
        let mut slots = state_of(&rig, dims, batch, initial);
        let out = run(&rig, &parts, batch, &mut slots);
        let after = values(&slots);
        for (i, part) in parts.iter().enumerate() {
            let slot = part.slot_in as usize;
            let mut expected: Vec<f64> = initial(slot).into_iter().map(f64::from).collect();
            let rows = streams[i].recurrence(&mut expected);
            assert_close(name, &out[i], &rows, BOUND, rounding(dtype));
            assert_close(
                name,
                &after[slot * dims.state_len()..][..dims.state_len()],
                &expected,
                BOUND,
                rounding(state),
            );
        }
    }
}

#[test]
fn a_fresh_sequence_counts_its_slot_as_zero() {
    let dims = GdnDims::new(1, 2, 8, 8);
    let stream = Stream::random(dims, 1, DType::F32, 1);
    let rig = Rig::cpu(Numerics::F32);
    let mut slots = state_of(&rig, dims, 1, |_| vec![f32::NAN; dims.state_len()]);
    let out = run(&rig, &[Part::new(&stream, 0, 1, 0)], 1, &mut slots);
    let mut state = vec![0.0; dims.state_len()];
    assert_close("out", &out[0], &stream.recurrence(&mut state), BOUND, 0.0);
    assert_close("state", &values(&slots), &state, BOUND, 0.0);
}

#[test]
fn rows_of_prefills_are_not_written() {
    let dims = GdnDims::new(1, 1, 4, 4);
    let rig = Rig::cpu(Numerics::F32);
    let cx = rig.cx();
    let step = Step::new(&rig.device, &[Seq::new(5, 1, 0), Seq::new(0, 3, 1)], 1);
    let conv = tensor(&cx, DType::F32, &[4, 12], &random(&mut rng(1), DType::F32, 48, 1.0));
    let gates =
        Gates { g: tensor(&cx, DType::F32, &[4, 1], &[-0.1; 4]), beta: tensor(&cx, DType::F32, &[4, 1], &[0.5; 4]) };
    let mut state = state_of(&rig, dims, 2, |_| vec![0.25; 16]);
    let before = bytes(&state);
    let mut out = tensor(&cx, DType::F32, &[4, 4], &[9.0; 16]);
    recurrent(&cx, &conv, &gates, &mut state, dims, step.batch(), &mut out).unwrap();
    assert!(values(&out)[..4].iter().all(|v| v.abs() < 5.0));
    assert_eq!(values(&out)[4..], [9.0; 12]);
    assert!(bytes(&state)[64..] == before[64..]);
    assert!(bytes(&state)[..64] != before[..64]);
}

#[test]
fn plan_and_cpu_allocate_the_same_and_the_meter_agrees_with_the_cost() {
    for case in cases().into_iter().filter(|c| c.dims.state_len() < 100_000) {
        assert_plan_counts_the_same(case.name, numerics(case.dtype, case.state), |rig| {
            let (cx, dims, rows) = (rig.cx(), case.dims, case.batch);
            let conv = cx.activation("test", "conv", &[rows, dims.channels()]).unwrap();
            let gate = || cx.alloc("test", "gate", DType::F32, &[rows, dims.value_heads]).unwrap();
            let gates = Gates { g: gate(), beta: gate() };
            let mut state = empty(&cx, case.state, &[rows, dims.value_heads, dims.key_dim, dims.value_dim]);
            let mut out = cx.activation("test", "out", &[rows, dims.out_width()]).unwrap();
            let step = step_of(&rig.device, &vec![(9, 1); rows], rows);
            recurrent(&cx, &conv, &gates, &mut state, dims, step.batch(), &mut out).unwrap();
            let metered = rig.meter.take();
            assert_eq!((metered.len(), metered[0].op), (1, "gdn_decode"));
            assert_eq!(metered[0].cost, cost(dims, step.batch().spans, case.dtype, case.state));
        });
    }
}

#[test]
fn cost_reads_and_writes_the_state_once() {
    let rig = Rig::plan(Numerics::BF16);
    let step = step_of(&rig.device, &[(3, 1), (4, 1)], 2);
    let c = cost(GdnDims::new(16, 48, 128, 128), step.batch().spans, DType::Bf16, DType::F32);
    assert_eq!(c.resident_bytes, 2 * 2 * 48 * 65_536);
    assert_eq!(c.flops, 2 * 48 * 128 * 128 * 7);
}

#[test]
fn operands_that_disagree_are_named() {
    let rig = Rig::cpu(Numerics::F32);
    let cx = rig.cx();
    let dims = GdnDims::new(1, 2, 4, 8);
    let f32s = |shape: &[usize]| tensor(&cx, DType::F32, shape, &vec![0.5; shape.iter().product()]);
    let gates = Gates { g: f32s(&[2, 2]), beta: f32s(&[2, 2]) };
    let (conv, mut state, mut out) = (f32s(&[2, 24]), f32s(&[2, 2, 4, 8]), f32s(&[2, 16]));
    let step = step_of(&rig.device, &[(0, 2)], 0);
    // A decode of two rows.
    let two_rows = Batch { decodes: 1, ..step.batch() };
    let result = recurrent(&cx, &conv, &gates, &mut state, dims, two_rows, &mut out);
    assert_shape_error(result, "gdn_decode", &["span 0", "len: 2"]);
    let result = recurrent(&cx, &f32s(&[2, 25]), &gates, &mut state, dims, step.batch(), &mut out);
    assert_shape_error(result, "gdn_decode", &["conv", "[2, 25]", "[2, 24]"]);
    let step = Step::new(&rig.device, &[Seq::new(1, 1, 0), Seq::new(1, 1, 2)], 2);
    let result = recurrent(&cx, &conv, &gates, &mut state, dims, step.batch(), &mut out);
    assert_shape_error(result, "gdn_decode", &["sequence 1 reads slot 2", "there are 2"]);
}
