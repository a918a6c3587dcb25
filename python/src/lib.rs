//! The compiled half of the Python package: attention on addresses that PyTorch's tensors have. `candle_sage/_ops.py` is the other half.
#![allow(unsafe_code)]

mod cpu;
#[cfg(feature = "cuda")]
mod gpu;

use std::collections::BTreeMap;

use candle_core::DType;
use candle_sage::shape::Packing;
use candle_sage::{Attention, Scheme};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A tensor (batch, sequence, heads, head_dim): address, dimensions, strides in elements.
type Tensor = (u64, [usize; 4], [usize; 4]);

/// Every error of the library is one of an argument: what, got, allowed and a hint.
fn error(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// An element type by its name in PyTorch.
fn dtype(name: &str) -> PyResult<DType> {
    match name {
        "float32" => Ok(DType::F32),
        "float16" => Ok(DType::F16),
        "bfloat16" => Ok(DType::BF16),
        other => Err(error(
            candle_sage::Error::unsupported("attention does not take this element type")
                .got(format!("torch.{other}"))
                .allowed("torch.float32 (CPU), torch.float16, torch.bfloat16")
                .hint("convert with `.to(torch.bfloat16)`"),
        )),
    }
}

/// The settings of attention calls.
#[pyclass(frozen)]
struct Settings {
    attention: Attention,
}

#[pymethods]
impl Settings {
    /// Names and values of `settings` are those of `Scheme::settings`; None in `window` sets no limit.
    #[new]
    #[pyo3(signature = (scheme, settings, causal, window, scale, softcap, deterministic))]
    fn new(
        scheme: &str,
        settings: BTreeMap<String, String>,
        causal: bool,
        window: (Option<usize>, Option<usize>),
        scale: Option<f64>,
        softcap: f64,
        deterministic: bool,
    ) -> PyResult<Self> {
        let mut of = Scheme::from_name(scheme).map_err(error)?;
        for (name, value) in &settings {
            of = of.with_setting(name, value).map_err(error)?;
        }
        of.validate().map_err(error)?;
        let attention = Attention::new(of)
            .causal(causal)
            .window(window.0, window.1)
            .softcap(softcap)
            .deterministic(deterministic);
        Ok(Self { attention: scale.map_or(attention.clone(), |scale| attention.softmax_scale(scale)) })
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.attention)
    }
}

impl Settings {
    /// The settings, for packed documents if there are any.
    fn packed(&self, packing: Option<(Vec<usize>, Vec<usize>)>) -> Attention {
        match packing {
            Some((queries, keys)) => self.attention.clone().packing(Packing::new(queries, keys)),
            None => self.attention.clone(),
        }
    }
}

/// The names of all schemes.
#[pyfunction]
fn schemes() -> Vec<&'static str> {
    Scheme::all().iter().map(Scheme::name).collect()
}

/// The compiled half of `candle_sage`.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Settings>()?;
    module.add_function(wrap_pyfunction!(schemes, module)?)?;
    module.add_function(wrap_pyfunction!(cpu::forward_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(cpu::backward_cpu, module)?)?;
    #[cfg(feature = "cuda")]
    module.add_class::<gpu::Call>()?;
    module.add("has_kernels", cfg!(feature = "cuda"))
}
