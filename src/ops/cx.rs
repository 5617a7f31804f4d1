//! What every op is called with: the device, the numerics, whose buffers these are, and the meter.

use std::sync::Arc;

use serde::Serialize;

use crate::device::Device;
use crate::error::Result;
use crate::mem::{End, Layer, Tag};
use crate::num::DType;
use crate::ops::cost::{Cost, Meter};
use crate::tensor::{Tensor, byte_size};

/// Whether the inputs of quantised linear layers are quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ActQuant {
    /// As the checkpoint asks, layer by layer.
    Checkpoint,
    /// Nowhere.
    Off,
}

/// The types values are kept in. Arithmetic inside an op is f32 everywhere; softmax and gates always are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Numerics {
    /// Activations and the residual stream: bf16 or f32.
    pub activations: DType,
    /// Logits: f32 or bf16.
    pub logits: DType,
    /// The GDN recurrent state: f32 or bf16. (The conv state is kept as activations are.)
    pub state: DType,
    /// KV pages: f32, bf16, or u8 for e4m3 codes under a scale per layer.
    pub kv: DType,
    /// Whether inputs of linear layers are quantised where the checkpoint asks for it.
    pub act_quant: ActQuant,
    /// Whether a card takes the same order of sums whatever the number of rows, so that a row's bits do not depend on its
    /// company. The CPU arm always does.
    pub batch_invariant: bool,
}

impl Numerics {
    /// bf16 activations and KV, f32 logits and state.
    pub const BF16: Numerics = Numerics {
        activations: DType::Bf16,
        logits: DType::F32,
        state: DType::F32,
        kv: DType::Bf16,
        act_quant: ActQuant::Checkpoint,
        batch_invariant: false,
    };
    /// f32 everywhere.
    pub const F32: Numerics = Numerics { activations: DType::F32, kv: DType::F32, ..Numerics::BF16 };
}

/// The largest step an engine may be asked for; every op's workspace has an upper bound under it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Tokens of one step, prefill and decode together.
    pub step_tokens: usize,
    /// Sequences of one step.
    pub batch: usize,
    /// Tokens of one sequence, prompt and output.
    pub context: usize,
}

/// The context of one op call.
#[derive(Debug, Clone, Copy)]
pub struct Cx<'a> {
    /// The device; arena buffers come from it.
    pub device: &'a Arc<Device>,
    /// The types values are kept in.
    pub numerics: Numerics,
    /// Who the buffers are for.
    pub layer: Layer,
    /// Set while sizing: workspaces are allocated at their upper bound under these limits.
    pub bound: Option<Limits>,
    /// Counts costs.
    pub meter: &'a Meter,
    /// Where routers' choices are written down, if anybody asked.
    pub routes: Option<&'a RouteLog>,
}

/// How many distinct experts each MoE layer of a step chose, in layer order.
#[derive(Debug, Default)]
pub struct RouteLog(std::cell::RefCell<Vec<usize>>);

impl RouteLog {
    /// Notes a layer's choice of `experts` experts: ids i32 `[T, k]`. On a card this waits for the router.
    pub(crate) fn note(&self, ids: &Tensor, experts: usize) -> Result<()> {
        let mut chosen = vec![false; experts];
        for id in ids.read::<i32>()? {
            if let Some(chosen) = usize::try_from(id).ok().and_then(|id| chosen.get_mut(id)) {
                *chosen = true;
            }
        }
        self.0.borrow_mut().push(chosen.into_iter().filter(|chosen| *chosen).count());
        Ok(())
    }

    /// The numbers noted since this was last asked.
    pub fn take(&self) -> Vec<usize> {
        self.0.take()
    }
}

impl<'a> Cx<'a> {
    /// The same context for another kind of layer.
    pub fn at(self, layer: Layer) -> Cx<'a> {
        Cx { layer, ..self }
    }

    /// Allocates an output in the step's arena.
    pub fn alloc(&self, op: &'static str, buffer: &'static str, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let bytes = byte_size(dtype, shape)?;
        let buffer = self.device.alloc(End::Arena, Tag::new(self.layer, op, buffer), bytes)?;
        Tensor::new(buffer, dtype, shape)
    }

    /// Allocates an activation output in the step's arena.
    pub fn activation(&self, op: &'static str, buffer: &'static str, shape: &[usize]) -> Result<Tensor> {
        self.alloc(op, buffer, self.numerics.activations, shape)
    }

    /// Allocates a list of integers in the step's arena and copies it to the device.
    pub fn ints(&self, op: &'static str, buffer: &'static str, values: &[i32]) -> Result<Tensor> {
        let mut tensor = self.alloc(op, buffer, DType::I32, &[values.len()])?;
        tensor.write(0, values)?;
        Ok(tensor)
    }

    /// Allocates an op's workspace: `tactic` bytes, or `bound(limits)` while sizing. No bytes, no buffer.
    pub fn workspace(
        &self,
        op: &'static str,
        tactic: u64,
        bound: impl FnOnce(Limits) -> u64,
    ) -> Result<Option<Tensor>> {
        let bytes = self.bound.map_or(tactic, |limits| bound(limits).max(tactic));
        if bytes == 0 {
            return Ok(None);
        }
        self.alloc(op, "workspace", DType::U8, &[bytes as usize]).map(Some)
    }

    /// Counts an op's cost.
    pub fn note(&self, op: &'static str, cost: Cost) {
        self.meter.note(self.layer, op, cost);
    }
}
