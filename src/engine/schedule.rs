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

/// Rows of the next piece of a prompt when `left` of the step's `chunk` prompt rows are left: all that is pending, or a
/// piece that ends on a boundary counted from the prompt's start, or none where the boundary is out of reach.
///
/// Boundaries are multiples of 64, or of the chunk where that is smaller. So who shares the batch never moves a cut: it
/// only decides which step a piece falls into. A prompt that is first in its step always gets a piece.
pub fn piece(view: View, left: usize, chunk: usize) -> usize {
    let pending = view.known - view.computed;
    let unit = CHUNK_TOKENS.min(chunk).max(1);
    let done = view.computed - view.depth;
    let boundary = (done + left) / unit * unit;
    // Below 64 a cut is seen in the last bits, so a piece never runs past one, even to the prompt's end.
    if pending <= left && (unit == CHUNK_TOKENS || done + pending <= (done / unit + 1) * unit) {
        return pending;
    }
    boundary.saturating_sub(done)
}

/// Rows a decode step of `rows` sequences is padded to on a card, where at most `batch` run together: powers of two to 8,
/// multiples of 8 to 64, multiples of 32 beyond, and the batch itself. A graph is captured for each.
pub fn bucket(rows: usize, batch: usize) -> usize {
    let bucket = match rows {
        0..=8 => rows.next_power_of_two(),
        9..=64 => rows.next_multiple_of(8),
        _ => rows.next_multiple_of(32),
    };
    bucket.min(batch).max(rows)
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
        let rows = piece(*view, left, chunk);
        if rows > 0 {
            picks.push((i, rows));
            left -= rows;
        }
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
        // Seven rows are left for the third, which would be cut inside a chunk: it waits.
        assert_eq!(picks, [(1, 1), (0, 192)]);
        assert_eq!(schedule(&[prompt(0, 70), prompt(0, 10)], 80, 80, false), [(0, 70), (1, 10)]);
    }

    #[test]
    fn pieces_end_on_chunk_boundaries_or_wait_for_one() {
        assert_eq!(piece(prompt(0, 1000), 130, 130), 128);
        assert_eq!(piece(prompt(128, 1000), 130, 130), 128);
        assert_eq!(piece(prompt(128, 1000), 63, 130), 0);
        assert_eq!(piece(prompt(0, 100), 100, 100), 100);
        assert_eq!(piece(View { computed: 1000, known: 1300, depth: 1000, decoding: false }, 100, 100), 64);
    }

    #[test]
    fn chunks_below_64_cut_at_their_own_multiples() {
        assert_eq!(piece(prompt(0, 1000), 16, 16), 16);
        assert_eq!(piece(prompt(16, 1000), 9, 16), 0);
        assert_eq!(piece(prompt(992, 1000), 16, 16), 8);
        assert_eq!(piece(prompt(0, 3), 16, 16), 3);
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
