//! Bytes that a decode step moves, by module: stacked bars of the `..._bytes` columns of a table that was given, or of the one
//! that the runs' built-in models have.

use highwater::checkpoint::{ModelRef, names};
use highwater::error::mib;
use highwater::ops::Numerics;
use rayon::prelude::*;

use super::load::{Input, Traffic};
use super::markup::Markup;
use super::view::{Cell, count};
use crate::replan::{BATCHES, TRAFFIC_CONTEXT};
use crate::table::{number, shortened};
use crate::traffic::{MODULES, Traffic as Step, traffic_of};

/// Sums of the other columns, and no modules.
const SUMS: [&str; 2] = ["step_bytes", "token_bytes"];
/// Most bars.
const MAX_BARS: usize = 60;

/// Most models whose table is computed.
const MAX_MODELS: usize = MAX_BARS / BATCHES.len();

/// What a decode step of each built-in model of the runs moves, at the batches and the context of `results/plan/traffic.csv`.
/// A checkpoint's folder is not here to be read.
pub(super) fn computed(input: &Input) -> Option<Traffic> {
    let mut models: Vec<(&str, &str)> = Vec::new();
    for row in input.runs.iter().flat_map(|run| &run.rows) {
        let seeded = row.weights_source.as_deref().is_some_and(|source| source.starts_with("seed:"));
        let model = (row.model.as_str(), row.recipe.as_str());
        if seeded && names().any(|name| Some(name) == model.0.split(':').next()) && !models.contains(&model) {
            models.push(model);
        }
    }
    let left_out = models.len().saturating_sub(MAX_MODELS) * BATCHES.len();
    models.truncate(MAX_MODELS);
    let of_model = |(model, recipe): &(&str, &str)| -> Option<Vec<Vec<String>>> {
        // A recipe or a cut of another build is no model of this one.
        let source = ModelRef::parse(&format!("{model}@{recipe}")).ok()?.open(0).ok()?;
        let steps = traffic_of(&source, Numerics::BF16, &BATCHES, TRAFFIC_CONTEXT).ok()?;
        let row = |step: &Step| {
            let words = [(*model).to_owned(), (*recipe).to_owned()];
            let sums = [step.total(), step.per_token()];
            let numbers = [TRAFFIC_CONTEXT, step.batch].into_iter().chain(step.modules).chain(sums);
            words.into_iter().chain(numbers.map(|number| number.to_string())).collect()
        };
        Some(steps.iter().map(row).collect())
    };
    let rows: Vec<Vec<String>> = models.par_iter().filter_map(of_model).flatten().collect();
    let columns = ["models", "recipe", "context", "batch"].map(str::to_owned).into_iter();
    let modules = MODULES.map(|(name, _)| format!("{name}_bytes")).into_iter();
    let columns = columns.chain(modules).chain(SUMS.map(str::to_owned)).collect();
    (!rows.is_empty()).then_some(Traffic { columns, rows, left_out })
}

/// The section's body; empty without a table.
pub(super) fn section(traffic: Option<&Traffic>, cells: &[Cell]) -> Markup {
    let mut out = Markup::new();
    let Some(traffic) = traffic else { return out };
    let column = |name: &str| traffic.columns.iter().position(|column| column == name);
    let modules: Vec<usize> = (0..traffic.columns.len())
        .filter(|at| traffic.columns[*at].ends_with("_bytes") && !SUMS.contains(&traffic.columns[*at].as_str()))
        .collect();
    // The rows of what the report is about, where the table says of which models they are.
    let about = |row: &&Vec<String>| {
        let (Some(models), Some(recipe)) = (column("models").or(column("model")), column("recipe")) else {
            return true;
        };
        let named = |model: &str| row[models].split(|c: char| c.is_whitespace() || c == ';').any(|name| name == model);
        cells.iter().any(|cell| row[recipe] == cell.row.recipe && named(&cell.row.model))
    };
    let mut rows: Vec<&Vec<String>> = traffic.rows.iter().filter(about).collect();
    let all = rows.is_empty();
    if all {
        rows = traffic.rows.iter().collect();
    }
    out.open("p", &[("class", "note")]);
    out.text(
        "Bytes one decode step reads and writes at least, by module, from the plan of bf16 values; per token it is divided by the batch. \
         Divided by the card's bandwidth they bound the TPOT.",
    );
    if all {
        out.text(" None of its rows is of a model of these runs, so all are shown.");
    }
    out.close("p").line();
    let number_at = |row: &[String], at: usize| row[at].parse::<u64>().ok();
    let sum = |row: &[String]| modules.iter().filter_map(|at| number_at(row, *at)).fold(0u64, u64::saturating_add);
    let most = rows.iter().take(MAX_BARS).map(|row| sum(row)).max().unwrap_or(0).max(1);
    out.open("figure", &[("class", "bars")]);
    for row in rows.iter().take(MAX_BARS) {
        let words = (0..row.len()).filter(|at| !traffic.columns[*at].ends_with("_bytes"));
        let name: Vec<String> = words
            .map(|at| match traffic.columns[at].as_str() {
                "model" | "models" => {
                    let all = || row[at].split(|c: char| c.is_whitespace() || c == ';');
                    let ours: Vec<&str> = all().filter(|name| cells.iter().any(|c| c.row.model == *name)).collect();
                    if ours.is_empty() { row[at].clone() } else { ours.join(" ") }
                }
                "recipe" => row[at].clone(),
                column => format!("{column} {}", row[at]),
            })
            .collect();
        let name = shortened(&name.join(" "), 100);
        let total = sum(row);
        out.open("div", &[("class", "bar-row")]).leaf("span", &[("class", "bar-name")], &name);
        let width = format!("width:{:.2}%", 100.0 * total as f64 / most as f64);
        out.open("span", &[("class", "track")]).open("span", &[("class", "bar"), ("style", &width)]);
        for (slot, at) in modules.iter().enumerate() {
            let Some(bytes) = number_at(row, *at).filter(|bytes| *bytes > 0) else { continue };
            let module = traffic.columns[*at].trim_end_matches("_bytes").replace('_', " ");
            let share = 100.0 * bytes as f64 / total.max(1) as f64;
            let label = format!("{name}: {module} {}, {} %", mib(bytes), number(share));
            let class = format!("r seg s{}", slot % super::chart::MAX_SERIES);
            let style = format!("flex-grow:{share:.3}");
            out.open(
                "span",
                &[("tabindex", "0"), ("role", "img"), ("class", &class), ("style", &style), ("aria-label", &label)],
            );
            if share > 8.0 {
                out.text(&module);
            }
            out.close("span");
        }
        out.close("span").close("span").leaf("span", &[("class", "bar-value")], &mib(total)).close("div");
    }
    out.close("figure");
    let left = rows.len().saturating_sub(MAX_BARS) + traffic.left_out;
    if left > 0 {
        out.leaf("p", &[("class", "note")], &format!("{} of the table not shown.", count(left, "more row")));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Row;
    use crate::record::tests::ok_row;
    use crate::report::load::Run;

    #[test]
    fn the_computed_table_is_what_the_committed_plans_say() {
        let seeded = |model: &str, recipe: &str| Row {
            model: model.into(),
            recipe: recipe.into(),
            weights_source: Some("seed:0".into()),
            ..ok_row(64, 1, 64)
        };
        let folder = Row { weights_source: Some("headers:1".into()), ..seeded("tiny", "bf16") };
        let rows = vec![
            folder,
            seeded("qwen3.5-0.8b", "bf16"),
            seeded("qwen3.5-0.8b", "no-such-recipe"),
            seeded("../x", "bf16"),
        ];
        let input = Input { runs: vec![Run { label: "r".into(), rows, torn: false }], ..Input::default() };
        let table = computed(&input).unwrap();
        let plan = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("results/plan/traffic.csv");
        let mut committed = csv::Reader::from_path(plan).unwrap();
        let header: Vec<String> = committed.headers().unwrap().iter().map(str::to_owned).collect();
        assert_eq!(table.columns, header);
        let committed = committed.records().map(|record| record.unwrap().iter().map(str::to_owned).collect::<Vec<_>>());
        let committed: Vec<_> = committed.filter(|row| row[0] == "qwen3.5-0.8b" && row[1] == "bf16").collect();
        assert_eq!((table.rows.len(), table.rows), (3, committed));
        assert!(computed(&Input::default()).is_none());
    }

    #[test]
    fn modules_are_the_columns_of_bytes_that_are_no_sums() {
        let text = |row: &[&str]| row.iter().map(|field| (*field).to_owned()).collect::<Vec<_>>();
        let traffic = Traffic {
            columns: text(&["models", "recipe", "batch", "mlp_bytes", "gdn_state_bytes", "step_bytes"]),
            rows: vec![
                text(&["<b>", "bf16", "8", "3145728", "1048576", "4194304"]),
                text(&["x", "y", "z", "", "", ""]),
            ],
            left_out: 1,
        };
        let html = section(Some(&traffic), &[]).finish();
        assert!(html.contains("&lt;b&gt; bf16 batch 8: mlp 3.0 MiB, 75.00 %"), "{html}");
        assert!(html.contains("gdn state 1.0 MiB") && html.contains("4.0 MiB</span>") && html.contains("1 more row"));
        assert!(section(None, &[]).is_empty());
    }
}
