//! Keys and values to their slots: every bit of the cache is the CPU arm's, whether it was written or not.

use highwater::num::{DType, fp8};
use highwater::ops::attention::AttnDims;
use highwater::ops::batch::{PAGE_TOKENS, Placement};
use highwater::ops::kv_write::{KvPages, write};
use highwater::ops::{Batch, Cx, Numerics, Span, StepInputs};

use super::{Pair, assert_same};
use crate::ops::{LIMITS, Rig, bytes, numerics, random, rng, tensor};

/// (cached tokens, new rows, first page or -1) of each sequence; pages follow one another.
const SEQUENCES: [(usize, usize, i32); 4] = [(63, 1, 7), (64, 1, -1), (0, 70, 2), (60, 9, 4)];
const PAGES: usize = 10;
/// Of keys and of values, where they are codes.
const SCALES: [f32; 2] = [0.003, 0.21];

fn run(rig: &Rig, dims: AttnDims, dtype: DType, kv: DType, qkv: &[f32]) -> (Vec<u8>, Vec<u8>) {
    let mut inputs = StepInputs::new(&rig.device, LIMITS).unwrap();
    let (mut spans, mut places, mut start) = (Vec::new(), Vec::new(), 0);
    for (i, (context, len, first)) in SEQUENCES.into_iter().enumerate() {
        spans.push(Span { start, len, context });
        let count = (context + len).div_ceil(PAGE_TOKENS) as i32;
        let pages = (0..count).map(|page| if first < 0 { -1 } else { first + page }).collect();
        places.push(Placement { slot_in: i as i32, slot_out: i as i32, pages });
        start += len;
    }
    inputs.upload(&spans, &places, &vec![0; start], &[]).unwrap();
    let cx = Cx { numerics: Numerics { kv, ..rig.numerics }, ..rig.cx() };
    let qkv = tensor(&cx, dtype, &[start, dims.qkv_cols()], qkv);
    let mut pages = KvPages::new(&rig.device, kv, PAGES, dims).unwrap();
    if kv == DType::U8 {
        [pages.k_scale, pages.v_scale] = SCALES;
    }
    write(&cx, &qkv, dims, &mut pages, &Batch { spans: &spans, decodes: 2, inputs: &inputs }).unwrap();
    (bytes(&pages.k), bytes(&pages.v))
}

#[test]
fn every_slot_is_the_cpu_arms_bits() {
    let rows: usize = SEQUENCES.iter().map(|s| s.1).sum();
    for (heads, kv_heads, head_dim) in [(4, 2, 6), (6, 2, 256), (2, 1, 8), (3, 3, 20)] {
        let dims = AttnDims { heads, kv_heads, head_dim, rotary_dim: 2 };
        for dtype in [DType::F32, DType::Bf16] {
            for kv in [DType::F32, DType::Bf16, DType::U8] {
                let what = format!("{dims:?} {dtype} to {kv}");
                let work = (rows * dims.kv_cols() * 2) as u64;
                let Some(pair) = Pair::new(&what, numerics(dtype, DType::F32), work) else { continue };
                let mut qkv = random(&mut rng(head_dim as u64), dtype, rows * dims.qkv_cols(), 2.0);
                // Codes below the normal ones, zeros of both signs, and values beside those where a code turns.
                for (i, v) in qkv.iter_mut().enumerate() {
                    let code = (i % 0x60) as u8 + 0x10;
                    let middle = f32::midpoint(fp8::decode(code), fp8::decode(code + 1));
                    let scale = SCALES[i / 7 % 2];
                    match i % 11 {
                        0 => *v *= 0.001,
                        1 => *v = 0.0,
                        2 => *v = -0.0,
                        3 => *v = middle * scale,
                        4 => *v = f32::from_bits((middle * scale).to_bits() - 1),
                        5 => *v = f32::from_bits((middle * scale).to_bits() + 1),
                        _ => {}
                    }
                }
                let (cpu, cuda) = pair.run(|rig| run(rig, dims, dtype, kv, &qkv));
                assert_same(&format!("{what}: k"), &cuda.0, &cpu.0);
                assert_same(&format!("{what}: v"), &cuda.1, &cpu.1);
            }
        }
    }
}

#[test]
fn a_slot_past_the_pages_is_left_out() {
    let dims = AttnDims { heads: 2, kv_heads: 1, head_dim: 16, rotary_dim: 4 };
    let Some(pair) = Pair::new("past the pages", Numerics::F32, 1000) else { return };
    let rig = &pair.cuda;
    let mut inputs = StepInputs::new(&rig.device, LIMITS).unwrap();
    let spans = [Span { start: 0, len: 3, context: 0 }];
    inputs.upload(&spans, &[Placement { slot_in: 0, slot_out: 0, pages: vec![0] }], &[0; 3], &[]).unwrap();
    inputs.kv_slots.write(0, &[5, PAGE_TOKENS as i32, i32::MAX]).unwrap();
    let values = random(&mut rng(1), DType::F32, 3 * dims.qkv_cols(), 1.0);
    let qkv = tensor(&rig.cx(), DType::F32, &[3, dims.qkv_cols()], &values);
    let mut kv = KvPages::new(&rig.device, DType::F32, 1, dims).unwrap();
    write(&rig.cx(), &qkv, dims, &mut kv, &Batch { spans: &spans, decodes: 0, inputs: &inputs }).unwrap();
    let written: Vec<usize> = (0..PAGE_TOKENS).filter(|&s| bytes(&kv.k)[s * 64..][..64] != [0xFF; 64]).collect();
    assert_eq!(written, [5]);
    drop((kv, qkv, inputs));
    assert!(rig.device.take_overruns().is_empty());
}
