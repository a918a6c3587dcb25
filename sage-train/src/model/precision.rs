//! The precision of linear layers, and the roles of their operands.

use candle_sage::Error;
use candle_sage::fp8::Fp8Format;
use candle_sage::ops::{self, Fp8Linear};

/// The precision of the matmuls of linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinearPrecision {
    /// The compute type of the model.
    Compute,
    /// FP8, with a scale for each matrix.
    Fp8(Fp8Linear, Scaling),
}

/// The source of the scale of an FP8 matrix that is not a weight. The scale of a weight is always computed from the
/// weight's own largest absolute value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scaling {
    /// The matrix's own largest value, which needs a second pass over memory.
    Current,
    /// A running maximum of the matrix's largest absolute values in earlier steps, times a margin.
    Delayed,
}

impl LinearPrecision {
    /// The settings of FP8, if the matmuls are in FP8.
    pub fn fp8(self) -> Option<(Fp8Linear, Scaling)> {
        match self {
            Self::Compute => None,
            Self::Fp8(settings, scaling) => Some((settings, scaling)),
        }
    }

    /// Whether the operands of the matmuls have fewer bits than the compute type.
    pub fn is_low(self) -> bool {
        match self {
            Self::Compute => false,
            Self::Fp8(..) => true,
        }
    }

    /// Bytes per element of an operand that is kept for the backward. `element`: bytes per element of the compute type.
    pub fn kept_bytes(self, element: u64) -> u64 {
        match self {
            Self::Compute => element,
            Self::Fp8(..) => 1,
        }
    }

    /// Whether the forward keeps the input of the down projection for the backward. With delayed scaling the backward
    /// computes this input again, from the outputs of the gate and up projections.
    pub(super) fn keeps_hidden(self) -> bool {
        match self {
            Self::Compute | Self::Fp8(_, Scaling::Current) => true,
            Self::Fp8(_, Scaling::Delayed) => false,
        }
    }

    /// Bytes per parameter for the copies that the matmuls read: the weight matrix in FP8, and its transpose.
    pub fn copied_bytes(self) -> u64 {
        match self {
            Self::Compute => 0,
            Self::Fp8(..) => 2,
        }
    }

    /// Speedup of a GPU's matmuls over 16 bit.
    pub fn speed(self) -> f64 {
        match self {
            Self::Compute => 1.0,
            // Matmuls of the 325M model, measured in PyTorch on an H100 (2026-11-25): 96.3 ms in 16 bit, 57.3 in FP8.
            Self::Fp8(..) => 1.68,
        }
    }

    /// Checks that the matmuls support `number` rows, inputs or outputs. The error message calls this dimension `name`.
    ///
    /// # Errors
    /// When the matmuls do not support `number`.
    pub fn check(self, name: &str, number: usize) -> candle_sage::Result<()> {
        match self {
            Self::Fp8(..) if !number.is_multiple_of(ops::FP8_MULTIPLE) => {
                Err(Error::new(format!("{name} does not fit FP8 matmuls"))
                    .got(number)
                    .allowed(format!("a multiple of {}", ops::FP8_MULTIPLE))
                    .hint("--linear bf16 accepts any number"))
            }
            Self::Compute | Self::Fp8(..) => Ok(()),
        }
    }
}

/// The inputs of the linear layers in a transformer layer, and the gradients of their outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OperandRole {
    /// Input of the query, key and value projections.
    Normed,
    /// Input of attention's output projection.
    Attended,
    /// Input of the gate and up projections.
    MlpNormed,
    /// Input of the down projection.
    Hidden,
    /// Gradient of the outputs of the query, key and value projections.
    Projected,
    /// Gradient of the output of attention's output projection.
    Output,
    /// Gradient of the outputs of the gate and up projections.
    GateUp,
    /// Gradient of the output of the down projection.
    Down,
}

impl OperandRole {
    pub(super) const COUNT: usize = 8;

    pub(super) fn format(self, settings: Fp8Linear) -> Fp8Format {
        match self {
            Self::Normed | Self::Attended | Self::MlpNormed | Self::Hidden => Fp8Format::E4M3,
            Self::Projected | Self::Output | Self::GateUp | Self::Down => settings.gradient,
        }
    }

    pub(super) const ALL: [Self; Self::COUNT] = [
        Self::Normed,
        Self::Attended,
        Self::MlpNormed,
        Self::Hidden,
        Self::Projected,
        Self::Output,
        Self::GateUp,
        Self::Down,
    ];
}
