//! Whether tokens are drawn as often as they should be: many draws from one row of logits against its probabilities, which are
//! worked out here in f64 from what the parameters mean, and a chi-square of the two.

use std::collections::{BTreeMap, BTreeSet};

use highwater::ops::sampler::SampleRow;

/// A chi-square further out than this many sigmas of a normal is no chance.
const MOST_SIGMA: f64 = 6.0;
/// Draws that a bin of a chi-square is to have at least, by the probabilities.
const LEAST_EXPECTED: f64 = 5.0;

/// How draws agree with the probabilities.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Drawn {
    /// Tokens drawn.
    pub(super) draws: u64,
    /// How far out the chi-square is; infinite where a token was drawn that cannot be.
    pub(super) sigma: f64,
}

impl Drawn {
    pub(super) fn passed(&self) -> bool {
        self.sigma <= MOST_SIGMA
    }

    /// Holds `tokens` to what `row` says of `logits`, of which the first `decodable` can be drawn.
    pub(super) fn of(tokens: &[i32], logits: &[f32], row: &SampleRow, decodable: usize) -> Drawn {
        let probabilities = probabilities(&logits[..decodable.min(logits.len())], row);
        Drawn { draws: tokens.len() as u64, sigma: sigma(tokens, &probabilities) }
    }
}

/// The tokens that can be drawn, the likeliest first, with their probabilities: bias, repetition, frequency and presence
/// penalties, temperature, min-p, top-k with all that equal the k-th, top-p by the fewest that reach it.
fn probabilities(logits: &[f32], row: &SampleRow) -> Vec<(i32, f64)> {
    let bias: BTreeMap<u32, f32> = row.bias.iter().copied().collect();
    let counts: BTreeMap<u32, u32> = row.output_counts.iter().copied().filter(|(_, count)| *count > 0).collect();
    let seen: BTreeSet<u32> = row.prompt_ids.iter().copied().chain(counts.keys().copied()).collect();
    let adjusted = |id: usize| {
        let id = id as u32;
        let mut logit = f64::from(logits[id as usize]) + f64::from(bias.get(&id).copied().unwrap_or(0.0));
        if seen.contains(&id) {
            let penalty = f64::from(row.repetition_penalty);
            logit = if logit > 0.0 { logit / penalty } else { logit * penalty };
        }
        if let Some(count) = counts.get(&id) {
            logit -= f64::from(row.frequency_penalty) * f64::from(*count) + f64::from(row.presence_penalty);
        }
        logit
    };
    let mut kept: Vec<(i32, f64)> = (0..logits.len()).map(|id| (id as i32, adjusted(id))).collect();
    kept.retain(|(_, logit)| logit.is_finite());
    kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if row.is_greedy() {
        return kept.into_iter().take(1).map(|(id, _)| (id, 1.0)).collect();
    }
    let largest = kept.first().map_or(0.0, |(_, logit)| *logit);
    for (_, logit) in &mut kept {
        *logit = ((*logit - largest) / f64::from(row.temperature)).exp();
    }
    kept.retain(|(_, mass)| *mass >= f64::from(row.min_p));
    if let Some((_, least)) = (row.top_k as usize).checked_sub(1).and_then(|at| kept.get(at)).copied() {
        kept.retain(|(_, mass)| *mass >= least);
    }
    let total: f64 = kept.iter().map(|(_, mass)| mass).sum();
    let mut reached = 0.0;
    let fewest = kept.iter().take_while(|(_, mass)| {
        let needed = reached < f64::from(row.top_p) * total;
        reached += mass;
        needed
    });
    let fewest = fewest.count().max(1);
    kept.truncate(fewest);
    let total: f64 = kept.iter().map(|(_, mass)| mass).sum();
    kept.into_iter().map(|(id, mass)| (id, mass / total)).collect()
}

/// The chi-square of `tokens` as sigmas of a normal, by Wilson and Hilferty's cube root. Rare tokens share bins.
fn sigma(tokens: &[i32], probabilities: &[(i32, f64)]) -> f64 {
    let mut counts: BTreeMap<i32, f64> = BTreeMap::new();
    for token in tokens {
        *counts.entry(*token).or_default() += 1.0;
    }
    if tokens.is_empty() || counts.keys().any(|token| !probabilities.iter().any(|(id, _)| id == token)) {
        return f64::INFINITY;
    }
    let mut bins: Vec<(f64, f64)> = Vec::new();
    let mut open = (0.0, 0.0);
    for (id, probability) in probabilities.iter().rev() {
        open.0 += counts.get(id).copied().unwrap_or(0.0);
        open.1 += probability * tokens.len() as f64;
        if open.1 >= LEAST_EXPECTED {
            bins.push(std::mem::take(&mut open));
        }
    }
    if let Some(last) = bins.last_mut() {
        (last.0, last.1) = (last.0 + open.0, last.1 + open.1);
    }
    let Some(freedom) = bins.len().checked_sub(1).filter(|freedom| *freedom > 0) else { return 0.0 };
    let square: f64 = bins.iter().map(|(count, expected)| (count - expected).powi(2) / expected).sum();
    let (n, spread) = (freedom as f64, 2.0 / (9.0 * freedom as f64));
    ((square / n).cbrt() - (1.0 - spread)) / spread.sqrt()
}

#[cfg(test)]
mod tests {
    use super::super::stats::Draw;
    use super::*;

    fn logits() -> Vec<f32> {
        (0..300).map(|id| 30.0 * ((id * 7919 % 301) as f32 / 150.0 - 1.0)).collect()
    }

    fn sampled() -> SampleRow {
        SampleRow { temperature: 0.7, top_k: 20, top_p: 0.95, ..SampleRow::greedy() }
    }

    /// 4096 draws by these probabilities.
    fn drawn(probabilities: &[(i32, f64)]) -> Vec<i32> {
        let mut draw = Draw::new(3);
        let one = |draw: &mut Draw| {
            let at = draw.below(1 << 30) as f64 / f64::from(1 << 30);
            let mut sum = 0.0;
            let found = probabilities.iter().find(|(_, probability)| {
                sum += probability;
                at < sum
            });
            found.or(probabilities.last()).unwrap().0
        };
        (0..4096).map(|_| one(&mut draw)).collect()
    }

    #[test]
    fn a_right_sampler_passes_and_wrong_ones_do_not() {
        let (logits, row) = (logits(), sampled());
        let judged = |other: &SampleRow| Drawn::of(&drawn(&probabilities(&logits, other)), &logits, &row, 300);
        let right = judged(&row);
        assert!(right.passed() && right.draws == 4096 && right.sigma.abs() < 4.0, "{right:?}");
        for wrong in [
            SampleRow { temperature: 1.0, ..row.clone() },
            SampleRow { temperature: 0.5, ..row.clone() },
            SampleRow { top_p: 1.0, ..row.clone() },
            SampleRow { top_k: 10, ..row.clone() },
            SampleRow { bias: vec![(0, 60.0)], ..row.clone() },
            SampleRow::greedy(),
        ] {
            let wrong = judged(&wrong);
            assert!(!wrong.passed(), "{wrong:?}");
        }
        // One token again and again is as wrong as one that cannot be drawn.
        assert_eq!(Drawn::of(&[299], &logits, &SampleRow::greedy(), 300).sigma, f64::INFINITY);
        assert!(!Drawn::of(&[], &logits, &row, 300).passed());
    }

    #[test]
    fn the_largest_logit_that_can_be_decoded_is_the_only_greedy_token() {
        let greedy = SampleRow::greedy();
        let drawn = |token, decodable| Drawn::of(&[token; 9], &[1.0, 3.0, 3.0, 9.0], &greedy, decodable);
        assert_eq!((drawn(1, 3).sigma, drawn(2, 3).sigma, drawn(3, 4).sigma), (0.0, f64::INFINITY, 0.0));
    }

    #[test]
    fn probabilities_are_those_of_the_parameters() {
        let near = |found: &[(i32, f64)], wanted: &[(i32, f64)]| {
            assert_eq!(found.len(), wanted.len(), "{found:?}");
            for (found, wanted) in found.iter().zip(wanted) {
                assert!(found.0 == wanted.0 && (found.1 - wanted.1).abs() < 1e-6, "{found:?} {wanted:?}");
            }
        };
        let logits = [0.0, 4f32.ln(), 2f32.ln(), f32::NEG_INFINITY];
        let row = SampleRow { temperature: 1.0, ..SampleRow::greedy() };
        near(&probabilities(&logits, &row), &[(1, 4.0 / 7.0), (2, 2.0 / 7.0), (0, 1.0 / 7.0)]);
        near(&probabilities(&logits, &SampleRow { top_k: 2, ..row.clone() }), &[(1, 2.0 / 3.0), (2, 1.0 / 3.0)]);
        near(&probabilities(&logits, &SampleRow { top_p: 0.6, ..row.clone() }), &[(1, 2.0 / 3.0), (2, 1.0 / 3.0)]);
        near(&probabilities(&logits, &SampleRow { top_p: 0.5, ..row.clone() }), &[(1, 1.0)]);
        near(&probabilities(&logits, &SampleRow { min_p: 0.4, ..row.clone() }), &[(1, 2.0 / 3.0), (2, 1.0 / 3.0)]);
        // ln 4 halved is ln 2; then ln 2 less ln 2 is 0.
        let repeated = SampleRow { repetition_penalty: 2.0, prompt_ids: vec![1], ..row.clone() };
        near(&probabilities(&logits, &repeated), &[(1, 0.4), (2, 0.4), (0, 0.2)]);
        let present = SampleRow { presence_penalty: 2f32.ln(), output_counts: vec![(1, 3)], ..row };
        near(&probabilities(&logits, &present), &[(1, 0.4), (2, 0.4), (0, 0.2)]);
    }
}
