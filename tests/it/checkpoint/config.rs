//! Valid configs: nested and flat, new and old rope keys, defaults, YaRN, and the published models.

use std::path::Path;

use highwater::checkpoint::{Gate, Geometry, Mixer, Mlp, Rope, Yarn, names};
use serde_json::{Value, json};

use super::maker::{dense_config, geometry, moe_config, nested};

fn read(config: &Value) -> Geometry {
    Geometry::from_config(Path::new("dir/config.json"), &config.to_string()).unwrap_or_else(|e| panic!("{e}"))
}

fn with(mut config: Value, field: &str, value: Value) -> Geometry {
    config[field] = value;
    read(&config)
}

/// A published model's config.json, from the table of published values, as the multimodal class writes it.
fn published(name: &str) -> Value {
    let (_, size) = name.split_once('-').unwrap();
    // hidden, layers, heads, kv heads, linear value heads, intermediate (0 for a MoE), tied.
    let (hidden, layers, heads, kv, hv, inter, tied) = match size {
        "0.8b" => (1024, 24, 8, 2, 16, 3584, true),
        "2b" => (2048, 24, 8, 2, 16, 6144, true),
        "4b" => (2560, 32, 16, 4, 32, 9216, true),
        "9b" => (4096, 32, 16, 4, 32, 12288, false),
        "27b" => (5120, 64, 24, 4, 48, 17408, false),
        "35b-a3b" => (2048, 40, 16, 2, 32, 0, false),
        other => panic!("{other}"),
    };
    let types: Vec<&str> =
        (0..layers).map(|i| if i % 4 == 3 { "full_attention" } else { "linear_attention" }).collect();
    let mut text = json!({
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": hv, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "vocab_size": 248_320, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "attention_bias": false, "attn_output_gate": true, "max_position_embeddings": 262_144,
        "full_attention_interval": 4, "layer_types": types, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
        "mlp_only_layers": [], "eos_token_id": 248_044, "tie_word_embeddings": tied, "model_type": "qwen3_5_text",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
            "mrope_interleaved": true, "mrope_section": [11, 11, 10]}
    });
    let moe = inter == 0;
    if moe {
        text["model_type"] = json!("qwen3_5_moe_text");
        text["num_experts"] = json!(256);
        text["num_experts_per_tok"] = json!(8);
        text["moe_intermediate_size"] = json!(512);
        text["shared_expert_intermediate_size"] = json!(512);
    } else {
        text["intermediate_size"] = json!(inter);
    }
    if name.starts_with("qwen3.8") {
        text["output_gate_type"] = json!("swish");
    }
    json!({
        "architectures": [if moe { "Qwen3_5MoeForConditionalGeneration" } else { "Qwen3_5ForConditionalGeneration" }],
        "model_type": if moe { "qwen3_5_moe" } else { "qwen3_5" },
        "eos_token_id": [248_046, 248_044], "tie_word_embeddings": tied, "image_token_id": 248_056, "text_config": text,
        "vision_config": {"depth": 27, "hidden_size": 1152}
    })
}

#[test]
fn a_published_config_is_its_built_in_geometry() {
    for name in names().filter(|n| !n.starts_with("tiny")) {
        let builtin = Geometry::builtin(name).unwrap();
        let read = read(&published(name));
        // A config knows the padded vocabulary only; the folder's tokenizer says how much of it decodes.
        assert_eq!(read.decodable, read.vocab);
        let read = Geometry { name: builtin.name.clone(), decodable: builtin.decodable, ..read };
        assert_eq!(read, builtin, "{name}");
    }
}

#[test]
fn nested_and_flat_say_the_same_whatever_the_class() {
    for flat in [dense_config(), moe_config()] {
        let expected = read(&flat);
        assert_eq!(read(&nested(&flat)), expected);
        // A flat config under the multimodal class, and a nested one under the text class.
        let mut other = flat.clone();
        other["architectures"] = nested(&flat)["architectures"].clone();
        assert_eq!(read(&other), expected);
        let mut other = nested(&flat);
        other["architectures"] = flat["architectures"].clone();
        other["model_type"] = flat["model_type"].clone();
        assert_eq!(read(&other), expected);
        // Type without class, and class without type.
        let mut other = flat.clone();
        other.as_object_mut().unwrap().remove("architectures");
        assert_eq!(read(&other), expected);
        let mut other = flat.clone();
        other.as_object_mut().unwrap().remove("model_type");
        assert_eq!(read(&other), expected);
    }
}

#[test]
fn keys_left_out_take_the_class_defaults() {
    let dense = read(&json!({"model_type": "qwen3_5_text"}));
    assert_eq!((dense.hidden, dense.layers.len(), dense.heads, dense.kv_heads), (4096, 32, 16, 4));
    assert_eq!((dense.head_dim, dense.rotary_dim, dense.vocab, dense.max_context), (256, 64, 248_320, 32_768));
    assert_eq!(
        (dense.gdn.key_heads, dense.gdn.value_heads, dense.gdn.key_dim, dense.gdn.value_dim),
        (16, 32, 128, 128)
    );
    assert_eq!((dense.gdn.conv_kernel, dense.gdn.gate, dense.eps, dense.tied), (4, Gate::Silu, 1e-6, false));
    assert_eq!(dense.mlp, Mlp::Dense { inter: 12_288 });
    assert_eq!(dense.rope, Rope { theta: 10_000.0, yarn: None });
    assert!(dense.eos.is_empty());
    let moe = read(&json!({"model_type": "qwen3_5_moe"}));
    assert_eq!((moe.hidden, moe.layers.len(), moe.kv_heads), (2048, 40, 2));
    assert_eq!(moe.mlp, Mlp::Moe { experts: 256, top_k: 8, inter: 512, shared_inter: 512 });
}

#[test]
fn layers_come_from_the_list_or_from_the_interval() {
    let by_list = with(
        dense_config(),
        "layer_types",
        json!(["full_attention", "linear_attention", "full_attention", "full_attention"]),
    );
    assert_eq!(by_list.layers, [Mixer::Attention, Mixer::Gdn, Mixer::Attention, Mixer::Attention]);
    for (interval, expected) in [(1, 4), (2, 2), (3, 1), (4, 1), (5, 0)] {
        let mut config = dense_config();
        config["layer_types"] = Value::Null;
        config["full_attention_interval"] = json!(interval);
        let g = read(&config);
        assert_eq!(g.attention_layers(), expected, "{interval}");
        let full = g.layers.iter().position(|m| *m == Mixer::Attention);
        assert_eq!(full, (interval <= 4).then(|| interval - 1), "{interval}");
    }
}

#[test]
fn the_output_gate_is_the_gated_norms_activation() {
    for (value, gate) in [
        (json!("swish"), Gate::Silu),
        (json!("silu"), Gate::Silu),
        (json!("sigmoid"), Gate::Sigmoid),
        (json!(null), Gate::Silu),
    ] {
        assert_eq!(with(dense_config(), "output_gate_type", value).gdn.gate, gate);
    }
}

#[test]
fn rope_parameters_win_over_the_older_keys_one_by_one() {
    let mut config = dense_config();
    config["rope_theta"] = json!(5e6);
    config["partial_rotary_factor"] = json!(0.5);
    config["rope_scaling"] = json!({"type": "yarn", "factor": 2.0});
    assert_eq!(read(&config), read(&dense_config()));
    // What rope_parameters leave out is taken from beside them; the older scaling is not.
    config["rope_parameters"] = json!({"rope_type": "default"});
    let g = read(&config);
    assert_eq!((g.rope, g.rotary_dim), (Rope { theta: 5e6, yarn: None }, 4));
    config["rope_parameters"] = Value::Null;
    let g = read(&config);
    assert_eq!((g.rope.theta, g.rotary_dim, g.rope.yarn.map(|y| y.factor)), (5e6, 4, Some(2.0)));
    assert_eq!(g.max_context, 2048);
    config["rope_scaling"] = json!({"type": "mrope", "mrope_section": [1, 1, 2]});
    assert_eq!(read(&config).rope.yarn, None);
}

#[test]
fn yarn_extends_the_context() {
    let mut config = published("qwen3.6-27b");
    let rope = &mut config["text_config"]["rope_parameters"];
    rope["rope_type"] = json!("yarn");
    rope["factor"] = json!(4.0);
    rope["original_max_position_embeddings"] = json!(262_144);
    let g = read(&config);
    let y = g.rope.yarn.expect("yarn");
    // 0.1 ln 4 + 1.
    assert!((y.attention_factor - 1.138_629_436_111_989).abs() < 1e-15, "{}", y.attention_factor);
    assert_eq!(
        Yarn { attention_factor: 0.0, ..y },
        Yarn { factor: 4.0, original_max_position: 262_144, attention_factor: 0.0, beta_fast: 32.0, beta_slow: 1.0 }
    );
    assert_eq!((g.max_context, g.rotary_dim, g.rope.theta), (1_048_576, 64, 1e7));
    let rope = &mut config["text_config"]["rope_parameters"];
    rope["attention_factor"] = json!(1.25);
    rope["beta_fast"] = json!(16);
    rope["beta_slow"] = json!(2);
    let y = read(&config).rope.yarn.expect("yarn");
    assert_eq!((y.attention_factor, y.beta_fast, y.beta_slow), (1.25, 16.0, 2.0));
}

#[test]
fn end_of_sequence_ids_come_from_outside_first_and_once_each() {
    let mut config = nested(&dense_config());
    assert_eq!(read(&config).eos, [3, 1]);
    config["eos_token_id"] = json!([7, 5, 7]);
    assert_eq!(read(&config).eos, [7, 5]);
    assert_eq!(with(dense_config(), "eos_token_id", json!(9)).eos, [9]);
    assert!(with(dense_config(), "eos_token_id", json!(null)).eos.is_empty());
    assert!(with(dense_config(), "eos_token_id", json!([])).eos.is_empty());
}

#[test]
fn the_tie_is_taken_from_outside() {
    let mut config = nested(&dense_config());
    for (outer, inner, tied) in [
        (json!(true), json!(false), true),
        (json!(false), json!(true), false),
        (json!(null), json!(true), false),
        (json!(true), json!(null), true),
    ] {
        config["tie_word_embeddings"] = outer;
        config["text_config"]["tie_word_embeddings"] = inner;
        assert_eq!(read(&config).tied, tied);
    }
    assert!(with(dense_config(), "tie_word_embeddings", json!(true)).tied);
}

#[test]
fn unknown_keys_and_nulls_are_passed_over() {
    let mut config = dense_config();
    config["transformers_version"] = json!("5.17.0");
    config["some_future_key"] = json!({"a": [1, 2, {"b": null}]});
    config["quantization_config"] = Value::Null;
    config["hidden_act"] = Value::Null;
    assert_eq!(read(&config), geometry(&dense_config()));
}

#[test]
fn a_geometry_is_called_after_its_folder() {
    let named = |path: &str| Geometry::from_config(Path::new(path), &dense_config().to_string()).unwrap().name;
    assert_eq!(named("models/my-finetune/config.json"), "my-finetune");
    assert_eq!(named("hub/models--Qwen--Qwen3.6-27B/snapshots/0a1b2c/config.json"), "Qwen/Qwen3.6-27B");
    assert_eq!(named("config.json"), "checkpoint");
}
