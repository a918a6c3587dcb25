//! What is computed: the numerics of the seven attention products. Settings only, no data.
//!
//! A scheme has a file of the same name on every floor: `scheme/sagebwd.rs` holds its settings,
//! `cpu/sagebwd.rs` its arithmetic.

mod sagebwd;

pub use sagebwd::{Granularity, SageBwd, Smoothing};

use crate::error::Result;

/// The numerics of an attention call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Scheme {
    /// Every product in floating point, as in FlashAttention-2: the baseline to compare with.
    /// On the CPU all products run in f32, also for 16-bit inputs; on CUDA operands are in 16 bit and
    /// sums in f32.
    #[default]
    FullPrecision,
    /// INT8 attention with an INT8 backward (SageBwd, arXiv 2603.02170).
    SageBwd(SageBwd),
}

impl Scheme {
    /// Checks the settings.
    ///
    /// # Errors
    /// When a tile or group size is out of range.
    pub fn validate(&self) -> Result<()> {
        match self {
            Scheme::FullPrecision => Ok(()),
            Scheme::SageBwd(settings) => settings.validate(),
        }
    }
}

impl From<SageBwd> for Scheme {
    fn from(settings: SageBwd) -> Self {
        Scheme::SageBwd(settings)
    }
}

impl std::fmt::Display for Scheme {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Scheme::FullPrecision => f.write_str("full precision"),
            Scheme::SageBwd(settings) => settings.fmt(f),
        }
    }
}
