//! The command line: verbs, flags, and what a value may be. Whatever can be refused without a model is refused here, with
//! exit code 2.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Parser, Subcommand, ValueEnum};
use highwater::device::Arch;
use highwater::device::cuda::library::FOLDER_FLAG;

use crate::ab::{AB_HELP, AbArgs};
use crate::axis::{AxisValues, MAX_BATCH, MAX_CHUNK, MAX_TOKENS, parse_count};
use crate::bench::cache::Cache;
use crate::bytes::parse_memory;
use crate::cell_cli::CellArgs;
use crate::definitions;
use crate::frontier::STEP_TOKENS;
use crate::gate::cli::{GATE_HELP, GateArgs};
use crate::ids::TokenIds;
use crate::run_args::{MergeArgs, RunArgs};
use crate::worker::WorkerArgs;

const EXIT_CODES: &str = "\
Exit codes: 0 done (cells that run out of memory are answers, not failures); 1 a cell or the program failed; 2 usage. Of \
gate and ab also: 3 slower; 4 more memory, or what fitted does not; 5 with --strict, inconclusive or measured otherwise.";

const AXES: &str = "\
NAME=VALUES with NAME one of chunk, batch, depth, and VALUES a list such as 512,2048,8192, a range such as 512-8192*2, \
1-16+5 or [1:16:3], or a mixture; chunk[pow2]=[9:13] gives exponents of 2. k is 1024: 8k = 8192. Values keep their order, \
repeated ones are dropped. A sweep also takes lists of words: kv-dtype=bf16,fp8, recipe=bf16,fp8-channel (of a model named \
without one), card=rtx-4090,h200, workload=fixed,ladder";

/// The whole command line.
#[derive(Debug, Parser)]
#[command(name = "highwater", version, about, after_help = EXIT_CODES, arg_required_else_help = true)]
pub(crate) struct Cli {
    /// The folder looked in first for NVRTC and cuBLASLt, before HIGHWATER_CUDA's: a CUDA 13 toolkit's, or one that pip
    /// installed their wheels into
    #[arg(long, global = true, value_name = "DIR", overrides_with = "cuda")]
    pub(crate) cuda: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Measure or plan every cell of a grid of chunk, batch and depth
    #[command(after_long_help = sweep_help())]
    Sweep(SweepArgs),
    /// Join the shards of a sweep over many machines
    Merge(MergeArgs),
    /// A sweep's worker process
    #[command(hide = true)]
    Worker(Box<WorkerArgs>),
    /// Say whether a model fits a card, and who holds which bytes, without running it
    Plan(PlanArgs),
    /// Plan every built-in model on every card and hold the plans to the committed baseline
    #[command(after_long_help = crate::replan::HELP, after_help = crate::replan::HELP)]
    Replan(crate::replan::ReplanArgs),
    /// Print the folder of the baselines that a run may be held to: by card, driver and method
    Baseline(crate::baseline::BaselineArgs),
    /// Find the largest chunk that fits, for each batch and depth
    Frontier(FrontierArgs),
    /// Write the float32 logits of a prompt to a safetensors file
    Logits(LogitsArgs),
    /// Generate tokens and print their ids
    Generate(GenerateArgs),
    /// Say how each module is stored, what is skipped and by which rule, and all that is wrong, from headers alone
    Inspect(InspectArgs),
    /// Write a checkpoint with random weights in a recipe's exact layout
    #[command(after_long_help = crate::synth::recipes_help())]
    Synth(SynthArgs),
    /// Compile every kernel for every arch, without a card, and print registers, spills and memory of each entry point
    Kernels(KernelsArgs),
    /// Say what this machine can do: driver, libraries, cards and their state, and how to get what is missing
    Doctor(DoctorArgs),
    /// Time kernels at the real models' shapes, beside what the card can do at most
    Bench(BenchArgs),
    /// Judge a run by an earlier one: speed by interval, bytes and the OOM frontier exactly
    #[command(after_long_help = GATE_HELP)]
    Gate(GateArgs),
    /// Compare two builds of this program side by side: base, candidate, candidate, base, over and over
    #[command(after_long_help = AB_HELP)]
    Ab(AbArgs),
    /// Write the rows of a run in another form: JSON, SQL, Bencher, llama-bench's or vLLM's keys, and more
    #[command(after_long_help = crate::formats::FORMATS)]
    Export(crate::formats::cli::ExportArgs),
    /// Make one HTML page of runs, complete in itself, or a short Markdown summary
    Report(crate::report::cli::ReportArgs),
}

/// Where the verb stands in the words of a command line, program included: after the flags that all verbs have.
pub(crate) fn verb_at(words: &[impl AsRef<OsStr>]) -> Option<usize> {
    let mut at = 1;
    loop {
        let word = words.get(at)?.as_ref().to_string_lossy();
        match word.split_once('=') {
            _ if word == FOLDER_FLAG => at += 2,
            Some((FOLDER_FLAG, _)) => at += 1,
            _ => return Some(at),
        }
    }
}

fn sweep_help() -> String {
    format!("What the numbers mean:\n{}\n{EXIT_CODES}", definitions::text())
}

/// `sweep`.
#[derive(Debug, Args)]
pub(crate) struct SweepArgs {
    /// A checkpoint folder, or GEOMETRY[:layers=N][@RECIPE] with seeded random weights; without it, the built-in tiny model
    /// here, then plans of real models on the usual cards
    pub(crate) model: Option<String>,
    /// An axis of the grid, once per axis [default: chunk=512,2048,8192 batch=1 depth=0]
    #[arg(long = "axis", value_name = "NAME=VALUES", value_parser = flat(AxisValues::from_str), long_help = AXES)]
    pub(crate) axes: Vec<AxisValues>,
    #[command(flatten)]
    pub(crate) target: Target,
    #[command(flatten)]
    pub(crate) numerics: Numerics,
    /// Prompt tokens of each sequence, after its depth [default: the cell's chunk]
    #[arg(long, value_name = "TOKENS", value_parser = flat(positive))]
    pub(crate) prompt: Option<u64>,
    /// Tokens each sequence generates
    #[arg(long, value_name = "TOKENS", value_parser = flat(positive), default_value = "32")]
    pub(crate) output: u64,
    #[command(flatten)]
    pub(crate) cell: CellArgs,
    /// Folder for sweep.csv, sweep.jsonl, sweep.plan.json, DEFINITIONS.txt and the pictures [default: highwater-out/RUN]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) formats: crate::formats::cli::FormatArgs,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

/// `plan`.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// A checkpoint folder, or GEOMETRY[:layers=N][@RECIPE]
    pub(crate) model: String,
    /// A card to plan for; may be repeated
    #[arg(long = "card", value_name = "NAME")]
    pub(crate) cards: Vec<String>,
    #[command(flatten)]
    pub(crate) budget: Budget,
    #[command(flatten)]
    pub(crate) numerics: Numerics,
    /// Prefill token budget of a step
    #[arg(long, value_name = "TOKENS", value_parser = flat(chunk), default_value = "2048")]
    pub(crate) chunk: u64,
    /// Sequences
    #[arg(long, value_name = "N", value_parser = flat(batch), default_value = "1")]
    pub(crate) batch: u64,
    /// Tokens of each sequence, prompt and output together
    #[arg(long, value_name = "TOKENS", value_parser = flat(context), default_value = "8192")]
    pub(crate) context: u64,
    /// Print what a decode step at the end of the context reads, by module, and the TPOT it bounds, and nothing else
    #[arg(long)]
    pub(crate) traffic: bool,
}

/// `frontier`.
#[derive(Debug, Args)]
pub(crate) struct FrontierArgs {
    /// A checkpoint folder, or GEOMETRY[:layers=N][@RECIPE]
    pub(crate) model: String,
    /// A card whose sizes and tactics are taken; may be repeated
    #[arg(long = "card", value_name = "NAME")]
    pub(crate) cards: Vec<String>,
    /// plan, or a device on which every answer is a run: cuda:N, cpu, emulated
    #[arg(long, default_value = "plan", value_parser = flat(device))]
    pub(crate) device: DeviceChoice,
    /// The batches, as batch=VALUES, and the depths, as depth=VALUES [default: batch=1 depth=0]
    #[arg(long = "axis", value_name = "NAME=VALUES", value_parser = flat(AxisValues::from_str), long_help = AXES)]
    pub(crate) axes: Vec<AxisValues>,
    #[command(flatten)]
    pub(crate) budget: Budget,
    #[command(flatten)]
    pub(crate) numerics: Numerics,
    /// Tokens of each sequence, prompt and output together
    #[arg(long, value_name = "TOKENS", value_parser = flat(context), default_value = "8192")]
    pub(crate) context: u64,
    /// The largest chunk to ask about, in steps of 64
    #[arg(long, value_name = "TOKENS", value_parser = flat(max_chunk), default_value = "64k")]
    pub(crate) max_chunk: u64,
}

/// `logits`.
#[derive(Debug, Args)]
pub(crate) struct LogitsArgs {
    /// A checkpoint folder, or GEOMETRY[:layers=N][@RECIPE]
    pub(crate) model: String,
    /// The prompt: ids as 5,7,9, or @FILE with a JSON array of them
    #[arg(long, value_name = "IDS", value_parser = flat(TokenIds::from_str))]
    pub(crate) ids: TokenIds,
    /// Rows to write: one per prompt token, or the last only
    #[arg(long, value_enum, default_value = "all")]
    pub(crate) rows: Rows,
    /// The file to write: one float32 tensor `logits` [rows, vocab]
    #[arg(long, value_name = "FILE.safetensors")]
    pub(crate) out: PathBuf,
    /// Prefill token budget of a step
    #[arg(long, value_name = "TOKENS", value_parser = flat(chunk), default_value = "2048")]
    pub(crate) chunk: u64,
    #[command(flatten)]
    pub(crate) target: Target,
    #[command(flatten)]
    pub(crate) numerics: Numerics,
}

/// `generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// A checkpoint folder, or GEOMETRY[:layers=N][@RECIPE]
    pub(crate) model: String,
    /// The prompt: ids as 5,7,9, or @FILE with a JSON array of them
    #[arg(long, value_name = "IDS", value_parser = flat(TokenIds::from_str))]
    pub(crate) ids: TokenIds,
    /// Most tokens to generate
    #[arg(long, value_name = "TOKENS", value_parser = flat(positive), default_value = "16")]
    pub(crate) max_tokens: u64,
    /// Prefill token budget of a step
    #[arg(long, value_name = "TOKENS", value_parser = flat(chunk), default_value = "2048")]
    pub(crate) chunk: u64,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) target: Target,
    #[command(flatten)]
    pub(crate) numerics: Numerics,
}

/// `inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// A checkpoint folder, or GEOMETRY[:layers=N][@RECIPE]
    pub(crate) model: String,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// `synth`.
#[derive(Debug, Args)]
pub(crate) struct SynthArgs {
    /// GEOMETRY[:layers=N]@RECIPE; --help lists the recipes
    pub(crate) model: String,
    /// The folder to write, which must be empty or not there
    pub(crate) dir: PathBuf,
    /// Write headers, scalars and holes: for what reads no weights
    #[arg(long)]
    pub(crate) sparse: bool,
    /// Seed of the weights
    #[arg(long, value_name = "N", default_value = "0")]
    pub(crate) seed: u64,
}

/// `kernels`.
#[derive(Debug, Args)]
pub(crate) struct KernelsArgs {
    /// Only kernels with this in their name, e.g. attention or HEAD_DIM=256
    pub(crate) filter: Option<String>,
    /// An arch to compile for; may be repeated [default: all]
    #[arg(long = "arch", value_name = "SM", value_parser = flat(arch))]
    pub(crate) archs: Vec<Arch>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// `doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
    /// Measure a card's memory outside the slab, and print the entry for src/device/cards.rs
    #[arg(long)]
    pub(crate) calibrate: bool,
    /// The card to measure
    #[arg(long, default_value = "cuda:0", value_parser = flat(device), requires = "calibrate")]
    pub(crate) device: DeviceChoice,
}

/// `bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Kernels to time [default: all]
    #[arg(value_name = "KERNEL")]
    pub(crate) kernels: Vec<String>,
    /// auto, cuda:N, cpu (the reference arm, small shapes), or emulated
    #[arg(long, default_value = "auto", value_parser = flat(device))]
    pub(crate) device: DeviceChoice,
    /// Time a vendor's kernel beside ours
    #[arg(long, value_enum)]
    pub(crate) peer: Option<Peer>,
    /// Only rows with this in their label; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub(crate) filter: Vec<String>,
    /// Only the row of this label, as --list prints it; may be repeated
    #[arg(long = "row", value_name = "LABEL")]
    pub(crate) rows: Vec<String>,
    /// What a call finds in the L2 cache [default: rotate on a card, warm elsewhere]
    #[arg(long, value_enum)]
    pub(crate) cache: Option<Cache>,
    /// Seconds for one row at most
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = flat(seconds))]
    pub(crate) cap: f32,
    /// Write DIR/CARD/kernels.csv, in which other rows stay [default: results on a card, nothing elsewhere]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Print the rows' labels and time nothing
    #[arg(long)]
    pub(crate) list: bool,
}

/// Whose kernels stand beside ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    /// bf16, and FP8 under one scale for each operand.
    Cublaslt,
}

/// Where it runs and what it may use.
#[derive(Debug, Args)]
pub(crate) struct Target {
    /// auto, cuda:N, cpu, emulated (a card's kernels on this processor), or plan (sizes only, no data, no time)
    #[arg(long, default_value = "auto", value_parser = flat(device))]
    pub(crate) device: DeviceChoice,
    /// The card whose sizes and tactics are taken; without it, this machine
    #[arg(long, value_name = "NAME")]
    pub(crate) card: Option<String>,
    #[command(flatten)]
    pub(crate) budget: Budget,
}

/// Memory.
#[derive(Debug, Args)]
pub(crate) struct Budget {
    /// Memory for everything, e.g. 16GiB or 24GB [default: what the card has]
    #[arg(long, value_name = "BYTES", value_parser = flat(parse_memory))]
    pub(crate) vram: Option<u64>,
    /// Tokens the KV pool holds, over all sequences; fewer than they need together do not fit [default: what they need]
    #[arg(long, value_name = "TOKENS", value_parser = flat(positive))]
    pub(crate) kv_tokens: Option<u64>,
}

/// Types of values, and what random weights are made from.
#[derive(Debug, Args)]
pub(crate) struct Numerics {
    /// Type of activations and matrix arithmetic [default: f32 for `logits`, bf16 elsewhere]
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<Dtype>,
    /// Type of the logits
    #[arg(long, value_enum, default_value = "f32")]
    pub(crate) logits: Dtype,
    /// Type of the KV cache; fp8 is e4m3 under the checkpoint's own scales, or under 1 [default: as activations]
    #[arg(long, value_enum)]
    pub(crate) kv_dtype: Option<KvDtype>,
    /// Type of the recurrent state
    #[arg(long, value_enum, default_value = "f32")]
    pub(crate) state: Dtype,
    /// Whether inputs of linear layers are quantised where the checkpoint asks for it [default: off for `logits`,
    /// checkpoint elsewhere]
    #[arg(long, value_enum)]
    pub(crate) act_quant: Option<ActQuant>,
    /// On a card, one order of sums at any number of rows: a sequence's bits do not depend on its company
    #[arg(long)]
    pub(crate) batch_invariant: bool,
    /// Seed of random weights, of primed depth and of made-up prompts
    #[arg(long, value_name = "N", default_value = "0")]
    pub(crate) seed: u64,
    /// A seeded fault of the engine, for tests of this program
    #[arg(long, value_name = "NAME", hide = true)]
    pub(crate) fault: Option<String>,
}

/// How the next token is chosen. Ranges are the engine's to check.
#[derive(Debug, Clone, PartialEq, Args)]
pub(crate) struct SamplingArgs {
    /// 0 takes the most likely token
    #[arg(long, value_name = "T", default_value = "0", value_parser = flat(finite), allow_negative_numbers = true)]
    pub(crate) temperature: f32,
    /// Only the K most likely tokens; 0 or -1: all
    #[arg(long, value_name = "K", default_value = "0", allow_negative_numbers = true)]
    pub(crate) top_k: i64,
    /// Only the most likely tokens that together have probability P
    #[arg(long, value_name = "P", default_value = "1", value_parser = flat(finite), allow_negative_numbers = true)]
    pub(crate) top_p: f32,
    /// Only tokens at least P times as likely as the most likely
    #[arg(long, value_name = "P", default_value = "0", value_parser = flat(finite), allow_negative_numbers = true)]
    pub(crate) min_p: f32,
    /// Subtracted from the logit of every token generated before
    #[arg(long, value_name = "X", default_value = "0", value_parser = flat(finite), allow_negative_numbers = true)]
    pub(crate) presence_penalty: f32,
    /// Subtracted once per earlier occurrence
    #[arg(long, value_name = "X", default_value = "0", value_parser = flat(finite), allow_negative_numbers = true)]
    pub(crate) frequency_penalty: f32,
    /// Divides (if positive) or multiplies the logit of every token of prompt and output
    #[arg(long, value_name = "X", default_value = "1", value_parser = flat(finite), allow_negative_numbers = true)]
    pub(crate) repetition_penalty: f32,
    /// Added to a token's logit, as ID=BIAS; may be repeated
    #[arg(long, value_name = "ID=BIAS", value_parser = flat(logit_bias))]
    pub(crate) logit_bias: Vec<(u32, f32)>,
    /// Seed of the draws
    #[arg(long, value_name = "N", default_value = "0")]
    pub(crate) sampling_seed: u64,
}

/// Where to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    /// The best this build has.
    Auto,
    /// The card of this number.
    Cuda(u32),
    /// A card's kernels, on this processor.
    Emulated,
    /// The reference arm.
    Cpu,
    /// Sizes without data.
    Plan,
}

/// A type of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    /// 32-bit floating point.
    F32,
    /// bfloat16.
    Bf16,
}

/// A type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvDtype {
    /// 32-bit floating point.
    F32,
    /// bfloat16.
    Bf16,
    /// e4m3 codes.
    Fp8,
}

/// When inputs of linear layers are quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ActQuant {
    /// Where the checkpoint asks for it.
    Checkpoint,
    /// Never.
    Off,
}

/// Which rows of logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rows {
    /// One per prompt token.
    All,
    /// The last prompt token's.
    Last,
}

/// A parser whose error is one line: clap prints an error's own text and not its causes.
pub(crate) fn flat<T>(parse: fn(&str) -> Result<T>) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| parse(text).map_err(|error| format!("{error:#}"))
}

fn device(text: &str) -> Result<DeviceChoice> {
    match text {
        "auto" => Ok(DeviceChoice::Auto),
        "cpu" => Ok(DeviceChoice::Cpu),
        "plan" => Ok(DeviceChoice::Plan),
        "emulated" => Ok(DeviceChoice::Emulated),
        "cuda" => Ok(DeviceChoice::Cuda(0)),
        _ => match text.strip_prefix("cuda:").map(str::parse) {
            Some(Ok(ordinal)) => Ok(DeviceChoice::Cuda(ordinal)),
            Some(Err(_)) => bail!("`{text}` names no card; cuda:0 is the first"),
            None => bail!("there is no device `{text}`; the devices are auto, cuda:N, cpu, emulated and plan"),
        },
    }
}

/// A count from `low` to `high`, with or without a suffix.
pub(crate) fn count(text: &str, low: u64, high: u64) -> Result<u64> {
    let count = parse_count(text)?;
    ensure!((low..=high).contains(&count), "{count} is outside {low} to {high}");
    Ok(count)
}

/// `sm_90a`, `90a` or `90`.
fn arch(text: &str) -> Result<Arch> {
    let wanted = text.trim().trim_start_matches("sm_").trim_end_matches('a');
    let number = |arch: &Arch| arch.to_string().trim_start_matches("sm_").trim_end_matches('a').to_owned();
    let names = || Arch::CARDS.map(|arch| arch.to_string()).join(", ");
    Arch::CARDS
        .into_iter()
        .find(|arch| number(arch) == wanted)
        .with_context(|| format!("kernels are not written for `{text}`; the archs are {}", names()))
}

pub(crate) fn positive(text: &str) -> Result<u64> {
    count(text, 1, MAX_TOKENS)
}

pub(crate) fn chunk(text: &str) -> Result<u64> {
    count(text, 1, MAX_CHUNK)
}

fn max_chunk(text: &str) -> Result<u64> {
    count(text, STEP_TOKENS, MAX_CHUNK)
}

pub(crate) fn batch(text: &str) -> Result<u64> {
    count(text, 1, MAX_BATCH)
}

/// One token of prompt and one of output at least; how many a model takes at most is the model's.
fn context(text: &str) -> Result<u64> {
    count(text, 2, MAX_TOKENS)
}

fn finite(text: &str) -> Result<f32> {
    let value: f32 = text.trim().parse().ok().with_context(|| format!("`{text}` is not a number"))?;
    ensure!(value.is_finite(), "`{text}` is not finite");
    Ok(value)
}

fn seconds(text: &str) -> Result<f32> {
    let value = finite(text)?;
    ensure!((0.0..=3600.0).contains(&value), "{value} is outside 0 to 3600 seconds");
    Ok(value)
}

fn logit_bias(text: &str) -> Result<(u32, f32)> {
    let (id, bias) = text.split_once('=').with_context(|| format!("`{text}` is not ID=BIAS, e.g. 50256=-100"))?;
    let id = id.trim().parse().ok().with_context(|| format!("`{id}` is not a token id"))?;
    Ok((id, finite(bias)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Verb, clap::Error> {
        Cli::try_parse_from(std::iter::once("highwater").chain(line.split_whitespace())).map(|cli| cli.verb)
    }

    fn refusal(line: &str) -> String {
        let error = parse(line).expect_err(line);
        assert_eq!(error.exit_code(), 2, "{line}");
        error.to_string()
    }

    #[test]
    fn the_definition_of_the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_sweep_s_axes_and_budget() {
        let line = "sweep tiny@bf16 --axis chunk=512-8192*2 --axis batch[pow2]=[0:3] --vram 16GiB --kv-tokens 64k --device plan --card rtx-4090";
        let Verb::Sweep(args) = parse(line).unwrap() else { panic!("not a sweep") };
        assert_eq!(args.model.as_deref(), Some("tiny@bf16"));
        assert_eq!(crate::axis::Grid::new(&args.axes).unwrap().cells(&[crate::workload::Kind::Fixed]).len(), 5 * 4);
        assert_eq!(args.target.budget.vram, Some(16 << 30));
        assert_eq!(args.target.budget.kv_tokens, Some(65_536));
        assert_eq!(args.target.device, DeviceChoice::Plan);
        let Verb::Sweep(args) = parse("sweep").unwrap() else { panic!("not a sweep") };
        assert_eq!((args.model, args.target.device, args.prompt), (None, DeviceChoice::Auto, None));
    }

    #[test]
    fn what_can_never_work_is_refused_with_what_can() {
        assert!(refusal("sweep --device cuda:x").contains("cuda:0 is the first"));
        assert!(refusal("sweep --device tpu").contains("auto, cuda:N, cpu, emulated and plan"));
        assert!(refusal("sweep --axis chunks=1").contains("the axes are chunk, batch, depth"));
        assert!(refusal("sweep --axis depth=1-18446744073709551615+1").contains("18446744073709551615 values"));
        assert!(refusal("sweep --vram 24").contains("24GiB"));
        assert!(refusal("sweep --kv-tokens 0").contains("outside 1"));
        assert!(refusal("plan").contains("MODEL"));
        assert!(refusal("plan tiny --chunk 0").contains("outside 1"));
        for verb in ["plan tiny", "generate tiny --ids 1", "logits tiny --ids 1 --out f"] {
            assert!(refusal(&format!("{verb} --chunk 1048577")).contains("outside 1 to 1048576"));
        }
        assert!(refusal("plan tiny --batch 16385").contains("outside 1 to 16384"));
        assert!(refusal("plan tiny --context 1").contains("outside 2"));
        assert!(refusal("frontier tiny --context 1").contains("outside 2"));
        assert!(refusal("frontier tiny --max-chunk 63").contains("outside 64 to 1048576"));
        assert!(refusal("logits tiny --ids 5").contains("--out"));
        assert!(refusal("logits tiny --ids 5,x --out f").contains("not a token id"));
        assert!(refusal("generate tiny --ids 1 --temperature NaN").contains("not finite"));
        assert!(refusal("generate tiny --ids 1 --top-p inf").contains("not finite"));
        assert!(refusal("generate tiny --ids 1 --logit-bias 5").contains("ID=BIAS"));
        assert!(
            refusal("kernels --arch sm_75").contains("the archs are sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120a")
        );
        assert!(refusal("bench --cache cold").contains("rotate, flush, warm"));
        assert!(
            refusal("bench --cap -1").contains("unexpected") || refusal("bench --cap=-1").contains("outside 0 to 3600")
        );
        assert!(refusal("bench --peer cutlass").contains("cublaslt"));
        assert!(refusal("fly").contains("unrecognized"));
        assert_eq!(parse("").unwrap_err().exit_code(), 2);
    }

    #[test]
    fn sampling_defaults_to_greedy_and_takes_negative_numbers() {
        let Verb::Generate(args) = parse("generate tiny --ids 1,2").unwrap() else { panic!("not generate") };
        let s = &args.sampling;
        assert_eq!((s.temperature, s.top_k, s.top_p, s.min_p), (0.0, 0, 1.0, 0.0));
        assert_eq!((s.presence_penalty, s.frequency_penalty, s.repetition_penalty), (0.0, 0.0, 1.0));
        let line = "generate tiny --ids 1 --top-k -1 --presence-penalty -0.5 --logit-bias 5=-100 --logit-bias 7=2.5";
        let Verb::Generate(args) = parse(line).unwrap() else { panic!("not generate") };
        assert_eq!((args.sampling.top_k, args.sampling.presence_penalty), (-1, -0.5));
        assert_eq!(args.sampling.logit_bias, [(5, -100.0), (7, 2.5)]);
    }

    #[test]
    fn archs_are_known_by_their_numbers() {
        let Verb::Kernels(args) = parse("kernels gemm --arch sm_90a --arch 120a --arch 80").unwrap() else { panic!() };
        assert_eq!((args.filter.as_deref(), args.archs), (Some("gemm"), vec![Arch::Sm90a, Arch::Sm120a, Arch::Sm80]));
    }

    #[test]
    fn the_folder_of_libraries_is_every_verb_s_flag_before_it_or_after() {
        let cuda = |line: &str| {
            let words: Vec<&str> = std::iter::once("highwater").chain(line.split_whitespace()).collect();
            let cli = Cli::try_parse_from(&words).unwrap_or_else(|error| panic!("{line}: {error}"));
            (cli.cuda.map(|folder| folder.display().to_string()), words[verb_at(&words).unwrap()].to_owned())
        };
        for verb in
            ["kernels", "doctor", "bench", "sweep tiny", "plan tiny", "frontier tiny", "logits tiny --ids 1 --out f"]
        {
            let name = verb.split(' ').next().unwrap();
            for line in [format!("--cuda d {verb}"), format!("{verb} --cuda d"), format!("--cuda=d {verb}")] {
                assert_eq!(cuda(&line), (Some("d".into()), name.into()), "{line}");
            }
            assert_eq!(cuda(verb), (None, name.into()));
        }
        // The last is taken, as of a worker's, which has the words before the verb after it.
        assert_eq!(cuda("sweep --cuda d --cuda e").0.as_deref(), Some("e"));
        assert_eq!(cuda("--cuda d sweep --cuda e").0.as_deref(), Some("e"));
        assert_eq!(verb_at(&["highwater", "--cuda"]), None);
        assert_eq!(verb_at(&["highwater"]), None);
    }

    #[test]
    fn faults_are_hidden_and_definitions_are_shown() {
        let mut command = Cli::command();
        let help = command.find_subcommand_mut("sweep").unwrap().render_long_help().to_string();
        assert!(!help.contains("--fault") && help.contains("TPOT: time per output token"), "{help}");
        assert!(matches!(parse("sweep --fault slice-rows"), Ok(Verb::Sweep(args)) if args.numerics.fault.is_some()));
    }
}
