//! Planned bytes against measured ones, the bound over legal schedules, and the incident the project began with.

use highwater::checkpoint::{ModelRef, Source};
use highwater::device::Device;
use highwater::engine::{Engine, Fault, KvBudget, Options, Policy, Request, Runner, sizing};
use highwater::engine::{PromptRows, StepPlan, runner::SampledRow};
use highwater::error::Error;
use highwater::mem::Report;
use highwater::num::DType;
use highwater::ops::batch::{PAGE_TOKENS, Placement};
use highwater::ops::sampler::SampleRow;
use highwater::ops::{Limits, Numerics, Span};
use rand::{RngExt, SeedableRng};

use crate::fixture::{CASES, SLAB, card, golden, options, source};

/// Every step's report of a fixed workload.
fn reports(mut engine: Engine, case: &str) -> Vec<(usize, usize, Report)> {
    let golden = golden(case);
    for n in [130, 1, 65] {
        // On a batch of one the others wait; on the plan device nothing is sampled, so lengths alone decide.
        let mut request = Request { depth: n % 3, ..Request::greedy(golden.prompt(n), 6) };
        // Lists and reports of any length must be the same on a device that draws no tokens.
        match n {
            130 => {
                request.sampling.repetition_penalty = 1.2;
                request.sampling.frequency_penalty = 0.1;
                request.sampling.logprobs = 5;
            }
            65 => request.prompt_logprobs = true,
            _ => {}
        }
        engine.submit(request).unwrap();
    }
    let mut list = Vec::new();
    while let Some(out) = engine.step().unwrap() {
        list.push((out.prefill_tokens, out.decode_tokens, out.memory));
    }
    list
}

#[test]
fn peak_transient_and_owners_are_equal_on_cpu_and_plan() {
    let mut compared = 0;
    for case in CASES {
        for name in ["rtx-4060-ti-16g", "rtx-4090", "rtx-5090", "h200", "a100-80g"] {
            for (chunk, batch) in [(16, 1), (64, 3), (512, 2)] {
                for numerics in [Numerics::BF16, Numerics::F32] {
                    let options = options(numerics, chunk, batch);
                    let on = |device| Engine::load(&device, source(case), options, &mut |_, _| {}).unwrap();
                    let cpu = on(Device::cpu(card(name), SLAB).unwrap());
                    let plan = on(Device::plan(card(name), SLAB));
                    assert_eq!(cpu.sizing(), plan.sizing());
                    let arena = plan.sizing().arena;
                    let (cpu, plan) = (reports(cpu, case), reports(plan, case));
                    assert_eq!(cpu, plan, "{case} on {name}, chunk {chunk}, batch {batch}");
                    for (_, _, report) in &plan {
                        assert_eq!(report.slab, report.resident + report.transient_peak + report.free);
                        let owned: u64 = report.owners.iter().map(|(_, bytes)| bytes).sum();
                        assert_eq!(owned, report.transient_peak);
                        assert!(report.transient_peak > 0 && report.transient_peak <= arena);
                        compared += 1;
                    }
                }
            }
        }
    }
    println!("{compared} steps equal byte for byte");
    assert!(compared > 1000);
}

#[test]
fn cards_with_other_tactics_have_other_bytes() {
    // Were tactics blind to the card, the parity above would say nothing about it.
    let peak = |name: &str| {
        let source = ModelRef::parse("qwen3.5-9b").unwrap().open(0).unwrap();
        let limits = Limits { step_tokens: 8, batch: 8, context: 32768 };
        sizing::size(&card(name), 80 << 30, &source, Numerics::BF16, limits, KvBudget::Tokens(4096)).unwrap().corners
    };
    assert_ne!(peak("rtx-4060-ti-16g"), peak("h200"));
}

/// A legal step under `limits`, anything goes: lengths, contexts, who is sampled and scored.
fn random_step(rng: &mut rand_chacha::ChaCha8Rng, limits: Limits) -> StepPlan {
    let mut plan = StepPlan::default();
    let mut left = rng.random_range(1..=limits.step_tokens);
    let sequences = rng.random_range(1..=limits.batch);
    let decodes = if limits.context > 1 { rng.random_range(0..=sequences) } else { 0 };
    let mut start = 0;
    for i in 0..sequences {
        if left == 0 {
            break;
        }
        let decode = i < decodes;
        let (len, context) = if decode {
            (1, rng.random_range(1..limits.context))
        } else {
            let most = left.min(limits.context);
            // Short pieces are as likely as long ones: many short prompts are a worst case of their own.
            let len =
                if rng.random_bool(0.5) { rng.random_range(1..=most) } else { rng.random_range(1..=most.min(70)) };
            (len, if rng.random_bool(0.5) { 0 } else { rng.random_range(0..=limits.context - len) })
        };
        plan.decodes += usize::from(decode);
        plan.spans.push(Span { start, len, context });
        plan.places.push(Placement { slot_in: 1, slot_out: 1, pages: vec![0; (context + len).div_ceil(PAGE_TOKENS)] });
        if decode || rng.random_bool(0.7) {
            let mut params = SampleRow::default();
            if rng.random_bool(0.3) {
                params.repetition_penalty = 1.1;
                params.prompt_ids = (0..rng.random_range(0..200)).collect();
                params.output_counts = (0..rng.random_range(0..100)).map(|id| (id, 1)).collect();
            }
            plan.samples.push(SampledRow { row: (start + len) as i32 - 1, params, logits: false });
        }
        if !decode && rng.random_bool(0.3) {
            plan.prompts.push(PromptRows { first: start, targets: vec![0; len], logits: false });
        }
        start += len;
        left -= len;
    }
    plan.tokens = vec![0; start];
    plan
}

#[test]
fn ten_thousand_legal_schedules_stay_under_the_planned_arena() {
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(7);
    let mut closest = 0.0f64;
    let mut drawn = 0;
    for (model, name, limits) in [
        ("tiny", "rtx-4090", Limits { step_tokens: 200, batch: 8, context: 400 }),
        ("tiny-moe", "h200", Limits { step_tokens: 512, batch: 64, context: 2048 }),
        ("qwen3.5-0.8b:layers=4", "rtx-5090", Limits { step_tokens: 2048, batch: 16, context: 8192 }),
        ("qwen3.6-27b:layers=4", "h200", Limits { step_tokens: 8192, batch: 64, context: 32768 }),
        ("qwen3.6-35b-a3b:layers=4", "rtx-4060-ti-16g", Limits { step_tokens: 4096, batch: 4, context: 3000 }),
    ] {
        let source = ModelRef::parse(model).unwrap().open(0).unwrap();
        let sizing =
            sizing::size(&card(name), 80 << 30, &source, Numerics::BF16, limits, KvBudget::Tokens(64)).unwrap();
        let device = Device::plan(card(name), 1 << 40);
        let mut runner = Runner::load(&device, &source, Numerics::BF16, &mut |_, _| {}).unwrap();
        runner.allocate(limits, sizing.pages as usize, sizing.slots as usize).unwrap();
        for _ in 0..2000 {
            let step = random_step(&mut rng, limits);
            runner.run(&step, None, None, None).unwrap();
            let peak = runner.report().transient_peak;
            assert!(peak <= sizing.arena, "{model}: {peak} B over the planned {} B: {:?}", sizing.arena, step.spans);
            closest = closest.max(peak as f64 / sizing.arena as f64);
            drawn += 1;
        }
    }
    assert_eq!(drawn, 10_000);
    println!("10000 schedules; the largest took {:.1} % of its arena", closest * 100.0);
    assert!(closest > 0.9, "the bound is loose: {closest}");
}

#[test]
fn corners_are_legal_steps() {
    for limits in [
        Limits { step_tokens: 1, batch: 1, context: 2 },
        Limits { step_tokens: 64, batch: 200, context: 5 },
        Limits { step_tokens: 8192, batch: 3, context: 100 },
        Limits { step_tokens: 8192, batch: 64, context: 32768 },
    ] {
        for (name, step) in sizing::corners(limits) {
            let rows: usize = step.spans.iter().map(|s| s.len).sum();
            assert!(rows <= limits.step_tokens && step.spans.len() <= limits.batch, "{name} under {limits:?}");
            assert!(step.spans.iter().all(|s| s.len > 0 && s.context + s.len <= limits.context), "{name} {limits:?}");
        }
        let source = ModelRef::parse("tiny").unwrap().open(0).unwrap();
        sizing::size(&card("h200"), 1 << 30, &source, Numerics::BF16, limits, KvBudget::Fill).unwrap();
    }
}

fn nine_b(fault: Option<Fault>, logits: DType, kv_tokens: u64) -> (Source, Options) {
    let source = ModelRef::parse("qwen3.5-9b@bf16").unwrap().open(0).unwrap();
    let options = Options {
        numerics: Numerics { logits, ..Numerics::BF16 },
        chunk: 8192,
        limits: Limits { step_tokens: 8192, batch: 1, context: 32768 },
        kv: KvBudget::Tokens(kv_tokens),
        policy: Policy::Mixed,
        seed: 0,
        graphs: true,
        fault,
    };
    (source, options)
}

fn prefill(engine: &mut Engine) -> Result<Report, Error> {
    engine.submit(Request::greedy(vec![0; 8192], 1)).unwrap();
    engine.step().map(|out| out.unwrap().memory)
}

#[test]
fn the_incident_full_window_logits_stand_at_the_peak() {
    // Room enough for both, to see who owns the peak.
    let (source, options) = nine_b(Some(Fault::FullWindowHead), DType::Bf16, 8192);
    let mut engine = Engine::load(&Device::plan(card("h200"), 100 << 30), source, options, &mut |_, _| {}).unwrap();
    let report = prefill(&mut engine).unwrap();
    let logits = report.owners.iter().find(|(owner, _)| owner.to_string() == "head.linear.logits");
    assert_eq!(logits.map(|(_, bytes)| *bytes), Some(8192 * 248_320 * 2), "{:?}", report.owners);
    assert_eq!(8192u64 * 248_320 * 2, 4_068_474_880);
}

#[test]
fn the_incident_on_a_24_gb_card_with_the_kv_pool_fixed() {
    let spec = card("rtx-4090");
    let slab = spec.slab_bytes(None);
    // The largest KV pool that leaves the right version a little over 1 GiB: the fault needs 3.79 GiB.
    let (source, options) = nine_b(None, DType::Bf16, 64);
    let small = sizing::size(&spec, slab, &source, options.numerics, options.limits, options.kv).unwrap();
    let spare = slab - small.total();
    let kv_tokens = 64 + (spare - (1 << 30)) / 32_768 / 64 * 64;
    let (source, options) = nine_b(None, DType::Bf16, kv_tokens);
    let mut right = Engine::load(&Device::plan(spec.clone(), slab), source, options, &mut |_, _| {}).unwrap();
    let spare = slab - right.sizing().total();
    assert!(spare < 3 << 30, "{spare} B to spare");
    let report = prefill(&mut right).unwrap();
    assert!(report.free < 3 << 30 && report.free >= spare);

    let (source, options) = nine_b(Some(Fault::FullWindowHead), DType::Bf16, kv_tokens);
    let mut faulty = Engine::load(&Device::plan(spec.clone(), slab), source, options, &mut |_, _| {}).unwrap();
    let err = prefill(&mut faulty).unwrap_err();
    let oom = err.out_of_memory().expect("an out-of-memory");
    assert_eq!(oom.tag, "head.linear.logits");
    assert_eq!(oom.requested, 4_068_474_880);
    assert!(oom.owners[0].0.contains("weights"), "{:?}", oom.owners);
    assert_eq!(faulty.unfinished(), 1, "a refused step changes nothing");
}

#[test]
fn a_budget_that_is_too_small_names_every_term_and_what_fits() {
    let source = ModelRef::parse("qwen3.5-9b@bf16").unwrap().open(0).unwrap();
    let limits = Limits { step_tokens: 32768, batch: 4, context: 32768 };
    let slab = 20 << 30;
    let err = sizing::size(&card("rtx-4090"), slab, &source, Numerics::BF16, limits, KvBudget::Fill).unwrap_err();
    let Error::Budget(budget) = &err else { panic!("{err}") };
    let names: Vec<&str> = budget.terms.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["weights", "kv", "state", "inputs", "transient"]);
    assert!(budget.first.is_some());
    let text = err.to_string();
    assert!(text.contains("--chunk ") && text.contains("fits"), "{text}");
    // What it says fits does fit.
    let chunk = text.split("--chunk ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    let limits = Limits { step_tokens: chunk, ..limits };
    sizing::size(&card("rtx-4090"), slab, &source, Numerics::BF16, limits, KvBudget::Fill).unwrap();
    // And a card that cannot hold the weights says so.
    let err = sizing::size(&card("rtx-4090"), 8 << 30, &source, Numerics::BF16, limits, KvBudget::Fill).unwrap_err();
    assert!(err.to_string().contains("smaller model"), "{err}");
}
