//! The model's dimensions as one value: what a config says, or a built-in name means, once it has been checked.
//!
//! May live here: [`Geometry`], the parameters that follow from it, and the relations between its numbers. May not:
//! reading files (config.rs), the numbers of published models (builtin.rs), and anything about a device or a dtype.

use std::path::Path;

use super::config;
use super::json::Bound;
use crate::error::{Error, Result};

/// What mixes tokens in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mixer {
    /// Gated DeltaNet: linear attention with a recurrent state (`linear_attention` in a config).
    Gdn,
    /// Gated softmax attention over the whole context (`full_attention` in a config).
    Attention,
}

/// The activation on `z` in the gated norm of a GDN layer. The output gate of attention is a sigmoid always.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// `z * sigmoid(z)`; a config calls it "swish" or "silu", or leaves it out.
    Silu,
    /// `sigmoid(z)`.
    Sigmoid,
}

/// Rotary position embedding of the attention layers: pairs `(i, i + rotary_dim / 2)` turn by
/// `position / theta^(2i / rotary_dim)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// The base, from 1 to 1e12.
    pub theta: f64,
    /// The context extension, if the config asks for one.
    pub yarn: Option<Yarn>,
}

/// YaRN (Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models").
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// How many times the context is extended, at least 1.
    pub factor: f64,
    /// Tokens of context the model was trained on.
    pub original_max_position: usize,
    /// What cos and sin are multiplied by; `0.1 ln(factor) + 1` (section 3.4 of the paper) unless the config says.
    pub attention_factor: f64,
    /// Turns within the trained context above which a frequency is left alone.
    pub beta_fast: f64,
    /// Turns within the trained context below which a frequency is divided by `factor`.
    pub beta_slow: f64,
}

/// Dimensions of a GDN layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gdn {
    /// Heads of q and k.
    pub key_heads: usize,
    /// Heads of v, z, beta and the decay; a multiple of `key_heads`, head `h` using key head `h / (value_heads / key_heads)`.
    pub value_heads: usize,
    /// Elements of one q or k head.
    pub key_dim: usize,
    /// Elements of one v head.
    pub value_dim: usize,
    /// Taps of the causal depthwise convolution; its state is one less.
    pub conv_kernel: usize,
    /// The gated norm's activation.
    pub gate: Gate,
}

impl Gdn {
    /// Rows of `in_proj_qkv`, which are the channels of the convolution: `2 * key_heads * key_dim + value_heads * value_dim`.
    pub fn conv_channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_channels()
    }

    /// Rows of `in_proj_z`, which are the columns of `out_proj`: `value_heads * value_dim`.
    pub fn value_channels(&self) -> usize {
        self.value_heads * self.value_dim
    }
}

/// The second half of every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mlp {
    /// One gated MLP.
    Dense {
        /// Rows of `gate_proj` and `up_proj`.
        inter: usize,
    },
    /// Routed experts and one shared expert.
    Moe {
        /// Routed experts.
        experts: usize,
        /// Experts each token takes.
        top_k: usize,
        /// Rows of one expert's `gate_proj` and `up_proj`.
        inter: usize,
        /// Rows of the shared expert's.
        shared_inter: usize,
    },
}

/// Everything the model needs to know of itself. Made by [`Geometry::from_config`] or [`Geometry::builtin`], which
/// check every number, so that products of any few of them fit in 64 bits.
#[derive(Debug, Clone, PartialEq)]
pub struct Geometry {
    /// What to call it: a built-in name with its options, or the checkpoint's folder.
    pub name: String,
    /// Width of the residual stream.
    pub hidden: usize,
    /// The mixer of each layer, first to last.
    pub layers: Vec<Mixer>,
    /// Rows of the embedding and of the head.
    pub vocab: usize,
    /// Ids below it may be sampled; rows from here to `vocab` are padding that no tokenizer decodes.
    pub decodable: usize,
    /// Query heads of an attention layer.
    pub heads: usize,
    /// Key and value heads of an attention layer; divides `heads`.
    pub kv_heads: usize,
    /// Elements of one attention head.
    pub head_dim: usize,
    /// Leading elements of a head that rotate; even, at most `head_dim`.
    pub rotary_dim: usize,
    /// How they rotate.
    pub rope: Rope,
    /// The linear-attention layers.
    pub gdn: Gdn,
    /// The MLP of every layer.
    pub mlp: Mlp,
    /// Under the root of every RMS norm.
    pub eps: f32,
    /// The head is the embedding: there is no `lm_head.weight`.
    pub tied: bool,
    /// Most tokens of one sequence, YaRN included.
    pub max_context: usize,
    /// Ids that end a sequence; may be empty.
    pub eos: Vec<u32>,
}

/// One parameter: its name without the prefix it has on disk, and its shape, outermost dimension first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    /// The canonical name, e.g. `layers.3.self_attn.q_proj.weight`; experts are always apart
    /// (`layers.0.mlp.experts.5.gate_proj.weight`).
    pub name: String,
    /// Elements along each dimension.
    pub shape: Vec<usize>,
}

impl Param {
    /// Elements in all.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

// Ranges of the numbers a config may hold. Far beyond any known model, and small enough that a product of the three
// largest and an element size stays below 2^63. Widths are multiples of 8, so a bf16 row is a whole number of 16-byte loads.
pub(crate) const HIDDEN: Bound = Bound::new(8, 1 << 20, 8);
pub(crate) const LAYERS: Bound = Bound::new(1, 4096, 1);
pub(crate) const VOCAB: Bound = Bound::new(2, 1 << 24, 1);
pub(crate) const HEADS: Bound = Bound::new(1, 4096, 1);
pub(crate) const HEAD_DIM: Bound = Bound::new(8, 1024, 8);
pub(crate) const CONV_KERNEL: Bound = Bound::new(2, 16, 1);
pub(crate) const INTER: Bound = Bound::new(8, 1 << 22, 8);
pub(crate) const EXPERTS: Bound = Bound::new(1, 1 << 16, 1);
pub(crate) const CONTEXT: Bound = Bound::new(1, 1 << 28, 1);
pub(crate) const INTERVAL: Bound = Bound::new(1, LAYERS.max, 1);

/// Most experts over all layers: each is three entries in every table of parameters.
const MAX_EXPERTS_IN_ALL: usize = 1 << 18;
/// Most parameters of a model: 64 TiB in f32.
const MAX_PARAMS: u128 = 1 << 44;

impl Geometry {
    /// The geometry a `config.json` describes. `file` names it in errors, and its folder names the geometry.
    ///
    /// Reads a text config nested under `text_config` or flat, whatever the class; `rope_parameters` wins over
    /// `rope_theta`, `rope_scaling` and `partial_rotary_factor` beside it; keys left out take the class's defaults.
    /// Only the config is seen: `decodable` is the padded vocabulary, and a tie flag that is stated differently inside
    /// and outside `text_config` is taken from outside; [`super::Checkpoint::open`] settles both from the folder.
    ///
    /// # Errors
    /// [`Error::Config`] for a value out of its range; [`Error::Unsupported`] for another model type, a quantisation that
    /// is not read, or a variant this crate does not compute; [`Error::Checkpoint`] for text that is not JSON.
    pub fn from_config(file: &Path, text: &str) -> Result<Geometry> {
        Ok(config::parse(file, text.as_bytes())?.geometry)
    }

    /// Attention layers, each of which holds keys and values per token.
    pub fn attention_layers(&self) -> usize {
        self.layers.iter().filter(|m| **m == Mixer::Attention).count()
    }

    /// GDN layers, each of which holds one state per sequence.
    pub fn gdn_layers(&self) -> usize {
        self.layers.len() - self.attention_layers()
    }

    /// Every parameter, in the order of the forward pass. For a tied model the head is the embedding and not listed.
    pub fn params(&self) -> Vec<Param> {
        let (h, mut list) = (self.hidden, Vec::new());
        let mut push = |name: String, shape: &[usize]| list.push(Param { name, shape: shape.to_vec() });
        push("embed_tokens.weight".into(), &[self.vocab, h]);
        for (i, mixer) in self.layers.iter().enumerate() {
            let at = |rest: &str| format!("layers.{i}.{rest}");
            push(at("input_layernorm.weight"), &[h]);
            match mixer {
                Mixer::Gdn => {
                    let g = &self.gdn;
                    let (c, z, hv) = (g.conv_channels(), g.value_channels(), g.value_heads);
                    push(at("linear_attn.in_proj_qkv.weight"), &[c, h]);
                    push(at("linear_attn.in_proj_z.weight"), &[z, h]);
                    push(at("linear_attn.in_proj_b.weight"), &[hv, h]);
                    push(at("linear_attn.in_proj_a.weight"), &[hv, h]);
                    push(at("linear_attn.conv1d.weight"), &[c, 1, g.conv_kernel]);
                    push(at("linear_attn.A_log"), &[hv]);
                    push(at("linear_attn.dt_bias"), &[hv]);
                    push(at("linear_attn.norm.weight"), &[g.value_dim]);
                    push(at("linear_attn.out_proj.weight"), &[h, z]);
                }
                Mixer::Attention => {
                    let (q, kv, d) = (self.heads * self.head_dim, self.kv_heads * self.head_dim, self.head_dim);
                    // Twice q's rows: each head's query rows, then the same head's gate rows.
                    push(at("self_attn.q_proj.weight"), &[2 * q, h]);
                    push(at("self_attn.k_proj.weight"), &[kv, h]);
                    push(at("self_attn.v_proj.weight"), &[kv, h]);
                    push(at("self_attn.q_norm.weight"), &[d]);
                    push(at("self_attn.k_norm.weight"), &[d]);
                    push(at("self_attn.o_proj.weight"), &[h, q]);
                }
            }
            push(at("post_attention_layernorm.weight"), &[h]);
            let mut gated = |stem: &str, inter: usize| {
                push(at(&format!("{stem}.gate_proj.weight")), &[inter, h]);
                push(at(&format!("{stem}.up_proj.weight")), &[inter, h]);
                push(at(&format!("{stem}.down_proj.weight")), &[h, inter]);
            };
            match self.mlp {
                Mlp::Dense { inter } => gated("mlp", inter),
                Mlp::Moe { experts, inter, shared_inter, .. } => {
                    (0..experts).for_each(|e| gated(&format!("mlp.experts.{e}"), inter));
                    gated("mlp.shared_expert", shared_inter);
                    push(at("mlp.gate.weight"), &[experts, h]);
                    push(at("mlp.shared_expert_gate.weight"), &[1, h]);
                }
            }
        }
        push("norm.weight".into(), &[h]);
        if !self.tied {
            push("lm_head.weight".into(), &[self.vocab, h]);
        }
        list
    }

    /// Elements of all parameters.
    pub fn param_count(&self) -> u64 {
        self.count() as u64
    }

    fn count(&self) -> u128 {
        let n = |v: usize| v as u128;
        let (h, g) = (n(self.hidden), &self.gdn);
        let (c, z, hv) = (n(g.conv_channels()), n(g.value_channels()), n(g.value_heads));
        let gdn = (c + 2 * z + 2 * hv) * h + c * n(g.conv_kernel) + 2 * hv + n(g.value_dim);
        let (q, kv) = (n(self.heads * self.head_dim), n(self.kv_heads * self.head_dim));
        let attention = (3 * q + 2 * kv) * h + 2 * n(self.head_dim);
        let mlp = match self.mlp {
            Mlp::Dense { inter } => 3 * n(inter) * h,
            Mlp::Moe { experts, inter, shared_inter, .. } => {
                (n(experts) * 3 * n(inter) + 3 * n(shared_inter) + n(experts) + 1) * h
            }
        };
        n(self.layers.len()) * (2 * h + mlp)
            + n(self.gdn_layers()) * gdn
            + n(self.attention_layers()) * attention
            + h
            + n(self.vocab) * h * if self.tied { 1 } else { 2 }
    }

    /// The relations between numbers that are each in range. `prefix` stands before a key in errors.
    pub(crate) fn check_relations(&self, file: &Path, prefix: &str) -> Result<()> {
        let fail = |key: &str, what: String| Err(Error::config(file, format!("{prefix}{key}"), what));
        let g = &self.gdn;
        if !self.heads.is_multiple_of(self.kv_heads) {
            let (q, kv) = (self.heads, self.kv_heads);
            return fail("num_key_value_heads", format!("{kv}; must divide num_attention_heads {q}"));
        }
        if !g.value_heads.is_multiple_of(g.key_heads) {
            let (k, v) = (g.key_heads, g.value_heads);
            return fail("linear_num_value_heads", format!("{v}; must be a multiple of linear_num_key_heads {k}"));
        }
        if let Mlp::Moe { experts, top_k, .. } = self.mlp {
            if top_k > experts {
                return fail("num_experts_per_tok", format!("{top_k}; must be at most num_experts {experts}"));
            }
            let layers = self.layers.len();
            if experts * layers > MAX_EXPERTS_IN_ALL {
                let all = experts * layers;
                let what =
                    format!("{experts} in each of {layers} layers are {all}; at most {MAX_EXPERTS_IN_ALL} in all");
                return fail("num_experts", what);
            }
        }
        let count = self.count();
        if count > MAX_PARAMS {
            return fail("hidden_size", format!("these dimensions give {count} parameters; at most {MAX_PARAMS}"));
        }
        Ok(())
    }
}
