//! `highwater bench` as a user runs it: the CPU arm here, the cards' kernels in emulation, a card where there is one.

use std::path::Path;
use std::process::Command;

use highwater::device::cuda::{emulator, info};

fn bench(args: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_highwater")).arg("bench").args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn card_is_there() -> bool {
    let there = info::cards().is_ok_and(|cards| !cards.is_empty());
    assert!(there || std::env::var_os("REQUIRE_GPU").is_none(), "REQUIRE_GPU is set and no card was found");
    if !there {
        println!("skipped: no card");
    }
    there
}

/// A CSV's rows by column.
struct Rows {
    header: csv::StringRecord,
    records: Vec<csv::StringRecord>,
}

impl Rows {
    fn of(file: &Path) -> Rows {
        let mut reader = csv::Reader::from_path(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        Rows { header: reader.headers().unwrap().clone(), records: reader.records().map(Result::unwrap).collect() }
    }

    fn column(&self, name: &str) -> Vec<&str> {
        let at = self.header.iter().position(|column| column == name).unwrap_or_else(|| panic!("no column {name}"));
        self.records.iter().map(|record| &record[at]).collect()
    }
}

#[test]
fn the_cpu_arm_is_timed_and_its_rows_say_where_they_come_from() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().display().to_string();
    let (code, text, err) = bench(&["norm", "silu_mul", "--device", "cpu", "--cap", "0.01", "--out", &out]);
    assert_eq!(code, Some(0), "{err}");
    assert!(text.contains("add_rms") && text.contains("% of ceiling: the time of reading"), "{text}");
    let rows = Rows::of(&dir.path().join("host/kernels.csv"));
    assert!(rows.records.len() >= 12);
    assert!(rows.column("median_us").iter().all(|us| us.parse::<f64>().unwrap() > 0.0));
    assert!(rows.column("checked").iter().all(|checked| checked.is_empty()), "the reference checks nothing");
    assert!(rows.column("cache").iter().all(|cache| *cache == "warm"), "only a card's L2 can be emptied");
    for column in ["card", "device", "time", "run", "version", "argv", "profile", "samples", "bytes", "gb_s"] {
        assert!(rows.column(column).iter().all(|value| !value.is_empty()), "{column}");
    }
    for column in ["rustc", "cargo_flags", "method"] {
        assert!(rows.column(column).iter().all(|value| !value.is_empty()), "{column}");
    }
    // Of a card alone.
    for column in ["nvrtc", "nvrtc_options", "uuid", "pci", "ecc", "power_limit_w", "cuda"] {
        assert!(rows.column(column).iter().all(|value| value.is_empty()), "{column}");
    }
    for column in ["samples_us", "low_us", "high_us", "flop_per_byte", "cpu", "cores"] {
        assert!(rows.column(column).iter().all(|value| !value.is_empty()), "{column}");
    }
    assert!(rows.column("samples_us").iter().zip(rows.column("samples")).all(|(list, count)| {
        let list: Vec<f64> = serde_json::from_str(list).unwrap();
        list.len().to_string() == count && list.iter().all(|us| *us > 0.0)
    }));
    assert!(!text.contains("  checked"), "the reference is checked by nothing: {text}");
    let definitions = std::fs::read_to_string(dir.path().join("host/kernels.DEFINITIONS.txt")).unwrap();
    for term in ["GB/s, TFLOP/s: ", "\nmethod: ", "\nbuild: "] {
        assert!(definitions.contains(term), "{term} is missing in {definitions}");
    }
}

#[test]
fn a_part_of_a_table_is_measured_again_and_the_rest_stays() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().display().to_string();
    let run = |args: &[&str]| bench(&[args, &["--device", "cpu", "--cap", "0", "--out", &out]].concat());
    let read = || Rows::of(&dir.path().join("host/kernels.csv"));
    assert_eq!(run(&["norm"]).0, Some(0));
    let before = read();
    let (code, text, err) = run(&["norm", "--row", "norm tiny gated M=8"]);
    assert!(code == Some(0) && text.lines().filter(|line| line.starts_with("norm ")).count() == 1, "{text}{err}");
    let after = read();
    assert_eq!(after.records.len(), before.records.len());
    let again = before.column("run").iter().zip(after.column("run")).filter(|(old, new)| **old != *new).count();
    assert_eq!(again, 1, "each row says which run it is of");
    assert_eq!(run(&["silu_mul"]).0, Some(0));
    assert!(read().records.len() > before.records.len());
    let (code, _, err) = run(&["norm", "--row", "norm M=9"]);
    assert!(code == Some(2) && err.contains("there is no row"), "{err}");
    std::fs::write(dir.path().join("host/kernels.csv"), "not,a table\n1,2\n").unwrap();
    let (code, text, err) = run(&["norm"]);
    assert!(code == Some(1) && text.is_empty() && err.contains("move it away"), "{text}{err}");
}

#[test]
fn a_bench_is_held_to_an_earlier_one() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run").display().to_string();
    let (code, _, err) = bench(&["norm", "--device", "cpu", "--filter", "M=1", "--cap", "0.05", "--out", &out]);
    assert_eq!(code, Some(0), "{err}");
    let gate = |candidate: &Path, flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_highwater"));
        let output = command.args(["gate", &out]).arg(candidate).args(flags).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    };
    let table = dir.path().join("run/host/kernels.csv");
    let (code, text) = gate(&table, &[]);
    assert!(code == Some(0) && text.contains("norm tiny rms M=1 warm"), "{text}");
    // Every sample twice as long, and 10 us more, which is over the floor of a call by itself.
    let other = dir.path().join("other");
    std::fs::create_dir_all(&other).unwrap();
    let rows = Rows::of(&table);
    let at = rows.header.iter().position(|name| name == "samples_us").unwrap();
    let mut writer = csv::Writer::from_path(other.join("kernels.csv")).unwrap();
    writer.write_record(&rows.header).unwrap();
    for record in &rows.records {
        let samples: Vec<f64> = serde_json::from_str(&record[at]).unwrap();
        let slower: Vec<f64> = samples.iter().cycle().take(samples.len().max(12)).map(|us| 2.0 * us + 10.0).collect();
        let fields = record.iter().enumerate();
        let slower = serde_json::to_string(&slower).unwrap();
        writer.write_record(fields.map(|(n, field)| if n == at { &slower } else { field })).unwrap();
    }
    writer.flush().unwrap();
    let (code, text) = gate(&other, &[]);
    assert!(code == Some(3) && text.contains("SLOWER: norm tiny"), "{text}");
    let (code, text) = gate(Path::new(env!("CARGO_MANIFEST_DIR")).join("results/plan").as_path(), &[]);
    assert!(code == Some(1) && text.contains("is a table of kernels"), "{text}");
}

#[test]
fn every_kernel_in_emulation_agrees_with_the_cpu_arm() {
    if let Some(why) = emulator::unavailable() {
        assert!(std::env::var_os("REQUIRE_EMULATOR").is_none(), "REQUIRE_EMULATOR is set: {why}");
        println!("skipped: {why}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().display().to_string();
    let (code, text, err) = bench(&["--device", "emulated", "--cap", "0", "--out", &out]);
    assert_eq!(code, Some(0), "{text}{err}");
    let rows = Rows::of(&dir.path().join("h200/kernels.csv"));
    let (kernels, checked) = (rows.column("kernel"), rows.column("checked"));
    for (kernel, draws) in kernels.iter().zip(rows.column("draws")) {
        assert_eq!(*kernel == "sampler", !draws.is_empty(), "{kernel}");
    }
    for (kernel, cosine) in kernels.iter().zip(rows.column("cosine")) {
        assert!(!["linear", "attention", "norm", "rope"].contains(kernel) || cosine.parse::<f64>().unwrap() > 0.99);
    }
    for ((kernel, checked), note) in kernels.iter().zip(checked).zip(rows.column("note")) {
        assert_eq!(checked, "true", "{kernel}: {note}");
    }
    assert_eq!(kernels.iter().collect::<std::collections::BTreeSet<_>>().len(), 14);
}

#[test]
fn a_card_s_rows_are_checked_and_held_against_its_ceilings() {
    if !card_is_there() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().display().to_string();
    let args = ["ceiling", "norm", "linear", "--filter", "M=8", "--filter", "27b", "--cap", "0.2", "--out", &out];
    let (code, text, err) = bench(&[&args[..], &["--peer", "cublaslt"]].concat());
    assert_eq!(code, Some(0), "{text}{err}");
    let folder = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
    let rows = Rows::of(&folder.join("kernels.csv"));
    for ((label, checked), percent) in
        rows.column("part").iter().zip(rows.column("checked")).zip(rows.column("percent_of_ceiling"))
    {
        assert_eq!(checked, "true", "{label}");
        let percent: f64 = percent.parse().unwrap();
        assert!((0.1..130.0).contains(&percent), "{label}: {percent} %");
    }
    assert!(rows.column("peer_median_us").iter().any(|us| !us.is_empty()));
    for column in ["nvrtc", "nvrtc_options", "uuid", "pci", "cuda"] {
        assert!(rows.column(column).iter().all(|value| !value.is_empty()), "{column}");
    }
}

#[test]
fn a_card_s_rows_say_how_its_cache_was_and_are_held_to_ceilings_of_the_same() {
    if !card_is_there() {
        return;
    }
    for cache in ["rotate", "flush", "warm"] {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().display().to_string();
        let args = ["linear", "--filter", "27b gate_up", "--filter", "M=8", "--cap", "0.2", "--out", &out];
        let (code, text, err) = bench(&[&args[..], &["--cache", cache]].concat());
        assert_eq!(code, Some(0), "{cache}: {text}{err}");
        let folder = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
        let rows = Rows::of(&folder.join("kernels.csv"));
        assert!(rows.column("cache").iter().all(|name| *name == cache), "{cache}");
        assert!(rows.column("percent_of_ceiling").iter().all(|percent| percent.parse::<f64>().unwrap() < 150.0));
        for (times, calls) in rows.column("rotation_of_l2").iter().zip(rows.column("calls")) {
            assert_eq!(times.parse::<f64>().is_ok_and(|times| times >= 3.0), cache == "rotate", "{cache}: {times}");
            assert!(cache != "flush" || calls == "1", "{calls} calls of a sample");
        }
    }
}

#[test]
fn what_cannot_be_timed_is_refused_with_what_can() {
    let (code, _, err) = bench(&["gemm", "--device", "cpu"]);
    assert_eq!(code, Some(2));
    assert!(err.contains("the kernels are attention, conv1d"), "{err}");
    let (code, _, err) = bench(&["--device", "plan"]);
    assert_eq!((code, err.contains("a plan has no time")), (Some(2), true), "{err}");
    for cache in ["rotate", "flush"] {
        let (code, _, err) = bench(&["--device", "cpu", "--cache", cache]);
        assert_eq!((code, err.contains("for a card, whose L2 is known")), (Some(2), true), "{err}");
    }
    let (code, _, err) = bench(&["--device", "cpu", "--filter", "no such row"]);
    assert_eq!((code, err.contains("--list")), (Some(2), true), "{err}");
    let (code, out, _) = bench(&["moe", "--device", "cpu", "--list"]);
    assert_eq!(code, Some(0));
    assert!(out.lines().count() > 5 && out.lines().all(|line| line.starts_with("moe tiny-moe ")), "{out}");
    // A folder that cannot be made fails before anything is timed.
    let file = tempfile::NamedTempFile::new().unwrap();
    let (code, out, err) = bench(&["norm", "--device", "cpu", "--out", &file.path().display().to_string()]);
    assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
    assert!(err.contains("cannot make"), "{err}");
}
