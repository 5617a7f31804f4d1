//! Tests of `compare`: what each pair of rows is found to be, and the exit code of it.

use std::path::Path;

use super::*;
use crate::owners::Owner;
use crate::record::tests::ok_row;

const TERMS: Terms = Terms { threshold: 0.01, strict: false, force: false, subset: false };

/// A row that may be a speed baseline: twelve repetitions of 10 ms and 100 ms, a tenth of a percent apart.
fn row(chunk: u64) -> Row {
    let around = |ms: f64| (0..12).map(|i| ms * (1.0 + 0.0001 * f64::from(i * 5 % 12))).collect::<Vec<f64>>();
    Row {
        model: "tiny".into(),
        checked: Some(true),
        prefill_samples_ms: around(100.0),
        tpot_passes_ms: around(10.0),
        argv: "highwater sweep tiny --axis chunk=64,128".into(),
        ..ok_row(chunk, 1, 64)
    }
}

fn run(rows: Vec<Row>) -> Run {
    Run::of(Path::new("run"), rows, Vec::new())
}

fn slower(row: &Row, by: f64) -> Row {
    Row { tpot_passes_ms: row.tpot_passes_ms.iter().map(|ms| ms * by).collect(), ..row.clone() }
}

fn larger(row: &Row, by: u64, tag: &str) -> Row {
    let mut row = row.clone();
    row.transient_peak_bytes = row.transient_peak_bytes.map(|bytes| bytes + by);
    row.slab_bytes = row.slab_bytes.map(|bytes| bytes + by);
    row.owners.push(Owner { tag: tag.into(), bytes: by });
    row
}

fn oom(row: &Row) -> Row {
    let mut row = Row { kv_tokens: None, ..row.clone() };
    row.set_status(Status::OomPredicted, "logits needs 9 B\nmore");
    row
}

fn judge(base: Vec<Row>, candidate: Vec<Row>, terms: Terms) -> Report {
    compare(&run(base), &run(candidate), terms).unwrap_or_else(|failure| panic!("{}", failure.render()))
}

fn kinds(report: &Report) -> Vec<Kind> {
    report.findings.iter().map(|finding| finding.kind).collect()
}

#[test]
fn equal_runs_find_nothing() {
    let report = judge(vec![row(64), row(128)], vec![row(64), row(128)], Terms { strict: true, ..TERMS });
    assert_eq!((kinds(&report), report.exit_code(), report.cells), (vec![], 0, 2));
    assert!(report.compared.iter().all(|compared| compared.comparison.verdict == Verdict::Same));
    assert_eq!(report.compared.len(), 4);
}

#[test]
fn each_change_is_found_as_what_it_is() {
    let base = row(64);
    for (candidate, found, code) in vec![
        (slower(&base, 1.03), vec![Kind::SpeedRegression], 3),
        (slower(&base, 0.97), vec![Kind::Better], 0),
        (larger(&base, 1, "x"), vec![Kind::MemoryRegression], 4),
        (oom(&base), vec![Kind::FrontierRegression, Kind::FrontierRegression], 4),
        (larger(&slower(&base, 0.97), 1, "x"), vec![Kind::MemoryRegression, Kind::Better, Kind::Trade], 4),
        (larger(&slower(&base, 1.03), 1, "x"), vec![Kind::MemoryRegression, Kind::SpeedRegression], 4),
        (Row { checked: Some(false), ..base.clone() }, vec![Kind::Failure], 1),
        (Row { checked: None, ..base.clone() }, vec![Kind::Inconclusive], 0),
        (Row { dirty: Some("throttled".into()), ..base.clone() }, vec![Kind::Inconclusive], 0),
        (Row { fault: Some("slow-kernel".into()), ..base.clone() }, vec![Kind::Note], 0),
        (Row { kv_bytes: None, ..base.clone() }, vec![Kind::Failure], 1),
    ] {
        let report = judge(vec![base.clone()], vec![candidate], TERMS);
        assert_eq!((kinds(&report), report.exit_code()), (found, code), "{}", report.text());
    }
    // The other way round: bytes saved for time.
    let report = judge(vec![larger(&base, 8, "x")], vec![slower(&base, 1.03)], TERMS);
    assert_eq!(kinds(&report), [Kind::Better, Kind::SpeedRegression, Kind::Trade]);
    assert!(report.text().contains("TRADE: tiny@bf16 cpu host chunk 64 batch 1 depth 0: gains memory and loses TPOT"));
}

#[test]
fn growth_names_its_owner_in_one_line() {
    let report = judge(vec![row(64)], vec![larger(&row(64), 12 << 20, "decode.extra")], TERMS);
    let text = report.text();
    let lines: Vec<&str> = text.lines().filter(|line| line.contains("decode.extra")).collect();
    assert_eq!(lines.len(), 1, "{text}");
    assert!(
        lines[0].starts_with("MORE MEMORY: ") && lines[0].ends_with("by owner at the peak: `decode.extra` +12.0 MiB")
    );
}

#[test]
fn growth_outside_the_slab_is_growth_and_a_little_of_it_a_note() {
    let card = |graphs: u64, unattributed: i64| Row {
        context_bytes: Some(500 << 20),
        modules_bytes: Some(2 << 20),
        blas_bytes: Some(34 << 20),
        graphs_bytes: Some(graphs << 20),
        unattributed_bytes: Some(unattributed << 20),
        ..row(64)
    };
    for (candidate, found, code) in [
        (card(4, 1), vec![], 0),
        (card(20, 1), vec![Kind::Note], 0),
        (card(21, 1), vec![Kind::MemoryRegression], 4),
        (card(4, 18), vec![Kind::MemoryRegression, Kind::Failure], 4),
        (card(4, -17), vec![Kind::Better, Kind::Failure], 1),
        (row(64), vec![Kind::Failure], 1),
    ] {
        let report = judge(vec![card(4, 1)], vec![candidate], TERMS);
        assert_eq!((kinds(&report), report.exit_code()), (found, code), "{}", report.text());
    }
    let report = judge(vec![card(4, 1)], vec![card(1028, 1)], TERMS);
    let (text, markdown) = (report.text(), report.markdown());
    assert!(
        text.contains("MORE MEMORY: tiny@bf16 cpu host chunk 64 batch 1 depth 0: outside the slab +1.00 GiB"),
        "{text}"
    );
    assert!(text.contains(": graphs +1.00 GiB\n") && text.contains("bytes of 0 of 1 cells exact"), "{text}");
    assert!(markdown.contains("| outside | 541.0 MiB | 1.53 GiB | +1073741824 B | - | MORE |"), "{markdown}");
    let note = judge(vec![card(4, 1), row(128)], vec![card(20, 1), row(128)], TERMS).text();
    assert!(
        note.contains("NOTE: 1 of 2 cells take more memory outside the slab, at most 16.0 MiB (graphs, tiny@bf16"),
        "{note}"
    );
    assert!(note.contains("bytes of 2 of 2 cells exact") && note.contains("WITHIN"), "{note}");
    // A new cell has no baseline, and must have a ledger.
    let report = judge(vec![row(128)], vec![row(128), card(4, 900)], TERMS);
    assert_eq!((kinds(&report), report.exit_code()), (vec![Kind::Note, Kind::Failure], 1));
    assert!(report.text().contains("its ledger does not hold: +900.0 MiB outside the slab are unattributed"));
}

#[test]
fn other_tokens_are_a_note_in_one_line() {
    let made = |hash: &str| Row { output_hash: Some(hash.into()), weights_source: Some("seed:0".into()), ..row(64) };
    let report = judge(vec![made("1"), row(128)], vec![made("2"), row(128)], Terms { strict: true, ..TERMS });
    assert_eq!((kinds(&report), report.exit_code()), (vec![Kind::Note], 0));
    let text = report.text();
    assert!(
        text.contains("NOTE: 1 of 2 cells generated other tokens than in the baseline, the first of them tiny@bf16"),
        "{text}"
    );
    assert_eq!(kinds(&judge(vec![made("1")], vec![made("1")], TERMS)), []);
    assert_eq!(kinds(&judge(vec![row(64)], vec![row(64)], TERMS)), [], "earlier rows do not say");
}

#[test]
fn times_at_other_clocks_are_not_compared() {
    let at = |mhz: f64, why: &str| Row { sm_clock_mhz: Some(mhz), throttled: Some(why.into()), ..row(64) };
    let found = |candidate: Row| {
        let report = judge(vec![at(1980.0, "")], vec![candidate], Terms { strict: true, ..TERMS });
        (kinds(&report), report.exit_code(), report.text())
    };
    assert_eq!(found(at(1965.0, "")).0, []);
    let (kinds, code, text) = found(slower(&at(900.0, "heat"), 2.2));
    assert_eq!((kinds, code), (vec![Kind::Inconclusive, Kind::Note], 5), "{text}");
    assert!(
        text.contains("times are not compared: the SM clock was 1980 MHz in the baseline and 900 MHz in the candidate"),
        "{text}"
    );
    assert!(
        text.contains("next: highwater sweep") && text.contains("NOTE: clocks were held down by nothing"),
        "{text}"
    );
    let (kinds, code, text) = found(slower(&at(1950.0, "the power limit"), 1.03));
    assert_eq!((kinds, code), (vec![Kind::SpeedRegression, Kind::Note], 3), "{text}");
}

#[test]
fn a_csv_s_times_are_not_compared_and_that_is_no_pass_but_a_plan_s_has_none() {
    let strict = Terms { strict: true, ..TERMS };
    let csv = |row: Row| Run { file: "run/sweep.csv".into(), ..run(vec![row]) };
    let timeless = Row { tpot_passes_ms: vec![], prefill_samples_ms: vec![], tpot_samples_ms: vec![], ..row(64) };
    for (base, candidate, files) in [
        (csv(timeless.clone()), csv(timeless.clone()), "run/sweep.csv and run/sweep.csv"),
        (csv(timeless.clone()), run(vec![row(64)]), "run/sweep.csv"),
    ] {
        let report = compare(&base, &candidate, strict).unwrap_or_else(|failure| panic!("{}", failure.render()));
        assert_eq!((kinds(&report), report.exit_code()), (vec![Kind::Inconclusive], 5));
        let said = format!("no times are compared: give sweep.jsonl for {files}\n");
        assert!(report.text().contains(&said), "{}", report.text());
    }
    let plan = || csv(Row { device: "plan".into(), ..timeless.clone() });
    let report = compare(&plan(), &plan(), strict).unwrap_or_else(|failure| panic!("{}", failure.render()));
    assert_eq!((kinds(&report), report.exit_code()), (vec![], 0));
}

#[test]
fn a_cell_that_fits_now_is_better_and_two_refusals_are_equal() {
    let report = judge(vec![oom(&row(64)), oom(&row(128))], vec![row(64), oom(&row(128))], TERMS);
    assert_eq!((kinds(&report), report.exit_code()), (vec![Kind::Better], 0));
    assert_eq!((report.frontier[0].baseline, report.frontier[0].candidate), (None, Some(64)));
}

#[test]
fn failures_and_missing_cells_are_no_pass() {
    let mut lost = row(128);
    lost.set_status(Status::Lost, "killed");
    let report = judge(vec![row(64), row(128)], vec![row(64), lost.clone()], TERMS);
    assert_eq!((kinds(&report), report.exit_code()), (vec![Kind::Failure], 1));
    let report = judge(vec![row(64), row(128)], vec![row(64)], TERMS);
    assert_eq!((kinds(&report), report.exit_code()), (vec![Kind::Missing], 1));
    let report = judge(vec![row(64), row(128)], vec![row(64)], Terms { subset: true, ..TERMS });
    assert_eq!((kinds(&report), report.exit_code()), (vec![Kind::Note], 0));
    // A failure of the baseline is nobody's regression; a new cell that failed is the candidate's.
    let report = judge(vec![row(64), lost.clone()], vec![row(64), row(128)], TERMS);
    assert_eq!((kinds(&report), report.exit_code()), (vec![Kind::Note], 0));
    let report = judge(vec![row(64)], vec![row(64), lost], TERMS);
    assert_eq!((kinds(&report), report.exit_code()), (vec![Kind::Failure], 1));
    let mut unsupported = row(64);
    unsupported.set_status(Status::Unsupported, "fp8");
    let report = judge(vec![row(64)], vec![unsupported], TERMS);
    assert_eq!((kinds(&report), report.exit_code()), (vec![Kind::Failure], 1));
}

#[test]
fn other_conditions_are_refused_by_name_unless_forced() {
    let other = Row { method: 9, cores: Some(3), ..row(64) };
    let refuse = |strict: bool| {
        compare(&run(vec![row(64)]), &run(vec![other.clone()]), Terms { strict, ..TERMS }).expect_err("refused")
    };
    let text = refuse(false).render();
    assert!(
        text.contains("method: 2 in the baseline, 9") && text.contains("cores: not said in the baseline, 3"),
        "{text}"
    );
    assert!(text.contains("help: ") && text.contains("--force"));
    let forced = judge(vec![row(64)], vec![other], Terms { force: true, strict: true, ..TERMS });
    assert_eq!((kinds(&forced), forced.exit_code()), (vec![Kind::Environment; 2], 5));
    let card = |name: &str, vram| vec![Row { card: name.into(), vram_bytes: Some(vram), ..row(64) }];
    let refused = compare(&run(card("h100", 80)), &run(card("h200", 141)), TERMS).expect_err("refused").render();
    assert!(refused.contains("card: h100 in the baseline, h200 in the candidate"), "{refused}");
    let forced = judge(card("h100", 80), card("h200", 141), Terms { force: true, ..TERMS });
    assert_eq!((forced.cells, forced.exit_code()), (1, 0));
    let nothing = compare(&run(vec![row(64)]), &run(vec![row(128)]), TERMS).expect_err("refused").render();
    assert!(nothing.contains("no cell in common"), "{nothing}");
}

#[test]
fn other_compilers_are_a_note_and_no_refusal() {
    let by = |rustc: &str| Row { rustc: Some(rustc.into()), ..row(64) };
    let report = judge(vec![by("1.88.0")], vec![by("1.95.0")], Terms { strict: true, ..TERMS });
    assert_eq!((kinds(&report), report.exit_code()), (vec![Kind::Note], 0));
    let text = report.text();
    assert!(text.contains("NOTE: rustc: 1.88.0 in the baseline, 1.95.0 in the candidate (1 cells)"), "{text}");
    assert_eq!(kinds(&judge(vec![row(64)], vec![by("1.95.0")], TERMS)), []);
}

#[test]
fn few_samples_ask_for_the_run_that_lacks_them() {
    let few = Row { tpot_passes_ms: vec![10.0; 3], ..row(64) };
    let next = |base: &Row, candidate: &Row| {
        let report = judge(vec![base.clone()], vec![candidate.clone()], TERMS);
        assert_eq!(kinds(&report), [Kind::Inconclusive]);
        report.findings[0].next.clone().unwrap()
    };
    let cell = "highwater sweep tiny --axis chunk=64 --axis batch=1 --axis depth=0 --repetitions 60 --cell-seconds 50 --out \
                run-again-2";
    assert_eq!(next(&row(64), &few), format!("{cell} && highwater gate run run-again-2 --subset"));
    assert_eq!(next(&few, &row(64)), format!("{cell} && highwater gate run-again-2 run --subset"));
    // Another build cannot measure the baseline again; and each metric's command has its own folder.
    let old = Row { binary_hash: Some("fnv1a64:01".into()), prefill_samples_ms: vec![10.0; 3], ..few };
    let report = judge(vec![old], vec![row(64)], TERMS);
    let said: Vec<&str> = report.findings.iter().filter_map(|finding| finding.next.as_deref()).collect();
    assert!(
        said.len() == 2 && said[0].contains("--out run-again-1") && said[1].contains("--out run-again-2"),
        "{said:?}"
    );
    assert!(
        said.iter().all(|next| next.ends_with(" # the sweep by the program of the baseline, fnv1a64:01")),
        "{said:?}"
    );
}

#[test]
fn a_baseline_without_a_check_or_without_samples_is_no_speed_baseline() {
    for base in [Row { checked: None, ..row(64) }, Row { dirty: Some("company".into()), ..row(64) }] {
        let report = judge(vec![base], vec![slower(&row(64), 2.0)], Terms { strict: true, ..TERMS });
        assert_eq!((kinds(&report), report.exit_code()), (vec![Kind::Inconclusive], 5));
        assert!(report.text().contains("times are not compared: the baseline"), "{}", report.text());
    }
    let csv = Row { tpot_passes_ms: vec![], prefill_samples_ms: vec![], tpot_samples_ms: vec![], ..row(64) };
    let report = judge(vec![csv], vec![row(64)], TERMS);
    assert_eq!(kinds(&report), [Kind::Inconclusive; 2]);
    assert!(report.text().contains("TPOT: the baseline holds no times"), "{}", report.text());
}
