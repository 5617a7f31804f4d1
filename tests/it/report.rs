//! The report: what is in it, that nothing of a file becomes markup, how large it grows, and how it looks to a browser.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command as Process, Stdio};

use serde_json::{Value, json};

use crate::verb::run;

const HOSTILE: &str = "\"><script>alert(1)</script><img src=x onerror=alert(1)>'\u{202e}|`<!--";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The page of `runs`, with more arguments.
fn page(dir: &Path, runs: &[&str], more: &[&str]) -> (PathBuf, String) {
    let out = dir.join("report.html");
    let mut args = vec!["report"];
    args.extend(runs);
    args.extend(["--out", out.to_str().unwrap()]);
    args.extend(more);
    let (code, printed, err) = run(&args);
    assert_eq!(code, 0, "{printed}{err}");
    let html = std::fs::read_to_string(&out).unwrap();
    (out, html)
}

/// What Python's own HTML parser finds: tags that do not close where they should, how often each tag is there, the names
/// of attributes, and whether the script is the one that the page's policy allows.
fn parsed(html: &str) -> Value {
    use std::io::Write as _;
    const PARSE: &str = r"
import base64, collections, hashlib, html.parser, json, re, sys
VOID = {'meta', 'link', 'input', 'br', 'img', 'hr'}
class Parser(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.wrong, self.script = [], [], ''
        self.tags, self.attributes, self.policy = collections.Counter(), collections.Counter(), ''
    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes.update(name for name, _ in attrs)
        if tag == 'meta' and ('http-equiv', 'Content-Security-Policy') in attrs:
            self.policy = dict(attrs)['content']
        if tag not in VOID:
            self.open.append(tag)
    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f'{tag} at {self.getpos()}')
    def handle_data(self, data):
        if self.open and self.open[-1] == 'script':
            self.script += data
page = Parser()
page.feed(sys.stdin.read())
page.close()
digest = base64.b64encode(hashlib.sha256(page.script.encode()).digest()).decode()
print(json.dumps({'wrong': page.wrong[:5] + page.open, 'tags': page.tags, 'attributes': page.attributes,
    'allowed': f'sha256-{digest}' in page.policy and 'unsafe-inline' not in page.policy.split('script-src')[1]}))
";
    let mut python =
        Process::new("python3").args(["-c", PARSE]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    python.stdin.take().unwrap().write_all(html.as_bytes()).unwrap();
    let output = python.wait_with_output().unwrap();
    assert!(output.status.success());
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Nothing but the program's own markup is there.
fn assert_own_markup(html: &str) {
    let found = parsed(html);
    assert_eq!(found["wrong"], json!([]), "tags that do not close where they should");
    assert_eq!(
        found["allowed"], true,
        "report.js.sha256 is the hash of report.js: openssl dgst -sha256 -binary | base64"
    );
    assert_eq!((&found["tags"]["script"], &found["tags"]["style"]), (&json!(1), &json!(1)));
    let own = [
        "a",
        "b",
        "body",
        "dd",
        "details",
        "div",
        "dl",
        "dt",
        "figcaption",
        "figure",
        "footer",
        "g",
        "h1",
        "h2",
        "h3",
        "head",
        "header",
        "html",
        "li",
        "link",
        "main",
        "meta",
        "nav",
        "p",
        "path",
        "script",
        "section",
        "small",
        "span",
        "style",
        "summary",
        "svg",
        "table",
        "tbody",
        "td",
        "text",
        "th",
        "thead",
        "title",
        "tr",
        "ul",
    ];
    for tag in found["tags"].as_object().unwrap().keys() {
        assert!(own.contains(&tag.as_str()), "a <{tag}> that is not the program's");
    }
    for name in found["attributes"].as_object().unwrap().keys() {
        assert!(!name.starts_with("on") && name != "src", "an attribute {name}");
    }
}

/// Kernels that are timed in the committed table; its ceilings are not.
fn kernel_timings() -> usize {
    let mut table = csv::Reader::from_path(root().join("results/h200/kernels.csv")).unwrap();
    table.records().filter(|row| row.as_ref().unwrap().get(0) != Some("ceiling")).count()
}

/// Rows of the committed sweeps of a folder, or of its folders.
fn cells_of(folder: &str) -> usize {
    let folder = root().join(folder);
    let inside = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let sweeps = std::iter::once(folder.clone()).chain(inside).map(|folder| folder.join("sweep.jsonl"));
    sweeps.filter_map(|file| Some(std::fs::read_to_string(file).ok()?.lines().count())).sum()
}

#[test]
fn a_report_of_results_has_every_section_and_asks_the_network_for_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let traffic = dir.path().join("traffic.csv");
    std::fs::write(&traffic, "models,recipe,batch,mlp_bytes,kv_bytes,step_bytes\nqwen3.6-27b,fp8-channel,8,9,1,10\n")
        .unwrap();
    let runs = ["results/h200", "results/qwen3.5-9b-on-rtx-4090"];
    let (_, html) = page(dir.path(), &runs, &["--traffic", traffic.to_str().unwrap()]);
    assert_own_markup(&html);
    for id in [
        "summary",
        "memory",
        "speed",
        "owners",
        "pareto",
        "compare",
        "kernels",
        "traffic",
        "cells",
        "provenance",
        "definitions",
    ] {
        assert!(html.contains(&format!("<h2 id=\"{id}\">")), "no section {id}");
    }
    // An incident's cell does not fit and is hatched, beside one that does; the frontier runs between them.
    assert!(html.contains("<td class=\"oom\">") && html.contains("short 1.21 GiB"));
    assert!(html.contains("head.linear.logits needs 3.79 GiB"));
    assert!(html.contains(" er\"><a ") && html.contains(" eb\"><a "));
    // The same cell with and without the fault.
    assert!(html.contains("oom \u{2192} ok"));
    let kernels = format!("{}</b>kernel timings, all checked against the CPU arm", kernel_timings());
    assert!(html.contains(&kernels), "{kernels}");
    assert!(html.contains("mlp 9 B, 90.00 %"));
    // Each cell, of the card and planned, is a line of the table that its cell of the heat map leads to.
    let cells: usize = runs.map(cells_of).iter().sum();
    assert!(cells > 40, "{cells}");
    for number in 1..=cells {
        assert!(html.contains(&format!("<tr id=\"c{number}\"")) && html.contains(&format!("href=\"#c{number}\"")));
    }
    for word in ["NaN", "Infinity", "None", "null"] {
        let text = html.split("<script>").next().unwrap();
        assert!(!text.contains(&format!(">{word}")) && !text.contains(&format!(" {word} ")), "{word}");
    }
    assert!(html.len() < 700_000, "{} B", html.len());
}

#[test]
fn nothing_that_a_file_says_becomes_markup() {
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().join("<img src=x onerror=alert(1)>");
    std::fs::create_dir(&run_dir).unwrap();
    let read = |run: &str| std::fs::read_to_string(root().join("results").join(run).join("sweep.jsonl")).unwrap();
    let mut lines = String::new();
    for line in read("h200/incident-one-faulty").lines().chain(read("h200/qwen3.6-27b-fp8-channel-decode").lines()) {
        let mut row: Value = serde_json::from_str(line).unwrap();
        for (column, value) in row.as_object_mut().unwrap() {
            if column != "status" && (value.is_string() || value.is_null() && column.ends_with("_tag")) {
                *value = HOSTILE.into();
            }
            if column == "owners" {
                value[0]["tag"] = HOSTILE.into();
            }
        }
        for column in ["detail", "fault", "worker_note", "dirty", "workload", "shard", "gpu", "driver", "throttled"] {
            row[column] = HOSTILE.into();
        }
        writeln!(lines, "{row}").unwrap();
    }
    std::fs::write(run_dir.join("sweep.jsonl"), lines).unwrap();
    let quoted = format!("\"{}\"", HOSTILE.replace('"', "\"\""));
    let kernels = format!(
        "kernel,model,part,scheme,cache,bound_by,card,argv,bytes,flops,median_us,percent_of_ceiling\n\
         {},9,9,9,9\n",
        [quoted.as_str(); 8].join(",")
    );
    std::fs::write(run_dir.join("kernels.csv"), kernels).unwrap();
    let traffic = dir.path().join("traffic.csv");
    std::fs::write(&traffic, format!("{quoted},x_bytes\n{quoted},7\n")).unwrap();
    let run_at = run_dir.to_str().unwrap();
    let (_, html) = page(dir.path(), &[run_at], &["--traffic", traffic.to_str().unwrap()]);
    assert_own_markup(&html);
    assert!(
        html.matches("&lt;script&gt;alert(1)").count() > 20
            && !html.contains("<script>alert")
            && !html.contains('\u{202e}')
    );
    let (code, markdown, _) = run(&["report", run_at, "--markdown"]);
    assert_eq!(code, 0);
    assert!(markdown.contains("\\<script\\>"), "{markdown}");
    let bare = markdown.replace("\\\\", "").replace("\\<", "");
    assert!(!bare.contains('<'), "every bracket of a file's text is escaped: {markdown}");
    for line in markdown.lines().filter(|line| line.starts_with('|')) {
        let cells = line.replace("\\\\", "").replace("\\|", "").matches('|').count();
        assert!(cells >= 3 && line.ends_with(" |"), "{line}");
    }
}

#[test]
fn a_report_of_ten_thousand_cells_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().join("run");
    std::fs::create_dir(&run_dir).unwrap();
    let line = std::fs::read_to_string(root().join("results/h200/qwen3.6-27b-fp8-channel-decode/sweep.jsonl")).unwrap();
    let mut row: Value = serde_json::from_str(line.lines().next().unwrap()).unwrap();
    let mut lines = String::new();
    for cell in 0..10_000u64 {
        row["chunk"] = (64 * (1 + cell % 50)).into();
        row["batch"] = (1 + cell / 50 % 20).into();
        row["depth"] = (1024 * (cell / 1000)).into();
        row["tpot_ms"] = (5.0 + (cell % 97) as f64).into();
        writeln!(lines, "{row}").unwrap();
    }
    std::fs::write(run_dir.join("sweep.jsonl"), lines).unwrap();
    let (_, html) = page(dir.path(), &[run_dir.to_str().unwrap()], &[]);
    assert_eq!(html.matches("<tr id=\"c").count(), 10_000);
    assert_eq!(html.matches("<td class=\"q").count(), 10_000, "every cell is in a heat map");
    assert!(html.len() < 20_000_000, "{} B", html.len());
    let (code, markdown, _) = run(&["report", run_dir.to_str().unwrap(), "--markdown"]);
    assert!(code == 0 && markdown.len() < 20_000, "{} B", markdown.len());
}

#[test]
fn markdown_for_a_pull_request_says_what_fits_what_does_not_and_what_changed() {
    let (code, text, _) = run(&["report", "results/h200", "results/qwen3.5-9b-on-rtx-4090", "--markdown"]);
    assert_eq!(code, 0);
    let runs = std::fs::read_dir(root().join("results/h200")).unwrap().map(|entry| entry.unwrap().path());
    let runs = runs.chain([root().join("results/qwen3.5-9b-on-rtx-4090")]).map(|run| run.join("sweep.jsonl"));
    let records: Vec<String> = runs.filter_map(|file| std::fs::read_to_string(file).ok()).collect();
    let cells: Vec<&str> = records.iter().flat_map(|record| record.lines()).collect();
    let fit = cells.iter().filter(|row| row.contains("\"status\":\"ok\"")).count();
    let (all, not) = (cells.len(), cells.len() - fit);
    let counts = format!("{all} cells in {} runs\n\n{fit} fit, {not} do not fit, 0 failed.\n", records.len());
    assert!(text.starts_with(&format!("### Highwater: {counts}")), "{counts}\n{text}");
    assert!(text.contains("batch 16: 16384 fits, 32768 does not"), "{text}");
    // 576 MiB at a chunk of 8192, twice that at 16384.
    assert!(text.contains("bytes a token") && text.contains("73728"), "{text}");
    assert!(text.contains("head.linear.logits needs 3.79 GiB, short by 1.21 GiB"));
    assert!(text.contains("| oom to ok |"));
    assert!(text.lines().count() < 80);
}

#[test]
fn a_report_that_cannot_be_made_says_why_and_writes_over_no_record() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().to_str().unwrap();
    let html = dir.path().join("x.html");
    let html = html.to_str().unwrap();
    let (code, _, err) = run(&["report", at, "--out", html]);
    assert!(code == 1 && err.contains("holds no run"), "{code} {err}");
    let record = "results/h200/incident-one-right/sweep.jsonl";
    let before = std::fs::read(root().join(record)).unwrap();
    let (code, _, err) = run(&["report", "results/h200", "--out", record]);
    assert!(code == 2 && err.contains("not a .html file"), "{code} {err}");
    assert_eq!(std::fs::read(root().join(record)).unwrap(), before);
    let (code, _, err) = run(&["report", "results/h200"]);
    assert!(code == 2 && err.contains("--out"), "{code} {err}");
    let (code, _, err) = run(&["report", "results/h200", "--out", html, "--traffic", "none.csv"]);
    assert!(code == 1 && err.contains("none.csv"), "{code} {err}");
}

#[test]
fn a_bench_s_folder_and_single_files_are_taken_and_traffic_is_computed() {
    let dir = tempfile::tempdir().unwrap();
    let bench = dir.path().join("bench/h200");
    std::fs::create_dir_all(&bench).unwrap();
    std::fs::copy(root().join("results/h200/kernels.csv"), bench.join("kernels.csv")).unwrap();
    let (_, html) = page(dir.path(), &[dir.path().join("bench").to_str().unwrap()], &[]);
    assert!(html.contains("<h2 id=\"kernels\">") && !html.contains("<h2 id=\"traffic\">"));
    let (_, html) = page(dir.path(), &["results/qwen3.5-9b-on-rtx-4090/sweep.csv"], &[]);
    assert_own_markup(&html);
    assert!(html.contains("<h2 id=\"traffic\">") && html.contains("qwen3.5-9b bf16 context 1024 batch 64"));
    let runs = ["results/h200", "results/h200/kernels.csv"];
    let (code, text, err) = run(&[&["report"], &runs[..], &["--markdown"]].concat());
    assert!(code == 0 && text.contains("\nMeasured otherwise than the "), "{text}{err}");
    assert!(text.contains(&format!("{} timings of kernels", kernel_timings())), "a file is read once: {text}");
}

/// A Chromium of this machine: `HIGHWATER_CHROMIUM`, or one under its usual names.
fn chromium() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("HIGHWATER_CHROMIUM") {
        return Some(named.into());
    }
    let names =
        ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell"];
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders)
        .flat_map(|folder| names.map(|name| folder.join(name)))
        .find(|program| program.is_file())
}

/// What `browser.py` finds wrong with a page.
fn findings(chromium: &Path, page: &Path) -> (bool, String) {
    let script = root().join("tests/it/browser.py");
    let output = Process::new("python3").arg(script).arg(chromium).arg(page).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.success(), said)
}

#[test]
fn a_browser_finds_nothing_wrong_with_the_report_and_finds_what_is_wrong_with_a_broken_one() {
    let Some(chromium) = chromium() else {
        assert!(std::env::var_os("REQUIRE_BROWSER").is_none(), "REQUIRE_BROWSER is set and there is no Chromium");
        println!("skipped: no Chromium; set HIGHWATER_CHROMIUM to one");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let (path, html) = page(dir.path(), &["results/h200", "results/qwen3.5-9b-on-rtx-4090"], &[]);
    let (fine, said) = findings(&chromium, &path);
    assert!(fine, "{said}");

    // Each fault alone would be missed by a check that always passes.
    let broken = html
        .replacen("--faint:#566069", "--faint:#b9bec3", 1)
        .replacen("<footer>", "<footer style=\"width:2000px\">", 1)
        .replacen("class=\"skip\"", "class=\"skip\" tabindex=\"-1\"", 1)
        .replacen("href=\"#definitions\"", "href=\"#nowhere\"", 1)
        .replacen("\"use strict\";", "console.log(1);", 1)
        .replacen("<td class=\"oom\"><a ", "<td class=\"oom\"><a tabindex=\"-1\" ", 1);
    assert_ne!(broken, html);
    let path = dir.path().join("broken.html");
    std::fs::write(&path, broken).unwrap();
    let (fine, said) = findings(&chromium, &path);
    assert!(!fine);
    for found in [
        "desk-light: contrast",
        "phone-light: scrolls sideways",
        "first stop of the tabulator",
        "leads nowhere: #nowhere",
        "Content Security Policy",
        "the heads of the table are no buttons",
        "cells of heat maps",
    ] {
        assert!(said.contains(found), "{found} was not found:\n{said}");
    }
}
