//! Matrix products by cuBLASLt: bf16 operands with f32 sums, one constant workspace outside the slab.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::sys;

use super::driver::{Driver, without_captures};
use super::library::{self, Library};
use super::{Backend, Cuda, Mode};
use crate::error::{Error, Result};
use crate::num::DType;

/// The workspace every product may use. A larger one lets the library split K further on shapes this project does not
/// have.
pub const WORKSPACE_BYTES: u64 = 32 << 20;

/// A product y = x Wᵀ: x `[m, k]` and y `[m, n]` with row pitches in elements, W `[n, k]` dense.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Product {
    /// Rows of x.
    pub m: u64,
    /// Rows of W.
    pub n: u64,
    /// Columns of both.
    pub k: u64,
    /// Elements from one row of x to the next.
    pub x_pitch: u64,
    /// Elements from one row of y to the next.
    pub y_pitch: u64,
    /// Operands: bf16, or u8 for e4m3 codes under a scale of 1 each, summed fast: in fewer bits than f32, as servers do.
    pub operands: DType,
    /// The result: bf16 or f32.
    pub out: DType,
}

impl Product {
    /// Of rows without gaps.
    pub fn dense(m: u64, n: u64, k: u64, operands: DType, out: DType) -> Product {
        Product { m, n, k, x_pitch: k, y_pitch: n, operands, out }
    }
}

/// The library's handle and its workspace.
#[derive(Debug)]
pub struct Blas {
    handle: sys::cublasLtHandle_t,
    workspace: u64,
    plans: Mutex<HashMap<Product, Plan>>,
    grown: AtomicU64,
}

// SAFETY: the handle may be used from any thread; plans are behind a mutex.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

#[derive(Debug, Clone, Copy)]
struct Plan {
    operation: sys::cublasLtMatmulDesc_t,
    w: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    y: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

fn check(status: sys::cublasStatus_t, call: impl std::fmt::Display) -> Result<()> {
    if status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS { Ok(()) } else { Err(refused(status, call)) }
}

fn refused(status: sys::cublasStatus_t, call: impl std::fmt::Display) -> Error {
    Error::device(format!("{call}: {status:?}"), "`highwater doctor` says which cuBLASLt was found")
}

/// The library's version, as 13.1.0.
pub fn version() -> Result<String> {
    library::load(Library::CublasLt)?;
    // SAFETY: the library is loaded; the call takes nothing.
    let version = unsafe { sys::cublasLtGetVersion() };
    Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}

impl Blas {
    /// Creates the handle and takes the workspace.
    pub(super) fn new(driver: &Driver) -> Result<Blas> {
        library::load(Library::CublasLt)?;
        driver.bind()?;
        let mut handle = std::ptr::null_mut();
        let alone = without_captures();
        // SAFETY: the library is loaded, `handle` a live pointer.
        check(unsafe { sys::cublasLtCreate(&raw mut handle) }, "cublasLtCreate")?;
        drop(alone);
        let workspace = driver.alloc(WORKSPACE_BYTES)?;
        Ok(Blas { handle, workspace, plans: Mutex::default(), grown: AtomicU64::new(0) })
    }

    /// Bytes of device memory the library took for kernels when it first ran them.
    pub(super) fn grown(&self) -> u64 {
        self.grown.load(Ordering::Relaxed)
    }

    fn plan(&self, product: Product) -> Result<(Plan, bool)> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&product) {
            return Ok((*plan, false));
        }
        let plan = self.make(product)?;
        plans.insert(product, plan);
        Ok((plan, true))
    }

    /// Column-major, as the library thinks: yᵀ `[n, m]` = (Wᵀ)ᵀ xᵀ.
    fn make(&self, product: Product) -> Result<Plan> {
        use sys::cublasLtMatmulDescAttributes_t as D;
        let Product { m, n, k, x_pitch, y_pitch, operands, out } = product;
        let operand = match operands {
            DType::U8 => sys::cudaDataType_t::CUDA_R_8F_E4M3,
            _ => sys::cudaDataType_t::CUDA_R_16BF,
        };
        let result = if out == DType::F32 { sys::cudaDataType_t::CUDA_R_32F } else { sys::cudaDataType_t::CUDA_R_16BF };
        let mut operation = std::ptr::null_mut();
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let scale = sys::cudaDataType_t::CUDA_R_32F;
        // SAFETY: `operation` is a live pointer.
        let created = unsafe { sys::cublasLtMatmulDescCreate(&raw mut operation, compute, scale) };
        check(created, "cublasLtMatmulDescCreate")?;
        // CUBLAS_OP_T.
        let transposed: i32 = 1;
        // SAFETY: the attribute is one operation long and the pointer is to one.
        let done = unsafe {
            sys::cublasLtMatmulDescSetAttribute(
                operation,
                D::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )
        };
        check(done, "cublasLtMatmulDescSetAttribute")?;
        if operands == DType::U8 {
            let fast: i8 = 1;
            // SAFETY: the attribute is one byte long and the pointer is to one.
            let set = unsafe {
                sys::cublasLtMatmulDescSetAttribute(
                    operation,
                    D::CUBLASLT_MATMUL_DESC_FAST_ACCUM,
                    (&raw const fast).cast(),
                    size_of_val(&fast),
                )
            };
            check(set, "cublasLtMatmulDescSetAttribute")?;
        }
        let layout = |kind, rows, cols, pitch: u64| -> Result<sys::cublasLtMatrixLayout_t> {
            let mut layout = std::ptr::null_mut();
            // SAFETY: `layout` is a live pointer.
            let created = unsafe { sys::cublasLtMatrixLayoutCreate(&raw mut layout, kind, rows, cols, pitch as i64) };
            check(created, "cublasLtMatrixLayoutCreate")?;
            Ok(layout)
        };
        let (w, x, y) = (layout(operand, k, n, k)?, layout(operand, k, m, x_pitch)?, layout(result, n, m, y_pitch)?);
        let mut preference = std::ptr::null_mut();
        // SAFETY: `preference` is a live pointer.
        check(unsafe { sys::cublasLtMatmulPreferenceCreate(&raw mut preference) }, "cublasLtMatmulPreferenceCreate")?;
        let workspace = WORKSPACE_BYTES as usize;
        // SAFETY: the attribute is one size long and the pointer is to one.
        let done = unsafe {
            sys::cublasLtMatmulPreferenceSetAttribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace).cast(),
                size_of_val(&workspace),
            )
        };
        check(done, "cublasLtMatmulPreferenceSetAttribute")?;
        let mut found = std::mem::MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::uninit();
        let mut count = 0;
        // SAFETY: all descriptors are live; room for the one result asked for.
        let asked = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                operation,
                w,
                x,
                y,
                y,
                preference,
                1,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };
        // SAFETY: created above, destroyed once.
        unsafe { sys::cublasLtMatmulPreferenceDestroy(preference) };
        check(asked, format_args!("cublasLtMatmulAlgoGetHeuristic of {product:?}"))?;
        if count == 0 {
            return Err(refused(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED, format_args!("{product:?}")));
        }
        // SAFETY: the library wrote `count` = 1 result.
        let algorithm = unsafe { found.assume_init() }.algo;
        Ok(Plan { operation, w, x, y, algorithm })
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        let _alone = without_captures();
        let plans = self.plans.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: every descriptor and the handle were created once and are destroyed once.
        unsafe {
            for plan in plans.values() {
                sys::cublasLtMatmulDescDestroy(plan.operation);
                for layout in [plan.w, plan.x, plan.y] {
                    sys::cublasLtMatrixLayoutDestroy(layout);
                }
            }
            sys::cublasLtDestroy(self.handle);
        }
    }
}

impl Cuda {
    /// Runs a product on the compute stream: addresses of x, W and y. An error in emulation, where there is no such library.
    pub fn product(&self, product: Product, x: super::Arg, w: super::Arg, y: super::Arg) -> Result<()> {
        let (Backend::Driver(driver), Some(blas)) = (&self.backend, &self.blas) else {
            return Err(Error::device("a product of cuBLASLt in emulation", "kernels of this project run there"));
        };
        if self.mode() == Mode::Dry {
            return Ok(());
        }
        let turn = driver.computing()?;
        let (plan, new) = blas.plan(product)?;
        let before = if new { driver.used().unwrap_or(0) } else { 0 };
        let (one, zero) = (1.0f32, 0.0f32);
        let address = |arg: super::Arg| arg.word() as usize as *mut c_void;
        // SAFETY: descriptors are live; the addresses are of device memory with the layouts' extents, which the op has
        // checked; the workspace has the size the algorithm was chosen for.
        let ran = unsafe {
            sys::cublasLtMatmul(
                blas.handle,
                plan.operation,
                (&raw const one).cast(),
                address(w),
                plan.w,
                address(x),
                plan.x,
                (&raw const zero).cast(),
                address(y),
                plan.y,
                address(y),
                plan.y,
                &raw const plan.algorithm,
                blas.workspace as usize as *mut c_void,
                WORKSPACE_BYTES as usize,
                turn.stream.handle.cast(),
            )
        };
        check(ran, format_args!("cublasLtMatmul of {product:?}"))?;
        if new {
            // Kernels are loaded when they first run; a capture forbids the question, and then nothing was loaded.
            let after = driver.used().unwrap_or(before);
            blas.grown.fetch_add(after.saturating_sub(before), Ordering::Relaxed);
        }
        Ok(())
    }
}
