//! Parameters from the files of a run or a checkpoint.

use std::path::Path;

use candle_core::{DType, Device};

use super::{InitialValues, Parameters, Training};
use crate::model::spec::ParameterSpec;
use crate::model::state::{State, StateFile};

impl Parameters {
    /// Reads every parameter from a safetensors file. `trained` is `None` if the model needs no gradients.
    ///
    /// # Errors
    /// When the file cannot be read, or belongs to another model.
    pub fn load(
        specs: Vec<ParameterSpec>,
        path: &Path,
        device: &Device,
        dtype: DType,
        trained: Option<Training<'_>>,
    ) -> candle_sage::Result<Self> {
        let file = StateFile::of_run(path)?;
        let weights = |spec: &ParameterSpec| file.values(spec, "");
        Self::from_values(specs, &InitialValues::weights(&weights), device, dtype, trained)
    }

    /// Restores parameters from a checkpoint. `trained` is as in [`Parameters::load`]; if it is `None`, only
    /// the weights are read.
    ///
    /// # Errors
    /// When the checkpoint cannot be read, or belongs to another model.
    pub fn restore(
        specs: Vec<ParameterSpec>,
        state: &State,
        device: &Device,
        dtype: DType,
        trained: Option<Training<'_>>,
    ) -> candle_sage::Result<Self> {
        let values = InitialValues {
            weights: &|spec| state.weights(spec),
            moments: Some(&|moment, spec, range| state.moments(moment, spec, range)),
            rows: Some(&|name, rows| state.rows(name, rows)),
        };
        Self::from_values(specs, &values, device, dtype, trained)
    }
}
