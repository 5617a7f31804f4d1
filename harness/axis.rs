//! Sweep axes: the words after `--axis`, and the grid of cells they make. Text and whole numbers only; nothing runs here.
//!
//! `NAME=ITEMS` or `NAME[pow2]=ITEMS`, where ITEMS is a comma-separated list, in square brackets or not, of
//! - a value: `512`, `8k`; the suffixes `k`/`Ki` and `m`/`Mi` are powers of two (`2k` = 2048), as everyone counts tokens;
//! - a range in llama-bench's form: `512-8192*2`, `1-16+5`, `1-4`;
//! - a range in nvbench's form: `1:16:3`, `9:13`, both ends included.
//!
//! After `NAME[pow2]` every value is an exponent: `chunk[pow2]=[9:13]` is 512, 1024, 2048, 4096, 8192.
//! The axes kv-dtype, recipe, card and workload take lists of words instead, whose meaning is `group`'s to know.
//! Values keep their order and repeated ones are dropped.

use anyhow::{Context, Result, bail, ensure};

use crate::record::Row;
use crate::workload::Kind;

/// Most values one axis may have; a range is counted before it is expanded.
pub(crate) const MAX_VALUES: usize = 1024;
/// Most cells one sweep may have.
pub(crate) const MAX_CELLS: usize = 100_000;

/// The longest depth accepted: 262,144 trained positions times YaRN's factor of 4, times 16 to spare.
pub(crate) const MAX_TOKENS: u64 = 1 << 24;
/// The largest chunk: the most rows the engine takes in a step.
pub(crate) const MAX_CHUNK: u64 = 1 << 20;
/// The largest batch the engine takes.
pub(crate) const MAX_BATCH: u64 = 1 << 14;

/// What can be swept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Axis {
    /// Prefill token budget of a step.
    Chunk,
    /// Sequences in flight.
    Batch,
    /// Tokens of each sequence already in the cache when the cell starts.
    Depth,
    /// Type of the KV cache.
    KvDtype,
    /// How the weights are stored.
    Recipe,
    /// Whose sizes and tactics are taken.
    Card,
    /// What the sequences do.
    Workload,
}

impl Axis {
    /// Every axis, in the order cells print.
    pub(crate) const ALL: [Axis; 7] =
        [Axis::Chunk, Axis::Batch, Axis::Depth, Axis::KvDtype, Axis::Recipe, Axis::Card, Axis::Workload];

    /// The name on the command line and in the rows.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Axis::Chunk => "chunk",
            Axis::Batch => "batch",
            Axis::Depth => "depth",
            Axis::KvDtype => "kv-dtype",
            Axis::Recipe => "recipe",
            Axis::Card => "card",
            Axis::Workload => "workload",
        }
    }

    /// Smallest and largest value of an axis of numbers; none of one of words.
    fn bounds(self) -> Option<(u64, u64)> {
        match self {
            Axis::Chunk => Some((1, MAX_CHUNK)),
            Axis::Batch => Some((1, MAX_BATCH)),
            Axis::Depth => Some((0, MAX_TOKENS)),
            Axis::KvDtype | Axis::Recipe | Axis::Card | Axis::Workload => None,
        }
    }

    fn parse(name: &str) -> Result<Axis> {
        Axis::ALL.into_iter().find(|axis| axis.name() == name).with_context(|| {
            let known: Vec<_> = Axis::ALL.iter().map(|axis| axis.name()).collect();
            format!("there is no axis `{name}`; the axes are {}", known.join(", "))
        })
    }
}

/// One `--axis` argument: an axis and its values, in order, each once, at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AxisValues {
    axis: Axis,
    /// Of an axis of numbers.
    values: Vec<u64>,
    /// Of an axis of words.
    words: Vec<String>,
}

impl AxisValues {
    /// The axis.
    pub(crate) fn axis(&self) -> Axis {
        self.axis
    }
}

impl std::str::FromStr for AxisValues {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<AxisValues> {
        let (name, items) =
            text.split_once('=').with_context(|| format!("`{text}` is not NAME=VALUES, e.g. chunk=512,2048,8192"))?;
        let name = name.trim();
        let (name, pow2) = match name.split_once('[') {
            None => (name, false),
            Some((name, "pow2]")) => (name, true),
            Some((name, flag)) => {
                bail!("`{name}[{flag}`: the only flag of an axis is [pow2], e.g. {name}[pow2]=[9:13]")
            }
        };
        let axis = Axis::parse(name)?;
        let Some((low, high)) = axis.bounds() else {
            ensure!(!pow2, "axis {}: [pow2] is for numbers", axis.name());
            let words = parse_words(items).with_context(|| format!("axis {}", axis.name()))?;
            return Ok(AxisValues { axis, values: Vec::new(), words });
        };
        let values = parse_items(items, pow2).with_context(|| format!("axis {}", axis.name()))?;
        if let Some(value) = values.iter().find(|value| !(low..=high).contains(*value)) {
            bail!("axis {}: {value} is outside {low} to {high}", axis.name());
        }
        Ok(AxisValues { axis, values, words: Vec::new() })
    }
}

/// The items without the square brackets that may stand around them.
fn unbracketed(items: &str) -> Result<&str> {
    let items = items.trim();
    match (items.strip_prefix('['), items.strip_suffix(']')) {
        (Some(rest), Some(_)) if items.len() >= 2 => Ok(&rest[..rest.len() - 1]),
        (None, None) => Ok(items),
        _ => bail!("`{items}`: a square bracket is opened or closed alone"),
    }
}

/// The words of `items`.
fn parse_words(items: &str) -> Result<Vec<String>> {
    let mut words: Vec<String> = Vec::new();
    for word in unbracketed(items)?.split(',').map(str::trim) {
        ensure!(!word.is_empty(), "an empty value; write e.g. kv-dtype=bf16,fp8");
        if !words.iter().any(|known| known == word) {
            words.push(word.to_owned());
        }
    }
    ensure!(words.len() <= MAX_VALUES, "{} values; an axis may have {MAX_VALUES}", words.len());
    Ok(words)
}

/// The values of `items`, bounded in number before anything is expanded.
fn parse_items(items: &str, pow2: bool) -> Result<Vec<u64>> {
    let inner = unbracketed(items)?;
    ensure!(!inner.trim().is_empty(), "no values; write e.g. 512,2048 or 512-8192*2 or [512:8192:512]");
    let mut values = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for item in inner.split(',') {
        let range = Range::parse(item.trim())?;
        range.check_count(item.trim())?;
        for value in range {
            let value = if pow2 { exponent(value)? } else { value };
            if seen.insert(value) {
                values.push(value);
            }
        }
        ensure!(values.len() <= MAX_VALUES, "more than {MAX_VALUES} values; an axis may have {MAX_VALUES}");
    }
    Ok(values)
}

fn exponent(power: u64) -> Result<u64> {
    u32::try_from(power).ok().and_then(|power| 1u64.checked_shl(power)).with_context(|| {
        format!("[pow2] takes exponents, and 2^{power} does not fit 64 bits; write e.g. [9:13] for 512 to 8192")
    })
}

/// How a range goes from one value to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stride {
    Add(u64),
    Multiply(u64),
}

/// `first` to `last`, both included where the stride meets them. Never empty, always ends.
#[derive(Debug)]
struct Range {
    next: Option<u64>,
    last: u64,
    stride: Stride,
}

impl Range {
    fn parse(item: &str) -> Result<Range> {
        ensure!(!item.is_empty(), "an empty value between commas");
        let (first, rest, colon) = match (item.split_once('-'), item.split_once(':')) {
            (_, Some((first, rest))) => (first, rest, true),
            (Some((first, rest)), None) => (first, rest, false),
            (None, None) => {
                let value = parse_count(item)?;
                return Ok(Range { next: Some(value), last: value, stride: Stride::Add(1) });
            }
        };
        let (last, stride) = match rest.find(if colon { &[':'][..] } else { &['+', '*'][..] }) {
            None => (rest, Stride::Add(1)),
            Some(at) => {
                let number = parse_count(&rest[at + 1..]).with_context(|| format!("the step of `{item}`"))?;
                (&rest[..at], if rest[at..].starts_with('*') { Stride::Multiply(number) } else { Stride::Add(number) })
            }
        };
        let first = parse_count(first).with_context(|| format!("the start of `{item}`"))?;
        let last = parse_count(last).with_context(|| format!("the end of `{item}`"))?;
        ensure!(first <= last, "`{item}` starts at {first}, after its end {last}");
        match stride {
            Stride::Add(0) => bail!("`{item}` has step 0 and would never end"),
            Stride::Multiply(factor @ 0..=1) => bail!("`{item}` multiplies by {factor} and would never end"),
            Stride::Multiply(_) if first == 0 => bail!("`{item}` multiplies 0 and would never end; start at 1"),
            Stride::Add(_) | Stride::Multiply(_) => Ok(Range { next: Some(first), last, stride }),
        }
    }

    /// An error if the range has more than [`MAX_VALUES`] values. Takes constant time however long the range is.
    fn check_count(&self, item: &str) -> Result<()> {
        let (Some(first), Stride::Add(step)) = (self.next, self.stride) else {
            return Ok(()); // a factor of 2 or more passes 64 bits within 64 values
        };
        let count = u128::from((self.last - first) / step) + 1;
        ensure!(
            count <= MAX_VALUES as u128,
            "`{item}` has {count} values and an axis may have {MAX_VALUES}; take a larger step, or a factor as in 1-1024*2"
        );
        Ok(())
    }
}

impl Iterator for Range {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let value = self.next?;
        self.next = match self.stride {
            Stride::Add(step) => value.checked_add(step),
            Stride::Multiply(factor) => value.checked_mul(factor),
        }
        .filter(|next| *next <= self.last);
        Some(value)
    }
}

/// A whole number with an optional binary suffix: `512`, `8k` = 8192, `1m` = 1048576.
pub(crate) fn parse_count(text: &str) -> Result<u64> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 0,
        "k" | "ki" => 10,
        "m" | "mi" => 20,
        suffix => bail!("`{text}`: `{suffix}` is no suffix of a count; k is 1024 and m is 1048576"),
    };
    ensure!(
        !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()),
        "`{text}` is not a whole number (0 or more, digits only, optionally k or m)"
    );
    digits
        .parse::<u64>()
        .ok()
        .and_then(|value| value.checked_mul(1 << shift))
        .with_context(|| format!("{text} does not fit 64 bits"))
}

/// One point of the grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Cell {
    /// Prefill token budget of a step.
    pub(crate) chunk: u64,
    /// Sequences.
    pub(crate) batch: u64,
    /// Tokens of each sequence already in the cache.
    pub(crate) depth: u64,
    /// What the sequences do.
    pub(crate) workload: Kind,
}

impl Cell {
    /// A cell of equal sequences.
    pub(crate) fn fixed(chunk: u64, batch: u64, depth: u64) -> Cell {
        Cell { chunk, batch, depth, workload: Kind::Fixed }
    }

    /// Writes the columns of the axes into a row.
    pub(crate) fn stamp(&self, row: &mut Row) {
        row.chunk = self.chunk;
        row.batch = self.batch;
        row.depth = self.depth;
        row.workload = Some(self.workload.name().to_owned());
    }

    /// Whether `self` does what `other` does and every axis is at least `other`'s: what `other` cannot hold, `self` cannot.
    pub(crate) fn dominates(&self, other: &Cell) -> bool {
        self.workload == other.workload
            && self.chunk >= other.chunk
            && self.batch >= other.batch
            && self.depth >= other.depth
    }
}

impl std::fmt::Display for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.workload != Kind::Fixed {
            write!(f, "{} ", self.workload.name())?;
        }
        write!(f, "chunk {} batch {} depth {}", self.chunk, self.batch, self.depth)
    }
}

/// The values of every axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Grid {
    chunk: Vec<u64>,
    batch: Vec<u64>,
    depth: Vec<u64>,
    /// KV types; none where the axis is not given. So too the others.
    pub(crate) kv_dtypes: Vec<String>,
    /// Recipes.
    pub(crate) recipes: Vec<String>,
    /// Cards.
    pub(crate) cards: Vec<String>,
    /// Workloads.
    pub(crate) workloads: Vec<String>,
}

impl Grid {
    /// The grid of the axes given, and for those not given `chunk=512,2048,8192`, `batch=1`, `depth=0`.
    pub(crate) fn new(axes: &[AxisValues]) -> Result<Grid> {
        let mut grid = Grid {
            chunk: vec![512, 2048, 8192],
            batch: vec![1],
            depth: vec![0],
            kv_dtypes: Vec::new(),
            recipes: Vec::new(),
            cards: Vec::new(),
            workloads: Vec::new(),
        };
        for (at, AxisValues { axis, values, words }) in axes.iter().enumerate() {
            ensure!(
                axes[..at].iter().all(|earlier| earlier.axis != *axis),
                "--axis {0} is given twice; join its values with commas, as in --axis {0}=1,2",
                axis.name()
            );
            match axis {
                Axis::Chunk => grid.chunk.clone_from(values),
                Axis::Batch => grid.batch.clone_from(values),
                Axis::Depth => grid.depth.clone_from(values),
                Axis::KvDtype => grid.kv_dtypes.clone_from(words),
                Axis::Recipe => grid.recipes.clone_from(words),
                Axis::Card => grid.cards.clone_from(words),
                Axis::Workload => grid.workloads.clone_from(words),
            }
        }
        let of_words = [&grid.kv_dtypes, &grid.recipes, &grid.cards, &grid.workloads];
        // At most 1024^7: no overflow.
        let groups: u128 = of_words.iter().map(|words| words.len().max(1) as u128).product();
        let cells = groups * (grid.chunk.len() * grid.batch.len() * grid.depth.len()) as u128;
        ensure!(
            cells <= MAX_CELLS as u128,
            "the axes make {cells} cells ({} chunk x {} batch x {} depth x {groups} of the others) and a sweep may have \
             {MAX_CELLS}; give fewer values",
            grid.chunk.len(),
            grid.batch.len(),
            grid.depth.len()
        );
        Ok(grid)
    }

    /// Every batch and depth, once: depth outermost, each in the order given.
    pub(crate) fn batches_and_depths(&self) -> Vec<(u64, u64)> {
        self.depth.iter().flat_map(|&depth| self.batch.iter().map(move |&batch| (batch, depth))).collect()
    }

    /// Every cell of those workloads: workload outermost, then depth, batch and chunk, each in the order given.
    pub(crate) fn cells(&self, workloads: &[Kind]) -> Vec<Cell> {
        let points = || self.batches_and_depths().into_iter();
        let of = |workload: Kind| {
            points().flat_map(move |(batch, depth)| {
                self.chunk.iter().map(move |&chunk| Cell { chunk, batch, depth, workload })
            })
        };
        workloads.iter().flat_map(|workload| of(*workload)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(text: &str) -> Vec<u64> {
        text.parse::<AxisValues>().unwrap_or_else(|e| panic!("{text}: {e:#}")).values
    }

    fn refusal(text: &str) -> String {
        format!("{:#}", text.parse::<AxisValues>().expect_err(text))
    }

    #[test]
    fn lists_and_ranges_of_both_dialects() {
        assert_eq!(values("chunk=512,2048,8192"), [512, 2048, 8192]);
        assert_eq!(values("chunk=512-8192*2"), [512, 1024, 2048, 4096, 8192]);
        assert_eq!(values("batch=1-16+5"), [1, 6, 11, 16]);
        assert_eq!(values("batch=1-4"), [1, 2, 3, 4]);
        assert_eq!(values("chunk[pow2]=[9:13]"), [512, 1024, 2048, 4096, 8192]);
        assert_eq!(values("batch=[1:16:3]"), [1, 4, 7, 10, 13, 16]);
        assert_eq!(values("batch=[1,2,4]"), [1, 2, 4]);
        assert_eq!(values("depth=0"), [0]);
    }

    #[test]
    fn mixed_lists_keep_their_order_and_lose_repeats() {
        assert_eq!(values("chunk=8192, 512-2048*2, 100:300:100, 512, 8k"), [8192, 512, 1024, 2048, 100, 200, 300]);
    }

    #[test]
    fn a_range_stops_before_an_end_it_does_not_meet() {
        assert_eq!(values("chunk=3-20*3"), [3, 9]);
        assert_eq!(values("batch=2:9:4"), [2, 6]);
    }

    #[test]
    fn suffixes_are_binary() {
        assert_eq!(values("chunk=2k,2K,2Ki,1m-1Mi"), [2048, 1 << 20]);
        assert_eq!(values("chunk=1k-8k*2"), [1024, 2048, 4096, 8192]);
        assert!(refusal("chunk=2g").contains("no suffix"));
    }

    #[test]
    fn endless_and_huge_ranges_are_refused_without_being_walked() {
        let start = std::time::Instant::now();
        let huge = refusal("depth=1-18446744073709551615+1");
        assert!(huge.contains("18446744073709551615 values") && huge.contains("1024"), "{huge}");
        assert!(refusal("depth=0-18446744073709551615").contains("18446744073709551616 values"));
        assert!(refusal("batch=1-5+0").contains("never end"));
        assert!(refusal("batch=1-5*1").contains("never end"));
        assert!(refusal("batch=1-5*0").contains("never end"));
        assert!(refusal("depth=0-5*2").contains("never end"));
        assert!(refusal("batch=5-1").contains("after its end"));
        assert!(refusal("chunk=1-600,601-1200").contains("1024"));
        assert!(start.elapsed() < std::time::Duration::from_secs(1));
    }

    #[test]
    fn bounds_hold_for_every_axis() {
        assert!(refusal("chunk=0").contains("outside 1 to 1048576"));
        assert!(refusal("batch=0").contains("outside 1 to 16384"));
        assert!(refusal("batch=16385").contains("outside") && refusal("chunk=1048577").contains("outside"));
        assert_eq!((values("batch=16384"), values("chunk=1m")), (vec![1 << 14], vec![1 << 20]));
        assert!(refusal("depth=0-16777217").contains("values"));
        assert!(refusal("depth=16777217").contains("outside 0 to 16777216"));
        assert!(refusal("chunk=1-18446744073709551615*2").contains("outside"));
        assert!(refusal("chunk[pow2]=64").contains("exponents"));
        assert!(refusal("chunk[pow2]=4294967296").contains("exponents"));
    }

    #[test]
    fn malformed_text_is_refused_by_what_is_wrong() {
        assert!(refusal("chunk").contains("NAME=VALUES"));
        assert!(refusal("chunks=1").contains("the axes are chunk, batch, depth"));
        assert!(refusal("=1").contains("the axes are"));
        assert!(refusal("chunk[log]=1").contains("[pow2]"));
        assert!(refusal("chunk[pow2=1").contains("[pow2]"));
        for text in ["chunk=", "chunk=[]", "chunk=1,,2", "chunk=1,", "chunk=[1", "chunk=1]", "chunk=[", "chunk=]"] {
            refusal(text);
        }
        for text in ["chunk=-1", "chunk=1.5", "chunk=1-", "chunk=1-2-3", "chunk=1:2:3:4", "chunk=1-2+", "chunk=1-2*2*2"]
        {
            refusal(text);
        }
        for text in ["chunk=k", "chunk=0x10", "chunk=1e3", "chunk=18446744073709551616", "chunk=18446744073709551615k"]
        {
            refusal(text);
        }
        for text in ["chunk=\u{665}", "chunk=5\u{e9}", "\u{e9}=1", "chunk=1\u{2013}5", "chunk=1 2"] {
            refusal(text);
        }
    }

    #[test]
    fn a_grid_has_every_cell_once_with_the_chunk_innermost() {
        let axes: Vec<AxisValues> = ["batch=1,2", "depth=0,64"].iter().map(|t| t.parse().unwrap()).collect();
        let cells = Grid::new(&axes).unwrap().cells(&[Kind::Fixed]);
        assert_eq!(cells.len(), 12);
        assert_eq!(cells[0], Cell::fixed(512, 1, 0));
        assert_eq!(cells[1], Cell::fixed(2048, 1, 0));
        assert_eq!(cells[3], Cell::fixed(512, 2, 0));
        assert_eq!(cells[11], Cell::fixed(8192, 2, 64));
        assert_eq!(cells.iter().collect::<std::collections::HashSet<_>>().len(), 12);
    }

    #[test]
    fn axes_of_words_are_lists_and_workloads_are_outermost() {
        let words = |text: &str| text.parse::<AxisValues>().unwrap_or_else(|e| panic!("{text}: {e:#}")).words;
        assert_eq!(words("kv-dtype=bf16, fp8,bf16"), ["bf16", "fp8"]);
        assert_eq!(words("card=[rtx-4090,h200]"), ["rtx-4090", "h200"]);
        for (text, why) in [
            ("recipe=", "an empty value"),
            ("recipe=a,,b", "an empty value"),
            ("card[pow2]=h200", "[pow2] is for numbers"),
            ("workload=[fixed", "opened or closed alone"),
        ] {
            assert!(refusal(text).contains(why), "{text}");
        }
        let axes = ["chunk=1,2", "kv-dtype=bf16,fp8"].map(|text| text.parse().unwrap());
        let cells = Grid::new(&axes).unwrap().cells(&[Kind::Fixed, Kind::Ladder]);
        let of = |chunk, workload| Cell { workload, ..Cell::fixed(chunk, 1, 0) };
        assert_eq!(cells, [of(1, Kind::Fixed), of(2, Kind::Fixed), of(1, Kind::Ladder), of(2, Kind::Ladder)]);
        assert_eq!(cells[2].to_string(), "ladder chunk 1 batch 1 depth 0");
    }

    #[test]
    fn a_grid_refuses_an_axis_given_twice_and_too_many_cells() {
        let parse = |texts: &[&str]| {
            let axes: Vec<AxisValues> = texts.iter().map(|t| t.parse().unwrap()).collect();
            Grid::new(&axes).map_err(|e| format!("{e:#}"))
        };
        assert!(parse(&["batch=1", "batch=2"]).unwrap_err().contains("--axis batch is given twice"));
        let many = parse(&["chunk=1-1000", "batch=1-1000", "depth=1"]).unwrap_err();
        assert!(many.contains("1000000 cells"), "{many}");
        assert!(parse(&["chunk=1-1000", "batch=1-100"]).is_ok());
        let many = parse(&["chunk=1-1000", "batch=1-100", "recipe=a,b"]).unwrap_err();
        assert!(many.contains("200000 cells"), "{many}");
    }

    #[test]
    fn dominance_needs_every_axis() {
        let cell = Cell::fixed;
        assert!(cell(2, 2, 0).dominates(&cell(2, 1, 0)));
        assert!(cell(2, 2, 0).dominates(&cell(2, 2, 0)));
        assert!(!cell(4, 1, 0).dominates(&cell(2, 2, 0)));
        assert!(!cell(2, 2, 0).dominates(&cell(2, 2, 1)));
        assert!(!cell(4, 2, 0).dominates(&Cell { workload: Kind::Ladder, ..cell(2, 2, 0) }));
    }
}
