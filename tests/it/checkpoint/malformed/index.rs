//! model.safetensors.index.json and the files it names.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::{Value, json};

use super::super::maker::{Maker, Tensor, safetensors};
use super::{Base, Case, Kind, rewrite};

const INDEX: &str = "model.safetensors.index.json";
const FIRST: &str = "model-00001-of-00003.safetensors";
const SECOND: &str = "model-00002-of-00003.safetensors";
const EMBED: &str = "model.embed_tokens.weight";

fn text(name: &str, says: &[&str], text: impl Into<Vec<u8>>) -> Case {
    let text = text.into();
    let says: Vec<&str> = says.iter().copied().chain([INDEX]).collect();
    Case::new(name, Base::Sharded, Kind::Checkpoint, &says).bend(move |dir| fs::write(dir.join(INDEX), &text).unwrap())
}

fn change(dir: &Path, f: impl FnOnce(&mut Value)) {
    rewrite(dir, INDEX, |bytes| {
        let mut index: Value = serde_json::from_slice(&bytes).unwrap();
        f(&mut index);
        index.to_string().into_bytes()
    });
}

fn edit(name: impl Into<String>, says: &[&str], f: impl Fn(&mut Value) + 'static) -> Case {
    Case::new(name, Base::Sharded, Kind::Checkpoint, says).bend(move |dir| change(dir, &f))
}

/// The shards as they are, and something done to the folder.
fn folder(name: &str, want: Kind, says: &[&str], f: impl Fn(&Path) + 'static) -> Case {
    Case::new(name, Base::Sharded, want, says).bend(f)
}

fn one(name: &str, bytes: usize) -> Vec<u8> {
    let shape = vec![bytes as u64];
    safetensors(&[Tensor { name: name.into(), dtype: "U8".into(), shape, bytes: vec![0; bytes] }])
}

pub(super) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    texts(&mut all);
    names(&mut all);
    files(&mut all);
    disagreements(&mut all);
    all
}

fn texts(all: &mut Vec<Case>) {
    all.push(text("empty", &["cut short"], ""));
    all.push(text("not JSON", &["JSON"], "weight_map"));
    all.push(text("a list", &["JSON"], "[]"));
    all.push(text("no weight_map", &["no weight_map"], "{\"metadata\": {}}"));
    all.push(text("an empty weight_map", &["weight_map is empty"], "{\"weight_map\": {}}"));
    for map in ["[]", "null", "\"model.safetensors\"", "7"] {
        all.push(text(&format!("weight_map = {map}"), &["weight_map"], format!("{{\"weight_map\": {map}}}")));
    }
    all.push(text("weight_map twice", &["weight_map stands twice"], "{\"weight_map\": {}, \"weight_map\": {}}"));
    let twice = format!("{{\"weight_map\": {{\"{EMBED}\": \"{FIRST}\", \"{EMBED}\": \"{FIRST}\"}}}}");
    all.push(text("a tensor twice", &[EMBED, "twice"], twice));
    all.push(text("not UTF-8", &["UTF-8"], b"{\"weight_map\": \"\xc3\x28\"}".to_vec()));
    let deep = |open: &str| format!("{{\"metadata\": {}", open.repeat(100_000));
    all.push(text("deep lists", &["nested", "32"], deep("[")));
    all.push(text("deep objects", &["nested", "32"], deep("{\"a\":")));
    all.push(text("cut", &["cut short"], format!("{{\"weight_map\": {{\"{EMBED}\": \"{FIRST}\"")));
    all.push(text("NaN", &["JSON"], "{\"metadata\": {\"total_size\": NaN}, \"weight_map\": {}}"));
    for (shown, value) in [("7", json!(7)), ("null", json!(null)), ("a list", json!([FIRST]))] {
        all.push(edit(format!("a file that is {shown}"), &[INDEX, EMBED], move |i| {
            i["weight_map"][EMBED] = value.clone();
        }));
    }
}

fn names(all: &mut Vec<Case>) {
    for name in [
        "../model.safetensors",
        "../../etc/passwd",
        "/etc/passwd",
        "/dev/zero",
        "sub/model.safetensors",
        "..\\model.safetensors",
        ".hidden.safetensors",
        "..",
        ".",
        "a\u{0}.safetensors",
    ] {
        all.push(edit(format!("file {name:?}"), &[INDEX, EMBED, "plain name inside"], move |i| {
            i["weight_map"][EMBED] = json!(name);
        }));
    }
    for name in ["", "model.bin", "pytorch_model.pt", INDEX, "config.json", "model.safetensors "] {
        all.push(edit(format!("file {name:?}"), &[INDEX, EMBED, "must end in .safetensors"], move |i| {
            i["weight_map"][EMBED] = json!(name);
        }));
    }
    all.push(edit("a file name of 300 bytes", &["at most 255"], |i| {
        i["weight_map"][EMBED] = json!(format!("{}.safetensors", "m".repeat(300)));
    }));
    let many: Vec<String> = (0..=1 << 19).map(|n| format!("\"t{n}\":\"{FIRST}\"")).collect();
    let many = format!("{{\"weight_map\":{{{}}}}}", many.join(","));
    all.push(text("half a million tensors", &["more than 524288 tensors"], many));
    all.push(edit("5000 files", &["more than 4096 files"], |i| {
        for n in 0..5000 {
            i["weight_map"][format!("t{n}")] = json!(format!("model-{n}.safetensors"));
        }
    }));
}

fn files(all: &mut Vec<Case>) {
    use Kind::{Checkpoint, Io};
    all.push(edit("a file that is not there", &[INDEX, "model-9.safetensors", "not in the folder"], |i| {
        i["weight_map"][EMBED] = json!("model-9.safetensors");
    }));
    all.push(folder("a shard removed", Checkpoint, &[INDEX, FIRST], |d| fs::remove_file(d.join(FIRST)).unwrap()));
    all.push(folder("a shard that links to itself", Io, &[FIRST], |d| {
        fs::remove_file(d.join(FIRST)).unwrap();
        symlink(FIRST, d.join(FIRST)).unwrap();
    }));
    all.push(folder("two shards that link to each other", Io, &[FIRST], |d| {
        for (a, b) in [(FIRST, SECOND), (SECOND, FIRST)] {
            fs::remove_file(d.join(a)).unwrap();
            symlink(b, d.join(a)).unwrap();
        }
    }));
    all.push(folder("a shard that links to nothing", Io, &[FIRST], |d| {
        fs::remove_file(d.join(FIRST)).unwrap();
        symlink("../../blobs/0123", d.join(FIRST)).unwrap();
    }));
    all.push(folder("a shard that is a folder", Checkpoint, &[FIRST, "regular file"], |d| {
        fs::remove_file(d.join(FIRST)).unwrap();
        fs::create_dir(d.join(FIRST)).unwrap();
    }));
    all.push(folder("a shard that is a device", Checkpoint, &[FIRST, "regular file"], |d| {
        fs::remove_file(d.join(FIRST)).unwrap();
        symlink("/dev/zero", d.join(FIRST)).unwrap();
    }));
    all.push(folder("a shard that is a socket", Checkpoint, &[FIRST, "regular file"], |d| {
        fs::remove_file(d.join(FIRST)).unwrap();
        drop(std::os::unix::net::UnixListener::bind(d.join(FIRST)).unwrap());
    }));
    all.push(folder("a shard that is another", Checkpoint, &["is also in", FIRST, SECOND], |d| {
        fs::remove_file(d.join(SECOND)).unwrap();
        symlink(FIRST, d.join(SECOND)).unwrap();
    }));
    all.push(folder("the index links to itself", Io, &[INDEX], |d| {
        fs::remove_file(d.join(INDEX)).unwrap();
        symlink(INDEX, d.join(INDEX)).unwrap();
    }));
    all.push(folder("the index is a folder", Checkpoint, &[INDEX, "regular file"], |d| {
        fs::remove_file(d.join(INDEX)).unwrap();
        fs::create_dir(d.join(INDEX)).unwrap();
    }));
    all.push(folder("no index", Checkpoint, &["3 other .safetensors files", INDEX], |d| {
        fs::remove_file(d.join(INDEX)).unwrap();
    }));
    all.push(folder("no weights", Checkpoint, &["neither model.safetensors nor"], |d| {
        for entry in fs::read_dir(d).unwrap().map(|e| e.unwrap().path()) {
            if !entry.ends_with("config.json") {
                fs::remove_file(entry).unwrap();
            }
        }
    }));
    for cut in [0, 7, 100, 3000] {
        all.push(folder(&format!("a shard cut to {cut} bytes"), Checkpoint, &[SECOND], move |d| {
            rewrite(d, SECOND, |mut b| {
                b.truncate(cut);
                b
            });
        }));
    }
}

fn disagreements(all: &mut Vec<Case>) {
    let gone = |name: &'static str| move |i: &mut Value| drop(i["weight_map"].as_object_mut().unwrap().remove(name));
    all.push(edit("a tensor the index does not name", &[FIRST, EMBED, "does not name it"], gone(EMBED)));
    all.push(edit("a tensor said to be in another shard", &[FIRST, EMBED, SECOND], |i| {
        i["weight_map"][EMBED] = json!(SECOND);
    }));
    all.push(edit("a tensor no shard has", &[INDEX, "model.more", "does not have it"], |i| {
        i["weight_map"]["model.more"] = json!(FIRST);
    }));
    all.push(edit("a vision tensor no shard has", &[INDEX, "model.visual.more", "does not have it"], |i| {
        i["weight_map"]["model.visual.more"] = json!(FIRST);
    }));
    let says = ["model.safetensors", "is also in", "remove one"];
    all.push(folder("one whole file beside the shards", Kind::Checkpoint, &says, |d| {
        fs::write(d.join("model.safetensors"), safetensors(&Maker::dense().tensors)).unwrap();
    }));
    let says = ["model-extra.safetensors", "model.extra.weight", "the index does not name"];
    all.push(folder("a file beside with a tensor of its own", Kind::Checkpoint, &says, |d| {
        fs::write(d.join("model-extra.safetensors"), one("model.extra.weight", 8)).unwrap();
    }));
    let says = ["model_mtp.safetensors", "overlap"];
    all.push(folder("a file beside whose header lies", Kind::Checkpoint, &says, |d| {
        let header = r#"{"mtp.a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"mtp.b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
        fs::write(d.join("model_mtp.safetensors"), super::super::maker::raw(header, &[0; 4])).unwrap();
    }));
    let says = ["model_mtp.safetensors", "is also in", "mtp.fc.weight"];
    all.push(folder("a skipped tensor in two files", Kind::Checkpoint, &says, |d| {
        fs::write(d.join("model-mtp.safetensors"), one("mtp.fc.weight", 8)).unwrap();
        fs::write(d.join("model_mtp.safetensors"), one("mtp.fc.weight", 8)).unwrap();
    }));
    let unsplit = |name: &str, says: &[&str], tensor: &'static str| {
        Case::new(name, Base::Dense, Kind::Checkpoint, says)
            .bend(move |d| fs::write(d.join("model_mtp.safetensors"), one(tensor, 8)).unwrap())
    };
    all.push(unsplit("beside one file: the same tensor", &["is also in", "lm_head.weight"], "lm_head.weight"));
    all.push(unsplit("beside one file: a parameter", &["model.layers.4.x", "no index"], "model.layers.4.x"));
}
