//! What is computed: the numerics of the seven attention products. Settings only, no data.
//!
//! A scheme has a file of the same name on every floor: `scheme/sagebwd.rs` holds its settings,
//! `cpu/sagebwd.rs` its arithmetic.

mod attn_qat;
mod sagebwd;

pub use attn_qat::{AttnQat, PReference, Products, ValueGroups};
pub use sagebwd::{Granularity, Int8Products, SageBwd, Smoothing};

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
    /// FP4 attention with a backward that trains through it (Attn-QAT, arXiv 2603.00040).
    AttnQat(AttnQat),
}

impl Scheme {
    /// Every scheme, with its default settings.
    pub fn all() -> Vec<Self> {
        vec![Self::FullPrecision, Self::SageBwd(SageBwd::default()), Self::AttnQat(AttnQat::default())]
    }

    /// A word for the scheme, the same for all of its settings: as it is called in tables and on command lines.
    pub fn name(&self) -> &'static str {
        match self {
            Self::FullPrecision => "fpa",
            Self::SageBwd(_) => "sagebwd",
            Self::AttnQat(_) => "attn-qat",
        }
    }

    /// One line that says what it is.
    pub fn summary(&self) -> &'static str {
        match self {
            Self::FullPrecision => "Full-precision attention",
            Self::SageBwd(_) => "INT8 attention with an INT8 backward (SageBwd)",
            Self::AttnQat(_) => "FP4 attention, trained for FP4 inference (Attn-QAT)",
        }
    }

    /// Every setting of the scheme, as a name and a value in words: two schemes with the same name and settings compute the
    /// same.
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::FullPrecision => Vec::new(),
            Self::SageBwd(settings) => settings.in_words(),
            Self::AttnQat(settings) => settings.in_words(),
        }
    }

    /// Bytes a token that a forward keeps on a GPU for its backward besides inputs, output and single values a row, with so
    /// many channels of all query heads and of all key heads, of `element` bytes.
    pub fn kept_bytes(&self, queries: u64, keys: u64, element: u64) -> u64 {
        match self {
            Self::FullPrecision => 0,
            Self::SageBwd(settings) if settings.products == Int8Products::FORWARD => 0,
            Self::SageBwd(_) => queries + keys,
            Self::AttnQat(settings) if settings.high_precision_output => queries * element,
            Self::AttnQat(_) => 0,
        }
    }

    /// What a low-bit inference runtime needs to know to compute what a model was trained for, as names and values. Empty
    /// where any exact attention will do.
    pub fn runtime_settings(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::FullPrecision | Self::SageBwd(_) => Vec::new(),
            Self::AttnQat(settings) => settings.runtime_settings(),
        }
    }

    /// What the blocks of a [`Selection`](crate::Selection) are multiples of: queries, and keys.
    pub fn block_unit(&self) -> (usize, usize) {
        match self {
            Self::FullPrecision | Self::AttnQat(_) => (16, 16),
            Self::SageBwd(settings) => (settings.tile_q, settings.tile_k),
        }
    }

    /// Whether it has no backward.
    pub(crate) fn is_forward_only(&self) -> bool {
        matches!(self, Self::AttnQat(AttnQat { products: Products::Nvfp4, .. }))
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// When a tile or group size is out of range.
    pub fn validate(&self) -> Result<()> {
        match self {
            Scheme::FullPrecision => Ok(()),
            Scheme::SageBwd(settings) => settings.validate(),
            Scheme::AttnQat(settings) => settings.validate(),
        }
    }
}

impl From<SageBwd> for Scheme {
    fn from(settings: SageBwd) -> Self {
        Scheme::SageBwd(settings)
    }
}

impl From<AttnQat> for Scheme {
    fn from(settings: AttnQat) -> Self {
        Scheme::AttnQat(settings)
    }
}

impl std::fmt::Display for Scheme {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Scheme::FullPrecision => f.write_str("full precision"),
            Scheme::SageBwd(settings) => settings.fmt(f),
            Scheme::AttnQat(settings) => settings.fmt(f),
        }
    }
}
