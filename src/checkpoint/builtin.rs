//! Geometries that are built in: the published models whose every number is known, and two tiny ones.
//!
//! May live here: the numbers, as data, and the options after a name. May not: weights, recipes, files.

use std::path::Path;

use super::geometry::{Gate, Gdn, Geometry, LAYERS, Mixer, Mlp, Rope};
use super::json::shown;
use crate::error::{Error, Result};

/// Rows of the published models' embedding and head.
const VOCAB: usize = 248_320;
/// Ids their tokenizer decodes: 248,070 in tokenizer.json and 7 more in its config. The rows above are padding.
const DECODABLE: usize = 248_077;
/// `<|im_end|>` and `<|endoftext|>`, as their generation_config.json lists them.
const EOS: [u32; 2] = [248_046, 248_044];

/// One published model; what all of them share is in [`published`].
struct Row {
    name: &'static str,
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    value_heads: usize,
    mlp: Mlp,
    tied: bool,
}

const fn row(name: &'static str, hidden: usize, layers: usize, heads: [usize; 3], mlp: Mlp, tied: bool) -> Row {
    let [heads, kv_heads, value_heads] = heads;
    Row { name, hidden, layers, heads, kv_heads, value_heads, mlp, tied }
}

const fn dense(inter: usize) -> Mlp {
    Mlp::Dense { inter }
}

const A3B: Mlp = Mlp::Moe { experts: 256, top_k: 8, inter: 512, shared_inter: 512 };

// hidden, layers, [query heads, kv heads, linear value heads], MLP, tied.
const PUBLISHED: [Row; 9] = [
    row("qwen3.5-0.8b", 1024, 24, [8, 2, 16], dense(3584), true),
    row("qwen3.5-2b", 2048, 24, [8, 2, 16], dense(6144), true),
    row("qwen3.5-4b", 2560, 32, [16, 4, 32], dense(9216), true),
    row("qwen3.5-9b", 4096, 32, [16, 4, 32], dense(12_288), false),
    row("qwen3.5-27b", 5120, 64, [24, 4, 48], dense(17_408), false),
    row("qwen3.6-27b", 5120, 64, [24, 4, 48], dense(17_408), false),
    row("qwen3.8-27b", 5120, 64, [24, 4, 48], dense(17_408), false),
    row("qwen3.5-35b-a3b", 2048, 40, [16, 2, 32], A3B, false),
    row("qwen3.6-35b-a3b", 2048, 40, [16, 2, 32], A3B, false),
];

/// Published models with a number nobody has checked; a plan made of guesses would look like a fact.
const UNVERIFIED: [&str; 2] = ["qwen3.5-122b-a10b", "qwen3.5-397b-a17b"];

const TINY: [&str; 2] = ["tiny", "tiny-moe"];

/// The names [`Geometry::builtin`] knows, the tiny ones first.
pub fn names() -> impl Iterator<Item = &'static str> {
    TINY.into_iter().chain(PUBLISHED.iter().map(|r| r.name))
}

/// Every fourth layer attends, the others are GDN.
fn hybrid(layers: usize) -> Vec<Mixer> {
    (0..layers).map(|i| if i % 4 == 3 { Mixer::Attention } else { Mixer::Gdn }).collect()
}

fn published(r: &Row) -> Geometry {
    Geometry {
        name: r.name.into(),
        hidden: r.hidden,
        layers: hybrid(r.layers),
        vocab: VOCAB,
        decodable: DECODABLE,
        heads: r.heads,
        kv_heads: r.kv_heads,
        head_dim: 256,
        rotary_dim: 64,
        rope: Rope { theta: 1e7, yarn: None },
        gdn: Gdn {
            key_heads: 16,
            value_heads: r.value_heads,
            key_dim: 128,
            value_dim: 128,
            conv_kernel: 4,
            gate: Gate::Silu,
        },
        mlp: r.mlp,
        eps: 1e-6,
        tied: r.tied,
        max_context: 262_144,
        eos: EOS.to_vec(),
    }
}

// Small enough to sweep on one core, with every structure of the real ones: grouped heads in both mixers, a partial
// rotation, padded vocabulary rows, attention wider than the residual stream.
fn tiny(name: &str, mlp: Mlp, tied: bool) -> Geometry {
    Geometry {
        name: name.into(),
        hidden: 64,
        layers: hybrid(4),
        vocab: 512,
        decodable: 500,
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        rotary_dim: 8,
        rope: Rope { theta: 1e7, yarn: None },
        gdn: Gdn { key_heads: 2, value_heads: 4, key_dim: 32, value_dim: 32, conv_kernel: 4, gate: Gate::Silu },
        mlp,
        eps: 1e-6,
        tied,
        max_context: 32_768,
        eos: vec![1],
    }
}

impl Geometry {
    /// A built-in geometry by `name[:layers=N]`, names as [`names`] lists them; `layers=N` keeps the first N layers,
    /// and the embedding and head whole.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an unknown name, with the known ones and the nearest; [`Error::Config`] for an
    /// option that is unknown, given twice, or out of range.
    pub fn builtin(spec: &str) -> Result<Geometry> {
        let (name, options) = spec.split_once(':').map_or((spec, None), |(n, o)| (n, Some(o)));
        let mut geometry = match name {
            "tiny" => tiny(name, Mlp::Dense { inter: 192 }, true),
            "tiny-moe" => tiny(name, Mlp::Moe { experts: 8, top_k: 2, inter: 32, shared_inter: 48 }, false),
            _ => published(PUBLISHED.iter().find(|r| r.name == name).ok_or_else(|| unknown(name))?),
        };
        let Some(options) = options else { return Ok(geometry) };
        let mut seen = false;
        for option in options.split(':') {
            let (key, value) = option.split_once('=').unwrap_or((option, ""));
            let fail = |what: String| Err(Error::config(Path::new(name), shown(key), what));
            if key != "layers" {
                return fail("no such option; the one option is layers=N, the first N layers".into());
            }
            if seen {
                return fail("given twice".into());
            }
            seen = true;
            let have = geometry.layers.len();
            match value.parse::<usize>() {
                Ok(n) if n >= LAYERS.min && n <= have => geometry.layers.truncate(n),
                _ => return fail(format!("\"{}\"; must be an integer from 1 to {have}", shown(value))),
            }
        }
        geometry.name = spec.into();
        Ok(geometry)
    }
}

/// Whether `name`, without options, is one that [`Geometry::builtin`] has or refuses by name.
pub(crate) fn is_known(name: &str) -> bool {
    names().any(|n| n == name) || UNVERIFIED.contains(&name)
}

fn unknown(name: &str) -> Error {
    let known = names().collect::<Vec<_>>().join(", ");
    if UNVERIFIED.contains(&name) {
        return Error::Unsupported {
            what: format!("geometry {name}"),
            supported: format!(
                "not all of its published numbers could be verified, so nothing is built in for it: open the checkpoint's folder, or take one of {known}"
            ),
        };
    }
    let nearest = names().map(|n| (distance(name, n), n)).min().filter(|(d, _)| *d <= 4);
    let hint = nearest.map_or_else(String::new, |(_, n)| format!("did you mean {n}? "));
    Error::Unsupported {
        what: format!("geometry \"{}\"", shown(name)),
        supported: format!("{hint}built in are {known}"),
    }
}

/// Levenshtein's edit distance, of the first 64 characters.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.to_lowercase().chars().take(64).enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let change = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
