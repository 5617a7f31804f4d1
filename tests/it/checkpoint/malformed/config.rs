//! config.json with one field wrong.

use serde_json::{Value, json};

use super::super::maker::{Maker, nested};
use super::{Base, Case, Kind, replace, rewrite};

/// Integer fields with their accepted range, of a dense and of a MoE model.
const INTS: [(&str, Base, i64, i64); 16] = [
    ("hidden_size", Base::Dense, 8, 1 << 20),
    ("num_hidden_layers", Base::Dense, 1, 4096),
    ("vocab_size", Base::Dense, 2, 1 << 24),
    ("num_attention_heads", Base::Dense, 1, 4096),
    ("num_key_value_heads", Base::Dense, 1, 4096),
    ("head_dim", Base::Dense, 8, 1024),
    ("linear_num_key_heads", Base::Dense, 1, 4096),
    ("linear_num_value_heads", Base::Dense, 1, 4096),
    ("linear_key_head_dim", Base::Dense, 8, 1024),
    ("linear_value_head_dim", Base::Dense, 8, 1024),
    ("linear_conv_kernel_dim", Base::Dense, 2, 16),
    ("intermediate_size", Base::Dense, 8, 1 << 22),
    ("num_experts", Base::Moe, 1, 1 << 16),
    ("num_experts_per_tok", Base::Moe, 1, 1 << 16),
    ("moe_intermediate_size", Base::Moe, 8, 1 << 22),
    ("shared_expert_intermediate_size", Base::Moe, 8, 1 << 22),
];

fn set(name: &str, base: Base, field: &'static str, value: Value, want: Kind, says: &[&str]) -> Case {
    Case::new(format!("{field} = {name}"), base, want, says).make(move |m: &mut Maker| m.config[field] = value.clone())
}

/// A field of the dense config that must be refused as [`Kind::Config`], the message naming it.
fn bad(field: &'static str, value: Value, says: &[&str]) -> Case {
    let says: Vec<&str> = says.iter().copied().chain([field]).collect();
    set(&value.to_string(), Base::Dense, field, value, Kind::Config, &says)
}

fn unsupported(field: &'static str, value: Value, says: &[&str]) -> Case {
    let says: Vec<&str> = says.iter().copied().chain([field, "not supported"]).collect();
    set(&value.to_string(), Base::Dense, field, value, Kind::Unsupported, &says)
}

/// The config's whole text replaced.
fn text(name: &str, text: impl Into<Vec<u8>>, says: &[&str]) -> Case {
    let text = text.into();
    let says: Vec<&str> = says.iter().copied().chain(["config.json"]).collect();
    Case::new(name, Base::Dense, Kind::Checkpoint, &says)
        .bend(move |dir| std::fs::write(dir.join("config.json"), &text).unwrap())
}

fn rope(value: Value, want: Kind, says: &[&str]) -> Case {
    let name = value.to_string();
    Case::new(format!("rope_parameters = {name}"), Base::Dense, want, says)
        .make(move |m: &mut Maker| m.config["rope_parameters"] = value.clone())
}

pub(super) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    integers(&mut all);
    texts(&mut all);
    families(&mut all);
    variants(&mut all);
    relations(&mut all);
    ropes(&mut all);
    nesting(&mut all);
    all
}

fn integers(all: &mut Vec<Case>) {
    for (field, base, min, max) in INTS {
        let range = format!("from {min} to {max}");
        let values = [
            json!(min - 1),
            json!(max + 8),
            json!(-8),
            json!(16.5),
            json!("16"),
            json!(true),
            json!([16]),
            json!(u64::MAX),
            json!(1e300),
        ];
        for v in values {
            all.push(set(&v.to_string(), base, field, v.clone(), Kind::Config, &[field, &range]));
        }
    }
    for (field, v) in [("hidden_size", 17), ("head_dim", 12), ("intermediate_size", 33), ("linear_key_head_dim", 9)] {
        all.push(bad(field, json!(v), &["a multiple of 8", &v.to_string()]));
    }
    for v in [json!(0), json!(-5), json!((1u64 << 28) + 1), json!("long")] {
        all.push(bad("max_position_embeddings", v, &["from 1 to 268435456"]));
    }
    for v in [json!(0), json!(-1e-6), json!(1.5), json!("1e-6"), json!(1e-40), json!([])] {
        all.push(bad("rms_norm_eps", v, &["from 1e-12 to 0.1"]));
    }
    for v in [json!(40), json!([3, 41]), json!(-1), json!("3"), json!([1.5]), json!([[1]]), json!(u64::MAX)] {
        all.push(bad("eos_token_id", v, &["from 0 to 39"]));
    }
    for v in [json!(1), json!("true"), json!([])] {
        all.push(bad("tie_word_embeddings", v, &["true or false"]));
    }
}

fn texts(all: &mut Vec<Case>) {
    all.push(text("empty", "", &["cut short"]));
    all.push(text("only white space", " \n\t ", &["cut short"]));
    all.push(text("null", "null", &["object"]));
    all.push(text("a list", "[{}]", &["object"]));
    all.push(text("a string", "\"qwen3_5\"", &["object"]));
    all.push(text("not JSON", "hidden_size = 16", &["JSON"]));
    all.push(text("two documents", "{} {}", &["trailing"]));
    all.push(text("not UTF-8", b"{\"model_type\": \"\xff\xfe\"}".to_vec(), &["UTF-8", "16"]));
    all.push(text("a byte order mark", b"\xef\xbb\xbf{}".to_vec(), &["JSON"]));
    all.push(text("10,000 lists deep", format!("{}{}", "[".repeat(10_000), "]".repeat(10_000)), &["nested", "32"]));
    all.push(text("100,000 objects deep", "{\"a\":".repeat(100_000), &["nested", "32"]));
    all.push(text("a comment", "{\"a\": 1 /* one */}", &["JSON"]));
    all.push(text("a trailing comma", "{\"hidden_size\": 16,}", &["JSON"]));
    all.push(text("a number out of range", "{\"hidden_size\": 1e999}", &["out of range"]));
    all.push(text("a lone surrogate", "{\"model_type\": \"\\ud800\"}", &["JSON"]));
    all.push(text("larger than any config", vec![b' '; (4 << 20) + 1], &["4194305", "4194304"]));
    for (name, value) in [("NaN", "NaN"), ("Infinity", "Infinity"), ("-Infinity", "-Infinity"), ("hexadecimal", "0x10")]
    {
        for field in ["\"rms_norm_eps\":1e-6", "\"hidden_size\":16"] {
            let key = field.split(':').next().unwrap();
            let case = Case::new(
                format!("{key} = {name}"),
                Base::Dense,
                Kind::Checkpoint,
                &["config.json", "line 1", key.trim_matches('"')],
            );
            all.push(case.bend(move |dir| replace(dir, "config.json", field, &format!("{key}:{value}"))));
        }
    }
    let twice = Case::new("a key twice", Base::Dense, Kind::Checkpoint, &["\"hidden_size\"", "twice"]);
    all.push(twice.bend(|dir| replace(dir, "config.json", "{", "{\"hidden_size\":32,")));
    for cut in [1, 2, 10, 100, 300] {
        let case =
            Case::new(format!("cut {cut} bytes before its end"), Base::Dense, Kind::Checkpoint, &["config.json"]);
        all.push(case.bend(move |dir| {
            rewrite(dir, "config.json", |mut b| {
                b.truncate(b.len() - cut);
                b
            });
        }));
    }
    let gone = Case::new("no config.json", Base::Dense, Kind::Checkpoint, &["no config.json"]);
    all.push(gone.bend(|dir| std::fs::remove_file(dir.join("config.json")).unwrap()));
    let folder = Case::new("config.json is a folder", Base::Dense, Kind::Checkpoint, &["config.json", "regular file"]);
    all.push(folder.bend(|dir| {
        std::fs::remove_file(dir.join("config.json")).unwrap();
        std::fs::create_dir(dir.join("config.json")).unwrap();
    }));
    let cyclic = Case::new("config.json is a link to itself", Base::Dense, Kind::Io, &["config.json"]);
    all.push(cyclic.bend(|dir| {
        std::fs::remove_file(dir.join("config.json")).unwrap();
        std::os::unix::fs::symlink("config.json", dir.join("config.json")).unwrap();
    }));
}

fn families(all: &mut Vec<Case>) {
    for kind in ["qwen4_exp", "qwen3_next", "qwen3", "llama", "qwen3_5_moe_text2", "", "\u{1b}[31mred\nline"] {
        let case = unsupported("model_type", json!(kind), &["qwen3_5_moe_text"]);
        all.push(case);
    }
    for class in ["Qwen4ExpForConditionalGeneration", "Qwen3NextForCausalLM", "LlamaForCausalLM"] {
        all.push(unsupported("architectures", json!([class]), &[class, "Qwen3_5ForCausalLM"]));
    }
    all.push(bad("architectures", json!([7]), &["list of strings"]));
    all.push(bad("architectures", json!("Qwen3_5ForCausalLM"), &["must be a list"]));
    all.push(bad("architectures", json!(["Qwen3_5MoeForCausalLM"]), &["Moe", "Dense", "model_type"]));
    all.push(bad("model_type", json!(35), &["must be a string"]));
    let none = Case::new("neither class nor type", Base::Dense, Kind::Config, &["model_type", "absent"]);
    all.push(none.make(|m| {
        m.config["model_type"] = Value::Null;
        m.config["architectures"] = Value::Null;
    }));
}

fn variants(all: &mut Vec<Case>) {
    all.push(unsupported("hidden_act", json!("gelu"), &["silu"]));
    all.push(unsupported("attention_bias", json!(true), &["bias"]));
    all.push(unsupported("attn_output_gate", json!(false), &["gated"]));
    all.push(unsupported("norm_topk_prob", json!(false), &["renormalised"]));
    all.push(unsupported("mlp_only_layers", json!([0]), &["experts"]));
    all.push(unsupported("decoder_sparse_step", json!(2), &["experts"]));
    all.push(bad("output_gate_type", json!("tanh"), &["tanh", "swish", "sigmoid"]));
    all.push(bad("output_gate_type", json!(1), &["string"]));
    all.push(bad("hidden_act", json!(["silu"]), &["string"]));
    all.push(bad("mlp_only_layers", json!("none"), &["list"]));
    for (q, says) in [
        (json!({"quant_method": "bitsandbytes"}), "bitsandbytes"),
        (json!({"quant_method": "gptq", "bits": 4}), "quant_method \"gptq\""),
        (json!({}), "no quant_method"),
    ] {
        all.push(unsupported("quantization_config", q, &[says, "BF16 and F32"]));
    }
    all.push(unsupported("compression_config", json!({"format": "float-quantized"}), &["no quant_method"]));
    all.push(bad("quantization_config", json!("fp8"), &["object"]));
    let modelopt = |name: &str, text: &'static str, want, says: &[&str]| {
        Case::new(name, Base::Dense, want, says)
            .bend(move |dir| std::fs::write(dir.join("hf_quant_config.json"), text).unwrap())
    };
    let algo = r#"{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A8_AWQ"}}"#;
    all.push(modelopt("hf_quant_config.json", algo, Kind::Unsupported, &["quantization.quant_algo", "W4A8_AWQ"]));
    let kv = r#"{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "NVFP4"}}"#;
    all.push(modelopt("its KV cache only", kv, Kind::Unsupported, &["kv_cache_quant_algo", "NVFP4"]));
    all.push(modelopt("hf_quant_config.json cut", "{\"quantization\"", Kind::Checkpoint, &["hf_quant_config.json"]));
}

fn relations(all: &mut Vec<Case>) {
    all.push(bad("num_key_value_heads", json!(3), &["must divide num_attention_heads 2"]));
    all.push(bad("linear_num_value_heads", json!(3), &[]).make(|m| {
        m.config["linear_num_value_heads"] = json!(3);
        m.config["linear_num_key_heads"] = json!(2);
    }));
    all.push(set("4 of 3", Base::Moe, "num_experts_per_tok", json!(4), Kind::Config, &["num_experts 3"]));
    let many = Case::new("experts in all layers", Base::Moe, Kind::Config, &["num_experts", "262144 in all"]);
    all.push(many.make(|m| {
        m.config["num_experts"] = json!(65_536);
        m.config["num_hidden_layers"] = json!(4096);
        m.config["layer_types"] = Value::Null;
    }));
    let huge = Case::new("17 trillion parameters", Base::Dense, Kind::Config, &["parameters", "at most"]);
    all.push(huge.make(|m| {
        m.config["hidden_size"] = json!(1 << 20);
        m.config["intermediate_size"] = json!(1 << 22);
        m.config["num_hidden_layers"] = json!(4096);
        m.config["layer_types"] = Value::Null;
    }));
    let full = "full_attention";
    let types = [
        (json!([full, full, full]), "3 entries"),
        (json!([full, full, full, full, full]), "5 entries"),
        (json!([]), "0 entries"),
        (json!([full, full, full, "sliding_attention"]), "layer_types[3]"),
        (json!([full, 7, full, full]), "layer_types[1]"),
        (json!([full, [full], full, full]), "layer_types[1]"),
        (json!(full), "must be a list"),
        (json!({"0": full}), "must be a list"),
    ];
    for (v, says) in types {
        all.push(bad("layer_types", v, &[says]));
    }
    for v in [json!(0), json!(-4), json!(5000), json!("4")] {
        all.push(bad("full_attention_interval", v, &["from 1 to 4096"]));
    }
}

fn ropes(all: &mut Vec<Case>) {
    let bad = |v: Value, says: &[&str]| rope(v, Kind::Config, says);
    for v in [json!(0), json!(-1e4), json!("1e7"), json!(1e300), json!(0.5)] {
        all.push(bad(json!({"rope_theta": v}), &["rope_parameters.rope_theta", "from 1 to 1e12"]));
    }
    for v in [json!(0), json!(1.5), json!(-0.25), json!("0.25")] {
        all.push(bad(json!({"partial_rotary_factor": v}), &["rope_parameters.partial_rotary_factor"]));
    }
    for v in [json!(0.1), json!(0.4)] {
        all.push(bad(json!({"partial_rotary_factor": v}), &["partial_rotary_factor", "head_dim 8", "even"]));
    }
    for kind in ["linear", "dynamic", "longrope", "llama3", "YARN"] {
        let says = ["rope_parameters.rope_type", kind, "yarn"];
        all.push(rope(json!({"rope_type": kind, "factor": 4.0}), Kind::Unsupported, &says));
    }
    all.push(bad(json!({"rope_type": 1}), &["rope_parameters.rope_type", "string"]));
    all.push(bad(json!([1e7]), &["rope_parameters", "object"]));
    all.push(bad(json!({"full_attention": {"rope_theta": 1e7}}), &["rope_parameters.full_attention"]));
    let yarn = |field: &str, v: Value| {
        let mut r = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024});
        r[field] = v;
        r
    };
    all.push(bad(json!({"rope_type": "yarn"}), &["rope_parameters.factor", "absent"]));
    for (field, v) in [
        ("factor", json!(0.5)),
        ("factor", json!(1e6)),
        ("factor", json!("4")),
        ("original_max_position_embeddings", json!(0)),
        ("original_max_position_embeddings", json!(1.5)),
        ("attention_factor", json!(0)),
        ("attention_factor", json!(-1)),
        ("beta_fast", json!(0)),
        ("beta_slow", json!(1e9)),
        ("truncate", json!(false)),
        ("mscale", json!(1.0)),
    ] {
        all.push(bad(yarn(field, v), &[&format!("rope_parameters.{field}")]));
    }
    all.push(bad(yarn("beta_fast", json!(0.5)), &["beta_fast", "beta_slow"]));
    let long = json!({"rope_type": "yarn", "factor": 1024, "original_max_position_embeddings": 1 << 28});
    all.push(bad(long, &["factor", "tokens"]));
    let old = Case::new("rope_scaling dynamic", Base::Dense, Kind::Unsupported, &["rope_scaling.rope_type", "dynamic"]);
    all.push(old.make(|m| {
        m.config["rope_parameters"] = Value::Null;
        m.config["rope_scaling"] = json!({"type": "dynamic", "factor": 2.0});
    }));
}

/// Fields inside `text_config` are named with their path.
fn nesting(all: &mut Vec<Case>) {
    let inner = |name: &str, want, says: &[&str], f: fn(&mut Value)| {
        Case::new(format!("nested: {name}"), Base::Dense, want, says).make(move |m| {
            m.config = nested(&m.config);
            f(&mut m.config);
        })
    };
    all.push(inner("size", Kind::Config, &["text_config.hidden_size"], |c| {
        c["text_config"]["hidden_size"] = json!(-1);
    }));
    all.push(inner("text_config a list", Kind::Config, &["text_config", "object"], |c| {
        c["text_config"] = json!([]);
    }));
    all.push(inner("type", Kind::Unsupported, &["text_config.model_type", "qwen4_exp_text"], |c| {
        c["text_config"]["model_type"] = json!("qwen4_exp_text");
    }));
    all.push(inner("outer type", Kind::Unsupported, &["minicpmv4_6"], |c| {
        c["model_type"] = json!("minicpmv4_6");
    }));
    all.push(inner("types differ", Kind::Config, &["text_config.model_type", "Moe", "Dense"], |c| {
        c["text_config"]["model_type"] = json!("qwen3_5_moe_text");
    }));
    all.push(inner("quantised inside", Kind::Unsupported, &["text_config.quantization_config", "fp8"], |c| {
        c["text_config"]["quantization_config"] = json!({"quant_method": "fp8"});
    }));
    all.push(inner("quantised outside", Kind::Unsupported, &["quantization_config", "fp8"], |c| {
        c["quantization_config"] = json!({"quant_method": "fp8"});
    }));
    all.push(inner("eos outside", Kind::Config, &[": eos_token_id", "from 0 to 39"], |c| {
        c["eos_token_id"] = json!([400]);
    }));
    all.push(inner("heads", Kind::Config, &["text_config.num_key_value_heads"], |c| {
        c["text_config"]["num_key_value_heads"] = json!(3);
    }));
    all.push(inner("fields outside are not read", Kind::Config, &["layer_types", "4 entries"], |c| {
        c["text_config"]["num_hidden_layers"] = Value::Null;
        c["num_hidden_layers"] = json!(4);
    }));
}
