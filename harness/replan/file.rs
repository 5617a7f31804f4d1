//! A book as text that a person reviews and a diff reads well: what is the same for all recipes, cards, batches or chunks
//! is written once, as `all`. Reading checks everything: a file edited by hand is an error, never another number.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use anyhow::{Context, Result, bail, ensure};

use super::book::{Book, Bytes, Point, RESIDENT, Under, edge_chunk};
use super::grid::{BATCHES, CHUNKS, CONTEXT};
use crate::frontier::Edge;
use crate::record::METHOD;

/// Version of the text: its lines and what they mean.
const FORMAT: u32 = 1;
/// A file is at most this long; the largest written is a tenth of it.
pub(crate) const MOST_BYTES: u64 = 1 << 20;
/// Models, recipes or cards of one file at most.
const MOST_NAMES: usize = 100;
/// The name of the arena's part.
const TRANSIENT: &str = "transient";
/// The name of the largest chunks.
const EDGES: &str = "chunk";
/// Every recipe, card, batch or chunk.
const ALL: &str = "all";

const HEAD: &str = "\
# Planned bytes of a slab's parts, and the largest chunk that fits each card. Written by `highwater replan --update`, held
# by `highwater replan`; never edited by hand. bf16, with logits and recurrent state in f32; the KV pool holds every
# sequence at its full context; weights to transient are what a slab must have. A card's slab is its memory less its
# overhead. `all` is every one of its kind; `alike A = B` says that B has every line of A in that part.
";

/// A part's value at one point: its bytes and, for the arena, who holds them.
type Value<'a> = (u64, &'a [(String, u64)]);

fn part_names() -> impl Iterator<Item = &'static str> {
    RESIDENT.into_iter().chain([TRANSIENT])
}

fn value<'a>(bytes: &'a Bytes, part: &str) -> Value<'a> {
    match RESIDENT.iter().position(|name| *name == part) {
        Some(at) => (bytes.resident[at], &[]),
        None => (bytes.transient, &bytes.owners),
    }
}

/// The text of a whole book: one with every recipe on every card under every batch and chunk.
pub(crate) fn render(book: &Book) -> String {
    let mut text = HEAD.to_owned();
    let _ = writeln!(text, "\nformat   {FORMAT}\nmethod   {METHOD}\ncontext  {CONTEXT}");
    for (name, list) in [("models", &book.models), ("recipes", &book.recipes), ("cards", &book.cards)] {
        let _ = writeln!(text, "{name:<7}  {}", list.join(" "));
    }
    for part in part_names() {
        render_part(&mut text, book, part);
    }
    render_edges(&mut text, book);
    text
}

fn render_part(text: &mut String, book: &Book, part: &str) {
    let get = |recipe: &str, card: &str, batch: u64, chunk: u64| {
        let key = Point { recipe: recipe.to_owned(), card: card.to_owned(), batch, chunk };
        book.cells.get(&key).map(|bytes| value(bytes, part))
    };
    // Every value of a recipe in one order: recipes whose lists are equal are alike.
    let list = |recipe: &String| -> Vec<Option<Value>> {
        let mut list = Vec::new();
        for batch in BATCHES {
            for chunk in CHUNKS {
                list.extend(book.cards.iter().map(|card| get(recipe, card, batch, chunk)));
            }
        }
        list
    };
    let mut classes: Vec<(Vec<Option<Value>>, Vec<&String>)> = Vec::new();
    for recipe in &book.recipes {
        let values = list(recipe);
        match classes.iter_mut().find(|(known, _)| *known == values) {
            Some((_, recipes)) => recipes.push(recipe),
            None => classes.push((values, vec![recipe])),
        }
    }
    let cards = book.cards.len();
    // The list is (batch, chunk, card), the card fastest.
    let by_chunk = classes.iter().any(|(list, _)| {
        list.chunks(cards * CHUNKS.len()).any(|of_batch| of_batch.chunks(cards).any(|of| *of != of_batch[..cards]))
    });
    let by_batch = classes.iter().any(|(list, _)| {
        let step = cards * CHUNKS.len();
        list.chunks(step).any(|of_batch| *of_batch != list[..step])
    });
    let _ = writeln!(text, "\n#     part      recipe                  batch  chunk         bytes  cards  owners");
    render_alike(text, part, classes.iter().map(|(_, recipes)| recipes));
    for (_, recipes) in &classes {
        let name = if classes.len() == 1 { ALL } else { recipes[0] };
        for batch in if by_batch { &BATCHES[..] } else { &BATCHES[..1] } {
            for chunk in if by_chunk { &CHUNKS[..] } else { &CHUNKS[..1] } {
                let mut groups: Vec<(Value, Vec<&str>)> = Vec::new();
                for card in &book.cards {
                    let Some(value) = get(recipes[0], card, *batch, *chunk) else { continue };
                    match groups.iter_mut().find(|(known, _)| *known == value) {
                        Some((_, cards)) => cards.push(card),
                        None => groups.push((value, vec![card])),
                    }
                }
                let of = |each: bool, n: &u64| if each { n.to_string() } else { ALL.to_owned() };
                let (batch, chunk) = (of(by_batch, batch), of(by_chunk, chunk));
                for ((bytes, owners), names) in &groups {
                    let names = if names.len() == cards { ALL.to_owned() } else { names.join(",") };
                    let owners: Vec<String> = owners.iter().map(|(tag, bytes)| format!("{tag}={bytes}")).collect();
                    let line = format!(
                        "bytes {part:<9} {name:<23} {batch:>5}  {chunk:>5}  {bytes:>12}  {names:<5}  {}",
                        owners.join(" ")
                    );
                    let _ = writeln!(text, "{}", line.trim_end());
                }
            }
        }
    }
}

/// One line for each recipe and set of cards whose edges are the same at every batch.
fn render_edges(text: &mut String, book: &Book) {
    type Edges = [Option<Edge>; BATCHES.len()];
    let edges = |recipe: &str, card: &str| -> Edges { BATCHES.map(|batch| book.edge(recipe, card, batch)) };
    let list = |recipe: &String| book.cards.iter().map(|card| edges(recipe, card)).collect::<Vec<_>>();
    let mut classes: Vec<(Vec<Edges>, Vec<&String>)> = Vec::new();
    for recipe in &book.recipes {
        let values = list(recipe);
        match classes.iter_mut().find(|(known, _)| *known == values) {
            Some((_, recipes)) => recipes.push(recipe),
            None => classes.push((values, vec![recipe])),
        }
    }
    let batches = BATCHES.map(|batch| format!("{:>10}", format!("batch {batch}"))).concat();
    let _ = writeln!(text, "\n#     part      recipe             {batches}  cards");
    render_alike(text, EDGES, classes.iter().map(|(_, recipes)| recipes));
    for (list, recipes) in &classes {
        let mut groups: Vec<(Edges, Vec<&str>)> = Vec::new();
        for (edges, card) in list.iter().zip(&book.cards) {
            match groups.iter_mut().find(|(known, _)| known == edges) {
                Some((_, cards)) => cards.push(card),
                None => groups.push((*edges, vec![card])),
            }
        }
        let name = if classes.len() == 1 { ALL } else { recipes[0] };
        for (edges, cards) in groups {
            let words = edges.map(|edge| format!("{:>10}", edge.map_or_else(String::new, edge_text))).concat();
            let cards = if cards.len() == book.cards.len() { ALL.to_owned() } else { cards.join(",") };
            let _ = writeln!(text, "fits  {EDGES:<9} {name:<18} {words}  {cards}");
        }
    }
}

/// The lines that say which recipes have every line of another.
fn render_alike<'a>(text: &mut String, part: &str, classes: impl ExactSizeIterator<Item = &'a Vec<&'a String>>) {
    if classes.len() == 1 {
        return;
    }
    for recipes in classes.filter(|recipes| recipes.len() > 1) {
        let others: Vec<&str> = recipes[1..].iter().map(|name| name.as_str()).collect();
        let _ = writeln!(text, "alike {part:<9} {} = {}", recipes[0], others.join(" "));
    }
}

/// An edge in one word.
pub(crate) fn edge_text(edge: Edge) -> String {
    match edge {
        Edge::Nothing => "none".into(),
        Edge::Largest(chunk) => chunk.to_string(),
        Edge::Beyond(chunk) => format!("{chunk}+"),
        Edge::Whole(chunk) => format!("{chunk}=all"),
    }
}

fn edge_of(text: &str) -> Result<Edge> {
    let edge = if text == "none" {
        Edge::Nothing
    } else if let Some(chunk) = text.strip_suffix('+') {
        Edge::Beyond(chunk.parse()?)
    } else if let Some(chunk) = text.strip_suffix("=all") {
        Edge::Whole(chunk.parse()?)
    } else {
        Edge::Largest(text.parse()?)
    };
    ensure!(edge == Edge::Nothing || edge_chunk(edge) > 0, "a chunk of 0 tokens; none is written `none`");
    Ok(edge)
}

/// Reads a book back. An error names the line.
pub(crate) fn parse(text: &str) -> Result<Book> {
    let mut reader = Reader::default();
    for (index, line) in text.lines().enumerate() {
        reader.line(line).with_context(|| format!("line {}: {}", index + 1, shown(line)))?;
    }
    reader.finish()
}

fn shown(line: &str) -> String {
    line.chars().take(100).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// What a key was last written for: (part, recipe, card, batch, chunk) to bytes and owners.
type Parts = BTreeMap<(&'static str, Point), (u64, Vec<(String, u64)>)>;

#[derive(Default)]
struct Reader {
    numbers: BTreeMap<String, u64>,
    lists: BTreeMap<String, Vec<String>>,
    alike: BTreeMap<(&'static str, String), Vec<String>>,
    parts: Parts,
    edges: BTreeMap<Under, Edge>,
}

impl Reader {
    fn line(&mut self, line: &str) -> Result<()> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            [] => Ok(()),
            [first, ..] if first.starts_with('#') => Ok(()),
            [name @ ("format" | "method" | "context"), number] => {
                let number: u64 = number.parse()?;
                let wanted = match *name {
                    "format" => u64::from(FORMAT),
                    "method" => u64::from(METHOD),
                    _ => CONTEXT,
                };
                ensure!(
                    number == wanted,
                    "this program plans with {name} {wanted}; a baseline of another {name} says nothing about it: write it \
                     anew with `highwater replan --update`"
                );
                ensure!(self.numbers.insert((*name).to_owned(), number).is_none(), "`{name}` is there twice");
                Ok(())
            }
            [name @ ("models" | "recipes" | "cards"), list @ ..] => {
                let list: Vec<String> = list.iter().map(|word| (*word).to_owned()).collect();
                let distinct: BTreeSet<&String> = list.iter().collect();
                ensure!(!list.is_empty() && distinct.len() == list.len(), "{name}: none, or one twice");
                // A line of `all` is as many values as their product: a file of any length must not fill memory.
                ensure!(list.len() <= MOST_NAMES, "{} {name}; at most {MOST_NAMES}", list.len());
                ensure!(self.lists.insert((*name).to_owned(), list).is_none(), "`{name}` is there twice");
                Ok(())
            }
            ["alike", part, first, "=", others @ ..] => {
                let key = (part_of(part)?, (*first).to_owned());
                let others = others.iter().map(|name| self.one("recipes", name)).collect::<Result<Vec<_>>>()?;
                self.one("recipes", first)?;
                ensure!(self.alike.insert(key, others).is_none(), "`{first}` has such a line already");
                Ok(())
            }
            ["bytes", part, recipe, batch, chunk, bytes, cards, owners @ ..] => {
                ensure!(*part != EDGES, "a chunk is no bytes");
                self.bytes(part_of(part)?, recipe, batch, chunk, bytes.parse()?, cards, owners)
            }
            ["fits", EDGES, recipe, edges @ .., cards] => {
                ensure!(edges.len() == BATCHES.len(), "an edge for each of the batches {BATCHES:?}");
                let edges = edges.iter().map(|edge| edge_of(edge)).collect::<Result<Vec<_>>>()?;
                for recipe in self.recipes(EDGES, recipe)? {
                    for card in self.cards(cards)? {
                        for (batch, edge) in BATCHES.into_iter().zip(&edges) {
                            let key = Under { recipe: recipe.clone(), card: card.clone(), batch };
                            let before = self.edges.insert(key, *edge);
                            ensure!(before.is_none(), "the edges of {recipe} on {card} are there twice");
                        }
                    }
                }
                Ok(())
            }
            _ => bail!("no line of a plan baseline begins and goes on like this"),
        }
    }

    fn bytes(
        &mut self,
        part: &'static str,
        recipe: &str,
        batch: &str,
        chunk: &str,
        bytes: u64,
        cards: &str,
        owners: &[&str],
    ) -> Result<()> {
        let (recipes, cards) = (self.recipes(part, recipe)?, self.cards(cards)?);
        let numbers = |text: &str, all: &[u64]| -> Result<Vec<u64>> {
            if text == ALL {
                return Ok(all.to_vec());
            }
            let number = text.parse()?;
            ensure!(all.contains(&number), "{number}; planned are {all:?}");
            Ok(vec![number])
        };
        let (batches, chunks) = (numbers(batch, &BATCHES)?, numbers(chunk, &CHUNKS)?);
        let owner = |text: &&str| -> Result<(String, u64)> {
            let (tag, bytes) = text.rsplit_once('=').with_context(|| format!("`{text}` is not tag=bytes"))?;
            Ok((tag.to_owned(), bytes.parse()?))
        };
        let owners = owners.iter().map(owner).collect::<Result<Vec<_>>>()?;
        let sum = owners.iter().try_fold(0u64, |sum, (_, bytes)| sum.checked_add(*bytes));
        let wanted = if part == TRANSIENT { bytes } else { 0 };
        ensure!(sum == Some(wanted), "the owners do not sum to the bytes");
        for recipe in &recipes {
            for card in &cards {
                for &batch in &batches {
                    for &chunk in &chunks {
                        let point = Point { recipe: recipe.clone(), card: card.clone(), batch, chunk };
                        let before = self.parts.insert((part, point), (bytes, owners.clone()));
                        ensure!(before.is_none(), "{part} of {recipe} on {card} is there twice");
                    }
                }
            }
        }
        Ok(())
    }

    /// The recipes a line of `part` is about: all, or one and those alike.
    fn recipes(&self, part: &'static str, name: &str) -> Result<Vec<String>> {
        if name == ALL {
            return Ok(self.list("recipes")?.to_vec());
        }
        let mut list = vec![self.one("recipes", name)?];
        list.extend(self.alike.get(&(part, name.to_owned())).into_iter().flatten().cloned());
        Ok(list)
    }

    fn cards(&self, names: &str) -> Result<Vec<String>> {
        match names {
            ALL => Ok(self.list("cards")?.to_vec()),
            names => names.split(',').map(|name| self.one("cards", name)).collect(),
        }
    }

    fn list(&self, name: &str) -> Result<&[String]> {
        self.lists.get(name).map(Vec::as_slice).with_context(|| format!("the line `{name}` must come first"))
    }

    /// A name, if it is in a list.
    fn one(&self, list: &str, name: &str) -> Result<String> {
        ensure!(self.list(list)?.iter().any(|known| known == name), "`{name}` is not in the line `{list}`");
        Ok(name.to_owned())
    }

    fn finish(mut self) -> Result<Book> {
        for name in ["format", "method", "context"] {
            ensure!(self.numbers.contains_key(name), "the line `{name}` is missing");
        }
        let mut book = Book {
            models: self.list("models")?.to_vec(),
            recipes: self.list("recipes")?.to_vec(),
            cards: self.list("cards")?.to_vec(),
            edges: std::mem::take(&mut self.edges),
            ..Book::default()
        };
        for recipe in &book.recipes {
            for card in &book.cards {
                for batch in BATCHES {
                    let missing = |what: &str| format!("{what} of {recipe} on {card} at batch {batch} is missing");
                    let key = Under { recipe: recipe.clone(), card: card.clone(), batch };
                    ensure!(book.edges.contains_key(&key), missing("the edge"));
                    for chunk in CHUNKS {
                        let point = Point { recipe: recipe.clone(), card: card.clone(), batch, chunk };
                        let mut take = |part: &'static str| {
                            self.parts.remove(&(part, point.clone())).with_context(|| missing(part))
                        };
                        let (transient, owners) = take(TRANSIENT)?;
                        let mut bytes = Bytes { transient, owners, ..Bytes::default() };
                        for (at, part) in RESIDENT.into_iter().enumerate() {
                            bytes.resident[at] = take(part)?.0;
                        }
                        let sum = bytes.resident.iter().try_fold(transient, |sum, bytes| sum.checked_add(*bytes));
                        ensure!(sum.is_some(), "{recipe} on {card}: more bytes than 64 bits count");
                        book.cells.insert(point, bytes);
                    }
                }
            }
        }
        Ok(book)
    }
}

fn part_of(text: &str) -> Result<&'static str> {
    part_names().chain([EDGES]).find(|name| *name == text).with_context(|| format!("`{text}` is no part of a slab"))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A book with something that depends on each of recipe, card, batch and chunk, and something that does not.
    pub(crate) fn sample() -> Book {
        let names = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let mut book = Book {
            models: names(&["m-1", "m-2"]),
            recipes: names(&["bf16", "fp8-a", "fp8-b"]),
            cards: names(&["rtx-1", "rtx-2", "h-3"]),
            ..Book::default()
        };
        for (r, recipe) in book.recipes.iter().enumerate() {
            for (c, card) in book.cards.iter().enumerate() {
                for batch in BATCHES {
                    let (recipe, card) = (recipe.clone(), card.clone());
                    let edge = match (c, batch) {
                        (0, _) => Edge::Nothing,
                        (1, 1) => Edge::Whole(8192),
                        (1, _) => Edge::Largest(64 * batch),
                        _ => Edge::Beyond(65_536),
                    };
                    book.edges.insert(Under { recipe: recipe.clone(), card: card.clone(), batch }, edge);
                    for chunk in CHUNKS {
                        // Two recipes are alike in the arena, which one card alone has more of, at one batch alone.
                        let more = u64::from(c == 2 && batch == 64) * 512;
                        let (logits, rest) = (chunk * 1000 + u64::from(r == 0) * 256, batch * 256 + more);
                        let bytes = Bytes {
                            resident: [1000 + r as u64, batch * 100, batch * 10, batch + chunk],
                            transient: logits + rest,
                            owners: vec![("head.linear.logits".into(), logits), ("(holes)".into(), rest)],
                        };
                        let (recipe, card) = (recipe.clone(), card.clone());
                        book.cells.insert(Point { recipe, card, batch, chunk }, bytes);
                    }
                }
            }
        }
        book
    }

    #[test]
    fn a_book_survives_its_text_and_the_text_says_nothing_twice() {
        let book = sample();
        let text = render(&book);
        assert_eq!(parse(&text).unwrap(), book, "{text}");
        for line in [
            "alike transient fp8-a = fp8-b",
            "bytes weights   bf16                      all    all          1000  all",
            "bytes kv        all                         8    all           800  all",
            "fits  chunk     all                      none      none      none  rtx-1",
            "fits  chunk     all                  8192=all       512      4096  rtx-2",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
        assert!(text.contains("rtx-1,rtx-2  head.linear.logits="), "{text}");
        // 3 parts of weights, 3 of kv, 3 of state, 9 of inputs; of the arena 2 x 9, and one card more in 2 x 3 of them.
        assert_eq!(text.lines().filter(|line| line.starts_with("bytes")).count(), 3 + 3 + 3 + 9 + 18 + 6);
    }

    #[test]
    fn a_file_edited_by_hand_is_refused_with_its_line() {
        let text = render(&sample());
        for (from, to, why) in [
            ("format   1", "format   2", "format 1"),
            ("method   ", "method   9", "write it anew"),
            ("context  8192", "", "context"),
            ("cards    rtx-1", "cards    rtx-1 rtx-1", "twice"),
            ("none  rtx-1", "none  rtx-9", "rtx-9"),
            ("none  rtx-1", "none  rtx-1,rtx-2", "twice"),
            ("      none  rtx-1", "  rtx-1", "for each of the batches"),
            ("fits  chunk     all                      none", "# ", "edge of bf16 on rtx-1"),
            (" none", " 0", "none"),
            ("bytes weights", "bytes chunk", "no bytes"),
            (
                "bytes kv        all                         8",
                "bytes kv        all                         9",
                "planned are",
            ),
            ("bytes kv        all                         8", "# bytes kv", "kv of bf16"),
            ("bytes state", "bytes stone", "stone"),
            ("(holes)=", "(holes)=1", "sum"),
            ("(holes)=", "(holes)=x", "invalid digit"),
            ("           800  all", "  18446744073709551616  all", "number too large"),
            ("           800  all", "  18446744073709551615  all", "64 bits"),
            ("bytes kv", "words kv", "no line"),
        ] {
            assert!(text.contains(from), "{from}");
            let error = parse(&text.replacen(from, to, 1)).map(|_| ()).expect_err(from);
            assert!(format!("{error:#}").contains(why), "{from}: {error:#}");
        }
        let twice = text.lines().find(|line| line.starts_with("bytes weights")).unwrap();
        assert!(format!("{:#}", parse(&format!("{text}\n{twice}")).unwrap_err()).contains("twice"));
        let many: Vec<String> = (0..=MOST_NAMES).map(|n| format!("x-{n}")).collect();
        let crowded = text.replacen("cards    rtx-1 ", &format!("cards    {} ", many.join(" ")), 1);
        assert!(format!("{:#}", parse(&crowded).unwrap_err()).contains("at most 100"));
        assert!(parse("").is_err());
        assert!(parse(&"\u{0}".repeat(1000)).is_err());
    }
}
