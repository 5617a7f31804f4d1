//! A trace file: one JSON object a line, each a request with its arrival, its prompt's and its output's length.
//!
//! Keys are those of published traces: `timestamp` (or `arrival_ms`), in ms from the start, or `arrival_step`, in engine
//! steps; `input_length` (or `prompt`) and `output_length` (or `output`), in tokens. `hash_ids` is skipped: prompts are made
//! up, and no prefix is shared. Any other key is refused, so that no file is read as what it is not.

use std::hash::Hasher as _;
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::axis::MAX_TOKENS;
use highwater::num::fnv::Fnv1a;

/// The largest file that is read.
const MAX_BYTES: u64 = 64 << 20;
/// The most requests of one.
const MAX_REQUESTS: usize = 100_000;
/// The latest arrival: a year, in ms.
const MAX_MS: f64 = 366.0 * 86_400e3;
/// The latest arrival in steps.
const MAX_STEP: u64 = 1 << 40;

/// When a request of a trace arrives.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Arrival {
    /// Milliseconds after the start.
    Ms(f64),
    /// Before the engine's step of this number, counted from 0.
    Step(u64),
}

/// A request of a trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TraceRequest {
    /// When it arrives.
    pub(crate) arrival: Arrival,
    /// Tokens of its prompt, at least 1.
    pub(crate) prompt: u64,
    /// Tokens it generates, at least 1.
    pub(crate) output: u64,
}

/// A trace, read and checked.
#[derive(Debug, PartialEq)]
pub(crate) struct Trace {
    /// `trace:FILE@HASH`: the file's own name and a hash of its bytes, so that two contents are never one workload.
    pub(crate) label: String,
    /// In order of arrival; at least one.
    pub(crate) requests: Vec<TraceRequest>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    #[serde(alias = "arrival_ms")]
    timestamp: Option<f64>,
    arrival_step: Option<u64>,
    #[serde(alias = "prompt")]
    input_length: u64,
    #[serde(alias = "output")]
    output_length: u64,
    #[serde(default, rename = "hash_ids")]
    _hash_ids: Option<IgnoredAny>,
}

impl Trace {
    /// Reads `path`; an error names the line.
    pub(crate) fn read(path: &Path) -> Result<Trace> {
        let shown = path.display();
        let about = std::fs::metadata(path).with_context(|| format!("cannot read the trace {shown}"))?;
        // A pipe or a device may never end.
        ensure!(about.is_file(), "the trace {shown} is no regular file");
        let mut bytes = Vec::new();
        let file = std::fs::File::open(path).with_context(|| format!("cannot read the trace {shown}"))?;
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes).with_context(|| format!("cannot read the trace {shown}"))?;
        ensure!(bytes.len() as u64 <= MAX_BYTES, "the trace {shown} has more than {MAX_BYTES} B; cut it");
        let requests = parse(&bytes).with_context(|| format!("trace {shown}"))?;
        let mut hash = Fnv1a::default();
        hash.write(&bytes);
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
        Ok(Trace { label: format!("trace:{name}@{:016x}", hash.finish()), requests })
    }

    /// The most tokens a request of it holds, prompt and output.
    pub(crate) fn longest(&self) -> u64 {
        self.requests.iter().map(|r| r.prompt + r.output).max().unwrap_or(0)
    }
}

fn parse(bytes: &[u8]) -> Result<Vec<TraceRequest>> {
    let mut requests: Vec<TraceRequest> = Vec::new();
    for (at, line) in bytes.split(|b| *b == b'\n').enumerate() {
        if line.trim_ascii().is_empty() {
            continue;
        }
        let request = parse_line(line).with_context(|| format!("line {}", at + 1))?;
        if let Some(earlier) = requests.last() {
            let in_order = match (earlier.arrival, request.arrival) {
                (Arrival::Ms(a), Arrival::Ms(b)) => a <= b,
                (Arrival::Step(a), Arrival::Step(b)) => a <= b,
                _ => bail!("line {}: arrivals in ms and in steps are mixed; take one", at + 1),
            };
            ensure!(in_order, "line {}: it arrives before the line above it; sort the file by arrival", at + 1);
        }
        ensure!(requests.len() < MAX_REQUESTS, "line {}: more than {MAX_REQUESTS} requests; cut the file", at + 1);
        requests.push(request);
    }
    ensure!(!requests.is_empty(), "it holds no request");
    Ok(requests)
}

fn parse_line(line: &[u8]) -> Result<TraceRequest> {
    let line: Line = serde_json::from_slice(line).map_err(|error| {
        // The one line is always line 1 to the parser; its column is what helps.
        let text = error.to_string().replace(" at line 1 column", ", column");
        anyhow::anyhow!("{text}; a line is like {{\"timestamp\": 27, \"input_length\": 512, \"output_length\": 32}}")
    })?;
    let arrival = match (line.timestamp, line.arrival_step) {
        (Some(ms), None) if (0.0..=MAX_MS).contains(&ms) => Arrival::Ms(ms),
        (None, Some(step)) if step <= MAX_STEP => Arrival::Step(step),
        (Some(ms), None) => bail!("an arrival of {ms} ms is outside 0 to {MAX_MS}"),
        (None, Some(step)) => bail!("an arrival at step {step} is outside 0 to {MAX_STEP}"),
        (Some(_), Some(_)) => bail!("both timestamp and arrival_step are given; take one"),
        (None, None) => bail!("neither timestamp (ms) nor arrival_step is given"),
    };
    for (name, tokens) in [("input_length", line.input_length), ("output_length", line.output_length)] {
        ensure!((1..=MAX_TOKENS).contains(&tokens), "{name} of {tokens} tokens is outside 1 to {MAX_TOKENS}");
    }
    Ok(TraceRequest { arrival, prompt: line.input_length, output: line.output_length })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        format!("{:#}", parse(text.as_bytes()).expect_err(text))
    }

    #[test]
    fn lines_of_published_traces_and_of_ours_are_read() {
        let text = "{\"timestamp\": 0, \"input_length\": 6955, \"output_length\": 52, \"hash_ids\": [46, 47]}\n\n\
                    {\"arrival_ms\": 27.5, \"prompt\": 3, \"output\": 1}\r\n";
        let want = [
            TraceRequest { arrival: Arrival::Ms(0.0), prompt: 6955, output: 52 },
            TraceRequest { arrival: Arrival::Ms(27.5), prompt: 3, output: 1 },
        ];
        assert_eq!(parse(text.as_bytes()).unwrap(), want);
        let steps = parse(b"{\"arrival_step\": 4, \"prompt\": 3, \"output\": 1}").unwrap();
        assert_eq!(steps[0].arrival, Arrival::Step(4));
    }

    #[test]
    fn whatever_is_wrong_is_refused_by_its_line() {
        let good = "{\"arrival_ms\": 5, \"prompt\": 3, \"output\": 1}\n";
        for (bad, words) in [
            ("{", "line 2: EOF"),
            ("[]", "line 2"),
            ("null", "line 2"),
            ("{\"prompt\": 3, \"output\": 1}", "neither timestamp"),
            ("{\"arrival_ms\": 5, \"arrival_step\": 5, \"prompt\": 3, \"output\": 1}", "both"),
            ("{\"arrival_step\": 9, \"prompt\": 3, \"output\": 1}", "mixed"),
            ("{\"arrival_ms\": 4, \"prompt\": 3, \"output\": 1}", "sort the file"),
            ("{\"arrival_ms\": -1, \"prompt\": 3, \"output\": 1}", "-1 ms is outside"),
            ("{\"arrival_ms\": 1e400, \"prompt\": 3, \"output\": 1}", "line 2: number out of range"),
            ("{\"arrival_ms\": 1e300, \"prompt\": 3, \"output\": 1}", "outside"),
            ("{\"arrival_ms\": NaN, \"prompt\": 3, \"output\": 1}", "line 2"),
            ("{\"arrival_ms\": 5, \"prompt\": 0, \"output\": 1}", "input_length of 0"),
            ("{\"arrival_ms\": 5, \"prompt\": 3, \"output\": 99999999}", "output_length of 99999999"),
            ("{\"arrival_ms\": 5, \"prompt\": -3, \"output\": 1}", "line 2: invalid value"),
            ("{\"arrival_ms\": 5, \"prompt\": 3, \"prompt\": 4, \"output\": 1}", "line 2: duplicate field"),
            ("{\"chat_id\": 1, \"arrival_ms\": 5, \"prompt\": 3, \"output\": 1}", "unknown field `chat_id`"),
            ("{\"arrival_ms\": 5, \"prompt\": 3, \"output\": 1} x", "line 2: trailing"),
            ("\u{feff}{}", "line 2"),
        ] {
            let text = refusal(&format!("{good}{bad}\n"));
            assert!(text.contains(words), "{bad}: {text}");
        }
        assert!(refusal("").contains("no request") && refusal(" \n\n").contains("no request"));
        let deep = format!("{{\"hash_ids\": {}", "[".repeat(10_000));
        assert!(refusal(&deep).contains("line 1"));
        assert!(parse(&[0xff, 0xfe, b'\n', 0]).is_err());
    }

    #[test]
    fn a_trace_is_known_by_its_name_and_its_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("burst.jsonl");
        let write = |prompt: u64| {
            std::fs::write(&path, format!("{{\"arrival_ms\": 0, \"prompt\": {prompt}, \"output\": 2}}\n")).unwrap();
            Trace::read(&path).unwrap()
        };
        let (a, b) = (write(3), write(4));
        assert!(a.label.starts_with("trace:burst.jsonl@") && a.label != b.label);
        assert_eq!((a.longest(), b.longest()), (5, 6));
        let text = format!("{:#}", Trace::read(dir.path()).unwrap_err());
        assert!(text.contains("no regular file"), "{text}");
        let text = format!("{:#}", Trace::read(&dir.path().join("none")).unwrap_err());
        assert!(text.contains("cannot read the trace"), "{text}");
    }
}
