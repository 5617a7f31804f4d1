//! What `cargo bench` prints of a kernel on a card, from plain numbers.

#[path = "../../benches/support/throughput.rs"]
mod throughput;

use criterion::Throughput;
use criterion::measurement::ValueFormatter;
use throughput::{Call, Rates};

#[test]
fn a_row_has_gb_s_tflop_s_and_the_share_of_its_ceiling() {
    let rates = Rates::new();
    let bytes = Throughput::Bytes(178_000_000);
    rates.set(Call { flops: 356_515_840, ceiling: Some(40.8e-6) });
    // 51 us.
    assert_eq!(rates.format_throughput(&bytes, 51_000.0), "3490.2 GB/s (6.99 TFLOP/s, 80% of ceiling)");
    assert_eq!(rates.format_value(51_000.0), "51.000 µs");
}

#[test]
fn what_is_not_known_of_a_call_is_left_out_and_nothing_stays_of_the_call_before() {
    let rates = Rates::new();
    let bytes = Throughput::Bytes(1000);
    assert_eq!(rates.format_throughput(&bytes, 2000.0), "0.5 GB/s");
    rates.set(Call { flops: 0, ceiling: Some(1e-6) });
    assert_eq!(rates.format_throughput(&bytes, 2000.0), "0.5 GB/s (50% of ceiling)");
    rates.set(Call { flops: 1_000_000, ceiling: None });
    assert_eq!(rates.format_throughput(&bytes, 2000.0), "0.5 GB/s (0.50 TFLOP/s)");
    rates.set(Call::default());
    assert_eq!(rates.format_throughput(&bytes, 2000.0), "0.5 GB/s");
}

#[test]
fn plots_and_files_have_criterion_s_own_units() {
    let rates = Rates::new();
    let mut values = [1000.0, 2000.0];
    assert_eq!((rates.scale_throughputs(1000.0, &Throughput::Bytes(4000), &mut values), values), ("GB/s", [4.0, 2.0]));
    let mut values = [1000.0];
    assert_eq!((rates.scale_throughputs(1000.0, &Throughput::Elements(5), &mut values), values), ("Melem/s", [5.0]));
    let mut values = [1500.0];
    assert_eq!((rates.scale_values(1500.0, &mut values), values), ("µs", [1.5]));
    let mut values = [1500.0];
    assert_eq!((rates.scale_for_machines(&mut values), values), ("ns", [1500.0]));
}
