//! Summaries of a sample: median and quartiles by linear interpolation between order statistics.
//!
//! The p-quantile of n sorted values is at position p (n - 1), counted from 0, and is interpolated between its two
//! neighbours (type 7 of Hyndman and Fan 1996, the default of numpy and R).

/// Order statistics of a sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Summary {
    /// Values in the sample, at least 1.
    pub(crate) count: u64,
    /// Smallest.
    pub(crate) min: f64,
    /// First quartile.
    pub(crate) q1: f64,
    /// Median.
    pub(crate) median: f64,
    /// Third quartile.
    pub(crate) q3: f64,
    /// Largest.
    pub(crate) max: f64,
}

impl Summary {
    /// The summary of `sample`; `None` if it is empty or holds a value that is not finite.
    pub(crate) fn of(sample: &[f64]) -> Option<Summary> {
        if sample.is_empty() || sample.iter().any(|value| !value.is_finite()) {
            return None;
        }
        let mut sorted = sample.to_vec();
        sorted.sort_by(f64::total_cmp);
        Some(Summary {
            count: sorted.len() as u64,
            min: sorted[0],
            q1: quantile(&sorted, 0.25),
            median: quantile(&sorted, 0.5),
            q3: quantile(&sorted, 0.75),
            max: sorted[sorted.len() - 1],
        })
    }
}

/// The `p`-quantile (0 to 1) of a non-empty ascending sample of finite values.
fn quantile(sorted: &[f64], p: f64) -> f64 {
    let position = p * (sorted.len() - 1) as f64;
    let below = position.floor() as usize;
    let above = (below + 1).min(sorted.len() - 1);
    let weight = position - below as f64;
    // The two-product form cannot overflow when the neighbours have opposite signs and are huge.
    sorted[below] * (1.0 - weight) + sorted[above] * weight
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_interpolate_linearly() {
        // numpy.percentile([4, 1, 3, 2], [25, 50, 75]) is [1.75, 2.5, 3.25].
        let summary = Summary::of(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!(summary, Summary { count: 4, min: 1.0, q1: 1.75, median: 2.5, q3: 3.25, max: 4.0 });
        let odd = Summary::of(&[5.0, 1.0, 2.0, 9.0, 7.0]).unwrap();
        assert_eq!((odd.q1, odd.median, odd.q3), (2.0, 5.0, 7.0));
    }

    #[test]
    fn one_value_is_its_own_summary() {
        let summary = Summary::of(&[2.5]).unwrap();
        assert_eq!((summary.min, summary.q1, summary.median, summary.q3, summary.max), (2.5, 2.5, 2.5, 2.5, 2.5));
    }

    #[test]
    fn an_outlier_moves_the_largest_and_not_the_median() {
        let summary = Summary::of(&[1.0, 1.0, 1.0, 1.0, 1000.0]).unwrap();
        assert_eq!((summary.median, summary.q3, summary.max), (1.0, 1.0, 1000.0));
    }

    #[test]
    fn nothing_and_values_that_are_not_finite_have_no_summary() {
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&[1.0, f64::NAN]), None);
        assert_eq!(Summary::of(&[f64::INFINITY]), None);
        assert!(Summary::of(&[-f64::MAX, f64::MAX]).unwrap().median.is_finite());
    }
}
