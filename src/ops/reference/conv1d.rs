//! The short convolution: per output the taps are added in order, oldest input first, in f32.

use rayon::prelude::*;

use super::activation::silu;
use crate::ops::Span;
use crate::tensor::{Elem, Rows};

/// Elements a thread takes at a time at least.
const GRAIN: usize = 1 << 13;

/// Writes every row of `out`, then leaves each sequence's last `taps - 1` raw inputs in its state, `[C, taps - 1]`,
/// which holds those before the step on entry. `None` is an inert sequence: zero rows.
pub(crate) fn causal<E: Elem>(
    x: Rows<E>,
    w: &[f32],
    taps: usize,
    mut states: Vec<Option<&mut [E]>>,
    spans: &[Span],
    out: &mut [E],
) {
    let channels = w.len() / taps;
    let kept = taps - 1;
    // Tap-major, so that the inner loop runs along channels.
    let w_by_tap: Vec<f32> = (0..taps * channels).map(|i| w[(i % channels) * taps + i / channels]).collect();
    let owner: Vec<usize> = spans.iter().enumerate().flat_map(|(i, s)| std::iter::repeat_n(i, s.len)).collect();
    out.par_chunks_exact_mut(channels).enumerate().with_min_len(GRAIN.div_ceil(channels)).for_each_init(
        || vec![0.0; channels],
        |sum, (row, out)| {
            let Some(state) = &states[owner[row]] else {
                out.fill(E::from_f32(0.0));
                return;
            };
            let start = spans[owner[row]].start;
            sum.fill(0.0);
            for (j, w) in w_by_tap.chunks_exact(channels).enumerate() {
                if row + j >= start + kept {
                    let x = x.row(row + j - kept);
                    sum.iter_mut().zip(x).zip(w).for_each(|((sum, x), w)| *sum += x.to_f32() * w);
                } else {
                    let x = state.iter().skip(row + j - start).step_by(kept);
                    sum.iter_mut().zip(x).zip(w).for_each(|((sum, x), w)| *sum += x.to_f32() * w);
                }
            }
            for (out, &sum) in out.iter_mut().zip(&*sum) {
                *out = E::from_f32(silu(E::from_f32(sum).to_f32()));
            }
        },
    );
    states.par_iter_mut().zip(spans).for_each(|(state, span)| {
        let Some(state) = state else { return };
        let new = span.len.min(kept);
        for old in state.chunks_exact_mut(kept) {
            old.rotate_left(new);
        }
        for j in kept - new..kept {
            let x = x.row(span.start + span.len + j - kept);
            state.iter_mut().skip(j).step_by(kept).zip(x).for_each(|(s, x)| *s = *x);
        }
    });
}
