//! The README's speeds are the rows the program wrote on a card, no number typed.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

type Row = BTreeMap<String, String>;

fn rows(run: &str) -> Vec<Row> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/h200").join(run).join("sweep.csv");
    let mut reader = csv::Reader::from_path(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    reader.deserialize().map(|row| row.unwrap()).collect()
}

fn number(row: &Row, column: &str) -> f64 {
    row[column].parse().unwrap_or_else(|_| panic!("{column} is {:?}", row[column]))
}

/// The table: prefill of one prompt of 8,192 tokens, and TPOT after 992 tokens by batch.
fn table() -> String {
    let models = [
        ("qwen3.6-27b-fp8-channel", ""),
        ("qwen3.6-27b-fp8-channel", "-batch-invariant"),
        ("qwen3.8-27b-unsloth-nvfp4", ""),
        ("qwen3.6-35b-a3b-fp8-channel", ""),
        ("qwen3.6-35b-a3b-unsloth-nvfp4-fast", ""),
    ];
    let mut text = String::from(
        "| model | prefill 8192, tok/s | TPOT ms, batch 1 | 8 | 64 | floors | distinct experts a layer |\n\
         | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for (model, how) in models {
        let decode = rows(&format!("{model}{}", if how.is_empty() { "-decode" } else { how }));
        let of = |batch: &str| decode.iter().find(|r| r["batch"] == batch).unwrap();
        let cells = ["1", "8", "64"].map(of);
        for row in cells {
            assert_eq!((&*row["status"], &*row["device"], &*row["checked"]), ("ok", "cuda", "true"));
            assert_eq!((&*row["context"], &*row["fault"]), (if how.is_empty() { "1024" } else { "1008" }, ""));
            let slab =
                ["resident_bytes", "transient_peak_bytes", "free_bytes"].map(|c| number(row, c)).iter().sum::<f64>();
            assert_eq!(slab, number(row, "slab_bytes"));
            assert!(number(row, "unattributed_bytes").abs() <= f64::from(16 << 20));
            // Taken off the card before the KV cache is sized, what capture takes included.
            let outside = ["context_bytes", "modules_bytes", "blas_bytes", "graphs_bytes"].map(|c| number(row, c));
            assert!(outside.iter().sum::<f64>() <= number(row, "overhead_bytes"));
        }
        let prefill = if how.is_empty() {
            let rows = rows(&format!("{model}-prefill"));
            assert_eq!((rows.len(), &*rows[0]["prompt"], &*rows[0]["checked"]), (1, "8192", "true"));
            format!("{:.0}", number(&rows[0], "prefill_tok_s"))
        } else {
            "-".into()
        };
        let tpot = cells.map(|row| format!("{:.2}", number(row, "tpot_ms"))).join(" | ");
        let floors = cells.map(|row| format!("{:.2}", number(row, "floor_tpot_ms"))).join(", ");
        let experts = if cells[0]["experts_per_layer"].is_empty() {
            "-".into()
        } else {
            cells.map(|row| format!("{:.0}", number(row, "experts_per_layer"))).join(", ")
        };
        let (name, recipe) = (&cells[0]["model"], &cells[0]["recipe"]);
        let how = if how.is_empty() { "" } else { " --batch-invariant" };
        writeln!(text, "| {name}@{recipe}{how} | {prefill} | {tpot} | {floors} | {experts} |").unwrap();
    }
    text
}

#[test]
fn the_readme_s_speeds_are_the_rows_of_results() {
    let readme = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let (begin, end) = ("<!-- speeds: from results/h200; a test holds the two together -->\n", "<!-- /speeds -->");
    let block = readme.split(begin).nth(1).and_then(|rest| rest.split(end).next()).unwrap_or("");
    let want = table();
    assert_eq!(block, want, "replace the table of speeds in README.md by:\n{want}");
}

#[test]
fn the_incidents_on_a_card_are_rows_that_say_so() {
    let find = |run: &str, chunk: &str| rows(run).into_iter().find(|r| r["chunk"] == chunk).unwrap();
    let faulty = find("incident-one-faulty", "8192");
    assert_eq!((&*faulty["status"], &*faulty["oom_tag"]), ("oom", "head.linear.logits"));
    assert_eq!(faulty["oom_requested_bytes"], "4068474880");
    // The engine goes on after it, in the same process.
    assert_eq!(find("incident-one-faulty", "512")["status"], "ok");
    assert_eq!(find("incident-one-right", "8192")["status"], "ok");
    assert_eq!(find("incident-two-native", "8192")["status"], "ok");
    assert_eq!(find("incident-two-twin", "8192")["status"], "oom_predicted");
    assert_eq!(find("incident-two-twin", "512")["status"], "ok");
    for run in ["incident-one-faulty", "incident-one-right", "incident-two-native", "incident-two-twin"] {
        assert!(rows(run).iter().all(|row| row["device"] == "cuda"), "{run}");
    }
}

/// How often the gate's verdicts were wrong on the card: what the README says is what the program wrote.
#[test]
fn the_readme_s_rates_of_verdicts_are_those_of_the_self_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = root.join("results/h200/self-test-qwen3.5-0.8b/self-test.json");
    let test: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let rate = |rate: &serde_json::Value| format!("{} of {}", rate["hits"], rate["trials"]);
    let scores = test["scores"].as_array().unwrap();
    let [prefill, tpot] = [&scores[0], &scores[1]];
    assert_eq!((&prefill["metric"], &tpot["metric"]), (&"prefill".into(), &"TPOT".into()));
    let said = format!(
        "{} (prefill) and {} (TPOT) comparisons of a build with itself got a false verdict, a seeded slowdown of 3 % was found \
         in {} and {}",
        rate(&prefill["false_verdicts"]),
        rate(&tpot["false_verdicts"]),
        rate(&prefill["found"]),
        rate(&tpot["found"]),
    );
    let readme =
        std::fs::read_to_string(root.join("README.md")).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(readme.contains(&said), "the README is to say: {said}");
}
