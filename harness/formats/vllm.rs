//! The key names of `vllm bench serve` and `vllm bench latency`: an array with an object per cell.
//!
//! There is no server and no network here: every sequence is submitted at once, so `request_rate` is `inf`, and a latency is
//! that of the whole batch in the engine, tokenisation left out. Times under `..._ms` are milliseconds, `duration`,
//! `avg_latency`, `latencies` and `percentiles` seconds, as there. Where sequences do not decode in step, the times of single
//! requests are not known but for the median TTFT, and their keys are null. Keys from `status` on are ours.

use anyhow::Result;
use serde_json::{Map, Value, json};

use super::sample::{decode_passes_ms, in_step, mean, percentile, population_deviation};
use crate::record::Row;
use crate::status::Status;

/// Percentiles of `vllm bench latency`.
const PERCENTILES: [u32; 6] = [10, 25, 50, 75, 90, 99];

/// An array of objects.
pub(super) fn json(rows: &[Row]) -> Result<String> {
    super::rows::array(&rows.iter().map(object).collect::<Vec<_>>())
}

fn object(row: &Row) -> Map<String, Value> {
    let ok = row.status == Status::Ok && row.prefill_ms.is_some();
    let passes = decode_passes_ms(row);
    // A batch takes its prefill and its decode; without either the repetition's time is not known.
    let batches_s: Vec<f64> = match row.decode_steps {
        _ if !ok => Vec::new(),
        Some(0) | None => row.prefill_samples_ms.iter().map(|ms| ms / 1e3).collect(),
        Some(_) => {
            row.prefill_samples_ms.iter().zip(&passes).map(|(prefill, decode)| (prefill + decode) / 1e3).collect()
        }
    };
    let together = ok && in_step(row);
    let steps = row.decode_steps.filter(|steps| *steps > 0).map(|steps| steps as f64);
    let own = |sample: Vec<f64>| if together { sample } else { Vec::new() };
    let ttft = own(row.prefill_samples_ms.clone());
    let tpot = own(steps.map(|steps| passes.iter().map(|ms| ms / steps).collect()).unwrap_or_default());
    let itl = own(row.tpot_samples_ms.clone());
    let e2el = own(batches_s.iter().map(|s| s * 1e3).collect());

    let duration = mean(&batches_s).filter(|s| *s > 0.0);
    let tokens = |each: Option<u64>| each.and_then(|each| each.checked_mul(row.batch));
    let (input, output) = (tokens(row.prompt), tokens(row.output));
    let rate = |tokens: Option<u64>| Some(tokens? as f64 / duration?);
    let mut object = Map::new();
    let mut put = |key: &str, value: Value| {
        object.insert(key.to_owned(), value);
    };
    put("date", compact_date(&row.time).into());
    put("endpoint_type", Value::Null);
    put("backend", "highwater".into());
    put("label", super::name::cell_name(row).into());
    put("model_id", crate::table::subject(row).into());
    put("tokenizer_id", Value::Null);
    put("num_prompts", row.batch.into());
    put("request_rate", "inf".into());
    put("burstiness", Value::Null);
    put("max_concurrency", row.batch.into());
    put("duration", duration.into());
    put("completed", if row.status == Status::Ok { row.batch } else { 0 }.into());
    put("failed", if row.status == Status::Ok { 0 } else { row.batch }.into());
    put("total_input_tokens", input.into());
    put("total_output_tokens", if row.status == Status::Ok { output } else { Some(0) }.into());
    put("request_throughput", rate(Some(row.batch)).into());
    put("request_goodput", Value::Null);
    put("output_throughput", rate(output).into());
    put("total_token_throughput", rate(input.zip(output).and_then(|(a, b)| a.checked_add(b))).into());
    put("max_output_tokens_per_s", Value::Null);
    put("max_concurrent_requests", row.batch.into());
    // The row's own median holds where its sequences are not in step, too.
    let known_ttft = row.ttft_ms.filter(|_| ok);
    for (metric, sample) in [("ttft", &ttft), ("tpot", &tpot), ("itl", &itl), ("e2el", &e2el)] {
        put(&format!("mean_{metric}_ms"), mean(sample).into());
        put(&format!("median_{metric}_ms"), percentile(sample, 50.0).into());
        put(&format!("std_{metric}_ms"), population_deviation(sample).into());
        put(&format!("p99_{metric}_ms"), percentile(sample, 99.0).into());
    }
    if ttft.is_empty() {
        put("median_ttft_ms", known_ttft.into());
    }
    put("avg_latency", mean(&batches_s).into());
    let of = |percent: u32| (percent.to_string(), Value::from(percentile(&batches_s, f64::from(percent))));
    put("percentiles", Value::Object(PERCENTILES.map(of).into_iter().collect()));
    put("latencies", json!(batches_s));
    put("status", row.status.name().into());
    put("detail", row.detail.clone().into());
    put("chunk", row.chunk.into());
    put("depth", row.depth.into());
    put("resident_bytes", row.resident_bytes.into());
    put("transient_peak_bytes", row.transient_peak_bytes.into());
    put("card", row.card.clone().into());
    put("device", row.device.clone().into());
    put("run", row.run.clone().into());
    object
}

/// `2026-11-30T12:00:00Z` as `20261130-120000`; null for a time that is not of that form.
fn compact_date(time: &str) -> Option<String> {
    let digits: String = time.chars().filter(char::is_ascii_digit).collect();
    (digits.len() == 14).then(|| format!("{}-{}", &digits[..8], &digits[8..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::ok_row;

    fn measured() -> Row {
        Row {
            prompt: Some(100),
            output: Some(3),
            decode_steps: Some(2),
            prefill_steps: Some(1),
            prefill_ms: Some(15.0),
            prefill_samples_ms: vec![10.0, 20.0],
            tpot_samples_ms: vec![1.0, 2.0, 2.0, 3.0],
            ..ok_row(512, 8, 64)
        }
    }

    #[test]
    fn requests_in_step_have_vllm_s_own_definitions() {
        let object = object(&measured());
        // Two batches: 10 + 3 ms and 20 + 5 ms.
        assert_eq!(object["latencies"], json!([0.013, 0.025]));
        assert!((object["avg_latency"].as_f64().unwrap() - 0.019).abs() < 1e-15);
        assert!((object["percentiles"]["50"].as_f64().unwrap() - 0.019).abs() < 1e-15);
        assert_eq!((&object["mean_ttft_ms"], &object["median_e2el_ms"]), (&json!(15.0), &json!(19.0)));
        // (e2el - ttft) / (output - 1): 1.5 and 2.5 ms.
        assert_eq!((&object["mean_tpot_ms"], &object["std_tpot_ms"]), (&json!(2.0), &json!(0.5)));
        assert_eq!((&object["median_itl_ms"], &object["mean_itl_ms"]), (&json!(2.0), &json!(2.0)));
        assert_eq!((&object["total_input_tokens"], &object["total_output_tokens"]), (&json!(800), &json!(24)));
        assert!((object["output_throughput"].as_f64().unwrap() - 24.0 / 0.019).abs() < 1e-9);
        assert_eq!((&object["date"], &object["request_rate"]), (&json!("20261130-120000"), &json!("inf")));
        assert_eq!(
            (&object["completed"], &object["failed"], &object["request_goodput"]),
            (&json!(8), &json!(0), &Value::Null)
        );
    }

    #[test]
    fn single_requests_are_null_where_sequences_are_not_in_step() {
        let object = object(&Row { prefill_steps: Some(4), ttft_ms: Some(12.5), ..measured() });
        assert_eq!(object["median_ttft_ms"], 12.5);
        for key in ["mean_ttft_ms", "p99_tpot_ms", "median_itl_ms", "std_e2el_ms"] {
            assert_eq!(object[key], Value::Null, "{key}");
        }
        assert!(object["avg_latency"].is_number() && object["request_throughput"].is_number());
    }

    #[test]
    fn what_does_not_fit_completes_nothing_and_has_no_times() {
        let mut oom = measured();
        oom.set_status(Status::OomPredicted, "does not fit");
        let object = object(&oom);
        assert_eq!(
            (&object["completed"], &object["failed"], &object["total_output_tokens"]),
            (&json!(0), &json!(8), &json!(0))
        );
        assert_eq!(
            (&object["duration"], &object["latencies"], &object["mean_ttft_ms"]),
            (&Value::Null, &json!([]), &Value::Null)
        );
        assert_eq!(compact_date("yesterday"), None);
    }
}
