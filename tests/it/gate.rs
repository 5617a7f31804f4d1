//! `highwater gate` through the binary: every exit code, on rows a card wrote, and on runs made here with seeded faults.

use std::path::Path;

use serde_json::{Value, json};

use crate::verb::{Ran, highwater};

/// Rows of an H200's sweep with twelve repetitions: medians of seven of its own decode steps stand for theirs.
fn rows() -> Vec<Value> {
    let file = "tests/fixtures/runs/qwen3.6-27b-fp8-channel-decode/sweep.jsonl";
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
    let mut rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for row in &mut rows {
        let steps: Vec<f64> = row["tpot_samples_ms"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
        let median = |seven: &[f64]| {
            let mut sorted = seven.to_vec();
            sorted.sort_by(f64::total_cmp);
            sorted[3]
        };
        row["tpot_passes_ms"] = steps[5..].chunks(7).take(12).map(median).collect::<Vec<f64>>().into();
        let others = steps[5..].chunks(7).take(12).map(|seven| 20.0 * median(seven));
        row["prefill_samples_ms"] = others.collect::<Vec<f64>>().into();
    }
    rows
}

/// Writes a run folder and gives its path.
fn write(dir: &Path, name: &str, rows: &[Value]) -> String {
    let folder = dir.join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let text = rows.iter().fold(String::new(), |text, row| text + &row.to_string() + "\n");
    std::fs::write(folder.join("sweep.jsonl"), text).unwrap();
    folder.display().to_string()
}

fn scale(row: &mut Value, column: &str, by: f64) {
    for ms in row[column].as_array_mut().unwrap() {
        *ms = json!(ms.as_f64().unwrap() * by);
    }
}

fn grow(row: &mut Value, by: i64) {
    for column in ["transient_peak_bytes", "decode_transient_bytes", "slab_bytes"] {
        row[column] = json!(row[column].as_i64().unwrap() + by);
    }
    if by > 0 {
        row["owners"].as_array_mut().unwrap().push(json!({"tag": "decode.extra", "bytes": by}));
    } else {
        let held = row["owners"][0]["bytes"].as_i64().unwrap();
        row["owners"][0]["bytes"] = json!(held + by);
    }
}

fn refuse_memory(row: &mut Value) {
    row["status"] = json!("oom_predicted");
    row["detail"] = json!("head.linear.logits needs 9 B");
    row["kv_tokens"] = Value::Null;
}

/// Gates the card's rows, changed by `change`, against themselves.
fn gate(change: impl FnOnce(&mut Vec<Value>), flags: &[&str]) -> Ran {
    let dir = tempfile::tempdir().unwrap();
    let base = write(dir.path(), "base", &rows());
    let mut changed = rows();
    change(&mut changed);
    let candidate = write(dir.path(), "candidate", &changed);
    highwater(&[&["gate", &base, &candidate], flags].concat())
}

fn holds(ran: &Ran, code: i32, words: &[&str]) {
    assert_eq!(ran.code, code, "{}{}", ran.out, ran.err);
    for word in words {
        assert!(ran.out.contains(word) || ran.err.contains(word), "{word} is missing in:\n{}{}", ran.out, ran.err);
    }
}

#[test]
fn a_run_held_to_itself_is_the_same_and_exits_0() {
    let ran = gate(|_| {}, &["--strict"]);
    holds(&ran, 0, &["3 cells, 6 SAME, bytes of 3 of 3 cells exact; exit 0"]);
    assert_eq!(ran.err, "");
}

#[test]
fn three_percent_slower_exits_3_and_faster_0() {
    let ran = gate(|rows| scale(&mut rows[1], "tpot_passes_ms", 1.03), &[]);
    holds(&ran, 3, &["SLOWER: qwen3.6-27b@fp8-channel cuda h200", "batch 8", "+3.00 [", "error: "]);
    holds(&gate(|rows| scale(&mut rows[1], "prefill_samples_ms", 1.03), &[]), 3, &["prefill"]);
    holds(&gate(|rows| scale(&mut rows[1], "tpot_passes_ms", 1.03), &["--threshold", "5%"]), 0, &["6 SAME"]);
    holds(&gate(|rows| scale(&mut rows[1], "tpot_passes_ms", 0.97), &[]), 0, &["BETTER", "FASTER"]);
}

#[test]
fn growth_exits_4_and_names_the_owner_in_one_line_and_4_wins_over_3() {
    let ran = gate(|rows| grow(&mut rows[0], 12 << 20), &[]);
    holds(&ran, 4, &[]);
    let lines: Vec<&str> = ran.out.lines().filter(|line| line.contains("decode.extra")).collect();
    assert_eq!(lines.len(), 1, "{}", ran.out);
    assert!(lines[0].starts_with("MORE MEMORY") && lines[0].contains("`decode.extra` +12.0 MiB"), "{}", lines[0]);
    holds(&gate(|rows| grow(&mut rows[0], 256), &[]), 4, &["`decode.extra` +256 B"]);
    let both = |rows: &mut Vec<Value>| {
        grow(&mut rows[0], 256);
        scale(&mut rows[1], "tpot_passes_ms", 1.03);
    };
    holds(&gate(both, &[]), 4, &["MORE MEMORY: ", "\nSLOWER: "]);
}

#[test]
fn a_cell_that_fitted_and_does_not_exits_4() {
    let ran = gate(|rows| refuse_memory(&mut rows[2]), &[]);
    holds(
        &ran,
        4,
        &["FITS NO MORE: ", "ok before, now oom_predicted", "was 8192 (all that were tried) and is none fits"],
    );
}

#[test]
fn memory_for_speed_is_a_trade_and_no_pass() {
    let saved = |rows: &mut Vec<Value>| {
        grow(&mut rows[0], -4096);
        scale(&mut rows[0], "tpot_passes_ms", 1.05);
    };
    holds(&gate(saved, &[]), 3, &["TRADE: ", "gains memory and loses TPOT", "less memory"]);
    let spent = |rows: &mut Vec<Value>| {
        grow(&mut rows[0], 4096);
        scale(&mut rows[0], "tpot_passes_ms", 0.95);
    };
    holds(&gate(spent, &[]), 4, &["TRADE: ", "gains TPOT and loses memory"]);
}

#[test]
fn failed_and_missing_cells_exit_1() {
    let failed = |rows: &mut Vec<Value>| {
        rows[0]["status"] = json!("error");
        rows[0]["detail"] = json!("panicked");
    };
    holds(&gate(failed, &[]), 1, &["FAILED: ", "error (panicked)"]);
    holds(&gate(|rows| rows[0]["checked"] = json!(false), &[]), 1, &["FAILED: ", "results are wrong"]);
    holds(&gate(|rows| rows.truncate(1), &[]), 1, &["MISSING: ", "2 x MISSING"]);
    holds(&gate(|rows| rows.truncate(1), &["--subset", "--strict"]), 0, &["1 cells, 2 SAME"]);
}

#[test]
fn what_is_inconclusive_says_the_next_command_and_exits_5_only_when_strict() {
    let few = |rows: &mut Vec<Value>| rows[0]["tpot_passes_ms"] = json!([9.7, 9.7, 9.7]);
    let ran = gate(few, &[]);
    holds(&ran, 0, &["INCONCLUSIVE: ", "3 samples; 10 are needed", "1 INCONCLUSIVE"]);
    let next = ran.out.lines().find_map(|line| line.trim().strip_prefix("next: ")).unwrap();
    let again = "highwater sweep qwen3.6-27b@fp8-channel";
    assert!(next.starts_with(again) && next.contains("--axis batch=1 ") && next.contains("--cell-seconds"), "{next}");
    assert!(next.contains("candidate-again-2 && highwater gate ") && next.ends_with("--subset"), "{next}");
    holds(&gate(few, &["--strict"]), 5, &["exit 5"]);
    let dirty = |rows: &mut Vec<Value>| rows[0]["dirty"] = json!("thermal throttling");
    holds(&gate(dirty, &["--strict"]), 5, &["the candidate is dirty (thermal throttling)"]);
}

#[test]
fn other_conditions_are_refused_unless_forced_and_exit_5_when_strict() {
    let driver = |rows: &mut Vec<Value>| rows.iter_mut().for_each(|row| row["driver"] = json!("590.1"));
    let named = "driver: not said in the baseline, 590.1 in the candidate (3 cells)";
    holds(&gate(driver, &[]), 1, &["not measured alike", named, "--force"]);
    holds(&gate(driver, &["--strict"]), 5, &[named]);
    holds(&gate(driver, &["--force"]), 0, &["CONDITIONS: ", named, "6 SAME"]);
    holds(&gate(driver, &["--force", "--strict"]), 5, &["CONDITIONS: "]);
    let card = |rows: &mut Vec<Value>| rows.iter_mut().for_each(|row| row["card"] = json!("h100"));
    holds(&gate(card, &[]), 1, &["card: h200 in the baseline, h100 in the candidate"]);
    let method = |rows: &mut Vec<Value>| rows.iter_mut().for_each(|row| row["method"] = json!(7));
    holds(&gate(method, &["--strict"]), 5, &["method: 1 in the baseline, 7 in the candidate"]);
    let schema = |rows: &mut Vec<Value>| rows.iter_mut().for_each(|row| row["schema"] = json!(4));
    holds(&gate(schema, &[]), 1, &["schema: 3 in the baseline, 4 in the candidate"]);
}

#[test]
fn a_baseline_with_a_fault_is_refused_and_one_unchecked_times_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut faulty = rows();
    faulty[1]["fault"] = json!("slow-kernel");
    let (base, candidate) = (write(dir.path(), "base", &faulty), write(dir.path(), "candidate", &rows()));
    holds(&highwater(&["gate", &base, &candidate]), 1, &["cannot be a baseline", "--fault slow-kernel"]);
    let mut unchecked = rows();
    unchecked[1]["checked"] = Value::Null;
    let base = write(dir.path(), "unchecked", &unchecked);
    let ran = highwater(&["gate", &base, &candidate]);
    holds(&ran, 0, &["the baseline passed no check that its results repeat", "4 SAME"]);
}

#[test]
fn usage_is_2_and_what_cannot_be_read_is_1_and_says_where() {
    let dir = tempfile::tempdir().unwrap();
    let good = write(dir.path(), "good", &rows());
    for args in [
        vec!["gate"],
        vec!["gate", &good],
        vec!["gate", &good, &good, "--threshold", "one"],
        vec!["gate", "--criterion", ".", "--baseline", "new"],
        vec!["gate", "--self-test", "1", "--fault", "extra-buffer"],
        vec!["gate", &good, &good, "--device", "cpu"],
        vec!["ab", "--base", "a"],
        vec!["ab", "--base", "a", "--cand", "b", "--", "plan"],
    ] {
        assert_eq!(highwater(&args).code, 2, "{args:?}");
    }
    let mut broken = rows();
    broken[1]["free_bytes"] = json!(1);
    let broken = write(dir.path(), "broken", &broken);
    let empty = write(dir.path(), "empty", &[]);
    let none = dir.path().join("none").display().to_string();
    std::fs::create_dir(dir.path().join("bare")).unwrap();
    let bare = dir.path().join("bare").display().to_string();
    let noise = dir.path().join("noise.jsonl");
    std::fs::write(&noise, b"\x00\xff{]\n").unwrap();
    let noise = noise.display().to_string();
    for (path, words) in [
        (&broken, "the row contradicts itself: resident "),
        (&empty, "holds no rows"),
        (&none, "none"),
        (&bare, "holds no sweep.jsonl and no sweep.csv"),
        (&noise, "noise.jsonl line 1"),
    ] {
        for args in [["gate", path, &good], ["gate", &good, path]] {
            holds(&highwater(&args), 1, &["error: ", words]);
        }
    }
}

#[test]
fn markdown_and_json_hold_what_the_terminal_shows() {
    let dir = tempfile::tempdir().unwrap();
    let mut changed = rows();
    scale(&mut changed[1], "tpot_passes_ms", 1.03);
    grow(&mut changed[0], 1 << 20);
    let (base, candidate) = (write(dir.path(), "base", &rows()), write(dir.path(), "candidate", &changed));
    let file = dir.path().join("gate.md").display().to_string();
    let ran = highwater(&["gate", &base, &candidate, "--json", "--markdown", &file]);
    assert_eq!(ran.code, 4, "{}", ran.err);
    let found: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(found["exit_code"], 4);
    assert_eq!(found["compared"].as_array().unwrap().len(), 6);
    assert_eq!(found["bytes"][0]["owners"][0]["part"], "decode.extra");
    let kinds: Vec<&str> =
        found["findings"].as_array().unwrap().iter().map(|finding| finding["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["memory_regression", "speed_regression"]);
    let markdown = std::fs::read_to_string(&file).unwrap();
    assert!(markdown.contains("| SLOWER |") && markdown.contains("- MORE MEMORY: "), "{markdown}");
    let nowhere = dir.path().join("none/gate.md").display().to_string();
    holds(&highwater(&["gate", &base, &base, "--markdown", &nowhere]), 1, &["none/gate.md"]);
    // A slip of the hand costs no record.
    let record = format!("{base}/sweep.jsonl");
    let before = std::fs::read(&record).unwrap();
    holds(&highwater(&["gate", &base, &base, "--markdown", &record]), 2, &["is not a .md file"]);
    assert!(before == std::fs::read(&record).unwrap());
}

#[test]
fn a_seeded_buffer_of_a_real_run_is_found_and_csv_baselines_hold_bytes() {
    let dir = tempfile::tempdir().unwrap();
    for device in ["plan", "cpu"] {
        let sweep = |name: &str, extra: &[&str]| {
            let out = dir.path().join(format!("{device}-{name}")).display().to_string();
            let args = ["sweep", "tiny", "--axis", "chunk=16,64", "--output", "3", "--device", device, "--out", &out];
            // Too few for a verdict on speed: the machine may be busy with other tests during one run and not the other.
            let ran = highwater(&[&args[..], &["--repetitions", "3"], extra].concat());
            assert_eq!(ran.code, 0, "{}", ran.err);
            out
        };
        let (base, same) = (sweep("base", &[]), sweep("same", &[]));
        let faulty = sweep("faulty", &["--fault", "extra-buffer"]);
        let ran = highwater(&["gate", &base, &same]);
        assert!(ran.out.contains("bytes of 2 of 2 cells exact") && ran.code == 0, "{}{}", ran.out, ran.err);
        let ran = highwater(&["gate", &base, &faulty]);
        holds(&ran, 4, &["2 x MORE MEMORY"]);
        let named =
            |line: &&str| line.starts_with("MORE MEMORY") && line.contains("peak: `other.fault.extra_buffer` +");
        assert_eq!(ran.out.lines().filter(named).count(), 2, "{}", ran.out);
        let csv = format!("{base}/sweep.csv");
        holds(&highwater(&["gate", &csv, &faulty]), 4, &["2 x MORE MEMORY"]);
        let uncompared = highwater(&["gate", &csv, &format!("{same}/sweep.csv"), "--strict"]);
        match device {
            "plan" => holds(&uncompared, 0, &["bytes of 2 of 2 cells exact; exit 0"]),
            _ => holds(&uncompared, 5, &["no times are compared: give sweep.jsonl for "]),
        }
        holds(&highwater(&["gate", &faulty, &base]), 1, &["cannot be a baseline", "extra-buffer"]);
    }
}

#[test]
fn bytes_outside_the_slab_are_held_too_and_clocks_and_tokens_are_looked_at() {
    let grown = |rows: &mut Vec<Value>| {
        for column in ["graphs_bytes", "modules_bytes"] {
            rows[0][column] = json!(rows[0][column].as_u64().unwrap() + (1 << 30));
        }
    };
    let ran = gate(grown, &[]);
    holds(&ran, 4, &["1 x MORE MEMORY", "outside the slab +2.00 GiB", "modules +1.00 GiB, graphs +1.00 GiB"]);
    let unheld = |rows: &mut Vec<Value>| rows[1]["unattributed_bytes"] = json!(900 << 20);
    holds(&gate(unheld, &[]), 4, &["FAILED: ", "its ledger does not hold: +900.0 MiB"]);
    holds(&gate(|rows| rows[1]["unattributed_bytes"] = json!(-(900 << 20)), &[]), 1, &["its ledger does not hold"]);
    let little = |rows: &mut Vec<Value>| rows[2]["blas_bytes"] = json!(rows[2]["blas_bytes"].as_u64().unwrap() + 4096);
    holds(&gate(little, &["--strict"]), 0, &["NOTE: 1 of 3 cells take more memory outside the slab, at most"]);

    let dir = tempfile::tempdir().unwrap();
    let with = |name: &str, mhz: f64, hash: &str, why: &str| {
        let mut rows = rows();
        for row in &mut rows {
            (row["sm_clock_mhz"], row["output_hash"], row["throttled"]) = (json!(mhz), json!(hash), json!(why));
        }
        write(dir.path(), name, &rows)
    };
    let (base, slow) = (with("fast", 1980.0, "a", ""), with("slow", 900.0, "b", "heat"));
    let ran = highwater(&["gate", &base, &slow, "--strict"]);
    let clocks = "times are not compared: the SM clock was 1980 MHz in the baseline and 900 MHz in the candidate";
    holds(
        &ran,
        5,
        &[clocks, "NOTE: 3 of 3 cells generated other tokens", "NOTE: clocks were held down by nothing", "heat"],
    );
    assert_eq!(ran.out.matches("INCONCLUSIVE: ").count(), 3, "{}", ran.out);
}

#[test]
fn one_file_held_to_itself_is_said_and_a_summary_is_said_once_where_it_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let (base, mut slower) = (write(dir.path(), "base", &rows()), rows());
    scale(&mut slower[1], "tpot_passes_ms", 1.03);
    let slower = write(dir.path(), "slower", &slower);
    let file = format!("{base}/sweep.jsonl");
    holds(&highwater(&["gate", &base, &file, "--strict"]), 0, &["NOTE: baseline and candidate are one run"]);
    let piped = highwater(&["gate", &base, &slower]);
    assert!(piped.code == 3 && piped.err.contains("; exit 3"), "{}", piped.err);
    let kept = dir.path().join("said.txt");
    let mut gate = std::process::Command::new(env!("CARGO_BIN_EXE_highwater"));
    gate.args(["gate", &base, &slower]).stdout(std::fs::File::create(&kept).unwrap());
    let ran = gate.output().unwrap();
    assert_eq!((ran.status.code(), String::from_utf8_lossy(&ran.stderr).as_ref()), (Some(3), ""));
    assert_eq!(std::fs::read_to_string(&kept).unwrap().matches("; exit 3").count(), 1);
}

#[test]
fn fifty_repeats_raise_no_alarm_and_every_seeded_buffer_is_found() {
    let dir = tempfile::tempdir().unwrap();
    for device in ["plan", "cpu"] {
        let out = dir.path().join(device).display().to_string();
        let cell = ["--chunk", "8", "--output", "2", "--repetitions", "10", "--device", device, "--out", &out];
        let ran = highwater(&[&["gate", "--self-test", "50", "--json"], &cell[..]].concat());
        let said: Value = serde_json::Deserializer::from_str(&ran.out).into_iter().next().unwrap().unwrap();
        let rate = |name: &str| (said[name]["hits"].as_u64().unwrap(), said[name]["trials"].as_u64().unwrap());
        assert_eq!((rate("memory_alarms"), rate("buffers_found")), ((0, 50), (50, 50)), "{}", ran.out);
        assert!(said["buffer"].as_str().unwrap().contains("fault.extra_buffer` +"), "{}", said["buffer"]);
        let file = std::fs::read_to_string(dir.path().join(device).join("self-test.json")).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&file).unwrap(), said);
        let csv = std::fs::read_to_string(dir.path().join(device).join("self-test.csv")).unwrap();
        // A comparison with itself and one with the slowdown, of prefill and of TPOT; a plan has no times.
        assert_eq!(csv.lines().count(), if device == "plan" { 0 } else { 1 + 50 * 4 });
        if device == "cpu" {
            for score in said["scores"].as_array().unwrap() {
                let (width, verdict) = (score["half_width"].as_f64().unwrap(), score["verdict"].as_str().unwrap());
                assert!(width <= 0.01 || verdict != "PASSED", "{score}");
            }
        }
    }
}
