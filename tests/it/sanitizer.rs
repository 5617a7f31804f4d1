//! `.github/sanitizer.sh` against stubs of the sanitizer and of a test binary: what it runs, and what it makes of the answers.

use std::path::Path;
use std::process::{Command, Output};

const TESTS: &str = r#"#!/bin/sh
[ "$1" = --list ] || { printf 'ran %s\n' "$*" >> "$STUB/ran"; exit 0; }
printf 'cuda::moe::a: test\ncuda::moe::b: test\ncuda::rope::c: test\ncuda::model::d: test\ngate::e: test\n\n5 tests\n'
"#;
/// Runs what it is given, and fails where a file says so.
const TOOL: &str = r#"#!/bin/sh
tool=$2; shift 4
[ "$REQUIRE_GPU$SMALL_CASES" = 11 ] || exit 1
"$@"
op=$(echo "$2" | tr -d ':')
if [ -e "$STUB/fails.$tool.$op" ]; then echo '========= ERROR SUMMARY: 3 errors'; exit 9; fi
echo '========= ERROR SUMMARY: 0 errors'
"#;

fn sanitizer(dir: &Path, args: &[&str]) -> (i32, String) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(".github/sanitizer.sh");
    let path = format!("{}:{}", dir.display(), std::env::var("PATH").unwrap());
    let ran: Output = Command::new("bash").arg(script).args(args).env("PATH", path).env("STUB", dir).output().unwrap();
    (ran.status.code().unwrap(), String::from_utf8([ran.stdout, ran.stderr].concat()).unwrap())
}

#[test]
fn every_op_is_run_under_both_tools_and_an_error_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in [("it", TESTS), ("compute-sanitizer", TOOL)] {
        std::fs::write(dir.path().join(name), text).unwrap();
        assert!(Command::new("chmod").arg("+x").arg(dir.path().join(name)).status().unwrap().success());
    }
    let (binary, out) = (dir.path().join("it"), dir.path().join("out"));
    let (binary, out) = (binary.to_str().unwrap(), out.to_str().unwrap());
    let (code, said) = sanitizer(dir.path(), &[binary, out]);
    assert_eq!(code, 0, "{said}");
    let lines: Vec<&str> = said.lines().collect();
    let line = |tool: &str, op: &str| format!("{tool} {op}: clean (ERROR SUMMARY: 0 errors)");
    let want = [line("memcheck", "moe"), line("memcheck", "rope"), line("racecheck", "moe"), line("racecheck", "rope")];
    assert_eq!(lines, want);
    let ran = std::fs::read_to_string(dir.path().join("ran")).unwrap();
    assert_eq!(ran.matches("ran cuda::moe:: --test-threads=1").count(), 2, "{ran}");
    // One error anywhere fails all, and the rest still runs.
    std::fs::write(dir.path().join("fails.memcheck.cudamoe"), "").unwrap();
    let (code, said) = sanitizer(dir.path(), &[binary, out]);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("memcheck moe: FAILED (ERROR SUMMARY: 3 errors)") && said.contains("racecheck rope: clean"));
    // Ops by name; and what cannot begin is a usage error.
    assert_eq!(sanitizer(dir.path(), &[binary, out, "rope"]).1.lines().count(), 2);
    assert_eq!(sanitizer(dir.path(), &["/no/such", out]).0, 2);
    assert_eq!(sanitizer(dir.path(), &[binary]).0, 2);
}
