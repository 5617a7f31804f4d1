//! Causal attention over pages, in f32.
//!
//! Order, for each row and head: pages ascending. In a page the scores come first, each a dot product in 16 lanes and a
//! tree as [`linear`](super::linear) sums; then the running maximum is raised, the running sum and the accumulators are
//! scaled by the exponential of its change, and the page's tokens are added one by one, ascending. Pages are counted from
//! the sequence's start, so a row's result does not depend on the chunk it came in.

use rayon::prelude::*;

use super::linear::tree;
use crate::error::{Error, Result};
use crate::ops::Batch;
use crate::ops::attention::AttnDims;
use crate::ops::batch::PAGE_TOKENS;
use crate::ops::kv_write::KvPages;
use crate::tensor::{Elem, Tensor};
use crate::with_elem;

const OP: &str = "attention";
const LANES: usize = 16;
/// Rows that share one conversion of a page to f32.
const BLOCK_ROWS: usize = 8;

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
    with_elem!(OP, out.dtype(), Y => with_elem!(OP, qkv.dtype(), E => with_elem!(OP, kv.k.dtype(), K => {
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
                let first = tasks.len();
                tasks.extend((0..dims.kv_heads).map(|kv_head| Task {
                    pages,
                    kv_head,
                    first_row: span.start + from,
                    first_position: span.context + from,
                    out: Vec::with_capacity(len),
                }));
                for row in rows.by_ref().take(len) {
                    if inert {
                        row.fill(Y::from_f32(0.0));
                        continue;
                    }
                    for (task, heads) in tasks[first..].iter_mut().zip(row.chunks_mut(dims.group() * dims.head_dim)) {
                        task.out.push(heads);
                    }
                }
            }
        }
        let (qkv, k, v) = (qkv.host::<E>()?, kv.k.host::<K>()?, kv.v.host::<K>()?);
        tasks.into_par_iter().for_each(|task| block(task, qkv, k, v, dims));
        Ok(())
    })))
}

/// One query head's running softmax.
struct Running {
    max: f32,
    sum: f32,
}

fn block<E: Elem, K: Elem, Y: Elem>(task: Task<Y>, qkv: &[E], k: &[K], v: &[K], dims: AttnDims) {
    let (d, group) = (dims.head_dim, dims.group());
    let queries = task.out.len() * group;
    let mut q = vec![0.0f32; queries * d];
    for (i, q) in q.chunks_mut(d).enumerate() {
        let head = task.kv_head * group + i % group;
        let from = (task.first_row + i / group) * dims.qkv_cols() + head * 2 * d;
        widen(&qkv[from..from + d], q);
    }
    let mut acc = vec![0.0f32; queries * d];
    let mut running: Vec<Running> = (0..queries).map(|_| Running { max: f32::NEG_INFINITY, sum: 0.0 }).collect();
    let (mut keys, mut values) = (vec![0.0f32; PAGE_TOKENS * d], vec![0.0f32; PAGE_TOKENS * d]);
    let scale = 1.0 / (d as f32).sqrt();
    let last_position = task.first_position + task.out.len().saturating_sub(1);
    for (p, &page) in task.pages.iter().enumerate() {
        let first_token = p * PAGE_TOKENS;
        if task.out.is_empty() || first_token > last_position {
            break;
        }
        let tokens = PAGE_TOKENS.min(last_position + 1 - first_token);
        for j in 0..tokens {
            let from = ((page as usize * PAGE_TOKENS + j) * dims.kv_heads + task.kv_head) * d;
            widen(&k[from..from + d], &mut keys[j * d..][..d]);
            widen(&v[from..from + d], &mut values[j * d..][..d]);
        }
        for (i, running) in running.iter_mut().enumerate() {
            let position = task.first_position + i / group;
            if first_token > position {
                continue;
            }
            let visible = PAGE_TOKENS.min(position + 1 - first_token);
            page_step(
                &q[i * d..][..d],
                &keys[..visible * d],
                &values[..visible * d],
                scale,
                running,
                &mut acc[i * d..][..d],
            );
        }
    }
    let heads = task.out.into_iter().flat_map(|row| row.chunks_mut(d));
    for ((out, acc), running) in heads.zip(acc.chunks(d)).zip(&running) {
        for (out, &a) in out.iter_mut().zip(acc) {
            *out = Y::from_f32(a / running.sum);
        }
    }
}

/// One query against one page's visible tokens.
fn page_step(q: &[f32], keys: &[f32], values: &[f32], scale: f32, running: &mut Running, acc: &mut [f32]) {
    let d = q.len();
    let mut scores = [0.0f32; PAGE_TOKENS];
    let scores = &mut scores[..keys.len() / d];
    for (score, key) in scores.iter_mut().zip(keys.chunks(d)) {
        *score = dot(q, key) * scale;
    }
    let max = scores.iter().fold(running.max, |max, &s| max.max(s));
    let shrink = (running.max - max).exp();
    running.max = max;
    running.sum *= shrink;
    for a in acc.iter_mut() {
        *a *= shrink;
    }
    for (&score, value) in scores.iter().zip(values.chunks(d)) {
        let p = (score - max).exp();
        running.sum += p;
        for (a, &v) in acc.iter_mut().zip(value) {
            *a += p * v;
        }
    }
}

fn widen<E: Elem>(from: &[E], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = from.to_f32();
    }
}

fn dot(x: &[f32], w: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for (x, w) in x.chunks(LANES).zip(w.chunks(LANES)) {
        for ((lane, x), w) in lanes.iter_mut().zip(x).zip(w) {
            *lane += x * w;
        }
    }
    tree(&lanes)
}
