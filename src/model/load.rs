//! Loading: every parameter allocated at the persistent end of a device and filled from a source, each linear layer in
//! the scheme its verdict names.
//!
//! Projections of one input are fused into one weight where they are stored alike; what is not stored alike stands beside
//! it and writes its own columns of the same output.

use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::{Geometry, Mixer, Mlp, Source, Verdict};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::mem::{End, Layer, Tag};
use crate::model::weights::{
    AttentionWeights, DenseWeights, GdnWeights, LayerWeights, MixerWeights, MlpWeights, Model, MoeWeights,
};
use crate::num::DType;
use crate::ops::linear::Projection;
use crate::ops::moe::Experts;
use crate::ops::scheme::{Grain, Scheme};
use crate::ops::weight::{BLOCK, InputScale, LinearSpec, Weight};
use crate::ops::{Cx, Meter, Numerics, rope};
use crate::tensor::{Tensor, byte_size};

impl Model {
    /// Allocates every parameter at the persistent end of `device` and fills it from `source`. `progress` is called
    /// with (bytes filled, bytes in all), parameters counted as bf16 whatever they are stored as.
    pub fn load(
        device: &Arc<Device>,
        source: &Source,
        numerics: Numerics,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Model> {
        let geometry = source.geometry().clone();
        let meter = Meter::default();
        let cx = Cx { device, numerics, layer: Layer::Weights, bound: None, meter: &meter, routes: None };
        let total = geometry.param_count() * DType::Bf16.bytes();
        let mut loader = Loader { cx, source, done: 0, total, progress };

        let hidden = geometry.hidden;
        let embed = loader.embedding(geometry.vocab, hidden)?;
        let mut layers = Vec::with_capacity(geometry.layers.len());
        for (i, mixer) in geometry.layers.iter().enumerate() {
            layers.push(loader.layer(&geometry, i, *mixer)?);
        }
        let norm = loader.vector(Layer::Norm, "norm", "norm.weight", &[hidden])?;
        let head = if geometry.tied {
            None
        } else {
            Some(loader.matrix(Layer::Head, "lm_head", "lm_head", geometry.vocab, hidden)?)
        };
        let (freqs, attention_factor) = rope::inv_freq(&rotary(&geometry))?;
        let mut inv_freq = loader.alloc(Layer::Attention, "inv_freq", DType::F32, &[freqs.len()])?;
        inv_freq.write(0, &freqs)?;
        let kv_scales = (0..geometry.layers.len())
            .map(|layer| match numerics.kv {
                DType::U8 => Ok(source.kv_scales(layer)?.unwrap_or((1.0, 1.0))),
                _ => Ok((1.0, 1.0)),
            })
            .collect::<Result<_>>()?;
        Ok(Model { geometry, numerics, embed, head, norm, inv_freq, attention_factor, layers, kv_scales })
    }
}

/// The geometry's rotary embedding as the op takes it.
fn rotary(geometry: &Geometry) -> rope::Rope {
    let yarn = geometry.rope.yarn.map(|y| rope::Yarn {
        factor: y.factor,
        original_max_position: y.original_max_position,
        attention_factor: Some(y.attention_factor),
        beta_fast: y.beta_fast,
        beta_slow: y.beta_slow,
        truncate: true,
    });
    rope::Rope { theta: geometry.rope.theta, rotary_dim: geometry.rotary_dim, yarn }
}

/// A module of a projection.
struct Part {
    module: String,
    rows: usize,
    verdict: Verdict,
}

impl Part {
    /// Whether the two are stored alike and want the same input.
    fn agrees(&self, other: &Part) -> bool {
        alike(&self.verdict, &other.verdict) && self.verdict.input_scale == other.verdict.input_scale
    }
}

/// Whether two modules have the same scheme and input scheme; floats are alike whatever their type.
fn alike(a: &Verdict, b: &Verdict) -> bool {
    let plain = |v: &Verdict| matches!(v.scheme, Scheme::Plain(_));
    a.act == b.act && (a.scheme == b.scheme || (plain(a) && plain(b)))
}

/// Runs of neighbouring parts that one weight can hold.
fn runs(parts: &[Part]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (i, part) in parts.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if fuses(&parts[run.clone()], part) => run.end = i + 1,
            _ => runs.push(i..i + 1),
        }
    }
    runs
}

/// Whether `next` can stand in one weight with `run`. FP8 blocks must end where a part ends: every part but the last has
/// whole blocks, or all are of one size.
fn fuses(run: &[Part], next: &Part) -> bool {
    let whole = run.iter().all(|part| part.rows.is_multiple_of(BLOCK));
    let equal = run.iter().all(|part| part.rows == next.rows);
    run.iter().all(|part| part.agrees(next)) && (next.verdict.scheme != Scheme::Fp8(Grain::Block) || whole || equal)
}

struct Loader<'a> {
    cx: Cx<'a>,
    source: &'a Source,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl Loader<'_> {
    fn alloc(&self, layer: Layer, buffer: &'static str, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let bytes = byte_size(dtype, shape)?;
        let block = self.cx.device.alloc(End::Persistent, Tag::new(layer, "weights", buffer), bytes)?;
        Tensor::new(block, dtype, shape)
    }

    /// The stored type of floats: bf16 where all were published as bf16 or are computed with in bf16, else f32.
    fn stored(&self, published: impl IntoIterator<Item = DType>) -> DType {
        let f32s = self.cx.numerics.activations != DType::Bf16 && published.into_iter().any(|d| d == DType::F32);
        if f32s { DType::F32 } else { DType::Bf16 }
    }

    /// The scheme modules of these verdicts, all alike, are stored in.
    fn scheme<'v>(&self, verdicts: impl IntoIterator<Item = &'v Verdict>) -> Option<Scheme> {
        let schemes: Vec<Scheme> = verdicts.into_iter().map(|v| v.scheme).collect();
        let plain = schemes.iter().filter_map(|s| if let Scheme::Plain(dtype) = s { Some(*dtype) } else { None });
        match schemes.first()? {
            Scheme::Plain(_) => Some(Scheme::Plain(self.stored(plain))),
            quantised => Some(*quantised),
        }
    }

    fn part(&self, module: &str, rows: usize) -> Result<Part> {
        Ok(Part { module: module.to_owned(), rows, verdict: self.source.verdict(module)? })
    }

    fn advance(&mut self, elements: usize) {
        self.done += elements as u64 * DType::Bf16.bytes();
        (self.progress)(self.done, self.total);
    }

    fn fill(&mut self, dst: &mut Tensor, first: usize, rows: usize, name: &str) -> Result<()> {
        self.source.fill(&self.cx, dst, first, rows, name)?;
        self.advance(rows * dst.cols());
        Ok(())
    }

    /// Fills rows `first..first + rows` of a weight with a module, in the weight's scheme.
    fn fill_weight(&mut self, w: &mut Weight, first: usize, rows: usize, module: &str) -> Result<()> {
        let spec = *w.spec();
        if let Scheme::Plain(_) = spec.scheme {
            return self.fill(w.codes_mut(), first, rows, &format!("{module}.weight"));
        }
        self.source.fill_codes(&self.cx, w.codes_mut(), first, rows, module)?;
        if let Some(scales) = w.scales_mut() {
            let (first, rows) = match spec.scheme {
                Scheme::Fp8(_) => (spec.block_row(first), rows.div_ceil(BLOCK)),
                _ => (first, rows),
            };
            self.source.fill_scales(&self.cx, scales, first, rows, module)?;
        }
        if let Some(scales) = w.row_scales_mut()
            && self.cx.device.has_data()
        {
            let mut values = vec![0.0; rows];
            self.source.row_scale(module)?.write(module, &mut values)?;
            scales.write(first, &values)?;
        }
        self.advance(rows * spec.cols);
        Ok(())
    }

    /// One weight of parts that agree, row after row.
    fn fused(&mut self, layer: Layer, buffer: &'static str, parts: &[Part], cols: usize) -> Result<Weight> {
        let rows = parts.iter().map(|part| part.rows).sum();
        let Some(scheme) = self.scheme(parts.iter().map(|part| &part.verdict)) else {
            return Err(Error::shape("load", format!("{buffer} has no parts")));
        };
        let one_size = parts.iter().all(|part| part.rows == parts[0].rows);
        let segment_rows = if scheme == Scheme::Fp8(Grain::Block) && one_size { parts[0].rows } else { rows };
        let Verdict { act, input_scale, .. } = parts[0].verdict;
        let spec = LinearSpec { rows, cols, scheme, act, segment_rows };
        let input = input_scale.map_or(InputScale::None, InputScale::One);
        let mut weight = Weight::alloc(self.cx.device, Tag::new(layer, "weights", buffer), spec, input)?;
        let mut first = 0;
        for part in parts {
            self.fill_weight(&mut weight, first, part.rows, &part.module)?;
            first += part.rows;
        }
        Ok(weight)
    }

    /// One module.
    fn matrix(&mut self, layer: Layer, buffer: &'static str, module: &str, rows: usize, cols: usize) -> Result<Weight> {
        let part = self.part(module, rows)?;
        self.fused(layer, buffer, &[part], cols)
    }

    /// Modules of one input, each (module, rows), in the order of their output columns.
    fn projection(
        &mut self,
        layer: Layer,
        buffer: &'static str,
        parts: &[(&str, usize)],
        cols: usize,
    ) -> Result<Projection> {
        let parts: Vec<Part> = parts.iter().map(|(module, rows)| self.part(module, *rows)).collect::<Result<_>>()?;
        let weights = runs(&parts).into_iter().map(|run| self.fused(layer, buffer, &parts[run], cols));
        Projection::new(weights.collect::<Result<_>>()?)
    }

    /// The embedding is floats in every checkpoint: it is looked up, not multiplied with, unless the head is tied to it.
    fn embedding(&mut self, vocab: usize, hidden: usize) -> Result<Weight> {
        let name = "embed_tokens.weight";
        let dtype = self.stored([self.source.dtype(name)?]);
        let mut table = self.alloc(Layer::Embed, "embed_tokens", dtype, &[vocab, hidden])?;
        self.fill(&mut table, 0, vocab, name)?;
        Weight::plain(table)
    }

    /// A small parameter, kept in f32.
    fn vector(&mut self, layer: Layer, buffer: &'static str, name: &str, shape: &[usize]) -> Result<Tensor> {
        let mut tensor = self.alloc(layer, buffer, DType::F32, shape)?;
        self.fill(&mut tensor, 0, shape[0], name)?;
        Ok(tensor)
    }

    fn layer(&mut self, geometry: &Geometry, index: usize, mixer: Mixer) -> Result<LayerWeights> {
        let prefix = format!("layers.{index}");
        let hidden = geometry.hidden;
        Ok(LayerWeights {
            input_norm: self.vector(
                Layer::Norm,
                "input_layernorm",
                &format!("{prefix}.input_layernorm.weight"),
                &[hidden],
            )?,
            mixer: match mixer {
                Mixer::Gdn => MixerWeights::Gdn(self.gdn(geometry, &format!("{prefix}.linear_attn"))?),
                Mixer::Attention => MixerWeights::Attention(self.attention(geometry, &format!("{prefix}.self_attn"))?),
            },
            post_norm: self.vector(
                Layer::Norm,
                "post_attention_layernorm",
                &format!("{prefix}.post_attention_layernorm.weight"),
                &[hidden],
            )?,
            mlp: self.mlp(geometry, &format!("{prefix}.mlp"))?,
        })
    }

    fn gdn(&mut self, geometry: &Geometry, at: &str) -> Result<GdnWeights> {
        let (g, hidden, layer) = (geometry.gdn, geometry.hidden, Layer::Gdn);
        let (channels, values, heads) = (g.conv_channels(), g.value_channels(), g.value_heads);
        let name = |part: &str| format!("{at}.{part}");
        Ok(GdnWeights {
            qkvz: self.projection(
                layer,
                "in_proj_qkvz",
                &[(&name("in_proj_qkv"), channels), (&name("in_proj_z"), values)],
                hidden,
            )?,
            ba: self.projection(
                layer,
                "in_proj_ba",
                &[(&name("in_proj_b"), heads), (&name("in_proj_a"), heads)],
                hidden,
            )?,
            conv: self.vector(layer, "conv1d", &name("conv1d.weight"), &[channels, g.conv_kernel])?,
            a_log: self.vector(layer, "A_log", &name("A_log"), &[heads])?,
            dt_bias: self.vector(layer, "dt_bias", &name("dt_bias"), &[heads])?,
            norm: self.vector(layer, "norm", &name("norm.weight"), &[g.value_dim])?,
            out: self.matrix(layer, "out_proj", &name("out_proj"), hidden, values)?,
        })
    }

    fn attention(&mut self, geometry: &Geometry, at: &str) -> Result<AttentionWeights> {
        let (hidden, layer, dim) = (geometry.hidden, Layer::Attention, geometry.head_dim);
        let (queries, keys) = (geometry.heads * dim, geometry.kv_heads * dim);
        let name = |part: &str| format!("{at}.{part}");
        Ok(AttentionWeights {
            qkv: self.projection(
                layer,
                "qkv_proj",
                &[(&name("q_proj"), 2 * queries), (&name("k_proj"), keys), (&name("v_proj"), keys)],
                hidden,
            )?,
            q_norm: self.vector(layer, "q_norm", &name("q_norm.weight"), &[dim])?,
            k_norm: self.vector(layer, "k_norm", &name("k_norm.weight"), &[dim])?,
            out: self.matrix(layer, "o_proj", &name("o_proj"), hidden, queries)?,
        })
    }

    fn dense(&mut self, layer: Layer, hidden: usize, inter: usize, at: &str) -> Result<DenseWeights> {
        let name = |part: &str| format!("{at}.{part}");
        Ok(DenseWeights {
            gate_up: self.projection(
                layer,
                "gate_up_proj",
                &[(&name("gate_proj"), inter), (&name("up_proj"), inter)],
                hidden,
            )?,
            down: self.matrix(layer, "down_proj", &name("down_proj"), hidden, inter)?,
        })
    }

    fn mlp(&mut self, geometry: &Geometry, at: &str) -> Result<MlpWeights> {
        let hidden = geometry.hidden;
        match geometry.mlp {
            Mlp::Dense { inter } => Ok(MlpWeights::Dense(self.dense(Layer::Mlp, hidden, inter, at)?)),
            Mlp::Moe { experts, top_k, inter, shared_inter } => Ok(MlpWeights::Moe(MoeWeights {
                router: self.matrix(Layer::Moe, "router", &format!("{at}.gate"), experts, hidden)?,
                experts: self.experts(hidden, experts, inter, at)?,
                top_k,
                inter,
                shared: self.dense(Layer::Moe, hidden, shared_inter, &format!("{at}.shared_expert"))?,
                shared_gate: self.matrix(
                    Layer::Moe,
                    "shared_expert_gate",
                    &format!("{at}.shared_expert_gate"),
                    1,
                    hidden,
                )?,
            })),
        }
    }

    /// Every expert resident, each in the slot of its own number.
    fn experts(&mut self, hidden: usize, experts: usize, inter: usize, at: &str) -> Result<Experts> {
        let gate = self.stacked(at, experts, "gate_proj", inter)?;
        let up = self.stacked(at, experts, "up_proj", inter)?;
        let down = self.stacked(at, experts, "down_proj", hidden)?;
        // Floats are kept in one type for all three.
        let floats = [&gate[0], &up[0], &down[0]].map(|part| part.verdict.scheme);
        let dtype =
            self.stored(floats.into_iter().filter_map(|s| if let Scheme::Plain(d) = s { Some(d) } else { None }));
        let (buffer, fused) = ("experts.gate_up", gate.iter().zip(&up).all(|(gate, up)| gate.agrees(up)));
        let gate_up = if fused {
            let parts = gate.into_iter().zip(up).flat_map(|(gate, up)| [gate, up]).collect::<Vec<_>>();
            Projection::from(self.stack(buffer, &parts, experts, dtype, hidden)?)
        } else {
            let gate = self.stack(buffer, &gate, experts, dtype, hidden)?;
            Projection::new(vec![gate, self.stack(buffer, &up, experts, dtype, hidden)?])?
        };
        let down = self.stack("experts.down", &down, experts, dtype, inter)?;
        let mut slots = self.alloc(Layer::Moe, "expert_slots", DType::I32, &[experts])?;
        slots.write(0, &(0..experts as i32).collect::<Vec<_>>())?;
        Ok(Experts { gate_up, down, slots })
    }

    /// One projection of every expert; an error where they are not all stored alike.
    fn stacked(&self, at: &str, experts: usize, projection: &str, rows: usize) -> Result<Vec<Part>> {
        let parts: Vec<Part> =
            (0..experts).map(|e| self.part(&format!("{at}.experts.{e}.{projection}"), rows)).collect::<Result<_>>()?;
        let form =
            |part: &Part| format!("{} is {:?} with input {:?}", part.module, part.verdict.scheme, part.verdict.act);
        match parts.iter().find(|part| !alike(&part.verdict, &parts[0].verdict)) {
            None => Ok(parts),
            Some(odd) => Err(Error::Unsupported {
                what: format!("{}, but {}", form(odd), form(&parts[0])),
                supported: "a layer's experts are kept in one stack; quantise all of them alike, or none".to_owned(),
            }),
        }
    }

    /// One weight of equal modules of every expert; the first `parts.len() / experts` of them are expert 0's.
    fn stack(
        &mut self,
        buffer: &'static str,
        parts: &[Part],
        experts: usize,
        dtype: DType,
        cols: usize,
    ) -> Result<Weight> {
        let rows = parts[0].rows;
        let Verdict { scheme, act, input_scale } = parts[0].verdict;
        let scheme = if let Scheme::Plain(_) = scheme { Scheme::Plain(dtype) } else { scheme };
        let spec = LinearSpec { rows: parts.len() * rows, cols, scheme, act, segment_rows: rows };
        let input = if input_scale.is_none() {
            InputScale::None
        } else {
            let mut scales = self.alloc(Layer::Moe, buffer, DType::F32, &[experts])?;
            if self.cx.device.has_data() {
                let per_expert = parts.chunks(parts.len() / experts);
                let values = per_expert.map(|parts| input_scale_of(&parts[0])).collect::<Result<Vec<_>>>()?;
                scales.write(0, &values)?;
            }
            InputScale::Each(scales)
        };
        let mut weight = Weight::alloc(self.cx.device, Tag::new(Layer::Moe, "weights", buffer), spec, input)?;
        for (i, part) in parts.iter().enumerate() {
            self.fill_weight(&mut weight, i * rows, rows, &part.module)?;
        }
        Ok(weight)
    }
}

fn input_scale_of(part: &Part) -> Result<f32> {
    part.verdict.input_scale.ok_or_else(|| Error::Unsupported {
        what: format!("{} has no input scale, other experts of its layer have one", part.module),
        supported: "each expert with its own, or none with any".to_owned(),
    })
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // one fused run of parts is a list of one range
mod tests {
    use super::*;
    use crate::ops::scheme::{ActScheme, Global};

    const BLOCKS: Scheme = Scheme::Fp8(Grain::Block);
    const NVFP4: Scheme = Scheme::Nvfp4(Global::Divides);
    const BF16: Scheme = Scheme::Plain(DType::Bf16);

    fn part(rows: usize, scheme: Scheme, act: ActScheme, input_scale: Option<f32>) -> Part {
        Part { module: String::new(), rows, verdict: Verdict { scheme, act, input_scale } }
    }

    fn runs_of(parts: &[(usize, Scheme, ActScheme, Option<f32>)]) -> Vec<Range<usize>> {
        runs(&parts.iter().map(|&(rows, scheme, act, scale)| part(rows, scheme, act, scale)).collect::<Vec<_>>())
    }

    #[test]
    fn neighbours_that_are_stored_alike_and_want_the_same_input_fuse() {
        use ActScheme::{Fp8Group, Fp8Token, None as Unquantised, Nvfp4};
        let f32s = Scheme::Plain(DType::F32);
        let channel = Scheme::Fp8(Grain::Channel);
        let cases = [
            (vec![(7, BF16, Unquantised, None), (9, f32s, Unquantised, None)], vec![0..2]),
            (vec![(7, NVFP4, Nvfp4, Some(2.0)), (9, NVFP4, Nvfp4, Some(2.0))], vec![0..2]),
            (vec![(7, NVFP4, Nvfp4, Some(2.0)), (9, NVFP4, Nvfp4, Some(3.0))], vec![0..1, 1..2]),
            (vec![(7, NVFP4, Nvfp4, Some(2.0)), (9, NVFP4, Unquantised, None)], vec![0..1, 1..2]),
            (vec![(7, channel, Fp8Token, None), (9, BF16, Unquantised, None)], vec![0..1, 1..2]),
            (
                vec![(7, channel, Fp8Token, None), (3, channel, Fp8Token, None), (3, BLOCKS, Fp8Group, None)],
                vec![0..2, 2..3],
            ),
            (
                vec![(7, Scheme::Nvfp4(Global::Multiplies), Unquantised, None), (7, NVFP4, Unquantised, None)],
                vec![0..1, 1..2],
            ),
        ];
        for (parts, want) in cases {
            assert_eq!(runs_of(&parts), want, "{parts:?}");
        }
    }

    #[test]
    fn blocks_fuse_where_each_part_but_the_last_is_whole_or_all_are_of_one_size() {
        let of = |rows: &[usize]| {
            runs_of(&rows.iter().map(|&rows| (rows, BLOCKS, ActScheme::Fp8Group, None)).collect::<Vec<_>>())
        };
        assert_eq!(of(&[256, 128, 128]), [0..3]);
        assert_eq!(of(&[256, 128, 5]), [0..3]);
        assert_eq!(of(&[192, 192]), [0..2]);
        assert_eq!(of(&[192, 256]), [0..1, 1..2]);
        assert_eq!(of(&[256, 5, 5]), [0..2, 2..3]);
        assert_eq!(of(&[5, 5, 5, 256]), [0..3, 3..4]);
    }
}
