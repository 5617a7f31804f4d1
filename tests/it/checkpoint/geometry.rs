//! Built-in geometries and the parameters that follow from a geometry.

use std::collections::HashSet;

use highwater::checkpoint::{Gate, Geometry, Mixer, Mlp, names};
use highwater::error::Error;

fn builtin(spec: &str) -> Geometry {
    Geometry::builtin(spec).unwrap_or_else(|e| panic!("{spec}: {e}"))
}

#[test]
fn the_27b_has_851_tensors_and_27_billion_parameters() {
    for name in ["qwen3.5-27b", "qwen3.6-27b", "qwen3.8-27b"] {
        let g = builtin(name);
        assert_eq!(g.params().len(), 851, "{name}");
        assert_eq!(g.param_count(), 26_895_998_464, "{name}");
        assert_eq!((g.gdn_layers(), g.attention_layers()), (48, 16));
    }
}

#[test]
fn every_builtin_counts_its_parameters_alike_in_closed_form_and_one_by_one() {
    for name in names() {
        let g = builtin(name);
        let params = g.params();
        let sum: u64 = params.iter().map(|p| p.elements() as u64).sum();
        assert_eq!(sum, g.param_count(), "{name}");
        let unique: HashSet<&str> = params.iter().map(|p| p.name.as_str()).collect();
        assert_eq!(unique.len(), params.len(), "{name}: a name twice");
        assert_eq!(params.iter().any(|p| p.name == "lm_head.weight"), !g.tied, "{name}");
        assert!(g.decodable < g.vocab && g.eos.iter().all(|id| (*id as usize) < g.decodable), "{name}");
        assert!(g.layers.contains(&Mixer::Attention) && g.layers.contains(&Mixer::Gdn), "{name}");
    }
}

#[test]
fn published_sizes_are_near_what_their_names_say() {
    let sizes = [("0.8b", 0.75e9), ("2b", 1.88e9), ("4b", 4.2e9), ("9b", 8.95e9), ("35b-a3b", 34.66e9)];
    for (name, expected) in sizes {
        let count = builtin(&format!("qwen3.5-{name}")).param_count() as f64;
        assert!((count / expected - 1.0).abs() < 0.01, "{name}: {count}");
    }
}

#[test]
fn layer_bytes_agree_with_the_budget_table_of_the_models() {
    // Bytes of bf16 keys and values per token, and of f32 GDN state and bf16 convolution state per sequence.
    let table = [
        ("qwen3.5-0.8b", 12_288, 18 * (16 * 16_384 * 4 + 6144 * 3 * 2)),
        ("qwen3.5-2b", 12_288, 18 * (16 * 16_384 * 4 + 6144 * 3 * 2)),
        ("qwen3.5-4b", 32_768, 24 * (32 * 16_384 * 4 + 8192 * 3 * 2)),
        ("qwen3.5-9b", 32_768, 24 * (32 * 16_384 * 4 + 8192 * 3 * 2)),
        ("qwen3.6-35b-a3b", 20_480, 30 * (32 * 16_384 * 4 + 8192 * 3 * 2)),
        ("qwen3.6-27b", 65_536, 48 * (48 * 16_384 * 4 + 10_240 * 3 * 2)),
    ];
    for (name, kv, state) in table {
        let g = builtin(name);
        assert_eq!(g.attention_layers() * 2 * g.kv_heads * g.head_dim * 2, kv, "{name}");
        let d = &g.gdn;
        let one = d.value_heads * d.key_dim * d.value_dim * 4 + d.conv_channels() * (d.conv_kernel - 1) * 2;
        assert_eq!(g.gdn_layers() * one, state, "{name}");
    }
}

#[test]
fn tiny_ones_have_the_structure_of_the_real_ones() {
    for name in ["tiny", "tiny-moe"] {
        let g = builtin(name);
        assert_eq!(g.gdn.value_heads, 2 * g.gdn.key_heads);
        assert!(g.heads > g.kv_heads && g.kv_heads > 1);
        assert!(g.rotary_dim < g.head_dim && g.rotary_dim.is_multiple_of(2));
        assert_eq!(g.layers, [Mixer::Gdn, Mixer::Gdn, Mixer::Gdn, Mixer::Attention]);
        assert!(g.param_count() < 1_000_000);
    }
    assert!(builtin("tiny").tied && !builtin("tiny-moe").tied);
    assert!(matches!(builtin("tiny-moe").mlp, Mlp::Moe { experts: 8, top_k: 2, .. }));
}

#[test]
fn layers_option_keeps_the_first_layers_and_the_rest_whole() {
    let (whole, part) = (builtin("qwen3.6-27b"), builtin("qwen3.6-27b:layers=5"));
    assert_eq!(part.name, "qwen3.6-27b:layers=5");
    assert_eq!(part.layers, whole.layers[..5]);
    assert_eq!((part.vocab, part.hidden, part.gdn.gate), (whole.vocab, whole.hidden, Gate::Silu));
    let names: HashSet<String> = whole.params().into_iter().map(|p| p.name).collect();
    assert!(part.params().iter().all(|p| names.contains(&p.name)));
    assert!(Geometry::builtin("qwen3.6-27b:layers=64").is_ok_and(|g| g.layers == whole.layers));
}

#[test]
fn a_wrong_option_is_named_with_what_is_accepted() {
    let cases = [
        ("tiny:layers=0", "layers", "from 1 to 4"),
        ("tiny:layers=5", "layers", "from 1 to 4"),
        ("tiny:layers=-1", "layers", "from 1 to 4"),
        ("tiny:layers=two", "layers", "from 1 to 4"),
        ("tiny:layers=", "layers", "from 1 to 4"),
        ("tiny:layers", "layers", "from 1 to 4"),
        ("tiny:layers=99999999999999999999999", "layers", "from 1 to 4"),
        ("tiny:layers=1:layers=2", "layers", "twice"),
        ("tiny:heads=2", "heads", "layers=N"),
        ("tiny:", "", "layers=N"),
    ];
    for (spec, field, what) in cases {
        match Geometry::builtin(spec) {
            Err(Error::Config { file, field: f, what: w }) => {
                assert_eq!((file.to_str(), f.as_str()), (Some("tiny"), field), "{spec}");
                assert!(w.contains(what), "{spec}: {w}");
            }
            other => panic!("{spec}: {other:?}"),
        }
    }
}

#[test]
fn an_unknown_name_lists_the_known_and_the_nearest() {
    let near = [("qwen3.6-27", "qwen3.6-27b"), ("tiny-mo", "tiny-moe"), ("Qwen3.5-9B", "qwen3.5-9b"), ("tny", "tiny")];
    for (typed, meant) in near {
        let message = Geometry::builtin(typed).unwrap_err().to_string();
        assert!(message.contains(&format!("did you mean {meant}?")), "{message}");
        assert!(names().all(|n| message.contains(n)), "{message}");
    }
    let far = Geometry::builtin("llama-3-70b-instruct").unwrap_err().to_string();
    assert!(!far.contains("did you mean") && far.contains("qwen3.6-27b"), "{far}");
}

#[test]
fn models_with_unverified_numbers_are_refused_by_name() {
    for name in ["qwen3.5-122b-a10b", "qwen3.5-397b-a17b"] {
        let error = Geometry::builtin(name).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }));
        let message = error.to_string();
        assert!(message.contains(name) && message.contains("verified"), "{message}");
    }
}
