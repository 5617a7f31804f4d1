//! Experts of every scheme: the same bits as the linear layers they are made of.

use highwater::num::{DType, bf16};
use highwater::ops::linear::{Projection, linear, linear_as};
use highwater::ops::moe::{self, Dims, Experts, Inputs, Routing};
use highwater::ops::scheme::{ActScheme, Grain, Scheme};
use highwater::ops::weight::{LinearSpec, Weight};
use highwater::ops::{ActQuant, Cx, Limits, Meter, Numerics};
use highwater::tensor::Tensor;

use super::weight::{SCHEMES, Synth};
use super::world::{blank, card, cx, device, ints, message, numerics, plan, tensor, uniform};
use super::{rng, values};

/// Widths with a partial FP8 block each, and whole NVFP4 groups.
const DIMS: Dims = Dims { hidden: 160, inter: 144, experts: 3, top_k: 2 };
const TOKENS: usize = 7;

/// Codes of a layer's experts.
struct Layer {
    /// Gate and up of every expert, in turns.
    gate_up: Synth,
    down: Synth,
    /// Input scales of gate and up (the same), and of down, by expert.
    inputs: [Vec<f32>; 2],
}

impl Layer {
    fn new(seed: u64, scheme: Scheme, act: ActScheme) -> Layer {
        let Dims { hidden, inter, experts, .. } = DIMS;
        let mut rng = rng(seed);
        let spec = |rows, cols, segment_rows| LinearSpec { rows, cols, scheme, act, segment_rows };
        let gate_up = Synth::new(&mut rng, spec(experts * 2 * inter, hidden, inter));
        let down = Synth::new(&mut rng, spec(experts * hidden, inter, hidden));
        let inputs = [gate_up.input, down.input].map(|base| [1.0, 1.5, 0.7].map(|f| base * f).to_vec());
        Layer { gate_up, down, inputs }
    }

    fn gate(&self, e: usize) -> Synth {
        Synth { input: self.inputs[0][e], ..self.gate_up.slice(e * 2 * DIMS.inter, DIMS.inter) }
    }

    fn up(&self, e: usize) -> Synth {
        Synth { input: self.inputs[0][e], ..self.gate_up.slice((e * 2 + 1) * DIMS.inter, DIMS.inter) }
    }

    fn down(&self, e: usize) -> Synth {
        Synth { input: self.inputs[1][e], ..self.down.slice(e * DIMS.hidden, DIMS.hidden) }
    }

    fn fused(&self, cx: &Cx) -> Experts {
        let device = cx.device;
        Experts {
            gate_up: self.gate_up.on_each(device, &self.inputs[0]).into(),
            down: self.down.on_each(device, &self.inputs[1]),
            slots: ints(device, &[0, 1, 2]),
        }
    }
}

fn routing(cx: &Cx, ids: &[i32], mix: &[f32]) -> Routing {
    let shape = [ids.len() / DIMS.top_k, DIMS.top_k];
    let ids = ints(cx.device, ids).reshape(&shape).unwrap();
    Routing { ids, weights: tensor(cx.device, DType::F32, &shape, mix) }
}

/// Token t goes to experts t mod 3 and t + 1 mod 3.
fn turns() -> (Vec<i32>, Vec<f32>) {
    let ids = (0..TOKENS as i32).flat_map(|t| [t % 3, (t + 1) % 3]).collect();
    (ids, [0.75, 0.25].repeat(TOKENS))
}

/// The layer's output from linear layers one by one: f32 gate and up, SwiGLU and each output rounded to `act`.
fn one_by_one(cx: &Cx, x: &[f32], ids: &[i32], mix: &[f32], expert: impl Fn(usize) -> [Weight; 3]) -> Vec<f32> {
    let (act, hidden) = (cx.numerics.activations, DIMS.hidden);
    let round = |v: f32| if act == DType::Bf16 { bf16::from_f32(v).to_f32() } else { v };
    let experts: Vec<[Weight; 3]> = (0..DIMS.experts).map(expert).collect();
    let mut out = Vec::new();
    for (t, x) in x.chunks(hidden).enumerate() {
        let x = tensor(cx.device, act, &[1, hidden], x);
        let outputs: Vec<Vec<f32>> = ids[t * 2..][..2]
            .iter()
            .map(|&e| {
                let [gate, up, down] = &experts[e as usize];
                let gate = values(&linear_as(cx, x.view(), gate, "gate", DType::F32).unwrap());
                let up = values(&linear_as(cx, x.view(), up, "up", DType::F32).unwrap());
                let h: Vec<f32> = gate.iter().zip(up).map(|(g, u)| round(g / (1.0 + (-g).exp()) * u)).collect();
                let h = tensor(cx.device, act, &[1, DIMS.inter], &h);
                values(&linear(cx, h.view(), down, "down").unwrap())
            })
            .collect();
        out.extend((0..hidden).map(|i| round(mix[2 * t] * outputs[0][i] + mix[2 * t + 1] * outputs[1][i])));
    }
    out
}

/// Numerics of both activation types, with inputs quantised and not.
fn every_numerics() -> Vec<Numerics> {
    let mut all = Vec::new();
    for act_quant in [ActQuant::Off, ActQuant::Checkpoint] {
        all.extend([DType::F32, DType::Bf16].map(|d| Numerics { act_quant, ..numerics(d) }));
    }
    all
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn input(cx: &Cx, seed: u64) -> (Vec<f32>, Tensor) {
    let x = uniform(&mut rng(seed), TOKENS * DIMS.hidden, 2.0);
    let t = tensor(cx.device, cx.numerics.activations, &[TOKENS, DIMS.hidden], &x);
    (values(&t), t)
}

#[test]
fn experts_are_their_linear_layers_bit_for_bit() {
    let (ids, mix) = turns();
    for (seed, (scheme, act)) in SCHEMES.into_iter().enumerate() {
        let layer = Layer::new(seed as u64, scheme, act);
        for numerics in every_numerics() {
            let (device, meter) = (device(), Meter::default());
            let cx = cx(&device, &meter, numerics);
            let (x, xt) = input(&cx, 100 + seed as u64);
            let r = routing(&cx, &ids, &mix);
            let got = values(&moe::experts(&cx, &xt, &r, &layer.fused(&cx), DIMS.inter).unwrap());
            let want = one_by_one(&cx, &x, &ids, &mix, |e| {
                [layer.gate(e).on(&device), layer.up(e).on(&device), layer.down(e).on(&device)]
            });
            assert!(got.iter().all(|v| v.is_finite()), "{scheme:?}");
            assert_eq!(bits(&got), bits(&want), "{scheme:?} {act:?} {numerics:?}");
        }
    }
}

#[test]
fn gate_and_up_that_are_stored_apart_give_the_same_and_may_differ_in_scheme_and_input() {
    let (ids, mix) = turns();
    let Dims { hidden, inter, experts, .. } = DIMS;
    for (seed, (scheme, act)) in SCHEMES.into_iter().enumerate() {
        let layer = Layer::new(20 + seed as u64, scheme, act);
        // The ups in another scheme, and with input scales of their own.
        let (other, other_act) = SCHEMES[(seed + 2) % SCHEMES.len()];
        let spec =
            LinearSpec { rows: experts * inter, cols: hidden, scheme: other, act: other_act, segment_rows: inter };
        let ups = Synth::new(&mut rng(40 + seed as u64), spec);
        let gates = Synth::new(&mut rng(60 + seed as u64), LinearSpec { scheme, act, ..spec });
        let up_inputs: Vec<f32> = [2.0, 1.0, 0.6].map(|f| ups.input * f).to_vec();
        for numerics in every_numerics() {
            let (device, meter) = (device(), Meter::default());
            let cx = cx(&device, &meter, numerics);
            let (x, xt) = input(&cx, 200 + seed as u64);
            let gate_up =
                Projection::new(vec![gates.on_each(&device, &layer.inputs[0]), ups.on_each(&device, &up_inputs)]);
            let w = Experts { gate_up: gate_up.unwrap(), ..layer.fused(&cx) };
            let got = values(&moe::experts(&cx, &xt, &routing(&cx, &ids, &mix), &w, inter).unwrap());
            let want = one_by_one(&cx, &x, &ids, &mix, |e| {
                let gate = Synth { input: layer.inputs[0][e], ..gates.slice(e * inter, inter) };
                let up = Synth { input: up_inputs[e], ..ups.slice(e * inter, inter) };
                [gate.on(&device), up.on(&device), layer.down(e).on(&device)]
            });
            assert_eq!(bits(&got), bits(&want), "{scheme:?} and {other:?} {numerics:?}");
        }
    }
}

#[test]
fn a_token_does_not_depend_on_its_company() {
    let (ids, mix) = turns();
    for (seed, (scheme, act)) in SCHEMES.into_iter().enumerate() {
        let layer = Layer::new(seed as u64, scheme, act);
        let (device, meter) = (device(), Meter::default());
        let cx = cx(&device, &meter, Numerics::BF16);
        let (x, xt) = input(&cx, 7);
        let w = layer.fused(&cx);
        let whole = values(&moe::experts(&cx, &xt, &routing(&cx, &ids, &mix), &w, DIMS.inter).unwrap());
        for t in 0..TOKENS {
            let row = tensor(&device, DType::Bf16, &[1, DIMS.hidden], &x[t * DIMS.hidden..][..DIMS.hidden]);
            let r = routing(&cx, &ids[2 * t..][..2], &mix[2 * t..][..2]);
            let alone = values(&moe::experts(&cx, &row, &r, &w, DIMS.inter).unwrap());
            assert_eq!(bits(&alone), bits(&whole[t * DIMS.hidden..][..DIMS.hidden]), "{scheme:?} token {t}");
        }
    }
}

#[test]
fn plan_and_cpu_take_the_same_bytes_and_the_workspace_holds_the_quantised_inputs() {
    let (ids, mix) = turns();
    for (scheme, act) in SCHEMES {
        let layer = Layer::new(1, scheme, act);
        for numerics in every_numerics() {
            let reports = [device(), plan()].map(|device| {
                let meter = Meter::default();
                let cx = cx(&device, &meter, numerics);
                let x = blank(&device, numerics.activations, &[TOKENS, DIMS.hidden]);
                let (r, w) = (routing(&cx, &ids, &mix), layer.fused(&cx));
                let inputs = Inputs::of(&cx, &w);
                device.begin_step();
                let out = moe::experts(&cx, &x, &r, &w, DIMS.inter).unwrap();
                drop(out);
                (device.report().transient_peak, meter.take(), inputs)
            });
            assert_eq!(reports[0], reports[1], "{scheme:?} {numerics:?}");
            let (peak, meters, inputs) = &reports[0];
            let workspace = |inputs| moe::tactic(&card(), TOKENS, DIMS, numerics.activations, inputs).workspace;
            let out = ((TOKENS * DIMS.hidden) as u64 * numerics.activations.bytes()).next_multiple_of(256);
            assert_eq!(*peak, workspace(*inputs) + out);
            let quantised = numerics.act_quant == ActQuant::Checkpoint;
            assert_eq!(workspace(*inputs) > workspace(Inputs::NONE), quantised);
            // All three experts are expected, and their codes and scales are what is read.
            let bytes = layer.gate_up.on(&plan()).bytes() + layer.down.on(&plan()).bytes();
            let read = meters[0].cost.resident_bytes as f64;
            assert!(read <= bytes as f64 * 1.01 && read >= bytes as f64 * 0.9, "{read} of {bytes}");
        }
    }
}

#[test]
fn a_step_within_limits_needs_no_more_than_the_bound() {
    let published = Dims { hidden: 2048, inter: 512, experts: 256, top_k: 8 };
    for (_, act) in SCHEMES {
        let inputs = Inputs { x: [act, ActScheme::None], h: act };
        for step_tokens in [1, 64, 3000, 8192] {
            let limits = Limits { step_tokens, batch: 8, context: 32_768 };
            let bound = moe::upper_bound(&card(), limits, published, DType::Bf16, inputs);
            for tokens in (1..=step_tokens).step_by(61) {
                let tactic = moe::tactic(&card(), tokens, published, DType::Bf16, inputs);
                assert!(tactic.workspace <= bound, "{act:?}: {tokens} of {step_tokens}");
            }
        }
    }
}

#[test]
fn experts_that_cannot_be_are_refused_with_their_numbers() {
    let (ids, mix) = turns();
    let (device, meter) = (device(), Meter::default());
    let cx = cx(&device, &meter, Numerics::F32);
    let (_, x) = input(&cx, 1);
    let r = routing(&cx, &ids, &mix);
    let nvfp4 = SCHEMES[4];
    let layer = Layer::new(1, nvfp4.0, nvfp4.1);
    let one = Experts { gate_up: layer.gate_up.on(&device).into(), ..layer.fused(&cx) };
    let text = message(moe::experts(&cx, &x, &r, &one, DIMS.inter));
    assert!(text.contains("gate_up") && text.contains("one for each of 3 slots"), "{text}");
    let two = Experts { down: layer.down.on_each(&device, &[1.0, 2.0]), ..layer.fused(&cx) };
    let text = message(moe::experts(&cx, &x, &r, &two, DIMS.inter));
    assert!(text.contains("down") && text.contains("one for each of 3 slots"), "{text}");
    // Blocks that run from one matrix into the next.
    let (rows, cols) = (DIMS.experts * 2 * DIMS.inter, DIMS.hidden);
    let spec =
        LinearSpec { rows, cols, scheme: Scheme::Fp8(Grain::Block), act: ActScheme::Fp8Group, segment_rows: rows };
    let run_on = Synth::new(&mut rng(1), spec);
    let block = Layer::new(1, spec.scheme, spec.act);
    let w = Experts { gate_up: run_on.on(&device).into(), ..block.fused(&cx) };
    let text = message(moe::experts(&cx, &x, &r, &w, DIMS.inter));
    assert!(text.contains("segments of 864 rows") && text.contains("144"), "{text}");
}
