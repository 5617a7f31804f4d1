//! The JSON beside the weights: config.json with its quantisation config, hf_quant_config.json, generation_config.json,
//! tokenizer.json.
//!
//! May live here: producers' keys and spellings. May not: tensors, and reading any of it back (../quant).

use serde_json::{Map, Value, json};

use super::layout::spelled;
use crate::checkpoint::geometry::{Gate, Geometry, Mixer, Mlp};
use crate::checkpoint::recipe::{Class, Producer, Recipe, Rule};
use crate::error::{Error, Result};
use crate::ops::scheme::{ActScheme, Grain, Scheme};

/// The small files of a checkpoint, by name, config.json last.
pub(crate) fn files(geometry: &Geometry, recipe: &Recipe) -> Result<Vec<(&'static str, Value)>> {
    let quantisation = Quantisation::of(geometry, recipe);
    let mut list = Vec::new();
    if !geometry.eos.is_empty() {
        list.push(("generation_config.json", json!({ "do_sample": false, "eos_token_id": eos(geometry) })));
    }
    if geometry.decodable < geometry.vocab {
        list.push(("tokenizer.json", tokenizer(geometry.decodable)));
    }
    let mut config = config(geometry, recipe.file().class);
    if !quantisation.rules.is_empty() {
        let q = match recipe.file().producer {
            Producer::Transformers => Value::Null,
            Producer::CompressedTensors => quantisation.compressed_tensors(),
            Producer::FineGrainedFp8 => quantisation.fine_grained(),
            Producer::Modelopt => {
                let (flat, nested) = quantisation.modelopt()?;
                list.push(("hf_quant_config.json", nested));
                flat
            }
        };
        config.insert("quantization_config".into(), q);
    }
    list.push(("config.json", Value::Object(config)));
    Ok(list)
}

fn eos(geometry: &Geometry) -> Value {
    match geometry.eos.as_slice() {
        [one] => json!(one),
        list => json!(list),
    }
}

/// A tokenizer whose tokens are the ids themselves, in digits: as many ids decode as the geometry says.
fn tokenizer(decodable: usize) -> Value {
    let vocab: Map<String, Value> = (0..decodable).map(|id| (id.to_string(), json!(id))).collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": { "type": "Whitespace" },
        "post_processor": null,
        "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "0" },
    })
}

fn config(g: &Geometry, class: Class) -> Map<String, Value> {
    let moe = matches!(g.mlp, Mlp::Moe { .. });
    let (stem, model_type) = if moe { ("Qwen3_5Moe", "qwen3_5_moe") } else { ("Qwen3_5", "qwen3_5") };
    let mut text = text_config(g);
    text.insert("model_type".into(), json!(format!("{model_type}_text")));
    let mut top = Map::new();
    let mut push = |key: &str, value: Value| drop(top.insert(key.into(), value));
    match class {
        Class::Text => {
            push("architectures", json!([format!("{stem}ForCausalLM")]));
            top.extend(text);
        }
        Class::Multimodal => {
            push("architectures", json!([format!("{stem}ForConditionalGeneration")]));
            push("dtype", json!("bfloat16"));
            push("model_type", json!(model_type));
            push("text_config", Value::Object(text));
            push("tie_word_embeddings", json!(g.tied));
        }
    }
    top
}

fn text_config(g: &Geometry) -> Map<String, Value> {
    let mut map = Map::new();
    let mut push = |key: &str, value: Value| drop(map.insert(key.into(), value));
    let kind = |m: &Mixer| if *m == Mixer::Gdn { "linear_attention" } else { "full_attention" };
    push("attention_bias", json!(false));
    push("attention_dropout", json!(0.0));
    push("attn_output_gate", json!(true));
    push("dtype", json!("bfloat16"));
    if !g.eos.is_empty() {
        push("eos_token_id", eos(g));
    }
    push("head_dim", json!(g.head_dim));
    push("hidden_act", json!("silu"));
    push("hidden_size", json!(g.hidden));
    push("initializer_range", json!(0.02));
    push("layer_types", json!(g.layers.iter().map(kind).collect::<Vec<_>>()));
    push("linear_conv_kernel_dim", json!(g.gdn.conv_kernel));
    push("linear_key_head_dim", json!(g.gdn.key_dim));
    push("linear_num_key_heads", json!(g.gdn.key_heads));
    push("linear_num_value_heads", json!(g.gdn.value_heads));
    push("linear_value_head_dim", json!(g.gdn.value_dim));
    push("mamba_ssm_dtype", json!("float32"));
    push("max_position_embeddings", json!(g.rope.yarn.map_or(g.max_context, |y| y.original_max_position)));
    match g.mlp {
        Mlp::Dense { inter } => push("intermediate_size", json!(inter)),
        Mlp::Moe { experts, top_k, inter, shared_inter } => {
            push("moe_intermediate_size", json!(inter));
            push("num_experts", json!(experts));
            push("num_experts_per_tok", json!(top_k));
            push("shared_expert_intermediate_size", json!(shared_inter));
        }
    }
    push("num_attention_heads", json!(g.heads));
    push("num_hidden_layers", json!(g.layers.len()));
    push("num_key_value_heads", json!(g.kv_heads));
    if g.gdn.gate == Gate::Sigmoid {
        push("output_gate_type", json!("sigmoid"));
    }
    push("rms_norm_eps", json!(shortest(g.eps)));
    push("rope_parameters", rope(g));
    push("tie_word_embeddings", json!(g.tied));
    push("use_cache", json!(true));
    push("vocab_size", json!(g.vocab));
    map
}

/// The shortest decimal that reads back as the same f32.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

fn rope(g: &Geometry) -> Value {
    // The factor is multiplied and cut down by readers: it must not fall short of a whole number.
    let mut partial = g.rotary_dim as f64 / g.head_dim as f64;
    if ((g.head_dim as f64 * partial) as usize) < g.rotary_dim {
        partial = partial.next_up();
    }
    let pairs = g.rotary_dim / 2;
    let (time, height) = (pairs.div_ceil(3), (pairs - pairs.div_ceil(3)).div_ceil(2));
    let mut rope = json!({
        "mrope_interleaved": true,
        "mrope_section": [time, height, pairs - time - height],
        "partial_rotary_factor": partial,
        "rope_theta": g.rope.theta,
        "rope_type": "default",
    });
    if let (Some(yarn), Some(map)) = (g.rope.yarn, rope.as_object_mut()) {
        map.insert("rope_type".into(), json!("yarn"));
        map.insert("factor".into(), json!(yarn.factor));
        map.insert("original_max_position_embeddings".into(), json!(yarn.original_max_position));
        map.insert("attention_factor".into(), json!(yarn.attention_factor));
        map.insert("beta_fast".into(), json!(yarn.beta_fast));
        map.insert("beta_slow".into(), json!(yarn.beta_slow));
    }
    rope
}

/// What a recipe says of a geometry's modules.
struct Quantisation<'a> {
    geometry: &'a Geometry,
    recipe: &'a Recipe,
    /// The rules that quantise a module here, in the recipe's order.
    rules: Vec<&'a Rule>,
    /// Modules and their rules, in the order of the forward pass.
    modules: Vec<(String, Option<&'a Rule>)>,
}

/// How a rule stores its modules: rules that agree are one group.
fn kind(rule: &Rule, recipe: &Recipe) -> (Scheme, ActScheme) {
    (rule.scheme(recipe.file().global()), rule.act())
}

impl<'a> Quantisation<'a> {
    fn of(geometry: &'a Geometry, recipe: &'a Recipe) -> Quantisation<'a> {
        let rule = |module: &str| recipe.rule(geometry, module);
        let modules: Vec<_> = geometry.linears().into_iter().map(|l| (rule(&l.module), l.module)).collect();
        let used = |rule: &&Rule| modules.iter().any(|(r, _)| r.is_some_and(|r| std::ptr::eq(r, *rule)));
        let rules = recipe.file().rules.iter().filter(used).collect();
        let modules = modules.into_iter().map(|(rule, module)| (module, rule)).collect();
        Quantisation { geometry, recipe, rules, modules }
    }

    fn spelled(&self, module: &str) -> String {
        spelled(self.recipe.file().class, module)
    }

    /// What is listed as unquantised; `linears` whether that may have every linear module that is.
    fn ignored(&self, linears: bool) -> Vec<String> {
        let ignore = &self.recipe.file().ignore;
        let mut list: Vec<String> = ignore.entries.iter().flat_map(|entry| expanded(entry)).collect();
        if linears && ignore.linears {
            list.extend(self.modules.iter().filter(|(_, rule)| rule.is_none()).map(|(m, _)| self.spelled(m)));
        }
        for (layer, mixer) in self.geometry.layers.iter().enumerate() {
            let has = |name: &str| match name.split_once('.') {
                Some(("linear_attn", _)) => *mixer == Mixer::Gdn,
                Some(("self_attn", _)) => *mixer == Mixer::Attention,
                _ => true,
            };
            let here = ignore.each_layer.iter().filter(|name| has(name));
            list.extend(here.map(|name| self.spelled(&format!("layers.{layer}.{name}"))));
        }
        list
    }

    fn compressed_tensors(&self) -> Value {
        let file = self.recipe.file();
        let mut groups: Vec<((Scheme, ActScheme), Vec<&str>)> = Vec::new();
        for rule in &self.rules {
            let kind = kind(rule, self.recipe);
            let targets = rule.targets.iter().map(String::as_str);
            match groups.iter_mut().find(|(k, _)| *k == kind) {
                Some((_, list)) => list.extend(targets),
                None => groups.push((kind, targets.collect())),
            }
        }
        let format = |scheme: Scheme| match scheme {
            Scheme::Nvfp4(_) => "nvfp4-pack-quantized",
            _ => "float-quantized",
        };
        let first = groups.first().map_or("dense", |((scheme, _), _)| format(*scheme));
        let mixed = groups.iter().any(|((scheme, _), _)| format(*scheme) != first);
        let named: Map<String, Value> = groups
            .iter()
            .enumerate()
            .map(|(i, ((scheme, act), targets))| {
                let group = json!({
                    "format": format(*scheme),
                    "input_activations": input_arguments(*act),
                    "output_activations": null,
                    "targets": targets,
                    "weights": weight_arguments(*scheme),
                });
                (format!("group_{i}"), group)
            })
            .collect();
        let mut config = json!({
            "config_groups": named,
            "format": if mixed { "mixed-precision" } else { first },
            "global_compression_ratio": null,
            "ignore": self.ignored(true),
            "kv_cache_scheme": file.kv.as_ref().map(|_| arguments(8, "tensor", &json!(false), None, Some("static_minmax"))),
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
        });
        if let (Some(version), Some(map)) = (&file.version, config.as_object_mut()) {
            map.insert("version".into(), json!(version));
        }
        config
    }

    fn fine_grained(&self) -> Value {
        json!({
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": self.ignored(true),
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        })
    }

    /// The config's own form, and that of hf_quant_config.json.
    fn modelopt(&self) -> Result<(Value, Value)> {
        let file = self.recipe.file();
        let mut producer = json!({ "name": "modelopt" });
        if let (Some(version), Some(map)) = (&file.version, producer.as_object_mut()) {
            map.insert("version".into(), json!(version));
        }
        let mut algorithms: Vec<&str> = Vec::new();
        for rule in &self.rules {
            let name = self.algorithm(rule)?;
            if !algorithms.contains(&name) {
                algorithms.push(name);
            }
        }
        let (mut groups, mut nested, mut flat) = (Map::new(), Map::new(), Map::new());
        let kv = file.kv.is_some();
        let single = match algorithms.as_slice() {
            [one] => Some(*one),
            _ => None,
        };
        nested.insert("quant_algo".into(), json!(single.unwrap_or("MIXED_PRECISION")));
        nested.insert("kv_cache_quant_algo".into(), if kv { json!("FP8") } else { Value::Null });
        let mut ignored = self.ignored(single.is_some());
        ignored.sort();
        if let Some(name) = single {
            if let Some(mut group) = modelopt_group(name) {
                group.insert("targets".into(), json!(["Linear"]));
                groups.insert("group_0".into(), Value::Object(group));
            }
            if name.contains("NVFP4") {
                nested.insert("group_size".into(), json!(16));
            }
            nested.insert("exclude_modules".into(), json!(ignored));
        } else {
            let mut layers = Map::new();
            for (module, rule) in &self.modules {
                let Some(rule) = rule else { continue };
                let name = self.algorithm(rule)?;
                let mut entry = json!({ "quant_algo": name });
                if let (true, Some(map)) = (name.contains("NVFP4"), entry.as_object_mut()) {
                    map.insert("group_size".into(), json!(16));
                }
                // All experts of a layer are one module of the model.
                let key = module.split_once(".mlp.experts.").map(|(layer, _)| format!("{layer}.mlp.experts"));
                layers.insert(self.spelled(key.as_deref().unwrap_or(module)), entry);
            }
            for (i, name) in algorithms.iter().enumerate() {
                let mut group = modelopt_group(name).unwrap_or_default();
                let of_it = layers.iter().filter(|(_, entry)| entry["quant_algo"] == *name);
                let mut targets: Vec<&String> = of_it.map(|(key, _)| key).collect();
                targets.sort();
                group.insert("targets".into(), json!(targets));
                groups.insert(format!("group_{i}"), Value::Object(group));
            }
            if !ignored.is_empty() {
                nested.insert("exclude_modules".into(), json!(ignored));
            }
            flat.insert("quantized_layers".into(), Value::Object(layers.clone()));
            nested.insert("quantized_layers".into(), Value::Object(layers));
        }
        if !groups.is_empty() {
            flat.insert("config_groups".into(), Value::Object(groups));
        }
        flat.insert("ignore".into(), json!(ignored));
        flat.insert("quant_algo".into(), nested["quant_algo"].clone());
        if kv {
            flat.insert("kv_cache_scheme".into(), json!({ "dynamic": false, "num_bits": 8, "type": "float" }));
        }
        flat.insert("producer".into(), producer.clone());
        flat.insert("quant_method".into(), json!("modelopt"));
        Ok((Value::Object(flat), json!({ "producer": producer, "quantization": nested })))
    }

    fn algorithm(&self, rule: &Rule) -> Result<&'static str> {
        Ok(match kind(rule, self.recipe) {
            (Scheme::Fp8(Grain::Tensor), ActScheme::Fp8Tensor) => "FP8",
            (Scheme::Fp8(Grain::Channel), ActScheme::Fp8Token) => "FP8_PER_CHANNEL_PER_TOKEN",
            (Scheme::Fp8(Grain::Block), ActScheme::None) => "fp8_pb_wo",
            (Scheme::Nvfp4(_), ActScheme::Nvfp4) => "NVFP4",
            (Scheme::Nvfp4(_), ActScheme::None) => "W4A16_NVFP4",
            (scheme, act) => {
                return Err(Error::Unsupported {
                    what: format!("{scheme:?} with inputs {act:?} in a checkpoint by modelopt"),
                    supported: "modelopt has no algorithm of that kind: the recipe is wrong".into(),
                });
            }
        })
    }
}

/// The group that modelopt writes for readers of compressed-tensors; none for fp8_pb_wo and by channel.
fn modelopt_group(algorithm: &str) -> Option<Map<String, Value>> {
    let arguments = |bits: u64| {
        let mut map = json!({ "dynamic": false, "num_bits": bits, "type": "float" });
        if let (4, Some(map)) = (bits, map.as_object_mut()) {
            map.insert("group_size".into(), json!(16));
        }
        map
    };
    let (bits, inputs) = match algorithm {
        "FP8" => (8, true),
        "NVFP4" => (4, true),
        "W4A16_NVFP4" => (4, false),
        _ => return None,
    };
    let mut group = Map::new();
    if inputs {
        group.insert("input_activations".into(), arguments(bits));
    }
    group.insert("weights".into(), arguments(bits));
    Some(group)
}

/// `a{0..2}b` is `a0b`, `a1b` and `a2b`; anything else is itself.
fn expanded(entry: &str) -> Vec<String> {
    let range = || {
        let (before, rest) = entry.split_once('{')?;
        let (range, after) = rest.split_once('}')?;
        let (first, last) = range.split_once("..")?;
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        Some((first..=last).map(|i| format!("{before}{i}{after}")).collect())
    };
    range().unwrap_or_else(|| vec![entry.to_owned()])
}

fn arguments(bits: u64, strategy: &str, dynamic: &Value, group: Option<u64>, observer: Option<&str>) -> Value {
    json!({
        "actorder": null,
        "block_structure": if strategy == "block" { json!([128, 128]) } else { Value::Null },
        "dynamic": dynamic,
        "group_size": group,
        "num_bits": bits,
        "observer": observer,
        "observer_kwargs": {},
        "scale_dtype": if bits == 4 { json!("torch.float8_e4m3fn") } else { Value::Null },
        "strategy": strategy,
        "symmetric": true,
        "type": "float",
        "zp_dtype": null,
    })
}

fn weight_arguments(scheme: Scheme) -> Value {
    let of = |bits, strategy, group| arguments(bits, strategy, &json!(false), group, Some("memoryless_minmax"));
    match scheme {
        Scheme::Plain(_) => Value::Null,
        Scheme::Fp8(Grain::Tensor) => of(8, "tensor", None),
        Scheme::Fp8(Grain::Channel) => of(8, "channel", None),
        Scheme::Fp8(Grain::Block) => of(8, "block", None),
        Scheme::Nvfp4(_) => of(4, "tensor_group", Some(16)),
    }
}

fn input_arguments(act: ActScheme) -> Value {
    match act {
        ActScheme::None => Value::Null,
        ActScheme::Fp8Tensor => arguments(8, "tensor", &json!(false), None, Some("static_minmax")),
        ActScheme::Fp8Token => arguments(8, "token", &json!(true), None, None),
        ActScheme::Fp8Group => arguments(8, "group", &json!(true), Some(128), None),
        ActScheme::Nvfp4 => arguments(4, "tensor_group", &json!("local"), Some(16), Some("static_minmax")),
    }
}
