//! What a checkpoint says about how each linear module is stored, and whether its tensors agree.
//!
//! | file | may hold |
//! |---|---|
//! | mod.rs | which producer wrote the config, and what any of them says of one module ([`Want`]) |
//! | matcher.rs | which modules an entry of a config names |
//! | compressed_tensors.rs, modelopt.rs, qwen_fp8.rs | one producer's config each |
//! | parts.rs | the tensors of a quantised module, by their names |
//! | check.rs | a module's tensors held against what was said |
//! | load.rs | scales and codes of a checked checkpoint, their values checked as they are read |
//!
//! A config only claims; the tensors on disk decide. A module is loaded when both say the same, and refused by its name
//! when they do not. May not live here: which tensors a model has, where a tensor is in its file.

pub(crate) mod check;
mod compressed_tensors;
mod load;
pub(crate) mod matcher;
mod modelopt;
pub(crate) mod parts;
mod qwen_fp8;

use std::fmt;
use std::path::Path;

use serde_json::Value;

use self::compressed_tensors::CompressedTensors;
use self::matcher::{Patience, Spelled};
use self::modelopt::ModelOpt;
use self::qwen_fp8::QwenFp8;
use super::header::Dtype;
use super::json::{Fields, kind, object, shown};
use crate::error::{Error, Result};
use crate::ops::scheme::{ActScheme, Grain};

/// What is read, for errors.
pub(crate) const SUPPORTED: &str = "supported are compressed-tensors (float-quantized, naive-quantized, \
    nvfp4-pack-quantized, mixed-precision), modelopt (FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, W4A16_NVFP4, \
    MIXED_PRECISION), fp8 in blocks of 128 x 128, and BF16 and F32 as they are: take the checkpoint in one of these";

/// The tensors a quantised weight is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// e4m3 codes and scales of this grain.
    Fp8(Grain),
    /// Pairs of e2m1 codes, e4m3 scales of 16, and a global, which multiplies or divides as its name on disk says.
    Nvfp4,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Layout::Fp8(Grain::Tensor) => "FP8 by tensor",
            Layout::Fp8(Grain::Channel) => "FP8 by channel",
            Layout::Fp8(Grain::Block) => "FP8 by block of 128 x 128",
            Layout::Nvfp4 => "NVFP4",
        })
    }
}

/// Where a module that was said to be quantised may be found as floats all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PlainIf {
    /// Nowhere.
    Never,
    /// Here: it is a router, which an entry that names the class "Linear" means or not, depending on the reader.
    Router,
    /// Where a dimension is no multiple of 128: transformers leaves such a weight as it is.
    OddShape,
}

/// What a config says of one module.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Want {
    /// Floats.
    Plain {
        /// Which entry says so.
        by: String,
    },
    /// Codes and scales.
    Quantised {
        layout: Layout,
        act: ActScheme,
        /// Which entry says so.
        by: String,
        plain_if: PlainIf,
    },
}

/// What a config says of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kv {
    /// Nothing, or that it is not quantised.
    Plain,
    /// FP8 with a scale stored for K and one for V of each attention layer.
    Static,
    /// The same, but its writer leaves the scales out where all are 1.
    StaticOrUnit,
    /// FP8 with scales made at run time.
    Dynamic,
}

#[derive(Debug)]
enum Method {
    /// No quantisation config.
    Absent,
    CompressedTensors(CompressedTensors),
    ModelOpt(ModelOpt),
    QwenFp8(QwenFp8),
}

/// A checkpoint's quantisation config, read and found to be of a supported kind.
#[derive(Debug)]
pub(crate) struct Quantisation {
    method: Method,
    pub(crate) kv: Kv,
}

impl Quantisation {
    fn absent() -> Quantisation {
        Quantisation { method: Method::Absent, kv: Kv::Plain }
    }

    /// Whether there is no config at all, so that anything quantised on disk was not announced.
    pub(crate) fn is_absent(&self) -> bool {
        matches!(self.method, Method::Absent)
    }

    /// Reads the config of a config.json, which stands at the top or in `text_config`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a method, algorithm or variant that is not read, by its name; [`Error::Config`] for a
    /// value that is wrong or contradicts another.
    pub(crate) fn read(top: &Fields<'_>, nested: Option<&Fields<'_>>) -> Result<Quantisation> {
        let mut found: Option<(Fields<'_>, &Value)> = None;
        for f in [Some(top), nested].into_iter().flatten() {
            for key in ["quantization_config", "compression_config"] {
                let (Some(q), Some(value)) = (f.object(key)?, f.get(key)) else { continue };
                match &found {
                    Some((_, first)) if *first != value => {
                        let what = "differs from the other quantisation config of this file; they must be the same";
                        return Err(f.error(key, what));
                    }
                    Some(_) => {}
                    None => found = Some((q, value)),
                }
            }
        }
        match &found {
            Some((q, _)) => Quantisation::of(q),
            None => Ok(Quantisation::absent()),
        }
    }

    fn of(q: &Fields<'_>) -> Result<Quantisation> {
        match q.text("quant_method")?.map(str::to_ascii_lowercase).as_deref() {
            Some("compressed-tensors") => {
                let (method, kv) = CompressedTensors::read(q)?;
                Ok(Quantisation { method: Method::CompressedTensors(method), kv })
            }
            Some("modelopt" | "modelopt_fp4" | "modelopt_mixed") => Quantisation::modelopt(q),
            Some("fp8") => Ok(Quantisation { method: Method::QwenFp8(QwenFp8::read(q)?), kv: Kv::Plain }),
            Some(other) => Err(unsupported(q, "quant_method", &format!("\"{}\"", shown(other)))),
            // Older compressed-tensors files leave the method out, but not the groups.
            None if q.get("config_groups").is_some() && q.get("quant_algo").is_none() => {
                let (method, kv) = CompressedTensors::read(q)?;
                Ok(Quantisation { method: Method::CompressedTensors(method), kv })
            }
            None => Err(unsupported(q, "quant_method", "(no quant_method)")),
        }
    }

    fn modelopt(q: &Fields<'_>) -> Result<Quantisation> {
        let (method, kv) = ModelOpt::read(q)?;
        Ok(Quantisation { method: method.map_or(Method::Absent, Method::ModelOpt), kv })
    }

    /// Reads a `hf_quant_config.json`: modelopt writes it beside the config's own, or, in older versions, alone.
    pub(crate) fn read_modelopt(file: &Path, bytes: &[u8]) -> Result<Quantisation> {
        let map = object(file, bytes)?;
        Quantisation::modelopt(&Fields::top(file, &map))
    }

    /// What is said of a module; an error is a contradiction within the config, in words that follow the module's name.
    pub(crate) fn want(&self, module: &Spelled) -> Result<Want, String> {
        match &self.method {
            Method::Absent => Ok(Want::Plain { by: "no quantization_config".into() }),
            Method::CompressedTensors(c) => c.want(module),
            Method::ModelOpt(m) => m.want(module),
            Method::QwenFp8(q) => Ok(q.want(module)),
        }
    }

    /// The time to ask [`Quantisation::want`] of every module.
    pub(crate) fn patience() -> Patience {
        Patience::begin()
    }
}

/// A variant that is refused by its name.
pub(crate) fn unsupported(f: &Fields<'_>, key: &str, name: &str) -> Error {
    Error::Unsupported { what: format!("{}: {} {name}", f.file().display(), f.path(key)), supported: SUPPORTED.into() }
}

/// A list of strings, or none.
pub(crate) fn strings<'a>(f: &Fields<'a>, key: &str) -> Result<Vec<&'a str>> {
    let mut out = Vec::new();
    for (i, entry) in f.list(key)?.unwrap_or_default().iter().enumerate() {
        match entry.as_str() {
            Some(text) => out.push(text),
            None => return Err(f.error(&format!("{key}[{i}]"), format!("{}; must be a string", kind(entry)))),
        }
    }
    Ok(out)
}

/// Whether a tensor of this dtype holds floats as they are: `Ok`, else what to say about it.
///
/// F16 is refused although every finite f16 is an f32: this crate keeps matrices in bf16, which would drop 3 bits of
/// an f16 significand, and a checkpoint converted to f16 has already lost the small end of its bf16 range.
pub(crate) fn plain(dtype: Dtype) -> Result<(), &'static str> {
    match dtype {
        Dtype::Bf16 | Dtype::F32 => Ok(()),
        Dtype::F16 => {
            Err("an F16 copy of a bf16 model has lost small values, and bf16 cannot hold an F16's precision: \
            take the BF16 original, or save it as F32")
        }
        Dtype::F64 => Err("save it as F32 or BF16"),
        Dtype::U8 | Dtype::F8E4m3 | Dtype::F8E5m2 | Dtype::F8E8m0 | Dtype::F4 => {
            Err("it looks quantised, and no quantization_config says so")
        }
        _ => Err("it is not a weight's dtype"),
    }
}
