//! Streams, and the pinned memory that copies to a card go through.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;

use super::driver::{Context, Turn, check};
use crate::error::Result;

/// A stream that waits for no other by itself.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) handle: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: a stream may be used from any thread that has bound its context.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// The context must be current.
    pub(super) fn new(context: &Arc<Context>) -> Result<Stream> {
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current, `handle` a live pointer.
        check(unsafe { sys::cuStreamCreate(&raw mut handle, flags) }, "cuStreamCreate")?;
        Ok(Stream { handle, context: Arc::clone(context) })
    }

    /// Waits until all that was put into it is done.
    pub(super) fn synchronize(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the stream is live.
        check(unsafe { sys::cuStreamSynchronize(self.handle) }, "cuStreamSynchronize")
    }

    /// Has what is put into this stream from here on wait for what is in `other` now, which `mark` is left at.
    pub(super) fn follow(&self, other: &Stream, mark: &Mark) -> Result<()> {
        mark.record(other)?;
        // SAFETY: stream and event are live.
        check(unsafe { sys::cuStreamWaitEvent(self.handle, mark.event, 0) }, "cuStreamWaitEvent")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made once, destroyed once; the driver keeps it until its work is done.
            unsafe { sys::cuStreamDestroy_v2(self.handle) };
        }
    }
}

/// A place in a stream, used again and again; it has no time.
#[derive(Debug)]
pub(super) struct Mark {
    event: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: a handle of a context that any thread may bind.
unsafe impl Send for Mark {}
// SAFETY: as above.
unsafe impl Sync for Mark {}

impl Mark {
    /// The context must be current.
    pub(super) fn new(context: &Arc<Context>) -> Result<Mark> {
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the context is current, `event` a live pointer.
        check(unsafe { sys::cuEventCreate(&raw mut event, flags) }, "cuEventCreate")?;
        Ok(Mark { event, context: Arc::clone(context) })
    }

    fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: event and stream are live, of one context.
        check(unsafe { sys::cuEventRecord(self.event, stream.handle) }, "cuEventRecord")
    }

    /// Has the host wait for it; at once where it was never recorded. The context must be current.
    fn wait(&self) -> Result<()> {
        // SAFETY: the event is live.
        check(unsafe { sys::cuEventSynchronize(self.event) }, "cuEventSynchronize")
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made once, destroyed once.
            unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}

/// Pinned host memory in two halves: one is filled while the card copies from the other.
#[derive(Debug)]
pub(super) struct Staging {
    start: *mut u8,
    half_bytes: usize,
    /// Behind the last copy from each half.
    copied: [Mark; 2],
    half: usize,
    next: usize,
    context: Arc<Context>,
}

// SAFETY: plain memory, reached through `&mut self`.
unsafe impl Send for Staging {}

impl Staging {
    /// The context must be current.
    pub(super) fn new(context: &Arc<Context>, half_bytes: usize) -> Result<Staging> {
        let copied = [Mark::new(context)?, Mark::new(context)?];
        let mut start = std::ptr::null_mut();
        // SAFETY: the context is current, `start` a live pointer.
        check(unsafe { sys::cuMemHostAlloc(&raw mut start, 2 * half_bytes, 0) }, "cuMemHostAlloc")?;
        // SAFETY: as many bytes were just given; written once so that every byte of them is initialised.
        unsafe { std::ptr::write_bytes(start.cast::<u8>(), 0, 2 * half_bytes) };
        Ok(Staging { start: start.cast(), half_bytes, copied, half: 0, next: 0, context: Arc::clone(context) })
    }

    /// Has `fill` write `bytes` bytes, at most a half, and puts their copy to `address` into the stream of `turn`, the same one
    /// at every call. The host waits only where both halves are still being copied.
    pub(super) fn copy<'a>(
        &mut self,
        turn: impl Fn() -> Result<Turn<'a>>,
        address: u64,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        assert!(bytes <= self.half_bytes, "{bytes} B in a half of {} B", self.half_bytes);
        if self.next + bytes > self.half_bytes {
            self.copied[self.half].record(turn()?.stream)?;
            self.half = 1 - self.half;
            self.next = 0;
            self.copied[self.half].wait()?;
        }
        let offset = self.half * self.half_bytes + self.next;
        // SAFETY: inside the memory, all of it initialised; no copy in flight reads this part: of this half only what is
        // before `next` may be in flight, since it was waited for when it was begun.
        let staged = unsafe { std::slice::from_raw_parts_mut(self.start.add(offset), bytes) };
        fill(staged)?;
        let turn = turn()?;
        let (from, stream) = (staged.as_ptr().cast::<c_void>(), turn.stream.handle);
        // SAFETY: the caller's range is inside an allocation of this driver; the staged bytes stay until the half is waited
        // for.
        let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(address, from, bytes, stream) };
        check(copied, "cuMemcpyHtoDAsync")?;
        self.next += bytes.next_multiple_of(256);
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated once, freed once; the driver drops it after its streams are waited for.
            unsafe { sys::cuMemFreeHost(self.start.cast()) };
        }
    }
}
