//! A safetensors file with one float32 tensor `logits` [rows, vocab], written row by row: all rows of a long prompt can be
//! larger than memory.
//!
//! Format: 8 bytes little-endian header length, the JSON header padded with spaces to 8 bytes, then the rows, row-major,
//! little-endian (safetensors format specification).

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// A file being written. It has its final name only once every row is in it.
#[derive(Debug)]
pub(crate) struct LogitsFile {
    out: BufWriter<File>,
    partial: PathBuf,
    path: PathBuf,
    rows: u64,
    vocab: u64,
    written: u64,
}

impl LogitsFile {
    /// Creates the file beside its final place, so that a bad path fails before anything is computed. `notes` become the
    /// header's metadata.
    pub(crate) fn create(path: &Path, rows: u64, vocab: u64, notes: &[(&str, String)]) -> Result<LogitsFile> {
        let bytes = rows.checked_mul(vocab).and_then(|n| n.checked_mul(4));
        let bytes = bytes.with_context(|| format!("{rows} rows of {vocab} logits do not fit a 64-bit file"))?;
        let name = path.file_name().with_context(|| format!("{} is not a file name", path.display()))?;
        ensure!(!path.is_dir(), "{} is a folder; --out takes a file", path.display());
        let mut partial_name = name.to_owned();
        partial_name.push(".partial");
        let partial = path.with_file_name(partial_name);
        let file = File::create(&partial).with_context(|| format!("cannot create {}", partial.display()))?;
        let metadata: serde_json::Map<_, _> =
            notes.iter().map(|(key, value)| ((*key).to_owned(), value.clone().into())).collect();
        let header = serde_json::json!({
            "__metadata__": metadata,
            "logits": {"dtype": "F32", "shape": [rows, vocab], "data_offsets": [0, bytes]},
        });
        let mut header = header.to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        let mut out = BufWriter::with_capacity(1 << 20, file);
        out.write_all(&(header.len() as u64).to_le_bytes())
            .and_then(|()| out.write_all(&header))
            .with_context(|| format!("cannot write {}", partial.display()))?;
        Ok(LogitsFile { out, partial, path: path.to_owned(), rows, vocab, written: 0 })
    }

    /// Appends the next row.
    pub(crate) fn push(&mut self, row: &[f32]) -> Result<()> {
        ensure!(row.len() as u64 == self.vocab, "a row of {} logits, not {}", row.len(), self.vocab);
        ensure!(self.written < self.rows, "more than {} rows of logits", self.rows);
        for value in row {
            self.out
                .write_all(&value.to_le_bytes())
                .with_context(|| format!("cannot write {}", self.partial.display()))?;
        }
        self.written += 1;
        Ok(())
    }

    /// Gives the complete file its name.
    pub(crate) fn finish(mut self) -> Result<()> {
        ensure!(self.written == self.rows, "{} of {} rows of logits were computed", self.written, self.rows);
        let flushed = self.out.flush().and_then(|()| self.out.get_ref().sync_all());
        flushed.with_context(|| format!("cannot write {}", self.partial.display()))?;
        std::fs::rename(&self.partial, &self.path).with_context(|| format!("cannot write {}", self.path.display()))
    }
}

impl Drop for LogitsFile {
    fn drop(&mut self) {
        // After `finish` there is none; after a failure it is half a file, which nobody wants.
        let _ = std::fs::remove_file(&self.partial);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_s_own_reader_reads_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("logits.safetensors");
        let notes = [("model", "tiny \"x\"".to_owned()), ("dtype", "f32".to_owned())];
        let mut file = LogitsFile::create(&path, 2, 3, &notes).unwrap();
        file.push(&[1.0, -2.5, f32::MIN_POSITIVE]).unwrap();
        assert!(!path.exists(), "an incomplete file must not look like a result");
        file.push(&[f32::NEG_INFINITY, 0.0, -0.0]).unwrap();
        file.finish().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let logits = tensors.tensor("logits").unwrap();
        assert_eq!((logits.dtype(), logits.shape()), (safetensors::Dtype::F32, &[2, 3][..]));
        let values: Vec<u32> = logits.data().chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
        let wanted = [1.0, -2.5, f32::MIN_POSITIVE, f32::NEG_INFINITY, 0.0, -0.0].map(f32::to_bits);
        assert_eq!(values, wanted);
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(metadata.metadata().as_ref().unwrap()["model"], "tiny \"x\"");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn wrong_rows_are_refused_and_half_a_file_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("l.safetensors");
        let mut file = LogitsFile::create(&path, 1, 2, &[]).unwrap();
        assert!(file.push(&[1.0]).unwrap_err().to_string().contains("1 logits, not 2"));
        file.push(&[1.0, 2.0]).unwrap();
        assert!(file.push(&[1.0, 2.0]).is_err());
        drop(file);
        let short = LogitsFile::create(&path, 2, 2, &[]).unwrap();
        assert!(short.finish().unwrap_err().to_string().contains("0 of 2 rows"));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_bad_path_fails_before_any_row() {
        let dir = tempfile::tempdir().unwrap();
        for path in [dir.path().join("none/l"), dir.path().to_owned(), dir.path().join(".."), PathBuf::new()] {
            assert!(LogitsFile::create(&path, 1, 1, &[]).is_err(), "{}", path.display());
        }
        assert!(LogitsFile::create(&dir.path().join("l"), u64::MAX, 2, &[]).is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
