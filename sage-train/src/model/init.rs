//! Parameters by name, initialised from a seed.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::VarBuilder;
use candle_sage::Error;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal};

use super::config::{LlamaConfig, ParameterSpec};
use crate::during;

/// The trained tensors of a model, in a fixed order.
#[derive(Debug)]
pub struct Parameters {
    entries: Vec<(ParameterSpec, Var)>,
}

impl Parameters {
    /// Draws every parameter. Each has a stream of its own, so that two models that differ in one
    /// part agree in the others.
    ///
    /// # Errors
    /// When a tensor cannot be allocated.
    pub fn init(config: &LlamaConfig, seed: u64, device: &Device) -> Result<Self> {
        let entries = config
            .parameter_specs()
            .into_iter()
            .map(|spec| {
                let values = draw(&spec, seed);
                let var = Var::from_vec(values, spec.dims.as_slice(), device)?;
                Ok((spec, var))
            })
            .collect::<Result<_>>()?;
        Ok(Self { entries })
    }

    /// Reads every parameter from a safetensors file.
    ///
    /// # Errors
    /// When the file cannot be read, or is of another model.
    pub fn load(config: &LlamaConfig, path: &Path, device: &Device) -> candle_sage::Result<Self> {
        let tensors = candle_core::safetensors::load(path, device)
            .map_err(during(format!("cannot read {}", path.display())))
            .map_err(|error| error.hint("a run has model.safetensors from its first validation on"))?;
        let entries = config
            .parameter_specs()
            .into_iter()
            .map(|spec| {
                let found = tensors.get(&spec.name);
                let tensor = found.filter(|tensor| tensor.dims() == spec.dims).ok_or_else(|| {
                    Error::new(format!("{} is not of this model", path.display()))
                        .got(match found {
                            None => format!("no {}", spec.name),
                            Some(tensor) => format!("{} of shape {:?}", spec.name, tensor.dims()),
                        })
                        .allowed(format!("{} of shape {:?}", spec.name, spec.dims))
                        .hint("weights and config.toml belong to one run")
                })?;
                let var = tensor.to_dtype(DType::F32).and_then(|tensor| Var::from_tensor(&tensor));
                Ok((spec, var.map_err(during("cannot make the model"))?))
            })
            .collect::<candle_sage::Result<_>>()?;
        Ok(Self { entries })
    }

    /// Names, variables and whether weight decay applies.
    pub fn iter(&self) -> impl Iterator<Item = (&ParameterSpec, &Var)> {
        self.entries.iter().map(|(spec, var)| (spec, var))
    }

    /// Number of parameters (tensors).
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// A builder that hands out the variables: a model made from it receives gradients.
    pub fn tracked(&self, device: &Device) -> VarBuilder<'static> {
        self.builder(device, |var| var.as_tensor().clone())
    }

    /// A builder that hands out views of the same memory without a graph, for evaluation: no state
    /// is kept for a backward, and updates show at once.
    pub fn untracked(&self, device: &Device) -> VarBuilder<'static> {
        self.builder(device, |var| var.as_tensor().detach())
    }

    fn builder(&self, device: &Device, view: impl Fn(&Var) -> Tensor) -> VarBuilder<'static> {
        let tensors: HashMap<String, Tensor> =
            self.entries.iter().map(|(spec, var)| (spec.name.clone(), view(var))).collect();
        VarBuilder::from_tensors(tensors, DType::F32, device)
    }

    /// Writes all weights as safetensors.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let tensors: HashMap<String, Tensor> =
            self.entries.iter().map(|(spec, var)| (spec.name.clone(), var.as_tensor().clone())).collect();
        candle_core::safetensors::save(&tensors, path)
    }
}

fn draw(spec: &ParameterSpec, seed: u64) -> Vec<f32> {
    let len = spec.len() as usize;
    let Some(std) = spec.std else { return vec![1.0; len] };
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
