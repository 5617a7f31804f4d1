//! Valid quantised checkpoints: what each producer wrote, and every variation that means the same.

use std::fs;

use highwater::checkpoint::{Checkpoint, SkipRule, Survey};
use highwater::ops::scheme::{ActScheme, Grain, Scheme};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::maker::{Maker, Tensor, moe_config};
use super::{CASES, counts, fixture, folder, kind, open, read_all};

fn counted(c: &Checkpoint) -> Vec<(String, usize)> {
    counts(c.modules())
}

fn opened(dir: &TempDir) -> Checkpoint {
    let c = Checkpoint::open(dir.path()).unwrap_or_else(|e| panic!("{e}"));
    read_all(&c).unwrap_or_else(|e| panic!("{e}"));
    c
}

fn set(list: &[(&str, usize)]) -> Vec<(String, usize)> {
    list.iter().map(|(k, n)| ((*k).to_string(), *n)).collect()
}

#[test]
fn every_fixture_opens_with_every_tensor_accounted_for() {
    // Linear modules of the dense model: 4 mixers' and 12 of MLPs, and the head; of the MoE model 8 experts a layer.
    let expected: [(&str, &[(&str, usize)]); 13] = [
        ("ct_dense_nvfp4", &[("bf16", 7), ("nvfp4-divides nvfp4", 25)]),
        ("ct_fp8_block", &[("bf16", 7), ("fp8-block group", 25)]),
        ("ct_fp8_dynamic", &[("bf16", 15), ("fp8-channel token", 121)]),
        ("ct_fp8_static", &[("bf16", 15), ("fp8-tensor tensor", 121)]),
        ("ct_mfree_ignore_re", &[("bf16", 15), ("fp8-channel token", 13), ("nvfp4-divides", 108)]),
        ("ct_mixed_lmhead_fp8", &[("bf16", 26), ("fp8-channel token", 14), ("nvfp4-divides nvfp4", 96)]),
        ("ct_nvfp4", &[("bf16", 15), ("nvfp4-divides nvfp4", 121)]),
        ("ct_nvfp4a16", &[("bf16", 15), ("nvfp4-divides", 121)]),
        ("hf_fp8_block", &[("bf16", 15), ("fp8-block group", 49)]),
        ("mo_fp8", &[("bf16", 15), ("fp8-tensor tensor", 121)]),
        ("mo_fp8_pc_pt", &[("bf16", 15), ("fp8-channel token", 121)]),
        ("mo_mixed", &[("bf16", 15), ("fp8-tensor tensor", 13), ("nvfp4-multiplies nvfp4", 108)]),
        ("mo_nvfp4", &[("bf16", 15), ("nvfp4-multiplies nvfp4", 121)]),
    ];
    assert_eq!(expected.map(|(case, _)| case), CASES);
    for (case, expected) in expected {
        let c = open(case);
        assert_eq!(counted(&c), set(expected), "{case}");
        read_all(&c).unwrap_or_else(|e| panic!("{case}: {e}"));
        // Every byte of data is a parameter's, or skipped by a rule.
        let maker = fixture(case);
        let all: u64 = maker.tensors.iter().map(|t| t.bytes.len() as u64).sum();
        let skipped = |rule| c.skipped().iter().filter(|s| s.rule == rule).map(|s| s.bytes).sum::<u64>();
        assert_eq!(c.bytes() + skipped(SkipRule::Vision), all, "{case}");
        assert_eq!(skipped(SkipRule::Vision) > 0, case == "ct_mixed_lmhead_fp8", "{case}");
        let of_modules: u64 = c.modules().iter().map(|m| m.bytes).sum();
        assert!(of_modules < c.bytes(), "{case}: embeddings and norms are no linear modules");
        // A module names itself, and its part on disk.
        for m in c.modules() {
            assert_eq!(c.module(&m.name), Some(m), "{case}");
            let verdict = c.verdict(&m.name).unwrap();
            assert_eq!((verdict.scheme, verdict.act), (m.scheme, m.act), "{case}");
            let stored = matches!(m.act, ActScheme::Fp8Tensor | ActScheme::Nvfp4);
            assert_eq!(verdict.input_scale.is_some(), stored, "{case}: {}", m.name);
        }
    }
}

#[test]
fn heads_are_linear_layers_like_any_other() {
    let head = |c: &Checkpoint| kind(c.module("lm_head").unwrap());
    assert_eq!(head(&open("ct_mixed_lmhead_fp8")), "fp8-channel token");
    assert_eq!(head(&open("ct_mfree_ignore_re")), "bf16", "ignore `re:.*lm_head` beats the targets");
    // NVFP4: its tensors are lm_head.weight_packed and so on, and there is no lm_head.weight.
    let mut maker = fixture("ct_nvfp4");
    quantise_head(&mut maker);
    assert_eq!(head(&opened(&maker.write())), "nvfp4-divides nvfp4");
    for t in &mut maker.tensors {
        if t.name.starts_with("lm_head.") {
            t.name = format!("language_model.{}", t.name);
        }
    }
    assert_eq!(head(&opened(&maker.write())), "nvfp4-divides nvfp4");
    maker.config["tie_word_embeddings"] = json!(true);
    let error = Checkpoint::open(maker.write().path()).unwrap_err().to_string();
    assert!(error.contains("lm_head.") && error.contains("tie_word_embeddings"), "{error}");
}

/// Puts the first layer's in_proj_qkv, which has the head's shape, in the head's place.
fn quantise_head(maker: &mut Maker) {
    maker.tensors.retain(|t| t.name != "lm_head.weight");
    let from = "model.layers.0.linear_attn.in_proj_qkv.";
    let copies: Vec<Tensor> = maker
        .tensors
        .iter()
        .filter_map(|t| Some(Tensor { name: format!("lm_head.{}", t.name.strip_prefix(from)?), ..t.clone() }))
        .collect();
    assert!(!copies.is_empty());
    maker.tensors.extend(copies);
    let ignore = maker.config["quantization_config"]["ignore"].as_array_mut().unwrap();
    ignore.retain(|e| e != "lm_head");
}

#[test]
fn names_in_a_config_match_whatever_the_prefix_on_disk() {
    for case in ["ct_fp8_dynamic", "ct_mfree_ignore_re", "mo_mixed", "mo_fp8", "hf_fp8_block"] {
        let expected = counted(&open(case));
        for prefix in ["model.language_model.", "language_model.model."] {
            let mut maker = fixture(case);
            maker.prefix(prefix);
            assert_eq!(counted(&opened(&maker.write())), expected, "{case} on disk under {prefix}");
        }
        let mut maker = fixture(case);
        let q = maker.config["quantization_config"].to_string();
        let q = q.replace("\"model.layers.", "\"model.language_model.layers.");
        maker.config["quantization_config"] = serde_json::from_str(&q).unwrap();
        assert_eq!(counted(&opened(&maker.write())), expected, "{case}, its config under another");
    }
}

#[test]
fn weights_and_scales_may_be_in_different_shards() {
    for case in CASES {
        let expected = counted(&open(case));
        let mut maker = fixture(case);
        // A module's tensors follow one another, so that seven shards taken in turn part them all.
        maker.tensors.sort_by(|a, b| a.name.cmp(&b.name));
        let dir = maker.write_sharded(7);
        let c = opened(&dir);
        assert_eq!(counted(&c), expected, "{case}");
        let m = c.modules().iter().find(|m| !matches!(m.scheme, Scheme::Plain(_))).unwrap();
        let part = |name: &str| c.entry(&format!("{}.{name}", m.name)).map(|e| c.file_of(e).to_path_buf());
        let codes = part("weight").or(part("weight_packed"));
        let scale = part("weight_scale").or(part("weight_scale_inv"));
        assert!(codes.is_some() && scale.is_some() && codes != scale, "{case}: {codes:?}");
    }
}

#[test]
fn modelopts_own_file_is_read_where_the_config_says_nothing() {
    for case in ["mo_fp8", "mo_fp8_pc_pt", "mo_mixed", "mo_nvfp4"] {
        let mut maker = fixture(case);
        maker.config.as_object_mut().unwrap().remove("quantization_config");
        let dir = maker.write();
        assert!(Checkpoint::open(dir.path()).is_err(), "{case}: quantised, and nothing says so");
        fs::copy(folder(case).join("hf_quant_config.json"), dir.path().join("hf_quant_config.json")).unwrap();
        assert_eq!(counted(&opened(&dir)), counted(&open(case)), "{case}");
        // Algorithms are known in any case.
        let text = fs::read_to_string(dir.path().join("hf_quant_config.json")).unwrap().replace("FP8", "fp8");
        fs::write(dir.path().join("hf_quant_config.json"), text).unwrap();
        assert_eq!(counted(&opened(&dir)), counted(&open(case)), "{case}");
    }
    // And nothing else: the config's own wins.
    let dir = fixture("mo_fp8").write();
    fs::copy(folder("mo_nvfp4").join("hf_quant_config.json"), dir.path().join("hf_quant_config.json")).unwrap();
    assert_eq!(counted(&opened(&dir)), counted(&open("mo_fp8")));
}

#[test]
fn a_config_may_stand_in_text_config_and_under_its_older_key() {
    let expected = counted(&open("ct_fp8_static"));
    let mut maker = fixture("ct_fp8_static");
    let q = maker.config.as_object_mut().unwrap().remove("quantization_config").unwrap();
    maker.config["compression_config"] = q.clone();
    assert_eq!(counted(&opened(&maker.write())), expected);
    let mut nested = super::super::maker::nested(&maker.config);
    nested["text_config"]["compression_config"] = Value::Null;
    nested["text_config"]["quantization_config"] = q.clone();
    maker.config = nested;
    assert_eq!(counted(&opened(&maker.write())), expected);
    maker.config["quantization_config"] = q;
    assert_eq!(counted(&opened(&maker.write())), expected, "twice the same");
}

#[test]
fn groups_may_be_presets_and_arguments_may_be_left_out() {
    let with = |case: &str, groups: Value| {
        let mut maker = fixture(case);
        maker.config["quantization_config"]["config_groups"] = groups;
        maker
    };
    for (case, preset) in [
        ("ct_fp8_static", "FP8"),
        ("ct_fp8_dynamic", "FP8_DYNAMIC"),
        ("ct_fp8_block", "fp8_block"),
        ("ct_nvfp4", "NVFP4"),
        ("ct_nvfp4a16", "NVFP4A16"),
    ] {
        let maker = with(case, json!({preset: ["Linear"]}));
        assert_eq!(counted(&opened(&maker.write())), counted(&open(case)), "{case}");
    }
    // The strategy follows from group_size: none is by tensor, -1 by channel, 16 of 4-bit floats is NVFP4.
    let args = |bits: u64, group: Value| json!({"num_bits": bits, "type": "float", "group_size": group});
    for (case, bits, group, input) in [
        ("ct_fp8_static", 8, Value::Null, json!({"num_bits": 8, "type": "float", "dynamic": false})),
        ("ct_fp8_dynamic", 8, json!(-1), json!({"num_bits": 8, "type": "FLOAT", "dynamic": true, "strategy": "token"})),
        ("ct_nvfp4a16", 4, json!(16), Value::Null),
    ] {
        let group = json!({"targets": ["Linear"], "weights": args(bits, group), "input_activations": input});
        let mut maker = with(case, json!({"g": group}));
        assert_eq!(counted(&opened(&maker.write())), counted(&open(case)), "{case}");
        for format in [json!("mixed-precision"), Value::Null] {
            maker.config["quantization_config"]["format"] = format;
            assert_eq!(counted(&opened(&maker.write())), counted(&open(case)), "{case}");
        }
    }
    // An older spelling of blocks, an older name of the format, and keys nobody knows at the top.
    let mut maker = fixture("ct_fp8_block");
    let q = &mut maker.config["quantization_config"];
    q["config_groups"]["group_0"]["weights"]["block_structure"] = json!("128x128");
    q["config_groups"]["group_0"]["format"] = json!("naive-quantized");
    q["format"] = json!("naive-quantized");
    q["a_key_of_tomorrow"] = json!({"x": 1});
    assert_eq!(counted(&opened(&maker.write())), counted(&open("ct_fp8_block")));
    // Weights alone.
    let mut maker = fixture("ct_fp8_dynamic");
    maker.config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = Value::Null;
    assert_eq!(counted(&opened(&maker.write())), set(&[("bf16", 15), ("fp8-channel", 121)]));
}

#[test]
fn names_on_disk_say_which_exporter_wrote_an_nvfp4_module() {
    // A compressed-tensors config over modelopt's tensors, and the other way round.
    let mut maker = fixture("mo_nvfp4");
    maker.config["quantization_config"] = fixture("ct_nvfp4").config["quantization_config"].clone();
    assert_eq!(counted(&opened(&maker.write())), set(&[("bf16", 15), ("nvfp4-multiplies nvfp4", 121)]));
    let mut maker = fixture("ct_nvfp4");
    maker.config["quantization_config"] = fixture("mo_nvfp4").config["quantization_config"].clone();
    assert_eq!(counted(&opened(&maker.write())), set(&[("bf16", 15), ("nvfp4-divides nvfp4", 121)]));
    let mut maker = fixture("ct_nvfp4a16");
    maker.config["quantization_config"] = json!({"quant_method": "modelopt", "quant_algo": "w4a16_nvfp4",
        "ignore": ["lm_head", "*.mlp.gate", "*shared_expert_gate", "*in_proj_[ab]"]});
    assert_eq!(counted(&opened(&maker.write())), set(&[("bf16", 15), ("nvfp4-divides", 121)]));
}

#[test]
fn scales_may_have_any_of_their_shapes() {
    let reshaped = |case: &str, last: &str, to: fn(&[u64]) -> Vec<u64>| {
        let mut maker = fixture(case);
        maker.tensors.iter_mut().filter(|t| t.name.ends_with(last)).for_each(|t| t.shape = to(&t.shape));
        assert_eq!(counted(&opened(&maker.write())), counted(&open(case)), "{case} {last}");
    };
    reshaped("ct_fp8_static", ".weight_scale", |_| vec![]);
    reshaped("ct_fp8_static", ".input_scale", |_| vec![]);
    reshaped("mo_fp8", ".weight_scale", |_| vec![1]);
    reshaped("ct_fp8_dynamic", ".weight_scale", |s| vec![s[0]]);
    reshaped("mo_fp8_pc_pt", ".weight_scale", |s| vec![s[0], 1]);
    reshaped("ct_nvfp4", ".weight_global_scale", |_| vec![]);
    reshaped("mo_nvfp4", ".weight_scale_2", |_| vec![1]);
    reshaped("ct_fp8_block", ".weight_scale", |s| vec![s[0], 1, s[1], 1]);
}

#[test]
fn modelopts_blocks_have_four_dimensions_or_none() {
    // No fixture of this one: the same codes and grids as compressed-tensors', in modelopt's f32 and shapes.
    let mut maker = fixture("ct_fp8_block");
    maker.config["quantization_config"] = json!({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo",
        "ignore": ["lm_head", "*in_proj_a", "*in_proj_b"], "producer": {"name": "modelopt", "version": "0.47.0"}});
    let mut scalars = 0;
    for t in maker.tensors.iter_mut().filter(|t| t.name.ends_with(".weight_scale")) {
        t.dtype = "F32".into();
        t.bytes = t.bytes.as_chunks::<2>().0.iter().flat_map(|b| [0, 0, b[0], b[1]]).collect();
        t.shape = if t.shape == [1, 1] { vec![] } else { vec![t.shape[0], 1, t.shape[1], 1] };
        scalars += usize::from(t.shape.is_empty());
    }
    assert!(scalars > 0, "a weight that fits one block is among them");
    let c = opened(&maker.write());
    assert_eq!(counted(&c), set(&[("bf16", 7), ("fp8-block", 25)]));
    let peer = open("ct_fp8_block");
    for m in c.modules().iter().filter(|m| m.scheme == Scheme::Fp8(Grain::Block)) {
        assert_eq!(c.block_scales(&m.name).unwrap(), peer.block_scales(&m.name).unwrap(), "{}", m.name);
    }
}

#[test]
fn layers_may_differ_within_one_role() {
    // The last layer's MLP in FP8, the others in NVFP4, named by pattern, as the 27B checkpoints of unsloth have it.
    let mut maker = fixture("ct_dense_nvfp4");
    let fp8 = fixture("ct_fp8_dynamic");
    let mut groups = maker.config["quantization_config"]["config_groups"].take();
    groups["group_0"]["targets"] = json!([r"re:.*layers\.[0-2]\.mlp\..*", r"re:.*attn\..*_proj.*"]);
    groups["group_1"] = fp8.config["quantization_config"]["config_groups"]["group_0"].clone();
    groups["group_1"]["targets"] = json!([r"re:.*layers\.3\.mlp\..*"]);
    groups["group_1"]["format"] = json!("float-quantized");
    maker.config["quantization_config"]["config_groups"] = groups;
    maker.config["quantization_config"]["format"] = json!("mixed-precision");
    let stems: Vec<(String, u64, u64)> = maker
        .tensors
        .iter()
        .filter(|t| t.name.starts_with("model.layers.3.mlp.") && t.name.ends_with("weight_packed"))
        .map(|t| (t.name.trim_end_matches("_packed").to_owned(), t.shape[0], 2 * t.shape[1]))
        .collect();
    assert_eq!(stems.len(), 3);
    maker.tensors.retain(|t| !t.name.starts_with("model.layers.3.mlp."));
    for (weight, n, k) in stems {
        maker.add(&weight, "F8_E4M3", &[n, k], (n * k) as usize);
        maker.add(&format!("{weight}_scale"), "F32", &[n, 1], 0);
        maker.tensors.last_mut().unwrap().bytes = 1f32.to_le_bytes().repeat(n as usize);
    }
    let c = opened(&maker.write());
    assert_eq!(counted(&c), set(&[("bf16", 7), ("fp8-channel token", 3), ("nvfp4-divides nvfp4", 22)]));
    assert_eq!(kind(c.module("layers.2.mlp.up_proj").unwrap()), "nvfp4-divides nvfp4");
    assert_eq!(kind(c.module("layers.3.mlp.up_proj").unwrap()), "fp8-channel token");
}

#[test]
fn a_name_beats_a_class_and_ignore_beats_both() {
    // "Linear" says one thing of all, a pattern another of some: both readers of such files take the pattern.
    let mut maker = fixture("ct_mixed_lmhead_fp8");
    let q = &mut maker.config["quantization_config"];
    q["config_groups"]["group_0"]["targets"] = json!(["Linear"]);
    let expected = counted(&open("ct_mixed_lmhead_fp8"));
    assert_eq!(counted(&opened(&maker.write())), expected);
    // The same scheme twice is no quarrel.
    let q = &mut maker.config["quantization_config"];
    q["config_groups"]["group_2"] = q["config_groups"]["group_0"].clone();
    assert_eq!(counted(&opened(&maker.write())), expected);
}

#[test]
fn a_router_under_a_class_is_what_it_is_on_disk() {
    // transformers 5 and vLLM disagree whether the router is a "Linear", and exporters leave it out of `ignore`.
    for case in ["ct_fp8_dynamic", "mo_fp8", "mo_nvfp4"] {
        let mut maker = fixture(case);
        let ignore = maker.config["quantization_config"]["ignore"].as_array_mut().unwrap();
        ignore.retain(|e| !e.as_str().unwrap().ends_with(".mlp.gate"));
        assert_eq!(counted(&opened(&maker.write())), counted(&open(case)), "{case}");
        let ignore = maker.config["quantization_config"]["ignore"].as_array_mut().unwrap();
        ignore.retain(|e| !e.as_str().unwrap().ends_with("in_proj_a"));
        let error = Checkpoint::open(maker.write().path()).unwrap_err().to_string();
        assert!(error.contains("module layers.0.linear_attn.in_proj_a"), "{case}: {error}");
    }
}

#[test]
fn modelopt_leaves_out_by_wildcard_and_by_tree() {
    let expected = counted(&open("mo_fp8"));
    for list in [
        json!(["lm_head", "*.mlp.gate", "*shared_expert_gate", "*in_proj_a", "*in_proj_b", "mtp*"]),
        json!(["lm_hea?", "model.layers.*.mlp.gate", "model.layers.?.mlp.shared_expert_gate", "*.in_proj_[ab]"]),
        json!(["lm_head*", "model.language_model.layers.*.mlp.gate", "*gate", "*in_proj_a*", "*in_proj_b*", "mtp*"]),
    ] {
        let mut maker = fixture("mo_fp8");
        maker.config["quantization_config"]["ignore"] = list.clone();
        assert_eq!(counted(&opened(&maker.write())), expected, "{list}");
    }
    // Exporters before 0.39 left out by a part of the name.
    let mut maker = fixture("mo_fp8");
    maker.config["quantization_config"]["ignore"] =
        json!(["lm_head", "mlp.gate", "shared_expert_gate", "in_proj_a", "in_proj_b"]);
    assert!(Checkpoint::open(maker.write().path()).is_err());
    maker.config["quantization_config"]["producer"]["version"] = json!("0.33.1");
    assert_eq!(counted(&opened(&maker.write())), expected);
}

#[test]
fn mixed_layers_are_named_one_by_one_or_by_their_container() {
    // The fixture names `...mlp.experts`; each expert by its own name means the same.
    let mut maker = fixture("mo_mixed");
    let layers = maker.config["quantization_config"]["quantized_layers"].as_object_mut().unwrap();
    let containers: Vec<String> = layers.keys().filter(|k| k.ends_with(".experts")).cloned().collect();
    assert_eq!(containers.len(), 4);
    for key in containers {
        let algo = layers.remove(&key).unwrap();
        for e in 0..8 {
            for part in ["gate_proj", "up_proj", "down_proj"] {
                layers.insert(format!("{key}.{e}.{part}"), algo.clone());
            }
        }
    }
    assert_eq!(counted(&opened(&maker.write())), counted(&open("mo_mixed")));
}

#[test]
fn transformers_leaves_odd_shapes_as_they_are() {
    // No entry in modules_to_not_convert: a shape that is no multiple of 128 explains itself.
    let mut maker = fixture("hf_fp8_block");
    let list = maker.config["quantization_config"]["modules_to_not_convert"].as_array_mut().unwrap();
    list.retain(|e| !e.as_str().unwrap().contains("in_proj_"));
    let c = opened(&maker.write());
    assert_eq!(counted(&c), counted(&open("hf_fp8_block")));
    // The last part of a name, or a pattern, leaves out as a full name does.
    maker.config["quantization_config"]["modules_to_not_convert"] =
        json!(["lm_head", "mlp.gate", "shared_expert_gate", r"model\.layers\..*\.in_proj_[ab]"]);
    assert_eq!(counted(&opened(&maker.write())), counted(&open("hf_fp8_block")));
    maker.config["quantization_config"]["weight_block_size"] = json!([128, 128]);
    maker.config["quantization_config"]["fmt"] = Value::Null;
    assert_eq!(counted(&opened(&maker.write())), counted(&open("hf_fp8_block")));
}

#[test]
fn fp8_experts_may_be_fused() {
    // As transformers writes them from a fused source: codes and grids of all experts in one tensor each.
    let apart = open("hf_fp8_block");
    let mut maker = fixture("hf_fp8_block");
    for layer in 0..4 {
        let base = format!("model.layers.{layer}.mlp.experts");
        for (last, part, dtype) in [("weight", "", "F8_E4M3"), ("weight_scale_inv", "_scale_inv", "F32")] {
            for (stem, of) in [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"][..])] {
                let (mut bytes, mut shape) = (Vec::new(), vec![2, 0, 0]);
                for e in 0..2 {
                    for piece in of {
                        let name = format!("{base}.{e}.{piece}.{last}");
                        let at = maker.tensors.iter().position(|t| t.name == name).unwrap();
                        let t = maker.tensors.remove(at);
                        shape = vec![2, t.shape[0] * of.len() as u64, t.shape[1]];
                        bytes.extend(t.bytes);
                    }
                }
                let name = format!("{base}.{stem}{part}");
                maker.tensors.push(Tensor { name, dtype: dtype.into(), shape, bytes });
            }
        }
    }
    let c = opened(&maker.write());
    assert_eq!(counted(&c), counted(&apart));
    for m in c.modules().iter().filter(|m| m.scheme == Scheme::Fp8(Grain::Block)) {
        let codes = |c: &Checkpoint| {
            let mut out = vec![0; m.rows * m.cols];
            c.read_codes(&m.name, 0..m.rows, &mut out).unwrap();
            out
        };
        assert_eq!(codes(&c), codes(&apart), "{}", m.name);
        assert_eq!(c.block_scales(&m.name).unwrap(), apart.block_scales(&m.name).unwrap(), "{}", m.name);
    }
}

#[test]
fn plain_experts_may_stay_fused_beside_quantised_layers() {
    let mut maker = Maker::new(moe_config());
    maker.fuse();
    for (name, n, k) in [("q_proj", 32, 16), ("k_proj", 8, 16), ("v_proj", 8, 16), ("o_proj", 16, 16)] {
        let weight = maker.tensor(&format!("model.layers.3.self_attn.{name}.weight"));
        (weight.dtype, weight.bytes) = ("F8_E4M3".into(), vec![0x38; n * k]);
        maker.add(&format!("model.layers.3.self_attn.{name}.weight_scale"), "BF16", &[n as u64], 0);
        maker.tensors.last_mut().unwrap().bytes = [0x80, 0x3F].repeat(n);
    }
    maker.config["quantization_config"] = json!({"quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"FP8_DYNAMIC": ["re:.*self_attn.*"]}, "ignore": ["lm_head"]});
    assert_eq!(counted(&opened(&maker.write())), set(&[("bf16", 72), ("fp8-channel token", 4)]));
}

#[test]
fn scales_of_the_kv_cache_are_kept_under_any_producers_names() {
    let scheme = json!({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": false, "symmetric": true});
    let put = |maker: &mut Maker, name: &str, dtype: &str, shape: &[u64], value: f32| {
        let bytes = if dtype == "F32" { value.to_le_bytes().to_vec() } else { value.to_le_bytes()[2..].to_vec() };
        maker.tensors.push(Tensor { name: name.into(), dtype: dtype.into(), shape: shape.to_vec(), bytes });
    };
    for (case, k, v, dtype, shape) in [
        ("ct_fp8_dynamic", "k_scale", "v_scale", "BF16", &[1][..]),
        ("ct_fp8_dynamic", "k_proj.output_scale", "v_proj.output_scale", "BF16", &[1][..]),
        ("mo_fp8", "k_proj.k_scale", "v_proj.v_scale", "F32", &[][..]),
    ] {
        let mut maker = fixture(case);
        maker.config["quantization_config"]["kv_cache_scheme"] = scheme.clone();
        put(&mut maker, &format!("model.layers.3.self_attn.{k}"), dtype, shape, 0.5);
        put(&mut maker, &format!("model.layers.3.self_attn.{v}"), dtype, shape, 0.75);
        let c = opened(&maker.write());
        assert_eq!(c.kv_scales(3).unwrap(), Some((0.5, 0.75)), "{case}");
        assert_eq!(c.kv_scales(0).unwrap(), None, "a GDN layer has no KV cache");
        assert_eq!(c.kv_scales(99).unwrap(), None);
        assert_eq!(counted(&c), counted(&open(case)), "{case}");
        put(&mut maker, "model.layers.3.self_attn.q_scale", dtype, shape, 2.0);
        let c = opened(&maker.write());
        let skipped: Vec<_> = c.skipped().iter().map(|s| (s.name.as_str(), s.rule)).collect();
        assert_eq!(skipped, [("model.layers.3.self_attn.q_scale", SkipRule::QueryScale)]);
        assert_eq!(SkipRule::QueryScale.to_string(), "query-scale");
    }
    // modelopt names an FP8 cache and writes no scales where all are 1; dynamic ones are never written.
    let mut maker = fixture("mo_fp8");
    maker.config["quantization_config"]["kv_cache_scheme"] = scheme;
    assert_eq!(opened(&maker.write()).kv_scales(3).unwrap(), None);
    let mut maker = fixture("ct_fp8_dynamic");
    maker.config["quantization_config"]["kv_cache_scheme"] =
        json!({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": true});
    assert_eq!(opened(&maker.write()).kv_scales(3).unwrap(), None);
    // An FP8 cache over weights that are not quantised.
    let maker = fixture("mo_fp8");
    assert!(maker.config["quantization_config"]["kv_cache_scheme"].is_null());
}

#[test]
fn a_survey_lists_every_fault_and_opens_nothing() {
    let mut maker = fixture("ct_nvfp4");
    maker.tensor("model.layers.1.mlp.experts.3.up_proj.weight_scale").shape = vec![64, 2];
    maker.tensors.retain(|t| t.name != "model.layers.2.mlp.experts.5.up_proj.weight_global_scale");
    maker.add("model.layers.0.mlp.experts.0.up_proj.qweight", "I32", &[1], 4);
    maker.tensor("model.norm.weight").dtype = "F16".into();
    let dir = maker.write();
    let Survey { modules, faults, geometry, skipped, bytes, kv_layers: _ } = Checkpoint::survey(dir.path()).unwrap();
    assert_eq!(counts(&modules), set(&[("bf16", 15), ("nvfp4-divides nvfp4", 119)]));
    let text: Vec<String> = faults.iter().map(ToString::to_string).collect();
    for (fault, says) in text.iter().zip([
        &["model.norm.weight", "F16"][..],
        &["experts.0.up_proj.qweight", "AWQ or GPTQ"],
        &["module layers.1.mlp.experts.3.up_proj [32, 64]", "weight_scale is F8_E4M3 [64, 2]"],
        &["module layers.2.mlp.experts.5.up_proj [32, 64]", "no weight_global_scale"],
    ]) {
        assert!(says.iter().all(|s| fault.contains(s)), "{says:?}: {fault}");
    }
    assert_eq!(text.len(), 4, "{text:#?}");
    assert!(geometry.layers.len() == 4 && skipped.is_empty() && bytes > 0);
    let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("model.norm.weight") && error.contains("3 more faults"), "{error}");
    let clean = Checkpoint::survey(&folder("ct_nvfp4")).unwrap();
    assert!(clean.faults.is_empty() && clean.bytes == open("ct_nvfp4").bytes());
}
