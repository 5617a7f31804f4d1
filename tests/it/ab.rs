//! `highwater ab` through the binary: one program twice, seeded faults, and programs that are not what they seem.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use assert_cmd::Command;

fn binary() -> String {
    env!("CARGO_BIN_EXE_highwater").to_owned()
}

fn ab(dir: &Path, flags: &[&str], words: &[&str]) -> (i32, String) {
    let out = dir.join("ab").display().to_string();
    let args = [&["ab", "--blocks", "10", "--out", &out], flags, &["--"], words].concat();
    let Output { status, stdout, stderr } = Command::cargo_bin("highwater").unwrap().args(&args).output().unwrap();
    let text = format!("{}{}", String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
    (status.code().expect("no signal"), text)
}

/// A program that stands for a build: a script that is given the words of `sweep` and ends in `--out DIR`. A shell writes it:
/// a file that this process had open for writing could still be so in a child of another test, and would not start.
fn script(dir: &Path, name: &str, body: &str) -> String {
    let path = dir.join(name).display().to_string();
    let text = format!("#!/bin/sh\nfor out; do :; done\n{body}\n");
    let made = ["-c", "printf %s \"$1\" > \"$0\" && chmod +x \"$0\"", &path, &text];
    Command::new("/bin/sh").args(made).assert().success();
    path
}

/// An H200's rows, their times multiplied.
fn rows(dir: &Path, name: &str, by: f64) -> PathBuf {
    let file = "tests/fixtures/runs/qwen3.6-27b-fp8-channel-decode/sweep.jsonl";
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
    let mut out = String::new();
    for line in text.lines() {
        let mut row: serde_json::Value = serde_json::from_str(line).unwrap();
        for column in ["tpot_samples_ms", "prefill_samples_ms"] {
            for ms in row[column].as_array_mut().unwrap() {
                *ms = (ms.as_f64().unwrap() * by).into();
            }
        }
        out += &row.to_string();
        out.push('\n');
    }
    let path = dir.join(name);
    fs::write(&path, out).unwrap();
    path
}

#[test]
fn a_program_is_never_slower_or_faster_than_itself() {
    let dir = tempfile::tempdir().unwrap();
    let own = binary();
    let words = ["sweep", "tiny", "--device", "cpu", "--axis", "chunk=16", "--output", "4"];
    let (code, text) = ab(dir.path(), &["--base", &own, "--cand", &own], &words);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("both are the same program") && text.contains("bytes of 1 of 1 cells exact"), "{text}");
    assert!(
        text.contains(&format!("base: {own} fnv1a64:")) && text.contains(&format!("candidate: {own} fnv1a64:")),
        "{text}"
    );
    assert_eq!(text.matches("10/10").count(), 2, "prefill and TPOT of ten blocks: {text}");
    assert!(!text.contains("SLOWER") && !text.contains("FASTER"), "{text}");
}

#[test]
fn both_sides_have_the_folder_of_libraries_that_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let toolkit = dir.path().join("toolkit");
    fs::create_dir(&toolkit).unwrap();
    // Never loaded: a plan needs no library.
    fs::write(toolkit.join("libnvrtc.so.13"), "").unwrap();
    let seen = dir.path().join("seen").display().to_string();
    let body = format!("echo \"$HIGHWATER_CUDA\" >> {seen}\nexec {} \"$@\"", binary());
    let own = script(dir.path(), "side", &body);
    let flags = ["--base", &own, "--cand", &own, "--cuda", &toolkit.display().to_string()];
    let (code, text) = ab(dir.path(), &flags, &["sweep", "tiny", "--device", "plan", "--axis", "chunk=16"]);
    assert_eq!(code, 0, "{text}");
    let (seen, whole) = (fs::read_to_string(seen).unwrap(), toolkit.canonicalize().unwrap().display().to_string());
    assert_eq!(seen.lines().count(), 40);
    assert!(seen.lines().all(|line| line == whole), "{seen}");
}

#[test]
fn a_buffer_more_exits_4() {
    let dir = tempfile::tempdir().unwrap();
    let own = binary();
    let sides = ["--base", &own, "--cand", &own, "--cand-arg", "--fault", "--cand-arg", "extra-buffer"];
    let (code, text) = ab(dir.path(), &sides, &["sweep", "tiny", "--device", "plan", "--axis", "chunk=16"]);
    assert_eq!(code, 4, "{text}");
    assert!(text.contains("MORE MEMORY: ") && text.contains("fault.extra_buffer` +"), "{text}");
    assert!(text.contains("the candidate was measured with --fault extra-buffer"), "{text}");
}

#[test]
fn three_percent_is_found_and_the_same_is_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let build = |name: &str, by: f64| {
        let rows = rows(dir.path(), &format!("{name}.jsonl"), by).display().to_string();
        script(dir.path(), name, &format!("mkdir -p $out && cp {rows} $out/sweep.jsonl"))
    };
    let (base, slower) = (build("base", 1.0), build("slower", 1.03));
    let (code, text) = ab(dir.path(), &["--base", &base, "--cand", &slower, "--strict"], &[]);
    assert_eq!(code, 3, "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("SLOWER: ")).count(), 6, "{text}");
    fs::remove_dir_all(dir.path().join("ab")).unwrap();
    let (code, text) = ab(dir.path(), &["--base", &slower, "--cand", &base], &[]);
    assert!(code == 0 && text.contains("6 FASTER"), "{text}");
    fs::remove_dir_all(dir.path().join("ab")).unwrap();
    let (code, text) = ab(dir.path(), &["--base", &base, "--cand", &base, "--strict"], &[]);
    assert!(code == 0 && text.contains("6 SAME"), "{text}");
}

#[test]
fn kernels_are_compared_by_the_table_that_bench_writes() {
    let dir = tempfile::tempdir().unwrap();
    let table = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/h200/kernels.csv");
    let mut reader = csv::Reader::from_path(&table).unwrap();
    let header = reader.headers().unwrap().clone();
    let median = header.iter().position(|name| name == "median_us").unwrap();
    let records: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
    let cache = header.iter().position(|name| name == "cache").unwrap();
    let build = |name: &str, by: f64, with: &str| {
        let file = dir.path().join(format!("{name}.csv"));
        let mut writer = csv::Writer::from_path(&file).unwrap();
        writer.write_record(&header).unwrap();
        for record in records.iter().take(40) {
            let scaled = record.iter().enumerate().map(|(at, field)| match field.parse::<f64>() {
                Ok(us) if at == median => (us * by).to_string(),
                _ if at == cache => with.to_owned(),
                _ => field.to_owned(),
            });
            writer.write_record(scaled).unwrap();
        }
        writer.flush().unwrap();
        script(dir.path(), name, &format!("mkdir -p $out/h200 && cp {} $out/h200/kernels.csv", file.display()))
    };
    let (base, slower) = (build("base", 1.0, "cold"), build("slower", 1.03, "cold"));
    let (code, text) = ab(dir.path(), &["--base", &base, "--cand", &slower], &["bench"]);
    assert_eq!(code, 3, "{text}");
    assert!(text.contains("SLOWER: ceiling read 4.00 GiB M=1 cold: time "), "{text}");
    fs::remove_dir_all(dir.path().join("ab")).unwrap();
    let (code, text) = ab(dir.path(), &["--base", &base, "--cand", &base], &["bench"]);
    assert!(code == 0 && text.contains("40 SAME"), "{text}");
    for (base, candidate) in [("cold", "rotate"), ("rotate", "flush"), ("flush", "warm")] {
        fs::remove_dir_all(dir.path().join("ab")).unwrap();
        let sides = [build(base, 1.0, base), build(candidate, 1.0, candidate)];
        let (code, text) = ab(dir.path(), &["--base", &sides[0], "--cand", &sides[1]], &["bench"]);
        assert!(code == 1 && !text.contains("SAME"), "{text}");
        let words =
            format!("the base timed its kernels with cache {base}, the candidate with {candidate}: two of these are");
        assert!(text.contains(&words), "{text}");
    }
}

#[test]
fn programs_that_fail_hang_or_babble_are_errors_that_say_so() {
    let dir = tempfile::tempdir().unwrap();
    let rows = rows(dir.path(), "rows.jsonl", 1.0).display().to_string();
    let good = script(dir.path(), "good", &format!("mkdir -p $out && cp {rows} $out/sweep.jsonl"));
    for (name, body, words) in [
        ("fails", "echo no such card >&2; exit 9", "ended with exit status: 9; it said: no such card"),
        ("hangs", "exec sleep 600", "did not end in 2 s and was killed"),
        ("silent", "exit 0", "ended well and wrote no"),
        ("babbles", "mkdir -p $out && head -c 100000 /dev/urandom > $out/sweep.jsonl", "sweep.jsonl"),
        ("stops", "mkdir -p $out && : > $out/sweep.jsonl", "holds no rows"),
        ("lies", "mkdir -p $out && echo '{\"schema\":99}' > $out/sweep.jsonl", "schema 99"),
    ] {
        let bad = script(dir.path(), name, body);
        let (code, text) = ab(dir.path(), &["--base", &good, "--cand", &bad, "--timeout", "2"], &[]);
        assert_eq!(code, 1, "{name}: {text}");
        assert!(text.contains("error: ") && text.contains(words), "{name}: {text}");
        fs::remove_dir_all(dir.path().join("ab")).unwrap();
    }
    let none = dir.path().join("none").display().to_string();
    let (code, text) = ab(dir.path(), &["--base", &good, "--cand", &none], &[]);
    assert!(code == 1 && text.contains("cannot read") && text.contains("none"), "{text}");
}
