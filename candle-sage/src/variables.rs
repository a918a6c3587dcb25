//! Loads a model's variables by name, and lists the variables without a gradient.

use std::sync::PoisonError;

use candle_core::backprop::GradStore;
use candle_core::{DType, Error as Candle, Result, Shape, Tensor};
use candle_nn::{Init, VarBuilder, VarMap};

use crate::error::{Error, ErrorKind};

/// The names of the variables without a gradient, sorted. If a model trains correctly, the list is empty after one
/// `backward()`.
///
/// Operators without a gradient cut the graph and return no error: candle-nn's fused `rms_norm`, `layer_norm`
/// (`LayerNorm`), `rope` and `softmax_last_dim`. The variables that reach the loss only through such an operator are
/// listed. A variable that also reaches the loss through a residual connection has a gradient, but without the
/// contribution of the cut branch.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap, layer_norm, linear};
/// use candle_sage::untrained;
///
/// let variables = VarMap::new();
/// let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
/// let (norm, map) = (layer_norm(8, 1e-5, vb.pp("norm"))?, linear(8, 8, vb.pp("map"))?);
/// let x = Tensor::randn(0f32, 1., (2, 8), &Device::Cpu)?;
/// let gradients = map.forward(&norm.forward(&x)?)?.sqr()?.sum_all()?.backward()?;
/// assert_eq!(untrained(&variables, &gradients), ["norm.bias", "norm.weight"]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn untrained(variables: &VarMap, gradients: &GradStore) -> Vec<String> {
    let variables = variables.data().lock().unwrap_or_else(PoisonError::into_inner);
    let without = variables.iter().filter(|(_, variable)| gradients.get(variable).is_none());
    let mut names: Vec<String> = without.map(|(name, _)| name.clone()).collect();
    names.sort_unstable();
    names
}

/// The tensor `name` at the path of `vb`. A new model initializes this tensor with `init`.
pub(crate) fn load(
    vb: &VarBuilder<'_>,
    shape: impl Into<Shape>,
    name: &str,
    init: Init,
    dtype: DType,
) -> Result<Tensor> {
    let shape = shape.into();
    vb.get_with_hints_dtype(shape.clone(), name, init, dtype).map_err(|error| {
        let error = innermost(&error);
        let (what, kind, hint) = match error {
            Candle::CannotFindTensor { .. } => {
                ("is missing", ErrorKind::Invalid, "set the prefix of the name with `VarBuilder::pp`")
            }
            Candle::UnexpectedShape { .. } => OTHER_SHAPE,
            // A `VarMap` reports a wrong shape only as text.
            Candle::Msg(text) if text.starts_with("shape mismatch") => OTHER_SHAPE,
            error => ("cannot be loaded", ErrorKind::of(error), "check that the weights file is complete"),
        };
        let prefix = vb.prefix();
        let path = if prefix.is_empty() { name.to_string() } else { format!("{prefix}.{name}") };
        Error::new(format!("the weight {path} {what}"))
            .with_kind(kind)
            .got(error)
            .allowed(format!("a tensor of {:?}", shape.dims()))
            .hint(hint)
            .into()
    })
}

const OTHER_SHAPE: (&str, ErrorKind, &str) =
    ("has the wrong shape", ErrorKind::Shape, "check that the configuration belongs to these weights");

/// The error without candle's backtraces.
fn innermost(error: &Candle) -> &Candle {
    match error {
        Candle::WithBacktrace { inner, .. } => innermost(inner),
        error => error,
    }
}
