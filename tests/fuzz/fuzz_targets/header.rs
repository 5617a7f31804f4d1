//! 4 bytes of length beyond what is given, then the beginning of a safetensors file.
#![no_main]

use std::path::Path;

use highwater::checkpoint::header;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((more, bytes)) = input.split_first_chunk::<4>() else { return };
    let file_len = bytes.len() as u64 + u64::from(u32::from_le_bytes(*more));
    if let Ok(h) = header::parse(Path::new("model.safetensors"), bytes, file_len) {
        assert_eq!(h.tensors.iter().map(|t| t.bytes).sum::<u64>() + h.data_start, file_len);
    }
});
