//! The fixtures other software wrote: opening them, their goldens, and the distance to them.
#![allow(unreachable_pub)] // shared by the modules of one test binary

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use highwater::checkpoint::{Checkpoint, Source};
use highwater::device::{Device, DeviceSpec, cards};
use highwater::engine::{Engine, Fault, Finish, KvBudget, Logits, Options, Policy, Request, RequestId};
use highwater::ops::{ActQuant, Limits, Numerics};
use safetensors::SafeTensors;

/// The bf16 and fp32 cases.
pub const CASES: [&str; 8] = [
    "dense_bf16",
    "dense_tied_bf16",
    "moe_bf16",
    "moe_fp32",
    "moe_v509_bf16",
    "moe_realdims_bf16",
    "moe_vl_bf16",
    "moe_vl_fused_bf16",
];

/// The quantised cases, with the golden set that has the peer's activation quantisation, where there is one.
pub const QUANTISED: [(&str, Option<&str>); 12] = [
    ("ct_dense_nvfp4", Some("fp32_actq")),
    ("ct_fp8_block", Some("fp32_actq")),
    ("ct_fp8_dynamic", Some("fp32_actq_rows")),
    ("ct_fp8_static", Some("fp32_actq")),
    ("ct_mfree_ignore_re", Some("fp32_actq")),
    ("ct_mixed_lmhead_fp8", Some("fp32_actq")),
    ("ct_nvfp4", Some("fp32_actq")),
    ("ct_nvfp4a16", None),
    ("hf_fp8_block", None),
    ("mo_fp8", Some("fp32_actq_rows")),
    ("mo_fp8_pc_pt", Some("fp32_actq_rows")),
    ("mo_mixed", None),
];

/// f32 arithmetic, inputs of quantised layers left as they are: what the `fp32` goldens were computed in.
pub const F32_WEIGHTS_ONLY: Numerics = Numerics { act_quant: ActQuant::Off, ..Numerics::F32 };

/// Lengths of each case's prompts.
pub const PROMPTS: [usize; 6] = [1, 7, 64, 65, 130, 200];

pub fn folder(case: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(case)
}

pub fn source(case: &str) -> Source {
    Source::Disk(Box::new(Checkpoint::open(&folder(case)).unwrap_or_else(|e| panic!("{case}: {e}"))))
}

/// Every tensor of a golden file, floats widened to f32 and integers as they are.
pub struct Golden {
    pub floats: HashMap<String, Vec<f32>>,
    pub ints: HashMap<String, Vec<i32>>,
    pub json: serde_json::Value,
}

pub fn golden(case: &str) -> Golden {
    let mut golden = Golden {
        floats: HashMap::new(),
        ints: HashMap::new(),
        json: serde_json::from_slice(&std::fs::read(folder(case).join("golden.json")).unwrap()).unwrap(),
    };
    golden.read(case, "golden.safetensors");
    if folder(case).join("actq.safetensors").exists() {
        golden.read(case, "actq.safetensors");
    }
    golden
}

impl Golden {
    fn read(&mut self, case: &str, name: &str) {
        let bytes = std::fs::read(folder(case).join(name)).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let words = view.data().as_chunks::<4>().0;
            match view.dtype() {
                safetensors::Dtype::F32 => {
                    self.floats.insert(name, words.iter().map(|b| f32::from_le_bytes(*b)).collect());
                }
                safetensors::Dtype::I32 => {
                    self.ints.insert(name, words.iter().map(|b| i32::from_le_bytes(*b)).collect());
                }
                other => panic!("{case}: {name} is {other:?}"),
            }
        }
    }

    pub fn prompt(&self, length: usize) -> Vec<u32> {
        self.ints[&format!("prompt.{length}")].iter().map(|&id| id as u32).collect()
    }
}

/// Relative L2 distance of `got` to `want`, in f64.
pub fn distance(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let (mut diff, mut norm) = (0.0, 0.0);
    for (a, b) in got.iter().zip(want) {
        diff += (f64::from(*a) - f64::from(*b)).powi(2);
        norm += f64::from(*b).powi(2);
    }
    assert!(!diff.is_nan(), "a NaN in the result");
    (diff / norm.max(f64::MIN_POSITIVE)).sqrt()
}

/// Distances row by row.
pub fn row_distances(got: &[f32], want: &[f32], cols: usize) -> Vec<f64> {
    assert_eq!(got.len(), want.len());
    got.chunks(cols).zip(want.chunks(cols)).map(|(a, b)| distance(a, b)).collect()
}

pub fn options(numerics: Numerics, chunk: usize, batch: usize) -> Options {
    Options {
        numerics,
        chunk,
        limits: Limits { step_tokens: chunk, batch, context: 512 },
        kv: KvBudget::Tokens(512 * batch as u64),
        policy: Policy::Mixed,
        seed: 1,
        graphs: true,
        fault: None,
    }
}

pub const SLAB: u64 = 1 << 30;

pub fn card(name: &str) -> DeviceSpec {
    cards::find(name).unwrap()
}

/// An engine on a poisoned CPU device: what nobody wrote is NaN.
pub fn engine(case: &str, options: Options) -> Engine {
    let device = Device::cpu_poisoned(card("rtx-4090"), SLAB).unwrap();
    load(&device, case, options)
}

pub fn load(device: &Arc<Device>, case: &str, options: Options) -> Engine {
    Engine::load(device, source(case), options, &mut |_, _| {}).unwrap_or_else(|e| panic!("{case}: {e}"))
}

/// What a request got until it finished.
#[derive(Debug, Default, Clone)]
pub struct Got {
    pub tokens: Vec<u32>,
    pub logits: Vec<f32>,
    pub prompt_logprobs: Vec<f32>,
    pub finish: Option<Finish>,
}

/// Steps until nothing is left to do.
pub fn drain(engine: &mut Engine) -> HashMap<RequestId, Got> {
    let mut all: HashMap<RequestId, Got> = HashMap::new();
    while let Some(out) = engine.step().unwrap() {
        for record in out.records {
            let got = all.entry(record.request).or_default();
            got.tokens.extend(record.token.map(|t| t.id));
            got.logits.extend(record.logits);
            got.prompt_logprobs.extend(record.prompt_logprobs);
            assert!(got.finish.is_none(), "a record after the last one");
            got.finish = record.finish;
        }
    }
    all
}

/// Runs one request by itself.
pub fn run(engine: &mut Engine, request: Request) -> Got {
    let id = engine.submit(request).unwrap();
    drain(engine).remove(&id).unwrap()
}

/// Logits of every row of a prompt.
pub fn all_logits(engine: &mut Engine, prompt: Vec<u32>) -> Vec<f32> {
    run(engine, Request { logits: Logits::Prompt, ..Request::greedy(prompt, 1) }).logits
}

/// Logits of the rows that are sampled: the prompt's last and each generated token's but the last.
pub fn sampled_logits(engine: &mut Engine, prompt: Vec<u32>, tokens: usize) -> Got {
    run(engine, Request { logits: Logits::Sampled, ..Request::greedy(prompt, tokens) })
}

pub fn with_fault(options: Options, fault: Fault) -> Options {
    Options { fault: Some(fault), ..options }
}
