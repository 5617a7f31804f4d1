//! Causal attention over pages, in f32.
//!
//! Order, for each row and head: pages ascending. In a page the scores come first, each a dot product in the order of
//! [`lanes`](super::lanes); then the running maximum is raised, the running sum and the accumulators are scaled by the
//! exponential of its change, and the page's tokens are added one by one, ascending. Pages are counted from the
//! sequence's start, so a row's result does not depend on the chunk it came in. Scratch is heap, one page and one block of
//! queries per thread. Keys and values that are codes are widened and scaled one by one before anything is summed.

use rayon::prelude::*;

use super::lanes::{LANES, Lanes, TILE_ROWS, multiply, pack, tree};
use crate::error::{Error, Result};
use crate::num::{DType, fp8};
use crate::ops::Batch;
use crate::ops::attention::AttnDims;
use crate::ops::batch::PAGE_TOKENS;
use crate::ops::kv_write::KvPages;
use crate::tensor::{Elem, Tensor};
use crate::with_elem;

const OP: &str = "attention";
/// Rows that share one conversion of a page to f32.
const BLOCK_ROWS: usize = 8;
/// Fewer products than this are done before another thread has woken up.
const PARALLEL_PRODUCTS: usize = 1 << 18;

/// Rows of one sequence and one kv head: what a thread takes at a time.
struct Task<'a, E> {
    pages: &'a [i32],
    kv_head: usize,
    first_row: usize,
    first_position: usize,
    out: Vec<&'a mut [E]>,
}

/// Attends every row of `qkv` to its sequence's pages.
pub fn attend(qkv: &Tensor, kv: &KvPages, dims: AttnDims, batch: &Batch, out: &mut Tensor) -> Result<()> {
    let table_cols = batch.inputs.page_table.cols();
    let table = batch.inputs.page_table.host::<i32>()?;
    with_elem!(OP, out.dtype(), Y => with_elem!(OP, qkv.dtype(), E => {
        let mut tasks: Vec<Task<Y>> = Vec::new();
        let mut rows = out.host_mut::<Y>()?.chunks_mut(dims.out_cols());
        for (s, span) in batch.spans.iter().enumerate() {
            let pages = &table[s * table_cols..][..(span.context + span.len).div_ceil(PAGE_TOKENS)];
            let inert = pages[0] < 0;
            if let Some(page) = pages.iter().find(|&&p| !inert && (p < 0 || p as usize >= kv.pages())) {
                let what = format!("sequence {s} has page {page}, the cache has {} (0..{0})", kv.pages());
                return Err(Error::shape(OP, what));
            }
            for from in (0..span.len).step_by(BLOCK_ROWS) {
                let len = BLOCK_ROWS.min(span.len - from);
                if inert {
                    for row in rows.by_ref().take(len) {
                        row.fill(Y::from_f32(0.0));
                    }
                    continue;
                }
                let first = tasks.len();
                tasks.extend((0..dims.kv_heads).map(|kv_head| Task {
                    pages,
                    kv_head,
                    first_row: span.start + from,
                    first_position: span.context + from,
                    out: Vec::with_capacity(len),
                }));
                for row in rows.by_ref().take(len) {
                    for (task, heads) in tasks[first..].iter_mut().zip(row.chunks_mut(dims.group() * dims.head_dim)) {
                        task.out.push(heads);
                    }
                }
            }
        }
        let qkv = qkv.host::<E>()?;
        let parallel = pairs(batch) * dims.out_cols() >= PARALLEL_PRODUCTS;
        if kv.k.dtype() == DType::U8 {
            let values = |scale: f32| move |code: u8| fp8::decode(code) * scale;
            let k = Half { cache: kv.k.host::<u8>()?, value: values(kv.k_scale) };
            let v = Half { cache: kv.v.host::<u8>()?, value: values(kv.v_scale) };
            run(tasks, parallel, |task| block(task, qkv, &k, &v, dims));
            return Ok(());
        }
        with_elem!(OP, kv.k.dtype(), K => {
            let k = Half { cache: kv.k.host::<K>()?, value: K::to_f32 };
            let v = Half { cache: kv.v.host::<K>()?, value: K::to_f32 };
            run(tasks, parallel, |task| block(task, qkv, &k, &v, dims));
            Ok(())
        })
    }))
}

/// All keys or all values, and what one of them is worth.
struct Half<'a, K, F> {
    cache: &'a [K],
    value: F,
}

impl<K: Copy, F: Fn(K) -> f32> Half<'_, K, F> {
    /// Elements `from..` to f32.
    fn widen(&self, from: usize, to: &mut [f32]) {
        for (to, &from) in to.iter_mut().zip(&self.cache[from..]) {
            *to = (self.value)(from);
        }
    }
}

fn run<T: Send>(tasks: Vec<T>, parallel: bool, task: impl Fn(T) + Sync + Send) {
    if parallel {
        tasks.into_par_iter().for_each(task);
    } else {
        tasks.into_iter().for_each(task);
    }
}

/// Pairs of a row and a token it sees, at most.
fn pairs(batch: &Batch) -> usize {
    batch.spans.iter().map(|s| s.len * (s.context + s.len)).sum()
}

/// One query head's running softmax.
#[derive(Clone)]
struct Running {
    max: f32,
    sum: f32,
}

fn block<E: Elem, K: Copy, F: Fn(K) -> f32, Y: Elem>(
    task: Task<Y>,
    qkv: &[E],
    k: &Half<K, F>,
    v: &Half<K, F>,
    dims: AttnDims,
) {
    let (d, group) = (dims.head_dim, dims.group());
    let depth = d.div_ceil(LANES);
    let queries = task.out.len() * group;
    let mut q = vec![[0.0; LANES]; queries * depth];
    for (i, q) in q.chunks_mut(depth).enumerate() {
        let head = task.kv_head * group + i % group;
        let from = (task.first_row + i / group) * dims.qkv_cols() + head * 2 * d;
        pack(&qkv[from..from + d], q);
    }
    let q: Vec<&[Lanes]> = q.chunks(depth).collect();
    let mut acc = vec![0.0f32; queries * d];
    let mut running = vec![Running { max: f32::NEG_INFINITY, sum: 0.0 }; queries];
    let (mut keys, mut values) = (vec![[0.0; LANES]; PAGE_TOKENS * depth], vec![0.0f32; PAGE_TOKENS * d]);
    let mut key = vec![0.0f32; d];
    let mut sums = vec![[0.0; LANES]; TILE_ROWS * PAGE_TOKENS];
    let scale = 1.0 / (d as f32).sqrt();
    let end = task.first_position + task.out.len();
    for (p, &page) in task.pages[..end.div_ceil(PAGE_TOKENS)].iter().enumerate() {
        let first_token = p * PAGE_TOKENS;
        let tokens = PAGE_TOKENS.min(end - first_token);
        for j in 0..tokens {
            let from = ((page as usize * PAGE_TOKENS + j) * dims.kv_heads + task.kv_head) * d;
            k.widen(from, &mut key);
            pack(&key, &mut keys[j * depth..]);
            v.widen(from, &mut values[j * d..][..d]);
        }
        let keys: Vec<&[Lanes]> = keys.chunks(depth).take(tokens).collect();
        for (strip, q) in q.chunks(TILE_ROWS).enumerate() {
            let sums = &mut sums[..q.len() * tokens];
            sums.fill([0.0; LANES]);
            multiply(q, &keys, sums);
            for (i, sums) in (strip * TILE_ROWS..).zip(sums.chunks(tokens)) {
                let position = task.first_position + i / group;
                let visible = tokens.min((position + 1).saturating_sub(first_token));
                page_step(&sums[..visible], scale, &values, &mut running[i], &mut acc[i * d..][..d]);
            }
        }
    }
    let heads = task.out.into_iter().flat_map(|row| row.chunks_mut(d));
    for ((out, acc), running) in heads.zip(acc.chunks(d)).zip(&running) {
        for (out, &a) in out.iter_mut().zip(acc) {
            *out = Y::from_f32(a / running.sum);
        }
    }
}

/// One query against the tokens it sees of one page: `sums` are their unscaled scores' lanes.
fn page_step(sums: &[Lanes], scale: f32, values: &[f32], running: &mut Running, acc: &mut [f32]) {
    if sums.is_empty() {
        return;
    }
    let mut weights = [0.0f32; PAGE_TOKENS];
    let weights = &mut weights[..sums.len()];
    for (weight, sums) in weights.iter_mut().zip(sums) {
        *weight = tree(sums) * scale;
    }
    let max = weights.iter().fold(running.max, |max, &s| max.max(s));
    let shrink = (running.max - max).exp();
    running.max = max;
    running.sum *= shrink;
    for a in acc.iter_mut() {
        *a *= shrink;
    }
    for weight in weights.iter_mut() {
        *weight = (*weight - max).exp();
        running.sum += *weight;
    }
    add_values(weights, values, acc);
}

/// `acc += weights[j] * values[j]` for ascending `j`, four at a time through the registers.
fn add_values(weights: &[f32], values: &[f32], acc: &mut [f32]) {
    let d = acc.len();
    let (quads, rest) = weights.as_chunks::<4>();
    for (&[w0, w1, w2, w3], v) in quads.iter().zip(values.chunks(4 * d)) {
        let (v0, v) = v.split_at(d);
        let (v1, v) = v.split_at(d);
        let (v2, v3) = v.split_at(d);
        for ((((a, v0), v1), v2), v3) in acc.iter_mut().zip(v0).zip(v1).zip(v2).zip(v3) {
            *a = *a + w0 * v0 + w1 * v1 + w2 * v2 + w3 * v3;
        }
    }
    for (w, v) in rest.iter().zip(values[quads.len() * 4 * d..].chunks(d)) {
        for (a, v) in acc.iter_mut().zip(v) {
            *a += w * v;
        }
    }
}
