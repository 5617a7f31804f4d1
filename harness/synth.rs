//! `synth`: a checkpoint with random weights, in the exact layout of a recipe.

use std::fmt::Write as _;

use highwater::checkpoint::synth::{SHARD_BYTES, Synth};
use highwater::checkpoint::{ModelRef, Recipe};
use highwater::error::{Error, mib};

use crate::cli::SynthArgs;
use crate::failure::Failure;
use crate::out::print;
use crate::progress::Progress;

/// `synth`.
pub(crate) fn synth(args: &SynthArgs) -> Result<(), Failure> {
    let (geometry, recipe) = match ModelRef::parse(&args.model)? {
        ModelRef::Builtin { geometry, recipe } => (geometry, recipe),
        ModelRef::Folder(folder) => {
            let what = format!("{} is a checkpoint's folder; give GEOMETRY[:layers=N]@RECIPE", folder.display());
            return Err(Error::Request { param: "MODEL", what }.into());
        }
    };
    let synth = Synth::new(&geometry, &recipe, args.seed, SHARD_BYTES)?;
    let bar = Progress::bytes(synth.bytes());
    bar.doing(&args.dir.display().to_string());
    let mut shown = 0;
    let written = synth.write(&args.dir, args.sparse, &mut |done| {
        bar.advance(done - shown);
        shown = done;
    });
    bar.finish();
    written?;
    print(&format!(
        "{}: {} tensors, {} B ({}) in {} file{}{}\n",
        args.dir.display(),
        synth.tensors(),
        synth.bytes(),
        mib(synth.bytes()),
        synth.shards(),
        if synth.shards() == 1 { "" } else { "s" },
        if args.sparse { ", as holes" } else { "" },
    ))?;
    Ok(())
}

/// Every recipe with what it reproduces, for the verb's help.
pub(crate) fn recipes_help() -> String {
    let mut text = String::from("Recipes:\n");
    for name in Recipe::names() {
        let Ok(recipe) = Recipe::parse(name) else { continue };
        let _ = writeln!(text, "  @{name}\n      {}", recipe.about());
        if let Some(assumed) = recipe.assumed() {
            let _ = writeln!(text, "      assumed: {assumed}");
        }
    }
    text.push_str(
        "Options, after a comma:\n  head=bf16      the head as its dequantised twin\n  \
         globals=pow2   NVFP4 globals are powers of two\n",
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_lists_every_recipe() {
        let help = recipes_help();
        for name in Recipe::names() {
            assert!(help.contains(&format!("@{name}\n")), "{name}");
        }
    }
}
