//! The driver: a card's context, memory, streams, events, modules and graphs, each freed when dropped.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;

use cudarc::driver::sys::{self, CUresult};

use super::library::{self, Library};
use super::staging::{Mark, Staging, Stream};
use super::{Grid, Slot, TensorMap};
use crate::device::spec::Arch;
use crate::error::{Error, Result};

/// Halves of the pinned memory that copies go through: of the copy stream, and of the small ones in the compute stream.
const BULK_HALF_BYTES: usize = 8 << 20;
const SMALL_HALF_BYTES: usize = 1 << 20;
/// Dynamic shared memory that needs no opting in: none, since static shared memory counts beside it.
const SHARED_BY_DEFAULT: u32 = 0;

/// A card's context.
#[derive(Debug)]
pub(super) struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: a context may be current to many threads at once; the driver locks what it shares.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Makes the context this thread's own: every call does, since any thread may make it.
    pub(super) fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained until drop.
        check(unsafe { sys::cuCtxSetCurrent(self.context) }, "cuCtxSetCurrent")
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `Driver::open`.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// An open card.
#[derive(Debug)]
pub(super) struct Driver {
    /// Kernels, and the copies that a step's kernels wait for anyway.
    compute: Stream,
    /// Copies of many bytes, beside the kernels; see [`Order`].
    copies: Stream,
    order: Mutex<Order>,
    bulk: Mutex<Staging>,
    small: Mutex<Staging>,
    allocations: Mutex<Vec<sys::CUdeviceptr>>,
    /// Whether a kernel's blocks may be placed before the kernel ahead of it has ended.
    overlaps: bool,
    context: Arc<Context>,
}

/// What one stream has that the other has not been told to wait for: each waits for the other's only when there is something.
#[derive(Debug)]
struct Order {
    computed: bool,
    copied: bool,
    compute: Mark,
    copies: Mark,
}

/// Captures share it; what waits for the whole card (cuBLASLt's creation and end, freeing) has it alone: such a wait, from any
/// thread, ends every capture on the card in an error.
static CAPTURES: RwLock<()> = RwLock::new(());

/// Held while launches are captured.
pub(super) fn capturing() -> RwLockReadGuard<'static, ()> {
    CAPTURES.read().unwrap_or_else(PoisonError::into_inner)
}

/// Held while the whole card may be waited for.
pub(super) fn without_captures() -> RwLockWriteGuard<'static, ()> {
    CAPTURES.write().unwrap_or_else(PoisonError::into_inner)
}

/// The right to put one thing into a stream: nobody else puts anything into either while it is held.
pub(super) struct Turn<'a> {
    pub(super) stream: &'a Stream,
    _order: MutexGuard<'a, Order>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Turns a driver's answer into a sentence.
pub(super) fn check(result: CUresult, call: impl std::fmt::Display) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: the driver is loaded, `text` is a live pointer that it sets to a static string.
    unsafe { sys::cuGetErrorString(result, &raw mut text) };
    // SAFETY: a zero-ended string of the driver's own, or null.
    let text = if text.is_null() { "".into() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy() };
    let sticky = matches!(
        result,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
    );
    Err(Error::Device {
        what: format!("{call}: {result:?} ({text})"),
        help: if sticky {
            "the device's context is lost; start the program again".into()
        } else {
            "`highwater doctor` says what the device and its driver can do".into()
        },
        sticky,
    })
}

/// Loads and starts the driver; the number of cards.
pub(super) fn start() -> Result<u32> {
    library::load(Library::Driver)?;
    // SAFETY: the library is loaded; the call may be repeated.
    check(unsafe { sys::cuInit(0) }, "cuInit")?;
    let mut count = 0;
    // SAFETY: `count` is a live integer.
    check(unsafe { sys::cuDeviceGetCount(&raw mut count) }, "cuDeviceGetCount")?;
    Ok(count as u32)
}

/// A card's handle.
pub(super) fn device(ordinal: u32) -> Result<sys::CUdevice> {
    let count = start()?;
    if ordinal >= count {
        let there = format!("cuda:0 to cuda:{} are there", count.saturating_sub(1));
        return Err(Error::device(format!("card {ordinal} of {count}"), there));
    }
    let mut device = 0;
    // SAFETY: `device` is a live integer, the ordinal is in range.
    check(unsafe { sys::cuDeviceGet(&raw mut device, ordinal as i32) }, "cuDeviceGet")?;
    Ok(device)
}

/// A number the driver knows of a card.
pub(super) fn attribute(device: sys::CUdevice, which: sys::CUdevice_attribute) -> Result<i32> {
    let mut value = 0;
    // SAFETY: `value` is a live integer, the device a valid handle.
    check(unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) }, "cuDeviceGetAttribute")?;
    Ok(value)
}

/// The arch whose kernels a card of this compute capability runs.
pub(super) fn arch_of(major: i32, minor: i32) -> Result<Arch> {
    Ok(match (major, minor) {
        (8, 0 | 7) => Arch::Sm80,
        (8, 6) => Arch::Sm86,
        (8, 9) => Arch::Sm89,
        (9, 0) => Arch::Sm90a,
        (10, 0) => Arch::Sm100a,
        (12, 0) => Arch::Sm120a,
        _ => {
            let what = format!("a card of compute capability {major}.{minor}");
            return Err(Error::device(what, "kernels are written for 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0"));
        }
    })
}

/// See [`Cuda::tensor_map`](super::Cuda::tensor_map).
pub(super) fn tensor_map(
    address: u64,
    [rows, cols]: [u64; 2],
    pitch: u64,
    [box_rows, box_cols]: [u32; 2],
) -> Result<TensorMap> {
    use sys::{
        CUtensorMapDataType_enum as Type, CUtensorMapFloatOOBfill_enum as Outside,
        CUtensorMapInterleave_enum as Interleave, CUtensorMapL2promotion_enum as Promotion,
        CUtensorMapSwizzle_enum as Swizzle,
    };
    let mut map = Slot([0; 16]);
    let (extents, pitches, boxed, steps) = ([cols, rows], [pitch], [box_cols, box_rows], [1, 1]);
    let swizzle = match box_cols {
        128 => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        _ => Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
    };
    // SAFETY: a slot has the size and the alignment of a tensor map; the arrays have the lengths that two dimensions need.
    let made = unsafe {
        sys::cuTensorMapEncodeTiled(
            (&raw mut map).cast(),
            Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            2,
            address as usize as *mut c_void,
            extents.as_ptr(),
            pitches.as_ptr(),
            boxed.as_ptr(),
            steps.as_ptr(),
            Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            Outside::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    check(made, format_args!("cuTensorMapEncodeTiled of {rows} rows of {cols} B, {pitch} B apart"))?;
    Ok(TensorMap(map.0))
}

/// Whether the card (from sm_90 on) and the driver (in captured graphs from CUDA 12.3 on) can overlap one kernel's end and the
/// next one's beginning.
fn overlaps(device: sys::CUdevice) -> Result<bool> {
    const SINCE: i32 = 12_030;
    let major = attribute(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    Ok(major >= 9 && super::info::driver_version()? >= SINCE)
}

impl Driver {
    /// Opens a card and makes its stream.
    pub(super) fn open(ordinal: u32) -> Result<Driver> {
        let device = device(ordinal)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` is a live pointer, the device a valid handle.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) }, "cuDevicePrimaryCtxRetain")?;
        let context = Arc::new(Context { device, context });
        context.bind()?;
        Ok(Driver {
            compute: Stream::new(&context)?,
            copies: Stream::new(&context)?,
            order: Mutex::new(Order {
                computed: false,
                copied: false,
                compute: Mark::new(&context)?,
                copies: Mark::new(&context)?,
            }),
            bulk: Mutex::new(Staging::new(&context, BULK_HALF_BYTES)?),
            small: Mutex::new(Staging::new(&context, SMALL_HALF_BYTES)?),
            allocations: Mutex::default(),
            overlaps: overlaps(device)?,
            context,
        })
    }

    pub(super) fn arch(&self) -> Result<Arch> {
        use sys::CUdevice_attribute as A;
        let major = attribute(self.context.device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(self.context.device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        arch_of(major, minor)
    }

    /// Bytes of the card in use, by this process and all others.
    pub(super) fn used(&self) -> Result<u64> {
        let (free, total) = self.memory()?;
        Ok(total - free)
    }

    /// Bytes of the card that are free, and all of them.
    fn memory(&self) -> Result<(u64, u64)> {
        self.context.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are live integers, the context is current.
        check(unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) }, "cuMemGetInfo")?;
        Ok((free as u64, total as u64))
    }

    /// Device memory, freed with the driver.
    pub(super) fn alloc(&self, bytes: u64) -> Result<u64> {
        self.context.bind()?;
        let mut address = 0;
        // SAFETY: `address` is a live integer, the context is current.
        let result = unsafe { sys::cuMemAlloc_v2(&raw mut address, (bytes as usize).max(1)) };
        if result == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (free, total) = self.memory()?;
            return Err(Error::device(
                format!("the card refused one block of {bytes} B; {free} B of its {total} B are free"),
                format!("--vram {free} or less leaves room for what else runs on the card"),
            ));
        }
        check(result, "cuMemAlloc")?;
        lock(&self.allocations).push(address);
        Ok(address)
    }

    /// The compute stream, for what is put into it next: behind every copy that was begun before.
    pub(super) fn computing(&self) -> Result<Turn<'_>> {
        self.context.bind()?;
        let mut order = lock(&self.order);
        if order.copied {
            self.compute.follow(&self.copies, &order.copies)?;
            order.copied = false;
        }
        order.computed = true;
        Ok(Turn { stream: &self.compute, _order: order })
    }

    /// The copy stream, for what is put into it next: behind every kernel that was launched before.
    fn copying(&self) -> Result<Turn<'_>> {
        self.context.bind()?;
        let mut order = lock(&self.order);
        if order.computed {
            self.copies.follow(&self.compute, &order.compute)?;
            order.computed = false;
        }
        order.copied = true;
        Ok(Turn { stream: &self.copies, _order: order })
    }

    /// Has `fill` write `bytes` bytes of pinned memory, then copies them; several pieces where they are many.
    pub(super) fn write_with(
        &self,
        address: u64,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        if bytes > BULK_HALF_BYTES {
            let mut staged = vec![0; bytes];
            fill(&mut staged)?;
            return self.write(address, &staged);
        }
        if bytes > SMALL_HALF_BYTES {
            return lock(&self.bulk).copy(|| self.copying(), address, bytes, fill);
        }
        lock(&self.small).copy(|| self.computing(), address, bytes, fill)
    }

    /// Copies through pinned memory; the host waits only where all of that is in use.
    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        bytes.chunks(BULK_HALF_BYTES).enumerate().try_for_each(|(i, piece)| {
            self.write_with(address + (i * BULK_HALF_BYTES) as u64, piece.len(), |staged| {
                staged.copy_from_slice(piece);
                Ok(())
            })
        })
    }

    pub(super) fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        let turn = self.computing()?;
        // SAFETY: the caller's range is inside an allocation of this driver and as long as `bytes`, which is waited for
        // before this returns.
        let copied = unsafe {
            sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast::<c_void>(), address, bytes.len(), turn.stream.handle)
        };
        check(copied, "cuMemcpyDtoHAsync")?;
        drop(turn);
        self.compute.synchronize()
    }

    pub(super) fn fill(&self, address: u64, value: u8, bytes: u64) -> Result<()> {
        let turn = self.computing()?;
        // SAFETY: the caller's range is inside an allocation of this driver.
        check(unsafe { sys::cuMemsetD8Async(address, value, bytes as usize, turn.stream.handle) }, "cuMemsetD8Async")
    }

    /// Waits for both streams.
    pub(super) fn synchronize(&self) -> Result<()> {
        self.copies.synchronize()?;
        self.compute.synchronize()
    }

    pub(super) fn bind(&self) -> Result<()> {
        self.context.bind()
    }

    pub(super) fn module(&self, cubin: &[u8]) -> Result<Module> {
        self.context.bind()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: a cubin carries its own length; ours came from the compiler or from a file whose checksum held.
        check(unsafe { sys::cuModuleLoadData(&raw mut module, cubin.as_ptr().cast()) }, "cuModuleLoadData")?;
        Ok(Module { module, context: Arc::clone(&self.context) })
    }

    pub(super) fn function(&self, module: &Module, entry: &str) -> Result<Function> {
        self.context.bind()?;
        let mut function = std::ptr::null_mut();
        let name = CString::new(entry).unwrap_or_default();
        // SAFETY: the module is live, the name ends in zero.
        let found = unsafe { sys::cuModuleGetFunction(&raw mut function, module.module, name.as_ptr()) };
        check(found, format_args!("cuModuleGetFunction({entry})"))?;
        Ok(Function { function, shared: SHARED_BY_DEFAULT })
    }

    /// Loads a function's code now rather than at its first launch, where the driver can: from CUDA 12.4 on.
    pub(super) fn load_code(&self, function: &Function) -> Result<()> {
        const SINCE: i32 = 12_040;
        if super::info::driver_version()? < SINCE {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the function's module is loaded, and the driver has the call.
        check(unsafe { sys::cuFuncLoad(function.function) }, "cuFuncLoad")
    }

    pub(super) fn launch(&self, function: &mut Function, grid: Grid, slots: &[Slot]) -> Result<()> {
        let turn = self.computing()?;
        if grid.shared > function.shared {
            let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function's module is loaded.
            let set = unsafe { sys::cuFuncSetAttribute(function.function, which, grid.shared as i32) };
            check(set, "cuFuncSetAttribute")?;
            function.shared = grid.shared;
        }
        let mut pointers: Vec<*mut c_void> = slots.iter().map(|slot| (&raw const *slot).cast_mut().cast()).collect();
        let mut overlap = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let [x, y, z] = grid.blocks;
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared,
            hStream: turn.stream.handle,
            attrs: &raw mut overlap,
            numAttrs: u32::from(self.overlaps),
        };
        // SAFETY: each pointer is to 128 bytes that begin with the argument; the driver reads as many as the kernel's own
        // signature says, at most 128, and the attribute, before it returns. Every kernel begins by waiting for those before
        // it, so that none sees less where they overlap.
        let launched = unsafe {
            sys::cuLaunchKernelEx(&raw const config, function.function, pointers.as_mut_ptr(), std::ptr::null_mut())
        };
        check(launched, "cuLaunchKernelEx")
    }

    pub(super) fn event(&self) -> Result<Event> {
        let turn = self.computing()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: the context is current, `event` a live pointer.
        check(unsafe { sys::cuEventCreate(&raw mut event, 0) }, "cuEventCreate")?;
        // Owned from here on, so that it is destroyed where recording fails.
        let owned = Event(Moment::Device { event, context: Arc::clone(&self.context) });
        // SAFETY: event and stream are live.
        check(unsafe { sys::cuEventRecord(event, turn.stream.handle) }, "cuEventRecord")?;
        Ok(owned)
    }

    pub(super) fn begin_capture(&self) -> Result<()> {
        // Copies are waited for ahead of the capture, which must not reach outside itself.
        let turn = self.computing()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live.
        check(unsafe { sys::cuStreamBeginCapture_v2(turn.stream.handle, mode) }, "cuStreamBeginCapture")
    }

    pub(super) fn end_capture(&self) -> Result<GraphExec> {
        self.context.bind()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is live, `graph` a live pointer.
        check(unsafe { sys::cuStreamEndCapture(self.compute.handle, &raw mut graph) }, "cuStreamEndCapture")?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph is live until destroyed below; `exec` is a live pointer.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) };
        // SAFETY: the graph was made by the capture; the instance does not need it.
        unsafe { sys::cuGraphDestroy(graph) };
        check(made, "cuGraphInstantiate")?;
        let exec = GraphExec { exec, context: Arc::clone(&self.context) };
        // SAFETY: instance and stream are live; uploading ahead keeps the first replay as quick as the next.
        check(unsafe { sys::cuGraphUpload(exec.exec, self.compute.handle) }, "cuGraphUpload")?;
        self.synchronize()?;
        Ok(exec)
    }

    pub(super) fn replay(&self, graph: &GraphExec) -> Result<()> {
        let turn = self.computing()?;
        // SAFETY: instance and stream are live.
        check(unsafe { sys::cuGraphLaunch(graph.exec, turn.stream.handle) }, "cuGraphLaunch")
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _alone = without_captures();
        // What a lost context still held is freed with it.
        if self.synchronize().is_err() {
            return;
        }
        for address in lock(&self.allocations).drain(..) {
            // SAFETY: allocated by this driver, freed once, and the streams were waited for.
            unsafe { sys::cuMemFree_v2(address) };
        }
    }
}

/// A loaded module.
#[derive(Debug)]
pub(super) struct Module {
    module: sys::CUmodule,
    context: Arc<Context>,
}

// SAFETY: a handle of a context that any thread may bind.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: loaded once, unloaded once.
            unsafe { sys::cuModuleUnload(self.module) };
        }
    }
}

/// A kernel of a loaded module, which outlives it in the same table.
#[derive(Debug)]
pub(super) struct Function {
    function: sys::CUfunction,
    /// Dynamic shared memory it may be launched with.
    shared: u32,
}

// SAFETY: a handle of a context that any thread may bind.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// An instantiated graph.
#[derive(Debug)]
pub(super) struct GraphExec {
    exec: sys::CUgraphExec,
    context: Arc<Context>,
}

// SAFETY: a handle of a context that any thread may bind.
unsafe impl Send for GraphExec {}
// SAFETY: as above.
unsafe impl Sync for GraphExec {}

impl Drop for GraphExec {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: instantiated once, destroyed once.
            unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}

/// A moment in the compute stream.
#[derive(Debug)]
pub struct Event(Moment);

#[derive(Debug)]
enum Moment {
    Device { event: sys::CUevent, context: Arc<Context> },
    Host(Instant),
}

// SAFETY: a handle of a context that any thread may bind.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// The wall clock's moment, where there is no stream.
    pub(super) fn now() -> Event {
        Event(Moment::Host(Instant::now()))
    }

    /// Seconds from `earlier` to this one, once both are past.
    pub fn seconds_since(&self, earlier: &Event) -> Result<f64> {
        match (&earlier.0, &self.0) {
            (Moment::Host(from), Moment::Host(to)) => Ok((*to - *from).as_secs_f64()),
            (Moment::Device { event: from, .. }, Moment::Device { event: to, context }) => {
                context.bind()?;
                let mut ms = 0.0f32;
                // SAFETY: both events are live and recorded.
                unsafe {
                    check(sys::cuEventSynchronize(*to), "cuEventSynchronize")?;
                    check(sys::cuEventElapsedTime_v2(&raw mut ms, *from, *to), "cuEventElapsedTime")?;
                }
                Ok(f64::from(ms) / 1e3)
            }
            _ => unreachable!("events of one device are of one kind"),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Moment::Device { event, context } = &self.0
            && context.bind().is_ok()
        {
            // SAFETY: created once, destroyed once.
            unsafe { sys::cuEventDestroy_v2(*event) };
        }
    }
}
