//! How Attn-QAT quantizes V.

use crate::error::{Error, Result};

/// The axis along which 16 values of V share a scale.
///
/// ```
/// use candle_sage::{AttnQat, ValueGroups};
///
/// let groups: ValueGroups = "head-dim".parse()?;
/// assert_eq!(AttnQat::default().value_groups(groups).value_groups, ValueGroups::HeadDim);
/// assert_eq!(ValueGroups::default().to_string(), "tokens");
/// # Ok::<(), candle_sage::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ValueGroups {
    /// Tokens: 16 tokens of a channel share a scale. P V sums over tokens, and block-scaled FP4 instructions need
    /// groups along the axis of the sum. So deployed models use this axis.
    ///
    /// A scale then depends on up to 15 later tokens, even with a causal mask: a token's value is rounded by the scale
    /// of its group's largest value, and a NaN reaches the earlier tokens of its group. (Token-by-token decoding
    /// quantizes an incomplete group again with each new token.)
    #[default]
    Tokens,
    /// Channels: 16 channels of a token share a scale, as in the paper's published training kernel.
    HeadDim,
}

/// Whether V is multiplied by a power of two before quantization, and the quantized V is divided by the same power.
///
/// Without this power of two, NVFP4 turns a group whose largest value is under 0.00586 into zeros, and limits values to
/// 2688. A group's scale loses bits if the group's largest value is under 0.09. QK-norm keeps the largest values of Q
/// and K well between 0.09 and 2688, but V has no such norm.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_sage::{Attention, AttnQat, ValueScale};
///
/// let x = Tensor::randn(0f32, 1., (1, 32, 2, 16), &Device::Cpu)?;
/// let small = (&x * 1e-4)?;
/// let largest = |scheme: AttnQat| -> candle_core::Result<f32> {
///     Attention::new(scheme).apply(&x, &x, &small)?.abs()?.max_all()?.to_scalar()
/// };
/// assert_eq!(largest(AttnQat::default())?, 0.0);
/// assert!(largest(AttnQat::default().value_scale(ValueScale::Head))? > 0.0);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ValueScale {
    /// V is not multiplied, as in the paper.
    #[default]
    None,
    /// V is multiplied by one factor for each key head of each sequence (or packed document): the power of two that
    /// moves the head's largest magnitude into [512, 1024). If the head contains a NaN or an infinity, the factor is 1.
    ///
    /// Where a group's scale is between 2^-6 and 448 both with and without the factor, [`ValueScale::None`] gives the
    /// same result. A runtime that runs the trained model in FP4 must apply the factor too.
    Head,
}

impl std::str::FromStr for ValueGroups {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = [Self::Tokens, Self::HeadDim].into_iter().find(|groups| groups.to_string() == text);
        found.ok_or_else(|| {
            Error::new("unknown axis of V's scale groups (`value-groups`)")
                .got(format!("`{text}`"))
                .allowed("tokens, head-dim")
                .hint("FP4 instructions need `tokens`; the published training kernel uses `head-dim`")
        })
    }
}

impl std::str::FromStr for ValueScale {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [Self::None, Self::Head].into_iter().find(|scale| scale.to_string() == text).ok_or_else(|| {
            Error::new("unknown scale of V (`value-scale`)")
                .got(format!("`{text}`"))
                .allowed("none, head")
                .hint("head also represents values below 0.006 or above 2688; none follows the paper")
        })
    }
}

impl std::fmt::Display for ValueGroups {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Tokens => "tokens",
            Self::HeadDim => "head-dim",
        })
    }
}

impl std::fmt::Display for ValueScale {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Head => "head",
        })
    }
}
