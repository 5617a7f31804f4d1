//! The tensors of a linear module, by the last part of their names.
//!
//! May live here: those names, on any producer's side. May not: shapes, dtypes, and which of them belong together.

use std::fmt;

use crate::checkpoint::account::Entry;

/// One tensor of a linear module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// Floats, e4m3 codes, or modelopt's pairs of e2m1 codes.
    Weight,
    /// compressed-tensors' pairs of e2m1 codes.
    Packed,
    /// The scale of what the scheme says, a multiplier in every scheme.
    Scale,
    /// The same under the name of Qwen's own files; it multiplies all the same.
    ScaleInv,
    /// modelopt's NVFP4 global, a multiplier.
    Scale2,
    /// compressed-tensors' NVFP4 global, a divisor.
    Global,
    /// The scale of the input: a multiplier of its codes, or modelopt's NVFP4 global.
    InputScale,
    /// compressed-tensors' NVFP4 global of the input, a divisor.
    InputGlobal,
}

const COUNT: usize = 8;

/// Each part with its name on disk.
const NAMES: [(Part, &str); COUNT] = [
    (Part::Weight, "weight"),
    (Part::Packed, "weight_packed"),
    (Part::Scale, "weight_scale"),
    (Part::ScaleInv, "weight_scale_inv"),
    (Part::Scale2, "weight_scale_2"),
    (Part::Global, "weight_global_scale"),
    (Part::InputScale, "input_scale"),
    (Part::InputGlobal, "input_global_scale"),
];

/// Names of schemes that are not read, with what they belong to.
const FOREIGN: [(&str, &str); 12] = [
    ("qweight", "AWQ or GPTQ"),
    ("qzeros", "AWQ or GPTQ"),
    ("scales", "AWQ or GPTQ"),
    ("g_idx", "GPTQ with activation order"),
    ("weight_g_idx", "integer codes with activation order"),
    ("weight_shape", "pack-quantized integer codes"),
    ("weight_zero_point", "codes with a zero point"),
    ("input_zero_point", "codes with a zero point"),
    ("pre_quant_scale", "AWQ's scaled inputs"),
    ("svdquant_lora_a", "SVDQuant"),
    ("svdquant_lora_b", "SVDQuant"),
    ("activation_scale", "FP8 with stored scales of the input"),
];

impl Part {
    /// Its name on disk.
    pub(crate) fn name(self) -> &'static str {
        NAMES[self as usize].1
    }

    /// The part of this name.
    pub(crate) fn by_name(name: &str) -> Option<Part> {
        NAMES.iter().find(|(_, n)| *n == name).map(|(part, _)| *part)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a tensor belongs to if its name is one of a scheme that is not read.
pub(crate) fn foreign(last: &str) -> Option<&'static str> {
    FOREIGN.iter().find(|(name, _)| *name == last).map(|(_, what)| *what)
}

/// A module's tensors.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Parts<'a>([Option<&'a Entry>; COUNT]);

impl<'a> Parts<'a> {
    /// Looks every part up.
    pub(crate) fn of(get: impl Fn(&str) -> Option<&'a Entry>) -> Parts<'a> {
        Parts(NAMES.map(|(_, name)| get(name)))
    }

    pub(crate) fn get(&self, part: Part) -> Option<&'a Entry> {
        self.0[part as usize]
    }

    /// Those that are there.
    pub(crate) fn present(&self) -> impl Iterator<Item = (Part, &'a Entry)> {
        NAMES.into_iter().filter_map(|(part, _)| Some((part, self.get(part)?)))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.present().next().is_none()
    }
}

impl fmt::Display for Parts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (part, entry)) in self.present().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{part} {} {:?}", entry.dtype, entry.shape)?;
        }
        Ok(())
    }
}
