//! Router, experts and shared expert on every path, with weights of every form and inputs of every scheme.

use highwater::device::{Device, DeviceSpec, cards};
use highwater::num::DType;
use highwater::ops::linear::Projection;
use highwater::ops::moe::{self, Dims, Experts, Routing};
use highwater::ops::scheme::{ActScheme, Global, Grain, Scheme};
use highwater::ops::weight::{LinearSpec, Weight};
use highwater::ops::{ActQuant, Meter, Numerics};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use super::{Pair, Where, assert_same, place, relative_norm};
use crate::ops::weight::{SCHEMES, Synth};
use crate::ops::{Rig, SLAB_BYTES, random, rng, tensor, values, world};

/// The values of one projection of every expert, for any device.
enum Matrices {
    Plain { dtype: DType, rows: usize, cols: usize, values: Vec<f32> },
    Quantised(Synth, Vec<f32>),
}

impl Matrices {
    fn plain(rng: &mut ChaCha8Rng, dtype: DType, rows: usize, cols: usize) -> Matrices {
        Matrices::Plain { dtype, rows, cols, values: random(rng, dtype, rows * cols, 1.5 / (cols as f32).sqrt()) }
    }

    /// `slots` matrices of `rows` rows, or twice that where `pairs`, one after another.
    fn quantised(rng: &mut ChaCha8Rng, spec: LinearSpec, slots: usize) -> Matrices {
        let synth = Synth::new(rng, spec);
        let scales = (0..slots).map(|_| synth.input * rng.random_range(0.7..1.4f32)).collect();
        Matrices::Quantised(synth, scales)
    }

    fn of(
        rng: &mut ChaCha8Rng,
        form: (Scheme, ActScheme),
        rows: usize,
        cols: usize,
        segment: usize,
        slots: usize,
    ) -> Self {
        match form {
            (Scheme::Plain(dtype), _) => Matrices::plain(rng, dtype, rows, cols),
            (scheme, act) => {
                Matrices::quantised(rng, LinearSpec { rows, cols, scheme, act, segment_rows: segment }, slots)
            }
        }
    }

    fn on(&self, rig: &Rig) -> Weight {
        match self {
            Matrices::Plain { dtype, rows, cols, values } => {
                Weight::plain(tensor(&rig.cx(), *dtype, &[*rows, *cols], values)).unwrap()
            }
            Matrices::Quantised(synth, scales) => synth.on_each(&rig.device, scales),
        }
    }
}

/// A layer's experts, one slot more than there are experts, in shuffled slots.
struct Layer {
    dims: Dims,
    parts: Vec<Matrices>,
    down: Matrices,
    slots: Vec<i32>,
}

impl Layer {
    /// gate and up as one projection.
    fn new(seed: u64, dims: Dims, gate_up: (Scheme, ActScheme), down: (Scheme, ActScheme)) -> Layer {
        let mut rng = rng(seed);
        let Dims { hidden, inter, experts, .. } = dims;
        let slots = experts + 1;
        let parts = vec![Matrices::of(&mut rng, gate_up, slots * 2 * inter, hidden, inter, slots)];
        let down = Matrices::of(&mut rng, down, slots * hidden, inter, hidden, slots);
        let table = (0..experts as i32).map(|e| (e * 7 + 3) % experts as i32 + 1).collect::<Vec<_>>();
        let table = if experts % 7 == 0 { (1..=experts as i32).collect() } else { table };
        Layer { dims, parts, down, slots: table }
    }

    /// gate and up by themselves.
    fn apart(seed: u64, dims: Dims, [gate, up, down]: [(Scheme, ActScheme); 3]) -> Layer {
        let mut layer = Layer::new(seed, dims, gate, down);
        let mut rng = rng(seed + 1000);
        let (rows, slots) = ((dims.experts + 1) * dims.inter, dims.experts + 1);
        layer.parts = [gate, up].map(|form| Matrices::of(&mut rng, form, rows, dims.hidden, dims.inter, slots)).into();
        layer
    }

    fn on(&self, rig: &Rig) -> Experts {
        let parts = self.parts.iter().map(|part| part.on(rig)).collect();
        Experts {
            gate_up: Projection::new(parts).unwrap(),
            down: self.down.on(rig),
            slots: world::ints(&rig.device, &self.slots),
        }
    }
}

/// Rows and the experts they go to.
#[derive(Clone)]
struct Step {
    tokens: usize,
    x: Vec<f32>,
    ids: Vec<i32>,
    mix: Vec<f32>,
}

impl Step {
    /// Distinct experts for each token, weights that sum to about one.
    fn new(seed: u64, tokens: usize, dims: Dims) -> Step {
        let mut rng = rng(seed);
        let x = random(&mut rng, DType::Bf16, tokens * dims.hidden, 2.0);
        let mut ids = Vec::new();
        for _ in 0..tokens {
            let mut left: Vec<i32> = (0..dims.experts as i32).collect();
            ids.extend((0..dims.top_k).map(|_| left.swap_remove(rng.random_range(0..left.len()))));
        }
        let mix = random(&mut rng, DType::Bf16, tokens * dims.top_k, 0.5 / dims.top_k as f32);
        let mix = mix.iter().map(|w| w.abs() + 1.0 / (4.0 * dims.top_k as f32)).collect();
        Step { tokens, x, ids, mix }
    }

    fn rows(&self, dims: Dims, from: usize, tokens: usize) -> Step {
        let (h, k) = (dims.hidden, dims.top_k);
        let part = |all: &[f32], width: usize| all[from * width..(from + tokens) * width].to_vec();
        Step {
            tokens,
            x: part(&self.x, h),
            ids: self.ids[from * k..(from + tokens) * k].to_vec(),
            mix: part(&self.mix, k),
        }
    }

    fn run(&self, rig: &Rig, layer: &Layer, w: &Experts) -> Vec<f32> {
        let (cx, Dims { hidden, inter, top_k, .. }) = (rig.cx(), layer.dims);
        let x = tensor(&cx, rig.numerics.activations, &[self.tokens, hidden], &self.x);
        let ids = world::ints(&rig.device, &self.ids).reshape(&[self.tokens, top_k]).unwrap();
        let routing = Routing { ids, weights: tensor(&cx, DType::F32, &[self.tokens, top_k], &self.mix) };
        values(&moe::experts(&cx, &x, &routing, w, inter).unwrap())
    }
}

fn work(tokens: usize, dims: Dims) -> u64 {
    (3 * tokens * dims.top_k * dims.hidden * dims.inter) as u64
}

fn numerics(act: DType, act_quant: ActQuant, batch_invariant: bool) -> Numerics {
    Numerics { act_quant, batch_invariant, ..if act == DType::Bf16 { Numerics::BF16 } else { Numerics::F32 } }
}

/// Asserts that rows of `hidden` agree.
///
/// f32 without quantised inputs: both arms round every product and sum once, in another order; chains of K / 16 (CPU) and
/// K sums leave errors of about the root of their lengths in ulps, 1e-6 in the norm for the widths here.
/// bf16: sums that differ by 1e-6 fall to different sides of a midpoint between neighbours 2^-8 apart once in thousands,
/// for the activation, each output and the result: a row in which one large value turns is off by 2^-8 of it at most; half the rows have none.
/// Quantised activations: such a step of one value can move a code, or a scale and with it many codes: one step of e4m3 is
/// 2^-3, of e2m1 it is a half. Most rows have none of that; those are the majority that must be as near as without.
/// `coarse`: products by Hopper's own FP8 instructions, whose sums keep 14 bits or so below a product's largest term. A hidden
/// value of a few 1e-4 beside its twin falls to another code once in hundreds, and a row has thousands of them.
#[track_caller]
fn assert_rows(what: &str, act: DType, [quantised, coarse]: [bool; 2], hidden: usize, cuda: &[f32], cpu: &[f32]) {
    assert_eq!(cuda.len(), cpu.len());
    assert!(cpu.iter().any(|v| *v != 0.0), "{what}: nothing to compare");
    let tight = if act == DType::F32 { 2e-6 } else { 1e-3 };
    let turned = if act == DType::F32 { tight } else { 1.0 / 256.0 };
    let loose = if quantised { 0.08 } else { turned };
    let mut errors: Vec<f64> =
        cuda.chunks(hidden).zip(cpu.chunks(hidden)).map(|(cuda, cpu)| relative_norm(cuda, cpu)).collect();
    errors.sort_by(f64::total_cmp);
    let (median, worst) = (errors[errors.len() / 2], errors[errors.len() - 1]);
    assert!(worst <= loose, "{what}: a row is off by {worst:e}, bound {loose:e}; median {median:e}");
    let typical = match (quantised && act == DType::Bf16, coarse) {
        (true, true) => 10.0 * tight,
        (true, false) => 4.0 * tight,
        (false, _) => tight,
    };
    assert!(median <= typical, "{what}: half the rows are off by {median:e}, bound {typical:e}");
}

#[track_caller]
fn compare(what: &str, numerics: Numerics, quantised: bool, layer: &Layer, step: &Step) -> Option<Vec<f32>> {
    compare_within(what, numerics, [quantised, false], layer, step)
}

/// As [`compare`], of steps that take Hopper's own path on a card.
fn compare_coarse(what: &str, layer: &Layer, step: &Step) {
    compare_within(what, Numerics::BF16, [true, place() == Where::Card], layer, step);
}

fn compare_within(what: &str, numerics: Numerics, how: [bool; 2], layer: &Layer, step: &Step) -> Option<Vec<f32>> {
    let pair = Pair::new(what, numerics, work(step.tokens, layer.dims))?;
    let (cpu, cuda) = pair.run(|rig| step.run(rig, layer, &layer.on(rig)));
    assert_rows(what, numerics.activations, how, layer.dims.hidden, &cuda, &cpu);
    Some(cuda)
}

const BF16: (Scheme, ActScheme) = (Scheme::Plain(DType::Bf16), ActScheme::None);

/// Widths that every fast path takes, and few experts for many tokens.
const WHOLE: Dims = Dims { hidden: 256, inter: 128, experts: 6, top_k: 2 };

#[test]
fn every_case_equals_the_cpu_arm() {
    for (seed, case) in moe::cases().into_iter().enumerate() {
        let form = (Scheme::Plain(case.weights), ActScheme::None);
        for batch_invariant in [false, true] {
            let what = format!("{} {} {} {batch_invariant}", case.name, case.act, case.weights);
            let layer = Layer::new(seed as u64, case.dims, form, form);
            let step = Step::new(100 + seed as u64, case.tokens, case.dims);
            compare(&what, numerics(case.act, ActQuant::Off, batch_invariant), false, &layer, &step);
        }
    }
}

#[test]
fn every_form_and_input_on_every_path() {
    // Decode in one kernel for down and sum, in two, tiles, tiles for one token; then widths for the path that takes all.
    let odd = Dims { hidden: 160, inter: 144, experts: 5, top_k: 3 };
    let shapes = [
        (1, false, WHOLE),
        (10, false, WHOLE),
        (45, false, WHOLE),
        (1, true, WHOLE),
        (9, false, odd),
        (40, false, odd),
    ];
    for (seed, form) in SCHEMES.into_iter().enumerate() {
        for (act, act_quant) in [
            (DType::Bf16, ActQuant::Checkpoint),
            (DType::Bf16, ActQuant::Off),
            (DType::F32, ActQuant::Checkpoint),
            (DType::F32, ActQuant::Off),
        ] {
            for (tokens, batch_invariant, dims) in shapes {
                let what = format!("{form:?} {act} {act_quant:?} {tokens} tokens of {dims:?} {batch_invariant}");
                let layer = Layer::new(seed as u64, dims, form, form);
                let step = Step::new(50 + seed as u64, tokens, dims);
                let quantised = act_quant == ActQuant::Checkpoint;
                compare(&what, numerics(act, act_quant, batch_invariant), quantised, &layer, &step);
            }
        }
    }
}

#[test]
fn gate_and_up_that_are_stored_apart_may_differ_in_form_and_input() {
    let forms: Vec<(Scheme, ActScheme)> = SCHEMES.into_iter().chain([BF16]).collect();
    for (i, &gate) in forms.iter().enumerate() {
        for up in [gate, forms[(i + 2) % forms.len()]] {
            for tokens in [2, 45] {
                let what = format!("{gate:?} and {up:?}, {tokens} tokens");
                let layer = Layer::apart(i as u64, WHOLE, [gate, up, forms[(i + 1) % forms.len()]]);
                let step = Step::new(70 + i as u64, tokens, WHOLE);
                compare(&what, Numerics::BF16, true, &layer, &step);
            }
        }
    }
    // A form and an input that no published model pairs, and f32 weights beside bf16 ones.
    let nvfp4 = Scheme::Nvfp4(Global::Divides);
    for input in [ActScheme::Fp8Tensor, ActScheme::Fp8Token, ActScheme::Fp8Group] {
        for tokens in [2, 45] {
            let layer = Layer::new(9, WHOLE, (nvfp4, input), (nvfp4, input));
            compare(&format!("NVFP4 with {input:?}"), Numerics::BF16, true, &layer, &Step::new(9, tokens, WHOLE));
        }
    }
    for input in [ActScheme::Fp8Tensor, ActScheme::Fp8Token] {
        let form = (Scheme::Fp8(Grain::Block), input);
        for tokens in [2, 45] {
            let layer = Layer::new(9, WHOLE, form, form);
            compare(&format!("blocks with {input:?}"), Numerics::BF16, true, &layer, &Step::new(9, tokens, WHOLE));
        }
    }
    let f32s = (Scheme::Plain(DType::F32), ActScheme::None);
    let layer = Layer::apart(10, WHOLE, [f32s, BF16, f32s]);
    compare("f32 and bf16", Numerics::F32, false, &layer, &Step::new(10, 5, WHOLE));
}

/// One form of each kind that a fast path takes.
const KINDS: [(Scheme, ActScheme); 5] = [BF16, SCHEMES[0], SCHEMES[1], SCHEMES[2], SCHEMES[4]];

#[test]
fn long_rows_in_parts_and_rows_too_long_for_eight_pairs_a_pass() {
    // Two and four parts of the columns; 8,192 columns leave room for four pairs a pass.
    for (hidden, inter) in [(1024, 48), (2048, 80), (8192, 16), (64, 2048)] {
        let dims = Dims { hidden, inter, experts: 3, top_k: 1 };
        for (seed, form) in KINDS.into_iter().enumerate() {
            // Widths that a form cannot have in its fast path go another way, and must be right there.
            if matches!(form.0, Scheme::Nvfp4(_)) && inter % 16 != 0 {
                continue;
            }
            let layer = Layer::new(seed as u64, dims, form, form);
            let mut step = Step::new(seed as u64, 6, dims);
            step.ids = vec![1, 1, 0, 1, 1, 1];
            compare(&format!("{hidden} x {inter}, {form:?}"), Numerics::BF16, true, &layer, &step);
        }
    }
}

#[test]
fn many_pairs_of_one_expert_and_experts_without_any() {
    let dims = Dims { experts: 40, top_k: 1, ..WHOLE };
    for (seed, form) in KINDS.into_iter().enumerate() {
        let layer = Layer::new(seed as u64, dims, form, form);
        // 21 pairs: three passes of decode. 150: tiles of several sizes, the last of an expert's partly filled.
        for (tokens, batch_invariant) in [(21, false), (21, true), (150, true)] {
            let mut step = Step::new(20 + seed as u64, tokens, dims);
            step.ids.iter_mut().enumerate().for_each(|(i, id)| *id = if i % 25 == 24 { 39 } else { 17 });
            let numerics = numerics(DType::Bf16, ActQuant::Checkpoint, batch_invariant);
            compare(&format!("{form:?} {tokens} {batch_invariant}"), numerics, true, &layer, &step);
        }
    }
}

/// Codes under scales of tokens and of weight rows, in numbers that have a path of their own on Hopper.
#[test]
fn many_pairs_of_codes_under_scales_of_rows() {
    let form = SCHEMES[1];
    let shapes = [
        // Several runs of rows and steps of columns, the last of both partly filled.
        (333, Dims { hidden: 528, inter: 272, experts: 9, top_k: 3 }),
        (130, Dims { hidden: 16, inter: 16, experts: 3, top_k: 1 }),
        // More experts than a warp has lanes.
        (150, Dims { hidden: 144, inter: 160, experts: 70, top_k: 4 }),
    ];
    for (seed, (tokens, dims)) in shapes.into_iter().enumerate() {
        let layers = [Layer::new(seed as u64, dims, form, form), Layer::apart(seed as u64, dims, [form; 3])];
        let even = Step::new(80 + seed as u64, tokens, dims);
        // Everyone goes to one expert, and no one to another.
        let mut skewed = even.clone();
        for ids in skewed.ids.chunks_mut(dims.top_k).filter(|ids| !ids.contains(&0)) {
            let last = ids.iter().position(|id| *id == dims.experts as i32 - 1);
            ids[last.unwrap_or(0)] = 0;
        }
        for (layer, step) in [(&layers[0], &even), (&layers[0], &skewed), (&layers[1], &even)] {
            let what = format!("{tokens} tokens of {dims:?}, {} parts", layer.parts.len());
            compare_coarse(&what, layer, step);
        }
    }
}

/// On Hopper codes under scales of rows have one block of tokens here, and outputs in two parts.
#[test]
fn a_step_too_long_for_whole_outputs() {
    let dims = Dims { hidden: 1024, inter: 32, experts: 64, top_k: 64 };
    let layer = Layer::new(11, dims, SCHEMES[1], SCHEMES[1]);
    compare_coarse("a long step", &layer, &Step::new(11, 1000, dims));
}

/// A card so small that decode gives each block several turns of rows.
fn small_card(numerics: Numerics) -> Option<Rig> {
    let spec = DeviceSpec { sms: 1, ..cards::find("h200").unwrap() };
    let device = match place() {
        Where::Card => Device::cuda_guarded(spec, 0, SLAB_BYTES).unwrap(),
        Where::Emulated => Device::emulated(spec, SLAB_BYTES).unwrap(),
        Where::Nowhere => return None,
    };
    Some(Rig { device, meter: Meter::default(), numerics })
}

#[test]
fn the_number_of_multiprocessors_does_not_enter_decode() {
    let dims = Dims { hidden: 1024, inter: 288, experts: 3, top_k: 2 };
    for (seed, form) in KINDS.into_iter().enumerate() {
        let layer = Layer::new(seed as u64, dims, form, form);
        let step = Step::new(30 + seed as u64, 3, dims);
        let Some(pair) = Pair::new("turns", Numerics::BF16, work(3, dims)) else { return };
        let Some(small) = small_card(Numerics::BF16) else { return };
        let run = |rig: &Rig| step.run(rig, &layer, &layer.on(rig));
        assert_same(&format!("{form:?}"), &bits(&run(&small)), &bits(&run(&pair.cuda)));
        assert_eq!(small.device.take_overruns(), Vec::<String>::new());
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn a_token_is_the_same_bits_in_any_company_on_its_path() {
    for (seed, form) in KINDS.into_iter().enumerate() {
        let layer = Layer::new(seed as u64, WHOLE, form, form);
        // Decode; tiles from one token to many; any form.
        for (numerics, tokens) in
            [(Numerics::BF16, 12), (numerics(DType::Bf16, ActQuant::Checkpoint, true), 70), (Numerics::F32, 40)]
        {
            let Some(pair) = Pair::new("company", numerics, work(tokens, WHOLE)) else { return };
            let w = layer.on(&pair.cuda);
            let step = Step::new(40 + seed as u64, tokens, WHOLE);
            let whole = step.run(&pair.cuda, &layer, &w);
            for (from, count) in [(0, 1), (3, 1), (tokens - 1, 1), (2, 5), (0, 10)] {
                let part = step.rows(WHOLE, from, count).run(&pair.cuda, &layer, &w);
                let what = format!("{form:?}, tokens {from}..{} of {tokens}", from + count);
                assert_same(&what, &bits(&part), &bits(&whole[from * WHOLE.hidden..(from + count) * WHOLE.hidden]));
            }
        }
    }
}

#[test]
fn a_token_is_the_same_bits_among_few_and_among_many() {
    for (seed, form) in KINDS.into_iter().enumerate() {
        let layer = Layer::new(seed as u64, WHOLE, form, form);
        let Some(pair) = Pair::new("company of many", Numerics::BF16, work(100, WHOLE)) else { return };
        let w = layer.on(&pair.cuda);
        let step = Step::new(90 + seed as u64, 100, WHOLE);
        let whole = step.run(&pair.cuda, &layer, &w);
        // All of them more than decode takes.
        for (from, count) in [(0, 13), (50, 14), (60, 40), (1, 99)] {
            let part = step.rows(WHOLE, from, count).run(&pair.cuda, &layer, &w);
            let what = format!("{form:?}, tokens {from}..{}", from + count);
            assert_same(&what, &bits(&part), &bits(&whole[from * WHOLE.hidden..(from + count) * WHOLE.hidden]));
        }
    }
}

#[test]
fn the_same_bits_every_time() {
    let times = if place() == Where::Card { 1000 } else { 3 };
    for (seed, form) in KINDS.into_iter().enumerate() {
        let layer = Layer::new(seed as u64, WHOLE, form, form);
        for (numerics, tokens) in [(Numerics::BF16, 3), (Numerics::BF16, 10), (Numerics::BF16, 40), (Numerics::F32, 9)]
        {
            let Some(pair) = Pair::new("repeated", numerics, times * work(tokens, WHOLE)) else { continue };
            let w = layer.on(&pair.cuda);
            let step = Step::new(60 + seed as u64, tokens, WHOLE);
            let first = bits(&step.run(&pair.cuda, &layer, &w));
            for time in 1..times {
                let again = bits(&step.run(&pair.cuda, &layer, &w));
                assert_same(&format!("{form:?}, {tokens} tokens, time {time}"), &again, &first);
            }
        }
    }
}

#[test]
fn an_absent_expert_adds_nothing_and_what_is_out_of_range_is_nan() {
    for (numerics, tokens) in [
        (Numerics::BF16, 4),
        (Numerics::BF16, 11),
        (Numerics::BF16, 40),
        (numerics(DType::Bf16, ActQuant::Checkpoint, true), 11),
        (Numerics::F32, 11),
    ] {
        for form in [BF16, SCHEMES[0], SCHEMES[1], SCHEMES[4]] {
            let mut layer = Layer::new(5, WHOLE, form, form);
            let Some(pair) = Pair::new("absent", numerics, work(tokens, WHOLE)) else { return };
            let mut step = Step::new(5, tokens, WHOLE);
            // Expert 5 is what everyone else is not sent to.
            for (i, id) in step.ids.iter_mut().enumerate() {
                *id = if i % 2 == 0 { i as i32 % 3 } else { 3 + i as i32 % 2 };
            }
            let what = format!("{form:?} {} {tokens}", numerics.activations);
            let run = |layer: &Layer, step: &Step| {
                let (_, out) = (0, step.run(&pair.cuda, layer, &layer.on(&pair.cuda)));
                assert_eq!(pair.cuda.device.take_overruns(), Vec::<String>::new(), "{what}");
                out
            };
            // A weight of 0 stands for nothing.
            let mut zero = step.clone();
            zero.mix[3] = 0.0;
            let want = run(&layer, &zero);
            step.ids[3] = 5;
            layer.slots[5] = -1;
            assert_same(&what, &run(&layer, &step), &want);

            let h = WHOLE.hidden;
            let nan_row = |out: &[f32], cause: &str| {
                for (t, (row, want)) in out.chunks(h).zip(want.chunks(h)).enumerate() {
                    if t == 1 {
                        assert!(row.iter().all(|v| v.is_nan()), "{what}: {cause}");
                    } else {
                        assert_same(&format!("{what}: {cause}, token {t}"), row, want);
                    }
                }
            };
            layer.slots[5] = layer.dims.experts as i32 + 1;
            nan_row(&run(&layer, &step), "a slot past the last");
            for id in [6, -1, i32::MAX, i32::MIN] {
                step.ids[3] = id;
                nan_row(&run(&layer, &step), &format!("expert {id}"));
            }
        }
    }
}

#[test]
fn nan_stays_where_it_is() {
    for form in KINDS {
        for (numerics, tokens) in [
            (Numerics::BF16, 4),
            (Numerics::BF16, 12),
            (Numerics::BF16, 40),
            (numerics(DType::Bf16, ActQuant::Checkpoint, true), 12),
            (Numerics::F32, 4),
        ] {
            let what = format!("{form:?} {} {tokens}", numerics.activations);
            let mut layer = Layer::new(6, WHOLE, form, form);
            let mut step = Step::new(6, tokens, WHOLE);
            // A token with a NaN, one with an infinity; a weight row with a NaN, in down of one expert.
            step.x[WHOLE.hidden + 7] = f32::NAN;
            step.x[2 * WHOLE.hidden + 9] = f32::INFINITY;
            let slot = layer.slots[2] as usize;
            match &mut layer.down {
                Matrices::Plain { values, cols, .. } => values[(slot * WHOLE.hidden + 33) * *cols + 5] = f32::NAN,
                Matrices::Quantised(synth, _) => match synth.spec.scheme {
                    Scheme::Nvfp4(_) => synth.group_scales[(slot * WHOLE.hidden + 33) * WHOLE.inter / 16 + 3] = 0x7F,
                    _ => synth.codes[(slot * WHOLE.hidden + 33) * WHOLE.inter + 100] = 0xFF,
                },
            }
            let Some(pair) = Pair::new(&what, numerics, work(tokens, WHOLE)) else { return };
            let (cpu, cuda) = pair.run(|rig| step.run(rig, &layer, &layer.on(rig)));
            for (i, (cuda, cpu)) in cuda.iter().zip(&cpu).enumerate() {
                // An infinity can meet a rounding that is NaN on one side only: inf - inf in another order.
                if i / WHOLE.hidden != 2 {
                    let at = (i / WHOLE.hidden, i % WHOLE.hidden);
                    assert_eq!(cuda.is_nan(), cpu.is_nan(), "{what}: {at:?} is {cuda} for {cpu}");
                }
            }
            assert!(cpu.iter().any(|v| v.is_nan()) && cpu.iter().any(|v| v.is_finite()), "{what}");
        }
    }
}

#[test]
fn the_router_chooses_what_the_cpu_arm_chooses() {
    let mut shapes: Vec<(usize, usize, usize)> =
        moe::cases().iter().map(|c| (c.tokens, c.dims.experts, c.dims.top_k)).collect();
    shapes.sort_unstable();
    shapes.dedup();
    // Past the logits that are kept in registers, every expert, more choices than lanes.
    shapes.extend([(5, 256, 8), (3, 300, 40), (2, 1000, 3), (2, 256, 256), (9, 37, 37)]);
    for (seed, (tokens, experts, top_k)) in shapes.into_iter().enumerate() {
        for (logits, act) in
            [(DType::F32, DType::F32), (DType::Bf16, DType::Bf16), (DType::F32, DType::Bf16), (DType::Bf16, DType::F32)]
        {
            let what = format!("{tokens} x {experts}, {top_k}: {logits} {act}");
            let numerics = numerics(act, ActQuant::Off, false);
            let Some(pair) = Pair::new(&what, numerics, (tokens * experts * top_k) as u64) else { return };
            let mut rng = rng(seed as u64);
            let mut x = random(&mut rng, logits, tokens * experts, 3.0);
            // Ties, signed zeros, and values that are none.
            for (i, v) in x.iter_mut().enumerate() {
                match i % 11 {
                    3 => *v = 0.5,
                    5 => *v = -0.0,
                    6 => *v = 0.0,
                    _ => {}
                }
            }
            for (row, odd) in x.chunks_mut(experts).zip([1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY]) {
                if odd != 1.0 {
                    row[experts / 2] = odd;
                }
            }
            if tokens > 4 {
                x[4 * experts..5 * experts].fill(f32::NAN);
            }
            let ((ids, weights), (cuda_ids, cuda_weights)) = pair.run(|rig| {
                let cx = rig.cx();
                let routing = moe::route(&cx, &tensor(&cx, logits, &[tokens, experts], &x), top_k).unwrap();
                (routing.ids.read::<i32>().unwrap(), values(&routing.weights))
            });
            assert_same(&what, &cuda_ids, &ids);
            for (i, (got, want)) in cuda_weights.iter().zip(&weights).enumerate() {
                assert_eq!(got.is_nan(), want.is_nan(), "{what}: weight {i}");
                // exp differs by 2 ulps between the libraries, sums and quotients by a few; bf16 by one neighbour.
                let bound = if act == DType::F32 { 1e-6 } else { 2f32.powi(-7) };
                assert!(want.is_nan() || (got - want).abs() <= bound * want + 1e-37, "{what}: {i} is {got} for {want}");
            }
        }
    }
}

#[test]
fn the_shared_expert_is_added_as_on_the_cpu() {
    for (seed, (tokens, hidden)) in [(1, 1), (3, 33), (5, 64), (2, 2048), (7, 4104)].into_iter().enumerate() {
        for act in [DType::F32, DType::Bf16] {
            let what = format!("{tokens} x {hidden} {act}");
            let Some(pair) = Pair::new(&what, numerics(act, ActQuant::Off, false), (tokens * hidden) as u64) else {
                return;
            };
            let mut rng = rng(seed as u64);
            let [routed, shared] = [0, 1].map(|_| random(&mut rng, act, tokens * hidden, 2.0));
            let mut gate = random(&mut rng, act, tokens, 8.0);
            gate[0] = if seed % 2 == 0 { -1e30 } else { 1e30 };
            let (cpu, cuda) = pair.run(|rig| {
                let cx = rig.cx();
                let t = |values: &[f32], cols: usize| tensor(&cx, act, &[tokens, cols], values);
                let mut out = t(&routed, hidden);
                moe::combine_shared(&cx, &mut out, &t(&shared, hidden), &t(&gate, 1)).unwrap();
                values(&out)
            });
            // One exp, one quotient, a product and a sum; in bf16 the last rounding may fall to the other side.
            let bound = if act == DType::F32 { 4e-7 } else { 2f32.powi(-7) };
            for (i, (got, want)) in cuda.iter().zip(&cpu).enumerate() {
                let size = routed[i].abs() + shared[i].abs();
                assert!((got - want).abs() <= bound * size, "{what}: element {i} is {got} for {want}");
            }
            let differing = cuda.iter().zip(&cpu).filter(|(a, b)| a != b).count();
            assert!(act == DType::F32 || differing <= cpu.len() / 100 + 1, "{what}: {differing} differ");
        }
    }
}
