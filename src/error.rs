//! The one error type. A variant per thing a user can act on; every message says what failed, the numbers, what to do.

use std::path::{Path, PathBuf};

/// What any fallible function of this crate returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong, by what the user can do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An allocation did not fit its end of the slab.
    #[error(transparent)]
    OutOfMemory(Box<OutOfMemory>),
    /// A budget is too small before anything was allocated: the terms, in bytes, and the nearest setting that fits.
    #[error(transparent)]
    Budget(Box<BudgetError>),
    /// The KV pool cannot hold at once all sequences that are to run together.
    #[error(transparent)]
    KvPool(Box<KvPoolError>),
    /// Data of a planned buffer was asked for: the plan device has no data, only sizes.
    #[error("{what}: the plan device holds sizes and no data; run with --device cpu to compute values")]
    NoData {
        /// What was read.
        what: String,
    },
    /// Operands of an op disagree.
    #[error("{op}: {what}")]
    Shape {
        /// The op.
        op: &'static str,
        /// Which operands, with their shapes, and what they must be.
        what: String,
    },
    /// A config.json (or a built-in geometry's options) is wrong.
    #[error("{}: {field}: {what}", file.display())]
    Config {
        /// The file, or the geometry's name.
        file: PathBuf,
        /// The key, dotted from the top of the file.
        field: String,
        /// The value found and what is accepted.
        what: String,
    },
    /// A checkpoint's tensors, header or index are wrong.
    #[error("{}: {what}", file.display())]
    Checkpoint {
        /// The file or folder.
        file: PathBuf,
        /// Which tensor, with the numbers, and what would be right.
        what: String,
    },
    /// Something this build does not do, with what it does.
    #[error("{what} is not supported; {supported}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// What can be asked for instead.
        supported: String,
    },
    /// A request that can never be served, or a parameter out of its range.
    #[error("{param}: {what}")]
    Request {
        /// The parameter's name, as the user wrote it.
        param: &'static str,
        /// The value and the accepted range.
        what: String,
    },
    /// A row of logits holds no finite value: the request fails, the engine goes on.
    #[error("logits of request {request}: no finite value in the row; the request is failed and its state freed")]
    NotFinite {
        /// The request's number.
        request: u64,
    },
    /// The same work took other memory than it had before: a leak, or fragmentation.
    #[error("{what}")]
    Leak {
        /// Which work, its bytes before and after, and who holds the difference.
        what: String,
    },
    /// A card, its driver or one of the vendor's libraries said no.
    #[error("{what}{}{help}", if help.is_empty() { "" } else { "; " })]
    Device {
        /// What was called and what it answered.
        what: String,
        /// What to do, or the compiler's own messages.
        help: String,
        /// Whether every later call fails too: the process must end.
        sticky: bool,
    },
    /// The file system said no.
    #[error("{}: {source}", file.display())]
    Io {
        /// The path.
        file: PathBuf,
        /// The system's own error.
        source: std::io::Error,
    },
}

impl Error {
    /// An [`Error::Io`] for `file`.
    pub fn io(file: &Path) -> impl FnOnce(std::io::Error) -> Error + '_ {
        move |source| Error::Io { file: file.to_path_buf(), source }
    }

    /// An [`Error::Shape`].
    pub fn shape(op: &'static str, what: impl Into<String>) -> Error {
        Error::Shape { op, what: what.into() }
    }

    /// An [`Error::Checkpoint`].
    pub fn checkpoint(file: impl Into<PathBuf>, what: impl Into<String>) -> Error {
        Error::Checkpoint { file: file.into(), what: what.into() }
    }

    /// An [`Error::Config`].
    pub fn config(file: impl Into<PathBuf>, field: impl Into<String>, what: impl Into<String>) -> Error {
        Error::Config { file: file.into(), field: field.into(), what: what.into() }
    }

    /// An [`Error::Device`] that the next call does not meet again.
    pub fn device(what: impl Into<String>, help: impl Into<String>) -> Error {
        Error::Device { what: what.into(), help: help.into(), sticky: false }
    }

    /// The allocation failure inside, if that is what this is.
    pub fn out_of_memory(&self) -> Option<&OutOfMemory> {
        match self {
            Error::OutOfMemory(oom) => Some(oom),
            Error::Budget(budget) => budget.first.as_deref(),
            _ => None,
        }
    }
}

/// An allocation that did not fit: what, by how much, and who holds the rest. All sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "out of memory: {tag} needs {requested} B ({}), {free} B are free of the slab's {slab} B, short by {} B; {}",
    mib(*requested), requested.saturating_sub(*free), holders(owners)
)]
pub struct OutOfMemory {
    /// The buffer that did not fit, as its tag prints.
    pub tag: String,
    /// Its size, padded to the alignment.
    pub requested: u64,
    /// The gap between the two ends of the slab.
    pub free: u64,
    /// The slab.
    pub slab: u64,
    /// Live bytes by tag at that moment, largest first, both ends.
    pub owners: Vec<(String, u64)>,
}

impl From<OutOfMemory> for Error {
    fn from(oom: OutOfMemory) -> Error {
        Error::OutOfMemory(Box::new(oom))
    }
}

fn holders(owners: &[(String, u64)]) -> String {
    match owners.first() {
        Some((tag, bytes)) => format!("{tag} holds the most, {bytes} B ({})", mib(*bytes)),
        None => "nothing is allocated".into(),
    }
}

/// A budget that cannot hold what was asked: each term in bytes, and the nearest setting that fits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BudgetError {
    /// The slab: what `--vram` or the card leaves after the overhead outside it.
    pub slab: u64,
    /// (term, bytes), in the order they are reserved.
    pub terms: Vec<(String, u64)>,
    /// The first allocation that would not fit, found by allocating in order on a slab of that size.
    pub first: Option<Box<OutOfMemory>>,
    /// What to set, e.g. `--chunk 2048 fits`; `None` where nothing does.
    pub nearest: Option<String>,
}

impl std::error::Error for BudgetError {}

impl std::fmt::Display for BudgetError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let total: u64 = self.terms.iter().map(|(_, b)| b).sum();
        write!(
            f,
            "the slab of {} B ({}) is too small by {} B: ",
            self.slab,
            mib(self.slab),
            total.saturating_sub(self.slab)
        )?;
        for (i, (term, bytes)) in self.terms.iter().enumerate() {
            write!(f, "{}{term} {bytes} B", if i == 0 { "" } else { " + " })?;
        }
        match &self.nearest {
            Some(fits) => write!(f, " = {total} B; {fits}"),
            None => write!(
                f,
                " = {total} B; no chunk, batch or KV size makes it fit: take a smaller model, recipe or a larger card"
            ),
        }
    }
}

impl From<BudgetError> for Error {
    fn from(budget: BudgetError) -> Error {
        Error::Budget(Box::new(budget))
    }
}

/// A KV pool that is smaller than what a batch of equal sequences holds at its longest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the KV pool of {pool_tokens} tokens, {} B ({}), cannot hold {batch} x {tokens} tokens at once, {} B ({}): short by {} \
     B; --kv-tokens {fits} fits",
    self.free(), mib(self.free()), self.requested(), mib(self.requested()), self.requested() - self.free()
)]
pub struct KvPoolError {
    /// Sequences.
    pub batch: u64,
    /// Tokens each of them holds at its longest.
    pub tokens: u64,
    /// Tokens the pool holds, whole pages.
    pub pool_tokens: u64,
    /// Pages of the pool that sequences can be given.
    pub pool_pages: u64,
    /// Pages needed, more than the pool's.
    pub pages: u64,
    /// Bytes of a page in all layers.
    pub page_bytes: u64,
    /// The smallest `--kv-tokens` that suffices.
    pub fits: u64,
}

impl KvPoolError {
    /// Bytes of the pages needed.
    pub fn requested(&self) -> u64 {
        self.pages.saturating_mul(self.page_bytes)
    }

    /// Bytes of the pages there are.
    pub fn free(&self) -> u64 {
        self.pool_pages.min(self.pages).saturating_mul(self.page_bytes)
    }
}

impl From<KvPoolError> for Error {
    fn from(short: KvPoolError) -> Error {
        Error::KvPool(Box::new(short))
    }
}

/// Bytes as `12.3 MiB`; GiB from 1 GiB on, KiB below 1 MiB, and B below 1 KiB.
pub fn mib(bytes: u64) -> String {
    let in_units = |shift: u32| bytes as f64 / (1u64 << shift) as f64;
    match bytes {
        0..0x400 => format!("{bytes} B"),
        0x400..0x10_0000 => format!("{:.1} KiB", in_units(10)),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", in_units(20)),
        _ => format!("{:.2} GiB", in_units(30)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_a_unit_that_shows_them() {
        let sizes = [0, 256, 1023, 1024, 98_304, (1 << 20) - 1, 1 << 20, 12_900_000, 1 << 30, 17_910_000_000];
        let shown = [
            "0 B",
            "256 B",
            "1023 B",
            "1.0 KiB",
            "96.0 KiB",
            "1024.0 KiB",
            "1.0 MiB",
            "12.3 MiB",
            "1.00 GiB",
            "16.68 GiB",
        ];
        assert_eq!(sizes.map(mib), shown);
    }
}
