//! What a gate found: every comparison, every finding, the exit code they make, and how they read on a terminal, in Markdown
//! and in JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use highwater::error::mib;
use serde::Serialize;

use crate::failure::{FAILED, Failure, MORE_MEMORY, SLOWER, UNDECIDED};
use crate::formats::write_whole;
use crate::gate::edges::Edge;
use crate::gate::memory::Memory;
use crate::gate::outside::Outside;
use crate::out::{self, print};
use crate::table::{Align, Table, number};
use crate::verdict::{Comparison, Verdict};

/// What a finding is, the gravest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// A cell takes more bytes than it did.
    MemoryRegression,
    /// A cell that fitted does not.
    FrontierRegression,
    /// A cell is slower than it was.
    SpeedRegression,
    /// One thing was gained for another on the same cell; the loss is a finding of its own.
    Trade,
    /// A cell of the candidate failed, or computed something wrong.
    Failure,
    /// The candidate lacks a cell of the baseline.
    Missing,
    /// The samples do not tell, or are not fit to be compared.
    Inconclusive,
    /// The runs were measured under other conditions.
    Environment,
    /// Something is better than it was.
    Better,
    /// Something to know.
    Note,
}

impl Kind {
    /// How a line of it begins.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Kind::MemoryRegression => "MORE MEMORY",
            Kind::FrontierRegression => "FITS NO MORE",
            Kind::SpeedRegression => "SLOWER",
            Kind::Trade => "TRADE",
            Kind::Failure => "FAILED",
            Kind::Missing => "MISSING",
            Kind::Inconclusive => "INCONCLUSIVE",
            Kind::Environment => "CONDITIONS",
            Kind::Better => "BETTER",
            Kind::Note => "NOTE",
        }
    }

    /// The exit code it asks for, by itself.
    fn code(self, strict: bool) -> u8 {
        match self {
            Kind::MemoryRegression | Kind::FrontierRegression => MORE_MEMORY,
            Kind::SpeedRegression => SLOWER,
            Kind::Failure | Kind::Missing => FAILED,
            Kind::Inconclusive | Kind::Environment if strict => UNDECIDED,
            _ => 0,
        }
    }
}

/// One thing found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Finding {
    /// What kind of thing.
    pub(crate) kind: Kind,
    /// The cell it is about.
    pub(crate) cell: Option<String>,
    /// In words, one line.
    pub(crate) text: String,
    /// The next command to run.
    pub(crate) next: Option<String>,
}

/// One comparison of times.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Compared {
    /// The cell.
    pub(crate) cell: String,
    /// `prefill`, `TPOT`, or a kernel's `time`.
    pub(crate) metric: &'static str,
    /// Unit of the medians.
    pub(crate) unit: &'static str,
    /// The numbers.
    #[serde(flatten)]
    pub(crate) comparison: Comparison,
}

/// One cell's bytes in either run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Bytes {
    /// The cell.
    pub(crate) cell: String,
    /// Resident and transient peak together, in the baseline.
    pub(crate) baseline: u64,
    /// The same in the candidate.
    pub(crate) candidate: u64,
    /// What changed.
    #[serde(flatten)]
    pub(crate) memory: Memory,
}

/// All that was found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Report {
    /// What was held to.
    pub(crate) baseline: String,
    /// What was judged.
    pub(crate) candidate: String,
    /// Effects up to this are no regression.
    pub(crate) threshold: f64,
    /// Whether what is undecided ends with a code of its own.
    pub(crate) strict: bool,
    /// Cells both runs have.
    pub(crate) cells: usize,
    /// Their times.
    pub(crate) compared: Vec<Compared>,
    /// Their bytes.
    pub(crate) bytes: Vec<Bytes>,
    /// Where either run stops fitting.
    pub(crate) frontier: Vec<Edge>,
    /// The findings.
    pub(crate) findings: Vec<Finding>,
}

impl Report {
    /// A report without findings.
    pub(crate) fn new(baseline: String, candidate: String, threshold: f64, strict: bool) -> Report {
        Report {
            baseline,
            candidate,
            threshold,
            strict,
            cells: 0,
            compared: Vec::new(),
            bytes: Vec::new(),
            frontier: Vec::new(),
            findings: Vec::new(),
        }
    }

    /// Adds a finding about a cell, or about all of them.
    pub(crate) fn find(&mut self, kind: Kind, cell: Option<&str>, text: impl Into<String>, next: Option<String>) {
        self.findings.push(Finding { kind, cell: cell.map(str::to_owned), text: text.into(), next });
    }

    /// Adds a comparison of times, and the finding that its verdict is. `next` is the command where it is inconclusive.
    pub(crate) fn compare(
        &mut self,
        cell: &str,
        metric: &'static str,
        unit: &'static str,
        comparison: Comparison,
        next: impl FnOnce(&Comparison) -> Option<String>,
    ) {
        let change = format!(
            "{metric} {} -> {} {unit}, {}",
            number(comparison.base),
            number(comparison.candidate),
            comparison.percent()
        );
        match comparison.verdict {
            Verdict::Same => {}
            Verdict::Faster => self.find(Kind::Better, Some(cell), format!("FASTER: {change}"), None),
            Verdict::Slower => self.find(Kind::SpeedRegression, Some(cell), change, None),
            Verdict::Inconclusive => {
                let why = comparison.why.as_deref().unwrap_or("no reason");
                self.find(Kind::Inconclusive, Some(cell), format!("{change}: {why}"), next(&comparison));
            }
        }
        self.compared.push(Compared { cell: cell.to_owned(), metric, unit, comparison });
    }

    /// 4 before 3 before 1 before 5: a measured regression is known whatever else failed.
    pub(crate) fn exit_code(&self) -> u8 {
        let codes: Vec<u8> = self.findings.iter().map(|finding| finding.kind.code(self.strict)).collect();
        [MORE_MEMORY, SLOWER, FAILED, UNDECIDED].into_iter().find(|code| codes.contains(code)).unwrap_or(0)
    }

    fn table(&self) -> Table {
        use Align::{Left, Right};
        let mut table = Table::new(&[
            ("cell", Left),
            ("metric", Left),
            ("baseline", Right),
            ("candidate", Right),
            ("change, with its interval", Left),
            ("samples", Right),
            ("verdict", Left),
        ]);
        for Compared { cell, metric, unit, comparison } in &self.compared {
            table.push(vec![
                cell.clone(),
                (*metric).to_owned(),
                format!("{} {unit}", number(comparison.base)),
                format!("{} {unit}", number(comparison.candidate)),
                comparison.percent(),
                format!("{}/{}", comparison.base_samples, comparison.candidate_samples),
                comparison.verdict.name().to_owned(),
            ]);
        }
        for Bytes { cell, baseline, candidate, memory } in &self.bytes {
            let verdict = match () {
                () if memory.slab_grew() => "MORE",
                () if !memory.parts.is_empty() => "LESS",
                () => "EXACT",
            };
            table.push(vec![
                cell.clone(),
                "bytes".into(),
                mib(*baseline),
                mib(*candidate),
                format!("{:+} B", i128::from(*candidate) - i128::from(*baseline)),
                "-".into(),
                verdict.into(),
            ]);
            if let Some(outside) = &memory.outside {
                table.push(outside_fields(cell, outside));
            }
        }
        table
    }

    /// The findings, the gravest first, a line each; a command has a line of its own.
    fn lines(&self, bullet: &str, code: &str) -> String {
        let mut findings: Vec<&Finding> = self.findings.iter().collect();
        findings.sort_by_key(|finding| finding.kind);
        let mut text = String::new();
        for Finding { kind, cell, text: what, next } in findings {
            let cell = cell.as_ref().map_or(String::new(), |cell| format!("{cell}: "));
            let line: String = format!("{cell}{what}").chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
            let _ = writeln!(text, "{bullet}{}: {line}", kind.title());
            if let Some(next) = next {
                let next: String = next.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
                let _ = writeln!(text, "    next: {code}{next}{code}");
            }
        }
        text
    }

    /// How many cells, verdicts and findings there are, and the exit code.
    pub(crate) fn summary(&self) -> String {
        let mut verdicts: BTreeMap<Verdict, usize> = BTreeMap::new();
        for compared in &self.compared {
            *verdicts.entry(compared.comparison.verdict).or_default() += 1;
        }
        let exact = self.bytes.iter().filter(|bytes| !bytes.memory.grew() && !bytes.memory.shrank()).count();
        let mut parts = vec![format!("{} cells", self.cells)];
        parts.extend(verdicts.iter().map(|(verdict, count)| format!("{count} {}", verdict.name())));
        parts.push(format!("bytes of {exact} of {} cells exact", self.bytes.len()));
        let mut kinds: BTreeMap<Kind, usize> = BTreeMap::new();
        for finding in self.findings.iter().filter(|finding| finding.kind.code(true) != 0) {
            *kinds.entry(finding.kind).or_default() += 1;
        }
        parts.extend(
            kinds.iter().filter(|(kind, _)| kind.code(true) != 0).map(|(kind, n)| format!("{n} x {}", kind.title())),
        );
        format!("{}; exit {}", parts.join(", "), self.exit_code())
    }

    /// The report for a terminal.
    pub(crate) fn text(&self) -> String {
        let edges = self.frontier.iter().fold(String::new(), |text, edge| text + "frontier: " + &edge.line() + "\n");
        let (table, lines) = (self.table().without_empty_columns().text(), self.lines("", ""));
        format!("{} against {}\n{table}{edges}{lines}{}\n", self.candidate, self.baseline, self.summary())
    }

    /// The report for a pull request.
    pub(crate) fn markdown(&self) -> String {
        let edges = self.frontier.iter().fold(String::new(), |text, edge| text + "- frontier: " + &edge.line() + "\n");
        let (table, lines) = (self.table().markdown(), self.lines("- ", "`"));
        format!("**{}** against {}: {}\n\n{table}\n{edges}{lines}", self.candidate, self.baseline, self.summary())
    }

    /// The report for a program: one JSON object with the exit code in it.
    pub(crate) fn json(&self) -> Result<String> {
        let mut value = serde_json::to_value(self).context("the report is no JSON")?;
        value["exit_code"] = self.exit_code().into();
        value["summary"] = self.summary().into();
        Ok(format!("{value:#}\n"))
    }

    /// Prints it and ends as it asks. The summary is not said again where the reader has it: on a terminal, or in a file.
    pub(crate) fn end(&self, json: bool, markdown: Option<&Path>) -> Result<(), Failure> {
        if let Some(file) = markdown {
            write_whole(file, &self.markdown())?;
        }
        print(&if json { self.json()? } else { self.text() })?;
        match self.exit_code() {
            0 => Ok(()),
            code if !json && out::is_kept() => Err(Failure::said(code)),
            code => {
                Err(Failure::found(code, format!("{} against {}: {}", self.candidate, self.baseline, self.summary())))
            }
        }
    }
}

/// A cell's bytes outside the slab, which need not be equal to the byte.
fn outside_fields(cell: &str, outside: &Outside) -> Vec<String> {
    let verdict = match () {
        () if outside.grew() => "MORE",
        () if outside.shrank() => "LESS",
        () => "WITHIN",
    };
    let size = |bytes: i64| mib(bytes.max(0).unsigned_abs());
    vec![
        cell.to_owned(),
        "outside".into(),
        size(outside.baseline),
        size(outside.candidate),
        format!("{:+} B", outside.candidate.saturating_sub(outside.baseline)),
        "-".into(),
        verdict.into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Rule;

    fn report(kinds: &[Kind], strict: bool) -> Report {
        let mut report = Report::new("a".into(), "b".into(), 0.01, strict);
        for kind in kinds {
            report.find(*kind, Some("cell"), "text\u{1b}[31m", None);
        }
        report
    }

    #[test]
    fn the_gravest_finding_decides_the_code() {
        use Kind::{Better, Environment, Failure, FrontierRegression, Inconclusive, MemoryRegression};
        use Kind::{Missing, Note, SpeedRegression, Trade};
        for (kinds, lax, strict) in [
            (vec![], 0, 0),
            (vec![Better, Note, Trade], 0, 0),
            (vec![Inconclusive], 0, 5),
            (vec![Environment, Better], 0, 5),
            (vec![Inconclusive, Failure], 1, 1),
            (vec![Missing, Environment], 1, 1),
            (vec![Failure, SpeedRegression, Inconclusive], 3, 3),
            (vec![SpeedRegression, MemoryRegression, Failure], 4, 4),
            (vec![FrontierRegression, SpeedRegression], 4, 4),
        ] {
            assert_eq!(report(&kinds, false).exit_code(), lax, "{kinds:?}");
            assert_eq!(report(&kinds, true).exit_code(), strict, "{kinds:?}");
        }
    }

    #[test]
    fn every_finding_is_a_line_and_control_characters_go() {
        let report = report(&[Kind::Note, Kind::MemoryRegression, Kind::SpeedRegression], false);
        let text = report.text();
        let found: Vec<&str> = text.lines().filter(|line| line.contains("cell: text")).collect();
        assert!(found[0].starts_with("MORE MEMORY") && found[1].starts_with("SLOWER") && found[2].starts_with("NOTE"));
        assert!(!text.contains('\u{1b}'));
        assert!(text.ends_with("1 x MORE MEMORY, 1 x SLOWER; exit 4\n"), "{text}");
    }

    #[test]
    fn an_inconclusive_comparison_says_why_and_what_next() {
        let mut report = report(&[], true);
        let comparison = Comparison::of(&[1.0; 3], &[1.0; 3], Rule { threshold: 0.01, floor: 0.0 }, 1).unwrap();
        report.compare("tiny", "TPOT", "ms", comparison, |_| Some("highwater sweep".into()));
        let (text, markdown, json) = (report.text(), report.markdown(), report.json().unwrap());
        assert!(text.contains("INCONCLUSIVE: tiny: TPOT 1.000 -> 1.000 ms"), "{text}");
        assert!(text.contains("3 samples; 10 are needed") && text.contains("    next: highwater sweep\n"), "{text}");
        assert!(
            markdown.contains("    next: `highwater sweep`") && markdown.contains("| INCONCLUSIVE |"),
            "{markdown}"
        );
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&json["exit_code"], &json["compared"][0]["verdict"]), (&5.into(), &"INCONCLUSIVE".into()));
        assert_eq!(json["findings"][0]["next"], "highwater sweep");
    }
}
