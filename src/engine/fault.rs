//! Seeded regressions: wrong on purpose, so that tests and gates can show that each is caught.

use crate::error::{Error, Result};
use crate::model::HeadFault;

/// A known regression an engine can be built with. Rows measured with one are marked and never become baselines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The vocabulary GEMM runs over the whole window before the sampled rows are taken.
    FullWindowHead,
    /// The head takes the first rows, as many as are sampled.
    SliceRows,
    /// The head takes the first rows, then indexes them by the sampled rows' numbers.
    SliceThenGather,
    /// One more activation-sized buffer lives through the step.
    ExtraBuffer,
    /// Every step takes 3 % longer.
    SlowKernel,
    /// The step's first allocation fails.
    FailedAllocation,
    /// The first sampled row's logits are all NaN.
    NanLogits,
    /// Each request whose prompt ends leaves a block in the arena for good.
    Leak,
    /// Each step in which a prompt ends leaves small blocks with holes between them, in place of the last step's.
    Fragment,
}

impl Fault {
    /// Every fault, in the order of the help text.
    pub const ALL: [Fault; 9] = [
        Fault::FullWindowHead,
        Fault::SliceRows,
        Fault::SliceThenGather,
        Fault::ExtraBuffer,
        Fault::SlowKernel,
        Fault::FailedAllocation,
        Fault::NanLogits,
        Fault::Leak,
        Fault::Fragment,
    ];

    /// The name `--fault` takes.
    pub fn name(self) -> &'static str {
        match self {
            Fault::FullWindowHead => "full-window-head",
            Fault::SliceRows => "slice-rows",
            Fault::SliceThenGather => "slice-then-gather",
            Fault::ExtraBuffer => "extra-buffer",
            Fault::SlowKernel => "slow-kernel",
            Fault::FailedAllocation => "failed-allocation",
            Fault::NanLogits => "nan-logits",
            Fault::Leak => "leak",
            Fault::Fragment => "fragment",
        }
    }

    /// The fault of that name.
    pub fn parse(name: &str) -> Result<Fault> {
        Fault::ALL.into_iter().find(|f| f.name() == name).ok_or_else(|| Error::Request {
            param: "--fault",
            what: format!("{name:?} is none of {}", Fault::ALL.map(Fault::name).join(", ")),
        })
    }

    /// The fault, if it changes what a step does; a slow step does the same, in the same captured graph, and then waits.
    pub(super) fn in_step(self) -> Option<Fault> {
        Some(self).filter(|fault| *fault != Fault::SlowKernel)
    }

    /// Whether what it leaves behind makes a step's bytes depend on the steps before, as no plan knows them.
    pub(super) fn outlives_its_step(self) -> bool {
        matches!(self, Fault::Leak | Fault::Fragment)
    }

    pub(super) fn head(self) -> Option<HeadFault> {
        match self {
            Fault::FullWindowHead => Some(HeadFault::FullWindow),
            Fault::SliceRows => Some(HeadFault::SliceRows),
            Fault::SliceThenGather => Some(HeadFault::SliceThenGather),
            _ => None,
        }
    }
}
