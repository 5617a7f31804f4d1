//! What a checkpoint of a geometry and a recipe has on disk: every tensor's name, dtype, shape and content.
//!
//! May live here: producers' names of tensors and the forms of their scales. May not: files, and the config (config.rs).

use half::bf16;

use crate::checkpoint::geometry::{Geometry, Mixer, Mlp};
use crate::checkpoint::header::Dtype;
use crate::checkpoint::recipe::{Class, Form, Producer, Rule};
use crate::checkpoint::seeded::{Scales, Seeded, init_of};
use crate::error::Result;
use crate::ops::fill::Code;
use crate::ops::reference::fill;
use crate::ops::scheme::{ActScheme, Global, Scheme};

/// One tensor of a checkpoint to be written.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OnDisk {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    content: Content,
}

/// Where its elements come from, in row-major order.
#[derive(Debug, Clone, PartialEq)]
enum Content {
    /// Parameters one after the other, near-normal in bf16.
    Normal(Vec<Normal>),
    /// Codes of one stream.
    Codes { key: [u32; 2], code: Code },
    /// Scales of one stream.
    Scales { key: [u32; 2], exponent: i32 },
    /// One value.
    One(f32),
}

#[derive(Debug, Clone, PartialEq)]
struct Normal {
    key: [u32; 2],
    mean: f32,
    std: f32,
    elements: u64,
}

impl OnDisk {
    pub(crate) fn elements(&self) -> u64 {
        self.shape.iter().map(|d| *d as u64).product()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.elements() * self.element_bytes()
    }

    /// Bytes of one element.
    pub(crate) fn element_bytes(&self) -> u64 {
        self.dtype.bits() / 8
    }

    /// Writes the bytes from element `first` on, as many as `out` holds; `out` is whole elements within the tensor.
    pub(crate) fn draw(&self, first: u64, out: &mut [u8]) {
        match &self.content {
            Content::Codes { key, code } => fill::codes(out, *key, first * code.elements(), *code),
            Content::One(value) => self.store(&[*value], out),
            Content::Scales { key, exponent } => {
                let mut values = vec![0.0; out.len() / self.element_bytes() as usize];
                fill::scales(&mut values, *key, first, *exponent);
                self.store(&values, out);
            }
            Content::Normal(parts) => {
                let (mut at, mut out) = (first, out);
                for part in parts {
                    if at >= part.elements {
                        at -= part.elements;
                        continue;
                    }
                    let count = (part.elements - at).min(out.len() as u64 / 2) as usize;
                    let (here, rest) = out.split_at_mut(2 * count);
                    let mut values = vec![bf16::ZERO; count];
                    fill::normal(&mut values, part.key, at, part.mean, part.std);
                    for (bytes, value) in here.as_chunks_mut::<2>().0.iter_mut().zip(&values) {
                        *bytes = value.to_le_bytes();
                    }
                    (at, out) = (0, rest);
                    if out.is_empty() {
                        break;
                    }
                }
            }
        }
    }

    fn store(&self, values: &[f32], out: &mut [u8]) {
        if self.dtype == Dtype::Bf16 {
            for (bytes, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *bytes = bf16::from_f32(*value).to_le_bytes();
            }
        } else {
            for (bytes, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                *bytes = value.to_le_bytes();
            }
        }
    }
}

/// What stands before a canonical name on disk.
pub(crate) fn prefix(class: Class) -> &'static str {
    match class {
        Class::Text => "model.",
        Class::Multimodal => "model.language_model.",
    }
}

/// A canonical name as it stands on disk and in the config: the head has no prefix.
pub(crate) fn spelled(class: Class, canonical: &str) -> String {
    if canonical == "lm_head" || canonical.starts_with("lm_head.") {
        canonical.to_owned()
    } else {
        format!("{}{canonical}", prefix(class))
    }
}

/// Every tensor, in the order of the forward pass, a module's scales behind its weight.
pub(crate) fn tensors(seeded: Seeded<'_>) -> Result<Vec<OnDisk>> {
    let mut lay = Lay { seeded, list: Vec::new() };
    for param in seeded.geometry.params() {
        if lay.is_fused(&param.name) {
            lay.fused(&param.name);
            continue;
        }
        let module = param.name.strip_suffix(".weight").unwrap_or_default();
        match seeded.recipe.rule(seeded.geometry, module) {
            Some(rule) => lay.quantised(module, [param.shape[0], param.shape[1]], rule)?,
            None => {
                let cols = param.shape[1..].iter().product();
                let normal = lay.normal(&param.name, cols, param.elements() as u64);
                lay.push(&param.name, Dtype::Bf16, param.shape, Content::Normal(vec![normal]));
            }
        }
        lay.kv_scale(&param.name);
    }
    Ok(lay.list)
}

struct Lay<'a> {
    seeded: Seeded<'a>,
    list: Vec<OnDisk>,
}

impl<'a> Lay<'a> {
    fn geometry(&self) -> &'a Geometry {
        self.seeded.geometry
    }

    fn producer(&self) -> Producer {
        self.seeded.recipe.file().producer
    }

    fn push(&mut self, canonical: &str, dtype: Dtype, shape: Vec<usize>, content: Content) {
        let name = spelled(self.seeded.recipe.file().class, canonical);
        self.list.push(OnDisk { name, dtype, shape, content });
    }

    fn normal(&self, name: &str, cols: usize, elements: u64) -> Normal {
        let init = init_of(name, cols);
        Normal { key: self.seeded.key(name), mean: init.mean, std: init.std, elements }
    }

    /// Whether it is one of the experts that unquantised files keep in one tensor of a layer.
    fn is_fused(&self, name: &str) -> bool {
        self.producer() == Producer::Transformers && name.contains(".mlp.experts.")
    }

    /// The layer's fused tensors, once: gate rows first, and no ".weight" behind the name.
    fn fused(&mut self, name: &str) {
        let Mlp::Moe { experts, inter, .. } = self.geometry().mlp else { return };
        let Some(layer) = name.strip_suffix(".0.gate_proj.weight") else { return };
        let hidden = self.geometry().hidden;
        let elements = (inter * hidden) as u64;
        let of = |e: usize, part: &str, cols| self.normal(&format!("{layer}.{e}.{part}_proj.weight"), cols, elements);
        let gate_up = (0..experts).flat_map(|e| [of(e, "gate", hidden), of(e, "up", hidden)]).collect();
        let down = (0..experts).map(|e| of(e, "down", inter)).collect();
        let shape = vec![experts, 2 * inter, hidden];
        self.push(&format!("{layer}.gate_up_proj"), Dtype::Bf16, shape, Content::Normal(gate_up));
        let shape = vec![experts, hidden, inter];
        self.push(&format!("{layer}.down_proj"), Dtype::Bf16, shape, Content::Normal(down));
    }

    /// A module's weight under its producer's name, and its scales.
    fn quantised(&mut self, module: &str, size: [usize; 2], rule: &Rule) -> Result<()> {
        let [rows, cols] = size;
        let (key, code) = self.seeded.codes(module)?;
        let (scales, verdict) = (self.seeded.scales(module)?, self.seeded.verdict(module)?);
        let divides = verdict.scheme == Scheme::Nvfp4(Global::Divides);
        let at = |last: &str| format!("{module}.{last}");
        let codes = Content::Codes { key, code };
        match code {
            Code::E2m1 if divides => self.push(&at("weight_packed"), Dtype::U8, vec![rows, cols / 2], codes),
            Code::E2m1 => self.push(&at("weight"), Dtype::U8, vec![rows, cols / 2], codes),
            _ => self.push(&at("weight"), Dtype::F8E4m3, vec![rows, cols], codes),
        }
        match (scales, &rule.scale) {
            (Scales::E4m3 { key }, _) => {
                let content = Content::Codes { key, code: Code::ScaleE4m3 };
                self.push(&at("weight_scale"), Dtype::F8E4m3, vec![rows, cols / 16], content);
            }
            (Scales::F32 { key, exponent }, Some(form)) => {
                let native = self.producer() == Producer::FineGrainedFp8;
                let name = at(if native { "weight_scale_inv" } else { "weight_scale" });
                self.push(&name, form.dtype(), form.shape(size), Content::Scales { key, exponent });
            }
            (Scales::F32 { .. }, None) => {}
        }
        if let Some(form) = &rule.global {
            let name = at(if divides { "weight_global_scale" } else { "weight_scale_2" });
            self.one(&name, form, size, self.seeded.global(module)?);
        }
        if let (Some(form), Some(scale)) = (&rule.input, verdict.input_scale) {
            let divisor = divides && verdict.act == ActScheme::Nvfp4;
            let name = at(if divisor { "input_global_scale" } else { "input_scale" });
            self.one(&name, form, size, scale);
        }
        Ok(())
    }

    fn one(&mut self, name: &str, form: &Form, size: [usize; 2], value: f32) {
        self.push(name, form.dtype(), form.shape(size), Content::One(value));
    }

    /// The KV scales of an attention layer, behind its last projection.
    fn kv_scale(&mut self, name: &str) {
        let Some(layer) = name.strip_prefix("layers.").and_then(|n| n.strip_suffix(".self_attn.o_proj.weight")) else {
            return;
        };
        let (Ok(layer), Some(form)) = (layer.parse::<usize>(), self.seeded.recipe.file().kv.clone()) else { return };
        if self.geometry().layers.get(layer) != Some(&Mixer::Attention) {
            return;
        }
        if let Some((k, v)) = self.seeded.kv_scales(layer) {
            for (which, value) in [("k", k), ("v", v)] {
                let tail = match self.producer() {
                    Producer::Modelopt => format!("{which}_proj.{which}_scale"),
                    _ => format!("{which}_scale"),
                };
                self.one(&format!("layers.{layer}.self_attn.{tail}"), &form, [1, 1], value);
            }
        }
    }
}
