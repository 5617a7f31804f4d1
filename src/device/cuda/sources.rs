//! The kernels' sources, part of the program; a folder given by `HIGHWATER_KERNELS` replaces them, for work on kernels
//! without building the program again.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Names a folder with the same files as `kernels/`.
pub const FOLDER_VARIABLE: &str = "HIGHWATER_KERNELS";

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../../kernels/", $name)))),*]
    };
}

/// Every file under `kernels/`, by its path there.
#[rustfmt::skip] // one file a line
pub const FILES: &[(&str, &str)] = files![
    "activation.cu",
    "attention.cu",
    "conv1d.cu",
    "fill.cu",
    "fp8_gemm.cu",
    "fp8_hopper.cu",
    "fp8_hopper_few.cu",
    "gdn_decode.cu",
    "gdn_prefill.cu",
    "kv_write.cu",
    "linear.cu",
    "moe.cu",
    "moe_decode.cu",
    "moe_gemm.cu",
    "moe_hopper.cu",
    "norm.cu",
    "nvfp4_gemm.cu",
    "nvfp4_hopper.cu",
    "quantise.cu",
    "rope.cu",
    "rows.cu",
    "sampler.cu",
    "stream.cu",
    "lib/attention.cuh",
    "lib/attention_decode.cuh",
    "lib/attention_plain.cuh",
    "lib/attention_prefill.cuh",
    "lib/base.cuh",
    "lib/e2m1.cuh",
    "lib/elementary.cuh",
    "lib/emulate.h",
    "lib/emulate_cuda.h",
    "lib/emulate_mma.h",
    "lib/experts.cuh",
    "lib/gates.cuh",
    "lib/gdn.cuh",
    "lib/gemm.cuh",
    "lib/hopper.cuh",
    "lib/logits.cuh",
    "lib/operand.cuh",
    "lib/philox.cuh",
    "lib/ptx.cuh",
    "lib/quantise.cuh",
    "lib/race.cuh",
    "lib/score.cuh",
    "lib/select.cuh",
    "lib/vector.cuh",
];

/// One kernel file with the headers that it and they include.
#[derive(Debug)]
pub struct Source {
    /// The file's stem.
    pub name: String,
    /// Its text.
    pub text: String,
    headers: Vec<(String, String)>,
}

impl Source {
    /// (path under `kernels/`, text) of every header.
    pub fn headers(&self) -> Vec<(&str, &str)> {
        self.headers.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect()
    }
}

/// `kernels/{name}.cu` and the headers.
pub fn kernel(name: &str) -> Result<Source> {
    let files = match std::env::var_os(FOLDER_VARIABLE) {
        Some(folder) => from_folder(&PathBuf::from(folder))?,
        None => FILES.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect(),
    };
    let file = format!("{name}.cu");
    let Some(text) = files.iter().find(|(path, _)| *path == file).map(|(_, text)| text.clone()) else {
        return Err(Error::Unsupported {
            what: format!("kernel file {file}"),
            supported: format!("the files are {:?}", files.iter().map(|(path, _)| path).collect::<Vec<_>>()),
        });
    };
    let headers = included(&text, files);
    Ok(Source { name: name.to_owned(), text, headers })
}

/// The files that `text` includes, and those that they include, whatever conditions stand around: an entry of the cache
/// depends on no other.
fn included(text: &str, files: Vec<(String, String)>) -> Vec<(String, String)> {
    let names = |text: &str| -> Vec<String> {
        let quoted = text.lines().filter_map(|line| {
            let rest = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?;
            Some(rest.trim_start().strip_prefix('"')?.split('"').next()?.to_owned())
        });
        quoted.collect()
    };
    let mut wanted = names(text);
    let mut at = 0;
    while at < wanted.len() {
        let found = files.iter().find(|(path, _)| *path == wanted[at]).map(|(_, text)| names(text));
        let new: Vec<String> = found.unwrap_or_default().into_iter().filter(|name| !wanted.contains(name)).collect();
        wanted.extend(new);
        at += 1;
    }
    files.into_iter().filter(|(path, _)| wanted.contains(path)).collect()
}

/// The `.cu`, `.cuh` and `.h` files of a folder and of its `lib`.
fn from_folder(folder: &Path) -> Result<Vec<(String, String)>> {
    let mut files = Vec::new();
    for part in ["", "lib/"] {
        let at = folder.join(part);
        for entry in std::fs::read_dir(&at).map_err(Error::io(&at))? {
            let path = entry.map_err(Error::io(&at))?.path();
            let extension = path.extension().and_then(|e| e.to_str()).unwrap_or("");
            if let (true, Some(name)) = (["cu", "cuh", "h"].contains(&extension), path.file_name()) {
                let text = std::fs::read_to_string(&path).map_err(Error::io(&path))?;
                files.push((format!("{part}{}", name.to_string_lossy()), text));
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_found_through_headers_and_no_others() {
        let file = |name: &str, text: &str| (name.to_owned(), text.to_owned());
        let files = vec![
            file("lib/a.cuh", "#include \"lib/b.cuh\"\n"),
            file("lib/b.cuh", "#ifdef X\n  # include  \"lib/c.cuh\" // why\n#endif\n#include \"lib/a.cuh\"\n"),
            file("lib/c.cuh", ""),
            file("lib/d.cuh", ""),
        ];
        let found = included("// #include \"lib/d.cuh\"\n#include \"lib/a.cuh\"\n#include \"none.h\"\n", files);
        assert_eq!(
            found.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
            ["lib/a.cuh", "lib/b.cuh", "lib/c.cuh"]
        );
        let source = kernel("stream").unwrap();
        assert!(source.headers().iter().any(|(name, _)| *name == "lib/base.cuh"));
    }
}
