//! The values of a model without files: which stream of the generator each parameter, code and scale is drawn from.
//!
//! May live here: distributions, as formulas of a name, a shape and a seed. May not: names on disk, files.
//!
//! Every stream is Philox keyed by the seed and a name ([`philox::stream_key`]), numbered in row-major order, and every
//! value is a function of its number in exact integers up to one rounding: the same on any device and under any split.
//!
//! | value | stream | drawn as |
//! |---|---|---|
//! | a matrix | its name | near-normal of variance 1 / K in bf16; the embedding's is 1 |
//! | FP8 codes | `module.weight` | n / 2 in e4m3 ([`Code::E4m3`]): root mean square 73.9, at most 256 |
//! | their scales, all or one per row or block | `module.weight_scale` | (1 + m / 128) 2^e |
//! | NVFP4 codes | `module.weight` | n / 44 in e2m1 ([`Code::E2m1`]): root mean square 3.19, 7 in 50 are 6 |
//! | their block scales | `module.weight_scale` | e4m3 codes 0x6C to 0x7B: 96 to 352, root mean square 210 |
//! | their global | `group.weight_global_scale` | (1 + m / 128) 2^e |
//! | an input's scale | `group.input_scale` | FP8 (1 + m / 128) 2^-6; NVFP4 (1 + m / 128) 2^-9, as a divisor 2^8 |
//! | a KV scale | `layers.L.self_attn.k_scale` | (1 + m / 128) 2^-6 |
//!
//! m is 7 bits, so a scale is exact in bf16 and in f32. The exponent e of a weight's scales makes the mean square of
//! decoded values between 1 / (2K) and 2 / K. Groups share a global or an input's scale as the producer's own files do.

use super::geometry::Geometry;
use super::linears::Place;
use super::recipe::{Producer, Recipe};
use super::verdict::{RowScale, Verdict};
use crate::error::{Error, Result};
use crate::num::DType;
use crate::num::philox::{philox4x32, stream_key};
use crate::ops::Cx;
use crate::ops::fill::{self, Code};
use crate::ops::reference::fill::{pow2, scales};
use crate::ops::scheme::{ActScheme, Global, Grain, Scheme};
use crate::tensor::Tensor;

// Mean squares, rounded, of code x scale / 2^e before the exponent is chosen: of e4m3 codes times (1 + m / 128), and of
// e2m1 codes times block scales, alone, times (1 + m / 128), and over it.
const FP8_POWER: u64 = 12_667;
const NVFP4_POWER: u64 = 446_884;
const NVFP4_POWER_MULTIPLIED: u64 = 1_037_497;
const NVFP4_POWER_DIVIDED: u64 = 224_755;

/// How an unquantised parameter is drawn: near-normal around `mean`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Init {
    pub(crate) mean: f32,
    pub(crate) std: f32,
}

/// Values that keep a random model's activations near one: matrices by the inverse root of their input width, norms
/// near their neutral value, decays from slow to fast.
pub(crate) fn init_of(name: &str, cols: usize) -> Init {
    let (mean, std) = if name.ends_with("linear_attn.norm.weight") {
        (1.0, 0.05)
    } else if name.ends_with("norm.weight") {
        (0.0, 0.05)
    } else if name.ends_with("A_log") {
        (1.0, 0.7)
    } else if name.ends_with("dt_bias") {
        (-2.0, 1.0)
    } else if name.ends_with("conv1d.weight") {
        (0.0, 0.5)
    } else if name == "embed_tokens.weight" {
        (0.0, 1.0)
    } else {
        (0.0, 1.0 / (cols as f32).sqrt())
    };
    Init { mean, std }
}

/// The scales of a quantised weight, as drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scales {
    /// Positive e4m3 codes.
    E4m3 { key: [u32; 2] },
    /// (1 + m / 128) 2^exponent.
    F32 { key: [u32; 2], exponent: i32 },
}

/// A model without files.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seeded<'a> {
    pub(crate) geometry: &'a Geometry,
    pub(crate) recipe: &'a Recipe,
    pub(crate) seed: u64,
}

impl<'a> Seeded<'a> {
    pub(crate) fn of(geometry: &'a Geometry, recipe: &'a Recipe, seed: u64) -> Seeded<'a> {
        Seeded { geometry, recipe, seed }
    }

    /// The element type of an unquantised parameter; one that is quantised has codes and scales instead.
    pub(crate) fn dtype(&self, name: &str) -> Result<DType> {
        match name.strip_suffix(".weight").and_then(|module| self.recipe.rule(self.geometry, module)) {
            None => Ok(DType::Bf16),
            Some(_) => Err(Error::shape("load", format!("{name} is quantised by @{}, it has no floats", self.recipe))),
        }
    }

    /// Fills rows with an unquantised parameter: as a bf16 checkpoint would hold it, whatever type it is kept in.
    pub(crate) fn fill(&self, cx: &Cx, dst: &mut Tensor, first: usize, rows: usize, name: &str) -> Result<()> {
        self.dtype(name)?;
        let init = init_of(name, dst.cols());
        fill::normal_bf16(cx, dst, first..first + rows, self.key(name), 0, init.mean, init.std)
    }

    /// Fills rows with all of a quantised module's codes.
    pub(crate) fn fill_codes(&self, cx: &Cx, dst: &mut Tensor, first: usize, rows: usize, module: &str) -> Result<()> {
        let (key, code) = self.codes(module)?;
        self.fits(dst, module, rows, |[n, k]| [n, k / code.elements() as usize])?;
        fill::codes(cx, dst, first..first + rows, key, code)
    }

    /// Fills rows with all of a quantised module's block scales.
    pub(crate) fn fill_scales(&self, cx: &Cx, dst: &mut Tensor, first: usize, rows: usize, module: &str) -> Result<()> {
        match self.scales(module)? {
            Scales::E4m3 { key } => {
                self.fits(dst, module, rows, |[n, k]| [n, k / 16])?;
                fill::codes(cx, dst, first..first + rows, key, Code::ScaleE4m3)
            }
            Scales::F32 { key, exponent } => {
                self.fits(dst, module, rows, |[n, k]| [n.div_ceil(128), k.div_ceil(128)])?;
                fill::scales(cx, dst, first..first + rows, key, exponent)
            }
        }
    }

    /// A destination must have the module's own rows and width: the stream is numbered by them.
    fn fits(&self, dst: &Tensor, module: &str, rows: usize, of: impl Fn([usize; 2]) -> [usize; 2]) -> Result<()> {
        match self.geometry.linear(module).map(of) {
            Some([n, k]) if n == rows && k == dst.cols() => Ok(()),
            right => Err(Error::shape("load", format!("{module}: {rows} rows of {} for {right:?}", dst.cols()))),
        }
    }

    /// How a linear module is stored.
    pub(crate) fn scheme(&self, module: &str) -> Result<(Scheme, ActScheme)> {
        self.recipe.scheme(self.geometry, module).ok_or_else(|| unknown(self.geometry, module))
    }

    pub(crate) fn verdict(&self, module: &str) -> Result<Verdict> {
        let (scheme, act) = self.scheme(module)?;
        Ok(Verdict { scheme, act, input_scale: self.input_scale(module, scheme, act)? })
    }

    /// The key of a named stream.
    pub(crate) fn key(&self, name: &str) -> [u32; 2] {
        stream_key(self.seed, name)
    }

    /// The codes of a quantised weight.
    pub(crate) fn codes(&self, module: &str) -> Result<([u32; 2], Code)> {
        let code = match self.scheme(module)?.0 {
            Scheme::Fp8(_) => Code::E4m3,
            Scheme::Nvfp4(_) => Code::E2m1,
            Scheme::Plain(_) => return Err(plain(module)),
        };
        Ok((self.key(&format!("{module}.weight")), code))
    }

    /// The scales of a quantised weight: of all of it, its rows, its blocks, or NVFP4's groups.
    pub(crate) fn scales(&self, module: &str) -> Result<Scales> {
        let (scheme, _) = self.scheme(module)?;
        let own = || format!("{module}.weight_scale");
        let exponent = || self.cols(module).map(|k| -half_log2(FP8_POWER * k));
        match scheme {
            Scheme::Fp8(Grain::Tensor) => {
                Ok(Scales::F32 { key: self.key(&self.shared_fp8_scale(module)?), exponent: exponent()? })
            }
            Scheme::Fp8(_) => Ok(Scales::F32 { key: self.key(&own()), exponent: exponent()? }),
            Scheme::Nvfp4(_) => Ok(Scales::E4m3 { key: self.key(&own()) }),
            Scheme::Plain(_) => Err(plain(module)),
        }
    }

    /// The NVFP4 global of a module.
    pub(crate) fn global(&self, module: &str) -> Result<f32> {
        let Scheme::Nvfp4(sense) = self.scheme(module)?.0 else { return Err(plain(module)) };
        let cols = self.cols(module)?;
        let exact = self.recipe.pow2_globals();
        let power = match sense {
            _ if exact => NVFP4_POWER,
            Global::Multiplies => NVFP4_POWER_MULTIPLIED,
            Global::Divides => NVFP4_POWER_DIVIDED,
        };
        let half = half_log2(power * cols);
        let exponent = if sense == Global::Multiplies { -half } else { half };
        Ok(if exact { pow2(exponent) } else { self.one(&self.shared_global(module)?, exponent) })
    }

    /// The scales of whole rows.
    pub(crate) fn row_scale(&self, module: &str) -> Result<RowScale> {
        let (scheme, _) = self.scheme(module)?;
        match (scheme, self.geometry.linear(module)) {
            (Scheme::Fp8(grain @ (Grain::Tensor | Grain::Channel)), Some([rows, _])) => {
                let Scales::F32 { key, exponent } = self.scales(module)? else { return Err(plain(module)) };
                let mut values = vec![0.0; if grain == Grain::Tensor { 1 } else { rows }];
                scales(&mut values, key, 0, exponent);
                Ok(if grain == Grain::Tensor { RowScale::One(values[0]) } else { RowScale::Each(values) })
            }
            (Scheme::Nvfp4(_), _) => self.global(module).map(RowScale::One),
            _ => Err(Error::shape("load", format!("module {module} has no scales of whole rows"))),
        }
    }

    /// The stored scales of K and V of an attention layer's FP8 cache, where the recipe has them.
    pub(crate) fn kv_scales(&self, layer: usize) -> Option<(f32, f32)> {
        let attends = self.geometry.layers.get(layer) == Some(&super::Mixer::Attention);
        let one = |which: &str| self.one(&format!("layers.{layer}.self_attn.{which}"), -6);
        (attends && self.recipe.file().kv.is_some()).then(|| (one("k_scale"), one("v_scale")))
    }

    fn input_scale(&self, module: &str, scheme: Scheme, act: ActScheme) -> Result<Option<f32>> {
        let exponent = match (act, scheme) {
            (ActScheme::Fp8Tensor, _) => -6,
            (ActScheme::Nvfp4, Scheme::Nvfp4(Global::Divides)) if self.recipe.pow2_globals() => return Ok(Some(512.0)),
            (ActScheme::Nvfp4, _) if self.recipe.pow2_globals() => return Ok(Some(1.0 / 512.0)),
            (ActScheme::Nvfp4, Scheme::Nvfp4(Global::Divides)) => 8,
            (ActScheme::Nvfp4, _) => -9,
            (ActScheme::None | ActScheme::Fp8Token | ActScheme::Fp8Group, _) => return Ok(None),
        };
        Ok(Some(self.one(&self.shared_input(module)?, exponent)))
    }

    /// The one scale of a stream.
    fn one(&self, name: &str, exponent: i32) -> f32 {
        let m = philox4x32(self.key(name), [0; 4])[0] >> 25;
        (128 + m) as f32 * pow2(exponent - 7)
    }

    fn cols(&self, module: &str) -> Result<u64> {
        self.geometry.linear(module).map(|[_, cols]| cols as u64).ok_or_else(|| unknown(self.geometry, module))
    }

    fn is_modelopt(&self) -> bool {
        self.recipe.file().producer == Producer::Modelopt
    }

    /// Modules that read the same activations were calibrated on the same ones. An expert's own activations are its own in
    /// llm-compressor's files, and all experts' together in modelopt's.
    fn shared_input(&self, module: &str) -> Result<String> {
        let p = self.place(module)?;
        let layer = p.layer.unwrap_or_default();
        Ok(match (p.block, p.part) {
            ("self_attn", "q_proj" | "k_proj" | "v_proj") => format!("layers.{layer}.self_attn.input_scale"),
            ("linear_attn", part) if part.starts_with("in_proj") => format!("layers.{layer}.linear_attn.input_scale"),
            (_, "gate_proj" | "up_proj") => format!("layers.{layer}.mlp.input_scale"),
            ("mlp.experts", part) if self.is_modelopt() => format!("layers.{layer}.mlp.experts.{part}.input_scale"),
            _ => format!("{module}.input_scale"),
        })
    }

    /// Both producers give q, k and v one global, and gate and up; modelopt in_proj_qkv and in_proj_z too.
    fn shared_global(&self, module: &str) -> Result<String> {
        let p = self.place(module)?;
        let group = match (p.block, p.part) {
            ("self_attn", "q_proj" | "k_proj" | "v_proj") => "qkv_proj",
            ("linear_attn", "in_proj_qkv" | "in_proj_z") if self.is_modelopt() => "in_proj_qkvz",
            (_, "gate_proj" | "up_proj") => "gate_up_proj",
            _ => p.part,
        };
        Ok(format!("{}.weight_global_scale", beside(module, group)))
    }

    /// modelopt gives gate and up one FP8 scale; all others have their own.
    fn shared_fp8_scale(&self, module: &str) -> Result<String> {
        let p = self.place(module)?;
        let pair = matches!(p.part, "gate_proj" | "up_proj") && self.is_modelopt();
        Ok(format!("{}.weight_scale", beside(module, if pair { "gate_up_proj" } else { p.part })))
    }

    fn place<'m>(&self, module: &'m str) -> Result<Place<'m>> {
        Place::of(module).ok_or_else(|| unknown(self.geometry, module))
    }
}

/// The module with its last part replaced.
fn beside(module: &str, part: &str) -> String {
    match module.rsplit_once('.') {
        Some((block, _)) => format!("{block}.{part}"),
        None => part.to_owned(),
    }
}

/// Half of log2(power), to the nearest integer.
fn half_log2(power: u64) -> i32 {
    power.ilog2().div_ceil(2) as i32
}

fn unknown(geometry: &Geometry, module: &str) -> Error {
    Error::shape("load", format!("{} has no linear module \"{module}\"", geometry.name))
}

fn plain(module: &str) -> Error {
    Error::shape("load", format!("module {module} is not quantised, it has no codes and no scales"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with<T>(geometry: &str, recipe: &str, then: impl FnOnce(Seeded<'_>) -> T) -> T {
        let (geometry, recipe) = (Geometry::builtin(geometry).unwrap(), Recipe::parse(recipe).unwrap());
        then(Seeded { geometry: &geometry, recipe: &recipe, seed: 3 })
    }

    #[test]
    fn modules_share_scales_as_the_producers_files_do() {
        let differ = |a: Option<f32>, b: Option<f32>| assert!(a != b && a.is_some() && b.is_some(), "{a:?} {b:?}");
        with("qwen3.6-35b-a3b", "modelopt-nvfp4", |s| {
            let input = |m: &str| s.verdict(m).unwrap().input_scale;
            assert_eq!(input("layers.3.self_attn.q_proj"), input("layers.3.self_attn.v_proj"));
            assert_eq!(input("layers.0.linear_attn.in_proj_qkv"), input("layers.0.linear_attn.in_proj_z"));
            assert_eq!(input("layers.0.mlp.experts.0.gate_proj"), input("layers.0.mlp.shared_expert.up_proj"));
            assert_eq!(input("layers.0.mlp.experts.0.down_proj"), input("layers.0.mlp.experts.255.down_proj"));
            differ(input("layers.3.self_attn.q_proj"), input("layers.7.self_attn.q_proj"));
            let global = |m: &str| s.global(m).unwrap().to_bits();
            assert_eq!(global("layers.0.linear_attn.in_proj_qkv"), global("layers.0.linear_attn.in_proj_z"));
            assert_eq!(global("layers.0.mlp.experts.9.gate_proj"), global("layers.0.mlp.experts.9.up_proj"));
            let experts: Vec<u32> = (0..8).map(|e| global(&format!("layers.0.mlp.experts.{e}.up_proj"))).collect();
            assert!(experts.iter().any(|g| *g != experts[0]), "each expert has its own");
        });
        with("qwen3.6-35b-a3b", "unsloth-nvfp4-fast", |s| {
            let input = |e: usize| s.verdict(&format!("layers.0.mlp.experts.{e}.down_proj")).unwrap().input_scale;
            assert!((1..8).any(|e| input(e) != input(0)));
            let (k, v) = s.kv_scales(3).unwrap();
            assert!(k > 0.0 && v > 0.0 && k.to_bits() != v.to_bits());
            assert_eq!(s.kv_scales(2), None, "a GDN layer");
            assert_eq!(s.kv_scales(40), None, "no layer");
        });
        with("qwen3.8-27b", "ct-nvfp4-all-gdn", |s| {
            let global = |m: &str| s.global(m).unwrap().to_bits();
            assert_ne!(global("layers.0.linear_attn.in_proj_qkv"), global("layers.0.linear_attn.in_proj_z"));
            assert_eq!(global("layers.3.self_attn.q_proj"), global("layers.3.self_attn.k_proj"));
            assert_eq!(s.kv_scales(3), None, "this recipe has none");
        });
    }

    #[test]
    fn power_of_two_globals_are_reciprocals_of_each_other() {
        let global = |recipe: &str| {
            with("qwen3.8-27b", recipe, |s| {
                let module = "layers.0.mlp.down_proj";
                (s.global(module).unwrap(), s.verdict(module).unwrap().input_scale)
            })
        };
        let (ct, mo) = (global("ct-nvfp4-early,globals=pow2"), global("modelopt-nvfp4,globals=pow2"));
        assert_eq!((ct.0 * mo.0).to_bits(), 1f32.to_bits());
        assert_eq!((ct.1.unwrap() * mo.1.unwrap()).to_bits(), 1f32.to_bits());
        assert_eq!(ct.0.to_bits() & 0x7F_FFFF, 0, "{}", ct.0);
    }

    #[test]
    fn a_module_has_what_its_scheme_has() {
        with("qwen3.8-27b", "unsloth-nvfp4", |s| {
            assert!(s.codes("layers.0.linear_attn.in_proj_a").is_err());
            assert!(s.scales("layers.0.linear_attn.in_proj_a").is_err());
            assert!(s.global("lm_head").is_err(), "FP8 has no global");
            assert!(matches!(s.row_scale("layers.3.self_attn.k_proj"), Ok(RowScale::Each(v)) if v.len() == 1024));
            assert!(matches!(s.row_scale("layers.3.mlp.up_proj"), Ok(RowScale::One(_))));
            assert!(s.verdict("layers.64.mlp.up_proj").unwrap_err().to_string().contains("no linear module"));
        });
        with("qwen3.8-27b", "fp8-block", |s| assert!(s.row_scale("layers.3.mlp.up_proj").is_err()));
    }
}
