//! The formats of a sweep's rows, each read by something other than what wrote it, and its numbers held against the rows.

use std::path::Path;
use std::process::{Command as Process, Stdio};

use serde_json::{Value, json};

use crate::verb::{ok, rows, run};

const RUN: &str = "tests/fixtures/runs/qwen3.6-27b-fp8-channel-decode";

/// What SQLite answers to `query` after it has loaded `sql`, as JSON rows. Python brings SQLite with it.
fn sqlite(sql: &str, query: &str) -> Vec<Value> {
    use std::io::Write as _;
    const LOAD: &str = "import json, sqlite3, sys\n\
        script, query = json.load(sys.stdin)\n\
        db = sqlite3.connect(':memory:')\n\
        db.executescript(script)\n\
        print(json.dumps(db.execute(query).fetchall()))";
    let mut python =
        Process::new("python3").args(["-c", LOAD]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    python.stdin.take().unwrap().write_all(json!([sql, query]).to_string().as_bytes()).unwrap();
    let output = python.wait_with_output().unwrap();
    assert!(output.status.success(), "SQLite refuses the script");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The files of a sweep over cells that fit, do not fit, and are not tried.
#[test]
fn a_sweep_writes_every_format_and_each_has_the_rows_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let formats = "csv,json,jsonl,md,sql,bmf,gh-benchmark,llama-bench,llama-bench-jsonl,llama-bench-sql,vllm";
    let printed = ok(&[
        "sweep",
        "tiny@bf16",
        "--device",
        "cpu",
        "--vram",
        "2GiB",
        "--axis",
        "chunk=16,64",
        "--axis",
        "batch=1,2",
        "--output",
        "4",
        "--format",
        formats,
        "--out",
        out.to_str().unwrap(),
    ]);
    assert!(printed.contains("bmf.json") && printed.contains("llama-bench.sql"), "{printed}");
    let rows = rows(&out);
    assert_eq!(rows.len(), 4);
    let read = |name: &str| std::fs::read_to_string(out.join(name)).unwrap();
    let parsed = |name: &str| -> Value { serde_json::from_str(&read(name)).unwrap() };

    assert_eq!(parsed("sweep.json").as_array().unwrap(), &rows);
    let mut csv = csv::Reader::from_path(out.join("sweep.csv")).unwrap();
    let headers = csv.headers().unwrap().clone();
    let tpot = headers.iter().position(|name| name == "tpot_ms").unwrap();
    for (record, row) in csv.records().zip(&rows) {
        assert_eq!(record.unwrap()[tpot].parse::<f64>().unwrap(), row["tpot_ms"].as_f64().unwrap());
    }
    let markdown = read("sweep.md");
    assert_eq!(markdown.lines().count(), 2 + rows.len());
    assert!(markdown.lines().all(|line| line.starts_with("| ") && line.ends_with(" |")), "{markdown}");

    let loaded = sqlite(
        &read("sweep.sql"),
        "SELECT chunk, batch, status, tpot_ms, transient_peak_bytes, oom_tag, checked, owners FROM highwater",
    );
    for (sql, row) in loaded.iter().zip(&rows) {
        let checked = i32::from(row["checked"].as_bool().unwrap());
        let wanted = json!([
            row["chunk"],
            row["batch"],
            row["status"],
            row["tpot_ms"],
            row["transient_peak_bytes"],
            null,
            checked
        ]);
        assert_eq!(sql.as_array().unwrap()[..7], wanted.as_array().unwrap()[..]);
        assert_eq!(serde_json::from_str::<Value>(sql[7].as_str().unwrap()).unwrap(), row["owners"]);
    }
    assert_eq!(loaded.len(), rows.len());

    let bmf = parsed("bmf.json");
    let github = parsed("gh-benchmark.json");
    for row in &rows {
        let part = format!(" chunk={} batch={} ", row["chunk"], row["batch"]);
        let (_, measures) = bmf.as_object().unwrap().iter().find(|(name, _)| name.contains(&part)).unwrap();
        assert_eq!(measures["tpot-ms"]["value"], row["tpot_ms"]);
        assert_eq!(measures["transient-peak-bytes"]["value"].as_f64(), row["transient_peak_bytes"].as_f64());
        for (end, column) in [("lower_value", "tpot_low_ms"), ("upper_value", "tpot_high_ms")] {
            assert_eq!(measures["tpot-ms"].get(end).cloned().unwrap_or(Value::Null), row[column]);
        }
        let entry = github.as_array().unwrap().iter().find(|entry| {
            let name = entry["name"].as_str().unwrap();
            name.contains(&part) && name.ends_with(" prefill-ms")
        });
        assert_eq!((&entry.unwrap()["value"], &entry.unwrap()["unit"]), (&row["prefill_ms"], &json!("ms")));
    }

    let records = parsed("llama-bench.json");
    assert_eq!(read("llama-bench.jsonl").lines().count(), records.as_array().unwrap().len());
    let of_sql = sqlite(&read("llama-bench.sql"), "SELECT test, avg_ts, n_prompt, n_gen, samples_ns FROM llama_bench");
    for (sql, record) in of_sql.iter().zip(records.as_array().unwrap()) {
        assert_eq!(
            [&sql[0], &sql[1], &sql[2], &sql[3]],
            ["test", "avg_ts", "n_prompt", "n_gen"].map(|key| &record[key])
        );
        assert_eq!(serde_json::from_str::<Value>(sql[4].as_str().unwrap()).unwrap(), record["samples_ns"]);
    }
    let prefill = records.as_array().unwrap().iter().find(|r| r["test"] == "pp64" && r["n_seqs"] == 1).unwrap();
    let row = rows.iter().find(|r| r["chunk"] == 64 && r["batch"] == 1).unwrap();
    let samples = row["prefill_samples_ms"].as_array().unwrap();
    let mean = samples.iter().map(|ms| 64_000.0 / ms.as_f64().unwrap()).sum::<f64>() / samples.len() as f64;
    assert!((prefill["avg_ts"].as_f64().unwrap() / mean - 1.0).abs() < 1e-12);

    let served = parsed("vllm.json");
    for (object, row) in served.as_array().unwrap().iter().zip(&rows) {
        assert_eq!((&object["completed"], &object["failed"]), (&row["batch"], &json!(0)));
        assert_eq!(object["total_output_tokens"].as_u64().unwrap(), 4 * row["batch"].as_u64().unwrap());
        assert!(object["duration"].as_f64().unwrap() > 0.0 && object["median_ttft_ms"].as_f64().unwrap() > 0.0);
        // Two prompts of a chunk each are two steps, after which the sequences are not in step.
        assert_eq!(object["median_tpot_ms"].is_number(), row["batch"] == 1);
    }
}

#[test]
fn an_ended_run_is_exported_with_the_numbers_of_its_rows_and_no_null_becomes_a_word() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let rows = rows(root.join(RUN));
    let records: Value = serde_json::from_str(&ok(&["export", RUN, "--format", "llama-bench"])).unwrap();
    let decode = records.as_array().unwrap().iter().find(|r| r["test"] == "tg31 @ d992" && r["n_seqs"] == 1).unwrap();
    // 31 steps of about 9.74 ms.
    let tpot = rows[0]["tpot_ms"].as_f64().unwrap();
    assert!((decode["avg_ts"].as_f64().unwrap() * tpot / 1000.0 - 1.0).abs() < 0.01, "{}", decode["avg_ts"]);
    assert_eq!(decode["samples_ns"].as_array().unwrap().len(), 3);
    for run in [RUN, "results/h200/incident-one-faulty", "results/qwen3.5-9b-on-rtx-4090"] {
        for format in ["csv", "json", "jsonl", "md", "sql", "bmf", "gh-benchmark", "llama-bench", "vllm"] {
            let text = ok(&["export", run, "--format", format]);
            let words: Vec<&str> = text.split(|c: char| !c.is_ascii_alphabetic()).collect();
            for word in ["NaN", "nan", "inf", "Infinity", "None"] {
                // vLLM's own way to say that requests are not spread over time.
                let allowed = format == "vllm" && word == "inf";
                assert!(allowed || !words.contains(&word), "{word} in {format} of {run}");
            }
        }
    }
    let loaded = sqlite(
        &ok(&["export", "results/h200/incident-one-faulty", "--format", "sql"]),
        "SELECT status, oom_requested_bytes, tpot_ms IS NULL FROM highwater ORDER BY chunk DESC",
    );
    assert_eq!(loaded, [json!(["oom", 4_068_474_880u64, 1]), json!(["ok", null, 0])]);
    let vllm: Value =
        serde_json::from_str(&ok(&["export", "results/h200/incident-one-faulty", "--format", "vllm"])).unwrap();
    assert_eq!((&vllm[0]["completed"], &vllm[0]["failed"], &vllm[0]["status"]), (&json!(0), &json!(1), &json!("oom")));
}

#[test]
fn export_names_what_it_cannot_read_and_never_writes_over_the_record() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().to_str().unwrap();
    let (code, _, err) = run(&["export", at, "--format", "json"]);
    assert!(code == 1 && err.contains("no run's folder"), "{code} {err}");
    std::fs::write(dir.path().join("sweep.jsonl"), "{\"schema\":4,\"tpot_ms\":\"fast\"}\n").unwrap();
    let (code, _, err) = run(&["export", at, "--format", "json"]);
    assert!(code == 1 && err.contains("line 1"), "{code} {err}");
    std::fs::write(dir.path().join("sweep.jsonl"), "{\"schema\":4}\n{\"schema\":4,").unwrap();
    let out = dir.path().join("rows.json");
    let (code, _, err) = run(&["export", at, "--format", "json", "--out", out.to_str().unwrap()]);
    assert!(code == 0 && err.contains("torn"), "{code} {err}");
    let rows: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(&out).unwrap()).unwrap();
    assert_eq!(rows.len(), 1);
    let record = dir.path().join("sweep.jsonl");
    let (code, _, err) = run(&["export", at, "--format", "json", "--out", record.to_str().unwrap()]);
    assert!(code == 2 && err.contains("record of the run"), "{code} {err}");
    let (code, _, _) = run(&["export", at, "--format", "yaml"]);
    assert_eq!(code, 2);
}
