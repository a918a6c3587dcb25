//! The compiled half of the Python package: attention on PyTorch tensors, which are passed as addresses.
//! `candle_sage/_ops.py` is the other half.
#![allow(unsafe_code)]

mod cpu;
#[cfg(feature = "cuda")]
mod gpu;

use std::collections::BTreeMap;

use candle_core::DType;
use candle_sage::shape::Packing;
use candle_sage::{Attention, ErrorKind, Scheme};
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// A tensor (batch, sequence, heads, head_dim): address, dimensions, strides in elements.
type Tensor = (u64, [usize; 4], [usize; 4]);

/// The addresses of sinks, ALiBi slopes and a selection's lists of key blocks, 0 if absent. The `usize` is `width`,
/// the most blocks in a list. Sinks and slopes are f32 of shape (query heads). Lists are u32 of shape (key heads,
/// blocks of queries, 1 + `width`): a row has a list's length, then the list.
type Others = (u64, u64, (u64, usize));

/// The number of tokens in a selection's block of queries, and in its block of keys.
const BLOCK: (usize, usize) = (128, 128);

/// The names of settings in Rust's error messages, and in Python.
const WORDS: [(&str, &str); 9] = [
    ("`.smoothing(Smoothing::None)`", "smoothing=\"none\""),
    ("`.products(Int8Products::SCORES)`", "products=\"scores\""),
    ("AttnQat::products(Products::SixteenBit)", "products=\"16-bit\""),
    ("SageBwd::default().products(Int8Products::SCORES)", "scheme=\"sagebwd\", products=\"scores\""),
    ("Scheme::Unquantized", "scheme=\"fpa\""),
    ("`to_dtype(DType::BF16)`", "`.to(torch.bfloat16)`"),
    ("`Tensor::detach`", "`.detach()`"),
    ("Smoothing::None", "smoothing=\"none\""),
    ("Packing::self_attention", "cu_seqlens_q"),
];

/// Converts an error to a Python exception, and the Rust names in its text to Python's. The exception is a
/// `RuntimeError` for [`ErrorKind::Failed`], a `MemoryError` for full memory, otherwise a `ValueError`.
fn error(error: impl std::fmt::Display + Into<candle_core::Error>) -> PyErr {
    let text = WORDS.iter().fold(error.to_string(), |text, (rust, python)| text.replace(rust, python));
    match ErrorKind::of(&error.into()) {
        ErrorKind::Failed => PyRuntimeError::new_err(text),
        ErrorKind::OutOfMemory => PyMemoryError::new_err(text),
        _ => PyValueError::new_err(text),
    }
}

/// Like [`error`], for errors about settings: writes the settings' names and values as in Python.
fn setting_error(error: candle_sage::Error) -> PyErr {
    let names = Scheme::all().into_iter().flat_map(|scheme| scheme.settings()).map(|(name, _)| name);
    let text = names.fold(error.to_string(), |text, name| text.replace(name, &name.replace('-', "_")));
    PyValueError::new_err(text.replace("allowed: on, off", "allowed: True, False"))
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
    /// `settings` has the names and values of `Scheme::settings`; None in `window` sets no limit.
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
            of = of.with_setting(name, value).map_err(setting_error)?;
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
    /// The settings, with the documents of `packing`.
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
    module.add("block", BLOCK)?;
    module.add("has_kernels", cfg!(feature = "cuda"))
}
