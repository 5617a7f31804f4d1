//! Seeded values, one Philox block for four elements. There is no sum, so no order: elements are independent.

use rayon::prelude::*;

use crate::num::elementary;
use crate::num::philox::{normal4, philox4x32, uniform};
use crate::tensor::Elem;

/// Elements of one task; a multiple of 4 is not needed, blocks are cut where a task starts.
const TASK_ELEMENTS: usize = 1 << 14;

/// `dst[j]` = round(mean + std x n), n from element `first + j` of the stream.
pub fn normal<T: Elem>(dst: &mut [T], key: [u32; 2], first: u64, mean: f32, std: f32) {
    stream(dst, key, first, |words| normal4(words).map(|n| mean + std * n));
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
