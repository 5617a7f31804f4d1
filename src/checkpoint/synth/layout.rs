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
        if let Some(rule) = seeded.recipe.rule(seeded.geometry, module) {
            lay.quantised(module, [param.shape[0], param.shape[1]], rule)?;
        } else {
            let cols = param.shape[1..].iter().product();
            let normal = lay.normal(&param.name, cols, param.elements() as u64);
            lay.push(&param.name, Dtype::Bf16, param.shape, Content::Normal(vec![normal]));
        }
        lay.kv_scale(&param.name);
    }
    Ok(lay.list)
}

/// Bytes on disk of one linear module.
pub(crate) fn module_bytes(seeded: Seeded<'_>, module: &str, size: [usize; 2]) -> Result<u64> {
    let [rows, cols] = size.map(|d| d as u64);
    match seeded.recipe.rule(seeded.geometry, module) {
        None => Ok(rows * cols * Dtype::Bf16.bits() / 8),
        Some(rule) => Ok(parts(seeded, module, size, rule)?.iter().map(Part::bytes).sum()),
    }
}

/// One tensor of a quantised module.
struct Part {
    /// The last part of its name.
    last: &'static str,
    dtype: Dtype,
    shape: Vec<usize>,
    content: Content,
}

impl Part {
    fn bytes(&self) -> u64 {
        self.shape.iter().map(|d| *d as u64).product::<u64>() * self.dtype.bits() / 8
    }
}

/// A module's weight under its producer's name, and its scales.
fn parts(seeded: Seeded<'_>, module: &str, size: [usize; 2], rule: &Rule) -> Result<Vec<Part>> {
    let [rows, cols] = size;
    let (key, code) = seeded.codes(module)?;
    let verdict = seeded.verdict(module)?;
    let divides = verdict.scheme == Scheme::Nvfp4(Global::Divides);
    let codes = Content::Codes { key, code };
    let mut list = vec![match code {
        Code::E2m1 => {
            let last = if divides { "weight_packed" } else { "weight" };
            Part { last, dtype: Dtype::U8, shape: vec![rows, cols / 2], content: codes }
        }
        _ => Part { last: "weight", dtype: Dtype::F8E4m3, shape: vec![rows, cols], content: codes },
    }];
    match (seeded.scales(module)?, &rule.scale) {
        (Scales::F32 { key, exponent }, Some(form)) => {
            let native = seeded.recipe.file().producer == Producer::FineGrainedFp8;
            let last = if native { "weight_scale_inv" } else { "weight_scale" };
            let content = Content::Scales { key, exponent };
            list.push(Part { last, dtype: form.dtype(), shape: form.shape(size), content });
        }
        (Scales::F32 { .. }, None) => {}
        (Scales::E4m3 { key }, _) => {
            let content = Content::Codes { key, code: Code::ScaleE4m3 };
            list.push(Part { last: "weight_scale", dtype: Dtype::F8E4m3, shape: vec![rows, cols / 16], content });
        }
    }
    let mut push = |last: &'static str, form: &Form, value: f32| {
        list.push(Part { last, dtype: form.dtype(), shape: form.shape(size), content: Content::One(value) });
    };
    if let Some(form) = &rule.global {
        push(if divides { "weight_global_scale" } else { "weight_scale_2" }, form, seeded.global(module)?);
    }
    if let (Some(form), Some(scale)) = (&rule.input, verdict.input_scale) {
        let divisor = divides && verdict.act == ActScheme::Nvfp4;
        push(if divisor { "input_global_scale" } else { "input_scale" }, form, scale);
    }
    Ok(list)
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

    fn quantised(&mut self, module: &str, size: [usize; 2], rule: &Rule) -> Result<()> {
        for part in parts(self.seeded, module, size, rule)? {
            self.push(&format!("{module}.{}", part.last), part.dtype, part.shape, part.content);
        }
        Ok(())
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
                let content = Content::One(value);
                self.push(&format!("layers.{layer}.self_attn.{tail}"), form.dtype(), form.shape([1, 1]), content);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::recipe::Recipe;

    #[test]
    fn a_tensor_drawn_in_pieces_is_the_tensor() {
        let moe = Geometry::builtin("tiny-moe").unwrap();
        // Fused experts, codes of both kinds, scales of each dtype, scalars.
        for name in ["bf16", "nvfp4", "fp8-tensor", "fp8-channel", "modelopt-fp8-block"] {
            let recipe = Recipe::parse(name).unwrap();
            for tensor in tensors(Seeded::of(&moe, &recipe, 1)).unwrap() {
                let width = tensor.element_bytes();
                let mut whole = vec![0; tensor.bytes() as usize];
                tensor.draw(0, &mut whole);
                for step in [1, 7, 4097] {
                    let mut first = 0;
                    while first < tensor.elements().min(40 * step) {
                        let count = step.min(tensor.elements() - first);
                        let mut piece = vec![0xAA; (count * width) as usize];
                        tensor.draw(first, &mut piece);
                        let at = (first * width) as usize;
                        assert_eq!(piece, whole[at..at + piece.len()], "{name} {} from {first}", tensor.name);
                        first += count;
                    }
                }
            }
        }
    }

    #[test]
    fn names_are_the_producers() {
        let names = |geometry: &str, recipe: &str| {
            let (g, r) = (Geometry::builtin(geometry).unwrap(), Recipe::parse(recipe).unwrap());
            let list = tensors(Seeded::of(&g, &r, 0)).unwrap();
            list.into_iter().map(|t| (t.name, t.dtype, t.shape)).collect::<Vec<_>>()
        };
        let has = |list: &[(String, Dtype, Vec<usize>)], name: &str, dtype: Dtype, shape: &[usize]| {
            assert!(list.iter().any(|(n, d, s)| n == name && *d == dtype && s == shape), "{name} {dtype} {shape:?}");
        };
        let unsloth = names("qwen3.8-27b", "unsloth-nvfp4");
        let layers = "model.language_model.layers";
        has(&unsloth, &format!("{layers}.0.mlp.up_proj.weight_packed"), Dtype::U8, &[17_408, 2560]);
        has(&unsloth, &format!("{layers}.0.mlp.up_proj.weight_scale"), Dtype::F8E4m3, &[17_408, 320]);
        has(&unsloth, &format!("{layers}.0.mlp.up_proj.weight_global_scale"), Dtype::F32, &[1]);
        has(&unsloth, &format!("{layers}.0.mlp.up_proj.input_global_scale"), Dtype::F32, &[1]);
        has(&unsloth, &format!("{layers}.63.mlp.up_proj.weight"), Dtype::F8E4m3, &[17_408, 5120]);
        has(&unsloth, &format!("{layers}.63.mlp.up_proj.weight_scale"), Dtype::Bf16, &[17_408, 1]);
        has(&unsloth, &format!("{layers}.3.self_attn.k_scale"), Dtype::Bf16, &[1]);
        has(&unsloth, "lm_head.weight", Dtype::F8E4m3, &[248_320, 5120]);
        has(&unsloth, "lm_head.weight_scale", Dtype::Bf16, &[248_320, 1]);
        has(&unsloth, &format!("{layers}.0.linear_attn.in_proj_a.weight"), Dtype::Bf16, &[48, 5120]);
        // The published model has 851 parameters without vision and mtp; a scale for each of 233, three for each of 168,
        // and two for each of 16 layers come on top.
        assert_eq!(unsloth.len(), 851 + 233 + 3 * 168 + 2 * 16);
        let nvidia = names("qwen3.6-35b-a3b:layers=4", "nvidia-nvfp4");
        has(&nvidia, &format!("{layers}.0.mlp.experts.255.down_proj.weight"), Dtype::U8, &[2048, 256]);
        has(&nvidia, &format!("{layers}.0.mlp.experts.255.down_proj.weight_scale_2"), Dtype::F32, &[]);
        has(&nvidia, &format!("{layers}.3.self_attn.q_proj.input_scale"), Dtype::F32, &[]);
        has(&nvidia, &format!("{layers}.3.self_attn.v_proj.v_scale"), Dtype::F32, &[]);
        let qwen = names("qwen3.6-35b-a3b:layers=4", "qwen-fp8");
        has(&qwen, &format!("{layers}.0.mlp.experts.0.up_proj.weight_scale_inv"), Dtype::Bf16, &[4, 16]);
        let blocks = names("qwen3.6-35b-a3b:layers=4", "modelopt-fp8-block");
        has(&blocks, "model.layers.0.mlp.experts.0.up_proj.weight_scale", Dtype::F32, &[4, 1, 16, 1]);
        let plain = names("qwen3.6-35b-a3b:layers=4", "bf16");
        has(&plain, &format!("{layers}.0.mlp.experts.gate_up_proj"), Dtype::Bf16, &[256, 1024, 2048]);
        has(&plain, &format!("{layers}.0.mlp.experts.down_proj"), Dtype::Bf16, &[256, 2048, 512]);
    }
}
