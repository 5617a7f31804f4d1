//! Every tensor on disk accounted for: it fills a parameter, is skipped by a named rule, or is an error.
//!
//! May live here: matching tensors to parameters by name and shape, the tie rule, fused experts as row slices. May not:
//! reading files; and nothing is ever reshaped, broadcast or converted to make it fit.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::geometry::{Geometry, Mlp, Param};
use super::header::{Dtype, Tensor};
use super::json::shown;
use super::names::{PREFIXES, Role, SkipRule, role};
use super::quant;
use crate::error::{Error, Result};

/// How many names an error lists before it only counts.
const LISTED: usize = 3;

/// Where one parameter's bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Element type on disk.
    pub dtype: Dtype,
    /// Elements along each dimension, outermost first; as [`Geometry::params`] says.
    pub shape: Vec<usize>,
    /// Position in the checkpoint's files.
    pub(crate) file: usize,
    /// First byte in that file.
    pub(crate) offset: u64,
    /// Position in the checkpoint's names on disk.
    pub(crate) source: usize,
}

impl Entry {
    /// Rows: elements along the first dimension.
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.shape[1..].iter().product::<usize>() * (self.dtype.bits() / 8) as usize
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

/// A tensor and the position of its file.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) file: usize,
    pub(crate) tensor: Tensor,
}

/// The result: each parameter's place, and what was left out.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) entries: HashMap<String, Entry>,
    pub(crate) skipped: Vec<Skipped>,
}

/// Decides whether the head is tied, from the flag and from what is on disk.
pub(crate) fn settle_tie(dir: &Path, g: &mut Geometry, unsettled: bool, found: &[Found]) -> Result<()> {
    let head = found.iter().find(|f| role(&f.tensor.name) == Role::Param("lm_head.weight"));
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

/// Matches all tensors of the checkpoint to the parameters of `g`.
pub(crate) fn account(dir: &Path, g: &Geometry, files: &[PathBuf], found: &[Found]) -> Result<Account> {
    let params = g.params();
    let mut fill = Fill {
        files,
        found,
        expected: params.iter().map(|p| (p.name.as_str(), p)).collect(),
        entries: HashMap::with_capacity(params.len()),
    };
    let (mut skipped, mut unknown) = (Vec::new(), Vec::new());
    for (source, Found { tensor, .. }) in found.iter().enumerate() {
        let known = match (role(&tensor.name), g.mlp) {
            (Role::Skip(rule), _) => {
                skipped.push(Skipped { name: tensor.name.clone(), rule, bytes: tensor.bytes });
                true
            }
            (Role::Param(name), _) => fill.whole(source, name)?,
            (Role::FusedGateUp(layer), Mlp::Moe { experts, inter, .. }) if layer < g.layers.len() => {
                fill.fused(source, layer, [experts, 2 * inter, g.hidden], &["gate_proj", "up_proj"])?;
                true
            }
            (Role::FusedDown(layer), Mlp::Moe { experts, inter, .. }) if layer < g.layers.len() => {
                fill.fused(source, layer, [experts, g.hidden, inter], &["down_proj"])?;
                true
            }
            _ => false,
        };
        if !known {
            unknown.push(source);
        }
    }
    if let Some(first) = unknown.first() {
        return Err(unknown_tensor(g, &files[found[*first].file], &found[*first].tensor.name, unknown.len()));
    }
    let missing: Vec<&Param> = params.iter().filter(|p| !fill.entries.contains_key(&p.name)).collect();
    if !missing.is_empty() {
        return Err(missing_parameters(dir, &missing, params.len()));
    }
    Ok(Account { entries: fill.entries, skipped })
}

struct Fill<'a> {
    files: &'a [PathBuf],
    found: &'a [Found],
    expected: HashMap<&'a str, &'a Param>,
    entries: HashMap<String, Entry>,
}

impl Fill<'_> {
    fn error(&self, source: usize, what: &str) -> Error {
        let Found { file, tensor } = &self.found[source];
        Error::checkpoint(&self.files[*file], format!("tensor \"{}\": {what}", shown(&tensor.name)))
    }

    /// A tensor that is one parameter; false where the model has no such parameter.
    fn whole(&mut self, source: usize, name: &str) -> Result<bool> {
        let Some(param) = self.expected.get(name).copied() else { return Ok(false) };
        self.check(source, &param.shape)?;
        let tensor = &self.found[source].tensor;
        self.insert(source, name.to_owned(), param.shape.clone(), tensor.offset)?;
        Ok(true)
    }

    /// A tensor that holds, for each expert in turn, the rows of `parts` in turn.
    fn fused(&mut self, source: usize, layer: usize, shape: [usize; 3], parts: &[&str]) -> Result<()> {
        self.check(source, &shape)?;
        let [experts, rows, columns] = shape;
        let tensor = &self.found[source].tensor;
        let rows = rows / parts.len();
        let bytes = (rows * columns) as u64 * tensor.dtype.bits() / 8;
        let mut offset = tensor.offset;
        for e in 0..experts {
            for part in parts {
                let name = format!("layers.{layer}.mlp.experts.{e}.{part}.weight");
                self.insert(source, name, vec![rows, columns], offset)?;
                offset += bytes;
            }
        }
        Ok(())
    }

    fn check(&self, source: usize, shape: &[usize]) -> Result<()> {
        let tensor = &self.found[source].tensor;
        if let Err(why) = quant::verdict(tensor.dtype) {
            return Err(self.error(source, &format!("dtype {}; must be BF16 or F32: {why}", tensor.dtype)));
        }
        if tensor.shape == shape {
            return Ok(());
        }
        let mut turned = tensor.shape.clone();
        if let [.., a, b] = turned.as_mut_slice() {
            std::mem::swap(a, b);
        }
        let hint = if turned == shape { ": it is transposed, rows are outputs" } else { "" };
        Err(self.error(source, &format!("shape {:?}; config.json asks for {shape:?}{hint}", tensor.shape)))
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
}

fn unknown_tensor(g: &Geometry, file: &Path, name: &str, count: usize) -> Error {
    let more = if count > 1 { format!(" ({} more like it)", count - 1) } else { String::new() };
    let what = format!("tensor \"{}\"{more}: {}", shown(name), why_unknown(g, name));
    Error::checkpoint(file, what)
}

/// The likeliest reason why a name is no parameter.
fn why_unknown(g: &Geometry, name: &str) -> String {
    const QUANTISED: [&str; 10] = [
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_packed",
        "weight_global_scale",
        "input_scale",
        "input_global_scale",
        "k_scale",
        "v_scale",
        "weight_zero_point",
    ];
    let number_after = |part: &str| -> Option<usize> {
        let (_, rest) = name.split_once(part)?;
        rest.split('.').next()?.parse().ok()
    };
    if matches!(role(name), Role::Unknown) {
        return format!(
            "no prefix of this model's tensors ({PREFIXES}, or lm_head.weight), and no rule skips it (vision, mtp)"
        );
    }
    if name.rsplit('.').next().is_some_and(|last| QUANTISED.contains(&last)) {
        return "part of a quantised weight, and no quantization_config says so".into();
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
