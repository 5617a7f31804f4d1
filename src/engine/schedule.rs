//! Which sequence gets how many rows of the next step: a pure function of lengths and a token budget.

/// Length of a GDN chunk, which unfinished pieces of a prompt are aligned to, so that a prompt is cut at the same places
/// whoever shares the batch.
pub const CHUNK_TOKENS: usize = crate::ops::gdn_prefill::CHUNK_TOKENS;

/// Whether decoding goes on while prompts are being prefilled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Decodes first, prompts in what is left of the budget: serving.
    #[default]
    Mixed,
    /// No decode while a prompt is unfinished: phases that can be timed apart.
    PrefillFirst,
}

/// A running sequence as the schedule sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// Tokens in the cache.
    pub computed: usize,
    /// Tokens known: computed and pending.
    pub known: usize,
    /// Tokens primed before the prompt.
    pub depth: usize,
    /// The prompt is done: one pending token is a decode.
    pub decoding: bool,
}

/// Rows of the next piece of a prompt under `budget`: all that is pending, or a piece that ends on a chunk boundary
/// counted from the prompt's start, or, where the budget does not reach one, the budget.
pub fn piece(view: View, budget: usize) -> usize {
    let pending = view.known - view.computed;
    if pending <= budget {
        return pending;
    }
    let done = view.computed - view.depth;
    let aligned = (done + budget) / CHUNK_TOKENS * CHUNK_TOKENS;
    if aligned > done { aligned - done } else { budget }
}

/// Rows for each running sequence: (index, rows). Decodes come first and get one row each; prompts share what is left
/// of `budget`, at most `chunk` rows together. `hold` leaves the decodes out.
pub fn schedule(running: &[View], budget: usize, chunk: usize, hold: bool) -> Vec<(usize, usize)> {
    let mut left = budget;
    let mut picks = Vec::with_capacity(running.len());
    if !hold {
        for (i, _) in running.iter().enumerate().filter(|(_, v)| v.decoding) {
            if left == 0 {
                break;
            }
            picks.push((i, 1));
            left -= 1;
        }
    }
    left = left.min(chunk);
    for (i, view) in running.iter().enumerate().filter(|(_, v)| !v.decoding) {
        if left == 0 {
            break;
        }
        let rows = piece(*view, left);
        picks.push((i, rows));
        left -= rows;
    }
    picks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(computed: usize, known: usize) -> View {
        View { computed, known, depth: 0, decoding: false }
    }

    fn decode(known: usize) -> View {
        View { computed: known - 1, known, depth: 0, decoding: true }
    }

    #[test]
    fn decodes_go_first_and_prompts_share_the_rest() {
        let picks = schedule(&[prompt(0, 300), decode(9), prompt(0, 10)], 200, 200, false);
        assert_eq!(picks, [(1, 1), (0, 192), (2, 7)]);
    }

    #[test]
    fn pieces_end_on_chunk_boundaries_where_the_budget_reaches_one() {
        assert_eq!(piece(prompt(0, 1000), 130), 128);
        assert_eq!(piece(prompt(128, 1000), 130), 128);
        assert_eq!(piece(prompt(3, 1000), 130), 125);
        assert_eq!(piece(prompt(0, 1000), 16), 16);
        assert_eq!(piece(prompt(0, 100), 100), 100);
        assert_eq!(piece(View { computed: 1000, known: 1300, depth: 1000, decoding: false }, 100), 64);
    }

    #[test]
    fn prompts_never_take_more_than_the_chunk() {
        assert_eq!(schedule(&[decode(9), prompt(0, 500), prompt(0, 9)], 512, 64, false), [(0, 1), (1, 64)]);
    }

    #[test]
    fn decodes_can_be_held_back() {
        assert_eq!(schedule(&[decode(9), prompt(0, 10)], 64, 64, true), [(1, 10)]);
        assert_eq!(schedule(&[decode(9), decode(7)], 64, 64, false), [(0, 1), (1, 1)]);
    }

    #[test]
    fn the_budget_is_never_exceeded() {
        for budget in 1..200 {
            let rows: usize = schedule(&[prompt(0, 70), decode(5), prompt(64, 500), decode(2)], budget, budget, false)
                .iter()
                .map(|(_, n)| n)
                .sum();
            assert!(rows <= budget && rows > 0);
        }
    }
}
