//! How many token ids a checkpoint's tokenizer decodes. Rows of the head above them are padding, and can win an argmax.
//!
//! May live here: the ids in tokenizer.json and tokenizer_config.json. May not: encoding or decoding text.

use std::fmt;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::folder;
use super::json::{self, shown};
use crate::error::{Error, Result};

/// Most bytes of a tokenizer.json; the family's is 20 MB.
const TOKENIZER_LIMIT: u64 = 128 << 20;
/// Most bytes of a tokenizer_config.json.
const TOKENIZER_CONFIG_LIMIT: u64 = 16 << 20;

/// One above the largest id that the folder's tokenizer knows, or `None` where the folder has no tokenizer.json.
///
/// # Errors
/// [`Error::Config`] for an id of `vocab` or above, and a tokenizer without any; [`Error::Checkpoint`] for files that
/// cannot be read as a tokenizer.
pub(crate) fn decodable(dir: &Path, vocab: usize) -> Result<Option<usize>> {
    let Some(bytes) = folder::optional(dir, "tokenizer.json", TOKENIZER_LIMIT)? else { return Ok(None) };
    let file = dir.join("tokenizer.json");
    let t: Tokenizer = document(&file, &bytes)?;
    let mut top = t.model.vocab.0;
    checked(&file, "model.vocab", top, vocab)?;
    if let Some(Ids(added)) = t.added_tokens {
        checked(&file, "added_tokens", added, vocab)?;
        top = top.max(added);
    }
    let config = dir.join("tokenizer_config.json");
    if let Some(bytes) = folder::optional(dir, "tokenizer_config.json", TOKENIZER_CONFIG_LIMIT)?
        && let Some(Keys(added)) = document::<TokenizerConfig>(&config, &bytes)?.added_tokens_decoder
    {
        checked(&config, "added_tokens_decoder", added, vocab)?;
        top = top.max(added);
    }
    match top {
        Some(id) => Ok(Some(id as usize + 1)),
        None => Err(Error::config(&file, "model.vocab", "no token at all; take the checkpoint's own tokenizer.json")),
    }
}

fn document<'a, T: Deserialize<'a>>(file: &Path, bytes: &'a [u8]) -> Result<T> {
    let text = json::text(file, bytes)?;
    serde_json::from_str(text).map_err(|e| json::syntax(file, text, &e))
}

fn checked(file: &Path, field: &str, id: Option<u64>, vocab: usize) -> Result<()> {
    match id {
        Some(id) if id >= vocab as u64 => {
            let what =
                format!("token id {id}; the model has {vocab} rows (vocab_size): this is another model's tokenizer");
            Err(Error::config(file, field, what))
        }
        _ => Ok(()),
    }
}

#[derive(serde::Deserialize)]
struct Tokenizer {
    model: Model,
    #[serde(default)]
    added_tokens: Option<Ids>,
}

#[derive(serde::Deserialize)]
struct Model {
    vocab: Vocab,
}

#[derive(serde::Deserialize)]
struct TokenizerConfig {
    #[serde(default)]
    added_tokens_decoder: Option<Keys>,
}

/// The largest id of a vocabulary: an object of ids by token, or a list where the id is the position.
struct Vocab(Option<u64>);

impl<'de> Deserialize<'de> for Vocab {
    fn deserialize<D: Deserializer<'de>>(de: D) -> Result<Vocab, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Vocab;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("model.vocab as an object of ids by token, or a list of tokens")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocab, A::Error> {
                let mut top = None;
                while let Some(token) = map.next_key::<String>()? {
                    let named = |e: A::Error| A::Error::custom(format!("token \"{}\": {e}", shown(&token)));
                    top = top.max(Some(map.next_value::<u64>().map_err(named)?));
                }
                Ok(Vocab(top))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vocab, A::Error> {
                let mut count = 0u64;
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(Vocab(count.checked_sub(1)))
            }
        }
        de.deserialize_any(V)
    }
}

#[derive(serde::Deserialize)]
struct AddedToken {
    id: u64,
}

/// The largest `id` of a list of objects.
struct Ids(Option<u64>);

impl<'de> Deserialize<'de> for Ids {
    fn deserialize<D: Deserializer<'de>>(de: D) -> Result<Ids, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Ids;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("added_tokens as a list of objects with an id")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Ids, A::Error> {
                let mut top = None;
                while let Some(token) = seq.next_element::<AddedToken>()? {
                    top = top.max(Some(token.id));
                }
                Ok(Ids(top))
            }
        }
        de.deserialize_seq(V)
    }
}

/// The largest key of an object whose keys are ids.
struct Keys(Option<u64>);

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(de: D) -> Result<Keys, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Keys;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("added_tokens_decoder as an object by token id")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Keys, A::Error> {
                let mut top = None;
                while let Some(key) = map.next_key::<String>()? {
                    let id: u64 = key.parse().map_err(|_| {
                        A::Error::custom(format!("added_tokens_decoder: key \"{}\" is no token id", shown(&key)))
                    })?;
                    map.next_value::<IgnoredAny>()?;
                    top = top.max(Some(id));
                }
                Ok(Keys(top))
            }
        }
        de.deserialize_map(V)
    }
}
