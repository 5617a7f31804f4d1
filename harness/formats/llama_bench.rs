//! The key names of llama.cpp's `llama-bench`, in its order: a record of prefill (`pp512`) and one of decode (`tg32`) per
//! cell.
//!
//! `n_gen` is the decode steps that were timed, and a decode record's `n_depth` is all that stood in the cache before them.
//! `samples_ns` has one value per repetition. A cell that did not end `ok`, or that no clock ran for, is one record with
//! both lengths and null times. Keys after `samples_ts` are ours: llama-bench knows one sequence, no out-of-memory row and
//! no device memory. Keys it has and this program has no meaning for are null.

use anyhow::Result;
use serde_json::{Map, Value, json};

use super::sample::{decode_passes_ms, deviation, in_step, mean};
use crate::record::Row;
use crate::status::Status;

/// llama-bench's columns in its own order, with their SQL types; then ours.
const COLUMNS: [(&str, &str); 51] = [
    ("build_commit", "TEXT"),
    ("build_number", "INTEGER"),
    ("cpu_info", "TEXT"),
    ("gpu_info", "TEXT"),
    ("backends", "TEXT"),
    ("model_filename", "TEXT"),
    ("model_type", "TEXT"),
    ("model_size", "INTEGER"),
    ("model_n_params", "INTEGER"),
    ("n_batch", "INTEGER"),
    ("n_ubatch", "INTEGER"),
    ("n_threads", "INTEGER"),
    ("cpu_mask", "TEXT"),
    ("cpu_strict", "INTEGER"),
    ("poll", "INTEGER"),
    ("type_k", "TEXT"),
    ("type_v", "TEXT"),
    ("n_gpu_layers", "INTEGER"),
    ("n_cpu_moe", "INTEGER"),
    ("split_mode", "TEXT"),
    ("main_gpu", "INTEGER"),
    ("no_kv_offload", "INTEGER"),
    ("flash_attn", "INTEGER"),
    ("devices", "TEXT"),
    ("tensor_split", "TEXT"),
    ("tensor_buft_overrides", "TEXT"),
    ("load_mode", "TEXT"),
    ("embeddings", "INTEGER"),
    ("no_op_offload", "INTEGER"),
    ("no_host", "INTEGER"),
    ("fit_target", "INTEGER"),
    ("fit_min_ctx", "INTEGER"),
    ("n_prompt", "INTEGER"),
    ("n_gen", "INTEGER"),
    ("n_depth", "INTEGER"),
    ("test_time", "TEXT"),
    ("avg_ns", "INTEGER"),
    ("stddev_ns", "INTEGER"),
    ("avg_ts", "REAL"),
    ("stddev_ts", "REAL"),
    ("samples_ns", "TEXT"),
    ("samples_ts", "TEXT"),
    ("test", "TEXT"),
    ("n_seqs", "INTEGER"),
    ("status", "TEXT"),
    ("detail", "TEXT"),
    ("resident_bytes", "INTEGER"),
    ("transient_peak_bytes", "INTEGER"),
    ("card", "TEXT"),
    ("device", "TEXT"),
    ("run", "TEXT"),
];

/// What one record times.
struct Test {
    prompt: Option<u64>,
    gen_steps: u64,
    depth: u64,
    /// Wall time of each repetition, ms.
    samples_ms: Vec<f64>,
    /// Tokens of one repetition, over all sequences; none where it is not known.
    tokens: Option<u64>,
}

impl Test {
    /// llama-bench's label, as `pp512`, `tg128`, `pp512+tg128`, and ` @ d4096` behind it.
    fn label(&self) -> String {
        let pp = self.prompt.filter(|n| *n > 0).map(|n| format!("pp{n}"));
        let tg = (self.gen_steps > 0).then(|| format!("tg{}", self.gen_steps));
        let label = pp.into_iter().chain(tg).collect::<Vec<_>>().join("+");
        if self.depth > 0 { format!("{label} @ d{}", self.depth) } else { label }
    }
}

fn tests(row: &Row) -> Vec<Test> {
    let mut tests = Vec::new();
    if row.status == Status::Ok && row.prefill_ms.is_some() {
        let tokens = row.prompt.and_then(|prompt| prompt.checked_mul(row.batch));
        let samples_ms = row.prefill_samples_ms.clone();
        tests.push(Test { prompt: row.prompt, gen_steps: 0, depth: row.depth, samples_ms, tokens });
    }
    if let (Status::Ok, Some(steps), true) = (row.status, row.decode_steps, row.tpot_ms.is_some()) {
        let tokens = steps.checked_mul(row.batch).filter(|_| in_step(row));
        let depth = row.depth.saturating_add(row.prompt.unwrap_or(0));
        tests.push(Test { prompt: Some(0), gen_steps: steps, depth, samples_ms: decode_passes_ms(row), tokens });
    }
    if tests.is_empty() {
        let gen_steps = row.output.unwrap_or(0);
        tests.push(Test { prompt: row.prompt, gen_steps, depth: row.depth, samples_ms: Vec::new(), tokens: None });
    }
    tests
}

fn record(row: &Row, test: &Test) -> Map<String, Value> {
    let ns: Vec<f64> = test.samples_ms.iter().map(|ms| ms * 1e6).collect();
    let ts: Vec<f64> = test
        .tokens
        .map(|tokens| test.samples_ms.iter().map(|ms| 1000.0 * tokens as f64 / ms).collect())
        .unwrap_or_default();
    let whole = |ns: f64| ns.round() as u64;
    let on_card = ["cuda", "plan"].contains(&row.device.as_str());
    let values = json!({
        "build_commit": row.git_sha,
        "cpu_info": row.cpu,
        "gpu_info": row.gpu.clone().or_else(|| on_card.then(|| row.card.clone())),
        "backends": row.device.to_uppercase(),
        "model_filename": row.model,
        "model_type": crate::table::subject(row),
        "model_size": row.weights_bytes,
        "n_batch": row.chunk,
        "n_ubatch": row.chunk,
        "n_threads": row.cores,
        "type_k": row.kv_dtype,
        "type_v": row.kv_dtype,
        "n_prompt": test.prompt,
        "n_gen": test.gen_steps,
        "n_depth": test.depth,
        "test_time": row.time,
        "avg_ns": mean(&ns).map(whole),
        "stddev_ns": deviation(&ns).map(whole),
        "avg_ts": mean(&ts).filter(|ts| ts.is_finite()),
        "stddev_ts": deviation(&ts).filter(|ts| ts.is_finite()),
        "samples_ns": ns.iter().copied().map(whole).collect::<Vec<_>>(),
        "samples_ts": ts,
        "test": test.label(),
        "n_seqs": row.batch,
        "status": row.status.name(),
        "detail": row.detail,
        "resident_bytes": row.resident_bytes,
        "transient_peak_bytes": row.transient_peak_bytes,
        "card": row.card,
        "device": row.device,
        "run": row.run,
    });
    let of = |column: &str| values.get(column).cloned().unwrap_or(Value::Null);
    COLUMNS.iter().map(|(column, _)| ((*column).to_owned(), of(column))).collect()
}

fn records(rows: &[Row]) -> Vec<Map<String, Value>> {
    rows.iter().flat_map(|row| tests(row).into_iter().map(|test| record(row, &test))).collect()
}

/// An array of records.
pub(super) fn json(rows: &[Row]) -> Result<String> {
    super::rows::array(&records(rows))
}

/// A record a line.
pub(super) fn jsonl(rows: &[Row]) -> Result<String> {
    super::rows::lines(&records(rows))
}

/// `CREATE TABLE llama_bench` and its rows.
pub(super) fn sql(rows: &[Row]) -> Result<String> {
    super::rows::table("llama_bench", &COLUMNS.map(|(column, kind)| (column.to_owned(), kind)), &records(rows))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::ok_row;

    fn measured() -> Row {
        Row {
            vram_bytes: None,
            prompt: Some(512),
            output: Some(3),
            depth: 4096,
            decode_steps: Some(2),
            prefill_steps: Some(1),
            prefill_ms: Some(20.0),
            prefill_samples_ms: vec![10.0, 20.0],
            tpot_samples_ms: vec![1.0, 2.0, 2.0, 3.0],
            ..ok_row(512, 8, 64)
        }
    }

    #[test]
    fn a_cell_is_a_prefill_and_a_decode_record_of_its_samples() {
        let records = records(&[measured()]);
        assert_eq!(records.len(), 2);
        let (pp, tg) = (&records[0], &records[1]);
        assert_eq!((&pp["test"], &tg["test"]), (&json!("pp512 @ d4096"), &json!("tg2 @ d4608")));
        assert_eq!((&pp["n_prompt"], &pp["n_gen"], &pp["n_depth"]), (&json!(512), &json!(0), &json!(4096)));
        assert_eq!((&tg["n_prompt"], &tg["n_gen"], &tg["n_depth"]), (&json!(0), &json!(2), &json!(4608)));
        assert_eq!(pp["samples_ns"], json!([10_000_000, 20_000_000]));
        assert_eq!(pp["avg_ns"], 15_000_000);
        // 8 x 512 tokens in 10 and in 20 ms.
        assert_eq!(pp["samples_ts"], json!([409_600.0, 204_800.0]));
        assert_eq!(pp["avg_ts"], 307_200.0);
        assert!((pp["stddev_ts"].as_f64().unwrap() - 144_815.468_787_004_3).abs() < 1e-6);
        // Two passes of two steps: 3 and 5 ms for 16 tokens.
        assert_eq!(tg["samples_ns"], json!([3_000_000, 5_000_000]));
        assert_eq!(tg["samples_ts"], json!([16_000.0 / 3.0, 3200.0]));
        let keys: Vec<&str> = pp.keys().map(String::as_str).collect();
        assert_eq!(keys, COLUMNS.map(|(column, _)| column));
        assert_eq!(
            &keys[32..42],
            [
                "n_prompt",
                "n_gen",
                "n_depth",
                "test_time",
                "avg_ns",
                "stddev_ns",
                "avg_ts",
                "stddev_ts",
                "samples_ns",
                "samples_ts"
            ]
        );
    }

    #[test]
    fn tokens_that_are_not_known_are_null_and_so_is_a_deviation_of_one_sample() {
        let staggered = Row { prefill_steps: Some(3), ..measured() };
        let tg = &records(&[staggered])[1];
        assert_eq!((&tg["avg_ts"], &tg["samples_ts"]), (&Value::Null, &json!([])));
        assert_eq!(tg["avg_ns"], 4_000_000);
        let once = Row { prefill_samples_ms: vec![10.0], tpot_samples_ms: vec![1.0, 2.0], ..measured() };
        assert_eq!(records(&[once])[0]["stddev_ns"], Value::Null);
    }

    #[test]
    fn a_cell_that_does_not_fit_is_a_record_without_times() {
        let mut oom = measured();
        oom.set_status(Status::Oom, "logits needs 9 B");
        let records = records(&[oom]);
        assert_eq!(records.len(), 1);
        let record = &records[0];
        assert_eq!((&record["test"], &record["status"]), (&json!("pp512+tg3 @ d4096"), &json!("oom")));
        assert_eq!((&record["avg_ns"], &record["avg_ts"]), (&Value::Null, &Value::Null));
        assert_eq!(record["detail"], "logits needs 9 B");
    }
}
