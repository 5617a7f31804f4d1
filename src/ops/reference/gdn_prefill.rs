//! The chunked gated delta rule in f32. Per (sequence, value head), chunks in order; in a chunk every product's sum
//! runs in index order from zero (norms: the order of `lanes`), the unit lower-triangular system is
//! solved by forward substitution, and the running sum of g is kept in f64, since differences of it are exponentiated.
//! A bf16 state is read exactly and rounded once, when the span is done.

use rayon::prelude::*;

use super::gdn_decode::unit;
use crate::ops::Span;
use crate::ops::gdn_prefill::{CHUNK_TOKENS, GdnDims};
use crate::tensor::Elem;

/// Rows of `out` a product works on together; the solve takes rows in such blocks too.
const TILE_ROWS: usize = 4;
/// Columns of `out` a product keeps in registers.
const TILE_COLS: usize = 8;

/// exp(g) is 0 in f32 from -104 on; a g below this counts as this, so that -inf has finite differences.
const LOG_ZERO: f64 = -1e3;

/// One value head of one sequence: where its state and its output rows are.
struct Task<'a, E, S> {
    head: usize,
    span: Span,
    state: &'a mut [S],
    out: Vec<&'a mut [E]>,
}

/// A thread's scratch: one chunk of one head.
struct Scratch {
    q: Vec<f32>,
    k: Vec<f32>,
    k_t: Vec<f32>,
    a: Vec<f32>,
    p: Vec<f32>,
    x: Vec<f32>,
    o: Vec<f32>,
    s: Vec<f32>,
}

impl Scratch {
    fn new(dims: GdnDims) -> Scratch {
        let zeros = |n: usize| vec![0.0; n];
        let (dk, dv, c) = (dims.key_dim, dims.value_dim, CHUNK_TOKENS);
        Scratch {
            q: zeros(c * dk),
            k: zeros(c * dk),
            k_t: zeros(c * dk),
            a: zeros(c * c),
            p: zeros(c * c),
            x: zeros(c * dv),
            o: zeros(c * dv),
            s: zeros(dk * dv),
        }
    }
}

/// The rows of `spans` of `out`; state blocks are updated in place, `None` is an inert sequence: zero rows.
pub(crate) fn chunked<E: Elem, S: Elem>(
    conv: &[E],
    g: &[f32],
    beta: &[f32],
    states: Vec<Option<&mut [S]>>,
    dims: GdnDims,
    spans: &[Span],
    out: &mut [E],
) {
    let first = spans.first().map_or(0, |s| s.start);
    let mut rows = out[first * dims.out_width()..].chunks_exact_mut(dims.out_width());
    let mut tasks: Vec<Task<E, S>> = Vec::with_capacity(spans.len() * dims.value_heads);
    for (&span, state) in spans.iter().zip(states) {
        let rows = rows.by_ref().take(span.len);
        let Some(state) = state else {
            rows.for_each(|row| row.fill(E::from_f32(0.0)));
            continue;
        };
        let mut heads: Vec<Vec<&mut [E]>> = (0..dims.value_heads).map(|_| Vec::with_capacity(span.len)).collect();
        for row in rows {
            heads.iter_mut().zip(row.chunks_exact_mut(dims.value_dim)).for_each(|(h, part)| h.push(part));
        }
        let blocks = state.chunks_exact_mut(dims.key_dim * dims.value_dim);
        tasks.extend(heads.into_iter().zip(blocks).enumerate().map(|(head, (out, state))| Task {
            head,
            span,
            state,
            out,
        }));
    }
    tasks.into_par_iter().for_each_init(
        || Scratch::new(dims),
        |scratch, task| {
            scratch.s.iter_mut().zip(&*task.state).for_each(|(s, b)| *s = b.to_f32());
            let mut out = task.out;
            for (i, out) in out.chunks_mut(CHUNK_TOKENS).enumerate() {
                chunk(conv, g, beta, dims, task.head, task.span.start + i * CHUNK_TOKENS, scratch, out);
            }
            task.state.iter_mut().zip(&scratch.s).for_each(|(b, s)| *b = S::from_f32(*s));
        },
    );
}

/// Rows `start..start + out.len()` of one head, at most a chunk; `scratch.s` is the state.
fn chunk<E: Elem>(
    conv: &[E],
    g: &[f32],
    beta: &[f32],
    dims: GdnDims,
    head: usize,
    start: usize,
    scratch: &mut Scratch,
    out: &mut [&mut [E]],
) {
    let GdnDims { key_heads, value_heads, key_dim: dk, value_dim: dv } = dims;
    let n = out.len();
    let Scratch { q, k, k_t, a, p, x, o, s } = scratch;
    let row = |i: usize| &conv[(start + i) * dims.channels()..][..dims.channels()];
    let key_col = head / (value_heads / key_heads) * dk;
    let q_scale = (dk as f32).powf(-0.5);
    for i in 0..n {
        unit(&row(i)[key_col..][..dk], q_scale, &mut q[i * dk..][..dk]);
        unit(&row(i)[key_heads * dk + key_col..][..dk], 1.0, &mut k[i * dk..][..dk]);
        for (c, k) in k[i * dk..][..dk].iter().enumerate() {
            k_t[c * n + i] = *k;
        }
    }
    let gate = |values: &[f32], i: usize| values[(start + i) * value_heads + head];
    let mut c = [0.0_f64; CHUNK_TOKENS];
    let mut sum = 0.0;
    for (i, c) in c[..n].iter_mut().enumerate() {
        let g = f64::from(gate(g, i));
        sum += if g < LOG_ZERO { LOG_ZERO } else { g };
        *c = sum;
    }
    let decay = |i: usize, j: usize| ((c[i] - c[j]) as f32).exp();

    // A and P, up to the diagonal; what lies above it is never read as a sum's term.
    for from in (0..n).step_by(TILE_ROWS) {
        let to = n.min(from + TILE_ROWS);
        for (x, out) in [(&*k, &mut *a), (&*q, &mut *p)] {
            let out = &mut out[from * n..to * n];
            out.fill(0.0);
            let cols = n.min(to.next_multiple_of(TILE_COLS));
            add_product(&x[from * dk..to * dk], k_t, n, dk, out, n, cols);
        }
        for i in from..to {
            for j in 0..i {
                let decay = decay(i, j);
                a[i * n + j] *= -gate(beta, i) * decay;
                p[i * n + j] *= decay;
            }
            p[i * n + i + 1..(i + 1) * n].fill(0.0);
        }
    }

    // The right-hand side beta (v - exp(c) k S), and what the state contributes to the output.
    x[..n * dv].fill(0.0);
    o[..n * dv].fill(0.0);
    add_product(&k[..n * dk], s, dv, dk, &mut x[..n * dv], dv, dv);
    add_product(&q[..n * dk], s, dv, dk, &mut o[..n * dv], dv, dv);
    for i in 0..n {
        let (from_start, beta) = ((c[i] as f32).exp(), gate(beta, i));
        let v = &row(i)[2 * key_heads * dk + head * dv..][..dv];
        x[i * dv..][..dv].iter_mut().zip(v).for_each(|(x, v)| *x = beta * (v.to_f32() - from_start * *x));
        o[i * dv..][..dv].iter_mut().for_each(|o| *o *= from_start);
    }

    // (I + A) X = rhs, by blocks of rows: the solved rows first, as a product, then the rows of the block in turn.
    for from in (0..n).step_by(TILE_ROWS) {
        let to = n.min(from + TILE_ROWS);
        let (done, rest) = x[..n * dv].split_at_mut(from * dv);
        let block = &mut rest[..(to - from) * dv];
        add_product_pitched(&a[from * n..to * n], n, done, dv, from, block, dv, dv);
        for i in from + 1..to {
            let (solved, current) = block.split_at_mut((i - from) * dv);
            for (j, solved) in solved.chunks_exact(dv).enumerate() {
                let a = a[i * n + from + j];
                current[..dv].iter_mut().zip(solved).for_each(|(x, s)| *x += a * s);
            }
        }
        add_product_pitched(&p[from * n..to * n], n, x, dv, to, &mut o[from * dv..to * dv], dv, dv);
    }
    for (out, o) in out.iter_mut().zip(o.chunks_exact(dv)) {
        out.iter_mut().zip(o).for_each(|(out, o)| *out = E::from_f32(*o));
    }

    let from_start = (c[n - 1] as f32).exp();
    for s in s.iter_mut() {
        *s *= from_start;
    }
    for i in 0..n {
        let decay = decay(n - 1, i);
        (0..dk).for_each(|c| k_t[c * n + i] *= decay);
    }
    add_product(&k_t[..dk * n], x, dv, n, s, dv, dv);
}

/// As [`add_product_pitched`], the rows of `a` being `terms` long.
fn add_product(a: &[f32], b: &[f32], b_pitch: usize, terms: usize, out: &mut [f32], pitch: usize, cols: usize) {
    add_product_pitched(a, terms, b, b_pitch, terms, out, pitch, cols);
}

/// `out[i, c] += sum_t a[i, t] * b[t, c]`, t in order from 0 to `terms`, for the first `cols` columns of every row.
fn add_product_pitched(
    a: &[f32],
    a_pitch: usize,
    b: &[f32],
    b_pitch: usize,
    terms: usize,
    out: &mut [f32],
    pitch: usize,
    cols: usize,
) {
    for (a, out) in a.chunks(TILE_ROWS * a_pitch).zip(out.chunks_mut(TILE_ROWS * pitch)) {
        match a.len() / a_pitch {
            4 => rows::<4>(a, a_pitch, b, b_pitch, terms, out, pitch, cols),
            3 => rows::<3>(a, a_pitch, b, b_pitch, terms, out, pitch, cols),
            2 => rows::<2>(a, a_pitch, b, b_pitch, terms, out, pitch, cols),
            _ => rows::<1>(a, a_pitch, b, b_pitch, terms, out, pitch, cols),
        }
    }
}

/// R rows of a product.
fn rows<const R: usize>(
    a: &[f32],
    a_pitch: usize,
    b: &[f32],
    b_pitch: usize,
    terms: usize,
    out: &mut [f32],
    pitch: usize,
    cols: usize,
) {
    let a: [&[f32]; R] = std::array::from_fn(|r| &a[r * a_pitch..][..terms]);
    let full = cols / TILE_COLS * TILE_COLS;
    for col in (0..full).step_by(TILE_COLS) {
        let mut sum = [[0.0_f32; TILE_COLS]; R];
        for (t, b) in b.chunks(b_pitch).take(terms).enumerate() {
            let Some((b, _)) = b[col..].split_first_chunk::<TILE_COLS>() else { break };
            for r in 0..R {
                for l in 0..TILE_COLS {
                    sum[r][l] += a[r][t] * b[l];
                }
            }
        }
        for (r, sum) in sum.iter().enumerate() {
            out[r * pitch + col..][..TILE_COLS].iter_mut().zip(sum).for_each(|(o, s)| *o += s);
        }
    }
    for r in 0..R {
        for col in full..cols {
            let mut sum = 0.0;
            for (t, a) in a[r].iter().enumerate() {
                sum += a * b[t * b_pitch + col];
            }
            out[r * pitch + col] += sum;
        }
    }
}
