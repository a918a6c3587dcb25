//! Reads the weights in a safetensors file, and the weights and moments in a checkpoint.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::safetensors::Load;
use candle_core::{DType, Device, Tensor};
use candle_sage::{Error, Result};
use safetensors::tensor::Metadata;
use safetensors::{Dtype, SafeTensors};

use super::pieces::overlap;
use super::snapshot::{Parts, is_damaged};
use super::spec::{Kind, OUTPUT, ParameterSpec, Start};
use crate::{during, read_exact_at, unpanicked};

/// The hint for tensors that are not floats.
const FLOATS: &str =
    "weights must be floats; dequantize a quantized model first, for example in transformers";

/// A safetensors file that parameters are read from.
#[derive(Debug)]
pub struct StateFile {
    path: PathBuf,
    tensors: HashMap<String, Tensor>,
    /// The names and types of the tensors that candle cannot load. Only reading such a tensor is an error.
    others: HashMap<String, String>,
}

impl StateFile {
    /// Reads the file into memory.
    ///
    /// # Errors
    /// When the file cannot be read, is not safetensors, or does not match the hash in its metadata.
    pub fn open(path: &Path) -> Result<Self> {
        let what = || format!("cannot read {}", path.display());
        let bytes = std::fs::read(path).map_err(during(what()))?;
        if bytes.starts_with(b"version https://git-lfs") {
            return Err(Error::new(what())
                .got("a Git LFS pointer instead of the file itself")
                .allowed("a safetensors file")
                .hint("`git lfs pull` in the folder downloads the file"));
        }
        let damaged = unpanicked(|| is_damaged(&bytes))
            .map_err(during(what()))
            .map_err(|error| error.hint("check that the file is complete and in the safetensors format"))?;
        if damaged {
            return Err(Error::new("the weights are damaged")
                .got(format!("{}: its hash is not the hash in its metadata", path.display()))
                .allowed("a file that is unchanged since it was written")
                .hint("use the weights in a checkpoint of the run: RUN/checkpoints/step-N"));
        }
        let load = || -> std::result::Result<_, String> {
            let (mut tensors, mut others) = (HashMap::new(), HashMap::new());
            for (name, view) in SafeTensors::deserialize(&bytes).map_err(|error| error.to_string())?.tensors()
            {
                match view.load(&Device::Cpu) {
                    Ok(tensor) => drop(tensors.insert(name, tensor)),
                    Err(candle_core::Error::UnsupportedSafeTensorDtype(_)) => {
                        others.insert(name, format!("{:?}", view.dtype()));
                    }
                    Err(error) => return Err(error.to_string()),
                }
            }
            Ok((tensors, others))
        };
        let (tensors, others) = unpanicked(load).map_err(during(what()))?;
        Ok(Self { path: path.to_owned(), tensors, others })
    }

    /// The file with `prefix` before the names of all tensors except the output matrix.
    pub fn with_prefix(mut self, prefix: &str) -> Self {
        let named = |name: String| if name == OUTPUT { name } else { format!("{prefix}{name}") };
        self.tensors = self.tensors.into_iter().map(|(name, tensor)| (named(name), tensor)).collect();
        self.others = self.others.into_iter().map(|(name, dtype)| (named(name), dtype)).collect();
        self
    }

    /// Reads the weights of a run.
    ///
    /// # Errors
    /// As [`StateFile::open`].
    pub fn of_run(path: &Path) -> Result<Self> {
        Self::open(path).map_err(|error| {
            error.hint(
                "a run writes it at its first validation; if it is missing or damaged, use a checkpoint: \
                 RUN/checkpoints/step-N",
            )
        })
    }

    /// The names of the file's tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().chain(self.others.keys()).map(String::as_str)
    }

    /// Whether the file has a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name) || self.others.contains_key(name)
    }

    /// The values of a parameter, stored under its name with `prefix` before it.
    ///
    /// # Errors
    /// When the tensor is missing, or has another shape.
    pub fn values(&self, spec: &ParameterSpec, prefix: &str) -> Result<Vec<f32>> {
        let name = format!("{prefix}{}", spec.name);
        let of_type = |dtype: &str| {
            Error::new(format!("{} cannot be used", self.path.display()))
                .got(format!("{name} in {dtype}"))
                .allowed("f64, f32, f16 or bf16")
                .hint(FLOATS)
        };
        if let Some(dtype) = self.others.get(&name) {
            return Err(of_type(dtype));
        }
        let found = self.tensors.get(&name);
        let tensor = found.filter(|tensor| tensor.dims() == spec.dims).ok_or_else(|| {
            // The names of a layer's tensors begin with `model.layers.N.`.
            let layer = name.match_indices('.').nth(2).map_or(name.as_str(), |(at, _)| &name[..=at]);
            let has_layer = self.names().any(|other| other.starts_with(layer));
            Error::new(format!("{} does not belong to this model", self.path.display()))
                .got(match found {
                    None => format!("no {name}"),
                    Some(tensor) => format!("{name} of shape {:?}", tensor.dims()),
                })
                .allowed(format!("{name} of shape {:?}", spec.dims))
                .hint(match name.as_str() {
                    name if found.is_none() && (name.ends_with("_router.weight") || name.ends_with(".theta")) => {
                        "these weights were not trained with SLA2: leave --attn out; to train them with SLA2, start a \
                         new run with --init-from"
                    }
                    name if found.is_none() && name.ends_with(".sinks") => "these weights have no sinks: leave --sinks out",
                    name if found.is_none() && name.contains(".layers.") && !has_layer => {
                        "these weights have fewer layers: check --layers, or num_hidden_layers in config.json"
                    }
                    name if found.is_none() && name.contains(".self_attn.") => {
                        "these weights were trained with other attention settings: leave --attn, --qk-norm and \
                         --qkv-bias out"
                    }
                    _ => "use weights and settings of the same run; --init-from also sets the model's sizes",
                })
        })?;
        if ![DType::F64, DType::F32, DType::F16, DType::BF16].contains(&tensor.dtype()) {
            return Err(of_type(tensor.dtype().as_str()));
        }
        let list = || tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        list().map_err(during("cannot make the model"))
    }
}

/// Largest allowed header of a safetensors file, in bytes.
const HEADER: u64 = 100_000_000;

/// One file of a checkpoint's state.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    file: File,
    /// Offset of the tensors' bytes in the file, and the number of these bytes.
    data: u64,
    bytes: u64,
    about: Metadata,
    parts: Parts,
}

/// A checkpoint's weights and moments, in one file or several. Any number of threads may read, and only the requested
/// ranges are read.
#[derive(Debug)]
pub struct State(Vec<Part>);

impl State {
    /// Opens files. `files`: each file's path, and the parameters that are only partly in this file.
    ///
    /// # Errors
    /// When a file cannot be opened, or its header is not a safetensors header.
    pub fn open(files: Vec<(PathBuf, Parts)>) -> Result<Self> {
        files.into_iter().map(|(path, parts)| Part::open(path, parts)).collect::<Result<_>>().map(Self)
    }

    /// The names of the parameters.
    pub fn names(&self) -> Vec<String> {
        let all = self.0.iter().flat_map(|part| part.about.tensors().into_keys());
        // A moment's tensor is named after its parameter, with a prefix that ends with a slash.
        all.filter(|name| !name.contains('/')).collect()
    }

    /// The weights of a parameter.
    ///
    /// # Errors
    /// When elements of the parameter are missing or occur twice in the checkpoint, or a stored tensor does not have
    /// the expected shape and type.
    pub fn weights(&self, spec: &ParameterSpec) -> Result<Vec<f32>> {
        self.values(spec, "", 0..spec.len() as usize)
    }

    /// The elements `range` of a moment of a parameter.
    ///
    /// # Errors
    /// As [`State::weights`].
    pub fn moments(&self, moment: &str, spec: &ParameterSpec, range: Range<usize>) -> Result<Vec<f32>> {
        self.values(spec, moment, range)
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|part| part.about.info(name).is_some())
    }

    /// The optimizer's statistics of a matrix with `rows` rows, one number for each row, stored as tensor `name`.
    ///
    /// # Errors
    /// As [`State::weights`].
    pub fn rows(&self, name: String, rows: usize) -> Result<Vec<f32>> {
        let spec = ParameterSpec {
            name,
            kind: Kind::Norm,
            dims: vec![rows],
            start: Start::Value(0.0),
            follows: false,
            fp8: false,
        };
        self.values(&spec, "", 0..rows)
    }

    /// The elements `range` of a stored tensor, whose name is `prefix` followed by the parameter's name.
    fn values(&self, spec: &ParameterSpec, prefix: &str, range: Range<usize>) -> Result<Vec<f32>> {
        let mut values = vec![0.0; range.len()];
        let mut filled = Vec::new();
        for part in &self.0 {
            filled.extend(part.fill(spec, prefix, &range, &mut values)?);
        }
        // Each element must occur exactly once: two copies of one half of a parameter are not the whole parameter.
        filled.sort_by_key(|here| here.start);
        let whole = filled.iter().try_fold(range.start, |at, here| (here.start == at).then_some(here.end));
        if whole == Some(range.end) {
            return Ok(values);
        }
        let filled: usize = filled.iter().map(Range::len).sum();
        let files: Vec<String> = self.0.iter().map(|part| part.path.display().to_string()).collect();
        Err(Error::new("the checkpoint does not belong to this model")
            .got(format!(
                "{filled} of {} elements of {prefix}{} in {}",
                range.len(),
                spec.name,
                files.join(", ")
            ))
            .allowed(format!("{prefix}{} of shape {:?}", spec.name, spec.dims))
            .hint("use weights and settings of the same run"))
    }
}

impl Part {
    fn open(path: PathBuf, parts: Parts) -> Result<Self> {
        let what = format!("cannot read {}", path.display());
        let read = || -> std::result::Result<(File, u64, u64, Metadata), String> {
            let mut file = File::open(&path).map_err(|error| error.to_string())?;
            let all = file.metadata().map_err(|error| error.to_string())?.len();
            let mut len = [0; 8];
            file.read_exact(&mut len).map_err(|error| error.to_string())?;
            let len = u64::from_le_bytes(len);
            if len > HEADER || len + 8 > all {
                return Err(format!("not safetensors: a header of {len} bytes in a file of {all} bytes"));
            }
            let mut header = vec![0; len as usize];
            file.read_exact(&mut header).map_err(|error| error.to_string())?;
            let about = serde_json::from_slice(&header).map_err(|error| error.to_string())?;
            Ok((file, len + 8, all - len - 8, about))
        };
        let (file, data, bytes, about) = unpanicked(read).map_err(during(what))?;
        Ok(Self { path, file, data, bytes, about, parts })
    }

    /// Of the parameter's elements in `range`, copies those that this file contains into `values`. Returns their range
    /// in the parameter.
    fn fill(
        &self,
        spec: &ParameterSpec,
        prefix: &str,
        range: &Range<usize>,
        values: &mut [f32],
    ) -> Result<Option<Range<usize>>> {
        let name = format!("{prefix}{}", spec.name);
        let Some(info) = self.about.info(&name) else { return Ok(None) };
        let (first, len) = match self.parts.get(&spec.name) {
            Some(&[first, len]) => (first, len),
            None => (0, spec.len()),
        };
        let shape = if self.parts.contains_key(&spec.name) { vec![len as usize] } else { spec.dims.clone() };
        let (start, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        let fits = info.dtype == Dtype::F32
            && info.shape == shape
            && first.checked_add(len).is_some_and(|end| end <= spec.len())
            && start <= end
            && end <= self.bytes
            && end - start == 4 * len;
        if !fits {
            return Err(Error::new(format!("{} does not belong to this model", self.path.display()))
                .got(format!("{name} of shape {:?} in {:?}", info.shape, info.dtype))
                .allowed(format!("{name} of shape {shape:?} in F32"))
                .hint("use weights and settings of the same run"));
        }
        let Some(here) = overlap(range, &(first as usize..(first + len) as usize)) else { return Ok(None) };
        let mut bytes = vec![0; 4 * here.len()];
        let at = self.data + start + 4 * (here.start as u64 - first);
        read_exact_at(&self.file, &mut bytes, at)
            .map_err(during(format!("cannot read {}", self.path.display())))?;
        let into = &mut values[here.start - range.start..][..here.len()];
        for (value, bytes) in into.iter_mut().zip(bytes.as_chunks().0) {
            *value = f32::from_le_bytes(*bytes);
        }
        Ok(Some(here))
    }
}

#[cfg(test)]
mod tests {
    use rayon::prelude::*;

    use super::*;

    #[test]
    fn threads_read_one_file_at_once() -> candle_core::Result<()> {
        let scratch = tempfile::tempdir()?;
        let path = scratch.path().join("state.safetensors");
        let (count, len) = (64u16, 500);
        let spec = |n: u16| ParameterSpec {
            name: n.to_string(),
            kind: Kind::Matrix,
            dims: vec![len],
            start: Start::Value(0.0),
            follows: false,
            fp8: false,
        };
        let tensor = |n: u16| Tensor::full(f32::from(n), len, &Device::Cpu);
        let tensors = (0..count).map(|n| Ok((n.to_string(), tensor(n)?)));
        candle_core::safetensors::save(&tensors.collect::<candle_core::Result<HashMap<_, _>>>()?, &path)?;
        let state = State::open(vec![(path, Parts::new())])?;
        (0..20 * count).into_par_iter().try_for_each(|n| {
            assert_eq!(state.weights(&spec(n % count))?, vec![f32::from(n % count); len]);
            Ok(())
        })
    }
}
