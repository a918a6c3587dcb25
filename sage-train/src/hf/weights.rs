//! The files of weights in a folder in Hugging Face's format.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

use candle_sage::{Error, Result};
use serde::Deserialize;

use super::WEIGHTS;
use super::config::unusable;
use crate::during;
use crate::model::{Kind, LlamaConfig, StateFile};

const INDEX: &str = "model.safetensors.index.json";
/// The beginning of the names of all weights except the output matrix.
const PREFIX: &str = "model.";

/// Opens the files of weights of a model. A base model (`LlamaModel`) has no output matrix. The names of its weights
/// lack [`PREFIX`], which this function adds.
///
/// # Errors
/// When a file is missing or damaged.
pub(super) fn open(folder: &Path, config: &LlamaConfig) -> Result<Vec<StateFile>> {
    let opened =
        files(folder)?.iter().map(|name| StateFile::open(&folder.join(name))).collect::<Result<Vec<_>>>()?;
    let specs = config.parameter_specs();
    let embedding = specs.iter().find(|spec| spec.kind == Kind::Embedding).map_or("", |spec| &spec.name);
    let has = |name: &str| opened.iter().any(|file| file.contains(name));
    Ok(match embedding.strip_prefix(PREFIX) {
        Some(of_base) if has(of_base) && !has(embedding) => {
            opened.into_iter().map(|file| file.with_prefix(PREFIX)).collect()
        }
        _ => opened,
    })
}

/// The name of the single file of weights, or the names in the index.
fn files(folder: &Path) -> Result<BTreeSet<String>> {
    let index = folder.join(INDEX);
    if folder.join(WEIGHTS).exists() {
        return Ok([WEIGHTS.to_owned()].into());
    }
    if !index.exists() {
        return Err(Error::new(format!("{} has no weights that can be read", folder.display()))
            .got(format!("neither {WEIGHTS} nor {INDEX}"))
            .allowed("weights in safetensors files with these names")
            .hint("transformers converts other files: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"));
    }
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let failed = || format!("cannot use {}", index.display());
    let text = std::fs::read(&index).map_err(during(failed()))?;
    let Index { weight_map } = serde_json::from_slice(&text).map_err(during(failed()))?;
    let files: BTreeSet<String> = weight_map.into_values().collect();
    let plain = |name: &String| {
        let mut parts = Path::new(name).components();
        matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) && !name.contains('\\')
    };
    match files.iter().find(|name| !plain(name)) {
        Some(name) => Err(unusable(folder, format!("{INDEX} names `{name}`"), "files of the same folder")),
        None if files.is_empty() => Err(unusable(folder, format!("{INDEX} names no file"), "at least one")),
        None => Ok(files),
    }
}
