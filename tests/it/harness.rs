//! The `highwater` binary as a user runs it: exit codes, files, what it prints.

use std::path::{Path, PathBuf};
use std::time::Instant;

use assert_cmd::Command;

use crate::fixture::{CASES, distance, folder, golden};

struct Ran {
    code: i32,
    out: String,
    err: String,
}

fn highwater(args: &[&str]) -> Ran {
    let output = Command::cargo_bin("highwater").unwrap().args(args).output().unwrap();
    Ran {
        code: output.status.code().expect("no signal"),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

fn ok(args: &[&str]) -> String {
    let ran = highwater(args);
    assert_eq!(ran.code, 0, "{args:?}\n{}{}", ran.out, ran.err);
    ran.out
}

fn path(dir: &Path, name: &str) -> String {
    dir.join(name).display().to_string()
}

/// Rows of a sweep's JSONL.
fn rows(dir: &str) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(Path::new(dir).join("sweep.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn the_bare_sweep_measures_tiny_here_and_plans_the_usual_models() {
    let dir = tempfile::tempdir().unwrap();
    let out = path(dir.path(), "run");
    let begun = Instant::now();
    let text = ok(&["sweep", "--out", &out]);
    assert!(begun.elapsed().as_secs() < 60, "{:?}", begun.elapsed());
    for word in
        ["qwen3.5-4b", "qwen3.5-9b", "qwen3.6-27b", "qwen3.6-35b-a3b", "does not fit", "TPOT: time per output token"]
    {
        assert!(text.contains(word), "{word} is missing in:\n{text}");
    }
    let rows = rows(&out);
    let measured: Vec<_> = rows.iter().filter(|r| r["device"] == "cpu").collect();
    assert!(measured.len() >= 6);
    for row in &measured {
        assert_eq!(row["status"], "ok");
        for column in ["prefill_tok_s", "tpot_ms", "ttft_ms", "floor_tpot_ms"] {
            assert!(row[column].as_f64().unwrap() > 0.0, "{column} of {row}");
        }
        assert_eq!(row["checked"], true);
        let bytes = |c: &str| row[c].as_u64().unwrap();
        assert_eq!(bytes("slab_bytes"), bytes("resident_bytes") + bytes("transient_peak_bytes") + bytes("free_bytes"));
        let parts: u64 = ["weights_bytes", "kv_bytes", "state_bytes", "inputs_bytes"].iter().map(|c| bytes(c)).sum();
        assert_eq!(parts, bytes("resident_bytes"));
        assert!(row["argv"].as_str().unwrap().contains("sweep"));
        assert!(row["time"].as_str().unwrap().ends_with('Z'));
    }
    for row in rows.iter().filter(|r| r["device"] == "plan") {
        assert!(row["tpot_ms"].is_null() && row["prefill_tok_s"].is_null(), "a plan measures nothing");
    }
    for file in ["sweep.csv", "DEFINITIONS.txt"] {
        assert!(Path::new(&out).join(file).is_file(), "{file}");
    }
    let pictures: Vec<PathBuf> = std::fs::read_dir(&out)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "svg"))
        .collect();
    assert!(pictures.len() >= 3, "{pictures:?}");
}

#[test]
fn cpu_and_plan_rows_of_a_sweep_have_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let run = |device: &str| {
        let out = path(dir.path(), device);
        let model = folder("moe_bf16").display().to_string();
        ok(&[
            "sweep",
            &model,
            "--device",
            device,
            "--card",
            "rtx-5090",
            "--axis",
            "chunk=16,100",
            "--axis",
            "batch=1,3",
            "--axis",
            "depth=0,70",
            "--output",
            "3",
            "--out",
            &out,
        ]);
        rows(&out)
    };
    let (cpu, plan) = (run("cpu"), run("plan"));
    assert_eq!(cpu.len(), 8);
    for (a, b) in cpu.iter().zip(&plan) {
        for column in [
            "chunk",
            "batch",
            "depth",
            "status",
            "weights_bytes",
            "kv_bytes",
            "state_bytes",
            "inputs_bytes",
            "resident_bytes",
            "transient_peak_bytes",
            "prefill_transient_bytes",
            "decode_transient_bytes",
            "free_bytes",
            "fragmentation_bytes",
            "largest_block_bytes",
            "largest_block_tag",
            "owners",
        ] {
            assert_eq!(a[column], b[column], "{column} of chunk {} batch {}", a["chunk"], a["batch"]);
        }
    }
}

/// The incident at its size: 9B in bf16 on a 24 GB card, the KV pool fixed so that 1 to 3 GiB are to spare.
#[test]
fn a_full_window_head_is_an_oom_row_that_names_logits_and_the_frontier_shows_both() {
    let dir = tempfile::tempdir().unwrap();
    let common = ["--card", "rtx-4090", "--kv-tokens", "98304", "--logits", "bf16"];
    let sweep = |name: &str, extra: &[&str]| {
        let out = path(dir.path(), name);
        let mut args = vec!["sweep", "qwen3.5-9b@bf16", "--device", "plan", "--axis", "chunk=8192", "--out", &out];
        args.extend(common);
        args.extend(extra);
        ok(&args);
        rows(&out).remove(0)
    };
    let right = sweep("right", &[]);
    assert_eq!(right["status"], "ok");
    let free = right["free_bytes"].as_u64().unwrap();
    assert!(free < 3 << 30, "{free} B to spare");
    let faulty = sweep("faulty", &["--fault", "full-window-head"]);
    assert_eq!(faulty["status"], "oom");
    assert_eq!(faulty["oom_tag"], "head.linear.logits");
    assert_eq!(faulty["oom_requested_bytes"], 4_068_474_880u64);
    assert!(faulty["owners"][0]["tag"].as_str().unwrap().contains("weights"));
    assert_eq!(faulty["fault"], "full-window-head");

    let frontier = |extra: &[&str]| {
        let mut args = vec!["frontier", "qwen3.5-9b@bf16", "--context", "32768"];
        args.extend(common);
        args.extend(extra);
        let text = ok(&args);
        let line = text.lines().nth(1).unwrap().to_owned();
        line.split_whitespace().skip_while(|w| *w != "1").nth(1).unwrap().parse::<u64>().unwrap()
    };
    let (right, faulty) = (frontier(&[]), frontier(&["--fault", "full-window-head"]));
    assert!(right >= 8192 && faulty < 8192 && faulty > 0, "right {right}, faulty {faulty}");
}

#[test]
fn logits_of_every_fixture_are_the_golden_ones() {
    let dir = tempfile::tempdir().unwrap();
    for case in CASES {
        let golden = golden(case);
        let ids = path(dir.path(), &format!("{case}.json"));
        std::fs::write(&ids, serde_json::to_string(&golden.prompt(65)).unwrap()).unwrap();
        let model = folder(case).display().to_string();
        for (rows, name) in [("all", "fp32/logits_all.65"), ("last", "fp32/logits_last.65")] {
            let out = path(dir.path(), &format!("{case}.{rows}.safetensors"));
            ok(&["logits", &model, "--ids", &format!("@{ids}"), "--rows", rows, "--out", &out]);
            let bytes = std::fs::read(&out).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let logits = file.tensor("logits").unwrap();
            let got: Vec<f32> = logits.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            let want = &golden.floats[name];
            assert_eq!(
                logits.shape(),
                [if rows == "all" { 65 } else { 1 }, want.len() / if rows == "all" { 65 } else { 1 }]
            );
            assert!(distance(&got, want) <= 1e-3, "{case}, {rows}");
        }
    }
}

#[test]
fn generate_prints_the_golden_tokens() {
    let golden = golden("dense_bf16");
    let ids: Vec<String> = golden.prompt(7).iter().map(u32::to_string).collect();
    let model = folder("dense_bf16").display().to_string();
    let text = ok(&["generate", &model, "--ids", &ids.join(","), "--max-tokens", "4", "--dtype", "f32"]);
    let want: Vec<String> = golden.ints["fp32/greedy.7"][..4].iter().map(i32::to_string).collect();
    assert_eq!(text.trim(), want.join(","));
}

#[test]
fn plan_says_whether_it_fits_and_what_it_bounds() {
    let begun = Instant::now();
    let text =
        ok(&["plan", "qwen3.6-27b@bf16", "--card", "h200", "--chunk", "8192", "--batch", "8", "--context", "32768"]);
    // A second on a release build; test builds are not that.
    assert!(begun.elapsed().as_secs_f64() < 10.0);
    for word in
        ["verdict: fits if overhead <= ", "weights", "53797294336", "floor", "measured -", "largest chunk that fits"]
    {
        assert!(text.contains(word), "{word} is missing in:\n{text}");
    }
    let text = ok(&["plan", "qwen3.5-9b", "--card", "rtx-4060-ti-16g"]);
    assert!(text.contains("verdict: does not fit") && text.contains("smaller model"), "{text}");
}

#[test]
fn mistakes_exit_2_and_failures_1_with_what_to_do() {
    for (args, code, words) in [
        (vec!["fly"], 2, "unrecognized"),
        (vec!["sweep", "--axis", "chunks=1"], 2, "chunk, batch, depth"),
        (vec!["plan", "qwen3.5-9b", "--card", "rtx-9999"], 2, "rtx-5090"),
        (vec!["sweep", "tiny", "--vram", "1MiB", "--out", "unused"], 2, "--vram"),
        (vec!["sweep", "tiny", "--fault", "nothing"], 2, "full-window-head"),
        (vec!["plan", "qwen3-next-80b"], 1, "qwen3.5-9b"),
        (vec!["plan", "./no-such-folder"], 1, "no-such-folder"),
        (vec!["generate", "tiny", "--ids", "999999"], 2, "ids go from 0"),
        (vec!["generate", "tiny", "--ids", "1", "--top-p", "0"], 2, "top_p"),
        (vec!["generate", "tiny", "--ids", "1", "--device", "plan"], 1, "--device cpu"),
    ] {
        let ran = highwater(&args);
        assert_eq!(ran.code, code, "{args:?}: {}", ran.err);
        assert!(ran.err.starts_with("error:") && ran.err.contains(words), "{args:?}: {}", ran.err);
    }
}

#[test]
fn a_failed_cell_exits_1_and_every_other_row_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let out = path(dir.path(), "run");
    let ran = highwater(&["sweep", "tiny", "--axis", "chunk=16,64", "--fault", "nan-logits", "--out", &out]);
    assert_eq!(ran.code, 1, "{}", ran.err);
    let rows = rows(&out);
    assert_eq!(rows.len(), 2);
    assert!(rows.iter().all(|r| r["status"] == "error" && r["detail"].as_str().unwrap().contains("no finite value")));
}

#[test]
fn the_readme_s_table_is_what_the_program_prints() {
    let dir = tempfile::tempdir().unwrap();
    let out = path(dir.path(), "run");
    ok(&["sweep", "--axis", "chunk=16", "--out", &out]);
    let fits = std::fs::read_to_string(Path::new(&out).join("fits.md")).unwrap();
    let readme = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let begin = readme.find("<!-- fits").unwrap();
    let begin = begin + readme[begin..].find('\n').unwrap() + 1;
    let end = readme.find("<!-- /fits -->").unwrap();
    assert_eq!(&readme[begin..end], fits, "replace the table in README.md by fits.md of a bare `highwater sweep`");
}
