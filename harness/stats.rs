//! Summaries of a sample: median and quartiles by linear interpolation between order statistics.
//!
//! The p-quantile of n sorted values is at position p (n - 1), counted from 0, and is interpolated between its two
//! neighbours (type 7 of Hyndman and Fan 1996, the default of numpy and R).
//!
//! Intervals are percentile bootstrap intervals (Efron 1979): the statistic of seeded resamples with replacement, and of
//! these the quantiles that leave out half of what the level leaves at either end.

use highwater::num::philox;

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

/// The ends of a confidence interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Interval {
    /// Lower end.
    pub(crate) low: f64,
    /// Upper end.
    pub(crate) high: f64,
}

/// Resamples of a bootstrap interval.
const RESAMPLES: u32 = 2000;

impl Interval {
    /// The bootstrap interval of the median of `sample` at `level` (0.95), the same for the same `seed`; `None` if the sample
    /// has fewer than two values or one that is not finite.
    pub(crate) fn of_median(sample: &[f64], level: f64, seed: u64) -> Option<Interval> {
        if sample.len() < 2 || sample.iter().any(|value| !value.is_finite()) {
            return None;
        }
        let mut draw = Draw::new(seed);
        let mut resample = vec![0.0; sample.len()];
        let mut medians: Vec<f64> = (0..RESAMPLES).map(|_| draw.median_of_resample(sample, &mut resample)).collect();
        medians.sort_by(f64::total_cmp);
        let outside = (1.0 - level) / 2.0;
        Some(Interval { low: quantile(&medians, outside), high: quantile(&medians, 1.0 - outside) })
    }

    /// Half its width, as a fraction of `centre`.
    pub(crate) fn half_width_of(&self, centre: f64) -> f64 {
        (self.high - self.low) / 2.0 / centre.abs()
    }
}

/// Seeded draws of places in a sample.
pub(crate) struct Draw {
    key: [u32; 2],
    at: u32,
}

impl Draw {
    pub(crate) fn new(seed: u64) -> Draw {
        Draw { key: philox::stream_key(seed, "bootstrap"), at: 0 }
    }

    /// A number below `count`, which is below 2^32.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        let word = philox::philox4x32(self.key, [self.at, 0, 0, 0])[0];
        self.at = self.at.wrapping_add(1);
        ((u64::from(word) * count as u64) >> 32) as usize
    }

    /// The median of as many values of `sample`, drawn with replacement into `resample`.
    pub(crate) fn median_of_resample(&mut self, sample: &[f64], resample: &mut [f64]) -> f64 {
        for value in resample.iter_mut() {
            *value = sample[self.below(sample.len())];
        }
        resample.sort_by(f64::total_cmp);
        quantile(resample, 0.5)
    }
}

/// The `p`-quantile (0 to 1) of a non-empty ascending sample of finite values.
pub(crate) fn quantile(sorted: &[f64], p: f64) -> f64 {
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
    fn an_interval_holds_the_true_median_about_as_often_as_it_says() {
        // Uniform samples of 25 have the median 0.5; 300 intervals at 95 % miss 15 of them, give or take 4 (one sigma).
        let mut draw = Draw::new(7);
        let mut missed = 0;
        for seed in 0..300 {
            let sample: Vec<f64> = (0..25).map(|_| draw.below(1 << 30) as f64 / f64::from(1 << 30)).collect();
            let interval = Interval::of_median(&sample, 0.95, seed).unwrap();
            assert!(interval.low <= interval.high);
            missed += u32::from(interval.low > 0.5 || interval.high < 0.5);
        }
        assert!((3..=30).contains(&missed), "{missed} of 300 intervals miss");
    }

    #[test]
    fn an_interval_is_the_same_for_the_same_seed_and_none_of_one_value() {
        let sample = [3.0, 1.0, 2.0, 5.0, 4.0];
        let interval = Interval::of_median(&sample, 0.95, 1).unwrap();
        assert_eq!(Some(interval), Interval::of_median(&sample, 0.95, 1));
        assert!((interval.half_width_of(4.0) - (interval.high - interval.low) / 8.0).abs() < 1e-15);
        assert_eq!(Interval::of_median(&[2.0; 9], 0.95, 1), Some(Interval { low: 2.0, high: 2.0 }));
        assert_eq!(Interval::of_median(&[1.0], 0.95, 1), None);
        assert_eq!(Interval::of_median(&[1.0, f64::NAN], 0.95, 1), None);
    }

    #[test]
    fn nothing_and_values_that_are_not_finite_have_no_summary() {
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&[1.0, f64::NAN]), None);
        assert_eq!(Summary::of(&[f64::INFINITY]), None);
        assert!(Summary::of(&[-f64::MAX, f64::MAX]).unwrap().median.is_finite());
    }
}
