//! `highwater doctor` as a user runs it, on whatever machine this is.

use std::process::Command;

use highwater::device::cuda::{emulator, info};
use serde_json::Value;

fn doctor(args: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_highwater")).arg("doctor").args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn cards() -> usize {
    info::cards().map_or(0, |cards| cards.len())
}

#[test]
fn it_says_what_this_machine_can_do_and_how_to_get_the_rest() {
    let (code, out, err) = doctor(&["--json"]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    let report: Value = serde_json::from_str(&out).unwrap();
    let works = |device: &str| {
        let abilities = report["abilities"].as_array().unwrap();
        abilities.iter().find(|ability| ability["device"] == device).map(|ability| ability["works"] == true)
    };
    assert_eq!((works("plan"), works("cpu")), (Some(true), Some(true)));
    assert_eq!(works("emulated"), Some(emulator::unavailable().is_none()));
    assert_eq!(report["cards"].as_array().unwrap().len(), cards());
    if cards() == 0 {
        assert_eq!(works("cuda:0"), Some(false));
    }
    let missing: Vec<&str> = report["missing"].as_array().unwrap().iter().map(|m| m.as_str().unwrap()).collect();
    let libraries = report["libraries"].as_array().unwrap();
    assert_eq!(libraries.len(), 4);
    for library in libraries {
        let name = library["name"].as_str().unwrap();
        match library["missing"].as_str() {
            None => assert!(library["place"].is_string(), "{library}"),
            Some(sentence) => {
                assert!(sentence.contains(name) && missing.contains(&sentence), "{library}");
                assert!(["install", "driver"].iter().any(|word| sentence.contains(word)), "how to get it: {sentence}");
            }
        }
    }
    let (code, out, _) = doctor(&[]);
    assert_eq!(code, Some(0));
    for part in ["driver ", "libraries", "libnvrtc.so.13", "what --device can be here", "yes plan", "yes cpu"] {
        assert!(out.contains(part), "{part} is missing in:\n{out}");
    }
    for sentence in missing {
        assert!(out.contains(sentence), "{sentence} is missing in:\n{out}");
    }
}

#[test]
fn a_folder_of_libraries_that_has_none_is_refused_with_what_was_looked_for() {
    let empty = tempfile::tempdir().unwrap();
    let (folder, gone) = (empty.path().display().to_string(), empty.path().join("gone").display().to_string());
    for (named, words) in [
        (&folder, "has neither libnvrtc.so.13 nor libcublasLt.so.13, in itself or in lib, lib64"),
        (&gone, "is no folder; libnvrtc.so.13 and"),
    ] {
        let (code, out, err) = doctor(&["--cuda", named]);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{err}");
        assert!(err.starts_with(&format!("error: --cuda: {named} {words}")), "{err}");
        assert!(err.contains("pip install --target DIR nvidia-cuda-nvrtc nvidia-cublas"), "{err}");
    }
    // Of every verb, before it does anything.
    for verb in [&["sweep", "tiny", "--device", "plan"][..], &["kernels"], &["bench"], &["plan", "tiny"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_highwater")).args(["--cuda", &gone]).args(verb).output().unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{verb:?}");
    }
    assert_eq!(doctor(&["--cuda"]).0, Some(2));
}

#[test]
fn a_library_of_the_named_folder_that_does_not_load_is_no_other_folder_s() {
    for layout in ["", "lib64", "nvidia/cu13/lib", "lib/python3.12/site-packages/nvidia/cu13/lib"] {
        let dir = tempfile::tempdir().unwrap();
        let inside = dir.path().join(layout);
        std::fs::create_dir_all(&inside).unwrap();
        std::fs::write(inside.join("libcublasLt.so.13"), "no library").unwrap();
        let (code, out, err) = doctor(&["--json", "--cuda", &dir.path().display().to_string()]);
        assert_eq!(code, Some(0), "{err}");
        let report: Value = serde_json::from_str(&out).unwrap();
        let whole = dir.path().canonicalize().unwrap();
        assert_eq!(report["folder"], whole.display().to_string());
        let blas = report["libraries"].as_array().unwrap().iter().find(|l| l["name"] == "libcublasLt.so.13").unwrap();
        let missing = blas["missing"].as_str().unwrap();
        let file = whole.join(layout).join("libcublasLt.so.13");
        assert!(missing.starts_with(&format!("{} cannot be loaded; ", file.display())), "{missing}");
        assert!(blas["place"].is_null(), "{blas}");
    }
}

#[test]
fn calibration_needs_a_card_and_says_so() {
    let (code, _, err) = doctor(&["--calibrate", "--device", "cpu"]);
    assert_eq!(code, Some(1));
    assert!(err.contains("only a card"), "{err}");
    // A number that no machine has.
    let (code, _, err) = doctor(&["--calibrate", "--device", "cuda:4096"]);
    assert_eq!(code, Some(1));
    let why = if cards() == 0 { "driver" } else { "card 4096 of" };
    assert!(err.starts_with("error: ") && err.contains(why), "{err}");
    assert_eq!(doctor(&["--device", "cuda:0"]).0, Some(2), "without --calibrate a device means nothing");
}

#[test]
fn a_card_s_calibration_adds_up() {
    if cards() == 0 {
        assert!(std::env::var_os("REQUIRE_GPU").is_none(), "REQUIRE_GPU is set and no card was found");
        println!("skipped: no card");
        return;
    }
    let (code, out, err) = doctor(&["--calibrate", "--json"]);
    assert_eq!(code, Some(0), "{err}");
    let measured: Value = serde_json::from_str(&out).unwrap();
    let part = |name: &str| measured["outside"][name].as_i64().unwrap();
    let parts: i64 = ["context", "modules", "blas", "graphs"].iter().map(|name| part(name)).sum();
    assert_eq!(measured["bytes"].as_i64().unwrap(), parts + part("unattributed").max(0));
    assert!(part("unattributed").abs() <= 16 << 20, "{measured}");
    assert!(measured["rust"].as_str().unwrap().starts_with("Overhead::Measured { bytes: "));
}
