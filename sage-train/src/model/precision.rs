//! What linear layers compute in, and the places of their operands.

use candle_sage::Error;
use candle_sage::fp8::Fp8Format;
use candle_sage::ops::{self, Fp8Linear};

/// What the products of linear layers compute in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinearPrecision {
    /// The compute type of the model.
    Compute,
    /// FP8, with a scale for each matrix.
    Fp8(Fp8Linear, Scaling),
}

/// Where the scale of a matrix in FP8 comes from. The scale of a weight always comes from its own largest value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scaling {
    /// The matrix's own largest value, which takes a second pass over memory.
    Current,
    /// The largest values of earlier steps, with a margin.
    Delayed,
}

impl LinearPrecision {
    /// The settings of FP8, if matmuls are in it.
    pub fn fp8(self) -> Option<(Fp8Linear, Scaling)> {
        match self {
            Self::Compute => None,
            Self::Fp8(settings, scaling) => Some((settings, scaling)),
        }
    }

    /// Bytes of an element of an operand that the backward needs again, if the model computes in elements of `element` bytes.
    pub fn kept_bytes(self, element: u64) -> u64 {
        match self {
            Self::Compute => element,
            Self::Fp8(..) => 1,
        }
    }

    /// Whether the backward needs the input of the down projection. With delayed scaling it makes the transposed codes, which it alone reads,
    /// where it reads gate and up: then nobody writes them twice.
    pub(super) fn keeps_hidden(self) -> bool {
        match self {
            Self::Compute | Self::Fp8(_, Scaling::Current) => true,
            Self::Fp8(_, Scaling::Delayed) => false,
        }
    }

    /// Bytes of the copies of a weight that the products read instead of the model's own.
    pub fn copied_bytes(self) -> u64 {
        match self {
            Self::Compute => 0,
            Self::Fp8(..) => 2,
        }
    }

    /// How many times as fast as in 16 bit a GPU multiplies.
    pub fn speed(self) -> f64 {
        match self {
            Self::Compute => 1.0,
            // 96.3 and 57.3 ms for the products of the 325M model on an H100 (PyTorch, 2026-11-25).
            Self::Fp8(..) => 1.68,
        }
    }

    /// Checks a number of rows, inputs or outputs, which `name` calls.
    ///
    /// # Errors
    /// When the products do not take it.
    pub fn check(self, name: &str, number: usize) -> candle_sage::Result<()> {
        match self {
            Self::Fp8(..) if !number.is_multiple_of(ops::FP8_MULTIPLE) => {
                Err(Error::new(format!("{name} does not fit products in FP8"))
                    .got(number)
                    .allowed(format!("a multiple of {}", ops::FP8_MULTIPLE))
                    .hint("--linear bf16 takes any number"))
            }
            Self::Compute | Self::Fp8(..) => Ok(()),
        }
    }
}

/// What an operand is in its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Inputs.
    Normed,
    Attended,
    MlpNormed,
    Hidden,
    /// Gradients of outputs: of query, key and value, of attention's output projection, of gate and up, of the down projection.
    Projected,
    Output,
    GateUp,
    Down,
}

impl Place {
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
