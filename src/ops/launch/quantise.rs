//! Rows of activations to codes and scales.

use super::grids::{THREADS, blocks, flag, int, long, row_share, row_threads};
use crate::device::cuda::{Arg, Cuda, Grid, Kernel, entry};
use crate::error::Result;
use crate::num::DType;
use crate::ops::quantise::Form;
use crate::ops::scheme::Global;
use crate::ops::weight::{BLOCK, NVFP4_GROUP};
use crate::tensor::{Tensor, View};

const OP: &str = "quantise";
/// Columns a thread takes at a time.
const RUN: usize = 8;

fn kernel(entry: &'static str) -> Kernel {
    Kernel::new(OP, entry).no_fma()
}

/// The module as every launch here uses it.
pub(super) fn variants() -> Vec<Kernel> {
    vec![kernel("fp8_token_bf16")]
}

/// Writes codes and scales of every row; the op has made them of the right sizes.
pub(crate) fn rows(cuda: &Cuda, x: View, form: Form, codes: &mut Tensor, scales: Option<&mut Tensor>) -> Result<()> {
    let (rows, cols, dtype) = (x.rows(), x.cols(), x.dtype());
    let (pitch, width) = (long(x.pitch()), int(OP, cols)?);
    let scales = scales.map_or(Arg::NULL, |scales| scales.arg());
    let flat = |threads| -> Result<Grid> { Ok(Grid::new([blocks(OP, threads, THREADS)?, 1, 1], THREADS as u32)) };
    match form {
        Form::Fp8Tensor(scale) => {
            let (grid, shift) = row_share(OP, rows, cols.div_ceil(RUN))?;
            let args = [x.arg(), pitch, codes.arg(), long(rows), width, Arg::F32(scale), shift];
            cuda.launch(kernel(entry!(dtype, "fp8_tensor")), grid, &args)
        }
        Form::Fp8Token => {
            let units = if cols.is_multiple_of(RUN) { cols / RUN } else { cols };
            let grid = Grid::new([blocks(OP, rows, 1)?, 1, 1], row_threads(units));
            cuda.launch(kernel(entry!(dtype, "fp8_token")), grid, &[x.arg(), pitch, codes.arg(), scales, width])
        }
        Form::Fp8Group => {
            let grid = flat(rows * cols.div_ceil(BLOCK) * (BLOCK / RUN))?;
            let args = [x.arg(), pitch, codes.arg(), scales, long(rows), width];
            cuda.launch(kernel(entry!(dtype, "fp8_group")), grid, &args)
        }
        Form::Nvfp4(global, sense) => {
            let grid = flat(rows * (cols / NVFP4_GROUP))?;
            let divides = flag(sense == Global::Divides);
            if codes.dtype() == DType::Bf16 {
                let args = [x.arg(), pitch, codes.arg(), long(rows), width, Arg::F32(global), divides];
                return cuda.launch(kernel(entry!(dtype, "nvfp4_widened")), grid, &args);
            }
            let args = [x.arg(), pitch, codes.arg(), scales, long(rows), width, Arg::F32(global), divides];
            cuda.launch(kernel(entry!(dtype, "nvfp4")), grid, &args)
        }
    }
}
