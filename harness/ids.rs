//! Token ids on the command line: `5,7,9`, or `@FILE` with a JSON array of them.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

/// Largest id file read.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// The value of `--ids`; a file is read when it is needed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TokenIds {
    /// As written on the command line.
    Inline(Vec<u32>),
    /// In a file.
    File(PathBuf),
}

impl std::str::FromStr for TokenIds {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<TokenIds> {
        if let Some(path) = text.strip_prefix('@') {
            ensure!(!path.is_empty(), "`@` without a file; write @ids.json");
            return Ok(TokenIds::File(path.into()));
        }
        let id = |part: &str| {
            let part = part.trim();
            let plain = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
            let id = part.parse::<u32>().ok().filter(|_| plain);
            id.with_context(|| format!("`{part}` is not a token id; write 5,7,9 or @ids.json"))
        };
        text.split(',').map(id).collect::<Result<_>>().map(TokenIds::Inline)
    }
}

impl TokenIds {
    /// The ids, at least one. Whether the vocabulary has them is the engine's question.
    pub(crate) fn load(&self) -> Result<Vec<u32>> {
        match self {
            TokenIds::Inline(ids) => Ok(ids.clone()),
            TokenIds::File(path) => read(path),
        }
    }
}

fn read(path: &Path) -> Result<Vec<u32>> {
    let name = || format!("cannot read token ids from {}", path.display());
    // Looked at before it is opened: opening a pipe waits for its writer, and a device may never end.
    ensure!(std::fs::metadata(path).with_context(name)?.is_file(), "{}: it is not a regular file", name());
    let mut text = Vec::new();
    let file = std::fs::File::open(path).with_context(name)?;
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut text).with_context(name)?;
    ensure!(text.len() as u64 <= MAX_FILE_BYTES, "{}: at most {MAX_FILE_BYTES} bytes are read", name());
    let values: Vec<serde_json::Value> = serde_json::from_slice(&text)
        .with_context(name)
        .context("the file must hold a JSON array of token ids, e.g. [5, 7, 9]")?;
    ensure!(!values.is_empty(), "{}: the array is empty", name());
    let mut ids = Vec::with_capacity(values.len());
    for (at, value) in values.iter().enumerate() {
        match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) => ids.push(id),
            None => bail!("{}: element {at} is {}, not a token id", name(), brief(value)),
        }
    }
    Ok(ids)
}

/// A JSON value in a few characters.
fn brief(value: &serde_json::Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 40 { text } else { text.chars().take(40).chain("...".chars()).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> Result<Vec<u32>> {
        text.parse::<TokenIds>()?.load()
    }

    #[test]
    fn ids_on_the_command_line() {
        assert_eq!(load("5,7,9").unwrap(), [5, 7, 9]);
        assert_eq!(load(" 0 , 4294967295").unwrap(), [0, u32::MAX]);
        for text in ["", ",", "5,", "5,,7", "-1", "+1", "4294967296", "5 7", "5.0", "a", "@", "[5,7]", "\u{665}"] {
            assert!(load(text).is_err(), "{text}");
        }
    }

    #[test]
    fn ids_in_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ids.json");
        let of = |text: &str| {
            std::fs::write(&path, text).unwrap();
            load(&format!("@{}", path.display())).map_err(|e| format!("{e:#}"))
        };
        assert_eq!(of(" [5, 7,\n9]\n").unwrap(), [5, 7, 9]);
        assert!(of("[]").unwrap_err().contains("empty"));
        assert!(of("[5, -1]").unwrap_err().contains("element 1 is -1"));
        assert!(of("[5, 4294967296]").unwrap_err().contains("element 1"));
        assert!(of("[1.5]").unwrap_err().contains("element 0 is 1.5"));
        assert!(of("[[5, 7]]").unwrap_err().contains("element 0 is [5,7]"));
        assert!(of("{\"ids\": [5]}").unwrap_err().contains("JSON array"));
        assert!(of("[5, 7").unwrap_err().contains("ids.json"));
        assert!(of(&"[".repeat(1_000_000)).is_err());
        assert!(of("\u{0}").is_err());
        assert!(load("@/none/ids.json").is_err());
        assert!(load(&format!("@{}", dir.path().display())).is_err());
        std::fs::File::create(&path).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
        assert!(format!("{:#}", load(&format!("@{}", path.display())).unwrap_err()).contains("at most"));
    }

    #[cfg(unix)]
    #[test]
    fn what_never_ends_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let socket = dir.path().join("socket");
        let _listening = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for path in [pipe, socket, "/dev/zero".into()] {
            let refused = format!("{:#}", load(&format!("@{}", path.display())).unwrap_err());
            assert!(refused.contains("not a regular file"), "{refused}");
        }
    }
}
