//! The pool by examples; [`properties`] draws the calls.

mod properties;

use std::collections::BTreeMap;

use highwater::error::Error;
use highwater::mem::{ALIGN_BYTES, End, Layer, Owner, Pool, Report, Tag};

const A: Tag = Tag::new(Layer::Gdn, "prefill", "h");
const B: Tag = Tag::new(Layer::Attention, "paged", "partials");
const C: Tag = Tag::new(Layer::Head, "linear", "logits");
const TAGS: [Tag; 6] = [
    A,
    B,
    C,
    Tag::new(Layer::Moe, "route", "ids"),
    Tag::new(Layer::Weights, "embed", "table"),
    Tag::new(Layer::Gdn, "prefill", "g"),
];
const ENDS: [End; 2] = [End::Persistent, End::Arena];

fn units(n: u64) -> u64 {
    n * ALIGN_BYTES
}

/// Distance of a block's near side from the end of the slab it grew from.
fn depth(capacity: u64, end: End, offset: u64, bytes: u64) -> u64 {
    match end {
        End::Persistent => offset,
        End::Arena => capacity - offset - bytes,
    }
}

#[test]
fn the_ends_grow_towards_each_other() {
    let mut pool = Pool::new(units(10) + 255);
    assert_eq!(pool.capacity(), units(10));
    let low = pool.alloc(End::Persistent, A, 1).unwrap();
    let high = pool.alloc(End::Arena, B, units(2)).unwrap();
    let next_high = pool.alloc(End::Arena, B, units(3) - 1).unwrap();
    let next_low = pool.alloc(End::Persistent, A, units(4)).unwrap();
    assert_eq!([low.offset(), next_low.offset()], [0, units(1)]);
    assert_eq!([high.offset(), next_high.offset()], [units(8), units(5)]);
    assert_eq!((next_high.bytes(), next_high.requested()), (units(3), units(3) - 1));
    assert_eq!((pool.resident(), pool.arena_extent(), pool.gap()), (units(5), units(5), 0));
    pool.free(next_low);
    assert_eq!(pool.gap(), units(4));
    let all = pool.alloc(End::Arena, C, units(4)).unwrap();
    assert_eq!((all.offset(), pool.gap()), (units(1), 0));
}

#[test]
fn zero_bytes_take_one_unit() {
    for end in ENDS {
        let mut pool = Pool::new(units(2));
        let none = pool.alloc(end, A, 0).unwrap();
        let other = pool.alloc(end, A, 0).unwrap();
        assert_eq!((none.bytes(), none.requested()), (ALIGN_BYTES, 0));
        assert_ne!(none.offset(), other.offset());
        pool.alloc(end, A, 0).unwrap_err();
    }
    Pool::new(255).alloc(End::Arena, A, 0).unwrap_err();
}

#[test]
fn a_freed_block_joins_the_holes_beside_it() {
    for end in ENDS {
        for (left, right) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut pool = Pool::new(units(1000));
            let [l, x, r, _guard] = [3, 5, 7, 1].map(|n| pool.alloc(end, A, units(n)).unwrap());
            let (start, mut merged) = (if left { 0 } else { 3 }, 5);
            if left {
                pool.free(l);
                merged += 3;
            }
            if right {
                pool.free(r);
                merged += 7;
            }
            pool.free(x);
            let extent = pool.resident() + pool.arena_extent();
            assert_eq!(extent, units(16), "{end:?} {left} {right}");
            let whole = pool.alloc(end, B, units(merged)).unwrap();
            assert_eq!(depth(units(1000), end, whole.offset(), whole.bytes()), units(start), "{end:?} {left} {right}");
            assert_eq!(pool.resident() + pool.arena_extent(), extent, "{end:?} {left} {right}: the hole holds it");
        }
    }
}

#[test]
fn a_hole_at_the_frontier_leaves_the_extent() {
    for end in ENDS {
        for (left, expected) in [(false, 3), (true, 0)] {
            let mut pool = Pool::new(units(100));
            let [l, x, r] = [3, 5, 7].map(|n| pool.alloc(end, A, units(n)).unwrap());
            if left {
                pool.free(l);
            }
            pool.free(x);
            assert_eq!(pool.resident() + pool.arena_extent(), units(15));
            pool.free(r);
            assert_eq!(pool.resident() + pool.arena_extent(), units(expected), "{end:?}: {left}");
        }
    }
}

#[test]
fn a_request_takes_the_hole_that_fits_best() {
    for end in ENDS {
        let mut pool = Pool::new(units(1000));
        let holes = [9, 4, 6, 40].map(|n| {
            let hole = pool.alloc(end, A, units(n)).unwrap();
            pool.alloc(end, B, 1).map(|_guard| hole).unwrap()
        });
        let [_, _, six, _] = [0, 1, 2, 3].map(|i: usize| holes[i].offset());
        for hole in holes {
            pool.free(hole);
        }
        let five = pool.alloc(end, C, units(5)).unwrap();
        let near_side = |offset, bytes| depth(units(1000), end, offset, bytes);
        assert_eq!(near_side(five.offset(), units(5)), near_side(six, units(6)));
    }
}

#[test]
fn of_equal_holes_the_one_nearest_the_start_is_taken() {
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let mut pool = Pool::new(units(1000));
        let mut holes = [(); 3].map(|()| {
            let hole = pool.alloc(End::Persistent, A, units(5)).unwrap();
            pool.alloc(End::Persistent, B, 1).map(|_guard| Some(hole)).unwrap()
        });
        for at in order {
            pool.free(holes[at].take().unwrap());
        }
        let taken = [(); 3].map(|()| pool.alloc(End::Persistent, C, units(5)).unwrap().offset());
        assert_eq!(taken, [0, units(6), units(12)], "freed in the order {order:?}");
    }
}

#[test]
fn book_keeping_does_not_grow_with_the_calls() {
    let mut pool = Pool::new(units(1000));
    let mut round = || {
        pool.begin_step();
        for end in ENDS {
            let [a, b, c, d] = [3, 5, 7, 1].map(|n| pool.alloc(end, A, units(n)).unwrap());
            for block in [b, a, c, d] {
                pool.free(block);
            }
        }
        format!("{pool:?}").len()
    };
    let first = round();
    for _ in 0..100 {
        assert_eq!(round(), first);
    }
}

/// 64 and 65 units share a class, and a search stops early in it; a refusal must have looked through all of it.
#[test]
fn the_last_hole_that_fits_is_found_before_a_refusal() {
    for end in ENDS {
        let mut pool = Pool::new(units(65 + 1 + 40 * 65));
        let mut holes = vec![pool.alloc(end, A, units(65)).unwrap()];
        let _guard = pool.alloc(end, B, 1).unwrap();
        for _ in 0..40 {
            holes.push(pool.alloc(end, A, units(64)).unwrap());
            let _guard = pool.alloc(end, B, 1).unwrap();
        }
        assert_eq!(pool.gap(), 0);
        for hole in holes {
            pool.free(hole);
        }
        pool.begin_step();
        let block = pool.alloc(end, C, units(65)).unwrap();
        assert_eq!(depth(pool.capacity(), end, block.offset(), block.bytes()), 0);
        pool.alloc(end, C, units(65)).unwrap_err();
    }
}

#[test]
fn sizes_near_the_largest_number_are_refused_or_fit() {
    let huge = [u64::MAX, u64::MAX - 1, u64::MAX - 254, u64::MAX - 255, u64::MAX - 256, 1 << 63, (1 << 63) + 1];
    for end in ENDS {
        for bytes in huge {
            let mut pool = Pool::new(units(4));
            let oom = pool.alloc(end, A, bytes).unwrap_err();
            assert!(oom.requested >= bytes - 255 && oom.requested.is_multiple_of(ALIGN_BYTES), "{oom:?}");
            assert!(oom.to_string().contains("short by"), "{oom}");
            // Every byte a u64 can count, and one block that takes them.
            let mut pool = Pool::new(u64::MAX);
            assert_eq!(pool.alloc(end, A, bytes).is_ok(), bytes <= u64::MAX - 255);
            if pool.gap() > 0 {
                let _rest = pool.alloc(end, A, pool.gap()).unwrap();
            }
            assert_eq!(pool.gap(), 0);
        }
    }
    for capacity in [0, 1, 255] {
        assert_eq!(Pool::new(capacity).alloc(End::Persistent, A, 1).unwrap_err().slab, 0);
    }
}

#[test]
fn owners_are_those_of_the_instant_of_the_peak() {
    let mut pool = Pool::new(units(100));
    let a = pool.alloc(End::Arena, A, units(10)).unwrap();
    let b = pool.alloc(End::Arena, B, units(2)).unwrap();
    pool.free(a);
    // The peak: 2 live, a hole of 10, 11 more. Nothing after it reaches as far.
    let c = pool.alloc(End::Arena, C, units(11)).unwrap();
    // As far again, by other owners: the first instant counts.
    let a = pool.alloc(End::Arena, A, units(10)).unwrap();
    pool.free(c);
    let more = pool.alloc(End::Arena, B, units(11)).unwrap();
    let report = pool.report();
    assert_eq!(report.transient_peak, units(23));
    let expected = [(Owner::Tag(C), units(11)), (Owner::Holes, units(10)), (Owner::Tag(B), units(2))];
    assert_eq!(report.owners, expected);
    assert_eq!((report.fragmentation, report.transient_live_peak), (units(10), units(23)));
    assert_eq!(report.largest, Some((C, units(11))));
    // A persistent block in between is not the arena's.
    let weights = pool.alloc(End::Persistent, TAGS[4], units(5)).unwrap();
    let after = pool.report();
    assert_eq!((&after.owners, after.resident, after.free), (&report.owners, units(5), units(72)));
    for block in [a, b, more, weights] {
        pool.free(block);
    }
    assert_eq!(pool.report(), report, "the step's marks outlive its blocks");
}

#[test]
fn begin_step_starts_the_marks_afresh() {
    let mut pool = Pool::new(units(100));
    let kept = pool.alloc(End::Persistent, TAGS[4], units(5)).unwrap();
    let big = pool.alloc(End::Arena, A, units(50)).unwrap();
    pool.free(big);
    assert_eq!(pool.report().transient_peak, units(50));
    pool.begin_step();
    let fresh = pool.report();
    assert_eq!((fresh.transient_peak, fresh.transient_live_peak, fresh.fragmentation), (0, 0, 0));
    assert_eq!((fresh.largest, fresh.owners.len(), fresh.resident, fresh.free), (None, 0, units(5), units(95)));
    let small = pool.alloc(End::Arena, B, units(3)).unwrap();
    let report = pool.report();
    assert_eq!((report.transient_peak, report.largest), (units(3), Some((B, units(3)))));
    assert_eq!(report.owners, [(Owner::Tag(B), units(3))]);
    pool.free(small);
    pool.free(kept);
}

#[test]
fn blocks_carried_into_a_step_count_as_its_own() {
    let mut pool = Pool::new(units(100));
    let [gone, left, also] = [4, 6, 6].map(|n| pool.alloc(End::Arena, A, units(n)).unwrap());
    pool.free(gone);
    pool.begin_step();
    let carried = pool.report();
    assert_eq!((carried.transient_peak, carried.transient_live_peak), (units(16), units(12)));
    assert_eq!(carried.owners, [(Owner::Tag(A), units(12)), (Owner::Holes, units(4))]);
    assert_eq!(carried.largest, Some((A, units(6))));
    pool.free(left);
    pool.free(also);
    assert_eq!(pool.report(), carried);
    pool.begin_step();
    assert_eq!((pool.report().transient_peak, pool.report().largest), (0, None));
}

#[test]
fn the_steps_peak_is_kept_from_persistent_blocks() {
    let mut pool = Pool::new(units(10));
    let step = pool.alloc(End::Arena, A, units(6)).unwrap();
    pool.free(step);
    let oom = pool.alloc(End::Persistent, C, units(5)).unwrap_err();
    assert_eq!((oom.free, oom.owners), (units(4), vec![("(kept for the step's peak)".to_owned(), units(6))]));
    let fits = pool.alloc(End::Persistent, C, units(4)).unwrap();
    assert_eq!(pool.report().free, 0);
    let again = pool.alloc(End::Arena, A, units(6)).unwrap();
    pool.free(again);
    pool.begin_step();
    let now = pool.alloc(End::Persistent, C, units(6)).unwrap();
    assert_eq!(pool.gap(), 0);
    pool.free(fits);
    pool.free(now);
}

#[test]
fn a_refusal_says_what_did_not_fit_and_who_holds_the_rest() {
    let mut pool = Pool::new(1 << 24);
    let empty = pool.alloc(End::Arena, A, (1 << 24) + 1).unwrap_err();
    assert_eq!(
        empty.to_string(),
        "out of memory: gdn.prefill.h needs 16777472 B (16.0 MiB), 16777216 B are free of the slab's 16777216 B, \
         short by 256 B; nothing is allocated"
    );
    let _weights = pool.alloc(End::Persistent, TAGS[4], 3 << 20).unwrap();
    let gone = pool.alloc(End::Arena, C, 1 << 20).unwrap();
    let _logits = pool.alloc(End::Arena, C, (2 << 20) + 1).unwrap();
    let _same_tag = pool.alloc(End::Persistent, C, 4 << 20).unwrap();
    pool.free(gone);
    let oom = pool.alloc(End::Arena, B, (10 << 20) - 1).unwrap_err();
    let owners = [("head.linear.logits", (6 << 20) + 256), ("weights.embed.table", 3 << 20), ("(holes)", 1 << 20)];
    assert_eq!(oom.owners, owners.map(|(tag, bytes)| (tag.to_owned(), bytes)));
    assert_eq!(
        Error::from(oom).to_string(),
        "out of memory: attention.paged.partials needs 10485760 B (10.0 MiB), 6291200 B are free of the slab's \
         16777216 B, short by 4194560 B; head.linear.logits holds the most, 6291712 B (6.0 MiB)"
    );
}

#[test]
fn tags_are_the_same_by_their_letters() {
    let mut pool = Pool::new(units(100));
    let copy = Tag::new(Layer::Gdn, String::from("prefill").leak(), String::from("h").leak());
    let _a = pool.alloc(End::Arena, A, units(1)).unwrap();
    let _b = pool.alloc(End::Arena, copy, units(2)).unwrap();
    assert_eq!(pool.report().owners, [(Owner::Tag(A), units(3))]);
}

/// Many times more tags than the pool's table of recent ones has slots, each allocated twice.
#[test]
fn thousands_of_tags_are_told_apart() {
    let words: Vec<&'static str> = (0..1000).map(|i| &*format!("word{i}").leak()).collect();
    // The same address, another length.
    let ops = words.iter().flat_map(|&word| [word, &word[..4]]).take(6);
    let pairs = ops.flat_map(|op| words.iter().map(move |&buffer| (op, buffer)));
    let layers = [Layer::Gdn, Layer::Mlp];
    let tags: Vec<Tag> = pairs.flat_map(|(op, buffer)| layers.map(|layer| Tag::new(layer, op, buffer))).collect();
    let mut pool = Pool::new(1 << 40);
    let mut expected = BTreeMap::new();
    for i in (0..tags.len()).chain((0..tags.len()).rev()) {
        let _block = pool.alloc(End::Arena, tags[i], units(i as u64)).unwrap();
        *expected.entry(Owner::Tag(tags[i])).or_insert(0) += units((i as u64).max(1));
    }
    assert_eq!(pool.report().owners.into_iter().collect::<BTreeMap<_, _>>(), expected);
}

#[test]
fn equal_owners_are_in_order_of_name() {
    let names = |order: &[Tag]| -> Vec<String> {
        let mut pool = Pool::new(units(100));
        for &tag in order {
            let _block = pool.alloc(End::Arena, tag, 1).unwrap();
        }
        pool.report().owners.iter().map(|(owner, _)| owner.to_string()).collect()
    };
    let sorted = ["attention.paged.partials", "gdn.prefill.h", "head.linear.logits"];
    assert_eq!(names(&[A, B, C]), sorted);
    assert_eq!(names(&[C, B, A]), sorted);
}

#[test]
fn a_report_serialises_with_named_owners() {
    let mut pool = Pool::new(units(10));
    let gone = pool.alloc(End::Arena, A, units(1)).unwrap();
    let _top = pool.alloc(End::Arena, C, units(2)).unwrap();
    pool.free(gone);
    pool.begin_step();
    let _weights = pool.alloc(End::Persistent, TAGS[4], units(3)).unwrap();
    let expected = serde_json::json!({
        "slab": 2560, "resident": 768, "transient_peak": 768, "free": 1024, "resident_live": 768,
        "transient_live_peak": 512, "fragmentation": 256,
        "largest": {"tag": "head.linear.logits", "bytes": 512},
        "owners": [{"tag": "head.linear.logits", "bytes": 512}, {"tag": "(holes)", "bytes": 256}],
        "resident_owners": [{"tag": "weights.embed.table", "bytes": 768}],
    });
    assert_eq!(serde_json::to_value(pool.report()).unwrap(), expected);
    assert!(serde_json::to_value(Pool::new(0).report()).unwrap()["largest"].is_null());
}

#[test]
fn merged_reports_keep_the_larger_peak_whole() {
    let report_of = |resident: u64, blocks: &[(Tag, u64)]| {
        let mut pool = Pool::new(units(100));
        let _weights = pool.alloc(End::Persistent, TAGS[4], units(resident)).unwrap();
        for &(tag, n) in blocks {
            let _block = pool.alloc(End::Arena, tag, units(n)).unwrap();
        }
        pool.report()
    };
    // Together their residents and peaks exceed the slab: taking the larger of each would not add up.
    let low = report_of(80, &[(A, 20)]);
    let high = report_of(20, &[(B, 15), (C, 15), (B, 10)]);
    for (mut first, second) in [(low.clone(), high.clone()), (high.clone(), low.clone())] {
        first.merge_peak(second);
        assert_eq!(first, Report { largest: Some((A, units(20))), ..high.clone() });
        assert_eq!(first.slab, first.resident + first.transient_peak + first.free);
    }
    let mut same = low.clone();
    same.merge_peak(report_of(10, &[(B, 20)]));
    assert_eq!(same, low, "equal peaks: the first stays");
}

#[test]
#[should_panic(expected = "is not of this pool")]
fn a_block_of_another_pool_is_not_taken_back() {
    let mut pool = Pool::new(units(10));
    let _mine = pool.alloc(End::Arena, A, units(1)).unwrap();
    let other = Pool::new(units(20)).alloc(End::Arena, A, units(1)).unwrap();
    pool.free(other);
}

#[test]
fn layers_print_in_lower_case() {
    use Layer::{Attention, Cache, Embed, Gdn, Head, Inputs, Mlp, Moe, Norm, Other, Sampler, Weights};
    for layer in [Weights, Cache, Inputs, Embed, Gdn, Attention, Mlp, Moe, Norm, Head, Sampler, Other] {
        assert_eq!(layer.to_string(), format!("{layer:?}").to_lowercase());
    }
    assert_eq!(A.to_string(), "gdn.prefill.h");
    assert_eq!(Owner::Holes.to_string(), "(holes)");
}
