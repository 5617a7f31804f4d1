//! What a cell is called wherever a name has to tell it from all others: equal names are the same cell.

use std::fmt::Write as _;

use crate::record::Row;
use crate::table::subject;

/// `MODEL@RECIPE CARD DEVICE AXES...`: every setting of the cell, those at their usual value left out. Nothing of the run
/// (time, commit, driver) is in it, so that the same cell of two runs has one name. Control characters are spaces.
pub(crate) fn cell_name(row: &Row) -> String {
    let mut name = format!("{} {} {}", subject(row), row.card, row.device);
    let mut part = |key: &str, value: Option<&dyn std::fmt::Display>| {
        if let Some(value) = value {
            let _ = write!(name, " {key}={value}");
        }
    };
    part("layers", shown(row.layers.as_ref()));
    part("workload", shown(row.workload.as_ref().filter(|workload| *workload != "fixed")));
    part("chunk", Some(&row.chunk));
    part("batch", Some(&row.batch));
    part("depth", Some(&row.depth));
    part("prompt", shown(row.prompt.as_ref()));
    part("output", shown(row.output.as_ref()));
    part("kv-tokens", shown(row.kv_tokens.as_ref()));
    let gib = row.vram_bytes.map(|bytes| format!("{:.2}GiB", bytes as f64 / f64::from(1 << 30)));
    part("vram", shown(gib.as_ref()));
    let unless = |value: &String, usual: &str| (!value.is_empty() && value != usual).then(|| value.clone());
    part("dtype", shown(unless(&row.dtype, "bf16").as_ref()));
    part("logits", shown(unless(&row.logits_dtype, "f32").as_ref()));
    part("state", shown(unless(&row.state_dtype, "f32").as_ref()));
    part("kv-dtype", shown(unless(&row.kv_dtype, &row.dtype).as_ref()));
    part("act-quant", shown(row.act_quant.as_ref().filter(|quant| *quant != "checkpoint")));
    part("batch-invariant", shown(row.batch_invariant.filter(|on| *on).as_ref()));
    part("fault", shown(row.fault.as_ref()));
    name.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn shown<T: std::fmt::Display>(value: Option<&T>) -> Option<&dyn std::fmt::Display> {
    value.map(|value| value as &dyn std::fmt::Display)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::ok_row;

    type Change = (&'static str, fn(&mut Row));

    #[test]
    fn a_name_holds_what_tells_cells_apart_and_nothing_of_the_run() {
        let row = Row {
            model: "qwen3.5-9b".into(),
            dtype: "bf16".into(),
            kv_dtype: "bf16".into(),
            logits_dtype: "f32".into(),
            vram_bytes: Some(24 << 30),
            prompt: Some(8192),
            output: Some(32),
            ..ok_row(512, 8, 1)
        };
        let usual = "qwen3.5-9b@bf16 host cpu layers=4 chunk=512 batch=8 depth=0 prompt=8192 output=32 vram=24.00GiB";
        assert_eq!(cell_name(&row), usual);
        let changes: [Change; 8] = [
            (" workload=ladder", |r| r.workload = Some("ladder".into())),
            (" kv-dtype=fp8", |r| r.kv_dtype = "fp8".into()),
            (" logits=bf16", |r| r.logits_dtype = "bf16".into()),
            (" act-quant=off", |r| r.act_quant = Some("off".into())),
            (" batch-invariant=true", |r| r.batch_invariant = Some(true)),
            (" kv-tokens=64", |r| r.kv_tokens = Some(64)),
            (" fault=x y", |r| r.fault = Some("x\ny".into())),
            (" depth=7", |r| r.depth = 7),
        ];
        for (part, change) in changes {
            let mut other = row.clone();
            change(&mut other);
            assert!(cell_name(&other).contains(part), "{part} in {}", cell_name(&other));
        }
        let other_run = Row {
            run: "r2".into(),
            time: "t".into(),
            git_sha: Some("x".into()),
            batch_invariant: Some(false),
            workload: Some("fixed".into()),
            ..row.clone()
        };
        assert_eq!(cell_name(&other_run), usual);
    }
}
