//! SageBwd, computed with dense f64 matrices. Each of its matmuls can be exact or quantized.

use candle_sage::{Int8Products, SageBwd, Smoothing};
use half::bf16;

use super::anatomy::{
    Anatomy, Inputs, Order, OutOfRange, Quantities, QuantizedParts, logit_gradient, mean, product, row_dots,
    softmax,
};

/// A matmul of SageBwd. The variants are in the order of [`PARTS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Product {
    Scores,
    Output,
    ValueGradient,
    /// Computed in bf16; the other matmuls are in INT8.
    ProbabilityGradient,
    QueryGradient,
    KeyGradient,
}

const PARTS: [&str; 6] = ["S = Q K^T", "O = P V", "dV = P^T dO", "dP = dO V^T", "dQ = dS K", "dK = dS^T Q"];

/// SageBwd with its settings.
#[derive(Debug, Clone, Copy)]
pub(super) struct SageBwdAnatomy {
    /// Tiles, smoothing, granularity, and the matmuls that are in INT8.
    pub(super) settings: SageBwd,
    /// Whether Q and K have a scale for each token, instead of a scale for each tile.
    pub(super) token_scales: bool,
}

/// Queries, keys and values after smoothing.
struct Smoothed {
    /// Queries minus the means of their tiles, if these are subtracted.
    q: Vec<f64>,
    /// The means that were subtracted from the queries, a row for each query.
    q_means: Vec<f64>,
    /// Keys minus their mean, if it is subtracted.
    k: Vec<f64>,
    /// Values minus their mean, if it is subtracted.
    v: Vec<f64>,
    /// The mean that was subtracted from the values, or zeros.
    v_mean: Vec<f64>,
}

/// Subtracts the means that the settings select. Subtracting K's mean changes each row of S by a constant, so the
/// softmax does not change. To compensate for the other means, `q_means K^T` is later added to S, and `v_mean` to O.
fn smoothed(inputs: &Inputs, settings: &SageBwd) -> Smoothed {
    let Inputs { rows: [q, k, v, _], tokens: n, head_dim: d } = inputs;
    let (d, tile, smoothing) = (*d, settings.tile_q, settings.smoothing);
    let mean_of = |x: &[f64], smooth: bool| match smooth {
        false => vec![0.0; d],
        true => {
            let rows: Vec<f64> =
                settings.key_mean.tokens(*n).flat_map(|token| &x[token * d..][..d]).copied().collect();
            mean(&rows, d)
        }
    };
    let (k_mean, v_mean) = (mean_of(k, smoothing.of_keys()), mean_of(v, smoothing.of_values()));
    let less = |rows: &[f64], mean: &[f64]| -> Vec<f64> {
        rows.chunks(d).flat_map(|row| row.iter().zip(mean).map(|(x, m)| x - m)).collect()
    };
    let q_means: Vec<f64> = match settings.smoothing {
        Smoothing::Qk => q.chunks(tile * d).flat_map(|tile| mean(tile, d).repeat(tile.len() / d)).collect(),
        _ => vec![0.0; n * d],
    };
    Smoothed {
        q: q.iter().zip(&q_means).map(|(x, m)| x - m).collect(),
        q_means,
        k: less(k, &k_mean),
        v: less(v, &v_mean),
        v_mean,
    }
}

/// Which matmuls are computed in low bits.
#[derive(Clone, Copy)]
struct Coding {
    low: QuantizedParts,
    products: Int8Products,
}

impl Coding {
    fn has(self, product: Product) -> bool {
        self.low.has(product as usize)
            && match product {
                Product::Output => self.products.o,
                Product::ValueGradient => self.products.dv,
                Product::QueryGradient => self.products.dq,
                Product::KeyGradient => self.products.dk,
                _ => true,
            }
    }

    /// An operand of a matmul: quantized with a scale for each block if the matmul is in INT8, otherwise unchanged.
    fn operand(self, x: &[f64], columns: usize, block: (usize, usize), product: Product) -> Vec<f64> {
        if self.has(product) { quantized(x, columns, block) } else { x.to_vec() }
    }

    /// An operand of dP: rounded to bf16, or unchanged if dP is computed exactly.
    fn half_precision(self, x: &[f64]) -> Vec<f64> {
        match self.has(Product::ProbabilityGradient) {
            true => x.iter().map(|x| bf16::from_f64(*x).to_f64()).collect(),
            false => x.to_vec(),
        }
    }
}

/// Queries and keys, exact and quantized. Each operand is quantized once, for all of its matmuls.
struct Operands {
    smoothed: Smoothed,
    q_codes: Vec<f64>,
    k_codes: Vec<f64>,
}

impl Operands {
    /// Queries and keys for the matmul `product`: quantized if `coding` computes it in low bits, otherwise exact.
    fn queries_and_keys(&self, coding: Coding, product: Product) -> [&[f64]; 2] {
        match coding.has(product) {
            true => [&self.q_codes, &self.k_codes],
            false => [&self.smoothed.q, &self.smoothed.k],
        }
    }

    /// `q_means K^T`, computed without quantization.
    fn of_means(&self, n: usize, d: usize) -> candle_core::Result<Vec<f64>> {
        product(&self.smoothed.q_means, &self.smoothed.k, (n, d, n), Order::Nt)
    }
}

/// `(Q K^T + of_means) / sqrt(d)`, where `of_means` is the result of [`Operands::of_means`]. Masked keys get minus
/// infinity.
fn logits(q: &[f64], k: &[f64], of_means: &[f64], d: usize) -> candle_core::Result<Vec<f64>> {
    let (n, scale) = (q.len() / d, 1.0 / (d as f64).sqrt());
    let of_codes = product(q, k, (n, d, n), Order::Nt)?;
    let mut s: Vec<f64> = of_codes.iter().zip(of_means).map(|(a, b)| (a + b) * scale).collect();
    for (i, row) in s.chunks_mut(n).enumerate() {
        row[i + 1..].fill(f64::NEG_INFINITY);
    }
    Ok(s)
}

impl SageBwdAnatomy {
    fn operands(&self, inputs: &Inputs) -> Operands {
        let (d, smoothed) = (inputs.head_dim, smoothed(inputs, &self.settings));
        let rows_of = |tile: usize| if self.token_scales { 1 } else { tile };
        Operands {
            q_codes: quantized(&smoothed.q, d, (rows_of(self.settings.tile_q), d)),
            k_codes: quantized(&smoothed.k, d, (rows_of(self.settings.tile_k), d)),
            smoothed,
        }
    }

    /// dQ and dK from dS. With `token_scales`, Q and K have one scale per token. The matmuls for dQ and dK sum over
    /// tokens, so these scales are multiplied into dS.
    fn query_and_key_gradients(
        &self,
        operands: &Operands,
        ds: &[f64],
        (n, d): (usize, usize),
        coding: Coding,
    ) -> candle_core::Result<[Vec<f64>; 2]> {
        let SageBwd { granularity, tile_q, tile_k, .. } = self.settings;
        let Smoothed { q, q_means, k, .. } = &operands.smoothed;
        let (of_keys, of_queries) = (scales(k, d, self.token_scales), scales(q, d, self.token_scales));
        let by_key: Vec<f64> = ds.iter().enumerate().map(|(at, x)| x * of_keys[at % n]).collect();
        let by_query: Vec<f64> = ds.iter().enumerate().map(|(at, x)| x * of_queries[at / n]).collect();
        let [_, k_rows] = operands.queries_and_keys(coding, Product::QueryGradient);
        let block = (granularity.vectors(tile_q), tile_k);
        let dq = product(
            &coding.operand(&by_key, n, block, Product::QueryGradient),
            &bare(k_rows, &of_keys, d),
            (n, n, d),
            Order::Nn,
        )?;
        let [q_rows, _] = operands.queries_and_keys(coding, Product::KeyGradient);
        let block = (tile_q, granularity.vectors(tile_k));
        let of_q = product(
            &coding.operand(&by_query, n, block, Product::KeyGradient),
            &bare(q_rows, &of_queries, d),
            (n, n, d),
            Order::Tn,
        )?;
        let of_q_means = product(ds, q_means, (n, n, d), Order::Tn)?;
        let scale = 1.0 / (d as f64).sqrt();
        let dk = of_q.iter().zip(&of_q_means).map(|(a, b)| (a + b) * scale).collect();
        Ok([dq.into_iter().map(|x| x * scale).collect(), dk])
    }
}

impl Anatomy for SageBwdAnatomy {
    fn parts(&self) -> &'static [&'static str] {
        &PARTS
    }

    fn compute(&self, inputs: &Inputs, low: QuantizedParts) -> candle_core::Result<Quantities> {
        let Inputs { rows: [_, _, v, dout], tokens: n, head_dim: d } = inputs;
        let (n, d, coding) = (*n, *d, Coding { low, products: self.settings.products });
        let SageBwd { granularity, tile_q, tile_k, .. } = self.settings;
        let operands = self.operands(inputs);
        let of_means = operands.of_means(n, d)?;
        let [q, k] = operands.queries_and_keys(coding, Product::Scores);
        let s = logits(q, k, &of_means, d)?;
        let mut p = softmax(&s, n);

        // P has a scale for each row of a tile, V a scale for each tile.
        let Smoothed { v: values, v_mean, .. } = &operands.smoothed;
        let mut o = product(
            &coding.operand(&p, n, (1, tile_k), Product::Output),
            &coding.operand(values, d, (tile_k, d), Product::Output),
            (n, n, d),
            Order::Nn,
        )?;
        o.chunks_mut(d).for_each(|row| row.iter_mut().zip(v_mean).for_each(|(x, m)| *x += m));
        let delta = row_dots(dout, &o, d);
        if !coding.products.s && coding.has(Product::Scores) {
            // The backward recomputes P from unquantized logits, but divides by the forward's sums of exponentials.
            let exact = logits(&operands.smoothed.q, &operands.smoothed.k, &of_means, d)?;
            let finite = p.iter_mut().zip(exact.iter().zip(&s)).filter(|(p, _)| **p > 0.0);
            finite.for_each(|(p, (exact, s))| *p *= (exact - s).exp());
        }
        let dv = product(
            &coding.operand(&p, n, (tile_q, granularity.vectors(tile_k)), Product::ValueGradient),
            &coding.operand(dout, d, (tile_q, granularity.vectors(d)), Product::ValueGradient),
            (n, n, d),
            Order::Tn,
        )?;
        let dp = product(&coding.half_precision(dout), &coding.half_precision(v), (n, d, n), Order::Nt)?;
        let ds = logit_gradient(&p, &dp, &delta);
        let [dq, dk] = self.query_and_key_gradients(&operands, &ds, (n, d), coding)?;
        Ok(Quantities { s, p, dp, delta, ds, o, gradients: [dq, dk, dv] })
    }

    fn smoothed(&self, inputs: &Inputs) -> [Vec<f64>; 2] {
        let Smoothed { q, k, .. } = smoothed(inputs, &self.settings);
        [q, k]
    }

    fn tiles(&self) -> [usize; 2] {
        [self.settings.tile_q, self.settings.tile_k]
    }

    fn out_of_range(&self, _: &Inputs, _: &Quantities) -> Vec<(&'static str, OutOfRange)> {
        Vec::new()
    }
}

/// A factor for each row (token) of Q or K: with `token_scales` the row's largest absolute value / 127, otherwise 1.
fn scales(rows: &[f64], d: usize, token_scales: bool) -> Vec<f64> {
    rows.chunks(d).map(|row| if token_scales { largest(row.iter()) / 127.0 } else { 1.0 }).collect()
}

/// Divides each row of Q or K by its factor from [`scales`].
fn bare(rows: &[f64], factors: &[f64], d: usize) -> Vec<f64> {
    rows.chunks(d)
        .zip(factors)
        .flat_map(|(row, f)| row.iter().map(move |x| if *f == 0.0 { 0.0 } else { x / f }))
        .collect()
}

fn largest<'a>(values: impl Iterator<Item = &'a f64>) -> f64 {
    values.fold(0.0, |most, x| most.max(x.abs()))
}

/// `round(x * 127 / max|x|) * max|x| / 127`, with one maximum for each block of rows and columns.
fn quantized(values: &[f64], columns: usize, (block_rows, block_columns): (usize, usize)) -> Vec<f64> {
    let (block_rows, block_columns) = (block_rows.max(1), block_columns.max(1));
    let mut out = values.to_vec();
    for band in out.chunks_mut(block_rows * columns) {
        for first in (0..columns).step_by(block_columns) {
            let width = block_columns.min(columns - first);
            let most = largest(band.chunks(columns).flat_map(|row| &row[first..first + width]));
            let scale = most / 127.0;
            if scale < f64::MIN_POSITIVE {
                // The scale is zero or subnormal: values this small (such as underflowed probabilities) become zeros.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::anatomy::tests::{by_the_op, distance, inputs};
    use candle_sage::Granularity;

    fn compute(inputs: &Inputs, settings: SageBwd, token_scales: bool, low: QuantizedParts) -> Quantities {
        SageBwdAnatomy { settings, token_scales }.compute(inputs, low).expect("memory")
    }

    /// The same number, computed in f32 and in f64, may round to two adjacent INT8 values. This happens to a few
    /// numbers in ten thousand, so the f64 results differ from those of the f32 op by a small fraction of the
    /// quantization error.
    #[test]
    fn with_every_product_in_codes_it_is_the_op() {
        for (smoothing, granularity) in [
            (Smoothing::K, Granularity::Vector),
            (Smoothing::None, Granularity::Tile),
            (Smoothing::Qk, Granularity::Group(16)),
            (Smoothing::Kv, Granularity::Vector),
        ] {
            let settings = SageBwd::default().smoothing(smoothing).granularity(granularity);
            let inputs = inputs(200, 32, 2.0);
            let codes = compute(&inputs, settings, false, QuantizedParts::All);
            let exact = compute(&inputs, settings, false, QuantizedParts::None);
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
        let of = |low, token_scales| compute(&inputs, settings, token_scales, low);
        let exact = of(QuantizedParts::None, false);
        // Each row of dS sums to zero. Without quantization, `token_scales` does not change the gradients.
        for row in exact.ds.chunks(96) {
            assert!(row.iter().sum::<f64>().abs() < 1e-12);
        }
        for (a, b) in exact.gradients.iter().zip(&of(QuantizedParts::None, true).gradients) {
            assert!(distance(a, b) < 1e-12);
        }
        let errors = |product: Product| {
            let got = of(QuantizedParts::One(product as usize), false);
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

    /// Logits of a model without QK-norm can exceed 10,000; all but one probability of a row then underflow.
    #[test]
    fn huge_logits_stay_finite() {
        let mut inputs = inputs(80, 16, 1.0);
        inputs.rows[0].iter_mut().for_each(|x| *x *= 3000.0);
        for low in [QuantizedParts::None, QuantizedParts::All] {
            let got = compute(&inputs, SageBwd::default(), false, low);
            let all = [&got.p, &got.dp, &got.delta, &got.ds, &got.o].into_iter().chain(&got.gradients);
            assert!(all.flatten().all(|x| x.is_finite()));
        }
    }

    /// Token 70 of K and V is a hundred times larger than the other tokens and determines its tile's scale; a scale for
    /// each token restores the precision of the other tokens.
    #[test]
    fn a_scale_per_token_isolates_an_outlier() {
        let mut inputs = inputs(128, 32, 1.0);
        for operand in [1, 2] {
            inputs.rows[operand][70 * 32..71 * 32].iter_mut().for_each(|x| *x *= 100.0);
        }
        let of = |low, token_scales| compute(&inputs, SageBwd::default(), token_scales, low);
        let exact = of(QuantizedParts::None, false);
        let error = |token_scales| {
            distance(
                &of(QuantizedParts::One(Product::QueryGradient as usize), token_scales).gradients[0],
                &exact.gradients[0],
            )
        };
        assert!(error(true) < 0.5 * error(false), "{} {}", error(true), error(false));
    }
}
