//! A module's tensors held against what its config says.
//!
//! May live here: which tensors a scheme is made of, their dtypes and shapes, and in words what is wrong. Nothing is
//! reshaped or broadcast to make it fit. May not: names of modules, and values.

use super::parts::{Part, Parts};
use super::{Layout, PlainIf, Want, plain};
use crate::checkpoint::account::Entry;
use crate::checkpoint::header::Dtype;
use crate::num::DType;
use crate::ops::scheme::{ActScheme, Global, Grain, Scheme};

/// Columns that share an NVFP4 scale.
const NVFP4_GROUP: usize = 16;
/// Rows, and columns, of a block.
const BLOCK: usize = 128;

/// A weight's rows (outputs) and columns (inputs).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

/// The scheme of a module whose tensors are what its config says; else what is wrong, in words that follow its name.
pub(crate) fn judge(size: Size, want: &Want, parts: &Parts<'_>) -> Result<(Scheme, ActScheme), String> {
    match want {
        Want::Plain { by } => judge_plain(size, by, parts).map(|scheme| (scheme, ActScheme::None)),
        Want::Quantised { layout, act, by, plain_if } => {
            let check = Check { size, parts, layout: *layout, act: *act, by };
            if check.is_plain() {
                let odd = !size.rows.is_multiple_of(BLOCK) || !size.cols.is_multiple_of(BLOCK);
                return match plain_if {
                    PlainIf::Router => judge_plain(size, by, parts),
                    PlainIf::OddShape if odd => judge_plain(size, by, parts),
                    _ => Err(check.wrong()),
                }
                .map(|scheme| (scheme, ActScheme::None));
            }
            match layout {
                Layout::Fp8(grain) => check.fp8(*grain),
                Layout::Nvfp4 => check.nvfp4(),
            }
            .map(|scheme| (scheme, *act))
        }
    }
}

fn judge_plain(size: Size, by: &str, parts: &Parts<'_>) -> Result<Scheme, String> {
    let unannounced = by == "no quantization_config";
    let right = format!("must be weight BF16 or F32 [{}, {}] alone", size.rows, size.cols);
    let extra = parts.present().find(|(part, _)| *part != Part::Weight).map(|(part, _)| part);
    let (Some(weight), None) = (parts.get(Part::Weight), extra) else {
        let extra = extra.unwrap_or(Part::Weight);
        return Err(if unannounced {
            format!(
                "{extra} is part of a quantised weight, and no quantization_config says so; on disk are {parts}, {right}"
            )
        } else {
            format!("quantised on disk ({parts}), and unquantised by config.json ({by}); {right}")
        });
    };
    let dtype = match weight.dtype {
        Dtype::Bf16 => DType::Bf16,
        Dtype::F32 => DType::F32,
        other => {
            let why = plain(other).err().unwrap_or_default();
            let by = if unannounced { String::new() } else { format!("; config.json leaves it unquantised ({by})") };
            return Err(format!("dtype {other}; must be BF16 or F32: {why}{by}"));
        }
    };
    shape(Part::Weight, weight, &[size.rows, size.cols], "config.json asks for")?;
    Ok(Scheme::Plain(dtype))
}

/// A shape that must be exactly this.
fn shape(part: Part, entry: &Entry, right: &[usize], asks: &str) -> Result<(), String> {
    if entry.shape == right {
        return Ok(());
    }
    let turned = entry.shape.iter().rev().eq(right);
    let hint = if turned { ": it is transposed, rows are outputs" } else { "" };
    Err(format!("{part} has shape {:?}; {asks} {right:?}{hint}", entry.shape))
}

fn is_scalar(entry: &Entry) -> bool {
    entry.shape.len() <= 2 && entry.shape.iter().product::<usize>() == 1
}

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::Bf16 | Dtype::F32)
}

struct Check<'a> {
    size: Size,
    parts: &'a Parts<'a>,
    layout: Layout,
    act: ActScheme,
    by: &'a str,
}

impl Check<'_> {
    /// Whether the module is floats on disk, and nothing else.
    fn is_plain(&self) -> bool {
        let floats = |entry: &Entry| matches!(entry.dtype, Dtype::Bf16 | Dtype::F32 | Dtype::F16 | Dtype::F64);
        self.parts.present().all(|(part, entry)| part == Part::Weight && floats(entry))
    }

    /// What the scheme's tensors must be, for errors.
    fn right(&self) -> String {
        let Size { rows, cols } = self.size;
        let right = match self.layout {
            Layout::Fp8(grain) => {
                let scale = match grain {
                    Grain::Tensor => "[] or [1]".to_owned(),
                    Grain::Channel => format!("[{rows}] or [{rows}, 1]"),
                    Grain::Block => format!("[{}, {}]", rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)),
                };
                format!("weight F8_E4M3 [{rows}, {cols}], weight_scale BF16 or F32 {scale}")
            }
            Layout::Nvfp4 if self.divides() => format!(
                "weight_packed U8 [{rows}, {}], weight_scale F8_E4M3 [{rows}, {}], weight_global_scale F32 [1]",
                cols / 2,
                cols / NVFP4_GROUP
            ),
            Layout::Nvfp4 => format!(
                "weight U8 [{rows}, {}], weight_scale F8_E4M3 [{rows}, {}], weight_scale_2 F32 []",
                cols / 2,
                cols / NVFP4_GROUP
            ),
        };
        match self.input_part() {
            Some(part) => format!("{right}, {part} F32 [1]"),
            None => right,
        }
    }

    fn wrong(&self) -> String {
        format!("{} by config.json ({}), and on disk {}; must be {}", self.layout, self.by, self.held(), self.right())
    }

    fn held(&self) -> String {
        if self.parts.is_empty() { "are no tensors of it".into() } else { format!("are {}", self.parts) }
    }

    fn fail<T>(&self, what: &str) -> Result<T, String> {
        Err(format!("{what}; {} by config.json ({}): must be {}", self.layout, self.by, self.right()))
    }

    /// Both exporters may call themselves the same: the tensors' names say which of them wrote an NVFP4 module.
    fn divides(&self) -> bool {
        [Part::Packed, Part::Global, Part::InputGlobal].iter().any(|p| self.parts.get(*p).is_some())
    }

    /// The tensor that the input's scale is stored in.
    fn input_part(&self) -> Option<Part> {
        match self.act {
            ActScheme::Nvfp4 if self.divides() => Some(Part::InputGlobal),
            ActScheme::Fp8Tensor | ActScheme::Nvfp4 => Some(Part::InputScale),
            ActScheme::None | ActScheme::Fp8Token | ActScheme::Fp8Group => None,
        }
    }

    /// Every tensor of `needed` and the input's is there, and no other.
    fn exactly(&self, needed: &[Part]) -> Result<(), String> {
        let needed = || needed.iter().copied().chain(self.input_part());
        if let Some(missing) = needed().find(|p| self.parts.get(*p).is_none()) {
            return self.fail(&format!("no {missing}, on disk {}", self.held()));
        }
        if let Some((extra, _)) = self.parts.present().find(|(part, _)| needed().all(|n| n != *part)) {
            let why = match (extra, self.act) {
                (Part::InputScale | Part::InputGlobal, act) if self.input_part().is_none() => {
                    format!("its input is {}", act_name(act))
                }
                _ => format!("on disk {}", self.held()),
            };
            return self.fail(&format!("{extra} is one too many, {why}"));
        }
        Ok(())
    }

    fn get(&self, part: Part) -> Result<&Entry, String> {
        self.parts.get(part).ok_or_else(|| self.wrong())
    }

    fn scalar(&self, part: Part) -> Result<(), String> {
        let entry = self.get(part)?;
        if !is_float(entry.dtype) || !is_scalar(entry) {
            let what = format!("{part} is {} {:?}, must be BF16 or F32, [] or [1]", entry.dtype, entry.shape);
            return self.fail(&what);
        }
        Ok(())
    }

    fn input(&self) -> Result<(), String> {
        self.input_part().map_or(Ok(()), |part| self.scalar(part))
    }

    fn fp8(&self, grain: Grain) -> Result<Scheme, String> {
        let Size { rows, cols } = self.size;
        // Qwen's name for a grid of blocks; it multiplies like the other.
        let inverse = grain == Grain::Block && self.parts.get(Part::Scale).is_none();
        let scale = if inverse { Part::ScaleInv } else { Part::Scale };
        self.exactly(&[Part::Weight, scale])?;
        let weight = self.get(Part::Weight)?;
        if weight.dtype != Dtype::F8E4m3 {
            let hint = if weight.dtype == Dtype::U8 { ": pairs of 4 bits, or bytes of an unknown kind" } else { "" };
            return self.fail(&format!("weight is {}, must be F8_E4M3{hint}", weight.dtype));
        }
        shape(Part::Weight, weight, &[rows, cols], "must have").or_else(|what| self.fail(&what))?;
        let entry = self.get(scale)?;
        if !is_float(entry.dtype) {
            return self.fail(&format!("{scale} is {} {:?}, must be BF16 or F32", entry.dtype, entry.shape));
        }
        let (br, bc) = (rows.div_ceil(BLOCK), cols.div_ceil(BLOCK));
        let fits = match grain {
            Grain::Tensor => is_scalar(entry),
            Grain::Channel => entry.shape == [rows] || entry.shape == [rows, 1],
            // modelopt keeps its four dimensions, and none for a single block.
            Grain::Block => {
                entry.shape == [br, bc] || entry.shape == [br, 1, bc, 1] || (br * bc == 1 && is_scalar(entry))
            }
        };
        if !fits {
            let turned = entry.shape.iter().rev().copied().eq([br, bc]) && grain == Grain::Block;
            let count: usize = entry.shape.iter().product();
            let hint = match grain {
                _ if turned || (grain == Grain::Channel && entry.shape == [1, rows]) => " (it is transposed)",
                Grain::Tensor if count == rows => " (it is one for each row: FP8 by channel)",
                Grain::Tensor | Grain::Channel if count == br * bc && count > 1 => " (it is a grid of blocks)",
                Grain::Channel | Grain::Block if count == 1 => " (it is one for the whole: FP8 by tensor)",
                Grain::Block if count == rows => " (it is one for each row: FP8 by channel)",
                _ => "",
            };
            return self.fail(&format!("{scale} is {} {:?}{hint}", entry.dtype, entry.shape));
        }
        self.input()?;
        Ok(Scheme::Fp8(grain))
    }

    fn nvfp4(&self) -> Result<Scheme, String> {
        let Size { rows, cols } = self.size;
        if !cols.is_multiple_of(NVFP4_GROUP) {
            return self.fail(&format!("{cols} columns; NVFP4 needs a multiple of {NVFP4_GROUP}"));
        }
        let (codes, global) = if self.divides() { (Part::Packed, Part::Global) } else { (Part::Weight, Part::Scale2) };
        self.exactly(&[codes, Part::Scale, global])?;
        let entry = self.get(codes)?;
        if entry.dtype != Dtype::U8 {
            return self.fail(&format!("{codes} is {} {:?}, must be U8", entry.dtype, entry.shape));
        }
        shape(codes, entry, &[rows, cols / 2], "must have").or_else(|what| self.fail(&what))?;
        let scale = self.get(Part::Scale)?;
        let groups = cols / NVFP4_GROUP;
        if scale.dtype != Dtype::F8E4m3 || scale.shape != [rows, groups] {
            let hint = match scale.shape.as_slice() {
                [r, g] if *r == rows && *g * 32 == cols => " (groups of 32 are MXFP4's, which is not supported)",
                [_] => " (one dimension: it was swizzled for a kernel, take a checkpoint in rows and columns)",
                [g, r] if *r == rows && *g == groups && *g != *r => " (it is transposed)",
                _ if matches!(scale.dtype, Dtype::U8 | Dtype::F8E8m0) => " (MXFP4's scales are powers of two)",
                _ => "",
            };
            return self.fail(&format!("weight_scale is {} {:?}{hint}", scale.dtype, scale.shape));
        }
        self.scalar(global)?;
        self.input()?;
        Ok(Scheme::Nvfp4(if self.divides() { Global::Divides } else { Global::Multiplies }))
    }
}

fn act_name(act: ActScheme) -> &'static str {
    match act {
        ActScheme::None => "not quantised",
        ActScheme::Fp8Tensor | ActScheme::Nvfp4 => "quantised by a stored scale",
        ActScheme::Fp8Token | ActScheme::Fp8Group => "quantised by scales made at run time",
    }
}
