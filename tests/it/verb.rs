//! The real binary, run to its end: what the tests of its verbs share.
#![allow(unreachable_pub)] // shared by the modules of one test binary

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// What a verb printed, and its exit code.
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

/// Runs `highwater` with `args` at the top of the source tree.
pub fn output(args: &[&str]) -> Output {
    let root = env!("CARGO_MANIFEST_DIR");
    Command::new(env!("CARGO_BIN_EXE_highwater")).current_dir(root).args(args).output().unwrap()
}

/// As [`output`], its texts apart.
pub fn highwater(args: &[&str]) -> Ran {
    let output = output(args);
    let code = code(&output);
    Ran { code, out: String::from_utf8(output.stdout).unwrap(), err: String::from_utf8(output.stderr).unwrap() }
}

/// As [`highwater`]: code, output, errors.
pub fn run(args: &[&str]) -> (i32, String, String) {
    let Ran { code, out, err } = highwater(args);
    (code, out, err)
}

/// What a verb prints that must not fail.
pub fn ok(args: &[&str]) -> String {
    let Ran { code, out, err } = highwater(args);
    assert_eq!(code, 0, "{args:?}\n{out}{err}");
    out
}

pub fn code(output: &Output) -> i32 {
    output.status.code().expect("no signal")
}

/// All that was printed.
pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.clone(), output.stderr.clone()].concat()).into_owned()
}

/// Rows of a sweep's JSONL.
pub fn rows(dir: impl AsRef<Path>) -> Vec<Value> {
    let text = std::fs::read_to_string(dir.as_ref().join("sweep.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
