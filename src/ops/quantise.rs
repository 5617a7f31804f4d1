//! Quantising the rows of an activation as a checkpoint asks for, for the product with a quantised weight.
//!
//! All arithmetic is f32, as in the fake quantisation of compressed-tensors (`calculate_qparams`,
//! `_quantize_dequantize`) on an f32 model, in its order:
//!
//! | form | scale | code |
//! |---|---|---|
//! | tensor | stored | `e4m3(x / scale)` |
//! | token, group of 128 | `amax / 448`; 2^-23 where that is 0 | `e4m3(x / scale)` |
//! | NVFP4, a global that divides | `s = e4m3(global * (amax / 6))`; 0.125 where that is 0 | `e2m1(x / (s / global))` |
//! | NVFP4, a global that multiplies | `s = e4m3(amax / (6 * global))`; 0.125 where that is 0 | `e2m1(x / (s * global))` |
//!
//! Codes saturate. Where the peers differ:
//!
//! - compressed-tensors computes dynamic scales in the model's own type, so a bf16 model's are rounded to bf16; serving
//!   kernels keep f32, as here. Its fake quantisation by token takes one scale for all rows of an input of two dimensions,
//!   which is what an expert and a shared expert get; a scale per row, as here, is what its name says, and what keeps a
//!   row from depending on its company.
//! - modelopt multiplies by `448 / amax` where this divides by `amax / 448`, which moves a code only where a value lies
//!   within a rounding of a midpoint, and takes 1 for an amax below 2^-24.
//!
//! A NaN makes what shares its scale NaN (by a stored scale, itself alone), and so does an infinity where the scale is f32
//! and dynamic; elsewhere an infinity saturates, as the peers' does.

use crate::device::Arm;
use crate::error::{Error, Result};
use crate::num::DType;
use crate::ops::cost::{Cost, Unit};
use crate::ops::scheme::{ActScheme, Global};
use crate::ops::weight::{BLOCK, NVFP4_GROUP};
use crate::ops::{Cx, launch, reference, with_elem};
use crate::tensor::{Tensor, View};

const OP: &str = "quantise";

/// How rows are quantised, with what is stored for it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Form {
    /// To e4m3 by this one scale.
    Fp8Tensor(f32),
    /// To e4m3 by a scale per row.
    Fp8Token,
    /// To e4m3 by a scale per row and 128 columns, the last group partial.
    Fp8Group,
    /// To e2m1 by an e4m3 scale per 16 columns under this global, in its sense.
    Nvfp4(f32, Global),
}

impl Form {
    /// The scheme without the numbers.
    pub fn scheme(&self) -> ActScheme {
        match self {
            Form::Fp8Tensor(_) => ActScheme::Fp8Tensor,
            Form::Fp8Token => ActScheme::Fp8Token,
            Form::Fp8Group => ActScheme::Fp8Group,
            Form::Nvfp4(..) => ActScheme::Nvfp4,
        }
    }
}

/// Quantised rows.
#[derive(Debug)]
pub struct Quantised {
    /// u8 `[T, K]`, or `[T, K/2]` for NVFP4, the even column in the low nibble. Where [`widened`], bf16 `[T, K]`: NVFP4 codes
    /// times their groups' scales.
    pub codes: Tensor,
    /// Per token f32 `[T, 1]`, per group f32 `[T, ceil(K/128)]`, NVFP4 u8 e4m3 `[T, K/16]`; none by a stored scale, and none
    /// where widened.
    pub scales: Option<Tensor>,
    /// How.
    pub form: Form,
}

impl Quantised {
    /// Rows.
    pub fn rows(&self) -> usize {
        self.codes.rows()
    }
}

/// Columns of one row's codes.
pub fn code_cols(scheme: ActScheme, cols: usize) -> usize {
    match scheme {
        ActScheme::None => 0,
        ActScheme::Fp8Tensor | ActScheme::Fp8Token | ActScheme::Fp8Group => cols,
        ActScheme::Nvfp4 => cols / 2,
    }
}

/// Element type and number of one row's scales.
pub fn scale_cols(scheme: ActScheme, cols: usize) -> (DType, usize) {
    match scheme {
        ActScheme::None | ActScheme::Fp8Tensor => (DType::F32, 0),
        ActScheme::Fp8Token => (DType::F32, 1),
        ActScheme::Fp8Group => (DType::F32, cols.div_ceil(BLOCK)),
        ActScheme::Nvfp4 => (DType::U8, cols / NVFP4_GROUP),
    }
}

/// Bytes of one row's codes and scales; 0 where nothing is quantised.
pub fn row_bytes(scheme: ActScheme, cols: usize) -> u64 {
    let (dtype, scales) = scale_cols(scheme, cols);
    code_cols(scheme, cols) as u64 + scales as u64 * dtype.bytes()
}

/// One read of `x`, one write of codes and scales; a magnitude, a division and a rounding for each element.
pub fn cost(tokens: usize, cols: usize, x: DType, scheme: ActScheme) -> Cost {
    let elements = (tokens * cols) as u64;
    Cost {
        flops: 3 * elements,
        resident_bytes: 0,
        activation_bytes: elements * x.bytes() + tokens as u64 * row_bytes(scheme, cols),
        unit: Unit::F32,
    }
}

/// As [`cost`], of rows that are [`widened`].
pub fn widened_cost(tokens: usize, cols: usize, x: DType) -> Cost {
    let elements = (tokens * cols) as u64;
    let activation_bytes = elements * (x.bytes() + DType::Bf16.bytes());
    Cost { activation_bytes, ..cost(tokens, cols, x, ActScheme::Nvfp4) }
}

/// Quantises the rows of `x`, `[T, K]` f32 or bf16. NVFP4 needs K to be a multiple of 16, a stored scale must be finite
/// and positive; anything else is an error.
pub fn quantise(cx: &Cx, x: View, form: Form) -> Result<Quantised> {
    let (tokens, cols, scheme) = (x.rows(), x.cols(), form.scheme());
    check(x, form)?;
    let codes = cx.alloc(OP, "codes", DType::U8, &[tokens, code_cols(scheme, cols)])?;
    let (dtype, count) = scale_cols(scheme, cols);
    let scales = match count {
        0 => None,
        _ => Some(cx.alloc(OP, "scales", dtype, &[tokens, count])?),
    };
    cx.note(OP, cost(tokens, cols, x.dtype(), scheme));
    fill(cx, x, Quantised { codes, scales, form })
}

/// As [`quantise`] to NVFP4, and each code times its group's scale as bf16, which is exact: for a product that reads every
/// row many times. Three and a half times the bytes.
pub fn widened(cx: &Cx, x: View, form: Form) -> Result<Quantised> {
    let (tokens, cols) = (x.rows(), x.cols());
    check(x, form)?;
    if form.scheme() != ActScheme::Nvfp4 {
        return Err(Error::shape(OP, format!("rows in {form:?} are not widened, must be NVFP4")));
    }
    let codes = cx.alloc(OP, "widened", DType::Bf16, &[tokens, cols])?;
    cx.note(OP, widened_cost(tokens, cols, x.dtype()));
    fill(cx, x, Quantised { codes, scales: None, form })
}

fn fill(cx: &Cx, x: View, mut to: Quantised) -> Result<Quantised> {
    match cx.device.arm() {
        Arm::Cpu(_) => reference::quantise::rows(x, to.form, &mut to.codes, to.scales.as_mut())?,
        Arm::Cuda(cuda) => launch::quantise::rows(cuda, x, to.form, &mut to.codes, to.scales.as_mut())?,
        Arm::Plan => {}
    }
    Ok(to)
}

fn check(x: View, form: Form) -> Result<()> {
    let (tokens, cols) = (x.rows(), x.cols());
    let err = |what: String| Err(Error::shape(OP, what));
    if tokens * cols == 0 || x.from() + cols > x.pitch() {
        return err(format!(
            "x is [{tokens}, {cols}] from column {} of {}, must be inside and not empty",
            x.from(),
            x.pitch()
        ));
    }
    if form.scheme() == ActScheme::Nvfp4 && cols % NVFP4_GROUP != 0 {
        return err(format!("x is [{tokens}, {cols}], NVFP4 needs a multiple of {NVFP4_GROUP} columns"));
    }
    if let Form::Fp8Tensor(scale) | Form::Nvfp4(scale, _) = form
        && !(scale.is_finite() && scale > 0.0)
    {
        return err(format!("the stored scale is {scale}, must be finite and positive"));
    }
    with_elem!(OP, x.dtype(), X => { let _: Option<X> = None; Ok(()) })
}

/// A shape that tests and benches share.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// What is special about it.
    pub name: &'static str,
    /// Rows.
    pub tokens: usize,
    /// Columns.
    pub cols: usize,
    /// The rows' type.
    pub x: DType,
}

/// One row, many rows, one group, a partial last group, widths of published models.
pub fn cases() -> Vec<Case> {
    let shapes = [
        ("one group", 1, 16),
        ("partial group", 3, 80),
        ("a group and a part", 5, 144),
        ("whole groups", 2, 256),
        ("decode", 1, 5120),
        ("prefill", 64, 2048),
    ];
    let mut cases = Vec::new();
    for x in [DType::F32, DType::Bf16] {
        cases.extend(shapes.map(|(name, tokens, cols)| Case { name, tokens, cols, x }));
    }
    cases
}
