//! Smoothing: what is subtracted from operands before they are quantized.

use crate::error::{Error, Result};

/// The operands whose mean over tokens is subtracted before quantizing (SageBwd, sections 3 and 6).
///
/// ```
/// use candle_sage::{AttnQat, SageBwd, Smoothing};
///
/// assert_eq!(SageBwd::default().smoothing, Smoothing::K);
/// assert_eq!(AttnQat::default().smoothing, Smoothing::None);
/// assert_eq!(Smoothing::Qk.to_string(), "qk");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Smoothing {
    /// Subtracts nothing. A channel with a large mean then takes up most of the quantized range.
    None,
    /// Subtracts from K its mean over all tokens of the sequence, or over some of them ([`KeyMean`]). The softmax does
    /// not change, because all logits of a row shift by the same number. The gradients do not change, because every row
    /// of the exact dS sums to zero.
    #[default]
    K,
    /// As `K`, and subtracts the mean of each tile of Q from the tile. The product of this mean and K, one row of
    /// logits, is added to every row of the tile's logits. The backward adds this mean's contribution to dK.
    Qk,
    /// As `K`; also subtracts from V its mean `m`, over the same tokens as K's mean, and adds `m` to the output:
    /// `O = P (V - m) + m`, because every row of the exact P sums to one. The rounding error of P is then multiplied by
    /// `V - m` instead of V, which reduces the bias of the output (the mean of its error). This method is ours;
    /// `docs/gradient_bias.md` has measurements. `Kv` cannot be combined with
    /// `AttnQat::high_precision_output(false)` or `Products::Nvfp4`.
    Kv,
}

impl Smoothing {
    /// Whether the mean of each tile of Q is subtracted.
    ///
    /// ```
    /// use candle_sage::Smoothing;
    ///
    /// let all = [Smoothing::None, Smoothing::K, Smoothing::Qk, Smoothing::Kv];
    /// assert_eq!(all.map(Smoothing::of_queries), [false, false, true, false]);
    /// assert_eq!(all.map(Smoothing::of_keys), [false, true, true, true]);
    /// assert_eq!(all.map(Smoothing::of_values), [false, false, false, true]);
    /// ```
    pub fn of_queries(self) -> bool {
        self == Self::Qk
    }

    /// Whether K's mean is subtracted.
    pub fn of_keys(self) -> bool {
        self != Self::None
    }

    /// Whether V's mean is subtracted.
    pub fn of_values(self) -> bool {
        self == Self::Kv
    }
}

/// The tokens over which [`Smoothing`] takes the means of K and V.
///
/// Subtracting the same vector from all keys changes neither the softmax nor the gradients. The subtraction only makes
/// better use of the quantized range; the mean of a few dozen keys suffices for that. The mean of all keys requires a
/// separate pass over K. `docs/sagebwd_products.md` compares the errors and times of these two means.
///
/// ```
/// use candle_sage::KeyMean;
///
/// let sample: KeyMean = "sample-4".parse()?;
/// assert_eq!(sample, KeyMean::Sample(4));
/// // The middle token of each quarter of ten tokens.
/// assert_eq!(sample.tokens(10).collect::<Vec<_>>(), [1, 3, 6, 8]);
/// assert_eq!(sample.tokens(3).collect::<Vec<_>>(), [0, 1, 2]);
/// assert_eq!(KeyMean::All.tokens(3).collect::<Vec<_>>(), [0, 1, 2]);
/// # Ok::<(), candle_sage::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum KeyMean {
    /// All tokens of the sequence, or of each packed document, as in the SageBwd paper.
    #[default]
    All,
    /// At most this many tokens (1 to 4096) of the sequence or of each packed document: the middles of equal intervals.
    /// If `n` tokens are divided into `m` intervals, the middle of interval `i` is token `floor((2 i + 1) n / (2 m))`.
    /// A small sample thus excludes the first token, which may be an attention sink with an unusual key.
    Sample(usize),
}

impl KeyMean {
    /// The indices of the tokens over which the mean is taken, in a sequence of `n` tokens.
    pub fn tokens(self, n: usize) -> impl Iterator<Item = usize> {
        let count = match self {
            Self::All => n,
            Self::Sample(count) => count.min(n),
        };
        (0..count).map(move |i| ((2 * i as u64 + 1) * n as u64 / (2 * count as u64)) as usize)
    }

    pub(super) fn in_range(self) -> bool {
        !matches!(self, Self::Sample(count) if !(1..=4096).contains(&count))
    }
}

impl std::fmt::Display for Smoothing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Smoothing::None => "none",
            Smoothing::K => "k",
            Smoothing::Qk => "qk",
            Smoothing::Kv => "kv",
        })
    }
}

impl std::fmt::Display for KeyMean {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            KeyMean::All => f.write_str("all"),
            KeyMean::Sample(count) => write!(f, "sample-{count}"),
        }
    }
}

impl std::str::FromStr for KeyMean {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parsed = match text {
            "all" => Some(KeyMean::All),
            _ => text.strip_prefix("sample-").and_then(|n| n.parse().ok()).map(KeyMean::Sample),
        };
        parsed.filter(|mean| mean.in_range()).ok_or_else(|| {
            Error::new("unknown choice of tokens for K's mean (`key-mean`)")
                .got(format!("`{text}`"))
                .allowed("all, sample-1 to sample-4096")
                .hint("all is the paper's choice; sample-64 avoids an additional read of K")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_mean_prints_and_parses() {
        for mean in [KeyMean::All, KeyMean::Sample(1), KeyMean::Sample(64), KeyMean::Sample(4096)] {
            assert_eq!(mean.to_string().parse(), Ok(mean));
        }
        for bad in ["", "sample", "sample-", "sample-0", "sample-4097", "64", "All"] {
            assert!(bad.parse::<KeyMean>().is_err(), "{bad}");
        }
        for (count, tokens) in [(64, 1), (64, 63), (64, 64), (64, 65), (64, 4096), (1, 7), (4096, 5000)] {
            let sample: Vec<_> = KeyMean::Sample(count).tokens(tokens).collect();
            assert_eq!(sample.len(), count.min(tokens));
            assert!(sample.windows(2).all(|pair| pair[0] < pair[1]) && *sample.last().unwrap() < tokens);
        }
        assert_eq!(KeyMean::Sample(8).tokens(0).count() + KeyMean::All.tokens(0).count(), 0);
    }
}
