//! Parameters from files: of a run, of a checkpoint, and values of any source.

use std::path::Path;

use candle_core::{DType, Device};

use super::{Parameters, Values};
use crate::model::config::{LlamaConfig, ParameterSpec};
use crate::model::state::{State, StateFile};
use crate::ranks::Ranks;

impl Parameters {
    /// Reads every parameter from a safetensors file. `trained` is the ranks that train the model, and
    /// `None` if it needs no gradients.
    ///
    /// # Errors
    /// When the file cannot be read, or belongs to another model.
    pub fn load(
        config: &LlamaConfig,
        path: &Path,
        device: &Device,
        dtype: DType,
        trained: Option<&Ranks>,
    ) -> candle_sage::Result<Self> {
        let file = StateFile::of_run(path)?;
        Self::from_values(config, &|spec| file.values(spec, ""), device, dtype, trained)
    }

    /// Makes parameters with the weights that `values` returns. `trained` is as in [`Parameters::load`].
    ///
    /// # Errors
    /// When `values` fails, or memory is short.
    pub fn from_values(
        config: &LlamaConfig,
        values: &dyn Fn(&ParameterSpec) -> candle_sage::Result<Vec<f32>>,
        device: &Device,
        dtype: DType,
        trained: Option<&Ranks>,
    ) -> candle_sage::Result<Self> {
        let values = Values { weights: values, moments: None };
        Self::new(config.parameter_specs(), &values, device, dtype, trained)
    }

    /// Restores parameters from a checkpoint. `trained` is as in [`Parameters::load`]; without it only the
    /// weights are read.
    ///
    /// # Errors
    /// When the checkpoint cannot be read, or belongs to another model.
    pub fn restore(
        config: &LlamaConfig,
        state: &State,
        device: &Device,
        dtype: DType,
        trained: Option<&Ranks>,
    ) -> candle_sage::Result<Self> {
        let values = Values {
            weights: &|spec| state.weights(spec),
            moments: Some(&|row, spec, range| state.values(spec, row, range)),
        };
        Self::new(config.parameter_specs(), &values, device, dtype, trained)
    }
}
