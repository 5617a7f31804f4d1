//! The host slab: anonymous memory reserved lazily, and typed views of its blocks.
#![allow(unsafe_code)]

use half::bf16;
use memmap2::{MmapOptions, MmapRaw};

use crate::error::{Error, Result};
use crate::mem::{ALIGN_BYTES, Block};

/// Types any bit pattern of which is a value, so that bytes of the slab can be viewed as them.
///
/// # Safety
/// Every bit pattern must be valid, and the alignment must divide [`ALIGN_BYTES`].
pub unsafe trait Pod: Copy + Send + Sync + 'static {}

// SAFETY: plain numbers; every bit pattern is a value and alignments are 1 to 8.
unsafe impl Pod for u8 {}
// SAFETY: as above.
unsafe impl Pod for i32 {}
// SAFETY: as above.
unsafe impl Pod for u32 {}
// SAFETY: as above.
unsafe impl Pod for f32 {}
// SAFETY: a transparent u16.
unsafe impl Pod for bf16 {}

/// The bytes of values.
pub(super) fn bytes_of<T: Pod>(values: &[T]) -> &[u8] {
    // SAFETY: a Pod has no padding among these types, and any byte is a u8.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The values that bytes hold, whatever their alignment (a remainder shorter than one is left out).
pub(super) fn values_of<T: Pod>(bytes: &[u8]) -> Vec<T> {
    let count = bytes.len() / size_of::<T>();
    let mut values = Vec::<T>::with_capacity(count);
    // SAFETY: the capacity is `count` values, whose bytes are copied in; any bit pattern is a T.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), values.as_mut_ptr().cast::<u8>(), count * size_of::<T>());
        values.set_len(count);
    }
    values
}

/// Address space for a whole slab; the system gives pages as they are first written.
#[derive(Debug)]
pub struct HostSlab {
    map: MmapRaw,
    bytes: u64,
}

impl HostSlab {
    /// Reserves `bytes`.
    pub fn reserve(bytes: u64) -> Result<HostSlab> {
        let len = usize::try_from(bytes.max(ALIGN_BYTES)).map_err(|_| Error::Unsupported {
            what: format!("a slab of {bytes} B"),
            supported: "this processor addresses fewer bytes".into(),
        })?;
        let map = MmapOptions::new().len(len).no_reserve_swap().map_anon().map_err(|source| Error::Io {
            file: format!("an anonymous mapping of {bytes} B (the cpu slab; a smaller --vram needs less)").into(),
            source,
        })?;
        Ok(HostSlab { map: map.into(), bytes })
    }

    /// Where the slab starts.
    pub(super) fn address(&self) -> u64 {
        self.map.as_mut_ptr() as u64
    }

    /// `offset` bytes in, once `bytes` from there are known to be inside.
    fn at(&self, offset: u64, bytes: u64) -> *mut u8 {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "{offset} + {bytes} B of a slab of {} B", self.bytes);
        // In range: checked on the line above.
        self.map.as_mut_ptr().wrapping_add(offset as usize)
    }

    /// Copies bytes in. For the emulated card, whose memory no Rust reference is ever made to.
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) {
        let to = self.at(offset, bytes.len() as u64);
        // SAFETY: in range; launches run on the caller's own thread, so none runs now.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies bytes out, as [`HostSlab::write`] copies in.
    pub(super) fn read(&self, offset: u64, bytes: &mut [u8]) {
        let from = self.at(offset, bytes.len() as u64);
        // SAFETY: in range; launches run on the caller's own thread, so none runs now.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Sets bytes, as [`HostSlab::write`] copies them.
    pub(super) fn fill(&self, offset: u64, value: u8, bytes: u64) {
        let to = self.at(offset, bytes);
        // SAFETY: in range; launches run on the caller's own thread, so none runs now.
        unsafe { std::ptr::write_bytes(to, value, bytes as usize) };
    }

    fn range(&self, block: &Block, bytes: u64) -> *mut u8 {
        let end = block.offset().checked_add(bytes);
        assert!(
            bytes <= block.bytes() && end.is_some_and(|end| end <= self.bytes),
            "a block of another slab: {} + {bytes} B of {} B",
            block.offset(),
            self.bytes
        );
        // In range: checked on the line above.
        self.map.as_mut_ptr().wrapping_add(block.offset() as usize)
    }

    /// The first `bytes` of `block`, as values of `T` (a remainder shorter than one is left out).
    pub(super) fn slice<'a, T: Pod>(&'a self, block: &'a Block, bytes: u64) -> &'a [T] {
        let start = self.range(block, bytes);
        // SAFETY: `range` checked the bounds; the map is page-aligned and blocks are ALIGN_BYTES-aligned, which every
        // Pod's alignment divides; any bit pattern is a T; the pool hands out disjoint blocks, each owned by one Buffer,
        // so while this shared borrow of the block lives nobody writes it.
        unsafe { std::slice::from_raw_parts(start.cast::<T>(), bytes as usize / size_of::<T>()) }
    }

    /// As [`HostSlab::slice`], to write.
    #[allow(clippy::mut_from_ref)] // the exclusive borrow is the block's; the slab itself is shared by all blocks
    pub(super) fn slice_mut<'a, T: Pod>(&'a self, block: &'a mut Block, bytes: u64) -> &'a mut [T] {
        let start = self.range(block, bytes);
        // SAFETY: as in `slice`, and the block is borrowed exclusively, so no other view of these bytes exists.
        unsafe { std::slice::from_raw_parts_mut(start.cast::<T>(), bytes as usize / size_of::<T>()) }
    }
}
