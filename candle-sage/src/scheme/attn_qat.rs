//! Settings of Attn-QAT, quantization-aware training of FP4 attention (arXiv 2603.00040).

mod values;

use super::Smoothing;
use crate::error::{Error, Result};

pub use values::{ValueGroups, ValueScale};

/// The means of K and V are computed from partial sums over this many rows, so that a mean has the same bits on the CPU
/// and on a GPU.
pub(crate) const MEAN_ROWS: usize = 64;

/// Attn-QAT: attention in 4-bit floating point ([NVFP4](crate::nvfp4)), with a backward that trains through the
/// quantization.
///
/// ```text
/// forward    Q^ = fq(Q)   K^ = fq(K)   V^ = fq(V)          fq rounds to NVFP4 and back
///            P  = softmax(scale Q^ K^^T)                    in floating point
///            O  = fq(P) V^              O' = P V^           O' is kept only for the backward
/// backward   P  from Q^, K^ and the forward's log-sum-exp
///            dV = fq(P)^T dO            dP = dO V^^T
///            dS = P o (dP - rowsum(dO o O'))
///            dQ = scale dS K^           dK = scale dS^T Q^
/// ```
///
/// Gradients pass fq unchanged (straight-through estimator); dO, dP and dS are never quantized. Groups of 16 values
/// that share a scale run along head_dim for Q and K, along the keys for P, and along the axis of [`ValueGroups`] for
/// V.
///
/// Attn-QAT prepares a model for FP4 inference; it does not make training faster. On every GPU, training multiplies
/// 16-bit operands. They represent NVFP4 values exactly, except that fq(P) in the product for dV is rounded to 16 bit.
/// So the forward has the results of FP4 tensor cores up to the order of sums.
///
/// Each ablation of the paper is one setting; [`AttnQat::drop_in`] is the paper's baseline that replaces only the
/// forward.
///
/// ```
/// use candle_core::{Device, Var};
/// use candle_sage::{Attention, AttnQat, PReference};
///
/// let var = || Var::randn(0f32, 1., (1, 32, 2, 16), &Device::Cpu);
/// let (q, k, v) = (var()?, var()?, var()?);
/// let scheme = AttnQat::default().p_reference(PReference::TwoLevel);
/// let out = Attention::new(scheme).causal(true).apply(&q, &k, &v)?;
/// let gradients = out.sqr()?.sum_all()?.backward()?;
/// assert!([&q, &k, &v].iter().all(|x| gradients.get(x).is_some()));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct AttnQat {
    /// Operands whose mean over tokens is subtracted before quantizing: none (the default, since the paper measured no
    /// gain), K, or K and V. The means are over all tokens, also with a causal mask. Subtracting K's mean does not
    /// change the softmax, but it changes how K is rounded.
    pub smoothing: Smoothing,
    /// Axis along which 16 values of V share a scale.
    pub value_groups: ValueGroups,
    /// Whether V is scaled to NVFP4's range before it is quantized.
    pub value_scale: ValueScale,
    /// See [`PReference`].
    pub p_reference: PReference,
    /// Whether dS uses the high-precision output O' (the paper's principle 2). Otherwise dS uses O; then the rows of dS
    /// do not sum to zero, and the mean of K leaks into dQ.
    pub high_precision_output: bool,
    /// Whether the backward computes its scores and all other matmuls from the forward's Q^, K^ and V^ (the paper's
    /// principle 1). Otherwise the backward uses the unquantized tensors (as a stock backward would), and computes
    /// probabilities that do not match the forward's log-sum-exp.
    pub matched_recomputation: bool,
    /// Whether dV is computed from quantized probabilities, as O is. Otherwise dV is computed from unquantized P.
    pub requantized_p: bool,
    /// Instructions that compute the matmuls. The choice changes an output only by the order of sums.
    /// [`Products::Nvfp4`] has no backward.
    pub products: Products,
}

impl Default for AttnQat {
    fn default() -> Self {
        Self {
            smoothing: Smoothing::None,
            value_groups: ValueGroups::default(),
            value_scale: ValueScale::default(),
            p_reference: PReference::default(),
            high_precision_output: true,
            matched_recomputation: true,
            requantized_p: true,
            products: Products::default(),
        }
    }
}

/// The instructions that multiply FP4 values.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_sage::{Attention, AttnQat, Products};
///
/// let inference = Attention::new(AttnQat::default().products(Products::Nvfp4));
/// let x = Tensor::randn(0f32, 1., (1, 32, 2, 16), &Device::Cpu)?;
/// assert_eq!(inference.apply(&x, &x, &x)?.dims(), x.dims());
/// // `Nvfp4` has no backward, so a variable is an error.
/// let x = Var::from_tensor(&x)?;
/// assert!(inference.apply(&x, &x, &x).is_err());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Products {
    /// 16-bit matmuls (f32 on the CPU) of values that NVFP4 can represent. Every device has a forward and a backward.
    #[default]
    SixteenBit,
    /// Block-scaled FP4 matmuls for inference, on GPUs of compute capability 10.0, 10.3 and 12.x. The CPU computes as
    /// with [`Products::SixteenBit`]. This variant has no backward: an input that candle tracks for gradients is an
    /// error.
    ///
    /// **The kernels have not run on such GPUs.** They are compiled for these GPUs, and their sources run on a CPU,
    /// thread by thread, with the instructions emulated as the PTX manual describes them (`kernels/host/run`). The
    /// emulated results equal the same NVFP4 attention computed in f64, up to rounding.
    Nvfp4,
}

/// A row's reference: the exponentials `2^logit` of the row's base-2 logits are divided by it, and the quotients are
/// quantized to NVFP4. Small quotients lose bits, because the E4M3 scale of their group has fewer than four significant
/// bits if it is below 2^-6.
///
/// ```
/// use candle_sage::PReference;
///
/// let reference: PReference = "two-level".parse()?;
/// assert_eq!(reference, PReference::TwoLevel);
/// assert_eq!(PReference::default().to_string(), "row-max");
/// # Ok::<(), candle_sage::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PReference {
    /// `2^ceil(m)`. In the backward, m is the row's largest base-2 logit; in the forward, the largest one for the keys
    /// read so far. The references of forward and backward differ by a power of two, so both compute the same E2M1
    /// values of every group whose E4M3 scale is at least 2^-6.
    #[default]
    RowMax,
    /// [`PReference::RowMax`] divided by 2048, so that the largest E4M3 scale is near the largest E4M3 value.
    /// Probabilities can be 2048 times smaller than with `RowMax` before their scales lose bits. The paper's two-level
    /// scale is similar: it multiplies a row by 2688 divided by the row's maximum.
    ///
    /// On CUDA the output can be wrong for logits beyond 10^7: rounding such logits in f32 can raise a scale
    /// beyond E4M3's range.
    TwoLevel,
    /// As in the paper's text: the forward divides a row's exponentials by the largest one, and the backward divides
    /// them by their sum. In the backward, a group of 16 quotients becomes zeros if all are below 0.006. Only for
    /// reproduction: with diffuse attention most of dV is lost.
    Literal,
}

impl AttnQat {
    /// The paper's baseline: the FP4 forward, with a stock backward on unquantized Q, K and V.
    ///
    /// ```
    /// use candle_sage::AttnQat;
    ///
    /// let baseline = AttnQat::drop_in();
    /// assert!(!baseline.high_precision_output && !baseline.matched_recomputation && !baseline.requantized_p);
    /// ```
    pub fn drop_in() -> Self {
        Self {
            high_precision_output: false,
            matched_recomputation: false,
            requantized_p: false,
            ..Self::default()
        }
    }

    /// Sets [`AttnQat::smoothing`].
    #[must_use]
    pub fn smoothing(mut self, smoothing: Smoothing) -> Self {
        self.smoothing = smoothing;
        self
    }

    /// Sets [`AttnQat::value_groups`].
    #[must_use]
    pub fn value_groups(mut self, value_groups: ValueGroups) -> Self {
        self.value_groups = value_groups;
        self
    }

    /// Sets [`AttnQat::value_scale`].
    #[must_use]
    pub fn value_scale(mut self, value_scale: ValueScale) -> Self {
        self.value_scale = value_scale;
        self
    }

    /// Sets [`AttnQat::p_reference`].
    #[must_use]
    pub fn p_reference(mut self, p_reference: PReference) -> Self {
        self.p_reference = p_reference;
        self
    }

    /// Sets [`AttnQat::high_precision_output`].
    #[must_use]
    pub fn high_precision_output(mut self, on: bool) -> Self {
        self.high_precision_output = on;
        self
    }

    /// Sets [`AttnQat::matched_recomputation`].
    #[must_use]
    pub fn matched_recomputation(mut self, on: bool) -> Self {
        self.matched_recomputation = on;
        self
    }

    /// Sets [`AttnQat::requantized_p`].
    #[must_use]
    pub fn requantized_p(mut self, on: bool) -> Self {
        self.requantized_p = on;
        self
    }

    /// Sets [`AttnQat::products`].
    #[must_use]
    pub fn products(mut self, products: Products) -> Self {
        self.products = products;
        self
    }

    /// The name and the value (as text) of each setting that changes results.
    pub(super) fn as_text(&self) -> Vec<(&'static str, String)> {
        let switch = |on: &bool| if *on { "on" } else { "off" }.to_string();
        let Self {
            smoothing,
            value_groups,
            value_scale,
            p_reference,
            high_precision_output,
            matched_recomputation,
            requantized_p,
            // `products` changes only the order of sums.
            products: _,
        } = self;
        vec![
            ("smoothing", smoothing.to_string()),
            ("value-groups", value_groups.to_string()),
            ("value-scale", value_scale.to_string()),
            ("p-reference", p_reference.to_string()),
            ("high-precision-output", switch(high_precision_output)),
            ("matched-recomputation", switch(matched_recomputation)),
            ("requantized-p", switch(requantized_p)),
        ]
    }

    /// See [`Scheme::runtime_settings`](crate::Scheme::runtime_settings).
    pub(super) fn runtime_settings(&self) -> Vec<(&'static str, String)> {
        let text = |words: &str| words.to_string();
        vec![
            ("format", text("nvfp4")),
            ("element", text("e2m1")),
            ("scale", text("e4m3")),
            ("group", crate::nvfp4::GROUP.to_string()),
            ("query_groups", text("head-dim")),
            ("key_groups", text("head-dim")),
            ("value_groups", self.value_groups.to_string()),
            ("value_scale", self.value_scale.to_string()),
            ("probability_groups", text("keys")),
            ("probability_reference", self.p_reference.to_string()),
            ("smoothing", self.smoothing.to_string()),
        ]
    }

    /// Checks the settings.
    ///
    /// ```
    /// use candle_sage::{AttnQat, Smoothing};
    ///
    /// assert!(AttnQat::default().smoothing(Smoothing::K).validate().is_ok());
    /// let error = AttnQat::default().smoothing(Smoothing::Qk).validate().unwrap_err();
    /// assert!(error.to_string().contains("allowed: smoothing none, k, kv"));
    /// ```
    ///
    /// # Errors
    /// When Q is smoothed; when smoothing of V is combined with FP4 matmuls or with `high_precision_output` off; when
    /// FP4 matmuls are combined with [`ValueScale::Head`] or [`ValueGroups::HeadDim`].
    pub fn validate(&self) -> Result<()> {
        if self.smoothing.of_values() && !self.high_precision_output {
            return Err(Error::new("smoothing of V needs `high_precision_output`")
                .got("smoothing kv without high_precision_output")
                .allowed("smoothing none, k; or kv with high_precision_output")
                .hint("AttnQat::high_precision_output(true) is the default"));
        }
        if self.smoothing.of_values() && self.products == Products::Nvfp4 {
            return Err(Error::unsupported("FP4 matmuls do not support smoothing of V")
                .got("smoothing kv, products nvfp4")
                .allowed("smoothing none, k")
                .hint("16-bit matmuls support it: AttnQat::products(Products::SixteenBit)"));
        }
        if self.smoothing.of_queries() {
            return Err(Error::new("Attn-QAT does not smooth the query")
                .got("smoothing qk")
                .allowed("smoothing none, k, kv")
                .hint("SageBwd smooths query and key"));
        }
        if self.products == Products::Nvfp4 && self.value_scale != ValueScale::None {
            return Err(Error::unsupported("FP4 matmuls do not support a scale for each head of V")
                .got(format!("value scale {}, products nvfp4", self.value_scale))
                .allowed("value scale none")
                .hint("multiply V by a power of two before the call, and divide the output by it"));
        }
        if self.products == Products::Nvfp4 && self.value_groups != ValueGroups::Tokens {
            return Err(Error::new("FP4 matmuls need V's scale groups along the tokens")
                .got(format!("value groups {}", self.value_groups))
                .allowed("value groups tokens")
                .hint("value groups head-dim need AttnQat::products(Products::SixteenBit)"));
        }
        Ok(())
    }
}

impl PReference {
    /// The base-2 logarithm of a row's reference (see [`PReference`]). `max` is the row's largest base-2 logit.
    ///
    /// ```
    /// use candle_sage::PReference;
    ///
    /// let all = [PReference::RowMax, PReference::TwoLevel, PReference::Literal];
    /// assert_eq!(all.map(|reference| reference.of(2.5)), [3.0, -8.0, 2.5]);
    /// ```
    #[inline(always)]
    pub fn of(self, max: f32) -> f32 {
        match self {
            Self::RowMax => max.ceil(),
            Self::TwoLevel => max.ceil() - 11.0,
            Self::Literal => max,
        }
    }
}

impl std::str::FromStr for PReference {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let all = [Self::RowMax, Self::TwoLevel, Self::Literal];
        all.into_iter().find(|reference| reference.to_string() == text).ok_or_else(|| {
            Error::new("unknown reference for P (`p-reference`)")
                .got(format!("`{text}`"))
                .allowed("row-max, two-level, literal")
                .hint("row-max keeps dV accurate if attention is diffuse; literal follows the paper's text")
        })
    }
}

impl std::fmt::Display for AttnQat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { smoothing, value_groups, value_scale, p_reference, .. } = self;
        write!(f, "Attn-QAT, smoothing {smoothing}, values by {value_groups}, P by {p_reference}")?;
        if *value_scale != ValueScale::None {
            write!(f, ", scale of V by {value_scale}")?;
        }
        for (on, missing) in [
            (self.high_precision_output, "high-precision output"),
            (self.matched_recomputation, "matched recomputation"),
            (self.requantized_p, "requantized P"),
        ] {
            if !on {
                write!(f, ", no {missing}")?;
            }
        }
        Ok(())
    }
}

impl std::fmt::Display for PReference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::RowMax => "row-max",
            Self::TwoLevel => "two-level",
            Self::Literal => "literal",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_print_and_parse() {
        for groups in [ValueGroups::Tokens, ValueGroups::HeadDim] {
            assert_eq!(groups.to_string().parse(), Ok(groups));
        }
        for scale in [ValueScale::None, ValueScale::Head] {
            assert_eq!(scale.to_string().parse(), Ok(scale));
        }
        for reference in [PReference::RowMax, PReference::TwoLevel, PReference::Literal] {
            assert_eq!(reference.to_string().parse(), Ok(reference));
        }
        assert!("".parse::<ValueGroups>().is_err() && "max".parse::<PReference>().is_err());
        assert!("tensor".parse::<ValueScale>().is_err());
        assert!(AttnQat::default().smoothing(Smoothing::Qk).validate().is_err());
    }
}
