//! Headers that are well formed and hold the wrong tensors.

use serde_json::json;

use super::super::maker::Maker;
use super::{Base, Case, Kind};

const QKV: &str = "model.layers.0.linear_attn.in_proj_qkv.weight";
const Q: &str = "model.layers.3.self_attn.q_proj.weight";
const HEAD: &str = "lm_head.weight";
const GATE_UP: &str = "model.layers.2.mlp.experts.gate_up_proj";

fn case(name: impl Into<String>, base: Base, says: &[&str], f: impl Fn(&mut Maker) + 'static) -> Case {
    Case::new(name, base, Kind::Checkpoint, says).make(f)
}

fn remove(m: &mut Maker, name: &str) {
    let before = m.tensors.len();
    m.tensors.retain(|t| t.name != name);
    assert_eq!(m.tensors.len() + 1, before, "no tensor {name}");
}

fn reshape(m: &mut Maker, name: &str, shape: &[u64]) {
    let t = m.tensor(name);
    t.shape = shape.to_vec();
    t.bytes = vec![0; shape.iter().product::<u64>() as usize * 2];
}

pub(super) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    missing_and_extra(&mut all);
    shapes(&mut all);
    dtypes(&mut all);
    experts(&mut all);
    ties_and_prefixes(&mut all);
    all
}

fn missing_and_extra(all: &mut Vec<Case>) {
    for name in [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.layers.0.linear_attn.A_log",
        "model.layers.0.linear_attn.dt_bias",
        "model.layers.2.linear_attn.conv1d.weight",
        "model.layers.2.linear_attn.norm.weight",
        "model.layers.1.linear_attn.in_proj_b.weight",
        "model.layers.3.self_attn.k_norm.weight",
        "model.layers.3.self_attn.o_proj.weight",
        "model.layers.3.mlp.down_proj.weight",
    ] {
        let canonical = name.strip_prefix("model.").unwrap();
        all.push(case(format!("no {name}"), Base::Dense, &["1 of 56 parameters", canonical], move |m| remove(m, name)));
    }
    all.push(case("a whole layer missing", Base::Dense, &["14 of 56", "layers.1.", "..."], |m| {
        m.tensors.retain(|t| !t.name.starts_with("model.layers.1."));
    }));
    all.push(case(
        "no tensor of the model but the head",
        Base::Dense,
        &["55 of 56", "embed_tokens.weight [40, 16]"],
        |m| {
            m.tensors.retain(|t| t.name == HEAD);
        },
    ));
    all.push(case("vision tensors alone", Base::Tied, &["55 of 55", "embed_tokens.weight [40, 16]"], |m| {
        m.tensors.clear();
        m.add("model.visual.pos_embed.weight", "BF16", &[16], 32);
    }));
    let extras = [
        ("model.layers.0.mlp.gate_proj.bias", "not a parameter"),
        ("model.layers.4.input_layernorm.weight", "num_hidden_layers is 4"),
        ("model.layers.00.input_layernorm.weight", "not a parameter"),
        ("model.layers.0.self_attn.q_proj.weight", "not a parameter"),
        ("model.layers.0.mlp.experts.0.gate_proj.weight", "dense model"),
        ("model.layers.0.mlp.experts.gate_up_proj", "not a parameter"),
        ("model.layers.0.linear_attn.in_proj_qkvz.weight", "Qwen3-Next"),
        ("model.layers.0.linear_attn.in_proj_ba.weight", "Qwen3-Next"),
        ("model.layers.0.mlp.gate_proj.weight_scale", "quantised"),
        ("model.layers.3.self_attn.k_scale", "quantised"),
        ("model.layers.0.linear_attn.conv1d.bias", "not a parameter"),
        ("model.lm_head.weight", "no prefix"),
        ("layers.0.input_layernorm.weight", "no prefix"),
        ("transformer.h.0.attn.weight", "no prefix"),
        ("norm.weight", "no prefix"),
        ("lm_head.bias", "no prefix"),
        ("visual", "no prefix"),
        ("mtp", "no prefix"),
        ("Model.norm.weight", "no prefix"),
        ("model.\u{1b}[2Jevil\n", "not a parameter"),
    ];
    for (name, says) in extras {
        all.push(case(format!("also {name:?}"), Base::Dense, &["model.safetensors", says], move |m| {
            m.add(name, "BF16", &[16], 32);
        }));
    }
    all.push(case("five of them", Base::Dense, &["(4 more like it)"], |m| {
        (0..5).for_each(|i| m.add(&format!("model.extra.{i}"), "BF16", &[16], 32));
    }));
}

fn shapes(all: &mut Vec<Case>) {
    let shapes: [(&str, &[u64], &str); 14] = [
        (QKV, &[16, 48], "transposed"),
        (Q, &[16, 32], "transposed"),
        (Q, &[16, 16], "asks for [32, 16]"),
        (HEAD, &[16, 40], "transposed"),
        (HEAD, &[39, 16], "asks for [40, 16]"),
        (HEAD, &[640], "asks for [40, 16]"),
        ("model.norm.weight", &[1, 16], "asks for [16]"),
        ("model.norm.weight", &[8], "asks for [16]"),
        ("model.norm.weight", &[], "asks for [16]"),
        ("model.layers.0.linear_attn.A_log", &[1], "asks for [2]"),
        ("model.layers.0.linear_attn.dt_bias", &[3], "asks for [2]"),
        ("model.layers.0.linear_attn.conv1d.weight", &[48, 4], "asks for [48, 1, 4]"),
        ("model.layers.0.linear_attn.conv1d.weight", &[48, 4, 1], "transposed"),
        ("model.layers.0.linear_attn.norm.weight", &[8], "asks for [16]"),
    ];
    for (name, shape, says) in shapes {
        let found = format!("{shape:?}");
        all.push(case(
            format!("{name} {shape:?}"),
            Base::Dense,
            &[name, says, &found, "model.safetensors"],
            move |m| {
                reshape(m, name, shape);
            },
        ));
    }
    for (field, value, says) in [
        ("vocab_size", 48, "embed_tokens"),
        ("hidden_size", 24, "embed_tokens"),
        ("intermediate_size", 32, "gate_proj"),
        ("num_attention_heads", 4, "q_proj"),
        ("head_dim", 16, "q_norm"),
        ("linear_num_value_heads", 4, "conv1d"),
        ("linear_value_head_dim", 8, "conv1d"),
        ("linear_conv_kernel_dim", 3, "conv1d"),
    ] {
        all.push(case(format!("another model's {field}"), Base::Dense, &[says, "config.json asks for"], move |m| {
            m.config[field] = json!(value);
        }));
    }
    for (layers, says) in [(5, "parameters have no tensor"), (3, "num_hidden_layers is 3")] {
        all.push(case(format!("{layers} layers in the config"), Base::Dense, &[says], move |m| {
            m.config["num_hidden_layers"] = json!(layers);
            m.config["layer_types"] = json!(null);
        }));
    }
    all.push(case("the mixers in another order", Base::Dense, &["layers.0.linear_attn", "not a parameter"], |m| {
        m.config["layer_types"] = json!(["full_attention", "linear_attention", "linear_attention", "linear_attention"]);
    }));
}

fn dtypes(all: &mut Vec<Case>) {
    for (dtype, size, says) in [
        ("F16", 2, "has lost small values"),
        ("F64", 8, "save it as F32"),
        ("U8", 1, "looks quantised"),
        ("F8_E4M3", 1, "looks quantised"),
        ("F8_E5M2", 1, "looks quantised"),
        ("I8", 1, "not a weight's dtype"),
        ("I32", 4, "not a weight's dtype"),
        ("BOOL", 1, "not a weight's dtype"),
        ("C64", 8, "not a weight's dtype"),
    ] {
        all.push(case(format!("{dtype} weights"), Base::Dense, &[QKV, dtype, "BF16 or F32", says], move |m| {
            let t = m.tensor(QKV);
            t.dtype = dtype.into();
            t.bytes = vec![0; 48 * 16 * size];
        }));
    }
    all.push(case("an F16 A_log", Base::Dense, &["A_log", "F16"], |m| {
        m.tensor("model.layers.0.linear_attn.A_log").dtype = "F16".into();
    }));
    all.push(case("packed nibbles", Base::Dense, &["U8", QKV], |m| {
        let t = m.tensor(QKV);
        (t.dtype, t.shape, t.bytes) = ("U8".into(), vec![48, 8], vec![0; 384]);
    }));
}

fn experts(all: &mut Vec<Case>) {
    all.push(case("one expert missing", Base::Moe, &["3 of", "layers.1.mlp.experts.2."], |m| {
        m.tensors.retain(|t| !t.name.starts_with("model.layers.1.mlp.experts.2."));
    }));
    all.push(case("one matrix of an expert", Base::Moe, &["1 of", "experts.1.up_proj.weight [8, 16]"], |m| {
        remove(m, "model.layers.3.mlp.experts.1.up_proj.weight");
    }));
    all.push(case("an expert too many", Base::Moe, &["experts.3.", "num_experts is 3"], |m| {
        m.add("model.layers.1.mlp.experts.3.up_proj.weight", "BF16", &[8, 16], 256);
    }));
    all.push(case("shared_experts for shared_expert", Base::Moe, &["shared_experts"], |m| {
        m.tensor("model.layers.0.mlp.shared_expert.up_proj.weight").name =
            "model.layers.0.mlp.shared_experts.up_proj.weight".into();
    }));
    all.push(case("a dense MLP in a MoE layer", Base::Moe, &["model.layers.0.mlp.up_proj.weight"], |m| {
        m.add("model.layers.0.mlp.up_proj.weight", "BF16", &[8, 16], 256);
    }));
    all.push(case("a quarter of a million experts in the config", Base::Moe, &["parameters have no tensor"], |m| {
        m.config["num_hidden_layers"] = json!(4096);
        m.config["layer_types"] = json!(null);
        m.config["num_experts"] = json!(64);
        m.tensors.retain(|t| !t.name.ends_with("mlp.gate.weight"));
    }));
    let fused = |name: &str, says: &[&str], f: fn(&mut Maker)| {
        case(format!("fused: {name}"), Base::Moe, says, move |m| {
            m.fuse();
            f(m);
        })
    };
    all.push(fused("no down_proj", &["3 of", "layers.2.mlp.experts.0.down_proj.weight"], |m| {
        remove(m, "model.layers.2.mlp.experts.down_proj");
    }));
    all.push(fused("no gate_up_proj", &["6 of", "layers.2.mlp.experts.0.gate_proj.weight"], |m| remove(m, GATE_UP)));
    all.push(fused("two experts of three", &[GATE_UP, "[3, 16, 16]"], |m| reshape(m, GATE_UP, &[2, 16, 16])));
    all.push(fused("gate only", &[GATE_UP, "[3, 16, 16]"], |m| reshape(m, GATE_UP, &[3, 8, 16])));
    all.push(fused("two dimensions", &[GATE_UP, "[3, 16, 16]"], |m| reshape(m, GATE_UP, &[48, 16])));
    all.push(fused("down transposed", &["experts.down_proj", "transposed"], |m| {
        reshape(m, "model.layers.1.mlp.experts.down_proj", &[3, 8, 16]);
    }));
    all.push(fused("F16", &[GATE_UP, "F16"], |m| m.tensor(GATE_UP).dtype = "F16".into()));
    all.push(fused("with .weight", &["experts.gate_up_proj.weight", "not a parameter"], |m| {
        m.tensor(GATE_UP).name = format!("{GATE_UP}.weight");
    }));
    all.push(fused("of a layer that is not there", &["num_hidden_layers is 4"], |m| {
        m.add("model.layers.4.mlp.experts.down_proj", "BF16", &[3, 16, 8], 768);
    }));
    all.push(fused(
        "and one expert apart",
        &["layers.2.mlp.experts.1.up_proj.weight", "and so is", "remove one"],
        |m| {
            m.add("model.layers.2.mlp.experts.1.up_proj.weight", "BF16", &[8, 16], 256);
        },
    ));
}

fn ties_and_prefixes(all: &mut Vec<Case>) {
    all.push(case("tied, and a head", Base::Tied, &[HEAD, "tie_word_embeddings true"], |m| {
        m.add(HEAD, "BF16", &[40, 16], 1280);
    }));
    all.push(case("untied, and no head", Base::Dense, &[HEAD, "tie_word_embeddings"], |m| remove(m, HEAD)));
    all.push(case("no flag, and no head", Base::Tied, &[HEAD, "tie_word_embeddings"], |m| {
        m.config.as_object_mut().unwrap().remove("tie_word_embeddings");
    }));
    for prefix in ["model.language_model.", "language_model.model."] {
        all.push(case(
            format!("norm.weight also under {prefix}"),
            Base::Dense,
            &["norm.weight", "and so is"],
            move |m| {
                m.add(&format!("{prefix}norm.weight"), "BF16", &[16], 32);
            },
        ));
    }
    all.push(case(
        "the head twice",
        Base::Dense,
        &["language_model.lm_head.weight", "and so is \"lm_head.weight\""],
        |m| {
            m.add("language_model.lm_head.weight", "BF16", &[40, 16], 1280);
        },
    ));
    for prefix in ["", "transformer.", "model.text_model.", "language_model."] {
        let says = if prefix == "model.text_model." { "not a parameter" } else { "no prefix" };
        all.push(case(format!("all under {prefix:?}"), Base::Dense, &["embed_tokens.weight", says], move |m| {
            m.prefix(prefix);
        }));
    }
}
