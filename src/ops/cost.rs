//! What an op must move and compute at least: the source of every floor and roofline.

use std::cell::RefCell;

use serde::Serialize;

use crate::device::Rates;
use crate::mem::Layer;

/// Which of a card's rates an op's arithmetic runs at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Tensor cores, bf16 operands.
    Bf16,
    /// Tensor cores, FP8 operands.
    Fp8,
    /// Outside the tensor cores.
    F32,
}

/// The least work of one call, from its shape alone.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cost {
    /// Operations; a multiply-add is two.
    pub flops: u64,
    /// Bytes of resident operands (weights, KV pages, recurrent state) read or written, each once.
    pub resident_bytes: u64,
    /// Bytes of activations read or written, each once.
    pub activation_bytes: u64,
    /// The rate `flops` run at.
    pub unit: Unit,
}

impl Cost {
    /// The least seconds one call takes by itself at `rates`: all its bytes, or its operations.
    pub fn floor_seconds(&self, rates: &Rates) -> f64 {
        (self.bytes() as f64 / rates.dram).max(self.compute_seconds(rates))
    }

    /// All its bytes.
    pub fn bytes(&self) -> u64 {
        self.resident_bytes + self.activation_bytes
    }

    /// Seconds of arithmetic at the card's rate.
    pub fn compute_seconds(&self, rates: &Rates) -> f64 {
        self.flops as f64
            / match self.unit {
                Unit::Bf16 => rates.bf16,
                Unit::Fp8 => rates.fp8,
                Unit::F32 => rates.f32,
            }
    }
}

/// Costs of the ops called since the last [`Meter::take`], summed by (layer, op).
#[derive(Debug, Default)]
pub struct Meter {
    entries: RefCell<Vec<Metered>>,
}

/// The summed cost of one op in one kind of layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Metered {
    /// The kind of layer.
    pub layer: Layer,
    /// The op.
    pub op: &'static str,
    /// Calls.
    pub calls: u64,
    /// Their cost together.
    pub cost: Cost,
}

impl Meter {
    /// Counts one call.
    pub fn note(&self, layer: Layer, op: &'static str, cost: Cost) {
        let mut entries = self.entries.borrow_mut();
        match entries.iter_mut().find(|e| e.layer == layer && e.op == op && e.cost.unit == cost.unit) {
            Some(e) => {
                e.calls += 1;
                e.cost.flops += cost.flops;
                e.cost.resident_bytes += cost.resident_bytes;
                e.cost.activation_bytes += cost.activation_bytes;
            }
            None => entries.push(Metered { layer, op, calls: 1, cost }),
        }
    }

    /// The sums since the last call, in the order the ops first ran.
    pub fn take(&self) -> Vec<Metered> {
        std::mem::take(&mut self.entries.borrow_mut())
    }
}

/// The least seconds of a whole step: its resident bytes once, or all its arithmetic. Activations are left out: they
/// may stay in cache.
pub fn step_floor_seconds(step: &[Metered], rates: &Rates) -> f64 {
    let bytes: u64 = step.iter().map(|e| e.cost.resident_bytes).sum();
    let compute: f64 = step.iter().map(|e| e.cost.compute_seconds(rates)).sum();
    (bytes as f64 / rates.dram).max(compute)
}
