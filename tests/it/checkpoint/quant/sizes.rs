//! Checkpoints of published sizes, as headers over holes: what opening them takes, and what it finds.

use std::fs;
use std::path::Path;
use std::time::Instant;

use highwater::checkpoint::{Checkpoint, Geometry, SkipRule};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::counts;

/// The config of a built-in geometry, as its publisher writes it.
fn config(name: &str) -> Value {
    let moe = name.contains("a3b");
    let mut text = json!({
        "model_type": if moe { "qwen3_5_moe_text" } else { "qwen3_5_text" },
        "vocab_size": 248_320, "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "full_attention_interval": 4,
        "max_position_embeddings": 262_144, "eos_token_id": 248_044,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    });
    let own = if moe {
        json!({"hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2,
            "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512})
    } else {
        json!({"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4,
            "linear_num_value_heads": 48, "intermediate_size": 17_408})
    };
    text.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    let class = if moe { "Qwen3_5MoeForConditionalGeneration" } else { "Qwen3_5ForConditionalGeneration" };
    json!({"architectures": [class], "model_type": if moe { "qwen3_5_moe" } else { "qwen3_5" }, "text_config": text,
        "tie_word_embeddings": false})
}

/// How each module is stored.
#[derive(Clone, Copy, PartialEq)]
enum As {
    Plain,
    Fp8Channel,
    Nvfp4,
}

/// Writes headers over holes: each module in the tensors that compressed-tensors gives it, in shards of 200 modules.
fn write(config: &Value, kv: bool, stored: impl Fn(&str) -> As) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let g = Geometry::from_config(Path::new("x/config.json"), &config.to_string()).unwrap();
    let mut tensors: Vec<(String, &str, Vec<usize>, usize)> = Vec::new();
    for p in g.params() {
        let stem = p.name.trim_end_matches(".weight");
        let module = if stem == "lm_head" { stem.to_owned() } else { format!("model.language_model.{stem}") };
        let matrix = p.shape.len() == 2 && stem != "embed_tokens";
        let (n, k) = (p.shape[0], p.shape[1..].iter().product::<usize>());
        let mut push =
            |part: &str, dtype, shape: Vec<usize>, size| tensors.push((format!("{module}{part}"), dtype, shape, size));
        match if matrix { stored(stem) } else { As::Plain } {
            As::Plain => push(if stem == p.name { "" } else { ".weight" }, "BF16", p.shape.clone(), 2),
            As::Fp8Channel => {
                push(".weight", "F8_E4M3", vec![n, k], 1);
                push(".weight_scale", "BF16", vec![n, 1], 2);
            }
            As::Nvfp4 => {
                push(".weight_packed", "U8", vec![n, k / 2], 1);
                push(".weight_scale", "F8_E4M3", vec![n, k / 16], 1);
                push(".weight_global_scale", "F32", vec![1], 4);
                push(".input_global_scale", "F32", vec![1], 4);
            }
        }
        if kv && stem.ends_with("self_attn.k_proj") {
            let attention = module.trim_end_matches(".k_proj");
            tensors.push((format!("{attention}.k_scale"), "BF16", vec![1], 2));
            tensors.push((format!("{attention}.v_scale"), "BF16", vec![1], 2));
        }
    }
    tensors.push(("mtp.fc.weight".into(), "BF16", vec![g.hidden, 2 * g.hidden], 2));
    let mut map = Map::new();
    for (i, shard) in tensors.chunks(200).enumerate() {
        let name = format!("model-{i:05}.safetensors");
        let (mut header, mut at) = (Map::new(), 0);
        for (tensor, dtype, shape, size) in shard {
            let end = at + shape.iter().product::<usize>() * size;
            header.insert(tensor.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]}));
            map.insert(tensor.clone(), json!(name));
            at = end;
        }
        let file = super::super::maker::raw(&Value::Object(header).to_string(), &[]);
        fs::write(dir.path().join(&name), &file).unwrap();
        let handle = fs::OpenOptions::new().write(true).open(dir.path().join(&name)).unwrap();
        handle.set_len((file.len() + at) as u64).unwrap();
    }
    fs::write(dir.path().join("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
    dir
}

fn group(layout: &str, targets: Value) -> Value {
    match layout {
        "fp8" => json!({"format": "float-quantized", "targets": targets,
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": false, "symmetric": true},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": true}}),
        _ => json!({"format": "nvfp4-pack-quantized", "targets": targets,
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                "scale_dtype": "torch.float8_e4m3fn"},
            "input_activations": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"}}),
    }
}

/// The 27B as its NVFP4 checkpoints have it: MLPs of layers 0 to 55 in NVFP4, all else that is large in FP8 by channel,
/// the head too; norms, in_proj_a and in_proj_b left out by name, one by one, the vision tower and mtp by pattern.
#[test]
fn the_27b_has_168_nvfp4_and_233_fp8_linears_and_opens_by_its_headers() {
    let mut config = config("qwen3.6-27b");
    let mut ignore = vec![json!("re:^mtp.*"), json!("re:.*visual.*")];
    for layer in (0..64).filter(|l| l % 4 != 3) {
        for part in ["norm", "in_proj_a", "in_proj_b"] {
            ignore.push(json!(format!("model.language_model.layers.{layer}.linear_attn.{part}")));
        }
    }
    config["quantization_config"] = json!({"quant_method": "compressed-tensors", "format": "mixed-precision",
        "quantization_status": "compressed", "version": "0.17.2.a20260716", "ignore": ignore,
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": false, "symmetric": true},
        "config_groups": {
            "group_0": group("nvfp4", json!([r"re:.*layers\.([0-9]|[1-4][0-9]|5[0-5])\.mlp\.(gate|up|down)_proj$"])),
            "group_1": group("fp8", json!([r"re:.*self_attn\.(q|k|v|o)_proj$",
                r"re:.*linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$",
                r"re:.*layers\.(5[6-9]|6[0-3])\.mlp\.(gate|up|down)_proj$", "re:.*lm_head"]))}});
    let dir = write(&config, true, |module| {
        let layer = || module.split('.').nth(1).and_then(|n| n.parse::<usize>().ok());
        if module.ends_with("in_proj_a") || module.ends_with("in_proj_b") {
            As::Plain
        } else if module.contains(".mlp.") && layer() < Some(56) {
            As::Nvfp4
        } else {
            As::Fp8Channel
        }
    });
    let start = Instant::now();
    let c = Checkpoint::open(dir.path()).unwrap_or_else(|e| panic!("{e}"));
    let took = start.elapsed();
    let expected = [("bf16", 96), ("fp8-channel token", 233), ("nvfp4-divides nvfp4", 168)];
    assert_eq!(counts(c.modules()), expected.map(|(k, n)| (k.to_string(), n)));
    let head = c.module("lm_head").unwrap();
    // Codes of one byte, and a bf16 scale for each row.
    assert_eq!(head.bytes, 248_320 * 5120 + 248_320 * 2);
    assert!(c.bytes() > 20 << 30, "{} bytes", c.bytes());
    assert_eq!(c.skipped().iter().map(|s| s.rule).collect::<Vec<_>>(), [SkipRule::Mtp]);
    // 20 GiB of data could not be read in this time.
    assert!(took.as_secs_f64() < 2.0, "opening took {took:?}");
    // Holes are zeros, and zero is no scale: what reads a value says so.
    let error = c.row_scale("lm_head").unwrap_err().to_string();
    assert!(error.contains("module lm_head") && error.contains("finite and above 0"), "{error}");
}

/// The 35B has 30,720 experts' matrices: as many names to match.
#[test]
fn the_35b_opens_by_its_headers() {
    let mut config = config("qwen3.6-35b-a3b");
    config["quantization_config"] = json!({"quant_method": "compressed-tensors", "format": "mixed-precision",
        "ignore": ["re:^mtp.*", "re:.*visual.*", "re:.*mlp.gate$", "re:.*shared_expert_gate$", "re:.*in_proj_(a|b)$"],
        "config_groups": {
            "group_0": group("nvfp4", json!([r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$", r"re:.*shared_expert\.(gate|up|down)_proj$"])),
            "group_1": group("fp8", json!([r"re:.*self_attn\.(q|k|v|o)_proj$",
                r"re:.*linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$", "re:.*lm_head"]))}});
    let dir = write(&config, false, |module| {
        if module.contains("expert") && module.ends_with("_proj") {
            As::Nvfp4
        } else if module == "lm_head" || module.ends_with("_proj") || module.ends_with("qkv") || module.ends_with("_z")
        {
            As::Fp8Channel
        } else {
            As::Plain
        }
    });
    let start = Instant::now();
    let c = Checkpoint::open(dir.path()).unwrap_or_else(|e| panic!("{e}"));
    let took = start.elapsed();
    let (experts, plain) = (40 * (256 * 3 + 3), 30 * 2 + 40 * 2);
    let fp8 = 30 * 3 + 10 * 4 + 1;
    let expected = [("bf16", plain), ("fp8-channel token", fp8), ("nvfp4-divides nvfp4", experts)];
    assert_eq!(counts(c.modules()), expected.map(|(k, n)| (k.to_string(), n)));
    assert_eq!(c.module("lm_head").unwrap().bytes, 248_320 * 2048 + 248_320 * 2);
    assert!(took.as_secs_f64() < 10.0, "opening took {took:?}");
    println!("{took:?}");
}
