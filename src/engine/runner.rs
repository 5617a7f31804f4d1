//! A model with its pools on one device, running one described step at a time. The engine drives one on the device and
//! its twin on the plan device; sizing drives one on a slab without end.

use std::collections::HashMap;
use std::sync::Arc;

use crate::checkpoint::Source;
use crate::device::Device;
use crate::device::cuda::{Cuda, Graph, Mode};
use crate::engine::cache;
use crate::engine::fault::Fault;
use crate::error::{Error, Result};
use crate::mem::{Layer, Report};
use crate::model::{LayerState, Model, Probe};
use crate::num::{DType, bf16};
use crate::ops::batch::Placement;
use crate::ops::cost::Metered;
use crate::ops::fill::Primed;
use crate::ops::kv_write::KvPages;
use crate::ops::sampler::{self, SampleRow};
use crate::ops::{Batch, Cx, Limits, Meter, Numerics, RouteLog, Span, StepInputs, fill};
use crate::tensor::Tensor;

/// Rows of logits computed at once where every row of a prompt is wanted.
pub const LOGIT_BLOCK_ROWS: usize = 64;

/// Blocks that a seeded fragmenter leaves behind.
const COMB_TEETH: usize = 8;
/// Rows of an activation between two of them.
const COMB_GAP_ROWS: usize = 16;

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

impl StepPlan {
    /// Adds inert decode rows until there are `rows`: they keep no state, write the reserved KV page, and their tokens mean
    /// nothing.
    pub(super) fn pad(&mut self, rows: usize) {
        for start in self.tokens.len()..rows {
            self.spans.push(Span { start, len: 1, context: 0 });
            self.places.push(Placement { slot_in: -1, slot_out: -1, pages: vec![cache::PADDING] });
            self.tokens.push(0);
            self.decodes += 1;
            self.samples.push(SampledRow { row: start as i32, params: SampleRow::default(), logits: false });
        }
    }

    /// Whether every row continues a sequence and is sampled, so that a captured graph can run the step.
    fn is_decode(&self) -> bool {
        self.decodes == self.spans.len() && self.samples.len() == self.decodes && self.prompts.is_empty()
    }
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
    /// Whether decode steps on a card run as captured graphs.
    graphs: bool,
    /// Where routers' choices are written down; steps then run without graphs.
    routes: Option<RouteLog>,
    /// What a seeded fault never gives back.
    kept: Vec<Tensor>,
}

#[derive(Debug)]
struct Pools {
    /// By decode rows. Graphs hold addresses of the pools below, so they go first.
    captured: HashMap<usize, Captured>,
    state: Vec<LayerState>,
    inputs: StepInputs,
}

/// A decode step's launches from the embedding to the logits.
#[derive(Debug)]
struct Captured {
    graph: Graph,
    /// Where the logits are: a later step of as many rows must find them there.
    logits: u64,
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
        let meter = Meter::default();
        Ok(Runner {
            device: Arc::clone(device),
            model,
            meter,
            pools: None,
            graphs: true,
            routes: None,
            kept: Vec::new(),
        })
    }

    /// Whether decode steps on a card run as captured graphs. They do unless told otherwise.
    pub fn set_graphs(&mut self, graphs: bool) {
        self.graphs = graphs;
    }

    /// Whether each step's distinct experts are counted; such steps are not captured and wait for every router.
    pub fn count_experts(&mut self, count: bool) {
        self.routes = count.then(RouteLog::default);
    }

    /// Distinct experts of each MoE layer in every step since this was last asked, layer after layer, step after step.
    pub fn take_experts(&self) -> Vec<usize> {
        self.routes.as_ref().map(RouteLog::take).unwrap_or_default()
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
        self.kept.clear();
        // The last step's peak is kept free until the next begins; pools may take it.
        self.device.begin_step();
        let state = cache::allocate(&self.device, &self.model.state(), self.model.kv_scales(), pages, slots)?;
        let inputs = StepInputs::new(&self.device, limits)?;
        self.pools = Some(Pools { captured: HashMap::new(), state, inputs });
        Ok(())
    }

    /// Frees the pools, the parameters stay.
    pub fn release(&mut self) {
        self.pools = None;
        self.kept.clear();
    }

    /// Runs one step. With `bound`, workspaces are allocated at their upper bound under those limits.
    pub fn run(
        &mut self,
        step: &StepPlan,
        fault: Option<Fault>,
        bound: Option<Limits>,
        probe: Option<Probe>,
    ) -> Result<StepResult> {
        let Runner { device, model, meter, pools, graphs, routes, kept } = self;
        let Some(pools) = pools else {
            return Err(Error::shape("step", "the pools are not allocated"));
        };
        let rows: Vec<i32> = step.samples.iter().map(|s| s.row).collect();
        let decode = step.is_decode() && fault.is_none() && bound.is_none() && probe.is_none() && routes.is_none();
        let captured = match device.as_cuda().filter(|_| *graphs && decode) {
            Some(cuda) => Some((cuda, capture(cuda, device, model, meter, pools, step.decodes)?)),
            None => None,
        };
        device.begin_step();
        meter.take();
        let routes = routes.as_ref();
        let cx = Cx { device, numerics: model.numerics(), layer: Layer::Other, bound, meter, routes };
        pools.inputs.upload(&step.spans, &step.places, &step.tokens, &rows)?;

        if fault == Some(Fault::FailedAllocation) {
            cx.alloc("fault", "failed_allocation", DType::U8, &[usize::MAX])?;
        }
        if let Some((cuda, logits)) = captured {
            let Some(Captured { graph, .. }) = pools.captured.get(&step.decodes) else {
                unreachable!("captured on the lines above")
            };
            cuda.replay(graph)?;
            // The same code again, launching nothing: it counts costs, and its buffers are those the graph wrote.
            let dry = dry(cuda, || forward(&cx, model, pools, step, None))?;
            let Forwarded { logits: Some(found), .. } = &dry else { unreachable!("a decode step samples") };
            if found.buffer().address() != logits {
                return Err(Error::shape("step", "the logits are not where the captured step left them"));
            }
            return finish(&cx, model, step, fault, dry);
        }
        let prompts_ended = step.samples.len().saturating_sub(step.decodes);
        if fault == Some(Fault::Leak) && prompts_ended > 0 {
            // The first blocks of a step: what they leave has no holes.
            kept.push(cx.activation("fault", "leak", &[prompts_ended, model.geometry().hidden])?);
        }
        let done = forward(&cx, model, pools, step, Some((fault, probe)))?;
        if fault == Some(Fault::Fragment) && prompts_ended > 0 {
            kept.clear();
            // A comb: between its teeth are holes that few buffers fit into.
            let mut gaps = Vec::new();
            for _ in 0..COMB_TEETH {
                gaps.push(cx.activation("fault", "gap", &[COMB_GAP_ROWS, model.geometry().hidden])?);
                kept.push(cx.alloc("fault", "fragment", DType::U8, &[1])?);
            }
        }
        finish(&cx, model, step, fault, done)
    }

    /// Fills a sequence's state as if `tokens` had been computed: KV pages near-normal, GDN state small. The values
    /// depend on the seed, the layer and the place in the sequence, not on which pages and slot were given.
    pub fn prime(&mut self, pages: &[i32], slot: i32, seed: u64) -> Result<()> {
        const RECURRENT_STD: f32 = 0.05;
        let Runner { device, model, meter, pools, .. } = self;
        let Some(pools) = pools else {
            return Err(Error::shape("prime", "the pools are not allocated"));
        };
        let cx = Cx { device, numerics: model.numerics(), layer: Layer::Cache, bound: None, meter, routes: None };
        let key = |layer: usize, what: &str| crate::num::philox::stream_key(seed, &format!("prime.{layer}.{what}"));
        let slot = [slot];
        let mut targets = Vec::new();
        for (i, state) in pools.state.iter_mut().enumerate() {
            match state {
                LayerState::Attention(KvPages { k, v, k_scale, v_scale }) => {
                    targets.push(Primed { dst: k, rows: pages, key: key(i, "k"), std: 1.0, scale: *k_scale });
                    targets.push(Primed { dst: v, rows: pages, key: key(i, "v"), std: 1.0, scale: *v_scale });
                }
                LayerState::Gdn { conv, recurrent } => {
                    targets.push(Primed { dst: conv, rows: &slot, key: key(i, "conv"), std: 1.0, scale: 1.0 });
                    let (key, std) = (key(i, "recurrent"), RECURRENT_STD);
                    targets.push(Primed { dst: recurrent, rows: &slot, key, std, scale: 1.0 });
                }
            }
        }
        fill::prime(&cx, &mut targets)
    }

    /// What the device's pool has seen since the step began.
    pub fn report(&self) -> Report {
        self.device.report()
    }
}

/// What is left of a step once its launches are made.
struct Forwarded {
    x: Tensor,
    logits: Option<Tensor>,
    _extra: Option<Tensor>,
}

/// The residual of every row, and the logits of the sampled ones.
fn forward(
    cx: &Cx,
    model: &Model,
    pools: &mut Pools,
    step: &StepPlan,
    special: Option<(Option<Fault>, Option<Probe>)>,
) -> Result<Forwarded> {
    let (fault, probe) = special.unwrap_or_default();
    let batch = Batch { spans: &step.spans, decodes: step.decodes, inputs: &pools.inputs };
    // Before the layers, so that it stands at the peak wherever in the step that is.
    let extra = match fault {
        Some(Fault::ExtraBuffer) => {
            Some(cx.activation("fault", "extra_buffer", &[step.tokens.len(), model.geometry().hidden])?)
        }
        _ => None,
    };
    let x = model.forward(cx, &batch, &mut pools.state, probe)?;
    let logits = match step.samples.len() {
        0 => None,
        n => Some(model.head(cx, &x, &pools.inputs.rows, n, fault.and_then(Fault::head))?),
    };
    Ok(Forwarded { x, logits, _extra: extra })
}

/// Draws from the logits and scores prompts.
fn finish(cx: &Cx, model: &Model, step: &StepPlan, fault: Option<Fault>, done: Forwarded) -> Result<StepResult> {
    let Forwarded { x, logits, _extra } = done;
    let mut result = StepResult::default();
    if let Some(mut logits) = logits {
        if fault == Some(Fault::NanLogits) {
            fill::constant(&cx.at(Layer::Head), &mut logits, 0..1, f32::NAN)?;
        }
        let params: Vec<&SampleRow> = step.samples.iter().map(|s| &s.params).collect();
        let decodable = model.geometry().decodable;
        let sampled = sampler::sample(&cx.at(Layer::Sampler), &logits, &params, decodable)?;
        result.tokens = read(&sampled, params.len(), cx.device.has_data())?;
        for (i, _) in step.samples.iter().enumerate().filter(|(_, s)| s.logits) {
            if cx.device.has_data() {
                result.logits.push(host_rows(&logits, i, 1)?);
            }
        }
    }
    for prompt in &step.prompts {
        result.prompts.push(score(cx, model, &x, prompt)?);
    }
    drop(x);
    result.metered = cx.meter.take();
    Ok(result)
}

/// Runs `body` without launching anything.
fn dry<R>(cuda: &Cuda, body: impl FnOnce() -> Result<R>) -> Result<R> {
    let before = cuda.set_mode(Mode::Dry);
    let result = body();
    cuda.set_mode(before);
    result
}

/// Captures a decode step of `rows` rows, once: run on inert rows first, so that kernels are loaded and products planned,
/// then recorded. Gives where it leaves the logits.
fn capture(
    cuda: &Cuda,
    device: &Arc<Device>,
    model: &Model,
    meter: &Meter,
    pools: &mut Pools,
    rows: usize,
) -> Result<u64> {
    if let Some(captured) = pools.captured.get(&rows) {
        return Ok(captured.logits);
    }
    let mut step = StepPlan::default();
    step.pad(rows);
    let cx = Cx { device, numerics: model.numerics(), layer: Layer::Other, bound: None, meter, routes: None };
    let sampled: Vec<i32> = (0..rows as i32).collect();
    device.begin_step();
    pools.inputs.upload(&step.spans, &step.places, &step.tokens, &sampled)?;
    let done = forward(&cx, model, pools, &step, None)?;
    finish(&cx, model, &step, None, done)?;
    cuda.synchronize()?;
    device.begin_step();
    let mut logits = 0;
    let graph = cuda.capture(|| {
        let done = forward(&cx, model, pools, &step, None)?;
        logits = done.logits.map_or(0, |logits| logits.buffer().address());
        Ok(())
    })?;
    pools.captured.insert(rows, Captured { graph, logits });
    Ok(logits)
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
            all.logprobs.extend(scored.targets.read::<f32>()?);
            all.finite &= scored.valid.read::<u8>()?.iter().all(|&valid| valid != 0);
            if prompt.logits {
                all.logits.extend(host_rows(&logits, 0, logits.rows())?);
            }
        }
    }
    Ok(all)
}

/// Rows of a float tensor as f32 on the host.
fn host_rows(tensor: &Tensor, first: usize, rows: usize) -> Result<Vec<f32>> {
    let (from, count) = (first * tensor.cols(), rows * tensor.cols());
    match tensor.dtype() {
        DType::Bf16 => Ok(tensor.read_range::<bf16>(from, count)?.into_iter().map(bf16::to_f32).collect()),
        _ => tensor.read_range::<f32>(from, count),
    }
}
