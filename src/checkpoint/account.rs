//! Every tensor on disk accounted for: it fills a parameter, is skipped by a named rule, or is an error.
//!
//! May live here: matching tensors to parameters and parts of quantised modules by name, the tie rule, fused experts as
//! row slices. May not: reading files, and what a quantised module's tensors must be (quant/check.rs); and nothing is ever
//! reshaped, broadcast or converted to make it fit.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use super::geometry::{Geometry, Mixer, Mlp, Param};
use super::header::{Dtype, Tensor};
use super::json::shown;
use super::names::{PREFIXES, Role, SkipRule, kv_scale, role};
use super::quant::check::{Size, judge};
use super::quant::matcher::Spelled;
use super::quant::parts::{Part, Parts, foreign};
use super::quant::{Kv, Quantisation, plain};
use crate::error::{Error, Result};
use crate::ops::scheme::{ActScheme, Scheme};

/// How many names an error lists before it only counts.
const LISTED: usize = 3;

/// Where one parameter's bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Element type on disk.
    pub dtype: Dtype,
    /// Elements along each dimension, outermost first; of a parameter as [`Geometry::params`] says, of a part of a
    /// quantised module as on disk.
    pub shape: Vec<usize>,
    /// Position in the checkpoint's files.
    pub(crate) file: usize,
    /// First byte in that file.
    pub(crate) offset: u64,
    /// Position in the checkpoint's names on disk.
    pub(crate) source: usize,
}

impl Entry {
    /// Rows: elements along the first dimension; 1 for a scalar.
    pub fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.shape.iter().skip(1).product::<usize>() * (self.dtype.bits() / 8) as usize
    }

    /// Bytes in all.
    pub fn bytes(&self) -> u64 {
        self.rows() as u64 * self.row_bytes() as u64
    }
}

/// Something on disk that is not read, and the rule that says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    /// The tensor's name on disk, or the file's where the rule is [`SkipRule::OtherFile`].
    pub name: String,
    /// Why.
    pub rule: SkipRule,
    /// Bytes not read.
    pub bytes: u64,
}

/// One linear module of a checkpoint, as its config says and its tensors are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Its canonical name, without `.weight`: `layers.3.mlp.experts.5.gate_proj`, `lm_head`.
    pub name: String,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// How its weight is stored.
    pub scheme: Scheme,
    /// How its input is to be quantised.
    pub act: ActScheme,
    /// Bytes on disk: codes and all scales.
    pub bytes: u64,
}

/// A tensor and the position of its file.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) file: usize,
    pub(crate) tensor: Tensor,
}

/// The result: where each parameter is, or each part of a quantised module; what was left out; and what is wrong. Nothing
/// may be read from a checkpoint with faults.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) entries: HashMap<String, Entry>,
    pub(crate) skipped: Vec<Skipped>,
    /// Linear modules that are what the config says, in the order of the forward pass.
    pub(crate) modules: Vec<Module>,
    pub(crate) faults: Vec<Error>,
}

/// Whether a parameter is the weight of a linear module: a matrix that is no table of rows.
fn is_linear(param: &Param) -> bool {
    param.shape.len() == 2 && param.name != "embed_tokens.weight"
}

/// Decides whether the head is tied, from the flag and from what is on disk.
pub(crate) fn settle_tie(dir: &Path, g: &mut Geometry, unsettled: bool, found: &[Found]) -> Result<()> {
    let is_head = |f: &&Found| matches!(role(&f.tensor.name), Role::Param(name) if name.starts_with("lm_head."));
    let head = found.iter().find(is_head);
    match head {
        _ if unsettled => g.tied = head.is_none(),
        Some(head) if g.tied => {
            let what = format!(
                "tensor \"{}\" is there, and config.json says tie_word_embeddings true; remove the one that is wrong",
                shown(&head.tensor.name)
            );
            return Err(Error::checkpoint(dir, what));
        }
        None if !g.tied => {
            let what = "no lm_head.weight, and config.json does not say tie_word_embeddings true; \
                the head's file is missing, or the flag is";
            return Err(Error::checkpoint(dir, what));
        }
        _ => {}
    }
    Ok(())
}

/// Matches all tensors of the checkpoint to the parameters of `g`, as `quant` says they are stored.
///
/// # Errors
/// Only what stops the matching itself; what is wrong with tensors is in [`Account::faults`].
pub(crate) fn account(
    dir: &Path,
    g: &Geometry,
    quant: &Quantisation,
    files: &[PathBuf],
    found: &[Found],
) -> Result<Account> {
    let params = g.params();
    let mut fill = Fill {
        g,
        files,
        found,
        expected: params.iter().map(|p| (p.name.as_str(), p)).collect(),
        entries: HashMap::with_capacity(found.len()),
        failed: HashSet::new(),
    };
    let (mut skipped, mut unknown, mut faults) = (Vec::new(), Vec::new(), Vec::new());
    for (source, Found { tensor, .. }) in found.iter().enumerate() {
        if let Role::Skip(rule) = role(&tensor.name) {
            skipped.push(Skipped { name: tensor.name.clone(), rule, bytes: tensor.bytes });
            continue;
        }
        match fill.one(source) {
            Ok(true) => {}
            Ok(false) => unknown.push(source),
            Err(fault) => faults.push(fault),
        }
    }
    if let Some(first) = unknown.first() {
        let file = &files[found[*first].file];
        faults.push(unknown_tensor(g, quant, file, &found[*first].tensor.name, unknown.len()));
    }
    let missing: Vec<&Param> = params.iter().filter(|p| !fill.has(p)).collect();
    if !missing.is_empty() {
        faults.push(missing_parameters(dir, &missing, params.len()));
    }
    let modules = fill.judge(dir, quant, &params, &mut faults)?;
    if faults.is_empty() && !quant.is_absent() && modules.iter().all(|m| matches!(m.scheme, Scheme::Plain(_))) {
        let what = "config.json says the weights are quantised, and no module is on disk; take the quantisation config \
            away, or the right files";
        faults.push(Error::checkpoint(dir, what));
    }
    fill.kv(dir, quant, &mut faults);
    Ok(Account { entries: fill.entries, skipped, modules, faults })
}

struct Fill<'a> {
    g: &'a Geometry,
    files: &'a [PathBuf],
    found: &'a [Found],
    expected: HashMap<&'a str, &'a Param>,
    entries: HashMap<String, Entry>,
    /// Parameters whose tensor is there and wrong.
    failed: HashSet<String>,
}

impl Fill<'_> {
    fn error(&self, source: usize, what: &str) -> Error {
        let Found { file, tensor } = &self.found[source];
        Error::checkpoint(&self.files[*file], format!("tensor \"{}\": {what}", shown(&tensor.name)))
    }

    /// One tensor; false where it is nothing of this model.
    fn one(&mut self, source: usize) -> Result<bool> {
        let tensor = &self.found[source].tensor;
        match (role(&tensor.name), self.g.mlp) {
            (Role::Param(name), _) => self.whole(source, name),
            (Role::FusedGateUp(l), Mlp::Moe { experts, inter, .. }) if l < self.g.layers.len() => {
                self.fused(source, l, [experts, 2 * inter, self.g.hidden], &["gate_proj", "up_proj"], Part::Weight)
            }
            (Role::FusedDown(l), Mlp::Moe { experts, inter, .. }) if l < self.g.layers.len() => {
                self.fused(source, l, [experts, self.g.hidden, inter], &["down_proj"], Part::Weight)
            }
            (Role::FusedGateUpScale(l), Mlp::Moe { experts, inter, .. }) if l < self.g.layers.len() => {
                if !inter.is_multiple_of(128) {
                    let what =
                        format!("blocks of 128 rows over gate and up rows of {inter} each; they must not share one");
                    return Err(self.error(source, &what));
                }
                let shape = [experts, 2 * inter / 128, self.g.hidden.div_ceil(128)];
                self.fused(source, l, shape, &["gate_proj", "up_proj"], Part::ScaleInv)
            }
            (Role::FusedDownScale(l), Mlp::Moe { experts, inter, .. }) if l < self.g.layers.len() => {
                let shape = [experts, self.g.hidden.div_ceil(128), inter.div_ceil(128)];
                self.fused(source, l, shape, &["down_proj"], Part::ScaleInv)
            }
            _ => Ok(false),
        }
    }

    /// A tensor that is one parameter, or one part of a linear module, or a KV scale.
    fn whole(&mut self, source: usize, name: &str) -> Result<bool> {
        let tensor = &self.found[source].tensor;
        if let Some(param) = self.expected.get(name).copied().filter(|p| !is_linear(p)) {
            self.check(source, &param.name, &param.shape)?;
            self.insert(source, name.to_owned(), param.shape.clone(), tensor.offset)?;
            return Ok(true);
        }
        let Some((module, last)) = name.rsplit_once('.') else { return Ok(false) };
        let is_module = || self.expected.get(format!("{module}.weight").as_str()).is_some_and(|p| is_linear(p));
        if Part::by_name(last).is_some() && is_module() {
            self.insert(source, name.to_owned(), tensor.shape.clone(), tensor.offset)?;
            return Ok(true);
        }
        if let Some(scale) = kv_scale(name)
            && self.attention_layers().any(|l| scale == k_scale(l) || scale == v_scale(l))
        {
            self.insert(source, scale, tensor.shape.clone(), tensor.offset)?;
            return Ok(true);
        }
        Ok(false)
    }

    /// A tensor that holds, for each expert in turn, the rows of `parts` in turn.
    fn fused(&mut self, source: usize, layer: usize, shape: [usize; 3], parts: &[&str], part: Part) -> Result<bool> {
        let tensor = &self.found[source].tensor;
        if tensor.shape != shape {
            let of = format!("layers.{layer}.mlp.experts.");
            let expected = self.expected.keys().filter(|n| n.starts_with(&of)).map(|n| (*n).to_owned());
            self.failed.extend(expected);
            return Err(self.error(source, &wrong_shape(&tensor.shape, &shape)));
        }
        let [experts, rows, columns] = shape;
        let rows = rows / parts.len();
        let bytes = (rows * columns) as u64 * tensor.dtype.bits() / 8;
        let mut offset = tensor.offset;
        for e in 0..experts {
            for stem in parts {
                let name = format!("layers.{layer}.mlp.experts.{e}.{stem}.{part}");
                self.insert(source, name, vec![rows, columns], offset)?;
                offset += bytes;
            }
        }
        Ok(true)
    }

    /// A parameter that is never quantised: its dtype and shape.
    fn check(&mut self, source: usize, name: &str, shape: &[usize]) -> Result<()> {
        let tensor = &self.found[source].tensor;
        let what = match plain(tensor.dtype) {
            Err(why) => format!("dtype {}; must be BF16 or F32: {why}", tensor.dtype),
            Ok(()) if tensor.shape != shape => wrong_shape(&tensor.shape, shape),
            Ok(()) => return Ok(()),
        };
        self.failed.insert(name.to_owned());
        Err(self.error(source, &what))
    }

    fn insert(&mut self, source: usize, name: String, shape: Vec<usize>, offset: u64) -> Result<()> {
        if let Some(first) = self.entries.get(&name) {
            let other = shown(&self.found[first.source].tensor.name);
            return Err(self.error(source, &format!("it is {name}, and so is \"{other}\"; remove one")));
        }
        let Found { file, tensor } = &self.found[source];
        self.entries.insert(name, Entry { dtype: tensor.dtype, shape, file: *file, offset, source });
        Ok(())
    }

    /// Whether any tensor was found for a parameter, right or wrong.
    fn has(&self, param: &Param) -> bool {
        self.failed.contains(&param.name)
            || self.entries.contains_key(&param.name)
            || (is_linear(param) && !self.parts(module_of(param)).is_empty())
    }

    fn parts(&self, module: &str) -> Parts<'_> {
        Parts::of(|last| self.entries.get(&format!("{module}.{last}")))
    }

    /// Holds every linear module's tensors against the config.
    fn judge(
        &self,
        dir: &Path,
        quant: &Quantisation,
        params: &[Param],
        faults: &mut Vec<Error>,
    ) -> Result<Vec<Module>> {
        let patience = Quantisation::patience();
        let mut modules = Vec::new();
        for param in params.iter().filter(|p| is_linear(p)) {
            let name = module_of(param);
            let parts = self.parts(name);
            // Reported as missing, or as wrong in its fused tensor.
            if parts.is_empty() || self.failed.contains(&param.name) {
                continue;
            }
            patience.check(dir)?;
            let size = Size { rows: param.shape[0], cols: param.shape[1] };
            match quant.want(&Spelled::of(name)).and_then(|want| judge(size, &want, &parts)) {
                Ok((scheme, act)) => modules.push(Module {
                    name: name.to_owned(),
                    rows: size.rows,
                    cols: size.cols,
                    scheme,
                    act,
                    bytes: parts.present().map(|(_, entry)| entry.bytes()).sum(),
                }),
                Err(what) => {
                    let first = parts.present().next().map(|(_, entry)| entry.source).unwrap_or_default();
                    let Found { file, tensor } = &self.found[first];
                    let [rows, cols] = [size.rows, size.cols];
                    let what = format!("module {name} [{rows}, {cols}] (tensor \"{}\"): {what}", shown(&tensor.name));
                    faults.push(Error::checkpoint(&self.files[*file], what));
                }
            }
        }
        Ok(modules)
    }

    fn attention_layers(&self) -> impl Iterator<Item = usize> {
        self.g.layers.iter().enumerate().filter(|(_, m)| **m == Mixer::Attention).map(|(l, _)| l)
    }

    /// Holds the scales of the KV cache against the config: for every attention layer both, or for none.
    fn kv(&self, dir: &Path, quant: &Quantisation, faults: &mut Vec<Error>) {
        let there = |l: usize| [k_scale(l), v_scale(l)].map(|name| self.entries.get(&name));
        let any = self.attention_layers().any(|l| there(l).iter().any(Option::is_some));
        for layer in self.attention_layers() {
            let module = format!("layers.{layer}.self_attn");
            for (name, entry) in ["k_scale", "v_scale"].iter().zip(there(layer)) {
                let Some(entry) = entry else { continue };
                let scalar = entry.shape.len() <= 2 && entry.shape.iter().product::<usize>() == 1;
                let what = match quant.kv {
                    Kv::Plain if quant.is_absent() => {
                        "part of a quantised KV cache, and no quantization_config says so: one must, or it must go".into()
                    }
                    Kv::Plain => "a scale of the KV cache, and config.json has no kv_cache_scheme: it must have one, or the scale must go".into(),
                    Kv::Dynamic => "a scale of the KV cache, whose scales config.json calls dynamic: none must be stored then".into(),
                    Kv::Static | Kv::StaticOrUnit if !scalar || plain(entry.dtype).is_err() => {
                        format!(
                            "{} {:?}; must be BF16 or F32, [] or [1]: one {name} for {module}",
                            entry.dtype, entry.shape
                        )
                    }
                    Kv::Static | Kv::StaticOrUnit => continue,
                };
                faults.push(self.error(entry.source, &what));
            }
            let count = there(layer).iter().flatten().count();
            let needed = quant.kv == Kv::Static || (quant.kv == Kv::StaticOrUnit && any);
            if needed && count < 2 {
                let what = format!(
                    "module {module}: {count} of its k_scale and v_scale are on disk, and config.json says the KV cache \
                     is quantised with stored scales; must be both, BF16 or F32, [] or [1]"
                );
                faults.push(Error::checkpoint(dir, what));
            }
        }
    }
}

/// The canonical name of a layer's scale of K.
pub(crate) fn k_scale(layer: usize) -> String {
    format!("layers.{layer}.self_attn.k_scale")
}

/// The canonical name of a layer's scale of V.
pub(crate) fn v_scale(layer: usize) -> String {
    format!("layers.{layer}.self_attn.v_scale")
}

fn module_of(param: &Param) -> &str {
    param.name.strip_suffix(".weight").unwrap_or(&param.name)
}

fn wrong_shape(found: &[usize], right: &[usize]) -> String {
    let mut turned = found.to_vec();
    if let [.., a, b] = turned.as_mut_slice() {
        std::mem::swap(a, b);
    }
    let hint = if turned == right { ": it is transposed, rows are outputs" } else { "" };
    format!("shape {found:?}; config.json asks for {right:?}{hint}")
}

fn unknown_tensor(g: &Geometry, quant: &Quantisation, file: &Path, name: &str, count: usize) -> Error {
    let more = if count > 1 { format!(" ({} more like it)", count - 1) } else { String::new() };
    let what = format!("tensor \"{}\"{more}: {}", shown(name), why_unknown(g, quant, name));
    Error::checkpoint(file, what)
}

/// The likeliest reason why a name is no parameter.
fn why_unknown(g: &Geometry, quant: &Quantisation, name: &str) -> String {
    let number_after = |part: &str| -> Option<usize> {
        let (_, rest) = name.split_once(part)?;
        rest.split('.').next()?.parse().ok()
    };
    if matches!(role(name), Role::Unknown) {
        return format!(
            "no prefix of this model's tensors ({PREFIXES}, or lm_head.weight), and no rule skips it (vision, mtp)"
        );
    }
    if name.ends_with("in_proj_qkvz.weight") || name.ends_with("in_proj_ba.weight") {
        return "Qwen3-Next's interleaved projection; that model is not supported".into();
    }
    match number_after("layers.") {
        Some(n) if n >= g.layers.len() => return format!("num_hidden_layers is {}", g.layers.len()),
        _ => {}
    }
    match (number_after("experts."), g.mlp) {
        (Some(_), Mlp::Dense { .. }) => return "config.json describes a dense model".into(),
        (Some(n), Mlp::Moe { experts, .. }) if n >= experts => return format!("num_experts is {experts}"),
        _ => {}
    }
    let last = name.rsplit('.').next().unwrap_or_default();
    if let Some(scheme) = foreign(last) {
        return format!("part of {scheme}; {}", super::quant::SUPPORTED);
    }
    let kv = kv_scale(name).is_some();
    if kv || (last != "weight" && Part::by_name(last).is_some()) {
        return if quant.is_absent() {
            "part of a quantised weight, and no quantization_config says so".into()
        } else if kv {
            "a scale of the KV cache of a layer that has none; must be of a full_attention layer".into()
        } else {
            "part of a quantised weight of a module that is not linear; must be BF16 or F32 alone".into()
        };
    }
    "not a parameter of this model, and no rule skips it (vision, mtp, rotary-buffer)".into()
}

fn missing_parameters(dir: &Path, missing: &[&Param], all: usize) -> Error {
    let listed: Vec<String> = missing.iter().take(LISTED).map(|p| format!("{} {:?}", p.name, p.shape)).collect();
    let more = if missing.len() > LISTED { ", ..." } else { "" };
    let what = format!(
        "{} of {all} parameters have no tensor: {}{more}; a file is missing, or config.json is another model's",
        missing.len(),
        listed.join(", ")
    );
    Error::checkpoint(dir, what)
}
