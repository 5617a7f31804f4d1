//! Configs of a kind that is not read, or that contradict themselves.

use serde_json::{Value, json};

use super::super::super::maker::{Maker, nested};
use super::{Case, case};

pub(super) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    methods(&mut all);
    compressed_tensors(&mut all);
    arguments(&mut all);
    inputs(&mut all);
    groups(&mut all);
    modelopt(&mut all);
    fp8(&mut all);
    all
}

/// A config's own object.
fn q(m: &mut Maker) -> &mut Value {
    &mut m.config["quantization_config"]
}

fn methods(all: &mut Vec<Case>) {
    for method in ["awq", "gptq", "bitsandbytes", "mxfp4", "fbgemm_fp8", "quark", "torchao", "auto-round", "hqq", "x"] {
        let says = format!("quant_method \"{method}\"");
        all.push(case(method, "ct_nvfp4", &[&says, "compressed-tensors", "modelopt", "BF16 and F32"], move |m| {
            q(m)["quant_method"] = json!(method);
        }));
    }
    all.push(case("no method", "mo_nvfp4", &["no quant_method"], |m| q(m)["quant_method"] = Value::Null));
    all.push(case("a method that is a number", "ct_nvfp4", &["quant_method", "string"], |m| {
        q(m)["quant_method"] = json!(8);
    }));
    all.push(case("a config that is a list", "ct_nvfp4", &["quantization_config", "object"], |m| *q(m) = json!([])));
    all.push(case("two configs that differ", "ct_nvfp4", &["compression_config", "must be the same"], |m| {
        m.config["compression_config"] = json!({"quant_method": "compressed-tensors"});
    }));
    all.push(case(
        "two configs that differ",
        "ct_fp8_dynamic",
        &["text_config.quantization_config", "the same"],
        |m| {
            let own = q(m).clone();
            m.config = nested(&m.config);
            m.config["quantization_config"] = own;
            m.config["text_config"]["quantization_config"]["ignore"] = json!([]);
        },
    ));
}

fn compressed_tensors(all: &mut Vec<Case>) {
    for format in [
        "pack-quantized",
        "int-quantized",
        "marlin-24",
        "sparse-24-bitmask",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "dense",
        "tomorrow",
    ] {
        let says = format!("\"{format}\"");
        all.push(case(format!("format {format}"), "ct_nvfp4", &["quantization_config.format", &says], move |m| {
            q(m)["format"] = json!(format);
        }));
        all.push(case(format!("group format {format}"), "ct_nvfp4", &["group_0.format", &says], move |m| {
            q(m)["config_groups"]["group_0"]["format"] = json!(format);
        }));
    }
    all.push(case("a group that is mixed", "ct_nvfp4", &["group_0.format", "mixed-precision"], |m| {
        q(m)["config_groups"]["group_0"]["format"] = json!("mixed-precision");
    }));
    all.push(case("8 bits in an NVFP4 format", "ct_fp8_dynamic", &["nvfp4-pack-quantized", "must agree"], |m| {
        q(m)["config_groups"]["group_0"]["format"] = json!("nvfp4-pack-quantized");
    }));
    all.push(case("4 bits in an FP8 format", "ct_nvfp4", &["float-quantized", "must agree"], |m| {
        q(m)["config_groups"]["group_0"]["format"] = json!("float-quantized");
    }));
    for status in ["frozen", "initialized", "calibration"] {
        all.push(case(format!("status {status}"), "ct_nvfp4", &["quantization_status", status], move |m| {
            q(m)["quantization_status"] = json!(status);
        }));
    }
    all.push(case("sparse weights", "ct_nvfp4", &["sparsity_config"], |m| {
        q(m)["sparsity_config"] = json!({"format": "sparse-24-bitmask"});
    }));
    all.push(case("rotated weights", "ct_nvfp4", &["transform_config"], |m| {
        q(m)["transform_config"] = json!({"config_groups": {"R1": {"type": "hadamard"}}});
    }));
    all.push(case("no groups", "ct_nvfp4", &["config_groups", "absent"], |m| q(m)["config_groups"] = Value::Null));
    all.push(case("empty groups", "ct_nvfp4", &["config_groups", "empty"], |m| q(m)["config_groups"] = json!({})));
    all.push(case("groups in a list", "ct_nvfp4", &["config_groups", "object"], |m| {
        q(m)["config_groups"] = json!([1]);
    }));
    for preset in ["W4A16", "W8A8", "MXFP4", "MXFP8", "W4AFP8", "INT8", "NOTHING"] {
        all.push(case(format!("preset {preset}"), "ct_nvfp4", &[preset, "FP8_DYNAMIC", "NVFP4A16"], move |m| {
            q(m)["config_groups"] = json!({preset: ["Linear"]});
        }));
    }
    all.push(case("an ignore that is no list", "ct_nvfp4", &["ignore", "list"], |m| q(m)["ignore"] = json!("lm_head")));
    all.push(case("an ignore of numbers", "ct_nvfp4", &["ignore[0]", "string"], |m| q(m)["ignore"] = json!([1])));
    all.push(case("an ignore that is no pattern", "ct_nvfp4", &["ignore[1]", "regular expression"], |m| {
        q(m)["ignore"] = json!(["lm_head", "re:(unclosed"]);
    }));
    all.push(case("a pattern without end", "ct_nvfp4", &["ignore[0]", "at most 1024"], |m| {
        q(m)["ignore"] = json!([format!("re:{}", "x".repeat(5000))]);
    }));
    for (name, scheme) in [
        ("int8", json!({"num_bits": 8, "type": "int", "strategy": "tensor"})),
        ("by head", json!({"num_bits": 8, "type": "float", "strategy": "attn_head"})),
        ("4-bit", json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16})),
    ] {
        all.push(case(format!("a KV cache of {name}"), "ct_nvfp4", &["kv_cache_scheme"], move |m| {
            q(m)["kv_cache_scheme"] = scheme.clone();
        }));
    }
}

fn arguments(all: &mut Vec<Case>) {
    let float4 = |group: u64| json!({"num_bits": 4, "type": "float", "strategy": "group", "group_size": group});
    let cases: Vec<(&str, Value, &[&str])> = vec![
        ("MXFP4", float4(32), &["group_size", "32", "MXFP4"]),
        ("4-bit floats in groups of 128", float4(128), &["group_size", "128"]),
        ("4-bit floats by tensor", json!({"num_bits": 4, "type": "float"}), &["4-bit float, strategy tensor"]),
        ("MXFP8", json!({"num_bits": 8, "type": "float", "group_size": 32}), &["MXFP8"]),
        ("FP8 in groups", json!({"num_bits": 8, "type": "float", "group_size": 128}), &["group of 128"]),
        ("int4 groups, as AWQ and GPTQ", json!({"num_bits": 4, "type": "int", "group_size": 128}), &["GPTQ, AWQ"]),
        ("int8", json!({"num_bits": 8, "type": "int", "strategy": "channel"}), &["W8A8", "8-bit int"]),
        ("no type, which is int", json!({"num_bits": 8, "strategy": "channel"}), &["8-bit int"]),
        ("6 bits", json!({"num_bits": 6, "type": "float", "strategy": "tensor"}), &["6-bit"]),
        ("by token", json!({"num_bits": 8, "type": "float", "strategy": "token"}), &["strategy token"]),
        ("by nothing known", json!({"num_bits": 8, "type": "float", "strategy": "diagonal"}), &["diagonal"]),
        (
            "no block_structure",
            json!({"num_bits": 8, "type": "float", "strategy": "block"}),
            &["block_structure", "[128, 128]"],
        ),
        (
            "blocks of 64",
            json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]}),
            &["block_structure", "[64, 64]"],
        ),
        (
            "blocks of 1 x 128",
            json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "1x128"}),
            &["block_structure", "[1, 128]"],
        ),
        (
            "blocks of words",
            json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "largexsmall"}),
            &["block_structure", "must be [128, 128]"],
        ),
        (
            "blocks by channel",
            json!({"num_bits": 8, "type": "float", "strategy": "channel", "block_structure": [128, 128]}),
            &["block_structure", "only \"block\""],
        ),
    ];
    for (name, weights, says) in cases {
        all.push(case(name, "ct_fp8_dynamic", says, move |m| {
            q(m)["config_groups"]["group_0"]["weights"] = weights.clone();
            q(m)["config_groups"]["group_0"]["format"] = Value::Null;
            q(m)["format"] = Value::Null;
        }));
    }
    let changes: [(&str, &str, Value, &[&str]); 17] = [
        ("asymmetric", "symmetric", json!(false), &["symmetric", "zero point"]),
        ("ordered", "actorder", json!("weight"), &["actorder"]),
        ("ordered by group", "actorder", json!("group"), &["actorder"]),
        ("ordered", "actorder", json!(true), &["actorder"]),
        ("dynamic", "dynamic", json!(true), &["dynamic"]),
        ("local", "dynamic", json!("local"), &["dynamic"]),
        ("an unknown key", "bits", json!(4), &["group_0.weights.bits", "unknown key"]),
        ("scales of powers of two", "scale_dtype", json!("torch.uint8"), &["scale_dtype", "uint8"]),
        ("4 columns in a group", "group_size", json!(4), &["group_size"]),
        ("no column in a group", "group_size", json!(0), &["group_size", "positive"]),
        ("fewer", "group_size", json!(-2), &["group_size", "positive"]),
        ("half a column", "group_size", json!(0.5), &["group_size"]),
        ("bits in words", "num_bits", json!("four"), &["num_bits", "must be"]),
        ("another type", "type", json!("complex"), &["type", "complex"]),
        ("type 8", "type", json!(8), &["type", "string"]),
        ("maybe symmetric", "symmetric", json!("yes"), &["symmetric", "true or false"]),
        ("no group", "group_size", Value::Null, &["strategy tensor_group"]),
    ];
    for (name, key, value, says) in changes {
        all.push(case(format!("{name}: {key}"), "ct_nvfp4", says, move |m| {
            q(m)["config_groups"]["group_0"]["weights"][key] = value.clone();
        }));
    }
    all.push(case("FP8 with e4m3 scales", "ct_fp8_dynamic", &["scale_dtype", "float8_e4m3fn"], |m| {
        q(m)["config_groups"]["group_0"]["weights"]["scale_dtype"] = json!("torch.float8_e4m3fn");
    }));
}

fn inputs(all: &mut Vec<Case>) {
    let float8 = |strategy: &str, dynamic: Value| json!({"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": dynamic});
    let mut by_group = float8("group", json!(true));
    by_group["group_size"] = json!(64);
    for (name, input) in [
        ("tokens, stored", float8("token", json!(false))),
        ("by tensor, dynamic", float8("tensor", json!(true))),
        ("by channel", float8("channel", json!(false))),
        ("local, of 8 bits", float8("tensor", json!("local"))),
        ("groups of 64", by_group),
        ("int8", json!({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": true})),
        ("MXFP8's", json!({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": true})),
    ] {
        all.push(case(
            format!("inputs: {name}"),
            "ct_fp8_dynamic",
            &["group_0.input_activations", "dynamic"],
            move |m| {
                q(m)["config_groups"]["group_0"]["input_activations"] = input.clone();
            },
        ));
    }
    all.push(case("inputs: 4-bit of 8-bit weights", "ct_fp8_dynamic", &["input_activations", "4-bit inputs"], |m| {
        q(m)["config_groups"]["group_0"]["input_activations"] =
            json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"});
    }));
    all.push(case("inputs: 8-bit of 4-bit weights", "ct_nvfp4a16", &["input_activations", "8-bit inputs"], |m| {
        q(m)["config_groups"]["group_0"]["input_activations"] =
            json!({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": true});
    }));
    all.push(case("inputs: 4-bit, all stored", "ct_nvfp4", &["input_activations", "dynamic false"], |m| {
        q(m)["config_groups"]["group_0"]["input_activations"]["dynamic"] = json!(false);
    }));
    all.push(case("inputs: sometimes", "ct_nvfp4", &["input_activations.dynamic", "\"sometimes\""], |m| {
        q(m)["config_groups"]["group_0"]["input_activations"]["dynamic"] = json!("sometimes");
    }));
    all.push(case("inputs alone", "ct_nvfp4", &["input_activations", "not quantised"], |m| {
        q(m)["config_groups"]["group_0"]["weights"] = Value::Null;
    }));
    all.push(case("outputs", "ct_nvfp4", &["output_activations"], |m| {
        q(m)["config_groups"]["group_0"]["output_activations"] = json!({"num_bits": 8, "type": "float"});
    }));
}

fn groups(all: &mut Vec<Case>) {
    let second = |m: &mut Maker, targets: Value| {
        q(m)["format"] = json!("mixed-precision");
        q(m)["config_groups"]["second"] = json!({"targets": targets,
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}});
    };
    let module = "module layers.0.linear_attn.in_proj_qkv";
    all.push(case(
        "two groups claim a class",
        "ct_nvfp4",
        &[module, "two groups claim it", "group_0", "second"],
        move |m| {
            second(m, json!(["Linear"]));
        },
    ));
    all.push(case("two groups claim a pattern", "ct_mfree_ignore_re", &["two groups claim it", "second"], move |m| {
        second(m, json!(["re:.*mlp.experts.*"]));
    }));
    all.push(case(
        "a pattern claims what another's name does",
        "ct_mfree_ignore_re",
        &["two groups", "q_proj"],
        move |m| {
            q(m)["config_groups"]["third"] = json!({"targets": ["model.layers.3.self_attn.q_proj"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}});
        },
    ));
    all.push(case(
        "a name, and another scheme on disk",
        "ct_nvfp4",
        &["q_proj", "FP8 by channel", "second"],
        move |m| {
            second(m, json!(["model.layers.3.self_attn.q_proj"]));
        },
    ));
    for (name, value, says) in [
        ("no targets", Value::Null, "absent"),
        ("no target", json!([]), "no targets"),
        ("one target", json!("Linear"), "list"),
        ("a number", json!([7]), "string"),
        ("no pattern", json!(["re:["]), "regular expression"),
    ] {
        all.push(case(format!("targets: {name}"), "ct_nvfp4", &["group_0.targets", says], move |m| {
            q(m)["config_groups"]["group_0"]["targets"] = value.clone();
        }));
    }
    all.push(case("an unknown key of a group", "ct_nvfp4", &["group_0.colour", "unknown key"], |m| {
        q(m)["config_groups"]["group_0"]["colour"] = json!("blue");
    }));
    all.push(case("a group that is null", "ct_nvfp4", &["config_groups.group_0", "null"], |m| {
        q(m)["config_groups"]["group_0"] = Value::Null;
    }));
    all.push(case("a group that is a number", "ct_nvfp4", &["config_groups.group_0", "object"], |m| {
        q(m)["config_groups"]["group_0"] = json!(4);
    }));
}

fn modelopt(all: &mut Vec<Case>) {
    for algo in [
        "W4A8_AWQ",
        "W4A16_AWQ",
        "NVFP4_AWQ",
        "NVFP4_SVD",
        "W4A8_NVFP4_FP8",
        "W4A8_MXFP4_FP8",
        "MXFP8",
        "MXFP4",
        "W8A16",
        "W8A8_SQ_PER_CHANNEL",
        "fp8_pb_real",
        "NVFP5",
    ] {
        all.push(case(format!("algorithm {algo}"), "mo_nvfp4", &["quant_algo", algo, "W4A16_NVFP4"], move |m| {
            q(m)["quant_algo"] = json!(algo);
        }));
        all.push(case(format!("a layer's algorithm {algo}"), "mo_mixed", &["quantized_layers", algo], move |m| {
            q(m)["quantized_layers"]["model.layers.3.self_attn.q_proj"]["quant_algo"] = json!(algo);
        }));
    }
    all.push(case("no algorithm", "mo_nvfp4", &["quant_algo", "absent"], |m| q(m)["quant_algo"] = Value::Null));
    all.push(case("an algorithm that is a list", "mo_nvfp4", &["quant_algo", "string"], |m| {
        q(m)["quant_algo"] = json!([]);
    }));
    for group in [json!(32), json!(8), json!("16"), json!(-1)] {
        all.push(case(format!("group_size {group}"), "mo_nvfp4", &["group_size", "groups of 16"], move |m| {
            q(m)["group_size"] = group.clone();
        }));
    }
    all.push(case("a layer's group of 32", "mo_mixed", &["group_size", "32", "MXFP4"], |m| {
        q(m)["quantized_layers"]["model.layers.0.mlp.experts"]["group_size"] = json!(32);
    }));
    all.push(case("FP8 in groups", "mo_fp8", &["group_size", "has no groups"], |m| q(m)["group_size"] = json!(16)));
    all.push(case("mixed without layers", "mo_mixed", &["quantized_layers", "absent"], |m| {
        q(m)["quantized_layers"] = Value::Null;
    }));
    all.push(case("mixed with no layer", "mo_mixed", &["quantized_layers", "empty"], |m| {
        q(m)["quantized_layers"] = json!({});
    }));
    all.push(case("FP8 with layers", "mo_mixed", &["quantized_layers", "MIXED_PRECISION"], |m| {
        q(m)["quant_algo"] = json!("FP8");
    }));
    all.push(case("a layer that is null", "mo_mixed", &["quantized_layers", "null"], |m| {
        q(m)["quantized_layers"]["model.layers.3.self_attn.q_proj"] = Value::Null;
    }));
    all.push(case("a layer without an algorithm", "mo_mixed", &["q_proj.quant_algo", "absent"], |m| {
        q(m)["quantized_layers"]["model.layers.3.self_attn.q_proj"] = json!({});
    }));
    all.push(case("a layer with scaled inputs", "mo_mixed", &["pre_quant_scale"], |m| {
        q(m)["quantized_layers"]["model.layers.3.self_attn.q_proj"]["pre_quant_scale"] = json!(true);
    }));
    for (key, value) in [("kv_cache_scheme", json!("NVFP4")), ("kv_cache_quant_algo", json!("INT8"))] {
        all.push(case(format!("{key} {value}"), "mo_nvfp4", &[key, "FP8 or not at all"], move |m| {
            q(m)[key] = value.clone();
        }));
    }
    all.push(case("an ignore of numbers", "mo_nvfp4", &["ignore[0]", "string"], |m| q(m)["ignore"] = json!([3])));
}

fn fp8(all: &mut Vec<Case>) {
    for (key, value, says) in [
        ("activation_scheme", json!("static"), "\"static\""),
        ("fmt", json!("e5m2"), "\"e5m2\""),
        ("scale_fmt", json!("ue8m0"), "\"ue8m0\""),
        ("weight_block_size", json!([64, 128]), "[64,128]"),
        ("weight_block_size", json!([128]), "[128]"),
        ("weight_block_size", json!([128, 128, 128]), "[128, 128]"),
        ("weight_block_size", Value::Null, "absent"),
        ("weight_block_size", json!(128), "[128, 128]"),
        ("modules_to_convert", json!(["embed_tokens"]), "modules_to_convert"),
        ("modules_to_not_convert", json!("lm_head"), "list"),
        ("modules_to_not_convert", json!([0]), "string"),
        ("modules_to_not_convert", json!(["layers.(0"]), "regular expression"),
    ] {
        all.push(case(format!("{key} {value}"), "hf_fp8_block", &[key, says], move |m| q(m)[key] = value.clone()));
    }
}
