//! What a sweep's rows show as pictures: transient bytes and prefill speed by chunk, time per output token by batch.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use highwater::error::mib;

use crate::plot::{Chart, Point, Series};
use crate::record::Row;
use crate::status::Status;
use crate::table::subject;

/// Rows that may stand in one picture: they differ in chunk and batch only.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Subject {
    model: String,
    numerics: String,
    kv_dtype: String,
    workload: String,
    device: String,
    card: String,
    vram_bytes: Option<u64>,
    fault: Option<String>,
    depth: u64,
}

impl Subject {
    fn of(row: &Row) -> Subject {
        Subject {
            model: subject(row),
            numerics: row.dtype.clone(),
            kv_dtype: row.kv_dtype.clone(),
            workload: row.workload.clone().unwrap_or_else(|| "fixed".into()),
            device: row.device.clone(),
            card: row.card.clone(),
            vram_bytes: row.vram_bytes,
            fault: row.fault.clone(),
            depth: row.depth,
        }
    }

    /// Its parts, each readable alone. With `usual` those are named too that go without saying where there is no other.
    fn parts(&self, usual: bool) -> Vec<String> {
        let unless = |is_usual: bool, text: String| if is_usual && !usual { String::new() } else { text };
        let fault = self.fault.as_ref().map(|fault| format!("fault {fault}"));
        vec![
            self.model.clone(),
            self.numerics.clone(),
            self.device.clone(),
            self.card.clone(),
            self.vram_bytes.map(mib).unwrap_or_default(),
            fault.unwrap_or_else(|| unless(true, "no fault".into())),
            unless(self.kv_dtype == self.numerics, format!("KV {}", self.kv_dtype)),
            unless(self.workload == "fixed", self.workload.clone()),
            format!("depth {}", self.depth),
        ]
    }
}

/// Draws every picture of `rows` into `dir`; the paths written, in the order drawn.
pub(crate) fn write(rows: &[Row], dir: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for (stem, chart) in sweep_charts(rows) {
        let path = dir.join(format!("{stem}.svg"));
        std::fs::write(&path, chart.svg()?).with_context(|| format!("cannot write {}", path.display()))?;
        paths.push(path);
    }
    Ok(paths)
}

/// Every picture of `rows`, under a file stem of its own. Speed pictures are left out where nothing was measured.
fn sweep_charts(rows: &[Row]) -> Vec<(String, Chart)> {
    let subjects: BTreeSet<Subject> = rows.iter().map(Subject::of).collect();
    let parts: Vec<Vec<String>> = subjects.iter().map(|subject| subject.parts(true)).collect();
    let mut charts = Vec::new();
    let mut stems = BTreeSet::new();
    for (subject, own_parts) in subjects.iter().zip(&parts) {
        // The file name holds what tells this subject from the others.
        let varying = (0..own_parts.len()).filter(|at| parts.iter().any(|other| other[*at] != own_parts[*at]));
        let named = varying.map(|at| slug(&own_parts[at])).filter(|slug| !slug.is_empty());
        let suffix = named.fold(String::new(), |suffix, slug| suffix + "-" + &slug);
        let own: Vec<&Row> = rows.iter().filter(|row| Subject::of(row) == *subject).collect();
        let subtitle: Vec<String> = subject.parts(false).into_iter().filter(|part| !part.is_empty()).collect();
        let subtitle = subtitle.join(", ");
        for (name, chart) in [
            ("transient_by_chunk", transient(&own)),
            ("prefill_by_chunk", prefill(&own)),
            ("tpot_by_batch", tpot(&own)),
        ] {
            let Some(chart) = chart else { continue };
            let mut stem = format!("{name}{suffix}");
            while !stems.insert(stem.clone()) {
                stem.push('_');
            }
            charts.push((stem, Chart { subtitle: subtitle.clone(), ..chart }));
        }
    }
    charts
}

fn transient(rows: &[&Row]) -> Option<Chart> {
    let largest = rows.iter().filter_map(|row| row.transient_peak_bytes).max().unwrap_or(0);
    let (unit, unit_bytes) = if largest >= 1 << 30 { ("GiB", 1u64 << 30) } else { ("MiB", 1 << 20) };
    let value = |row: &Row| row.transient_peak_bytes.map(|bytes| (bytes as f64 / unit_bytes as f64, None));
    let series = series(rows, |row| (row.chunk, row.batch), value);
    let drawn = series.iter().any(|s| !s.points.is_empty() || !s.oom.is_empty());
    drawn.then(|| Chart {
        title: "Transient memory by prefill chunk".into(),
        subtitle: String::new(),
        x_label: "chunk, tokens (log2)".into(),
        y_label: format!("transient peak, {unit}"),
        legend: "batch, sequences".into(),
        series,
    })
}

fn prefill(rows: &[&Row]) -> Option<Chart> {
    let series = series(rows, |row| (row.chunk, row.batch), |row| row.prefill_tok_s.map(|speed| (speed, None)));
    measured(&series).then(|| Chart {
        title: "Prefill speed by chunk".into(),
        subtitle: String::new(),
        x_label: "chunk, tokens (log2)".into(),
        y_label: "prefill, tok/s".into(),
        legend: "batch, sequences".into(),
        series,
    })
}

fn tpot(rows: &[&Row]) -> Option<Chart> {
    let value = |row: &Row| row.tpot_ms.map(|ms| (ms, row.tpot_q1_ms.zip(row.tpot_q3_ms)));
    let series = series(rows, |row| (row.batch, row.chunk), value);
    measured(&series).then(|| Chart {
        title: "Time per output token by batch (median, bars: quartiles)".into(),
        subtitle: String::new(),
        x_label: "batch, sequences (log2)".into(),
        y_label: "TPOT, ms".into(),
        legend: "chunk, tokens".into(),
        series,
    })
}

fn measured(series: &[Series]) -> bool {
    series.iter().any(|s| !s.points.is_empty())
}

/// Lines of the rows: `at` says where a row stands and in which series, `value` its height and interval if it is `ok`.
/// Of two rows in one place the later counts.
fn series(
    rows: &[&Row],
    at: impl Fn(&Row) -> (u64, u64),
    value: impl Fn(&Row) -> Option<(f64, Option<(f64, f64)>)>,
) -> Vec<Series> {
    let mut places: BTreeMap<u64, BTreeMap<u64, &Row>> = BTreeMap::new();
    for row in rows {
        let (x, series) = at(row);
        places.entry(series).or_default().insert(x, row);
    }
    let of_name = |(name, row_at): (u64, BTreeMap<u64, &Row>)| {
        let oom = row_at.iter().filter(|(_, row)| row.status.is_oom()).map(|(x, _)| *x).collect();
        let ok = row_at.iter().filter(|(_, row)| row.status == Status::Ok);
        let points = ok.filter_map(|(x, row)| value(row).map(|(y, interval)| Point { x: *x, y, interval })).collect();
        Series { name: name.to_string(), points, oom }
    };
    let all = places.into_iter().map(of_name).filter(|s| !s.points.is_empty() || !s.oom.is_empty()).collect();
    merged(all)
}

/// Equal lines as one under all their names: drawn apart, the last would hide the others.
fn merged(all: Vec<Series>) -> Vec<Series> {
    let mut groups: Vec<(Vec<String>, Series)> = Vec::new();
    for series in all {
        match groups.iter_mut().find(|(_, drawn)| drawn.points == series.points && drawn.oom == series.oom) {
            Some((names, _)) => names.push(series.name),
            None => groups.push((vec![series.name.clone()], series)),
        }
    }
    let name = |names: &[String]| match names {
        [first, .., last] if names.len() > 3 => format!("{} from {first} to {last}", names.len()),
        names => names.join(", "),
    };
    groups.into_iter().map(|(names, series)| Series { name: name(&names), ..series }).collect()
}

/// A part of a file name: lower-case letters, digits, `.` and `-`, at most 60 of them.
fn slug(text: &str) -> String {
    let mut slug = String::new();
    for c in text.chars().take(60) {
        match c.to_ascii_lowercase() {
            c if c.is_ascii_alphanumeric() || c == '.' => slug.push(c),
            _ if !slug.ends_with('-') => slug.push('-'),
            _ => {}
        }
    }
    slug.trim_matches(['-', '.']).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::ok_row;

    fn grid() -> Vec<Row> {
        let mut rows = Vec::new();
        for batch in [1, 4] {
            for chunk in [8192, 512] {
                rows.push(ok_row(chunk, batch, chunk << 20));
            }
        }
        rows
    }

    #[test]
    fn a_line_per_batch_ascending_with_oom_cells_apart() {
        let mut rows = grid();
        rows[2].set_status(Status::OomPredicted, "x");
        let charts = sweep_charts(&rows);
        let names: Vec<&str> = charts.iter().map(|(stem, _)| stem.as_str()).collect();
        assert_eq!(names, ["transient_by_chunk", "prefill_by_chunk", "tpot_by_batch"]);
        let chart = &charts[0].1;
        assert_eq!(chart.y_label, "transient peak, GiB");
        assert_eq!(chart.series[0].points.iter().map(|p| (p.x, p.y)).collect::<Vec<_>>(), [(512, 0.5), (8192, 8.0)]);
        assert_eq!((chart.series[1].points.len(), chart.series[1].oom.as_slice()), (1, &[8192][..]));
        let tpot = &charts[2].1;
        assert_eq!(tpot.series.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["512", "8192"]);
        assert_eq!(tpot.series[0].points[0].interval, Some((0.0625, 0.5)));
        assert_eq!(tpot.series[1].oom, [4]);
    }

    #[test]
    fn subjects_never_share_a_picture_and_files_are_named_by_what_differs() {
        let mut rows = grid();
        rows.extend(grid().into_iter().map(|row| Row { card: "../RTX 4090".into(), depth: 64, ..row }));
        let charts = sweep_charts(&rows);
        let names: Vec<&str> = charts.iter().map(|(stem, _)| stem.as_str()).collect();
        assert_eq!(names.len(), 6);
        assert!(names.contains(&"transient_by_chunk-rtx-4090-depth-64"), "{names:?}");
        assert!(names.contains(&"transient_by_chunk-host-depth-0"), "{names:?}");
        assert!(charts.iter().all(|(_, chart)| chart.series.iter().all(|s| s.points.len() == 2)));
    }

    #[test]
    fn what_is_usual_has_a_name_beside_what_is_not_and_no_part_of_a_name_is_empty() {
        let names = |change: fn(&mut Row)| -> Vec<String> {
            let mut rows = grid();
            let usual = |row: &mut Row| (row.dtype, row.kv_dtype) = ("bf16".into(), "bf16".into());
            rows.iter_mut().for_each(usual);
            let mut others = rows.clone();
            others.iter_mut().for_each(change);
            rows.extend(others);
            let stems = sweep_charts(&rows).into_iter().map(|(stem, _)| stem);
            stems.filter_map(|stem| Some(stem.strip_prefix("prefill_by_chunk")?.to_owned())).collect()
        };
        assert_eq!(names(|row| row.kv_dtype = "fp8".into()), ["-kv-bf16", "-kv-fp8"]);
        assert_eq!(names(|row| row.workload = Some("ladder".into())), ["-fixed", "-ladder"]);
        assert_eq!(names(|row| row.fault = Some("slow-kernel".into())), ["-no-fault", "-fault-slow-kernel"]);
        assert_eq!(names(|row| row.vram_bytes = None).iter().filter(|name| name.ends_with('-')).count(), 0);
        assert_eq!(names(|_| {}), [""]);
    }

    #[test]
    fn equal_lines_are_one_under_all_their_names() {
        let mut rows: Vec<Row> = [1, 2, 4, 8, 16].into_iter().map(|batch| ok_row(512, batch, 1 << 20)).collect();
        rows.push(ok_row(512, 32, 2 << 20));
        let names =
            |rows: &[Row]| -> Vec<String> { sweep_charts(rows)[0].1.series.iter().map(|s| s.name.clone()).collect() };
        assert_eq!(names(&rows), ["5 from 1 to 16", "32"]);
        assert_eq!(names(&rows[..2]), ["1, 2"]);
    }

    #[test]
    fn plans_and_all_oom_sweeps_have_the_memory_picture_alone() {
        let mut rows = grid();
        for row in &mut rows {
            row.set_status(Status::Oom, "x");
        }
        let charts = sweep_charts(&rows);
        assert_eq!(charts.len(), 1);
        assert!(charts[0].1.series.iter().all(|s| s.points.is_empty() && s.oom.len() == 2));
        let failed = Row { status: Status::Error, ..ok_row(1, 1, 1) };
        assert!(sweep_charts(&[failed]).is_empty());
        assert!(sweep_charts(&[]).is_empty());
    }

    #[test]
    fn pictures_are_written_where_told() {
        let dir = tempfile::tempdir().unwrap();
        let paths = write(&grid(), dir.path()).unwrap();
        assert_eq!(paths.len(), 3);
        assert!(std::fs::read_to_string(&paths[0]).unwrap().contains("Transient memory"));
        assert!(write(&grid(), &dir.path().join("none")).is_err());
    }
}
