//! The nightly script and the workflows that call it: what it does with each of the gate's answers, against a stub; what it
//! does with the real program; and that the workflows ask for no more rights than they use.

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A program that answers as told: `gate.NAME` and `sweep.NAME` hold the exit codes of one call after another.
const STUB: &str = r#"#!/usr/bin/env bash
set -eu
printf '%s\n' "$*" >> "$STUB/calls"
next() {
  [ -f "$1" ] || { echo 0; return; }
  head -n 1 "$1"
  sed -i 1d "$1"
}
verb=$1
shift
out='' report=''
operands=()
while (($# > 0)); do
  case $1 in
    --out) out=$2; shift 2 ;;
    --markdown) report=$2; shift 2 ;;
    --in) out=$2; shift 2 ;;
    *) operands+=("$1"); shift ;;
  esac
done
case $verb in
  sweep | bench)
    mkdir -p "$out"
    printf '{}\n' > "$out/sweep.jsonl"
    code=$(next "$STUB/$verb.$(basename "$out")")
    echo "a sweep ends with $code"
    exit "$code"
    ;;
  baseline) printf '%s/card/driver-m1\n' "$out" ;;
  gate)
    code=$(next "$STUB/gate.$(basename "${operands[0]}")")
    if [ "$code" = 3 ]; then cat "$STUB/slower" 2> /dev/null || true; fi
    [ "$code" = 101 ] || printf 'the gate says %s\n' "$code" > "$report"
    exit "$code"
    ;;
esac
"#;

struct Nightly {
    dir: tempfile::TempDir,
}

struct Ran {
    code: i32,
    text: String,
}

impl Nightly {
    /// A stub, a list of two sweeps, and baselines for both.
    fn new() -> Nightly {
        let night = Nightly { dir: tempfile::tempdir().unwrap() };
        night.write("highwater", STUB);
        let made = Command::new("chmod").arg("+x").arg(night.path("highwater")).status().unwrap();
        assert!(made.success());
        night.write("cells", "# a list\n\none tiny --axis chunk=64   --device cpu\ntwo tiny-moe\n");
        for name in ["one", "two"] {
            night.write(&format!("baselines/card/driver-m1/{name}/sweep.jsonl"), "{}\n");
        }
        night
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// The codes the gate ends with for a sweep, call after call.
    fn gate(self, name: &str, codes: &[i32]) -> Nightly {
        let lines: String = codes.iter().map(|code| format!("{code}\n")).collect::<Vec<_>>().concat();
        self.write(&format!("gate.{name}"), &lines);
        self
    }

    fn run_with(&self, bin: &str, extra: &[&str]) -> Ran {
        let output = Command::new("bash")
            .arg(root().join(".github/nightly.sh"))
            .args(["--bin", bin, "--cells"])
            .arg(self.path("cells"))
            .arg("--out")
            .arg(self.path("out"))
            .arg("--baselines")
            .arg(self.path("baselines"))
            .args(extra)
            .env("STUB", self.dir.path())
            .env("GITHUB_SHA", "0123abcd")
            .current_dir(root())
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        Ran { code: output.status.code().expect("no signal"), text: String::from_utf8(text).unwrap() }
    }

    fn run(&self, extra: &[&str]) -> Ran {
        self.run_with(&self.path("highwater").display().to_string(), extra)
    }

    fn has(&self, name: &str) -> bool {
        self.path(name).exists()
    }
}

#[test]
fn each_answer_of_the_gate_ends_the_night_as_it_should() {
    // The gate's codes of sweep `one`, the night's code, whether an issue is written, a word of the summary.
    for (codes, code, issue, word) in [
        (&[0][..], 0, false, "one: nothing is worse"),
        (&[3, 3], 3, true, "one: **regression confirmed** (code 3)"),
        (&[4, 4], 4, true, "one: **regression confirmed** (code 4)"),
        (&[3, 4], 4, true, "confirmed"),
        (&[3, 0], 0, false, "one: **not confirmed**: the second run ended with code 0"),
        (&[4, 5], 5, false, "**not confirmed**"),
        (&[3, 1], 1, false, "**not confirmed**"),
        (&[1], 1, false, "one: **failed**"),
        (&[2], 1, false, "one: **failed**"),
        (&[101], 1, false, "one: **failed**"),
        (&[5], 5, false, "one: **inconclusive**"),
    ] {
        let night = Nightly::new().gate("one", codes);
        let ran = night.run(&[]);
        assert_eq!(ran.code, code, "{codes:?}: {}", ran.text);
        let summary = night.read("out/summary.md");
        assert!(summary.contains(word) && summary.contains("two: nothing is worse"), "{codes:?}: {summary}");
        assert_eq!((night.has("out/issue.md"), night.has("out/issue.title")), (issue, issue), "{codes:?}");
        assert_eq!(night.read("out/outcome"), format!("code={code}\nconfirmed={issue}\n"));
        let calls = night.read("calls");
        let sweeps = calls.lines().filter(|line| line.starts_with("sweep tiny --axis chunk=64 --device cpu")).count();
        assert_eq!(
            sweeps,
            if codes.len() > 1 { 2 } else { 1 },
            "a regression is run once more, and nothing else: {calls}"
        );
        assert!(calls.lines().filter(|line| line.starts_with("gate ")).all(|line| line.contains(" --strict ")));
    }
}

#[test]
fn an_issue_says_what_to_look_at_and_how_to_see_it_again() {
    let night = Nightly::new().gate("one", &[3, 3]).gate("two", &[4, 4]);
    let ran = night.run(&[]);
    assert_eq!(ran.code, 4, "{}", ran.text);
    assert_eq!(night.read("out/issue.title"), "Nightly regression: one, two");
    let issue = night.read("out/issue.md");
    for word in [
        "## one: slower",
        "## two: more memory, or a fit lost",
        "Commit 0123abcd",
        "`highwater sweep tiny --axis chunk=64 --device cpu --out run`",
        "card/driver-m1/one",
        "the gate says 3",
        "the gate says 4",
    ] {
        assert!(issue.contains(word), "{word}:\n{issue}");
    }
}

#[test]
fn a_failed_sweep_is_a_failure_and_no_issue_and_the_rest_goes_on() {
    let night = Nightly::new().gate("two", &[3, 3]);
    night.write("sweep.one", "1\n");
    let ran = night.run(&[]);
    assert_eq!(ran.code, 3, "what was found twice is graver than what failed: {}", ran.text);
    assert_eq!(night.read("out/issue.title"), "Nightly regression: two");
    assert!(night.read("out/summary.md").contains("one: **failed**: the sweep ended with code 1"));
    assert!(!night.read("calls").lines().any(|line| line.starts_with("gate ") && line.contains("/run/one")));

    // The run that was to confirm fails: a failure, not a regression.
    let night = Nightly::new().gate("one", &[3]);
    night.write("sweep.one", "0\n137\n");
    let ran = night.run(&[]);
    assert_eq!((ran.code, night.has("out/issue.md")), (1, false), "{}", ran.text);
    // So does the bench, which is asked for or not.
    let night = Nightly::new();
    night.write("bench.run", "1\n");
    assert_eq!(night.run(&["--bench"]).code, 1);
    assert!(!Nightly::new().run(&[]).text.contains("bench"));
}

#[test]
fn the_bench_is_held_to_its_baseline_and_what_was_slower_alone_is_run_once_more() {
    // The gate's codes, the night's code, a word of the summary.
    for (codes, code, word) in [
        (&[0][..], 0, "bench: nothing is worse"),
        (&[3, 3], 3, "bench: **regression confirmed** (code 3)"),
        (&[3, 0], 0, "bench: **not confirmed**: the second run ended with code 0"),
        (&[5], 5, "bench: **inconclusive**"),
        (&[1], 1, "bench: **failed**"),
    ] {
        let night = Nightly::new().gate("bench", codes);
        night.write("baselines/card/driver-m1/bench/kernels.csv", "kernel\n");
        night.write(
            "slower",
            "SLOWER: norm qwen3.6-27b add rms M=8 rotate: time 1.0 -> 2.0 us, +100 %\n\
             SLOWER: ceiling read 4.00 GiB M=1 rotate: time 1.0 -> 2.0 us, +100 %\nBETTER: rows M=1 rotate: time\n",
        );
        let ran = night.run(&["--bench", "--bench-args", "norm --device cpu"]);
        assert_eq!(ran.code, code, "{codes:?}: {}", ran.text);
        let (summary, calls) = (night.read("out/summary.md"), night.read("calls"));
        assert!(summary.contains(word) && summary.contains("one: nothing is worse"), "{codes:?}: {summary}");
        let benches: Vec<&str> = calls.lines().filter(|line| line.starts_with("bench ")).collect();
        assert!(
            benches[0].starts_with("bench norm --device cpu --out ") && benches[0].ends_with("/bench/run"),
            "{calls}"
        );
        assert_eq!(benches.len(), codes.len(), "{calls}");
        if let [_, again] = benches[..] {
            let rows = "--row norm qwen3.6-27b add rms M=8 --row ceiling read 4.00 GiB M=1 --out ";
            assert!(again.contains(rows) && again.ends_with("/bench/confirm"), "{again}");
            assert!(calls.lines().any(|line| line.starts_with("gate ") && line.ends_with(" --subset")), "{calls}");
        }
        assert_eq!(night.has("out/issue.md"), codes == [3, 3]);
    }
    // The issue says how to see it again; where there is no baseline the run is proposed as one.
    let night = Nightly::new().gate("bench", &[3, 3]);
    night.write("baselines/card/driver-m1/bench/kernels.csv", "kernel\n");
    night.run(&["--bench"]);
    let issue = night.read("out/issue.md");
    assert!(issue.contains("`highwater bench --out run`, then `highwater gate "), "{issue}");
    let night = Nightly::new();
    let ran = night.run(&["--bench"]);
    assert!(ran.code == 5 && night.has("out/proposed/card/driver-m1/bench"), "{}", ran.text);
    assert_eq!(Nightly::new().run(&["--bench-args", "norm"]).code, 2);
}

#[test]
fn without_a_baseline_the_run_is_proposed_and_nothing_else_is_touched() {
    let night = Nightly::new();
    std::fs::remove_dir_all(night.path("baselines")).unwrap();
    let ran = night.run(&[]);
    assert_eq!(ran.code, 5, "{}", ran.text);
    assert!(night.has("out/proposed/card/driver-m1/one/sweep.jsonl") && !night.has("baselines"));
    let summary = night.read("out/summary.md");
    assert!(summary.contains("no baseline") && summary.contains("commit it"), "{summary}");
    assert!(!night.has("out/issue.md"));
    assert!(!night.read("calls").lines().any(|line| line.starts_with("gate ")));
}

#[test]
fn another_key_is_held_to_only_by_force() {
    let other = |night: &Nightly| night.path("baselines/other-card/1-m1").display().to_string();
    let night = Nightly::new();
    assert_eq!(night.run(&["--against", &other(&night)]).code, 2);
    assert!(!night.has("out"), "refused before anything is run");
    night.write("baselines/other-card/1-m1/one/sweep.jsonl", "{}\n");
    night.write("baselines/other-card/1-m1/two/sweep.jsonl", "{}\n");
    let ran = night.run(&["--against", &other(&night), "--force"]);
    assert_eq!(ran.code, 0, "{}", ran.text);
    let calls = night.read("calls");
    let gates: Vec<&str> = calls.lines().filter(|line| line.starts_with("gate ")).collect();
    assert_eq!(gates.len(), 2);
    assert!(gates.iter().all(|line| line.contains("/other-card/") && line.ends_with("--force")), "{gates:?}");
}

#[test]
fn a_night_that_cannot_begin_is_a_usage_error() {
    let refused = |night: &Nightly, extra: &[&str], word: &str| {
        let ran = night.run(extra);
        assert_eq!(ran.code, 2, "{}", ran.text);
        assert!(ran.text.contains(word), "{word}: {}", ran.text);
    };
    refused(&Nightly::new(), &["--frobnicate"], "--frobnicate");
    refused(&Nightly::new(), &["--force"], "--against");
    refused(&Nightly::new(), &["--bin", "/no/such/program"], "/no/such/program");
    refused(&Nightly::new(), &["--cells", "/no/such/list"], "/no/such/list");
    let night = Nightly::new();
    night.write("out/run/one/sweep.jsonl", "{}\n");
    refused(&night, &[], "not empty");
    for (cells, word) in
        [("# none\n", "lists no sweep"), ("../one tiny\n", "no name"), ("one tiny\none tiny-moe\n", "twice")]
    {
        let night = Nightly::new();
        night.write("cells", cells);
        refused(&night, &[], word);
        assert!(!night.has("out"), "a list that is wrong is refused before anything is written");
    }
    // A sweep may be called what a file of the night is called, and makes no issue by it.
    let night = Nightly::new();
    night.write("cells", "issue tiny\nsummary tiny\nrun tiny\nbench tiny\n");
    for name in ["issue", "summary", "run", "bench"] {
        night.write(&format!("baselines/card/driver-m1/{name}/sweep.jsonl"), "{}\n");
    }
    let ran = night.run(&[]);
    assert_eq!((ran.code, night.has("out/issue.md")), (0, false), "{}", ran.text);
    // The last line counts without its end.
    let night = Nightly::new();
    night.write("cells", "one tiny");
    assert_eq!(night.run(&[]).code, 0);
}

#[test]
fn the_lists_of_sweeps_are_sweeps_of_this_program() {
    for list in ["cpu", "gpu"] {
        let text = std::fs::read_to_string(root().join(".github/cells").join(list)).unwrap();
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert!(lines.len() >= 2);
        for line in lines {
            // Planned instead of run, one token after the prompt: names, axes and flags are what is tried.
            let mut words: Vec<&str> = line.split_whitespace().skip(1).collect();
            for (flag, instead) in [("--device", "plan"), ("--output", "2")] {
                let at = words.iter().position(|word| *word == flag).unwrap_or_else(|| panic!("{line}"));
                words[at + 1] = instead;
            }
            let dir = tempfile::tempdir().unwrap();
            let mut sweep = assert_cmd::Command::cargo_bin("highwater").unwrap();
            sweep.arg("sweep").args(&words).arg("--out").arg(dir.path().join("run"));
            sweep.assert().success();
        }
    }
}

fn workflow(name: &str) -> String {
    std::fs::read_to_string(root().join(".github/workflows").join(name)).unwrap()
}

#[test]
fn workflows_pin_their_actions_end_in_time_and_may_write_only_where_they_do() {
    for (name, jobs) in [("ci.yml", 2), ("nightly.yml", 2)] {
        let text = workflow(name);
        let count = |what: &str| text.lines().filter(|line| line.trim_start().starts_with(what)).count();
        assert_eq!(count("runs-on:"), jobs, "{name}");
        assert_eq!(count("timeout-minutes:"), jobs, "{name}: a job without an end");
        assert_eq!(count("concurrency:"), 1, "{name}");
        assert!(!text.contains('\t'), "{name}: tabs are no YAML");
        for line in text.lines().filter(|line| line.contains("uses:")) {
            let (_, version) = line.split_once('@').unwrap_or_else(|| panic!("{line}"));
            let sha = version.split_whitespace().next().unwrap();
            let pinned = sha.len() == 40 && sha.bytes().all(|b| b.is_ascii_hexdigit());
            assert!(pinned && version.contains("# v"), "{line}: pinned by commit, its version beside it");
        }
        // A checkout must not leave a token for what it builds.
        assert_eq!(count("- uses: actions/checkout@"), count("persist-credentials: false"), "{name}");
    }
    let (ci, nightly) = (workflow("ci.yml"), workflow("nightly.yml"));
    assert!(!ci.contains(": write") && ci.contains(".ci/run") && ci.contains("highwater replan"));
    assert_eq!(nightly.matches(": write").count(), 1, "issues alone");
    let (before, issue) = nightly.split_once("\n  issue:\n").unwrap();
    assert!(issue.contains("issues: write") && issue.contains("confirmed == 'true'") && !issue.contains("checkout"));
    assert!(before.contains("permissions: {}") && before.contains("[self-hosted, linux, gpu]"));
    assert!(before.contains(".github/nightly.sh") && before.contains("cargo build --locked --release"));
}

/// Whether this machine has what a check needs; where it has not, the check says so.
fn has(program: &str, args: &[&str]) -> bool {
    let there = Command::new(program).args(args).output().is_ok_and(|output| output.status.success());
    if !there {
        println!("skipped: no {program} {}", args.join(" "));
    }
    there
}

#[test]
fn workflows_are_yaml_and_the_script_is_clean_as_far_as_this_machine_can_tell() {
    if has("python3", &["-c", "import yaml"]) {
        let check = "import sys, yaml\n\
                     for name in sys.argv[1:]:\n\
                     \x20   tree = yaml.safe_load(open(name))\n\
                     \x20   assert tree['jobs'] and tree['name'] and True in tree, name\n\
                     \x20   for job in tree['jobs'].values():\n\
                     \x20       assert job['timeout-minutes'] and all('run' in s or 'uses' in s for s in job['steps']), name\n";
        let files = ["ci.yml", "nightly.yml"].map(|name| root().join(".github/workflows").join(name));
        let output = Command::new("python3").args(["-c", check]).args(files).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let script = root().join(".github/nightly.sh");
    assert!(Command::new("bash").arg("-n").arg(&script).status().unwrap().success());
    if has("shellcheck", &["--version"]) {
        let output = Command::new("shellcheck").arg(&script).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

/// The real program on the processor: sweeps, no baseline yet, the proposal.
#[test]
fn the_first_night_of_a_machine_proposes_its_baseline() {
    let night = Nightly::new();
    night.write("cells", "tiny tiny@bf16 --device cpu --axis chunk=64 --axis batch=1 --output 4\n");
    let bin = assert_cmd::cargo::cargo_bin("highwater").display().to_string();
    let ran = night.run_with(&bin, &[]);
    assert_eq!(ran.code, 5, "{}", ran.text);
    let host = night.path("out/proposed/host");
    let key = std::fs::read_dir(&host).unwrap().next().unwrap().unwrap().path();
    assert!(key.file_name().unwrap().to_string_lossy().ends_with("-m2"), "{}", key.display());
    assert!(key.join("tiny/sweep.jsonl").is_file() && !night.has("out/issue.md"));
    let folder = Command::new(&bin).arg("baseline").arg(key.join("tiny")).args(["--in", "x"]).output().unwrap();
    let folder = String::from_utf8(folder.stdout).unwrap();
    assert_eq!(Path::new(folder.trim()), Path::new("x/host").join(key.file_name().unwrap()));
}

/// The real program and the real gate, on bytes alone, which no machine's noise moves: a night that is the baseline's, and one
/// with a buffer more, which is found twice and makes an issue.
#[test]
fn a_second_night_is_held_to_the_first_and_a_seeded_buffer_makes_an_issue() {
    let bin = assert_cmd::cargo::cargo_bin("highwater").display().to_string();
    let cells = "tiny tiny@bf16 --device plan --card rtx-4090 --axis chunk=64,512 --axis batch=1,4 --output 4";
    let night = |baselines: Option<&Path>, cells: &str| {
        let night = Nightly::new();
        std::fs::remove_dir_all(night.path("baselines")).unwrap();
        if let Some(from) = baselines {
            assert!(Command::new("cp").arg("-R").arg(from).arg(night.path("baselines")).status().unwrap().success());
        }
        night.write("cells", cells);
        let ran = night.run_with(&bin, &[]);
        (night, ran)
    };
    let (first, ran) = night(None, cells);
    assert_eq!(ran.code, 5, "{}", ran.text);
    let baselines = first.path("out/proposed");
    assert!(baselines.join("rtx-4090/plan-m2/tiny/sweep.jsonl").is_file(), "{}", ran.text);

    let (second, ran) = night(Some(&baselines), cells);
    assert_eq!((ran.code, second.has("out/issue.md")), (0, false), "{}", ran.text);
    assert!(second.read("out/summary.md").contains("tiny: nothing is worse"));

    let (third, ran) = night(Some(&baselines), &format!("{cells} --fault extra-buffer"));
    assert_eq!(ran.code, 4, "{}", ran.text);
    assert_eq!(third.read("out/outcome"), "code=4\nconfirmed=true\n");
    let issue = third.read("out/issue.md");
    assert!(issue.contains("extra_buffer") && issue.contains("### Second run"), "{issue}");
}

/// The real program and the real gate on two kernels of the processor: a first night that proposes, and one held to it.
#[test]
fn the_first_night_with_kernels_proposes_their_baseline_and_the_next_is_held_to_it() {
    let bin = assert_cmd::cargo::cargo_bin("highwater").display().to_string();
    let bench = ["--bench", "--bench-args", "norm --filter M=1 --filter rms --device cpu --cap 0.1"];
    let cells = "tiny tiny@bf16 --device plan --card rtx-4090 --axis chunk=64 --axis batch=1 --output 4\n";
    let first = Nightly::new();
    first.write("cells", cells);
    let ran = first.run_with(&bin, &bench);
    assert_eq!(ran.code, 5, "{}", ran.text);
    let host = first.path("out/proposed/host");
    let key = std::fs::read_dir(&host).unwrap().next().unwrap().unwrap().path();
    assert!(key.file_name().unwrap().to_string_lossy().ends_with("-k2"), "{}", key.display());
    assert!(key.join("bench/host/kernels.csv").is_file());

    let second = Nightly::new();
    second.write("cells", cells);
    std::fs::remove_dir_all(second.path("baselines")).unwrap();
    let copied =
        Command::new("cp").arg("-R").arg(first.path("out/proposed")).arg(second.path("baselines")).status().unwrap();
    assert!(copied.success());
    let ran = second.run_with(&bin, &bench);
    // Whatever this machine's noise is, it was compared.
    assert!([0, 3, 5].contains(&ran.code), "{}", ran.text);
    let said = second.read("out/bench/gate-run.md");
    assert!(said.contains("norm tiny rms M=1 warm"), "{said}");
}
