//! Bencher Metric Format and github-action-benchmark: a named number per cell, for services that draw it over commits.
//!
//! Speeds are their medians with their interval; bytes have none. Whether a cell fits is a number too (`does-not-fit`, 0 or
//! 1), so that a cell that ran out of memory is seen by its own alert and does not just stop reporting. Cells that failed
//! report nothing. Of two rows of one name the later counts.

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::{Map, Value, json};

use super::name::cell_name;
use crate::record::Row;
use crate::status::Status;

/// A number of a cell where smaller is better.
struct Measure {
    name: &'static str,
    unit: &'static str,
    value: f64,
    interval: Option<(f64, f64)>,
}

/// The numbers of a row; none for one that failed.
fn measures(row: &Row) -> Vec<Measure> {
    let mut measures = Vec::new();
    let mut add = |name, unit, value: Option<f64>, interval: Option<(f64, f64)>| {
        let interval = interval.filter(|(low, high)| low.is_finite() && high.is_finite());
        measures.extend(value.filter(|value| value.is_finite()).map(|value| Measure { name, unit, value, interval }));
    };
    let bytes = |value: Option<u64>| value.map(|bytes| bytes as f64);
    match row.status {
        Status::Ok => {
            add("does-not-fit", "cells", Some(0.0), None);
            add("transient-peak-bytes", "bytes", bytes(row.transient_peak_bytes), None);
            add("resident-bytes", "bytes", bytes(row.resident_bytes), None);
            add("prefill-ms", "ms", row.prefill_ms, row.prefill_low_ms.zip(row.prefill_high_ms));
            add("ttft-ms", "ms", row.ttft_ms, None);
            add("tpot-ms", "ms", row.tpot_ms, row.tpot_low_ms.zip(row.tpot_high_ms));
        }
        status if status.is_oom() => add("does-not-fit", "cells", Some(1.0), None),
        _ => {}
    }
    measures
}

/// `{name: {measure: {value, lower_value, upper_value}}}`.
pub(super) fn bmf(rows: &[Row]) -> Result<String> {
    let mut all = Map::new();
    for row in rows {
        let mut own = Map::new();
        for measure in measures(row) {
            let mut metric = Map::from_iter([("value".to_owned(), Value::from(measure.value))]);
            if let Some((low, high)) = measure.interval {
                metric.insert("lower_value".into(), low.into());
                metric.insert("upper_value".into(), high.into());
            }
            own.insert(measure.name.into(), Value::Object(metric));
        }
        if own.is_empty() {
            all.remove(&cell_name(row));
        } else {
            all.insert(cell_name(row), Value::Object(own));
        }
    }
    Ok(serde_json::to_string_pretty(&all)? + "\n")
}

/// `[{name, unit, value, range, extra}]`.
pub(super) fn github(rows: &[Row]) -> Result<String> {
    let names: Vec<String> = rows.iter().map(cell_name).collect();
    let last: BTreeMap<&String, usize> = names.iter().enumerate().map(|(at, name)| (name, at)).collect();
    let mut entries = Vec::new();
    for (at, (row, name)) in rows.iter().zip(&names).enumerate() {
        if last[name] != at {
            continue;
        }
        for measure in measures(row) {
            let mut entry = json!({
                "name": format!("{name} {}", measure.name),
                "unit": measure.unit,
                "value": measure.value,
            });
            if let Some((low, high)) = measure.interval {
                entry["range"] = format!("{low} to {high}").into();
            }
            if let Some(detail) = &row.detail {
                entry["extra"] = detail.clone().into();
            }
            entries.push(entry);
        }
    }
    super::rows::array(&entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::ok_row;

    fn rows() -> Vec<Row> {
        let ok = Row {
            prefill_ms: Some(2.5),
            prefill_low_ms: Some(2.25),
            prefill_high_ms: Some(2.75),
            ttft_ms: Some(2.625),
            ..ok_row(512, 1, 64)
        };
        let mut oom = ok_row(8192, 1, 64);
        oom.set_status(Status::Oom, "logits needs 9 B");
        let mut failed = ok_row(1024, 1, 64);
        failed.set_status(Status::Error, "panicked");
        vec![ok, oom, failed]
    }

    #[test]
    fn bencher_has_medians_with_their_interval_bytes_without_and_what_does_not_fit() {
        let rows = rows();
        let all: Map<String, Value> = serde_json::from_str(&bmf(&rows).unwrap()).unwrap();
        assert_eq!(all.len(), 2, "a cell that failed reports nothing");
        let ok = &all[&cell_name(&rows[0])];
        assert_eq!(ok["prefill-ms"], json!({"value": 2.5, "lower_value": 2.25, "upper_value": 2.75}));
        assert_eq!(ok["tpot-ms"], json!({"value": 0.125}));
        assert_eq!(ok["transient-peak-bytes"], json!({"value": 64.0}));
        assert_eq!(ok["does-not-fit"], json!({"value": 0.0}));
        assert_eq!(all[&cell_name(&rows[1])], json!({"does-not-fit": {"value": 1.0}}));
        for name in all.keys() {
            assert!(name.len() <= 1024, "Bencher takes names of up to 1024 characters");
        }
    }

    #[test]
    fn of_two_rows_of_one_cell_the_later_counts() {
        let mut rows = rows();
        rows.push(Row { tpot_ms: Some(0.25), ..rows[0].clone() });
        let all: Map<String, Value> = serde_json::from_str(&bmf(&rows).unwrap()).unwrap();
        assert_eq!(all[&cell_name(&rows[0])]["tpot-ms"]["value"], 0.25);
        let entries: Vec<Value> = serde_json::from_str(&github(&rows).unwrap()).unwrap();
        let mut names: Vec<&str> = entries.iter().map(|entry| entry["name"].as_str().unwrap()).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
        let tpot = entries.iter().find(|entry| entry["name"].as_str().unwrap().ends_with("tpot-ms")).unwrap();
        assert_eq!((&tpot["value"], &tpot["unit"]), (&json!(0.25), &json!("ms")));
        let mut last_failed = rows.clone();
        last_failed[3].set_status(Status::Lost, "lost");
        let all: Map<String, Value> = serde_json::from_str(&bmf(&last_failed).unwrap()).unwrap();
        assert!(!all.contains_key(&cell_name(&rows[0])), "an earlier row never stands in for a failed one");
    }

    #[test]
    fn the_action_has_a_range_where_there_is_an_interval_and_says_why_a_cell_does_not_fit() {
        let entries: Vec<Value> = serde_json::from_str(&github(&rows()).unwrap()).unwrap();
        let find = |end: &str| entries.iter().find(|entry| entry["name"].as_str().unwrap().ends_with(end)).unwrap();
        assert_eq!(find("prefill-ms")["range"], "2.25 to 2.75");
        assert!(find("tpot-ms").get("range").is_none());
        let oom = entries.iter().find(|entry| entry["value"] == 1.0).unwrap();
        assert_eq!((&oom["extra"], &oom["unit"]), (&json!("logits needs 9 B"), &json!("cells")));
    }
}
