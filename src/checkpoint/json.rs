//! JSON from a file that may be hostile: bounded in bytes and in depth, UTF-8, no key twice, numbers finite.
//!
//! May live here: reading a small file whole within a limit, turning its text into a [`Value`], and typed access to
//! its fields with errors that name file, key, value and what is accepted. May not: what any key means.

use std::fmt;
use std::io::Read;
use std::path::Path;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::{Error, Result};

/// Levels of `{` and `[` a document may nest. A quantisation config, the deepest known, has 6.
const MAX_DEPTH: usize = 32;

/// Longest piece of a file's own text that an error repeats, in characters.
const MAX_SHOWN: usize = 96;

/// A name or value out of a file, escaped and cut so that a message stays one readable line.
pub(crate) fn shown(text: &str) -> String {
    let mut out: String = text.chars().take(MAX_SHOWN).flat_map(char::escape_debug).collect();
    if text.chars().nth(MAX_SHOWN).is_some() {
        out.push('…');
    }
    out
}

/// The whole of a regular file of at most `limit` bytes. A pipe or device is refused unopened: it could block forever.
pub(crate) fn read_bounded(file: &Path, limit: u64) -> Result<Vec<u8>> {
    let meta = std::fs::metadata(file).map_err(Error::io(file))?;
    if !meta.is_file() {
        return Err(Error::checkpoint(file, "not a regular file; a checkpoint's files must be ordinary files"));
    }
    if meta.len() > limit {
        let len = meta.len();
        return Err(Error::checkpoint(file, format!("{len} bytes; at most {limit} are read: this is not such a file")));
    }
    let mut bytes = Vec::with_capacity(meta.len() as usize);
    let handle = std::fs::File::open(file).map_err(Error::io(file))?;
    // The limit again, for a file that grows while it is read.
    handle.take(limit + 1).read_to_end(&mut bytes).map_err(Error::io(file))?;
    if bytes.len() as u64 > limit {
        return Err(Error::checkpoint(file, format!("grew beyond {limit} bytes while it was read")));
    }
    Ok(bytes)
}

/// The text of `bytes`, once it is UTF-8 and nests no deeper than [`MAX_DEPTH`].
pub(crate) fn text<'a>(file: &Path, bytes: &'a [u8]) -> Result<&'a str> {
    let text = std::str::from_utf8(bytes).map_err(|e| {
        Error::checkpoint(
            file,
            format!("not UTF-8 at byte {}; JSON must be UTF-8: the file is damaged", e.valid_up_to()),
        )
    })?;
    check_depth(file, text)?;
    Ok(text)
}

fn check_depth(file: &Path, text: &str) -> Result<()> {
    let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => {
                depth += 1;
                if depth > MAX_DEPTH {
                    let what =
                        format!("JSON nested deeper than {MAX_DEPTH} levels at byte {at}; no checkpoint needs that");
                    return Err(Error::checkpoint(file, what));
                }
            }
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    Ok(())
}

/// The error of a document that serde_json refused, with the text around the place where its syntax is wrong.
pub(crate) fn syntax(file: &Path, text: &str, error: &serde_json::Error) -> Error {
    let near = if error.is_eof() {
        ": the file is cut short, copy it again".into()
    } else if error.is_syntax() {
        let near = around(text, error.line(), error.column());
        let hint = if near.contains("NaN") || near.contains("Infinity") { "; JSON has no NaN or Infinity" } else { "" };
        format!(", near {}{hint}", shown(near))
    } else {
        String::new()
    };
    Error::checkpoint(file, format!("not the JSON expected: {}{near}", shown_error(error)))
}

/// Some text before and after a line and column, both counted from 1.
fn around(text: &str, line: usize, column: usize) -> &str {
    let start = text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum::<usize>();
    let at = (start + column).min(text.len());
    let from = (0..=at.saturating_sub(40)).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
    let to = (at + 20..text.len()).find(|i| text.is_char_boundary(*i)).unwrap_or(text.len());
    &text[from..to]
}

// serde_json repeats keys and values of the file in its messages, at any length.
fn shown_error(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let cut: String = text.chars().take(4 * MAX_SHOWN).flat_map(char::escape_debug).collect();
    cut.replace("\\'", "'").replace("\\\"", "\"")
}

/// A document whose top is an object.
pub(crate) fn object(file: &Path, bytes: &[u8]) -> Result<Map<String, Value>> {
    let text = text(file, bytes)?;
    let mut de = serde_json::Deserializer::from_str(text);
    let value = Unique.deserialize(&mut de).and_then(|v| de.end().map(|()| v)).map_err(|e| syntax(file, text, &e))?;
    match value {
        Value::Object(map) => Ok(map),
        other => Err(Error::checkpoint(file, format!("holds {}; must hold a JSON object", kind(&other)))),
    }
}

/// Builds a [`Value`], and refuses an object with one key twice: readers disagree about which of the two holds.
struct Unique;

impl<'de> DeserializeSeed<'de> for Unique {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, de: D) -> Result<Value, D::Error> {
        de.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Unique {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }
    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }
    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }
    fn visit_f64<E: serde::de::Error>(self, v: f64) -> Result<Value, E> {
        Number::from_f64(v).map(Value::Number).ok_or_else(|| E::custom("a number that is not finite"))
    }
    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(Value::String(v.to_owned()))
    }
    fn visit_string<E>(self, v: String) -> Result<Value, E> {
        Ok(Value::String(v))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(v) = seq.next_element_seed(Unique)? {
            list.push(v);
        }
        Ok(Value::Array(list))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value_seed(Unique)?;
            if object.contains_key(&key) {
                return Err(A::Error::custom(format!("key \"{}\" stands twice in one object", shown(&key))));
            }
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}

/// A number as people write it.
fn plain(v: f64) -> String {
    if (1e-3..1e5).contains(&v) { v.to_string() } else { format!("{v:e}") }
}

/// What a value is, in a message.
pub(crate) fn kind(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::Object(map) => format!("an object of {} keys", map.len()),
        Value::String(s) => format!("\"{}\"", shown(s)),
        other => shown(&other.to_string()),
    }
}

/// The integers a field accepts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bound {
    pub(crate) min: usize,
    pub(crate) max: usize,
    pub(crate) multiple: usize,
}

impl Bound {
    pub(crate) const fn new(min: usize, max: usize, multiple: usize) -> Bound {
        Bound { min, max, multiple }
    }

    pub(crate) fn accepts(self, v: usize) -> bool {
        (self.min..=self.max).contains(&v) && v.is_multiple_of(self.multiple)
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an integer from {} to {}", self.min, self.max)?;
        if self.multiple > 1 {
            write!(f, ", a multiple of {}", self.multiple)?;
        }
        Ok(())
    }
}

/// One object of a document, with where it stands. JSON null reads as absent, as Python's `None` does.
#[derive(Debug, Clone)]
pub(crate) struct Fields<'a> {
    file: &'a Path,
    prefix: String,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(crate) fn top(file: &'a Path, map: &'a Map<String, Value>) -> Fields<'a> {
        Fields { file, prefix: String::new(), map }
    }

    pub(crate) fn file(&self) -> &'a Path {
        self.file
    }

    /// The key as it is reached from the top of the file, dotted.
    pub(crate) fn path(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    pub(crate) fn error(&self, key: &str, what: impl Into<String>) -> Error {
        Error::config(self.file, self.path(key), what)
    }

    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (&'a String, &'a Value)> + use<'a> {
        self.map.iter()
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Fields<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Fields { file: self.file, prefix: format!("{}{key}.", self.prefix), map }))
            }
            Some(other) => Err(self.error(key, format!("{}; must be an object", kind(other)))),
        }
    }

    pub(crate) fn int(&self, key: &str, accepted: Bound) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|v| usize::try_from(v).ok()).filter(|&v| accepted.accepts(v)) {
            Some(v) => Ok(Some(v)),
            None => Err(self.error(key, format!("{}; must be {accepted}", kind(value)))),
        }
    }

    /// A number in `min..=max`; the JSON may write it as an integer.
    pub(crate) fn float(&self, key: &str, min: f64, max: f64) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        if let Some(v) = value.as_f64().filter(|v| (min..=max).contains(v)) {
            return Ok(Some(v));
        }
        let what = format!("{}; must be a number from {} to {}", kind(value), plain(min), plain(max));
        Err(self.error(key, what))
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(v)) => Ok(Some(*v)),
            Some(other) => Err(self.error(key, format!("{}; must be true or false", kind(other)))),
        }
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(v)) => Ok(Some(v)),
            Some(other) => Err(self.error(key, format!("{}; must be a string", kind(other)))),
        }
    }

    pub(crate) fn list(&self, key: &str) -> Result<Option<&'a [Value]>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(v)) => Ok(Some(v)),
            Some(other) => Err(self.error(key, format!("{}; must be a list", kind(other)))),
        }
    }
}
