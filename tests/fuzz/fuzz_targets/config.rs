//! Any text as config.json.
#![no_main]

use std::path::Path;

use highwater::checkpoint::Geometry;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(g) = Geometry::from_config(Path::new("config.json"), text) {
        assert!(g.param_count() < 1 << 44 && g.rotary_dim <= g.head_dim && g.decodable <= g.vocab);
    }
});
