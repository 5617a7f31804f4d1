//! The plan gate: the committed plans are today's, and a seeded regression loses a card by name.

use std::path::{Path, PathBuf};

use crate::verb::highwater;

fn committed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("results/plan")
}

/// A copy of the committed plans to change.
fn copy() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(committed()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

/// The gate itself: every model and recipe on every card, the tables too, in two minutes of two cores.
#[test]
fn the_committed_plans_are_what_is_planned_now() {
    const MOST_CPU_SECONDS: f64 = 2.0 * 120.0;
    // Whoever else uses this machine makes it wait longer, and takes no more of its processors.
    let output = std::process::Command::new("bash")
        .args(["-c", "TIMEFORMAT='%U %S'; time \"$0\" replan"])
        .arg(assert_cmd::cargo::cargo_bin("highwater"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(0), "{out}{err}");
    let times = err.lines().last().unwrap().split(' ').map(|seconds| seconds.parse::<f64>().unwrap());
    let seconds: f64 = times.sum();
    println!("{out}{seconds:.1} s of processors");
    assert!(seconds < MOST_CPU_SECONDS, "{seconds} s");
    assert!(out.contains("on 16 cards") && out.ends_with("no difference\n"), "{out}");
    let bytes: u64 =
        std::fs::read_dir(committed()).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    assert!(bytes < 400 << 10, "{bytes} B are more than anybody reviews");
}

#[test]
fn a_seeded_extra_buffer_is_growth_by_name_and_only_that() {
    let subset = ["replan", "--only", "qwen3.5-9b@bf16", "--card", "rtx-4090", "--card", "h200"];
    let clean = highwater(&subset);
    assert_eq!(clean.code, 0, "{}{}", clean.out, clean.err);
    let ran = highwater(&[&subset[..], &["--fault", "extra-buffer"]].concat());
    assert_eq!(ran.code, 4, "{}{}", ran.out, ran.err);
    let grown = ran.out.lines().find(|line| line.starts_with("grown: ") && line.contains("chunk 8192")).unwrap();
    // 8192 rows of 4096 in bf16.
    for word in ["qwen3.5-9b@bf16 on rtx-4090, h200", "transient", "other.fault.extra_buffer +67108864"] {
        assert!(grown.contains(word), "{word}: {grown}");
    }
    assert!(ran.err.contains("--update"), "{}", ran.err);
}

#[test]
fn a_seeded_full_window_head_loses_fits_by_model_card_and_buffer() {
    let ran = highwater(&["replan", "--only", "qwen3.5-9b@bf16", "--card", "4090", "--fault", "full-window-head"]);
    assert_eq!(ran.code, 4, "{}{}", ran.out, ran.err);
    let lost: Vec<&str> = ran.out.lines().filter(|line| line.starts_with("lost fit: ")).collect();
    let line = lost.iter().find(|line| line.contains("batch 1:")).unwrap_or_else(|| panic!("{}", ran.out));
    for word in ["qwen3.5-9b@bf16 on rtx-4090", "largest chunk 8192=all -> ", "head.linear.logits +"] {
        assert!(line.contains(word), "{word}: {line}");
    }
    // The worst comes first.
    assert!(ran.out.lines().nth(1).unwrap().starts_with("lost fit: "), "{}", ran.out);
}

/// The baseline's edges are those that `frontier` finds by running whole cells.
#[test]
fn the_edges_are_those_of_frontier() {
    let mut compared = 0;
    for (model, file, cards) in [
        ("qwen3.5-9b@bf16", "qwen3.5-9b", ["rtx-4090", "l40s"]),
        ("qwen3.6-27b@unsloth-nvfp4", "qwen3.5-27b", ["rtx-5090", "rtx-6000-ada"]),
        ("qwen3.6-35b-a3b@fp8-channel", "qwen3.5-35b-a3b", ["l40s", "a100-40g"]),
    ] {
        let table = std::fs::read_to_string(committed().join("frontier.md")).unwrap();
        let recipe = model.split_once('@').unwrap().1;
        let section = table.split("\n## ").find(|section| section.starts_with(file)).unwrap();
        let line = |start: &str| -> Vec<String> {
            let line = section.lines().find(|line| line.starts_with(&format!("| {start} "))).unwrap();
            line.split('|').map(|cell| cell.trim().to_owned()).collect()
        };
        let (header, edges) = (line("recipe"), line(recipe));
        for card in cards {
            let at = header.iter().position(|name| name == card).unwrap();
            let mut kept: Vec<&str> = edges[at].split(" / ").collect();
            kept.resize(3, kept[0]);
            let ran = highwater(&["frontier", model, "--card", card, "--axis", "batch=1,8,64"]);
            assert_eq!(ran.code, 0, "{}", ran.err);
            for (kept, line) in kept.into_iter().zip(ran.out.lines().skip(1)) {
                let found = match kept {
                    "-" => line.contains("does not fit"),
                    "all" => line.contains("(all of the context)"),
                    edge => match edge.strip_suffix('+') {
                        Some(edge) => line.contains(&format!(" {edge} or more")),
                        None => line.contains(&format!(" {edge} ")),
                    },
                };
                assert!(found, "{model} on {card}: {kept} is kept, and frontier says\n{line}");
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 18);
}

#[test]
fn a_baseline_that_is_old_missing_or_changed_by_hand_says_what_to_do() {
    let dir = copy();
    let at = dir.path().display().to_string();
    let tiny = |extra: &[&str]| highwater(&[&["replan", at.as_str(), "--only", "tiny@bf16"][..], extra].concat());
    assert_eq!(tiny(&[]).code, 0);
    let path = dir.path().join("tiny.txt");
    let text = std::fs::read_to_string(&path).unwrap();

    // Fewer bytes than were kept: better, and the baseline is to be written anew. More: a regression.
    let line = text.lines().find(|line| line.starts_with("bytes kv")).unwrap();
    let bytes = line.split_whitespace().nth(5).unwrap();
    let number: u64 = bytes.parse().unwrap();
    std::fs::write(&path, text.replacen(bytes, &(number + 256).to_string(), 1)).unwrap();
    let better = tiny(&[]);
    assert_eq!(better.code, 1, "{}{}", better.out, better.err);
    assert!(
        better.out.contains("better: tiny@bf16") && better.err.contains("--update"),
        "{}{}",
        better.out,
        better.err
    );
    std::fs::write(&path, text.replacen(bytes, &(number - 256).to_string(), 1)).unwrap();
    let worse = tiny(&[]);
    assert_eq!(worse.code, 4, "{}{}", worse.out, worse.err);
    assert!(worse.out.contains("grown: tiny@bf16 on rtx-3090, "), "{}", worse.out);

    std::fs::write(&path, text.replacen("format   1", "format   7", 1)).unwrap();
    let other = tiny(&[]);
    assert_eq!(other.code, 1);
    assert!(other.err.contains("tiny.txt") && other.err.contains("format 1"), "{}", other.err);
    std::fs::write(&path, "\u{0}\u{1}garbage\n").unwrap();
    assert_eq!(tiny(&[]).code, 1);
    std::fs::write(&path, "x".repeat(2 << 20)).unwrap();
    assert!(tiny(&[]).err.contains("longer than"));
    std::fs::remove_file(&path).unwrap();
    let missing = tiny(&[]);
    assert_eq!(missing.code, 1);
    assert!(missing.out.contains("tiny.txt is missing"), "{}", missing.out);

    // Where there is nothing to hold them to, nothing is planned first.
    let empty = tempfile::tempdir().unwrap();
    for at in [empty.path().to_path_buf(), empty.path().join("none")] {
        let ran = highwater(&["replan", at.to_str().unwrap()]);
        assert!(ran.code == 1 && ran.out.is_empty() && ran.err.contains("holds no plans"), "{}{}", ran.out, ran.err);
        assert!(ran.err.contains("help: run it at the top of the source tree"), "{}", ran.err);
    }
}

#[test]
fn what_can_never_be_planned_is_a_usage_error() {
    for args in [
        &["replan", "--card", "rtx-9999"][..],
        &["replan", "--card", "host"],
        &["replan", "--only", "no-such-model"],
        &["replan", "--fault", "gremlin"],
        &["replan", "--update", "--only", "tiny"],
        &["replan", "--update", "--fault", "extra-buffer"],
    ] {
        let ran = highwater(args);
        assert_eq!(ran.code, 2, "{args:?}: {}{}", ran.out, ran.err);
    }
}

#[test]
fn traffic_is_printed_by_module_with_the_bound_of_each_card() {
    let ran = highwater(&[
        "plan",
        "qwen3.6-27b@fp8-channel",
        "--traffic",
        "--context",
        "1024",
        "--card",
        "h200",
        "--card",
        "rtx-5090",
    ]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    for word in ["gdn_state", "kv ", "head", "on h200 (4800 GB/s): TPOT at least 5.6", "on rtx-5090"] {
        assert!(ran.out.contains(word), "{word}:\n{}", ran.out);
    }
    let refused = highwater(&["plan", "tiny", "--traffic", "--context", "100000"]);
    assert_eq!(refused.code, 2, "{}", refused.err);
}
