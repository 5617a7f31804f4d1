//! `quant_method` "fp8": FP8 in blocks of 128 x 128, as Qwen publishes it and transformers writes it.
//!
//! May live here: the keys of that config, and what `modules_to_not_convert` leaves out. May not: tensors.

use serde_json::Value;

use super::matcher::{Spelled, regex};
use super::{Layout, PlainIf, Want, strings, unsupported};
use crate::checkpoint::json::{Fields, kind, shown};
use crate::error::Result;
use crate::ops::scheme::{ActScheme, Grain};

#[derive(Debug)]
pub(crate) struct QwenFp8 {
    excluded: Vec<Excluded>,
}

#[derive(Debug)]
enum Excluded {
    /// A module and all inside it, or the last parts of a name.
    Name(String),
    /// A pattern, matched from the start of a name.
    Regex(String, fancy_regex::Regex),
}

impl QwenFp8 {
    pub(crate) fn read(f: &Fields<'_>) -> Result<QwenFp8> {
        let text = |key: &str, accepted: &[&str]| match f.text(key)? {
            Some(v) if !accepted.contains(&v.to_ascii_lowercase().as_str()) => {
                Err(unsupported(f, key, &format!("\"{}\" (of quant_method \"fp8\")", shown(v))))
            }
            _ => Ok(()),
        };
        text("activation_scheme", &["dynamic"])?;
        text("fmt", &["e4m3", "float8_e4m3fn"])?;
        text("scale_fmt", &["float"])?;
        match f.get("weight_block_size") {
            Some(Value::Array(sides)) if sides.iter().map(Value::as_u64).eq([Some(128), Some(128)]) => {}
            other => {
                let found = other.map_or_else(|| "absent".into(), kind_of_sides);
                let name = format!("{found} (of quant_method \"fp8\"; must be [128, 128])");
                return Err(unsupported(f, "weight_block_size", &name));
            }
        }
        if f.list("modules_to_convert")?.is_some_and(|l| !l.is_empty()) {
            return Err(unsupported(f, "modules_to_convert", "(modules beyond the linear ones)"));
        }
        let mut excluded = Vec::new();
        for key in ["modules_to_not_convert", "ignored_layers"] {
            for name in strings(f, key)? {
                excluded.push(if name.contains(['*', '\\', '[', '(', '+', '^', '$', '?', '|']) {
                    Excluded::Regex(name.into(), regex(name).map_err(|what| f.error(key, what))?)
                } else {
                    Excluded::Name(name.into())
                });
            }
        }
        Ok(QwenFp8 { excluded })
    }

    pub(crate) fn want(&self, module: &Spelled) -> Want {
        match self.excluded.iter().find(|e| e.holds(module)) {
            Some(Excluded::Name(text) | Excluded::Regex(text, _)) => {
                Want::Plain { by: format!("modules_to_not_convert \"{}\"", shown(text)) }
            }
            None => Want::Quantised {
                layout: Layout::Fp8(Grain::Block),
                act: ActScheme::Fp8Group,
                by: "quant_method \"fp8\"".into(),
                plain_if: PlainIf::OddShape,
            },
        }
    }
}

impl Excluded {
    fn holds(&self, module: &Spelled) -> bool {
        module.names().any(|name| match self {
            Excluded::Name(text) => {
                name == text
                    || name.strip_prefix(text.as_str()).is_some_and(|rest| rest.starts_with('.'))
                    || name.strip_suffix(text.as_str()).is_some_and(|before| before.ends_with('.'))
            }
            // One that gives up names nothing: the module's tensors then say whether that was right.
            Excluded::Regex(_, regex) => regex.is_match(name).unwrap_or(false),
        })
    }
}

fn kind_of_sides(value: &Value) -> String {
    match value {
        Value::Array(list) if list.len() <= 4 => shown(&value.to_string()),
        other => kind(other),
    }
}
