//! Which modules an entry of a quantisation config names.
//!
//! May live here: a module's spellings and classes, compressed-tensors' three ways to name it (its full name, `re:`, its
//! class), and modelopt's wildcards. May not: what a match means.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use fancy_regex::{Regex, RegexBuilder};
use serde_json::Value;

use crate::checkpoint::json::{Fields, kind, shown};
use crate::error::{Error, Result};

/// Most regular expressions of one list, and most bytes of one: published lists have under 40.
const MAX_REGEXES: usize = 256;
const MAX_REGEX_BYTES: usize = 1024;
/// Steps back a regular expression may take in one name. Names are under 100 bytes; a sane pattern needs hundreds.
const BACKTRACKS: usize = 20_000;
/// Bytes of one compiled expression.
const REGEX_MEMORY: usize = 1 << 20;
/// Longest that one checkpoint's names may take to match in all: a config must not hang its reader.
const PATIENCE: Duration = Duration::from_secs(10);

/// A linear module under every name a config may call it by.
#[derive(Debug)]
pub(crate) struct Spelled {
    /// Its canonical name, without `.weight`.
    pub(crate) canonical: String,
    names: Vec<String>,
    classes: &'static [&'static str],
}

impl Spelled {
    /// The spellings of a canonical name. Class and prefix of a checkpoint are independent, and a config may have been
    /// written under another prefix than its tensors, so all are tried: a match that is wrong ends in a contradiction
    /// with the tensors on disk, never in a wrong layer.
    pub(crate) fn of(canonical: &str) -> Spelled {
        let names = if canonical == "lm_head" {
            vec!["lm_head".into(), "language_model.lm_head".into()]
        } else {
            ["model.language_model.", "model.", "language_model.model."].map(|p| format!("{p}{canonical}")).into()
        };
        let classes: &[&str] = match canonical {
            "lm_head" => &["Linear", "LinearBase", "ParallelLMHead"],
            _ if is_router(canonical) => &["Linear", "LinearBase", "Qwen3_5MoeTopKRouter"],
            _ => &["Linear", "LinearBase"],
        };
        Spelled { canonical: canonical.into(), names, classes }
    }

    /// Each full name.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }
}

/// Whether a module is the router of a MoE layer: a plain linear in some readers' model, a class of its own in others',
/// so that an entry naming the class "Linear" means it or not, depending on the reader.
pub(crate) fn is_router(canonical: &str) -> bool {
    canonical.ends_with(".mlp.gate")
}

/// How closely an entry names a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// By its full name.
    Exact,
    /// By a regular expression.
    Regex,
    /// By its class.
    Class,
}

/// A list of compressed-tensors entries.
#[derive(Debug, Default)]
pub(crate) struct Patterns {
    literal: HashSet<String>,
    regexes: Vec<(String, Regex)>,
}

impl Patterns {
    /// Compiles the list under `key`.
    pub(crate) fn read(f: &Fields<'_>, key: &str, list: &[Value]) -> Result<Patterns> {
        let mut patterns = Patterns::default();
        for (i, entry) in list.iter().enumerate() {
            let at = || format!("{key}[{i}]");
            let Some(text) = entry.as_str() else {
                return Err(f.error(&at(), format!("{}; must be a string", kind(entry))));
            };
            match text.strip_prefix("re:") {
                None => drop(patterns.literal.insert(text.into())),
                Some(_) if patterns.regexes.len() == MAX_REGEXES => {
                    return Err(f.error(&at(), format!("more than {MAX_REGEXES} regular expressions")));
                }
                Some(pattern) => {
                    let regex = regex(pattern).map_err(|what| f.error(&at(), what))?;
                    patterns.regexes.push((text.into(), regex));
                }
            }
        }
        Ok(patterns)
    }

    /// The closest entry that names the module, with how it does.
    pub(crate) fn find(&self, module: &Spelled) -> Result<Option<(Level, &str)>, String> {
        if let Some(text) = module.names().find_map(|n| self.literal.get(n)) {
            return Ok(Some((Level::Exact, text)));
        }
        for (text, regex) in &self.regexes {
            for name in module.names() {
                if regex.is_match(name).map_err(|e| format!("\"{}\" on \"{name}\": {e}", shown(text)))? {
                    return Ok(Some((Level::Regex, text)));
                }
            }
        }
        let class = module.classes.iter().find_map(|c| self.literal.get(*c));
        Ok(class.map(|text| (Level::Class, text.as_str())))
    }
}

/// A pattern as Python's `re.match` takes it: anchored at the start only.
pub(crate) fn regex(pattern: &str) -> Result<Regex, String> {
    if pattern.len() > MAX_REGEX_BYTES {
        return Err(format!("a regular expression of {} bytes; at most {MAX_REGEX_BYTES}", pattern.len()));
    }
    let build = |text: &str| {
        RegexBuilder::new(text).backtrack_limit(BACKTRACKS).delegate_size_limit(REGEX_MEMORY).build().map_err(|e| {
            format!(
                "\"{}\" is no regular expression ({}); must be one as Python takes it",
                shown(pattern),
                shown(&e.to_string())
            )
        })
    };
    // Alone first, or a stray parenthesis would pair with those put around it.
    build(pattern)?;
    build(&format!(r"\A(?:{pattern})"))
}

/// Python's `fnmatch.fnmatchcase`: `*`, `?`, `[abc]` and `[!abc]`, over the whole name, dots no exception.
pub(crate) fn wildcard(pattern: &str, name: &str) -> bool {
    let (p, n): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut i, mut j) = (0, 0);
    // After a star: where the pattern goes on, and how much of the name the star has taken.
    let mut star: Option<(usize, usize)> = None;
    while j < n.len() {
        let step = match p.get(i) {
            Some('*') => {
                star = Some((i + 1, j));
                i += 1;
                continue;
            }
            Some('?') => Some(1),
            Some('[') => set(&p[i..], n[j]),
            Some(c) if *c == n[j] => Some(1),
            _ => None,
        };
        match (step, star) {
            (Some(step), _) => (i, j) = (i + step, j + 1),
            (None, Some((after, taken))) => {
                (i, j) = (after, taken + 1);
                star = Some((after, taken + 1));
            }
            (None, None) => return false,
        }
    }
    p[i..].iter().all(|c| *c == '*')
}

/// The length of the set that `p` begins with, if it holds `c`; a `[` that nothing closes stands for itself.
fn set(p: &[char], c: char) -> Option<usize> {
    let negated = p.get(1) == Some(&'!');
    let first = 1 + usize::from(negated);
    // A `]` right after the opening is a member.
    let Some(close) = p.iter().skip(first + 1).position(|x| *x == ']').map(|at| at + first + 1) else {
        return (c == '[').then_some(1);
    };
    let members = &p[first..close];
    let (mut i, mut held) = (0, false);
    while i < members.len() {
        if i + 2 < members.len() && members[i + 1] == '-' {
            held |= (members[i]..=members[i + 2]).contains(&c);
            i += 3;
        } else {
            held |= members[i] == c;
            i += 1;
        }
    }
    (held != negated).then_some(close + 1)
}

/// The time that all matching of one checkpoint may take.
#[derive(Debug)]
pub(crate) struct Patience(Instant);

impl Patience {
    pub(crate) fn begin() -> Patience {
        Patience(Instant::now())
    }

    /// An error once it is over.
    pub(crate) fn check(&self, file: &std::path::Path) -> Result<()> {
        if self.0.elapsed() < PATIENCE {
            return Ok(());
        }
        let what = format!(
            "its patterns took more than {} s over the model's modules; write them without nested repetition",
            PATIENCE.as_secs()
        );
        Err(Error::config(file, "quantization_config", what))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    fn patterns(list: &Value) -> Patterns {
        let map = serde_json::Map::new();
        Patterns::read(&Fields::top(Path::new("config.json"), &map), "ignore", list.as_array().unwrap()).unwrap()
    }

    /// How a list of one entry names each module.
    fn level(entry: &str, module: &str) -> Option<Level> {
        patterns(&json!([entry])).find(&Spelled::of(module)).unwrap().map(|(level, _)| level)
    }

    #[test]
    fn a_full_name_matches_itself_alone_under_any_prefix() {
        let gate = "layers.1.mlp.gate";
        for prefix in ["model.", "model.language_model.", "language_model.model."] {
            assert_eq!(level(&format!("{prefix}{gate}"), gate), Some(Level::Exact));
            assert_eq!(level(&format!("{prefix}{gate}"), "layers.1.mlp.gate_proj"), None);
            assert_eq!(level(&format!("{prefix}{gate}"), "layers.11.mlp.gate"), None);
        }
        assert_eq!(level("lm_head", "lm_head"), Some(Level::Exact));
        assert_eq!(level("language_model.lm_head", "lm_head"), Some(Level::Exact));
        for not in ["layers.1.mlp.gate", "mlp.gate", "model.layers.1.mlp.gate.weight", "model.layers.1.mlp", "lm_"] {
            assert_eq!(level(not, gate), None, "{not}");
        }
        // A parent's name is not its children's.
        assert_eq!(level("model.layers.1.mlp.experts", "layers.1.mlp.experts.0.up_proj"), None);
    }

    #[test]
    fn regular_expressions_match_as_pythons_re_match() {
        let all = [
            ("re:.*lm_head", "lm_head", true),
            ("re:lm_head", "lm_head", true),
            ("re:head", "lm_head", false),
            ("re:lm", "lm_head", true),
            ("re:.*(?<!lm_)head", "lm_head", false),
            ("re:.*(?<!lm_)proj", "layers.0.mlp.up_proj", true),
            ("re:^mtp.*", "layers.0.mlp.up_proj", false),
            ("re:mtp.*", "layers.0.mlp.up_proj", false),
            ("re:.*mlp.gate$", "layers.0.mlp.gate", true),
            ("re:.*mlp.gate$", "layers.0.mlp.gate_proj", false),
            ("re:.*mlp.gate", "layers.0.mlp.gate_proj", true),
            (r"re:.*in_proj_(a|b)$", "layers.2.linear_attn.in_proj_b", true),
            (r"re:.*in_proj_(a|b)$", "layers.2.linear_attn.in_proj_z", false),
            (r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$", "layers.3.mlp.experts.255.down_proj", true),
            (r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$", "layers.3.mlp.shared_expert.down_proj", false),
            (r"re:.*layers\.(5[6-9]|6[0-3])\..*", "layers.56.mlp.up_proj", true),
            (r"re:.*layers\.(5[6-9]|6[0-3])\..*", "layers.5.mlp.up_proj", false),
            (r"re:model\.layers\.\d\..*", "layers.7.mlp.up_proj", true),
            (r"re:model\.layers\.\d\..*", "layers.17.mlp.up_proj", false),
            (r"re:(?i).*LM_HEAD", "lm_head", true),
            (r"re:(?!.*shared).*mlp.*", "layers.0.mlp.shared_expert.up_proj", false),
            (r"re:(?P<kind>model).*up_proj", "layers.0.mlp.up_proj", true),
            ("re:", "lm_head", true),
        ];
        for (entry, module, expected) in all {
            assert_eq!(level(entry, module), expected.then_some(Level::Regex), "{entry} on {module}");
        }
    }

    #[test]
    fn classes_are_the_last_resort() {
        assert_eq!(level("Linear", "layers.0.mlp.up_proj"), Some(Level::Class));
        assert_eq!(level("Linear", "lm_head"), Some(Level::Class));
        assert_eq!(level("ParallelLMHead", "lm_head"), Some(Level::Class));
        assert_eq!(level("ParallelLMHead", "layers.0.mlp.up_proj"), None);
        assert_eq!(level("Embedding", "lm_head"), None);
        assert_eq!(level("linear", "lm_head"), None, "the case is part of a class's name");
        assert_eq!(level("re:Linear", "lm_head"), None, "a pattern is about names");
        let list = patterns(&json!(["Linear", "re:.*up_proj", "model.layers.0.mlp.up_proj"]));
        let found = |module: &str| list.find(&Spelled::of(module)).unwrap().map(|(l, t)| (l, t.to_owned()));
        assert_eq!(found("layers.0.mlp.up_proj"), Some((Level::Exact, "model.layers.0.mlp.up_proj".into())));
        assert_eq!(found("layers.1.mlp.up_proj"), Some((Level::Regex, "re:.*up_proj".into())));
        assert_eq!(found("lm_head"), Some((Level::Class, "Linear".into())));
    }

    #[test]
    fn what_is_no_pattern_is_an_error_and_a_slow_one_gives_up() {
        let map = serde_json::Map::new();
        let f = Fields::top(Path::new("config.json"), &map);
        let long = format!("re:{}", "a".repeat(2000));
        let many: Vec<Value> = (0..300).map(|i| json!(format!("re:{i}"))).collect();
        for (list, says) in [
            (json!(["re:("]), "ignore[0]"),
            (json!(["lm_head", "re:a)(?:b"]), "ignore[1]"),
            (json!(["re:*"]), "no regular expression"),
            (json!([1]), "must be a string"),
            (json!([long]), "2000 bytes"),
            (json!(many), "more than 256"),
            (json!([r"re:(?:a{1000}){1000}{1000}"]), "no regular expression"),
        ] {
            let error = Patterns::read(&f, "ignore", list.as_array().unwrap()).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        let slow = patterns(&json!([r"re:(?=x?)(\w*\.?)*\1$(?<!y)#"]));
        let start = Instant::now();
        let error = slow.find(&Spelled::of("layers.0.linear_attn.in_proj_qkv"));
        assert!(error.is_err() || error == Ok(None), "{error:?}");
        assert!(start.elapsed() < Duration::from_secs(2));
    }

    #[test]
    fn wildcards_match_as_pythons_fnmatchcase() {
        let conv = "model.layers.0.linear_attn.conv1d";
        for (pattern, name, expected) in [
            ("mtp*", "mtp.layers.0.mlp.up_proj", true),
            ("mtp*", "model.mtp", false),
            ("*.linear_attn.conv1d", conv, true),
            ("*.linear_attn.conv1", conv, false),
            ("model.layers.*.mlp.gate", "model.layers.17.mlp.gate", true),
            ("model.layers.*.mlp.gate", "model.layers.17.mlp.gate_proj", false),
            ("model.layers.0.linear_attn*", conv, true),
            ("model.layers.1*", "model.layers.17.mlp.gate", true),
            ("foo*", "foobar", true),
            ("lm_head", "lm_head", true),
            ("LM_HEAD", "lm_head", false),
            ("lm_hea?", "lm_head", true),
            ("lm_head?", "lm_head", false),
            ("*", "anything", true),
            ("", "", true),
            ("", "a", false),
            ("**a**b**", "xxaxxbxx", true),
            ("*a*b*c", "abcabcab", false),
            ("layers.[0-3].mlp", "layers.2.mlp", true),
            ("layers.[0-3].mlp", "layers.4.mlp", false),
            ("layers.[!0-3].mlp", "layers.4.mlp", true),
            ("layers.[!0-3].mlp", "layers.2.mlp", false),
            ("a[]]b", "a]b", true),
            ("a[b", "a[b", true),
            ("a[b", "ab", false),
            ("a[", "a[", true),
            ("a[!", "a[!", true),
            ("[-a]x", "-x", true),
        ] {
            assert_eq!(wildcard(pattern, name), expected, "{pattern:?} on {name:?}");
        }
        // Quadratic at worst, not exponential.
        assert!(!wildcard(&"*a".repeat(2000), &"a".repeat(1999)));
    }

    #[test]
    fn a_router_is_the_gate_of_a_layer_and_nothing_else() {
        assert!(is_router("layers.3.mlp.gate"));
        for not in ["layers.3.mlp.gate_proj", "layers.3.mlp.shared_expert_gate", "lm_head", "layers.3.self_attn.gate"] {
            assert!(!is_router(not), "{not}");
        }
    }
}
