//! What a cell does, through the real binary: every workload on the cpu and planned, axes of words, when repetitions end,
//! and the seeded leak and fragmenter that a ladder must name.

use std::path::Path;

use assert_cmd::Command;
use serde_json::Value;

struct Ran {
    code: i32,
    text: String,
    rows: Vec<Value>,
}

/// Runs `sweep` with `args` into a folder of its own.
fn sweep(args: &[&str]) -> Ran {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let mut command = Command::cargo_bin("highwater").unwrap();
    let output = command.arg("sweep").args(args).arg("--out").arg(&out).output().unwrap();
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    let rows = std::fs::read_to_string(out.join("sweep.jsonl")).unwrap_or_default();
    let rows = rows.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    Ran { code: output.status.code().expect("no signal"), text, rows }
}

fn rows(args: &[&str]) -> Vec<Value> {
    let ran = sweep(args);
    assert_eq!(ran.code, 0, "{args:?}\n{}", ran.text);
    ran.rows
}

fn trace(dir: &Path, lines: &[&str]) -> String {
    let path = dir.join("burst.jsonl");
    std::fs::write(&path, lines.join("\n")).unwrap();
    format!("trace:{}", path.display())
}

/// Columns that a plan and a run share.
const PLANNED: [&str; 19] = [
    "workload",
    "chunk",
    "batch",
    "depth",
    "prompt",
    "output",
    "context",
    "kv_tokens",
    "status",
    "kv_bytes",
    "state_bytes",
    "inputs_bytes",
    "resident_bytes",
    "transient_peak_bytes",
    "prefill_transient_bytes",
    "decode_transient_bytes",
    "fragmentation_bytes",
    "owners",
    "stages",
];

#[test]
fn every_workload_takes_the_planned_bytes_and_generates_the_same_each_time() {
    let dir = tempfile::tempdir().unwrap();
    let steps = trace(
        dir.path(),
        &[
            r#"{"arrival_step": 0, "input_length": 100, "output_length": 9, "hash_ids": [1, 2]}"#,
            r#"{"arrival_step": 2, "input_length": 30, "output_length": 4}"#,
            r#"{"arrival_step": 2, "input_length": 7, "output_length": 1}"#,
            r#"{"arrival_step": 400, "input_length": 64, "output_length": 2}"#,
        ],
    );
    let run = |device: &str| {
        let mut args = vec!["tiny", "--device", device, "--card", "rtx-5090", "--vram", "2GiB"];
        args.extend(["--axis", "chunk=64,100", "--axis", "batch=3", "--axis", "depth=0,70", "--output", "12"]);
        args.extend(["--ladder-scale", "64", "--repetitions", "2", "--cell-seconds", "3600"]);
        for workload in ["fixed", "ladder", "many-short", "concurrent-prefill", "mixed", &steps] {
            args.extend(["--workload", workload]);
        }
        rows(&args)
    };
    let (cpu, plan) = (run("cpu"), run("plan"));
    assert_eq!((cpu.len(), plan.len()), (24, 24));
    for (a, b) in cpu.iter().zip(&plan) {
        for column in PLANNED {
            assert_eq!(a[column], b[column], "{column} of {} chunk {} depth {}", a["workload"], a["chunk"], a["depth"]);
        }
        assert_eq!((&a["status"], &a["checked"]), (&"ok".into(), &true.into()), "{a}");
        assert!(a["output_hash"].as_str().unwrap().starts_with("fnv1a64:") && b["output_hash"].is_null());
        assert!(a["ttft_ms"].as_f64().unwrap() > 0.0 && a["prefill_tok_s"].as_f64().unwrap() > 0.0);
        assert!(b["floor_prefill_tok_s"].as_f64().unwrap() > 0.0 && b["prefill_ms"].is_null());
        assert_eq!((&a["stopped_by"], &a["prefill_count"]), (&"count".into(), &2.into()));
        assert!(a["warm_up"].as_u64().unwrap() >= 1 && b["warm_up"].is_null());
        // There is no card here to be asked.
        for column in ["sm_clock_mhz", "throttled", "foreign_processes", "dirty", "temperature_c"] {
            assert!(a[column].is_null(), "{column}");
        }
    }
    let of = |name: &str| cpu.iter().filter(|r| r["workload"].as_str().unwrap().starts_with(name)).collect::<Vec<_>>();
    for row in of("ladder") {
        let stages = row["stages"].as_array().unwrap();
        let names: Vec<&str> = stages.iter().map(|stage| stage["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["prompt 32", "prompt 96", "prompt 192", "prompt 384", "prompt 32", "prompt 192"]);
        assert_eq!((&stages[4], &stages[5]), (&stages[0], &stages[2]));
        let peaks = stages.iter().map(|stage| stage["transient_peak_bytes"].as_u64().unwrap());
        assert_eq!(peaks.max(), row["transient_peak_bytes"].as_u64());
        assert!(row["prompt"].is_null() && row["output"] == 12);
    }
    for row in of("many-short") {
        assert_eq!(row["prompt"].as_u64().unwrap(), (row["chunk"].as_u64().unwrap() / 3).min(63));
        // All of them share one step.
        assert_eq!((&row["prefill_steps"], &row["decode_steps"]), (&1.into(), &11.into()));
    }
    for row in of("concurrent-prefill") {
        assert_eq!((&row["prefill_steps"], &row["decode_steps"], &row["output"]), (&1.into(), &0.into(), &1.into()));
        assert!(row["tpot_ms"].is_null());
    }
    for row in of("mixed") {
        // Each of the three prompts takes a step or two, in which three sequences wait for their tokens.
        let (stalled, steady) = (row["itl_stalled_count"].as_u64().unwrap(), row["itl_steady_count"].as_u64().unwrap());
        assert!((9..=18).contains(&stalled) && steady >= 11, "{stalled} {steady}");
        assert!(row["itl_stalled_ms"].as_f64().unwrap() > row["itl_steady_ms"].as_f64().unwrap(), "{row}");
    }
    for row in of("trace:burst.jsonl@") {
        assert!(row["prompt"].is_null() && row["itl_steady_count"].as_u64().unwrap() > 0);
    }
    for row in of("fixed") {
        assert!(row["itl_steady_ms"].is_null() && row["stages"].as_array().unwrap().is_empty());
    }
}

#[test]
fn a_trace_by_the_clock_computes_the_same_each_time_and_can_be_planned() {
    let dir = tempfile::tempdir().unwrap();
    let by_ms = trace(
        dir.path(),
        &[
            r#"{"timestamp": 0, "input_length": 40, "output_length": 30}"#,
            r#"{"timestamp": 3, "input_length": 90, "output_length": 3}"#,
            r#"{"timestamp": 900000, "input_length": 5, "output_length": 2}"#,
        ],
    );
    let args = [
        "tiny",
        "--axis",
        "chunk=64",
        "--axis",
        "batch=2",
        "--workload",
        &by_ms,
        "--repetitions=3",
        "--cell-seconds=3600",
    ];
    let cpu = rows(&[&args[..], &["--device", "cpu"]].concat());
    assert_eq!((&cpu[0]["checked"], &cpu[0]["preempted"]), (&true.into(), &0.into()), "{}", cpu[0]);
    assert!(cpu[0]["warm_up"].as_u64().unwrap() >= 2);
    // Fifteen minutes without a request are not waited for.
    let plan = rows(&[&args[..], &["--device", "plan", "--card", "rtx-5090"]].concat());
    assert_eq!((&plan[0]["status"], &plan[0]["workload"]), (&"ok".into(), &cpu[0]["workload"]));
}

#[test]
fn a_hostile_trace_is_a_usage_error_that_names_the_line() {
    let dir = tempfile::tempdir().unwrap();
    let good = r#"{"timestamp": 5, "input_length": 3, "output_length": 1}"#;
    for bad in ["{", r#"{"timestamp": 4, "input_length": 3, "output_length": 1}"#, r#"{"timestamp": 6}"#, "\u{0}"] {
        let ran = sweep(&["tiny", "--device", "cpu", "--workload", &trace(dir.path(), &[good, bad])]);
        assert_eq!(ran.code, 2, "{}", ran.text);
        assert!(ran.text.contains("line 2") && ran.rows.is_empty(), "{}", ran.text);
    }
    // A request that the model cannot take is an answer.
    let long = trace(dir.path(), &[r#"{"timestamp": 0, "input_length": 16777216, "output_length": 1}"#]);
    let row =
        rows(&["tiny", "--device", "plan", "--card", "h200", "--axis", "chunk=64", "--workload", &long]).remove(0);
    assert_eq!(row["status"], "unsupported");
}

#[test]
fn a_seeded_leak_and_a_fragmenter_are_named_in_one_line() {
    for (fault, words, tag) in [
        ("leak", "a leak: prompt 32 took", "`other.fault.leak` still holds"),
        ("fragment", "fragmentation: prompt 32 took", "`other.fault.fragment` still holds"),
    ] {
        for device in ["cpu", "plan"] {
            let args = ["tiny", "--device", device, "--workload", "ladder", "--ladder-scale", "64"];
            let more = ["--axis", "chunk=64,512", "--repetitions", "1", "--output", "2", "--fault", fault];
            let ran = sweep(&[&args[..], &more].concat());
            assert_eq!((ran.code, ran.rows.len()), (1, 2), "{}", ran.text);
            for row in &ran.rows {
                let detail = row["detail"].as_str().unwrap();
                assert_eq!(row["status"], "error");
                assert!(detail.starts_with(words) && detail.contains(tag) && !detail.contains('\n'), "{detail}");
                assert_eq!(row["stages"].as_array().unwrap().len(), 6, "the numbers are kept");
            }
        }
        // Any other cell finds what is left behind, and one that is not faulty finds nothing.
        let fixed = ["tiny", "--device", "cpu", "--axis", "chunk=64", "--repetitions", "1", "--output", "2"];
        let ran = sweep(&[&fixed[..], &["--fault", fault]].concat());
        assert_eq!(ran.code, 1, "{fault}: {}", ran.text);
        let detail = ran.rows[0]["detail"].as_str().unwrap();
        assert!(detail.starts_with("a leak: the arena is not empty after the last step: `"), "{detail}");
        assert_eq!(rows(&fixed)[0]["status"], "ok");
    }
}

#[test]
fn repetitions_end_by_interval_by_time_and_by_count() {
    let run = |more: &[&str]| {
        let args = ["tiny", "--device", "cpu", "--axis", "chunk=64", "--output", "4"];
        rows(&[&args[..], more].concat()).remove(0)
    };
    let row = run(&["--precision", "50%", "--cell-seconds", "3600"]);
    assert_eq!(row["stopped_by"], "interval");
    let count = row["prefill_count"].as_u64().unwrap();
    assert!(count >= 5, "{count}");
    assert_eq!(row["tpot_passes_ms"].as_array().unwrap().len() as u64, count);
    assert_eq!(row["prefill_samples_ms"].as_array().unwrap().len() as u64, count);
    assert!(row["warm_up"].as_u64().unwrap() >= 1 && row["method"] == 2);
    let ends = |name: &str| row[name].as_f64().unwrap();
    assert!(ends("tpot_low_ms") <= ends("tpot_high_ms") && ends("prefill_low_ms") <= ends("prefill_high_ms"));
    let row = run(&["--cell-seconds", "0"]);
    assert_eq!((&row["stopped_by"], &row["prefill_count"], &row["checked"]), (&"time".into(), &1.into(), &true.into()));
    let row = run(&["--repetitions", "7", "--cell-seconds", "3600"]);
    assert_eq!((&row["stopped_by"], &row["prefill_count"]), (&"count".into(), &7.into()));
    for (flag, value) in
        [("--precision", "0"), ("--cell-seconds", "-1"), ("--repetitions", "0"), ("--ladder-scale", "0")]
    {
        let ran = sweep(&["tiny", "--device", "cpu", &format!("{flag}={value}")]);
        assert_eq!(ran.code, 2, "{flag} {value}: {}", ran.text);
    }
}

#[test]
fn workloads_are_a_list_and_an_unknown_one_names_its_own_flag() {
    let plan = ["tiny", "--device", "plan", "--card", "h200", "--axis", "chunk=64", "--axis", "batch=2"];
    let found = rows(&[&plan[..], &["--workload", "many-short,mixed", "--workload", "fixed"]].concat());
    let names: Vec<&str> = found.iter().map(|row| row["workload"].as_str().unwrap()).collect();
    assert_eq!(names, ["many-short", "mixed", "fixed"]);
    let ran = sweep(&[&plan[..], &["--workload", "fixed,steep"]].concat());
    assert!(ran.code == 2 && ran.text.contains("--workload: there is no workload `steep`"), "{}", ran.text);
}

#[test]
fn recipes_cards_and_kv_types_are_axes() {
    let found = rows(&[
        "tiny",
        "--device",
        "plan",
        "--vram",
        "2GiB",
        "--axis",
        "chunk=64",
        "--axis",
        "recipe=bf16,fp8-channel",
        "--axis",
        "card=rtx-4090,h200",
        "--axis",
        "kv-dtype=bf16,fp8",
        "--axis",
        "workload=fixed,many-short",
    ]);
    assert_eq!(found.len(), 16);
    let text = |row: &Value, column: &str| row[column].as_str().unwrap().to_owned();
    let seen: Vec<String> = found
        .iter()
        .map(|row| ["recipe", "card", "kv_dtype", "workload"].map(|column| text(row, column)).join(" "))
        .collect();
    assert_eq!(seen[0], "bf16 rtx-4090 bf16 fixed");
    assert_eq!(seen[3], "bf16 rtx-4090 fp8 many-short");
    assert_eq!(seen[15], "fp8-channel h200 fp8 many-short");
    assert!(found.iter().all(|row| row["status"] == "ok"), "{seen:?}");
    let bytes = |at: usize, column: &str| found[at][column].as_u64().unwrap();
    // Two pages and the reserved one, of half the bytes.
    assert_eq!(bytes(0, "kv_bytes"), 2 * bytes(2, "kv_bytes"));
    assert!(bytes(8, "weights_bytes") < bytes(0, "weights_bytes"));
    // Frontiers are of chunks; its axes are numbers.
    let mut command = Command::cargo_bin("highwater").unwrap();
    let output = command.args(["frontier", "tiny", "--axis", "recipe=bf16"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}
