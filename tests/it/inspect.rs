//! `synth` and `inspect` as a user runs them: counts of published checkpoints, what is wrong, time and memory.

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use highwater::checkpoint::{Geometry, Recipe};
use serde_json::Value;

fn binary() -> &'static str {
    env!("CARGO_BIN_EXE_highwater")
}

fn run(args: &[&str]) -> Output {
    Command::new(binary()).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn ok(args: &[&str]) -> String {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn sparse(model: &str, dir: &Path) {
    ok(&["synth", model, dir.to_str().unwrap(), "--sparse"]);
}

fn report(model: &str) -> Value {
    serde_json::from_str(&ok(&["inspect", model, "--json"])).unwrap()
}

/// Linears of a report whose scheme begins so.
fn linears(report: &Value, scheme: &str) -> u64 {
    let of = |v: &&Value| v["scheme"].as_str().unwrap().starts_with(scheme);
    report["verdicts"].as_array().unwrap().iter().filter(of).map(|v| v["linears"].as_u64().unwrap()).sum()
}

#[test]
fn unsloth_s_27b_has_its_published_counts() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("model");
    sparse("qwen3.8-27b@unsloth-nvfp4", &folder);
    for model in [folder.to_str().unwrap(), "qwen3.8-27b@unsloth-nvfp4"] {
        let report = report(model);
        assert_eq!((linears(&report, "nvfp4"), linears(&report, "fp8"), linears(&report, "bf16")), (168, 233, 96));
        assert_eq!(report["head"]["scheme"], "fp8 channel");
        let bf16 = report["verdicts"].as_array().unwrap().iter().find(|v| v["scheme"] == "bf16").unwrap();
        let roles: Vec<_> = bf16["roles"].as_array().unwrap().iter().map(|r| r["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["linear_attn.in_proj_b", "linear_attn.in_proj_a"]);
        assert_eq!(report["kv_scale_layers"].as_array().unwrap().len(), 16);
        assert_eq!(report["faults"], serde_json::json!([]));
    }
}

/// Headers alone: 27 billion parameters, 2 seconds, and no more than 100 MB of addresses, be they touched or not.
#[test]
fn inspect_of_a_27b_folder_takes_under_two_seconds_and_100_mb() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("model");
    sparse("qwen3.8-27b@unsloth-nvfp4", &folder);
    let begun = Instant::now();
    let output = Command::new("sh")
        .args(["-c", "ulimit -v 102400 && exec \"$0\" inspect \"$1\" --json", binary()])
        .arg(&folder)
        .output()
        .unwrap();
    let took = begun.elapsed();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(took < Duration::from_secs(2), "{took:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(linears(&report, "nvfp4"), 168);
}

#[test]
fn every_recipe_is_written_and_inspected_at_full_size() {
    for name in Recipe::names() {
        let recipe = Recipe::parse(name).unwrap();
        for geometry in ["qwen3.8-27b", "qwen3.6-35b-a3b:layers=4"] {
            if recipe.check(&Geometry::builtin(geometry).unwrap()).is_err() {
                continue;
            }
            let model = format!("{geometry}@{name}");
            let dir = tempfile::tempdir().unwrap();
            sparse(&model, dir.path());
            let (mut disk, mut drawn) = (report(dir.path().to_str().unwrap()), report(&model));
            disk["model"] = Value::Null;
            drawn["model"] = Value::Null;
            assert_eq!(disk, drawn, "{model}");
        }
    }
}

#[test]
fn every_contradiction_is_listed_and_the_verb_fails() {
    let dir = tempfile::tempdir().unwrap();
    sparse("tiny-moe@nvfp4", dir.path());
    let path = dir.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let ignore = config["quantization_config"]["ignore"].as_array_mut().unwrap();
    ignore.push("model.layers.0.mlp.experts.0.up_proj".into());
    ignore.push("model.layers.3.self_attn.q_proj".into());
    std::fs::write(&path, config.to_string()).unwrap();
    let folder = dir.path().to_str().unwrap();
    let output = run(&["inspect", folder]);
    assert_eq!(output.status.code(), Some(1));
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(out.matches("contradiction: ").count(), 2, "{out}");
    for says in ["layers.0.mlp.experts.0.up_proj", "layers.3.self_attn.q_proj", "nvfp4, global divides"] {
        assert!(out.contains(says), "{says}: {out}");
    }
    assert!(err.contains("2 contradictions"), "{err}");
    let report: Value = serde_json::from_slice(&run(&["inspect", folder, "--json"]).stdout).unwrap();
    assert_eq!(report["faults"].as_array().unwrap().len(), 2);
}

#[test]
fn what_is_skipped_is_told_by_rule() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/moe_vl_bf16");
    let out = ok(&["inspect", model.to_str().unwrap()]);
    assert!(out.contains("skipped by rule vision: ") && out.contains("model.visual."), "{out}");
    assert!(out.contains("bf16") && out.contains("KV scales: none"), "{out}");
}

#[test]
fn what_cannot_be_written_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().to_str().unwrap();
    sparse("tiny@bf16", dir.path());
    for (args, code, says) in [
        (["synth", "tiny@bf16", folder], 2, "entries"),
        (["synth", folder, "somewhere"], 2, "GEOMETRY"),
        (["synth", "tiny@nvfp5", "somewhere"], 1, "recipes are bf16, fp8-tensor"),
        (["synth", "tiny-moe@unsloth-nvfp4", "somewhere"], 1, "dense"),
        (["synth", "tiny@bf16", "/dev/null/model"], 1, "/dev/null/model"),
    ] {
        let output = run(&args);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {err}");
        assert!(err.contains(says), "{args:?}: {err}");
    }
    assert!(!Path::new("somewhere").exists());
    let help = ok(&["synth", "--help"]);
    assert!(help.contains("@unsloth-nvfp4-fast") && help.contains("head=bf16"), "{help}");
}
