//! Rows by index, 16 bytes a thread at a time.

use super::grids::{long, per16, row_share};
use crate::device::cuda::{Cuda, Kernel};
use crate::error::Result;
use crate::num::DType;
use crate::tensor::Tensor;

/// The module as every launch here uses it.
pub(super) fn variants() -> Vec<Kernel> {
    vec![Kernel::new("rows", "gather_bf16")]
}

/// Row `i` of `out` becomes row `indices[i]` of `table`; NaN where there is no such row.
pub(crate) fn gather(cuda: &Cuda, op: &'static str, table: &Tensor, indices: &Tensor, out: &mut Tensor) -> Result<()> {
    let entry = match (table.dtype(), out.dtype()) {
        (DType::Bf16, DType::Bf16) => "gather_bf16",
        (DType::Bf16, _) => "gather_bf16_f32",
        _ => "gather_f32",
    };
    let (n, cols) = (out.rows(), out.cols());
    let (grid, shift) = row_share(op, n, cols.div_ceil(per16(table.dtype())))?;
    let sizes = [long(table.rows()), long(n), long(cols), shift];
    cuda.launch(Kernel::new("rows", entry), grid, &[&[table.arg(), indices.arg(), out.arg()], &sizes[..]].concat())
}
