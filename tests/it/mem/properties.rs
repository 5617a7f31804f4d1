//! Random calls of the pool, against a model that forgets nothing and shares no code with it.

use std::collections::BTreeMap;

use highwater::error::OutOfMemory;
use highwater::mem::{ALIGN_BYTES, Block, End, Layer, Owner, Pool, Report, Tag};
use proptest::prelude::*;

use super::{A, ENDS, TAGS, depth, units};

#[derive(Debug, Clone, Copy)]
enum Op {
    Alloc(End, usize, u64),
    /// Frees the live block of this number, modulo how many there are.
    Free(usize),
    BeginStep,
}

fn size() -> impl Strategy<Value = u64> {
    prop_oneof![
        1 => 0..=1u64,
        6 => 1..=4 * ALIGN_BYTES,
        6 => (1..=80u64).prop_map(units),
        // Classes here hold several sizes.
        4 => (64..=200u64).prop_map(units),
        3 => (0..=24u32, any::<u64>()).prop_map(|(log, low)| (1 << log) + low % (1 << log)),
        1 => (0..=600u64).prop_map(|below| u64::MAX - below),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let end = prop_oneof![2 => Just(End::Persistent), 3 => Just(End::Arena)];
    prop_oneof![
        50 => (end, 0..TAGS.len(), size()).prop_map(|(end, tag, bytes)| Op::Alloc(end, tag, bytes)),
        40 => any::<usize>().prop_map(Op::Free),
        2 => Just(Op::BeginStep),
    ]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(op(), 0..300)
}

fn capacity() -> impl Strategy<Value = u64> {
    prop_oneof![1 => 0..=units(4), 4 => 0..=units(600), 4 => 0..=units(8000), 1 => Just(u64::MAX)]
}

fn config() -> ProptestConfig {
    ProptestConfig { failure_persistence: None, ..ProptestConfig::default() }
}

/// What one call did: where a block went, or the refusal.
type Outcome = Result<(End, u64, u64), OutOfMemory>;

/// Runs `ops`, calling `seen` with the pool and what the op did after each.
fn run(pool: &mut Pool, ops: &[Op], mut seen: impl FnMut(&Pool, Op, Option<usize>, Option<&Outcome>)) -> Vec<Block> {
    let mut live: Vec<Block> = Vec::new();
    for &op in ops {
        match op {
            Op::Alloc(end, tag, bytes) => {
                let outcome = pool.alloc(end, TAGS[tag], bytes).map(|block| {
                    let place = (block.end(), block.offset(), block.bytes());
                    assert_eq!((block.requested(), block.end()), (bytes, end));
                    live.push(block);
                    place
                });
                seen(pool, op, None, Some(&outcome));
            }
            Op::Free(n) if !live.is_empty() => {
                let at = n % live.len();
                pool.free(live.swap_remove(at));
                seen(pool, op, Some(at), None);
            }
            Op::Free(_) => {}
            Op::BeginStep => {
                pool.begin_step();
                seen(pool, op, None, None);
            }
        }
    }
    live
}

fn outcomes(pool: &mut Pool, ops: &[Op]) -> (Vec<Outcome>, Vec<Report>) {
    let (mut outcomes, mut reports) = (Vec::new(), Vec::new());
    run(pool, ops, |pool, _, _, outcome| {
        outcomes.extend(outcome.cloned());
        reports.push(pool.report());
    });
    (outcomes, reports)
}

#[derive(Debug, Clone, Copy)]
struct Held {
    end: End,
    tag: Tag,
    offset: u64,
    bytes: u64,
}

/// The arena at one instant.
#[derive(Debug)]
struct Instant {
    extent: u64,
    owners: BTreeMap<Tag, u64>,
}

/// Every live block, every instant of the step, every arena block of the step; asked, it looks through all of them.
#[derive(Debug)]
struct Model {
    capacity: u64,
    live: Vec<Held>,
    instants: Vec<Instant>,
    step_blocks: Vec<(Tag, u64)>,
}

impl Model {
    fn new(capacity: u64) -> Model {
        let mut model = Model { capacity, live: Vec::new(), instants: Vec::new(), step_blocks: Vec::new() };
        model.begin_step();
        model
    }

    fn of(&self, end: End) -> Vec<Held> {
        let mut held: Vec<Held> = self.live.iter().copied().filter(|h| h.end == end).collect();
        held.sort_by_key(|h| self.depth(h));
        held
    }

    fn depth(&self, held: &Held) -> u64 {
        depth(self.capacity, held.end, held.offset, held.bytes)
    }

    fn extent(&self, end: End) -> u64 {
        self.of(end).last().map_or(0, |h| self.depth(h) + h.bytes)
    }

    fn owners(&self, end: End) -> BTreeMap<Tag, u64> {
        let mut owners = BTreeMap::new();
        for held in self.of(end) {
            *owners.entry(held.tag).or_insert(0) += held.bytes;
        }
        owners
    }

    fn note_instant(&mut self) {
        self.instants.push(Instant { extent: self.extent(End::Arena), owners: self.owners(End::Arena) });
    }

    fn alloc(&mut self, held: Held) {
        self.live.push(held);
        if held.end == End::Arena {
            self.step_blocks.push((held.tag, held.bytes));
        }
        self.note_instant();
    }

    fn free(&mut self, at: usize) {
        self.live.swap_remove(at);
        self.note_instant();
    }

    fn begin_step(&mut self) {
        self.instants.clear();
        self.step_blocks = self.of(End::Arena).iter().map(|h| (h.tag, h.bytes)).collect();
        self.note_instant();
    }

    /// The first of the instants with the largest extent.
    fn peak(&self) -> &Instant {
        let most = self.instants.iter().map(|i| i.extent).max().unwrap();
        self.instants.iter().find(|i| i.extent == most).unwrap()
    }

    /// Whether a hole or the gap holds `bytes`.
    fn fits(&self, end: End, bytes: u64) -> bool {
        let mut last = 0;
        for held in self.of(end) {
            if self.depth(&held) - last >= bytes {
                return true;
            }
            last = self.depth(&held) + held.bytes;
        }
        bytes <= self.room(end)
    }

    fn room(&self, end: End) -> u64 {
        let arena = if end == End::Arena { self.extent(End::Arena) } else { self.peak().extent };
        self.capacity - self.extent(End::Persistent) - arena
    }

    fn report(&self) -> Report {
        let peak = self.peak();
        let live = |i: &Instant| i.owners.values().sum::<u64>();
        let most = self.step_blocks.iter().map(|b| b.1).max();
        let resident = self.extent(End::Persistent);
        let resident_owners = self.owners(End::Persistent);
        Report {
            slab: self.capacity,
            resident,
            transient_peak: peak.extent,
            free: self.capacity - resident - peak.extent,
            resident_live: resident_owners.values().sum(),
            transient_live_peak: self.instants.iter().map(live).max().unwrap(),
            fragmentation: peak.extent - live(peak),
            largest: self.step_blocks.iter().copied().find(|b| Some(b.1) == most),
            owners: rows(&peak.owners, peak.extent),
            resident_owners: rows(&resident_owners, resident),
        }
    }
}

fn rows(owners: &BTreeMap<Tag, u64>, extent: u64) -> Vec<(Owner, u64)> {
    let mut rows: Vec<(Owner, u64)> = owners.iter().map(|(&tag, &bytes)| (Owner::Tag(tag), bytes)).collect();
    let holes = extent - owners.values().sum::<u64>();
    if holes > 0 {
        rows.push((Owner::Holes, holes));
    }
    rows.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.to_string().cmp(&b.0.to_string())));
    rows
}

proptest! {
    #![proptest_config(config())]

    /// After every call: blocks aligned, padded, inside the slab and disjoint; a refusal only where nothing fits; the
    /// report, owners at the peak included, equal to the model's.
    #[test]
    fn equals_the_naive_model(capacity in capacity(), ops in ops()) {
        let mut pool = Pool::new(capacity);
        let capacity = capacity - capacity % ALIGN_BYTES;
        prop_assert_eq!(pool.capacity(), capacity);
        let mut model = Model::new(capacity);
        run(&mut pool, &ops, |pool, op, freed, outcome| {
            match (op, outcome) {
                (Op::Alloc(end, tag, asked), Some(Ok((_, offset, bytes)))) => {
                    let held = Held { end, tag: TAGS[tag], offset: *offset, bytes: *bytes };
                    assert_eq!(held.offset % ALIGN_BYTES, 0);
                    assert_eq!(held.bytes, asked.max(1).div_ceil(ALIGN_BYTES) * ALIGN_BYTES);
                    assert!(held.offset + held.bytes <= capacity);
                    for other in &model.live {
                        let apart = held.offset + held.bytes <= other.offset || other.offset + other.bytes <= held.offset;
                        assert!(apart, "{held:?} overlaps {other:?}");
                    }
                    model.alloc(held);
                }
                (Op::Alloc(end, tag, asked), Some(Err(oom))) => {
                    let padded = asked.max(1).checked_next_multiple_of(ALIGN_BYTES);
                    assert!(padded.is_none_or(|padded| !model.fits(end, padded)), "{oom} though it fits");
                    assert_eq!(oom.tag, TAGS[tag].to_string());
                    assert_eq!(oom.requested, padded.unwrap_or(u64::MAX - u64::MAX % ALIGN_BYTES));
                    assert_eq!((oom.free, oom.slab), (model.room(end), capacity));
                    assert_eq!(oom.owners.iter().map(|o| o.1).sum::<u64>(), oom.slab - oom.free);
                    assert!(oom.owners.is_sorted_by(|a, b| a.1 >= b.1));
                }
                (Op::Free(_), _) => model.free(freed.unwrap()),
                (Op::BeginStep, _) => model.begin_step(),
                (Op::Alloc(..), None) => unreachable!("an alloc has an outcome"),
            }
            let report = pool.report();
            assert_eq!(&report, &model.report());
            assert_eq!(report.slab, report.resident + report.transient_peak + report.free);
            assert_eq!(report.owners.iter().map(|o| o.1).sum::<u64>(), report.transient_peak);
            assert_eq!(report.resident_owners.iter().map(|o| o.1).sum::<u64>(), report.resident);
            assert_eq!(pool.resident(), report.resident);
            assert_eq!(pool.arena_extent(), model.extent(End::Arena));
            assert_eq!(pool.arena_live(), model.owners(End::Arena).values().sum::<u64>());
            assert_eq!(pool.gap(), capacity - pool.resident() - pool.arena_extent());
        });
    }

    #[test]
    fn same_calls_give_the_same_offsets(capacity in capacity(), ops in ops()) {
        let (mut one, mut two) = (Pool::new(capacity), Pool::new(capacity));
        prop_assert_eq!(outcomes(&mut one, &ops), outcomes(&mut two, &ops));
    }

    /// What the engine's sizing rests on: a step planned in a large slab takes the same bytes in any slab that holds it.
    #[test]
    fn a_slab_that_fits_moves_nothing(more in 0..=units(1 << 20), ops in ops()) {
        let allocs = ops.iter().filter(|op| matches!(op, Op::Alloc(_, _, bytes) if *bytes <= units(200)) || !matches!(op, Op::Alloc(..)));
        let ops: Vec<Op> = allocs.copied().collect();
        let mut wide = Pool::new(u64::MAX);
        let (_, reports) = outcomes(&mut wide, &ops);
        let needed = reports.iter().map(|r| r.slab - r.free).max().unwrap_or(0);
        let mut tight = Pool::new(needed + more);
        let (places, reports_tight) = outcomes(&mut tight, &ops);
        let (places_wide, _) = outcomes(&mut Pool::new(u64::MAX), &ops);
        let depths = |capacity: u64, places: &[Outcome]| -> Vec<u64> {
            places.iter().map(|p| { let (end, at, bytes) = *p.as_ref().unwrap(); depth(capacity, end, at, bytes) }).collect()
        };
        prop_assert_eq!(depths(tight.capacity(), &places), depths(wide.capacity(), &places_wide));
        for (wide, tight) in std::iter::zip(reports, reports_tight) {
            let same_slab = Report { slab: tight.slab, free: tight.free, ..wide };
            prop_assert_eq!(same_slab, tight);
        }
    }

    #[test]
    fn freed_in_any_order_nothing_leaks(capacity in units(1)..=units(8000), ops in ops(), order in any::<u64>()) {
        let mut pool = Pool::new(capacity);
        let mut live = run(&mut pool, &ops, |_, _, _, _| ());
        let mut pick = order;
        while !live.is_empty() {
            pick = pick.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = (pick >> 33) as usize % live.len();
            pool.free(live.swap_remove(at));
        }
        prop_assert_eq!((pool.resident(), pool.arena_extent(), pool.arena_live()), (0, 0, 0));
        prop_assert_eq!(pool.gap(), pool.capacity());
        pool.begin_step();
        for end in ENDS {
            let all = pool.alloc(end, A, pool.capacity()).unwrap();
            prop_assert_eq!((all.offset(), pool.gap()), (0, 0));
            pool.free(all);
            pool.begin_step();
        }
    }
}

proptest! {
    // Each case prints the whole pool twice per call.
    #![proptest_config(ProptestConfig { cases: 24, ..config() })]

    /// A pool with refused calls strewn in goes on exactly as one without.
    #[test]
    fn a_refused_call_changes_nothing(capacity in 0..=units(600), ops in ops()) {
        let mut plain = Pool::new(capacity);
        let mut tried = Pool::new(capacity);
        let new_tag = Tag::new(Layer::Other, "never", "seen");
        let mut held: Vec<Block> = Vec::new();
        run(&mut plain, &ops, |plain, op, freed, outcome| {
            let before = format!("{tried:?}");
            for (end, bytes) in [(End::Persistent, capacity + 1), (End::Arena, capacity + 1), (End::Arena, u64::MAX)] {
                tried.alloc(end, new_tag, bytes).unwrap_err();
            }
            assert_eq!(before, format!("{tried:?}"));
            match op {
                Op::Alloc(end, tag, bytes) => {
                    let got = tried.alloc(end, TAGS[tag], bytes);
                    assert_eq!(got.as_ref().map(|b| (b.end(), b.offset(), b.bytes())), outcome.unwrap().as_ref().copied());
                    held.extend(got);
                }
                Op::Free(_) => tried.free(held.swap_remove(freed.unwrap())),
                Op::BeginStep => tried.begin_step(),
            }
            assert_eq!(plain.report(), tried.report());
        });
    }
}
