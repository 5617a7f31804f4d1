//! `y = x Wᵀ`: a projection with the weight as checkpoints keep it, `[outputs, inputs]` in any scheme, and no bias.
//!
//! Sums are f32 whatever the operands' types; the result is rounded once, to the output's type. A quantised weight is
//! widened inside the product, a piece at a time. Where weight and numerics ask for it the input is quantised first, and
//! the product is that of the quantised values; many NVFP4 rows are [widened](quantise::widened) where the card's kernel
//! wants them so. No workspace: the vendor library's constant workspace is not an op's, and the other kernels need none.

use crate::device::{Arch, Arm, DeviceSpec};
use crate::error::{Error, Result};
use crate::num::DType;
use crate::ops::cost::{Cost, Unit};
use crate::ops::quantise::{self, Form, Quantised};
use crate::ops::reference::weight::Matrix;
use crate::ops::scheme::{ActScheme, Grain, Scheme};
use crate::ops::weight::{self, LinearSpec, Weight};
use crate::ops::{Cx, launch, reference};
use crate::tensor::{Tensor, View};

const OP: &str = "linear";

/// The shape of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Rows of `x`: tokens.
    pub tokens: usize,
    /// The type of `x`.
    pub x: DType,
    /// The weight; its input scheme is that of the call, none where quantisation is off.
    pub w: LinearSpec,
    /// The type of the result.
    pub out: DType,
}

/// Weights of one input, whose outputs stand side by side: a fused projection where they are stored alike, several
/// products where they are not.
#[derive(Debug)]
pub struct Projection {
    parts: Vec<Weight>,
}

impl Projection {
    /// Whether every part's input is quantised by a scale per token, so that a norm may give codes and nothing else.
    pub fn takes_token_codes(&self, cx: &Cx) -> Result<bool> {
        self.parts.iter().try_fold(true, |all, part| Ok(all && part.form(cx)? == Some(Form::Fp8Token)))
    }

    /// Parts in the order of their columns in the output; an error where there is none or their inputs differ.
    pub fn new(parts: Vec<Weight>) -> Result<Projection> {
        let cols: Vec<usize> = parts.iter().map(Weight::cols).collect();
        if cols.is_empty() || cols.iter().any(|c| *c != cols[0]) {
            return Err(Error::shape(OP, format!("parts of {cols:?} columns, must be one or more, all equal")));
        }
        Ok(Projection { parts })
    }

    /// The parts.
    pub fn parts(&self) -> &[Weight] {
        &self.parts
    }

    /// Output features of all parts.
    pub fn rows(&self) -> usize {
        self.parts.iter().map(Weight::rows).sum()
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.parts[0].cols()
    }

    /// Bytes of all parts, unpadded.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(Weight::bytes).sum()
    }
}

impl From<Weight> for Projection {
    fn from(weight: Weight) -> Projection {
        Projection { parts: vec![weight] }
    }
}

/// The rows that a layer's projections are of.
#[derive(Debug)]
pub enum Input {
    /// Activations `[T, K]`.
    Rows(Tensor),
    /// Their codes alone, for projections that [take them](Projection::takes_token_codes).
    Codes(Quantised),
}

/// The same, borrowed.
#[derive(Clone, Copy)]
enum Source<'a> {
    Rows(View<'a>),
    Codes(&'a Quantised),
}

/// `x` `[T, K]` times the transpose of `w` `[N, K]`, as `[T, N]` activations named `out`. `x` is f32 or bf16; an f32
/// weight needs an f32 `x`. An error where the inner dimensions or the types disagree.
pub fn linear(cx: &Cx, x: View, w: &Weight, out: &'static str) -> Result<Tensor> {
    linear_as(cx, x, w, out, cx.numerics.activations)
}

/// As [`linear`], with the result in `dtype` (f32 or bf16), e.g. that of the logits.
pub fn linear_as(cx: &Cx, x: View, w: &Weight, out: &'static str, dtype: DType) -> Result<Tensor> {
    products(cx, Source::Rows(x), std::slice::from_ref(w), out, dtype)
}

/// As [`linear`], with each part's outputs in its own columns of one result `[T, sum of N]`. The input is quantised once
/// for neighbouring parts that ask for the same.
pub fn project(cx: &Cx, x: View, w: &Projection, out: &'static str) -> Result<Tensor> {
    products(cx, Source::Rows(x), &w.parts, out, cx.numerics.activations)
}

/// As [`project`], of rows or of their codes.
pub fn project_input(cx: &Cx, x: &Input, w: &Projection, out: &'static str) -> Result<Tensor> {
    let x = match x {
        Input::Rows(x) => Source::Rows(x.view()),
        Input::Codes(x) => Source::Codes(x),
    };
    products(cx, x, &w.parts, out, cx.numerics.activations)
}

fn products(cx: &Cx, x: Source, parts: &[Weight], out: &'static str, dtype: DType) -> Result<Tensor> {
    let shapes = parts.iter().map(|w| check(cx, x, w, dtype)).collect::<Result<Vec<_>>>()?;
    let tokens = shapes.first().map_or(0, |shape| shape.tokens);
    let mut y = cx.alloc(OP, out, dtype, &[tokens, parts.iter().map(Weight::rows).sum()])?;
    // One input for all parts, so one form of it.
    let wide = !cx.numerics.batch_invariant && shapes.iter().any(|shape| widens(cx.device.spec(), shape));
    let mut made: Option<Quantised> = None;
    let mut first = 0;
    for (w, shape) in parts.iter().zip(&shapes) {
        let form = w.form(cx)?;
        let x = match (x, form) {
            (Source::Rows(x), Some(form)) => {
                if made.as_ref().is_none_or(|made| made.form != form) {
                    // The old one goes before the new one comes.
                    drop(made.take());
                    let wide = wide && form.scheme() == ActScheme::Nvfp4;
                    made = Some(if wide { quantise::widened(cx, x, form)? } else { quantise::quantise(cx, x, form)? });
                }
                made.as_ref().map_or(Source::Rows(x), Source::Codes)
            }
            (x, _) => x,
        };
        cx.note(OP, cost_of(cx.device.spec(), shape, wide)?);
        match cx.device.arm() {
            Arm::Cpu(_) => {
                let x = match x {
                    Source::Codes(codes) => Matrix::quantised(codes)?,
                    Source::Rows(x) => Matrix::rows(x)?,
                };
                reference::linear::linear(&x, shape, &Matrix::weight(w)?, &mut y, first)?;
            }
            Arm::Cuda(cuda) => {
                let x = match x {
                    Source::Codes(codes) => launch::linear::Input::Quantised(codes),
                    Source::Rows(x) => launch::linear::Input::Rows(x),
                };
                let (spec, invariant) = (cx.device.spec(), cx.numerics.batch_invariant);
                launch::linear::linear(cuda, spec, x, shape, w, (&mut y, first), invariant)?;
            }
            Arm::Plan => {}
        }
        first += w.rows();
    }
    Ok(y)
}

/// Whether many rows of an NVFP4 input enter as bf16, unless rows must not depend on each other: on Hopper, whose tensor
/// cores take them from where the copy engine puts them.
fn widens(spec: &DeviceSpec, shape: &Shape) -> bool {
    let nvfp4 = shape.w.act == ActScheme::Nvfp4 && shape.out == DType::Bf16;
    spec.arch == Arch::Sm90a && nvfp4 && launch::nvfp4_hopper::takes(spec, shape.tokens, shape.w.rows, shape.w.cols)
}

/// One read of the weight as it lies on the card, of `x` as it enters the product, and one write of the result; two
/// operations per weight and row. Where rows may depend on each other.
pub fn cost(spec: &DeviceSpec, shape: &Shape) -> Result<Cost> {
    cost_of(spec, shape, widens(spec, shape))
}

fn cost_of(spec: &DeviceSpec, shape: &Shape, wide: bool) -> Result<Cost> {
    let (t, n, k) = (shape.tokens as u64, shape.w.rows as u64, shape.w.cols as u64);
    let x = match shape.w.act {
        ActScheme::Nvfp4 if wide => k * DType::Bf16.bytes(),
        ActScheme::None => k * shape.x.bytes(),
        act => quantise::row_bytes(act, shape.w.cols),
    };
    Ok(Cost {
        flops: 2 * t * n * k,
        resident_bytes: weight::layout(spec, &shape.w)?.bytes(),
        activation_bytes: t * x + t * n * shape.out.bytes(),
        unit: unit(shape.x, shape.w.scheme, shape.w.act),
    })
}

/// Where a product runs: FP8 tensor cores for e4m3 inputs, bf16 ones for bf16 and NVFP4 inputs, outside them for f32.
pub(crate) fn unit(x: DType, w: Scheme, act: ActScheme) -> Unit {
    match act {
        ActScheme::Fp8Tensor | ActScheme::Fp8Token | ActScheme::Fp8Group => Unit::Fp8,
        ActScheme::Nvfp4 => Unit::Bf16,
        ActScheme::None if x == DType::Bf16 && w != Scheme::Plain(DType::F32) => Unit::Bf16,
        ActScheme::None => Unit::F32,
    }
}

fn check(cx: &Cx, x: Source, w: &Weight, out: DType) -> Result<Shape> {
    let err = |what: String| Err(Error::shape(OP, what));
    let form = w.form(cx)?;
    let (tokens, inputs, dtype) = match x {
        Source::Rows(x) if x.from() + x.cols() > x.pitch() => {
            return err(format!("x is columns {}..{} of a tensor of {}", x.from(), x.from() + x.cols(), x.pitch()));
        }
        Source::Rows(x) => (x.rows(), x.cols(), x.dtype()),
        Source::Codes(x) if form != Some(x.form) || x.form != Form::Fp8Token => {
            return err(format!("x is codes in {:?}, w asks for {form:?}; must be codes by token for both", x.form));
        }
        Source::Codes(x) => (x.rows(), x.codes.cols(), cx.numerics.activations),
    };
    let (outputs, k) = (w.rows(), w.cols());
    if k != inputs || tokens * outputs * k == 0 {
        return err(format!(
            "x is [{tokens}, {inputs}], w is [{outputs}, {k}]; must be [T, K] and [N, K], none of them 0"
        ));
    }
    let scheme = w.spec().scheme;
    let fits = match dtype {
        DType::F32 => true,
        DType::Bf16 => scheme != Scheme::Plain(DType::F32),
        _ => false,
    };
    if !fits {
        return err(format!("x is {dtype}, w is {scheme:?}; must be f32, or bf16 where w is not f32"));
    }
    if !matches!(out, DType::F32 | DType::Bf16) {
        return err(format!("the result is to be {out}, must be f32 or bf16"));
    }
    Ok(Shape { tokens, x: dtype, w: LinearSpec { act: w.act(cx), ..*w.spec() }, out })
}

/// A shape that tests and benches share.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// What is special about it.
    pub name: &'static str,
    /// The shape.
    pub shape: Shape,
}

/// One row, many rows, dimensions that no vector width divides, projections of the small published models; then every
/// scheme with every input it takes, whole and partial blocks, several segments.
pub fn cases() -> Vec<Case> {
    use DType::{Bf16, F32};
    let case = |name, tokens, rows, cols, x, w, out| {
        let w = LinearSpec::plain(rows, cols, w);
        Case { name, shape: Shape { tokens, x, w, out } }
    };
    let mut cases = vec![
        case("one", 1, 1, 1, F32, F32, F32),
        case("odd", 3, 5, 7, F32, F32, F32),
        case("odd-bf16", 9, 17, 33, Bf16, Bf16, Bf16),
        case("gate", 5, 1, 257, F32, Bf16, F32),
        case("tall", 131, 3, 1030, Bf16, Bf16, F32),
        case("wide", 2, 1031, 48, F32, Bf16, F32),
        case("decode", 1, 1024, 1024, Bf16, Bf16, Bf16),
        case("decode-f32", 1, 1024, 1024, F32, F32, F32),
        case("batch", 8, 1024, 1024, Bf16, Bf16, Bf16),
        case("prefill", 256, 1024, 1024, Bf16, Bf16, Bf16),
        case("prefill-f32", 256, 1024, 1024, F32, F32, F32),
        case("down", 64, 1024, 3584, F32, Bf16, F32),
    ];
    cases.extend(quantised_cases());
    cases
}

/// The cases whose weight is quantised.
pub fn quantised_cases() -> Vec<Case> {
    use crate::ops::scheme::Global::{Divides, Multiplies};
    use DType::{Bf16, F32};
    let channel = Scheme::Fp8(Grain::Channel);
    let schemes = [
        ("fp8-tensor", Scheme::Fp8(Grain::Tensor), ActScheme::Fp8Tensor),
        ("fp8-channel", channel, ActScheme::Fp8Token),
        ("fp8-block", Scheme::Fp8(Grain::Block), ActScheme::Fp8Group),
        ("nvfp4-divides", Scheme::Nvfp4(Divides), ActScheme::Nvfp4),
        ("nvfp4-multiplies", Scheme::Nvfp4(Multiplies), ActScheme::Nvfp4),
    ];
    // Rows, columns (those of NVFP4 in whole groups), segment.
    let shapes = [(1, 1, 16, 16, 1), (3, 5, 7, 48, 5), (9, 260, 300, 304, 260), (70, 390, 520, 528, 195)];
    let mut cases = Vec::new();
    for (name, scheme, act) in schemes {
        for (tokens, rows, cols, grouped, segment_rows) in shapes {
            let cols = if matches!(scheme, Scheme::Nvfp4(_)) { grouped } else { cols };
            for (x, act) in [(F32, ActScheme::None), (Bf16, ActScheme::None), (F32, act), (Bf16, act)] {
                let w = LinearSpec { rows, cols, scheme, act, segment_rows };
                cases.push(Case { name, shape: Shape { tokens, x, w, out: x } });
            }
        }
    }
    let head = LinearSpec { act: ActScheme::Fp8Token, scheme: channel, ..LinearSpec::plain(1024, 1024, Bf16) };
    cases.push(Case { name: "decode-fp8", shape: Shape { tokens: 1, x: Bf16, w: head, out: F32 } });
    let nvfp4 = LinearSpec { act: ActScheme::None, scheme: Scheme::Nvfp4(Divides), ..head };
    cases.push(Case { name: "prefill-nvfp4", shape: Shape { tokens: 256, x: Bf16, w: nvfp4, out: Bf16 } });
    // Enough rows on both sides for Hopper's kernel, and none that its tiles divide.
    let many = [
        ("many-nvfp4-divides", Divides, ActScheme::None),
        ("many-nvfp4-multiplies", Multiplies, ActScheme::None),
        ("many-nvfp4-input-divides", Divides, ActScheme::Nvfp4),
        ("many-nvfp4-input-multiplies", Multiplies, ActScheme::Nvfp4),
    ];
    cases.extend(many.map(|(name, sense, act)| {
        let w = LinearSpec { rows: 5633, cols: 256, scheme: Scheme::Nvfp4(sense), act, segment_rows: 5633 };
        Case { name, shape: Shape { tokens: 65, x: Bf16, w, out: Bf16 } }
    }));
    cases
}
