//! How each module's weight is stored: the verdict per module.
//!
//! May live here: reading a quantisation config, and what each parameter's tensor may be. May not: where tensors are.
//! Two schemes exist, BF16 and F32 as they stand; a config that states any other is refused whole, by its name, before
//! a tensor is looked at.

use std::path::Path;

use super::header::Dtype;
use super::json::{Fields, kind, object, shown};
use crate::error::{Error, Result};

/// What this build loads, for errors.
const SUPPORTED: &str = "this build loads BF16 and F32 tensors; take the unquantised checkpoint";

/// Refuses a `quantization_config`, by its method and format. Both its usual place and the older key are looked at.
pub(crate) fn refuse(f: &Fields<'_>) -> Result<()> {
    for key in ["quantization_config", "compression_config"] {
        let Some(value) = f.get(key) else { continue };
        let Some(q) = value.as_object() else {
            return Err(f.error(key, format!("{}; must be an object", kind(value))));
        };
        let names: Vec<String> = ["quant_method", "quant_algo", "format"]
            .iter()
            .filter_map(|k| q.get(*k).and_then(|v| v.as_str()).map(|v| format!("{k} \"{}\"", shown(v))))
            .collect();
        let names = if names.is_empty() { "no quant_method".into() } else { names.join(", ") };
        return Err(unsupported(f.file(), &f.path(key), &names));
    }
    Ok(())
}

/// Refuses a `hf_quant_config.json` that quantises anything: modelopt writes it beside, or instead of, the config's own.
pub(crate) fn refuse_modelopt(file: &Path, bytes: &[u8]) -> Result<()> {
    let map = object(file, bytes)?;
    let top = Fields::top(file, &map);
    let Some(q) = top.object("quantization")? else { return Ok(()) };
    for key in ["quant_algo", "kv_cache_quant_algo"] {
        if let Some(value) = q.get(key) {
            return Err(unsupported(file, &q.path(key), &kind(value)));
        }
    }
    Ok(())
}

fn unsupported(file: &Path, field: &str, names: &str) -> Error {
    Error::Unsupported { what: format!("{}: {field} ({names})", file.display()), supported: SUPPORTED.into() }
}

/// The verdict on one parameter's tensor: `Ok` for a dtype that can be loaded, else what to say about it.
///
/// F16 is refused although every finite f16 is an f32: this crate keeps matrices in bf16, which would drop 3 bits of
/// an f16 significand, and a checkpoint converted to f16 has already lost the small end of its bf16 range.
pub(crate) fn verdict(dtype: Dtype) -> Result<(), &'static str> {
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
