//! How well a rate is known from how often something happened: the exact interval of Clopper and Pearson (1934).

use serde::Serialize;

/// Level of the intervals.
pub(crate) const LEVEL: f64 = 0.95;

/// `hits` of `trials`, with the rates between which the true one lies at [`LEVEL`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Rate {
    /// How often it happened.
    pub(crate) hits: usize,
    /// How often it could have.
    pub(crate) trials: usize,
    /// The least rate at which so many hits are not too many.
    pub(crate) low: f64,
    /// The largest at which so few are not too few.
    pub(crate) high: f64,
}

impl Rate {
    /// The rate of `hits`, of which there are no more than `trials`.
    pub(crate) fn of(hits: usize, trials: usize) -> Rate {
        let hits = hits.min(trials);
        let tail = (1.0 - LEVEL) / 2.0;
        let low = if hits == 0 { 0.0 } else { crossing(|p| 1.0 - at_most(hits - 1, trials, p) >= tail) };
        let high = if hits == trials { 1.0 } else { crossing(|p| at_most(hits, trials, p) <= tail) };
        Rate { hits, trials, low, high }
    }

    /// `1/200 (0.0 % to 2.8 %)`.
    pub(crate) fn text(&self) -> String {
        format!("{}/{} ({:.1} % to {:.1} %)", self.hits, self.trials, self.low * 100.0, self.high * 100.0)
    }
}

/// The rate from which on `holds`, by bisection.
fn crossing(holds: impl Fn(f64) -> bool) -> f64 {
    let (mut below, mut above) = (0.0, 1.0);
    for _ in 0..60 {
        let middle = (below + above) / 2.0;
        if holds(middle) {
            above = middle;
        } else {
            below = middle;
        }
    }
    above
}

/// The probability of no more than `hits` of `trials` at the rate `p`.
fn at_most(hits: usize, trials: usize, p: f64) -> f64 {
    if p <= 0.0 {
        return 1.0;
    }
    if p >= 1.0 {
        return if hits >= trials { 1.0 } else { 0.0 };
    }
    let (mut sum, mut ways) = (0.0, 0.0f64);
    for k in 0..=hits.min(trials) {
        // The logarithm of the number of ways, so that no factor overflows.
        if k > 0 {
            ways += ((trials - k + 1) as f64).ln() - (k as f64).ln();
        }
        sum += (ways + k as f64 * p.ln() + (trials - k) as f64 * (-p).ln_1p()).exp();
    }
    sum.min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_the_published_ones() {
        // By the closed forms at the ends: 0 of n has the upper end 1 - 0.025^(1/n), n of n the lower end 0.025^(1/n).
        for n in [1usize, 20, 200, 10_000] {
            let end = 0.025f64.powf(1.0 / n as f64);
            let (none, all) = (Rate::of(0, n), Rate::of(n, n));
            assert!(none.low == 0.0 && (none.high - (1.0 - end)).abs() < 1e-9, "{none:?}");
            assert!(all.high == 1.0 && (all.low - end).abs() < 1e-9, "{all:?}");
        }
        // R: binom.test(3, 10), binom.test(95, 100).
        for (hits, trials, low, high) in [(3, 10, 0.066_739_51, 0.652_452_9), (95, 100, 0.887_165_1, 0.983_568_1)] {
            let rate = Rate::of(hits, trials);
            assert!((rate.low - low).abs() < 1e-6 && (rate.high - high).abs() < 1e-6, "{rate:?}");
        }
    }

    #[test]
    fn a_rate_reads_with_its_interval() {
        assert_eq!(Rate::of(0, 20).text(), "0/20 (0.0 % to 16.8 %)");
    }
}
