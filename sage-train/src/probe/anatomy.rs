//! The insides of SageBwd: every product of attention as dense f64 matrices, with codes in the products that are asked for.
//!
//! The walks of candle-sage never hold P, dP or dS; here they are whole, so that each has an error, and so that one
//! product can be quantized while the others are exact. With codes in all of them the results are those of
//! `candle_sage::Attention` up to its f32 (a test).

use candle_core::{Device, Tensor};
use candle_sage::{SageBwd, Smoothing};
use half::bf16;
use serde::{Deserialize, Serialize};

/// A product of attention that SageBwd computes in fewer bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Product {
    /// `S = Q K^T`.
    #[serde(rename = "QK")]
    Scores,
    /// `O = P V`.
    #[serde(rename = "PV")]
    Output,
    /// `dV = P^T dO`.
    #[serde(rename = "PtdO")]
    ValueGradient,
    /// `dP = dO V^T`, in bf16.
    #[serde(rename = "dOVt")]
    ProbabilityGradient,
    /// `dQ = dS K`.
    #[serde(rename = "dSK")]
    QueryGradient,
    /// `dK = dS^T Q`.
    #[serde(rename = "dStQ")]
    KeyGradient,
}

impl Product {
    /// All of them, in the order of the computation.
    pub const ALL: [Self; 6] = [
        Self::Scores,
        Self::Output,
        Self::ValueGradient,
        Self::ProbabilityGradient,
        Self::QueryGradient,
        Self::KeyGradient,
    ];

    /// As a formula.
    pub fn formula(self) -> &'static str {
        match self {
            Self::Scores => "S = Q K^T",
            Self::Output => "O = P V",
            Self::ValueGradient => "dV = P^T dO",
            Self::ProbabilityGradient => "dP = dO V^T",
            Self::QueryGradient => "dQ = dS K",
            Self::KeyGradient => "dK = dS^T Q",
        }
    }
}

/// How products are quantized.
#[derive(Debug, Clone, Copy)]
pub struct Quantization<'a> {
    /// Tiles, smoothing and granularity.
    pub settings: SageBwd,
    /// The products with codes; the others are exact.
    pub products: &'a [Product],
    /// A scale for each token of Q and K, and not for each tile: folded into dS, where dS meets them again.
    pub token_scales: bool,
}

/// One query head and its key head: causal attention over a sequence, row-major, (tokens, head_dim).
#[derive(Debug, Clone)]
pub struct Inputs {
    /// Query, key, value and output gradient.
    pub rows: [Vec<f64>; 4],
    /// Tokens.
    pub tokens: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// What attention computes on its way, forward and back.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantities {
    /// Logits, scaled; minus infinity where a query does not see a key.
    pub s: Vec<f64>,
    /// Probabilities.
    pub p: Vec<f64>,
    /// Their gradient.
    pub dp: Vec<f64>,
    /// `rowsum(dO O)`.
    pub delta: Vec<f64>,
    /// `P (dP - delta)`.
    pub ds: Vec<f64>,
    /// Output.
    pub o: Vec<f64>,
    /// Gradients of query, key, value.
    pub gradients: [Vec<f64>; 3],
}

/// Queries and keys as they are quantized.
pub(super) struct Smoothed {
    /// Queries less the means of their tiles, where those are taken away.
    pub(super) q: Vec<f64>,
    /// What was taken away, a row for each query.
    q_means: Vec<f64>,
    /// Keys less their mean, where that is taken away.
    pub(super) k: Vec<f64>,
}

/// K less its mean, Q less the mean of each tile: softmax does not see the first, the second comes back as a row.
pub(super) fn smoothed(inputs: &Inputs, settings: &SageBwd) -> Smoothed {
    let Inputs { rows: [q, k, ..], tokens: n, head_dim: d } = inputs;
    let (d, tile) = (*d, settings.tile_q);
    let k_mean = if settings.smoothing == Smoothing::None { vec![0.0; d] } else { mean(k, d) };
    let q_means: Vec<f64> = match settings.smoothing {
        Smoothing::Qk => q.chunks(tile * d).flat_map(|tile| mean(tile, d).repeat(tile.len() / d)).collect(),
        _ => vec![0.0; n * d],
    };
    Smoothed {
        q: q.iter().zip(&q_means).map(|(x, m)| x - m).collect(),
        q_means,
        k: k.chunks(d).flat_map(|row| row.iter().zip(&k_mean).map(|(x, m)| x - m)).collect(),
    }
}

/// Bytes that [`compute`] holds at once for so many query heads of one key head, with exact results and others beside:
/// S, P, dP and dS of each, and what the last one is made of.
pub(super) fn bytes(tokens: usize, heads: usize) -> u64 {
    8 * (tokens as u64).pow(2) * (12 * heads as u64 + 8)
}

/// Computes everything.
///
/// # Errors
/// When there is no memory.
pub fn compute(inputs: &Inputs, how: &Quantization<'_>) -> candle_core::Result<Quantities> {
    let Inputs { rows: [_, _, v, dout], tokens: n, head_dim: d } = inputs;
    let (n, d) = (*n, *d);
    let SageBwd { granularity, tile_q, tile_k, .. } = how.settings;
    let coded = |product: Product| how.products.contains(&product);
    let codes = |x: &[f64], columns: usize, block: (usize, usize), product: Product| {
        if coded(product) { quantized(x, columns, block) } else { x.to_vec() }
    };
    let scale = 1.0 / (d as f64).sqrt();

    let Smoothed { q: q_smooth, q_means, k: k_smooth } = smoothed(inputs, &how.settings);
    let rows_of = |tile: usize| if how.token_scales { 1 } else { tile };
    let q_codes = quantized(&q_smooth, d, (rows_of(tile_q), d));
    let k_codes = quantized(&k_smooth, d, (rows_of(tile_k), d));
    let choose = |exact: &[f64], codes: &[f64], product| if coded(product) { codes } else { exact }.to_vec();

    let of_codes = product(
        &choose(&q_smooth, &q_codes, Product::Scores),
        &choose(&k_smooth, &k_codes, Product::Scores),
        (n, d, n),
        Order::Nt,
    )?;
    let of_means = product(&q_means, &k_smooth, (n, d, n), Order::Nt)?;
    let mut s: Vec<f64> = of_codes.iter().zip(&of_means).map(|(a, b)| (a + b) * scale).collect();
    for (i, row) in s.chunks_mut(n).enumerate() {
        row[i + 1..].fill(f64::NEG_INFINITY);
    }
    let p = softmax(&s, n);

    // One scale for each row of a tile of P, one for each tile of V.
    let o = product(
        &codes(&p, n, (1, tile_k), Product::Output),
        &codes(v, d, (tile_k, d), Product::Output),
        (n, n, d),
        Order::Nn,
    )?;
    let delta: Vec<f64> =
        dout.chunks(d).zip(o.chunks(d)).map(|(a, b)| a.iter().zip(b).map(|(x, y)| x * y).sum()).collect();
    let dv = product(
        &codes(&p, n, (tile_q, granularity.vectors(tile_k)), Product::ValueGradient),
        &codes(dout, d, (tile_q, granularity.vectors(d)), Product::ValueGradient),
        (n, n, d),
        Order::Tn,
    )?;
    let half = |x: &[f64]| -> Vec<f64> {
        match coded(Product::ProbabilityGradient) {
            true => x.iter().map(|x| bf16::from_f64(*x).to_f64()).collect(),
            false => x.to_vec(),
        }
    };
    let dp = product(&half(dout), &half(v), (n, d, n), Order::Nt)?;
    let ds: Vec<f64> = p
        .iter()
        .zip(&dp)
        .enumerate()
        .map(|(at, (p, dp))| if *p == 0.0 { 0.0 } else { p * (dp - delta[at / n]) })
        .collect();

    // The scale of a token lies along the reduction of these products: it is folded into dS, and K and Q are bare codes.
    let (of_keys, of_queries) =
        (scales(&k_smooth, d, how.token_scales), scales(&q_smooth, d, how.token_scales));
    let folded = |by_column: bool, factors: &[f64]| -> Vec<f64> {
        ds.iter().enumerate().map(|(at, x)| x * factors[if by_column { at % n } else { at / n }]).collect()
    };
    let bare = |codes: &[f64], factors: &[f64]| -> Vec<f64> {
        codes
            .chunks(d)
            .zip(factors)
            .flat_map(|(row, f)| row.iter().map(move |x| if *f == 0.0 { 0.0 } else { x / f }))
            .collect()
    };
    let k_rows = choose(&k_smooth, &k_codes, Product::QueryGradient);
    let dq = product(
        &codes(&folded(true, &of_keys), n, (granularity.vectors(tile_q), tile_k), Product::QueryGradient),
        &bare(&k_rows, &of_keys),
        (n, n, d),
        Order::Nn,
    )?;
    let q_rows = choose(&q_smooth, &q_codes, Product::KeyGradient);
    let of_q = product(
        &codes(&folded(false, &of_queries), n, (tile_q, granularity.vectors(tile_k)), Product::KeyGradient),
        &bare(&q_rows, &of_queries),
        (n, n, d),
        Order::Tn,
    )?;
    let of_q_means = product(&ds, &q_means, (n, n, d), Order::Tn)?;
    let scaled = |x: Vec<f64>| -> Vec<f64> { x.into_iter().map(|x| x * scale).collect() };
    let dk = of_q.iter().zip(&of_q_means).map(|(a, b)| a + b).collect();
    Ok(Quantities { s, p, dp, delta, ds, o, gradients: [scaled(dq), scaled(dk), dv] })
}

/// The factor of each row that is folded: the largest value of a token, or 1.
fn scales(rows: &[f64], d: usize, token_scales: bool) -> Vec<f64> {
    rows.chunks(d).map(|row| if token_scales { largest(row.iter()) / 127.0 } else { 1.0 }).collect()
}

fn largest<'a>(values: impl Iterator<Item = &'a f64>) -> f64 {
    values.fold(0.0, |most, x| most.max(x.abs()))
}

/// The mean of each channel.
fn mean(rows: &[f64], d: usize) -> Vec<f64> {
    let mut sums = vec![0.0; d];
    rows.chunks(d).for_each(|row| sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x));
    sums.iter().map(|sum| sum / (rows.len() / d) as f64).collect()
}

fn softmax(s: &[f64], n: usize) -> Vec<f64> {
    s.chunks(n)
        .flat_map(|row| {
            let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let exp: Vec<f64> = row.iter().map(|x| (x - most).exp()).collect();
            let sum: f64 = exp.iter().sum();
            exp.into_iter().map(move |x| x / sum)
        })
        .collect()
}

/// `round(x * 127 / max|x|)` times its scale, with one scale for each block of so many rows and columns.
fn quantized(values: &[f64], columns: usize, (block_rows, block_columns): (usize, usize)) -> Vec<f64> {
    let (block_rows, block_columns) = (block_rows.max(1), block_columns.max(1));
    let mut out = values.to_vec();
    for band in out.chunks_mut(block_rows * columns) {
        for first in (0..columns).step_by(block_columns) {
            let width = block_columns.min(columns - first);
            let most = largest(band.chunks(columns).flat_map(|row| &row[first..first + width]));
            let scale = most / 127.0;
            if scale < f64::MIN_POSITIVE {
                // Probabilities that far down are zeros to any format.
                band.chunks_mut(columns).for_each(|row| row[first..first + width].fill(0.0));
                continue;
            }
            for row in band.chunks_mut(columns) {
                row[first..first + width]
                    .iter_mut()
                    .for_each(|x| *x = (*x / scale).round_ties_even() * scale);
            }
        }
    }
    out
}

/// Which operand of a product is transposed.
#[derive(Clone, Copy)]
enum Order {
    Nn,
    Nt,
    Tn,
}

/// A product of f64 matrices: `(m, k, n)` says that it is (m, k) by (k, n), after what is transposed.
fn product(
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
mod tests {
    use super::*;
    use candle_core::{DType, Var};
    use candle_sage::{Attention, Granularity};
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;
    use rand_distr::{Distribution, StandardNormal};

    fn inputs(tokens: usize, head_dim: usize, sigma: f64) -> Inputs {
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        let mut rows = |sigma: f64| -> Vec<f64> {
            // Values that f32 holds: the op gets the same.
            let mut sample = || -> f64 { StandardNormal.sample(&mut rng) };
            (0..tokens * head_dim).map(|_| f64::from((sigma * sample()) as f32)).collect()
        };
        Inputs { rows: [rows(sigma), rows(sigma), rows(1.0), rows(1.0)], tokens, head_dim }
    }

    fn distance(a: &[f64], b: &[f64]) -> f64 {
        let difference: f64 = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum();
        (difference / b.iter().map(|b| b * b).sum::<f64>()).sqrt()
    }

    /// O, dQ, dK, dV as the op computes them on the CPU.
    fn by_the_op(inputs: &Inputs, settings: SageBwd) -> [Vec<f64>; 4] {
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

    /// A code that rounds the other way in f32 is 1/127 of its scale: a few in ten thousand. So the two differ by a small part of
    /// what they differ from the exact by.
    #[test]
    fn with_every_product_in_codes_it_is_the_op() {
        for (smoothing, granularity) in [
            (Smoothing::K, Granularity::Vector),
            (Smoothing::None, Granularity::Tile),
            (Smoothing::Qk, Granularity::Group(16)),
        ] {
            let settings = SageBwd { smoothing, granularity, ..SageBwd::default() };
            let inputs = inputs(200, 32, 2.0);
            let how = |products| Quantization { settings, products, token_scales: false };
            let codes = compute(&inputs, &how(&Product::ALL)).expect("memory");
            let exact = compute(&inputs, &how(&[])).expect("memory");
            let op = by_the_op(&inputs, settings);
            for (n, op) in op.iter().enumerate() {
                let [ours, exact] = [&codes, &exact].map(|x| if n == 0 { &x.o } else { &x.gradients[n - 1] });
                let (apart, error) = (distance(ours, op), distance(op, exact));
                assert!(apart < 0.15 * error, "{settings}, result {n}: {apart} apart, error {error}");
                assert!((distance(ours, exact) / error - 1.0).abs() < 0.05, "{settings}, result {n}");
            }
        }
    }

    #[test]
    fn exact_is_exact_and_each_product_has_an_error_where_it_should() {
        let inputs = inputs(96, 16, 1.0);
        let settings = SageBwd::default();
        let of = |products: &[Product], token_scales| {
            compute(&inputs, &Quantization { settings, products, token_scales }).expect("memory")
        };
        let exact = of(&[], false);
        // Rows of dS sum to zero, and folding what is not quantized changes nothing.
        for row in exact.ds.chunks(96) {
            assert!(row.iter().sum::<f64>().abs() < 1e-12);
        }
        for (a, b) in exact.gradients.iter().zip(&of(&[], true).gradients) {
            assert!(distance(a, b) < 1e-12);
        }
        let errors = |product| {
            let got = of(&[product], false);
            [&got.gradients[0], &got.gradients[1], &got.gradients[2]]
                .iter()
                .zip(&exact.gradients)
                .map(|(a, b)| distance(a, b) > 1e-9)
                .collect::<Vec<_>>()
        };
        assert_eq!(errors(Product::Scores), [true, true, true]);
        assert_eq!(errors(Product::Output), [true, true, false]);
        assert_eq!(errors(Product::ValueGradient), [false, false, true]);
        assert_eq!(errors(Product::ProbabilityGradient), [true, true, false]);
        assert_eq!(errors(Product::QueryGradient), [true, false, false]);
        assert_eq!(errors(Product::KeyGradient), [false, true, false]);
    }

    /// Logits of a model without QK-norm reach ten thousands; all but one probability of a row are next to nothing then.
    #[test]
    fn huge_logits_stay_finite() {
        let mut inputs = inputs(80, 16, 1.0);
        inputs.rows[0].iter_mut().for_each(|x| *x *= 3000.0);
        for products in [&[][..], &Product::ALL] {
            let how = Quantization { settings: SageBwd::default(), products, token_scales: false };
            let got = compute(&inputs, &how).expect("memory");
            let all = [&got.p, &got.dp, &got.delta, &got.ds, &got.o].into_iter().chain(&got.gradients);
            assert!(all.flatten().all(|x| x.is_finite()));
        }
    }

    /// One token a hundred times the others takes the range of its tile; a scale for each token gives it back.
    #[test]
    fn a_scale_a_token_mends_an_outlier() {
        let mut inputs = inputs(128, 32, 1.0);
        for operand in [1, 2] {
            inputs.rows[operand][70 * 32..71 * 32].iter_mut().for_each(|x| *x *= 100.0);
        }
        // A token that all queries see and none looks at.
        let of = |products: &[Product], token_scales| {
            compute(&inputs, &Quantization { settings: SageBwd::default(), products, token_scales })
                .expect("memory")
        };
        let exact = of(&[], false);
        let error = |token_scales| {
            distance(&of(&[Product::QueryGradient], token_scales).gradients[0], &exact.gradients[0])
        };
        assert!(error(true) < 0.5 * error(false), "{} {}", error(true), error(false));
    }
}
