//! Who looks at the card while a row is measured: the thread and the judge of `hygiene`, one repetition after another, and a
//! little time for a card that was disturbed.

use std::time::Duration;

use highwater::error::Result;

use super::time::Lookout;
use crate::hygiene::{Conditions, Seen, Source, during, judge, settle};

/// What a disturbed card is given to recover, and how often in a row: there are hundreds of rows.
const COOL_DOWN: Duration = Duration::from_millis(250);
const MOST_COOL_DOWNS: usize = 4;

/// Looks at one card.
pub(super) struct CardLookout {
    source: Box<dyn Source>,
    seen: Vec<Seen>,
    cool_downs: usize,
    conditions: Conditions,
}

impl std::fmt::Debug for CardLookout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CardLookout").field("repetitions", &self.seen.len()).finish_non_exhaustive()
    }
}

impl CardLookout {
    pub(super) fn new(source: Box<dyn Source>) -> CardLookout {
        CardLookout { source, seen: Vec::new(), cool_downs: 0, conditions: Conditions::default() }
    }

    /// The card over the samples that were settled last.
    pub(super) fn conditions(&self) -> Conditions {
        self.conditions.clone()
    }
}

impl Lookout for CardLookout {
    fn begin(&mut self) {
        self.seen.clear();
        self.cool_downs = 0;
    }

    fn during(&mut self, repetition: &mut dyn FnMut() -> Result<Vec<f64>>) -> Result<Vec<f64>> {
        let (samples, seen) = during(Some(&mut *self.source), repetition);
        self.seen.push(seen);
        samples
    }

    fn clean(&self) -> Vec<bool> {
        judge(&self.seen).iter().map(Option::is_none).collect()
    }

    fn cool_down(&mut self) -> Duration {
        if self.cool_downs >= MOST_COOL_DOWNS {
            return Duration::ZERO;
        }
        self.cool_downs += 1;
        std::thread::sleep(COOL_DOWN);
        COOL_DOWN
    }

    fn settle(&mut self) -> (Vec<usize>, Option<String>) {
        let settled = settle(&judge(&self.seen));
        self.conditions = Conditions::of(&self.seen, &settled.kept);
        (settled.kept, settled.dirty)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::hygiene::tests::moment;
    use crate::nvml::Moment;

    /// A card that is hot while it is told to be.
    struct Told(Arc<AtomicBool>);

    impl Source for Told {
        fn look(&mut self) -> Option<Moment> {
            Some(moment(1980, if self.0.load(Ordering::SeqCst) { &["heat"] } else { &[] }))
        }
    }

    /// Three repetitions, of which these are hot.
    fn three(hot: [bool; 3]) -> CardLookout {
        let now = Arc::new(AtomicBool::new(false));
        let mut lookout = CardLookout::new(Box::new(Told(Arc::clone(&now))));
        lookout.begin();
        for hot in hot {
            now.store(hot, Ordering::SeqCst);
            assert_eq!(lookout.during(&mut || Ok(vec![1.0])).unwrap(), [1.0]);
        }
        lookout
    }

    #[test]
    fn a_disturbed_repetition_does_not_stand_and_a_hot_card_is_dirty() {
        let mut lookout = three([false, true, false]);
        assert_eq!(lookout.clean(), [true, false, true]);
        assert_eq!(lookout.settle(), (vec![0, 2], None));
        let conditions = lookout.conditions();
        assert_eq!((conditions.sm_clock_mhz, conditions.throttled.as_deref()), (Some(1980.0), Some("heat")));
        let mut lookout = three([true; 3]);
        let (kept, dirty) = lookout.settle();
        assert_eq!((kept, dirty.as_deref()), (vec![0, 1, 2], Some("3 of 3 repetitions were disturbed: heat")));
    }

    #[test]
    fn a_card_cools_down_a_few_times_a_row_and_no_more() {
        let mut lookout = three([true; 3]);
        let cooled: Vec<bool> = (0..=MOST_COOL_DOWNS).map(|_| lookout.cool_down() > Duration::ZERO).collect();
        assert_eq!(cooled.iter().filter(|cooled| **cooled).count(), MOST_COOL_DOWNS);
        lookout.begin();
        assert!(lookout.clean().is_empty() && lookout.cool_down() > Duration::ZERO);
    }
}
