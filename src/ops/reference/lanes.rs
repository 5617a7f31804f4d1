//! Sums along a row. The order is fixed: lane l of 16 adds elements l, l + 16, l + 32, ... in turn, then lanes are added
//! in halves (l and l + 8, l + 4, l + 2, l + 1). It does not depend on the thread count or on other rows.

const LANES: usize = 16;

/// The sum of `a[i] * b[i]`, in f32.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for l in 0..LANES {
            lanes[l] += a[l] * b[l];
        }
    }
    for (l, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        lanes[l] += a * b;
    }
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// The sum of squares, in f32.
pub(crate) fn sum_squares(x: &[f32]) -> f32 {
    dot(x, x)
}
