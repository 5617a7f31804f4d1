//! The forms that hold the rows themselves: CSV, JSON, JSON lines, a Markdown table, SQL.

use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value};

use crate::journal::{csv_columns, csv_fields};
use crate::record::Row;
use crate::table::sweep_table;

/// Comma-separated values: the journal's own columns, without samples.
pub(super) fn csv(rows: &[Row]) -> Result<String> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(csv_columns())?;
    for row in rows {
        writer.write_record(csv_fields(row)?)?;
    }
    let bytes = writer.into_inner().map_err(|e| anyhow::anyhow!("{e}"))?;
    String::from_utf8(bytes).context("CSV of rows is text")
}

/// An array of rows, one a line.
pub(super) fn json(rows: &[Row]) -> Result<String> {
    array(rows)
}

/// One row a line.
pub(super) fn jsonl(rows: &[Row]) -> Result<String> {
    lines(rows)
}

/// The terminal's table in Markdown.
pub(super) fn markdown(rows: &[Row]) -> String {
    sweep_table(rows).markdown()
}

/// `CREATE TABLE highwater` and an `INSERT` per row. Lists are JSON text, truth values 1 and 0.
pub(super) fn sql(rows: &[Row]) -> Result<String> {
    let columns = object(&Row::default())?;
    let types: Vec<(String, &str)> = columns.keys().map(|name| (name.clone(), column_type(name))).collect();
    let records = rows.iter().map(object).collect::<Result<Vec<_>>>()?;
    table("highwater", &types, &records)
}

/// A JSON array with one item a line.
pub(super) fn array<T: serde::Serialize>(items: &[T]) -> Result<String> {
    let mut text = String::from("[");
    for (at, item) in items.iter().enumerate() {
        text.push_str(if at == 0 { "\n" } else { ",\n" });
        text.push_str(&serde_json::to_string(item)?);
    }
    text.push_str("\n]\n");
    Ok(text)
}

/// JSON lines.
pub(super) fn lines<T: serde::Serialize>(items: &[T]) -> Result<String> {
    let mut text = String::new();
    for item in items {
        text.push_str(&serde_json::to_string(item)?);
        text.push('\n');
    }
    Ok(text)
}

/// A table of SQL in one transaction: `types` are the columns, `records` hold them by name, and one that is missing is
/// `NULL`.
pub(super) fn table(name: &str, types: &[(String, &str)], records: &[Map<String, Value>]) -> Result<String> {
    let mut text = format!("BEGIN;\nCREATE TABLE IF NOT EXISTS {name} (\n");
    for (at, (column, kind)) in types.iter().enumerate() {
        let _ = writeln!(text, "  \"{column}\" {kind}{}", if at + 1 < types.len() { "," } else { "" });
    }
    text.push_str(");\n");
    let columns: Vec<String> = types.iter().map(|(column, _)| format!("\"{column}\"")).collect();
    for record in records {
        let values = types
            .iter()
            .map(|(column, _)| literal(record.get(column).unwrap_or(&Value::Null)).with_context(|| column.clone()))
            .collect::<Result<Vec<_>>>()?;
        let _ = writeln!(text, "INSERT INTO {name} ({}) VALUES ({});", columns.join(","), values.join(","));
    }
    text.push_str("COMMIT;\n");
    Ok(text)
}

/// A value as SQL writes it. A zero byte, which SQL text cannot hold, becomes the replacement character.
fn literal(value: &Value) -> Result<String> {
    let quoted = |text: &str| format!("'{}'", text.replace('\0', "\u{fffd}").replace('\'', "''"));
    Ok(match value {
        Value::Null => "NULL".into(),
        Value::Bool(on) => u8::from(*on).to_string(),
        Value::Number(number) => {
            let fits = number.is_f64() || number.as_i64().is_some();
            ensure!(fits, "{number} is above the largest integer of SQL, {}; export as json instead", i64::MAX);
            number.to_string()
        }
        Value::String(text) => quoted(text),
        Value::Array(_) | Value::Object(_) => quoted(&value.to_string()),
    })
}

fn object<T: serde::Serialize>(item: &T) -> Result<Map<String, Value>> {
    match serde_json::to_value(item)? {
        Value::Object(map) => Ok(map),
        _ => anyhow::bail!("a row is not an object"),
    }
}

/// The SQL type of a column: what the row takes there.
fn column_type(column: &str) -> &'static str {
    let takes = |value: Value| {
        let object = Value::Object([(column.to_owned(), value)].into_iter().collect());
        serde_json::from_value::<Row>(object).is_ok()
    };
    match () {
        () if takes(Value::from(1.5)) => "REAL",
        () if takes(Value::from(1)) || takes(Value::from(true)) => "INTEGER",
        () => "TEXT",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::ok_row;

    #[test]
    fn sql_types_are_those_of_the_columns() {
        let kinds = ["chunk", "tpot_ms", "checked", "model", "owners", "unattributed_bytes", "time"].map(column_type);
        assert_eq!(kinds, ["INTEGER", "REAL", "INTEGER", "TEXT", "TEXT", "INTEGER", "TEXT"]);
    }

    #[test]
    fn an_integer_that_sql_cannot_hold_is_refused_and_a_null_is_null() {
        let row = ok_row(1, 1, 1);
        assert_eq!(row.vram_bytes, Some(u64::MAX));
        let error = format!("{:#}", sql(std::slice::from_ref(&row)).unwrap_err());
        assert!(error.contains("vram_bytes") && error.contains("export as json"), "{error}");
        let text = sql(&[Row { vram_bytes: None, tpot_ms: Some(f64::NAN), ..row }]).unwrap();
        assert!(text.contains("'tiny, \"quoted\"'") && text.contains("'highwater sweep ''a b''\nsecond line'"));
        assert!(!text.to_lowercase().contains("nan") && text.contains(",NULL,"), "{text}");
    }

    #[test]
    fn csv_and_json_lines_are_the_journal_s_own() {
        let dir = tempfile::tempdir().unwrap();
        let rows = [ok_row(1, 2, 3), ok_row(4, 5, 6)];
        let mut journal = crate::journal::Journal::create(dir.path()).unwrap();
        for row in &rows {
            journal.append(row).unwrap();
        }
        let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        assert_eq!(csv(&rows).unwrap(), read("sweep.csv"));
        assert_eq!(jsonl(&rows).unwrap(), read("sweep.jsonl"));
        let back: Vec<Row> = serde_json::from_str(&json(&rows).unwrap()).unwrap();
        assert_eq!(back, rows);
        assert_eq!(serde_json::from_str::<Vec<Row>>(&json(&[]).unwrap()).unwrap(), []);
    }
}
