//! FNV-1a of 64 bits (<http://www.isthe.com/chongo/tech/comp/fnv/>): a hash that is the same on every machine and release,
//! which the standard hasher does not promise.

use std::hash::Hasher;

/// The hash of what was written so far.
#[derive(Debug, Clone)]
pub struct Fnv1a(u64);

impl Default for Fnv1a {
    fn default() -> Fnv1a {
        Fnv1a(0xcbf2_9ce4_8422_2325)
    }
}

impl Hasher for Fnv1a {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_the_published_ones() {
        // Test vectors of the FNV authors.
        let published: [(&[u8], u64); 3] =
            [(b"", 0xcbf2_9ce4_8422_2325), (b"a", 0xaf63_dc4c_8601_ec8c), (b"foobar", 0x8594_4171_f739_67e8)];
        for (bytes, wanted) in published {
            let mut hash = Fnv1a::default();
            hash.write(bytes);
            assert_eq!(hash.finish(), wanted);
        }
    }
}
