//! Sampling on a card: which of the kernels of `kernels/sampler.cu` a batch needs, and what they are told about its rows.

use std::ops::Range;

use crate::device::cuda::{Arg, Cuda, Grid, Kernel, entry};
use crate::error::Result;
use crate::ops::sampler::{Edit, Logprobs, SampleRow, Sampled, TopLogprobs};
use crate::tensor::Tensor;

/// Threads of a block of `scan`, `list`, `race`, `histogram` and `settle`, as the kernels are written.
const THREADS: u32 = 256;
/// Threads of a block of `score`, as the kernel is written.
const SCORE_THREADS: u32 = 512;
/// Up to this k, the maxima of groups of lanes say nearly which lanes are in top-k: a row has some 1,000 groups or more,
/// and about a third more than k of its lanes are then looked at.
const LISTED_TOP_K: u32 = 512;
/// 32-bit words of a row's parameters and of an edit.
const PARAM_WORDS: usize = 16;
const EDIT_WORDS: usize = 4;

/// How a row is drawn; the numbers are the kernels'.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The largest logit.
    Greedy = 0,
    /// top-k of a small k: a short list holds all lanes that may be drawn.
    List = 1,
    /// Neither top-k nor top-p.
    Race = 2,
    /// Anything else: boundaries from a histogram first.
    Histogram = 3,
}

/// k, or 0 where it leaves every lane.
fn top_k(row: &SampleRow, decodable: usize) -> u32 {
    if row.top_k as usize >= decodable { 0 } else { row.top_k }
}

fn kind(row: &SampleRow, decodable: usize) -> Kind {
    match top_k(row, decodable) {
        _ if row.is_greedy() => Kind::Greedy,
        0 if row.top_p >= 1.0 => Kind::Race,
        1..=LISTED_TOP_K => Kind::List,
        _ => Kind::Histogram,
    }
}

/// What a call has on the device besides its operands and results.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// 64 bytes a row.
    pub(crate) params: Tensor,
    /// 16 bytes an edit, for any group of rows.
    pub(crate) edits: Option<Tensor>,
    /// As [`crate::ops::sampler::tactic`] has it.
    pub(crate) workspace: Option<Tensor>,
    /// Parts of a row.
    pub(crate) splits: u32,
}

/// The words of a row's parameters; `first` is its first edit.
fn params(row: &SampleRow, decodable: usize, first: usize, edits: usize) -> [u32; PARAM_WORDS] {
    [
        row.temperature.to_bits(),
        row.top_p.to_bits(),
        row.min_p.to_bits(),
        row.repetition_penalty.to_bits(),
        row.presence_penalty.to_bits(),
        row.frequency_penalty.to_bits(),
        top_k(row, decodable),
        kind(row, decodable) as u32,
        row.seed as u32,
        (row.seed >> 32) as u32,
        row.step as u32,
        (row.step >> 32) as u32,
        first as u32,
        edits as u32,
        row.logprobs,
        0,
    ]
}

/// The rows of a call.
#[derive(Debug)]
pub(crate) struct Rows<'a> {
    /// Their parameters.
    pub(crate) params: &'a [&'a SampleRow],
    /// Their edits.
    pub(crate) lists: &'a [Vec<Edit>],
    /// Consecutive rows whose edits fit the device's list together.
    pub(crate) groups: &'a [Range<usize>],
}

/// Draws a token for each row, one group after the other.
pub(crate) fn sample(
    cuda: &Cuda,
    logits: &Tensor,
    decodable: usize,
    rows: &Rows,
    mut scratch: Scratch,
    out: &mut Sampled,
) -> Result<()> {
    let Rows { params: rows, lists, groups } = *rows;
    let mut words = Vec::with_capacity(rows.len() * PARAM_WORDS);
    for group in groups {
        let mut first = 0;
        for i in group.clone() {
            words.extend(params(rows[i], decodable, first, lists[i].len()));
            first += lists[i].len();
        }
    }
    scratch.params.write(0, &words)?;
    for group in groups {
        let edits: Vec<u32> = lists[group.clone()]
            .iter()
            .flatten()
            .flat_map(|edit| -> [u32; EDIT_WORDS] { [edit.id, edit.count, edit.bias.to_bits(), u32::from(edit.seen)] })
            .collect();
        if let Some(list) = scratch.edits.as_mut().filter(|_| !edits.is_empty()) {
            list.write(0, &edits)?;
        }
        draw(cuda, logits, decodable, &rows[group.clone()], group.start, &scratch, out)?;
    }
    if let Some(top) = &out.top {
        let args = [logits.arg(), Arg::NULL, scratch.params.arg(), Arg::NULL, Arg::NULL];
        score(cuda, logits, decodable, args, 0, Some(top))?;
    }
    Ok(())
}

/// Launches what rows `first..first + rows.len()` need.
fn draw(
    cuda: &Cuda,
    logits: &Tensor,
    decodable: usize,
    rows: &[&SampleRow],
    first: usize,
    scratch: &Scratch,
    out: &mut Sampled,
) -> Result<()> {
    let dtype = logits.dtype();
    let grid = Grid::new([scratch.splits, rows.len() as u32, 1], THREADS);
    let args = [
        logits.arg_at(first * logits.cols()),
        Arg::I32(logits.cols() as i32),
        Arg::I32(decodable as i32),
        scratch.params.arg_at(first * PARAM_WORDS * size_of::<u32>()),
        scratch.edits.as_ref().map_or(Arg::NULL, Tensor::arg),
        scratch.workspace.as_ref().map_or(Arg::NULL, Tensor::arg),
        out.tokens.arg_at(first),
        out.valid.arg_at(first),
        out.logprobs.arg_at(first),
    ];
    let has = |wanted| rows.iter().any(|row| kind(row, decodable) == wanted);
    cuda.launch(kernel(entry!(dtype, "scan")), grid, &args)?;
    if has(Kind::List) {
        cuda.launch(kernel(entry!(dtype, "list")), grid, &args)?;
    }
    if has(Kind::Race) {
        cuda.launch(kernel(entry!(dtype, "race")), grid, &args)?;
    }
    if has(Kind::Histogram) {
        cuda.launch(kernel(entry!(dtype, "histogram")), grid, &args)?;
        cuda.launch(kernel(entry!(dtype, "settle")), grid, &args)?;
    }
    Ok(())
}

/// Raw log-probabilities of targets and of the `top_n` most likely tokens.
pub(crate) fn logprobs(
    cuda: &Cuda,
    logits: &Tensor,
    targets: &Tensor,
    top_n: usize,
    decodable: usize,
    out: &mut Logprobs,
) -> Result<()> {
    let args = [logits.arg(), targets.arg(), Arg::NULL, out.targets.arg(), out.valid.arg()];
    score(cuda, logits, decodable, args, top_n, out.top.as_ref())
}

/// One block a row; `args` are logits, targets, parameters, and the targets' results.
fn score(
    cuda: &Cuda,
    logits: &Tensor,
    decodable: usize,
    [lanes, targets, params, logprobs, valid]: [Arg; 5],
    top_n: usize,
    top: Option<&TopLogprobs>,
) -> Result<()> {
    let args = [
        lanes,
        Arg::I32(logits.cols() as i32),
        Arg::I32(decodable as i32),
        targets,
        params,
        Arg::I32(top_n as i32),
        Arg::I32(top.map_or(0, |top| top.ids.cols()) as i32),
        logprobs,
        valid,
        top.map_or(Arg::NULL, |top| top.ids.arg()),
        top.map_or(Arg::NULL, |top| top.logprobs.arg()),
    ];
    let grid = Grid::new([logits.rows() as u32, 1, 1], SCORE_THREADS);
    cuda.launch(kernel(entry!(logits.dtype(), "score")), grid, &args)
}

/// An entry point of this file's module. Nothing is contracted: tokens are those of the CPU arm.
const fn kernel(entry: &'static str) -> Kernel {
    Kernel::new("sampler", entry).no_fma()
}

/// The module, which has no compile-time values.
pub(crate) fn variants() -> Vec<Kernel> {
    vec![kernel("scan_f32")]
}
