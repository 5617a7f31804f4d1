//! Router and experts against float64, ties, absent experts, blocks, batches, shared expert, bytes.

use std::ops::Range;

use highwater::device::DeviceSpec;
use highwater::device::cards;
use highwater::num::{DType, bf16};
use highwater::ops::cost::Unit;
use highwater::ops::linear::Projection;
use highwater::ops::moe::{self, Case, Dims, Experts, Inputs, Routing};
use highwater::ops::scheme::ActScheme;
use highwater::ops::weight::Weight;
use highwater::ops::{Limits, Numerics, reference};
use highwater::tensor::Tensor;

use super::kit::{Kit, Words, assert_refused, normals, rounded, values};

/// The operands of a case: router logits, rows, experts, on plain values that the dtypes hold exactly.
struct Operands {
    logits: Vec<f32>,
    x: Vec<f32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
}

impl Operands {
    fn new(case: &Case, seed: u32) -> Operands {
        let Dims { hidden, inter, experts, .. } = case.dims;
        let t = case.tokens;
        let scale = |n: usize| 1.0 / (n as f32).sqrt();
        Operands {
            logits: rounded(case.act, &normals(seed, 0, t * experts, 1.5)),
            x: rounded(case.act, &normals(seed, 1, t * hidden, 1.0)),
            gate_up: rounded(case.weights, &normals(seed, 2, experts * 2 * inter * hidden, 2.0 * scale(hidden))),
            down: rounded(case.weights, &normals(seed, 3, experts * hidden * inter, scale(inter))),
        }
    }

    fn experts(&self, kit: &Kit, case: &Case) -> Experts {
        let Dims { hidden, inter, experts, .. } = case.dims;
        let (gate_up, down) = pair(
            kit.floats(case.weights, &[experts * 2 * inter, hidden], &self.gate_up),
            kit.floats(case.weights, &[experts * hidden, inter], &self.down),
        );
        Experts { gate_up, down, slots: kit.ints(&[experts], &(0..experts as i32).collect::<Vec<_>>()) }
    }

    fn rows(&self, kit: &Kit, case: &Case, tokens: Range<usize>) -> Tensor {
        let h = case.dims.hidden;
        kit.floats(case.act, &[tokens.len(), h], &self.x[tokens.start * h..tokens.end * h])
    }

    fn router(&self, kit: &Kit, case: &Case, tokens: Range<usize>) -> Tensor {
        let e = case.dims.experts;
        kit.floats(case.act, &[tokens.len(), e], &self.logits[tokens.start * e..tokens.end * e])
    }
}

/// Every way to quantise an input.
const ACT_SCHEMES: [ActScheme; 5] =
    [ActScheme::None, ActScheme::Fp8Tensor, ActScheme::Fp8Token, ActScheme::Fp8Group, ActScheme::Nvfp4];

fn plain(matrix: Tensor) -> Weight {
    Weight::plain(matrix).unwrap()
}

/// gate_up and down, both floats.
fn pair(gate_up: Tensor, down: Tensor) -> (Projection, Weight) {
    (plain(gate_up).into(), plain(down))
}

/// The outputs of some tokens of a case, as a step of their own.
fn run(kit: &Kit, case: &Case, operands: &Operands, w: &Experts, tokens: Range<usize>) -> Vec<f32> {
    let cx = kit.cx();
    let routing = moe::route(&cx, &operands.router(kit, case, tokens.clone()), case.dims.top_k).unwrap();
    let x = operands.rows(kit, case, tokens);
    values(&moe::experts(&cx, &x, &routing, w, case.dims.inter).unwrap())
}

fn routing(kit: &Kit, top_k: usize, ids: &[i32], weights: &[f32]) -> Routing {
    let shape = [ids.len() / top_k, top_k];
    Routing { ids: kit.ints(&shape, ids), weights: kit.floats(DType::F32, &shape, weights) }
}

/// sum over k of w_k down_k (silu(gate_k x) * up_k x), all in f64.
fn oracle(x: &[f32], ids: &[i32], weights: &[f32], o: &Operands, dims: Dims) -> Vec<f64> {
    oracle_rounding(x, ids, weights, o, dims, |v| v)
}

/// As [`oracle`], with `round` where the op stores: the activation and each expert's output.
fn oracle_rounding(
    x: &[f32],
    ids: &[i32],
    weights: &[f32],
    o: &Operands,
    dims: Dims,
    round: impl Fn(f64) -> f64,
) -> Vec<f64> {
    let Dims { hidden, inter, .. } = dims;
    let dot = |a: &[f32], b: &[f64]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * b).sum::<f64>();
    let x: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
    let mut out = vec![0.0; hidden];
    for (&id, &w) in ids.iter().zip(weights) {
        let matrix = |m: usize| &o.gate_up[(id as usize * 2 + m) * inter * hidden..][..inter * hidden];
        let h: Vec<f64> = (0..inter)
            .map(|i| {
                let g = dot(&matrix(0)[i * hidden..][..hidden], &x);
                round(g / (1.0 + (-g).exp()) * dot(&matrix(1)[i * hidden..][..hidden], &x))
            })
            .collect();
        let down = &o.down[id as usize * hidden * inter..][..hidden * inter];
        for (j, out) in out.iter_mut().enumerate() {
            *out += f64::from(w) * round(dot(&down[j * inter..][..inter], &h));
        }
    }
    out
}

fn relative(got: &[f32], want: &[f64]) -> f64 {
    let error: f64 = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum();
    (error / want.iter().map(|w| w * w).sum::<f64>()).sqrt()
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[test]
fn routes_as_float64_does() {
    for (seed, case) in moe::cases().into_iter().enumerate() {
        let kit = Kit::cpu(Kit::of(case.act));
        let o = Operands::new(&case, seed as u32);
        let Dims { experts, top_k, .. } = case.dims;
        let got = moe::route(&kit.cx(), &o.router(&kit, &case, 0..case.tokens), top_k).unwrap();
        let (ids, weights) = (got.ids.host::<i32>().unwrap(), values(&got.weights));
        for t in 0..case.tokens {
            let row = &o.logits[t * experts..][..experts];
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).unwrap()); // stable: lower id first
            let p = |id: usize| f64::from(row[id]).exp();
            let sum: f64 = order[..top_k].iter().map(|&id| p(id)).sum();
            for k in 0..top_k {
                assert_eq!(ids[t * top_k + k], order[k] as i32, "{} token {t} place {k}", case.name);
                let (got, want) = (f64::from(weights[t * top_k + k]), p(order[k]) / sum);
                // f32: a few roundings of exp, two divisions and the sum; bf16: one rounding to 8 bits on top.
                let bound = if case.act == DType::F32 { 1e-6 } else { 2f64.powi(-8) * 1.001 };
                assert!((got - want).abs() <= bound * want, "{} token {t} place {k}: {got} for {want}", case.name);
            }
        }
    }
}

#[test]
fn equal_logits_go_to_the_lower_id() {
    let kit = Kit::cpu(Numerics::F32);
    for (row, want) in [
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0, 1, 2]),
        ([0.0, 2.0, 1.0, 2.0, 1.0, 1.0], [1, 3, 2]),
        ([-1.0, 0.0, -0.0, 0.0, -0.0, -1.0], [1, 2, 3]),
        (
            [f32::NEG_INFINITY, f32::NEG_INFINITY, 5.0, f32::NEG_INFINITY, f32::NEG_INFINITY, f32::NEG_INFINITY],
            [2, 0, 1],
        ),
    ] {
        let logits = kit.floats(DType::F32, &[1, 6], &row);
        let got = moe::route(&kit.cx(), &logits, 3).unwrap();
        assert_eq!(got.ids.host::<i32>().unwrap(), want, "{row:?}");
        let sum: f32 = values(&got.weights).iter().sum();
        assert!((sum - 1.0).abs() < 1e-6, "{row:?}: {sum}");
    }
    // bf16 logits tie often: the published router size, against a stable sort.
    let kit = Kit::cpu(Numerics::BF16);
    let row = rounded(DType::Bf16, &normals(3, 0, 256, 0.05));
    let mut order: Vec<i32> = (0..256).collect();
    order.sort_by(|&a, &b| row[b as usize].partial_cmp(&row[a as usize]).unwrap());
    let got = moe::route(&kit.cx(), &kit.floats(DType::Bf16, &[1, 256], &row), 200).unwrap();
    assert_eq!(got.ids.host::<i32>().unwrap(), &order[..200]);
    assert!(order[..200].windows(2).any(|w| row[w[0] as usize] == row[w[1] as usize]), "no tie in the test");
}

#[test]
fn weights_are_renormalised_and_rounded_to_the_activation_type() {
    let row = [3.0, 1.0, 0.5, -2.0, 0.25];
    for (act, sum_bound) in [(DType::F32, 2e-7), (DType::Bf16, 3.0 * 2f64.powi(-9))] {
        let kit = Kit::cpu(Kit::of(act));
        let got = moe::route(&kit.cx(), &kit.floats(act, &[1, 5], &row), 3).unwrap();
        let weights = values(&got.weights);
        let sum: f64 = weights.iter().map(|&w| f64::from(w)).sum();
        assert!((sum - 1.0).abs() <= sum_bound, "{act}: {sum}");
        // Softmax over all five would leave these three at 0.93.
        assert_eq!(rounded(act, &weights), weights, "{act}: {weights:?} are not {act} values");
    }
    let kit = Kit::cpu(Numerics::BF16);
    let got = moe::route(&kit.cx(), &kit.floats(DType::Bf16, &[1, 5], &row), 1).unwrap();
    assert_eq!(values(&got.weights), [1.0], "one expert takes all");
}

#[test]
fn large_logits_do_not_overflow() {
    let kit = Kit::cpu(Numerics::F32);
    let got = moe::route(&kit.cx(), &kit.floats(DType::F32, &[2, 3], &[3e38, 3e38, -3e38, 1e4, 0.0, -1e4]), 2).unwrap();
    assert_eq!(got.ids.host::<i32>().unwrap(), [0, 1, 0, 1]);
    assert_eq!(values(&got.weights), [0.5, 0.5, 1.0, 0.0]);
}

#[test]
fn a_row_with_nan_has_valid_ids_and_nan_weights_and_spoils_no_other() {
    let kit = Kit::cpu(Numerics::F32);
    let logits = [0.5, f32::NAN, 2.0, 1.0, 0.5, 3.0, 2.0, 1.0, f32::NAN, f32::NAN, f32::NAN, f32::NAN];
    let got = moe::route(&kit.cx(), &kit.floats(DType::F32, &[3, 4], &logits), 2).unwrap();
    assert_eq!(got.ids.host::<i32>().unwrap(), [2, 3, 1, 2, 0, 1]);
    let weights = values(&got.weights);
    assert!(weights[..2].iter().chain(&weights[4..]).all(|w| w.is_nan()), "{weights:?}");
    assert!(weights[2..4].iter().all(|w| w.is_finite()), "{weights:?}");
    let got = moe::route(&kit.cx(), &kit.floats(DType::F32, &[1, 2], &[f32::INFINITY, 0.0]), 1).unwrap();
    assert!(got.ids.host::<i32>().unwrap() == [0] && values(&got.weights)[0].is_nan());
}

#[test]
fn experts_are_within_their_bound_of_float64() {
    for (seed, case) in moe::cases().into_iter().enumerate() {
        let kit = Kit::cpu(Kit::of(case.act));
        let o = Operands::new(&case, 100 + seed as u32);
        let Dims { hidden, top_k, .. } = case.dims;
        let routing = moe::route(&kit.cx(), &o.router(&kit, &case, 0..case.tokens), top_k).unwrap();
        let x = o.rows(&kit, &case, 0..case.tokens);
        let got = moe::experts(&kit.cx(), &x, &routing, &o.experts(&kit, &case), case.dims.inter).unwrap();
        assert_eq!(got.dtype(), case.act);
        let got = values(&got);
        let (ids, weights) = (routing.ids.host::<i32>().unwrap(), values(&routing.weights));
        for t in 0..case.tokens {
            let places = t * top_k..(t + 1) * top_k;
            let want = oracle(&o.x[t * hidden..][..hidden], &ids[places.clone()], &weights[places], &o, case.dims);
            let error = relative(&got[t * hidden..][..hidden], &want);
            // bf16: three roundings (activation, each expert's output, sum) of 2^-8 at most and half of that on average.
            let bound = if case.act == DType::F32 { 1e-6 } else { 1.5 * 2f64.powi(-8) };
            assert!(error <= bound, "{} token {t}: {error:e} > {bound:e}", case.name);
        }
    }
}

#[test]
fn bf16_rounds_the_activation_each_output_and_the_sum_and_nothing_else() {
    let round = |v: f64| f64::from(bf16::from_f32(v as f32).to_f32());
    let case = moe::cases().into_iter().find(|c| c.tokens == 150 && c.act == DType::Bf16).unwrap();
    let kit = Kit::cpu(Numerics::BF16);
    let o = Operands::new(&case, 15);
    let Dims { hidden, top_k, .. } = case.dims;
    let routing = moe::route(&kit.cx(), &o.router(&kit, &case, 0..150), top_k).unwrap();
    let x = o.rows(&kit, &case, 0..150);
    let got = values(&moe::experts(&kit.cx(), &x, &routing, &o.experts(&kit, &case), case.dims.inter).unwrap());
    let (ids, weights) = (routing.ids.host::<i32>().unwrap(), values(&routing.weights));
    let mut equal = [0, 0];
    for t in 0..150 {
        let (x, places) = (&o.x[t * hidden..][..hidden], t * top_k..(t + 1) * top_k);
        let with = oracle_rounding(x, &ids[places.clone()], &weights[places.clone()], &o, case.dims, round);
        let without = oracle(x, &ids[places.clone()], &weights[places], &o, case.dims);
        for (i, want) in [with, without].iter().enumerate() {
            equal[i] += got[t * hidden..].iter().zip(want).filter(|(g, w)| f64::from(**g) == round(**w)).count();
        }
    }
    // f32 sums flip a rounding now and then; rounding elsewhere flips a good part of all values.
    let all = 150 * hidden;
    assert!(equal[0] > all * 98 / 100, "{} of {all} are those of the written roundings", equal[0]);
    assert!(equal[1] < all * 80 / 100, "{} of {all} are those of no rounding: the test is blind", equal[1]);
}

#[test]
fn a_token_is_the_same_bits_alone_as_in_any_batch() {
    for (seed, case) in moe::cases().into_iter().enumerate().filter(|(_, c)| c.tokens > 1) {
        let kit = Kit::cpu(Kit::of(case.act));
        let o = Operands::new(&case, 200 + seed as u32);
        let h = case.dims.hidden;
        let w = o.experts(&kit, &case);
        let whole = run(&kit, &case, &o, &w, 0..case.tokens);
        for t in (0..case.tokens).step_by(case.tokens.div_ceil(20)) {
            assert!(same_bits(&run(&kit, &case, &o, &w, t..t + 1), &whole[t * h..][..h]), "{} token {t}", case.name);
        }
        let cut = case.tokens / 2;
        assert!(same_bits(&run(&kit, &case, &o, &w, 0..cut), &whole[..cut * h]), "{}", case.name);
    }
}

#[test]
fn blocks_and_threads_do_not_show() {
    let case = moe::cases().into_iter().find(|c| c.tokens == 150).unwrap();
    let o = Operands::new(&case, 7);
    let kit = Kit::cpu(Numerics::F32);
    let routing = moe::route(&kit.cx(), &o.router(&kit, &case, 0..150), case.dims.top_k).unwrap();
    let w = o.experts(&kit, &case);
    let slots: Vec<i32> = (0..case.dims.experts as i32).collect();
    let weights = values(&routing.weights);
    let run = |block: usize| {
        let mut out = vec![f32::NAN; o.x.len()];
        let routed = reference::moe::Routed { ids: routing.ids.host().unwrap(), weights: &weights, slots: &slots };
        let matrices = reference::moe::Weights::of(&w, Inputs::NONE, case.dims, case.dims.experts).unwrap();
        reference::moe::experts(&o.x, routed, &matrices, case.dims, block, &mut out).unwrap();
        out
    };
    let whole = run(150);
    for block in [1, 2, 7, 64, 149, 151, 4096] {
        assert!(same_bits(&run(block), &whole), "blocks of {block}");
    }
    for threads in [1, 2, 5] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert!(same_bits(&pool.install(|| run(64)), &whole), "{threads} threads");
    }
}

#[test]
fn a_step_of_several_blocks_is_the_same_as_its_tokens_alone() {
    // Rows so wide that a block's workspace holds 256 tokens only.
    let dims = Dims { hidden: 65_500, inter: 3, experts: 2, top_k: 2 };
    let case = Case { name: "two blocks", tokens: 257, dims, act: DType::F32, weights: DType::F32 };
    let tactic = moe::tactic(&DeviceSpec::host(), 257, dims, DType::F32, Inputs::NONE);
    assert_eq!(tactic.block_tokens, 129, "{tactic:?}");
    let kit = Kit::cpu(Numerics::F32);
    let o = Operands::new(&case, 8);
    let w = o.experts(&kit, &case);
    let whole = run(&kit, &case, &o, &w, 0..257);
    for t in [0, 128, 129, 256] {
        assert!(same_bits(&run(&kit, &case, &o, &w, t..t + 1), &whole[t * 65_500..][..65_500]), "token {t}");
    }
}

#[test]
fn all_tokens_to_one_expert_and_one_to_each() {
    let dims = Dims { hidden: 40, inter: 24, experts: 6, top_k: 1 };
    let case = Case { name: "one expert", tokens: 6, dims, act: DType::F32, weights: DType::F32 };
    let kit = Kit::cpu(Numerics::F32);
    let o = Operands::new(&case, 9);
    for ids in [[3; 6], [5, 4, 3, 2, 1, 0], [0; 6]] {
        let weights = [1.0, 0.5, 0.25, 0.0, -1.0, 2.0];
        let x = o.rows(&kit, &case, 0..6);
        let r = routing(&kit, 1, &ids, &weights);
        let got = values(&moe::experts(&kit.cx(), &x, &r, &o.experts(&kit, &case), 24).unwrap());
        for t in 0..6 {
            let want = oracle(&o.x[t * 40..][..40], &ids[t..=t], &weights[t..=t], &o, dims);
            let row = &got[t * 40..][..40];
            if weights[t] == 0.0 {
                assert!(row.iter().all(|v| *v == 0.0));
            } else {
                assert!(relative(row, &want) < 2e-6, "{ids:?} token {t}");
            }
        }
    }
}

#[test]
fn experts_are_found_through_their_slots() {
    let dims = Dims { hidden: 16, inter: 8, experts: 4, top_k: 2 };
    let case = Case { name: "slots", tokens: 5, dims, act: DType::F32, weights: DType::F32 };
    let kit = Kit::cpu(Numerics::F32);
    let o = Operands::new(&case, 10);
    let r = routing(&kit, 2, &[0, 3, 3, 0, 0, 3, 3, 0, 0, 3], &[0.5; 10]);
    let x = o.rows(&kit, &case, 0..5);
    let want = values(&moe::experts(&kit.cx(), &x, &r, &o.experts(&kit, &case), 8).unwrap());
    // Three slots: expert 3 in slot 0, expert 0 in slot 2, the others absent, slot 1 never read.
    let (gu, dn) = (2 * 8 * 16, 16 * 8);
    let nan = |n| vec![f32::NAN; n];
    let gate_up = [&o.gate_up[3 * gu..], &nan(gu), &o.gate_up[..gu]].concat();
    let down = [&o.down[3 * dn..], &nan(dn), &o.down[..dn]].concat();
    let (gate_up, down) =
        pair(kit.floats(DType::F32, &[3 * 16, 16], &gate_up), kit.floats(DType::F32, &[3 * 16, 8], &down));
    let mut w = Experts { gate_up, down, slots: kit.ints(&[4], &[2, -1, -1, 0]) };
    let got = values(&moe::experts(&kit.cx(), &x, &r, &w, 8).unwrap());
    assert!(same_bits(&got, &want));

    let absent = routing(&kit, 2, &[0, 3, 3, 0, 0, 1, 3, 0, 1, 3], &[0.5; 10]);
    assert_refused(moe::experts(&kit.cx(), &x, &absent, &w, 8), &["token 2", "expert 1", "absent", "-1"]);
    for id in [4, -1, i32::MAX, i32::MIN] {
        let outside = routing(&kit, 2, &[0, 3, 3, 0, 0, 3, 3, 0, 0, id], &[0.5; 10]);
        assert_refused(
            moe::experts(&kit.cx(), &x, &outside, &w, 8),
            &["token 4", &format!("expert {id}"), "there are 4"],
        );
    }
    w.slots = kit.ints(&[4], &[2, -1, -1, 3]);
    assert_refused(moe::experts(&kit.cx(), &x, &r, &w, 8), &["expert 3", "slot 3", "have 3"]);
}

#[test]
fn the_shared_expert_is_added_through_its_gate() {
    for act in [DType::F32, DType::Bf16] {
        let kit = Kit::cpu(Kit::of(act));
        let (t, h) = (7, 33);
        let value = |stream, n, std| rounded(act, &normals(11, stream, n, std));
        let (routed, shared, gate) = (value(0, t * h, 1.0), value(1, t * h, 1.0), value(2, t, 4.0));
        let mut out = kit.floats(act, &[t, h], &routed);
        let (s, g) = (kit.floats(act, &[t, h], &shared), kit.floats(act, &[t, 1], &gate));
        moe::combine_shared(&kit.cx(), &mut out, &s, &g).unwrap();
        for (i, got) in values(&out).into_iter().enumerate() {
            let (routed, shared, gate) = (f64::from(routed[i]), f64::from(shared[i]), f64::from(gate[i / h]));
            let want = routed + shared / (1.0 + (-gate).exp());
            let bound =
                if act == DType::F32 { 3e-7 * (routed.abs() + shared.abs()) } else { want.abs() / 256.0 + 1e-6 };
            assert!((f64::from(got) - want).abs() <= bound, "{act} element {i}: {got} for {want}");
        }
    }
    // Gates at the ends: the shared expert is out, or in whole; no overflow on the way.
    let kit = Kit::cpu(Numerics::F32);
    let mut out = kit.floats(DType::F32, &[2, 1], &[1.0, 1.0]);
    let shared = kit.floats(DType::F32, &[2, 1], &[5.0, 5.0]);
    moe::combine_shared(&kit.cx(), &mut out, &shared, &kit.floats(DType::F32, &[2, 1], &[-1e30, 1e30])).unwrap();
    assert_eq!(values(&out), [1.0, 6.0]);
}

#[test]
fn operands_that_disagree_are_refused() {
    let kit = Kit::cpu(Numerics::F32);
    let cx = kit.cx();
    let f = |shape: &[usize]| kit.floats(DType::F32, shape, &vec![0.0; shape.iter().product()]);
    for (shape, k) in [(vec![2, 4], 0), (vec![2, 4], 5), (vec![4], 1), (vec![0, 4], 1), (vec![2, 2, 2], 1)] {
        let t = kit.empty(DType::F32, &shape);
        assert_refused(moe::route(&cx, &t, k), &["route", &format!("{shape:?}"), &format!("top_k {k}")]);
    }
    assert_refused(moe::route(&cx, &kit.ints(&[1, 2], &[0, 0]), 1), &["i32"]);

    let dims = Dims { hidden: 8, inter: 4, experts: 3, top_k: 2 };
    let experts = |gu: &[usize], dn: &[usize], slots: usize| {
        let (gate_up, down) = pair(f(gu), f(dn));
        Experts { gate_up, down, slots: kit.ints(&[slots], &vec![0; slots]) }
    };
    let right = || experts(&[3 * 8, 8], &[3 * 8, 4], 3);
    let routed = |t: usize, k: usize| routing(&kit, k, &vec![0; t * k], &vec![0.5; t * k]);
    assert!(moe::experts(&cx, &f(&[5, 8]), &routed(5, 2), &right(), dims.inter).is_ok());
    assert_refused(moe::experts(&cx, &f(&[5, 8]), &routed(4, 2), &right(), 4), &["routing ids", "[4, 2]", "[5, 2]"]);
    let w = experts(&[3 * 8, 9], &[3 * 8, 4], 3);
    assert_refused(moe::experts(&cx, &f(&[5, 8]), &routed(5, 2), &w, 4), &["gate_up", "[24, 9]", "3 slots x 8, 8"]);
    assert_refused(moe::experts(&cx, &f(&[5, 8]), &routed(5, 2), &right(), 5), &["down", "[24, 4]", "slots x 8, 5"]);
    let w = experts(&[3 * 8, 8], &[2 * 8, 4], 3);
    assert_refused(moe::experts(&cx, &f(&[5, 8]), &routed(5, 2), &w, 4), &["gate_up", "[24, 8]", "2 slots x 8, 8"]);
    let w = experts(&[3 * 8, 8], &[3 * 8 - 1, 4], 3);
    assert_refused(moe::experts(&cx, &f(&[5, 8]), &routed(5, 2), &w, 4), &["down", "[23, 4]", "slots x 8, 4"]);
    assert_refused(moe::experts(&cx, &f(&[5, 8]), &routed(5, 4), &right(), 4), &["5 tokens to 4 of 3 experts"]);
    let gates = || plain(f(&[3 * 4, 8]));
    let w = Experts { gate_up: Projection::new(vec![gates(), gates(), gates()]).unwrap(), ..right() };
    assert_refused(moe::experts(&cx, &f(&[5, 8]), &routed(5, 2), &w, 4), &["gate_up", "3 parts", "one or two"]);
    let x16 = kit.floats(DType::Bf16, &[5, 8], &[0.0; 40]);
    assert_refused(moe::experts(&cx, &x16, &routed(5, 2), &right(), 4), &["x is bf16", "f32"]);
    let narrow = Kit::cpu(Numerics::BF16);
    assert_refused(moe::experts(&narrow.cx(), &x16, &routed(5, 2), &right(), 4), &["bf16 activations", "f32"]);
    let unequal = Routing { ids: kit.ints(&[5, 2], &[0; 10]), weights: f(&[5, 1]) };
    assert_refused(moe::experts(&cx, &f(&[5, 8]), &unequal, &right(), 4), &["routing weights", "[5, 1]"]);

    let mut out = f(&[4, 8]);
    assert_refused(moe::combine_shared(&cx, &mut out, &f(&[4, 7]), &f(&[4, 1])), &["shared", "[4, 7]", "[4, 8]"]);
    assert_refused(moe::combine_shared(&cx, &mut out, &f(&[4, 8]), &f(&[4])), &["gate", "[4]", "[4, 1]"]);
    assert_refused(moe::combine_shared(&cx, &mut out, &f(&[4, 8]), &f(&[1, 1])), &["gate", "[1, 1]"]);
    let mut out = kit.floats(DType::Bf16, &[4, 8], &[0.0; 32]);
    assert_refused(moe::combine_shared(&cx, &mut out, &f(&[4, 8]), &f(&[4, 1])), &["out", "bf16"]);
}

#[test]
fn plan_and_cpu_take_the_same_bytes() {
    for case in moe::cases() {
        let mut reports = Vec::new();
        for kit in [Kit::cpu(Kit::of(case.act)), Kit::plan(Kit::of(case.act))] {
            let o = Operands::new(&case, 12);
            let (logits, x) = (o.router(&kit, &case, 0..case.tokens), o.rows(&kit, &case, 0..case.tokens));
            let w = o.experts(&kit, &case);
            reports.push((
                kit.measured(|cx| {
                    let routing = moe::route(cx, &logits, case.dims.top_k).unwrap();
                    let out = moe::experts(cx, &x, &routing, &w, case.dims.inter).unwrap();
                    (routing, out)
                }),
                kit.meter.take(),
            ));
        }
        assert_eq!(reports[0], reports[1], "{}", case.name);
        let tactic = moe::tactic(&DeviceSpec::host(), case.tokens, case.dims, case.act, Inputs::NONE);
        let workspace = reports[0].0.owners.iter().find(|(owner, _)| owner.to_string().ends_with("experts.workspace"));
        assert_eq!(workspace.map(|(_, bytes)| *bytes), Some(tactic.workspace), "{:?}", reports[0].0.owners);
    }
}

#[test]
fn no_step_needs_more_than_the_upper_bound() {
    let mut words = Words::new(13);
    for round in 0..3_000 {
        let top_k = 1 + words.below(10);
        let dims = Dims {
            hidden: 1 + words.below(8192),
            inter: 1 + words.below(4096),
            experts: top_k + words.below(500),
            top_k,
        };
        let act = if round % 2 == 0 { DType::Bf16 } else { DType::F32 };
        let mut scheme = || ACT_SCHEMES[words.below(ACT_SCHEMES.len())];
        let inputs = Inputs { x: [scheme(), scheme()], h: scheme() };
        let step_tokens = 1 + words.below(20_000);
        let limits = Limits { step_tokens, batch: 8, context: 32_768 };
        let spec = &cards::all()[words.below(cards::all().len())];
        let bound = moe::upper_bound(spec, limits, dims, act, inputs);
        for tokens in [1, step_tokens, 1 + words.below(step_tokens), 1 + words.below(step_tokens)] {
            let tactic = moe::tactic(spec, tokens, dims, act, inputs);
            assert!(tactic.workspace <= bound, "{tokens} tokens of {limits:?} {dims:?}: {tactic:?} > {bound}");
            assert!(tactic.block_tokens >= 1 && tactic.block_tokens <= tokens);
        }
    }
    // The published layer: the workspace stops growing, under 130 MiB.
    let dims = Dims { hidden: 2048, inter: 512, experts: 256, top_k: 8 };
    let at = |tokens| moe::tactic(&DeviceSpec::host(), tokens, dims, DType::Bf16, Inputs::NONE).workspace;
    assert!(at(1 << 20) < 130 << 20 && at(8192) < 130 << 20 && at(64) < 4 << 20);
}

#[test]
fn sizing_takes_the_upper_bound() {
    let case = moe::cases()[1];
    let limits = Limits { step_tokens: 700, batch: 4, context: 1024 };
    let mut kit = Kit::plan(Numerics::F32);
    kit.bound = Some(limits);
    let o = Operands::new(&case, 14);
    let (logits, x, w) = (o.router(&kit, &case, 0..13), o.rows(&kit, &case, 0..13), o.experts(&kit, &case));
    let report = kit.measured(|cx| {
        let routing = moe::route(cx, &logits, case.dims.top_k).unwrap();
        moe::experts(cx, &x, &routing, &w, case.dims.inter).unwrap()
    });
    let bound = moe::upper_bound(&DeviceSpec::host(), limits, case.dims, DType::F32, Inputs::NONE);
    assert!(report.owners.iter().any(|(owner, b)| owner.to_string().ends_with("experts.workspace") && *b == bound));
}

#[test]
fn costs_count_the_experts_expected() {
    let dims = Dims { hidden: 2048, inter: 512, experts: 256, top_k: 8 };
    let expert = 3 * 2048 * 512 * 2;
    let bytes = |tokens| moe::cost(tokens, dims, DType::Bf16, expert, Unit::Bf16).resident_bytes;
    assert_eq!(bytes(1), 8 * expert);
    assert_eq!(bytes(100_000), 256 * expert);
    let expected = 256.0 * (1.0 - (1.0 - 8.0 / 256.0f64).powi(64)) * f64::from(expert as u32);
    assert!((bytes(64) as f64 - expected).abs() < 1.0);
    assert_eq!(moe::cost(3, dims, DType::Bf16, expert, Unit::Bf16).flops, 3 * 8 * 6 * 2048 * 512);
}
