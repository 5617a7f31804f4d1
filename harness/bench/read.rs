//! Rows of `kernels.csv` read back, to be compared: of this build and of earlier ones, whose columns were fewer.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Deserializer};

use super::file::NAME;
use crate::gate::criterion::FLOOR_NS;
use crate::verdict::STEP_FLOOR_MS;

/// Rows that are ceilings of the card and no kernels.
const CEILING: &str = "ceiling";

/// A row, as far as it is read. What an earlier build did not write is empty.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Timed {
    pub(crate) kernel: String,
    pub(crate) model: String,
    pub(crate) part: String,
    pub(crate) scheme: String,
    pub(crate) m: u64,
    pub(crate) cache: String,
    pub(crate) median_us: Option<f64>,
    #[serde(deserialize_with = "from_json")]
    pub(crate) samples_us: Vec<f64>,
    pub(crate) calls: Option<u64>,
    pub(crate) checked: Option<bool>,
    pub(crate) dirty: String,
    pub(crate) note: String,
    pub(crate) method: u32,
    pub(crate) card: String,
    pub(crate) device: String,
    pub(crate) driver: String,
    pub(crate) gpu: String,
    pub(crate) power_limit_w: String,
    pub(crate) ecc: String,
    pub(crate) cpu: String,
    pub(crate) cores: Option<u64>,
    pub(crate) profile: String,
    pub(crate) binary_hash: String,
    pub(crate) rustc: String,
    pub(crate) cargo_flags: String,
    pub(crate) nvrtc: String,
    pub(crate) nvrtc_options: String,
    pub(crate) argv: String,
}

impl Timed {
    /// The compilers behind it and what they were given; empty where an earlier build wrote it.
    pub(crate) fn tools(&self) -> [(&'static str, &str); 4] {
        let Timed { rustc, cargo_flags, nvrtc, nvrtc_options, .. } = self;
        [("rustc", rustc), ("cargo flags", cargo_flags), ("NVRTC", nvrtc), ("NVRTC options", nvrtc_options)]
    }

    /// What is timed, whatever the cache holds: the label that `bench --row` takes.
    pub(crate) fn label(&self) -> String {
        let Timed { kernel, model, part, scheme, m, .. } = self;
        let words = [kernel.as_str(), model, part, scheme].into_iter().filter(|word| !word.is_empty());
        format!("{} M={m}", words.collect::<Vec<_>>().join(" "))
    }

    /// What a row is of: its label and what the cache holds.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.label(), self.cache)
    }

    /// `cuda`, whichever of the cards, `emulated` or `cpu`.
    pub(crate) fn device_kind(&self) -> &str {
        self.device.split(':').next().unwrap_or_default()
    }

    /// Whether its result is to be checked: nothing checks the reference itself, nor reads and products that are ceilings.
    pub(crate) fn is_to_be_checked(&self) -> bool {
        self.kernel != CEILING && self.device_kind() != "cpu"
    }

    /// us below which a difference is none: a call by itself is a launch, and one of a group the mean of many.
    pub(crate) fn floor(&self) -> f64 {
        if self.calls.is_some_and(|calls| calls > 1) { FLOOR_NS / 1e3 } else { STEP_FLOOR_MS * 1e3 }
    }
}

/// A field that is itself a list.
fn from_json<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<f64>, D::Error> {
    let text = String::deserialize(from)?;
    if text.is_empty() { Ok(Vec::new()) } else { serde_json::from_str(&text).map_err(serde::de::Error::custom) }
}

/// The table of kernels that `path` is, or holds: itself, DIR/kernels.csv, or DIR/CARD/kernels.csv. None where it is a run of
/// `sweep`, or nothing of either.
pub(crate) fn find(path: &Path) -> Result<Option<PathBuf>> {
    if path.is_file() {
        return Ok(Some(path.to_owned()).filter(|path| path.file_name().is_some_and(|name| name == NAME)));
    }
    if !path.is_dir() || ["sweep.jsonl", "sweep.csv"].iter().any(|name| path.join(name).exists()) {
        return Ok(None);
    }
    let own = path.join(NAME);
    if own.is_file() {
        return Ok(Some(own));
    }
    let at = || format!("cannot list {}", path.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).with_context(at)? {
        let file = entry.with_context(at)?.path().join(NAME);
        files.extend(file.is_file().then_some(file));
    }
    ensure!(
        files.len() < 2,
        "{} holds {} files {NAME}, and not one: name the card's folder",
        path.display(),
        files.len()
    );
    Ok(files.pop())
}

/// The rows of a table of kernels.
pub(crate) fn read(file: &Path) -> Result<Vec<Timed>> {
    let mut reader = csv::Reader::from_path(file).with_context(|| format!("cannot open {}", file.display()))?;
    let header = reader.headers().with_context(|| format!("cannot read {}", file.display()))?;
    if !header.iter().any(|column| column == "kernel") {
        bail!("{} is no table of kernels", file.display());
    }
    let mut rows = Vec::new();
    for row in reader.deserialize() {
        rows.push(row.with_context(|| format!("{} row {}", file.display(), rows.len() + 1))?);
    }
    ensure!(!rows.is_empty(), "{} holds no rows", file.display());
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_found_by_itself_in_its_folder_or_in_its_card_s() {
        let dir = tempfile::tempdir().unwrap();
        let table = |folder: &str| {
            let folder = dir.path().join(folder);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(NAME), "kernel,m,samples_us\nnorm,8,\"[1.5,2]\"\n").unwrap();
            folder.join(NAME)
        };
        let file = table("one/h200");
        for path in [file.clone(), dir.path().join("one/h200"), dir.path().join("one")] {
            assert_eq!(find(&path).unwrap(), Some(file.clone()), "{}", path.display());
        }
        let rows = read(&file).unwrap();
        assert_eq!((rows[0].samples_us.as_slice(), rows[0].label()), (&[1.5, 2.0][..], "norm M=8".to_owned()));
        table("one/rtx-4090");
        assert!(find(&dir.path().join("one")).unwrap_err().to_string().contains("holds 2 files"));
        std::fs::write(dir.path().join("one/sweep.jsonl"), "{}\n").unwrap();
        assert_eq!(find(&dir.path().join("one")).unwrap(), None, "a run of `sweep`");
        assert_eq!(find(&dir.path().join("nothing")).unwrap(), None);
    }

    #[test]
    fn what_is_no_table_or_holds_nothing_is_an_error_and_an_earlier_one_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(NAME);
        for (text, words) in [
            ("a,b\n1,2\n", "is no table of kernels"),
            ("kernel,m\n", "holds no rows"),
            ("kernel,m,median_us\nnorm,1,fast\n", "row 1"),
            ("kernel,m,samples_us\nnorm,1,[1\n", "row 1"),
        ] {
            std::fs::write(&file, text).unwrap();
            let error = format!("{:#}", read(&file).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
        let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/h200/kernels.csv");
        let rows = read(&committed).unwrap();
        assert!(rows.len() > 300 && rows.iter().any(|row| row.checked == Some(true)));
    }
}
