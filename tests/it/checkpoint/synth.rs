//! Recipes and the checkpoints written from them: what stands on disk, and that it is the seeded model.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use highwater::checkpoint::synth::{SHARD_BYTES, survey};
use highwater::checkpoint::{Checkpoint, Geometry, Mlp, ModelRef, Recipe, RowScale, Source, Synth, Verdict};
use highwater::device::{Device, DeviceSpec};
use highwater::engine::Engine;
use highwater::mem::{End, Layer, Tag};
use highwater::num::{DType, fp4, fp8};
use highwater::ops::scheme::{ActScheme, Global, Grain, Scheme};
use highwater::ops::{Cx, Meter, Numerics};
use highwater::tensor::{Tensor, byte_size};
use safetensors::SafeTensors;

use crate::fixture::{all_logits, options};

/// Widths that blocks of 128 divide, and some they do not: 320 is two and a half.
fn wide(name: &str) -> Geometry {
    let mut g = Geometry::builtin(name).unwrap();
    g.name = format!("wide-{name}");
    g.hidden = 256;
    g.tied = false;
    g.mlp = match g.mlp {
        Mlp::Dense { .. } => Mlp::Dense { inter: 320 },
        Mlp::Moe { .. } => Mlp::Moe { experts: 3, top_k: 2, inter: 128, shared_inter: 192 },
    };
    g
}

fn geometries() -> Vec<Geometry> {
    let builtin = |name| Geometry::builtin(name).unwrap();
    vec![builtin("tiny"), builtin("tiny-moe"), wide("tiny"), wide("tiny-moe")]
}

/// Every recipe with every geometry it describes.
fn pairs() -> Vec<(Geometry, Recipe)> {
    let mut all = Vec::new();
    for name in Recipe::names() {
        let recipe = Recipe::parse(name).unwrap();
        all.extend(geometries().into_iter().filter(|g| recipe.check(g).is_ok()).map(|g| (g, recipe.clone())));
    }
    assert!(all.len() > 2 * Recipe::names().count());
    all
}

fn write(geometry: &Geometry, recipe: &Recipe, seed: u64, shard_bytes: u64) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let synth = Synth::new(geometry, recipe, seed, shard_bytes).unwrap();
    let mut done = 0;
    synth.write(dir.path(), false, &mut |bytes| done = bytes).unwrap();
    assert_eq!(done, synth.bytes());
    dir
}

fn seeded(geometry: &Geometry, recipe: &Recipe, seed: u64) -> Source {
    Source::Seeded { geometry: geometry.clone().into(), recipe: recipe.clone(), seed }
}

fn disk(dir: &Path) -> Source {
    Source::Disk(Box::new(Checkpoint::open(dir).unwrap_or_else(|e| panic!("{e}"))))
}

struct Kit {
    device: Arc<Device>,
    meter: Meter,
}

impl Kit {
    fn new() -> Kit {
        Kit { device: Device::cpu_poisoned(DeviceSpec::host(), 1 << 28).unwrap(), meter: Meter::default() }
    }

    fn cx(&self) -> Cx<'_> {
        Cx {
            device: &self.device,
            numerics: Numerics::F32,
            layer: Layer::Weights,
            bound: None,
            meter: &self.meter,
            routes: None,
        }
    }

    fn tensor(&self, dtype: DType, shape: &[usize]) -> Tensor {
        let tag = Tag::new(Layer::Other, "test", "weight");
        let bytes = byte_size(dtype, shape).unwrap();
        Tensor::new(self.device.alloc(End::Persistent, tag, bytes).unwrap(), dtype, shape).unwrap()
    }
}

/// All a source says of one module, as bytes.
#[derive(Debug, PartialEq)]
struct Held {
    verdict: Verdict,
    codes: Vec<u8>,
    scales: Vec<u8>,
    rows: Option<RowScale>,
}

fn held(kit: &Kit, source: &Source, module: &str) -> Held {
    let [n, k] = source.geometry().linear(module).unwrap();
    let verdict = source.verdict(module).unwrap();
    let cx = kit.cx();
    let bytes = |t: &Tensor| t.host::<u8>().unwrap().to_vec();
    let codes = |cols| {
        let mut t = kit.tensor(DType::U8, &[n, cols]);
        source.fill_codes(&cx, &mut t, 0, n, module).unwrap_or_else(|e| panic!("{module}: {e}"));
        bytes(&t)
    };
    let scales = |dtype, shape: [usize; 2]| {
        let mut t = kit.tensor(dtype, &shape);
        source.fill_scales(&cx, &mut t, 0, shape[0], module).unwrap();
        bytes(&t)
    };
    let rows = || Some(source.row_scale(module).unwrap());
    match verdict.scheme {
        Scheme::Plain(dtype) => {
            let mut t = kit.tensor(dtype, &[n, k]);
            source.fill(&cx, &mut t, 0, n, &format!("{module}.weight")).unwrap();
            Held { verdict, codes: bytes(&t), scales: Vec::new(), rows: None }
        }
        Scheme::Fp8(Grain::Block) => {
            let grid = [n.div_ceil(128), k.div_ceil(128)];
            Held { verdict, codes: codes(k), scales: scales(DType::F32, grid), rows: None }
        }
        Scheme::Fp8(_) => Held { verdict, codes: codes(k), scales: Vec::new(), rows: rows() },
        Scheme::Nvfp4(_) => Held { verdict, codes: codes(k / 2), scales: scales(DType::U8, [n, k / 16]), rows: rows() },
    }
}

/// The weight as the scheme decodes it, in f32.
fn decoded(held: &Held, [n, k]: [usize; 2]) -> Vec<f32> {
    let row = |r: usize| match &held.rows {
        Some(RowScale::One(scale)) => *scale,
        Some(RowScale::Each(scales)) => scales[r],
        None => f32::NAN,
    };
    let mut out = Vec::with_capacity(n * k);
    for r in 0..n {
        for c in 0..k {
            out.push(match held.verdict.scheme {
                Scheme::Plain(_) => f32::NAN,
                Scheme::Fp8(Grain::Block) => {
                    let at = 4 * ((r / 128) * k.div_ceil(128) + c / 128);
                    fp8::decode(held.codes[r * k + c]) * f32::from_le_bytes(held.scales[at..at + 4].try_into().unwrap())
                }
                Scheme::Fp8(_) => fp8::decode(held.codes[r * k + c]) * row(r),
                Scheme::Nvfp4(sense) => {
                    let scale = fp8::decode(held.scales[r * (k / 16) + c / 16]);
                    let scale = if sense == Global::Divides { scale / row(r) } else { scale * row(r) };
                    fp4::decode_pair(held.codes[r * (k / 2) + c / 2])[c % 2] * scale
                }
            });
        }
    }
    out
}

#[test]
fn every_recipe_writes_the_seeded_model_bit_for_bit() {
    let kit = Kit::new();
    let mut schemes = BTreeMap::new();
    for (geometry, recipe) in pairs() {
        let what = format!("{}@{recipe}", geometry.name);
        let dir = write(&geometry, &recipe, 7, SHARD_BYTES);
        let (written, drawn) = (disk(dir.path()), seeded(&geometry, &recipe, 7));
        let mut read = written.geometry().clone();
        read.name.clone_from(&geometry.name);
        assert_eq!(read, geometry, "{what}");
        for linear in geometry.linears() {
            let (a, b) = (held(&kit, &written, &linear.module), held(&kit, &drawn, &linear.module));
            assert!(a == b, "{what}: {} {:?} {:?}", linear.module, a.verdict, b.verdict);
            *schemes.entry(format!("{:?} {:?}", a.verdict.scheme, a.verdict.act)).or_insert(0) += 1;
        }
        for param in geometry.params() {
            if param.name.strip_suffix(".weight").is_some_and(|module| geometry.linear(module).is_some()) {
                continue;
            }
            // Vectors are kept in f32 on a device.
            let (mut a, mut b) = (kit.tensor(DType::F32, &param.shape), kit.tensor(DType::F32, &param.shape));
            written.fill(&kit.cx(), &mut a, 0, param.shape[0], &param.name).unwrap();
            drawn.fill(&kit.cx(), &mut b, 0, param.shape[0], &param.name).unwrap();
            assert!(a.host::<u8>().unwrap() == b.host::<u8>().unwrap(), "{what}: {}", param.name);
        }
        for layer in 0..geometry.layers.len() {
            assert_eq!(written.kv_scales(layer).unwrap(), drawn.kv_scales(layer).unwrap(), "{what}: layer {layer}");
        }
    }
    // Every scheme with every input scheme that any producer writes.
    assert_eq!(schemes.len(), 1 + 1 + 1 + 2 + 4, "{schemes:?}");
}

#[test]
fn every_recipe_loads_back_to_the_logits_it_was_written_from() {
    let mut compared = 0;
    for (geometry, recipe) in pairs() {
        let what = format!("{}@{recipe}", geometry.name);
        let dir = write(&geometry, &recipe, 7, SHARD_BYTES);
        for numerics in [Numerics::F32, Numerics::BF16] {
            let load = |device: &Arc<Device>, source: Source| {
                Engine::load(device, source, options(numerics, 16, 1), &mut |_, _| {})
                    .unwrap_or_else(|e| panic!("{what}: {e}"))
            };
            let logits = |source: Source| {
                let mut engine = load(&Device::cpu_poisoned(DeviceSpec::host(), 1 << 28).unwrap(), source);
                for planned in [disk(dir.path()), seeded(&geometry, &recipe, 7)] {
                    let planned = load(&Device::plan(DeviceSpec::host(), 1 << 28), planned);
                    assert_eq!(planned.sizing(), engine.sizing(), "{what}: planned bytes");
                }
                let prompt = (0..23).map(|i| (i * 37 + 5) % geometry.decodable as u32).collect();
                all_logits(&mut engine, prompt)
            };
            let (read, drawn) = (logits(disk(dir.path())), logits(seeded(&geometry, &recipe, 7)));
            assert_eq!(read.len(), 23 * geometry.vocab);
            assert!(read.iter().zip(&drawn).all(|(a, b)| a.to_bits() == b.to_bits()), "{what} {numerics:?}");
            // A random head on a normed row gives logits near one, and an embedding of variance 1 as the head the root of
            // the width: were weights out of scale, these would not be.
            let head = if geometry.tied { geometry.hidden as f64 } else { 1.0 };
            let power = read.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / read.len() as f64 / head;
            assert!((0.05..20.0).contains(&power), "{what} {numerics:?}: mean square {power}");
            compared += read.len();
        }
    }
    assert!(compared > 1_000_000, "{compared}");
}

#[test]
fn every_recipe_s_files_are_safetensors_to_its_own_reader() {
    for (geometry, recipe) in pairs() {
        let dir = write(&geometry, &recipe, 1, 100_000);
        let index: serde_json::Value =
            serde_json::from_slice(&std::fs::read(dir.path().join("model.safetensors.index.json")).unwrap()).unwrap();
        let mut bytes = 0;
        let mut names = 0;
        for entry in std::fs::read_dir(dir.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|e| e == "safetensors") {
                let data = std::fs::read(&path).unwrap();
                let file = SafeTensors::deserialize(&data).unwrap_or_else(|e| panic!("{recipe}: {e}"));
                for (name, view) in file.tensors() {
                    assert_eq!(index["weight_map"][&name], path.file_name().unwrap().to_str().unwrap());
                    let aligned = view.data().as_ptr() as usize - data.as_ptr() as usize;
                    assert!(aligned.is_multiple_of(view.dtype().bitsize() / 8), "{name}");
                    bytes += view.data().len() as u64;
                    names += 1;
                }
            }
        }
        assert_eq!(index["metadata"]["total_size"], bytes);
        assert_eq!(index["weight_map"].as_object().unwrap().len(), names);
        let synth = Synth::new(&geometry, &recipe, 1, 100_000).unwrap();
        assert_eq!((synth.bytes(), synth.tensors()), (bytes, names));
        assert!(synth.shards() > 1);
    }
}

#[test]
fn the_split_into_files_changes_no_value_and_a_seed_changes_all() {
    let (geometry, recipe) = (wide("tiny-moe"), Recipe::parse("ornith-nvfp4-fp8").unwrap());
    let (one, many) = (write(&geometry, &recipe, 3, SHARD_BYTES), write(&geometry, &recipe, 3, 60_000));
    assert!(one.path().join("model.safetensors").exists() && !one.path().join("model.safetensors.index.json").exists());
    let kit = Kit::new();
    let (a, b, other) = (disk(one.path()), disk(many.path()), seeded(&geometry, &recipe, 4));
    for module in
        ["layers.0.mlp.experts.2.down_proj", "layers.3.self_attn.q_proj", "layers.1.mlp.shared_expert.up_proj"]
    {
        assert!(held(&kit, &a, module) == held(&kit, &b, module), "{module}");
        assert_ne!(held(&kit, &a, module).codes, held(&kit, &other, module).codes);
    }
}

#[test]
fn decoded_weights_have_the_variance_of_a_matrix() {
    let kit = Kit::new();
    for (geometry, recipe) in pairs() {
        let source = seeded(&geometry, &recipe, 11);
        for module in ["layers.3.self_attn.q_proj", "layers.0.linear_attn.in_proj_qkv", "layers.3.mlp.down_proj"] {
            let Some([n, k]) = geometry.linear(module) else { continue };
            let held = held(&kit, &source, module);
            if matches!(held.verdict.scheme, Scheme::Plain(_)) {
                continue;
            }
            let values = decoded(&held, [n, k]);
            let (mut sum, mut squares) = (0.0, 0.0);
            for v in &values {
                sum += f64::from(*v);
                squares += f64::from(*v).powi(2);
            }
            let count = values.len() as f64;
            let power = squares / count * k as f64;
            // The exponent gives a factor of two; a few scales' mean is anywhere in an octave.
            let [low, high] = match held.rows {
                Some(RowScale::Each(_)) => [0.45, 2.2],
                _ => [0.2, 3.6],
            };
            assert!((low..=high).contains(&power), "{}@{recipe}: {module}: {power} / K", geometry.name);
            assert!((sum / count).abs() < 5.0 * (squares / count / count).sqrt(), "{recipe} {module}: mean");
        }
    }
}

#[test]
fn both_producers_files_of_power_of_two_globals_decode_alike() {
    let geometry = wide("tiny-moe");
    let kit = Kit::new();
    let write = |name: &str| write(&geometry, &Recipe::parse(name).unwrap(), 5, SHARD_BYTES);
    let (ct, mo) = (write("nvfp4,globals=pow2"), write("modelopt-nvfp4-a16,globals=pow2"));
    let (ct, mo) = (disk(ct.path()), disk(mo.path()));
    let mut compared = 0;
    for linear in geometry.linears() {
        let (a, b) = (held(&kit, &ct, &linear.module), held(&kit, &mo, &linear.module));
        if matches!(a.verdict.scheme, Scheme::Plain(_)) {
            assert!(a == b);
            continue;
        }
        assert_eq!(
            (a.verdict.scheme, b.verdict.scheme),
            (Scheme::Nvfp4(Global::Divides), Scheme::Nvfp4(Global::Multiplies))
        );
        let size = [linear.rows, linear.cols];
        let (a, b) = (decoded(&a, size), decoded(&b, size));
        assert!(a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits()), "{}", linear.module);
        compared += a.len();
    }
    assert!(compared > 1_000_000 / 2, "{compared}");
}

#[test]
fn published_counts_hold() {
    let mut held = 0;
    for name in Recipe::names() {
        let recipe = Recipe::parse(name).unwrap();
        for published in recipe.published() {
            let geometry = Geometry::builtin(&published.geometry).unwrap();
            let dir = tempfile::tempdir().unwrap();
            Synth::new(&geometry, &recipe, 0, SHARD_BYTES).unwrap().write(dir.path(), true, &mut |_| {}).unwrap();
            let found = Checkpoint::survey(dir.path()).unwrap();
            assert!(found.faults.is_empty(), "{:?}", found.faults);
            let count = |of: fn(&Scheme) -> bool| found.modules.iter().filter(|m| of(&m.scheme)).count();
            assert_eq!(count(|s| matches!(s, Scheme::Nvfp4(_))), published.nvfp4, "{name}");
            assert_eq!(count(|s| matches!(s, Scheme::Fp8(_))), published.fp8, "{name}");
            assert_eq!(found.kv_layers.len(), published.kv_layers, "{name}");
            let config = std::fs::read_to_string(dir.path().join("config.json")).unwrap();
            let config: serde_json::Value = serde_json::from_str(&config).unwrap();
            let quantisation = &config["quantization_config"];
            if let Some(entries) = published.ignore {
                assert_eq!(quantisation["ignore"].as_array().unwrap().len(), entries, "{name}");
            }
            if let Some(entries) = published.quantized_layers {
                assert_eq!(quantisation["quantized_layers"].as_object().unwrap().len(), entries, "{name}");
            }
            held += 1;
        }
    }
    assert!(held >= 2);
}

#[test]
fn a_survey_without_files_is_that_of_the_files() {
    for (geometry, recipe) in pairs() {
        let dir = tempfile::tempdir().unwrap();
        Synth::new(&geometry, &recipe, 0, SHARD_BYTES).unwrap().write(dir.path(), true, &mut |_| {}).unwrap();
        let (a, b) = (Checkpoint::survey(dir.path()).unwrap(), survey(&geometry, &recipe).unwrap());
        let what = format!("{}@{recipe}", geometry.name);
        assert!(a.faults.is_empty(), "{what}: {:?}", a.faults);
        assert_eq!(a.modules, b.modules, "{what}");
        assert_eq!((a.bytes, a.kv_layers), (b.bytes, b.kv_layers), "{what}");
    }
}

#[test]
fn a_head_may_be_asked_for_as_its_dequantised_twin() {
    let model = |text: &str| match ModelRef::parse(text).unwrap() {
        ModelRef::Builtin { geometry, recipe } => survey(&geometry, &recipe).unwrap(),
        ModelRef::Folder(_) => panic!("{text}"),
    };
    let head = |text: &str| model(text).modules.into_iter().find(|m| m.name == "lm_head").unwrap();
    let native = head("qwen3.6-35b-a3b:layers=4@unsloth-nvfp4-fast");
    assert_eq!((native.rows, native.cols), (248_320, 2048));
    assert_eq!((native.scheme, native.act), (Scheme::Fp8(Grain::Channel), ActScheme::Fp8Token));
    assert_eq!(native.bytes, 248_320 * 2048 + 248_320 * 2);
    let twin = head("qwen3.6-35b-a3b:layers=4@unsloth-nvfp4-fast,head=bf16");
    assert_eq!((twin.scheme, twin.bytes), (Scheme::Plain(DType::Bf16), 248_320 * 2048 * 2));
    // Its folder says so too, though the group's pattern still names it.
    let (geometry, recipe) = (wide("tiny-moe"), Recipe::parse("unsloth-nvfp4-fast,head=bf16").unwrap());
    let dir = write(&geometry, &recipe, 0, SHARD_BYTES);
    assert_eq!(disk(dir.path()).verdict("lm_head").unwrap().scheme, Scheme::Plain(DType::Bf16));
}

#[test]
fn a_folder_with_anything_in_it_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("notes.txt"), "mine").unwrap();
    let synth = Synth::new(&wide("tiny"), &Recipe::default(), 0, SHARD_BYTES).unwrap();
    let error = synth.write(dir.path(), false, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("1 entries") && error.contains("empty"), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    // One that is not there is made, with the folders above it.
    synth.write(&dir.path().join("a/b"), true, &mut |_| {}).unwrap();
    Checkpoint::open(&dir.path().join("a/b")).unwrap();
}

#[test]
fn a_file_of_holes_holds_its_scalars_and_takes_no_room() {
    use std::os::unix::fs::MetadataExt;

    let (geometry, recipe) = (Geometry::builtin("qwen3.8-27b").unwrap(), Recipe::parse("nvidia-nvfp4").unwrap());
    let dir = tempfile::tempdir().unwrap();
    let synth = Synth::new(&geometry, &recipe, 9, SHARD_BYTES).unwrap();
    let mut done = 0;
    synth.write(dir.path(), true, &mut |bytes| done = bytes).unwrap();
    assert_eq!(done, synth.bytes());
    let (mut length, mut blocks) = (0, 0);
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let meta = entry.unwrap().metadata().unwrap();
        length += meta.len();
        blocks += meta.blocks() * 512;
    }
    assert!(length > synth.bytes() && blocks < 32 << 20, "{length} bytes in {blocks}");
    let (written, drawn) = (disk(dir.path()), seeded(&geometry, &recipe, 9));
    for module in ["layers.0.linear_attn.in_proj_z", "layers.63.mlp.down_proj", "lm_head"] {
        assert_eq!(written.verdict(module).unwrap(), drawn.verdict(module).unwrap());
        assert_eq!(written.row_scale(module).unwrap(), drawn.row_scale(module).unwrap());
    }
    assert_eq!(written.kv_scales(3).unwrap(), drawn.kv_scales(3).unwrap());
}
