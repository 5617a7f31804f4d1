//! model.safetensors with its length, its header or its end wrong.

use std::fs;

use serde_json::{Value, json};

use super::super::maker::{Maker, header, raw};
use super::{Base, Case, Kind, rewrite};

const FILE: &str = "model.safetensors";
/// A tensor in the middle of the file: [16, 24] bf16, 768 bytes.
const DOWN: &str = "model.layers.1.mlp.down_proj.weight";

fn file(name: impl Into<String>, says: &[&str], f: impl Fn(Vec<u8>) -> Vec<u8> + 'static + Clone) -> Case {
    let says: Vec<&str> = says.iter().copied().chain([FILE]).collect();
    Case::new(name, Base::Dense, Kind::Checkpoint, &says).bend(move |dir| rewrite(dir, FILE, f.clone()))
}

/// The header's JSON changed as a value, its length kept true, the data as they were.
fn edit(name: &str, says: &[&str], f: impl Fn(&mut Value) + 'static) -> Case {
    let says: Vec<&str> = says.iter().copied().chain([FILE]).collect();
    Case::new(name, Base::Dense, Kind::Checkpoint, &says).bend(move |dir| {
        let maker = Maker::dense();
        let mut h = header(&maker.tensors);
        f(&mut h);
        let data: Vec<u8> = maker.tensors.iter().flat_map(|t| t.bytes.clone()).collect();
        fs::write(dir.join(FILE), raw(&h.to_string(), &data)).unwrap();
    })
}

/// One field of one tensor's entry changed.
fn entry(field: &'static str, value: Value, says: &[&str]) -> Case {
    let says: Vec<&str> = says.iter().copied().chain([DOWN]).collect();
    edit(&format!("{field} = {value}"), &says, move |h| h[DOWN][field] = value.clone())
}

/// The header's JSON changed as text, its length kept true.
fn spelled(name: &str, says: &[&str], f: impl Fn(String) -> String + 'static) -> Case {
    let says: Vec<&str> = says.iter().copied().chain([FILE]).collect();
    Case::new(name, Base::Dense, Kind::Checkpoint, &says).bend(move |dir| {
        let maker = Maker::dense();
        let data: Vec<u8> = maker.tensors.iter().flat_map(|t| t.bytes.clone()).collect();
        fs::write(dir.join(FILE), raw(&f(header(&maker.tensors).to_string()), &data)).unwrap();
    })
}

pub(super) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    lengths(&mut all);
    entries(&mut all);
    places(&mut all);
    spellings(&mut all);
    all
}

fn lengths(all: &mut Vec<Case>) {
    let maker = Maker::dense();
    let json = header(&maker.tensors).to_string().len();
    let whole = super::super::maker::safetensors(&maker.tensors).len();
    let cuts = [
        0,
        1,
        4,
        7,
        8,
        9,
        10,
        64,
        json / 2,
        json,
        json + 7,
        json + 8,
        json + 9,
        json + 1000,
        whole / 2,
        whole - 4096,
        whole - 2,
        whole - 1,
    ];
    for cut in cuts {
        let size = if cut < 8 { format!("{cut} bytes") } else { String::new() };
        all.push(file(format!("cut to {cut} of {whole} bytes"), &[&size], move |mut b| {
            b.truncate(cut);
            b
        }));
    }
    for extra in [1, 2, 4096] {
        all.push(file(format!("{extra} bytes too long"), &["belong to nothing", &extra.to_string()], move |mut b| {
            b.resize(b.len() + extra, 0);
            b
        }));
    }
    let says = |len: u64| {
        if len > 100_000_000 { "at most 100000000" } else { "follow" }
    };
    for len in [0, 1, whole as u64 - 7, 100_000_000, 100_000_001, 1 << 40, 1 << 63, u64::MAX] {
        all.push(file(format!("header length {len}"), &[says(len), &len.to_string()], move |mut b| {
            b[..8].copy_from_slice(&len.to_le_bytes());
            b
        }));
    }
    for len in [2, 10, json as u64 - 1, json as u64 + 1, json as u64 + 8] {
        all.push(file(format!("header length {len} of {json}"), &["JSON"], move |mut b| {
            b[..8].copy_from_slice(&len.to_le_bytes());
            b
        }));
    }
    all.push(file("a length of the other byte order", &["at most 100000000"], |mut b| {
        b[..8].reverse();
        b
    }));
    all.push(file("zeros", &["follow"], |b| vec![0; b.len()]));
    all.push(file("an HTML page", &["at most 100000000"], |_| b"<!DOCTYPE html><html></html>".to_vec()));
    all.push(file("a git-lfs pointer", &["at most 100000000"], |_| {
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n".to_vec()
    }));
    all.push(file("a zip archive", &["at most 100000000"], |mut b| {
        b[..8].copy_from_slice(b"PK\x03\x04\x14\x00\x08\x08");
        b
    }));
}

fn entries(all: &mut Vec<Case>) {
    for dtype in ["BF17", "bf16", "", "float32", "I4", "\u{0}"] {
        all.push(entry("dtype", json!(dtype), &["unknown dtype"]));
    }
    for v in [json!(7), json!(null), json!(["BF16"])] {
        all.push(entry("dtype", v, &["invalid type"]));
    }
    for dtype in ["F32", "F64", "U8", "F8_E4M3", "F4", "C64"] {
        all.push(entry("dtype", json!(dtype), &[dtype, "[16, 24]", "data_offsets"]));
    }
    for v in [json!([16, 25]), json!([16]), json!([]), json!([0, 24]), json!([16, 24, 2]), json!([1u64 << 40, 24])] {
        all.push(entry("shape", v, &["BF16", "bytes", "data_offsets"]));
    }
    for v in [json!([u64::MAX, 24]), json!([1u64 << 32, 1u64 << 32]), json!([1u64 << 60, 1])] {
        all.push(entry("shape", v, &["overflows"]));
    }
    for v in
        [json!([16, -24]), json!([16, 24.0]), json!([16, "24"]), json!([16, null]), json!([[16, 24]]), json!("16x24")]
    {
        all.push(entry("shape", v, &["invalid"]));
    }
    all.push(entry("shape", json!(vec![2; 9]), &["8 dimensions"]));
    all.push(entry("shape", json!(vec![1; 100_000]), &["8 dimensions"]));
    for v in [json!([0]), json!([]), json!(0), json!("0-10"), json!([0.0, 768.0]), json!([-1, 767]), json!([null, 1])] {
        all.push(entry("data_offsets", v, &["invalid"]));
    }
    all.push(entry("data_offsets", json!([0, 1, 2]), &["trailing"]));
    for field in ["dtype", "shape", "data_offsets"] {
        all.push(edit(&format!("no {field}"), &[DOWN, "missing field", field], move |h| {
            h[DOWN].as_object_mut().unwrap().remove(field);
        }));
    }
    all.push(edit("an unknown field", &[DOWN, "unknown field", "strides"], |h| h[DOWN]["strides"] = json!([24, 1])));
    for v in [json!(null), json!([]), json!("x"), json!(1), json!({})] {
        all.push(edit(&format!("an entry that is {v}"), &[DOWN], move |h| h[DOWN] = v.clone()));
    }
    for v in [json!([]), json!("pt"), json!({"format": 1}), json!({"a": {"b": "c"}}), json!(null)] {
        all.push(edit(&format!("metadata {v}"), &["__metadata__"], move |h| h["__metadata__"] = v.clone()));
    }
    let add = |name: String| {
        move |h: &mut Value| {
            h[name.as_str()] = json!({"dtype": "U8", "shape": [0], "data_offsets": [0, 0]});
        }
    };
    all.push(edit("an empty name", &["name of 0 bytes"], add(String::new())));
    all.push(edit("a name of 600 bytes", &["name of 600 bytes", "512"], add("n".repeat(600))));
}

fn places(all: &mut Vec<Case>) {
    let maker = Maker::dense();
    let h = header(&maker.tensors);
    let [begin, end] = [0, 1].map(|i| h[DOWN]["data_offsets"][i].as_u64().unwrap());
    let at = |begin: u64, end: u64| json!([begin, end]);
    let whole = maker.tensors.iter().map(|t| t.bytes.len() as u64).sum::<u64>();
    all.push(entry("data_offsets", at(begin, end + 2), &["are not", "768 bytes"]));
    all.push(entry("data_offsets", at(begin, end - 2), &["are not", "768 bytes"]));
    all.push(entry("data_offsets", at(end, begin), &["are not", "768 bytes"]));
    all.push(entry("data_offsets", at(begin - 2, end - 2), &["overlap"]));
    all.push(entry("data_offsets", at(0, 768), &["overlap"]));
    all.push(entry("data_offsets", at(u64::MAX - 768, u64::MAX), &["overflow"]));
    let elsewhere = |name: &str, offset: u64, says: &[&str]| {
        edit(name, says, move |h| h[DOWN]["data_offsets"] = json!([offset, offset + 768]))
    };
    all.push(elsewhere("beyond the end", whole + 4096, &["gap"]));
    all.push(elsewhere("after all others", whole, &["gap"]));
    all.push(elsewhere("2 bytes late", begin + 2, &["gap", DOWN]));
    all.push(edit("two tensors on the same bytes", &["overlap"], |h| {
        h[DOWN]["data_offsets"] = h["model.layers.0.mlp.down_proj.weight"]["data_offsets"].clone();
    }));
    all.push(edit("one tensor left out", &["gap"], |h| drop(h.as_object_mut().unwrap().remove(DOWN))));
    all.push(edit("the first left out", &["gap"], |h| {
        drop(h.as_object_mut().unwrap().remove("model.embed_tokens.weight"));
    }));
    all.push(edit("the last left out", &["belong to nothing"], |h| {
        drop(h.as_object_mut().unwrap().remove("lm_head.weight"));
    }));
    all.push(edit("a tensor more, beyond the end", &["cut short", "\"more\""], move |h| {
        h["more"] = json!({"dtype": "U8", "shape": [1 << 20], "data_offsets": [whole, whole + (1 << 20)]});
    }));
    all.push(edit("a tensor of the whole file more", &["overlap"], move |h| {
        h["all"] = json!({"dtype": "U8", "shape": [whole], "data_offsets": [0, whole]});
    }));
    all.push(edit("half a byte", &["\"nibbles\"", "whole number of bytes"], move |h| {
        h["nibbles"] = json!({"dtype": "F4", "shape": [3], "data_offsets": [whole, whole + 1]});
    }));
    all.push(edit("no tensor at all", &["belong to nothing"], |h| *h = json!({})));
}

fn spellings(all: &mut Vec<Case>) {
    all.push(spelled("a name twice", &["lm_head.weight", "twice"], |h| {
        h.replacen('{', r#"{"lm_head.weight":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"#, 1)
    }));
    all.push(spelled("metadata twice", &["__metadata__", "twice"], |h| h.replacen('{', r#"{"__metadata__":{},"#, 1)));
    all.push(spelled("a field twice", &["duplicate field"], |h| {
        h.replacen(r#""dtype":"BF16""#, r#""dtype":"BF16","dtype":"F32""#, 1)
    }));
    for number in ["NaN", "Infinity", "-1", "1e3", "0x10", "99999999999999999999999", "1.0", "01"] {
        all.push(spelled(&format!("an offset of {number}"), &["line 1"], move |h| {
            h.replacen("\"data_offsets\":[0,", &format!("\"data_offsets\":[{number},"), 1)
        }));
    }
    all.push(spelled("a list for an object", &["begin with '{'"], |h| format!("[{h}]")));
    all.push(spelled("white space before", &["begin with '{'"], |h| format!(" {h}")));
    all.push(spelled("a byte order mark", &["begin with '{'"], |h| format!("\u{feff}{h}")));
    all.push(spelled("something after", &["trailing"], |h| format!("{h} {{}}")));
    all.push(spelled("zeros after", &["trailing"], |h| format!("{h}\0\0\0\0")));
    all.push(spelled("a bracket lost", &["cut short"], |mut h| {
        h.truncate(h.len() - 1);
        h
    }));
    all.push(spelled("deep metadata", &["nested", "32"], |h| {
        h.replacen("{\"format\":\"pt\"}", &format!("{}{}", "{\"a\":".repeat(50_000), "1"), 1)
    }));
    all.push(spelled("a deep entry", &["nested", "32"], |h| {
        h.replacen("[40,16]", &format!("{}{}", "[".repeat(200_000), "]".repeat(200_000)), 1)
    }));
    let bytes = Case::new("a header that is not UTF-8", Base::Dense, Kind::Checkpoint, &["UTF-8", FILE]);
    all.push(bytes.bend(|dir| {
        rewrite(dir, FILE, |mut b| {
            b[12] = 0xff;
            b
        });
    }));
}
