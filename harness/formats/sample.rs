//! What the samples of a row say beyond their median, for the forms of programs that report it.

use crate::record::Row;
use crate::stats::quantile;

/// The mean of a sample; `None` if it is empty.
pub(super) fn mean(sample: &[f64]) -> Option<f64> {
    (!sample.is_empty()).then(|| sample.iter().sum::<f64>() / sample.len() as f64)
}

/// The standard deviation of a sample (n - 1); `None` below two values.
pub(super) fn deviation(sample: &[f64]) -> Option<f64> {
    let mean = mean(sample).filter(|_| sample.len() > 1)?;
    let squares: f64 = sample.iter().map(|value| (value - mean).powi(2)).sum();
    Some((squares / (sample.len() - 1) as f64).sqrt())
}

/// The standard deviation as numpy takes it (n); `None` if the sample is empty.
pub(super) fn population_deviation(sample: &[f64]) -> Option<f64> {
    let mean = mean(sample)?;
    Some((sample.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / sample.len() as f64).sqrt())
}

/// The `percent`-th percentile, linearly interpolated; `None` if the sample is empty.
pub(super) fn percentile(sample: &[f64], percent: f64) -> Option<f64> {
    let mut sorted = sample.to_vec();
    sorted.sort_by(f64::total_cmp);
    (!sorted.is_empty()).then(|| quantile(&sorted, percent / 100.0))
}

/// Whether every sequence takes part in every decode step, as one prefill step or one sequence makes sure of.
pub(super) fn in_step(row: &Row) -> bool {
    row.batch == 1 || row.prefill_steps == Some(1)
}

/// The decode time of each repetition in ms; empty where the samples do not say where a repetition ends.
pub(super) fn decode_passes_ms(row: &Row) -> Vec<f64> {
    let steps = row.decode_steps.unwrap_or(0) as usize;
    let passes = row.prefill_samples_ms.len();
    if steps == 0 || steps.checked_mul(passes) != Some(row.tpot_samples_ms.len()) {
        return Vec::new();
    }
    row.tpot_samples_ms.chunks(steps).map(|pass| pass.iter().sum()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_are_those_of_numpy() {
        // numpy: mean 3.0, std(ddof=1) 1.5811388300841898, std 1.4142135623730951, percentile 99 4.96.
        let sample = [5.0, 1.0, 2.0, 4.0, 3.0];
        assert_eq!(mean(&sample), Some(3.0));
        assert!((deviation(&sample).unwrap() - 1.581_138_830_084_189_8).abs() < 1e-15);
        assert!((population_deviation(&sample).unwrap() - std::f64::consts::SQRT_2).abs() < 1e-15);
        assert!((percentile(&sample, 99.0).unwrap() - 4.96).abs() < 1e-12);
        assert_eq!((mean(&[]), deviation(&[1.0]), percentile(&[], 50.0)), (None, None, None));
    }

    #[test]
    fn passes_are_cut_only_where_the_samples_say_where() {
        let row = Row {
            decode_steps: Some(2),
            prefill_samples_ms: vec![9.0; 2],
            tpot_samples_ms: vec![1.0, 2.0, 3.0, 4.0],
            ..Row::default()
        };
        assert_eq!(decode_passes_ms(&row), [3.0, 7.0]);
        let odd = Row { decode_steps: Some(3), ..row.clone() };
        assert!(decode_passes_ms(&odd).is_empty());
        assert!(decode_passes_ms(&Row { decode_steps: None, ..row }).is_empty());
    }
}
