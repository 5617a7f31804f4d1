//! The linear modules of a model by name: what a quantisation scheme can be said of.
//!
//! May live here: names and shapes of linear modules, and the role a name has in any layer. May not: how one is stored.
//! A module is named canonically and without `.weight`: `layers.3.mlp.experts.5.gate_proj`, `lm_head`.

use super::geometry::{Geometry, Mixer, Mlp};

/// One linear module: y = x W^T with W `[rows, cols]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Linear {
    /// Its canonical name.
    pub module: String,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
}

/// What a module's name says: where it is, and what it does there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place<'a> {
    /// The layer, where it is in one.
    pub(crate) layer: Option<usize>,
    /// The expert, where it is one's.
    pub(crate) expert: Option<usize>,
    /// What is left: `self_attn`, `linear_attn`, `mlp`, `mlp.experts` or `mlp.shared_expert`, or nothing.
    pub(crate) block: &'a str,
    /// The last part: `q_proj`, `lm_head`.
    pub(crate) part: &'a str,
}

impl<'a> Place<'a> {
    /// Takes a canonical module's name apart; `None` for a name of another form.
    pub(crate) fn of(module: &'a str) -> Option<Place<'a>> {
        let Some(rest) = module.strip_prefix("layers.") else {
            return (module == "lm_head").then_some(Place { layer: None, expert: None, block: "", part: module });
        };
        let (layer, rest) = rest.split_once('.')?;
        let (block, part) = rest.rsplit_once('.')?;
        let (block, expert) = match block.strip_prefix("mlp.experts.") {
            Some(expert) => ("mlp.experts", Some(number(expert)?)),
            None => (block, None),
        };
        Some(Place { layer: Some(number(layer)?), expert, block, part })
    }

    /// The role in any layer and expert: `self_attn.q_proj`, `mlp.experts.gate_proj`, `lm_head`.
    pub(crate) fn role(&self) -> String {
        if self.block.is_empty() { self.part.to_owned() } else { format!("{}.{}", self.block, self.part) }
    }
}

/// A number written the one way numbers are written in a name: "07" and "+7" are not 7.
fn number(text: &str) -> Option<usize> {
    text.parse().ok().filter(|n: &usize| n.to_string() == text)
}

impl Geometry {
    /// Every linear module in the order of [`Geometry::params`]. The embedding is none, and a tied head neither.
    pub fn linears(&self) -> Vec<Linear> {
        self.params()
            .into_iter()
            .filter_map(|param| {
                let module = param.name.strip_suffix(".weight")?;
                let &[rows, cols] = param.shape.as_slice() else { return None };
                (module != "embed_tokens").then(|| Linear { module: module.to_owned(), rows, cols })
            })
            .collect()
    }

    /// Rows and columns of one linear module; `None` where the model has none of that name.
    pub fn linear(&self, module: &str) -> Option<[usize; 2]> {
        let place = Place::of(module)?;
        let h = self.hidden;
        let Some(layer) = place.layer else { return (!self.tied).then_some([self.vocab, h]) };
        let mixer = *self.layers.get(layer)?;
        let (q, kv, g) = (self.heads * self.head_dim, self.kv_heads * self.head_dim, &self.gdn);
        let gated = |inter: usize| match place.part {
            "gate_proj" | "up_proj" => Some([inter, h]),
            "down_proj" => Some([h, inter]),
            _ => None,
        };
        match (place.block, mixer, self.mlp) {
            ("self_attn", Mixer::Attention, _) => match place.part {
                "q_proj" => Some([2 * q, h]),
                "k_proj" | "v_proj" => Some([kv, h]),
                "o_proj" => Some([h, q]),
                _ => None,
            },
            ("linear_attn", Mixer::Gdn, _) => match place.part {
                "in_proj_qkv" => Some([g.conv_channels(), h]),
                "in_proj_z" => Some([g.value_channels(), h]),
                "in_proj_a" | "in_proj_b" => Some([g.value_heads, h]),
                "out_proj" => Some([h, g.value_channels()]),
                _ => None,
            },
            ("mlp", _, Mlp::Dense { inter }) => gated(inter),
            ("mlp", _, Mlp::Moe { experts, .. }) => match place.part {
                "gate" => Some([experts, h]),
                "shared_expert_gate" => Some([1, h]),
                _ => None,
            },
            ("mlp.experts", _, Mlp::Moe { experts, inter, .. }) if place.expert.is_some_and(|e| e < experts) => {
                gated(inter)
            }
            ("mlp.shared_expert", _, Mlp::Moe { shared_inter, .. }) => gated(shared_inter),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_and_the_lookup_agree_on_every_module() {
        for name in ["tiny", "tiny-moe", "qwen3.8-27b", "qwen3.6-35b-a3b:layers=4"] {
            let g = Geometry::builtin(name).unwrap();
            let list = g.linears();
            for linear in &list {
                assert_eq!(g.linear(&linear.module), Some([linear.rows, linear.cols]), "{name}: {}", linear.module);
            }
            assert_eq!(list.iter().any(|l| l.module == "lm_head"), !g.tied);
        }
        assert_eq!(Geometry::builtin("qwen3.8-27b").unwrap().linears().len(), 64 * 3 + 48 * 5 + 16 * 4 + 1);
    }

    #[test]
    fn names_of_no_module_are_refused() {
        let g = Geometry::builtin("tiny-moe").unwrap();
        for name in [
            "",
            "norm",
            "embed_tokens",
            "lm_head.weight",
            "layers.0.self_attn.q_proj",
            "layers.3.linear_attn.in_proj_z",
            "layers.4.mlp.gate",
            "layers.00.mlp.gate",
            "layers.0.mlp.gate_proj",
            "layers.0.mlp.experts.8.gate_proj",
            "layers.0.mlp.experts.gate_proj",
            "layers.0.linear_attn.conv1d",
        ] {
            assert_eq!(g.linear(name), None, "{name}");
        }
        assert_eq!(g.linear("layers.0.mlp.experts.7.down_proj"), Some([64, 32]));
        assert_eq!(Geometry::builtin("tiny").unwrap().linear("lm_head"), None, "a tied head is no module");
    }

    #[test]
    fn a_role_is_the_same_in_every_layer_and_expert() {
        let role = |name| Place::of(name).map(|p| p.role());
        assert_eq!(role("layers.31.mlp.experts.255.up_proj").as_deref(), Some("mlp.experts.up_proj"));
        assert_eq!(role("layers.0.self_attn.q_proj").as_deref(), Some("self_attn.q_proj"));
        assert_eq!(role("lm_head").as_deref(), Some("lm_head"));
        assert_eq!(role("layers.0"), None);
    }
}
