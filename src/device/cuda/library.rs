//! Where the vendor's libraries are. Each is looked for in the folder the command line names, then in those the environment
//! names, then in a toolkit's, each by itself, as a toolkit is laid out and as pip lays out wheels; last in the loader's own
//! places. One that is missing is a sentence that says how to get it.
#![allow(unsafe_code)]

use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::error::{Error, Result};

/// Names a folder that is looked in first: one with the libraries, or one that pip installed wheels into.
pub const FOLDER_VARIABLE: &str = "HIGHWATER_CUDA";
/// The flag that names one to be looked in before that.
pub const FOLDER_FLAG: &str = "--cuda";
/// Where in a folder libraries lie: in itself, as in a toolkit, as in wheels.
const LAYOUTS: [&str; 5] = ["", "lib", "lib64", "nvidia/cu13/lib", "cu13/lib"];
/// The same in a folder of `lib` that is a virtual environment's, `pythonX.Y`.
const ENVIRONMENT_LAYOUT: &str = "site-packages/nvidia/cu13/lib";

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
                "install the CUDA 13 toolkit, or `pip install --target DIR nvidia-cuda-nvrtc`, and name its folder by --cuda DIR \
                 or HIGHWATER_CUDA"
            }
            Library::CublasLt => {
                "install the CUDA 13 toolkit, or `pip install --target DIR nvidia-cublas`, and name its folder by --cuda DIR or \
                 HIGHWATER_CUDA"
            }
        }
    }
}

/// The folder the command line names.
static NAMED: OnceLock<PathBuf> = OnceLock::new();

/// Makes `folder` the one that is looked in first from here on; to be called before anything is loaded. It must hold one of
/// the libraries: who names a folder means what is in it.
pub fn set_folder(folder: &Path) -> Result<()> {
    let refused = |what: String| Error::Request { param: FOLDER_FLAG, what: format!("{} {what}", folder.display()) };
    let wanted = [Library::Nvrtc, Library::CublasLt].map(Library::soname);
    let hint = "name the folder of a CUDA 13 toolkit, or one filled by `pip install --target DIR nvidia-cuda-nvrtc \
                nvidia-cublas`";
    let [nvrtc, blas] = wanted;
    if !folder.is_dir() {
        return Err(refused(format!("is no folder; {nvrtc} and {blas} are looked for in it: {hint}")));
    }
    let whole = folder.canonicalize().map_err(Error::io(folder))?;
    if !laid_out(&whole).iter().any(|inside| wanted.iter().any(|name| inside.join(name).is_file())) {
        let inside = LAYOUTS[1..].join(", ");
        let what =
            format!("has neither {nvrtc} nor {blas}, in itself or in {inside}, lib/python*/{ENVIRONMENT_LAYOUT}");
        return Err(refused(format!("{what}; {hint}")));
    }
    NAMED.set(whole).map_err(|_| refused("is the second; one is looked in first".into()))
}

/// The folder that [`set_folder`] set.
pub fn folder() -> Option<&'static Path> {
    NAMED.get().map(PathBuf::as_path)
}

/// `base` and the folders in it that may hold libraries.
fn laid_out(base: &Path) -> Vec<PathBuf> {
    let inside = LAYOUTS.map(|part| if part.is_empty() { base.to_owned() } else { base.join(part) });
    let pythons = std::fs::read_dir(base.join("lib")).into_iter().flatten().flatten();
    inside.into_iter().chain(pythons.map(|entry| entry.path().join(ENVIRONMENT_LAYOUT))).collect()
}

/// Folders that may hold libraries, in the order they are tried.
fn folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let mut with_layouts = |base: &Path| folders.extend(laid_out(base));
    if let Some(named) = folder() {
        with_layouts(named);
    }
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
    let place = find(library)?.ok_or_else(missing)?;
    found.push((library, place.clone()));
    Ok(place)
}

fn find(library: Library) -> Result<Option<String>> {
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
                        let _ = open(&entry.path());
                    }
                }
            }
            match open(&file) {
                Ok(()) => return Ok(Some(file.display().to_string())),
                // Who named the folder is not given another's library without a word.
                Err(why) if self::folder().is_some_and(|named| folder.starts_with(named)) => {
                    return Err(Error::device(format!("{} cannot be loaded", file.display()), why.to_string()));
                }
                Err(_) => {}
            }
        }
    }
    Ok(open(Path::new(soname)).is_ok().then(|| format!("{soname}, by the loader")))
}

/// Opens a library for the rest of the process; later lookups of its name find it.
fn open(file: &Path) -> std::result::Result<(), libloading::Error> {
    use libloading::os::unix::{Library as Handle, RTLD_GLOBAL, RTLD_NOW};
    // SAFETY: the vendor's libraries run their own constructors only, and the handle is never closed.
    let handle = unsafe { Handle::open(Some(file), RTLD_NOW | RTLD_GLOBAL) }?;
    std::mem::forget(handle);
    Ok(())
}
