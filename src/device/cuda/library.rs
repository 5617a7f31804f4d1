//! Where the vendor's libraries are. Each is looked for in the loader's own places, then in a toolkit's folders, then in
//! the layout of the PyPI wheels; one that is missing is a sentence that says how to get it.
#![allow(unsafe_code)]

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};

/// Names a folder that is looked in first: one with the libraries, or one that pip installed wheels into.
pub const FOLDER_VARIABLE: &str = "HIGHWATER_CUDA";

/// The folder, inside a build folder, that the test command installs wheels into.
pub const WHEELS: &str = "cuda-wheels";
/// Folders from a program up to its build folder at most: `deps`, the profile, the target triple, and that folder.
const BUILD_FOLDERS_UP: usize = 4;

/// A vendor library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// The driver, `libcuda.so.1`.
    Driver,
    /// The run-time compiler, `libnvrtc.so.13`.
    Nvrtc,
    /// Matrix products, `libcublasLt.so.13`.
    CublasLt,
}

impl Library {
    /// The name the loader knows it by.
    pub fn soname(self) -> &'static str {
        match self {
            Library::Driver => "libcuda.so.1",
            Library::Nvrtc => "libnvrtc.so.13",
            Library::CublasLt => "libcublasLt.so.13",
        }
    }

    /// How to get it.
    pub fn how_to_get(self) -> &'static str {
        match self {
            Library::Driver => {
                "install NVIDIA's driver, version 580 or later; without a card --device plan and --device cpu work"
            }
            Library::Nvrtc => {
                "install the CUDA 13 toolkit, or `pip install nvidia-cuda-nvrtc` and set HIGHWATER_CUDA to the folder it \
                 went to"
            }
            Library::CublasLt => {
                "install the CUDA 13 toolkit, or `pip install nvidia-cublas` and set HIGHWATER_CUDA to the folder it went to"
            }
        }
    }
}

/// Folders that may hold libraries, in the order they are tried.
fn folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let mut with_layouts = |base: &Path| {
        for part in ["", "lib", "lib64", "nvidia/cu13/lib", "cu13/lib"] {
            folders.push(if part.is_empty() { base.to_owned() } else { base.join(part) });
        }
        // A virtual environment: lib/pythonX.Y/site-packages.
        for entry in std::fs::read_dir(base.join("lib")).into_iter().flatten().flatten() {
            folders.push(entry.path().join("site-packages/nvidia/cu13/lib"));
        }
    };
    for name in [FOLDER_VARIABLE, "CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV"] {
        if let Some(value) = std::env::var_os(name).filter(|v| !v.is_empty()) {
            with_layouts(Path::new(&value));
        }
    }
    with_layouts(Path::new("/usr/local/cuda"));
    with_layouts(Path::new("/usr/local/cuda-13"));
    // The test command's own wheels: in the build folder that this program is in, or in the one of this folder.
    let program = std::env::current_exe().unwrap_or_default();
    for build in program.ancestors().skip(1).take(BUILD_FOLDERS_UP).chain([Path::new("target")]) {
        with_layouts(&build.join(WHEELS));
    }
    folders
}

/// Loads the library, once; gives where it was found.
pub fn load(library: Library) -> Result<String> {
    static FOUND: Mutex<Vec<(Library, String)>> = Mutex::new(Vec::new());
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, place)) = found.iter().find(|(l, _)| *l == library) {
        return Ok(place.clone());
    }
    let missing = || Error::device(format!("{} was not found", library.soname()), library.how_to_get());
    let place = find(library).ok_or_else(missing)?;
    found.push((library, place.clone()));
    Ok(place)
}

fn find(library: Library) -> Option<String> {
    let soname = library.soname();
    if library != Library::Driver {
        for folder in folders() {
            let file = folder.join(soname);
            if !file.is_file() {
                continue;
            }
            // NVRTC asks the loader for its builtins by name: they must be loaded from the same place first.
            if library == Library::Nvrtc {
                for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
                    if entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so") {
                        open(&entry.path());
                    }
                }
            }
            if open(&file) {
                return Some(file.display().to_string());
            }
        }
    }
    open(Path::new(soname)).then(|| format!("{soname}, by the loader"))
}

/// Opens a library for the rest of the process; later lookups of its name find it.
fn open(file: &Path) -> bool {
    use libloading::os::unix::{Library as Handle, RTLD_GLOBAL, RTLD_NOW};
    // SAFETY: the vendor's libraries run their own constructors only, and the handle is never closed.
    match unsafe { Handle::open(Some(file), RTLD_NOW | RTLD_GLOBAL) } {
        Ok(handle) => {
            std::mem::forget(handle);
            true
        }
        Err(_) => false,
    }
}
