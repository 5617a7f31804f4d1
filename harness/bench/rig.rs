//! Where kernels are timed, and under which terms: a device, the card it is, what its cache holds, and the time a row may
//! take.

use std::sync::Arc;
use std::time::Duration;

use highwater::device::Device;
use highwater::device::cuda::info::Card;
use highwater::error::Result;
use highwater::mem::Layer;
use highwater::ops::{Cx, Meter, Numerics};

use super::cache::Cache;
use super::time::{SharedLookout, Watch};

/// A device, and how kernels are timed on it.
#[derive(Debug)]
pub(super) struct Rig {
    pub(super) device: Arc<Device>,
    /// None where the device is no card.
    pub(super) card: Option<Card>,
    pub(super) cache: Cache,
    /// Time for one row.
    pub(super) cap: Duration,
    /// Who looks at the card meanwhile, if anybody.
    pub(super) lookout: Option<SharedLookout>,
}

impl Rig {
    pub(super) fn on_card(&self) -> bool {
        self.card.is_some()
    }

    pub(super) fn has_fp8(&self) -> bool {
        self.card.as_ref().is_some_and(Card::has_fp8)
    }

    /// Copies of operands of `bytes` that are gone round.
    pub(super) fn copies(&self, bytes: u64) -> usize {
        self.card.as_ref().map_or(1, |card| self.cache.copies(card.l2_bytes, bytes))
    }

    /// How many times the L2 those fill, where calls go round them.
    pub(super) fn rotation_of_l2(&self, bytes: u64) -> Option<f64> {
        let card = self.card.as_ref().filter(|_| self.cache == Cache::Rotate)?;
        Some(self.copies(bytes) as f64 * bytes as f64 / card.l2_bytes.max(1) as f64)
    }

    /// Runs `body` in a step of the device.
    pub(super) fn with<R>(&self, body: impl FnOnce(&Cx) -> Result<R>) -> Result<R> {
        let meter = Meter::default();
        self.device.begin_step();
        body(&context(&self.device, &meter))
    }

    /// What takes the time of calls under `cx`.
    pub(super) fn watch<'a>(&'a self, cx: &'a Cx<'a>) -> Watch<'a> {
        let flushed = self.card.as_ref().and_then(|card| self.cache.flushed(card.l2_bytes));
        Watch { cx, cap: self.cap, flushed, lookout: self.lookout.as_ref() }
    }
}

/// A context of kernels by themselves, which are of no layer.
pub(super) fn context<'a>(device: &'a Arc<Device>, meter: &'a Meter) -> Cx<'a> {
    Cx { device, numerics: Numerics::BF16, layer: Layer::Other, bound: None, meter, routes: None }
}
