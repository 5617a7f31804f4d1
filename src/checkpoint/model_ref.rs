//! What a user may write where a model is asked for.
//!
//! May live here: the syntax of a model's name. May not: opening anything.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::builtin::is_known;
use super::folder;
use super::geometry::Geometry;
use super::json::shown;
use super::recipe::Recipe;
use crate::error::{Error, Result};

/// A model: a checkpoint on disk, or a geometry with random weights.
#[derive(Debug, Clone, PartialEq)]
pub enum ModelRef {
    /// The folder that holds config.json.
    Folder(PathBuf),
    /// A built-in geometry.
    Builtin {
        /// Its dimensions.
        geometry: Box<Geometry>,
        /// How its weights are stored.
        recipe: Recipe,
    },
}

impl ModelRef {
    /// Parses a folder's path, or `geometry[:layers=N][@recipe[,option=value]…]`, as [`Recipe::parse`] reads a recipe. A
    /// built-in name wins over a folder of that name; write `./tiny` for the folder.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a name or recipe that does not exist, with those that do; [`Error::Config`] for a
    /// wrong option; [`Error::Io`] or [`Error::Checkpoint`] for a path that is no checkpoint's folder.
    pub fn parse(text: &str) -> Result<ModelRef> {
        let name = text.split([':', '@']).next().unwrap_or_default();
        if is_known(name) {
            let (spec, recipe) = text.split_once('@').map_or((text, None), |(s, r)| (s, Some(r)));
            let recipe = recipe.map_or_else(|| Ok(Recipe::default()), Recipe::parse)?;
            let geometry = Geometry::builtin(spec)?;
            recipe.check(&geometry)?;
            return Ok(ModelRef::Builtin { geometry: geometry.into(), recipe });
        }
        let path = Path::new(text);
        if text.contains('/') || text.starts_with('.') || (!text.is_empty() && path.exists()) {
            return folder::resolve(path).map(ModelRef::Folder);
        }
        match Geometry::builtin(name) {
            Err(Error::Unsupported { supported, .. }) => Err(Error::Unsupported {
                what: format!("model \"{}\", which is no folder here either,", shown(text)),
                supported: format!("{supported}; or give a checkpoint's folder"),
            }),
            Err(other) => Err(other),
            Ok(geometry) => Ok(ModelRef::Builtin { geometry: geometry.into(), recipe: Recipe::default() }),
        }
    }
}

impl FromStr for ModelRef {
    type Err = Error;
    fn from_str(text: &str) -> Result<ModelRef> {
        ModelRef::parse(text)
    }
}
