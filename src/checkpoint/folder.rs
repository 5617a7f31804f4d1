//! Which files of a folder make a checkpoint.
//!
//! May live here: finding the folder (a Hugging Face cache included) and sorting its `.safetensors` files into the
//! shards that are read, the extras that may only hold skipped tensors, and the rest. May not: what is in a file.

use std::path::{Path, PathBuf};

use super::config::CONFIG_LIMIT;
use super::index::{self, INDEX, INDEX_LIMIT, Index, MAX_FILES};
use super::json::{read_bounded, shown};
use crate::error::{Error, Result};

/// The weight file of a checkpoint that is not split.
const SINGLE: &str = "model.safetensors";
/// Most entries of a folder that are looked at.
const MAX_ENTRIES: usize = 1 << 16;

/// The weight files of one folder, each list sorted by name.
#[derive(Debug)]
pub(crate) struct Weights {
    pub(crate) index: Option<Index>,
    /// Files that hold the parameters.
    pub(crate) shards: Vec<String>,
    /// Files called `model*` beside them, such as `model_mtp.safetensors`: all they hold must be skipped by a rule.
    pub(crate) extras: Vec<String>,
    /// Any other `.safetensors` files, not opened.
    pub(crate) others: Vec<String>,
}

/// Whether the folder has an entry of this name, be it a link that leads nowhere.
pub(crate) fn has(dir: &Path, name: &str) -> bool {
    dir.join(name).symlink_metadata().is_ok()
}

/// The bytes of a small JSON file of the folder, or `None` where there is none.
pub(crate) fn optional(dir: &Path, name: &str, limit: u64) -> Result<Option<Vec<u8>>> {
    if has(dir, name) { read_bounded(&dir.join(name), limit).map(Some) } else { Ok(None) }
}

/// The folder that holds config.json: `path` itself, or the commit that `refs/main` of a Hugging Face cache's
/// `models--owner--name` folder points to.
///
/// # Errors
/// [`Error::Io`] where there is nothing, [`Error::Checkpoint`] where it is no checkpoint's folder.
pub(crate) fn resolve(path: &Path) -> Result<PathBuf> {
    let meta = std::fs::metadata(path).map_err(Error::io(path))?;
    if !meta.is_dir() {
        return Err(Error::checkpoint(path, "a file; give the folder that holds config.json"));
    }
    if has(path, "config.json") {
        return Ok(path.to_path_buf());
    }
    let main = path.join("refs").join("main");
    if main.symlink_metadata().is_err() {
        return Err(Error::checkpoint(
            path,
            "no config.json, and no refs/main of a Hugging Face cache; give the checkpoint's folder",
        ));
    }
    let bytes = read_bounded(&main, 256)?;
    let revision = std::str::from_utf8(&bytes).unwrap_or_default().trim();
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_' || c == '.';
    if revision.is_empty() || revision.starts_with('.') || !revision.chars().all(plain) {
        let what =
            format!("\"{}\"; must be the name of a folder in snapshots", shown(&String::from_utf8_lossy(&bytes)));
        return Err(Error::checkpoint(&main, what));
    }
    let snapshot = path.join("snapshots").join(revision);
    if has(&snapshot, "config.json") {
        Ok(snapshot)
    } else {
        Err(Error::checkpoint(
            &snapshot,
            "refs/main points here, and there is no config.json; download the model again",
        ))
    }
}

/// The config.json of a folder.
pub(crate) fn config(dir: &Path) -> Result<Vec<u8>> {
    read_bounded(&dir.join("config.json"), CONFIG_LIMIT)
}

/// Sorts the folder's `.safetensors` files.
pub(crate) fn weights(dir: &Path) -> Result<Weights> {
    let mut names = safetensors(dir)?;
    let index = match optional(dir, INDEX, INDEX_LIMIT)? {
        Some(bytes) => Some(index::parse(&dir.join(INDEX), &bytes)?),
        None => None,
    };
    let shards = match &index {
        Some(index) => {
            let mut files = index.files.clone();
            files.sort();
            if let Some(missing) = files.iter().find(|f| !names.contains(f)) {
                let what = format!("it names \"{}\", which is not in the folder; download that file", shown(missing));
                return Err(Error::checkpoint(dir.join(INDEX), what));
            }
            files
        }
        None if names.iter().any(|n| n == SINGLE) => vec![SINGLE.to_string()],
        None => return Err(no_weights(dir, &names)),
    };
    names.retain(|n| shards.binary_search(n).is_err());
    let (extras, others) = names.into_iter().partition(|n| n.starts_with("model"));
    Ok(Weights { index, shards, extras, others })
}

fn safetensors(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for (seen, entry) in std::fs::read_dir(dir).map_err(Error::io(dir))?.enumerate() {
        if seen == MAX_ENTRIES {
            return Err(Error::checkpoint(dir, format!("more than {MAX_ENTRIES} entries; not a checkpoint's folder")));
        }
        let entry = entry.map_err(Error::io(dir))?;
        match entry.file_name().into_string() {
            Ok(name) if name.ends_with(".safetensors") => names.push(name),
            _ => {}
        }
    }
    if names.len() > MAX_FILES {
        let what = format!("{} .safetensors files; at most {MAX_FILES}", names.len());
        return Err(Error::checkpoint(dir, what));
    }
    names.sort();
    Ok(names)
}

fn no_weights(dir: &Path, names: &[String]) -> Error {
    let what = match names.first() {
        Some(first) => format!(
            "neither {SINGLE} nor {INDEX}, but {} other .safetensors files (\"{}\" first); download the index",
            names.len(),
            shown(first)
        ),
        None => format!("neither {SINGLE} nor {INDEX}; only safetensors weights are read"),
    };
    Error::checkpoint(dir, what)
}
