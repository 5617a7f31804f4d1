//! Quantised checkpoints: every producer's fixture opens and dequantises to the peer's own bits; every bent one is refused.

mod layouts;
mod mutations;
mod refused;
mod sizes;
mod sources;
mod values;

use std::fs;
use std::path::PathBuf;

use highwater::checkpoint::{Checkpoint, Module, header};
use highwater::error::Result;
use highwater::ops::scheme::{ActScheme, Global, Grain, Scheme};
use serde_json::Value;

use super::maker::{Maker, Tensor};

/// The quantised fixtures.
const CASES: [&str; 13] = [
    "ct_dense_nvfp4",
    "ct_fp8_block",
    "ct_fp8_dynamic",
    "ct_fp8_static",
    "ct_mfree_ignore_re",
    "ct_mixed_lmhead_fp8",
    "ct_nvfp4",
    "ct_nvfp4a16",
    "hf_fp8_block",
    "mo_fp8",
    "mo_fp8_pc_pt",
    "mo_mixed",
    "mo_nvfp4",
];

fn folder(case: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(case)
}

/// A fixture's config and tensors, to bend and write again.
fn fixture(case: &str) -> Maker {
    let file = folder(case).join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let header = header::parse(&file, &bytes, bytes.len() as u64).unwrap();
    let tensors = header.tensors.into_iter().map(|t| Tensor {
        name: t.name,
        dtype: t.dtype.name().into(),
        shape: t.shape.iter().map(|d| *d as u64).collect(),
        bytes: bytes[t.offset as usize..(t.offset + t.bytes) as usize].to_vec(),
    });
    let config: Value = serde_json::from_slice(&fs::read(folder(case).join("config.json")).unwrap()).unwrap();
    Maker { config, tensors: tensors.collect() }
}

fn open(case: &str) -> Checkpoint {
    Checkpoint::open(&folder(case)).unwrap_or_else(|e| panic!("{case}: {e}"))
}

/// What a module's scheme and input are, in a word each.
fn kind(m: &Module) -> String {
    let scheme = match m.scheme {
        Scheme::Plain(dtype) => dtype.to_string(),
        Scheme::Fp8(Grain::Tensor) => "fp8-tensor".into(),
        Scheme::Fp8(Grain::Channel) => "fp8-channel".into(),
        Scheme::Fp8(Grain::Block) => "fp8-block".into(),
        Scheme::Nvfp4(Global::Divides) => "nvfp4-divides".into(),
        Scheme::Nvfp4(Global::Multiplies) => "nvfp4-multiplies".into(),
    };
    let act = match m.act {
        ActScheme::None => "",
        ActScheme::Fp8Tensor => " tensor",
        ActScheme::Fp8Token => " token",
        ActScheme::Fp8Group => " group",
        ActScheme::Nvfp4 => " nvfp4",
    };
    scheme + act
}

/// How many modules there are of each kind, in alphabetical order.
fn counts(modules: &[Module]) -> Vec<(String, usize)> {
    let mut counts = std::collections::BTreeMap::new();
    for m in modules {
        *counts.entry(kind(m)).or_insert(0) += 1;
    }
    counts.into_iter().collect()
}

/// Reads every value of a checkpoint, as a load does.
fn read_all(c: &Checkpoint) -> Result<()> {
    for m in c.modules() {
        c.verdict(&m.name)?;
        let half = if matches!(m.scheme, Scheme::Nvfp4(_)) { m.cols / 2 } else { m.cols };
        match m.scheme {
            Scheme::Plain(_) => continue,
            Scheme::Fp8(Grain::Block) => drop(c.block_scales(&m.name)?),
            Scheme::Nvfp4(_) => {
                c.row_scale(&m.name)?;
                c.read_group_scales(&m.name, 0..m.rows, &mut vec![0; m.rows * m.cols / 16])?;
            }
            Scheme::Fp8(_) => drop(c.row_scale(&m.name)?),
        }
        c.read_codes(&m.name, 0..m.rows, &mut vec![0; m.rows * half])?;
    }
    for layer in 0..c.geometry().layers.len() {
        c.kv_scales(layer)?;
    }
    Ok(())
}
