//! The config that modelopt writes: flat in config.json, or nested in `hf_quant_config.json`.
//!
//! May live here: algorithms by name, `quantized_layers`, and the wildcards of what is left out. `config_groups`, which
//! newer versions add for other readers, is not read: it says less than the algorithm does. May not: tensors.

use std::collections::HashMap;

use serde_json::Value;

use super::matcher::{Spelled, is_router, wildcard};
use super::{Kv, Layout, PlainIf, SUPPORTED, Want, strings, unsupported};
use crate::checkpoint::json::{Fields, kind, shown};
use crate::error::{Error, Result};
use crate::ops::scheme::{ActScheme, Grain};

/// Algorithms by name, with the group size that may be stated beside each.
const ALGORITHMS: [(&str, Layout, ActScheme, u64); 6] = [
    ("FP8", Layout::Fp8(Grain::Tensor), ActScheme::Fp8Tensor, 0),
    ("FP8_PER_CHANNEL_PER_TOKEN", Layout::Fp8(Grain::Channel), ActScheme::Fp8Token, 0),
    ("FP8_PC_PT", Layout::Fp8(Grain::Channel), ActScheme::Fp8Token, 0),
    ("FP8_PB_WO", Layout::Fp8(Grain::Block), ActScheme::None, 128),
    ("NVFP4", Layout::Nvfp4, ActScheme::Nvfp4, 16),
    ("W4A16_NVFP4", Layout::Nvfp4, ActScheme::None, 16),
];
const MIXED: &str = "MIXED_PRECISION";
/// Exporters before this version match what they leave out as parts of names.
const WHOLE_NAMES_SINCE: (u64, u64) = (0, 39);

#[derive(Debug, Clone, Copy)]
struct Algorithm {
    name: &'static str,
    layout: Layout,
    act: ActScheme,
}

#[derive(Debug)]
pub(crate) struct ModelOpt {
    /// The algorithm of every linear module, or `None` where `layers` says it of each.
    all: Option<Algorithm>,
    /// By module, and by container of modules (`...mlp.experts`).
    layers: HashMap<String, Algorithm>,
    excluded: Vec<String>,
    /// Entries of `excluded` without wildcards are parts of names.
    parts_of_names: bool,
}

impl ModelOpt {
    /// Reads a config; `None` where it quantises no weight.
    pub(crate) fn read(top: &Fields<'_>) -> Result<(Option<ModelOpt>, Kv)> {
        let nested = top.object("quantization")?;
        let f = nested.as_ref().unwrap_or(top);
        let kv = kv_cache(f)?;
        let Some(stated) = f.text("quant_algo")? else {
            // In a config that says it was quantised, the algorithm must be named.
            if nested.is_none() && f.get("quant_method").is_some() && kv == Kv::Plain {
                return Err(f.error("quant_algo", "absent; must name the algorithm"));
            }
            return Ok((None, kv));
        };
        let group = f.get("group_size");
        let mixed = stated.eq_ignore_ascii_case(MIXED);
        let all = if mixed { None } else { Some(algorithm(f, stated, group)?) };
        let layers = layers(f, mixed)?;
        let mut excluded = strings(f, "exclude_modules")?;
        excluded.extend(strings(f, "ignore")?);
        let version = match top.object("producer")? {
            Some(producer) => producer.text("version")?.and_then(version),
            None => None,
        };
        Ok((
            Some(ModelOpt {
                all,
                layers,
                excluded: excluded.into_iter().map(String::from).collect(),
                parts_of_names: version.is_some_and(|v| v < WHOLE_NAMES_SINCE),
            }),
            kv,
        ))
    }

    pub(crate) fn want(&self, module: &Spelled) -> Result<Want, String> {
        let excluded = self.excluded.iter().find(|pattern| self.excludes(pattern, module));
        let by_layer = self.layer(module);
        if let Some(pattern) = excluded {
            return match by_layer {
                Some((key, _)) => {
                    let (key, pattern) = (shown(key), shown(pattern));
                    Err(format!("quantized_layers has \"{key}\", and \"{pattern}\" excludes it; one must not"))
                }
                None => Ok(Want::Plain { by: format!("excluded by \"{}\"", shown(pattern)) }),
            };
        }
        if let Some((key, a)) = by_layer {
            let by = format!("{} of quantized_layers \"{}\"", a.name, shown(key));
            return Ok(Want::Quantised { layout: a.layout, act: a.act, by, plain_if: PlainIf::Never });
        }
        Ok(match self.all {
            // Never inferred from its siblings.
            None => Want::Plain { by: "not in quantized_layers".into() },
            Some(a) => Want::Quantised {
                layout: a.layout,
                act: a.act,
                by: format!("quant_algo {}", a.name),
                plain_if: if is_router(&module.canonical) { PlainIf::Router } else { PlainIf::Never },
            },
        })
    }

    fn layer(&self, module: &Spelled) -> Option<(&str, Algorithm)> {
        let get = |name: &str| self.layers.get_key_value(name).map(|(key, a)| (key.as_str(), *a));
        module.names().find_map(get).or_else(|| {
            module.names().find_map(|name| {
                let (container, _) = name.split_once(".mlp.experts.")?;
                get(&format!("{container}.mlp.experts"))
            })
        })
    }

    fn excludes(&self, pattern: &str, module: &Spelled) -> bool {
        module.names().any(|name| {
            wildcard(pattern, name)
                // A module without wildcards is its whole tree.
                || name.strip_prefix(pattern).is_some_and(|rest| rest.starts_with('.'))
                || (self.parts_of_names && !pattern.is_empty() && !pattern.contains(['*', '?', '[']) && name.contains(pattern))
        })
    }
}

fn layers(f: &Fields<'_>, mixed: bool) -> Result<HashMap<String, Algorithm>> {
    let mut layers = HashMap::new();
    let Some(named) = f.object("quantized_layers")? else {
        if mixed {
            return Err(f.error("quantized_layers", format!("absent; {MIXED} must say each module's algorithm")));
        }
        return Ok(layers);
    };
    for (name, _) in named.entries() {
        let Some(layer) = named.object(name)? else {
            return Err(named.error(&shown(name), "null; must be an object with a quant_algo"));
        };
        let Some(stated) = layer.text("quant_algo")? else {
            return Err(layer.error("quant_algo", "absent; must name the module's algorithm"));
        };
        if layer.flag("pre_quant_scale")? == Some(true) {
            return Err(unsupported(&layer, "pre_quant_scale", "true (inputs scaled before they are quantised)"));
        }
        layers.insert(name.clone(), algorithm(&layer, stated, layer.get("group_size"))?);
    }
    if mixed && layers.is_empty() {
        return Err(f.error("quantized_layers", format!("empty; {MIXED} must say each module's algorithm")));
    }
    if !mixed && !layers.is_empty() {
        return Err(
            f.error("quantized_layers", format!("with a quant_algo other than {MIXED}; only that one has layers"))
        );
    }
    Ok(layers)
}

fn algorithm(f: &Fields<'_>, stated: &str, group: Option<&Value>) -> Result<Algorithm> {
    let found = ALGORITHMS.iter().find(|(name, ..)| name.eq_ignore_ascii_case(stated));
    let Some((name, layout, act, expected)) = found else {
        let group = group.map_or_else(String::new, |g| format!(", group_size {}", kind(g)));
        return Err(Error::Unsupported {
            what: format!("{}: {} \"{}\"{group}", f.file().display(), f.path("quant_algo"), shown(stated)),
            supported: SUPPORTED.into(),
        });
    };
    // Zero where there are no groups: modelopt writes the size it looked up either way.
    match group.map(Value::as_u64) {
        None | Some(Some(0)) => {}
        Some(Some(size)) if size == *expected => {}
        Some(size) => {
            let found = size.map_or_else(|| group.map_or_else(String::new, kind), |s| s.to_string());
            let right = if *expected == 0 { "has no groups".into() } else { format!("has groups of {expected}") };
            let hint = if size == Some(32) { " (32 are MXFP4's)" } else { "" };
            return Err(unsupported(f, "group_size", &format!("{found}{hint} where {name} {right}")));
        }
    }
    Ok(Algorithm { name, layout: *layout, act: *act })
}

fn kv_cache(f: &Fields<'_>) -> Result<Kv> {
    let mut kv = Kv::Plain;
    if let Some(algorithm) = f.text("kv_cache_quant_algo")? {
        kv = named_kv(f, "kv_cache_quant_algo", algorithm)?;
    }
    match f.get("kv_cache_scheme") {
        None => Ok(kv),
        Some(Value::String(name)) => named_kv(f, "kv_cache_scheme", name),
        Some(_) => match super::compressed_tensors::kv_cache(f)? {
            Kv::Static => Ok(Kv::StaticOrUnit),
            other => Ok(other),
        },
    }
}

fn named_kv(f: &Fields<'_>, key: &str, name: &str) -> Result<Kv> {
    match name {
        _ if name.eq_ignore_ascii_case("FP8") => Ok(Kv::StaticOrUnit),
        _ if name.eq_ignore_ascii_case("none") => Ok(Kv::Plain),
        _ => Err(Error::Unsupported {
            what: format!("{}: {} \"{}\"", f.file().display(), f.path(key), shown(name)),
            supported: "the KV cache is quantised to FP8 or not at all".into(),
        }),
    }
}

/// `major.minor` of a version.
fn version(text: &str) -> Option<(u64, u64)> {
    let mut numbers = text.split('.').map(|n| n.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}
