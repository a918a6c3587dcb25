//! Schemes: the numerics of attention's seven matmuls. A scheme consists only of settings.
//!
//! Files are named after their scheme in every module: `scheme/sagebwd.rs` contains the settings, `cpu/sagebwd.rs` the
//! CPU arithmetic.

mod attn_qat;
mod sagebwd;
mod smoothing;
mod text;

pub(crate) use attn_qat::MEAN_ROWS;
pub use attn_qat::{AttnQat, PReference, Products, ValueGroups, ValueScale};
pub use sagebwd::{Granularity, Int8Products, SageBwd};
pub use smoothing::{KeyMean, Smoothing};

use crate::error::Result;

/// The numerics of an attention call.
///
/// ```
/// use candle_sage::{AttnQat, SageBwd, Scheme, Smoothing};
///
/// let scheme: Scheme = SageBwd::default().smoothing(Smoothing::Qk).into();
/// scheme.validate()?;
/// assert_eq!(scheme.to_string(), "SageBwd, smoothing qk, granularity vector, tiles 64x64");
/// assert_ne!(scheme, Scheme::from(AttnQat::default()));
/// # Ok::<(), candle_sage::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Scheme {
    /// Unquantized attention, as in FlashAttention-2: the baseline. On the CPU all matmuls run in f32, also for 16-bit
    /// inputs; on CUDA operands are 16-bit and accumulators f32.
    #[default]
    Unquantized,
    /// INT8 attention with an INT8 backward (SageBwd, arXiv 2603.02170).
    SageBwd(SageBwd),
    /// FP4 attention with a backward that trains through the quantization (Attn-QAT, arXiv 2603.00040).
    AttnQat(AttnQat),
}

impl Scheme {
    /// The former name of [`Scheme::Unquantized`].
    #[deprecated(note = "use `Scheme::Unquantized`")]
    #[expect(non_upper_case_globals)]
    pub const FullPrecision: Self = Self::Unquantized;

    /// Every scheme, with its default settings.
    ///
    /// ```
    /// use candle_sage::Scheme;
    ///
    /// let names: Vec<_> = Scheme::all().iter().map(Scheme::name).collect();
    /// assert_eq!(names, ["fpa", "sagebwd", "attn-qat"]);
    /// ```
    pub fn all() -> Vec<Self> {
        // This match makes the compiler report a new scheme that is missing here.
        let next = |scheme: &Self| match scheme {
            Self::Unquantized => Some(SageBwd::default().into()),
            Self::SageBwd(_) => Some(AttnQat::default().into()),
            Self::AttnQat(_) => None,
        };
        std::iter::successors(Some(Self::Unquantized), next).collect()
    }

    /// Whether a list contains every scheme, with any settings.
    #[cfg(test)]
    pub(crate) fn contains_all(list: &[Self]) -> bool {
        Self::all().iter().all(|scheme| list.iter().any(|one| one.name() == scheme.name()))
    }

    /// Short name of the scheme, independent of the settings, for tables and command lines.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Unquantized => "fpa",
            Self::SageBwd(_) => "sagebwd",
            Self::AttnQat(_) => "attn-qat",
        }
    }

    /// A description of the scheme in one line.
    pub fn summary(&self) -> &'static str {
        match self {
            Self::Unquantized => "Unquantized attention",
            Self::SageBwd(_) => "INT8 attention with an INT8 backward (SageBwd)",
            Self::AttnQat(_) => "FP4 attention for training a model that will run in FP4 (Attn-QAT)",
        }
    }

    /// Whether logits are computed from keys minus their mean over tokens. Subtracting the mean changes the logits but
    /// not the softmax. [Soft caps](crate::Attention::softcap), [sinks](crate::Attention::sinks) and
    /// [log-sum-exps](crate::Attention::apply_with_lse) need the original logits, so they are errors with such a
    /// scheme.
    ///
    /// ```
    /// use candle_sage::{SageBwd, Scheme, Smoothing};
    ///
    /// assert!(Scheme::from(SageBwd::default()).smooths_keys());
    /// assert!(!Scheme::from(SageBwd::default().smoothing(Smoothing::None)).smooths_keys());
    /// ```
    pub fn smooths_keys(&self) -> bool {
        match self {
            Self::Unquantized => false,
            Self::SageBwd(settings) => settings.smoothing != Smoothing::None,
            Self::AttnQat(settings) => settings.smoothing != Smoothing::None,
        }
    }

    /// The same scheme without smoothing: see [`Smoothing::None`].
    ///
    /// ```
    /// use candle_sage::{SageBwd, Scheme};
    ///
    /// assert!(!Scheme::from(SageBwd::default()).without_smoothing().smooths_keys());
    /// ```
    #[must_use]
    pub fn without_smoothing(self) -> Self {
        match self {
            Self::Unquantized => self,
            Self::SageBwd(settings) => settings.smoothing(Smoothing::None).into(),
            Self::AttnQat(settings) => settings.smoothing(Smoothing::None).into(),
        }
    }

    /// Whether the kernels for GPUs support a [soft cap](crate::Attention::softcap) and
    /// [`ALiBi`](crate::Attention::alibi). On the CPU every scheme supports a soft cap and `ALiBi`.
    ///
    /// ```
    /// use candle_sage::{Int8Products, SageBwd, Scheme};
    ///
    /// assert!(!Scheme::from(SageBwd::default()).supports_softcap_on_gpu());
    /// assert!(Scheme::from(SageBwd::default().products(Int8Products::SCORES)).supports_softcap_on_gpu());
    /// ```
    pub fn supports_softcap_on_gpu(&self) -> bool {
        match self {
            Self::Unquantized => true,
            Self::SageBwd(settings) => settings.products == Int8Products::SCORES,
            Self::AttnQat(settings) => settings.products == Products::SixteenBit,
        }
    }

    /// The name and the value (as text) of each setting that changes results. [`AttnQat::products`] is not included: it
    /// changes only the order of sums. If two schemes have the same [`Scheme::name`] and settings, they compute the
    /// same results, up to the order of sums.
    ///
    /// ```
    /// use candle_sage::{SageBwd, Scheme};
    ///
    /// let settings = Scheme::from(SageBwd::default().tile_q(32)).settings();
    /// assert!(settings.contains(&("tile-q", "32".to_string())));
    /// assert!(Scheme::Unquantized.settings().is_empty());
    /// ```
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::Unquantized => Vec::new(),
            Self::SageBwd(settings) => settings.as_text(),
            Self::AttnQat(settings) => settings.as_text(),
        }
    }

    /// Bytes per token that a forward on a GPU keeps for its backward, in addition to inputs, output and a few numbers
    /// for each query of each head. `queries` and `keys` are the numbers of channels of all query heads and of all key
    /// heads; `element` is the size of an input's element in bytes.
    ///
    /// ```
    /// use candle_sage::{SageBwd, Scheme};
    ///
    /// // Eight query heads and two key heads of 64 channels in bf16. Kept: Q and K in INT8, one byte per element.
    /// let scheme = Scheme::from(SageBwd::default());
    /// assert_eq!(scheme.kept_bytes(8 * 64, 2 * 64, 2), 640);
    /// ```
    pub fn kept_bytes(&self, queries: u64, keys: u64, element: u64) -> u64 {
        match self {
            Self::Unquantized => 0,
            Self::SageBwd(settings) if settings.products == Int8Products::FORWARD => 0,
            Self::SageBwd(_) => queries + keys,
            Self::AttnQat(settings) if settings.high_precision_output => queries * element,
            Self::AttnQat(_) => 0,
        }
    }

    /// Names and values of the settings that a low-bit inference runtime needs to run a model trained with this scheme.
    /// Empty if the model may run with any exact attention.
    ///
    /// ```
    /// use candle_sage::{AttnQat, Scheme};
    ///
    /// let settings = Scheme::from(AttnQat::default()).runtime_settings();
    /// assert!(settings.contains(&("format", "nvfp4".to_string())));
    /// assert!(Scheme::Unquantized.runtime_settings().is_empty());
    /// ```
    pub fn runtime_settings(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::Unquantized | Self::SageBwd(_) => Vec::new(),
            Self::AttnQat(settings) => settings.runtime_settings(),
        }
    }

    /// The unit of block sizes, in queries and in keys: the block sizes of a [`Selection`](crate::Selection) must be
    /// multiples of this unit.
    ///
    /// ```
    /// use candle_sage::{SageBwd, Scheme};
    ///
    /// assert_eq!(Scheme::Unquantized.block_unit(), (16, 16));
    /// assert_eq!(Scheme::from(SageBwd::default()).block_unit(), (64, 64));
    /// ```
    pub fn block_unit(&self) -> (usize, usize) {
        match self {
            Self::Unquantized | Self::AttnQat(_) => (16, 16),
            Self::SageBwd(settings) => (settings.tile_q, settings.tile_k),
        }
    }

    /// Limits SageBwd's tiles to `tokens` queries and keys, for selections with small blocks. Other schemes are not
    /// changed.
    ///
    /// ```
    /// use candle_sage::{SageBwd, Scheme};
    ///
    /// assert_eq!(Scheme::from(SageBwd::default()).for_blocks(32).block_unit(), (32, 32));
    /// ```
    #[must_use]
    pub fn for_blocks(self, tokens: usize) -> Self {
        match self {
            Self::Unquantized | Self::AttnQat(_) => self,
            Self::SageBwd(settings) => {
                let (tile_q, tile_k) = (settings.tile_q.min(tokens), settings.tile_k.min(tokens));
                settings.tile_q(tile_q).tile_k(tile_k).into()
            }
        }
    }

    pub(crate) fn is_forward_only(&self) -> bool {
        matches!(self, Self::AttnQat(AttnQat { products: Products::Nvfp4, .. }))
    }

    /// Checks the settings.
    ///
    /// ```
    /// use candle_sage::{SageBwd, Scheme};
    ///
    /// assert!(Scheme::from(SageBwd::default().tile_k(128)).validate().is_ok());
    /// assert!(Scheme::from(SageBwd::default().tile_k(8)).validate().is_err());
    /// ```
    ///
    /// # Errors
    /// When a setting is out of range, or when settings do not fit together.
    pub fn validate(&self) -> Result<()> {
        match self {
            Scheme::Unquantized => Ok(()),
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
            Scheme::Unquantized => f.write_str("unquantized"),
            Scheme::SageBwd(settings) => settings.fmt(f),
            Scheme::AttnQat(settings) => settings.fmt(f),
        }
    }
}
