//! Weights and moments at one moment, and the files that they become.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;

use candle_core::{DType, Result, Tensor};
use safetensors::View;
use sha2::{Digest, Sha256};

use super::config::ParameterSpec;
use super::pieces::{Layout, overlap};
use crate::hex;

/// What the rows of the state are called in a checkpoint, before the parameter's name.
pub(super) const ROWS: [&str; 3] = ["", "adamw.mean/", "adamw.square/"];

/// Of parameters that a file has in part, by name: the first element, and how many.
pub type Parts = BTreeMap<String, [u64; 2]>;

/// Weights, and moments if they were asked for, at one moment: of all parameters, or of those parts that a rank owns.
#[derive(Debug)]
pub struct Snapshot {
    pub(super) specs: Vec<ParameterSpec>,
    pub(super) layout: Layout,
    /// The first element, and (rows, elements).
    pub(super) held: Vec<(usize, Tensor)>,
}

impl Snapshot {
    /// Writes all of it as safetensors, in f32: the weights under their own names. Says what is there in part.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<Parts> {
        self.save_as(path, DType::F32)
    }

    /// As [`Snapshot::save`], in another type.
    ///
    /// # Errors
    /// As [`Snapshot::save`].
    pub fn save_as(&self, path: &Path, dtype: DType) -> Result<Parts> {
        let (mut tensors, mut parts) = (HashMap::new(), Parts::new());
        for (first, held) in &self.held {
            let (rows, len) = held.dims2()?;
            for spec in &self.specs {
                let at = self.layout.places[&spec.name].1;
                let whole = at..at + spec.len() as usize;
                let Some(here) = overlap(&whole, &(*first..first + len)) else { continue };
                let dims = match here == whole {
                    true => spec.dims.clone(),
                    false => {
                        let Range { start, end } = here;
                        parts.insert(spec.name.clone(), [(start - at) as u64, (end - start) as u64]);
                        vec![end - start]
                    }
                };
                for (row, prefix) in ROWS.iter().enumerate().take(rows) {
                    let tensor = held.get(row)?.narrow(0, here.start - first, here.len())?;
                    let tensor = tensor.reshape(dims.as_slice())?.to_dtype(dtype)?;
                    tensors.insert(format!("{prefix}{}", spec.name), tensor);
                }
            }
        }
        // The library makes files that only their owner may read; these are as open as any other.
        let permissions = std::fs::File::create(path)?.metadata()?.permissions();
        // The state of a checkpoint has a hash of its own.
        let weights = self.held.iter().all(|(_, held)| held.dims()[0] == 1);
        let about = weights.then(|| {
            let hash = hash(tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.data())));
            in_order([("format".to_owned(), "pt".to_owned()), (HASH.to_owned(), hash)])
        });
        safetensors::serialize_to_file(&tensors, about, path)?;
        std::fs::set_permissions(path, permissions)?;
        Ok(parts)
    }
}

/// What a file says of itself, as a map that lists it in this order: the same weights are the same file. A map's order is
/// drawn when it is made, and this one is drawn until it is right. (`format` is what transformers asks for.)
fn in_order(about: [(String, String); 2]) -> HashMap<String, String> {
    loop {
        let map = HashMap::from(about.clone());
        if map.keys().next() == Some(&about[0].0) {
            return map;
        }
    }
}

/// What a file of weights says of itself: [`hash`] of its tensors.
const HASH: &str = "sage-train-sha256";

/// SHA-256 of tensors, in the order of their names.
fn hash<'a>(tensors: impl Iterator<Item = (&'a str, Cow<'a, [u8]>)>) -> String {
    let sorted: BTreeMap<&str, Cow<'_, [u8]>> = tensors.collect();
    let mut hash = Sha256::new();
    for (name, bytes) in sorted {
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name);
        hash.update(bytes);
    }
    hex(&hash.finalize())
}

/// Whether tensors are not those that their file says, where it says it.
pub(super) fn is_damaged(bytes: &[u8]) -> std::result::Result<bool, safetensors::SafeTensorError> {
    let (_, about) = safetensors::SafeTensors::read_metadata(bytes)?;
    let Some(written) = about.metadata().as_ref().and_then(|about| about.get(HASH)) else { return Ok(false) };
    let tensors = safetensors::SafeTensors::deserialize(bytes)?;
    let all = tensors.tensors();
    Ok(hash(all.iter().map(|(name, tensor)| (name.as_str(), Cow::Borrowed(tensor.data())))) != *written)
}
