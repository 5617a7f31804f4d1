//! model.safetensors.index.json: which file holds which tensor.
//!
//! May live here: the index's own rules, so that every file it names is a plain name inside the checkpoint's folder.
//! May not: whether those files exist or hold what it says (disk.rs).

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use super::json::{self, shown};
use crate::error::{Error, Result};

/// The file's name in a checkpoint's folder.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Most bytes of it: 400,000 tensors of the longest names known take 60 MB.
pub(crate) const INDEX_LIMIT: u64 = 128 << 20;
/// Most files a checkpoint may be split into.
pub(crate) const MAX_FILES: usize = 4096;

/// Most tensors it may name; the largest model of the family, quantised, has 370,000.
const MAX_TENSORS: usize = 1 << 19;

/// What a valid index says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Index {
    /// File names, in the order they are first named.
    pub files: Vec<String>,
    /// Position in `files` by tensor name.
    pub tensors: HashMap<String, usize>,
}

/// Parses an index. Its `metadata` is not read: exporters disagree about what `total_size` counts.
///
/// # Errors
/// [`Error::Checkpoint`], naming the tensor or the file, for text that is not JSON, no `weight_map` or an empty one, a
/// name twice, and a file that is not a plain `*.safetensors` name inside the folder.
pub fn parse(file: &Path, bytes: &[u8]) -> Result<Index> {
    let text = json::text(file, bytes)?;
    let mut de = serde_json::Deserializer::from_str(text);
    let found =
        Top.deserialize(&mut de).and_then(|v| de.end().map(|()| v)).map_err(|e| json::syntax(file, text, &e))?;
    match found {
        Some(index) if index.tensors.is_empty() => {
            Err(Error::checkpoint(file, "weight_map is empty; it must name each tensor's file"))
        }
        Some(index) => Ok(index),
        None => Err(Error::checkpoint(file, "no weight_map; it must name each tensor's file")),
    }
}

/// Why `name` cannot be a file of the checkpoint, if it cannot.
fn fault(name: &str) -> Option<&'static str> {
    if name.contains(['/', '\\', '\0']) || name.starts_with('.') {
        Some("it must be a plain name inside the checkpoint's folder")
    } else if name.len() > 255 || !name.ends_with(".safetensors") {
        Some("it must end in .safetensors, in at most 255 bytes")
    } else {
        None
    }
}

struct Top;

impl<'de> DeserializeSeed<'de> for Top {
    type Value = Option<Index>;
    fn deserialize<D: Deserializer<'de>>(self, de: D) -> Result<Self::Value, D::Error> {
        de.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Top {
    type Value = Option<Index>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut index = None;
        while let Some(key) = map.next_key::<String>()? {
            if key != "weight_map" {
                map.next_value::<IgnoredAny>()?;
            } else if index.is_some() {
                return Err(A::Error::custom("weight_map stands twice"));
            } else {
                index = Some(map.next_value_seed(WeightMap)?);
            }
        }
        Ok(index)
    }
}

struct WeightMap;

impl<'de> DeserializeSeed<'de> for WeightMap {
    type Value = Index;
    fn deserialize<D: Deserializer<'de>>(self, de: D) -> Result<Index, D::Error> {
        de.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap {
    type Value = Index;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a weight_map: an object of file names by tensor name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Index, A::Error> {
        let (mut index, mut position) = (Index::default(), HashMap::<String, usize>::new());
        while let Some(tensor) = map.next_key::<String>()? {
            let named = |e: A::Error| A::Error::custom(format!("tensor \"{}\": {e}", shown(&tensor)));
            let file: String = map.next_value().map_err(named)?;
            let at = if let Some(at) = position.get(&file) {
                *at
            } else {
                if let Some(why) = fault(&file) {
                    let what = format!("tensor \"{}\" is said to be in \"{}\"; {why}", shown(&tensor), shown(&file));
                    return Err(A::Error::custom(what));
                }
                if index.files.len() == MAX_FILES {
                    return Err(A::Error::custom(format!("more than {MAX_FILES} files")));
                }
                index.files.push(file.clone());
                position.insert(file, index.files.len() - 1);
                index.files.len() - 1
            };
            if index.tensors.len() == MAX_TENSORS {
                return Err(A::Error::custom(format!("more than {MAX_TENSORS} tensors")));
            }
            if index.tensors.insert(tensor.clone(), at).is_some() {
                return Err(A::Error::custom(format!("tensor \"{}\" stands twice in weight_map", shown(&tensor))));
            }
        }
        Ok(index)
    }
}
