//! Compiled kernels on disk, by content: source, headers, values, options and compiler. An entry holds the machine code and
//! the assembler's report under one checksum, so that a torn or altered file is compiled again.

use std::hash::{Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::Kernel;
use super::nvrtc::{self, Compiled};
use super::sources::Source;
use crate::device::spec::Arch;
use crate::error::{Error, Result};
use crate::num::fnv::Fnv1a;

/// Names another folder than the user's cache folder.
pub const FOLDER_VARIABLE: &str = "HIGHWATER_CACHE";

const MAGIC: &[u8; 8] = b"hwcubin2";
/// Magic, checksum of what follows, length of the report.
const HEADER_BYTES: usize = 24;

/// `key`'s module for `arch`, from the cache, or compiled and put there; and whether it was there.
pub fn compiled(source: &Source, key: Kernel, arch: Arch) -> Result<(Compiled, bool)> {
    let file =
        folder().map(|folder| folder.join(format!("{}-{arch}-{:032x}.cubin", source.name, digest(source, key, arch))));
    if let Some(found) = file.as_deref().and_then(read) {
        return Ok((found, true));
    }
    let compiled = nvrtc::compile(source, key, arch)?;
    if let Some(file) = file {
        // A cache that cannot be written costs a compilation next time, nothing else.
        let _ = write(&file, &compiled);
    }
    Ok((compiled, false))
}

/// The cache's folder; none where the system names no place for it.
pub fn folder() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os(FOLDER_VARIABLE) {
        return Some(folder.into());
    }
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    Some(base.or_else(home)?.join("highwater"))
}

fn digest(source: &Source, key: Kernel, arch: Arch) -> u128 {
    digest_of(&(&source.text, source.headers(), key.defines(), key.fma(), nvrtc::options(arch), nvrtc::version()))
}

/// 128 bits that tell contents apart, the same in every process.
pub(super) fn digest_of(content: &impl Hash) -> u128 {
    let half = |seed: u8| {
        let mut hasher = Fnv1a::default();
        (seed, content).hash(&mut hasher);
        hasher.finish()
    };
    u128::from(half(0)) << 64 | u128::from(half(1))
}

fn checksum(parts: &[&[u8]]) -> u64 {
    let mut hasher = Fnv1a::default();
    for part in parts {
        hasher.write(part);
    }
    hasher.finish()
}

fn read(file: &Path) -> Option<Compiled> {
    let bytes = std::fs::read(file).ok()?;
    let (head, body) = bytes.split_at_checked(HEADER_BYTES)?;
    let number = |at: usize| head[at..at + 8].try_into().map(u64::from_le_bytes).ok();
    if !head.starts_with(MAGIC) || number(8)? != checksum(&[&head[16..], body]) {
        return None;
    }
    let (report, cubin) = body.split_at_checked(usize::try_from(number(16)?).ok()?)?;
    Some(Compiled { cubin: cubin.to_vec(), usage: serde_json::from_slice(report).ok()? })
}

/// Written beside and renamed, so that nobody reads half of it.
fn write(file: &Path, compiled: &Compiled) -> Result<()> {
    static WRITES: AtomicU64 = AtomicU64::new(0);
    let folder = file.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
    let one = WRITES.fetch_add(1, Ordering::Relaxed);
    let beside = file.with_extension(format!("{}-{one}.partial", std::process::id()));
    let report = serde_json::to_vec(&compiled.usage).map_err(|e| Error::io(file)(e.into()))?;
    let length = (report.len() as u64).to_le_bytes();
    let sum = checksum(&[&length, &report, &compiled.cubin]).to_le_bytes();
    let parts: [&[u8]; 5] = [MAGIC, &sum, &length, &report, &compiled.cubin];
    let mut out = std::fs::File::create(&beside).map_err(Error::io(&beside))?;
    parts.iter().try_for_each(|part| out.write_all(part)).map_err(Error::io(&beside))?;
    std::fs::rename(&beside, file).map_err(Error::io(file))
}

#[cfg(test)]
mod tests {
    use super::super::nvrtc::Usage;
    use super::*;

    #[test]
    fn an_altered_entry_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x.cubin");
        assert_eq!(read(&file), None);
        let usage = vec![Usage { entry: "f".into(), registers: 40, ..Usage::default() }];
        let compiled = Compiled { cubin: b"a cubin".to_vec(), usage };
        write(&file, &compiled).unwrap();
        assert_eq!(read(&file), Some(compiled));
        let whole = std::fs::read(&file).unwrap();
        for at in 0..whole.len() {
            let mut altered = whole.clone();
            altered[at] ^= 0x10;
            std::fs::write(&file, &altered).unwrap();
            assert_eq!(read(&file), None, "byte {at}");
            std::fs::write(&file, &whole[..at]).unwrap();
            assert_eq!(read(&file), None, "cut at {at}");
        }
    }
}
