//! Attention with all of its intermediate quantities as dense f64 matrices: the trait that each scheme
//! implements, and code that the implementations share.
//!
//! The tiled implementations of candle-sage never store all of P, dP or dS. Here these matrices are complete, so that
//! the error of each can be measured, and so that one part of a scheme (a matmul or an operand) can be quantized while
//! the others are exact. With all parts quantized the results equal those of `candle_sage::Attention` up to f32
//! rounding; a test of each scheme checks this.

use candle_core::{Device, Tensor};

/// The parts of a scheme that are quantized, by their indices in [`Anatomy::parts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuantizedParts {
    /// No part: exact attention.
    None,
    /// All parts: the scheme itself.
    All,
    /// Only one part.
    One(usize),
}

impl QuantizedParts {
    /// Whether this part is quantized.
    pub fn has(self, part: usize) -> bool {
        match self {
            Self::None => false,
            Self::All => true,
            Self::One(one) => one == part,
        }
    }
}

/// A scheme, computed with dense f64 matrices. Each part of the computation can be quantized alone.
pub trait Anatomy: Sync {
    /// Names of the parts of a scheme that can be quantized separately, in the order of the computation.
    fn parts(&self) -> &'static [&'static str];

    /// Computes attention, forward and backward. `low` determines which parts are quantized.
    ///
    /// # Errors
    /// When memory is short.
    fn compute(&self, inputs: &Inputs, low: QuantizedParts) -> candle_core::Result<Quantities>;

    /// Queries and keys after smoothing and before quantization.
    fn smoothed(&self, inputs: &Inputs) -> [Vec<f64>; 2];

    /// The tile lengths of Q and of K, in tokens. To find outliers, a token is compared with the tokens of its tile.
    fn tiles(&self) -> [usize; 2];

    /// For each NVFP4 operand, its name and the fractions of its groups that are too small or too large for NVFP4.
    /// Empty without such operands.
    fn out_of_range(&self, inputs: &Inputs, exact: &Quantities) -> Vec<(&'static str, OutOfRange)>;
}

/// Fractions of an operand's groups that are too small or too large for NVFP4.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct OutOfRange {
    /// Fraction of groups that become zeros.
    pub vanished: f64,
    /// Fraction of groups whose largest magnitude is above 2688, the largest NVFP4 value (6 times a scale of 448).
    pub saturated: f64,
}

/// The inputs of causal attention over one sequence, for one query head and its key head. Each matrix is row-major,
/// (tokens, head_dim).
#[derive(Debug, Clone)]
pub struct Inputs {
    /// Query, key, value and output gradient.
    pub rows: [Vec<f64>; 4],
    /// Number of tokens.
    pub tokens: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// The quantities that attention computes, forward and backward.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantities {
    /// Scaled logits S; minus infinity for masked keys.
    pub s: Vec<f64>,
    /// Probabilities P.
    pub p: Vec<f64>,
    /// dP, the gradient of the probabilities.
    pub dp: Vec<f64>,
    /// `rowsum(dO O)`.
    pub delta: Vec<f64>,
    /// dS, the gradient of the logits: `P (dP - delta)`.
    pub ds: Vec<f64>,
    /// Output O.
    pub o: Vec<f64>,
    /// dQ, dK and dV.
    pub gradients: [Vec<f64>; 3],
}

/// Peak bytes of a probe of one key head with `heads` query heads. Each query head needs S, P, dP and dS of three
/// computations: exact, with all parts of the scheme quantized, and with one part quantized. All heads together need
/// 8 temporary matrices.
pub(super) fn bytes(tokens: usize, heads: usize) -> u64 {
    8 * (tokens as u64).pow(2) * (12 * heads as u64 + 8)
}

/// `Q K^T / sqrt(head_dim)` of (tokens, head_dim) matrices; minus infinity for masked keys.
pub(super) fn logits(q: &[f64], k: &[f64], tokens: usize, head_dim: usize) -> candle_core::Result<Vec<f64>> {
    let scale = 1.0 / (head_dim as f64).sqrt();
    let mut s = product(q, k, (tokens, head_dim, tokens), Order::Nt)?;
    for (i, row) in s.chunks_mut(tokens).enumerate() {
        row.iter_mut().for_each(|x| *x *= scale);
        row[i + 1..].fill(f64::NEG_INFINITY);
    }
    Ok(s)
}

/// The dot product of each row of `a` with the same row of `b`.
pub(super) fn row_dots(a: &[f64], b: &[f64], d: usize) -> Vec<f64> {
    a.chunks(d).zip(b.chunks(d)).map(|(a, b)| a.iter().zip(b).map(|(x, y)| x * y).sum()).collect()
}

/// `P (dP - delta)`; 0 where P is 0, even if dP is not finite.
pub(super) fn logit_gradient(p: &[f64], dp: &[f64], delta: &[f64]) -> Vec<f64> {
    let n = delta.len();
    let at = |(at, (p, dp)): (usize, (&f64, &f64))| if *p == 0.0 { 0.0 } else { p * (dp - delta[at / n]) };
    p.iter().zip(dp).enumerate().map(at).collect()
}

pub(super) fn mean(rows: &[f64], d: usize) -> Vec<f64> {
    let mut sums = vec![0.0; d];
    rows.chunks(d).for_each(|row| sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x));
    sums.iter().map(|sum| sum / (rows.len() / d) as f64).collect()
}

/// The softmax of each row of a square matrix.
pub(super) fn softmax(s: &[f64], n: usize) -> Vec<f64> {
    s.chunks(n)
        .flat_map(|row| {
            let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let exp: Vec<f64> = row.iter().map(|x| (x - most).exp()).collect();
            let sum: f64 = exp.iter().sum();
            exp.into_iter().map(move |x| x / sum)
        })
        .collect()
}

/// Which operand of a matmul is transposed.
#[derive(Clone, Copy)]
pub(super) enum Order {
    Nn,
    Nt,
    Tn,
}

/// A matmul of f64 matrices: (m, k) times (k, n), where `order` tells which operand is given as its transpose.
pub(super) fn product(
    a: &[f64],
    b: &[f64],
    (m, k, n): (usize, usize, usize),
    order: Order,
) -> candle_core::Result<Vec<f64>> {
    let tensor = |x: &[f64], rows, columns| Tensor::from_slice(x, (rows, columns), &Device::Cpu);
    let (a, b) = match order {
        Order::Nn => (tensor(a, m, k)?, tensor(b, k, n)?),
        Order::Nt => (tensor(a, m, k)?, tensor(b, n, k)?.t()?),
        Order::Tn => (tensor(a, k, m)?.t()?, tensor(b, k, n)?),
    };
    a.matmul(&b)?.flatten_all()?.to_vec1()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use candle_core::{DType, Var};
    use candle_sage::{Attention, Scheme};
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;
    use rand_distr::{Distribution, StandardNormal};

    pub(in crate::probe) fn inputs(tokens: usize, head_dim: usize, sigma: f64) -> Inputs {
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        let mut rows = |sigma: f64| -> Vec<f64> {
            // The values are rounded to f32, because `candle_sage::Attention` gets the same values as f32.
            let mut sample = || -> f64 { StandardNormal.sample(&mut rng) };
            (0..tokens * head_dim).map(|_| f64::from((sigma * sample()) as f32)).collect()
        };
        Inputs { rows: [rows(sigma), rows(sigma), rows(1.0), rows(1.0)], tokens, head_dim }
    }

    pub(in crate::probe) fn distance(a: &[f64], b: &[f64]) -> f64 {
        let difference: f64 = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum();
        (difference / b.iter().map(|b| b * b).sum::<f64>()).sqrt()
    }

    /// O, dQ, dK, dV as `candle_sage::Attention` computes them on the CPU.
    pub(in crate::probe) fn by_the_op(inputs: &Inputs, settings: impl Into<Scheme>) -> [Vec<f64>; 4] {
        let var = |n: usize| {
            let values: Vec<f32> = inputs.rows[n].iter().map(|x| *x as f32).collect();
            let tensor = Tensor::from_vec(values, (1, inputs.tokens, 1, inputs.head_dim), &Device::Cpu);
            tensor.and_then(|tensor| Var::from_tensor(&tensor)).expect("a variable")
        };
        let [q, k, v, dout] = [0, 1, 2, 3].map(var);
        let out = Attention::new(settings).causal(true).apply(&q, &k, &v).expect("attention");
        let grads =
            (&out * dout.as_tensor()).and_then(|x| x.sum_all()).and_then(|x| x.backward()).expect("backward");
        let values = |tensor: &Tensor| -> Vec<f64> {
            tensor
                .to_dtype(DType::F64)
                .and_then(|t| t.flatten_all())
                .and_then(|t| t.to_vec1())
                .expect("values")
        };
        let grad = |var: &Var| values(grads.get(var).expect("a gradient"));
        [values(&out), grad(&q), grad(&k), grad(&v)]
    }

    #[test]
    fn every_low_bit_scheme_can_be_probed() {
        for scheme in Scheme::all() {
            let dense = crate::probe::anatomy_of(scheme, false);
            assert_eq!(dense.is_ok(), scheme != Scheme::Unquantized, "{scheme}");
        }
    }
}
