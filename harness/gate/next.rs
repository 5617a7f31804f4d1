//! What to run where nothing could be concluded: the command that measured the cell, for that cell alone and longer.

use std::path::{Path, PathBuf};

use crate::cli::verb_at;
use crate::provenance::command_line;
use crate::record::Row;
use crate::verdict::{Comparison, LEAST_SAMPLES, MOST_HALF_WIDTH};

/// Seconds a cell is measured for where its command does not say.
const CELL_SECONDS: f64 = 10.0;
/// Most seconds, and most repetitions, that are asked for.
const MOST_SECONDS: f64 = 3600.0;
const MOST_REPETITIONS: usize = 1000;

/// How many times longer to measure what a comparison left undecided: intervals narrow with the root of the time.
fn factor(compared: Option<&Comparison>) -> f64 {
    compared.map_or(1.0, |compared| {
        let least = compared.base_samples.min(compared.candidate_samples).max(1);
        let by_count = LEAST_SAMPLES as f64 / least as f64;
        let by_width = compared.half_width().map_or(1.0, |half| (half / MOST_HALF_WIDTH).powi(2));
        (1.5 * by_count.max(by_width)).clamp(2.0, 20.0)
    })
}

/// Seconds for a cell that had `had` and was not decided.
pub(crate) fn seconds(had: f64, compared: Option<&Comparison>) -> f64 {
    (had * factor(compared)).ceil().clamp(1.0, MOST_SECONDS)
}

/// Repetitions for a cell that had `had` and was not decided.
fn repetitions(had: usize, compared: Option<&Comparison>) -> usize {
    ((had as f64 * factor(compared)).ceil() as usize).clamp(2 * LEAST_SAMPLES, MOST_REPETITIONS)
}

/// The sweep that measured `row`, for its cell alone, into `out`, as long and as often as what was left undecided needs.
/// `None` where the row does not hold a sweep's command line.
pub(crate) fn sweep(row: &Row, out: &Path, compared: Option<&Comparison>) -> Option<String> {
    let words = words(&row.argv)?;
    let verb = verb_at(&words)?;
    if words[verb] != "sweep" {
        return None;
    }
    let (mut kept, mut had) = (words[..=verb].to_vec(), CELL_SECONDS);
    let mut words = words.into_iter().skip(verb + 1);
    while let Some(word) = words.next() {
        let (flag, inline) = match word.split_once('=') {
            Some((flag, value)) if flag.starts_with("--") => (flag, Some(value.to_owned())),
            _ => (word.as_str(), None),
        };
        match flag {
            "--resume" => {}
            "--axis" | "--out" | "--cell-seconds" | "--repetitions" | "--precision" | "--shard" => {
                let value = match inline {
                    Some(value) => value,
                    None => words.next()?,
                };
                let axis = value.split(['=', '[']).next().unwrap_or_default().trim().to_owned();
                if flag == "--cell-seconds" {
                    had = value.parse().ok().filter(|s: &f64| s.is_finite() && *s > 0.0).unwrap_or(CELL_SECONDS);
                } else if flag == "--axis" && !["chunk", "batch", "depth"].contains(&axis.as_str()) {
                    kept.extend(["--axis".to_owned(), value]);
                }
            }
            _ => kept.push(word),
        }
    }
    for (axis, value) in [("chunk", row.chunk), ("batch", row.batch), ("depth", row.depth)] {
        kept.extend(["--axis".to_owned(), format!("{axis}={value}")]);
    }
    // A narrow interval must not end them before there are enough.
    kept.extend(["--repetitions".to_owned(), repetitions(row.prefill_samples_ms.len(), compared).to_string()]);
    kept.extend(["--cell-seconds".to_owned(), seconds(had, compared).to_string()]);
    kept.extend(["--out".to_owned(), out.display().to_string()]);
    Some(command_line(kept.into_iter()))
}

/// A command that measures into `folder` again, for the baseline or the candidate, and the one that compares then; where the
/// two of `paths` were measured by different programs, which verb of which program (by its hash) it takes.
pub(crate) fn and_gate(
    measure: &str,
    folder: &Path,
    baseline: bool,
    [base, candidate]: [&Path; 2],
    program: Option<(&str, &str)>,
) -> String {
    let compared = if baseline { [folder, candidate] } else { [base, folder] };
    let [from, to] = compared.map(|path| path.display().to_string());
    let gate = command_line(["highwater", "gate", &from, &to, "--subset"].map(str::to_owned).into_iter());
    let whose = if baseline { "baseline" } else { "candidate" };
    let comment = program.map(|(verb, hash)| format!(" # the {verb} by the program of the {whose}, {hash}"));
    format!("{measure} && {gate}{}", comment.unwrap_or_default())
}

/// A folder beside `path` that is not there yet.
pub(crate) fn fresh(path: &Path, number: usize) -> PathBuf {
    let is_file = path.extension().is_some_and(|extension| extension == "jsonl" || extension == "csv");
    let folder = if is_file { path.parent().unwrap_or(path) } else { path };
    let name = folder.file_name().map_or("run".into(), |name| name.to_string_lossy().into_owned());
    let beside = |number: usize| folder.with_file_name(format!("{name}-again-{number}"));
    (number..number + 1000).map(beside).find(|path| !path.exists()).unwrap_or_else(|| beside(number))
}

/// The words of a command line that [`command_line`] wrote. `None` where it is not of that form.
fn words(line: &str) -> Option<Vec<String>> {
    let (mut words, mut word, mut begun) = (Vec::new(), String::new(), false);
    let mut rest = line.chars();
    while let Some(c) = rest.next() {
        match c {
            '\'' => {
                begun = true;
                loop {
                    match rest.next()? {
                        '\'' => break,
                        inner => word.push(inner),
                    }
                }
            }
            '\\' => {
                begun = true;
                word.push(rest.next()?);
            }
            ' ' if begun => {
                words.push(std::mem::take(&mut word));
                begun = false;
            }
            ' ' => {}
            _ => {
                begun = true;
                word.push(c);
            }
        }
    }
    if begun {
        words.push(word);
    }
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::ok_row;
    use crate::verdict::Rule;

    #[test]
    fn a_command_line_is_read_as_it_was_written() {
        let said = ["highwater", "sweep", "it's", "", "a b", "chunk[pow2]=[9:13]", "\\"].map(str::to_owned);
        assert_eq!(words(&command_line(said.clone().into_iter())).unwrap(), said);
        assert_eq!(words("a 'b"), None);
        assert_eq!(words("a \\"), None);
    }

    #[test]
    fn the_next_command_is_the_cell_s_own_and_longer() {
        let argv = "highwater sweep 'my model' --axis chunk=512,64 --axis kv-dtype=fp8 --axis=depth=0 --out old \
                    --cell-seconds=20 --resume --precision 1% --repetitions 3 --vram 16GiB --shard 1/2";
        let row = Row { argv: argv.into(), depth: 4096, ..ok_row(64, 2, 64) };
        assert_eq!(
            sweep(&row, Path::new("new"), None).unwrap(),
            "highwater sweep 'my model' --axis kv-dtype=fp8 --vram 16GiB --axis chunk=64 --axis batch=2 --axis depth=4096 \
             --repetitions 20 --cell-seconds 20 --out new"
        );
        let named = Row { argv: "highwater --cuda 'my toolkit' sweep tiny --out old".into(), ..ok_row(64, 2, 64) };
        let line = sweep(&named, Path::new("new"), None).unwrap();
        assert!(line.starts_with("highwater --cuda 'my toolkit' sweep tiny --axis chunk=64 "), "{line}");
        for argv in ["", "highwater", "highwater plan x", "highwater sweep --out", "highwater sweep 'x"] {
            assert_eq!(sweep(&Row { argv: argv.into(), ..row.clone() }, Path::new("new"), None), None, "{argv}");
        }
    }

    #[test]
    fn wide_intervals_and_few_samples_ask_for_more_time_within_bounds() {
        let rule = Rule { threshold: 0.01, floor: 0.0 };
        let few = Comparison::of(&[1.0; 2], &[1.0; 8], rule, 1).unwrap();
        assert_eq!(seconds(10.0, Some(&few)), 75.0);
        let wild: Vec<f64> = (1..=8).map(f64::from).collect();
        let wide = Comparison::of(&wild, &wild, rule, 1).unwrap();
        assert_eq!((seconds(10.0, Some(&wide)), seconds(1000.0, Some(&wide))), (200.0, 3600.0));
        assert_eq!((seconds(10.0, None), repetitions(0, None), repetitions(30, Some(&wide))), (10.0, 20, 600));
    }

    #[test]
    fn a_fresh_folder_is_beside_the_run_and_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        std::fs::create_dir(dir.path().join("run-again-1")).unwrap();
        assert_eq!(fresh(&run, 1), dir.path().join("run-again-2"));
        assert_eq!(fresh(&run.join("sweep.jsonl"), 3), dir.path().join("run-again-3"));
        assert_eq!(fresh(&dir.path().join("qwen3.6-27b"), 1), dir.path().join("qwen3.6-27b-again-1"));
    }
}
