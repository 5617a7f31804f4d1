//! Seeded values: the CPU arm's bits, wherever a range starts and whatever its stream does there.

use highwater::num::DType;
use highwater::ops::fill::{self, Code, cases};
use highwater::ops::{Cx, Numerics};
use highwater::tensor::Tensor;

use super::{Pair, assert_same};
use crate::ops::{Rig, bytes, empty};

const KEY: [u32; 2] = [0xC0FF_EE11, 0x8BAD_F00D];

/// Bytes of a tensor that `write` wrote part of, the rest poison on both arms.
#[track_caller]
fn same(what: &str, pair: &Pair, dtype: DType, shape: [usize; 2], write: impl Fn(&Cx, &mut Tensor)) {
    let run = |rig: &Rig| {
        let mut dst = empty(&rig.cx(), dtype, &shape);
        write(&rig.cx(), &mut dst);
        bytes(&dst)
    };
    let (cpu, cuda) = pair.run(run);
    assert!(cpu.iter().any(|b| *b != 0xFF), "{what}: something is written");
    assert_same(what, &cuda, &cpu);
}

#[test]
fn floats_are_the_cpu_arms_bits_at_every_start_of_the_stream() {
    let Some(pair) = Pair::new("fill", Numerics::F32, 1 << 20) else { return };
    for case in cases() {
        let shape = [case.rows, case.cols];
        // 2^34 - 5: the block number crosses 32 bits within the tensor. The last: the stream's end.
        let end = u64::MAX - (case.rows * case.cols) as u64;
        for first in [0, 1, 2, 3, 7, (1 << 34) - 5, end] {
            let what = format!("{} {:?} from {first}", case.name, case.dtype);
            let rows = 0..case.rows;
            for bf16_first in [false, true] {
                same(&format!("normal {what} {bf16_first}"), &pair, case.dtype, shape, |cx, dst| {
                    let call = if bf16_first { fill::normal_bf16 } else { fill::normal };
                    call(cx, dst, rows.clone(), KEY, first, 0.25, 1.5).unwrap();
                });
            }
            same(&format!("log_uniform {what}"), &pair, case.dtype, shape, |cx, dst| {
                fill::log_uniform(cx, dst, rows.clone(), KEY, first, 0.0, 16.0).unwrap();
            });
        }
    }
}

#[test]
fn rows_that_start_anywhere_in_sixteen_bytes_are_the_cpu_arms_and_no_other_byte_changes() {
    let Some(pair) = Pair::new("fill", Numerics::F32, 1 << 20) else { return };
    for (rows, cols) in [(9, 1), (9, 3), (5, 17), (40, 33), (3, 40_001)] {
        for from in 0..rows.min(9) {
            for to in [from + 1, rows] {
                let (shape, range) = ([rows, cols], from..to);
                let what = format!("rows {range:?} of {shape:?}");
                for dtype in [DType::F32, DType::Bf16] {
                    let what = format!("{what} {dtype}");
                    same(&format!("normal {what}"), &pair, dtype, shape, |cx, dst| {
                        fill::normal(cx, dst, range.clone(), KEY, from as u64, -3.0, 0.02).unwrap();
                    });
                    same(&format!("log_uniform {what}"), &pair, dtype, shape, |cx, dst| {
                        fill::log_uniform(cx, dst, range.clone(), KEY, 5, 2.0, 9.0).unwrap();
                    });
                    same(&format!("constant {what}"), &pair, dtype, shape, |cx, dst| {
                        fill::constant(cx, dst, range.clone(), 1.0 + 3.0 / 256.0).unwrap();
                    });
                }
                for code in [Code::E4m3, Code::E2m1, Code::ScaleE4m3] {
                    same(&format!("{code:?} {what}"), &pair, DType::U8, shape, |cx, dst| {
                        fill::codes(cx, dst, range.clone(), KEY, code).unwrap();
                    });
                }
                same(&format!("scales {what}"), &pair, DType::F32, shape, |cx, dst| {
                    fill::scales(cx, dst, range.clone(), KEY, -12).unwrap();
                });
            }
        }
    }
}

#[test]
fn primed_rows_of_many_tensors_are_the_cpu_arms_and_no_other_byte_changes() {
    let Some(pair) = Pair::new("prime", Numerics::F32, 1 << 20) else { return };
    // Rows that are and are not whole windows, in and out of order, none, and one of more than a block's windows.
    let targets: [(DType, [usize; 2], &[i32]); 6] = [
        (DType::F32, [7, 12], &[6, 0, 3]),
        (DType::Bf16, [5, 33], &[1, 2]),
        (DType::U8, [9, 21], &[8, 4, 5, 0]),
        (DType::F32, [3, 4], &[]),
        (DType::Bf16, [4, 20_001], &[3, 1]),
        (DType::U8, [2, 64], &[1]),
    ];
    let (cpu, cuda) = pair.run(|rig| {
        let cx = rig.cx();
        let mut tensors = targets.map(|(dtype, shape, _)| empty(&cx, dtype, &shape));
        let mut primed: Vec<fill::Primed> = tensors
            .iter_mut()
            .zip(targets)
            .zip(0..)
            .map(|((dst, (dtype, _, rows)), i)| fill::Primed {
                dst,
                rows,
                key: [KEY[0] + i, KEY[1]],
                std: 0.3 + i as f32,
                scale: if dtype == DType::U8 { 0.01 } else { 1.0 },
            })
            .collect();
        fill::prime(&cx, &mut primed).unwrap();
        tensors.map(|t| bytes(&t))
    });
    for (i, (cuda, cpu)) in cuda.iter().zip(&cpu).enumerate() {
        assert_same(&format!("target {i}"), cuda, cpu);
        assert_eq!(cpu.iter().any(|b| *b != 0xFF), !targets[i].2.is_empty());
    }
}

#[test]
fn nothing_is_launched_for_no_rows() {
    let Some(pair) = Pair::new("fill", Numerics::F32, 1) else { return };
    let cx = pair.cuda.cx();
    let mut dst = empty(&cx, DType::F32, &[4, 4]);
    fill::normal(&cx, &mut dst, 2..2, KEY, 0, 0.0, 1.0).unwrap();
    assert!(bytes(&dst).iter().all(|b| *b == 0xFF));
}
