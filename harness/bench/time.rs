//! Timing. On a card a group of calls is captured once and replayed between two events, so that no call waits for the host;
//! a kernel that needs the host (it uploads parameters) is launched call by call, and the row says so. Where the cache is
//! flushed before each call, each has events of its own. Elsewhere it is the wall clock around one call. Sampling stops when
//! the median is known well enough, or when time is up.

use std::time::{Duration, Instant};

use highwater::device::cuda::Cuda;
use highwater::error::{Error, Result};
use highwater::num::DType;
use highwater::ops::{Cx, fill};
use highwater::tensor::Tensor;

use super::operands::Maker;
use super::stats::Summary;

/// A group of calls takes this long or longer, so that events are fine enough; and what a launch takes by itself.
const GROUP_SECONDS: f64 = 200e-6;
const LAUNCH_SECONDS: f64 = 2e-6;
/// Calls with events of their own that are queued before the host waits: while the card flushes, the host launches. A power of
/// two, as the numbers of samples are at which their interval is looked at.
const QUEUED: usize = 16;
/// Sampling stops once the 95% interval of the median is this narrow, relative to it.
const INTERVAL: f64 = 0.01;
/// Samples below which an interval means nothing.
const LEAST_SAMPLES: usize = 10;
/// Samples after which no more is learnt.
const MOST_SAMPLES: usize = 1000;
/// Runs and share of the time that are thrown away first.
const WARM_UP_RUNS: usize = 3;
const WARM_UP_SHARE: f64 = 0.2;

/// Runs a kernel on a copy of its operands.
type Run<'a> = dyn FnMut(usize) -> Result<Vec<Tensor>> + 'a;

/// How a row's time is taken.
#[derive(Debug, Clone, Copy)]
pub(super) struct Watch<'a> {
    pub(super) cx: &'a Cx<'a>,
    /// Time for one row.
    pub(super) cap: Duration,
    /// Bytes that are written before each call.
    pub(super) flushed: Option<u64>,
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

impl Timing {
    /// Seconds of one call.
    pub(super) fn median(&self) -> f64 {
        Summary::of(&self.seconds).map_or(f64::NAN, |summary| summary.median)
    }
}

impl Watch<'_> {
    /// Times `run`, which is called with the copy to run on, 0 to `copies` - 1 in turn, in groups as long as calls of
    /// `floor_seconds` or more need. Results live until the copies have been gone round. It has run once before.
    pub(super) fn time(&self, copies: usize, floor_seconds: f64, run: &mut Run) -> Result<Timing> {
        let Some(cuda) = self.cx.device.as_cuda().filter(|cuda| cuda.is_card()) else {
            return self.by_the_wall_clock(copies, run);
        };
        if let Some(bytes) = self.flushed {
            let mut flushed = Maker::new(*self.cx).empty(DType::F32, &[bytes.div_ceil(DType::F32.bytes()) as usize])?;
            let all = 0..flushed.rows();
            return self.one_by_one(cuda, &mut || fill::constant(self.cx, &mut flushed, all.clone(), 1.0), run);
        }
        let calls = calls(copies, floor_seconds);
        let mut group = || -> Result<()> {
            self.cx.device.begin_step();
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

    fn by_the_wall_clock(&self, copies: usize, run: &mut Run) -> Result<Timing> {
        let mut copy = 0;
        let seconds = sample(self.cap, &mut || {
            let begun = Instant::now();
            drop(run(copy)?);
            copy = (copy + 1) % copies;
            Ok(vec![begun.elapsed().as_secs_f64()])
        })?;
        Ok(Timing { seconds, calls: 1, via: "wall" })
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
            Ok(vec![cuda.event()?.seconds_since(&begun)? / calls as f64])
        })?;
        Ok(Timing { seconds, calls, via })
    }

    /// Times calls with `flush` before each, which stands outside of the call's two events.
    fn one_by_one(&self, cuda: &Cuda, flush: &mut dyn FnMut() -> Result<()>, run: &mut Run) -> Result<Timing> {
        let seconds = sample(self.cap, &mut || {
            let mut marks = Vec::with_capacity(QUEUED);
            for _ in 0..QUEUED {
                self.cx.device.begin_step();
                flush()?;
                let begun = cuda.event()?;
                drop(run(0)?);
                marks.push((begun, cuda.event()?));
            }
            marks.iter().map(|(begun, ended)| ended.seconds_since(begun)).collect()
        })?;
        Ok(Timing { seconds, calls: 1, via: "stream" })
    }
}

/// Calls of a group: whole rounds of the copies.
fn calls(copies: usize, floor_seconds: f64) -> usize {
    let wanted = (GROUP_SECONDS / (floor_seconds + LAUNCH_SECONDS)).ceil() as usize;
    copies * wanted.div_ceil(copies).max(1)
}

/// Samples that `some` takes, a few at a time and warmed up, until their median is known well enough or `cap` is over.
fn sample(cap: Duration, some: &mut dyn FnMut() -> Result<Vec<f64>>) -> Result<Vec<f64>> {
    let begun = Instant::now();
    let warm = cap.mul_f64(WARM_UP_SHARE);
    for run in 0.. {
        if run >= WARM_UP_RUNS && begun.elapsed() >= warm || begun.elapsed() >= cap {
            break;
        }
        some()?;
    }
    let mut seconds = Vec::new();
    while seconds.is_empty() || seconds.len() < MOST_SAMPLES && begun.elapsed() < cap {
        seconds.extend(some()?);
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
    use std::cell::RefCell;

    use highwater::device::cuda::emulator;
    use highwater::device::{Device, cards};
    use highwater::ops::Meter;

    use super::super::rig::context;
    use super::*;

    #[test]
    fn sampling_stops_at_a_narrow_interval_or_when_time_is_up() {
        let mut runs = 0;
        let steady = sample(Duration::from_secs(1), &mut || {
            runs += 1;
            Ok(vec![1.0])
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
            Ok(vec![value])
        });
        assert!(wild.is_ok_and(|seconds| seconds.len() <= 50) && begun.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn time_that_is_up_still_gives_a_sample() {
        assert_eq!(sample(Duration::ZERO, &mut || Ok(vec![2.0])).unwrap(), [2.0]);
    }

    #[test]
    fn each_call_is_flushed_for_and_timed_without_its_flush() {
        if let Some(why) = emulator::unavailable() {
            assert!(std::env::var_os("REQUIRE_EMULATOR").is_none(), "REQUIRE_EMULATOR is set: {why}");
            return;
        }
        let device = Device::emulated(cards::find("h200").unwrap(), 1 << 20).unwrap();
        let meter = Meter::default();
        let cx = context(&device, &meter);
        let order = RefCell::new(Vec::new());
        let mut flush = || {
            std::thread::sleep(Duration::from_millis(2));
            order.borrow_mut().push("flush");
            Ok(())
        };
        let mut run = |_| {
            order.borrow_mut().push("call");
            Ok(Vec::new())
        };
        let watch = Watch { cx: &cx, cap: Duration::ZERO, flushed: Some(1 << 10) };
        let timing = watch.one_by_one(device.as_cuda().unwrap(), &mut flush, &mut run).unwrap();
        assert_eq!((timing.seconds.len(), timing.calls, timing.via), (QUEUED, 1, "stream"));
        assert!(timing.median() < 1e-3, "{timing:?}");
        assert!(order.borrow().chunks(2).all(|pair| pair == ["flush", "call"]));
    }

    #[test]
    fn groups_are_whole_rounds_of_the_copies() {
        assert_eq!([1, 7, 181].map(|copies| calls(copies, 1e-6) % copies), [0, 0, 0]);
        assert!(calls(1, 1e-6) > 10 && calls(1, 1.0) == 1);
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
