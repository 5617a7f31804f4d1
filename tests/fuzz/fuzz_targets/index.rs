//! Any bytes as model.safetensors.index.json.
#![no_main]

use std::path::Path;

use highwater::checkpoint::index;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(i) = index::parse(Path::new("model.safetensors.index.json"), bytes) {
        assert!(i.files.iter().all(|f| Path::new(f).components().count() == 1));
    }
});
