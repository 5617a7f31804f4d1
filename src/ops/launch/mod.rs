//! The CUDA arm of each op, same stem as its kernel file: which kernel, on which grid, with which arguments.
//!
//! May live here: grids, arguments, the choice among kernels as a pure function of card and shape. May not: allocations,
//! reads of device data.

pub(crate) mod activation;
pub(crate) mod attention;
pub(crate) mod conv1d;
pub(crate) mod fill;
pub(crate) mod gdn_decode;
pub(crate) mod gdn_prefill;
mod grids;
mod hopper;
mod hopper_few;
pub(crate) mod kv_write;
pub(crate) mod linear;
pub(crate) mod moe;
mod moe_hopper;
pub(crate) mod norm;
pub(crate) mod nvfp4_hopper;
pub(crate) mod quantise;
pub(crate) mod rope;
pub(crate) mod rows;
pub(crate) mod sampler;
pub mod stream;
mod tiles;

use crate::device::Arch;
use crate::device::cuda::Kernel;

/// Every file of kernels under every set of compile-time values that the published models need.
pub fn variants() -> Vec<Kernel> {
    [
        activation::variants(),
        attention::variants(),
        conv1d::variants(),
        fill::variants(),
        gdn_decode::variants(),
        gdn_prefill::variants(),
        kv_write::variants(),
        linear::variants(),
        moe::variants(),
        norm::variants(),
        quantise::variants(),
        rope::variants(),
        rows::variants(),
        sampler::variants(),
        stream::variants(),
    ]
    .concat()
}

/// Whether a kernel's file has anything for an arch: all but those of one arch's own instructions have.
pub fn runs_on(kernel: Kernel, arch: Arch) -> bool {
    let hoppers = [hopper::MODULE, hopper_few::MODULE, nvfp4_hopper::MODULE, moe_hopper::MODULE];
    !hoppers.contains(&kernel.module()) || arch == Arch::Sm90a
}
