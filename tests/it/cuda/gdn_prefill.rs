//! The delta rule over prompts.
//!
//! Token by token it is f32 throughout, as the CPU arm is. In chunks, on bf16 activations, operands of the products are
//! rounded: it is held to the CPU arm's f32 arithmetic on the same bf16 inputs, so that what is measured is the card's
//! error alone.

use std::sync::Arc;

use highwater::device::{Device, DeviceSpec, cards};
use highwater::num::DType;
use highwater::ops::gdn_prefill::{GdnDims, cases, cost};
use highwater::ops::{Meter, Numerics, Span};

use super::gdn_decode::F32_BOUND;
use super::{Pair, Where, assert_near, assert_same, place, relative_norm};
use crate::ops::delta_rule::{Part, Stream, run, run_in_pieces, state_of};
use crate::ops::{Rig, SLAB_BYTES, bytes, numerics, random, rng, values};

/// What rounding operands may do to rows and states. Each of T, P, S, v - k S and X is rounded once, an error of at most
/// 2^-9 relative and of 2^-9 / sqrt(3) = 1.1e-3 in the mean square; none correlates with another. A row is q S + P X, X
/// is T (v - k S), and k S has S's: five independent errors of 1.1e-3 and the stored row's own are 2.8e-3 where the terms
/// do not cancel. Where v - k S does (a key that was just written), the error is 1.1e-3 of v and stays: what is written
/// is corrected by the next read. The bound leaves a factor of three for such terms.
const BF16_BOUND: f64 = 1e-2;
/// The largest of many such errors: some five deviations of the root mean square, against the largest value.
const BF16_WORST: f64 = 2e-2;

/// Rows and slots of `parts` on the CPU arm in f32 and on the CUDA arm.
#[track_caller]
fn compare(
    what: &str,
    dims: GdnDims,
    act: DType,
    kept: DType,
    slots: usize,
    decodes: usize,
    parts: &[Part],
    work: u64,
) {
    let Some(mut pair) = Pair::new(what, numerics(act, kept), work) else { return };
    pair.cpu.numerics = Numerics::F32;
    let (cpu, cuda) = pair.run(|rig| {
        let mut state = state_of(rig, dims, slots, |i| random(&mut rng(900 + i as u64), kept, dims.state_len(), 0.5));
        let out = run(rig, parts, decodes, &mut state);
        (out, values(&state))
    });
    let rounded = act == DType::Bf16;
    let mut largest = [0.0f64; 2];
    for (i, (cuda, cpu)) in cuda.0.iter().zip(&cpu.0).enumerate() {
        let what = format!("{what}: sequence {i}");
        largest[0] = largest[0].max(relative_norm(cuda, cpu));
        let (norm, worst) = if rounded { (BF16_BOUND, BF16_WORST) } else { (F32_BOUND, F32_BOUND) };
        assert_near(&what, cuda, cpu, norm, worst);
    }
    for (i, (cuda, cpu)) in cuda.1.chunks(dims.state_len()).zip(cpu.1.chunks(dims.state_len())).enumerate() {
        let what = format!("{what}: slot {i}");
        if parts.iter().any(|p| p.slot_in >= 0 && p.slot_out == i as i32) {
            largest[1] = largest[1].max(relative_norm(cuda, cpu));
            let exact = !rounded && kept == DType::F32;
            let (norm, worst) = if exact { (F32_BOUND, F32_BOUND) } else { (BF16_BOUND, BF16_WORST) };
            assert_near(&what, cuda, cpu, norm, worst);
        } else {
            assert_same(&what, cuda, cpu);
        }
    }
    println!("{what}: rows within {:.1e}, states within {:.1e}", largest[0], largest[1]);
}

fn work(dims: GdnDims, lens: &[usize]) -> u64 {
    let spans: Vec<Span> = lens.iter().map(|&len| Span { start: 0, len, context: 1 }).collect();
    cost(dims, &spans, DType::Bf16, DType::F32).flops / 2
}

#[test]
fn every_case_equals_the_cpu_arm() {
    for case in cases() {
        let streams: Vec<Stream> = case
            .spans
            .iter()
            .enumerate()
            .map(|(i, &(context, len))| Stream::random(case.dims, context + len, case.dtype, 40 + i as u64))
            .collect();
        let parts: Vec<Part> = streams
            .iter()
            .zip(&case.spans)
            .enumerate()
            .map(|(i, (s, &(context, len)))| Part::new(s, context, context + len, i as i32))
            .collect();
        let lens: Vec<usize> = case.spans.iter().map(|s| s.1).collect();
        let work = work(case.dims, &lens);
        compare(case.name, case.dims, case.dtype, case.state, parts.len(), 0, &parts, work);
    }
}

/// Fresh and continued, of every length around a chunk's; slots in place and apart; an inert sequence; decodes before.
#[test]
fn ragged_steps_equal_the_cpu_arm() {
    let lens = [1, 1, 1, 63, 64, 65, 130, 70, 2];
    let in_chunks = [
        (GdnDims::new(1, 2, 128, 128), DType::Bf16, DType::F32),
        (GdnDims::new(1, 1, 128, 128), DType::Bf16, DType::Bf16),
    ];
    let by_token = [
        (GdnDims::new(1, 2, 128, 128), DType::F32, DType::F32),
        (GdnDims::new(1, 3, 5, 7), DType::F32, DType::Bf16),
        (GdnDims::new(2, 2, 40, 130), DType::Bf16, DType::F32),
    ];
    for (dims, act, kept) in in_chunks.into_iter().chain(by_token) {
        let streams: Vec<Stream> = (0..lens.len()).map(|i| Stream::random(dims, 150, act, 80 + i as u64)).collect();
        let part = |i: usize, from: usize, slot_in, slot_out| Part {
            slot_in,
            slot_out,
            ..Part::new(&streams[i], from, from + lens[i], 0)
        };
        let parts = [
            part(0, 20, 3, 3),
            part(1, 9, -1, 0),
            part(2, 0, 1, 1),
            part(3, 5, 2, 4),
            part(4, 0, 9, 5),
            part(5, 64, 6, 6),
            part(6, 3, 2, 7),
            part(7, 1, -1, -1),
            part(8, 1, 8, 8),
        ];
        compare(&format!("{dims:?}, {act}, state {kept}"), dims, act, kept, 10, 2, &parts, 1);
    }
}

/// Keys all parallel, betas and decays at their ends: what makes the inverse and the running sums hard.
#[test]
fn repeated_keys_and_extreme_betas_and_decays_equal_the_cpu_arm() {
    for (dims, act) in [(GdnDims::new(1, 1, 128, 128), DType::Bf16), (GdnDims::new(1, 2, 16, 16), DType::F32)] {
        let base = Stream::random(dims, 130, act, 3);
        let check = |what: &str, change: &dyn Fn(&mut Stream)| {
            let mut stream = base.clone();
            change(&mut stream);
            let what = format!("{what}, {act}");
            compare(&what, dims, act, DType::F32, 1, 0, &[Part::new(&stream, 0, 130, 0).continued()], 1);
        };
        let one_key = |stream: &mut Stream, signs: bool| {
            let (width, keys) = (dims.channels(), dims.key_heads * dims.key_dim..2 * dims.key_heads * dims.key_dim);
            let first: Vec<f32> = stream.conv[keys.clone()].to_vec();
            for (t, row) in stream.conv.chunks_exact_mut(width).enumerate() {
                let sign = if signs && t % 3 == 1 { -1.0 } else { 1.0 };
                row[keys.clone()].iter_mut().zip(&first).for_each(|(k, f)| *k = sign * f);
            }
        };
        let gates = |stream: &mut Stream, beta: f32, g: f32| {
            stream.beta.fill(beta);
            stream.g.fill(g);
        };
        check("one key, beta 1, no decay", &|s| (one_key(s, false), gates(s, 1.0, 0.0)).1);
        check("one key and its negative, beta 1", &|s| (one_key(s, true), gates(s, 1.0, 0.0)).1);
        check("one key, beta 0.5", &|s| (one_key(s, true), gates(s, 0.5, -0.01)).1);
        check("beta 0", &|s| gates(s, 0.0, -0.1));
        check("beta 1, no decay", &|s| gates(s, 1.0, 0.0));
        check("all forgotten", &|s| gates(s, 1.0, -77.0));
        check("beta 0 or 1, saturated and slow decays", &|s| {
            (0..s.g.len()).for_each(|i| {
                s.beta[i] = (i % 2) as f32;
                s.g[i] = if i / 4 % 3 < 2 { -77.0 } else { -0.01 };
            });
        });
        check("minus infinity", &|s| {
            (0..s.g.len()).for_each(|i| s.g[i] = if i % 7 == 0 { f32::NEG_INFINITY } else { -0.1 });
        });
        check("zero rows", &|s| {
            s.conv.fill(0.0);
            s.g.fill(-0.01);
        });
    }
}

/// A rig of the CUDA arm whose card has `sms` multiprocessors.
fn rig(sms: u32, numerics: Numerics) -> Option<Rig> {
    let spec = DeviceSpec { sms, ..cards::find("h200").unwrap() };
    let device: Arc<Device> = match place() {
        Where::Card => Device::cuda_guarded(spec, 0, SLAB_BYTES).unwrap(),
        Where::Emulated => Device::emulated(spec, SLAB_BYTES).unwrap(),
        Where::Nowhere => return None,
    };
    Some(Rig { device, meter: Meter::default(), numerics })
}

/// Rows and state of one step, as bits.
fn step(rig: &Rig, dims: GdnDims, parts: &[Part], pieces: Option<usize>) -> (Vec<Vec<u32>>, Vec<u8>) {
    let mut state = state_of(rig, dims, 4, |i| random(&mut rng(i as u64), rig.numerics.state, dims.state_len(), 0.5));
    let out = run_in_pieces(rig, parts, 0, &mut state, pieces);
    assert!(rig.device.take_overruns().is_empty());
    (out.iter().map(|row| row.iter().map(|v| v.to_bits()).collect()).collect(), bytes(&state))
}

/// Company, the size of pieces, the width of blocks and who shares a block change no bit.
#[test]
fn a_sequence_gives_the_same_bits_in_any_company_pieces_and_blocks() {
    let dims = GdnDims::new(1, 3, 128, 128);
    for kept in [DType::F32, DType::Bf16] {
        let (Some(wide), Some(narrow)) = (rig(1, numerics(DType::Bf16, kept)), rig(1000, numerics(DType::Bf16, kept)))
        else {
            return;
        };
        let streams: Vec<Stream> = (0..3).map(|i| Stream::random(dims, 200, DType::Bf16, 50 + i)).collect();
        let apart = Part { slot_out: 3, ..Part::new(&streams[1], 10, 150, 1) };
        let parts = [Part::new(&streams[0], 64, 135, 0), apart, Part::new(&streams[2], 0, 65, 2)];
        let (rows, state) = step(&wide, dims, &parts, None);
        for pieces in [1, 2, 3] {
            let what = format!("state {kept}, pieces of {pieces}");
            let (cut, left) = step(&wide, dims, &parts, Some(pieces));
            assert_same(&what, &cut.concat(), &rows.concat());
            assert_same(&what, &left, &state);
        }
        for (i, part) in parts.iter().enumerate() {
            let (alone, left) = step(&narrow, dims, &[*part], Some(2));
            assert_same(&format!("state {kept}, sequence {i} alone"), &alone[0], &rows[i]);
            let slot = left.len() / 4 * part.slot_out as usize..left.len() / 4 * (part.slot_out as usize + 1);
            assert_same(&format!("state {kept}, slot of sequence {i}"), &left[slot.clone()], &state[slot]);
        }
    }
}

#[test]
fn cuts_at_multiples_of_64_change_no_bit() {
    let dims = GdnDims::new(1, 1, 128, 128);
    let Some(rig) = rig(132, Numerics::BF16) else { return };
    let stream = Stream::random(dims, 200, DType::Bf16, 17);
    let (whole, state) = step(&rig, dims, &[Part::new(&stream, 0, 200, 0)], None);
    let mut cut = Vec::new();
    let mut kept = state_of(&rig, dims, 4, |i| random(&mut rng(i as u64), DType::F32, dims.state_len(), 0.5));
    for (from, to) in [(0, 64), (64, 192), (192, 200)] {
        cut.extend(run(&rig, &[Part::new(&stream, from, to, 0)], 0, &mut kept).remove(0));
    }
    assert_same("rows", &cut.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), &whole[0]);
    assert_same("state", &bytes(&kept), &state);
}

/// The CPU arm refuses slots that do not exist; a card gives NaN and goes on.
#[test]
fn a_slot_that_does_not_exist_gives_rows_of_nan_and_changes_nothing() {
    for (dims, act) in [(GdnDims::new(1, 1, 128, 128), DType::Bf16), (GdnDims::new(1, 2, 16, 20), DType::F32)] {
        let Some(rig) = rig(132, numerics(act, DType::F32)) else { return };
        let streams: Vec<Stream> = (0..3).map(|i| Stream::random(dims, 80, act, i)).collect();
        let part = |i: usize, slot_in, slot_out| Part { slot_in, slot_out, ..Part::new(&streams[i], 1, 71, 0) };
        let mut state = state_of(&rig, dims, 3, |i| random(&mut rng(i as u64), DType::F32, dims.state_len(), 0.5));
        let before = values(&state);
        let out = run(&rig, &[part(0, 3, 0), part(1, 2, 2), part(2, 1, -1)], 0, &mut state);
        let after = values(&state);
        assert!(out[0].iter().chain(&out[2]).all(|v| v.is_nan()));
        assert!(out[1].iter().all(|v| v.is_finite()));
        let two = 2 * dims.state_len();
        assert_same("slots 0 and 1", &after[..two], &before[..two]);
        assert!(after[two..] != before[two..]);
        assert!(rig.device.take_overruns().is_empty());
    }
}
