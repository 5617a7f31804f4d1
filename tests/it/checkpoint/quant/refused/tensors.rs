//! Tensors that are not what a config says, and values that no scheme allows.

use serde_json::{Value, json};

use super::super::super::maker::{Maker, Tensor};
use super::{Case, case};

const QKV: &str = "model.layers.0.linear_attn.in_proj_qkv";
const UP: &str = "model.layers.2.mlp.experts.5.up_proj";

pub(super) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    channel(&mut all);
    tensor(&mut all);
    block(&mut all);
    nvfp4(&mut all);
    exporters(&mut all);
    presence(&mut all);
    values(&mut all);
    kv(&mut all);
    all
}

/// Gives a tensor another shape, with as many bytes as that needs.
fn reshape(m: &mut Maker, name: &str, shape: &[u64]) {
    let t = m.tensor(name);
    let size = t.bytes.len() as u64 / t.shape.iter().product::<u64>().max(1);
    let bytes = t.bytes.clone();
    t.shape = shape.to_vec();
    t.bytes = bytes.iter().copied().cycle().take((shape.iter().product::<u64>() * size) as usize).collect();
}

/// Gives a tensor another element type of the same shape.
fn retype(m: &mut Maker, name: &str, dtype: &str, size: usize) {
    let t = m.tensor(name);
    t.dtype = dtype.into();
    t.bytes = vec![0x38; t.shape.iter().product::<u64>() as usize * size];
}

fn remove(m: &mut Maker, name: &str) {
    let before = m.tensors.len();
    m.tensors.retain(|t| t.name != name);
    assert_eq!(m.tensors.len() + 1, before, "{name}");
}

/// Adds a tensor of small positive values.
fn add(m: &mut Maker, name: &str, dtype: &str, shape: &[u64]) {
    let (one, size): (&[u8], _) = match dtype {
        "F32" => (&[0, 0, 0x80, 0x3F], 4),
        "BF16" => (&[0x80, 0x3F], 2),
        _ => (&[0x38], 1),
    };
    let bytes = one.repeat(shape.iter().product::<u64>() as usize);
    assert_eq!(bytes.len(), shape.iter().product::<u64>() as usize * size);
    m.tensors.push(Tensor { name: name.into(), dtype: dtype.into(), shape: shape.to_vec(), bytes });
}

/// Overwrites an element's bytes.
fn poke(m: &mut Maker, name: &str, element: usize, bytes: &[u8]) {
    let t = m.tensor(name);
    t.bytes[element * bytes.len()..(element + 1) * bytes.len()].copy_from_slice(bytes);
}

fn channel(all: &mut Vec<Case>) {
    const BASE: &str = "ct_fp8_dynamic";
    let module = "module layers.0.linear_attn.in_proj_qkv [256, 64]";
    for (shape, says) in [
        (&[255, 1][..], "weight_scale is BF16 [255, 1]"),
        (&[257, 1], "weight_scale is BF16 [257, 1]"),
        (&[255], "weight_scale is BF16 [255]"),
        (&[1, 256], "transposed"),
        (&[1], "FP8 by tensor"),
        (&[], "FP8 by tensor"),
        (&[256, 2], "weight_scale is BF16 [256, 2]"),
        (&[2, 128], "weight_scale is BF16 [2, 128]"),
        (&[256, 1, 1], "weight_scale is BF16 [256, 1, 1]"),
        (&[64], "weight_scale is BF16 [64]"),
    ] {
        let says = &[module, says, "[256] or [256, 1]", "ignore", "FP8 by channel"];
        let says: Vec<&str> = says.iter().copied().filter(|s| *s != "ignore").collect();
        all.push(case(format!("scale {shape:?}"), BASE, &says, move |m| {
            reshape(m, &format!("{QKV}.weight_scale"), shape);
        }));
    }
    for (dtype, size) in [("F16", 2), ("F8_E8M0", 1), ("F8_E4M3", 1), ("U8", 1), ("F64", 8)] {
        let says = format!("weight_scale is {dtype} [256, 1], must be BF16 or F32");
        all.push(case(format!("scale of {dtype}"), BASE, &[module, &says], move |m| {
            retype(m, &format!("{QKV}.weight_scale"), dtype, size);
        }));
    }
    all.push(case("no scale", BASE, &[module, "no weight_scale", "[256] or [256, 1]"], |m| {
        remove(m, &format!("{QKV}.weight_scale"));
    }));
    for (shape, says) in [(&[64, 256][..], "transposed"), (&[255, 64], "[255, 64]"), (&[256, 32], "[256, 32]")] {
        all.push(case(format!("weight {shape:?}"), BASE, &[module, says, "must have [256, 64]"], move |m| {
            reshape(m, &format!("{QKV}.weight"), shape);
        }));
    }
    for (dtype, size) in [("F8_E5M2", 1), ("U8", 1), ("I8", 1), ("F8_E4M3FNUZ", 1), ("BF16", 2), ("F32", 4)] {
        all.push(case(format!("weight of {dtype}"), BASE, &[module, dtype, "F8_E4M3"], move |m| {
            retype(m, &format!("{QKV}.weight"), dtype, size);
        }));
    }
    for (extra, dtype, shape) in [
        ("input_scale", "F32", &[][..]),
        ("weight_scale_2", "F32", &[]),
        ("weight_scale_inv", "F32", &[2, 1]),
        ("weight_global_scale", "F32", &[1]),
        ("weight_packed", "U8", &[256, 32]),
    ] {
        let says = format!("{extra} is one too many");
        all.push(case(format!("also {extra}"), BASE, &[module, &says], move |m| {
            add(m, &format!("{QKV}.{extra}"), dtype, shape);
        }));
    }
}

fn tensor(all: &mut Vec<Case>) {
    const BASE: &str = "ct_fp8_static";
    let module = "module layers.0.linear_attn.in_proj_qkv [256, 64]";
    let scale = format!("{QKV}.weight_scale");
    for (shape, says) in [
        (&[256][..], "one for each row"),
        (&[256, 1], "one for each row"),
        (&[2], "weight_scale is BF16 [2]"),
        (&[2, 1], "a grid of blocks"),
        (&[0], "weight_scale is BF16 [0]"),
        (&[3], "weight_scale is BF16 [3]"),
    ] {
        let name = scale.clone();
        all.push(case(format!("scale {shape:?}"), BASE, &[module, says, "[] or [1]"], move |m| {
            reshape(m, &name, shape);
        }));
    }
    let input = format!("{QKV}.input_scale");
    let name = input.clone();
    all.push(case("no input_scale", BASE, &[module, "no input_scale", "input_scale F32 [1]"], move |m| {
        remove(m, &name);
    }));
    let name = input.clone();
    all.push(case("input_scale [64]", BASE, &[module, "input_scale is BF16 [64]"], move |m| reshape(m, &name, &[64])));
    for (what, bytes) in [("0", [0, 0]), ("-0.5", [0, 0xBF]), ("NaN", [0xC0, 0x7F]), ("inf", [0x80, 0x7F])] {
        let name = input.clone();
        let module = "module layers.0.linear_attn.in_proj_qkv";
        all.push(case(format!("input_scale of {what}"), BASE, &[module, "input_scale", what], move |m| {
            poke(m, &name, 0, &bytes);
        }));
    }
    let strip =
        |m: &mut Maker| m.config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = Value::Null;
    all.push(case(
        "input_scale, and inputs not quantised",
        BASE,
        &[module, "input_scale is one too many, its input is not quantised"],
        strip,
    ));
    let dynamic = |m: &mut Maker| {
        m.config["quantization_config"]["config_groups"]["group_0"]["input_activations"] =
            json!({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": true});
    };
    all.push(case(
        "input_scale, and dynamic inputs",
        BASE,
        &[module, "input_scale is one too many", "run time"],
        dynamic,
    ));
}

fn block(all: &mut Vec<Case>) {
    for (base, last) in [("ct_fp8_block", "weight_scale"), ("hf_fp8_block", "weight_scale_inv")] {
        let (rows, blocks) = if base == "ct_fp8_block" { (384, 3) } else { (512, 4) };
        let module = format!("module layers.0.linear_attn.in_proj_qkv [{rows}, 128]");
        let grid = format!("[{blocks}, 1]");
        for (shape, says) in [
            (vec![blocks - 1, 1], ""),
            (vec![1, blocks], "transposed"),
            (vec![blocks], ""),
            (vec![rows, 1], "FP8 by channel"),
            (vec![1], "FP8 by tensor"),
            (vec![], "FP8 by tensor"),
            (vec![blocks, 1, 1], ""),
            (vec![1, blocks, 1, 1], ""),
        ] {
            let found = format!("{shape:?}");
            all.push(case(format!("grid {shape:?}"), base, &[&module, &found, &grid, says], move |m| {
                reshape(m, &format!("{QKV}.{last}"), &shape);
            }));
        }
        all.push(case("no grid", base, &[&module, "no weight_scale", "F8_E4M3", &grid], move |m| {
            remove(m, &format!("{QKV}.{last}"));
        }));
        let both = if last == "weight_scale" { "weight_scale_inv" } else { "weight_scale" };
        all.push(case("both names of a grid", base, &[&module, "one too many"], move |m| {
            add(m, &format!("{QKV}.{both}"), "F32", &[blocks, 1]);
        }));
    }
    let fused = "model.layers.1.mlp.experts.gate_up_proj_scale_inv";
    all.push(case("a fused grid that two parts share", "ct_nvfp4", &[fused, "gate and up rows of 32"], move |m| {
        add(m, fused, "F32", &[8, 1, 1]);
    }));
    all.push(case("a fused grid of 3 experts of 2", "hf_fp8_block", &[fused, "[3, 2, 1]", "[2, 2, 1]"], move |m| {
        add(m, fused, "F32", &[3, 2, 1]);
    }));
    all.push(case("a fused grid and grids apart", "hf_fp8_block", &[fused, "and so is", "remove one"], move |m| {
        add(m, fused, "F32", &[2, 2, 1]);
    }));
}

fn nvfp4(all: &mut Vec<Case>) {
    const BASE: &str = "ct_nvfp4";
    let module = "module layers.2.mlp.experts.5.up_proj [32, 64]";
    for (shape, says) in [
        (&[31, 4][..], "weight_scale is F8_E4M3 [31, 4]"),
        (&[33, 4], "weight_scale is F8_E4M3 [33, 4]"),
        (&[4, 32], "transposed"),
        (&[32, 2], "groups of 32"),
        (&[32, 64], "weight_scale is F8_E4M3 [32, 64]"),
        (&[128], "swizzled"),
        (&[32, 4, 1], "weight_scale is F8_E4M3 [32, 4, 1]"),
        (&[1], "weight_scale is F8_E4M3 [1]"),
    ] {
        all.push(case(format!("scales {shape:?}"), BASE, &[module, says, "weight_scale F8_E4M3 [32, 4]"], move |m| {
            reshape(m, &format!("{UP}.weight_scale"), shape);
        }));
    }
    for (dtype, size) in [("U8", 1), ("F8_E8M0", 1), ("BF16", 2), ("F32", 4), ("F8_E5M2", 1)] {
        let says = format!("weight_scale is {dtype} [32, 4]");
        all.push(case(format!("scales of {dtype}"), BASE, &[module, &says, "F8_E4M3 [32, 4]"], move |m| {
            retype(m, &format!("{UP}.weight_scale"), dtype, size);
        }));
    }
    for (shape, says) in [
        (&[32, 64][..], "[32, 64]"),
        (&[32, 16], "[32, 16]"),
        (&[31, 32], "[31, 32]"),
        (&[64, 16], "[64, 16]"),
        (&[16, 64], "[16, 64]"),
    ] {
        all.push(case(format!("codes {shape:?}"), BASE, &[module, says, "must have [32, 32]"], move |m| {
            reshape(m, &format!("{UP}.weight_packed"), shape);
        }));
    }
    for dtype in ["I8", "F8_E4M3", "F4"] {
        all.push(case(
            format!("codes of {dtype}"),
            BASE,
            &[module, "weight_packed is", dtype, "must be U8"],
            move |m| {
                let t = m.tensor(&format!("{UP}.weight_packed"));
                t.dtype = dtype.into();
                t.shape = if dtype == "F4" { vec![32, 64] } else { vec![32, 32] };
            },
        ));
    }
    for part in ["weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"] {
        let says = format!("no {part}");
        all.push(case(format!("no {part}"), BASE, &[module, &says, "weight_packed U8 [32, 32]"], move |m| {
            remove(m, &format!("{UP}.{part}"));
        }));
    }
    for part in ["weight_global_scale", "input_global_scale"] {
        let says = format!("{part} is F32 [32]");
        all.push(case(format!("{part} for each row"), BASE, &[module, &says], move |m| {
            reshape(m, &format!("{UP}.{part}"), &[32]);
        }));
        let says = format!("{part} is F16 [1]");
        all.push(case(format!("{part} of F16"), BASE, &[module, &says], move |m| {
            retype(m, &format!("{UP}.{part}"), "F16", 2);
        }));
    }
    all.push(case(
        "an input scale of weights alone",
        "ct_nvfp4a16",
        &[module, "input_global_scale is one too many"],
        |m| {
            add(m, &format!("{UP}.input_global_scale"), "F32", &[1]);
        },
    ));
    // 24 columns are no multiple of 16.
    all.push(case(
        "24 columns",
        "ct_dense_nvfp4",
        &["module layers.0.mlp.down_proj [64, 24]", "multiple of 16"],
        |m| {
            m.config["intermediate_size"] = json!(24);
            for layer in 0..4 {
                for part in ["gate_proj", "up_proj"] {
                    reshape(m, &format!("model.layers.{layer}.mlp.{part}.weight_packed"), &[24, 32]);
                    reshape(m, &format!("model.layers.{layer}.mlp.{part}.weight_scale"), &[24, 4]);
                }
                reshape(m, &format!("model.layers.{layer}.mlp.down_proj.weight_packed"), &[64, 12]);
                reshape(m, &format!("model.layers.{layer}.mlp.down_proj.weight_scale"), &[64, 1]);
            }
        },
    ));
}

fn exporters(all: &mut Vec<Case>) {
    let module = "module layers.2.mlp.experts.5.up_proj [32, 64]";
    let rename = |m: &mut Maker, from: &str, to: &str| m.tensor(&format!("{UP}.{from}")).name = format!("{UP}.{to}");
    all.push(case(
        "modelopt's global under compressed-tensors' codes",
        "ct_nvfp4",
        &[module, "no weight_global_scale"],
        move |m| {
            rename(m, "weight_global_scale", "weight_scale_2");
        },
    ));
    all.push(case("modelopt's input scale", "ct_nvfp4", &[module, "no input_global_scale"], move |m| {
        rename(m, "input_global_scale", "input_scale");
    }));
    all.push(case(
        "compressed-tensors' global under modelopt's codes",
        "mo_nvfp4",
        &[module, "no weight_packed"],
        move |m| {
            rename(m, "weight_scale_2", "weight_global_scale");
        },
    ));
    all.push(case("both globals", "mo_nvfp4", &[module, "no weight_packed", "weight_scale_2 F32 []"], |m| {
        add(m, &format!("{UP}.weight_global_scale"), "F32", &[1]);
    }));
    all.push(case("codes under both names", "ct_nvfp4", &[module, "weight is one too many"], |m| {
        add(m, &format!("{UP}.weight"), "U8", &[32, 32]);
    }));
    all.push(case("no weight_scale_2", "mo_nvfp4", &[module, "no weight_scale_2", "weight U8 [32, 32]"], |m| {
        remove(m, &format!("{UP}.weight_scale_2"));
    }));
    all.push(case("no input_scale", "mo_nvfp4", &[module, "no input_scale"], |m| {
        remove(m, &format!("{UP}.input_scale"));
    }));
    all.push(case("W4A16, and input scales", "mo_nvfp4", &["W4A16_NVFP4", "input_scale is one too many"], |m| {
        m.config["quantization_config"]["quant_algo"] = json!("W4A16_NVFP4");
    }));
    all.push(case(
        "FP8 by config, NVFP4 on disk",
        "mo_nvfp4",
        &["FP8 by tensor", "quant_algo FP8", "weight_scale_2"],
        |m| {
            m.config["quantization_config"]["quant_algo"] = json!("FP8");
        },
    ));
    all.push(case(
        "NVFP4 by config, FP8 on disk",
        "mo_fp8",
        &["NVFP4 by config.json (quant_algo NVFP4)", "no weight_scale_2"],
        |m| {
            m.config["quantization_config"]["quant_algo"] = json!("NVFP4");
        },
    ));
    all.push(case(
        "by channel by config, by tensor on disk",
        "mo_fp8",
        &["FP8 by channel", "input_scale is one too many"],
        |m| {
            m.config["quantization_config"]["quant_algo"] = json!("FP8_PER_CHANNEL_PER_TOKEN");
        },
    ));
    all.push(case(
        "by tensor by config, by channel on disk",
        "mo_fp8_pc_pt",
        &["FP8 by tensor", "no input_scale"],
        |m| {
            m.config["quantization_config"]["quant_algo"] = json!("FP8");
        },
    ));
    let q = "module layers.3.self_attn.q_proj";
    all.push(case("a layer that is not in the list", "mo_mixed", &[q, "not in quantized_layers", "F8_E4M3"], |m| {
        let layers = m.config["quantization_config"]["quantized_layers"].as_object_mut().unwrap();
        layers.remove("model.layers.3.self_attn.q_proj").unwrap();
    }));
    all.push(case("a layer of another algorithm", "mo_mixed", &[q, "NVFP4 of quantized_layers", "F8_E4M3"], |m| {
        m.config["quantization_config"]["quantized_layers"]["model.layers.3.self_attn.q_proj"] =
            json!({"quant_algo": "NVFP4", "group_size": 16});
    }));
    all.push(case("a layer in the list, and left out", "mo_mixed", &[q, "*q_proj", "one must not"], |m| {
        m.config["quantization_config"]["ignore"] = json!(["*q_proj"]);
    }));
}

fn presence(all: &mut Vec<Case>) {
    for base in ["ct_nvfp4", "ct_fp8_dynamic", "mo_fp8"] {
        all.push(case("an expert missing", base, &["parameters have no tensor", "layers.2.mlp.experts.5."], |m| {
            m.tensors.retain(|t| !t.name.starts_with("model.layers.2.mlp.experts.5."));
        }));
        all.push(case("an expert too many", base, &["layers.2.mlp.experts.8.up_proj", "num_experts is 8"], |m| {
            add(m, "model.layers.2.mlp.experts.8.up_proj.weight", "F8_E4M3", &[32, 64]);
        }));
        all.push(case("an extra tensor", base, &["something", "not a parameter"], |m| {
            add(m, "model.something", "F32", &[1]);
        }));
        all.push(case("a bias", base, &["in_proj_qkv.bias", "not a parameter"], |m| {
            add(m, &format!("{QKV}.bias"), "BF16", &[256]);
        }));
        all.push(case("a quantised embedding", base, &["embed_tokens.weight", "F8_E4M3", "BF16 or F32"], |m| {
            retype(m, "model.embed_tokens.weight", "F8_E4M3", 1);
        }));
        all.push(case("an embedding's scale", base, &["embed_tokens.weight_scale", "not linear"], |m| {
            add(m, "model.embed_tokens.weight_scale", "BF16", &[256, 1]);
        }));
        all.push(case("a convolution's scale", base, &["conv1d.weight_scale", "not linear"], |m| {
            add(m, "model.layers.0.linear_attn.conv1d.weight_scale", "BF16", &[256, 1]);
        }));
    }
    for (part, says) in [
        ("qweight", "AWQ or GPTQ"),
        ("qzeros", "AWQ or GPTQ"),
        ("scales", "AWQ or GPTQ"),
        ("g_idx", "activation order"),
        ("weight_g_idx", "activation order"),
        ("weight_shape", "integer codes"),
        ("weight_zero_point", "zero point"),
        ("pre_quant_scale", "AWQ"),
        ("svdquant_lora_a", "SVDQuant"),
        ("activation_scale", "stored scales of the input"),
    ] {
        all.push(case(format!("also {part}"), "ct_nvfp4", &[part, says, "supported are"], move |m| {
            add(m, &format!("{UP}.{part}"), "I32", &[4]);
            m.tensors.last_mut().unwrap().bytes = vec![0; 16];
        }));
    }
    all.push(case("AWQ's head", "ct_nvfp4", &["lm_head.qweight", "AWQ or GPTQ"], |m| {
        add(m, "lm_head.qweight", "U8", &[4]);
    }));
    // Said to be quantised, and not: for each way to say it.
    for (base, says) in [
        ("ct_fp8_dynamic", "group_0 (target \"Linear\")"),
        ("ct_mixed_lmhead_fp8", "FP8 by channel"),
        ("mo_fp8", "quant_algo FP8"),
        ("mo_mixed", "FP8 of quantized_layers"),
        ("hf_fp8_block", "quant_method \"fp8\""),
    ] {
        let module = "module layers.3.self_attn.o_proj";
        all.push(case("bf16 on disk", base, &[module, says, "on disk are weight BF16", "F8_E4M3"], |m| {
            let name = ".layers.3.self_attn.o_proj.weight";
            let found = m.tensors.iter().find(|t| t.name.ends_with(name)).unwrap().name.clone();
            retype(m, &found, "BF16", 2);
            m.tensors.retain(|t| t.name == found || !t.name.contains("layers.3.self_attn.o_proj."));
        }));
    }
    all.push(case(
        "bf16 on disk",
        "ct_nvfp4",
        &["module layers.3.self_attn.o_proj", "NVFP4", "on disk are weight BF16"],
        |m| {
            m.tensors.retain(|t| !t.name.contains("layers.3.self_attn.o_proj."));
            add(m, "model.layers.3.self_attn.o_proj.weight", "BF16", &[64, 128]);
        },
    ));
    all.push(case(
        "a bf16 head under \"Linear\"",
        "ct_fp8_dynamic",
        &["module lm_head [256, 64]", "weight BF16 [256, 64]"],
        |m| {
            m.config["quantization_config"]["ignore"].as_array_mut().unwrap().retain(|e| e != "lm_head");
        },
    ));
    // Left out, and quantised all the same.
    for (base, key, entry, says) in [
        ("ct_fp8_dynamic", "ignore", "model.layers.3.self_attn.o_proj", "ignore \"model.layers.3.self_attn.o_proj\""),
        ("ct_nvfp4", "ignore", "re:.*o_proj", "ignore \"re:.*o_proj\""),
        ("ct_nvfp4", "ignore", "Linear", "ignore \"Linear\""),
        ("ct_mixed_lmhead_fp8", "ignore", "re:.*lm_head", "module lm_head [256, 64]"),
        ("mo_fp8", "ignore", "*o_proj", "excluded by \"*o_proj\""),
        ("mo_nvfp4", "ignore", "model.layers.3.self_attn", "excluded by \"model.layers.3.self_attn\""),
        ("hf_fp8_block", "modules_to_not_convert", "o_proj", "modules_to_not_convert \"o_proj\""),
    ] {
        all.push(case(format!("{entry} left out"), base, &[says, "quantised on disk", "alone"], move |m| {
            m.config["quantization_config"][key].as_array_mut().unwrap().push(json!(entry));
        }));
    }
    all.push(case("no target", "ct_nvfp4", &["no group's target", "quantised on disk"], |m| {
        m.config["quantization_config"]["config_groups"]["group_0"]["targets"] = json!(["re:nothing"]);
    }));
    all.push(case("no config", "ct_nvfp4", &["no quantization_config says so"], |m| {
        m.config.as_object_mut().unwrap().remove("quantization_config");
    }));
    all.push(case("no config", "mo_fp8", &["no quantization_config says so"], |m| {
        m.config.as_object_mut().unwrap().remove("quantization_config");
    }));
    all.push(case("nothing is quantised", "moe_bf16", &["no module is on disk"], |m| {
        m.config["quantization_config"] =
            json!({"quant_method": "compressed-tensors", "config_groups": {"FP8": ["re:x"]}});
    }));
    all.push(case("a tied head that is there", "ct_mixed_lmhead_fp8", &["lm_head.", "tie_word_embeddings"], |m| {
        m.config["tie_word_embeddings"] = json!(true);
        m.config["text_config"]["tie_word_embeddings"] = json!(true);
    }));
    all.push(case("an F16 weight left out", "ct_nvfp4", &["module lm_head", "F16", "ignore \"lm_head\""], |m| {
        m.tensor("lm_head.weight").dtype = "F16".into();
    }));
    all.push(case("a transposed weight left out", "ct_nvfp4", &["module lm_head", "transposed"], |m| {
        reshape(m, "lm_head.weight", &[64, 256]);
    }));
}

fn values(all: &mut Vec<Case>) {
    let qkv = "module layers.0.linear_attn.in_proj_qkv";
    for (what, bytes) in
        [("0", [0, 0]), ("-0.5", [0, 0xBF]), ("NaN", [0xC0, 0x7F]), ("inf", [0x80, 0x7F]), ("-inf", [0x80, 0xFF])]
    {
        for base in ["ct_fp8_dynamic", "ct_fp8_static", "ct_fp8_block"] {
            all.push(case(
                format!("a scale of {what}"),
                base,
                &[qkv, "weight_scale", what, "finite and above 0"],
                move |m| {
                    poke(m, &format!("{QKV}.weight_scale"), 0, &bytes);
                },
            ));
        }
    }
    for (what, value) in [("0", 0f32), ("-1", -1.0), ("NaN", f32::NAN), ("inf", f32::INFINITY)] {
        for (base, part) in [
            ("mo_fp8_pc_pt", "weight_scale"),
            ("mo_fp8", "input_scale"),
            ("mo_nvfp4", "weight_scale_2"),
            ("mo_nvfp4", "input_scale"),
            ("ct_nvfp4", "weight_global_scale"),
            ("ct_nvfp4", "input_global_scale"),
            ("hf_fp8_block", "weight_scale_inv"),
        ] {
            all.push(case(format!("{part} of {what}"), base, &[qkv, part, what, "finite and above 0"], move |m| {
                poke(m, &format!("{QKV}.{part}"), 0, &value.to_le_bytes());
            }));
        }
    }
    for code in [0x7Fu8, 0xFF] {
        let says = format!("code {code:#04x} at row 3, column 5");
        for base in ["ct_fp8_dynamic", "ct_fp8_static", "mo_fp8", "mo_mixed"] {
            all.push(case(format!("weight code {code:#x}"), base, &[qkv, &says, "NaN"], move |m| {
                poke(m, &format!("{QKV}.weight"), 3 * 64 + 5, &[code]);
            }));
        }
    }
    for (code, what) in
        [(0x7Fu8, "NaN"), (0xFF, "NaN"), (0x00, "zero"), (0x80, "zero"), (0xB8, "negative"), (0x81, "negative")]
    {
        let says = format!("code {code:#04x} at row 7, group 2 is {what}");
        for base in ["ct_nvfp4", "mo_nvfp4"] {
            all.push(case(format!("scale code {code:#x}"), base, &[qkv, &says, "above 0"], move |m| {
                poke(m, &format!("{QKV}.weight_scale"), 7 * 4 + 2, &[code]);
            }));
        }
    }
}

fn kv(all: &mut Vec<Case>) {
    const K: &str = "model.layers.3.self_attn.k_scale";
    const V: &str = "model.layers.3.self_attn.v_scale";
    let scheme = |m: &mut Maker, dynamic: bool| {
        m.config["quantization_config"]["kv_cache_scheme"] =
            json!({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": dynamic});
    };
    all.push(case(
        "static KV scales, none there",
        "ct_nvfp4",
        &["layers.3.self_attn", "0 of its k_scale and v_scale"],
        move |m| {
            scheme(m, false);
        },
    ));
    for base in ["ct_nvfp4", "mo_nvfp4"] {
        all.push(case("K's scale alone", base, &["layers.3.self_attn", "1 of its k_scale and v_scale"], move |m| {
            scheme(m, false);
            add(m, K, "F32", &[1]);
        }));
        all.push(case("a KV scale for each head", base, &["k_scale", "[2]", "[] or [1]"], move |m| {
            scheme(m, false);
            add(m, K, "F32", &[2]);
            add(m, V, "F32", &[2]);
        }));
        all.push(case(
            "KV scales, and a config without",
            base,
            &["k_scale", "no kv_cache_scheme", "takes"][..2],
            move |m| {
                add(m, K, "F32", &[1]);
                add(m, V, "F32", &[1]);
            },
        ));
        all.push(case("KV scales, and dynamic ones", base, &["k_scale", "dynamic"], move |m| {
            scheme(m, true);
            add(m, K, "F32", &[1]);
            add(m, V, "F32", &[1]);
        }));
        all.push(case("K's scale twice", base, &["k_proj.k_scale", "and so is"], move |m| {
            scheme(m, false);
            add(m, K, "F32", &[1]);
            add(m, V, "F32", &[1]);
            add(m, "model.layers.3.self_attn.k_proj.k_scale", "F32", &[]);
        }));
        all.push(case("a KV scale of a GDN layer", base, &["layers.1.self_attn.k_scale", "has none"], move |m| {
            scheme(m, false);
            add(m, "model.layers.1.self_attn.k_scale", "F32", &[1]);
        }));
        for (what, value) in [("0", 0f32), ("-1", -1.0), ("NaN", f32::NAN)] {
            all.push(case(format!("a KV scale of {what}"), base, &["layers.3.self_attn", "v_scale", what], move |m| {
                scheme(m, false);
                add(m, K, "F32", &[1]);
                add(m, V, "F32", &[1]);
                poke(m, V, 0, &value.to_le_bytes());
            }));
        }
        all.push(case("an F16 KV scale", base, &["k_scale", "F16"], move |m| {
            scheme(m, false);
            add(m, K, "BF16", &[1]);
            add(m, V, "BF16", &[1]);
            m.tensor(K).dtype = "F16".into();
        }));
    }
}
