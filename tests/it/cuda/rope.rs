//! Norm and rotation of heads: a head's sum is taken in another order than the CPU arm's; sines and cosines are the same.

use highwater::num::DType;
use highwater::ops::attention::AttnDims;
use highwater::ops::batch::Placement;
use highwater::ops::rope::{Rope, inv_freq, qk_norm_rope};
use highwater::ops::{Batch, Span, StepInputs};

use super::norm::assert_rounded;
use super::{Pair, assert_same};
use crate::ops::{LIMITS, numerics, random, rng, tensor, values};

const EPS: f32 = 1e-6;
/// The last position of the longest published context.
const LAST: i32 = 262_143;

/// Dimensions of published models and awkward ones, with rows: few, and so many that a block takes a whole row.
fn shapes() -> Vec<(AttnDims, usize)> {
    let dims = |heads, kv_heads, head_dim, rotary_dim| AttnDims { heads, kv_heads, head_dim, rotary_dim };
    vec![
        (dims(24, 4, 256, 64), 3),
        (dims(8, 2, 256, 64), 1),
        (dims(2, 1, 256, 64), 300),
        (dims(6, 2, 32, 8), 9),
        (dims(3, 1, 64, 64), 5),
        (dims(2, 2, 128, 128), 5),
        (dims(3, 1, 20, 6), 7),
        (dims(1, 1, 2, 2), 4),
        (dims(2, 1, 768, 512), 3),
        (dims(2, 1, 512, 320), 3),
        (dims(2, 1, 256, 192), 3),
        (dims(1, 1, 16_400, 40), 2),
    ]
}

#[test]
fn every_shape_equals_the_cpu_arm_and_gates_and_values_stay() {
    for (seed, (dims, rows)) in shapes().into_iter().enumerate() {
        for dtype in [DType::F32, DType::Bf16] {
            let what = format!("{rows} rows of {dims:?} {dtype}");
            let Some(pair) = Pair::new(&what, numerics(dtype, DType::F32), (rows * dims.qkv_cols()) as u64) else {
                continue;
            };
            let mut rng = rng(seed as u64);
            let given = random(&mut rng, dtype, rows * dims.qkv_cols(), 3.0);
            let [qw, kw] = [(); 2].map(|()| random(&mut rng, DType::F32, dims.head_dim, 0.5));
            let (freqs, _) = inv_freq(&Rope { theta: 1e7, rotary_dim: dims.rotary_dim, yarn: None }).unwrap();
            let positions: Vec<i32> = (0..rows as i32).map(|i| LAST - i * 4099 % LAST).collect();
            let (cpu, cuda) = pair.run(|rig| {
                let cx = rig.cx();
                let mut inputs = StepInputs::new(&rig.device, LIMITS).unwrap();
                let spans = [Span { start: 0, len: rows, context: 0 }];
                let pages = vec![0; rows.div_ceil(64)];
                let place = Placement { slot_in: 0, slot_out: 0, pages };
                inputs.upload(&spans, &[place], &vec![0; rows], &[]).unwrap();
                inputs.positions.write(0, &positions).unwrap();
                let mut qkv = tensor(&cx, dtype, &[rows, dims.qkv_cols()], &given);
                let [qw, kw, freqs] = [&qw, &kw, &freqs].map(|v| tensor(&cx, DType::F32, &[v.len()], v));
                let batch = Batch { spans: &spans, decodes: 0, inputs: &inputs };
                qk_norm_rope(&cx, &mut qkv, &qw, &kw, &freqs, 1.125, EPS, dims, &batch).unwrap();
                values(&qkv)
            });
            let d = dims.head_dim;
            let turned = |block: usize| {
                let block = block % (dims.qkv_cols() / d);
                (block < 2 * dims.heads && block.is_multiple_of(2))
                    || (2 * dims.heads..2 * dims.heads + dims.kv_heads).contains(&block)
            };
            let (mut all_cuda, mut all_cpu) = (Vec::new(), Vec::new());
            for (block, (cuda, cpu)) in cuda.chunks(d).zip(cpu.chunks(d)).enumerate() {
                if turned(block) {
                    all_cuda.extend_from_slice(cuda);
                    all_cpu.extend_from_slice(cpu);
                } else {
                    assert_same(&format!("{what}: block {block}"), cuda, &given[block * d..][..d]);
                }
            }
            // The CPU arm adds a head's squares in one chain: its error is up to root(d) units of what is rotated, and
            // values are up to about 6; a rotation may cancel, so the bound is absolute.
            let absolute = 6.0 * 2f64.powi(-24) * (8.0 + (d as f64).sqrt());
            assert_rounded(&what, dtype, &all_cuda, &all_cpu, 0.0, absolute, 1.0);
        }
    }
}

/// A head of (1, 0) is rotated to (cos, sin) times its norm, so each shows alone and to its own last places, also where it
/// is small: the norm and the product are three roundings.
#[test]
fn sines_and_cosines_are_the_cpu_arms_at_any_position() {
    let dims = AttnDims { heads: 1, kv_heads: 1, head_dim: 2, rotary_dim: 2 };
    let positions: Vec<i32> =
        (0..1024).map(|i| if i < 700 { LAST - 373 * i } else { i32::MAX - 6_553_601 * (i - 700) }).collect();
    let rows = positions.len();
    let Some(pair) = Pair::new("positions", numerics(DType::F32, DType::F32), rows as u64 * 8) else { return };
    let (cpu, cuda) = pair.run(|rig| {
        let cx = rig.cx();
        let mut inputs = StepInputs::new(&rig.device, LIMITS).unwrap();
        let spans = [Span { start: 0, len: rows, context: 0 }];
        let place = Placement { slot_in: 0, slot_out: 0, pages: vec![0; rows.div_ceil(64)] };
        inputs.upload(&spans, &[place], &vec![0; rows], &[]).unwrap();
        inputs.positions.write(0, &positions).unwrap();
        let mut qkv = tensor(&cx, DType::F32, &[rows, 8], &[1.0, 0.0].repeat(rows * 4));
        let one = |v: f32, n: usize| tensor(&cx, DType::F32, &[n], &vec![v; n]);
        let batch = Batch { spans: &spans, decodes: 0, inputs: &inputs };
        qk_norm_rope(&cx, &mut qkv, &one(0.0, 2), &one(0.0, 2), &one(1.0, 1), 1.0, EPS, dims, &batch).unwrap();
        values(&qkv)
    });
    assert_rounded("turns", DType::F32, &cuda, &cpu, 4.0 * 2f64.powi(-23), 0.0, 0.0);
    assert!(cpu.iter().any(|v| v.abs() < 2e-3 && *v != 0.0), "one is small");
}
