//! How often the verdicts are wrong, on samples of real runs in `tests/fixtures/noise`: the decode steps of an H200, and of a
//! shared two-core machine. A run is drawn from a set as a run is made: repetitions, each all of one kept
//! repetition's steps drawn anew, so that what differs between repetitions and what differs between steps are both in it.

use std::path::Path;

use serde::Deserialize;

use crate::stats::{Draw, Summary};
use crate::verdict::{Comparison, MOST_HALF_WIDTH, Rule, Verdict};

/// The default of `--threshold`.
const THRESHOLD: f64 = 0.01;
/// Comparisons of a thing with itself, of which at most one may be a verdict.
const EQUAL: usize = 200;
/// Comparisons with a slowdown of 3 %, of which 95 must be found.
const SLOWED: usize = 100;

/// Steps of the repetitions of one cell, in ms.
#[derive(Debug, Deserialize)]
struct Set {
    name: String,
    repetitions: Vec<Vec<f64>>,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Cells of an H200 that decoded for more than a few steps.
fn of_a_card() -> Vec<Set> {
    let sets = sets("h200");
    assert!(sets.len() >= 15, "{}", sets.len());
    sets
}

fn sets(machine: &str) -> Vec<Set> {
    let file = root().join("tests/fixtures/noise").join(machine).with_extension("json");
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// Sets of one thread of a shared machine of two cores, from its quietest moments to its worst.
fn of_a_processor() -> Vec<Set> {
    let sets = sets("cpu");
    assert!(sets.len() == 3 && sets.iter().all(|set| set.repetitions.len() >= 12));
    sets
}

/// The median step of each repetition of a run, times `slower`.
fn run(set: &Set, repetitions: usize, slower: f64, draw: &mut Draw) -> Vec<f64> {
    let one = |draw: &mut Draw| {
        let kept = &set.repetitions[draw.below(set.repetitions.len())];
        let steps: Vec<f64> = kept.iter().map(|_| kept[draw.below(kept.len())]).collect();
        Summary::of(&steps).unwrap().median * slower
    };
    (0..repetitions).map(|_| one(draw)).collect()
}

/// Verdicts of `count` comparisons, the sets in turn.
fn verdicts(sets: &[Set], count: usize, repetitions: usize, slower: f64) -> Vec<Comparison> {
    let mut draw = Draw::new(20_261_201);
    let one = |at: usize| {
        let set = &sets[at % sets.len()];
        let (base, candidate) = (run(set, repetitions, 1.0, &mut draw), run(set, repetitions, slower, &mut draw));
        Comparison::of(&base, &candidate, Rule::of_steps(THRESHOLD), at as u64)
            .unwrap_or_else(|why| panic!("{}: {why}", set.name))
    };
    (0..count).map(one).collect()
}

fn count(found: &[Comparison], verdict: Verdict) -> usize {
    found.iter().filter(|comparison| comparison.verdict == verdict).count()
}

/// Holds a kind of machine to both requirements, with as many repetitions as its noise needs.
fn hold(sets: &[Set], repetitions: usize) {
    let equal = verdicts(sets, EQUAL, repetitions, 1.0);
    let wrong = count(&equal, Verdict::Slower) + count(&equal, Verdict::Faster);
    assert!(wrong <= 1, "{wrong} of {EQUAL} comparisons of a thing with itself are verdicts");
    for same in equal.iter().filter(|comparison| comparison.verdict == Verdict::Same) {
        assert!(same.half_width().unwrap() <= MOST_HALF_WIDTH);
    }
    let slowed = verdicts(sets, SLOWED, repetitions, 1.03);
    let found = count(&slowed, Verdict::Slower);
    assert!(found * 100 >= SLOWED * 95, "{found} of {SLOWED} slowdowns of 3 % are found");
    assert_eq!(count(&slowed, Verdict::Faster) + count(&slowed, Verdict::Same), 0);
    let faster = verdicts(sets, SLOWED, repetitions, 1.0 / 1.03);
    assert!(count(&faster, Verdict::Faster) * 100 >= SLOWED * 95);
}

#[test]
fn on_a_card_equal_runs_are_equal_and_three_percent_is_found() {
    let sets = of_a_card();
    hold(&sets, 10);
    let equal = verdicts(&sets, EQUAL, 10, 1.0);
    assert!(count(&equal, Verdict::Same) * 100 >= EQUAL * 95, "a quiet card's equal runs are called the same");
}

#[test]
fn on_a_quiet_processor_too_given_its_repetitions() {
    let quiet: Vec<Set> = of_a_processor().into_iter().filter(|set| set.name.starts_with("quiet")).collect();
    hold(&quiet, 24);
}

#[test]
fn on_a_noisy_processor_nothing_is_concluded_wrongly_however_few_the_repetitions() {
    let noisy: Vec<Set> = of_a_processor().into_iter().filter(|set| !set.name.starts_with("quiet")).collect();
    for repetitions in [10, 12, 20] {
        let equal = verdicts(&noisy, EQUAL, repetitions, 1.0);
        let wrong = count(&equal, Verdict::Slower) + count(&equal, Verdict::Faster);
        assert!(wrong <= 1, "{wrong} of {EQUAL} at {repetitions} repetitions");
        // The draws would fool a gate that had no interval.
        let naive = equal.iter().filter(|comparison| (comparison.ratio - 1.0).abs() > THRESHOLD).count();
        assert!(naive > EQUAL / 10, "{naive}");
        let slowed = verdicts(&noisy, SLOWED, repetitions, 1.03);
        assert_eq!(count(&slowed, Verdict::Same), 0, "three percent is never called the same");
    }
}
