//! Writes tiny checkpoints: a valid one of each kind, whole or as parts that a test can bend before writing.

use std::fs;
use std::path::Path;

use highwater::checkpoint::Geometry;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

/// One tensor to be written.
#[derive(Debug, Clone)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: Vec<u8>,
}

/// A checkpoint before it is written.
#[derive(Debug, Clone)]
pub(super) struct Maker {
    pub(super) config: Value,
    pub(super) tensors: Vec<Tensor>,
}

/// A flat text config: 3 GDN layers and 1 of attention.
pub(super) fn dense_config() -> Value {
    json!({
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "intermediate_size": 24,
        "vocab_size": 40,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "eos_token_id": [3, 1],
        "tie_word_embeddings": false
    })
}

/// The same with 3 experts in place of the dense MLP.
pub(super) fn moe_config() -> Value {
    let mut c = dense_config();
    c["architectures"] = json!(["Qwen3_5MoeForCausalLM"]);
    c["model_type"] = json!("qwen3_5_moe_text");
    c["num_experts"] = json!(3);
    c["num_experts_per_tok"] = json!(2);
    c["moe_intermediate_size"] = json!(8);
    c["shared_expert_intermediate_size"] = json!(24);
    c.as_object_mut().unwrap().remove("intermediate_size");
    c
}

/// The config nested under `text_config`, as the multimodal class writes it.
pub(super) fn nested(flat: &Value) -> Value {
    let moe = flat["model_type"] == "qwen3_5_moe_text";
    let mut inner = flat.clone();
    inner.as_object_mut().unwrap().remove("architectures");
    let (class, kind) = if moe {
        ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")
    } else {
        ("Qwen3_5ForConditionalGeneration", "qwen3_5")
    };
    json!({
        "architectures": [class],
        "model_type": kind,
        "text_config": inner,
        "tie_word_embeddings": flat["tie_word_embeddings"],
        "vision_config": {"depth": 1, "model_type": kind, "rope_parameters": {"rope_theta": 1e4, "rope_type": "axial"}}
    })
}

pub(super) fn geometry(config: &Value) -> Geometry {
    Geometry::from_config(Path::new("dir/config.json"), &config.to_string()).expect("the maker's config is valid")
}

impl Maker {
    pub(super) fn new(config: Value) -> Maker {
        let params = geometry(&config).params();
        let mut next = 0u32;
        let tensors = params.into_iter().map(|p| {
            // Every byte differs from its neighbours, so that a read from a wrong place is seen.
            let bytes = (0..p.elements() * 2).map(|_| {
                next = next.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (next >> 24) as u8
            });
            let bytes = bytes.collect();
            let name = if p.name == "lm_head.weight" { p.name } else { format!("model.{}", p.name) };
            Tensor { name, dtype: "BF16".into(), shape: p.shape.iter().map(|d| *d as u64).collect(), bytes }
        });
        Maker { tensors: tensors.collect(), config }
    }

    pub(super) fn dense() -> Maker {
        Maker::new(dense_config())
    }

    pub(super) fn moe() -> Maker {
        Maker::new(moe_config())
    }

    pub(super) fn tied() -> Maker {
        let mut config = dense_config();
        config["tie_word_embeddings"] = json!(true);
        Maker::new(config)
    }

    pub(super) fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    pub(super) fn add(&mut self, name: &str, dtype: &str, shape: &[u64], bytes: usize) {
        self.tensors.push(Tensor {
            name: name.into(),
            dtype: dtype.into(),
            shape: shape.to_vec(),
            bytes: vec![0; bytes],
        });
    }

    /// Puts another prefix in place of `model.`, leaving the head as it is.
    pub(super) fn prefix(&mut self, prefix: &str) {
        for t in &mut self.tensors {
            if let Some(rest) = t.name.strip_prefix("model.") {
                t.name = format!("{prefix}{rest}");
            }
        }
    }

    /// Fuses each layer's experts into the two 3-D tensors of the official files.
    pub(super) fn fuse(&mut self) {
        let layers = self.config["num_hidden_layers"].as_u64().unwrap();
        let experts = self.config["num_experts"].as_u64().unwrap();
        for l in 0..layers {
            let base = format!("model.layers.{l}.mlp.experts");
            let mut take = |name: String| {
                let at = self.tensors.iter().position(|t| t.name == name).unwrap();
                self.tensors.remove(at)
            };
            let (mut gate_up, mut down, mut inter, mut hidden) = (Vec::new(), Vec::new(), 0, 0);
            for e in 0..experts {
                let gate = take(format!("{base}.{e}.gate_proj.weight"));
                (inter, hidden) = (gate.shape[0], gate.shape[1]);
                gate_up.extend(gate.bytes);
                gate_up.extend(take(format!("{base}.{e}.up_proj.weight")).bytes);
                down.extend(take(format!("{base}.{e}.down_proj.weight")).bytes);
            }
            let shapes = [vec![experts, 2 * inter, hidden], vec![experts, hidden, inter]];
            for ((name, bytes), shape) in [("gate_up_proj", gate_up), ("down_proj", down)].into_iter().zip(shapes) {
                self.tensors.push(Tensor { name: format!("{base}.{name}"), dtype: "BF16".into(), shape, bytes });
            }
        }
    }

    /// Writes config.json and one model.safetensors.
    pub(super) fn write(&self) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        self.write_config(dir.path());
        fs::write(dir.path().join("model.safetensors"), safetensors(&self.tensors)).unwrap();
        dir
    }

    /// Writes config.json, an index, and `count` shards that take the tensors in turn, so that every layer is split.
    pub(super) fn write_sharded(&self, count: usize) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        self.write_config(dir.path());
        let name = |i: usize| format!("model-{:05}-of-{count:05}.safetensors", i + 1);
        let mut map = Map::new();
        for i in 0..count {
            let part: Vec<Tensor> = self.tensors.iter().skip(i).step_by(count).cloned().collect();
            map.extend(part.iter().map(|t| (t.name.clone(), json!(name(i)))));
            fs::write(dir.path().join(name(i)), safetensors(&part)).unwrap();
        }
        let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
        fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        dir
    }

    pub(super) fn write_config(&self, dir: &Path) {
        fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
    }
}

/// The header of these tensors, in their order.
pub(super) fn header(tensors: &[Tensor]) -> Value {
    let mut map = Map::new();
    map.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut at = 0;
    for t in tensors {
        let end = at + t.bytes.len();
        map.insert(t.name.clone(), json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [at, end]}));
        at = end;
    }
    Value::Object(map)
}

/// A file of these tensors, as the format asks.
pub(super) fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    let data: Vec<u8> = tensors.iter().flat_map(|t| t.bytes.iter().copied()).collect();
    raw(&header(tensors).to_string(), &data)
}

/// A file of any header and data, with the header's true length before it.
pub(super) fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}
