//! The config that compressed-tensors and llm-compressor write.
//!
//! May live here: groups, presets, arguments, `ignore`, and which group claims a module. Unknown keys at the top are
//! skipped, inside a group or its arguments they are an error, as upstream. May not: tensors.

use serde_json::Value;

use super::matcher::{Level, Patterns, Spelled, is_router};
use super::{Kv, Layout, PlainIf, SUPPORTED, Want, unsupported};
use crate::checkpoint::json::{Fields, kind, shown};
use crate::error::{Error, Result};
use crate::ops::scheme::{ActScheme, Grain};

const SCHEME_KEYS: [&str; 5] = ["targets", "weights", "input_activations", "output_activations", "format"];
const ARGUMENT_KEYS: [&str; 12] = [
    "num_bits",
    "type",
    "symmetric",
    "group_size",
    "strategy",
    "block_structure",
    "dynamic",
    "actorder",
    "scale_dtype",
    "zp_dtype",
    "observer",
    "observer_kwargs",
];
/// Presets a group may be named after, with their layout and the quantisation of their input.
const PRESETS: [(&str, Option<(Layout, ActScheme)>); 6] = [
    ("UNQUANTIZED", None),
    ("FP8", Some((Layout::Fp8(Grain::Tensor), ActScheme::Fp8Tensor))),
    ("FP8_DYNAMIC", Some((Layout::Fp8(Grain::Channel), ActScheme::Fp8Token))),
    ("FP8_BLOCK", Some((Layout::Fp8(Grain::Block), ActScheme::Fp8Group))),
    ("NVFP4", Some((Layout::Nvfp4, ActScheme::Nvfp4))),
    ("NVFP4A16", Some((Layout::Nvfp4, ActScheme::None))),
];

#[derive(Debug)]
pub(crate) struct CompressedTensors {
    ignore: Patterns,
    groups: Vec<Group>,
}

#[derive(Debug)]
struct Group {
    name: String,
    targets: Patterns,
    /// `None` where the group leaves its targets unquantised.
    scheme: Option<(Layout, ActScheme)>,
}

impl CompressedTensors {
    pub(crate) fn read(f: &Fields<'_>) -> Result<(CompressedTensors, Kv)> {
        match f.text("quantization_status")? {
            None | Some("compressed") => {}
            Some(other) => {
                let what = format!("\"{}\"; only \"compressed\" weights are stored as codes", shown(other));
                return Err(f.error("quantization_status", what));
            }
        }
        for key in ["sparsity_config", "transform_config"] {
            let Some(config) = f.object(key)? else { continue };
            if config.entries().any(|(_, v)| !v.is_null()) && config.text("format")? != Some("dense") {
                return Err(unsupported(f, key, "(weights that are sparse or transformed)"));
            }
        }
        let format = Format::read(f)?;
        let Some(named) = f.object("config_groups")? else {
            return Err(f.error("config_groups", "absent; it must say which modules are stored how"));
        };
        let mut groups = Vec::new();
        for (name, value) in named.entries() {
            groups.push(match value {
                Value::Array(targets) => Group::preset(&named, name, targets)?,
                _ => Group::read(&named, name, format)?,
            });
        }
        if groups.is_empty() {
            return Err(f.error("config_groups", "empty; it must say which modules are stored how"));
        }
        let ignore = Patterns::read(f, "ignore", f.list("ignore")?.unwrap_or_default())?;
        let kv = kv_cache(f)?;
        Ok((CompressedTensors { ignore, groups }, kv))
    }

    /// `ignore` first; then the groups, an exact name before a regular expression before a class.
    pub(crate) fn want(&self, module: &Spelled) -> Result<Want, String> {
        if let Some((_, entry)) = self.ignore.find(module)? {
            return Ok(Want::Plain { by: format!("ignore \"{}\"", shown(entry)) });
        }
        let mut claims: Vec<(Level, &str, &Group)> = Vec::new();
        for group in &self.groups {
            if let Some((level, entry)) = group.targets.find(module)? {
                claims.push((level, entry, group));
            }
        }
        let Some((level, entry, group)) = claims.iter().min_by_key(|(level, ..)| *level) else {
            return Ok(Want::Plain { by: "no group's target".into() });
        };
        // A reader that takes the closest entry and one that takes the first by name must come to the same scheme.
        let other = claims
            .iter()
            .find(|(l, _, g)| g.scheme != group.scheme && (l == level || (*l < Level::Class && self.before(g, group))));
        if let Some((_, other_entry, other)) = other {
            let says = |g: &Group| g.scheme.map_or_else(|| "unquantised".into(), |(layout, _)| layout.to_string());
            return Err(format!(
                "two groups claim it: {} (target \"{}\") says {}, {} (target \"{}\") says {}; one must not",
                group.name,
                shown(entry),
                says(group),
                other.name,
                shown(other_entry),
                says(other)
            ));
        }
        let by = format!("{} (target \"{}\")", group.name, shown(entry));
        Ok(match group.scheme {
            None => Want::Plain { by },
            Some((layout, act)) => {
                let loose = *level == Level::Class && is_router(&module.canonical);
                let plain_if = if loose { PlainIf::Router } else { PlainIf::Never };
                Want::Quantised { layout, act, by, plain_if }
            }
        })
    }

    fn before(&self, a: &Group, b: &Group) -> bool {
        let at = |g: &Group| self.groups.iter().position(|x| std::ptr::eq(x, g));
        at(a) < at(b)
    }
}

/// What a `format` says: only that weights are codes of 8 bits, or pairs of 4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Unstated,
    Fp8,
    Nvfp4,
    Mixed,
}

impl Format {
    fn read(f: &Fields<'_>) -> Result<Format> {
        match f.text("format")? {
            None => Ok(Format::Unstated),
            Some("float-quantized" | "naive-quantized") => Ok(Format::Fp8),
            Some("nvfp4-pack-quantized") => Ok(Format::Nvfp4),
            Some("mixed-precision") => Ok(Format::Mixed),
            Some(other) => Err(unsupported(f, "format", &format!("\"{}\"", shown(other)))),
        }
    }
}

impl Group {
    fn preset(named: &Fields<'_>, name: &str, targets: &[Value]) -> Result<Group> {
        let Some((_, scheme)) = PRESETS.iter().find(|(preset, _)| preset.eq_ignore_ascii_case(name)) else {
            return Err(Error::Unsupported {
                what: format!("{}: preset {}", named.file().display(), shown(&named.path(name))),
                supported: format!("presets are {}; {SUPPORTED}", PRESETS.map(|(preset, _)| preset).join(", ")),
            });
        };
        Ok(Group { name: shown(name), targets: targets_of(named, name, targets)?, scheme: *scheme })
    }

    fn read(named: &Fields<'_>, name: &str, top: Format) -> Result<Group> {
        let Some(f) = named.object(name)? else {
            return Err(named.error(&shown(name), "null; must be an object, or a list of targets"));
        };
        known_keys(&f, &SCHEME_KEYS)?;
        if let Some(output) = f.get("output_activations") {
            return Err(unsupported(&f, "output_activations", &format!("({})", kind(output))));
        }
        let format = match Format::read(&f)? {
            Format::Mixed => {
                return Err(f.error("format", "\"mixed-precision\"; only the whole config's format may be that"));
            }
            Format::Unstated if top == Format::Mixed => Format::Unstated,
            Format::Unstated => top,
            stated => stated,
        };
        let Some(list) = f.list("targets")? else {
            return Err(f.error("targets", "absent; must be a list of modules, patterns or classes"));
        };
        let targets = targets_of(&f, "targets", list)?;
        let (weights, input) = (f.object("weights")?, f.object("input_activations")?);
        let scheme = match (weights, input) {
            (None, None) => None,
            (None, Some(_)) => return Err(unsupported(&f, "input_activations", "(of weights that are not quantised)")),
            (Some(weights), input) => {
                let layout = layout(&weights, format)?;
                Some((layout, input.map_or(Ok(ActScheme::None), |i| activations(&i, layout))?))
            }
        };
        Ok(Group { name: shown(name), targets, scheme })
    }
}

fn targets_of(f: &Fields<'_>, key: &str, list: &[Value]) -> Result<Patterns> {
    if list.is_empty() {
        return Err(f.error(&shown(key), "no targets; it must say which modules it is about"));
    }
    Patterns::read(f, key, list)
}

fn known_keys(f: &Fields<'_>, known: &[&str]) -> Result<()> {
    match f.entries().find(|(key, _)| !known.contains(&key.as_str())) {
        Some((key, _)) => Err(f.error(&shown(key), format!("unknown key; known are {}", known.join(", ")))),
        None => Ok(()),
    }
}

/// The arguments of a weight or an input, with upstream's defaults.
struct Arguments {
    bits: u64,
    float: bool,
    strategy: String,
    group: Option<i64>,
}

fn arguments(f: &Fields<'_>) -> Result<Arguments> {
    known_keys(f, &ARGUMENT_KEYS)?;
    let bits = match f.get("num_bits") {
        None => 8,
        Some(v) => v.as_u64().ok_or_else(|| f.error("num_bits", format!("{}; must be 4 or 8", kind(v))))?,
    };
    let float = match f.text("type")?.map(str::to_ascii_lowercase).as_deref() {
        Some("float") => true,
        None | Some("int") => false,
        Some(other) => return Err(f.error("type", format!("\"{}\"; must be \"float\" or \"int\"", shown(other)))),
    };
    let group = match f.get("group_size") {
        None => None,
        Some(v) => match v.as_i64().filter(|g| *g == -1 || *g > 0) {
            Some(g) => Some(g),
            None => return Err(f.error("group_size", format!("{}; must be -1 or positive", kind(v)))),
        },
    };
    let strategy = match (f.text("strategy")?, group) {
        (Some(stated), _) => stated.to_ascii_lowercase(),
        (None, None) => "tensor".into(),
        (None, Some(-1)) => "channel".into(),
        (None, Some(_)) => "group".into(),
    };
    if f.flag("symmetric")? == Some(false) {
        return Err(unsupported(f, "symmetric", "false (codes with a zero point)"));
    }
    if let Some(order) = f.get("actorder").filter(|v| **v != Value::Bool(false)) {
        return Err(unsupported(f, "actorder", &kind(order)));
    }
    Ok(Arguments { bits, float, strategy, group })
}

impl Arguments {
    /// What people call it.
    fn name(&self) -> String {
        let Arguments { bits, float, strategy, group } = self;
        let known = match (float, bits, group) {
            (true, 4, Some(32)) => "MXFP4: ",
            (true, 8, Some(32)) => "MXFP8: ",
            (false, ..) => "integer codes, as of GPTQ, AWQ or W8A8: ",
            _ => "",
        };
        let kind = if *float { "float" } else { "int" };
        let group = group.map_or_else(String::new, |g| format!(" of {g}"));
        format!("({known}{bits}-bit {kind}, strategy {}{group})", shown(strategy))
    }
}

fn layout(f: &Fields<'_>, format: Format) -> Result<Layout> {
    let a = arguments(f)?;
    let path = f.path("");
    let refuse = || Error::Unsupported {
        what: format!("{}: {} {}", f.file().display(), path.trim_end_matches('.'), a.name()),
        supported: SUPPORTED.into(),
    };
    match f.get("dynamic") {
        None | Some(Value::Bool(false)) => {}
        Some(other) => {
            return Err(f.error("dynamic", format!("{}; must be false, a weight's scales are stored", kind(other))));
        }
    }
    let block = f.get("block_structure");
    let layout = match (a.float, a.bits, a.strategy.as_str(), a.group) {
        (true, 8, "tensor", None) => Layout::Fp8(Grain::Tensor),
        (true, 8, "channel", None | Some(-1)) => Layout::Fp8(Grain::Channel),
        (true, 8, "block", None) => match block.map(block_sides) {
            Some(Some([128, 128])) => Layout::Fp8(Grain::Block),
            Some(Some([r, c])) => return Err(unsupported(f, "block_structure", &format!("[{r}, {c}]"))),
            _ => {
                let found = block.map_or_else(|| "absent".into(), kind);
                return Err(f.error("block_structure", format!("{found}; must be [128, 128]")));
            }
        },
        (true, 4, "tensor_group" | "group", Some(16)) => Layout::Nvfp4,
        (true, 4, _, Some(group)) if group != 16 => {
            return Err(unsupported(f, "group_size", &format!("{group} {}", a.name())));
        }
        _ => return Err(refuse()),
    };
    if block.is_some() && layout != Layout::Fp8(Grain::Block) {
        return Err(f.error("block_structure", format!("with strategy {}; only \"block\" has blocks", a.strategy)));
    }
    if let Some(dtype) = f.text("scale_dtype")?
        && (layout == Layout::Nvfp4) != (dtype.trim_start_matches("torch.") == "float8_e4m3fn")
    {
        return Err(unsupported(f, "scale_dtype", &format!("\"{}\" of {layout}", shown(dtype))));
    }
    match (format, layout) {
        (Format::Fp8, Layout::Nvfp4) | (Format::Nvfp4, Layout::Fp8(_)) => {
            let stated = if format == Format::Fp8 { "float-quantized" } else { "nvfp4-pack-quantized" };
            let what = format!("{}-bit weights ({layout}), where the format is \"{stated}\"; they must agree", a.bits);
            Err(f.error("num_bits", what))
        }
        _ => Ok(layout),
    }
}

/// `[rows, columns]`, or the older `"rowsxcolumns"`.
fn block_sides(value: &Value) -> Option<[u64; 2]> {
    let sides: Vec<u64> = match value {
        Value::Array(list) => list.iter().map(Value::as_u64).collect::<Option<_>>()?,
        Value::String(text) => text.split('x').map(|s| s.parse().ok()).collect::<Option<_>>()?,
        _ => return None,
    };
    sides.try_into().ok()
}

fn activations(f: &Fields<'_>, weights: Layout) -> Result<ActScheme> {
    let a = arguments(f)?;
    let dynamic = match f.get("dynamic") {
        None | Some(Value::Bool(false)) => "false",
        Some(Value::Bool(true)) => "true",
        Some(Value::String(s)) if s.eq_ignore_ascii_case("local") => "local",
        Some(other) => return Err(f.error("dynamic", format!("{}; must be true, false or \"local\"", kind(other)))),
    };
    let act = match (a.float, a.bits, a.strategy.as_str(), a.group, dynamic) {
        (true, 8, "tensor", None, "false") => ActScheme::Fp8Tensor,
        (true, 8, "token", None, "true") => ActScheme::Fp8Token,
        (true, 8, "group", Some(128), "true") => ActScheme::Fp8Group,
        (true, 4, "tensor_group", Some(16), "local") => ActScheme::Nvfp4,
        _ => {
            let path = f.path("");
            return Err(Error::Unsupported {
                what: format!("{}: {} {}, dynamic {dynamic}", f.file().display(), path.trim_end_matches('.'), a.name()),
                supported: "inputs are quantised to 8-bit float by tensor (stored), by token or by group of 128 \
                    (dynamic), or to 4-bit float by tensor_group of 16 (dynamic \"local\")"
                    .into(),
            });
        }
    };
    if (act == ActScheme::Nvfp4) != (weights == Layout::Nvfp4) {
        let what = format!("{}-bit inputs of weights that are {weights}", a.bits);
        return Err(unsupported(f, "num_bits", &format!("({what})")));
    }
    Ok(act)
}

/// `kv_cache_scheme`: absent, or 8-bit floats with a scale per tensor.
pub(crate) fn kv_cache(f: &Fields<'_>) -> Result<Kv> {
    let Some(scheme) = f.object("kv_cache_scheme")? else { return Ok(Kv::Plain) };
    let a = arguments(&scheme)?;
    if !a.float || a.bits != 8 || a.strategy != "tensor" {
        return Err(unsupported(f, "kv_cache_scheme", &a.name()));
    }
    Ok(if scheme.flag("dynamic")? == Some(true) { Kv::Dynamic } else { Kv::Static })
}
