//! Compiling kernels with NVRTC, to machine code of one arch. No card is needed.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char};
use std::sync::OnceLock;

use cudarc::nvrtc::sys;
use serde::{Deserialize, Serialize};

use super::Kernel;
use super::library::{self, Library};
use super::sources::Source;
use crate::device::spec::Arch;
use crate::error::{Error, Result};

/// What a compilation gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// Machine code.
    pub cubin: Vec<u8>,
    /// What each entry point takes.
    pub usage: Vec<Usage>,
}

/// What one entry point takes of a multiprocessor, by the assembler's own report.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// The entry point.
    pub entry: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of static shared memory of a block.
    pub shared: u32,
    /// Bytes of a thread's stack frame.
    pub stack: u32,
    /// Bytes a thread spills.
    pub spill_stores: u32,
    /// Bytes a thread reads back.
    pub spill_loads: u32,
}

/// The compiler's version, (0, 0) where there is none.
pub fn version() -> (i32, i32) {
    static VERSION: OnceLock<(i32, i32)> = OnceLock::new();
    *VERSION.get_or_init(|| {
        if library::load(Library::Nvrtc).is_err() {
            return (0, 0);
        }
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library is loaded; both pointers are to live integers.
        unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
        (major, minor)
    })
}

/// What every kernel is compiled with for `arch`. A kernel adds its own `-D` values, and `--fmad=false` where its results are
/// to be the CPU arm's bits.
pub fn options(arch: Arch) -> Vec<String> {
    // Lambdas carry no annotation.
    let device = "-default-device";
    vec![format!("--gpu-architecture={arch}"), "--std=c++17".into(), "--ptxas-options=-v".into(), device.into()]
}

/// Compiles a kernel file under `key`'s values for `arch`. An error carries the compiler's own messages.
pub fn compile(source: &Source, key: Kernel, arch: Arch) -> Result<Compiled> {
    library::load(Library::Nvrtc)?;
    let text = |text: &str| {
        let zero = |_| Error::device(format!("{}.cu has a zero byte", source.name), "kernel sources are text");
        CString::new(text).map_err(zero)
    };
    let mut options = options(arch);
    options.extend(key.defines().iter().map(|(name, value)| format!("-D{name}={value}")));
    if !key.fma() {
        options.push("--fmad=false".into());
    }
    let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>>>()?;
    let headers = source.headers();
    let names = headers.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>>>()?;
    let texts = headers.iter().map(|(_, header)| text(header)).collect::<Result<Vec<_>>>()?;
    let (body, file) = (text(&source.text)?, text(&format!("{}.cu", source.name))?);
    let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).collect::<Vec<*const c_char>>();
    let (options, names, texts) = (pointers(&options), pointers(&names), pointers(&texts));

    let mut program: sys::nvrtcProgram = std::ptr::null_mut();
    // SAFETY: every pointer is to a string or an array that outlives the call; the counts are the arrays' lengths.
    let created = unsafe {
        sys::nvrtcCreateProgram(
            &raw mut program,
            body.as_ptr(),
            file.as_ptr(),
            names.len() as i32,
            texts.as_ptr(),
            names.as_ptr(),
        )
    };
    check(created, "nvrtcCreateProgram", String::new)?;
    let program = Program(program);
    // SAFETY: the program is live, the options outlive the call.
    let compiled = unsafe { sys::nvrtcCompileProgram(program.0, options.len() as i32, options.as_ptr()) };
    let log = program.log();
    check(compiled, &format!("compiling {} for {arch}", key.variant()), || log.trim().to_owned())?;
    Ok(Compiled { cubin: program.cubin()?, usage: usage(&log) })
}

struct Program(sys::nvrtcProgram);

impl Program {
    fn log(&self) -> String {
        let mut size = 0usize;
        // SAFETY: the program is live and `size` is a live integer.
        unsafe { sys::nvrtcGetProgramLogSize(self.0, &raw mut size) };
        let mut log = vec![0u8; size.max(1)];
        // SAFETY: the buffer has the size the library asked for.
        unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) };
        log.truncate(log.iter().position(|b| *b == 0).unwrap_or(log.len()));
        String::from_utf8_lossy(&log).into_owned()
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let mut size = 0usize;
        // SAFETY: the program is live and `size` is a live integer.
        check(unsafe { sys::nvrtcGetCUBINSize(self.0, &raw mut size) }, "nvrtcGetCUBINSize", String::new)?;
        let mut cubin = vec![0u8; size];
        // SAFETY: the buffer has the size the library asked for.
        check(unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast()) }, "nvrtcGetCUBIN", String::new)?;
        Ok(cubin)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by nvrtcCreateProgram, destroyed once.
        unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

fn check(result: sys::nvrtcResult, what: &str, log: impl FnOnce() -> String) -> Result<()> {
    if result == sys::nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    let (major, minor) = version();
    Err(Error::device(format!("NVRTC {major}.{minor}: {what}: {result:?}"), log()))
}

/// The assembler's report: an "entry function" line, then a line of stack and spills, then one of registers and memory.
fn usage(log: &str) -> Vec<Usage> {
    let number_before = |line: &str, word: &str| -> u32 {
        let head = line.split(word).next().unwrap_or("").trim_end();
        let digits: String = head.chars().rev().take_while(char::is_ascii_digit).collect();
        if line.contains(word) { digits.chars().rev().collect::<String>().parse().unwrap_or(0) } else { 0 }
    };
    let mut list: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            list.push(Usage { entry: rest.split('\'').next().unwrap_or("").to_owned(), ..Usage::default() });
        } else if let Some(last) = list.last_mut() {
            if line.contains("bytes stack frame") {
                last.stack = number_before(line, " bytes stack frame");
                last.spill_stores = number_before(line, " bytes spill stores");
                last.spill_loads = number_before(line, " bytes spill loads");
            } else if line.contains("Used ") && line.contains(" registers") {
                last.registers = number_before(line, " registers");
                last.shared = number_before(line, " bytes smem");
            }
        }
    }
    list.sort_by(|a, b| a.entry.cmp(&b.entry));
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assembler_s_report_is_read() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'b' for 'sm_90a'\n\
            ptxas         .     16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n\
            ptxas info    : Used 255 registers, used 1 barriers, 128 bytes smem, 372 bytes cmem[0]\n\
            ptxas info    : Compiling entry function 'a' for 'sm_90a'\n\
            ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 14 registers\n";
        let b = Usage { entry: "b".into(), registers: 255, shared: 128, stack: 16, spill_stores: 12, spill_loads: 8 };
        assert_eq!(usage(log), [Usage { entry: "a".into(), registers: 14, ..Usage::default() }, b]);
    }
}
