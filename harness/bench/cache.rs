//! What a timed call finds of its operands in the card's L2 cache, and how that is brought about. Numbers of two of these are
//! never compared.

use clap::ValueEnum;

/// Nothing of an operand is left once this many times the L2 has gone through it since the operand was last used.
const TIMES_L2: u64 = 3;
/// Copies of operands at most: the smallest stay warm in part, and their rows say so.
pub(super) const MOST_COPIES: usize = 16_384;

/// What is in the cache when a call begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Cache {
    /// None of its operands: calls go round copies of them that fill three times the L2
    Rotate,
    /// None of its operands: three times the L2 is written before each call, outside of its time
    Flush,
    /// All of them that it holds: every call has the same
    Warm,
}

impl Cache {
    /// As the command line and the rows name it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Cache::Rotate => "rotate",
            Cache::Flush => "flush",
            Cache::Warm => "warm",
        }
    }

    /// Copies of operands of `bytes` to go round; one, where they are so large that none of them outlasts a call.
    pub(super) fn copies(self, l2_bytes: u64, bytes: u64) -> usize {
        let past = TIMES_L2 * l2_bytes;
        match self {
            Cache::Rotate if bytes < past => (past.div_ceil(bytes.max(1)) + 1).min(MOST_COPIES as u64) as usize,
            _ => 1,
        }
    }

    /// Bytes to write before each call.
    pub(super) fn flushed(self, l2_bytes: u64) -> Option<u64> {
        (self == Cache::Flush).then_some(TIMES_L2 * l2_bytes)
    }

    /// Whether so many times the L2, gone round, leave some operands in it.
    pub(super) fn is_partly_warm(self, rotation_of_l2: f64) -> bool {
        self == Cache::Rotate && rotation_of_l2 < TIMES_L2 as f64
    }

    /// Of the `bytes` that a call moves, those that must have come from memory or gone there by its end.
    pub(super) fn through_memory(self, l2_bytes: u64, bytes: u64) -> u64 {
        match self {
            Cache::Rotate => bytes,
            // What a call writes last can still be in the cache when it ends, and no later call pushes it out in its time.
            Cache::Flush => bytes.saturating_sub(l2_bytes),
            Cache::Warm => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const L2: u64 = 60 << 20;

    #[test]
    fn copies_go_past_three_times_the_cache() {
        for bytes in [12_000, 1 << 20, 50 << 20, 179 << 20] {
            let copies = Cache::Rotate.copies(L2, bytes);
            assert!((copies as u64 - 1) * bytes >= 3 * L2, "{bytes}: {copies}");
            assert!(!Cache::Rotate.is_partly_warm((copies as u64 * bytes) as f64 / L2 as f64));
        }
        assert_eq!(Cache::Rotate.copies(L2, 180 << 20), 1, "larger than the cache: cold by itself");
        assert_eq!(Cache::Rotate.copies(L2, 16), MOST_COPIES);
        assert!(Cache::Rotate.is_partly_warm((MOST_COPIES * 16) as f64 / L2 as f64));
        assert_eq!([Cache::Flush, Cache::Warm].map(|cache| cache.copies(L2, 1 << 20)), [1, 1]);
    }

    #[test]
    fn a_flush_writes_three_times_the_cache_and_nothing_else_is_flushed() {
        assert_eq!(Cache::Flush.flushed(L2), Some(180 << 20));
        assert_eq!([Cache::Rotate, Cache::Warm].map(|cache| cache.flushed(L2)), [None, None]);
    }

    #[test]
    fn only_what_must_pass_the_memory_is_held_to_its_rate() {
        let of = |cache: Cache, bytes| cache.through_memory(L2, bytes);
        assert_eq!((of(Cache::Rotate, 1 << 20), of(Cache::Warm, 1 << 30)), (1 << 20, 0));
        assert_eq!((of(Cache::Flush, 1 << 20), of(Cache::Flush, 100 << 20)), (0, 40 << 20));
    }
}
