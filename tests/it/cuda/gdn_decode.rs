//! One token of the delta rule: the card sums over key_dim in lanes and warps, the CPU arm in index order, both in f32.

use highwater::num::DType;
use highwater::ops::activation::Gates;
use highwater::ops::gdn_decode::{cases, cost, recurrent};
use highwater::ops::gdn_prefill::GdnDims;
use highwater::ops::{Numerics, Span};

use super::{Pair, assert_near, assert_same};
use crate::ops::delta_rule::{Part, Stream, run, state_of};
use crate::ops::{Rig, Seq, Step, numerics, random, rng, tensor, values};

/// Sums of 128 products in another order, and a few roundings: some units of 2^-24, of the whole and of the largest.
pub(super) const F32_BOUND: f64 = 1e-5;
/// A stored bf16 differs by its last place, 2^-8 of the value, where the f32 before it falls on the other side of a tie:
/// seldom, so the norm sees little of it.
const BF16_BOUND: f64 = 1e-3;
const BF16_WORST: f64 = 1.0 / 128.0;

/// The bounds of values stored as `dtype`.
fn bounds(dtype: DType) -> (f64, f64) {
    if dtype == DType::Bf16 { (BF16_BOUND, BF16_WORST) } else { (F32_BOUND, F32_BOUND) }
}

#[track_caller]
fn compare(what: &str, dims: GdnDims, act: DType, kept: DType, slots: usize, parts: &[Part], work: u64) {
    let Some(pair) = Pair::new(what, numerics(act, kept), work) else { return };
    let (cpu, cuda) = pair.run(|rig| {
        let mut state = state_of(rig, dims, slots, |i| random(&mut rng(900 + i as u64), kept, dims.state_len(), 0.5));
        let out = run(rig, parts, parts.len(), &mut state);
        (out, values(&state))
    });
    for (i, (cuda, cpu)) in cuda.0.iter().zip(&cpu.0).enumerate() {
        let (norm, worst) = bounds(act);
        assert_near(&format!("{what}: row {i}"), cuda, cpu, norm, worst);
    }
    for (i, (cuda, cpu)) in cuda.1.chunks(dims.state_len()).zip(cpu.1.chunks(dims.state_len())).enumerate() {
        let what = format!("{what}: slot {i}");
        if parts.iter().any(|p| p.slot_in >= 0 && p.slot_out == i as i32) {
            let (norm, worst) = bounds(kept);
            assert_near(&what, cuda, cpu, norm, worst);
        } else {
            assert_same(&what, cuda, cpu);
        }
    }
}

#[test]
fn every_case_equals_the_cpu_arm() {
    for case in cases() {
        let streams: Vec<Stream> =
            (0..case.batch).map(|i| Stream::random(case.dims, 3, case.dtype, 40 + i as u64)).collect();
        let parts: Vec<Part> = streams.iter().enumerate().map(|(i, s)| Part::new(s, 2, 3, i as i32)).collect();
        let spans = vec![Span { start: 0, len: 1, context: 2 }; case.batch];
        let work = cost(case.dims, &spans, case.dtype, case.state).flops / 2;
        compare(case.name, case.dims, case.dtype, case.state, case.batch, &parts, work);
    }
}

/// In place, apart, two from one slot, fresh, inert: on the kernels for heads of 128 and for any heads, for every type.
#[test]
fn every_kernel_reads_and_writes_the_slots_it_is_told() {
    for dims in [GdnDims::new(1, 3, 128, 128), GdnDims::new(2, 4, 40, 9), GdnDims::new(1, 2, 128, 64)] {
        for act in [DType::F32, DType::Bf16] {
            for kept in [DType::F32, DType::Bf16] {
                let streams: Vec<Stream> = (0..6).map(|i| Stream::random(dims, 4, act, 60 + i)).collect();
                let part = |i: usize, slot_in, slot_out, fresh| Part {
                    slot_in,
                    slot_out,
                    fresh,
                    ..Part::new(&streams[i], 3, 4, 0)
                };
                let parts = [
                    part(0, 0, 0, false),
                    part(1, 1, 3, false),
                    part(2, -1, 2, false),
                    part(3, 1, 5, false),
                    part(4, 6, 6, true),
                    part(5, -1, -1, false),
                ];
                compare(&format!("{dims:?}, {act}, state {kept}"), dims, act, kept, 7, &parts, 1);
            }
        }
    }
}

#[test]
fn extreme_gates_equal_the_cpu_arm() {
    for dims in [GdnDims::new(1, 1, 128, 128), GdnDims::new(1, 1, 24, 10)] {
        for g in [0.0, -1e-6, -77.0, -104.0, f32::NEG_INFINITY] {
            for beta in [0.0, 1.0] {
                let mut stream = Stream::random(dims, 2, DType::F32, 5);
                stream.g.fill(g);
                stream.beta.fill(beta);
                let what = format!("{dims:?}, g {g}, beta {beta}");
                compare(&what, dims, DType::F32, DType::F32, 1, &[Part::new(&stream, 1, 2, 0)], 1);
            }
        }
        let mut zeros = Stream::random(dims, 2, DType::F32, 6);
        zeros.conv.fill(0.0);
        compare("zero rows", dims, DType::F32, DType::F32, 1, &[Part::new(&zeros, 1, 2, 0)], 1);
    }
}

/// The CPU arm refuses slots that do not exist; on a card the numbers come from a graph's inputs, and the row is NaN.
#[test]
fn a_slot_that_does_not_exist_gives_a_row_of_nan_and_changes_nothing() {
    for dims in [GdnDims::new(1, 2, 128, 128), GdnDims::new(1, 2, 16, 20)] {
        let Some(pair) = Pair::new("no such slot", Numerics::F32, 1) else { return };
        let streams: Vec<Stream> = (0..4).map(|i| Stream::random(dims, 2, DType::F32, i)).collect();
        let part = |i: usize, slot_in, slot_out| Part { slot_in, slot_out, ..Part::new(&streams[i], 1, 2, 0) };
        let parts = [part(0, 3, 0), part(1, 1, 3), part(2, 2, 2), part(3, 1, -1)];
        let mut state =
            state_of(&pair.cuda, dims, 3, |i| random(&mut rng(i as u64), DType::F32, dims.state_len(), 0.5));
        let before = values(&state);
        let out = run(&pair.cuda, &parts, 4, &mut state);
        let after = values(&state);
        for i in [0, 1, 3] {
            assert!(out[i].iter().all(|v| v.is_nan()), "row {i}");
        }
        assert!(out[2].iter().all(|v| v.is_finite()));
        let two = 2 * dims.state_len();
        assert_same("slots 0 and 1", &after[..two], &before[..two]);
        assert!(after[two..] != before[two..]);
        assert!(pair.cuda.device.take_overruns().is_empty());
    }
}

#[test]
fn a_row_does_not_depend_on_its_company() {
    for dims in [GdnDims::new(1, 2, 128, 128), GdnDims::new(1, 2, 24, 20)] {
        let Some(pair) = Pair::new("company", Numerics::BF16, 1) else { return };
        let streams: Vec<Stream> = (0..5).map(|i| Stream::random(dims, 2, DType::Bf16, 70 + i)).collect();
        let parts: Vec<Part> = (0..5).map(|i| Part::new(&streams[i], 1, 2, 4 - i as i32)).collect();
        let step = |parts: &[Part]| {
            let rig = &pair.cuda;
            let mut state = state_of(rig, dims, 5, |i| random(&mut rng(i as u64), DType::F32, dims.state_len(), 0.5));
            let out = run(rig, parts, parts.len(), &mut state);
            (out, values(&state))
        };
        let (rows, states) = step(&parts);
        for (i, part) in parts.iter().enumerate() {
            let (alone, state) = step(&[*part]);
            assert_same(&format!("row {i}"), &alone[0], &rows[i]);
            let slot = part.slot_out as usize * dims.state_len()..(part.slot_out as usize + 1) * dims.state_len();
            assert_same(&format!("state {i}"), &state[slot.clone()], &states[slot]);
        }
    }
}

/// A captured step reads contexts and slots when it is replayed.
#[test]
fn a_captured_step_runs_what_the_inputs_say_at_its_replay() {
    let dims = GdnDims::new(1, 2, 128, 128);
    let Some(pair) = Pair::new("captured", Numerics::F32, 1) else { return };
    let stream = Stream::random(dims, 3, DType::F32, 8);
    let live = [Seq::new(8, 1, 2), Seq::new(0, 1, 0), Seq { context: 3, len: 1, slot_in: 3, slot_out: 1 }];
    let (cpu, cuda) = pair.run(|rig: &Rig| {
        let cx = rig.cx();
        let conv = tensor(&cx, DType::F32, &[3, dims.channels()], &stream.conv);
        let gates = Gates {
            g: tensor(&cx, DType::F32, &[3, 2], &stream.g),
            beta: tensor(&cx, DType::F32, &[3, 2], &stream.beta),
        };
        let mut state = state_of(rig, dims, 4, |i| random(&mut rng(i as u64), DType::F32, dims.state_len(), 0.5));
        let mut out = cx.activation("test", "out", &[3, dims.out_width()]).unwrap();
        if let Some(cuda) = rig.device.as_cuda() {
            let mut step = Step::new(&rig.device, &[Seq::new(0, 1, -1); 3], 3);
            recurrent(&cx, &conv, &gates, &mut state, dims, step.batch(), &mut out).unwrap();
            assert!(values(&out).iter().all(|v| v.to_bits() == 0), "inert rows are zero");
            let graph =
                cuda.capture(|| recurrent(&cx, &conv, &gates, &mut state, dims, step.batch(), &mut out)).unwrap();
            step.upload(&live);
            cuda.replay(&graph).unwrap();
        } else {
            let step = Step::new(&rig.device, &live, 3);
            recurrent(&cx, &conv, &gates, &mut state, dims, step.batch(), &mut out).unwrap();
        }
        (values(&out), values(&state))
    });
    assert_near("rows", &cuda.0, &cpu.0, F32_BOUND, F32_BOUND);
    assert_near("states", &cuda.1, &cpu.1, F32_BOUND, F32_BOUND);
}
