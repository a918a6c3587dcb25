//! Settings of Attn-QAT, quantization-aware training of FP4 attention (arXiv 2603.00040).

use super::Smoothing;
use crate::error::{Error, Result};

/// Attn-QAT: the forward of 4-bit attention ([NVFP4](crate::nvfp4)), and a backward that trains through it.
///
/// ```text
/// forward    Q^ = fq(Q)   K^ = fq(K)   V^ = fq(V)          fq rounds to NVFP4 and back
///            P  = softmax(scale Q^ K^^T)                    in floating point
///            O  = fq(P) V^              O' = P V^           O' is kept for the backward alone
/// backward   P  from Q^, K^ and the forward's log-sum-exp
///            dV = fq(P)^T dO            dP = dO V^^T
///            dS = P o (dP - rowsum(dO o O'))
///            dQ = scale dS K^           dK = scale dS^T Q^
/// ```
///
/// Gradients pass fq as if it were not there (straight-through estimator); dO, dP and dS are never quantized. Groups of
/// 16 lie along head_dim for Q and K, along the keys for P, and as [`ValueGroups`] says for V.
///
/// It makes a model fit for FP4 inference; it does not make training faster. On every GPU training runs in 16 bit on values
/// that NVFP4 holds exactly: the forward gives the results of FP4 units up to the order of sums. (In dV a probability is a
/// code times a scale over the row's sum, rounded to 16 bit: within 2^-8 in bf16, 2^-12 in f16.)
///
/// Each ablation of the paper is one setting; [`AttnQat::drop_in`] is the paper's baseline that only replaces the forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct AttnQat {
    /// Whether K's token mean is subtracted before quantizing. The paper measured no gain: none by default. The mean is over
    /// all tokens, later ones too; the softmax does not change, what is rounded does.
    pub smoothing: Smoothing,
    /// Along which axis 16 values of V share a scale.
    pub value_groups: ValueGroups,
    /// What probabilities are relative to when they are quantized.
    pub p_reference: PReference,
    /// Whether dS uses the high-precision output O' (principle 2). Otherwise `D = rowsum(dO o O)`, and rows of dS do not
    /// sum to zero: a mean of K then goes into dQ.
    pub high_precision_output: bool,
    /// Whether the backward computes its scores, and all other products, from the forward's Q^, K^ and V^ (principle 1).
    /// Otherwise from the unquantized ones, as a stock backward would, whose probabilities do not fit the forward's
    /// log-sum-exp.
    pub matched_recomputation: bool,
    /// Whether dV comes from quantized probabilities, as O did. Otherwise from P.
    pub requantized_p: bool,
    /// What multiplies: it changes no result beyond the order of sums.
    pub products: Products,
}

impl Default for AttnQat {
    fn default() -> Self {
        Self {
            smoothing: Smoothing::None,
            value_groups: ValueGroups::default(),
            p_reference: PReference::default(),
            high_precision_output: true,
            matched_recomputation: true,
            requantized_p: true,
            products: Products::default(),
        }
    }
}

/// What multiplies the codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Products {
    /// Products of 16 bit, on values that NVFP4 holds: forward and backward, on every GPU and on the CPU.
    #[default]
    SixteenBit,
    /// Block-scaled FP4 products, `mma.kind::mxf4nvf4`, for inference: a forward alone, on GPUs of compute capability 12.x
    /// (the CPU computes as ever). O' is not made; a tracked input is an error.
    ///
    /// **The kernel has not run on such a GPU.** It is assembled for them, and its source runs on a CPU, thread by thread, with
    /// the instruction as the PTX manual describes it (`kernels/host/run`): within rounding of a definition in f64.
    Nvfp4,
}

/// Along which axis 16 values of V share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ValueGroups {
    /// Tokens, the reduction of P V: what block-scaled FP4 instructions need, and what a model is deployed with.
    ///
    /// A scale then sees up to 15 later tokens: with a causal mask the value of a token is rounded as its group's largest says,
    /// and a NaN reaches the tokens of its group that come before it. (Decoding token by token, a group is rounded again
    /// until it is full.)
    #[default]
    Tokens,
    /// Channels, as the paper's published training kernel has it.
    HeadDim,
}

/// What a row's probabilities are relative to when they are quantized. E4M3 scales keep four bits from 2^-6 on only, so
/// this decides which probabilities survive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PReference {
    /// `2^ceil(m)`, with the row's largest base-2 logit m: probabilities are relative to the largest one. References are
    /// powers of two, so that a running maximum moves them exactly, and the backward meets the forward's codes.
    #[default]
    RowMax,
    /// `2^(ceil(m) - 11)`: the same, moved to the top of E4M3's range, where 32 times smaller probabilities keep their bits
    /// (in the place of the paper's two-level scale of 2688 over the row's maximum).
    TwoLevel,
    /// The paper's text: in the forward the running maximum itself, in the backward the row's sum, so that
    /// probabilities under 0.006 vanish. For reproduction: diffuse attention loses most of dV.
    Literal,
}

impl AttnQat {
    /// The baseline that only replaces the forward: a stock backward on unquantized Q, K and V.
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

    /// What an FP4 attention runtime needs to know: formats, the axis of each operand's groups, and what P is relative to.
    pub(super) fn in_words(&self) -> Vec<(&'static str, String)> {
        let switch = |on: bool| if on { "on" } else { "off" }.to_string();
        vec![
            ("smoothing", self.smoothing.to_string()),
            ("value-groups", self.value_groups.to_string()),
            ("p-reference", self.p_reference.to_string()),
            ("high-precision-output", switch(self.high_precision_output)),
            ("matched-recomputation", switch(self.matched_recomputation)),
            ("requantized-p", switch(self.requantized_p)),
        ]
    }

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
            ("probability_groups", text("keys")),
            ("probability_reference", self.p_reference.to_string()),
            ("smoothing", self.smoothing.to_string()),
        ]
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// When Q is to be smoothed: Attn-QAT has smoothing of K alone. When FP4 products are to have groups of V along head_dim,
    /// which is not their reduction.
    pub fn validate(&self) -> Result<()> {
        if self.smoothing == Smoothing::Qk {
            return Err(Error::new("Attn-QAT does not smooth the query")
                .got("smoothing qk")
                .allowed("none, k")
                .hint("SageBwd has smoothing of both"));
        }
        if self.products == Products::Nvfp4 && self.value_groups != ValueGroups::Tokens {
            return Err(Error::new("FP4 products scale V along the tokens, their reduction")
                .got(format!("values by {}", self.value_groups))
                .allowed("tokens")
                .hint("16-bit products take both: AttnQat::products"));
        }
        Ok(())
    }
}

impl PReference {
    /// The reference of a row whose largest base-2 logit is `max`: probabilities are `2^(logit - reference)`.
    #[inline(always)]
    pub fn of(self, max: f32) -> f32 {
        match self {
            Self::RowMax => max.ceil(),
            Self::TwoLevel => max.ceil() - 11.0,
            Self::Literal => max,
        }
    }
}

impl std::str::FromStr for ValueGroups {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = [Self::Tokens, Self::HeadDim].into_iter().find(|groups| groups.to_string() == text);
        found.ok_or_else(|| {
            Error::new("unknown groups of values")
                .got(format!("`{text}`"))
                .allowed("tokens, head-dim")
                .hint("tokens is what FP4 instructions need; head-dim is the published training kernel's")
        })
    }
}

impl std::str::FromStr for PReference {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let all = [Self::RowMax, Self::TwoLevel, Self::Literal];
        all.into_iter().find(|reference| reference.to_string() == text).ok_or_else(|| {
            Error::new("unknown reference of probabilities")
                .got(format!("`{text}`"))
                .allowed("row-max, two-level, literal")
                .hint("row-max keeps dV of diffuse attention; literal is the paper's text")
        })
    }
}

impl std::fmt::Display for AttnQat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { smoothing, value_groups, p_reference, .. } = self;
        write!(f, "Attn-QAT, smoothing {smoothing}, values by {value_groups}, P by {p_reference}")?;
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

impl std::fmt::Display for ValueGroups {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Tokens => "tokens",
            Self::HeadDim => "head-dim",
        })
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
    fn words_print_and_parse() {
        for groups in [ValueGroups::Tokens, ValueGroups::HeadDim] {
            assert_eq!(groups.to_string().parse(), Ok(groups));
        }
        for reference in [PReference::RowMax, PReference::TwoLevel, PReference::Literal] {
            assert_eq!(reference.to_string().parse(), Ok(reference));
        }
        assert!("".parse::<ValueGroups>().is_err() && "max".parse::<PReference>().is_err());
        assert!(AttnQat::default().smoothing(Smoothing::Qk).validate().is_err());
    }
}
