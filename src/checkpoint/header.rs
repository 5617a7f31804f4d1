//! The header of one safetensors file: 8 bytes of length, then JSON with each tensor's dtype, shape and place.
//!
//! May live here: the format's own rules, checked so that every tensor of a [`Header`] lies inside its file, apart from
//! every other, with as many bytes as dtype and shape say. May not: what a name means, and reading the data.
//! The format: <https://github.com/huggingface/safetensors#format>.

use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use super::json::{self, shown};
use crate::error::{Error, Result};

/// Most bytes of JSON; the reference reader's limit.
pub const MAX_JSON: u64 = 100_000_000;
/// Most tensors of one file.
const MAX_TENSORS: usize = 1 << 19;
/// Most dimensions of a tensor; the family's largest, a vision kernel, has 5.
const MAX_RANK: usize = 8;
/// Longest tensor name, in bytes.
const MAX_NAME: usize = 512;

/// Every element type the format knows.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    Bool,
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F4,
    F6E2m3,
    F6E3m2,
    F8E4m3,
    F8E5m2,
    F8E8m0,
    F8E4m3Fnuz,
    F8E5m2Fnuz,
    F16,
    Bf16,
    F32,
    F64,
    C64,
}

/// Each dtype with its name in a header and its bits per element.
const DTYPES: [(Dtype, &str, u64); 22] = [
    (Dtype::Bool, "BOOL", 8),
    (Dtype::U8, "U8", 8),
    (Dtype::I8, "I8", 8),
    (Dtype::U16, "U16", 16),
    (Dtype::I16, "I16", 16),
    (Dtype::U32, "U32", 32),
    (Dtype::I32, "I32", 32),
    (Dtype::U64, "U64", 64),
    (Dtype::I64, "I64", 64),
    (Dtype::F4, "F4", 4),
    (Dtype::F6E2m3, "F6_E2M3", 6),
    (Dtype::F6E3m2, "F6_E3M2", 6),
    (Dtype::F8E4m3, "F8_E4M3", 8),
    (Dtype::F8E5m2, "F8_E5M2", 8),
    (Dtype::F8E8m0, "F8_E8M0", 8),
    (Dtype::F8E4m3Fnuz, "F8_E4M3FNUZ", 8),
    (Dtype::F8E5m2Fnuz, "F8_E5M2FNUZ", 8),
    (Dtype::F16, "F16", 16),
    (Dtype::Bf16, "BF16", 16),
    (Dtype::F32, "F32", 32),
    (Dtype::F64, "F64", 64),
    (Dtype::C64, "C64", 64),
];

impl Dtype {
    fn row(self) -> (Dtype, &'static str, u64) {
        DTYPES[self as usize]
    }

    /// Its name in a header, e.g. `BF16`.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Bits of one element.
    pub fn bits(self) -> u64 {
        self.row().2
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its name in this file.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Elements along each dimension, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// Its first byte, from the start of the file.
    pub offset: u64,
    /// Its bytes: exactly its elements times their size.
    pub bytes: u64,
}

/// What a valid header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// All tensors, in the order of their data.
    pub tensors: Vec<Tensor>,
    /// Where the data begin: 8 and the bytes of JSON.
    pub data_start: u64,
}

/// The bytes of JSON after the first 8 of a file of `file_len` bytes.
///
/// # Errors
/// [`Error::Checkpoint`] if that many cannot be there, or are more than [`MAX_JSON`].
pub fn json_len(file: &Path, first: [u8; 8], file_len: u64) -> Result<u64> {
    let len = u64::from_le_bytes(first);
    let rest = file_len.saturating_sub(8);
    if len > MAX_JSON {
        let what = format!("the header says it is {len} bytes; at most {MAX_JSON} are read: not a safetensors file");
        return Err(Error::checkpoint(file, what));
    }
    if len < 2 || len > rest {
        let what = format!(
            "the header says it is {len} bytes, and {rest} follow; the file is cut short or no safetensors file, copy it again"
        );
        return Err(Error::checkpoint(file, what));
    }
    Ok(len)
}

/// Parses the beginning of a file of `file_len` bytes. `bytes` must hold at least the length and the JSON.
///
/// # Errors
/// [`Error::Checkpoint`], naming the tensor and the numbers, for anything the format does not allow: a length that does
/// not fit, text that is not JSON, a name twice, an unknown dtype, a shape that overflows, and data that overlap, leave a
/// gap, end beyond or before the file's end, or have a size other than dtype and shape give.
pub fn parse(file: &Path, bytes: &[u8], file_len: u64) -> Result<Header> {
    let Some((first, rest)) = bytes.split_first_chunk::<8>() else {
        let what = format!("{} bytes; a safetensors file begins with 8 bytes of header length", bytes.len());
        return Err(Error::checkpoint(file, what));
    };
    let len = json_len(file, *first, file_len)?;
    let Some(json) = rest.get(..len as usize) else {
        let what = format!("the header is {len} bytes, and {} could be read; copy the file again", rest.len());
        return Err(Error::checkpoint(file, what));
    };
    let text = json::text(file, json)?;
    if !text.starts_with('{') {
        let what = "the header does not begin with '{'; not a safetensors file";
        return Err(Error::checkpoint(file, what));
    }
    let mut de = serde_json::Deserializer::from_str(text);
    let raw =
        Entries.deserialize(&mut de).and_then(|v| de.end().map(|()| v)).map_err(|e| json::syntax(file, text, &e))?;
    let data_start = 8 + len;
    let mut tensors = Vec::with_capacity(raw.len());
    for (name, entry) in raw {
        tensors.push(place(name, entry, data_start).map_err(|what| Error::checkpoint(file, what))?);
    }
    tensors.sort_by(|a, b| (a.offset, a.bytes, &a.name).cmp(&(b.offset, b.bytes, &b.name)));
    tile(&tensors, data_start, file_len).map_err(|what| Error::checkpoint(file, what))?;
    Ok(Header { tensors, data_start })
}

/// One tensor's own numbers: known dtype, a size that can be computed, and as many bytes as its offsets hold.
fn place(name: String, raw: Entry, data_start: u64) -> Result<Tensor, String> {
    let Entry { dtype, shape: Dims(shape), data_offsets: (begin, end) } = raw;
    let shown_name = shown(&name);
    let Some((dtype, ..)) = DTYPES.into_iter().find(|(_, n, _)| *n == dtype) else {
        return Err(format!("tensor \"{shown_name}\": unknown dtype \"{}\"", shown(&dtype)));
    };
    let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
    let Some(bits) = elements.and_then(|n| n.checked_mul(dtype.bits())) else {
        return Err(format!("tensor \"{shown_name}\": shape {shape:?} of {dtype} overflows 64 bits"));
    };
    if bits % 8 != 0 {
        return Err(format!(
            "tensor \"{shown_name}\": shape {shape:?} of {dtype} is {bits} bits, not a whole number of bytes"
        ));
    }
    let bytes = bits / 8;
    if end.checked_sub(begin) != Some(bytes) {
        return Err(format!(
            "tensor \"{shown_name}\": shape {shape:?} of {dtype} is {bytes} bytes, and data_offsets [{begin}, {end}] are not"
        ));
    }
    let Some(offset) = begin.checked_add(data_start).filter(|o| o.checked_add(bytes).is_some()) else {
        return Err(format!("tensor \"{shown_name}\": data_offsets [{begin}, {end}] overflow 64 bits"));
    };
    let shape = shape.into_iter().map(|d| d as usize).collect();
    Ok(Tensor { name, dtype, shape, offset, bytes })
}

/// Tensors, sorted by place, tile the data exactly.
fn tile(tensors: &[Tensor], data_start: u64, file_len: u64) -> Result<(), String> {
    let mut at = data_start;
    let mut before = "the header";
    for t in tensors {
        let (name, begin) = (shown(&t.name), t.offset - data_start);
        let free = at - data_start;
        if t.offset < at {
            return Err(format!(
                "tensor \"{name}\": its data begin at {begin}, before {} ends at {free}: they overlap",
                shown(before)
            ));
        }
        if t.offset > at {
            return Err(format!(
                "tensor \"{name}\": its data begin at {begin}, and {} ends at {free}: a gap",
                shown(before)
            ));
        }
        at += t.bytes;
        if at > file_len {
            return Err(format!(
                "tensor \"{name}\": its data end at byte {at} of a file of {file_len}; the file is cut short, copy it again"
            ));
        }
        before = &t.name;
    }
    if at != file_len {
        return Err(format!(
            "the last tensor ends at byte {at} of a file of {file_len}; {} bytes belong to nothing",
            file_len - at
        ));
    }
    Ok(())
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object of dtype, shape and data_offsets")]
struct Entry {
    dtype: String,
    shape: Dims,
    data_offsets: (u64, u64),
}

/// A shape of at most [`MAX_RANK`] dimensions.
struct Dims(Vec<u64>);

impl<'de> serde::Deserialize<'de> for Dims {
    fn deserialize<D: Deserializer<'de>>(de: D) -> Result<Dims, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Dims;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a shape, as a list of non-negative integers")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Dims, A::Error> {
                let mut dims = Vec::new();
                while let Some(d) = seq.next_element()? {
                    if dims.len() == MAX_RANK {
                        return Err(A::Error::custom(format!("a shape of more than {MAX_RANK} dimensions")));
                    }
                    dims.push(d);
                }
                Ok(Dims(dims))
            }
        }
        de.deserialize_seq(V)
    }
}

/// The header's object: entries by name in the order written, `__metadata__` checked and dropped.
struct Entries;

impl<'de> DeserializeSeed<'de> for Entries {
    type Value = Vec<(String, Entry)>;
    fn deserialize<D: Deserializer<'de>>(self, de: D) -> Result<Self::Value, D::Error> {
        de.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Entries {
    type Value = Vec<(String, Entry)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut list, mut names) = (Vec::new(), HashSet::new());
        while let Some(name) = map.next_key::<String>()? {
            if name.is_empty() || name.len() > MAX_NAME {
                let what = format!("a tensor name of {} bytes; must be 1 to {MAX_NAME}", name.len());
                return Err(A::Error::custom(what));
            }
            if !names.insert(name.clone()) {
                return Err(A::Error::custom(format!("tensor \"{}\" stands twice in the header", shown(&name))));
            }
            if list.len() == MAX_TENSORS {
                return Err(A::Error::custom(format!("more than {MAX_TENSORS} tensors")));
            }
            let named = |e: A::Error| A::Error::custom(format!("tensor \"{}\": {e}", shown(&name)));
            if name == "__metadata__" {
                map.next_value::<StringMap>().map_err(named)?;
            } else {
                let entry = map.next_value::<Entry>().map_err(named)?;
                list.push((name, entry));
            }
        }
        Ok(list)
    }
}

/// An object of strings, dropped as it is read.
struct StringMap;

impl<'de> serde::Deserialize<'de> for StringMap {
    fn deserialize<D: Deserializer<'de>>(de: D) -> Result<StringMap, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = StringMap;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<StringMap, A::Error> {
                while map.next_entry::<String, String>()?.is_some() {}
                Ok(StringMap)
            }
        }
        de.deserialize_map(V)
    }
}
