//! Linear layers: sums in another order than the CPU arm's, of the same exact products.

use highwater::device::{Device, DeviceSpec, cards};
use highwater::num::DType;
use highwater::ops::linear::{Case, Projection, Shape, cases, linear, linear_as, project};
use highwater::ops::scheme::{ActScheme, Global, Grain, Scheme};
use highwater::ops::weight::{LinearSpec, Weight};
use highwater::ops::{ActQuant, Meter, Numerics};

use super::{Pair, Where, assert_near, assert_same, place};
use crate::ops::weight::{SCHEMES, Synth};
use crate::ops::{Rig, SLAB_BYTES, bytes, numerics, random, rng, tensor, values};

/// A weight to put on any device.
enum Source {
    Plain(DType, Vec<f32>),
    Coded(Synth),
}

impl Source {
    fn new(seed: u64, spec: LinearSpec) -> Source {
        let mut rng = rng(seed);
        match spec.scheme {
            Scheme::Plain(dtype) => Source::Plain(dtype, random(&mut rng, dtype, spec.rows * spec.cols, 1.0)),
            _ => Source::Coded(Synth::new(&mut rng, spec)),
        }
    }

    fn on(&self, rig: &Rig, spec: &LinearSpec) -> Weight {
        match self {
            Source::Plain(dtype, values) => {
                Weight::plain(tensor(&rig.cx(), *dtype, &[spec.rows, spec.cols], values)).unwrap()
            }
            Source::Coded(synth) => synth.on(&rig.device),
        }
    }
}

/// f32 results differ by their sums' orders alone: a tile adds at most 65 sums of 16 products here, the CPU arm as many, each
/// within half an ulp of a partial sum, and tensor cores may cut where the CPU rounds. A bf16 result may besides fall on the
/// other side of a midpoint: an ulp, 2^-7 of a value at most, of few elements.
#[track_caller]
fn near(what: &str, out: DType, cuda: &[f32], cpu: &[f32]) {
    let (norm, worst) = if out == DType::F32 { (1e-5, 1e-5) } else { (2e-3, 1.0 / 128.0) };
    assert_near(what, cuda, cpu, norm, worst);
}

#[track_caller]
fn compare(pair: &Pair, what: &str, seed: u64, shape: &Shape) {
    let Shape { tokens, x, w: spec, out } = *shape;
    let what = format!("{what}: [{tokens}, {}] {x} by {spec:?} as {out}", spec.cols);
    let source = Source::new(seed, spec);
    let rows = random(&mut rng(1000 + seed), x, tokens * spec.cols, 1.0);
    let (cpu, cuda) = pair.run(|rig| {
        let xt = tensor(&rig.cx(), x, &[tokens, spec.cols], &rows);
        values(&linear_as(&rig.cx(), xt.view(), &source.on(rig, &spec), "y", out).unwrap())
    });
    near(&what, out, &cuda, &cpu);
}

fn work(shape: &Shape) -> u64 {
    (shape.tokens * shape.w.rows * shape.w.cols) as u64
}

/// A pair whose card has `sms` multiprocessors: with few of them wide tiles win, with many narrow ones.
fn pair_of(what: &str, numerics: Numerics, work: u64, sms: u32) -> Option<Pair> {
    let mut pair = Pair::new(what, numerics, work)?;
    if place() == Where::Emulated {
        let spec = DeviceSpec { sms, ..cards::find("h200").unwrap() };
        let device = Device::emulated(spec, SLAB_BYTES).unwrap();
        pair.cuda = Rig { device, meter: Meter::default(), numerics };
    }
    Some(pair)
}

#[test]
fn every_case_is_near_the_cpu_arm() {
    for (seed, Case { name, shape }) in cases().into_iter().enumerate() {
        let numerics = numerics(shape.x, DType::F32);
        if let Some(pair) = Pair::new(name, numerics, work(&shape)) {
            compare(&pair, name, seed as u64, &shape);
        }
    }
}

/// Forms on tensor cores: the weight's scheme and the input's.
const FORMS: [(Scheme, ActScheme); 8] = [
    (Scheme::Plain(DType::Bf16), ActScheme::None),
    (Scheme::Fp8(Grain::Channel), ActScheme::None),
    (Scheme::Fp8(Grain::Channel), ActScheme::Fp8Token),
    (Scheme::Fp8(Grain::Tensor), ActScheme::Fp8Tensor),
    (Scheme::Fp8(Grain::Block), ActScheme::None),
    (Scheme::Fp8(Grain::Block), ActScheme::Fp8Group),
    (Scheme::Nvfp4(Global::Divides), ActScheme::None),
    (Scheme::Nvfp4(Global::Multiplies), ActScheme::Nvfp4),
];

#[test]
fn rows_and_columns_of_every_remainder_are_near_the_cpu_arm_in_every_form() {
    // Tokens, rows, columns: whole tiles and not, one mma, less than a stage, several.
    let shapes = [
        (1, 260, 1040),
        (2, 8, 64),
        (7, 130, 144),
        (8, 8, 256),
        (9, 130, 304),
        (16, 260, 48),
        (33, 130, 1088),
        (64, 8, 128),
        (65, 260, 320),
        (130, 130, 16),
        (130, 200, 576),
        (3, 520, 576),
    ];
    for (i, (scheme, act)) in FORMS.into_iter().enumerate() {
        for (j, (tokens, rows, cols)) in shapes.into_iter().enumerate() {
            // Every tile is some shape's.
            let sms = [1, 2, 132][(i + j) % 3];
            let w = LinearSpec { rows, cols, scheme, act, segment_rows: if rows == 260 { 130 } else { rows } };
            let out = if j % 4 == 3 { DType::Bf16 } else { DType::F32 };
            let shape = Shape { tokens, x: DType::Bf16, w, out };
            let Some(pair) = pair_of("a shape", Numerics::BF16, work(&shape), sms) else { continue };
            compare(&pair, "a shape", (100 * i + j) as u64, &shape);
        }
    }
}

#[test]
fn columns_of_wider_tensors_are_read_and_written_where_they_lie() {
    for (seed, from) in [8, 3].into_iter().enumerate() {
        // Three parts side by side; x begins at a multiple of 16 bytes, and does not.
        let specs = [
            LinearSpec { rows: 21, act: ActScheme::Fp8Token, ..LinearSpec::plain(21, 128, DType::Bf16) },
            LinearSpec { rows: 5, ..LinearSpec::plain(5, 128, DType::Bf16) },
            LinearSpec { rows: 40, act: ActScheme::Nvfp4, ..LinearSpec::plain(40, 128, DType::Bf16) },
        ];
        let schemes = [Scheme::Fp8(Grain::Channel), Scheme::Plain(DType::Bf16), Scheme::Nvfp4(Global::Divides)];
        let specs: Vec<LinearSpec> =
            specs.into_iter().zip(schemes).map(|(s, scheme)| LinearSpec { scheme, ..s }).collect();
        let sources: Vec<Source> = specs.iter().map(|spec| Source::new(seed as u64, *spec)).collect();
        for act_quant in [ActQuant::Checkpoint, ActQuant::Off] {
            let numerics = Numerics { act_quant, ..Numerics::BF16 };
            let Some(pair) = Pair::new("a view", numerics, 11 * 66 * 128) else { continue };
            let wide = random(&mut rng(7), DType::Bf16, 11 * 152, 1.0);
            let (cpu, cuda) = pair.run(|rig| {
                let x = tensor(&rig.cx(), DType::Bf16, &[11, 152], &wide);
                let parts = sources.iter().zip(&specs).map(|(source, spec)| source.on(rig, spec)).collect();
                let w = Projection::new(parts).unwrap();
                values(&project(&rig.cx(), x.columns(from, 128), &w, "y").unwrap())
            });
            near(&format!("from {from}, {act_quant:?}"), DType::Bf16, &cuda, &cpu);
        }
    }
}

/// A weight of small integers under scales of one, in every scheme.
fn integers(scheme: Scheme, rows: usize, cols: usize) -> Synth {
    let spec = LinearSpec { rows, cols, scheme, act: ActScheme::None, segment_rows: rows };
    let mut synth = Synth::new(&mut rng(5), spec);
    // 0, 1, 2, 3 and their negatives; e4m3 has 1, 2 and 3 at 0x38, 0x40 and 0x44, e2m1 at 2, 4 and 5.
    for (i, code) in synth.codes.iter_mut().enumerate() {
        let pick = |i: usize| (i * i + i / 7) % 4;
        *code = match scheme {
            Scheme::Nvfp4(_) => {
                let nibble = |i: usize| [0, 2, 4, 5][pick(i)] | (i as u8 & 1) << 3;
                nibble(2 * i + i / 5) | nibble(2 * i + 1) << 4
            }
            _ => [0, 0x38, 0x40, 0x44][pick(i)] | ((i / 3) as u8 & 1) << 7,
        };
    }
    synth.row_scales.fill(1.0);
    synth.block_scales.fill(1.0);
    synth.group_scales.fill(0x38);
    synth
}

#[test]
fn sums_of_small_integers_are_exact_bits_in_any_order() {
    for scheme in [Scheme::Fp8(Grain::Channel), Scheme::Fp8(Grain::Block), Scheme::Nvfp4(Global::Divides)] {
        for (tokens, sms) in [(1, 132), (20, 132), (20, 1), (70, 1)] {
            let (rows, cols) = (50, 448);
            let Some(pair) = pair_of("integers", Numerics::BF16, (tokens * rows * cols) as u64, sms) else { continue };
            let x: Vec<f32> = (0..tokens * cols).map(|i| ((i * 5 + i / 11) % 9) as f32 - 4.0).collect();
            let synth = integers(scheme, rows, cols);
            let (cpu, cuda) = pair.run(|rig| {
                let x = tensor(&rig.cx(), DType::Bf16, &[tokens, cols], &x);
                values(&linear_as(&rig.cx(), x.view(), &synth.on(&rig.device), "y", DType::F32).unwrap())
            });
            assert_same(&format!("{scheme:?}, {tokens} tokens"), &cuda, &cpu);
        }
    }
}

#[test]
fn each_column_meets_its_own_column() {
    // Token t has a one in column 37 t + 11: its results are that column of the weight, exactly.
    for scheme in [Scheme::Fp8(Grain::Channel), Scheme::Nvfp4(Global::Multiplies)] {
        let (tokens, rows, cols) = (60, 40, 576);
        let Some(pair) = pair_of("one-hot", Numerics::BF16, (tokens * rows * cols) as u64, 12) else { continue };
        let mut synth = integers(scheme, rows, cols);
        let at = |t: usize| (37 * t + 11) % cols;
        let mut x = vec![0.0; tokens * cols];
        (0..tokens).for_each(|t| x[t * cols + at(t)] = 1.0);
        if let Scheme::Nvfp4(_) = scheme {
            // Every group has its own power of two.
            let groups = cols / 16;
            synth.group_scales.iter_mut().enumerate().for_each(|(i, s)| *s = (0x20 + 8 * ((i + i / groups) % 5)) as u8);
        }
        let rig = &pair.cuda;
        let xt = tensor(&rig.cx(), DType::Bf16, &[tokens, cols], &x);
        let y = values(&linear_as(&rig.cx(), xt.view(), &synth.on(&rig.device), "y", DType::F32).unwrap());
        for t in 0..tokens {
            for n in 0..rows {
                assert_eq!(y[t * rows + n], synth.written(n, at(t)), "{scheme:?} [{t}, {n}]");
            }
        }
    }
}

#[test]
fn a_nan_stays_in_its_token_and_a_nan_weight_in_its_row() {
    for (i, (scheme, act)) in SCHEMES.into_iter().chain([(SCHEMES[1].0, ActScheme::None)]).enumerate() {
        let spec = LinearSpec { rows: 33, cols: 256, scheme, act, segment_rows: 33 };
        let mut synth = Synth::new(&mut rng(i as u64), spec);
        if let Scheme::Fp8(_) = scheme {
            synth.codes[7 * 256 + 91] = 0xFF;
        } else {
            synth.group_scales[7 * 16 + 5] = 0x7F;
        }
        let mut x = random(&mut rng(3), DType::Bf16, 12 * 256, 1.0);
        x[4 * 256 + 200] = f32::NAN;
        let Some(pair) = Pair::new("nan", Numerics::BF16, 12 * 33 * 256) else { continue };
        let (cpu, cuda) = pair.run(|rig| {
            let x = tensor(&rig.cx(), DType::Bf16, &[12, 256], &x);
            values(&linear_as(&rig.cx(), x.view(), &synth.on(&rig.device), "y", DType::F32).unwrap())
        });
        let is_nan: Vec<bool> = cuda.iter().map(|v| v.is_nan()).collect();
        assert_same(&format!("{scheme:?} {act:?}"), &is_nan, &cpu.iter().map(|v| v.is_nan()).collect::<Vec<_>>());
        assert!(is_nan[4 * 33] && is_nan[7] && !is_nan[6]);
    }
}

#[test]
fn batch_invariant_rows_are_the_same_bits_alone_and_in_any_batch() {
    let numerics = Numerics { batch_invariant: true, ..Numerics::BF16 };
    for (i, (scheme, act)) in [FORMS[0], FORMS[1], FORMS[2], FORMS[6]].into_iter().enumerate() {
        let (rows, cols) = (136, 1088);
        let Some(pair) = pair_of("batch invariant", numerics, (70 * rows * cols) as u64, 4) else { continue };
        let spec = LinearSpec { rows, cols, scheme, act, segment_rows: rows };
        let source = Source::new(i as u64, spec);
        let x = random(&mut rng(9), DType::Bf16, 70 * cols, 1.0);
        let rig = &pair.cuda;
        let w = source.on(rig, &spec);
        let run = |from: usize, to: usize| {
            let x = tensor(&rig.cx(), DType::Bf16, &[to - from, cols], &x[from * cols..to * cols]);
            bytes(&linear(&rig.cx(), x.view(), &w, "y").unwrap())
        };
        let row_bytes = 2 * rows;
        let whole = run(0, 70);
        for (from, to) in [(0, 1), (33, 34), (69, 70), (3, 12), (40, 60), (0, 65)] {
            assert_eq!(run(from, to), whole[from * row_bytes..to * row_bytes], "{scheme:?} rows {from}..{to}");
        }
    }
}

/// Decode steps of layers in FP8: the few rows that a card may take by kernels of its own, at every count of columns of a
/// product, whole and not; published layers too where a card does the work.
#[test]
fn few_rows_of_codes_are_near_the_cpu_arm() {
    let sizes = [(8, 16), (130, 144), (264, 320), (520, 1088), (1000, 4096), (5120, 6144), (2048, 512)];
    let counts = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 127, 128];
    for (i, (rows, cols)) in sizes.into_iter().enumerate() {
        for (j, tokens) in counts.into_iter().enumerate() {
            let grain = if j % 3 == 0 { Grain::Tensor } else { Grain::Channel };
            let act = if j % 2 == 0 { ActScheme::Fp8Token } else { ActScheme::Fp8Tensor };
            let w = LinearSpec { rows, cols, scheme: Scheme::Fp8(grain), act, segment_rows: rows };
            let shape = Shape { tokens, x: DType::Bf16, w, out: DType::Bf16 };
            let what = format!("{tokens} x {rows} x {cols}");
            let numerics = Numerics { act_quant: ActQuant::Checkpoint, ..numerics(DType::Bf16, DType::F32) };
            if let Some(pair) = Pair::new(&what, numerics, work(&shape)) {
                compare(&pair, &what, 7000 + (100 * i + j) as u64, &shape);
            }
        }
    }
}

/// Prompts of layers in NVFP4: the many rows that a card may take by a kernel of its own, its tiles whole and not, x out of a
/// wider tensor and results beside others. Emulated with one multiprocessor, so that inputs are widened there too.
#[test]
fn many_rows_by_nvfp4_are_near_the_cpu_arm() {
    let sizes =
        [(65, 130, 256), (130, 77, 512), (65, 5641, 256), (257, 1911, 1024), (700, 1161, 512), (257, 5120, 5120)];
    let forms =
        [Global::Divides, Global::Multiplies].map(|sense| [ActScheme::None, ActScheme::Nvfp4].map(|act| (sense, act)));
    for (i, (tokens, rows, cols)) in sizes.into_iter().enumerate() {
        for (j, (sense, act)) in forms.concat().into_iter().enumerate() {
            // The small part before the other leaves no row of results aligned.
            let rows = if (i + j) % 2 == 0 { [rows, 24] } else { [21, rows] };
            let specs =
                rows.map(|rows| LinearSpec { rows, cols, scheme: Scheme::Nvfp4(sense), act, segment_rows: rows });
            let sources = specs.map(|spec| Source::new((100 * i + j) as u64, spec));
            let what = format!("{tokens} x {rows:?} x {cols}, {sense:?} {act:?}");
            let work = (tokens * rows.iter().sum::<usize>() * cols) as u64;
            let Some(pair) = pair_of(&what, Numerics::BF16, work, 1) else { continue };
            let wide = random(&mut rng(j as u64), DType::Bf16, tokens * (cols + 16), 1.0);
            let (cpu, cuda) = pair.run(|rig| {
                let x = tensor(&rig.cx(), DType::Bf16, &[tokens, cols + 16], &wide);
                let parts = sources.iter().zip(&specs).map(|(source, spec)| source.on(rig, spec)).collect();
                values(&project(&rig.cx(), x.columns(8, cols), &Projection::new(parts).unwrap(), "y").unwrap())
            });
            near(&what, DType::Bf16, &cuda, &cpu);
        }
    }
}
