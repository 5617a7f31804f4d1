//! What may be written where a model is asked for.

use highwater::checkpoint::{Geometry, ModelRef, Recipe};
use highwater::error::Error;

use super::maker::Maker;

fn builtin(text: &str) -> (Geometry, Recipe) {
    match ModelRef::parse(text).unwrap_or_else(|e| panic!("{text}: {e}")) {
        ModelRef::Builtin { geometry, recipe } => (*geometry, recipe),
        other @ ModelRef::Folder(_) => panic!("{other:?}"),
    }
}

#[test]
fn a_geometry_with_options_and_recipe() {
    for text in ["tiny-moe", "tiny-moe@bf16"] {
        assert_eq!(builtin(text), (Geometry::builtin("tiny-moe").unwrap(), Recipe::default()));
    }
    for text in ["qwen3.6-27b:layers=8", "qwen3.6-27b:layers=8@bf16"] {
        assert_eq!(builtin(text).0, Geometry::builtin("qwen3.6-27b:layers=8").unwrap());
    }
    let twin = builtin("qwen3.6-35b-a3b:layers=8@unsloth-nvfp4-fast,head=bf16").1;
    assert_eq!((twin.name(), twin.to_string().as_str()), ("unsloth-nvfp4-fast", "unsloth-nvfp4-fast,head=bf16"));
    assert_eq!("tiny".parse::<ModelRef>().unwrap(), ModelRef::parse("tiny@bf16").unwrap());
}

#[test]
fn a_folder_and_a_cache_folder() {
    let dir = Maker::dense().write();
    let path = dir.path().to_str().unwrap();
    assert_eq!(ModelRef::parse(path).unwrap(), ModelRef::Folder(dir.path().to_path_buf()));
    let model = dir.path().join("models--a--b");
    let snapshot = model.join("snapshots/abc");
    std::fs::create_dir_all(model.join("refs")).unwrap();
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::write(model.join("refs/main"), "abc\n").unwrap();
    Maker::dense().write_config(&snapshot);
    for text in [&model, &snapshot] {
        assert_eq!(ModelRef::parse(text.to_str().unwrap()).unwrap(), ModelRef::Folder(snapshot.clone()));
    }
}

#[test]
fn what_is_neither_says_what_there_is() {
    for (text, says) in [
        ("tiny@fp8", "recipe \"@fp8\" is not supported; recipes are bf16, fp8-tensor, "),
        ("qwen3.6-27b@unsloth-nvfp4-fast", "is about MoE models"),
        (
            "tiny-moe@unsloth-nvfp4",
            "on tiny-moe, a MoE model, is not supported; what is known of it is about dense models",
        ),
        ("tiny@", "recipe \"@\""),
        ("tiny@BF16", "recipes are bf16"),
        ("tiny@bf16@bf16", "@bf16@bf16"),
        ("qwen3.6-27", "did you mean qwen3.6-27b?"),
        ("qwen3.6-27:layers=2@bf16", "did you mean qwen3.6-27b?"),
        ("qwen3.5-397b-a17b", "could be verified"),
        ("qwen3.5-122b-a10b:layers=1", "could be verified"),
        ("", "built in are tiny, tiny-moe"),
        ("@bf16", "built in are tiny, tiny-moe"),
    ] {
        let error = ModelRef::parse(text).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{text}: {error:?}");
        assert!(error.to_string().contains(says), "{text}: {error}");
    }
    assert!(matches!(ModelRef::parse("tiny:layers=9"), Err(Error::Config { .. })));
    assert!(matches!(ModelRef::parse("tiny@nvfp4,head=fp8"), Err(Error::Config { .. })));
    assert!(matches!(ModelRef::parse("no/such/folder"), Err(Error::Io { .. })));
    assert!(matches!(ModelRef::parse("./tiny"), Err(Error::Io { .. })));
}
