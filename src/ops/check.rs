//! Checks of operands, each one a [`Error::Shape`] that names the op, the operand, what it is and what it must be.

use crate::error::{Error, Result};
use crate::num::DType;
use crate::ops::Batch;
use crate::tensor::{Tensor, View};

/// `tensor` has exactly this element type and shape.
pub(crate) fn tensor(op: &'static str, name: &str, tensor: &Tensor, dtype: DType, shape: &[usize]) -> Result<()> {
    if tensor.dtype() == dtype && tensor.shape() == shape {
        return Ok(());
    }
    Err(Error::shape(op, format!("{name} is {} {:?}, must be {dtype} {shape:?}", tensor.dtype(), tensor.shape())))
}

/// `view` has exactly this element type, rows and columns, and its columns lie inside its tensor.
pub(crate) fn view(op: &'static str, name: &str, view: &View, dtype: DType, rows: usize, cols: usize) -> Result<()> {
    let inside = view.from().checked_add(view.cols()).is_some_and(|end| end <= view.pitch());
    if view.dtype() == dtype && view.rows() == rows && view.cols() == cols && inside {
        return Ok(());
    }
    Err(Error::shape(
        op,
        format!(
            "{name} is {} [{}, {}] from column {} of {}, must be {dtype} [{rows}, {cols}] inside",
            view.dtype(),
            view.rows(),
            view.cols(),
            view.from(),
            view.pitch()
        ),
    ))
}

/// `tensor` has two dimensions, none of them 0; gives them.
pub(crate) fn matrix(op: &'static str, name: &str, tensor: &Tensor) -> Result<(usize, usize)> {
    match *tensor.shape() {
        [rows, cols] if rows > 0 && cols > 0 => Ok((rows, cols)),
        _ => Err(Error::shape(op, format!("{name} is {:?}, must be [rows, columns] and not empty", tensor.shape()))),
    }
}

/// The batch is consistent with itself and has `rows` rows: spans in order and not empty, leading decodes of one row.
pub(crate) fn batch(op: &'static str, batch: &Batch, rows: usize) -> Result<()> {
    let err = |what: String| Err(Error::shape(op, what));
    let limit = batch.inputs.limits().batch;
    if batch.decodes > batch.spans.len() || batch.spans.len() > limit {
        return err(format!("{} decodes of {} spans, at most {limit} spans", batch.decodes, batch.spans.len()));
    }
    let mut next = 0;
    for (i, span) in batch.spans.iter().enumerate() {
        if span.start != next || span.len == 0 || (i < batch.decodes && span.len != 1) {
            return err(format!("span {i} of {} decodes is {span:?}; must start at row {next}", batch.decodes));
        }
        next += span.len;
    }
    if next != rows {
        return err(format!("the batch has {next} rows, the operands have {rows}"));
    }
    Ok(())
}
