//! Every kernel compiled for every arch, here and without a card, by the binary's own verb; and what the verb says of
//! kernels that are wrong.
//!
//! NVRTC is taken where the library finds it, else from its wheel, which [`wheels.py`](./wheels.py) installs below
//! `target/`. Cubins are kept there too, by content: what has not changed is not compiled again.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use highwater::device::Arch;
use highwater::device::cuda::library::{self, Library};
use highwater::device::cuda::sources;
use highwater::ops::launch;
use serde_json::Value;

fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("target")
}

/// The folder to name in `HIGHWATER_CUDA`; none where the loader finds NVRTC by itself. Fails where there is no way to have
/// it.
fn wheels() -> Option<&'static Path> {
    static WHEELS: OnceLock<Option<PathBuf>> = OnceLock::new();
    let wheels = WHEELS.get_or_init(|| {
        if let Ok(place) = library::load(Library::Nvrtc) {
            // What is found from this folder is not found from the verb's.
            return Path::new(&place).canonicalize().ok().and_then(|file| Some(file.parent()?.to_owned()));
        }
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/wheels.py");
        let ran = Command::new("python3").arg(script).arg(target()).output();
        let ran = ran.unwrap_or_else(|e| {
            panic!("python3: {e}. The test command installs NVRTC with it: install Python 3, or the CUDA 13 toolkit")
        });
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        Some(target().join(library::WHEELS))
    });
    wheels.as_deref()
}

/// `highwater kernels` with `args`, from a folder that is not the package's.
struct Verb {
    command: Command,
    folder: tempfile::TempDir,
}

fn verb(args: &[&str]) -> Verb {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_highwater"));
    command.arg("kernels").args(args).current_dir(folder.path());
    command.env_remove(sources::FOLDER_VARIABLE).env("HIGHWATER_CACHE", target().join("cuda-cache"));
    if let Some(wheels) = wheels() {
        command.env(library::FOLDER_VARIABLE, wheels);
    }
    Verb { command, folder }
}

fn text(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

impl Verb {
    fn cache(mut self, folder: &Path) -> Verb {
        self.command.env("HIGHWATER_CACHE", folder);
        self
    }

    /// With the files of `kernels/`, `stream.cu` replaced by what `change` makes of it.
    fn changed(mut self, change: impl Fn(String) -> String) -> Verb {
        let folder = self.folder.path().join("kernels");
        std::fs::create_dir_all(folder.join("lib")).unwrap();
        for (name, text) in sources::FILES {
            let text = if *name == "stream.cu" { change((*text).to_owned()) } else { (*text).to_owned() };
            std::fs::write(folder.join(name), text).unwrap();
        }
        self.command.env(sources::FOLDER_VARIABLE, &folder);
        self
    }

    #[track_caller]
    fn json(mut self) -> Value {
        let output = self.command.arg("--json").output().unwrap();
        let (out, err) = text(&output);
        assert!(output.status.success(), "{err}");
        serde_json::from_str(&out).unwrap()
    }

    #[track_caller]
    fn refused(mut self) -> String {
        let output = self.command.output().unwrap();
        let (out, err) = text(&output);
        assert_eq!(output.status.code(), Some(1), "{out}{err}");
        err
    }
}

#[test]
fn every_kernel_compiles_for_every_arch_and_spills_only_by_name() {
    let report = verb(&[]).json();
    assert_eq!(report["failed"], Value::Array(vec![]));
    let rows = report["kernels"].as_array().unwrap();
    let field = |row: &Value, name: &str| row[name].as_str().unwrap().to_owned();
    let compiled: BTreeSet<_> = rows.iter().map(|row| (field(row, "variant"), field(row, "arch"))).collect();
    let wanted: BTreeSet<_> = launch::variants()
        .iter()
        .flat_map(|kernel| Arch::CARDS.map(|arch| (*kernel, arch)))
        .filter(|(kernel, arch)| launch::runs_on(*kernel, *arch))
        .map(|(kernel, arch)| (kernel.variant(), arch.to_string()))
        .collect();
    assert_eq!(compiled, wanted);
    for row in rows {
        let number = |name: &str| row[name].as_u64().unwrap();
        assert!((1..=255).contains(&number("registers")) && number("cubin_bytes") > 1000, "{row}");
        let spilled = number("spill_stores") + number("spill_loads");
        assert!(spilled == 0 || row["exception"].as_str().is_some_and(|why| why.len() > 20), "{row}");
    }
    let files: BTreeSet<_> = launch::variants().iter().map(|kernel| format!("{}.cu", kernel.module())).collect();
    for (file, _) in sources::FILES.iter().filter(|(file, _)| Path::new(file).extension().is_some_and(|e| e == "cu")) {
        assert!(files.contains(*file), "kernels/{file} is in no variant: nothing compiles it");
    }
    println!(
        "{} entry points, {} of {} compilations from the cache, {} s",
        rows.len(),
        report["cached"],
        report["compilations"],
        report["seconds"]
    );
}

#[test]
fn a_broken_kernel_is_reported_in_the_compiler_s_words() {
    let error =
        verb(&["stream"]).changed(|text| text + "\nKERNEL broken(int* x) { *x = undeclared_here; }\n").refused();
    assert!(error.contains("stream for sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120a"), "{error}");
    assert!(error.contains("identifier \"undeclared_here\" is undefined"), "{error}");
    assert_eq!(error.matches("is undefined").count(), 1, "once for all archs: {error}");
}

#[test]
fn a_kernel_that_spills_is_refused() {
    // 48 values wait for their sum, in the 32 registers that two blocks of 1024 threads leave to each.
    let spilling = "
KERNEL LAUNCH_BOUNDS(1024, 2) spilling(const float* x, float* y) {
  float v[48], sum = 0.0f;
  for (int i = 0; i < 48; ++i) sum += v[i] = x[i * 1024 + threadIdx.x];
  for (int i = 0; i < 48; ++i) y[i * 1024 + threadIdx.x] = v[i] * sum;
}
";
    let error = verb(&["stream", "--arch", "sm_90a"]).changed(|text| text + spilling).refused();
    assert!(error.contains("spilling of stream for sm_90a: a thread spills"), "{error}");
}

#[test]
fn a_damaged_cache_entry_is_compiled_again() {
    let cache = tempfile::tempdir().unwrap();
    let run = || verb(&["stream", "--arch", "sm_90a"]).cache(cache.path()).json();
    let file = || {
        let files: Vec<_> = std::fs::read_dir(cache.path()).unwrap().map(|e| e.unwrap().path()).collect();
        assert_eq!(files.len(), 1, "{files:?}");
        files[0].clone()
    };
    assert_eq!(run()["cached"], 0);
    let whole = std::fs::read(file()).unwrap();
    let found = run();
    assert_eq!(found["cached"], 1);
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for damaged in [&flipped[..], &whole[..whole.len() / 2], b""] {
        std::fs::write(file(), damaged).unwrap();
        let rebuilt = run();
        assert_eq!(rebuilt["cached"], 0);
        assert!(std::fs::read(file()).unwrap() == whole, "the entry is as it was");
        assert_eq!(rebuilt["kernels"].as_array().unwrap().len(), found["kernels"].as_array().unwrap().len());
    }
    // Another source is another entry.
    let other =
        verb(&["stream", "--arch", "sm_90a"]).cache(cache.path()).changed(|text| text + "\n// changed\n").json();
    assert_eq!(other["cached"], 0);
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 2);
}

#[test]
fn the_folder_of_the_flag_comes_before_the_environment_s() {
    let Some(wheels) = wheels() else {
        println!("skipped: NVRTC is the loader's own, and in no folder to be named");
        return;
    };
    // The environment's folder holds a file that is no library, which is passed over.
    let broken = tempfile::tempdir().unwrap();
    std::fs::write(broken.path().join("libnvrtc.so.13"), "no library").unwrap();
    let library = |flag: &Path, variable: &Path| {
        let mut verb = verb(&["stream", "--arch", "sm_90a", "--cuda", &flag.display().to_string()]);
        verb.command.env(library::FOLDER_VARIABLE, variable);
        verb
    };
    let report = library(wheels, broken.path()).json();
    let (place, whole) = (report["library"].as_str().unwrap().to_owned(), wheels.canonicalize().unwrap());
    assert!(Path::new(&place).starts_with(&whole), "{place} is not in {}", whole.display());
    // The flag's is not passed over for the environment's.
    let error = library(broken.path(), wheels).refused();
    assert!(error.contains("libnvrtc.so.13 cannot be loaded; "), "{error}");
}

#[test]
fn a_machine_without_nvrtc_is_told_how_to_get_it() {
    let away = tempfile::tempdir().unwrap();
    let program = away.path().join("highwater");
    let here = env!("CARGO_BIN_EXE_highwater");
    std::fs::hard_link(here, &program).or_else(|_| std::fs::copy(here, &program).map(|_| ())).unwrap();
    let mut command = Command::new(&program);
    command.args(["kernels", "stream"]).current_dir(away.path());
    for variable in [library::FOLDER_VARIABLE, "CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH"] {
        command.env_remove(variable);
    }
    let output = command.env("HIGHWATER_CACHE", away.path()).output().unwrap();
    let (out, err) = text(&output);
    if output.status.success() {
        // A toolkit in the loader's own places: nothing is missing here.
        assert!(out.contains("by NVRTC"), "{out}");
        return;
    }
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.starts_with("error: libnvrtc.so.13 was not found; install the CUDA 13 toolkit"), "{err}");
    assert!(err.contains("--cuda DIR or HIGHWATER_CUDA"), "{err}");
}
