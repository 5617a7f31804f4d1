//! How often a cell is run: warm-up passes that are thrown away, then repetitions until their median is known well enough,
//! or time is up, or there are as many as were asked for; on a card, clean ones.
//!
//! What runs, the clock and the card are the caller's, so that every rule here is tested without any of them.

use highwater::error::Result;

use crate::hygiene::{Conditions, Seen, Settled, Source, during, judge, settle};
use crate::stats::{Interval, Summary};

/// Repetitions below which an interval means nothing; the gate wants as many of either side.
const LEAST: usize = 10;
/// Repetitions after which no more is learnt, where no other number is asked for.
const MOST: usize = 40;
/// The interval is looked at when there are this many times more repetitions than at the last look: a rule that is asked
/// after every repetition stops on luck.
const GROWTH: f64 = 1.25;
/// Level of the intervals.
pub(crate) const LEVEL: f64 = 0.95;
/// Warm-up passes at most.
const MOST_WARM: usize = 3;
/// A warm-up pass that is faster than the one before by more than this asks for another.
const STILL_WARMING: f64 = 0.05;
/// Share of a cell's time that warm-up passes after the first may take.
const WARM_SHARE: f64 = 0.2;
/// What a disturbed card is given to recover, in seconds, and how often in a cell.
const COOL_DOWN_SECONDS: f64 = 1.0;
const MOST_COOL_DOWNS: usize = 10;

/// When the repetitions of a cell end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rules {
    /// Half the width of the interval of the median, as a fraction of it, at which prefill and TPOT are known well enough.
    pub(crate) precision: f64,
    /// Seconds after the warm-up after which no repetition begins.
    pub(crate) seconds: f64,
    /// This many repetitions, whatever the interval.
    pub(crate) repetitions: Option<u64>,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules { precision: 0.005, seconds: 10.0, repetitions: None }
    }
}

/// Why there were no more repetitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The intervals are narrow enough.
    Interval,
    /// The time is up.
    Time,
    /// There are as many as were wanted, or twice as many, of which too few are clean.
    Count,
}

impl Stop {
    /// The word in the rows.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Stop::Interval => "interval",
            Stop::Time => "time",
            Stop::Count => "count",
        }
    }
}

/// Seconds, and waiting for them to pass.
pub(crate) trait Clock {
    /// Seconds since some moment.
    fn now(&self) -> f64;
    /// Waits.
    fn pause(&self, seconds: f64);
}

/// What a repetition took, ms; none where it had no such phase.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Times {
    /// Its prefill.
    pub(crate) prefill_ms: Option<f64>,
    /// The median of its decode steps.
    pub(crate) tpot_ms: Option<f64>,
}

/// The passes over a cell.
#[derive(Debug)]
pub(crate) struct Measured<P> {
    /// Those thrown away first, at least one.
    pub(crate) warm: Vec<P>,
    /// All others, in order; `settled` says which stand.
    pub(crate) passes: Vec<P>,
    /// Which of them stand.
    pub(crate) settled: Settled,
    /// The card meanwhile.
    pub(crate) conditions: Conditions,
    /// Why there are no more.
    pub(crate) stop: Stop,
}

impl<P> Measured<P> {
    /// The repetitions that stand, at least one.
    pub(crate) fn kept(&self) -> impl Iterator<Item = &P> {
        self.settled.kept.iter().filter_map(|at| self.passes.get(*at))
    }
}

/// What is measured, with what, and by which rules.
pub(crate) struct Measure<'a, 'card, P> {
    /// The rules.
    pub(crate) rules: Rules,
    /// Warm-up passes at least.
    pub(crate) least_warm: usize,
    /// Seeds the intervals.
    pub(crate) seed: u64,
    /// The time.
    pub(crate) clock: &'a dyn Clock,
    /// The card, if there is one to look at.
    pub(crate) source: Option<&'card mut dyn Source>,
    /// A pass's times.
    pub(crate) times: &'a dyn Fn(&P) -> Times,
}

impl<P> Measure<'_, '_, P> {
    /// Runs `run`, which is told how many passes were before it, until the rules say enough. The first error ends all.
    pub(crate) fn run(mut self, run: &mut dyn FnMut(usize) -> Result<P>) -> Result<Measured<P>> {
        let warm = self.warm_up(run)?;
        // What is compiled and loaded in the first pass takes none of the repetitions' time.
        let begun = self.clock.now();
        let wanted = self.rules.repetitions.map(|n| n.clamp(1, usize::MAX as u64 / 4) as usize);
        let (mut passes, mut seen, mut cool_downs) = (Vec::new(), Vec::<Seen>::new(), 0);
        let (mut paused, mut next_look) = (0.0, LEAST);
        let (stop, verdicts) = loop {
            let before = warm.len() + passes.len();
            // The thread borrows the source for one repetition.
            let source = self.source.as_mut().map(|source| &mut **source as &mut dyn Source);
            let (pass, moments) = during(source, || run(before));
            passes.push(pass?);
            seen.push(moments);
            let verdicts = judge(&seen);
            let clean: Vec<usize> = (0..passes.len()).filter(|at| verdicts[*at].is_none()).collect();
            if clean.len() >= wanted.unwrap_or(MOST) {
                break (Stop::Count, verdicts);
            }
            if wanted.is_none() && clean.len() >= next_look {
                let times: Vec<Times> = clean.iter().map(|at| (self.times)(&passes[*at])).collect();
                if self.narrow(&times) {
                    break (Stop::Interval, verdicts);
                }
                next_look = ((clean.len() as f64 * GROWTH) as usize).max(clean.len() + 1);
            }
            if self.clock.now() - begun - paused >= self.rules.seconds {
                break (Stop::Time, verdicts);
            }
            // Twice as many as are wanted: of those asked for, or of the least that mean something.
            let dirty = passes.len() - clean.len();
            if dirty >= wanted.unwrap_or(LEAST.max(clean.len())) {
                break (Stop::Count, verdicts);
            }
            if verdicts.last().is_some_and(Option::is_some) && cool_downs < MOST_COOL_DOWNS {
                self.clock.pause(COOL_DOWN_SECONDS);
                cool_downs += 1;
                paused += COOL_DOWN_SECONDS;
            }
        };
        let settled = settle(&verdicts);
        let conditions = Conditions::of(&seen, &settled.kept);
        Ok(Measured { warm, passes, settled, conditions, stop })
    }

    /// Passes that load, compile and touch what the first time does; more while each is still much faster than the last.
    fn warm_up(&self, run: &mut dyn FnMut(usize) -> Result<P>) -> Result<Vec<P>> {
        let (mut warm, mut last) = (Vec::new(), None);
        let begun = self.clock.now();
        loop {
            let start = self.clock.now();
            warm.push(run(warm.len())?);
            let (end, least) = (self.clock.now(), self.least_warm.max(1));
            let took = end - start;
            let settled = last.is_some_and(|last: f64| took > last * (1.0 - STILL_WARMING));
            let late = end - begun > self.rules.seconds * WARM_SHARE;
            if warm.len() >= least && (settled || late || warm.len() >= MOST_WARM) {
                return Ok(warm);
            }
            last = Some(took);
        }
    }

    /// Whether both medians are known to the precision asked for; a phase that no repetition has asks for nothing.
    fn narrow(&self, times: &[Times]) -> bool {
        let known = |of: fn(&Times) -> Option<f64>| {
            let sample: Vec<f64> = times.iter().filter_map(of).collect();
            if sample.is_empty() {
                return true;
            }
            let (Some(summary), Some(interval)) =
                (Summary::of(&sample), Interval::of_median(&sample, LEVEL, self.seed))
            else {
                return false;
            };
            interval.half_width_of(summary.median) <= self.rules.precision
        };
        known(|times| times.prefill_ms) && known(|times| times.tpot_ms)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;
    use crate::hygiene::tests::moment;
    use crate::nvml::Moment;
    use highwater::error::Error;

    /// Time that passes only when it is told to.
    #[derive(Default)]
    struct Told {
        seconds: Cell<f64>,
        pauses: Cell<usize>,
    }

    impl Clock for Told {
        fn now(&self) -> f64 {
            self.seconds.get()
        }

        fn pause(&self, seconds: f64) {
            self.seconds.set(self.seconds.get() + seconds);
            self.pauses.set(self.pauses.get() + 1);
        }
    }

    /// Measures passes that take `seconds(i)`, with prefill and TPOT of `ms(i)`.
    fn measured(
        rules: Rules,
        source: Option<&mut dyn Source>,
        seconds: impl Fn(usize) -> f64,
        ms: impl Fn(usize) -> (Option<f64>, Option<f64>),
    ) -> (Measured<usize>, usize) {
        let clock = Told::default();
        let times = |at: &usize| {
            let (prefill_ms, tpot_ms) = ms(*at);
            Times { prefill_ms, tpot_ms }
        };
        let measure = Measure { rules, least_warm: 1, seed: 1, clock: &clock, source, times: &times };
        let measured = measure.run(&mut |at| {
            clock.seconds.set(clock.seconds.get() + seconds(at));
            Ok(at)
        });
        (measured.unwrap(), clock.pauses.get())
    }

    fn steady(_: usize) -> (Option<f64>, Option<f64>) {
        (Some(100.0), Some(10.0))
    }

    fn noisy(at: usize) -> (Option<f64>, Option<f64>) {
        (Some(100.0), Some(10.0 + (at * 7 % 5) as f64))
    }

    #[test]
    fn a_narrow_interval_of_both_ends_it_after_the_least() {
        let (done, pauses) = measured(Rules::default(), None, |_| 0.01, steady);
        assert_eq!((done.stop, done.passes.len(), done.settled.thrown, pauses), (Stop::Interval, LEAST, 0, 0));
        assert_eq!(done.conditions, Conditions::default());
        // One noisy metric is enough to go on, to the count.
        let (done, _) = measured(Rules::default(), None, |_| 0.01, noisy);
        assert_eq!((done.stop, done.passes.len()), (Stop::Count, MOST));
        let (done, _) = measured(Rules::default(), None, |_| 0.01, |at| (noisy(at).1, Some(10.0)));
        assert_eq!(done.stop, Stop::Count);
        // A coarser wish is met.
        let rules = Rules { precision: 0.5, ..Rules::default() };
        assert_eq!(measured(rules, None, |_| 0.01, noisy).0.stop, Stop::Interval);
        // Nothing decodes: prefill alone decides.
        let (done, _) = measured(Rules::default(), None, |_| 0.01, |_| (Some(100.0), None));
        assert_eq!((done.stop, done.passes.len()), (Stop::Interval, LEAST));
    }

    #[test]
    fn time_ends_it_and_one_repetition_is_always_made() {
        let (done, _) = measured(Rules { seconds: 3.5, ..Rules::default() }, None, |_| 1.0, noisy);
        // One warm-up pass, then four repetitions: the last begins before the time is up, which begins after the warm-up.
        assert_eq!((done.stop, done.warm.len(), done.passes.len()), (Stop::Time, 1, 4));
        // A first pass that compiles for longer than the cell may take costs no repetition.
        let (done, _) =
            measured(Rules { seconds: 3.5, ..Rules::default() }, None, |at| if at == 0 { 60.0 } else { 1.0 }, noisy);
        assert_eq!((done.stop, done.passes.len()), (Stop::Time, 4));
        let (done, _) = measured(Rules::default(), None, |_| 100.0, noisy);
        assert_eq!((done.stop, done.warm.len(), done.passes, done.settled.kept), (Stop::Time, 1, vec![1], vec![0]));
    }

    #[test]
    fn as_many_as_asked_for_whatever_the_interval() {
        for n in [1, 3, 60] {
            let rules = Rules { repetitions: Some(n), ..Rules::default() };
            let (done, _) = measured(rules, None, |_| 0.01, steady);
            assert_eq!((done.stop, done.passes.len()), (Stop::Count, n as usize));
        }
        let rules = Rules { repetitions: Some(u64::MAX), seconds: 1.0, ..Rules::default() };
        assert_eq!(measured(rules, None, |_| 0.1, steady).0.stop, Stop::Time);
    }

    #[test]
    fn warm_up_goes_on_while_passes_get_faster() {
        let warm = |seconds: &'static [f64]| {
            measured(Rules::default(), None, |at| seconds.get(at).copied().unwrap_or(0.01), steady).0.warm.len()
        };
        assert_eq!(warm(&[0.01, 0.01]), 2);
        assert_eq!(warm(&[0.5, 0.01]), 3);
        assert_eq!(warm(&[0.5, 0.4, 0.3, 0.2]), MOST_WARM);
        // More than a fifth of the time is gone.
        assert_eq!(warm(&[2.5, 1.0]), 1);
    }

    #[test]
    fn an_error_ends_it() {
        let clock = Told::default();
        let times = |(): &()| Times::default();
        let measure =
            Measure { rules: Rules::default(), least_warm: 1, seed: 1, clock: &clock, source: None, times: &times };
        let mut ran = RefCell::new(0);
        let error = measure.run(&mut |at| {
            *ran.borrow_mut() += 1;
            if at == 3 { Err(Error::shape("cell", "lost")) } else { Ok(()) }
        });
        assert!(error.is_err() && *ran.get_mut() == 4);
    }

    /// A card whose looks are scripted by repetition: each repetition is looked at twice or more, and takes no time.
    struct Scripted {
        moments: Vec<Moment>,
        looks: usize,
    }

    impl Source for Scripted {
        fn look(&mut self) -> Option<Moment> {
            let at = (self.looks / 2).min(self.moments.len() - 1);
            self.looks += 1;
            Some(self.moments[at].clone())
        }
    }

    fn on_card(moments: Vec<Moment>, rules: Rules) -> (Measured<usize>, usize) {
        let mut source = Scripted { moments, looks: 0 };
        measured(rules, Some(&mut source), |_| 0.001, steady)
    }

    #[test]
    fn dirty_repetitions_are_thrown_away_and_made_again_after_a_pause() {
        let good = || moment(1980, &["the power limit"]);
        let (done, pauses) = on_card(
            vec![good(), moment(1500, &["heat"]), good(), moment(1980, &["the power brake"]), good()],
            Rules::default(),
        );
        assert_eq!((done.stop, done.passes.len(), done.settled.thrown, pauses), (Stop::Interval, LEAST + 2, 2, 2));
        assert_eq!(done.settled.dirty, None);
        assert_eq!(done.kept().copied().take(5).collect::<Vec<_>>(), [2, 4, 6, 7, 8]);
        assert_eq!(done.kept().count(), LEAST);
        assert_eq!(done.conditions.throttled.as_deref(), Some("the power limit, heat, the power brake"));
        assert_eq!(done.conditions.sm_clock_least_mhz, Some(1980.0));
    }

    #[test]
    fn a_card_that_is_never_clean_ends_and_says_so() {
        let (done, pauses) = on_card(vec![moment(1500, &["heat"])], Rules::default());
        assert_eq!((done.stop, done.passes.len(), done.kept().count()), (Stop::Count, LEAST, LEAST));
        assert_eq!(done.settled.dirty.as_deref(), Some("10 of 10 repetitions were disturbed: heat"));
        assert_eq!(pauses, LEAST - 1);
        // Asked for 3: at most 6 are made.
        let good = moment(1980, &[]);
        let hot = moment(1980, &["heat"]);
        let rules = Rules { repetitions: Some(3), ..Rules::default() };
        let (done, _) = on_card(vec![good.clone(), hot.clone(), good, hot.clone(), hot], rules);
        assert_eq!((done.passes.len(), done.stop), (5, Stop::Count));
        assert_eq!(done.settled.dirty.as_deref(), Some("3 of 5 repetitions were disturbed: heat"));
    }

    #[test]
    fn pauses_do_not_use_up_a_cell_s_time() {
        let rules = Rules { seconds: 2.5, ..Rules::default() };
        let bad = moment(1980, &["heat"]);
        let good = moment(1980, &[]);
        let (done, pauses) = on_card(vec![bad.clone(), good.clone(), bad.clone(), good.clone(), bad, good], rules);
        assert_eq!((done.stop, pauses, done.settled.thrown), (Stop::Interval, 3, 3));
    }
}
