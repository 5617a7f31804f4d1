//! The OOM frontier: the largest chunk that fits, by bisection. What "fits" means is the caller's: a plan or a run.

use anyhow::{Result, ensure};

/// Chunks are tried in steps of the recurrence's own chunk, below which bytes hardly change.
pub(crate) const STEP_TOKENS: u64 = 64;

/// Where a batch stops fitting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Edge {
    /// Not even the smallest chunk fits.
    Nothing,
    /// This chunk fits and the next step does not.
    Largest(u64),
    /// The largest chunk asked about fits: the edge is beyond it.
    Beyond(u64),
    /// This chunk fits and takes every prompt whole: there is nothing beyond it.
    Whole(u64),
}

/// The largest multiple of [`STEP_TOKENS`] up to `limit` (rounded down) for which `fits` holds. Takes at most
/// log2(limit / 64) + 2 questions. `fits` must not become true again above a chunk where it was false.
pub(crate) fn largest_chunk(limit: u64, mut fits: impl FnMut(u64) -> Result<bool>) -> Result<Edge> {
    let steps = limit / STEP_TOKENS;
    ensure!(steps >= 1, "the largest chunk to try is {limit} tokens, and the least is {STEP_TOKENS}");
    if !fits(STEP_TOKENS)? {
        return Ok(Edge::Nothing);
    }
    if steps == 1 || fits(steps * STEP_TOKENS)? {
        return Ok(Edge::Beyond(steps * STEP_TOKENS));
    }
    // Invariant: `low` steps fit and `high` steps do not.
    let (mut low, mut high) = (1, steps);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle * STEP_TOKENS)? {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok(Edge::Largest(low * STEP_TOKENS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_edge_is_found_with_few_questions() {
        for edge in 0..=260u64 {
            let mut asked = 0;
            let found = largest_chunk(256 * 64 + 63, |chunk| {
                asked += 1;
                assert!(chunk % 64 == 0 && (64..=256 * 64).contains(&chunk));
                Ok(chunk <= edge * 64)
            })
            .unwrap();
            let wanted = match edge {
                0 => Edge::Nothing,
                1..256 => Edge::Largest(edge * 64),
                _ => Edge::Beyond(256 * 64),
            };
            assert_eq!(found, wanted);
            assert!(asked <= 10, "{asked} questions");
        }
    }

    #[test]
    fn small_and_huge_limits_end() {
        assert_eq!(largest_chunk(64, |_| Ok(true)).unwrap(), Edge::Beyond(64));
        assert_eq!(largest_chunk(64, |_| Ok(false)).unwrap(), Edge::Nothing);
        assert!(largest_chunk(63, |_| Ok(true)).unwrap_err().to_string().contains("63 tokens"));
        assert_eq!(largest_chunk(u64::MAX, |c| Ok(c <= 12_345)).unwrap(), Edge::Largest(12_288));
    }

    #[test]
    fn a_failed_question_is_an_error_and_no_edge() {
        assert!(largest_chunk(4096, |chunk| if chunk == 64 { Ok(true) } else { anyhow::bail!("lost") }).is_err());
    }
}
