//! Linear layers, and the precision of their products. Gradients of weights are added in place, in f32.

use candle_core::{Result, Tensor};
use candle_sage::ops;

use super::parameters::{Parameters, Weight};

/// What the products of linear layers compute in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinearPrecision {
    /// The compute type of the model.
    Compute,
}

impl LinearPrecision {
    /// Bytes of an element of an operand that the backward needs again, if the model computes in elements of `element` bytes.
    pub fn kept_bytes(self, element: u64) -> u64 {
        match self {
            Self::Compute => element,
        }
    }

    /// How many times as fast as in 16 bit a GPU multiplies.
    pub fn speed(self) -> f64 {
        match self {
            Self::Compute => 1.0,
        }
    }
}

/// An operand of linear layers, (rows, columns): their input, or the gradient of their output, in the form that their products read. An
/// op whose output is an operand can write this form itself.
#[derive(Debug, Clone)]
pub(super) struct Operand(Tensor);

impl Operand {
    /// The number of rows.
    pub(super) fn rows(&self) -> Result<usize> {
        self.0.dim(0)
    }
}

impl From<Tensor> for Operand {
    fn from(rows: Tensor) -> Self {
        Self(rows)
    }
}

/// `y = x W^T` on rows, without bias.
#[derive(Debug, Clone)]
pub(super) struct Linear(Weight);

impl Linear {
    /// The matrix `{at}.{name}.weight`. Several names make one product over a common input, whose outputs are
    /// concatenated along the columns.
    pub(super) fn new(parameters: &Parameters, at: &str, names: &[&str]) -> Result<Self> {
        let names: Vec<String> = names.iter().map(|name| format!("{at}.{name}.weight")).collect();
        Ok(Self(parameters.joined(&names)?))
    }

    /// (rows, inputs) -> (rows, outputs).
    pub(super) fn forward(&self, Operand(x): &Operand) -> Result<Tensor> {
        x.matmul(&self.0.value.t()?)
    }

    /// Adds the gradient of the weight and returns that of the input.
    pub(super) fn backward(&self, x: &Operand, dy: &Operand) -> Result<Tensor> {
        self.backward_weight(x, dy)?;
        self.backward_input(dy)
    }

    /// As [`Linear::backward`], but adds the gradient of the input to `dx`.
    pub(super) fn backward_into(&self, dx: &Tensor, x: &Operand, dy: &Operand) -> Result<()> {
        self.backward_weight(x, dy)?;
        ops::product_into(dx, &dy.0, &self.0.value, 1.0, true)
    }

    /// Returns the gradient of the input alone.
    pub(super) fn backward_input(&self, Operand(dy): &Operand) -> Result<Tensor> {
        dy.matmul(&self.0.value)
    }

    /// Adds the gradient of the weight alone.
    pub(super) fn backward_weight(&self, Operand(x): &Operand, Operand(dy): &Operand) -> Result<()> {
        let add = self.0.take_turn();
        ops::product_into(self.0.gradient()?, &dy.t()?, x, 1.0, add)
    }
}
