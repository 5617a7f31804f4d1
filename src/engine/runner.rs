//! A model with its pools on one device, running one described step at a time. The engine drives one on the device and
//! its twin on the plan device; sizing drives one on a slab without end.

use std::sync::Arc;

use crate::checkpoint::Source;
use crate::device::Device;
use crate::engine::cache;
use crate::engine::fault::Fault;
use crate::error::{Error, Result};
use crate::mem::{Layer, Report};
use crate::model::{LayerState, Model, Probe};
use crate::num::{DType, bf16};
use crate::ops::batch::Placement;
use crate::ops::cost::Metered;
use crate::ops::sampler::{self, SampleRow};
use crate::ops::{Batch, Cx, Limits, Meter, Numerics, Span, StepInputs, fill};
use crate::tensor::Tensor;

/// Rows of logits computed at once where every row of a prompt is wanted.
pub const LOGIT_BLOCK_ROWS: usize = 64;

/// A row to sample.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledRow {
    /// The row of the step.
    pub row: i32,
    /// How to sample it.
    pub params: SampleRow,
    /// Copy its raw logits to the host.
    pub logits: bool,
}

/// Rows of a prompt whose log-probabilities or raw logits are wanted, whatever is sampled.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptRows {
    /// First row of the step.
    pub first: usize,
    /// The token each row should predict; one entry a row.
    pub targets: Vec<i32>,
    /// Copy raw logits to the host as well.
    pub logits: bool,
}

/// A step as the schedule made it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepPlan {
    /// The sequences, decodes first.
    pub spans: Vec<Span>,
    /// Leading spans that are decodes.
    pub decodes: usize,
    /// Where each span's state lives.
    pub places: Vec<Placement>,
    /// Token ids of all rows.
    pub tokens: Vec<i32>,
    /// Rows to sample.
    pub samples: Vec<SampledRow>,
    /// Prompt rows to score.
    pub prompts: Vec<PromptRows>,
}

/// What a step computed and what it took.
#[derive(Debug, Default)]
pub struct StepResult {
    /// One entry per [`StepPlan::samples`]; `None` where the row had no finite logit.
    pub tokens: Vec<Option<sampler::Token>>,
    /// Raw logits of the sampled rows that asked for them, in order.
    pub logits: Vec<Vec<f32>>,
    /// One entry per [`StepPlan::prompts`].
    pub prompts: Vec<Scored>,
    /// Costs by op.
    pub metered: Vec<Metered>,
}

/// Rows of a prompt, scored.
#[derive(Debug, Default)]
pub struct Scored {
    /// Log-probability of each row's target.
    pub logprobs: Vec<f32>,
    /// Raw logits `[rows, V]`, where asked for.
    pub logits: Vec<f32>,
    /// Whether every row had a finite logit.
    pub finite: bool,
}

/// A model and its pools on a device.
#[derive(Debug)]
pub struct Runner {
    device: Arc<Device>,
    model: Model,
    meter: Meter,
    pools: Option<Pools>,
}

#[derive(Debug)]
struct Pools {
    state: Vec<LayerState>,
    inputs: StepInputs,
}

impl Runner {
    /// Loads the parameters. `progress` is called with (bytes done, bytes in all).
    pub fn load(
        device: &Arc<Device>,
        source: &Source,
        numerics: Numerics,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Runner> {
        let model = Model::load(device, source, numerics, progress)?;
        Ok(Runner { device: Arc::clone(device), model, meter: Meter::default(), pools: None })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Allocates state for `pages` KV pages and `slots` sequences (reserved ones included) and the step's inputs; what
    /// was there before is freed first.
    pub fn allocate(&mut self, limits: Limits, pages: usize, slots: usize) -> Result<()> {
        self.pools = None;
        // The last step's peak is kept free until the next begins; pools may take it.
        self.device.begin_step();
        let state = cache::allocate(&self.device, &self.model.state(), pages, slots)?;
        let inputs = StepInputs::new(&self.device, limits)?;
        self.pools = Some(Pools { state, inputs });
        Ok(())
    }

    /// Frees the pools, the parameters stay.
    pub fn release(&mut self) {
        self.pools = None;
    }

    /// Runs one step. With `bound`, workspaces are allocated at their upper bound under those limits.
    pub fn run(
        &mut self,
        step: &StepPlan,
        fault: Option<Fault>,
        bound: Option<Limits>,
        probe: Option<Probe>,
    ) -> Result<StepResult> {
        let Runner { device, model, meter, pools } = self;
        let Some(pools) = pools else {
            return Err(Error::shape("step", "the pools are not allocated"));
        };
        device.begin_step();
        meter.take();
        let cx = Cx { device, numerics: model.numerics(), layer: Layer::Other, bound, meter };
        let rows: Vec<i32> = step.samples.iter().map(|s| s.row).collect();
        pools.inputs.upload(&step.spans, &step.places, &step.tokens, &rows)?;
        let batch = Batch { spans: &step.spans, decodes: step.decodes, inputs: &pools.inputs };

        if fault == Some(Fault::FailedAllocation) {
            cx.alloc("fault", "failed_allocation", DType::U8, &[usize::MAX])?;
        }
        let x = model.forward(&cx, &batch, &mut pools.state, probe)?;
        let _extra = match fault {
            Some(Fault::ExtraBuffer) => Some(cx.activation("fault", "extra_buffer", x.shape())?),
            _ => None,
        };
        let mut result = StepResult::default();
        if !rows.is_empty() {
            let head = fault.and_then(Fault::head);
            let mut logits = model.head(&cx, &x, &pools.inputs.rows, rows.len(), head)?;
            if fault == Some(Fault::NanLogits) {
                let cx = &cx.at(Layer::Head);
                fill::constant(cx, &mut logits, 0..1, f32::NAN)?;
            }
            let params: Vec<&SampleRow> = step.samples.iter().map(|s| &s.params).collect();
            let decodable = model.geometry().decodable;
            let sampled = sampler::sample(&cx.at(Layer::Sampler), &logits, &params, decodable)?;
            result.tokens = read(&sampled, params.len(), device.has_data())?;
            for (i, _) in step.samples.iter().enumerate().filter(|(_, s)| s.logits) {
                if device.has_data() {
                    result.logits.push(host_rows(&logits, i, 1)?);
                }
            }
        }
        for prompt in &step.prompts {
            result.prompts.push(score(&cx, model, &x, prompt)?);
        }
        drop(x);
        result.metered = meter.take();
        Ok(result)
    }

    /// Fills a sequence's state as if `tokens` had been computed: KV pages near-normal, GDN state small. The values
    /// depend on the seed, the layer and the place in the sequence, not on which pages and slot were given.
    pub fn prime(&mut self, pages: &[i32], slot: i32, seed: u64) -> Result<()> {
        const RECURRENT_STD: f32 = 0.05;
        let Runner { device, model, meter, pools } = self;
        let Some(pools) = pools else {
            return Err(Error::shape("prime", "the pools are not allocated"));
        };
        let cx = Cx { device, numerics: model.numerics(), layer: Layer::Cache, bound: None, meter };
        let put = |dst: &mut Tensor, row: i32, name: &str, at: usize, std: f32| {
            let row = row as usize;
            let first = (at * dst.cols()) as u64;
            fill::normal(&cx, dst, row..row + 1, crate::num::philox::stream_key(seed, name), first, 0.0, std)
        };
        for (i, state) in pools.state.iter_mut().enumerate() {
            match state {
                LayerState::Attention(kv) => {
                    for (at, &page) in pages.iter().enumerate() {
                        put(&mut kv.k, page, &format!("prime.{i}.k"), at, 1.0)?;
                        put(&mut kv.v, page, &format!("prime.{i}.v"), at, 1.0)?;
                    }
                }
                LayerState::Gdn { conv, recurrent } => {
                    put(conv, slot, &format!("prime.{i}.conv"), 0, 1.0)?;
                    put(recurrent, slot, &format!("prime.{i}.recurrent"), 0, RECURRENT_STD)?;
                }
            }
        }
        Ok(())
    }

    /// What the device's pool has seen since the step began.
    pub fn report(&self) -> Report {
        self.device.report()
    }
}

/// The drawn tokens; on the plan device, which draws none, id 0 stands in for each: the engine's one data edge.
fn read(sampled: &sampler::Sampled, rows: usize, has_data: bool) -> Result<Vec<Option<sampler::Token>>> {
    if has_data {
        return sampled.read();
    }
    Ok(vec![Some(sampler::Token { id: 0, logprob: 0.0, top: Vec::new() }); rows])
}

/// Scores rows of a prompt in blocks, so that logits of a long prompt never stand in memory together.
fn score(cx: &Cx, model: &Model, x: &Tensor, prompt: &PromptRows) -> Result<Scored> {
    let mut all = Scored { finite: true, ..Scored::default() };
    for (i, targets) in prompt.targets.chunks(LOGIT_BLOCK_ROWS).enumerate() {
        let first = prompt.first + i * LOGIT_BLOCK_ROWS;
        let indices: Vec<i32> = (first..first + targets.len()).map(|r| r as i32).collect();
        let indices = cx.at(Layer::Head).ints("prompt_rows", "indices", &indices)?;
        let logits = model.head(cx, x, &indices, targets.len(), None)?;
        let targets = cx.at(Layer::Sampler).ints("prompt_rows", "targets", targets)?;
        let decodable = model.geometry().decodable;
        let scored = sampler::logprobs(&cx.at(Layer::Sampler), &logits, &targets, 0, decodable)?;
        if cx.device.has_data() {
            all.logprobs.extend_from_slice(scored.targets.host::<f32>()?);
            all.finite &= scored.valid.host::<u8>()?.iter().all(|&valid| valid != 0);
            if prompt.logits {
                all.logits.extend(host_rows(&logits, 0, logits.rows())?);
            }
        }
    }
    Ok(all)
}

/// Rows of a float tensor as f32 on the host.
fn host_rows(tensor: &Tensor, first: usize, rows: usize) -> Result<Vec<f32>> {
    let range = first * tensor.cols()..(first + rows) * tensor.cols();
    match tensor.dtype() {
        DType::Bf16 => Ok(tensor.host::<bf16>()?[range].iter().map(|v| v.to_f32()).collect()),
        _ => Ok(tensor.host::<f32>()?[range].to_vec()),
    }
}
