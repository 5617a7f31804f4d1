//! Element-wise activations: SiLU of a gate times up, the output gate of attention, and the two gates of a GDN layer.

use serde::Serialize;

use crate::device::Arm;
use crate::error::{Error, Result};
use crate::num::DType;
use crate::ops::attention::AttnDims;
use crate::ops::cost::Unit;
use crate::ops::{Cost, Cx, check, launch, reference};
use crate::tensor::Tensor;
use crate::with_elem;

const SILU_MUL: &str = "silu_mul";
const SIGMOID_MUL: &str = "sigmoid_mul";
const GDN_GATES: &str = "gdn_gates";

/// The gates of a GDN layer, each f32 `[T, value heads]`.
#[derive(Debug)]
pub struct Gates {
    /// The log of the decay, not above 0.
    pub g: Tensor,
    /// How much of the prediction error is written, in 0..1.
    pub beta: Tensor,
}

/// Which of the activations a case or a cost is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// [`silu_mul`].
    SiluMul,
    /// [`sigmoid_mul`].
    SigmoidMul,
    /// [`gdn_gates`].
    GdnGates,
}

/// One shape of the tests and benches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Case {
    /// Its name.
    pub name: &'static str,
    /// The op.
    pub kind: Kind,
    /// Rows.
    pub rows: usize,
    /// Elements of a row of the result (of each of the two, for [`Kind::GdnGates`]).
    pub width: usize,
    /// The activations' type.
    pub dtype: DType,
}

/// The shapes tests and benches share.
pub fn cases() -> Vec<Case> {
    let case = |name, kind, rows, width, dtype| Case { name, kind, rows, width, dtype };
    vec![
        case("silu_mul_one", Kind::SiluMul, 1, 1, DType::F32),
        case("silu_mul_odd", Kind::SiluMul, 3, 37, DType::Bf16),
        case("silu_mul_27b", Kind::SiluMul, 64, 17408, DType::Bf16),
        case("sigmoid_mul_one_row", Kind::SigmoidMul, 1, 256, DType::F32),
        case("sigmoid_mul_27b", Kind::SigmoidMul, 64, 6144, DType::Bf16),
        case("gdn_gates_one", Kind::GdnGates, 1, 1, DType::F32),
        case("gdn_gates_27b", Kind::GdnGates, 64, 48, DType::Bf16),
    ]
}

/// The least work of one call on `rows` rows of `width` results.
pub fn cost(kind: Kind, rows: usize, width: usize, dtype: DType) -> Cost {
    let elements = (rows * width) as u64;
    // (operations per element, bytes of activations per element, f32 parameters per column)
    let (flops, bytes, parameters) = match kind {
        Kind::SiluMul | Kind::SigmoidMul => (5, 3 * dtype.bytes(), 0),
        Kind::GdnGates => (10, 2 * dtype.bytes() + 2 * DType::F32.bytes(), 2),
    };
    Cost {
        flops: flops * elements,
        resident_bytes: 4 * parameters * width as u64,
        activation_bytes: bytes * elements,
        unit: Unit::F32,
    }
}

/// `silu(gate) * up` of fused rows `[T, 2I]`, gate first, in place: the first I columns of each row become the result,
/// rounded once, and the others are left. A buffer of its own would be a third of an MLP's transient bytes.
pub fn silu_mul(cx: &Cx, gate_up: &mut Tensor) -> Result<()> {
    let (rows, cols) = check::matrix(SILU_MUL, "gate_up", gate_up)?;
    if cols % 2 != 0 {
        return Err(Error::shape(SILU_MUL, format!("gate_up has {cols} columns, must be gate and up, equally wide")));
    }
    check::tensor(SILU_MUL, "gate_up", gate_up, cx.numerics.activations, &[rows, cols])?;
    cx.note(SILU_MUL, cost(Kind::SiluMul, rows, cols / 2, gate_up.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => with_elem!(SILU_MUL, gate_up.dtype(), E => {
            reference::activation::silu_mul::<E>(gate_up.host_mut()?, cols / 2);
            Ok(())
        }),
        Arm::Cuda(cuda) => launch::activation::silu_mul(cuda, gate_up),
        Arm::Plan => Ok(()),
    }
}

/// The output gate of attention, in place: `x *= sigmoid(gate)`. x `[T, heads*d]`; qkv `[T, 2*heads*d + 2*kv_heads*d]`
/// holds the gate of head h at columns `h*2d + d .. (h+1)*2d`.
pub fn sigmoid_mul(cx: &Cx, x: &mut Tensor, qkv: &Tensor, dims: AttnDims) -> Result<()> {
    let AttnDims { heads, kv_heads, head_dim, .. } = dims;
    let (rows, _) = check::matrix(SIGMOID_MUL, "x", x)?;
    check::tensor(SIGMOID_MUL, "x", x, cx.numerics.activations, &[rows, heads * head_dim])?;
    let fused = 2 * (heads + kv_heads) * head_dim;
    check::tensor(SIGMOID_MUL, "qkv", qkv, cx.numerics.activations, &[rows, fused])?;
    cx.note(SIGMOID_MUL, cost(Kind::SigmoidMul, rows, heads * head_dim, qkv.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => with_elem!(SIGMOID_MUL, qkv.dtype(), E => {
            reference::activation::sigmoid_mul::<E>(x.host_mut()?, qkv.host()?, heads, head_dim, fused);
            Ok(())
        }),
        Arm::Cuda(cuda) => launch::activation::sigmoid_mul(cuda, x, qkv, dims),
        Arm::Plan => Ok(()),
    }
}

/// The gates of a GDN layer: `beta = sigmoid(b)` and `g = -exp(a_log) * softplus(a + dt_bias)`, in f32. A row of ba,
/// `[T, 2*heads]`, holds b first, then a; a_log and dt_bias are f32 `[heads]`.
pub fn gdn_gates(cx: &Cx, ba: &Tensor, a_log: &Tensor, dt_bias: &Tensor) -> Result<Gates> {
    let (rows, cols) = check::matrix(GDN_GATES, "ba", ba)?;
    let heads = a_log.len();
    check::tensor(GDN_GATES, "ba", ba, cx.numerics.activations, &[rows, 2 * heads])?;
    check::tensor(GDN_GATES, "a_log", a_log, DType::F32, &[cols / 2])?;
    check::tensor(GDN_GATES, "dt_bias", dt_bias, DType::F32, &[heads])?;
    let mut gates = Gates {
        g: cx.alloc(GDN_GATES, "g", DType::F32, &[rows, heads])?,
        beta: cx.alloc(GDN_GATES, "beta", DType::F32, &[rows, heads])?,
    };
    cx.note(GDN_GATES, cost(Kind::GdnGates, rows, heads, ba.dtype()));
    match cx.device.arm() {
        Arm::Cpu(_) => with_elem!(GDN_GATES, ba.dtype(), E => {
            let (g, beta) = (gates.g.host_mut()?, gates.beta.host_mut()?);
            reference::activation::gdn_gates::<E>(ba.host()?, a_log.host()?, dt_bias.host()?, g, beta);
            Ok(gates)
        }),
        Arm::Cuda(cuda) => {
            launch::activation::gdn_gates(cuda, ba, a_log, dt_bias, &mut gates)?;
            Ok(gates)
        }
        Arm::Plan => Ok(gates),
    }
}
