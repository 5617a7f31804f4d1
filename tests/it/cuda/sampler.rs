//! The sampler's CUDA arm gives the CPU arm's own tokens, valid flags and ids, and its log-probabilities within a bound.

use std::cell::Cell;

use highwater::num::DType;
use highwater::ops::Numerics;
use highwater::ops::sampler::{self, SampleRow, Token};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use super::Pair;
use crate::ops::{Rig, empty, rng, round, tensor};

/// What a log-probability may be off by. Terms of the card's sum of exponentials are within 3e-7 (two units of `expf`, and
/// the rounding of a difference of at most 20, below which terms have no weight) and are added in trees of at most 32
/// levels, whose errors have no sign; then one rounding to f32 of the result, on both arms.
fn bound(logprob: f32) -> f32 {
    1.5e-6 + 1.2e-7 * logprob.abs()
}

/// Logits of one call and how its rows are drawn.
struct Batch {
    dtype: DType,
    vocab: usize,
    decodable: usize,
    logits: Vec<f32>,
    rows: Vec<SampleRow>,
}

impl Batch {
    fn draw(&self, rig: &Rig) -> Vec<Option<Token>> {
        rig.device.begin_step();
        let logits = tensor(&rig.cx(), self.dtype, &[self.rows.len(), self.vocab], &self.logits);
        let drawn = sampler::sample(&rig.cx(), &logits, &self.rows, self.decodable).unwrap();
        let read = drawn.read().unwrap();
        let (tokens, logprobs) = (drawn.tokens.read::<i32>().unwrap(), drawn.logprobs.read::<f32>().unwrap());
        for (i, row) in read.iter().enumerate().filter(|(_, row)| row.is_none()) {
            assert!(tokens[i] == -1 && logprobs[i].is_nan(), "row {i}, {row:?}: {} {}", tokens[i], logprobs[i]);
        }
        read
    }

    /// Rows `rows` by themselves.
    fn only(&self, rows: std::ops::Range<usize>) -> Batch {
        Batch {
            logits: self.logits[rows.start * self.vocab..rows.end * self.vocab].to_vec(),
            rows: self.rows[rows].to_vec(),
            ..*self
        }
    }

    /// Draws on both arms, holds the one to the other, and gives the CUDA arm's.
    #[track_caller]
    fn check(&self, what: &str, pair: &Pair, worst: &Cell<f32>) -> Vec<Option<Token>> {
        let (cpu, cuda) = pair.run(|rig| self.draw(rig));
        assert_eq!(cpu.len(), cuda.len());
        for (i, (host, card)) in cpu.iter().zip(&cuda).enumerate() {
            let told = || format!("{what}, {}, V {}, row {i}, {:?}", self.dtype, self.vocab, abridged(&self.rows[i]));
            let (Some(host), Some(card)) = (host, card) else {
                assert!(host.is_none() && card.is_none(), "{}: {card:?} for {host:?}", told());
                continue;
            };
            assert_eq!(card.id, host.id, "{}", told());
            let ids = |token: &Token| token.top.iter().map(|t| t.0).collect::<Vec<_>>();
            assert_eq!(ids(card), ids(host), "{}", told());
            let pairs = std::iter::once((card.logprob, host.logprob));
            for (a, b) in pairs.chain(card.top.iter().zip(&host.top).map(|(a, b)| (a.1, b.1))) {
                near(a, b, worst, told);
            }
        }
        cuda
    }
}

#[track_caller]
fn near(a: f32, b: f32, worst: &Cell<f32>, told: impl Fn() -> String) {
    if a == b || (a.is_nan() && b.is_nan()) {
        return;
    }
    assert!((a - b).abs() <= bound(b), "{}: log-probability {a} for {b}, off by {:e}", told(), (a - b).abs());
    worst.set(worst.get().max((a - b).abs() / bound(b)));
}

/// The row without its lists.
fn abridged(row: &SampleRow) -> SampleRow {
    SampleRow { prompt_ids: Vec::new(), output_counts: Vec::new(), bias: Vec::new(), ..row.clone() }
}

fn pick<T: Copy>(rng: &mut ChaCha8Rng, of: &[T]) -> T {
    of[rng.random_range(0..of.len())]
}

/// A row of logits of some kind: spread, quantised to many ties, all equal, huge, with lanes that are no finite numbers.
fn lanes(rng: &mut ChaCha8Rng, dtype: DType, vocab: usize) -> Vec<f32> {
    let spread = pick(rng, &[0.01, 0.3, 1.0, 1.0, 3.0, 10.0]);
    let step = pick(rng, &[0.0, 0.0, 0.0, 0.25, 2.0, 40.0]);
    let shift = pick(rng, &[0.0, 0.0, -20.0, 15.0]);
    let mut lanes: Vec<f32> = (0..vocab)
        .map(|_| {
            let near_normal: f32 = (0..6).map(|_| rng.random_range(-1.0..1.0f32)).sum();
            let value = near_normal * 0.7 * spread + shift;
            if step > 0.0 { (value / step).round() * step } else { value }
        })
        .collect();
    match rng.random_range(0..12) {
        0 => lanes.sort_by(f32::total_cmp),
        1 => lanes.fill(1.5),
        2 => lanes.iter_mut().for_each(|v| *v *= 1e37),
        3 => {
            let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN];
            lanes.iter_mut().for_each(|v| {
                if rng.random_range(0..3) == 0 {
                    *v = pick(rng, &bad);
                }
            });
        }
        4 => {
            let kept = rng.random_range(0..vocab);
            let bad = pick(rng, &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
            lanes.iter_mut().enumerate().for_each(|(i, v)| {
                if i != kept {
                    *v = bad;
                }
            });
        }
        5 if rng.random_range(0..3) == 0 => lanes.fill(f32::NAN),
        6 => (0..3).for_each(|_| lanes[rng.random_range(0..vocab)] += 30.0),
        _ => {}
    }
    lanes.iter().map(|&v| round(dtype, v)).collect()
}

/// Parameters of every sort, those that decide nothing among them.
fn parameters(rng: &mut ChaCha8Rng, vocab: usize, decodable: usize) -> SampleRow {
    let v = decodable as u32;
    let off = rng.random_range(0..4);
    let mut row = SampleRow {
        temperature: pick(rng, &[0.0, 1e-5, 0.05, 0.7, 0.7, 1.0, 1.0, 1.3, 6.0, 3e38]),
        top_k: pick(
            rng,
            &[0, 0, 0, 1, 2, 3, 5, 20, 20, 50, 200, 512, 513, 700, v.saturating_sub(1), v, v + 1, u32::MAX],
        ),
        top_p: pick(rng, &[1.0, 1.0, 0.999_999_94, 0.999, 0.95, 0.95, 0.8, 0.5, 0.1, 1e-6, f32::MIN_POSITIVE]),
        min_p: pick(rng, &[0.0, 0.0, 0.0, 0.0, f32::from_bits(1), 1e-20, 1e-3, 0.05, 0.5, 1.0]),
        seed: rng.random(),
        step: if rng.random() { rng.random() } else { rng.random_range(0..100) },
        logprobs: pick(rng, &[0, 0, 1, 5, 20]),
        ..SampleRow::default()
    };
    if off == 0 {
        row.repetition_penalty = pick(rng, &[1.0, 1.2, 0.5, 1e-30, 1e30]);
        row.presence_penalty = pick(rng, &[0.0, 0.5, -2.0]);
        row.frequency_penalty = pick(rng, &[0.0, 0.1, 2.0]);
        let some = pick(rng, &[1, 10, 300, 3000]);
        row.prompt_ids = distinct(rng, vocab, some);
        row.output_counts =
            distinct(rng, vocab, some).into_iter().map(|id| (id, pick(rng, &[0, 1, 1, 7, 90]))).collect();
    }
    if off <= 1 && rng.random() {
        let some = pick(rng, &[1, 4, 300]);
        row.bias = distinct(rng, decodable, some).into_iter().map(|id| (id, rng.random_range(-100.0..100.0))).collect();
    }
    row
}

/// About `n` ids below `vocab` in no order, each once.
fn distinct(rng: &mut ChaCha8Rng, vocab: usize, n: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..n).map(|_| rng.random_range(0..vocab as u32)).collect();
    ids.sort_unstable();
    ids.dedup();
    for i in (1..ids.len()).rev() {
        ids.swap(i, rng.random_range(0..=i));
    }
    ids
}

fn batch(rng: &mut ChaCha8Rng, dtype: DType, rows: usize, vocab: usize, decodable: usize) -> Batch {
    Batch {
        dtype,
        vocab,
        decodable,
        logits: (0..rows).flat_map(|_| lanes(rng, dtype, vocab)).collect(),
        rows: (0..rows).map(|_| parameters(rng, vocab, decodable)).collect(),
    }
}

#[test]
fn every_case_draws_the_host_s_tokens() {
    let mut rng = rng(1);
    let worst = Cell::new(0.0);
    for case in sampler::cases() {
        let work = 10 * (case.rows * case.vocab) as u64;
        let Some(pair) = Pair::new(case.name, Numerics::F32, work) else { continue };
        for _ in 0..2 {
            let batch = batch(&mut rng, case.dtype, case.rows, case.vocab, case.decodable);
            batch.check(case.name, &pair, &worst);
        }
    }
    println!("log-probabilities: at most {:.2} of their bound apart", worst.get());
}

#[test]
fn rows_of_every_sort_draw_the_host_s_tokens() {
    let Some(pair) = Pair::new("random rows", Numerics::F32, 1) else { return };
    let mut rng = rng(2);
    let worst = Cell::new(0.0);
    for dtype in [DType::F32, DType::Bf16] {
        for (rows, vocab, decodable) in [
            (150, 1, 1),
            (90, 2, 2),
            (90, 33, 31),
            (200, 320, 300),
            (120, 1031, 1031),
            (70, 1032, 1030),
            (60, 4096, 4096),
            (40, 10_007, 10_000),
        ] {
            batch(&mut rng, dtype, rows, vocab, decodable).check("random rows", &pair, &worst);
        }
    }
    println!("log-probabilities: at most {:.2} of their bound apart", worst.get());
}

#[test]
fn long_rows_draw_the_host_s_tokens() {
    let vocab = 248_320;
    let Some(pair) = Pair::new("long rows", Numerics::F32, 20_000_000) else { return };
    let mut rng = rng(3);
    let worst = Cell::new(0.0);
    let row = |temperature, top_k, top_p, min_p, seed| SampleRow {
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        logprobs: (seed % 3) as u32,
        ..SampleRow::default()
    };
    for dtype in [DType::F32, DType::Bf16] {
        let rows = vec![
            row(0.0, 0, 1.0, 0.0, 1),
            row(0.7, 20, 0.95, 0.0, 2),
            row(1.0, 0, 1.0, 0.0, 3),
            row(1.0, 0, 0.9, 0.0, 4),
            row(1.0, 5000, 0.9, 0.0, 5),
            row(1.5, 100_000, 1.0, 1e-4, 6),
        ];
        let logits = (0..rows.len() * vocab).map(|_| round(dtype, normal(&mut rng))).collect();
        Batch { dtype, vocab, decodable: 248_077, logits, rows }.check("long rows", &pair, &worst);
    }
    println!("log-probabilities: at most {:.2} of their bound apart", worst.get());
}

fn normal(rng: &mut ChaCha8Rng) -> f32 {
    (0..12).map(|_| rng.random_range(-0.5..0.5f32)).sum()
}

/// More lanes in doubt than a row's list holds: thousands of equal logits at the boundary.
#[test]
fn boundaries_among_thousands_of_equal_logits() {
    let Some(pair) = Pair::new("equal logits", Numerics::F32, 1) else { return };
    let mut rng = rng(4);
    let worst = Cell::new(0.0);
    let (vocab, decodable) = (9_000, 8_999);
    let mut rows = Vec::new();
    for (top_k, top_p, min_p) in [
        (2, 1.0, 0.0),
        (50, 0.5, 0.0),
        (512, 0.999, 0.2),
        (600, 0.7, 0.0),
        (3_500, 0.3, 0.0),
        (8_000, 1.0, 0.0),
        (8_998, 0.99, 1e-9),
        (0, 0.5, 0.0),
        (0, 0.1, 0.9),
        (0, 0.999, 0.0),
        (0, 1e-7, 0.0),
        (0, 1.0, 0.5),
    ] {
        rows.push(SampleRow {
            temperature: 0.9,
            top_k,
            top_p,
            min_p,
            seed: rng.random(),
            logprobs: 20,
            ..SampleRow::default()
        });
    }
    for values in [vec![2.5], vec![1.0, 1.25], vec![0.0, -0.0], vec![-3.0, -3.0, -3.0, -1.0], vec![5.0, 4.75, 4.5]] {
        for dtype in [DType::F32, DType::Bf16] {
            let logits = (0..rows.len() * vocab).map(|_| pick(&mut rng, &values)).collect();
            let batch = Batch { dtype, vocab, decodable, logits, rows: rows.clone() };
            batch.check(&format!("equal logits {values:?}"), &pair, &worst);
        }
    }
}

/// A share of equal logits that is reached exactly, by few of thousands: one lane more would often be drawn.
#[test]
fn shares_of_equal_logits_that_come_out_even() {
    let Some(pair) = Pair::new("even shares", Numerics::F32, 1) else { return };
    let vocab = 8_192;
    let rows: Vec<SampleRow> = (0..30)
        .map(|i| SampleRow {
            temperature: 1.0,
            top_p: [2.0, 3.0, 4.0][i % 3] / 8_192.0,
            min_p: if i % 2 == 0 { 0.0 } else { 0.25 },
            seed: i as u64,
            ..SampleRow::default()
        })
        .collect();
    let logits = vec![0.75; rows.len() * vocab];
    let drawn =
        Batch { dtype: DType::F32, vocab, decodable: vocab, logits, rows }.check("even", &pair, &Cell::new(0.0));
    let largest = drawn.iter().map(|token| token.as_ref().unwrap().id).max();
    assert_eq!(largest, Some(3), "the first two, three or four of 8192 equal lanes");
}

/// Distinct logits so close that the histogram has them in one bin, with the boundaries of top-k and top-p among them.
#[test]
fn boundaries_inside_one_bin() {
    let Some(pair) = Pair::new("one bin", Numerics::F32, 1) else { return };
    let mut rng = rng(8);
    let worst = Cell::new(0.0);
    let vocab = 3_500;
    for crowded in [300, 2_400, 3_100] {
        let mut logits = Vec::new();
        let mut rows = Vec::new();
        for (top_k, top_p) in
            [(900, 1.0), (900, 0.97), (900, 0.4), (1_500, 0.8), (3_400, 0.6), (0, 0.9), (0, 0.3), (0, 0.01)]
        {
            for seed in 0..8 {
                rows.push(SampleRow { temperature: 12.0, top_k, top_p, seed, ..SampleRow::default() });
                let mut row: Vec<f32> = (0..vocab).map(|i| if i < crowded { i as f32 * 4e-7 } else { 0.0 }).collect();
                row.iter_mut().skip(crowded).for_each(|v| *v = rng.random_range(-3.0..5.0));
                for i in (1..vocab).rev() {
                    row.swap(i, rng.random_range(0..=i));
                }
                logits.extend(row);
            }
        }
        for dtype in [DType::F32, DType::Bf16] {
            let logits = logits.iter().map(|&v| round(dtype, v)).collect();
            let batch = Batch { dtype, vocab, decodable: vocab, logits, rows: rows.clone() };
            batch.check(&format!("{crowded} in one bin"), &pair, &worst);
        }
    }
}

/// The largest lanes side by side, as where logits fall with the id, and edits at the ends of rows and stripes.
#[test]
fn lanes_in_order_and_edits_at_every_border() {
    let Some(pair) = Pair::new("in order", Numerics::F32, 1) else { return };
    let worst = Cell::new(0.0);
    let vocab = 5_000;
    for dtype in [DType::F32, DType::Bf16] {
        for slope in [-0.01f32, 0.01, -1.0] {
            let line: Vec<f32> = (0..vocab).map(|i| round(dtype, i as f32 * slope)).collect();
            let mut rows = Vec::new();
            for (i, top_k) in [0, 0, 2, 40, 300, 512, 2_000].into_iter().enumerate() {
                let edges = [0, 1, 3, 4, 127, 128, 129, 255, 256, 511, 512, 1023, 1024, 4095, 4096, 4991, 4992, 4999];
                rows.push(SampleRow {
                    temperature: 0.8,
                    top_k,
                    top_p: if i % 2 == 0 { 1.0 } else { 0.9 },
                    bias: edges.iter().map(|&id| (id, 3.0 + id as f32 / 1000.0)).collect(),
                    repetition_penalty: 1.3,
                    frequency_penalty: 0.2,
                    prompt_ids: (0..vocab as u32).step_by(i + 1).collect(),
                    output_counts: (0..vocab as u32).step_by(97).map(|id| (id, id % 3)).collect(),
                    seed: 77,
                    step: i as u64,
                    logprobs: 20,
                    ..SampleRow::default()
                });
            }
            let logits = line.repeat(rows.len());
            Batch { dtype, vocab, decodable: vocab, logits, rows }.check("in order", &pair, &worst);
        }
    }
}

/// Edits of a batch that do not fit the device's list together are taken in groups.
#[test]
fn rows_with_more_edits_than_the_list_holds() {
    let vocab = 200_000;
    let Some(pair) = Pair::new("many edits", Numerics::F32, 20_000_000) else { return };
    let mut rng = rng(5);
    let rows: Vec<SampleRow> = (0..4u32)
        .map(|i| SampleRow {
            temperature: 1.0,
            top_k: 30 * (i % 2),
            top_p: 0.9,
            repetition_penalty: 1.4,
            prompt_ids: if i == 2 { Vec::new() } else { (0..vocab as u32).filter(|id| id % 5 != i).collect() },
            seed: u64::from(i),
            logprobs: 3 * i,
            ..SampleRow::default()
        })
        .collect();
    assert!(rows[0].edits() + rows[1].edits() > 1 << 18, "they fit together");
    let logits = (0..rows.len() * vocab).map(|_| normal(&mut rng)).collect();
    let batch = Batch { dtype: DType::F32, vocab, decodable: vocab, logits, rows };
    batch.check("many edits", &pair, &Cell::new(0.0));
}

#[test]
fn a_row_is_drawn_alike_in_any_company() {
    let Some(pair) = Pair::new("company", Numerics::F32, 1) else { return };
    let mut rng = rng(6);
    for (dtype, rows, vocab) in [(DType::F32, 70, 1_031), (DType::Bf16, 23, 6_000), (DType::F32, 450, 700)] {
        let batch = batch(&mut rng, dtype, rows, vocab, vocab - 1);
        // Parts of a row are as many as there is room for: 64 of it alone, a few in company, one among hundreds.
        let together = batch.check("company", &pair, &Cell::new(0.0));
        for from in (0..rows).step_by(7) {
            let to = (from + 1 + from % 3).min(rows);
            let alone = batch.only(from..to).draw(&pair.cuda);
            for (i, (a, b)) in alone.iter().zip(&together[from..to]).enumerate() {
                let (Some(a), Some(b)) = (a, b) else {
                    assert!(a.is_none() && b.is_none());
                    continue;
                };
                assert!(a.id == b.id && a.logprob.to_bits() == b.logprob.to_bits(), "row {} of {rows}", from + i);
                // The batch has places for the most that any row asks for, a row alone for its own.
                assert_eq!(a.top, b.top, "row {} of {rows}", from + i);
            }
        }
    }
}

#[test]
fn prompts_are_scored_as_on_the_host() {
    let Some(pair) = Pair::new("scores", Numerics::F32, 1) else { return };
    let mut rng = rng(7);
    let worst = Cell::new(0.0);
    for dtype in [DType::F32, DType::Bf16] {
        for (rows, vocab, decodable) in [(5, 1, 1), (40, 33, 31), (60, 320, 300), (30, 1031, 1031), (24, 9_000, 8_999)]
        {
            for top_n in [0, 1, 20] {
                let logits: Vec<f32> = (0..rows).flat_map(|_| lanes(&mut rng, dtype, vocab)).collect();
                let targets: Vec<i32> = (0..rows).map(|_| rng.random_range(0..vocab as i32)).collect();
                let (cpu, cuda) = pair.run(|rig| {
                    rig.device.begin_step();
                    let cx = rig.cx();
                    let logits = tensor(&cx, dtype, &[rows, vocab], &logits);
                    let mut ids = empty(&cx, DType::I32, &[rows]);
                    ids.write(0, &targets).unwrap();
                    let scored = sampler::logprobs(&cx, &logits, &ids, top_n, decodable).unwrap();
                    let top = scored.top.as_ref().map(|top| top.read().unwrap());
                    (scored.targets.read::<f32>().unwrap(), scored.valid.read::<u8>().unwrap(), top)
                });
                let told = |i| move || format!("{dtype} [{rows}, {vocab}], row {i}, {top_n} most likely");
                assert_eq!(cuda.1, cpu.1);
                for (i, (&a, &b)) in cuda.0.iter().zip(&cpu.0).enumerate() {
                    assert_eq!(a.is_nan(), b.is_nan(), "{}: {a} for {b}", told(i)());
                    near(a, b, &worst, told(i));
                }
                assert_eq!(cuda.2.is_some(), cpu.2.is_some());
                for (i, (a, b)) in cuda.2.iter().flatten().zip(cpu.2.iter().flatten()).enumerate() {
                    let ids = |top: &[(u32, f32)]| top.iter().map(|t| t.0).collect::<Vec<_>>();
                    assert_eq!(ids(a), ids(b), "{}", told(i)());
                    a.iter().zip(b).for_each(|(a, b)| near(a.1, b.1, &worst, told(i)));
                }
            }
        }
    }
    println!("log-probabilities: at most {:.2} of their bound apart", worst.get());
}

/// The host refuses a target that is no id; a card cannot, and says NaN without reading outside the row.
#[test]
fn targets_that_are_no_ids_are_nan_on_a_card() {
    let Some(pair) = Pair::new("targets", Numerics::F32, 1) else { return };
    let cx = pair.cuda.cx();
    let logits = tensor(&cx, DType::F32, &[5, 6], &[0.5; 30]);
    let mut targets = empty(&cx, DType::I32, &[5]);
    targets.write(0, &[-1, 6, i32::MAX, 5, 2]).unwrap();
    let scored = sampler::logprobs(&cx, &logits, &targets, 2, 5).unwrap();
    let got = scored.targets.read::<f32>().unwrap();
    assert!(got[..3].iter().all(|v| v.is_nan()), "{got:?}");
    assert_eq!(got[3], f32::NEG_INFINITY, "id 5 is not decodable");
    assert!((got[4] + 5f32.ln()).abs() < 1e-6, "{got:?}");
    assert_eq!(scored.valid.read::<u8>().unwrap(), [1; 5]);
}
