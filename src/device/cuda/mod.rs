//! The CUDA arm: one slab on a card, kernels compiled when they are first used, launches on one stream.
//!
//! May live here: everything that touches the driver, NVRTC or cuBLASLt. May not: what a kernel computes.
//!
//! The same arm runs without a card where a C++ compiler is there: [`emulator`] builds the kernels' own sources for this
//! processor, so that launches are tested on machines without a GPU.

pub mod blas;
pub mod cache;
mod driver;
pub mod emulator;
pub mod info;
pub mod library;
pub mod nvrtc;
pub mod sources;
mod staging;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;

pub use driver::Event;

use super::host::HostSlab;
use super::spec::Arch;
use crate::error::{Error, Result};
use blas::Blas;
use driver::Driver;
use emulator::Emulator;

/// Most compile-time values of one kernel.
const MAX_DEFINES: usize = 4;

/// Chooses an entry point by element type: `entry!(dtype, "rms")` is `rms_f32` or `rms_bf16`.
#[macro_export]
macro_rules! entry {
    ($dtype:expr, $name:literal) => {
        if $dtype == $crate::num::DType::Bf16 { concat!($name, "_bf16") } else { concat!($name, "_f32") }
    };
}
pub use crate::entry;

/// One kernel: the file it is in, its entry point, and the values it is compiled with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Kernel {
    module: &'static str,
    entry: &'static str,
    defines: [(&'static str, i32); MAX_DEFINES],
    fma: bool,
}

impl Kernel {
    /// Entry point `entry` of `kernels/{module}.cu`.
    pub const fn new(module: &'static str, entry: &'static str) -> Kernel {
        Kernel { module, entry, defines: [("", 0); MAX_DEFINES], fma: true }
    }

    /// With the macro `name` set to `value`; at most four.
    #[must_use]
    pub const fn define(mut self, name: &'static str, value: i32) -> Kernel {
        let mut i = 0;
        while i < MAX_DEFINES && !self.defines[i].0.is_empty() {
            i += 1;
        }
        assert!(i < MAX_DEFINES, "more compile-time values than a kernel may have");
        self.defines[i] = (name, value);
        self
    }

    /// Products and sums are never contracted: for results that must be the same bits as the CPU arm's.
    #[must_use]
    pub const fn no_fma(mut self) -> Kernel {
        self.fma = false;
        self
    }

    /// The file's stem.
    pub fn module(&self) -> &'static str {
        self.module
    }

    /// The macros that are set.
    pub fn defines(&self) -> &[(&'static str, i32)] {
        let count = self.defines.iter().position(|(name, _)| name.is_empty()).unwrap_or(MAX_DEFINES);
        &self.defines[..count]
    }

    /// Whether products and sums may be contracted.
    pub fn fma(&self) -> bool {
        self.fma
    }

    /// As `attention[HEAD_DIM=256]`.
    pub fn variant(&self) -> String {
        let defines: Vec<String> = self.defines().iter().map(|(name, value)| format!("{name}={value}")).collect();
        if defines.is_empty() { self.module.to_owned() } else { format!("{}[{}]", self.module, defines.join(",")) }
    }

    /// The compilation it is part of: the same for every entry point of a file under the same values.
    pub fn module_key(&self) -> Kernel {
        Kernel { entry: "", ..*self }
    }
}

/// Blocks, threads of a block, and bytes of dynamic shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Blocks along x, y, z.
    pub blocks: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
}

impl Grid {
    /// Without dynamic shared memory.
    pub const fn new(blocks: [u32; 3], threads: u32) -> Grid {
        Grid { blocks, threads, shared: 0 }
    }

    /// With `bytes` of dynamic shared memory.
    #[must_use]
    pub const fn shared(mut self, bytes: u32) -> Grid {
        self.shared = bytes;
        self
    }
}

/// One argument of a launch, of exactly the kernel's own type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arg {
    /// A pointer.
    Address(u64),
    /// `int`.
    I32(i32),
    /// `unsigned`.
    U32(u32),
    /// `long long`.
    I64(i64),
    /// `unsigned long long`.
    U64(u64),
    /// `float`.
    F32(f32),
    /// A tensor map of the copy engine: see [`Cuda::tensor_map`].
    Map(TensorMap),
}

/// How Hopper's copy engine finds the boxes of a matrix: opaque, made by the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMap([u64; 16]);

/// An argument's bytes, little-endian, where a launch reads them.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Slot([u64; 16]);

impl Arg {
    /// A null pointer: an operand this call does not have.
    pub const NULL: Arg = Arg::Address(0);

    /// The first eight bytes.
    fn word(self) -> u64 {
        match self {
            Arg::Address(v) | Arg::U64(v) => v,
            Arg::I32(v) => u64::from(v as u32),
            Arg::U32(v) => u64::from(v),
            Arg::I64(v) => v as u64,
            Arg::F32(v) => u64::from(v.to_bits()),
            Arg::Map(map) => map.0[0],
        }
    }

    fn slot(self) -> Slot {
        let mut words = [0; 16];
        match self {
            Arg::Map(map) => words = map.0,
            other => words[0] = other.word(),
        }
        Slot(words)
    }
}

/// What a launch does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Runs.
    Run,
    /// Only makes sure the kernel is there: for loading ahead of time, and beside the replay of a graph.
    Dry,
}

/// Bytes of device memory outside the slab, each a difference of free memory around its own event.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Outside {
    /// The context.
    pub context: u64,
    /// Loaded kernels.
    pub modules: u64,
    /// cuBLASLt's handle, its kernels and its workspace.
    pub blas: u64,
    /// Instantiated graphs.
    pub graphs: u64,
    /// Used by the device and by none of these, nor by the slab; negative where they counted something twice.
    pub unattributed: i64,
}

impl Outside {
    /// All that is attributed.
    pub fn total(&self) -> u64 {
        self.context + self.modules + self.blas + self.graphs
    }
}

/// A captured sequence of launches.
#[derive(Debug)]
pub struct Graph(Recorded);

#[derive(Debug)]
enum Recorded {
    Driver(driver::GraphExec),
    Emulator(Vec<Recording>),
}

#[derive(Debug, Clone)]
enum Recording {
    Launch(Kernel, Grid, Vec<u64>),
    Fill(u64, u8, u64),
}

#[derive(Debug)]
enum Backend {
    Driver(Box<Driver>),
    Emulator(Emulator, HostSlab),
}

enum Function {
    Driver(driver::Function),
    Emulator(emulator::Function),
}

/// A card, or what stands in for one, with the slab on it.
pub struct Cuda {
    backend: Backend,
    arch: Arch,
    slab: u64,
    slab_bytes: u64,
    blas: Option<Blas>,
    state: Mutex<State>,
}

struct State {
    modules: HashMap<Kernel, driver::Module>,
    functions: HashMap<Kernel, Function>,
    mode: Mode,
    recording: Option<Vec<Recording>>,
    capturing: bool,
    outside: Outside,
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cuda").field("arch", &self.arch).field("slab_bytes", &self.slab_bytes).finish_non_exhaustive()
    }
}

impl Cuda {
    /// Opens card `ordinal`, takes cuBLASLt's workspace, and then a slab of `slab_bytes` in one allocation.
    pub fn open(ordinal: u32, slab_bytes: u64) -> Result<Cuda> {
        let driver = Driver::open(ordinal)?;
        let context = driver.used()?;
        let blas = Blas::new(&driver)?;
        let with_blas = driver.used()?;
        let slab = driver.alloc(slab_bytes)?;
        let outside = Outside { context, blas: with_blas.saturating_sub(context), ..Outside::default() };
        let arch = driver.arch()?;
        Ok(Cuda::new(Backend::Driver(Box::new(driver)), arch, slab, slab_bytes, Some(blas), outside))
    }

    /// Kernels built for this processor, the slab in its memory; `arch` is the one tactics are for.
    pub fn emulated(arch: Arch, slab_bytes: u64) -> Result<Cuda> {
        let slab = HostSlab::reserve(slab_bytes)?;
        let address = slab.address();
        let backend = Backend::Emulator(Emulator::new()?, slab);
        Ok(Cuda::new(backend, arch, address, slab_bytes, None, Outside::default()))
    }

    fn new(backend: Backend, arch: Arch, slab: u64, slab_bytes: u64, blas: Option<Blas>, outside: Outside) -> Cuda {
        let state = State {
            modules: HashMap::new(),
            functions: HashMap::new(),
            mode: Mode::Run,
            recording: None,
            capturing: false,
            outside,
        };
        Cuda { backend, arch, slab, slab_bytes, blas, state: Mutex::new(state) }
    }

    /// What kernels are compiled for.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// Whether this is a card and not the emulator.
    pub fn is_card(&self) -> bool {
        matches!(self.backend, Backend::Driver(_))
    }

    /// The vendor's matrix library; none in emulation.
    pub fn blas(&self) -> Option<&Blas> {
        self.blas.as_ref()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets what launches do from here on; gives what they did.
    pub fn set_mode(&self, mode: Mode) -> Mode {
        std::mem::replace(&mut self.state().mode, mode)
    }

    /// What launches do.
    pub fn mode(&self) -> Mode {
        self.state().mode
    }

    /// Launches a kernel on the compute stream. An empty grid launches nothing.
    pub fn launch(&self, kernel: Kernel, grid: Grid, args: &[Arg]) -> Result<()> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        let mut state = self.state();
        if !state.functions.contains_key(&kernel) {
            self.load(&mut state, kernel)?;
        }
        if state.mode == Mode::Dry {
            return Ok(());
        }
        let words = || args.iter().map(|arg| arg.word()).collect::<Vec<u64>>();
        if let Some(recording) = &mut state.recording {
            recording.push(Recording::Launch(kernel, grid, words()));
            return Ok(());
        }
        match (&self.backend, state.functions.get_mut(&kernel)) {
            (Backend::Driver(driver), Some(Function::Driver(function))) => {
                let slots: Vec<Slot> = args.iter().map(|arg| arg.slot()).collect();
                driver.launch(function, grid, &slots).map_err(|e| named(e, kernel, grid))
            }
            (Backend::Emulator(emulator, _), Some(Function::Emulator(function))) => emulator
                .launch(function, grid.blocks, grid.threads, grid.shared, &words())
                .map_err(|e| named(e, kernel, grid)),
            _ => unreachable!("a backend's functions are its own"),
        }
    }

    /// Compiles (or takes from the cache) and loads the kernel.
    fn load(&self, state: &mut State, kernel: Kernel) -> Result<()> {
        let function = match &self.backend {
            Backend::Driver(driver) => {
                let before = driver.used()?;
                let key = kernel.module_key();
                let module = match state.modules.entry(key) {
                    Entry::Occupied(loaded) => loaded.into_mut(),
                    Entry::Vacant(place) => {
                        let (compiled, _) = cache::compiled(&sources::kernel(kernel.module)?, key, self.arch)?;
                        place.insert(driver.module(&compiled.cubin)?)
                    }
                };
                let function = driver.function(module, kernel.entry)?;
                state.outside.modules += driver.used()?.saturating_sub(before);
                Function::Driver(function)
            }
            Backend::Emulator(emulator, _) => {
                let source = sources::kernel(kernel.module)?;
                let (module, defines) = (kernel.module, kernel.defines());
                let function = emulator.function(module, &source.text, &source.headers(), defines, kernel.entry)?;
                Function::Emulator(function)
            }
        };
        state.functions.insert(kernel, function);
        Ok(())
    }

    /// Whether Hopper's own instructions are there: [`Cuda::tensor_map`] and kernels that need them.
    pub fn has_hopper(&self) -> bool {
        self.is_card() && self.arch == Arch::Sm90a
    }

    /// The map of a matrix of bytes: rows and columns, `pitch` bytes from one row to the next, copied in boxes of at most 256
    /// rows; those of 128 bytes a row are swizzled as Hopper's products read them. Address, pitch and a box's columns must be
    /// multiples of 16.
    pub fn tensor_map(&self, address: Arg, extents: [u64; 2], pitch: u64, boxed: [u32; 2]) -> Result<Arg> {
        // A dry run's arguments go nowhere.
        if self.mode() == Mode::Dry {
            return Ok(Arg::NULL);
        }
        match &self.backend {
            Backend::Driver(_) => driver::tensor_map(address.word(), extents, pitch, boxed).map(Arg::Map),
            Backend::Emulator(..) => Err(Error::device(
                "a tensor map in emulation",
                "kernels that need Hopper are launched where has_hopper says so",
            )),
        }
    }

    /// Compiles (or takes from the cache) and loads `kernel`'s module with every entry point; how many there are. A card's
    /// alone: emulation builds entry points when they are launched.
    pub fn preload(&self, kernel: Kernel) -> Result<usize> {
        let Backend::Driver(driver) = &self.backend else { return Ok(0) };
        let key = kernel.module_key();
        let (compiled, _) = cache::compiled(&sources::kernel(key.module)?, key, self.arch)?;
        let mut state = self.state();
        let before = driver.used()?;
        let module = match state.modules.entry(key) {
            Entry::Occupied(loaded) => loaded.into_mut(),
            Entry::Vacant(place) => place.insert(driver.module(&compiled.cubin)?),
        };
        for usage in &compiled.usage {
            driver.load_code(&driver.function(module, &usage.entry)?)?;
        }
        state.outside.modules += driver.used()?.saturating_sub(before);
        Ok(compiled.usage.len())
    }

    /// The address of byte `offset` of the slab.
    pub(super) fn address(&self, offset: u64) -> u64 {
        self.slab + offset
    }

    fn check(&self, offset: u64, bytes: u64) {
        let end = offset.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.slab_bytes),
            "{offset} + {bytes} B is outside a slab of {} B",
            self.slab_bytes
        );
    }

    /// Copies bytes to the slab, in the order of the compute stream. Nothing in a dry run.
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.check(offset, bytes.len() as u64);
        if self.mode() == Mode::Dry || bytes.is_empty() {
            return Ok(());
        }
        if self.is_recording() {
            return Err(Error::device(
                format!("{} B from the host while launches are recorded", bytes.len()),
                "a graph reads its inputs from buffers that are written before it is replayed",
            ));
        }
        match &self.backend {
            Backend::Driver(driver) => driver.write(self.slab + offset, bytes),
            Backend::Emulator(_, slab) => {
                slab.write(offset, bytes);
                Ok(())
            }
        }
    }

    /// Has `fill` write into pinned memory what is then copied to the slab, in the order of the compute stream.
    pub(super) fn write_with(
        &self,
        offset: u64,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        self.check(offset, bytes as u64);
        match &self.backend {
            Backend::Driver(driver) => driver.write_with(self.slab + offset, bytes, fill),
            Backend::Emulator(_, slab) => {
                let mut staged = vec![0; bytes];
                fill(&mut staged)?;
                slab.write(offset, &staged);
                Ok(())
            }
        }
    }

    /// Whether launches are being recorded.
    pub fn is_recording(&self) -> bool {
        self.state().capturing
    }

    /// Copies bytes from the slab once everything launched before is done.
    pub(super) fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.check(offset, bytes.len() as u64);
        match &self.backend {
            Backend::Driver(driver) => driver.read(self.slab + offset, bytes),
            Backend::Emulator(_, slab) => {
                slab.read(offset, bytes);
                Ok(())
            }
        }
    }

    /// Sets bytes of the slab, in the order of the compute stream.
    pub(super) fn fill(&self, offset: u64, value: u8, bytes: u64) -> Result<()> {
        self.check(offset, bytes);
        let mut state = self.state();
        if state.mode == Mode::Dry || bytes == 0 {
            return Ok(());
        }
        match &self.backend {
            Backend::Driver(driver) => driver.fill(self.slab + offset, value, bytes),
            Backend::Emulator(_, slab) => {
                match &mut state.recording {
                    Some(recording) => recording.push(Recording::Fill(offset, value, bytes)),
                    None => slab.fill(offset, value, bytes),
                }
                Ok(())
            }
        }
    }

    /// Waits for everything launched.
    pub fn synchronize(&self) -> Result<()> {
        match &self.backend {
            Backend::Driver(driver) => driver.synchronize(),
            Backend::Emulator(..) => Ok(()),
        }
    }

    /// A mark in the compute stream, to measure between; in emulation it is the wall clock's.
    pub fn event(&self) -> Result<Event> {
        match &self.backend {
            Backend::Driver(driver) => driver.event(),
            Backend::Emulator(..) => Ok(Event::now()),
        }
    }

    /// Records what `body` launches instead of running it.
    pub fn capture(&self, body: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.state().capturing = true;
        let graph = self.record(body);
        self.state().capturing = false;
        graph
    }

    fn record(&self, body: impl FnOnce() -> Result<()>) -> Result<Graph> {
        match &self.backend {
            Backend::Driver(driver) => {
                let _capturing = driver::capturing();
                let before = driver.used()?;
                driver.begin_capture()?;
                let ran = body();
                let graph = driver.end_capture();
                ran?;
                let graph = Graph(Recorded::Driver(graph?));
                self.state().outside.graphs += driver.used()?.saturating_sub(before);
                Ok(graph)
            }
            Backend::Emulator(..) => {
                self.state().recording = Some(Vec::new());
                let ran = body();
                let recorded = self.state().recording.take().unwrap_or_default();
                ran?;
                Ok(Graph(Recorded::Emulator(recorded)))
            }
        }
    }

    /// Runs what was captured.
    pub fn replay(&self, graph: &Graph) -> Result<()> {
        match (&self.backend, &graph.0) {
            (Backend::Driver(driver), Recorded::Driver(graph)) => driver.replay(graph),
            (Backend::Emulator(emulator, slab), Recorded::Emulator(recorded)) => {
                let state = self.state();
                for step in recorded {
                    match step {
                        Recording::Fill(offset, value, bytes) => slab.fill(*offset, *value, *bytes),
                        Recording::Launch(kernel, grid, slots) => {
                            let Some(Function::Emulator(function)) = state.functions.get(kernel) else {
                                unreachable!("a captured kernel is loaded")
                            };
                            emulator
                                .launch(function, grid.blocks, grid.threads, grid.shared, slots)
                                .map_err(|e| named(e, *kernel, *grid))?;
                        }
                    }
                }
                Ok(())
            }
            _ => unreachable!("a graph runs on the device that captured it"),
        }
    }

    /// Memory outside the slab; all zeros in emulation.
    pub fn outside(&self) -> Result<Outside> {
        let mut outside = self.state().outside;
        if let Backend::Driver(driver) = &self.backend {
            outside.blas += self.blas.as_ref().map_or(0, Blas::grown);
            outside.unattributed = driver.used()? as i64 - (outside.total() + self.slab_bytes) as i64;
        }
        Ok(outside)
    }
}

/// Says which launch an error was found at: errors of earlier launches can show later.
fn named(error: Error, kernel: Kernel, grid: Grid) -> Error {
    match error {
        Error::Device { what, help, sticky } => Error::Device {
            what: format!(
                "{what} at {}.{} of {:?} blocks of {} threads, {} B of shared memory",
                kernel.variant(),
                kernel.entry,
                grid.blocks,
                grid.threads,
                grid.shared
            ),
            help,
            sticky,
        },
        other => other,
    }
}
