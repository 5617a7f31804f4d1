//! `plan`: whether a model fits a card, who holds which bytes, the largest chunk that fits, and floors of its speed.

use std::fmt::Write as _;

use anyhow::Result;
use highwater::checkpoint::Source;
use highwater::device::{DeviceSpec, Overhead};
use highwater::engine::{KvBudget, Sizing, sizing};
use highwater::error::{Error, mib};
use highwater::ops::{Limits, Numerics};

use crate::axis::Cell;
use crate::cell::{EngineRunner, Workload, pool_holds};
use crate::cli::{DeviceChoice, PlanArgs};
use crate::definitions;
use crate::edges::{Question, edge_text, edges, places};
use crate::failure::Failure;
use crate::out::print;
use crate::record::Row;
use crate::sweep::Runner as _;
use crate::table::{Align, Table, number, or_null};
use crate::target::{Model, Place, Values};
use crate::traffic::traffic_text;

/// The largest chunk asked about.
const LARGEST_CHUNK: u64 = 1 << 16;

/// `plan`.
pub(crate) fn plan(args: &PlanArgs) -> Result<(), Failure> {
    let values = Values::of(&args.numerics, Numerics::BF16)?;
    let model = Model { text: args.model.clone(), seed: args.numerics.seed };
    let source = model.open()?;
    let limits = Limits {
        step_tokens: args.chunk.max(args.batch) as usize,
        batch: args.batch as usize,
        context: args.context as usize,
    };
    let places = places(DeviceChoice::Plan, &args.cards, args.budget.vram)?;
    if args.traffic {
        return Ok(print(&traffic_text(&source, &places, values.numerics, args.batch, args.context)?)?);
    }
    for place in places {
        // The verdict is out before anything else is asked of the model.
        let (fits, verdict) = verdict_text(&source, &place, values, limits, args)?;
        print(&verdict)?;
        if fits {
            print(&format!("\n{}", peak_text(&model, &place, values, args)?))?;
        }
        print("\n")?;
    }
    Ok(())
}

/// Whether it fits, and the verdict on one card with the bytes by part.
fn verdict_text(
    source: &Source,
    place: &Place,
    values: Values,
    limits: Limits,
    args: &PlanArgs,
) -> Result<(bool, String), Failure> {
    let slab = place.slab();
    let kv = args.budget.kv_tokens.map_or(KvBudget::Tokens(args.batch * args.context), KvBudget::Tokens);
    let mut text = String::new();
    let spec = &place.spec;
    let _ = writeln!(
        text,
        "{} on {} ({}), chunk {}, batch {}, context {}",
        args.model, spec.name, spec.title, args.chunk, args.batch, args.context
    );
    match sizing::size(spec, slab, source, values.numerics, limits, kv) {
        Ok(sizing) => {
            let held = args.context - 1;
            let pool = pool_holds(place, source, values.numerics, sizing.kv_tokens, args.batch, held);
            match pool {
                Ok(()) => {
                    let _ = writeln!(text, "verdict: {}", verdict(spec, place.vram, &sizing));
                }
                Err(short @ Error::KvPool(_)) => {
                    let _ = writeln!(text, "verdict: does not fit\n{short}");
                    return Ok((false, text));
                }
                Err(other) => return Err(other.into()),
            }
            text.push_str(&terms_table(spec, place.vram, &sizing).text());
            Ok((true, text))
        }
        Err(Error::Budget(budget)) => {
            let _ = writeln!(text, "verdict: does not fit");
            let _ = writeln!(text, "{budget}");
            if let Some(first) = &budget.first {
                let _ = writeln!(text, "the first allocation past the end is {} of {} B", first.tag, first.requested);
            }
            Ok((false, text))
        }
        Err(other) => Err(other.into()),
    }
}

/// Whether it fits: where the overhead outside the slab is assumed, how much overhead it bears.
fn verdict(spec: &DeviceSpec, vram: Option<u64>, sizing: &Sizing) -> String {
    let total = vram.unwrap_or(spec.total_bytes);
    let bears = total - sizing.total();
    match &spec.overhead {
        Overhead::Measured { bytes, date, driver } => {
            format!("fits (overhead {bytes} B measured {date}, driver {driver})")
        }
        Overhead::Assumed { bytes, .. } => {
            format!("fits if overhead <= {bears} B ({}); assumed {bytes} B ({})", mib(bears), mib(*bytes))
        }
    }
}

fn terms_table(spec: &DeviceSpec, vram: Option<u64>, sizing: &Sizing) -> Table {
    let mut table = Table::new(&[("part", Align::Left), ("bytes", Align::Right), ("", Align::Right)]);
    let mut push = |name: &str, bytes: u64| table.push(vec![name.into(), bytes.to_string(), mib(bytes)]);
    for (name, bytes) in sizing.terms() {
        push(&name, bytes);
    }
    push("free", sizing.slab - sizing.total());
    push("slab", sizing.slab);
    push("overhead", spec.overhead.bytes());
    push("memory", vram.unwrap_or(spec.total_bytes));
    table
}

/// The owners at the peak of the cell's own run, its largest chunk, and its floors.
fn peak_text(model: &Model, place: &Place, values: Values, args: &PlanArgs) -> Result<String, Failure> {
    const OUTPUT_TOKENS: u64 = 2;
    let prompt = args.chunk.min(args.context.saturating_sub(OUTPUT_TOKENS)).max(1);
    let output = OUTPUT_TOKENS.min(args.context - prompt).max(1);
    let kv_tokens = args.budget.kv_tokens;
    let workload =
        Workload { prompt: Some(prompt), output, kv_tokens, context: Some(args.context), ..Workload::default() };
    let mut runner = EngineRunner::new(model.clone(), place.clone(), values, workload);
    // Decode floors are read near the end of the context, where a step reads the most.
    let depth = args.context.saturating_sub(prompt + output);
    let cell = Cell::fixed(args.chunk, args.batch, depth);
    let mut row = Row::default();
    let mut text = String::new();
    match runner.run(&cell, &mut row) {
        Ok(()) => {
            let mut table =
                Table::new(&[("owner at the peak", Align::Left), ("bytes", Align::Right), ("", Align::Right)]);
            for owner in &row.owners {
                table.push(vec![owner.tag.clone(), owner.bytes.to_string(), mib(owner.bytes)]);
            }
            text.push_str(&table.text());
            let _ = writeln!(
                text,
                "\nprefill: floor {} tok/s, measured -\nTPOT:    floor {} ms, measured -",
                or_null(row.floor_prefill_tok_s, number),
                or_null(row.floor_tpot_ms, number)
            );
            let _ = writeln!(text, "{}", definitions::of_terms(&["floor"]));
        }
        Err(error) => {
            row.set_error(&error);
            if !row.status.is_oom() {
                return Err(error.into());
            }
            let _ = writeln!(text, "the run does not fit: {}", row.detail.unwrap_or_default());
        }
    }
    let question = Question { context: args.context, kv_tokens, max_chunk: LARGEST_CHUNK };
    for answer in edges(model, place, values, &[(args.batch, 0)], question)? {
        let _ = writeln!(text, "largest chunk that fits at batch {}: {}", args.batch, edge_text(answer.edge));
    }
    Ok(text)
}
