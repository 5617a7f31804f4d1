//! `highwater gate --criterion` on what criterion wrote: `tests/fixtures/criterion` is two runs of two of this project's
//! benchmarks, the first saved as `before`.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::{Value, json};

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/criterion")
}

/// Folders of the benchmarks below `dir`.
fn benches(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut pending = vec![dir.to_owned()];
    while let Some(dir) = pending.pop() {
        if dir.join("new").is_dir() {
            found.push(dir);
            continue;
        }
        pending.extend(fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()).filter(|path| path.is_dir()));
    }
    found.sort();
    found
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (path, name) = entry.map(|e| (e.path(), e.file_name())).unwrap();
        if path.is_dir() {
            copy(&path, &to.join(name));
        } else {
            fs::copy(&path, to.join(name)).unwrap();
        }
    }
}

fn change(file: &Path, change: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    change(&mut value);
    fs::write(file, value.to_string()).unwrap();
}

/// Makes `new` of a benchmark `before` once more, its samples in another order and its times multiplied.
fn rerun(bench: &Path, by: f64) {
    fs::remove_dir_all(bench.join("new")).unwrap();
    copy(&bench.join("before"), &bench.join("new"));
    change(&bench.join("new/sample.json"), |sample| {
        for list in ["iters", "times"] {
            sample[list].as_array_mut().unwrap().reverse();
        }
        for ns in sample["times"].as_array_mut().unwrap() {
            *ns = json!(ns.as_f64().unwrap() * by);
        }
    });
    change(&bench.join("new/estimates.json"), |estimates| {
        let median = &mut estimates["median"]["point_estimate"];
        *median = json!(median.as_f64().unwrap() * by);
    });
}

fn gate(change: impl FnOnce(&[PathBuf]), flags: &[&str]) -> (i32, String) {
    let dir = tempfile::tempdir().unwrap();
    copy(&fixture(), dir.path());
    let benches = benches(dir.path());
    assert_eq!(benches.len(), 2);
    change(&benches);
    let folder = dir.path().display().to_string();
    let args = [&["gate", "--criterion", &folder, "--baseline", "before"], flags].concat();
    let output = Command::cargo_bin("highwater").unwrap().args(&args).output().unwrap();
    let text = format!("{}{}", String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    (output.status.code().expect("no signal"), text)
}

#[test]
fn files_that_criterion_wrote_are_read_and_every_benchmark_is_compared() {
    let (code, text) = gate(|_| {}, &["--json"]);
    assert!([0, 3].contains(&code), "whatever the two runs were: {text}");
    let found: Value = serde_json::Deserializer::from_str(&text).into_iter().next().unwrap().unwrap();
    let compared = found["compared"].as_array().unwrap();
    assert_eq!(compared.len(), 2, "{text}");
    for (compared, bench) in compared.iter().zip(benches(&fixture())) {
        // The medians are criterion's own.
        for (side, folder) in [("base", "before"), ("candidate", "new")] {
            let text = fs::read_to_string(bench.join(folder).join("estimates.json")).unwrap();
            let estimates: Value = serde_json::from_str(&text).unwrap();
            let (own, theirs) =
                (compared[side].as_f64().unwrap(), estimates["median"]["point_estimate"].as_f64().unwrap());
            assert!((own - theirs).abs() < 1e-6 * theirs, "{own} {theirs}");
        }
        assert!(compared["cell"].as_str().unwrap().starts_with("norm/"), "{compared}");
    }
}

#[test]
fn three_times_as_long_exits_3_where_criterion_exits_0() {
    let (code, text) = gate(|benches| benches.iter().for_each(|bench| rerun(bench, 3.0)), &[]);
    assert_eq!(code, 3, "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("SLOWER: norm/")).count(), 2, "{text}");
    let (code, text) = gate(|benches| benches.iter().for_each(|bench| rerun(bench, 1.0 / 3.0)), &["--strict"]);
    assert!(code == 0 && text.contains("2 FASTER"), "{text}");
    let (code, text) = gate(|benches| benches.iter().for_each(|bench| rerun(bench, 1.0)), &[]);
    assert!(code == 0 && !text.contains("SLOWER") && !text.contains("FASTER"), "{text}");
}

#[test]
fn few_samples_are_inconclusive_and_say_what_to_run() {
    let few = |benches: &[PathBuf]| {
        rerun(&benches[0], 1.0);
        rerun(&benches[1], 1.0);
        let (calls, ns) = (json!([1.0, 1.0, 1.0]), json!([1e6, 1e6, 1e6]));
        for side in ["before", "new"] {
            change(&benches[0].join(side).join("sample.json"), |sample| {
                sample["iters"] = calls.clone();
                sample["times"] = ns.clone();
            });
            change(&benches[0].join(side).join("estimates.json"), |e| e["median"]["point_estimate"] = json!(1e6));
        }
        // Not the very samples of the baseline.
        change(&benches[0].join("new/sample.json"), |sample| sample["times"] = json!([1e6, 1e6, 1.1e6]));
    };
    let (code, text) = gate(few, &["--strict"]);
    assert_eq!(code, 5, "{text}");
    let next = text.lines().find_map(|line| line.trim().strip_prefix("next: ")).unwrap();
    assert!(next.starts_with("cargo bench -- --exact norm/") && next.contains("--baseline before"), "{next}");
    assert!(text.contains("3 samples; 10 are needed"), "{text}");
}

#[test]
fn a_baseline_that_is_the_last_run_itself_is_no_comparison() {
    let same = |benches: &[PathBuf]| {
        fs::remove_dir_all(benches[0].join("new")).unwrap();
        copy(&benches[0].join("before"), &benches[0].join("new"));
        rerun(&benches[1], 1.0);
    };
    let (code, text) = gate(same, &[]);
    assert!(code == 1 && text.contains("MISSING: norm/") && text.contains("the last run is the one saved"), "{text}");
    let (code, text) = gate(same, &["--subset"]);
    assert_eq!(code, 0, "{text}");
    let old = |benches: &[PathBuf]| {
        fs::remove_dir_all(benches[0].join("new")).unwrap();
        rerun(&benches[1], 1.0);
    };
    let (code, text) = gate(old, &[]);
    assert!(code == 1 && text.contains("not run since"), "{text}");
    let gone = |benches: &[PathBuf]| {
        for bench in benches {
            fs::rename(bench.join("before"), bench.join("main")).unwrap();
        }
    };
    let (code, text) = gate(gone, &[]);
    assert!(code == 1 && text.contains("there are: main") && text.contains("--save-baseline before"), "{text}");
}

/// The file, what is done to it, and what the failure says.
type Damage = (&'static str, fn(&Path), &'static str);

#[test]
fn damaged_files_are_failures_that_name_the_file() {
    let damage = |file: &'static str, damage: fn(&Path)| {
        move |benches: &[PathBuf]| {
            rerun(&benches[1], 1.0);
            damage(&benches[0].join(file));
        }
    };
    let cases: [Damage; 9] = [
        ("new/sample.json", |file| fs::remove_file(file).unwrap(), "sample.json"),
        ("before/estimates.json", |file| fs::remove_file(file).unwrap(), "estimates.json"),
        ("new/benchmark.json", |file| fs::write(file, "{}").unwrap(), "full_id"),
        ("new/sample.json", |file| fs::write(file, b"\xff\x00").unwrap(), "sample.json"),
        (
            "new/sample.json",
            |file| {
                let text = fs::read_to_string(file).unwrap();
                fs::write(file, &text[..text.len() / 2]).unwrap();
            },
            "sample.json",
        ),
        (
            "new/sample.json",
            |file| change(file, |sample| drop(sample["times"].as_array_mut().unwrap().pop())),
            "counts of calls",
        ),
        ("new/sample.json", |file| change(file, |sample| sample["iters"][0] = json!(0)), "is no time"),
        (
            "before/sample.json",
            |file| {
                change(file, |sample| {
                    sample["times"].as_array_mut().unwrap().iter_mut().for_each(|ns| *ns = json!(1.0));
                });
            },
            "estimates.json says",
        ),
        ("new/sample.json", |file| change(file, |s| (s["iters"], s["times"]) = (json!([]), json!([]))), "0 times"),
    ];
    for (file, how, words) in cases {
        let (code, text) = gate(damage(file, how), &[]);
        assert_eq!(code, 1, "{file}: {text}");
        assert!(text.contains("FAILED: ") && text.contains(words), "{file}: {text}");
    }
    for folder in ["/no/such/folder", "src"] {
        let output = Command::cargo_bin("highwater").unwrap().args(["gate", "--criterion", folder]).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && text.starts_with("error: "), "{folder}: {text}");
    }
}
