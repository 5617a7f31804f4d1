//! Element-wise activations, 16 bytes a thread at a time.

use super::grids::{int, long, per16, row_share};
use crate::device::cuda::{Cuda, Kernel, entry};
use crate::error::Result;
use crate::ops::activation::Gates;
use crate::ops::attention::AttnDims;
use crate::tensor::Tensor;

const OP: &str = "activation";

/// The module as every launch here uses it.
pub(super) fn variants() -> Vec<Kernel> {
    vec![Kernel::new(OP, "silu_mul_bf16")]
}

/// `silu(gate) * up` in place of the gates.
pub(crate) fn silu_mul(cuda: &Cuda, gate_up: &mut Tensor) -> Result<()> {
    let (rows, width) = (gate_up.rows(), gate_up.cols() / 2);
    let (grid, shift) = row_share(OP, rows, width.div_ceil(per16(gate_up.dtype())))?;
    let args = [gate_up.arg(), long(rows), long(width), shift];
    cuda.launch(Kernel::new(OP, entry!(gate_up.dtype(), "silu_mul")), grid, &args)
}

/// `x *= sigmoid(gate)`, the gates in `qkv`.
pub(crate) fn sigmoid_mul(cuda: &Cuda, x: &mut Tensor, qkv: &Tensor, dims: AttnDims) -> Result<()> {
    let (grid, shift) = row_share(OP, x.rows(), x.cols().div_ceil(per16(x.dtype())))?;
    let args =
        [x.arg(), qkv.arg(), long(x.rows()), int(OP, dims.heads)?, int(OP, dims.head_dim)?, long(qkv.cols()), shift];
    cuda.launch(Kernel::new(OP, entry!(x.dtype(), "sigmoid_mul")), grid, &args)
}

/// The gates of a GDN layer.
pub(crate) fn gdn_gates(cuda: &Cuda, ba: &Tensor, a_log: &Tensor, dt_bias: &Tensor, gates: &mut Gates) -> Result<()> {
    let (rows, heads) = (ba.rows(), a_log.len());
    let (grid, shift) = row_share(OP, rows, heads)?;
    let args =
        [ba.arg(), a_log.arg(), dt_bias.arg(), gates.g.arg(), gates.beta.arg(), long(rows), int(OP, heads)?, shift];
    cuda.launch(Kernel::new(OP, entry!(ba.dtype(), "gdn_gates")), grid, &args)
}
