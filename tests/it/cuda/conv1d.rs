//! The short convolution: taps are summed as the CPU arm sums them, so only SiLU differs, and the state not at all.

use highwater::num::DType;
use highwater::ops::Numerics;
use highwater::ops::conv1d::{Case, cases, causal};

use super::norm::assert_rounded;
use super::{Pair, assert_same};
use crate::ops::{Rig, Seq, Step, bytes, numerics, random, rng, step_of, tensor, values};

/// SiLU of the same rounded sum: an exponential to two units, a sum, a division and a product.
const RELATIVE: f64 = 6e-7;

struct Shape {
    channels: usize,
    extra: usize,
    taps: usize,
    dtype: DType,
    slots: usize,
}

#[track_caller]
fn same(what: &str, shape: &Shape, seed: u64, step: impl Fn(&Rig) -> Step) {
    let &Shape { channels, extra, taps, dtype, slots } = shape;
    let Some(pair) = Pair::new(what, numerics(dtype, DType::F32), 1) else { return };
    let (cpu, cuda) = pair.run(|rig| {
        let cx = rig.cx();
        let step = step(rig);
        let rows = step.batch().tokens();
        let mut rng = rng(seed);
        let x = random(&mut rng, dtype, rows * (channels + extra), 1.0);
        let w = random(&mut rng, DType::F32, channels * taps, 0.5);
        let before = random(&mut rng, dtype, slots * channels * (taps - 1), 1.0);
        let x = tensor(&cx, dtype, &[rows, channels + extra], &x);
        let w = tensor(&cx, DType::F32, &[channels, taps], &w);
        let mut state = tensor(&cx, dtype, &[slots, channels, taps - 1], &before);
        let y = causal(&cx, x.columns(extra / 2, channels), &w, &mut state, step.batch()).unwrap();
        (values(&y), bytes(&state))
    });
    assert_rounded(what, dtype, &cuda.0, &cpu.0, RELATIVE, 1e-37, 1.0);
    assert_same(&format!("{what}: state"), &cuda.1, &cpu.1);
}

#[test]
fn every_case_equals_the_cpu_arm() {
    for (seed, Case { name, channels, extra, taps, spans, dtype }) in cases().into_iter().enumerate() {
        let rows: usize = spans.iter().map(|s| s.1).sum();
        if Pair::new(name, Numerics::F32, (rows * channels * taps) as u64).is_none() {
            continue;
        }
        // x from column 0, as the fused projection has it.
        let shape = Shape { channels, extra: extra & !1, taps, dtype, slots: spans.len() };
        same(name, &shape, seed as u64, |rig| step_of(&rig.device, &spans, 0));
    }
}

/// Slots apart and in place, fresh sequences, spans shorter than the taps, inert ones, spans over several blocks of rows.
#[test]
fn ragged_steps_of_any_taps_equal_the_cpu_arm() {
    let at = |context, len, slot_in, slot_out| Seq { context, len, slot_in, slot_out };
    let ragged = vec![
        at(5, 1, 0, 0),
        at(9, 1, 1, 2),
        at(4, 1, -1, 3),
        at(0, 1, 3, 3),
        at(0, 2, 9, 4),
        at(7, 2, 5, 5),
        at(64, 3, 6, 7),
        at(0, 41, 8, 8),
        at(0, 5, -1, -1),
        at(128, 67, 10, 10),
        at(1, 4, 11, 9),
    ];
    let decodes =
        vec![at(5, 1, 0, 0), at(9, 1, 1, 2), at(4, 1, -1, 0), at(0, 1, 3, 3), at(0, 1, -1, -1), at(2, 1, 4, 6)];
    for dtype in [DType::F32, DType::Bf16] {
        for (channels, extra) in [(40, 16), (37, 6), (264, 0), (24, 2)] {
            for taps in [2, 3, 4, 5, 9] {
                for (name, seqs) in [("ragged", &ragged), ("decodes", &decodes)] {
                    let what = format!("{name} {channels}+{extra} channels, {taps} taps, {dtype}");
                    let shape = Shape { channels, extra, taps, dtype, slots: 12 };
                    same(&what, &shape, taps as u64, |rig| Step::new(&rig.device, seqs, 0));
                }
            }
        }
    }
}

#[test]
fn a_captured_step_reads_what_each_sequence_is_when_it_is_replayed() {
    let Some(pair) = Pair::new("captured", Numerics::BF16, 1) else { return };
    let (channels, slots) = (48, 4);
    let x = random(&mut rng(1), DType::Bf16, 3 * channels, 1.0);
    let w = random(&mut rng(2), DType::F32, channels * 4, 0.5);
    let before = random(&mut rng(3), DType::Bf16, slots * channels * 3, 1.0);
    let live = [Seq::new(8, 1, 2), Seq::new(0, 1, 0), Seq { context: 3, len: 1, slot_in: 3, slot_out: 1 }];
    let run = |rig: &Rig, captured: bool| {
        let cx = rig.cx();
        let xt = tensor(&cx, DType::Bf16, &[3, channels], &x);
        let wt = tensor(&cx, DType::F32, &[channels, 4], &w);
        let mut state = tensor(&cx, DType::Bf16, &[slots, channels, 3], &before);
        let inert = [Seq::new(0, 1, -1); 3];
        let mut step = Step::new(&rig.device, if captured { &inert } else { &live }, 3);
        let y = match rig.device.as_cuda().filter(|_| captured) {
            Some(cuda) => {
                let mut y = Some(causal(&cx, xt.view(), &wt, &mut state, step.batch()).unwrap());
                let graph = cuda
                    .capture(|| {
                        y = None;
                        y = Some(causal(&cx, xt.view(), &wt, &mut state, step.batch())?);
                        Ok(())
                    })
                    .unwrap();
                step.upload(&live);
                cuda.replay(&graph).unwrap();
                y.unwrap()
            }
            None => causal(&cx, xt.view(), &wt, &mut state, step.batch()).unwrap(),
        };
        (bytes(&y), bytes(&state))
    };
    let cuda = &pair.cuda;
    assert_eq!(run(cuda, true), run(cuda, false));
}

#[test]
fn a_slot_outside_the_state_gives_nan_rows_and_leaves_every_slot() {
    for (channels, dtype) in [(16, DType::Bf16), (7, DType::F32)] {
        let Some(pair) = Pair::new("outside", numerics(dtype, DType::F32), 1) else { return };
        let rig = &pair.cuda;
        let cx = rig.cx();
        let w = tensor(&cx, DType::F32, &[channels, 4], &vec![0.5; channels * 4]);
        for lens in [[1, 1, 1], [2, 3, 1]] {
            let seq = |i: usize, slot_in, slot_out| Seq { context: 4, len: lens[i], slot_in, slot_out };
            let step = Step::new(&rig.device, &[seq(0, 2, 0), seq(1, 0, 2), seq(2, 0, -5)], 0);
            let rows = lens.iter().sum::<usize>();
            let x = tensor(&cx, dtype, &[rows, channels], &vec![1.0; rows * channels]);
            let mut state = tensor(&cx, dtype, &[2, channels, 3], &vec![0.25; 2 * channels * 3]);
            let y = causal(&cx, x.view(), &w, &mut state, step.batch()).unwrap();
            assert!(values(&y).iter().all(|v| v.is_nan()));
            assert!(values(&state).iter().all(|v| *v == 0.25));
        }
    }
}
