//! Whether one sample of times is slower than another: SAME, FASTER, SLOWER, or INCONCLUSIVE with the reason.
//!
//! What is compared is the ratio of the medians, candidate over base, with the bootstrap interval of that ratio at
//! [`LEVEL`] (percentiles of seeded resamples of either sample). The rules, in this order:
//!
//! 1. SLOWER or FASTER where the interval does not hold 1 and the effect is larger than the tolerance. The tolerance is
//!    the threshold, or the absolute floor as a share of the base where that is more.
//! 2. SAME where the interval is known to a half-width of [`MOST_HALF_WIDTH`] or better and lies within the tolerance.
//! 3. INCONCLUSIVE otherwise, and always below [`LEAST_SAMPLES`] samples.
//!
//! The level is high because the gate is asked often: with it and ten samples on either side, fewer than one in 200
//! comparisons of equal things is a verdict of a difference, on quiet machines and on ones whose speed jumps by half;
//! `gate::noise` holds that on samples of real runs.

use serde::Serialize;

use crate::stats::{Draw, Summary, quantile};

/// Level of the interval of a ratio.
pub(crate) const LEVEL: f64 = 0.998;
/// Largest half-width of an interval, as a share of the base, at which two things may be called the same.
pub(crate) const MOST_HALF_WIDTH: f64 = 0.01;
/// Samples on either side below which nothing is concluded: fewer have too few orders to be surprised by one.
pub(crate) const LEAST_SAMPLES: usize = 10;
/// Differences of a step, or of a kernel that is launched by itself, up to this many ms are no regression.
pub(crate) const STEP_FLOOR_MS: f64 = 0.002;
/// Resamples of an interval: 0.1 % of them are beyond either end.
const RESAMPLES: usize = 4000;

/// How two samples compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum Verdict {
    /// Within the tolerance, and known well enough to say so.
    Same,
    /// Faster by more than the tolerance.
    Faster,
    /// Slower by more than the tolerance.
    Slower,
    /// The samples do not tell.
    Inconclusive,
}

impl Verdict {
    /// The word in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Verdict::Same => "SAME",
            Verdict::Faster => "FASTER",
            Verdict::Slower => "SLOWER",
            Verdict::Inconclusive => "INCONCLUSIVE",
        }
    }
}

/// What counts as a difference.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rule {
    /// As a share of the base.
    pub(crate) threshold: f64,
    /// In the samples' own unit.
    pub(crate) floor: f64,
}

impl Rule {
    /// The rule of a step's times in ms.
    pub(crate) fn of_steps(threshold: f64) -> Rule {
        Rule { threshold, floor: STEP_FLOOR_MS }
    }
}

/// A comparison of two samples.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Comparison {
    /// Median of the base, in the samples' unit.
    pub(crate) base: f64,
    /// Median of the candidate.
    pub(crate) candidate: f64,
    /// Candidate over base.
    pub(crate) ratio: f64,
    /// Lower end of its interval; null where there are too few samples for one.
    pub(crate) low: Option<f64>,
    /// Upper end.
    pub(crate) high: Option<f64>,
    /// Samples of the base.
    pub(crate) base_samples: usize,
    /// Samples of the candidate.
    pub(crate) candidate_samples: usize,
    /// What is concluded.
    pub(crate) verdict: Verdict,
    /// Why nothing is, where nothing is.
    pub(crate) why: Option<String>,
}

impl Comparison {
    /// Compares two samples of times drawn one after the other. The same samples and `seed` give the same answer. An error
    /// says which sample is none: empty, or with a value that is no positive number.
    pub(crate) fn of(base: &[f64], candidate: &[f64], rule: Rule, seed: u64) -> Result<Comparison, String> {
        let (of_base, of_candidate) = (median(base, "baseline")?, median(candidate, "candidate")?);
        let enough = base.len().min(candidate.len()) >= 2;
        let interval = enough.then(|| {
            let mut draw = Draw::new(seed);
            let (mut left, mut right) = (vec![0.0; base.len()], vec![0.0; candidate.len()]);
            ends(|| {
                let below = draw.median_of_resample(base, &mut left);
                draw.median_of_resample(candidate, &mut right) / below
            })
        });
        let counts = (base.len(), candidate.len());
        Ok(Comparison::judge(of_base, of_candidate, of_candidate / of_base, interval, counts, rule))
    }

    /// Compares by the ratios of pairs measured side by side: what drifts over a run is in both halves of a pair. `base` is
    /// the median time of the base.
    pub(crate) fn of_pairs(base: f64, ratios: &[f64], rule: Rule, seed: u64) -> Result<Comparison, String> {
        let base = median(&[base], "baseline")?;
        let ratio = median(ratios, "sample of ratios")?;
        let interval = (ratios.len() >= 2).then(|| {
            let (mut draw, mut resample) = (Draw::new(seed), vec![0.0; ratios.len()]);
            ends(|| draw.median_of_resample(ratios, &mut resample))
        });
        Ok(Comparison::judge(base, base * ratio, ratio, interval, (ratios.len(), ratios.len()), rule))
    }

    fn judge(
        base: f64,
        candidate: f64,
        ratio: f64,
        interval: Option<(f64, f64)>,
        (base_samples, candidate_samples): (usize, usize),
        rule: Rule,
    ) -> Comparison {
        let tolerance = rule.threshold.max(rule.floor / base);
        let least = base_samples.min(candidate_samples);
        let undecided = |why: String| (Verdict::Inconclusive, Some(why));
        let (verdict, why) = match interval {
            _ if least < LEAST_SAMPLES => undecided(format!("{least} samples; {LEAST_SAMPLES} are needed at least")),
            None => undecided("no interval".into()),
            Some((low, _)) if low > 1.0 && ratio - 1.0 > tolerance => (Verdict::Slower, None),
            Some((_, high)) if high < 1.0 && 1.0 - ratio > tolerance => (Verdict::Faster, None),
            Some((low, high)) => {
                let half = (high - low) / 2.0;
                if half > MOST_HALF_WIDTH {
                    undecided(format!(
                        "the interval is +-{:.2} % wide; {:.0} % is needed",
                        half * 100.0,
                        MOST_HALF_WIDTH * 100.0
                    ))
                } else if low >= 1.0 - tolerance && high <= 1.0 + tolerance {
                    (Verdict::Same, None)
                } else {
                    undecided(format!("the interval crosses the edge of +-{:.2} %", tolerance * 100.0))
                }
            }
        };
        let (low, high) = interval.unzip();
        Comparison { base, candidate, ratio, low, high, base_samples, candidate_samples, verdict, why }
    }

    /// Half the interval's width, as a share of the base.
    pub(crate) fn half_width(&self) -> Option<f64> {
        Some((self.high? - self.low?) / 2.0)
    }

    /// The change in percent, with its interval.
    pub(crate) fn percent(&self) -> String {
        let percent = |ratio: f64| format!("{:+.2}", (ratio - 1.0) * 100.0);
        match (self.low, self.high) {
            (Some(low), Some(high)) => format!("{} [{}, {}] %", percent(self.ratio), percent(low), percent(high)),
            _ => format!("{} %", percent(self.ratio)),
        }
    }
}

/// The ends of the interval of what `one` draws.
fn ends(mut one: impl FnMut() -> f64) -> (f64, f64) {
    let mut drawn: Vec<f64> = (0..RESAMPLES).map(|_| one()).collect();
    drawn.sort_by(f64::total_cmp);
    let outside = (1.0 - LEVEL) / 2.0;
    (quantile(&drawn, outside), quantile(&drawn, 1.0 - outside))
}

/// The median of times, each of which is a positive number.
fn median(sample: &[f64], whose: &str) -> Result<f64, String> {
    if let Some(bad) = sample.iter().find(|value| !value.is_normal() || **value < 0.0) {
        return Err(format!("the {whose} holds a time of {bad}, and times are positive numbers"));
    }
    Summary::of(sample).map(|summary| summary.median).ok_or_else(|| format!("the {whose} holds no times"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: Rule = Rule { threshold: 0.01, floor: 0.0 };

    /// `n` values around 1, `spread` apart from end to end, in no order.
    fn around_one(n: usize, spread: f64) -> Vec<f64> {
        (0..n).map(|i| 1.0 + spread * ((i * 7 % n) as f64 / (n - 1) as f64 - 0.5)).collect()
    }

    fn scaled(sample: &[f64], by: f64) -> Vec<f64> {
        sample.iter().map(|value| value * by).collect()
    }

    fn verdict(base: &[f64], candidate: &[f64], rule: Rule) -> Verdict {
        Comparison::of(base, candidate, rule, 1).unwrap().verdict
    }

    #[test]
    fn each_verdict_has_its_samples() {
        let base = around_one(20, 0.004);
        for (by, wanted) in [
            (1.0, Verdict::Same),
            (1.004, Verdict::Same),
            (1.03, Verdict::Slower),
            (0.97, Verdict::Faster),
            (1.0099, Verdict::Inconclusive),
        ] {
            assert_eq!(verdict(&base, &scaled(&base, by), RULE), wanted, "{by}");
        }
    }

    #[test]
    fn wide_samples_and_few_are_never_the_same() {
        let wide = around_one(20, 0.2);
        let compared = Comparison::of(&wide, &wide, Rule { threshold: 0.5, floor: 0.0 }, 1).unwrap();
        assert!(compared.half_width().unwrap() > MOST_HALF_WIDTH);
        assert_eq!(compared.verdict, Verdict::Inconclusive);
        assert!(compared.why.unwrap().contains("1 % is needed"));
        let few = vec![1.0; LEAST_SAMPLES - 1];
        let compared = Comparison::of(&few, &scaled(&few, 2.0), RULE, 1).unwrap();
        assert_eq!((compared.verdict, compared.ratio), (Verdict::Inconclusive, 2.0));
        assert!(compared.why.unwrap().contains("9 samples; 10 are needed"));
        let one = Comparison::of(&[1.0], &[1.0], RULE, 1).unwrap();
        assert_eq!((one.low, one.verdict), (None, Verdict::Inconclusive));
    }

    #[test]
    fn the_floor_stands_where_the_threshold_is_less() {
        let base = around_one(20, 0.004);
        let floor = |floor| Rule { threshold: 0.01, floor };
        assert_eq!(verdict(&base, &scaled(&base, 1.03), floor(0.02)), Verdict::Slower);
        assert_eq!(verdict(&base, &scaled(&base, 1.03), floor(0.05)), Verdict::Same);
        assert_eq!(verdict(&base, &scaled(&base, 1.2), floor(0.05)), Verdict::Slower);
    }

    #[test]
    fn pairs_cancel_what_drifts() {
        // The base doubles over the run; each candidate is 3 % above the base beside it.
        let base: Vec<f64> = (0..12).map(|i| 1.0 + f64::from(i) / 12.0).collect();
        let candidate = scaled(&base, 1.03);
        assert_eq!(verdict(&base, &candidate, RULE), Verdict::Inconclusive);
        let ratios: Vec<f64> = base.iter().zip(&candidate).map(|(a, b)| b / a).collect();
        let paired = Comparison::of_pairs(1.5, &ratios, RULE, 1).unwrap();
        assert_eq!((paired.verdict, paired.base_samples), (Verdict::Slower, 12));
        assert!((paired.candidate - 1.545).abs() < 1e-12);
    }

    #[test]
    fn what_is_no_time_is_an_error_that_says_whose() {
        let good = around_one(9, 0.01);
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-320] {
            let with = [&good[..], &[bad]].concat();
            assert!(Comparison::of(&with, &good, RULE, 1).unwrap_err().contains("baseline"));
            assert!(Comparison::of(&good, &with, RULE, 1).unwrap_err().contains("candidate"));
        }
        assert!(Comparison::of(&good, &[], RULE, 1).unwrap_err().contains("no times"));
        assert!(Comparison::of_pairs(1.0, &[], RULE, 1).unwrap_err().contains("no times"));
    }

    #[test]
    fn the_same_seed_gives_the_same_answer() {
        let (base, candidate) = (around_one(20, 0.1), around_one(15, 0.2));
        let compared = |seed| Comparison::of(&base, &candidate, RULE, seed).unwrap();
        assert_eq!(compared(3), compared(3));
        assert_ne!((compared(3).low, compared(3).high), (compared(4).low, compared(4).high));
        assert_eq!(compared(3).percent(), compared(3).percent());
    }
}
