//! Timing. On a card a group of calls is captured once and replayed between two events, so that no call waits for the host;
//! a kernel that needs the host (it uploads parameters) is launched call by call, and the row says so. Where the cache is
//! flushed before each call, each has events of its own. Elsewhere it is the wall clock around one call. Sampling stops when
//! the median is known well enough, or when time is up.
//!
//! Samples are taken in repetitions of a few. Where somebody looks at the card meanwhile, those that were disturbed are thrown
//! away.

use std::sync::{Arc, Mutex, PoisonError};
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
/// Samples of a repetition at most, and how long one lasts.
const REPETITION_SAMPLES: usize = 16;
const REPETITION: Duration = Duration::from_millis(50);
/// Repetitions of a row at least, where a card is looked at: a clock is odd only beside others.
const LEAST_REPETITIONS: usize = 3;
/// Disturbed repetitions of a row at most, unless as many are clean.
const MOST_DISTURBED: usize = 10;
/// Runs and share of the time that are thrown away first.
const WARM_UP_RUNS: usize = 3;
const WARM_UP_SHARE: f64 = 0.2;

/// Runs a kernel on a copy of its operands.
type Run<'a> = dyn FnMut(usize) -> Result<Vec<Tensor>> + 'a;

/// Who looks at a card while samples are taken, and says which of them stand.
pub(super) trait Lookout: std::fmt::Debug + Send {
    /// Begins a row: what was seen before is forgotten.
    fn begin(&mut self);
    /// Looks while a repetition is made.
    fn during(&mut self, repetition: &mut dyn FnMut() -> Result<Vec<f64>>) -> Result<Vec<f64>>;
    /// Of each repetition whether nothing disturbed it.
    fn clean(&self) -> Vec<bool>;
    /// Gives a disturbed card time to recover: how long it took.
    fn cool_down(&mut self) -> Duration;
    /// The places of the repetitions that stand, and why they are not clean, where clean ones were too few.
    fn settle(&mut self) -> (Vec<usize>, Option<String>);
}

/// One that a rig and its owner share.
pub(super) type SharedLookout = Arc<Mutex<dyn Lookout>>;

/// How a row's time is taken.
#[derive(Debug, Clone, Copy)]
pub(super) struct Watch<'a> {
    pub(super) cx: &'a Cx<'a>,
    /// Time for one row.
    pub(super) cap: Duration,
    /// Bytes that are written before each call.
    pub(super) flushed: Option<u64>,
    /// None where there is no card to look at.
    pub(super) lookout: Option<&'a SharedLookout>,
}

/// Samples, and what became of the others.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Samples {
    /// Seconds of one call.
    pub(super) seconds: Vec<f64>,
    /// How many were thrown away, because the card was disturbed.
    pub(super) thrown: u64,
    /// What disturbed those that stand, where clean ones were too few.
    pub(super) dirty: Option<String>,
}

/// What was timed.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Timing {
    /// Seconds of one call, each the mean of a group.
    pub(super) samples: Samples,
    /// Calls of a group.
    pub(super) calls: usize,
    /// `graph`, `stream` or `wall`.
    pub(super) via: &'static str,
}

impl Timing {
    /// Seconds of one call.
    pub(super) fn median(&self) -> f64 {
        Summary::of(&self.samples.seconds).map_or(f64::NAN, |summary| summary.median)
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
        let samples = sample(self.cap, self.lookout, &mut || {
            let begun = Instant::now();
            drop(run(copy)?);
            copy = (copy + 1) % copies;
            Ok(vec![begun.elapsed().as_secs_f64()])
        })?;
        Ok(Timing { samples, calls: 1, via: "wall" })
    }

    fn between_events(
        &self,
        cuda: &Cuda,
        calls: usize,
        via: &'static str,
        group: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Timing> {
        let samples = sample(self.cap, self.lookout, &mut || {
            let begun = cuda.event()?;
            group()?;
            Ok(vec![cuda.event()?.seconds_since(&begun)? / calls as f64])
        })?;
        Ok(Timing { samples, calls, via })
    }

    /// Times calls with `flush` before each, which stands outside of the call's two events.
    fn one_by_one(&self, cuda: &Cuda, flush: &mut dyn FnMut() -> Result<()>, run: &mut Run) -> Result<Timing> {
        let samples = sample(self.cap, self.lookout, &mut || {
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
        Ok(Timing { samples, calls: 1, via: "stream" })
    }
}

/// Calls of a group: whole rounds of the copies.
fn calls(copies: usize, floor_seconds: f64) -> usize {
    let wanted = (GROUP_SECONDS / (floor_seconds + LAUNCH_SECONDS)).ceil() as usize;
    copies * wanted.div_ceil(copies).max(1)
}

/// Samples that `some` takes, a few at a time and warmed up, until the median of those that stand is known well enough or
/// `cap` is over, cool-downs not counted.
fn sample(
    cap: Duration,
    lookout: Option<&SharedLookout>,
    some: &mut dyn FnMut() -> Result<Vec<f64>>,
) -> Result<Samples> {
    let begun = Instant::now();
    let warm = cap.mul_f64(WARM_UP_SHARE);
    for run in 0.. {
        if run >= WARM_UP_RUNS && begun.elapsed() >= warm || begun.elapsed() >= cap {
            break;
        }
        some()?;
    }
    let mut lookout = lookout.map(|shared| shared.lock().unwrap_or_else(PoisonError::into_inner));
    if let Some(lookout) = &mut lookout {
        lookout.begin();
    }
    let least = if lookout.is_some() { LEAST_REPETITIONS } else { 1 };
    let (mut repetitions, mut end, mut next_look) = (Vec::<Vec<f64>>::new(), cap, LEAST_SAMPLES.next_power_of_two());
    loop {
        let mut repetition = || {
            let (start, mut seconds) = (Instant::now(), some()?);
            while seconds.len() < REPETITION_SAMPLES && start.elapsed() < REPETITION && begun.elapsed() < end {
                seconds.extend(some()?);
            }
            Ok(seconds)
        };
        repetitions.push(match &mut lookout {
            Some(lookout) => lookout.during(&mut repetition)?,
            None => repetition()?,
        });
        let clean = lookout.as_ref().map_or_else(|| vec![true; repetitions.len()], |lookout| lookout.clean());
        let of_clean: Vec<f64> =
            repetitions.iter().zip(&clean).filter(|(_, clean)| **clean).flat_map(|(some, _)| some.clone()).collect();
        if of_clean.len() >= MOST_SAMPLES || begun.elapsed() >= end {
            break;
        }
        // Looked at when there are twice as many: a rule that is asked after every repetition stops on luck.
        if repetitions.len() >= least && of_clean.len() >= next_look {
            if interval(&of_clean) <= INTERVAL {
                break;
            }
            next_look = 2 * of_clean.len();
        }
        let undisturbed = clean.iter().filter(|clean| **clean).count();
        if clean.len() - undisturbed >= MOST_DISTURBED.max(undisturbed) {
            break;
        }
        if let (Some(lookout), Some(false)) = (&mut lookout, clean.last()) {
            end += lookout.cool_down();
        }
    }
    let all: usize = repetitions.iter().map(Vec::len).sum();
    let (kept, dirty) = match &mut lookout {
        Some(lookout) => lookout.settle(),
        None => ((0..repetitions.len()).collect(), None),
    };
    let seconds: Vec<f64> = kept.iter().filter_map(|at| repetitions.get(*at)).flatten().copied().collect();
    Ok(Samples { thrown: (all - seconds.len()) as u64, seconds, dirty })
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
        let steady = sample(Duration::from_secs(1), None, &mut || {
            runs += 1;
            Ok(vec![1.0])
        });
        assert_eq!(
            steady.unwrap().seconds.len(),
            16,
            "steady samples are looked at when there are a power of two, ten at least"
        );
        assert!(runs >= 16 + WARM_UP_RUNS);
        let mut value = 1.0;
        let begun = Instant::now();
        let wild = sample(Duration::from_millis(50), None, &mut || {
            value = 3.0 - value;
            std::thread::sleep(Duration::from_millis(1));
            Ok(vec![value])
        });
        assert!(wild.is_ok_and(|samples| samples.seconds.len() <= 50) && begun.elapsed() < Duration::from_secs(30));
    }

    /// Says of each repetition what it is told, and counts cool-downs.
    #[derive(Debug)]
    struct Told {
        clean: fn(usize) -> bool,
        seen: usize,
        cooled: usize,
    }

    impl Lookout for Told {
        fn begin(&mut self) {
            self.seen = 0;
        }

        fn during(&mut self, repetition: &mut dyn FnMut() -> Result<Vec<f64>>) -> Result<Vec<f64>> {
            self.seen += 1;
            repetition()
        }

        fn clean(&self) -> Vec<bool> {
            (0..self.seen).map(self.clean).collect()
        }

        fn cool_down(&mut self) -> Duration {
            self.cooled += 1;
            Duration::ZERO
        }

        fn settle(&mut self) -> (Vec<usize>, Option<String>) {
            let kept: Vec<usize> = (0..self.seen).filter(|at| (self.clean)(*at)).collect();
            let dirty = kept.is_empty().then(|| "heat".to_owned());
            (if kept.is_empty() { (0..self.seen).collect() } else { kept }, dirty)
        }
    }

    fn looked_at(clean: fn(usize) -> bool, cap: Duration) -> (Samples, usize) {
        let told = Arc::new(Mutex::new(Told { clean, seen: 9, cooled: 0 }));
        let shared: SharedLookout = told.clone();
        let samples = sample(cap, Some(&shared), &mut || Ok(vec![1.0]));
        let cooled = told.lock().unwrap().cooled;
        (samples.unwrap(), cooled)
    }

    #[test]
    fn a_card_is_looked_at_in_repetitions_and_those_disturbed_are_thrown_away() {
        // Three repetitions at least, so that one has others beside it.
        let (samples, cooled) = looked_at(|_| true, Duration::from_secs(9));
        assert_eq!((samples.seconds.len(), samples.thrown, samples.dirty, cooled), (48, 0, None, 0));
        let (samples, cooled) = looked_at(|at| at != 1, Duration::from_secs(9));
        assert_eq!((samples.seconds.len(), samples.thrown, cooled), (32, 16, 1));
        let (samples, cooled) = looked_at(|_| false, Duration::from_secs(9));
        assert_eq!((samples.thrown, samples.dirty.as_deref()), (0, Some("heat")));
        assert_eq!((samples.seconds.len(), cooled), (160, 9), "a card that stays disturbed is not waited for");
    }

    #[test]
    fn time_that_is_up_still_gives_a_sample() {
        assert_eq!(sample(Duration::ZERO, None, &mut || Ok(vec![2.0])).unwrap().seconds, [2.0]);
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
        let watch = Watch { cx: &cx, cap: Duration::ZERO, flushed: Some(1 << 10), lookout: None };
        let timing = watch.one_by_one(device.as_cuda().unwrap(), &mut flush, &mut run).unwrap();
        assert_eq!((timing.samples.seconds.len(), timing.calls, timing.via), (QUEUED, 1, "stream"));
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
