//! The `highwater` binary as a user runs it: exit codes, files, what it prints.

use std::path::{Path, PathBuf};
use std::time::Instant;

use assert_cmd::Command;

use crate::fixture::{CASES, distance, folder, golden};
use crate::verb::{highwater, ok, rows};

fn path(dir: &Path, name: &str) -> String {
    dir.join(name).display().to_string()
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
            "--repetitions",
            "2",
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
        // After the batch, 1, and the depth, 0.
        line.split_whitespace().skip_while(|w| *w != "1").nth(2).unwrap().parse::<u64>().unwrap()
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
        ["verdict: fits (overhead 617414656 B measured", "weights", "53797294336", "floor", "largest chunk that fits"]
    {
        assert!(text.contains(word), "{word} is missing in:\n{text}");
    }
    let text = ok(&["plan", "qwen3.6-27b@bf16", "--card", "h100", "--chunk", "8192", "--context", "32768"]);
    assert!(text.contains("verdict: fits if overhead <= ") && text.contains("measured -"), "{text}");
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

#[test]
fn a_pool_too_small_for_the_batch_is_an_answer_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    let out = path(dir.path(), "run");
    let axes = ["--axis=chunk=16,512", "--axis=batch=1,4", "--output=4", "--prompt=100", "--repetitions=2"];
    // One sequence takes two pages of 64 tokens: 128 hold a batch of 1 and no batch of 4; 64 hold no prompt.
    for (kv, statuses) in [
        ("128", ["ok", "ok", "oom_predicted", "oom_skipped_dominated"]),
        ("64", ["oom_predicted", "oom_skipped_dominated", "oom_skipped_dominated", "oom_skipped_dominated"]),
    ] {
        let out = format!("{out}{kv}");
        ok(&[&["sweep", "tiny", "--kv-tokens", kv, "--out", &out], &axes[..]].concat());
        let rows = rows(&out);
        assert_eq!(rows.iter().map(|r| r["status"].as_str().unwrap()).collect::<Vec<_>>(), statuses);
        for row in &rows {
            if row["status"] == "ok" {
                assert_eq!(row["preempted"], 0);
            }
            if row["status"] == "oom_predicted" {
                let bytes = |c: &str| row[c].as_u64().unwrap();
                assert_eq!(row["oom_tag"], "cache.kv");
                assert!(bytes("oom_short_bytes") > 0);
                let pages = if kv == "128" { (8, 2) } else { (2, 1) };
                assert_eq!(bytes("oom_requested_bytes") * pages.1, bytes("oom_free_bytes") * pages.0);
                let fits = if kv == "128" { "--kv-tokens 512 fits" } else { "--kv-tokens 128 fits" };
                assert!(row["detail"].as_str().unwrap().contains(fits), "{row}");
                assert!(row["tpot_ms"].is_null() && row["prefill_ms"].is_null());
            }
        }
    }
    // What it advises is enough.
    let advised = path(dir.path(), "advised");
    ok(&[&["sweep", "tiny", "--kv-tokens", "512", "--out", &advised], &axes[..]].concat());
    assert!(rows(&advised).iter().all(|r| r["status"] == "ok"));

    let text = ok(&["plan", "tiny", "--vram", "1GiB", "--context", "512", "--kv-tokens", "64"]);
    assert!(text.contains("verdict: does not fit") && text.contains("--kv-tokens 512 fits"), "{text}");
    let text = ok(&["plan", "tiny", "--vram", "1GiB", "--context", "512", "--kv-tokens", "512"]);
    assert!(text.contains("verdict: fits") && text.contains("512 (all of the context)"), "{text}");
    let frontier = |kv: &str| {
        let text = ok(&["frontier", "tiny", "--vram", "1GiB", "--context", "1024", "--kv-tokens", kv]);
        text.lines().nth(1).unwrap().to_owned()
    };
    // 64 tokens of prompt and two of output, the last of which is never stored, take 65.
    let none = frontier("64");
    assert!(none.contains("does not fit") && none.contains("cache.kv"), "{none}");
    // Five pages: a chunk of 256 stores 257 tokens.
    let some = frontier("320");
    assert!(some.contains(" 256 ") && some.contains("cache.kv"), "{some}");
    // Where every answer is a run, it is the plan's.
    let args = ["frontier", "tiny", "--vram", "1GiB", "--context", "1024", "--kv-tokens", "320", "--device", "cpu"];
    let run = ok(&args).lines().nth(1).unwrap().to_owned();
    let words = |line: &str| line.split_whitespace().map(|word| word.replace("cpu", "plan")).collect::<Vec<_>>();
    assert_eq!((words(&run), run.contains(" cpu ")), (words(&some), true));
}

#[test]
fn what_of_a_card_is_not_emulated_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let sweep = |name: &str, extra: &[&str]| {
        let out = path(dir.path(), name);
        ok(&[&["sweep", "tiny", "--axis", "chunk=16", "--output", "2", "--repetitions", "1", "--out", &out], extra]
            .concat())
    };
    let card = ["--card", "rtx-4090", "--vram", "16GiB"];
    let text = sweep("a", &[&card[..], &["--device", "cpu"]].concat());
    let said = "rtx-4090 is emulated in its bytes and tactics alone: times are this processor's, and the ";
    assert!(text.contains(said) && text.contains("outside the slab (assumed)"), "{text}");
    for (name, extra) in [("b", vec!["--device", "cpu"]), ("c", [&card[..], &["--device", "plan"]].concat())] {
        let text = sweep(name, &extra);
        assert!(!text.contains("is emulated in"), "{text}");
    }
}

#[test]
fn frontier_answers_each_batch_and_depth_once_and_refuses_a_chunk() {
    let text = ok(&[
        "frontier",
        "tiny",
        "--vram",
        "1GiB",
        "--context",
        "1024",
        "--axis",
        "batch=1,2",
        "--axis",
        "depth=0,512",
    ]);
    let header: Vec<&str> = text.lines().next().unwrap().split_whitespace().collect();
    let (batch, depth) =
        (header.iter().position(|w| *w == "batch").unwrap(), header.iter().position(|w| *w == "depth").unwrap());
    let pairs: Vec<(String, String)> = text
        .lines()
        .skip(1)
        .map(|line| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .map(|words| (words[batch].clone(), words[depth].clone()))
        .collect();
    assert_eq!(pairs, [("1", "0"), ("2", "0"), ("1", "512"), ("2", "512")].map(|(b, d)| (b.into(), d.into())));
    assert!(text.contains("1024 (all of the context)") && text.contains("512 (all of the context)"), "{text}");
    for (args, words) in [
        (["--axis", "chunk=64"], "--max-chunk"),
        (["--axis", "depth=8190"], "--context"),
        (["--max-chunk", "63"], "64"),
        (["--context", "999999"], "999999"),
    ] {
        let ran = highwater(&[&["frontier", "tiny"], &args[..]].concat());
        assert_eq!(ran.code, 2, "{args:?}: {}", ran.err);
        assert!(ran.err.contains(words), "{args:?}: {}", ran.err);
    }
}

#[test]
fn a_sweep_that_cannot_open_its_model_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let out = path(dir.path(), "run");
    assert_eq!(highwater(&["sweep", "./no-such-folder", "--out", &out]).code, 1);
    assert!(!Path::new(&out).exists());
    ok(&["sweep", "tiny", "--axis", "chunk=16", "--out", &out]);
}

#[test]
fn logits_say_where_they_come_from_and_a_bad_path_or_prompt_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let out = path(dir.path(), "l.safetensors");
    let model = folder("dense_bf16");
    // From inside the folder, whose name the file is to give.
    let args = ["logits", ".", "--ids", "5,7", "--seed", "3", "--fault", "slow-kernel", "--out", &out];
    Command::cargo_bin("highwater").unwrap().current_dir(&model).args(args).assert().success();
    let bytes = std::fs::read(&out).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let notes = header.metadata().as_ref().unwrap();
    assert_eq!((notes["model"].as_str(), notes["seed"].as_str()), ("dense_bf16", "3"));
    assert_eq!(notes["fault"], "slow-kernel");
    assert!(notes["weights"].starts_with("headers:"), "{}", notes["weights"]);
    std::fs::remove_file(&out).unwrap();
    assert_eq!(highwater(&["logits", "tiny", "--ids", "99999999", "--out", &out]).code, 2);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    // The path is looked at first: this model would take minutes to make, or more memory than there is.
    let begun = Instant::now();
    let nowhere = path(dir.path(), "none/l.safetensors");
    let ran = highwater(&["logits", "qwen3.5-0.8b", "--ids", "5", "--out", &nowhere]);
    assert!(ran.code == 1 && ran.err.contains("cannot create"), "{}", ran.err);
    assert!(begun.elapsed().as_secs() < 10);
}

#[test]
fn generate_says_when_it_was_cut_short_and_stops_without_a_reader() {
    let cut = highwater(&["generate", "tiny", "--ids", "1,2", "--max-tokens", "200", "--kv-tokens", "64"]);
    assert_eq!(cut.code, 0, "{}", cut.err);
    assert_eq!(cut.out.trim().split(',').count(), 63);
    assert!(cut.err.contains("stopped after 63 of 200 tokens") && cut.err.contains("holds 64"), "{}", cut.err);
    let whole = highwater(&["generate", "tiny", "--ids", "1,2", "--max-tokens", "3"]);
    assert!(!whole.err.contains("stopped"), "{}", whole.err);

    // Its reader is gone before the first token: it ends at once and well, not after all of them.
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_highwater"))
        .args(["generate", "tiny", "--ids", "1,2", "--max-tokens", "8000"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let begun = Instant::now();
    assert!(child.wait().unwrap().success());
    assert!(begun.elapsed().as_secs() < 10, "{:?}", begun.elapsed());
}
