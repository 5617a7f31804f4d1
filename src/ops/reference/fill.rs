//! Seeded values, one Philox block for four elements. There is no sum, so no order: elements are independent.

use rayon::prelude::*;

use half::bf16;

use crate::error::Result;
use crate::num::philox::{normal4, philox4x32, uniform};
use crate::num::{DType, elementary, fp8};
use crate::ops::fill::{Code, Primed};
use crate::tensor::Elem;

/// Elements of one task; a multiple of 4 is not needed, blocks are cut where a task starts.
const TASK_ELEMENTS: usize = 1 << 14;

/// `dst[j]` = round(mean + std x n), n from element `first + j` of the stream.
pub fn normal<T: Elem>(dst: &mut [T], key: [u32; 2], first: u64, mean: f32, std: f32) {
    stream(dst, key, first, |words| normal4(words).map(|n| mean + std * n));
}

/// [`normal`] rounded to bf16, then to `T`.
pub fn normal_bf16<T: Elem>(dst: &mut [T], key: [u32; 2], first: u64, mean: f32, std: f32) {
    stream(dst, key, first, |words| normal4(words).map(|n| bf16::from_f32(mean + std * n).to_f32()));
}

/// Rows of a tensor of state.
pub(in crate::ops) fn prime(target: &mut Primed) -> Result<()> {
    let Primed { ref mut dst, rows, key, std, scale } = *target;
    let cols = dst.cols();
    for (j, &row) in rows.iter().enumerate() {
        let (at, first) = (row as usize * cols, (j * cols) as u64);
        match dst.dtype() {
            DType::U8 => {
                let mut values = vec![0.0f32; cols];
                normal(&mut values, key, first, 0.0, std);
                for (code, value) in dst.host_mut::<u8>()?[at..at + cols].iter_mut().zip(values) {
                    *code = fp8::encode(value / scale);
                }
            }
            DType::Bf16 => normal(&mut dst.host_mut::<bf16>()?[at..at + cols], key, first, 0.0, std),
            _ => normal(&mut dst.host_mut::<f32>()?[at..at + cols], key, first, 0.0, std),
        }
    }
    Ok(())
}

/// `dst[j]` = the code of the `code.elements()` elements from `first + j * code.elements()` on.
pub fn codes(dst: &mut [u8], key: [u32; 2], first: u64, code: Code) {
    let per_byte = code.elements();
    dst.par_chunks_mut(TASK_ELEMENTS).enumerate().for_each(|(task, chunk)| {
        let element = first + (task * TASK_ELEMENTS) as u64 * per_byte;
        let mut words = Words::new(key, element);
        for byte in chunk {
            *byte = match code {
                Code::E4m3 => e4m3(centred(words.next())),
                Code::E2m1 => {
                    let low = e2m1(centred(words.next()));
                    low | e2m1(centred(words.next())) << 4
                }
                Code::ScaleE4m3 => 0x6C + (words.next() >> 28) as u8,
            };
        }
    });
}

/// `dst[j]` = (1 + (word >> 25) / 128) 2^exponent of element `first + j`.
pub fn scales(dst: &mut [f32], key: [u32; 2], first: u64, exponent: i32) {
    let unit = pow2(exponent - 7);
    dst.par_chunks_mut(TASK_ELEMENTS).enumerate().for_each(|(task, chunk)| {
        let mut words = Words::new(key, first + (task * TASK_ELEMENTS) as u64);
        for scale in chunk {
            // 8 bits times a power of two: exact.
            *scale = (128 + (words.next() >> 25)) as f32 * unit;
        }
    });
}

/// 2^exponent, from -126 to 127, by its bits.
pub fn pow2(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// The words of a stream in order.
struct Words {
    key: [u32; 2],
    element: u64,
    block: [u32; 4],
}

impl Words {
    fn new(key: [u32; 2], element: u64) -> Words {
        let block = if element.is_multiple_of(4) { [0; 4] } else { block(key, element / 4) };
        Words { key, element, block }
    }

    #[inline]
    fn next(&mut self) -> u32 {
        let lane = (self.element % 4) as usize;
        if lane == 0 {
            self.block = block(self.key, self.element / 4);
        }
        self.element += 1;
        self.block[lane]
    }
}

fn block(key: [u32; 2], index: u64) -> [u32; 4] {
    philox4x32(key, [index as u32, (index >> 32) as u32, 0, 0])
}

/// The sum of a word's bytes less its mean: -510 to 510.
#[inline]
fn centred(word: u32) -> i32 {
    let pairs = (word & 0x00FF_00FF) + (word >> 8 & 0x00FF_00FF);
    ((pairs & 0xFFFF) + (pairs >> 16)) as i32 - 510
}

/// n / 2 to e4m3: 4 significant bits, ties to even. Zero is +0.
#[inline]
fn e4m3(n: i32) -> u8 {
    let magnitude = n.unsigned_abs();
    if magnitude == 0 {
        return 0;
    }
    let mut top = magnitude.ilog2();
    // 1.mmm in eighths; below 16 it is exact.
    let mut significand = magnitude << 3u32.saturating_sub(top);
    if let Some(below) = top.checked_sub(3).filter(|b| *b > 0) {
        let (kept, rest, half) = (magnitude >> below, magnitude & ((1 << below) - 1), 1 << (below - 1));
        significand = kept + u32::from(rest > half || (rest == half && kept & 1 == 1));
    }
    if significand == 16 {
        significand = 8;
        top += 1;
    }
    // n / 2 = 1.mmm x 2^(top - 1), and the exponent's bias is 7.
    let code = ((top + 6) << 3 | (significand & 7)) as u8;
    if n < 0 { code | 0x80 } else { code }
}

/// n / 44 to e2m1, ties to even; beyond 5 it is 6.
#[inline]
fn e2m1(n: i32) -> u8 {
    let m = n.unsigned_abs();
    // The midpoints .25 .75 1.25 1.75 2.5 3.5 5 times 44; every second code is even.
    let index = u8::from(m > 11)
        + u8::from(m >= 33)
        + u8::from(m > 55)
        + u8::from(m >= 77)
        + u8::from(m > 110)
        + u8::from(m >= 154)
        + u8::from(m > 220);
    if n < 0 { index | 8 } else { index }
}

/// `dst[j]` = round(ln(low + (high - low) (1 - u))), u the 24-bit uniform value of element `first + j`.
pub fn log_uniform<T: Elem>(dst: &mut [T], key: [u32; 2], first: u64, low: f32, high: f32) {
    let span = high - low;
    stream(dst, key, first, |words| words.map(|w| elementary::ln(low + span * (1.0 - uniform(w)))));
}

/// `dst[j]` = round(value).
pub fn constant<T: Elem>(dst: &mut [T], value: f32) {
    let value = T::from_f32(value);
    dst.par_chunks_mut(TASK_ELEMENTS).for_each(|chunk| chunk.fill(value));
}

fn stream<T: Elem>(dst: &mut [T], key: [u32; 2], first: u64, values: impl Fn([u32; 4]) -> [f32; 4] + Sync) {
    dst.par_chunks_mut(TASK_ELEMENTS).enumerate().for_each(|(task, chunk)| {
        let mut element = first + (task * TASK_ELEMENTS) as u64;
        let mut rest = chunk;
        while !rest.is_empty() {
            let (block, lane) = (element / 4, (element % 4) as usize);
            let four = values(philox4x32(key, [block as u32, (block >> 32) as u32, 0, 0]));
            let n = rest.len().min(4 - lane);
            let (head, tail) = rest.split_at_mut(n);
            for (d, &v) in head.iter_mut().zip(&four[lane..]) {
                *d = T::from_f32(v);
            }
            rest = tail;
            element += n as u64;
        }
    });
}
