//! What a card cannot do. A row that is faster was not all read, or not all computed.

use highwater::device::Rates;
use highwater::ops::cost::{Cost, Unit};

/// Faster than the memory's own rate by more than this is a cache's doing.
const ABOVE_MEMORY: f64 = 1.05;
/// The same of arithmetic. A datasheet's rate may be at a clock some percent below a card's highest: H200's bf16 is at
/// 1830 MHz of 1980.
const ABOVE_ARITHMETIC: f64 = 1.1;

/// Whether `bytes` in `us` are more than the memory moves.
pub(super) fn is_above_memory(bytes: u64, us: f64, rates: &Rates) -> bool {
    bytes as f64 / us * 1e6 > ABOVE_MEMORY * rates.dram
}

/// Whether these operations a second are more than the card's `unit` does at the SM clock that was sampled; where none was, at
/// its highest.
pub(super) fn is_above_arithmetic(
    operations: f64,
    unit: Unit,
    rates: &Rates,
    sampled_mhz: Option<f64>,
    boost_khz: u32,
) -> bool {
    let second = Cost { flops: 1, resident_bytes: 0, activation_bytes: 0, unit }.compute_seconds(rates);
    let share = sampled_mhz.filter(|_| boost_khz > 0).map_or(1.0, |mhz| (mhz * 1e3 / f64::from(boost_khz)).min(1.0));
    operations * second > ABOVE_ARITHMETIC * share
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATES: Rates = Rates { dram: 4e12, bf16: 1000e12, fp8: 2000e12, f32: 60e12 };

    #[test]
    fn memory_moves_no_more_than_its_rate_and_a_little() {
        // 4 MB in 1 us is all of 4 TB/s.
        assert!(!is_above_memory(4_000_000, 1.0, &RATES) && !is_above_memory(4_190_000, 1.0, &RATES));
        assert!(is_above_memory(4_210_000, 1.0, &RATES));
    }

    #[test]
    fn arithmetic_is_held_to_its_own_unit_at_the_clock_that_was_sampled() {
        let above = |operations, unit, mhz| is_above_arithmetic(operations, unit, &RATES, mhz, 2_000_000);
        for (unit, rate) in [(Unit::Bf16, 1000e12), (Unit::Fp8, 2000e12), (Unit::F32, 60e12)] {
            for (mhz, share) in [(None, 1.0), (Some(2000.0), 1.0), (Some(1500.0), 0.75)] {
                assert!(!above(1.09 * share * rate, unit, mhz), "{unit:?} {mhz:?}");
                assert!(above(1.11 * share * rate, unit, mhz), "{unit:?} {mhz:?}");
            }
        }
        // What FP8 may do, bf16 may not; a clock above the highest asks for no more.
        assert!(above(1500e12, Unit::Bf16, None) && !above(1500e12, Unit::Fp8, None));
        assert!(above(1200e12, Unit::Bf16, Some(2500.0)));
        assert!(!is_above_arithmetic(1000e12, Unit::Bf16, &RATES, Some(1.0), 0), "a highest clock that is not known");
    }
}
