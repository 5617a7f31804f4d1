//! How the weights of a geometry without files are stored: recipes, one data file each under `recipes/`.
//!
//! May live here: recipes by name, their options, and the scheme of one module. May not: tensors' names on disk
//! (synth/layout.rs), and values (seeded.rs). A new recipe is a file and a line in [`FILES`].
//!
//! A user writes `name[,option=value]…` after the geometry's `@`:
//!
//! | option | does |
//! |---|---|
//! | `head=bf16` | the head as its dequantised twin, whatever the recipe says of it |
//! | `globals=pow2` | NVFP4 globals are powers of two, the same in both producers' sense, so that both decode alike |

mod file;

use std::fmt;
use std::sync::Arc;

pub use self::file::Published;
pub(crate) use self::file::{Class, File, Form, Producer, Rule};

use self::file::MlpKind;
use super::geometry::{Geometry, Mlp};
use super::json::shown;
use super::linears::Place;
use crate::error::{Error, Result};
use crate::num::DType;
use crate::ops::scheme::{ActScheme, Scheme};

macro_rules! files {
    ($($name:literal),* $(,)?) => { [$(($name, include_str!(concat!("../recipes/", $name, ".toml")))),*] };
}

/// Every recipe's name and text. The first is the default.
const FILES: [(&str, &str); 22] = files![
    "bf16",
    "fp8-tensor",
    "fp8-channel",
    "fp8-block",
    "nvfp4",
    "modelopt-fp8",
    "modelopt-fp8-channel",
    "modelopt-fp8-block",
    "modelopt-nvfp4",
    "modelopt-nvfp4-a16",
    "qwen-fp8",
    "nvidia-nvfp4",
    "unsloth-nvfp4",
    "unsloth-nvfp4-fast",
    "ct-nvfp4-early",
    "ct-nvfp4-all-gdn",
    "ct-nvfp4-attn-fp8",
    "ct-nvfp4-fp8-block",
    "ct-nvfp4-fp8-head",
    "modelopt-nvfp4-experts",
    "ornith-fp8",
    "ornith-nvfp4-fp8",
];

/// How the weights of a built-in geometry are stored.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    name: &'static str,
    file: Arc<File>,
    bf16_head: bool,
    pow2_globals: bool,
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)?;
        if self.bf16_head {
            f.write_str(",head=bf16")?;
        }
        if self.pow2_globals {
            f.write_str(",globals=pow2")?;
        }
        Ok(())
    }
}

impl Recipe {
    /// The names there are, the default first.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FILES.iter().map(|(name, _)| *name)
    }

    /// A recipe by `name[,option=value]…`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an unknown name, with the known ones; [`Error::Config`] for an unknown option.
    pub fn parse(text: &str) -> Result<Recipe> {
        let mut parts = text.split(',');
        let name = parts.next().unwrap_or_default();
        let Some((name, toml)) = FILES.iter().find(|(known, _)| *known == name) else {
            return Err(Error::Unsupported {
                what: format!("recipe \"@{}\"", shown(name)),
                supported: format!("recipes are {}", Recipe::names().collect::<Vec<_>>().join(", ")),
            });
        };
        let mut recipe = Recipe { name, file: File::read(name, toml)?.into(), bf16_head: false, pow2_globals: false };
        for option in parts {
            let flag = match option {
                "head=bf16" => &mut recipe.bf16_head,
                "globals=pow2" => &mut recipe.pow2_globals,
                _ => {
                    let what = "no such option of a recipe; the options are head=bf16 and globals=pow2";
                    return Err(Error::config(text, shown(option), what));
                }
            };
            if std::mem::replace(flag, true) {
                return Err(Error::config(text, shown(option), "given twice"));
            }
        }
        Ok(recipe)
    }

    /// Its name, without options.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// What it reproduces.
    pub fn about(&self) -> &str {
        &self.file.about
    }

    /// Where it fills in what the public description of a checkpoint leaves open.
    pub fn assumed(&self) -> Option<&str> {
        self.file.assumed.as_deref()
    }

    /// Counts of published checkpoints that it reproduces.
    pub fn published(&self) -> &[Published] {
        &self.file.published
    }

    /// Whether it describes this kind of model.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where it describes dense models or MoE models only, and this is the other.
    pub fn check(&self, geometry: &Geometry) -> Result<()> {
        let (only, other) = match (self.file.mlp, geometry.mlp) {
            (Some(MlpKind::Dense), Mlp::Moe { .. }) => ("dense", "MoE"),
            (Some(MlpKind::Moe), Mlp::Dense { .. }) => ("MoE", "dense"),
            _ => return Ok(()),
        };
        Err(Error::Unsupported {
            what: format!("recipe @{} on {}, a {other} model,", self.name, geometry.name),
            supported: format!("what is known of it is about {only} models"),
        })
    }

    /// How a linear module of `geometry` is stored, and how its input is quantised; `None` where there is no such module.
    pub fn scheme(&self, geometry: &Geometry, module: &str) -> Option<(Scheme, ActScheme)> {
        geometry.linear(module)?;
        Some(match self.rule(geometry, module) {
            Some(rule) => (rule.scheme(self.file.global()), rule.act()),
            None => (Scheme::Plain(DType::Bf16), ActScheme::None),
        })
    }

    /// The rule that quantises a module.
    pub(crate) fn rule(&self, geometry: &Geometry, module: &str) -> Option<&Rule> {
        let size = geometry.linear(module)?;
        let place = Place::of(module)?;
        if self.bf16_head && place.layer.is_none() {
            return None;
        }
        let role = place.role();
        self.file.rules.iter().find(|rule| rule.holds(&role, place.layer, size))
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn pow2_globals(&self) -> bool {
        self.pow2_globals
    }
}

impl Default for Recipe {
    /// Every parameter in bf16.
    fn default() -> Recipe {
        let (name, text) = FILES[0];
        let file = File::read(name, text).expect("the first recipe is part of this program and a test reads it");
        Recipe { name, file: file.into(), bf16_head: false, pow2_globals: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::scheme::{Global, Grain};

    fn schemes(geometry: &str, recipe: &str) -> impl Fn(&str) -> (Scheme, ActScheme) {
        let (g, r) = (Geometry::builtin(geometry).unwrap(), Recipe::parse(recipe).unwrap());
        move |module| r.scheme(&g, module).unwrap_or_else(|| panic!("{module} is no module"))
    }

    const BF16: (Scheme, ActScheme) = (Scheme::Plain(DType::Bf16), ActScheme::None);

    #[test]
    fn every_file_is_read_and_every_rule_meets_a_module() {
        for name in Recipe::names() {
            let recipe = Recipe::parse(name).unwrap();
            assert_eq!(recipe.to_string(), name);
            assert!(!recipe.about().is_empty());
            let geometries = ["qwen3.8-27b", "qwen3.6-35b-a3b:layers=4"].map(|g| Geometry::builtin(g).unwrap());
            let geometries: Vec<_> = geometries.iter().filter(|g| recipe.check(g).is_ok()).collect();
            assert!(!geometries.is_empty());
            let mut idle: Vec<&Rule> = recipe.file.rules.iter().collect();
            for g in geometries {
                for linear in g.linears() {
                    let found = recipe.rule(g, &linear.module);
                    idle.retain(|rule| !found.is_some_and(|f| std::ptr::eq(*rule, f)));
                }
            }
            assert!(idle.is_empty(), "{name}: {idle:?}");
        }
        assert_eq!(Recipe::default(), Recipe::parse("bf16").unwrap());
    }

    #[test]
    fn unsloth_s_split_varies_by_layer_within_a_role() {
        let of = schemes("qwen3.8-27b", "unsloth-nvfp4");
        let fp8 = (Scheme::Fp8(Grain::Channel), ActScheme::Fp8Token);
        let nvfp4 = (Scheme::Nvfp4(Global::Divides), ActScheme::Nvfp4);
        assert_eq!(of("layers.55.mlp.down_proj"), nvfp4);
        assert_eq!(of("layers.56.mlp.down_proj"), fp8);
        assert_eq!(of("layers.63.self_attn.o_proj"), fp8);
        assert_eq!(of("layers.0.linear_attn.in_proj_qkv"), fp8);
        assert_eq!(of("layers.0.linear_attn.in_proj_a"), BF16);
        assert_eq!(of("lm_head"), fp8);
        assert_eq!(schemes("qwen3.8-27b", "unsloth-nvfp4,head=bf16")("lm_head"), BF16);
    }

    #[test]
    fn generic_recipes_leave_what_is_left_by_every_exporter() {
        for name in ["fp8-tensor", "fp8-channel", "fp8-block", "nvfp4"] {
            let g = Geometry::builtin("qwen3.6-35b-a3b").unwrap();
            let recipe = Recipe::parse(name).unwrap();
            for linear in g.linears() {
                let plain = ["in_proj_a", "in_proj_b", "mlp.gate", "shared_expert_gate", "lm_head"];
                let expected = plain.iter().any(|end| linear.module.ends_with(end));
                let (scheme, act) = recipe.scheme(&g, &linear.module).unwrap();
                assert_eq!((scheme, act) == BF16, expected, "{name}: {}", linear.module);
                assert!(name != "nvfp4" || act == ActScheme::None, "W4A16");
            }
        }
    }

    #[test]
    fn shapes_that_a_scheme_does_not_divide_stay_bf16() {
        let mut g = Geometry::builtin("tiny-moe").unwrap();
        g.mlp = Mlp::Moe { experts: 2, top_k: 1, inter: 24, shared_inter: 48 };
        let nvfp4 = Recipe::parse("nvfp4").unwrap();
        assert_eq!(nvfp4.scheme(&g, "layers.0.mlp.experts.0.down_proj"), Some(BF16), "24 columns");
        assert_ne!(nvfp4.scheme(&g, "layers.0.mlp.experts.0.gate_proj"), Some(BF16));
        let qwen = Recipe::parse("qwen-fp8").unwrap();
        assert_eq!(qwen.scheme(&g, "layers.0.mlp.experts.0.gate_proj"), Some(BF16), "24 rows");
        let blocks = Recipe::parse("fp8-block").unwrap();
        assert_ne!(blocks.scheme(&g, "layers.0.mlp.experts.0.gate_proj"), Some(BF16), "a partial block");
    }

    #[test]
    fn what_is_wrong_with_a_name_is_said() {
        let text = |t: &str| Recipe::parse(t).unwrap_err().to_string();
        assert!(text("fp7").contains("unsloth-nvfp4-fast"), "{}", text("fp7"));
        assert!(text("nvfp4,head=fp8").contains("head=bf16"));
        assert!(text("nvfp4,head=bf16,head=bf16").contains("twice"));
        assert!(text("nvfp4,").contains("no such option"));
        let moe = Geometry::builtin("tiny-moe").unwrap();
        assert!(Recipe::parse("unsloth-nvfp4").unwrap().check(&moe).unwrap_err().to_string().contains("dense"));
        assert_eq!(Recipe::parse("nvfp4,globals=pow2,head=bf16").unwrap().to_string(), "nvfp4,head=bf16,globals=pow2");
    }

    #[test]
    fn a_file_that_contradicts_itself_is_refused() {
        let good = FILES.iter().find(|(n, _)| *n == "unsloth-nvfp4").unwrap().1;
        File::read("x", good).unwrap();
        for (from, to) in [
            ("[\"N\", 1]", "[1]"),
            ("act = \"fp8-token\"", "act = \"fp8-tensor\""),
            ("scheme = \"nvfp4\"", "scheme = \"fp8-tensor\""),
            ("producer = \"compressed-tensors\"", "producer = \"modelopt\""),
            ("about =", "colour ="),
            ("layers = [56, 63]", "layers = [63, 56]"),
        ] {
            assert!(good.contains(from), "{from}");
            assert!(File::read("x", &good.replacen(from, to, 1)).is_err(), "{from} -> {to}");
        }
    }
}
