//! A checkpoint's folder, opened: config and headers read, every tensor accounted for, data read on demand.
//!
//! May live here: opening files, and positioned reads of rows into the caller's bytes. May not: a memory map (a file
//! cut short must be an error, not a signal), a conversion of elements, or any decision about names (account.rs).

use std::collections::HashMap;
use std::fs::File;
use std::hash::Hasher;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::account::{Account, Entry, Found, Module, Skipped, account, k_scale, settle_tie};
use super::config::{self, CONFIG_LIMIT};
use super::folder::{self, Weights};
use super::geometry::Geometry;
use super::header::{self, Header};
use super::index::INDEX;
use super::json::shown;
use super::names::{Role, SkipRule, role};
use super::quant::Quantisation;
use super::tokenizer;
use crate::error::{Error, Result};
use crate::num::fnv::Fnv1a;

/// Where modelopt says how weights are stored, if config.json does not.
const HF_QUANT: &str = "hf_quant_config.json";

/// A checkpoint that is complete: every parameter of its geometry has bytes of the right dtype and shape on disk, in the
/// scheme its quantisation config says, and everything else there is skipped by a named rule. Reading is `&self` and safe
/// from many threads.
#[derive(Debug)]
pub struct Checkpoint {
    geometry: Geometry,
    entries: HashMap<String, Entry>,
    modules: Vec<Module>,
    places: HashMap<String, usize>,
    names: Vec<String>,
    paths: Vec<PathBuf>,
    files: Vec<File>,
    skipped: Vec<Skipped>,
    bytes: u64,
    header_hash: u64,
}

/// What a folder holds, right or wrong: everything [`Checkpoint::open`] would refuse it for at once.
#[derive(Debug)]
pub struct Survey {
    /// The model its config describes.
    pub geometry: Geometry,
    /// The linear modules that are stored as the config says, in the order of the forward pass.
    pub modules: Vec<Module>,
    /// The attention layers with stored scales of an FP8 KV cache.
    pub kv_layers: Vec<usize>,
    /// What is not read, and why.
    pub skipped: Vec<Skipped>,
    /// Bytes of all parameters on disk.
    pub bytes: u64,
    /// What is wrong, each naming its module or tensor; a checkpoint opens only where this is empty.
    pub faults: Vec<Error>,
}

impl Checkpoint {
    /// Opens a folder, or the `models--owner--name` folder of a Hugging Face cache. Reads config.json,
    /// hf_quant_config.json, generation_config.json, the ids of tokenizer.json, and headers; no data.
    ///
    /// # Errors
    /// Everything [`Geometry::from_config`] can say, and [`Error::Checkpoint`] naming file, module, tensor and numbers for
    /// a header or index that lies, a tensor nothing consumes, a parameter nothing fills, a module whose tensors are not
    /// what the quantisation config says, or a tie flag that the files contradict; [`Error::Io`] for what cannot be read.
    pub fn open(folder: &Path) -> Result<Checkpoint> {
        let (open, geometry, mut done) = gather(folder)?;
        if !done.faults.is_empty() {
            let more = done.faults.len() - 1;
            return Err(match done.faults.swap_remove(0) {
                Error::Checkpoint { file, what } if more > 0 => {
                    Error::Checkpoint { file, what: format!("{what} (and {more} more faults; inspect lists them)") }
                }
                fault => fault,
            });
        }
        Ok(Checkpoint {
            geometry,
            bytes: done.entries.values().map(Entry::bytes).sum(),
            entries: done.entries,
            places: done.modules.iter().enumerate().map(|(i, m)| (m.name.clone(), i)).collect(),
            modules: done.modules,
            names: open.found.into_iter().map(|f| f.tensor.name).collect(),
            paths: open.paths,
            files: open.files,
            skipped: done.skipped,
            header_hash: open.hash.0.finish(),
        })
    }

    /// What a folder holds, and all that is wrong with it. Reads what [`Checkpoint::open`] reads.
    ///
    /// # Errors
    /// What leaves nothing to report on: a config.json, header or index that cannot be read.
    pub fn survey(folder: &Path) -> Result<Survey> {
        let (_, geometry, done) = gather(folder)?;
        let has = |layer: &usize| done.entries.contains_key(&k_scale(*layer));
        Ok(Survey {
            kv_layers: (0..geometry.layers.len()).filter(has).collect(),
            geometry,
            modules: done.modules,
            skipped: done.skipped,
            bytes: done.entries.values().map(Entry::bytes).sum(),
            faults: done.faults,
        })
    }

    /// The linear modules, in the order of the forward pass.
    pub fn modules(&self) -> &[Module] {
        &self.modules
    }

    /// A linear module by its canonical name, without `.weight`.
    pub fn module(&self, name: &str) -> Option<&Module> {
        self.places.get(name).map(|at| &self.modules[*at])
    }

    /// The model it holds, with the tie, the end-of-sequence ids and the decodable vocabulary settled from the folder.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Where a parameter is, by its canonical name as [`Geometry::params`] lists it, or a part of a quantised module by
    /// the module's name and its own (`lm_head.weight_scale`).
    pub fn entry(&self, canonical: &str) -> Option<&Entry> {
        self.entries.get(canonical)
    }

    /// The name an entry's tensor has on disk; experts of a fused tensor share one.
    pub fn disk_name(&self, entry: &Entry) -> &str {
        &self.names[entry.source]
    }

    /// The file an entry's tensor is in.
    pub fn file_of(&self, entry: &Entry) -> &Path {
        &self.paths[entry.file]
    }

    /// Reads rows of a parameter's first dimension into `out`, as they are on disk: little-endian, row-major, of the
    /// entry's dtype.
    ///
    /// # Errors
    /// [`Error::Shape`] for an unknown name, rows the parameter does not have, or an `out` of another size;
    /// [`Error::Checkpoint`] where the file has become shorter since it was opened; [`Error::Io`] for a failed read.
    pub fn read(&self, canonical: &str, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
        const OP: &str = "checkpoint read";
        let Some(entry) = self.entries.get(canonical) else {
            return Err(Error::shape(OP, format!("\"{}\" is not a parameter of this checkpoint", shown(canonical))));
        };
        if rows.start > rows.end || rows.end > entry.rows() {
            return Err(Error::shape(OP, format!("{canonical}: rows {rows:?} of {}", entry.rows())));
        }
        let row_bytes = entry.row_bytes();
        let want = rows.len() * row_bytes;
        if out.len() != want {
            let what = format!("{canonical}: rows {rows:?} are {want} bytes, and there is room for {}", out.len());
            return Err(Error::shape(OP, what));
        }
        let at = entry.offset + (rows.start * row_bytes) as u64;
        let (file, path) = (&self.files[entry.file], &self.paths[entry.file]);
        read_exact(file, out, at).map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => {
                let now = file.metadata().map_or(0, |m| m.len());
                let what = format!(
                    "tensor \"{}\": bytes {at} to {} are beyond the file's end; it is {now} bytes now and was longer when \
                     it was opened: it was cut short meanwhile",
                    shown(self.disk_name(entry)),
                    at + want as u64
                );
                Error::checkpoint(path, what)
            }
            _ => Error::io(path)(e),
        })
    }

    /// What on disk is not read, and why, in the order of the files.
    pub fn skipped(&self) -> &[Skipped] {
        &self.skipped
    }

    /// Bytes of all parameters on disk.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The files whose headers were read.
    pub fn files(&self) -> &[PathBuf] {
        &self.paths
    }

    /// FNV-1a, 64 bits, of config.json (and hf_quant_config.json, where that is read) and of each file's name, length and header: what the checkpoint says it is.
    /// The folder's own name and the data are not part of it.
    pub fn header_hash(&self) -> u64 {
        self.header_hash
    }
}

/// Reads a folder's config and headers, and accounts for every tensor.
fn gather(folder: &Path) -> Result<(Opened, Geometry, Account)> {
    let dir = folder::resolve(folder)?;
    let mut open = Opened::default();
    let config_bytes = folder::config(&dir)?;
    open.hash.write(&config_bytes);
    let parsed = config::parse(&dir.join("config.json"), &config_bytes)?;
    let (mut geometry, mut quantisation) = (parsed.geometry, parsed.quantisation);
    if quantisation.is_absent()
        && let Some(bytes) = folder::optional(&dir, HF_QUANT, CONFIG_LIMIT)?
    {
        open.hash.write(&bytes);
        quantisation = Quantisation::read_modelopt(&dir.join(HF_QUANT), &bytes)?;
    }
    read_tokens(&dir, &mut geometry)?;

    let weights = folder::weights(&dir)?;
    for name in weights.shards.iter().chain(&weights.extras) {
        open.file(&dir, name)?;
    }
    open.check_places(&dir, &weights)?;
    settle_tie(&dir, &mut geometry, parsed.tie_unsettled, &open.found)?;
    let mut done = account(&dir, &geometry, &quantisation, &open.paths, &open.found)?;
    for name in weights.others {
        let bytes = std::fs::metadata(dir.join(&name)).map_or(0, |m| m.len());
        done.skipped.push(Skipped { name, rule: SkipRule::OtherFile, bytes });
    }
    Ok((open, geometry, done))
}

/// The ids that end a sequence, and how many ids the tokenizer decodes, where the folder says.
fn read_tokens(dir: &Path, geometry: &mut Geometry) -> Result<()> {
    const GENERATION: &str = "generation_config.json";
    if let Some(bytes) = folder::optional(dir, GENERATION, CONFIG_LIMIT)?
        && let Some(ids) = config::generation_eos(&dir.join(GENERATION), &bytes, geometry.vocab)?
    {
        geometry.eos = ids;
    }
    if let Some(decodable) = tokenizer::decodable(dir, geometry.vocab)? {
        if let Some(id) = geometry.eos.iter().find(|id| **id as usize >= decodable) {
            let what = format!(
                "{id} ends a sequence, and the tokenizer's ids end at {}: they do not belong together",
                decodable - 1
            );
            return Err(Error::config(dir.join("tokenizer.json"), "model.vocab", what));
        }
        geometry.decodable = decodable;
    }
    Ok(())
}

#[derive(Default)]
struct Opened {
    paths: Vec<PathBuf>,
    files: Vec<File>,
    found: Vec<Found>,
    hash: PieceHash,
}

impl Opened {
    fn file(&mut self, dir: &Path, name: &str) -> Result<()> {
        let path = dir.join(name);
        // Before opening: a pipe or device would block, or do something.
        if !std::fs::metadata(&path).map_err(Error::io(&path))?.is_file() {
            return Err(Error::checkpoint(&path, "not a regular file; a checkpoint's files must be ordinary files"));
        }
        let file = File::open(&path).map_err(Error::io(&path))?;
        let (header, bytes) = read_header(&path, &file)?;
        self.hash.write(name.as_bytes());
        self.hash.write(&file.metadata().map_err(Error::io(&path))?.len().to_le_bytes());
        self.hash.write(&bytes);
        let at = self.paths.len();
        self.found.extend(header.tensors.into_iter().map(|tensor| Found { file: at, tensor }));
        self.paths.push(path);
        self.files.push(file);
        Ok(())
    }

    /// No tensor stands in two files, and the index and the headers say the same.
    fn check_places(&self, dir: &Path, weights: &Weights) -> Result<()> {
        let mut places: HashMap<&str, usize> = HashMap::with_capacity(self.found.len());
        for Found { file, tensor } in &self.found {
            if let Some(first) = places.insert(&tensor.name, *file) {
                let what = format!(
                    "tensor \"{}\" is also in {}; remove one",
                    shown(&tensor.name),
                    self.paths[first].display()
                );
                return Err(Error::checkpoint(&self.paths[*file], what));
            }
        }
        let Some(index) = &weights.index else {
            return self.only_skipped(weights.shards.len(), "which holds parameters though no index names it");
        };
        for Found { file, tensor } in self.found.iter().filter(|f| f.file < weights.shards.len()) {
            let here = &weights.shards[*file];
            let what = match index.tensors.get(&tensor.name).map(|at| &index.files[*at]) {
                Some(said) if said != here => format!("says it is in {}", shown(said)),
                None if !matches!(role(&tensor.name), Role::Skip(_)) => "does not name it".into(),
                _ => continue,
            };
            let what = format!("tensor \"{}\" is here, and {INDEX} {what}; download both again", shown(&tensor.name));
            return Err(Error::checkpoint(&self.paths[*file], what));
        }
        // In the order of the names, so that the same folder gives the same error every time.
        let lost = index.tensors.iter().filter(|(name, _)| !places.contains_key(name.as_str())).min();
        if let Some((name, at)) = lost {
            let file = &index.files[*at];
            let what =
                format!("tensor \"{}\" is said to be in {}, whose header does not have it", shown(name), shown(file));
            return Err(Error::checkpoint(dir.join(INDEX), what));
        }
        self.only_skipped(weights.shards.len(), "a file the index does not name")
    }

    fn only_skipped(&self, shards: usize, why: &str) -> Result<()> {
        match self.found.iter().find(|f| f.file >= shards && !matches!(role(&f.tensor.name), Role::Skip(_))) {
            Some(f) => {
                let what = format!(
                    "tensor \"{}\" is in {why}; put the index and its files together, and nothing else",
                    shown(&f.tensor.name)
                );
                Err(Error::checkpoint(&self.paths[f.file], what))
            }
            None => Ok(()),
        }
    }
}

fn read_header(path: &Path, file: &File) -> Result<(Header, Vec<u8>)> {
    let len = file.metadata().map_err(Error::io(path))?.len();
    if len < 8 {
        return header::parse(path, &vec![0; len as usize], len).map(|h| (h, Vec::new()));
    }
    let mut first = [0; 8];
    file.read_exact_at(&mut first, 0).map_err(Error::io(path))?;
    let json = header::json_len(path, first, len)?;
    let mut bytes = vec![0; 8 + json as usize];
    file.read_exact_at(&mut bytes, 0).map_err(Error::io(path))?;
    let header = header::parse(path, &bytes, len)?;
    Ok((header, bytes))
}

/// Fills `out` from byte `at` of a file, large ranges by several threads: one does not reach what a fast disk gives.
fn read_exact(file: &File, out: &mut [u8], at: u64) -> std::io::Result<()> {
    /// Bytes of one thread's read.
    const PIECE: usize = 1 << 20;
    if out.len() <= PIECE {
        return file.read_exact_at(out, at);
    }
    let pieces = out.par_chunks_mut(PIECE).enumerate();
    pieces.map(|(i, piece)| file.read_exact_at(piece, at + (i * PIECE) as u64)).collect()
}

/// A hash of pieces, each preceded by its length.
#[derive(Default)]
struct PieceHash(Fnv1a);

impl PieceHash {
    fn write(&mut self, piece: &[u8]) {
        self.0.write(&(piece.len() as u64).to_le_bytes());
        self.0.write(piece);
    }
}
