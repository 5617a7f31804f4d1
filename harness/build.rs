//! The build script: tells the program which compiler built it and with what, for its rows to say. It builds nothing and
//! looks for no library: a machine without CUDA builds everything.
#![allow(clippy::print_stdout)] // cargo reads it

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Settings of a profile that cargo does not tell a build script: they are read where they are written.
const UNTOLD: [&str; 2] = ["lto", "codegen-units"];

fn main() {
    println!("cargo:rerun-if-changed=harness/build.rs");
    println!("cargo:rerun-if-changed=Cargo.toml");
    println!("cargo:rustc-env=HIGHWATER_RUSTC={}", rustc().unwrap_or_default());
    println!("cargo:rustc-env=HIGHWATER_CARGO_FLAGS={}", cargo_flags());
}

/// The compiler's version, as `1.95.0 (59807616e 2026-04-14)`.
fn rustc() -> Option<String> {
    let said = Command::new(env::var_os("RUSTC")?).arg("--version").output().ok()?;
    let said = String::from_utf8(said.stdout).ok()?;
    Some(said.trim().trim_start_matches("rustc ").to_owned())
}

/// On one line, as `--release opt-level=3 lto=thin target=x86_64-unknown-linux-gnu target-features=sse2 rustflags="..."`.
fn cargo_flags() -> String {
    let told = |name: &str| env::var(name).unwrap_or_default();
    let profile = profile();
    let mut flags = vec![if profile == "release" { "--release".to_owned() } else { format!("--profile {profile}") }];
    flags.push(format!("opt-level={}", told("OPT_LEVEL")));
    let manifest = fs::read_to_string("Cargo.toml").unwrap_or_default();
    for key in UNTOLD {
        let variable = format!("CARGO_PROFILE_{profile}_{key}").to_uppercase().replace('-', "_");
        println!("cargo:rerun-if-env-changed={variable}");
        // What is neither in the environment nor in the manifest is cargo's default, or was said by `--config`.
        let value = env::var(&variable).ok().or_else(|| setting(&manifest, &profile, key));
        flags.extend(value.map(|value| format!("{key}={value}")));
    }
    flags.push(format!("target={}", told("TARGET")));
    flags.push(format!("target-features={}", told("CARGO_CFG_TARGET_FEATURE")));
    // Words are apart by a unit separator.
    let rustflags = told("CARGO_ENCODED_RUSTFLAGS").replace('\u{1f}', " ");
    if !rustflags.is_empty() {
        flags.push(format!("rustflags={rustflags:?}"));
    }
    flags.join(" ")
}

/// The profile's name: its folder's, where `PROFILE` says only what it is derived from.
fn profile() -> String {
    let out = env::var("OUT_DIR").unwrap_or_default();
    let folder = Path::new(&out).ancestors().nth(2).filter(|build| build.ends_with("build")).and_then(Path::parent);
    let name = folder.and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    match name.or_else(|| env::var("PROFILE").ok()).unwrap_or_default().as_str() {
        "debug" => "dev".to_owned(),
        name => name.to_owned(),
    }
}

/// `key` of `[profile.NAME]` in the manifest, or of the one it inherits from.
fn setting(manifest: &str, profile: &str, key: &str) -> Option<String> {
    let header = format!("[profile.{profile}]");
    let inside = manifest.lines().skip_while(|line| line.trim() != header).skip(1);
    let inside = inside.take_while(|line| !line.trim_start().starts_with('['));
    let pairs: Vec<(&str, &str)> = inside.filter_map(|line| line.split('#').next()?.split_once('=')).collect();
    let value = |key: &str| {
        let (_, value) = pairs.iter().find(|(name, _)| name.trim() == key)?;
        Some(value.trim().trim_matches('"').to_owned())
    };
    value(key).or_else(|| setting(manifest, &value("inherits").filter(|from| from != profile)?, key))
}
