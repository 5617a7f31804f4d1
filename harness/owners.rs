//! Who holds which bytes, as JSON's array and as CSV's text.

use highwater::mem::Report;
use serde::{Deserialize, Deserializer, Serialize};

/// Live bytes under one tag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Owner {
    /// Layer kind, op and buffer, as the pool's tag prints.
    pub(crate) tag: String,
    /// Live bytes, padding included.
    pub(crate) bytes: u64,
}

/// The largest step of each phase: of steps that hold prompt tokens, and of steps that hold none.
#[derive(Debug, Default)]
pub(crate) struct Phases {
    prefill: Option<Report>,
    decode: Option<Report>,
}

impl Phases {
    /// Looks at a step's memory.
    pub(crate) fn see(&mut self, holds_prompt: bool, memory: &Report) {
        let largest = if holds_prompt { &mut self.prefill } else { &mut self.decode };
        if largest.as_ref().is_none_or(|largest| memory.transient_peak > largest.transient_peak) {
            *largest = Some(memory.clone());
        }
    }

    /// Owners at the peak of the phase whose peak is the lower one; none where there was one phase.
    pub(crate) fn lesser<'a>(repetitions: impl Iterator<Item = &'a Phases>) -> Vec<Owner> {
        let mut all = Phases::default();
        for Phases { prefill, decode } in repetitions {
            if let Some(memory) = prefill {
                all.see(true, memory);
            }
            if let Some(memory) = decode {
                all.see(false, memory);
            }
        }
        let Phases { prefill: Some(prefill), decode: Some(decode) } = all else { return Vec::new() };
        let lesser = if prefill.transient_peak >= decode.transient_peak { decode } else { prefill };
        lesser.owners.iter().map(|(owner, bytes)| Owner { tag: owner.to_string(), bytes: *bytes }).collect()
    }
}

/// `tag=bytes;tag=bytes`, the CSV form of owners; `%` and `;` inside a tag are written `%25` and `%3B`.
pub(crate) fn owners_text(owners: &[Owner]) -> String {
    let one = |owner: &Owner| format!("{}={}", owner.tag.replace('%', "%25").replace(';', "%3B"), owner.bytes);
    owners.iter().map(one).collect::<Vec<_>>().join(";")
}

fn owners_from_text(text: &str) -> Result<Vec<Owner>, String> {
    let one = |part: &str| {
        let (tag, bytes) = part.rsplit_once('=').ok_or_else(|| format!("owner `{part}` is not tag=bytes"))?;
        let bytes = bytes.parse().map_err(|_| format!("owner `{part}`: `{bytes}` is not a number of bytes"))?;
        Ok(Owner { tag: tag.replace("%3B", ";").replace("%25", "%"), bytes })
    };
    text.split(';').filter(|part| !part.is_empty()).map(one).collect()
}

/// Reads owners from JSON's array or from CSV's text.
pub(crate) fn owners_of_either_format<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Owner>, D::Error> {
    struct Visitor;
    impl<'de> serde::de::Visitor<'de> for Visitor {
        type Value = Vec<Owner>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an array of {tag, bytes}, or tag=bytes;tag=bytes")
        }

        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Vec<Owner>, E> {
            owners_from_text(text).map_err(E::custom)
        }

        fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<Owner>, A::Error> {
            let mut owners = Vec::new();
            while let Some(owner) = seq.next_element()? {
                owners.push(owner);
            }
            Ok(owners)
        }
    }
    deserializer.deserialize_any(Visitor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_survive_their_csv_form_whatever_the_tag() {
        let owners: Vec<Owner> = [("gdn.h", 1), ("(holes)", 0), ("a=b;c%3Bd", u64::MAX)]
            .map(|(tag, bytes)| Owner { tag: tag.into(), bytes })
            .into();
        assert_eq!(owners_text(&owners), "gdn.h=1;(holes)=0;a=b%3Bc%253Bd=18446744073709551615");
        assert_eq!(owners_from_text(&owners_text(&owners)).unwrap(), owners);
        assert_eq!(owners_from_text("").unwrap(), []);
        assert!(owners_from_text("logits").unwrap_err().contains("tag=bytes"));
        assert!(owners_from_text("logits=-1").unwrap_err().contains("number of bytes"));
    }
}
