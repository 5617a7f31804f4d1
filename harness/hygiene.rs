//! Whether a repetition on a card is to be believed: clocks, heat, power and company, sampled by a thread while it runs.
//!
//! What makes a repetition dirty is a pure function of what was seen ([`judge`]). A driver that holds clocks at the power
//! limit is no reason: a 700 W card does that under any full load, for as long as the load lasts, and the speed it then has
//! is its speed. It is reported in `throttled`; where it makes clocks drift, the drift is the reason. The same goes for a
//! clock setting and for the clocks of a group of cards. Heat, the power brake and hardware slowdown are not states a card
//! should be measured in.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

use crate::nvml::Moment;
use crate::stats::Summary;

/// Time between two looks at a card: its own counters are refreshed no faster.
const PERIOD: Duration = Duration::from_millis(50);
/// A repetition whose clock is below the usual by more than this is another card's.
pub(crate) const CLOCK_DRIFT: f64 = 0.05;
/// What holds clocks in a way that no measurement should stand, by the words of `nvml`.
const DISTURBING: [&str; 4] = ["hardware slowdown", "heat", "heat, by the hardware", "the power brake"];
/// What the library reports of a card that has nothing to do; it holds nothing down.
const IDLE: &str = "idleness";

/// Something that can be asked how a card is now.
pub(crate) trait Source: Send {
    /// The card at this moment; none where that is not known.
    fn look(&mut self) -> Option<Moment>;
}

/// What was seen of a card over one repetition, at its beginning, at its end and in between.
pub(crate) type Seen = Vec<Moment>;

/// Runs `body` while a thread looks at the card, if there is one.
pub(crate) fn during<T>(source: Option<&mut (dyn Source + '_)>, body: impl FnOnce() -> T) -> (T, Seen) {
    let Some(source) = source else { return (body(), Seen::new()) };
    let (done, bell) = (Mutex::new(false), Condvar::new());
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut seen = Seen::new();
            loop {
                seen.extend(source.look());
                let Ok(guard) = done.lock() else { return seen };
                let Ok((guard, _)) = bell.wait_timeout_while(guard, PERIOD, |done| !*done) else { return seen };
                if *guard {
                    drop(guard);
                    seen.extend(source.look());
                    return seen;
                }
            }
        });
        // Rung however `body` ends: the scope waits for the thread.
        let ring = Ring { done: &done, bell: &bell };
        let value = body();
        drop(ring);
        (value, watcher.join().unwrap_or_default())
    })
}

struct Ring<'a> {
    done: &'a Mutex<bool>,
    bell: &'a Condvar,
}

impl Drop for Ring<'_> {
    fn drop(&mut self) {
        if let Ok(mut done) = self.done.lock() {
            *done = true;
        }
        self.bell.notify_all();
    }
}

/// Of each repetition why it is dirty, if it is: something held the clocks down that should not, another process was on the
/// card, or the clock was more than 5 % below the median of the repetitions that neither happened to.
pub(crate) fn judge(repetitions: &[Seen]) -> Vec<Option<String>> {
    let mut verdicts: Vec<Option<String>> = repetitions.iter().map(|seen| disturbed(seen)).collect();
    let clocks: Vec<Option<f64>> = repetitions.iter().map(|seen| sm_clock(seen)).collect();
    let undisturbed: Vec<f64> =
        clocks.iter().zip(&verdicts).filter(|(_, verdict)| verdict.is_none()).filter_map(|(clock, _)| *clock).collect();
    let Some(usual) = Summary::of(&undisturbed).map(|summary| summary.median) else { return verdicts };
    for (verdict, clock) in verdicts.iter_mut().zip(clocks) {
        if let Some(clock) = clock.filter(|clock| verdict.is_none() && *clock < usual * (1.0 - CLOCK_DRIFT)) {
            *verdict = Some(format!("an SM clock of {clock:.0} MHz where {usual:.0} MHz is usual"));
        }
    }
    verdicts
}

fn disturbed(seen: &[Moment]) -> Option<String> {
    let held = seen.iter().flat_map(|moment| moment.throttled.iter().flatten());
    if let Some(reason) = held.copied().find(|reason| DISTURBING.contains(reason)) {
        return Some(reason.to_owned());
    }
    let other = seen.iter().flat_map(|moment| moment.others.iter().flatten()).next()?;
    let name = other.name.as_deref().map_or(String::new(), |name| format!(" ({name})"));
    Some(format!("process {}{name} on the card", other.pid))
}

/// The median clock of a repetition. The clock of a card at rest, before the first launch or after the last, is left out
/// where there is another.
fn sm_clock(seen: &[Moment]) -> Option<f64> {
    let resting = |moment: &Moment| moment.throttled.iter().flatten().any(|reason| *reason == IDLE);
    let of = |busy: bool| -> Vec<f64> {
        let counted = seen.iter().filter(|moment| !busy || !resting(moment));
        counted.filter_map(|moment| moment.sm_clock_mhz.map(f64::from)).collect()
    };
    Summary::of(&of(true)).or_else(|| Summary::of(&of(false))).map(|summary| summary.median)
}

/// Which repetitions stand.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Settled {
    /// Places of those that do.
    pub(crate) kept: Vec<usize>,
    /// How many were thrown away.
    pub(crate) thrown: u64,
    /// Why what stands is not clean, where clean ones were too few.
    pub(crate) dirty: Option<String>,
}

/// The clean repetitions, where at least half are clean; else all of them, and why they are not to be trusted.
pub(crate) fn settle(verdicts: &[Option<String>]) -> Settled {
    let clean: Vec<usize> = (0..verdicts.len()).filter(|at| verdicts[*at].is_none()).collect();
    let dirty = verdicts.len() - clean.len();
    if dirty == 0 || (!clean.is_empty() && clean.len() >= dirty) {
        return Settled { kept: clean, thrown: dirty as u64, dirty: None };
    }
    let mut reasons: Vec<(&str, usize)> = Vec::new();
    for reason in verdicts.iter().flatten() {
        match reasons.iter_mut().find(|(known, _)| known == reason) {
            Some((_, count)) => *count += 1,
            None => reasons.push((reason, 1)),
        }
    }
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let (most, _) = reasons.first().copied().unwrap_or_default();
    let more = if reasons.len() > 1 { ", among others" } else { "" };
    let dirty = format!("{dirty} of {} repetitions were disturbed: {most}{more}", verdicts.len());
    Settled { kept: (0..verdicts.len()).collect(), thrown: 0, dirty: Some(dirty) }
}

/// The card over a cell, for its row. Clocks, heat and power are of the repetitions kept; what held clocks and who else was
/// there, of all.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Conditions {
    /// Median SM clock, MHz.
    pub(crate) sm_clock_mhz: Option<f64>,
    /// The lowest of any repetition's median, MHz.
    pub(crate) sm_clock_least_mhz: Option<f64>,
    /// Median memory clock, MHz.
    pub(crate) memory_clock_mhz: Option<f64>,
    /// Highest temperature, degrees Celsius.
    pub(crate) temperature_c: Option<f64>,
    /// Median power, W.
    pub(crate) power_w: Option<f64>,
    /// What held clocks, joined by `, `.
    pub(crate) throttled: Option<String>,
    /// The most other processes at once.
    pub(crate) foreign_processes: Option<u64>,
}

impl Conditions {
    /// Of all `repetitions`, of which those at `kept` stand.
    pub(crate) fn of(repetitions: &[Seen], kept: &[usize]) -> Conditions {
        let stand: Vec<&Moment> = kept.iter().filter_map(|at| repetitions.get(*at)).flatten().collect();
        let all = || repetitions.iter().flatten();
        let median = |values: Vec<f64>| Summary::of(&values).map(|summary| summary.median);
        let clocks: Vec<f64> = kept.iter().filter_map(|at| sm_clock(repetitions.get(*at)?)).collect();
        let mut held: Vec<&str> = Vec::new();
        for reason in all().filter_map(|moment| moment.throttled.as_ref()).flatten() {
            if *reason != IDLE && !held.contains(reason) {
                held.push(reason);
            }
        }
        let known = all().any(|moment| moment.throttled.is_some());
        Conditions {
            sm_clock_least_mhz: Summary::of(&clocks).map(|summary| summary.min),
            sm_clock_mhz: median(clocks),
            memory_clock_mhz: median(stand.iter().filter_map(|m| m.memory_clock_mhz.map(f64::from)).collect()),
            temperature_c: stand.iter().filter_map(|m| m.temperature_c.map(f64::from)).reduce(f64::max),
            power_w: median(stand.iter().filter_map(|m| m.power_w).collect()),
            throttled: known.then(|| held.join(", ")),
            foreign_processes: all().filter_map(|m| m.others.as_ref().map(|others| others.len() as u64)).max(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::nvml::Process;

    pub(crate) fn moment(clock: u32, held: &[&'static str]) -> Moment {
        Moment {
            sm_clock_mhz: Some(clock),
            memory_clock_mhz: Some(3201),
            temperature_c: Some(60),
            power_w: Some(690.0),
            throttled: Some(held.to_vec()),
            others: Some(Vec::new()),
            ..Moment::default()
        }
    }

    fn with_company(pid: u32) -> Moment {
        let other = Process { pid, name: Some("python3".into()), bytes: Some(1 << 30) };
        Moment { others: Some(vec![other]), ..moment(1980, &[]) }
    }

    #[test]
    fn what_makes_a_repetition_dirty() {
        let clean = || vec![moment(1980, &[]), moment(1965, &["the power limit"])];
        for (odd, why) in [
            (vec![moment(1980, &[]), moment(1980, &["heat"])], Some("heat")),
            (vec![moment(1980, &["heat, by the hardware"])], Some("heat, by the hardware")),
            (vec![moment(1980, &["the power brake"])], Some("the power brake")),
            (vec![moment(1980, &["the power limit", "hardware slowdown"])], Some("hardware slowdown")),
            (vec![moment(1980, &[]), with_company(77)], Some("process 77 (python3) on the card")),
            (vec![moment(1860, &["the power limit"])], Some("an SM clock of 1860 MHz where 1972 MHz is usual")),
            // Within 5 %, whatever holds it.
            (vec![moment(1880, &["the power limit"])], None),
            (vec![moment(1980, &["a clock setting", "another card of its group"])], None),
            // At rest before its first launch: the busy clock counts.
            (vec![moment(345, &["idleness"]), moment(1980, &[])], None),
            // Nothing known is no disturbance.
            (vec![Moment::default()], None),
            (Vec::new(), None),
        ] {
            let verdicts = judge(&[clean(), odd.clone(), clean(), clean()]);
            assert_eq!(verdicts[1].as_deref(), why, "{odd:?}");
            assert!(verdicts.iter().enumerate().all(|(at, verdict)| at == 1 || verdict.is_none()), "{verdicts:?}");
        }
    }

    #[test]
    fn the_usual_clock_is_of_repetitions_that_nothing_disturbed() {
        // Two hot and slow ones do not make 1200 MHz usual.
        let hot = vec![moment(1200, &["heat"])];
        let verdicts = judge(&[hot.clone(), hot, vec![moment(1980, &[])]]);
        assert_eq!(verdicts, [Some("heat".into()), Some("heat".into()), None]);
        assert_eq!(judge(&[]), Vec::<Option<String>>::new());
    }

    #[test]
    fn clean_ones_stand_where_they_are_half_and_all_do_where_not() {
        let settled = |verdicts: &[Option<&str>]| {
            settle(&verdicts.iter().map(|verdict| verdict.map(str::to_owned)).collect::<Vec<_>>())
        };
        assert_eq!(settled(&[]), Settled::default());
        assert_eq!(settled(&[None, None]), Settled { kept: vec![0, 1], ..Settled::default() });
        let one_thrown = Settled { kept: vec![0, 2], thrown: 1, dirty: None };
        assert_eq!(settled(&[None, Some("heat"), None]), one_thrown);
        let all = |why: &str| Settled { kept: vec![0, 1, 2], thrown: 0, dirty: Some(why.to_owned()) };
        let too_few = all("2 of 3 repetitions were disturbed: heat");
        assert_eq!(settled(&[Some("heat"), None, Some("heat")]), too_few);
        let none = all("3 of 3 repetitions were disturbed: heat, among others");
        assert_eq!(settled(&[Some("heat"), Some("x"), Some("heat")]), none);
    }

    #[test]
    fn conditions_are_of_what_stands_and_company_of_all() {
        let repetitions = [
            vec![moment(1980, &["idleness"]), moment(1960, &["the power limit"])],
            vec![moment(1200, &["heat"]), with_company(7)],
        ];
        let conditions = Conditions::of(&repetitions, &[0]);
        assert_eq!((conditions.sm_clock_mhz, conditions.sm_clock_least_mhz), (Some(1960.0), Some(1960.0)));
        assert_eq!((conditions.temperature_c, conditions.power_w), (Some(60.0), Some(690.0)));
        assert_eq!(conditions.throttled.as_deref(), Some("the power limit, heat"));
        assert_eq!(conditions.foreign_processes, Some(1));
        assert_eq!(Conditions::of(&[Vec::new()], &[0]), Conditions::default());
    }

    /// Counts how often it is asked.
    struct Counting(u32);

    impl Source for Counting {
        fn look(&mut self) -> Option<Moment> {
            self.0 += 1;
            Some(moment(self.0, &[]))
        }
    }

    #[test]
    fn a_card_is_looked_at_before_during_and_after() {
        let mut source = Counting(0);
        let (value, seen) = during(Some(&mut source), || {
            std::thread::sleep(3 * PERIOD);
            5
        });
        assert!(value == 5 && seen.len() >= 3, "{} looks", seen.len());
        let mut source = Counting(0);
        assert!(during(Some(&mut source), || ()).1.len() >= 2);
        assert_eq!(during(None, || 1), (1, Vec::new()));
    }

    #[test]
    fn a_panic_while_a_card_is_watched_ends_the_watch() {
        let caught = std::panic::catch_unwind(|| {
            let mut source = Counting(0);
            during(Some(&mut source), || panic!("on purpose"))
        });
        assert!(caught.is_err());
    }
}
