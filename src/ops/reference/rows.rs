//! Rows by index: copies, no sums.

use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::tensor::{Elem, Tensor};
use crate::with_elem;

/// Row `i` of `out` becomes row `indices[i]` of `table`; `of` says in an error what the table's rows are.
pub fn gather(op: &'static str, of: &str, table: &Tensor, indices: &Tensor, out: &mut Tensor) -> Result<()> {
    let (rows, cols) = (table.rows(), table.cols());
    let indices = &indices.host::<i32>()?[..out.rows()];
    if let Some((i, index)) = indices.iter().enumerate().find(|&(_, &r)| r < 0 || r as usize >= rows) {
        return Err(Error::shape(op, format!("index {i} is row {index}, outside {of} of {rows} rows (0..{rows})")));
    }
    with_elem!(op, table.dtype(), A => with_elem!(op, out.dtype(), B => {
        let table = table.host::<A>()?;
        out.host_mut::<B>()?.par_chunks_mut(cols).zip(indices).for_each(|(out, &row)| {
            for (out, value) in out.iter_mut().zip(&table[row as usize * cols..]) {
                *out = B::from_f32(value.to_f32());
            }
        });
        Ok(())
    }))
}
