//! Each kernel as the engine calls it: its public op on a device. Operands come in copies, so that a cold cache can be had
//! by going round them. Some rows of the first copy's result are checked against the CPU arm.

use std::ops::Range;
use std::sync::Arc;

use highwater::device::Device;
use highwater::device::cuda::Cuda;
use highwater::error::{Error, Result};
use highwater::num::DType;
use highwater::ops::norm::{self, Gate};
use highwater::ops::quantise::{self, Form};
use highwater::ops::sampler::{self, SampleRow};
use highwater::ops::scheme::{ActScheme, Global, Grain, Scheme};
use highwater::ops::weight::{LinearSpec, Weight};
use highwater::ops::{Cost, Cx, Meter, activation, fill, linear};
use highwater::tensor::Tensor;

use super::drawn::Drawn;
use super::mixers;
use super::operands::{self, FP8_INPUT_SCALE, Maker, NVFP4_INPUT_GLOBAL, floats, input_scale, part, rows};
use super::positions;
use super::rig::context;
use super::shapes::{Draw, Op, Shape};

/// Output features of a product that are checked.
const CHECKED_FEATURES: usize = 64;
/// Tokens that are drawn from one row of logits: what a chi-square needs, and less where a processor emulates the card.
const CARD_DRAWS: usize = 4096;
const HOST_DRAWS: usize = 256;
/// Under the root of a norm.
const EPS: f32 = 1e-6;
/// Relative norm of a difference that rounding to bf16 explains, several times over: a kernel that reads the wrong operand
/// is off by about 1. The tests of ops hold tighter bounds.
pub(super) const ROUNDING: f64 = 0.02;

/// One kernel on one shape, with its operands.
pub(super) trait Work {
    /// Runs it once on a copy of the operands. What it gives is kept until the copies have been gone round.
    fn run(&mut self, cx: &Cx, copy: usize) -> Result<Vec<Tensor>>;

    /// Runs it on the first copy, and some of its rows on `cpu`.
    fn check(&mut self, cx: &Cx, cpu: &Cx) -> Result<Checked>;
}

/// How far a kernel is from the CPU arm: a relative norm or a share of values that differ, and more of rounded values and of
/// drawn tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Checked {
    pub(super) error: f64,
    pub(super) bound: f64,
    /// Of values that are rounded.
    pub(super) apart: Option<Apart>,
    /// Of tokens that are drawn.
    pub(super) drawn: Option<Drawn>,
}

/// How far rounded values are from the CPU arm's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Apart {
    /// The largest difference.
    pub(super) largest: f64,
    /// The same, by the largest of the CPU arm's values.
    pub(super) relative: f64,
    /// The cosine of the two as vectors.
    pub(super) cosine: f64,
}

impl Apart {
    /// Of as many values in either.
    fn of(a: &[f32], b: &[f32]) -> Apart {
        let pairs = || a.iter().zip(b).map(|(a, b)| (f64::from(*a), f64::from(*b)));
        // A NaN is the largest difference there is.
        let most = |values: &mut dyn Iterator<Item = f64>| {
            values.fold(0.0, |most: f64, value| if value.is_nan() { f64::INFINITY } else { most.max(value) })
        };
        let largest = most(&mut pairs().map(|(a, b)| (a - b).abs()));
        let scale = most(&mut pairs().map(|(_, b)| b.abs()));
        let dot = |of: fn((f64, f64)) -> f64| pairs().map(of).sum::<f64>();
        let cosine = dot(|(a, b)| a * b) / (dot(|(a, _)| a * a) * dot(|(_, b)| b * b)).sqrt();
        Apart { largest, relative: if largest > 0.0 { largest / scale } else { 0.0 }, cosine }
    }

    /// The worse of each.
    fn and(self, other: Apart) -> Apart {
        Apart {
            largest: self.largest.max(other.largest),
            relative: self.relative.max(other.relative),
            cosine: if other.cosine < self.cosine || other.cosine.is_nan() { other.cosine } else { self.cosine },
        }
    }
}

impl Checked {
    pub(super) fn passed(&self) -> bool {
        self.error <= self.bound && self.drawn.is_none_or(|drawn| drawn.passed())
    }

    /// What cannot be compared.
    pub(super) fn wrong() -> Checked {
        Checked { error: f64::INFINITY, bound: ROUNDING, ..Checked::default() }
    }

    /// Rounded values: `|a - b| / |b|`, infinite where one is NaN or nothing is compared.
    pub(super) fn near(a: &[f32], b: &[f32]) -> Checked {
        let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
        let norm = square(&mut b.iter().map(|b| f64::from(*b)));
        let off = square(&mut a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
        let ratio = (off / norm).sqrt();
        let sane = a.len() == b.len() && norm > 0.0 && ratio.is_finite();
        let error = if sane { ratio } else { f64::INFINITY };
        Checked { error, bound: ROUNDING, apart: Some(Apart::of(a, b)), drawn: None }
    }

    /// Values that are the same on both arms: the share that differ, which must be 0.
    pub(super) fn same<T: PartialEq>(a: &[T], b: &[T]) -> Checked {
        let differ = a.iter().zip(b).filter(|(a, b)| a != b).count();
        let sane = a.len() == b.len() && !a.is_empty();
        let error = if sane { differ as f64 / a.len() as f64 } else { f64::INFINITY };
        Checked { error, ..Checked::default() }
    }

    /// The worse of two, by how near each is to its bound.
    pub(super) fn and(self, other: Checked) -> Checked {
        let strain = |c: &Checked| if c.bound > 0.0 { c.error / c.bound } else { c.error * f64::MAX.sqrt() };
        let worse = if strain(&self) >= strain(&other) { self } else { other };
        let apart = match (self.apart, other.apart) {
            (Some(a), Some(b)) => Some(a.and(b)),
            (a, b) => a.or(b),
        };
        Checked { apart, drawn: self.drawn.or(other.drawn), ..worse }
    }
}

/// The kernel of a shape with `copies` copies of its operands.
pub(super) fn build(shape: &Shape, make: &Maker, copies: usize) -> Result<Box<dyn Work>> {
    let m = shape.m;
    let each = |one: &dyn Fn() -> Result<Tensor>| (0..copies).map(|_| one()).collect::<Result<Vec<_>>>();
    let row_wise = |kind, cols, width, mean| -> Result<Box<dyn Work>> {
        let xs = each(&|| make.activations(&[m, cols]))?;
        let others = if kind == Kind::Rms { Vec::new() } else { each(&|| make.activations(&[m, cols]))? };
        Ok(Box::new(RowWise { kind, xs, others, ws: each(&|| make.normal(DType::F32, &[width], mean, 0.05))? }))
    };
    Ok(match shape.op {
        Op::Linear { n, k, scheme, act, out } => {
            let spec = LinearSpec { rows: n, cols: k, scheme, act, segment_rows: n };
            let weights = (0..copies).map(|_| make.weight(spec, input_scale(act))).collect::<Result<_>>()?;
            Box::new(Linear { xs: each(&|| make.activations(&[m, k]))?, weights, out })
        }
        Op::Quantise { cols, act } => {
            let form = match act {
                ActScheme::Fp8Token => Form::Fp8Token,
                ActScheme::Fp8Group => Form::Fp8Group,
                ActScheme::Nvfp4 => Form::Nvfp4(NVFP4_INPUT_GLOBAL, Global::Divides),
                ActScheme::Fp8Tensor | ActScheme::None => Form::Fp8Tensor(FP8_INPUT_SCALE),
            };
            Box::new(Quantise { xs: each(&|| make.activations(&[m, cols]))?, form })
        }
        Op::Rms { width } => row_wise(Kind::Rms, width, width, 0.0)?,
        Op::AddRms { width } => row_wise(Kind::AddRms, width, width, 0.0)?,
        Op::Gated { heads, width } => row_wise(Kind::Gated, heads * width, width, 1.0)?,
        Op::SiluMul { width } => {
            // Gates of 24 and ups of 1 stay as they are, however often; what is checked is drawn anew.
            let mut xs = each(&|| make.normal(make.cx.numerics.activations, &[m, 2 * width], 24.0, 3.0))?;
            xs.insert(0, make.activations(&[m, 2 * width])?);
            for x in &mut xs[1..] {
                ones(make, x, width)?;
            }
            Box::new(SiluMul { xs })
        }
        Op::Sample { vocab, decodable, draw } => {
            let logits = each(&|| make.normal(DType::F32, &[m, vocab], 0.0, 3.0))?;
            Box::new(Sample { logits, rows: draws(draw, m, decodable), decodable })
        }
        Op::Fill { cols } => Box::new(Fill { outs: each(&|| make.empty(DType::Bf16, &[m, cols]))? }),
        _ => match positions::build(shape, make, copies)? {
            Some(work) => work,
            None => mixers::build(shape, make, copies)?,
        },
    })
}

/// What one call must move and compute at least: every op's own account on a plan, summed. The unit is that of most
/// operations.
pub(super) fn cost(plan: &Arc<Device>, shape: &Shape) -> Result<Cost> {
    let meter = Meter::default();
    let cx = context(plan, &meter);
    plan.begin_step();
    let mut work = build(shape, &Maker::new(cx), 1)?;
    meter.take();
    drop(work.run(&cx, 0)?);
    let costs = meter.take();
    let sum = |part: fn(&Cost) -> u64| costs.iter().map(|entry| part(&entry.cost)).sum();
    let main = costs.iter().max_by_key(|entry| entry.cost.flops);
    let Some(main) = main else { return Err(Error::shape("bench", format!("{} has no cost", shape.label()))) };
    Ok(Cost {
        flops: sum(|cost| cost.flops),
        resident_bytes: sum(|cost| cost.resident_bytes),
        activation_bytes: sum(|cost| cost.activation_bytes),
        unit: main.cost.unit,
    })
}

/// Sets the second half of each row to 1.
fn ones(make: &Maker, x: &mut Tensor, width: usize) -> Result<()> {
    if !make.cx.device.has_data() {
        return Ok(());
    }
    // bf16's 1, or f32's.
    let row: Vec<u8> = match x.dtype() {
        DType::Bf16 => 0x3F80u16.to_le_bytes().repeat(width),
        _ => 1f32.to_le_bytes().repeat(width),
    };
    (0..x.rows()).try_for_each(|i| x.write((2 * i + 1) * row.len(), &row))
}

/// The first and the last rows: those of a tile's edges.
fn ends(rows: usize) -> Vec<Range<usize>> {
    if rows <= 4 { std::iter::once(0..rows).collect() } else { vec![0..2, rows - 2..rows] }
}

struct Linear {
    xs: Vec<Tensor>,
    weights: Vec<Weight>,
    out: DType,
}

impl Work for Linear {
    fn run(&mut self, cx: &Cx, copy: usize) -> Result<Vec<Tensor>> {
        Ok(vec![linear::linear_as(cx, self.xs[copy].view(), &self.weights[copy], "y", self.out)?])
    }

    fn check(&mut self, cx: &Cx, cpu: &Cx) -> Result<Checked> {
        let y = self.run(cx, 0)?.remove(0);
        let weight = &self.weights[0];
        // Whole blocks of 128 rows, where scales are of blocks.
        let fp8_block = weight.spec().scheme == Scheme::Fp8(Grain::Block);
        let features = weight.rows().min(if fp8_block { 128 } else { CHECKED_FEATURES });
        let weight = part(cpu, weight, features)?;
        let (mut got, mut want) = (Vec::new(), Vec::new());
        for range in ends(y.rows()) {
            let x = rows(cpu, &self.xs[0], range.clone())?;
            want.extend(floats(&linear::linear_as(cpu, x.view(), &weight, "y", self.out)?, 0..range.len())?);
            got.extend(floats(&y, range)?.chunks(y.cols()).flat_map(|row| row[..features].to_vec()));
        }
        Ok(Checked::near(&got, &want))
    }
}

struct Quantise {
    xs: Vec<Tensor>,
    form: Form,
}

impl Work for Quantise {
    fn run(&mut self, cx: &Cx, copy: usize) -> Result<Vec<Tensor>> {
        let quantised = quantise::quantise(cx, self.xs[copy].view(), self.form)?;
        Ok(std::iter::once(quantised.codes).chain(quantised.scales).collect())
    }

    fn check(&mut self, cx: &Cx, cpu: &Cx) -> Result<Checked> {
        let got = self.run(cx, 0)?;
        let mut worst = Checked::default();
        for range in ends(self.xs[0].rows()) {
            let x = rows(cpu, &self.xs[0], range.clone())?;
            let want = quantise::quantise(cpu, x.view(), self.form)?;
            for (got, want) in got.iter().zip(std::iter::once(want.codes).chain(want.scales)) {
                let row = got.cols() * got.dtype().bytes() as usize;
                let bytes = got.read_range::<u8>(range.start * row, range.len() * row)?;
                worst = worst.and(Checked::same(&bytes, &want.read::<u8>()?));
            }
        }
        Ok(worst)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Rms,
    AddRms,
    Gated,
}

/// The norms: `others` is what is added, or the gate.
struct RowWise {
    kind: Kind,
    xs: Vec<Tensor>,
    others: Vec<Tensor>,
    ws: Vec<Tensor>,
}

impl RowWise {
    fn apply(kind: Kind, cx: &Cx, x: &mut Tensor, other: Option<&Tensor>, w: &Tensor) -> Result<Tensor> {
        match (kind, other) {
            (Kind::AddRms, Some(delta)) => norm::add_rms(cx, x, delta, w, EPS, "y"),
            (Kind::Gated, Some(z)) => norm::gated(cx, x, z.view(), w, EPS, Gate::Silu),
            _ => norm::rms(cx, x, w, EPS, "y"),
        }
    }
}

impl Work for RowWise {
    fn run(&mut self, cx: &Cx, copy: usize) -> Result<Vec<Tensor>> {
        let RowWise { kind, xs, others, ws } = self;
        Ok(vec![RowWise::apply(*kind, cx, &mut xs[copy], others.get(copy), &ws[copy])?])
    }

    fn check(&mut self, cx: &Cx, cpu: &Cx) -> Result<Checked> {
        let w = operands::whole(cpu, &self.ws[0])?;
        let (mut got, mut want) = (Vec::new(), Vec::new());
        // Copied first: the residual changes in place.
        for range in ends(self.xs[0].rows()) {
            let mut x = rows(cpu, &self.xs[0], range.clone())?;
            let other = self.others.first().map(|other| rows(cpu, other, range.clone())).transpose()?;
            let y = RowWise::apply(self.kind, cpu, &mut x, other.as_ref(), &w)?;
            want.extend(floats(&y, 0..range.len())?);
        }
        let y = self.run(cx, 0)?.remove(0);
        for range in ends(y.rows()) {
            got.extend(floats(&y, range)?);
        }
        Ok(Checked::near(&got, &want))
    }
}

/// In place: the first tensor is for the check, the others are timed.
struct SiluMul {
    xs: Vec<Tensor>,
}

impl Work for SiluMul {
    fn run(&mut self, cx: &Cx, copy: usize) -> Result<Vec<Tensor>> {
        activation::silu_mul(cx, &mut self.xs[copy + 1])?;
        Ok(Vec::new())
    }

    fn check(&mut self, cx: &Cx, cpu: &Cx) -> Result<Checked> {
        let x = &mut self.xs[0];
        let (mut got, mut want) = (Vec::new(), Vec::new());
        for range in ends(x.rows()) {
            let mut x = rows(cpu, x, range.clone())?;
            activation::silu_mul(cpu, &mut x)?;
            want.extend(floats(&x, 0..range.len())?);
        }
        activation::silu_mul(cx, x)?;
        for range in ends(x.rows()) {
            got.extend(floats(x, range)?);
        }
        Ok(Checked::near(&got, &want))
    }
}

/// The parameters of `rows` rows.
fn draws(draw: Draw, rows: usize, decodable: usize) -> Vec<SampleRow> {
    let chain = SampleRow { temperature: 0.7, top_k: 20, top_p: 0.95, ..SampleRow::greedy() };
    let tokens = decodable.min(1024) as u32;
    let row = match draw {
        Draw::Greedy => SampleRow::greedy(),
        Draw::TopKTopP => chain,
        Draw::Penalties => SampleRow {
            repetition_penalty: 1.1,
            presence_penalty: 0.5,
            prompt_ids: (0..tokens).collect(),
            output_counts: (0..tokens / 4).map(|id| (id, 2)).collect(),
            ..chain
        },
    };
    (0..rows as u64).map(|seed| SampleRow { seed, ..row.clone() }).collect()
}

struct Sample {
    logits: Vec<Tensor>,
    rows: Vec<SampleRow>,
    decodable: usize,
}

impl Sample {
    /// Draws from the first row of logits again and again, each time by a seed and a step of its own, as many rows at once as
    /// are timed.
    fn draw(&self, cx: &Cx) -> Result<Drawn> {
        let on_card = cx.device.as_cuda().is_some_and(Cuda::is_card);
        let draws = if on_card { CARD_DRAWS } else { HOST_DRAWS };
        let (m, vocab) = (self.rows.len(), self.logits[0].cols());
        let first = self.logits[0].read_range::<f32>(0, vocab)?;
        let mut logits = Maker::new(*cx).empty(DType::F32, &[m, vocab])?;
        (0..m).try_for_each(|row| logits.write(row * vocab, &first))?;
        let mut tokens: Vec<i32> = Vec::with_capacity(draws + m);
        let mut rows = self.rows.clone();
        for step in 0..draws.div_ceil(m) as u64 {
            for row in &mut rows {
                row.step = step;
            }
            cx.device.begin_step();
            tokens.extend(sampler::sample(cx, &logits, &rows, self.decodable)?.tokens.read::<i32>()?);
        }
        Ok(Drawn::of(&tokens, &first, &self.rows[0], self.decodable))
    }
}

impl Work for Sample {
    fn run(&mut self, cx: &Cx, copy: usize) -> Result<Vec<Tensor>> {
        let sampled = sampler::sample(cx, &self.logits[copy], &self.rows, self.decodable)?;
        Ok(vec![sampled.tokens, sampled.valid, sampled.logprobs])
    }

    fn check(&mut self, cx: &Cx, cpu: &Cx) -> Result<Checked> {
        let got = self.run(cx, 0)?;
        let (tokens, valid) = (got[0].read::<i32>()?, got[1].read::<u8>()?);
        let mut worst = Checked::same(&valid, &vec![1; self.rows.len()]);
        for range in ends(self.rows.len()) {
            let logits = rows(cpu, &self.logits[0], range.clone())?;
            let want = sampler::sample(cpu, &logits, &self.rows[range.clone()], self.decodable)?;
            worst = worst.and(Checked::same(&tokens[range], &want.tokens.read::<i32>()?));
        }
        drop(got);
        Ok(Checked { drawn: Some(self.draw(cx)?), ..worst })
    }
}

struct Fill {
    outs: Vec<Tensor>,
}

impl Fill {
    fn fill(cx: &Cx, out: &mut Tensor) -> Result<()> {
        let rows = 0..out.rows();
        fill::normal(cx, out, rows, [1, 2], 0, 0.0, 1.0)
    }
}

impl Work for Fill {
    fn run(&mut self, cx: &Cx, copy: usize) -> Result<Vec<Tensor>> {
        Fill::fill(cx, &mut self.outs[copy])?;
        Ok(Vec::new())
    }

    fn check(&mut self, cx: &Cx, cpu: &Cx) -> Result<Checked> {
        self.run(cx, 0)?;
        let first = 0..self.outs[0].rows().min(4);
        let mut want = rows(cpu, &self.outs[0], first.clone())?;
        Fill::fill(cpu, &mut want)?;
        Ok(Checked::same(&floats(&self.outs[0], first.clone())?, &floats(&want, first)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_relative_and_nothing_passes_by_being_empty() {
        assert!(Checked::near(&[1.0, 2.0], &[1.0, 2.0]).passed());
        assert!(Checked::near(&[1.001, 2.0], &[1.0, 2.0]).passed());
        assert!(!Checked::near(&[2.0, 1.0], &[1.0, 2.0]).passed());
        for (a, b) in [(&[][..], &[][..]), (&[f32::NAN], &[1.0]), (&[0.0], &[0.0]), (&[1.0], &[1.0, 2.0])] {
            assert!(!Checked::near(a, b).passed(), "{a:?} {b:?}");
        }
        assert!(Checked::same(&[1, 2], &[1, 2]).passed() && !Checked::same(&[1, 3], &[1, 2]).passed());
        assert!(!Checked::same::<i32>(&[], &[]).passed());
    }

    #[test]
    fn the_worse_of_two_checks_is_kept() {
        let (good, bad) = (Checked::same(&[1], &[1]), Checked::near(&[2.0], &[1.0]));
        assert_eq!(good.and(bad), bad);
        assert_eq!(bad.and(good), bad);
        assert!(!Checked::same(&[1], &[2]).and(Checked::near(&[1.0], &[1.0])).passed());
        let both = Checked::near(&[1.0, 2.5], &[1.0, 2.0]).and(Checked::near(&[8.0], &[9.0])).and(good);
        let apart = both.apart.unwrap();
        assert_eq!((apart.largest, apart.relative), (1.0, 0.25));
    }

    #[test]
    fn differences_are_absolute_relative_to_the_largest_value_and_an_angle() {
        let apart = |a: &[f32], b: &[f32]| Checked::near(a, b).apart.unwrap();
        assert_eq!(apart(&[3.0, 4.0], &[3.0, 4.0]), Apart { largest: 0.0, relative: 0.0, cosine: 1.0 });
        let off = apart(&[3.0, -4.5], &[3.0, -4.0]);
        assert_eq!((off.largest, off.relative), (0.5, 0.125));
        assert!(off.cosine < 1.0 && off.cosine > 0.99, "{off:?}");
        assert!(apart(&[1.0, 0.0], &[0.0, 1.0]).cosine.abs() < 1e-12);
        assert_eq!(apart(&[f32::NAN], &[1.0]).largest, f64::INFINITY);
        assert_eq!(Checked::same(&[1], &[1]).apart, None, "codes and tokens have no distance");
    }

    #[test]
    fn a_sampler_whose_tokens_agree_and_whose_frequencies_do_not_is_wrong() {
        let drawn = |sigma| Checked { drawn: Some(Drawn { draws: 9, sigma }), ..Checked::same(&[1], &[1]) };
        assert!(drawn(2.0).passed() && !drawn(9.0).passed() && !drawn(f64::NAN).passed());
        assert!(!Checked::same(&[1], &[1]).and(drawn(9.0)).passed());
    }

    #[test]
    fn both_ends_of_many_rows_are_checked_and_few_rows_once() {
        assert_eq!(ends(1), vec![0..1; 1]);
        assert_eq!(ends(4), vec![0..4; 1]);
        assert_eq!(ends(5), [0..2, 3..5]);
    }
}
