//! A recipe's file: what it may say, and what in it must agree.
//!
//! May live here: the structure of `recipes/*.toml`. May not: models, names on disk, random numbers.
//!
//! | key | says |
//! |---|---|
//! | `about`, `assumed` | what it reproduces; what the public description leaves open |
//! | `producer`, `version` | whose config is written |
//! | `class` | `text`: names `model.layers…`, a flat config; `multimodal`: names `model.language_model.layers…`, the config nested |
//! | `mlp` | `dense` or `moe`, where only one of them is described |
//! | `[[rule]]` | modules by role (a last `*` stands for any rest) and first and last layer, with scheme, input scheme, the scales' dtypes and shapes, and the config's targets; the first that matches holds, and what none matches stays bf16 |
//! | `[kv]` | the form of the KV scales, if there are any |
//! | `[ignore]` | what the config lists as unquantised |
//! | `[[published]]` | counts that somebody published, which a test holds |

use std::path::Path;

use serde::Deserialize;

use crate::checkpoint::header::Dtype;
use crate::error::{Error, Result};
use crate::ops::scheme::{ActScheme, Global, Grain, Scheme};

/// One recipe, as its file says.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct File {
    pub(crate) about: String,
    #[serde(default)]
    pub(crate) assumed: Option<String>,
    pub(crate) producer: Producer,
    #[serde(default)]
    pub(crate) version: Option<String>,
    pub(crate) class: Class,
    #[serde(default)]
    pub(crate) mlp: Option<MlpKind>,
    #[serde(default, rename = "rule")]
    pub(crate) rules: Vec<Rule>,
    #[serde(default)]
    pub(crate) kv: Option<Form>,
    #[serde(default)]
    pub(crate) ignore: Ignore,
    #[serde(default)]
    pub(crate) published: Vec<Published>,
}

/// Who writes such a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Producer {
    /// transformers, unquantised.
    Transformers,
    /// llm-compressor and others that write compressed-tensors.
    CompressedTensors,
    /// NVIDIA's Model Optimizer.
    Modelopt,
    /// `quant_method` "fp8": Qwen's own files.
    FineGrainedFp8,
}

/// How the model's class names its tensors and nests its config.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Class {
    Text,
    Multimodal,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum MlpKind {
    Dense,
    Moe,
}

/// Modules stored alike.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Rule {
    modules: Vec<String>,
    /// First and last.
    #[serde(default)]
    layers: Option<[usize; 2]>,
    scheme: SchemeName,
    act: ActName,
    /// What the rows and columns must be multiples of; a module whose are not stays bf16.
    #[serde(default)]
    multiple_of: Option<[usize; 2]>,
    /// The scales of an FP8 weight. Those of an NVFP4 weight are e4m3 `[N, K/16]` always.
    #[serde(default)]
    pub(crate) scale: Option<Form>,
    /// The NVFP4 global.
    #[serde(default)]
    pub(crate) global: Option<Form>,
    /// The stored scale of the input.
    #[serde(default)]
    pub(crate) input: Option<Form>,
    /// How compressed-tensors' config names these modules.
    #[serde(default)]
    pub(crate) targets: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum SchemeName {
    Fp8Tensor,
    Fp8Channel,
    Fp8Block,
    Nvfp4,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ActName {
    None,
    Fp8Tensor,
    Fp8Token,
    Fp8Group,
    Nvfp4,
}

/// The dtype and shape of scales on disk.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Form {
    dtype: FloatName,
    shape: Vec<Dim>,
    /// A shape of ones becomes a scalar, as modelopt does to a single block.
    #[serde(default)]
    scalar_if_one: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
enum FloatName {
    #[serde(rename = "BF16")]
    Bf16,
    #[serde(rename = "F32")]
    F32,
}

/// One dimension of a scale.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
enum Dim {
    Fixed(usize),
    Of(DimName),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
enum DimName {
    #[serde(rename = "N")]
    Rows,
    #[serde(rename = "N/128")]
    RowBlocks,
    #[serde(rename = "K/128")]
    ColBlocks,
}

/// What the config lists as unquantised.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Ignore {
    /// Every linear module left in bf16, by its full name.
    #[serde(default)]
    pub(crate) linears: bool,
    /// Modules of a layer that are not linear, by name within the layer.
    #[serde(default)]
    pub(crate) each_layer: Vec<String>,
    /// Entries as they stand; `{0..26}` stands for an entry with each of these numbers.
    #[serde(default)]
    pub(crate) entries: Vec<String>,
}

/// Counts of a published checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Published {
    /// The geometry it is of, by its built-in name.
    pub geometry: String,
    /// NVFP4 linear modules.
    #[serde(default)]
    pub nvfp4: usize,
    /// FP8 linear modules.
    #[serde(default)]
    pub fp8: usize,
    /// Layers with KV scales.
    #[serde(default)]
    pub kv_layers: usize,
    /// Entries of the config's list of unquantised modules.
    #[serde(default)]
    pub ignore: Option<usize>,
    /// Entries of modelopt's `quantized_layers`.
    #[serde(default)]
    pub quantized_layers: Option<usize>,
}

/// A weight's rows (N) and columns (K).
pub(crate) type Size = [usize; 2];

impl File {
    /// Reads the text of `recipes/<name>.toml`.
    pub(crate) fn read(name: &str, text: &str) -> Result<File> {
        let path = format!("{name}.toml");
        let fail = |key: &str, what: &str| Error::config(Path::new(&path), key, what);
        let file: File = toml::from_str(text).map_err(|e| fail("recipe", &e.to_string()))?;
        if (file.producer == Producer::Transformers) != file.rules.is_empty() {
            return Err(fail("rule", "quantised modules and a producer that quantises must come together"));
        }
        for rule in &file.rules {
            rule.check(file.producer).map_err(|what| fail("rule", &what))?;
        }
        Ok(file)
    }

    /// What an NVFP4 global does in this producer's files.
    pub(crate) fn global(&self) -> Global {
        if self.producer == Producer::Modelopt { Global::Multiplies } else { Global::Divides }
    }
}

impl Rule {
    fn check(&self, producer: Producer) -> Result<(), String> {
        let nvfp4 = self.scheme == SchemeName::Nvfp4;
        let stored_input = matches!(self.act, ActName::Fp8Tensor | ActName::Nvfp4);
        let wrong = [
            (self.modules.is_empty(), "no modules"),
            (self.layers.is_some_and(|[a, b]| a > b), "layers end before they begin"),
            (self.scale.is_some() == nvfp4, "FP8 needs a form of its scales, and NVFP4's is fixed"),
            (self.global.is_some() != nvfp4, "NVFP4, and it alone, needs the form of its global"),
            (self.input.is_some() != stored_input, "a stored scale of the input needs a form, and no other does"),
            (self.act == ActName::Nvfp4 && !nvfp4, "4-bit inputs of 8-bit weights"),
            (self.targets.is_empty() == (producer == Producer::CompressedTensors), "targets are compressed-tensors'"),
        ];
        if let Some((_, what)) = wrong.iter().find(|(bad, _)| *bad) {
            return Err((*what).to_owned());
        }
        // Any size tells the shapes of the grains apart.
        let (size, blocks) = ([640, 384], 5 * 3);
        let scalar = |form: &Option<Form>| form.as_ref().is_none_or(|f| f.elements(size) == 1);
        let right = match self.scheme {
            SchemeName::Fp8Tensor => 1,
            SchemeName::Fp8Channel => size[0],
            SchemeName::Fp8Block => blocks,
            SchemeName::Nvfp4 => return check_that(scalar(&self.global) && scalar(&self.input)),
        };
        check_that(scalar(&self.input) && self.scale.as_ref().is_some_and(|f| f.elements(size) == right))
    }

    /// Whether it is about a module of this role, in this layer, of this size.
    pub(crate) fn holds(&self, role: &str, layer: Option<usize>, size: Size) -> bool {
        let names = |pattern: &String| match pattern.strip_suffix('*') {
            Some(stem) => role.starts_with(stem),
            None => role == pattern,
        };
        let inside = self.layers.is_none_or(|[first, last]| layer.is_some_and(|l| (first..=last).contains(&l)));
        let fits = |[n, k]: [usize; 2]| size[0].is_multiple_of(n) && size[1].is_multiple_of(k);
        let whole_groups = self.scheme != SchemeName::Nvfp4 || size[1].is_multiple_of(16);
        inside && self.modules.iter().any(names) && self.multiple_of.is_none_or(fits) && whole_groups
    }

    /// How the weight is stored, by a producer whose globals do this.
    pub(crate) fn scheme(&self, global: Global) -> Scheme {
        match self.scheme {
            SchemeName::Fp8Tensor => Scheme::Fp8(Grain::Tensor),
            SchemeName::Fp8Channel => Scheme::Fp8(Grain::Channel),
            SchemeName::Fp8Block => Scheme::Fp8(Grain::Block),
            SchemeName::Nvfp4 => Scheme::Nvfp4(global),
        }
    }

    /// How the input is quantised.
    pub(crate) fn act(&self) -> ActScheme {
        match self.act {
            ActName::None => ActScheme::None,
            ActName::Fp8Tensor => ActScheme::Fp8Tensor,
            ActName::Fp8Token => ActScheme::Fp8Token,
            ActName::Fp8Group => ActScheme::Fp8Group,
            ActName::Nvfp4 => ActScheme::Nvfp4,
        }
    }
}

fn check_that(right: bool) -> Result<(), String> {
    if right { Ok(()) } else { Err("a scale's shape is not the scheme's".into()) }
}

impl Form {
    pub(crate) fn dtype(&self) -> Dtype {
        match self.dtype {
            FloatName::Bf16 => Dtype::Bf16,
            FloatName::F32 => Dtype::F32,
        }
    }

    /// The shape for a weight of this size.
    pub(crate) fn shape(&self, [rows, cols]: Size) -> Vec<usize> {
        let dim = |d: &Dim| match d {
            Dim::Fixed(n) => *n,
            Dim::Of(DimName::Rows) => rows,
            Dim::Of(DimName::RowBlocks) => rows.div_ceil(128),
            Dim::Of(DimName::ColBlocks) => cols.div_ceil(128),
        };
        let shape: Vec<usize> = self.shape.iter().map(dim).collect();
        if self.scalar_if_one && shape.iter().all(|d| *d == 1) { Vec::new() } else { shape }
    }

    fn elements(&self, size: Size) -> usize {
        self.shape(size).iter().product()
    }
}
