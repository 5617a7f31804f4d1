//! `kv_write` against the columns it copies.

use highwater::device::Device;
use highwater::num::{DType, bf16};
use highwater::ops::attention::AttnDims;
use highwater::ops::batch::PAGE_TOKENS;
use highwater::ops::kv_write::{KvPages, cost, write};
use highwater::ops::{Cx, Limits, Meter, Numerics};
use std::sync::Arc;

use super::quantise::to_e4m3;
use super::weight::e4m3;
use super::world::{Step, blank, cx, device, message, numerics, plan, scatter, stored, tensor, uniform};
use super::{bytes, rng};

const DIMS: AttnDims = AttnDims { heads: 4, kv_heads: 2, head_dim: 6, rotary_dim: 2 };
const SEQUENCES: &[(usize, usize)] = &[(63, 1), (64, 1), (0, 70), (60, 9)];

fn step(device: &Arc<Device>, pages: &[Vec<i32>]) -> Step {
    let limits = Limits { step_tokens: 100, batch: 4, context: 256 };
    Step::new(device, limits, SEQUENCES, 2, pages)
}

fn rows() -> usize {
    SEQUENCES.iter().map(|&(_, len)| len).sum()
}

/// Where each row goes, computed apart: (page, offset), or nothing for the inert sequence.
fn places(pages: &[Vec<i32>]) -> Vec<Option<usize>> {
    let mut places = Vec::new();
    for (&(context, len), pages) in SEQUENCES.iter().zip(pages) {
        for position in context..context + len {
            let page = pages[position / PAGE_TOKENS];
            places.push((page >= 0).then(|| page as usize * PAGE_TOKENS + position % PAGE_TOKENS));
        }
    }
    places
}

#[test]
fn each_row_goes_to_its_slot_and_nothing_else_changes() {
    for dtype in [DType::F32, DType::Bf16] {
        let mut rng = rng(1);
        let (mut pages, total) = scatter(&mut rng, SEQUENCES);
        // An inert sequence in the middle, as a captured graph pads with.
        pages[1] = vec![-1; pages[1].len()];
        let (device, meter) = (device(), Meter::default());
        let step = step(&device, &pages);
        let values = uniform(&mut rng, rows() * DIMS.qkv_cols(), 4.0);
        let qkv = tensor(&device, dtype, &[rows(), DIMS.qkv_cols()], &values);
        let mut kv = KvPages::new(&device, dtype, total, DIMS).unwrap();
        // A pattern, so that a slot nobody should write shows if it changes.
        let pattern = |i: usize, half: usize| (i * 31 + half * 7) as u8;
        for (half, t) in [&mut kv.k, &mut kv.v].into_iter().enumerate() {
            for (i, byte) in t.host_mut::<u8>().unwrap().iter_mut().enumerate() {
                *byte = pattern(i, half);
            }
        }
        write(&cx(&device, &meter, numerics(dtype)), &qkv, DIMS, &mut kv, &step.batch()).unwrap();
        let places = places(&pages);
        for (half, t) in [&kv.k, &kv.v].into_iter().enumerate() {
            let row_bytes = DIMS.kv_cols() * dtype.bytes() as usize;
            let from = 2 * DIMS.heads * DIMS.head_dim + half * DIMS.kv_heads * DIMS.head_dim;
            for (slot, got) in bytes(t).chunks(row_bytes).enumerate() {
                let want: Vec<u8> = match places.iter().position(|p| *p == Some(slot)) {
                    Some(row) => values[row * DIMS.qkv_cols() + from..][..DIMS.kv_cols()]
                        .iter()
                        .flat_map(|&v| match dtype {
                            DType::Bf16 => bf16::from_f32(v).to_le_bytes().to_vec(),
                            _ => v.to_le_bytes().to_vec(),
                        })
                        .collect(),
                    None => (slot * row_bytes..(slot + 1) * row_bytes).map(|i| pattern(i, half)).collect(),
                };
                assert_eq!(got, want, "{dtype} half {half} slot {slot}");
            }
        }
        assert_eq!(meter.take()[0].cost, cost(rows(), DIMS, dtype, dtype));
    }
}

#[test]
fn codes_are_the_nearest_under_each_halfs_scale() {
    for dtype in [DType::F32, DType::Bf16] {
        let mut rng = rng(4);
        let (mut pages, total) = scatter(&mut rng, SEQUENCES);
        pages[1] = vec![-1; pages[1].len()];
        let (device, meter) = (device(), Meter::default());
        let step = step(&device, &pages);
        // To about 500 codes' worth under the smaller scale, so that some saturate, and a few lie near 0.
        let mut values = uniform(&mut rng, rows() * DIMS.qkv_cols(), 4.0);
        values.iter_mut().step_by(7).for_each(|v| *v *= 1e-4);
        let qkv = tensor(&device, dtype, &[rows(), DIMS.qkv_cols()], &values);
        let mut kv = KvPages::new(&device, DType::U8, total, DIMS).unwrap();
        (kv.k_scale, kv.v_scale) = (0.008, 0.37);
        let cx = cx(&device, &meter, Numerics { kv: DType::U8, ..numerics(dtype) });
        write(&cx, &qkv, DIMS, &mut kv, &step.batch()).unwrap();
        let places = places(&pages);
        for (half, (t, scale)) in [(&kv.k, 0.008f32), (&kv.v, 0.37)].into_iter().enumerate() {
            let from = 2 * DIMS.heads * DIMS.head_dim + half * DIMS.kv_cols();
            for (slot, got) in bytes(t).chunks(DIMS.kv_cols()).enumerate() {
                let Some(row) = places.iter().position(|p| *p == Some(slot)) else {
                    assert!(got.iter().all(|&code| code == 0xFF), "slot {slot} is poison yet");
                    continue;
                };
                let row = &stored(dtype, &values)[row * DIMS.qkv_cols() + from..][..DIMS.kv_cols()];
                for (&code, &value) in got.iter().zip(row) {
                    let want = f64::from(to_e4m3(value / scale));
                    assert_eq!(e4m3(code), want, "{dtype} half {half} slot {slot}: {value}");
                    assert_eq!(code & 0x80 != 0, value < 0.0);
                }
            }
        }
        assert_eq!(meter.take()[0].cost, cost(rows(), DIMS, dtype, DType::U8));
    }
}

#[test]
fn a_slot_past_the_pages_is_an_error_and_writes_nothing() {
    let (device, meter) = (device(), Meter::default());
    let mut rng = rng(2);
    let (pages, total) = scatter(&mut rng, SEQUENCES);
    let mut step = step(&device, &pages);
    let qkv =
        tensor(&device, DType::F32, &[rows(), DIMS.qkv_cols()], &uniform(&mut rng, rows() * DIMS.qkv_cols(), 1.0));
    let mut kv = KvPages::new(&device, DType::F32, total, DIMS).unwrap();
    let before = (bytes(&kv.k), bytes(&kv.v));
    let slot = (total * PAGE_TOKENS) as i32;
    step.inputs.kv_slots.host_mut::<i32>().unwrap()[5] = slot;
    let said = message(write(&cx(&device, &meter, numerics(DType::F32)), &qkv, DIMS, &mut kv, &step.batch()));
    assert!(said.contains("row 5") && said.contains(&format!("slot {slot}")), "{said}");
    assert_eq!((bytes(&kv.k), bytes(&kv.v)), before);
}

#[test]
fn operands_that_disagree_are_named_with_their_numbers() {
    for device in [device(), plan()] {
        let meter = Meter::default();
        let cx = cx(&device, &meter, numerics(DType::F32));
        let (pages, total) = scatter(&mut rng(3), SEQUENCES);
        let step = step(&device, &pages);
        let qkv = |rows: usize, cols: usize| blank(&device, DType::F32, &[rows, cols]);
        let mut kv = KvPages::new(&device, DType::F32, total, DIMS).unwrap();
        let said = message(write(&cx, &qkv(rows(), DIMS.qkv_cols() + 1), DIMS, &mut kv, &step.batch()));
        assert!(said.contains(&DIMS.qkv_cols().to_string()), "{said}");
        let said = message(write(&cx, &qkv(rows() - 1, DIMS.qkv_cols()), DIMS, &mut kv, &step.batch()));
        assert!(said.contains(&rows().to_string()), "{said}");
        let good = qkv(rows(), DIMS.qkv_cols());
        let mut wrong_type = KvPages::new(&device, DType::Bf16, total, DIMS).unwrap();
        let said = message(write(&cx, &good, DIMS, &mut wrong_type, &step.batch()));
        assert!(said.contains("bf16") && said.contains("f32"), "{said}");
        let wider = AttnDims { head_dim: 8, ..DIMS };
        let mut wrong_shape = KvPages::new(&device, DType::F32, total, wider).unwrap();
        let said = message(write(&cx, &good, DIMS, &mut wrong_shape, &step.batch()));
        assert!(said.contains("2, 8]") && said.contains("2, 6]"), "{said}");
        for dims in [
            AttnDims { heads: 3, ..DIMS },
            AttnDims { kv_heads: 0, ..DIMS },
            AttnDims { head_dim: 0, ..DIMS },
            AttnDims { rotary_dim: 3, ..DIMS },
            AttnDims { rotary_dim: 8, ..DIMS },
        ] {
            message(write(&cx, &good, dims, &mut kv, &step.batch()));
        }
        write(&cx, &good, DIMS, &mut kv, &step.batch()).unwrap();
        kv.k_scale = 0.5;
        let said = message(write(&cx, &good, DIMS, &mut kv, &step.batch()));
        assert!(said.contains("k_scale is 0.5") && said.contains("f32"), "{said}");
        let cx = Cx { numerics: Numerics { kv: DType::U8, ..cx.numerics }, ..cx };
        let mut codes = KvPages::new(&device, DType::U8, total, DIMS).unwrap();
        for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            codes.v_scale = scale;
            let said = message(write(&cx, &good, DIMS, &mut codes, &step.batch()));
            assert!(said.contains(&format!("v_scale is {scale}")), "{said}");
        }
        codes.v_scale = 0.5;
        write(&cx, &good, DIMS, &mut codes, &step.batch()).unwrap();
    }
}
