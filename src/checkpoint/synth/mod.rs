//! Writes a checkpoint with random weights in a producer's exact layout: the values of the seeded model of that name.
//!
//! | file | may hold |
//! |---|---|
//! | mod.rs | [`Synth`]: files, their sizes, and writing them as a stream |
//! | layout.rs | every tensor's name, dtype, shape and content |
//! | config.rs | the JSON beside the weights |
//!
//! The format is safetensors' (<https://github.com/huggingface/safetensors#format>); elements of a large type come first,
//! as its own writer puts them, so that each is aligned. Nothing is held in memory but one block of one tensor.

mod config;
mod layout;

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::{Map, Value, json};

use self::layout::OnDisk;
use super::account::Module;
use super::disk::Survey;
use super::geometry::Geometry;
use super::recipe::Recipe;
use super::seeded::Seeded;
use crate::error::{Error, Result};

/// Most bytes of tensors in one file, unless one tensor alone has more.
pub const SHARD_BYTES: u64 = 5_000_000_000;
/// Bytes made and written at once.
const BLOCK_BYTES: u64 = 8 << 20;

/// What a folder would hold that is written for `geometry` as `recipe` stores it.
///
/// # Errors
/// [`Error::Unsupported`] where the recipe does not describe such a model.
pub fn survey(geometry: &Geometry, recipe: &Recipe) -> Result<Survey> {
    recipe.check(geometry)?;
    let seeded = Seeded::of(geometry, recipe, 0);
    let mut modules = Vec::new();
    for linear in geometry.linears() {
        let (scheme, act) = seeded.scheme(&linear.module)?;
        let bytes = layout::module_bytes(seeded, &linear.module, [linear.rows, linear.cols])?;
        modules.push(Module { name: linear.module, rows: linear.rows, cols: linear.cols, scheme, act, bytes });
    }
    Ok(Survey {
        geometry: geometry.clone(),
        modules,
        kv_layers: (0..geometry.layers.len()).filter(|l| seeded.kv_scales(*l).is_some()).collect(),
        skipped: Vec::new(),
        bytes: layout::tensors(seeded)?.iter().map(OnDisk::bytes).sum(),
        faults: Vec::new(),
    })
}

/// A checkpoint to be written.
#[derive(Debug)]
pub struct Synth {
    label: String,
    small: Vec<(&'static str, Value)>,
    shards: Vec<Vec<OnDisk>>,
}

impl Synth {
    /// The checkpoint of `geometry` as `recipe` stores it, its values those of the seeded model of that seed, in files of
    /// at most `shard_bytes` bytes of tensors.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the recipe does not describe such a model.
    pub fn new(geometry: &Geometry, recipe: &Recipe, seed: u64, shard_bytes: u64) -> Result<Synth> {
        recipe.check(geometry)?;
        let mut shards: Vec<Vec<OnDisk>> = Vec::new();
        let mut room = 0;
        for tensor in layout::tensors(Seeded { geometry, recipe, seed })? {
            let bytes = tensor.bytes();
            match shards.last_mut() {
                Some(shard) if bytes <= room => {
                    room -= bytes;
                    shard.push(tensor);
                }
                _ => {
                    room = shard_bytes.saturating_sub(bytes);
                    shards.push(vec![tensor]);
                }
            }
        }
        for shard in &mut shards {
            // Scales of one element together, so that a file of holes has them in few blocks.
            let place = |t: &OnDisk| (std::cmp::Reverse(t.element_bytes()), t.elements() != 1);
            shard.sort_by(|a, b| place(a).cmp(&place(b)).then_with(|| a.name.cmp(&b.name)));
        }
        let small = config::files(geometry, recipe)?;
        Ok(Synth { label: format!("{}@{recipe} seed {seed}", geometry.name), small, shards })
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.shards.iter().flatten().map(OnDisk::bytes).sum()
    }

    /// How many tensors there are.
    pub fn tensors(&self) -> usize {
        self.shards.iter().map(Vec::len).sum()
    }

    /// How many weight files there are.
    pub fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Writes it into `dir`, which is made if it is not there. `progress` is called with the bytes of tensors written so
    /// far. Where `sparse`, tensors of more than one element are holes, which read as zeros: what needs headers and
    /// scalars alone can use such a checkpoint. config.json comes last: before it is there, it is no checkpoint.
    ///
    /// # Errors
    /// [`Error::Request`] where `dir` has anything in it; [`Error::Io`] for what cannot be written.
    pub fn write(&self, dir: &Path, sparse: bool, progress: &mut dyn FnMut(u64)) -> Result<()> {
        fs::create_dir_all(dir).map_err(Error::io(dir))?;
        let held = fs::read_dir(dir).map_err(Error::io(dir))?.count();
        if held > 0 {
            let what = format!("{} has {held} entries; give a folder that is empty or not there", dir.display());
            return Err(Error::Request { param: "DIR", what });
        }
        let mut done = 0;
        for (i, shard) in self.shards.iter().enumerate() {
            self.shard(&dir.join(self.file_name(i)), shard, sparse, &mut |bytes| {
                done += bytes;
                progress(done);
            })?;
        }
        if self.shards.len() > 1 {
            write_json(&dir.join("model.safetensors.index.json"), &self.index())?;
        }
        self.small.iter().try_for_each(|(name, value)| write_json(&dir.join(name), value))
    }

    fn file_name(&self, shard: usize) -> String {
        match self.shards.len() {
            1 => "model.safetensors".into(),
            all => format!("model-{:05}-of-{all:05}.safetensors", shard + 1),
        }
    }

    fn index(&self) -> Value {
        let mut places: Vec<(&str, String)> = Vec::with_capacity(self.tensors());
        for (i, shard) in self.shards.iter().enumerate() {
            places.extend(shard.iter().map(|t| (t.name.as_str(), self.file_name(i))));
        }
        places.sort();
        let map: Map<String, Value> = places.into_iter().map(|(name, file)| (name.to_owned(), json!(file))).collect();
        json!({ "metadata": { "total_size": self.bytes() }, "weight_map": map })
    }

    /// The JSON of a file's header, padded so that the data begin at a multiple of 8.
    fn header(&self, shard: &[OnDisk]) -> Result<Vec<u8>> {
        let mut map = Map::new();
        map.insert(
            "__metadata__".into(),
            json!({ "format": "pt", "made_by": format!("highwater synth {}", self.label) }),
        );
        let mut at = 0;
        for tensor in shard {
            let end = at + tensor.bytes();
            let entry = json!({ "dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": [at, end] });
            map.insert(tensor.name.clone(), entry);
            at = end;
        }
        let mut text = serde_json::to_vec(&map).map_err(|e| Error::shape("synth", e.to_string()))?;
        text.resize(text.len().next_multiple_of(8), b' ');
        Ok(text)
    }

    fn shard(&self, path: &Path, shard: &[OnDisk], sparse: bool, progress: &mut dyn FnMut(u64)) -> Result<()> {
        use std::os::unix::fs::FileExt;

        let header = self.header(shard)?;
        let mut file = File::create_new(path).map_err(Error::io(path))?;
        file.write_all(&(header.len() as u64).to_le_bytes()).map_err(Error::io(path))?;
        file.write_all(&header).map_err(Error::io(path))?;
        let mut block = vec![0u8; BLOCK_BYTES as usize];
        let mut at = 8 + header.len() as u64;
        if sparse {
            let end = at + shard.iter().map(OnDisk::bytes).sum::<u64>();
            file.set_len(end).map_err(Error::io(path))?;
        }
        for tensor in shard {
            let (bytes, elements) = (tensor.bytes(), tensor.elements());
            let mut first = 0;
            while first < elements && !(sparse && elements > 1) {
                let count = (elements - first).min(BLOCK_BYTES / tensor.element_bytes());
                let out = &mut block[..(count * tensor.element_bytes()) as usize];
                tensor.draw(first, out);
                file.write_all_at(out, at + first * tensor.element_bytes()).map_err(Error::io(path))?;
                first += count;
                progress(out.len() as u64);
            }
            if first < elements {
                progress(bytes);
            }
            at += bytes;
        }
        // What the system could not write it says here at the latest.
        file.sync_all().map_err(Error::io(path))
    }
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let file = File::create_new(path).map_err(Error::io(path))?;
    let mut out = BufWriter::new(file);
    // A vocabulary would have a line for each token.
    let written = if value.get("model").is_some() {
        serde_json::to_writer(&mut out, value)
    } else {
        serde_json::to_writer_pretty(&mut out, value)
    };
    written.map_err(|e| Error::io(path)(e.into()))?;
    out.flush().map_err(Error::io(path))
}
