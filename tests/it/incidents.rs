//! The two incidents of memory at their real sizes, on the layouts of the checkpoints that had them; plans alone.

use highwater::checkpoint::{ModelRef, Source};
use highwater::device::{Device, DeviceSpec};
use highwater::engine::{Engine, Fault, KvBudget, Options, Policy, Request, sizing};
use highwater::error::{Error, Result};
use highwater::mem::Report;
use highwater::num::DType;
use highwater::ops::{Limits, Numerics};

use crate::fixture::card;

const PROMPT: usize = 8192;
const VOCAB: u64 = 248_320;

fn source(model: &str) -> Source {
    ModelRef::parse(model).unwrap().open(0).unwrap()
}

fn options(kv_tokens: u64, logits: DType, fault: Option<Fault>) -> Options {
    Options {
        numerics: Numerics { logits, ..Numerics::BF16 },
        chunk: PROMPT,
        // A row more than the prompt: a decode beside a full chunk.
        limits: Limits { step_tokens: PROMPT + 1, batch: 1, context: PROMPT + 1 },
        kv: KvBudget::Tokens(kv_tokens),
        policy: Policy::Mixed,
        seed: 0,
        graphs: true,
        fault,
    }
}

/// Loads a model and prefills a prompt, or says what did not fit.
fn prefill(model: &str, spec: &DeviceSpec, slab: u64, options: Options) -> Result<Report> {
    let device = Device::plan(spec.clone(), slab);
    let mut engine = Engine::load(&device, source(model), options, &mut |_, _| {})?;
    engine.submit(Request::greedy(vec![0; PROMPT], 1))?;
    engine.step().map(|out| out.unwrap().memory)
}

/// Resident weights by layer.
fn weights(model: &str) -> u64 {
    let o = options(PROMPT as u64 + 64, DType::F32, None);
    let sizing = sizing::size(&card("h200"), 130 << 30, &source(model), o.numerics, o.limits, o.kv).unwrap();
    sizing.terms().iter().find(|(name, _)| name == "weights").unwrap().1
}

#[test]
fn incident_two_a_head_that_stays_native_is_half_its_dequantised_twin() {
    let spec = card("rtx-4060-ti-16g");
    let slab = spec.slab_bytes(None);
    let model = |layers: usize, head: &str| format!("qwen3.6-35b-a3b:layers={layers}@unsloth-nvfp4-fast{head}");
    // Codes and one f32 scale for each row, against two bytes for each weight.
    let (native, twin) = (VOCAB * 2048 + VOCAB * 4, VOCAB * 2048 * 2);
    let difference = weights(&model(1, ",head=bf16")) - weights(&model(1, ""));
    assert_eq!(difference, twin - native);
    let gib = |bytes: u64| (bytes as f64 / f64::from(1 << 30) * 1000.0).round() / 1000.0;
    assert!((gib(native) - 0.475).abs() < 0.0015 && (gib(twin) - 0.947).abs() < 0.0005, "{native} {twin}");

    let run =
        |layers, head: &str| prefill(&model(layers, head), &spec, slab, options(PROMPT as u64 + 64, DType::F32, None));
    // The most layers that fit with the native head.
    let layers = (1..=40).rev().find(|l| run(*l, "").is_ok()).unwrap();
    assert!((24..40).contains(&layers), "{layers} layers are at the edge of 16 GB");
    let report = run(layers, "").unwrap();
    assert!(report.free < 1 << 29, "{} B free", report.free);
    let error = run(layers, ",head=bf16").unwrap_err();
    let Error::Budget(budget) = &error else { panic!("{error}") };
    let total: u64 = budget.terms.iter().map(|(_, bytes)| bytes).sum();
    assert!(total > slab && total - slab < difference, "{error}");
    assert!(run(layers - 1, ",head=bf16").is_ok(), "one layer fewer makes room for the twin");
}

#[test]
fn incident_one_full_window_logits_do_not_fit_where_the_gathered_rows_do() {
    let spec = card("rtx-5090d");
    let slab = spec.slab_bytes(None);
    let model = "qwen3.8-27b@unsloth-nvfp4";
    let size = |kv_tokens| {
        let o = options(kv_tokens, DType::Bf16, None);
        sizing::size(&spec, slab, &source(model), o.numerics, o.limits, o.kv).unwrap().total()
    };
    // A KV pool that leaves the right version a little over 1 GiB, fixed for both.
    let least = PROMPT as u64 + 64;
    let kv_tokens = least + (slab - size(least) - (1 << 30)) / 65_536 / 64 * 64;
    let spare = slab - size(kv_tokens);
    assert!((1 << 30..3 << 29).contains(&spare), "{spare} B to spare");

    let right = prefill(model, &spec, slab, options(kv_tokens, DType::Bf16, None)).unwrap();
    assert!(right.free >= spare, "{} B free of {spare} B; {right:?}", right.free);
    let faulty = options(kv_tokens, DType::Bf16, Some(Fault::FullWindowHead));
    let error = prefill(model, &spec, slab, faulty).unwrap_err();
    let oom = error.out_of_memory().expect("an out-of-memory");
    assert!(oom.tag.ends_with(".logits"), "{}", oom.tag);
    assert_eq!(oom.requested, PROMPT as u64 * VOCAB * 2);
}
