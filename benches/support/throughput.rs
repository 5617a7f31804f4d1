//! What criterion prints of a kernel on a card: GB/s, TFLOP/s, and the share of its ceiling, which was measured in the same
//! process.

use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

use criterion::Throughput;
use criterion::measurement::{Measurement, ValueFormatter, WallTime};

static WALL: WallTime = WallTime;

/// What one call of a benchmark does, beside the bytes that criterion knows.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Call {
    /// Operations; 0 where they say nothing.
    pub(crate) flops: u64,
    /// Seconds it takes at best.
    pub(crate) ceiling: Option<f64>,
}

/// Formats times of the benchmark under way, in ns, as wall-clock time is, and rates by what a call of it does.
#[derive(Debug)]
pub(crate) struct Rates(Mutex<Call>);

impl Rates {
    pub(crate) const fn new() -> Rates {
        Rates(Mutex::new(Call { flops: 0, ceiling: None }))
    }

    /// From here on times are of such a call.
    pub(crate) fn set(&self, call: Call) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = call;
    }
}

impl ValueFormatter for Rates {
    fn format_throughput(&self, throughput: &Throughput, ns: f64) -> String {
        let Call { flops, ceiling } = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rate = [ns];
        let unit = self.scale_throughputs(ns, throughput, &mut rate);
        let mut text = format!("{:.1} {unit}", rate[0]);
        let operations = (flops > 0).then(|| format!("{:.2} TFLOP/s", flops as f64 / ns / 1e3));
        let share = ceiling.map(|seconds| format!("{:.0}% of ceiling", 100.0 * seconds * 1e9 / ns));
        let others: Vec<String> = operations.into_iter().chain(share).collect();
        if !others.is_empty() {
            let _ = write!(text, " ({})", others.join(", "));
        }
        text
    }

    fn scale_values(&self, typical: f64, values: &mut [f64]) -> &'static str {
        WALL.formatter().scale_values(typical, values)
    }

    /// Bytes are always in GB/s: rows are read beside each other.
    fn scale_throughputs(&self, typical: f64, throughput: &Throughput, values: &mut [f64]) -> &'static str {
        let Throughput::Bytes(bytes) = *throughput else {
            return WALL.formatter().scale_throughputs(typical, throughput, values);
        };
        for ns in values.iter_mut() {
            *ns = bytes as f64 / *ns;
        }
        "GB/s"
    }

    fn scale_for_machines(&self, values: &mut [f64]) -> &'static str {
        WALL.formatter().scale_for_machines(values)
    }
}
