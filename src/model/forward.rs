//! The forward pass of one step, and the head over the rows that are sampled.

use crate::error::{Error, Result};
use crate::mem::Layer;
use crate::model::layers::LayerState;
use crate::model::weights::Model;
use crate::ops::linear::Input;
use crate::ops::{Batch, Cx, linear, norm, rows};
use crate::tensor::Tensor;

/// Called with (0, embedding rows) and (i + 1, residual after layer i), `[T, H]` each.
pub type Probe<'a> = &'a mut dyn FnMut(usize, &Tensor) -> Result<()>;

/// Known-wrong ways to run the head, kept so that tests and gates can show they are caught.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadFault {
    /// The vocabulary GEMM runs over every row of the window, then the sampled rows are taken.
    FullWindow,
    /// The first rows are taken, as many as are sampled, whichever they are.
    SliceRows,
    /// As many first rows as are sampled are taken, then indexed by the sampled rows' numbers.
    SliceThenGather,
}

impl Model {
    /// Runs the layers over a step's rows: the residual stream after the last layer, `[T, H]`, before the final norm.
    /// Writes KV pages and state slots of every span.
    pub fn forward(
        &self,
        cx: &Cx,
        batch: &Batch,
        state: &mut [LayerState],
        mut probe: Option<Probe>,
    ) -> Result<Tensor> {
        if state.len() != self.layers.len() {
            return Err(Error::shape("forward", format!("{} layers, state of {}", self.layers.len(), state.len())));
        }
        let (eps, at_norm) = (self.geometry.eps, cx.at(Layer::Norm));
        let mut x = rows::embed(&cx.at(Layer::Embed), self.embed.codes(), batch)?;
        if let Some(probe) = &mut probe {
            probe(0, &x)?;
        }
        let Some(first) = self.layers.first() else { return Ok(x) };
        let mut normed = if Model::mixer_takes_codes(cx, first)? {
            Input::Codes(norm::rms_fp8(&at_norm, &x, &first.input_norm, eps)?)
        } else {
            Input::Rows(norm::rms(&at_norm, &x, &first.input_norm, eps, "normed")?)
        };
        for (i, (layer, state)) in self.layers.iter().zip(state).enumerate() {
            let mixed = self.mixer(*cx, layer, normed, batch, state)?;
            normed = add_norm(&at_norm, &mut x, &mixed, &layer.post_norm, eps, Model::mlp_takes_codes(cx, layer)?)?;
            drop(mixed);
            let mlp = Model::mlp(*cx, layer, normed)?;
            let Some(next) = self.layers.get(i + 1) else {
                norm::add(&at_norm, &mut x, &mlp)?;
                drop(mlp);
                if let Some(probe) = &mut probe {
                    probe(i + 1, &x)?;
                }
                break;
            };
            normed = add_norm(&at_norm, &mut x, &mlp, &next.input_norm, eps, Model::mixer_takes_codes(cx, next)?)?;
            drop(mlp);
            if let Some(probe) = &mut probe {
                probe(i + 1, &x)?;
            }
        }
        Ok(x)
    }

    /// Logits `[n, V]` of `n` rows of `x`: the rows are gathered first, so the final norm and the vocabulary GEMM run on
    /// exactly those. `indices` are i32 row numbers on the device, its first `n` used; `n` is at least 1.
    pub fn head(&self, cx: &Cx, x: &Tensor, indices: &Tensor, n: usize, fault: Option<HeadFault>) -> Result<Tensor> {
        let cx = &cx.at(Layer::Head);
        match fault {
            None => {
                let picked = rows::gather(cx, x, indices, n, "rows")?;
                self.logits(cx, &picked)
            }
            Some(HeadFault::FullWindow) => {
                let all = self.logits(cx, x)?;
                rows::gather(cx, &all, indices, n, "rows")
            }
            Some(HeadFault::SliceRows) => {
                let sliced = rows::gather(cx, x, &first_rows(cx, n)?, n, "rows")?;
                self.logits(cx, &sliced)
            }
            Some(HeadFault::SliceThenGather) => {
                let sliced = rows::gather(cx, x, &first_rows(cx, n)?, n, "sliced")?;
                let picked = rows::gather(cx, &sliced, indices, n, "rows")?;
                self.logits(cx, &picked)
            }
        }
    }

    /// The final norm of `rows`, `[n, H]`.
    pub fn final_norm(&self, cx: &Cx, rows: &Tensor) -> Result<Tensor> {
        norm::rms(&cx.at(Layer::Head), rows, &self.norm, self.geometry.eps, "normed")
    }

    fn logits(&self, cx: &Cx, rows: &Tensor) -> Result<Tensor> {
        let normed = self.final_norm(cx, rows)?;
        let head = self.head.as_ref().unwrap_or(&self.embed);
        linear::linear_as(cx, normed.view(), head, "logits", self.numerics.logits)
    }
}

/// `x += delta` and its norm: as codes by token where that is all the next layer reads, without the rows between.
fn add_norm(cx: &Cx, x: &mut Tensor, delta: &Tensor, w: &Tensor, eps: f32, codes: bool) -> Result<Input> {
    if codes {
        norm::add_rms_fp8(cx, x, delta, w, eps).map(Input::Codes)
    } else {
        norm::add_rms(cx, x, delta, w, eps, "normed").map(Input::Rows)
    }
}

/// The numbers 0 to n - 1 on the device.
fn first_rows(cx: &Cx, n: usize) -> Result<Tensor> {
    let numbers: Vec<i32> = (0..n as i32).collect();
    cx.ints("fault", "indices", &numbers)
}
