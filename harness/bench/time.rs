//! Timing. On a card a group of calls is captured once and replayed between two events, so that no call waits for the host;
//! a kernel that needs the host (it uploads parameters) is launched call by call, and the row says so. Elsewhere it is the
//! wall clock around one call. Sampling stops when the median is known well enough, or when time is up.

use std::time::{Duration, Instant};

use highwater::device::Device;
use highwater::device::cuda::Cuda;
use highwater::error::{Error, Result};
use highwater::tensor::Tensor;

/// Sampling stops once the 95% interval of the median is this narrow, relative to it.
const INTERVAL: f64 = 0.01;
/// Samples below which an interval means nothing.
const LEAST_SAMPLES: usize = 10;
/// Samples after which no more is learnt.
const MOST_SAMPLES: usize = 1000;
/// Runs and share of the time that are thrown away first.
const WARM_UP_RUNS: usize = 3;
const WARM_UP_SHARE: f64 = 0.2;

/// How a row's time is taken.
#[derive(Debug, Clone, Copy)]
pub(super) struct Watch<'a> {
    pub(super) device: &'a Device,
    /// Time for one row.
    pub(super) cap: Duration,
}

/// What was timed.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Timing {
    /// Seconds of one call, each the mean of a group.
    pub(super) seconds: Vec<f64>,
    /// Calls of a group.
    pub(super) calls: usize,
    /// `graph`, `stream` or `wall`.
    pub(super) via: &'static str,
}

impl Watch<'_> {
    /// Times `run`, which is called with the copy to run on, 0 to `copies` - 1 in turn, `calls` times a group. Results live
    /// until the copies have been gone round. It has run once before.
    pub(super) fn time(
        &self,
        copies: usize,
        calls: usize,
        run: &mut dyn FnMut(usize) -> Result<Vec<Tensor>>,
    ) -> Result<Timing> {
        let Some(cuda) = self.device.as_cuda().filter(|cuda| cuda.is_card()) else {
            let mut copy = 0;
            let seconds = sample(self.cap, &mut || {
                let begun = Instant::now();
                drop(run(copy)?);
                copy = (copy + 1) % copies;
                Ok(begun.elapsed().as_secs_f64())
            })?;
            return Ok(Timing { seconds, calls: 1, via: "wall" });
        };
        let mut group = || -> Result<()> {
            self.device.begin_step();
            let mut kept = Vec::new();
            for call in 0..calls {
                kept.push(run(call % copies)?);
                if (call + 1) % copies == 0 {
                    kept.clear();
                }
            }
            Ok(())
        };
        match cuda.capture(&mut group) {
            Ok(graph) => self.between_events(cuda, calls, "graph", &mut || cuda.replay(&graph)),
            Err(Error::Device { sticky: false, .. }) => self.between_events(cuda, calls, "stream", &mut group),
            Err(error) => Err(error),
        }
    }

    fn between_events(
        &self,
        cuda: &Cuda,
        calls: usize,
        via: &'static str,
        group: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Timing> {
        let seconds = sample(self.cap, &mut || {
            let begun = cuda.event()?;
            group()?;
            Ok(cuda.event()?.seconds_since(&begun)? / calls as f64)
        })?;
        Ok(Timing { seconds, calls, via })
    }
}

/// Samples of `one`, warmed up, until their median is known well enough or `cap` is over.
fn sample(cap: Duration, one: &mut dyn FnMut() -> Result<f64>) -> Result<Vec<f64>> {
    let begun = Instant::now();
    let warm = cap.mul_f64(WARM_UP_SHARE);
    for run in 0.. {
        if run >= WARM_UP_RUNS && begun.elapsed() >= warm || begun.elapsed() >= cap {
            break;
        }
        one()?;
    }
    let mut seconds = Vec::new();
    while seconds.is_empty() || seconds.len() < MOST_SAMPLES && begun.elapsed() < cap {
        seconds.push(one()?);
        if seconds.len() >= LEAST_SAMPLES && seconds.len().is_power_of_two() && interval(&seconds) <= INTERVAL {
            break;
        }
    }
    Ok(seconds)
}

/// Width of the 95% interval of the median, relative to it: order statistics at n/2 -+ 0.98 sqrt(n), the normal limit of
/// the binomial.
fn interval(seconds: &[f64]) -> f64 {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (n, half) = (sorted.len() as f64, 0.98 * (sorted.len() as f64).sqrt());
    let at = |rank: f64| sorted[(rank.max(0.0) as usize).min(sorted.len() - 1)];
    (at((n / 2.0 + half).ceil()) - at((n / 2.0 - half).floor())) / at(n / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_stops_at_a_narrow_interval_or_when_time_is_up() {
        let mut runs = 0;
        let steady = sample(Duration::from_secs(1), &mut || {
            runs += 1;
            Ok(1.0)
        });
        assert_eq!(
            steady.unwrap().len(),
            16,
            "steady samples are looked at when there are a power of two, ten at least"
        );
        assert!(runs >= 16 + WARM_UP_RUNS);
        let mut value = 1.0;
        let begun = Instant::now();
        let wild = sample(Duration::from_millis(50), &mut || {
            value = 3.0 - value;
            std::thread::sleep(Duration::from_millis(1));
            Ok(value)
        });
        assert!(wild.is_ok_and(|seconds| seconds.len() <= 50) && begun.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn time_that_is_up_still_gives_a_sample() {
        assert_eq!(sample(Duration::ZERO, &mut || Ok(2.0)).unwrap(), [2.0]);
    }

    #[test]
    fn the_interval_narrows_with_samples_and_not_with_outliers() {
        let noisy = |n: usize| -> Vec<f64> { (0..n).map(|i| 1.0 + (i * 7919 % 101) as f64 * 1e-3).collect() };
        assert!(interval(&noisy(16)) > interval(&noisy(900)));
        let mut spiked = vec![1.0; 50];
        spiked[7] = 1000.0;
        assert_eq!(interval(&spiked), 0.0);
    }
}
