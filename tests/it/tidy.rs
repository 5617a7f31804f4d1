//! The shape of the house: import order between rooms, twins of ops, where `unsafe` may stand, module docs.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// What each room may import, itself aside.
const ROOMS: &[(&str, &[&str])] = &[
    ("error", &[]),
    ("num", &["error"]),
    ("mem", &["error", "num"]),
    ("device", &["error", "num", "mem"]),
    ("tensor", &["error", "num", "mem", "device"]),
    ("ops", &["error", "num", "mem", "device", "tensor"]),
    ("checkpoint", &["error", "num", "mem", "device", "tensor", "ops"]),
    ("model", &["error", "num", "mem", "device", "tensor", "ops", "checkpoint"]),
    ("engine", &["error", "num", "mem", "device", "tensor", "ops", "checkpoint", "model"]),
];

/// Files of `ops` that are no op: the context every op is called with.
const OPS_WITHOUT_TWIN: &[&str] = &["mod", "batch", "check", "cost", "cx", "scheme"];

/// Kernel files of an op that has several: by how its weight is stored, for which card, or for how many rows.
const KERNELS_OF: &[(&str, &[&str])] = &[
    ("linear", &["fp8_gemm", "fp8_hopper", "fp8_hopper_few", "nvfp4_gemm", "nvfp4_hopper"]),
    ("moe", &["moe_decode", "moe_gemm", "moe_hopper"]),
];

/// Kernel files that measure and that no model runs: a launch and a test, no op.
const KERNELS_WITHOUT_OP: &[&str] = &["stream"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn rust_files(dir: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut pending = vec![root().join(dir)];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                if path.file_name().is_some_and(|n| n != "fuzz" && n != "fixtures") {
                    pending.push(path);
                }
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn stems(dir: &str) -> BTreeSet<String> {
    fs::read_dir(root().join(dir))
        .into_iter()
        .flatten()
        .map(|e| e.unwrap().path())
        .filter(|p| p.is_file())
        .filter_map(|p| p.file_stem().map(|s| s.to_string_lossy().into_owned()))
        .collect()
}

/// The room a source file belongs to: its folder, or its own stem, directly under `src`.
fn room(path: &Path) -> String {
    let inside = path.strip_prefix(root().join("src")).unwrap();
    let first = inside.components().next().unwrap().as_os_str().to_string_lossy().into_owned();
    first.trim_end_matches(".rs").to_string()
}

/// Code before the unit tests, comments left out: a doc link is no import.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]").next().unwrap();
    text.lines().map(|l| l.split("//").next().unwrap()).collect::<Vec<_>>().join("\n")
}

/// Rooms named by `crate::X` paths, the groups of `use crate::{a, b}` included.
fn imports(code: &str) -> BTreeSet<String> {
    let mut rooms = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        let name = |s: &str| -> String { s.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect() };
        if let Some(group) = rest.strip_prefix('{') {
            let mut depth = 0;
            let mut word = String::new();
            for c in group.chars() {
                match c {
                    '{' => depth += 1,
                    '}' if depth == 0 => break,
                    '}' => depth -= 1,
                    ',' if depth == 0 => {
                        rooms.insert(name(word.trim()));
                        word.clear();
                        continue;
                    }
                    _ => {}
                }
                if depth == 0 {
                    word.push(c);
                }
            }
            rooms.insert(name(word.trim()));
        } else {
            rooms.insert(name(rest));
        }
    }
    rooms.remove("");
    rooms
}

#[test]
fn rooms_import_only_what_comes_before_them() {
    let known: BTreeSet<&str> = ROOMS.iter().map(|(room, _)| *room).collect();
    let mut wrong = Vec::new();
    for path in rust_files("src") {
        let room = room(&path);
        if room == "lib" {
            continue;
        }
        let Some((_, allowed)) = ROOMS.iter().find(|(name, _)| *name == room) else {
            wrong.push(format!("{}: room {room} has no place in the import order", path.display()));
            continue;
        };
        for import in imports(&code(&path)) {
            // Macros are exported at the crate's root, whichever room defines them.
            if import == room || ["with_elem", "entry"].contains(&import.as_str()) {
                continue;
            }
            if !known.contains(import.as_str()) || !allowed.contains(&import.as_str()) {
                wrong.push(format!("{}: {room} imports {import}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn an_arrow_back_would_be_found() {
    assert_eq!(imports("use crate::engine::Engine;"), BTreeSet::from(["engine".to_string()]));
    let group = imports("use crate::{error::Result, model::{a, b}, mem};");
    assert_eq!(group, BTreeSet::from(["error", "mem", "model"].map(String::from)));
    assert_eq!(imports("fn f() -> crate::ops::Cx {}"), BTreeSet::from(["ops".to_string()]));
}

#[test]
fn every_op_has_its_reference_and_its_tests() {
    let ops: BTreeSet<String> =
        stems("src/ops").into_iter().filter(|s| !OPS_WITHOUT_TWIN.contains(&s.as_str())).collect();
    let mut reference = stems("src/ops/reference");
    reference.remove("mod");
    let mut tests = stems("tests/it/ops");
    tests.remove("mod");
    assert!(ops.len() > 10, "ops found: {ops:?}");
    for op in &ops {
        assert!(reference.contains(op), "src/ops/{op}.rs has no src/ops/reference/{op}.rs");
        assert!(tests.contains(op), "src/ops/{op}.rs has no tests/it/ops/{op}.rs");
    }
}

#[test]
fn every_kernel_has_its_op_reference_and_tests() {
    let files: BTreeSet<String> =
        highwater::device::cuda::sources::FILES.iter().map(|(f, _)| (*f).to_owned()).collect();
    let on_disk = |dir: &str| {
        fs::read_dir(root().join("kernels").join(dir)).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_file())
    };
    let name = |p: PathBuf| p.strip_prefix(root().join("kernels")).unwrap().to_string_lossy().into_owned();
    let found: BTreeSet<String> = on_disk("").chain(on_disk("lib")).map(name).collect();
    assert_eq!(files, found, "src/device/cuda/sources.rs lists the files of kernels/");
    for kernel in stems("kernels") {
        let op = KERNELS_OF.iter().find(|(_, files)| files.contains(&kernel.as_str()));
        let kernel = op.map_or(kernel, |(op, _)| (*op).to_owned());
        let mut twins = vec![format!("src/ops/launch/{kernel}.rs"), format!("tests/it/cuda/{kernel}.rs")];
        if !KERNELS_WITHOUT_OP.contains(&kernel.as_str()) {
            twins.extend(["src/ops", "src/ops/reference", "tests/it/ops"].map(|dir| format!("{dir}/{kernel}.rs")));
        }
        for twin in twins {
            assert!(root().join(&twin).is_file(), "kernels/{kernel}.cu has no {twin}");
        }
    }
}

/// A launch lets a kernel begin before the one ahead of it has ended, so each waits for what it may read or write over.
#[test]
fn every_kernel_waits_for_those_before_it() {
    let mut kernels = 0;
    for file in fs::read_dir(root().join("kernels")).unwrap().map(|entry| entry.unwrap().path()) {
        let Ok(text) = fs::read_to_string(&file) else { continue };
        // A macro's lines end in a backslash; parameters hold no braces.
        let text = text.replace('\\', " ");
        for kernel in text.split("KERNEL LAUNCH_BOUNDS").skip(1).chain(text.split("KERNEL any_").skip(1)) {
            let (name, body) = kernel.split_once('{').unwrap();
            let first = body.trim_start();
            let first_of_all = ["after_earlier_kernels();", "wait_for_earlier_kernels();"];
            let waits = first_of_all.iter().any(|w| first.starts_with(w))
                // Weights alone are read before.
                || file.ends_with("fp8_hopper_few.cu") && body.contains("  wait_for_earlier_kernels();");
            assert!(waits, "{}: {}", file.display(), name.trim());
            kernels += 1;
        }
    }
    assert!(kernels >= 70, "{kernels}");
}

/// Files of `ops/launch` that are part of others' launches, and the ceiling that kernels are held against.
const LAUNCHES_WITHOUT_BENCH: &[&str] =
    &["mod", "grids", "hopper", "hopper_few", "nvfp4_hopper", "moe_hopper", "tiles", "stream"];

/// What `highwater bench` calls a kernel where that is not its file.
const BENCHED_AS: &[(&str, &str)] = &[("activation", "silu_mul")];

#[test]
fn every_kernel_has_a_bench_and_rows_of_its_own() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let listed = std::process::Command::new(env!("CARGO_BIN_EXE_highwater"))
        .args(["bench", "--device", "cpu", "--list"])
        .output()
        .unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    for launch in stems("src/ops/launch") {
        if LAUNCHES_WITHOUT_BENCH.contains(&launch.as_str()) {
            continue;
        }
        let file = root().join("benches").join(&launch).with_extension("rs");
        let bench =
            fs::read_to_string(&file).unwrap_or_else(|e| panic!("src/ops/launch/{launch}.rs has no bench: {e}"));
        let entry = format!("[[bench]]\nname = \"{launch}\"\nharness = false");
        assert!(manifest.contains(&entry), "Cargo.toml has no entry for {}", file.display());
        let kernel = BENCHED_AS.iter().find(|(file, _)| *file == launch).map_or(launch.as_str(), |(_, kernel)| kernel);
        assert!(bench.contains(&format!("cuda::kernels(c, &[\"{kernel}\"")), "{} times no {kernel}", file.display());
        let own = |line: &str| line.split(' ').next() == Some(kernel);
        assert!(listed.lines().any(own), "`highwater bench` has no row of {kernel}");
    }
}

#[test]
fn unsafe_stands_only_in_the_device_room() {
    for dir in ["src", "harness", "benches", "tests/it"] {
        for path in rust_files(dir) {
            let inside = path.strip_prefix(root()).unwrap();
            if inside.starts_with("src/device") || inside.ends_with("tidy.rs") {
                continue;
            }
            for line in code(&path).lines() {
                let found = line.contains("unsafe ") || line.contains("allow(unsafe");
                assert!(!found, "{}: {line}", inside.display());
            }
        }
    }
}

#[test]
fn the_driver_is_spoken_to_from_one_room() {
    for dir in ["src", "harness", "benches", "tests/it"] {
        for path in rust_files(dir) {
            let inside = path.strip_prefix(root()).unwrap();
            let allowed = inside.starts_with("src/device/cuda") || inside.ends_with("tidy.rs");
            assert!(allowed || !code(&path).contains("cudarc::"), "{} names cudarc", inside.display());
        }
    }
}

#[test]
fn every_file_says_what_it_is_and_none_is_huge() {
    const MOST_LINES: usize = 700;
    for dir in ["src", "harness", "benches", "tests/it"] {
        for path in rust_files(dir) {
            let text = fs::read_to_string(&path).unwrap();
            let name = path.strip_prefix(root()).unwrap().display().to_string();
            assert!(text.starts_with("//!"), "{name} does not open with what it is for");
            let lines = text.lines().count();
            assert!(lines <= MOST_LINES, "{name} has {lines} lines; at most {MOST_LINES}: split it by idea");
        }
    }
}

#[test]
fn no_test_is_ignored() {
    let marker = format!("#[{}", "ignore");
    for dir in ["src", "harness", "tests/it"] {
        for path in rust_files(dir) {
            let text = fs::read_to_string(&path).unwrap();
            assert!(!text.contains(&marker), "{}", path.display());
        }
    }
}

#[test]
fn the_top_level_is_the_card_s() {
    for name in
        ["Cargo.toml", "src", "benches", "harness", "results", "tests", "README.md", "ARCHITECTURE.md", "CHANGELOG.md"]
    {
        assert!(root().join(name).exists(), "{name} is missing at the top level");
    }
    assert!(!root().join("build.rs").exists(), "the build script is harness/build.rs");
    // A machine without CUDA builds everything: the script tells what cargo told it, and looks for nothing.
    let script = code(&root().join("harness/build.rs"));
    let told: Vec<&str> = script.match_indices("cargo:").map(|(at, _)| &script[at..]).collect();
    let allowed = ["cargo:rerun-if-", "cargo:rustc-env=HIGHWATER_"];
    for line in told {
        assert!(allowed.iter().any(|start| line.starts_with(start)), "{}", line.lines().next().unwrap());
    }
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    assert!(!manifest.contains("[build-dependencies]"), "the build script has the standard library");
}
