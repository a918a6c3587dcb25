//! Copies of weights and moments at one point in time, and the files that they are written to.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;

use candle_core::{DType, Result, Tensor};
use safetensors::View;
use sha2::{Digest, Sha256};

use super::pieces::{Layout, overlap};
use super::spec::ParameterSpec;
use super::training::Moments;
use crate::hex;

/// The parameters of which a file contains only a range of elements. For each name: the range's offset in the parameter
/// and the range's length.
pub type Parts = BTreeMap<String, [u64; 2]>;

/// A copy of all weights, or of the weights and moments that one rank writes to a checkpoint.
#[derive(Debug)]
pub struct Snapshot {
    pub(super) specs: Vec<ParameterSpec>,
    pub(super) layout: Layout,
    /// The names of the moments. A moment's name is the prefix that a checkpoint puts before a parameter's name.
    pub(super) moments: Moments,
    /// For each copied range of the parameters' elements: the index of its first element in `layout`, and a tensor of
    /// shape (rows, elements). The first row contains the weights, the next rows the values of the `moments`.
    pub(super) held: Vec<(usize, Tensor)>,
    /// The optimizer's statistics of hidden matrices (one number for each row), by their tensor's name in a checkpoint.
    /// Only rank 0 writes them, because all ranks have the same statistics.
    pub(super) rows: Vec<(String, Tensor)>,
    /// The scale and the running maximum of each FP8 operand with delayed scaling.
    pub(crate) scales: Vec<[f32; 2]>,
}

impl Snapshot {
    /// Writes the snapshot as safetensors in f32. Returns the parameters that the file contains only in part.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<Parts> {
        self.save_as(path, DType::F32)
    }

    /// As [`Snapshot::save`], in another element type.
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
                let prefixes = std::iter::once(&"").chain(self.moments.of(spec.kind));
                for (row, prefix) in prefixes.enumerate().take(rows) {
                    let tensor = held.get(row)?.narrow(0, here.start - first, here.len())?;
                    let tensor = tensor.reshape(dims.as_slice())?.to_dtype(dtype)?;
                    tensors.insert(format!("{prefix}{}", spec.name), tensor);
                }
            }
        }
        tensors.extend(self.rows.iter().cloned());
        // safetensors creates files that only their owner can access. So after writing, the file gets the permissions
        // of an ordinary new file.
        let permissions = std::fs::File::create(path)?.metadata()?.permissions();
        // Only files without moments contain a hash. The hash of a file with moments is in `checkpoint.json`.
        let weights = self.held.iter().all(|(_, held)| held.dims()[0] == 1);
        let about = weights.then(|| {
            let hash = hash(tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.data())));
            // transformers requires the entry `format`.
            in_order([("format".to_owned(), "pt".to_owned()), (HASH.to_owned(), hash)])
        });
        safetensors::serialize_to_file(&tensors, about, path)?;
        std::fs::set_permissions(path, permissions)?;
        Ok(parts)
    }
}

/// The metadata of a file as a map that iterates in the given order, so that equal weights make equal files. A
/// `HashMap` draws a random order when it is made, so this function makes maps until one has the right order.
fn in_order(about: [(String, String); 2]) -> HashMap<String, String> {
    loop {
        let map = HashMap::from(about.clone());
        if map.keys().next() == Some(&about[0].0) {
            return map;
        }
    }
}

/// Metadata key of the [`hash`] of a file's tensors.
const HASH: &str = "sage-train-sha256";

/// SHA-256 of the names and bytes of tensors, in the order of their names.
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

/// Whether the tensors of a file contradict the hash in its metadata. False for a file without a hash.
pub(super) fn is_damaged(bytes: &[u8]) -> std::result::Result<bool, safetensors::SafeTensorError> {
    let (_, about) = safetensors::SafeTensors::read_metadata(bytes)?;
    let Some(written) = about.metadata().as_ref().and_then(|about| about.get(HASH)) else { return Ok(false) };
    let tensors = safetensors::SafeTensors::deserialize(bytes)?;
    let all = tensors.tensors();
    Ok(hash(all.iter().map(|(name, tensor)| (name.as_str(), Cow::Borrowed(tensor.data())))) != *written)
}
