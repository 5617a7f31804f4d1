//! Keys and values to their slots, copied or encoded: no sums.

use crate::error::{Error, Result};
use crate::num::{DType, fp8};
use crate::ops::attention::AttnDims;
use crate::ops::batch::PAGE_TOKENS;
use crate::ops::kv_write::KvPages;
use crate::tensor::{Elem, Tensor};
use crate::with_elem;

const OP: &str = "kv_write";

/// Row `t` of `qkv` goes to slot `slots[t]` of each half; negative slots are skipped.
pub fn write(qkv: &Tensor, dims: AttnDims, kv: &mut KvPages, slots: &Tensor) -> Result<()> {
    let slots = &slots.host::<i32>()?[..qkv.rows()];
    let end = kv.pages() * PAGE_TOKENS;
    if let Some((row, slot)) = slots.iter().enumerate().find(|&(_, &s)| s >= 0 && s as usize >= end) {
        return Err(Error::shape(OP, format!("row {row} goes to slot {slot}, the pages hold {end} (0..{end})")));
    }
    let (k, v, k_scale, v_scale) = (&mut kv.k, &mut kv.v, kv.k_scale, kv.v_scale);
    with_elem!(OP, qkv.dtype(), A => {
        let rows = qkv.host::<A>()?;
        for (half, from, scale) in [(k, dims.k_col(), k_scale), (v, dims.v_col(), v_scale)] {
            let columns = (qkv.cols(), from, dims.kv_cols());
            if half.dtype() == DType::U8 {
                scatter(rows, columns, slots, half.host_mut::<u8>()?, |value| fp8::encode(value / scale));
            } else {
                with_elem!(OP, half.dtype(), B => {
                    scatter(rows, columns, slots, half.host_mut::<B>()?, B::from_f32);
                    Ok(())
                })?;
            }
        }
        Ok(())
    })
}

/// `columns`: a row's elements, the first one taken, how many are.
fn scatter<A: Elem, B>(
    rows: &[A],
    columns: (usize, usize, usize),
    slots: &[i32],
    half: &mut [B],
    store: impl Fn(f32) -> B,
) {
    let (pitch, from, cols) = columns;
    for (row, &slot) in rows.chunks(pitch).zip(slots) {
        if slot >= 0 {
            for (to, value) in half[slot as usize * cols..].iter_mut().zip(&row[from..from + cols]) {
                *to = store(value.to_f32());
            }
        }
    }
}
