//! A sweep over many machines: the command lines of the examples, run here, merged, and held against the whole sweep.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::verb::{code, output as run, rows, text};

const BIN: &str = env!("CARGO_BIN_EXE_highwater");

/// A shell's working folder in which `highwater` is this build's, and nothing computes.
fn shell(dir: &Path, script: &str, env: &[(&str, String)]) -> Output {
    let bin = dir.join("bin");
    if !bin.exists() {
        std::fs::create_dir(&bin).unwrap();
        symlink(BIN, bin.join("highwater")).unwrap();
    }
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("bash");
    command.args(["-euc", script]).current_dir(dir).env("PATH", path).env("DEVICE", "plan");
    command.envs(env.iter().map(|(name, value)| (name, value))).output().unwrap()
}

fn example(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("harness/examples").join(name)).unwrap()
}

/// YAML's literal blocks: the lines after one that ends in `|`, as far as they are indented more.
fn literal_blocks(yaml: &str) -> Vec<String> {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let lines: Vec<&str> = yaml.lines().collect();
    let mut blocks = Vec::new();
    for (at, opening) in lines.iter().enumerate().filter(|(_, line)| line.trim_end().ends_with('|')) {
        let inside = lines[at + 1..].iter().take_while(|line| line.trim().is_empty() || indent(line) > indent(opening));
        let inside: Vec<&str> = inside.copied().collect();
        let margin = inside.iter().filter(|line| !line.trim().is_empty()).map(|line| indent(line)).min().unwrap_or(0);
        blocks.push(inside.iter().map(|line| line.get(margin..).unwrap_or("")).collect::<Vec<_>>().join("\n"));
    }
    blocks
}

/// The value after `key` on the line that has it, once.
fn value<'a>(text: &'a str, key: &str) -> &'a str {
    let mut found = text.lines().filter_map(|line| Some(line.split_once(key)?.1.trim()));
    let value = found.next().unwrap_or_else(|| panic!("no {key}"));
    assert!(found.next().is_none(), "{key} twice");
    value
}

/// The sweep's command line without the flags of one shard.
fn unsharded(script: &str) -> String {
    let start = script.find("highwater sweep").unwrap();
    let command = script[start..].replace("\\\n", " ");
    let flags = command.find("--shard").unwrap();
    format!("{} --out whole", &command[..flags])
}

/// Everything but when it ran, as which part, and what a shard cannot know: that a cell of another did not fit.
fn comparable(dir: &Path) -> Vec<Value> {
    let mut rows = rows(dir);
    for row in &mut rows {
        for column in ["time", "run", "argv", "shard"] {
            row[column] = Value::Null;
        }
        if row["status"].as_str().unwrap().starts_with("oom") {
            *row = serde_json::json!({ "cell": row["cell"], "status": "does not fit" });
        }
    }
    rows
}

fn check(dir: &Path, script: &str, merge: &str) {
    let merged = shell(dir, merge, &[]);
    assert_eq!(code(&merged), 0, "{merge}: {}", text(&merged));
    let whole = shell(dir, &unsharded(script), &[]);
    assert_eq!(code(&whole), 0, "{}", text(&whole));
    let (parts, whole) = (comparable(&dir.join("sweep/whole")), comparable(&dir.join("whole")));
    assert_eq!(parts.len(), 10);
    assert_eq!(parts, whole);
    let shards: Vec<Value> = rows(dir.join("sweep/whole")).iter().map(|row| row["shard"].clone()).collect();
    for shard in ["1/3", "2/3", "3/3"] {
        assert!(shards.iter().filter(|of| *of == shard).count() >= 3, "{shards:?}");
    }
}

#[test]
fn the_slurm_example_s_array_makes_the_whole_sweep() {
    let script = example("slurm.sbatch");
    let (first, last) = value(&script, "#SBATCH --array=").split_once('-').unwrap();
    let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
    assert_eq!((first, last), (1, 3));
    let dir = tempfile::tempdir().unwrap();
    for task in first..=last {
        let env = [("SLURM_ARRAY_TASK_ID", task.to_string()), ("SLURM_ARRAY_TASK_COUNT", last.to_string())];
        let ran = shell(dir.path(), &script, &env);
        assert_eq!(code(&ran), 0, "{}", text(&ran));
    }
    let merge = script.lines().find_map(|line| line.split_once("--wrap '")?.1.split('\'').next()).unwrap();
    check(dir.path(), &script, merge);
}

#[test]
fn the_github_example_s_matrix_makes_the_whole_sweep() {
    let yaml = example("github-matrix.yml");
    let shards: Vec<&str> = value(&yaml, "        shard:").trim_matches(['[', ']']).split(", ").collect();
    let blocks = literal_blocks(&yaml);
    let block = |word: &str| blocks.iter().find(|block| block.contains(word)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    for shard in &shards {
        let script = block("highwater sweep").replace("${{ matrix.shard }}", shard);
        let script = script.replace("${{ strategy.job-total }}", &shards.len().to_string());
        assert!(!script.contains("{{"), "{script}");
        let ran = shell(dir.path(), &script, &[]);
        assert_eq!(code(&ran), 0, "{}", text(&ran));
    }
    check(dir.path(), block("highwater sweep"), block("highwater merge"));
}

#[test]
fn the_kubernetes_example_s_pods_make_the_whole_sweep() {
    let yaml = example("kubernetes.yaml");
    let pods: usize = value(&yaml, "  completions: ").parse().unwrap();
    let shards = value(&yaml, "name: SHARDS, value: \"").trim_end_matches([' ', '}', '"']);
    assert_eq!(shards, pods.to_string());
    let script = literal_blocks(&yaml).remove(0);
    let dir = tempfile::tempdir().unwrap();
    for pod in 0..pods {
        let env = [("JOB_COMPLETION_INDEX", pod.to_string()), ("SHARDS", shards.to_owned())];
        let ran = shell(dir.path(), &script, &env);
        assert_eq!(code(&ran), 0, "{}", text(&ran));
    }
    let merge = yaml.lines().find_map(|line| line.split_once("cd /sweep && ")?.1.split('\'').next()).unwrap();
    check(dir.path(), &script, merge);
}

/// Shards `of` of a small sweep of nine cells, in folders 1, 2 and 3.
fn shards(dir: &Path, of: &[usize], extra: &[&str]) {
    for shard in of {
        let (part, out) = (format!("{shard}/3"), dir.join(shard.to_string()).display().to_string());
        let args = ["sweep", "tiny", "--device", "plan", "--output", "4", "--shard", &part, "--out", &out];
        let axes = ["--axis", "chunk=16,64,128", "--axis", "batch=1,2,3"];
        let ran = run(&[&args[..], &axes[..], extra].concat());
        assert_eq!(code(&ran), 0, "{}", text(&ran));
    }
}

fn merge(dir: &Path, of: &[&str], out: &str, extra: &[&str]) -> Output {
    let of: Vec<String> = of.iter().map(|name| dir.join(name).display().to_string()).collect();
    let out = dir.join(out).display().to_string();
    let of: Vec<&str> = of.iter().map(String::as_str).collect();
    run(&[&["merge", "--out", &out], &of[..], extra].concat())
}

#[test]
fn missing_cells_are_named_and_a_partial_merge_can_be_gone_on_with() {
    let dir = tempfile::tempdir().unwrap();
    shards(dir.path(), &[1, 3], &[]);
    let refused = merge(dir.path(), &["1", "3"], "out", &[]);
    let said = text(&refused);
    assert!(code(&refused) == 1 && said.contains("3 of 9 cells are missing"), "{said}");
    assert!(said.contains("tiny@bf16 host chunk 64 batch 2 depth 0 (shard 2)") && said.contains("--partial"), "{said}");
    assert!(!dir.path().join("out").exists());
    let partial = merge(dir.path(), &["3", "1"], "out", &["--partial"]);
    assert_eq!(code(&partial), 0, "{}", text(&partial));
    let found = rows(dir.path().join("out"));
    assert_eq!(found.len(), 6);
    assert!(found.iter().all(|row| row["run"] == found[0]["run"]));
    // The folder is a sweep like any other: the rest of it runs here.
    let out = dir.path().join("out").display().to_string();
    let args = ["sweep", "tiny", "--device", "plan", "--output", "4", "--out", &out, "--resume"];
    let ran = run(&[&args[..], &["--axis", "chunk=16,64,128", "--axis", "batch=1,2,3"]].concat());
    assert_eq!(code(&ran), 0, "{}", text(&ran));
    let cached: Vec<bool> = rows(Path::new(&out)).iter().map(|row| row["cached"] == true).collect();
    assert_eq!(cached, [true, true, true, false, false, false, true, true, true]);
}

#[test]
fn what_is_not_of_one_sweep_is_not_joined_and_each_difference_is_named() {
    let dir = tempfile::tempdir().unwrap();
    shards(dir.path(), &[1, 2, 3], &[]);
    let whole = merge(dir.path(), &["2", "3", "1", "1"], "whole", &[]);
    assert_eq!(code(&whole), 0, "the same folder twice is no harm: {}", text(&whole));
    let refuses = |of: &[&str], words: &str| {
        let ran = merge(dir.path(), of, "out", &["--partial"]);
        assert!(code(&ran) == 1 && text(&ran).contains(words), "{words}: {}", text(&ran));
        assert!(!dir.path().join("out").exists(), "{words}");
    };
    // Another run of a shard: the rows differ, in their time at least.
    let copy = dir.path().join("again");
    std::fs::create_dir(&copy).unwrap();
    for file in ["sweep.plan.json", "sweep.jsonl"] {
        std::fs::copy(dir.path().join("1").join(file), copy.join(file)).unwrap();
    }
    let lines = std::fs::read_to_string(copy.join("sweep.jsonl")).unwrap();
    let edit = |from: &str, to: &str| std::fs::write(copy.join("sweep.jsonl"), lines.replacen(from, to, 1)).unwrap();
    edit("\"time\":\"", "\"time\":\"1");
    refuses(&["1", "again", "2", "3"], "different rows of cell tiny@bf16 host chunk 16 batch 1 depth 0");
    // What cannot be true.
    edit("\"free_bytes\":", "\"free_bytes\":1");
    refuses(&["again", "2", "3"], "the row contradicts itself: resident ");
    edit("\"chunk\":", "\"chunk\":9");
    refuses(&["again", "2", "3"], "and sweep.plan.json plans tiny@bf16 host chunk");
    // Provenance, row by row.
    let hash = rows(dir.path().join("1"))[0]["binary_hash"].as_str().unwrap().to_owned();
    for (from, to, words) in [
        (format!("\"binary_hash\":\"{hash}\""), "\"binary_hash\":\"fnv1a64:1\"", "binary_hash: "),
        ("\"method\":".into(), "\"method\":9", "method: "),
        ("\"profile\":\"".into(), "\"profile\":\"x", "profile: "),
        ("\"rustc\":\"".into(), "\"rustc\":\"x", "rustc: "),
        ("\"cargo_flags\":\"".into(), "\"cargo_flags\":\"x", "cargo_flags: "),
    ] {
        assert!(lines.contains(&from), "{from}");
        edit(&from, to);
        refuses(&["2", "3", "again"], words);
    }
    edit("\"cell\":\"", "\"cell\":\"0");
    refuses(&["2", "3", "again"], "of no cell");
    edit("\"cell\":\"", "\"cells\":\"");
    refuses(&["2", "3", "again"], "names no cell");
    edit("{", "[");
    refuses(&["2", "3", "again"], "sweep.jsonl line 1");
    // And by plan: another card, other axes.
    let other = tempfile::tempdir().unwrap();
    shards(other.path(), &[2], &["--card", "h100"]);
    std::fs::rename(other.path().join("2"), dir.path().join("other")).unwrap();
    refuses(&["1", "other", "3"], "card: host in");
    // Asked otherwise, in words.
    let other = tempfile::tempdir().unwrap();
    shards(other.path(), &[2], &["--precision", "1%"]);
    std::fs::rename(other.path().join("2"), dir.path().join("rougher")).unwrap();
    let words = format!("precision: 0.005 in {0}/1, 0.01 in {0}/rougher", dir.path().display());
    refuses(&["1", "rougher", "3"], &words);
    refuses(&["1", "none"], "sweep.plan.json");
    // What is there already is not overwritten.
    let ran = merge(dir.path(), &["1", "2", "3"], "whole", &[]);
    assert!(code(&ran) == 1 && text(&ran).contains("earlier sweep"), "{}", text(&ran));
    assert!(!text(&ran).contains("--resume"), "merge has no --resume: {}", text(&ran));
}

#[test]
fn a_shard_without_cells_is_a_sweep_of_none() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x").display().to_string();
    let ran = run(&["sweep", "tiny", "--device", "plan", "--axis", "chunk=16", "--shard", "1/2", "--out", &out]);
    assert_eq!(code(&ran), 0, "{}", text(&ran));
    let other = dir.path().join("y").display().to_string();
    let ran = run(&["sweep", "tiny", "--device", "plan", "--axis", "chunk=16", "--shard", "2/2", "--out", &other]);
    assert_eq!(code(&ran), 0, "{}", text(&ran));
    assert_eq!(rows(Path::new(&out)).len() + rows(Path::new(&other)).len(), 1);
}
