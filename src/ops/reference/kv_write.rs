//! Keys and values to their slots: copies, no sums.

use crate::error::{Error, Result};
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
    with_elem!(OP, qkv.dtype(), A => with_elem!(OP, kv.k.dtype(), B => {
        let rows = qkv.host::<A>()?;
        scatter::<A, B>(rows, qkv.cols(), dims.k_col(), dims.kv_cols(), slots, kv.k.host_mut()?);
        scatter::<A, B>(rows, qkv.cols(), dims.v_col(), dims.kv_cols(), slots, kv.v.host_mut()?);
        Ok(())
    }))
}

fn scatter<A: Elem, B: Elem>(rows: &[A], pitch: usize, from: usize, cols: usize, slots: &[i32], half: &mut [B]) {
    for (row, &slot) in rows.chunks(pitch).zip(slots) {
        if slot >= 0 {
            for (to, value) in half[slot as usize * cols..].iter_mut().zip(&row[from..from + cols]) {
                *to = B::from_f32(value.to_f32());
            }
        }
    }
}
