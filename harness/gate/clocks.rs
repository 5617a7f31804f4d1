//! The clocks two rows were measured at: whether their times may be compared, and what held the clocks down.

use std::collections::BTreeMap;

use crate::hygiene::CLOCK_DRIFT;
use crate::record::Row;

/// Which row's clock was the lower one and why times at such clocks are not compared; `None` where they are near enough, or
/// a row does not say its clock.
pub(super) fn apart(base: &Row, candidate: &Row) -> Option<(Slower, String)> {
    let clock = |row: &Row| row.sm_clock_mhz.filter(|mhz| mhz.is_finite() && *mhz > 0.0);
    let (before, after) = (clock(base)?, clock(candidate)?);
    if before.min(after) >= before.max(after) * (1.0 - CLOCK_DRIFT) {
        return None;
    }
    let cycles = [
        ("prefill", base.prefill_kcycles, candidate.prefill_kcycles),
        ("TPOT", base.tpot_kcycles, candidate.tpot_kcycles),
    ];
    let cycles = cycles.into_iter().filter_map(|(name, before, after)| {
        let change = after? / before.filter(|cycles| *cycles > 0.0)? - 1.0;
        Some(format!("{name} {:+.1} %", change * 100.0))
    });
    let cycles: Vec<String> = cycles.collect();
    let cycles = if cycles.is_empty() { String::new() } else { format!("; in cycles {}", cycles.join(", ")) };
    let slower = if before < after { Slower::Baseline } else { Slower::Candidate };
    let text = format!("the SM clock was {before:.0} MHz in the baseline and {after:.0} MHz in the candidate{cycles}");
    Some((slower, text))
}

/// The run whose clock was the lower one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Slower {
    Baseline,
    Candidate,
}

/// A line for each pair of reasons that held clocks down in either run, with the clocks of the cells it is of.
pub(super) fn held<'a>(pairs: impl Iterator<Item = (&'a Row, &'a Row)>) -> Vec<String> {
    type Clocks = (usize, [Vec<f64>; 2]);
    let mut found: BTreeMap<[&str; 2], Clocks> = BTreeMap::new();
    for (base, candidate) in pairs {
        let why = |row: &'a Row| row.throttled.as_deref().filter(|why| !why.is_empty()).unwrap_or("nothing");
        let reasons = [why(base), why(candidate)];
        if reasons == ["nothing"; 2] {
            continue;
        }
        let (cells, clocks) = found.entry(reasons).or_default();
        *cells += 1;
        for (clocks, row) in clocks.iter_mut().zip([base, candidate]) {
            clocks.extend(row.sm_clock_mhz);
        }
    }
    let line = |([before, after], (cells, [was, is])): (&[&str; 2], &Clocks)| {
        format!(
            "clocks were held down by {before} in the baseline ({}) and by {after} in the candidate ({}) ({cells} cells)",
            range(was),
            range(is)
        )
    };
    found.iter().map(line).collect()
}

fn range(clocks: &[f64]) -> String {
    let (least, most) =
        (clocks.iter().copied().fold(f64::INFINITY, f64::min), clocks.iter().copied().fold(0.0, f64::max));
    match clocks {
        [] => "SM clock not said".into(),
        _ if least == most => format!("SM clock {least:.0} MHz"),
        _ => format!("SM clocks {least:.0} to {most:.0} MHz"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::ok_row;

    fn at(mhz: f64) -> Row {
        let (prefill_kcycles, tpot_kcycles) = (Some(200.0 * mhz), Some(10.0 * mhz));
        Row { sm_clock_mhz: Some(mhz), prefill_kcycles, tpot_kcycles, ..ok_row(512, 1, 64) }
    }

    #[test]
    fn clocks_further_apart_than_a_repetition_s_may_be_say_both_and_the_cycles() {
        let slow = Row { tpot_kcycles: Some(19_998.0), prefill_kcycles: None, ..at(900.0) };
        let (slower, text) = apart(&at(1980.0), &slow).unwrap();
        assert_eq!(slower, Slower::Candidate);
        assert_eq!(
            text,
            "the SM clock was 1980 MHz in the baseline and 900 MHz in the candidate; in cycles TPOT +1.0 %"
        );
        assert_eq!(apart(&slow, &at(1980.0)).unwrap().0, Slower::Baseline);
        assert_eq!(apart(&at(2000.0), &at(1900.0)), None, "exactly the bound");
        assert!(apart(&at(2000.0), &at(1899.0)).is_some());
        assert_eq!(apart(&at(1980.0), &Row { sm_clock_mhz: None, ..at(900.0) }), None);
    }

    #[test]
    fn what_held_clocks_is_a_line_for_each_pair_of_reasons() {
        let held_by = |why: &str, mhz: f64| Row { throttled: Some(why.into()), ..at(mhz) };
        let (free, power) = (held_by("", 1980.0), held_by("the power limit", 1590.0));
        let other = held_by("the power limit", 1605.0);
        let pairs = [(&free, &free), (&free, &power), (&free, &other), (&power, &power)];
        let lines = held(pairs.into_iter());
        assert_eq!(
            lines,
            [
                "clocks were held down by nothing in the baseline (SM clock 1980 MHz) and by the power limit in the candidate \
                 (SM clocks 1590 to 1605 MHz) (2 cells)",
                "clocks were held down by the power limit in the baseline (SM clock 1590 MHz) and by the power limit in the \
                 candidate (SM clock 1590 MHz) (1 cells)",
            ]
        );
    }
}
