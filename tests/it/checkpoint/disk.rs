//! Valid checkpoints on disk: every layout reads the same bytes, and what is not read is named.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use highwater::checkpoint::{Checkpoint, Dtype, SkipRule, Skipped, header};
use highwater::error::{Error, Result};
use serde_json::{Value, json};

use super::maker::{Maker, nested, safetensors};

fn open(dir: &Path) -> Checkpoint {
    Checkpoint::open(dir).unwrap_or_else(|e| panic!("{e}"))
}

/// Every parameter's bytes by its canonical name.
fn contents(c: &Checkpoint) -> HashMap<String, Vec<u8>> {
    let read = |name: &str| {
        let entry = c.entry(name).unwrap_or_else(|| panic!("no {name}"));
        let mut out = vec![0; entry.bytes() as usize];
        c.read(name, 0..entry.rows(), &mut out).unwrap();
        out
    };
    c.geometry().params().into_iter().map(|p| (p.name.clone(), read(&p.name))).collect()
}

/// What the maker wrote, under canonical names; for a checkpoint whose experts are apart.
fn written(m: &Maker) -> HashMap<String, Vec<u8>> {
    let canonical = |n: &str| n.strip_prefix("model.").unwrap_or(n).to_string();
    m.tensors.iter().map(|t| (canonical(&t.name), t.bytes.clone())).collect()
}

#[test]
fn every_parameter_reads_as_it_was_written() {
    for maker in [Maker::dense(), Maker::moe(), Maker::tied()] {
        let dir = maker.write();
        let c = open(dir.path());
        assert_eq!(contents(&c), written(&maker));
        assert_eq!(c.bytes(), maker.tensors.iter().map(|t| t.bytes.len() as u64).sum::<u64>());
        assert!(c.skipped().is_empty());
        assert_eq!(c.files(), [dir.path().join("model.safetensors")]);
        for p in c.geometry().params() {
            let entry = c.entry(&p.name).unwrap();
            assert_eq!((&entry.shape, entry.dtype), (&p.shape, Dtype::Bf16));
        }
    }
}

#[test]
fn prefixes_do_not_matter() {
    for prefix in ["model.", "model.language_model.", "language_model.model."] {
        let mut maker = Maker::moe();
        let expected = written(&maker);
        maker.prefix(prefix);
        assert_eq!(contents(&open(maker.write().path())), expected, "{prefix}");
        maker.config = nested(&maker.config);
        let dir = maker.write_sharded(2);
        assert_eq!(contents(&open(dir.path())), expected, "{prefix}, nested, sharded");
    }
    let mut maker = Maker::dense();
    let expected = written(&maker);
    maker.tensor("lm_head.weight").name = "language_model.lm_head.weight".into();
    let dir = maker.write();
    let c = open(dir.path());
    assert_eq!(contents(&c), expected);
    assert_eq!(c.disk_name(c.entry("lm_head.weight").unwrap()), "language_model.lm_head.weight");
}

#[test]
fn fused_experts_are_row_slices_of_the_same_bytes() {
    let mut maker = Maker::moe();
    let apart = contents(&open(maker.write().path()));
    maker.fuse();
    let dir = maker.write_sharded(2);
    let c = open(dir.path());
    assert_eq!(contents(&c), apart);
    let name = "layers.2.mlp.experts.1.up_proj.weight";
    let entry = c.entry(name).unwrap();
    assert_eq!(
        (entry.shape.as_slice(), c.disk_name(entry)),
        ([8, 16].as_slice(), "model.layers.2.mlp.experts.gate_up_proj")
    );
    // Some rows in the middle of a slice.
    let mut rows = vec![0; 3 * entry.row_bytes()];
    c.read(name, 2..5, &mut rows).unwrap();
    assert_eq!(rows, apart[name][2 * 32..5 * 32]);
}

#[test]
fn any_number_of_shards_gives_the_same_bytes_and_splits_layers() {
    let maker = Maker::dense();
    let expected = written(&maker);
    for count in [1, 2, 3, 7, 56] {
        let dir = maker.write_sharded(count);
        let c = open(dir.path());
        assert_eq!(contents(&c), expected, "{count}");
        assert_eq!(c.files().len(), count);
        let of_layer = |l: usize| -> std::collections::HashSet<_> {
            let prefix = format!("layers.{l}.");
            let names = expected.keys().filter(|n| n.starts_with(&prefix));
            names.map(|n| c.file_of(c.entry(n).unwrap()).to_path_buf()).collect()
        };
        assert_eq!(of_layer(1).len(), count.min(14), "{count}");
    }
}

#[test]
fn f32_tensors_and_mixtures_are_taken_as_they_are() {
    let mut maker = Maker::dense();
    for name in ["model.layers.0.linear_attn.A_log", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"] {
        let t = maker.tensor(name);
        t.dtype = "F32".into();
        t.bytes = (0..t.bytes.len() * 2).map(|i| i as u8).collect();
    }
    let dir = maker.write();
    let c = open(dir.path());
    assert_eq!(contents(&c), written(&maker));
    assert_eq!(c.entry("norm.weight").unwrap().dtype, Dtype::F32);
    assert_eq!(c.entry("norm.weight").unwrap().row_bytes(), 4);
    assert_eq!(c.entry("layers.1.mlp.up_proj.weight").unwrap().dtype, Dtype::Bf16);
}

#[test]
fn every_dtype_of_the_format_has_the_reference_readers_size() {
    use safetensors::Dtype as D;
    let all = [
        D::BOOL,
        D::F4,
        D::F6_E2M3,
        D::F6_E3M2,
        D::U8,
        D::I8,
        D::F8_E5M2,
        D::F8_E4M3,
        D::F8_E8M0,
        D::F8_E4M3FNUZ,
        D::F8_E5M2FNUZ,
        D::I16,
        D::U16,
        D::F16,
        D::BF16,
        D::I32,
        D::U32,
        D::F32,
        D::C64,
        D::F64,
        D::I64,
        D::U64,
    ];
    for theirs in all {
        let name = serde_json::to_value(theirs).unwrap();
        let bytes = theirs.bitsize();
        let json = json!({"t": {"dtype": name, "shape": [8], "data_offsets": [0, bytes]}}).to_string();
        let file = super::maker::raw(&json, &vec![0; bytes]);
        let ours = &header::parse(Path::new("t"), &file, file.len() as u64).unwrap().tensors[0];
        assert_eq!((ours.dtype.name(), ours.dtype.bits()), (name.as_str().unwrap(), bytes as u64));
    }
}

#[test]
fn what_is_skipped_is_named_with_its_rule_and_bytes() {
    let mut maker = Maker::dense();
    maker.add("model.visual.patch_embed.proj.weight", "BF16", &[2, 3, 2, 2, 2], 96);
    maker.add("visual.blocks.0.attn.proj.bias", "F16", &[4], 8);
    maker.add("mtp.fc.weight", "F8_E4M3", &[4, 8], 32);
    maker.add("model.layers.3.self_attn.rotary_emb.inv_freq", "F32", &[1], 4);
    let dir = maker.write();
    let mut mtp = Maker::dense();
    mtp.tensors.clear();
    mtp.add("mtp.norm.weight", "BF16", &[16], 32);
    fs::write(dir.path().join("model_mtp.safetensors"), safetensors(&mtp.tensors)).unwrap();
    fs::write(dir.path().join("optimizer.safetensors"), b"anything").unwrap();
    let c = open(dir.path());
    let expected = [
        ("model.visual.patch_embed.proj.weight", SkipRule::Vision, 96),
        ("visual.blocks.0.attn.proj.bias", SkipRule::Vision, 8),
        ("mtp.fc.weight", SkipRule::Mtp, 32),
        ("model.layers.3.self_attn.rotary_emb.inv_freq", SkipRule::RotaryBuffer, 4),
        ("mtp.norm.weight", SkipRule::Mtp, 32),
        ("optimizer.safetensors", SkipRule::OtherFile, 8),
    ];
    assert_eq!(c.skipped(), expected.map(|(name, rule, bytes)| Skipped { name: name.into(), rule, bytes }));
    assert_eq!(contents(&c), written(&Maker::dense()));
    let rules = c.skipped().iter().map(|s| s.rule.to_string()).collect::<Vec<_>>();
    assert_eq!(rules, ["vision", "vision", "mtp", "rotary-buffer", "mtp", "other-file"]);
}

#[test]
fn skipped_tensors_may_stand_outside_the_index() {
    let dir = Maker::dense().write_sharded(2);
    let mut mtp = Maker::dense();
    mtp.tensors.clear();
    mtp.add("mtp.norm.weight", "BF16", &[16], 32);
    fs::write(dir.path().join("model-mtp-bf16.safetensors"), safetensors(&mtp.tensors)).unwrap();
    let c = open(dir.path());
    assert_eq!((c.skipped().len(), c.files().len()), (1, 3));
}

#[test]
fn tie_flags_that_disagree_are_settled_by_the_head_on_disk() {
    for (maker, has_head) in [(Maker::dense(), true), (Maker::tied(), false)] {
        for (outer, inner) in [(json!(true), json!(false)), (json!(false), json!(true)), (json!(null), json!(true))] {
            let mut maker = maker.clone();
            maker.config = nested(&maker.config);
            maker.config["tie_word_embeddings"] = outer;
            maker.config["text_config"]["tie_word_embeddings"] = inner;
            let dir = maker.write();
            let c = open(dir.path());
            assert_eq!((c.geometry().tied, c.entry("lm_head.weight").is_some()), (!has_head, has_head));
        }
    }
}

#[test]
fn reads_are_checked() {
    let dir = Maker::dense().write();
    let c = open(dir.path());
    let shape_error = |r: Result<()>, says: &str| match r {
        Err(Error::Shape { what, .. }) => assert!(what.contains(says), "{what}"),
        other => panic!("{other:?}"),
    };
    let name = "layers.0.mlp.up_proj.weight"; // [24, 16] bf16
    let mut row = [0; 32];
    shape_error(c.read("layers.9.mlp.up_proj.weight", 0..1, &mut row), "not a parameter");
    shape_error(c.read(name, 24..25, &mut row), "24..25 of 24");
    shape_error(c.read(name, 0..usize::MAX, &mut row), "of 24");
    #[allow(clippy::reversed_empty_ranges, reason = "the fault under test")]
    shape_error(c.read(name, 2..1, &mut row), "2..1 of 24");
    shape_error(c.read(name, 0..2, &mut row), "64 bytes, and there is room for 32");
    c.read(name, 24..24, &mut []).unwrap();
    c.read(name, 23..24, &mut row).unwrap();
    assert_eq!(row, written(&Maker::dense())[name][23 * 32..]);
}

#[test]
fn a_file_cut_short_after_it_was_opened_is_an_error() {
    let dir = Maker::dense().write();
    let c = open(dir.path());
    let file = dir.path().join("model.safetensors");
    let len = fs::metadata(&file).unwrap().len();
    fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(len - 1).unwrap();
    let mut head = vec![0; 40 * 32];
    let error = c.read("lm_head.weight", 0..40, &mut head).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Checkpoint { .. }), "{error:?}");
    assert!(
        text.contains("lm_head.weight") && text.contains("cut short") && text.contains(&(len - 1).to_string()),
        "{text}"
    );
    // What is before the cut still reads.
    c.read("lm_head.weight", 0..39, &mut head[..39 * 32]).unwrap();
}

#[test]
fn many_threads_may_read_at_once() {
    let maker = Maker::moe();
    let expected = written(&maker);
    let dir = maker.write_sharded(3);
    let c = open(dir.path());
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| assert_eq!(contents(&c), expected));
        }
    });
}

#[test]
fn the_header_hash_is_of_what_the_checkpoint_says_it_is() {
    let hash = |m: &Maker| open(m.write().path()).header_hash();
    let maker = Maker::dense();
    assert_eq!(hash(&maker), hash(&maker), "another folder, the same checkpoint");
    let mut data = maker.clone();
    data.tensor("model.norm.weight").bytes[0] ^= 1;
    assert_eq!(hash(&data), hash(&maker), "the data are not part of it");
    let mut config = maker.clone();
    config.config["rms_norm_eps"] = json!(1e-5);
    assert_ne!(hash(&config), hash(&maker));
    let mut order = maker.clone();
    order.tensors.reverse();
    assert_ne!(hash(&order), hash(&maker));
    assert_ne!(open(maker.write_sharded(2).path()).header_hash(), hash(&maker));
}

#[test]
fn tokens_come_from_the_folder() {
    let dir = Maker::dense().write();
    let put = |name: &str, v: Value| fs::write(dir.path().join(name), v.to_string()).unwrap();
    let now = || {
        let c = open(dir.path());
        (c.geometry().decodable, c.geometry().eos.clone())
    };
    assert_eq!(now(), (40, vec![3, 1]));
    put("generation_config.json", json!({"eos_token_id": [7, 2], "temperature": 0.6}));
    assert_eq!(now(), (40, vec![7, 2]));
    put(
        "tokenizer.json",
        json!({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 30}, "merges": [["a", "b"]]}}),
    );
    assert_eq!(now(), (31, vec![7, 2]));
    put(
        "tokenizer.json",
        json!({"model": {"vocab": {"a": 0, "b": 30}}, "added_tokens": [{"id": 33, "content": "<x>"}, {"id": 31}]}),
    );
    assert_eq!(now(), (34, vec![7, 2]));
    put(
        "tokenizer_config.json",
        json!({"added_tokens_decoder": {"36": {"content": "<y>"}, "35": {}}, "chat_template": "{{x}}"}),
    );
    assert_eq!(now(), (37, vec![7, 2]));
    put(
        "tokenizer.json",
        json!({"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": null}),
    );
    assert_eq!(now(), (37, vec![7, 2]));
    // Only the added tokens are known then, not how many others there are.
    fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    assert_eq!(now(), (40, vec![7, 2]));
    // A config that quantises nothing is no quantised checkpoint.
    put("hf_quant_config.json", json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": null}}));
    assert_eq!(now(), (40, vec![7, 2]));
}

#[test]
fn a_hugging_face_cache_folder_opens_through_its_links() {
    let maker = Maker::dense();
    let made = maker.write_sharded(2);
    let cache = tempfile::tempdir().unwrap();
    let model = cache.path().join("models--some--Model-1B");
    let snapshot = model.join("snapshots").join("0a1b2c");
    for d in ["blobs", "refs", "snapshots/0a1b2c"] {
        fs::create_dir_all(model.join(d)).unwrap();
    }
    fs::write(model.join("refs/main"), "0a1b2c").unwrap();
    for (i, entry) in fs::read_dir(made.path()).unwrap().enumerate() {
        let path = entry.unwrap().path();
        fs::rename(&path, model.join(format!("blobs/{i}"))).unwrap();
        symlink(format!("../../blobs/{i}"), snapshot.join(path.file_name().unwrap())).unwrap();
    }
    for dir in [&model, &snapshot] {
        let c = open(dir);
        assert_eq!(contents(&c), written(&maker));
        assert_eq!(c.geometry().name, "some/Model-1B");
    }
    for (text, says) in [
        ("../../../etc", "must be the name"),
        ("", "must be the name"),
        ("ffff", "no config.json"),
        ("a\nb", "must be the name"),
    ] {
        fs::write(model.join("refs/main"), text).unwrap();
        let error = Checkpoint::open(&model).unwrap_err();
        assert!(matches!(error, Error::Checkpoint { .. }) && error.to_string().contains(says), "{text:?}: {error}");
    }
}

#[test]
fn a_path_that_is_no_folder_is_an_error() {
    let dir = Maker::dense().write();
    assert!(matches!(Checkpoint::open(&dir.path().join("nothing")), Err(Error::Io { .. })));
    let error = Checkpoint::open(&dir.path().join("model.safetensors")).unwrap_err();
    assert!(error.to_string().contains("give the folder"), "{error}");
    let error = Checkpoint::open(Path::new("")).unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error:?}");
}
