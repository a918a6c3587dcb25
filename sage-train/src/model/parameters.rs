//! All parameters of a model in one piece of memory, with their moments, gradients and 16-bit copy: an optimizer's step is
//! one pass over it, and a parameter is a view of it.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Result, Tensor};
use candle_sage::{Error, ops};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal};
use safetensors::View;
use sha2::{Digest, Sha256};

use super::config::{LlamaConfig, ParameterSpec, Start};
use crate::{during, hex, unpanicked};

/// The table of the embedding, and of the output.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";

/// Parameters that follow no other start at multiples of this many elements: 16 bytes are aligned in every element type.
const ALIGNMENT: usize = 64;

/// By name: which parameter, and its first element.
type Places = HashMap<String, (usize, usize)>;

/// What the rows of the state are called in a checkpoint, before the parameter's name.
const ROWS: [&str; 3] = ["", "adamw.mean/", "adamw.square/"];

/// The trained tensors of a model. What computes with them holds views: updates show at once.
#[derive(Debug)]
pub struct Parameters {
    specs: Vec<ParameterSpec>,
    places: Places,
    /// Elements of all, gaps included; those that decay come first.
    len: usize,
    decayed: usize,
    /// Weights and moments, (3, len), or (1, len) where nothing is trained.
    state: Tensor,
    /// (len), where something is trained.
    gradients: Option<Tensor>,
    /// Of each parameter: see [`Weight`].
    filled: Vec<Arc<AtomicBool>>,
    /// The weights in the type that the model computes in, where that is not f32.
    copy: Option<Tensor>,
}

/// A parameter of a model, or several as one: its value, and the place for its gradient where it is trained.
#[derive(Debug, Clone)]
pub struct Weight {
    /// In the type that the model computes in; vectors and routers in f32.
    pub value: Tensor,
    /// In f32.
    pub gradient: Option<Tensor>,
    /// Whether something is in there since it was cleared: of each parameter that this is.
    filled: Vec<Arc<AtomicBool>>,
}

impl Weight {
    /// The place for the gradient.
    ///
    /// # Errors
    /// When the model was not made for training.
    pub fn gradient(&self) -> Result<&Tensor> {
        match &self.gradient {
            Some(gradient) => Ok(gradient),
            None => candle_core::bail!("the model was not made for training"),
        }
    }

    /// For products that fill the whole gradient: whether this one is to be added to what is there, or is the first since
    /// [`Parameters::clear_gradients`].
    pub(super) fn take_turn(&self) -> bool {
        let turns: Vec<bool> =
            self.filled.iter().map(|filled| filled.swap(true, Ordering::Relaxed)).collect();
        debug_assert!(turns.iter().all(|turn| *turn == turns[0]), "filled in part");
        turns[0]
    }
}

impl Parameters {
    /// Draws every parameter, for training. Each has a stream of its own, so that two models that differ in one part
    /// agree in the others. `dtype` is what the model computes in.
    ///
    /// # Errors
    /// When a tensor cannot be allocated.
    pub fn init(config: &LlamaConfig, seed: u64, device: &Device, dtype: DType) -> Result<Self> {
        let specs = config.parameter_specs();
        let values = specs.iter().map(|spec| draw(spec, seed)).collect();
        Self::new(specs, vec![values], device, dtype, true)
    }

    /// Reads every parameter from a safetensors file. `trained`: whether there will be gradients.
    ///
    /// # Errors
    /// When the file cannot be read, or is of another model.
    pub fn load(
        config: &LlamaConfig,
        path: &Path,
        device: &Device,
        dtype: DType,
        trained: bool,
    ) -> candle_sage::Result<Self> {
        let file = StateFile::open(path)
            .map_err(|error| error.hint("a run has model.safetensors from its first validation on"))?;
        Self::from_values(config, &|spec| file.values(spec, ""), device, dtype, trained)
    }

    /// Weights for training, whose values `values` gives.
    ///
    /// # Errors
    /// When it gives an error, or memory is short.
    pub fn from_values(
        config: &LlamaConfig,
        values: &dyn Fn(&ParameterSpec) -> candle_sage::Result<Vec<f32>>,
        device: &Device,
        dtype: DType,
        trained: bool,
    ) -> candle_sage::Result<Self> {
        let specs = config.parameter_specs();
        let values = specs.iter().map(values).collect::<candle_sage::Result<_>>()?;
        Self::new(specs, vec![values], device, dtype, trained).map_err(during("cannot make the model"))
    }

    /// Reads weights and moments that [`Snapshot::save`] wrote.
    ///
    /// # Errors
    /// When the file cannot be read, or is of another model.
    pub fn restore(
        config: &LlamaConfig,
        path: &Path,
        device: &Device,
        dtype: DType,
    ) -> candle_sage::Result<Self> {
        let (file, specs) = (StateFile::open(path)?, config.parameter_specs());
        let rows = ROWS
            .map(|row| specs.iter().map(|spec| file.values(spec, row)).collect::<candle_sage::Result<_>>());
        let rows = rows.into_iter().collect::<candle_sage::Result<_>>()?;
        Self::new(specs, rows, device, dtype, true).map_err(during("cannot make the model"))
    }

    /// `values` are those of each parameter: of the weights, and of the moments where they are not zero.
    fn new(
        specs: Vec<ParameterSpec>,
        values: Vec<Vec<Vec<f32>>>,
        device: &Device,
        dtype: DType,
        trained: bool,
    ) -> Result<Self> {
        let (mut places, mut len, mut decayed): (Places, usize, usize) = (HashMap::new(), 0, 0);
        // What decays comes first, each kind in the order of the specs.
        for decays in [true, false] {
            for (n, spec) in specs.iter().enumerate().filter(|(_, spec)| spec.decays() == decays) {
                // What is multiplied at once lies without gaps.
                if !spec.follows {
                    len = len.next_multiple_of(ALIGNMENT);
                }
                places.insert(spec.name.clone(), (n, len));
                len += spec.len() as usize;
            }
            len = len.next_multiple_of(ALIGNMENT);
            if decays {
                decayed = len;
            }
        }
        let rows = if trained { 3 } else { 1 };
        let mut all = vec![0.0f32; rows * len];
        for (row, values) in values.into_iter().enumerate() {
            for (spec, values) in specs.iter().zip(values) {
                let at = row * len + places[&spec.name].1;
                all[at..at + values.len()].copy_from_slice(&values);
            }
        }
        let state = Tensor::from_vec(all, (rows, len), device)?;
        let copy = (dtype != DType::F32).then(|| state.get(0)?.to_dtype(dtype)).transpose()?;
        let gradients = trained.then(|| Tensor::zeros(len, DType::F32, device)).transpose()?;
        let filled = specs.iter().map(|_| Arc::default()).collect();
        Ok(Self { specs, places, len, decayed, state, gradients, filled, copy })
    }

    /// A parameter as the model takes it.
    ///
    /// # Errors
    /// When there is none of this name.
    pub fn weight(&self, name: &str) -> Result<Weight> {
        self.joined(&[name.to_owned()])
    }

    /// Matrices that follow one another, as one with the rows of all.
    ///
    /// # Errors
    /// When there is none of a name, or they do not follow one another, or are not of one width.
    pub fn joined(&self, names: &[String]) -> Result<Weight> {
        let Some(first) = names.first() else { candle_core::bail!("no matrices to join") };
        let (number, start) = self.place(first)?;
        let columns = &self.specs[number].dims[1..];
        let (mut rows, mut end, mut filled) = (0, start, Vec::with_capacity(names.len()));
        for name in names {
            let (number, at) = self.place(name)?;
            let spec = &self.specs[number];
            if at != end || spec.dims[1..] != *columns {
                candle_core::bail!("{names:?} are not matrices of one width that follow one another");
            }
            (rows, end) = (rows + spec.dims[0], end + spec.len() as usize);
            filled.push(self.filled[number].clone());
        }
        let dims = [&[rows], columns].concat();
        let view = |all: &Tensor| all.narrow(0, start, end - start)?.reshape(dims.as_slice());
        let values = match &self.copy {
            Some(copy) if dims.len() == 2 => copy.clone(),
            _ => self.state.get(0)?,
        };
        let gradient = self.gradients.as_ref().map(view).transpose()?;
        Ok(Weight { value: view(&values)?, gradient, filled })
    }

    fn place(&self, name: &str) -> Result<(usize, usize)> {
        match self.places.get(name) {
            Some(&place) => Ok(place),
            None => candle_core::bail!("the model has no parameter {name}"),
        }
    }

    fn view(&self, all: &Tensor, name: &str) -> Result<Tensor> {
        let (number, at) = self.place(name)?;
        let spec = &self.specs[number];
        all.narrow(0, at, spec.len() as usize)?.reshape(spec.dims.as_slice())
    }

    /// What the parameters are, in the order of [`LlamaConfig::parameter_specs`].
    pub fn specs(&self) -> &[ParameterSpec] {
        &self.specs
    }

    /// The sum of gradients since [`Parameters::clear_gradients`].
    ///
    /// # Errors
    /// When nothing is trained.
    pub fn gradients(&self) -> Result<&Tensor> {
        match &self.gradients {
            Some(gradients) => Ok(gradients),
            None => candle_core::bail!("the model was not made for training"),
        }
    }

    /// Begins new sums of gradients. What the next backward fills whole is left as it is: a pass over the memory less.
    ///
    /// # Errors
    /// When nothing is trained.
    pub fn clear_gradients(&self) -> Result<()> {
        self.filled.iter().for_each(|filled| filled.store(false, Ordering::Relaxed));
        let gradients = self.gradients()?;
        gradients.narrow(0, self.decayed, self.len - self.decayed)?.zero_set()?;
        // The embedding, which two sides add to.
        self.view(gradients, EMBEDDING)?.zero_set()
    }

    /// The first parameter whose gradient is not finite.
    ///
    /// # Errors
    /// When nothing is trained.
    pub fn first_non_finite(&self) -> Result<Option<&str>> {
        for spec in &self.specs {
            let sum = ops::sum_of_squares(&self.view(self.gradients()?, &spec.name)?)?;
            if !sum.to_scalar::<f64>()?.is_finite() {
                return Ok(Some(&spec.name));
            }
        }
        Ok(None)
    }

    /// Updates all parameters with their gradients, whose sum of squares is `squares`. How many decay is known here.
    ///
    /// # Errors
    /// When nothing is trained, or a matrix received no gradient.
    pub fn update(&self, adamw: ops::AdamW, squares: &Tensor) -> Result<()> {
        for (spec, filled) in self.specs.iter().zip(&self.filled) {
            if spec.decays() && spec.name != EMBEDDING && !filled.load(Ordering::Relaxed) {
                candle_core::bail!("{} received no gradient", spec.name);
            }
        }
        let adamw = ops::AdamW { decayed: self.decayed, ..adamw };
        adamw.step(&self.state, self.gradients()?, squares, self.copy.as_ref())
    }

    /// Elements of all parameters, with what lies between them.
    pub fn elements(&self) -> usize {
        self.len
    }

    /// A copy of the weights, and of the moments, on the host: it stays as it is while training goes on.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn snapshot(&self, moments: bool) -> Result<Snapshot> {
        let state = if moments { self.state.clone() } else { self.state.narrow(0, 0, 1)? };
        let state = if state.device().is_cpu() { state.copy()? } else { state.to_device(&Device::Cpu)? };
        Ok(Snapshot { specs: self.specs.clone(), places: self.places.clone(), state })
    }
}

/// Weights, and moments if they were asked for, at one moment.
#[derive(Debug)]
pub struct Snapshot {
    specs: Vec<ParameterSpec>,
    places: Places,
    state: Tensor,
}

impl Snapshot {
    /// Writes all of it as safetensors, in f32: the weights under their own names.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        self.save_as(path, DType::F32)
    }

    /// As [`Snapshot::save`], in another type.
    ///
    /// # Errors
    /// As [`Snapshot::save`].
    pub fn save_as(&self, path: &Path, dtype: DType) -> Result<()> {
        let mut tensors = HashMap::new();
        for (row, prefix) in ROWS.iter().enumerate().take(self.state.dim(0)?) {
            let values = self.state.get(row)?;
            for spec in &self.specs {
                let tensor = values.narrow(0, self.places[&spec.name].1, spec.len() as usize)?;
                let tensor = tensor.reshape(spec.dims.as_slice())?.to_dtype(dtype)?;
                tensors.insert(format!("{prefix}{}", spec.name), tensor);
            }
        }
        // The library makes files that only their owner may read; these are as open as any other.
        let permissions = std::fs::File::create(path)?.metadata()?.permissions();
        // The state of a checkpoint has a hash of its own.
        let about = (self.state.dim(0)? == 1).then(|| {
            let hash = hash(tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.data())));
            in_order([("format".to_owned(), "pt".to_owned()), (HASH.to_owned(), hash)])
        });
        safetensors::serialize_to_file(&tensors, about, path)?;
        Ok(std::fs::set_permissions(path, permissions)?)
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
fn is_damaged(bytes: &[u8]) -> std::result::Result<bool, safetensors::SafeTensorError> {
    let (_, about) = safetensors::SafeTensors::read_metadata(bytes)?;
    let Some(written) = about.metadata().as_ref().and_then(|about| about.get(HASH)) else { return Ok(false) };
    let tensors = safetensors::SafeTensors::deserialize(bytes)?;
    let all = tensors.tensors();
    Ok(hash(all.iter().map(|(name, tensor)| (name.as_str(), Cow::Borrowed(tensor.data())))) != *written)
}

/// A safetensors file, to take parameters from.
#[derive(Debug)]
pub struct StateFile {
    path: PathBuf,
    tensors: HashMap<String, Tensor>,
}

impl StateFile {
    /// Reads the file.
    ///
    /// # Errors
    /// When it is none.
    pub fn open(path: &Path) -> candle_sage::Result<Self> {
        let what = || format!("cannot read {}", path.display());
        let bytes = std::fs::read(path).map_err(during(what()))?;
        let damaged =
            unpanicked(|| is_damaged(&bytes).map_err(|error| error.to_string())).map_err(during(what()))?;
        if damaged {
            return Err(Error::new("the weights are damaged")
                .got(format!("{}: not the hash that it was written with", path.display()))
                .allowed("a file as it was written")
                .hint("a run's checkpoints have its weights too: RUN/checkpoints/step-N"));
        }
        let load =
            || candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).map_err(|error| error.to_string());
        let tensors = unpanicked(load).map_err(during(what()))?;
        Ok(Self { path: path.to_owned(), tensors })
    }

    /// Whether a tensor of this name is in it.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The values of a parameter, under its name behind `prefix`.
    ///
    /// # Errors
    /// When they are not there, or of another shape.
    pub fn values(&self, spec: &ParameterSpec, prefix: &str) -> candle_sage::Result<Vec<f32>> {
        let name = format!("{prefix}{}", spec.name);
        let found = self.tensors.get(&name);
        let tensor = found.filter(|tensor| tensor.dims() == spec.dims).ok_or_else(|| {
            Error::new(format!("{} is not of this model", self.path.display()))
                .got(match found {
                    None => format!("no {name}"),
                    Some(tensor) => format!("{name} of shape {:?}", tensor.dims()),
                })
                .allowed(format!("{name} of shape {:?}", spec.dims))
                .hint("weights and settings belong to one run")
        })?;
        let list = || tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        list().map_err(during("cannot make the model"))
    }
}

fn draw(spec: &ParameterSpec, seed: u64) -> Vec<f32> {
    let len = spec.len() as usize;
    let Start::Normal(std) = spec.start else { return spec.fixed_start().unwrap_or_default() };
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(fnv1a(&spec.name));
    let normal = Normal::new(0.0, std as f32).expect("a checked standard deviation");
    (0..len).map(|_| normal.sample(&mut rng)).collect()
}

/// The 64-bit FNV-1a hash: a stream number for each name.
fn fnv1a(name: &str) -> u64 {
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
