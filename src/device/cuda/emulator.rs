//! Kernels without a card: `kernels/X.cu` built by the system's C++ compiler over `kernels/lib/emulate.h`, loaded, and
//! run on this processor. For tests: a kernel takes thousands of times longer than on a card.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::cache;
use super::sources;
use crate::error::{Error, Result};

/// What EXPORT makes of an entry point: it takes pointers to the arguments.
type Call = unsafe extern "C" fn(*mut *mut c_void);
/// `hw_launch` of emulate.h.
type Launch = unsafe extern "C" fn(Call, *const u32, u32, u32, *mut *mut c_void, *mut c_char, u32) -> c_int;

/// A library once it is loaded. Threads may be inside it at any time: none is ever unloaded.
type Slot = Arc<Mutex<Option<&'static Library>>>;

static LIBRARIES: LazyLock<Mutex<HashMap<PathBuf, Slot>>> = LazyLock::new(Mutex::default);

/// A C++ compiler.
#[derive(Debug)]
struct Compiler {
    program: OsString,
    flags: Vec<&'static str>,
    /// What it calls itself, the flags among it: part of every cached library's name.
    version: String,
}

/// Builds and runs kernels on this processor.
#[derive(Debug)]
pub(super) struct Emulator {
    compiler: &'static Compiler,
    folder: PathBuf,
}

/// An entry point that can be launched.
#[derive(Debug, Clone, Copy)]
pub(super) struct Function {
    call: Call,
    launch: Launch,
}

impl Emulator {
    /// Finds a compiler and the cache's folder. [`Error::Unsupported`] says what is missing.
    pub(super) fn new() -> Result<Emulator> {
        let compiler = compiler().ok_or_else(|| Error::Unsupported {
            what: "running kernels on this processor".into(),
            supported: "it takes x86-64 Linux and a C++17 compiler: install g++ or clang++, or set CXX to one".into(),
        })?;
        let folder = cache::folder().ok_or_else(|| Error::Unsupported {
            what: "running kernels on this processor without a folder for what is built".into(),
            supported: format!("set {} to a folder of your own", cache::FOLDER_VARIABLE),
        })?;
        Ok(Emulator { compiler, folder: folder.join("emulated") })
    }

    /// Entry point `entry` of a kernel file's text, built once for each content, set of values and compiler. Products
    /// and sums are never contracted here, whether a kernel asks for that or not.
    pub(super) fn function(
        &self,
        module: &str,
        source: &str,
        headers: &[(&str, &str)],
        defines: &[(&str, i32)],
        entry: &str,
    ) -> Result<Function> {
        let digest = cache::digest_of(&(source, headers, defines, &self.compiler.version));
        let file = self.folder.join(format!("{module}-{digest:032x}.so"));
        let slot = {
            let mut all = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(all.entry(file.clone()).or_default())
        };
        // One thread builds a library, others that want it wait here.
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        let library = if let Some(library) = *slot {
            library
        } else {
            if !file.is_file() {
                self.build(module, source, headers, defines, &file)?;
            }
            // SAFETY: the file is in the user's own cache, built from this program's kernels; it has no constructors.
            let library = unsafe { Library::open(Some(&file), RTLD_NOW | RTLD_LOCAL) }
                .map_err(|e| refused(format!("loading {}: {e}", file.display()), "remove the file"))?;
            *slot.insert(Box::leak(Box::new(library)))
        };
        let missing =
            |name: &str| refused(format!("{module}.cu has no {name}"), "EXPORT(entry) must follow each KERNEL");
        // SAFETY: EXPORT gives the symbol this type.
        let call = unsafe { library.get::<Call>(format!("{entry}_call").as_bytes()) }.map_err(|_| missing(entry))?;
        // SAFETY: emulate.h gives the symbol this type.
        let launch = unsafe { library.get::<Launch>(b"hw_launch") }.map_err(|_| missing("hw_launch"))?;
        Ok(Function { call: *call, launch: shared_launch(headers, *launch) })
    }

    fn build(
        &self,
        module: &str,
        source: &str,
        headers: &[(&str, &str)],
        defines: &[(&str, i32)],
        file: &Path,
    ) -> Result<()> {
        static BUILDS: AtomicU64 = AtomicU64::new(0);
        let number = BUILDS.fetch_add(1, Ordering::Relaxed);
        let beside = file.with_extension(format!("{}-{number}.building", std::process::id()));
        let built = self.build_in(&beside, module, source, headers, defines);
        let moved = built.and_then(|library| std::fs::rename(&library, file).map_err(Error::io(file)));
        // Sources that stay behind cost a few kilobytes, nothing else.
        let _ = std::fs::remove_dir_all(&beside);
        moved
    }

    /// Writes the sources to `folder` and compiles them there; gives the library.
    fn build_in(
        &self,
        folder: &Path,
        module: &str,
        source: &str,
        headers: &[(&str, &str)],
        defines: &[(&str, i32)],
    ) -> Result<PathBuf> {
        let main = folder.join(format!("{module}.cu"));
        let headers = headers.iter().map(|(name, text)| (folder.join(name), *text));
        for (path, text) in headers.chain([(main.clone(), source)]) {
            let parent = path.parent().unwrap_or(folder);
            std::fs::create_dir_all(parent).map_err(Error::io(parent))?;
            std::fs::write(&path, text).map_err(Error::io(&path))?;
        }
        let library = folder.join("built.so");
        let mut command = Command::new(&self.compiler.program);
        command.args(&self.compiler.flags).arg("-I").arg(folder).arg("-DHIGHWATER_EMULATE");
        command.args(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        let output = command.args(["-x", "c++"]).arg(&main).arg("-o").arg(&library).arg("-ldl").output();
        let output = output.map_err(Error::io(Path::new(&self.compiler.program)))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).replace(&format!("{}/", folder.display()), "");
            let said: String = said.chars().take(6000).collect();
            return Err(refused(format!("building {module}.cu with {defines:?} for this processor"), said.trim()));
        }
        Ok(library)
    }

    /// Runs every block to its end, on at most as many threads as there are processors. `args` holds each argument's
    /// bytes, little-endian. Arguments that are not the kernel's, a deadlock and an unmapped address are errors.
    #[allow(clippy::unused_self)] // a launch is the emulator's, as the driver's is the driver's
    pub(super) fn launch(
        &self,
        function: &Function,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        args: &[u64],
    ) -> Result<()> {
        let pointers = args.iter().map(|slot| std::ptr::from_ref(slot).cast_mut().cast::<c_void>());
        let mut pointers: Vec<*mut c_void> = pointers.chain([std::ptr::null_mut()]).collect();
        let mut said = [0u8; 1024];
        // SAFETY: every pointer outlives the call, and the arguments are only read; the text's size is given. What the
        // kernel does with the addresses among the arguments is the launch code's to get right, as on a card.
        let failed = unsafe {
            (function.launch)(
                function.call,
                grid.as_ptr(),
                threads,
                shared,
                pointers.as_mut_ptr(),
                said.as_mut_ptr().cast(),
                said.len() as u32,
            )
        };
        if failed == 0 {
            return Ok(());
        }
        let said = CStr::from_bytes_until_nul(&said).unwrap_or_default().to_string_lossy();
        Err(refused(format!("emulated {said}"), ""))
    }
}

/// The first library's `hw_launch` runs the entries of all libraries with the same headers, on one set of stacks.
fn shared_launch(headers: &[(&str, &str)], own: Launch) -> Launch {
    static FIRST: LazyLock<Mutex<HashMap<u128, Launch>>> = LazyLock::new(Mutex::default);
    let mut first = FIRST.lock().unwrap_or_else(PoisonError::into_inner);
    *first.entry(cache::digest_of(&headers)).or_insert(own)
}

fn refused(what: String, help: &str) -> Error {
    Error::device(what, help)
}

/// `CXX`, or the first of the usual names that compiles C++17; looked for once.
fn compiler() -> Option<&'static Compiler> {
    static COMPILER: OnceLock<Option<Compiler>> = OnceLock::new();
    let found = COMPILER.get_or_init(|| {
        if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
            return None;
        }
        let named = std::env::var_os("CXX").filter(|name| !name.is_empty());
        named.into_iter().chain(["g++", "c++", "clang++"].map(OsString::from)).find_map(Compiler::try_new)
    });
    found.as_ref()
}

impl Compiler {
    fn try_new(program: OsString) -> Option<Compiler> {
        let output = Command::new(&program).arg("--version").stderr(Stdio::null()).output().ok()?;
        let name = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut flags = vec!["-O2", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-pthread", "-w"];
        // Else a frame of more than a page could step over the guard below a fiber's stack.
        flags.push("-fstack-clash-protection");
        if !name.contains("clang") {
            // Else a `__shared__` in an inline function would be one variable for all libraries.
            flags.push("-fno-gnu-unique");
        }
        #[cfg(target_arch = "x86_64")]
        for (has, flag) in [
            (is_x86_feature_detected!("avx2"), "-mavx2"),
            (is_x86_feature_detected!("fma"), "-mfma"),
            (is_x86_feature_detected!("f16c"), "-mf16c"),
        ] {
            flags.extend(has.then_some(flag));
        }
        let mut check = Command::new(&program)
            .args(&flags)
            .args(["-fsyntax-only", "-x", "c++", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let written =
            check.stdin.take()?.write_all(b"#include <pthread.h>\n#include <type_traits>\n#include <utility>\n");
        let works = check.wait().ok()?.success() && written.is_ok();
        works.then(|| Compiler { version: format!("{name}{flags:?}"), program, flags })
    }
}

/// An argument of [`run_text`].
#[doc(hidden)]
#[derive(Debug)]
pub enum TextArg<'a> {
    /// `float*`.
    F32(&'a mut [f32]),
    /// `unsigned*`.
    U32(&'a mut [u32]),
    /// `unsigned short*`.
    U16(&'a mut [u16]),
    /// `int`.
    Int(i32),
    /// Eight bytes of anything.
    Slot(u64),
}

/// Builds a kernel file given as text and runs one of its entries: how the emulator itself is tested.
#[doc(hidden)]
pub fn run_text(
    source: &str,
    entry: &str,
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    args: &mut [TextArg],
) -> Result<()> {
    let emulator = Emulator::new()?;
    let headers: Vec<(&str, &str)> = sources::FILES.iter().copied().filter(|(name, _)| name.ends_with('h')).collect();
    let function = emulator.function("text", source, &headers, &[], entry)?;
    let slots = args.iter_mut().map(|arg| match arg {
        TextArg::F32(values) => values.as_mut_ptr() as u64,
        TextArg::U32(values) => values.as_mut_ptr() as u64,
        TextArg::U16(values) => values.as_mut_ptr() as u64,
        TextArg::Int(value) => u64::from(*value as u32),
        TextArg::Slot(value) => *value,
    });
    let slots: Vec<u64> = slots.collect();
    emulator.launch(&function, grid, threads, shared, &slots)
}

/// Why kernels cannot be run on this processor, if they cannot.
#[doc(hidden)]
pub fn unavailable() -> Option<Error> {
    Emulator::new().err()
}
