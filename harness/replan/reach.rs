//! The largest chunk that fits, found from totals that cards of one kind share: a total asked for once is kept, and where
//! totals grow evenly the next chunk to ask about is computed instead of halved.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::frontier::STEP_TOKENS;

/// Guesses before the rest is bisected: totals that do not grow evenly must not take long.
const GUESSES: usize = 6;

/// Bytes by chunk of one recipe and batch, kept as they are asked for.
pub(crate) struct Totals<F> {
    known: BTreeMap<u64, u64>,
    ask: F,
}

impl<F: FnMut(u64) -> Result<u64>> Totals<F> {
    /// None is known yet; `ask` gives the bytes at a chunk.
    pub(crate) fn new(ask: F) -> Totals<F> {
        Totals { known: BTreeMap::new(), ask }
    }

    /// The bytes at `chunk`.
    pub(crate) fn at(&mut self, chunk: u64) -> Result<u64> {
        if let Some(bytes) = self.known.get(&chunk) {
            return Ok(*bytes);
        }
        let bytes = (self.ask)(chunk)?;
        self.known.insert(chunk, bytes);
        Ok(bytes)
    }

    /// The largest multiple of [`STEP_TOKENS`] up to `most` (itself one) whose bytes are at most `slab`; `None` where not even
    /// the smallest is. Bytes must not fall again as the chunk grows past one that does not fit.
    pub(crate) fn largest(&mut self, most: u64, slab: u64) -> Result<Option<u64>> {
        // Invariant: `low` fits and `high` does not, both in steps.
        let too_large = self.known.range(STEP_TOKENS..=most).find(|(_, bytes)| **bytes > slab).map(|(chunk, _)| *chunk);
        let limit = too_large.map_or(most, |chunk| chunk.min(most));
        let fits = self.known.range(STEP_TOKENS..limit).rev().find(|(chunk, _)| **chunk % STEP_TOKENS == 0);
        let mut low = fits.map(|(chunk, _)| chunk / STEP_TOKENS);
        if low.is_none() && self.at(STEP_TOKENS)? <= slab {
            low = Some(1);
        }
        let Some(mut low) = low else { return Ok(None) };
        let mut high = match too_large {
            Some(chunk) => chunk.div_ceil(STEP_TOKENS),
            None if self.at(most)? <= slab => return Ok(Some(most)),
            None => most / STEP_TOKENS,
        };
        let mut guesses = 0;
        while high - low > 1 {
            let middle = if guesses < GUESSES { self.guess(low, high, slab)? } else { low + (high - low) / 2 };
            guesses += 1;
            if self.at(middle * STEP_TOKENS)? <= slab {
                low = middle;
                // A good guess is the edge itself, or next to it.
                if high - low > 1 && guesses <= GUESSES {
                    if self.at((low + 1) * STEP_TOKENS)? <= slab {
                        low += 1;
                    } else {
                        high = low + 1;
                    }
                }
            } else {
                high = middle;
            }
        }
        Ok(Some(low * STEP_TOKENS))
    }

    /// Where the straight line through two chunks meets `slab`, strictly between them.
    fn guess(&mut self, low: u64, high: u64, slab: u64) -> Result<u64> {
        let (at_low, at_high) = (self.at(low * STEP_TOKENS)?, self.at(high * STEP_TOKENS)?);
        let share = (slab - at_low) as f64 / (at_high - at_low) as f64;
        Ok((low + ((high - low) as f64 * share) as u64).clamp(low + 1, high - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frontier::{Edge, largest_chunk};

    /// What bisection finds, for totals of several shapes, seen one card after another with what is known kept.
    #[test]
    fn it_finds_what_bisection_finds_in_fewer_questions() {
        type Shape = (&'static str, fn(u64) -> u64);
        let shapes: [Shape; 5] = [
            ("even", |c| 1_000_000 + 300 * c),
            ("a knee", |c| 500_000 + 900 * c.min(4096) + 10 * c),
            ("steps", |c| 100 * c.next_multiple_of(512)),
            ("squares", |c| c * c / 64),
            ("level", |c| 700_000 + c.min(64)),
        ];
        for (name, total) in shapes {
            for most in [64, 128, 8192, 65_536] {
                let mut asked = 0;
                let mut cards = 0;
                let mut totals = Totals::new(|chunk| {
                    asked += 1;
                    assert!(chunk % STEP_TOKENS == 0 && (STEP_TOKENS..=65_536).contains(&chunk));
                    Ok(total(chunk))
                });
                for chunk in [512, 2048, 8192] {
                    totals.at(chunk).unwrap();
                }
                for slab in (0..70_000_000).step_by(1_234_567).chain([699_999, 700_064, 1_019_200]) {
                    let found = totals.largest(most, slab).unwrap();
                    let wanted = match largest_chunk(most, |chunk| Ok(total(chunk) <= slab)).unwrap() {
                        Edge::Nothing => None,
                        Edge::Largest(chunk) | Edge::Beyond(chunk) | Edge::Whole(chunk) => Some(chunk),
                    };
                    assert_eq!(found, wanted, "{name}, up to {most}, {slab} B");
                    cards += 1;
                }
                assert!(asked <= 6 * cards, "{name}, up to {most}: {asked} questions for {cards} cards");
            }
        }
    }

    #[test]
    fn a_failed_question_is_an_error() {
        let mut totals = Totals::new(|chunk| if chunk > 64 { anyhow::bail!("lost") } else { Ok(1) });
        assert!(totals.largest(8192, 5).is_err());
    }
}
