//! Attn-QAT with dense f64 matrices. The caller chooses which operands are rounded to NVFP4: none, one, or all.

use candle_sage::nvfp4::{Axis, E2M1_MAX, E4M3_MAX, GROUP, Packed, Scale, head_factor};
use candle_sage::{AttnQat, PReference, ValueGroups, ValueScale};

use super::anatomy::{
    Anatomy, Inputs, Order, OutOfRange, Quantities, QuantizedParts, logit_gradient, logits, mean, product,
    row_dots,
};

/// An operand that Attn-QAT quantizes. The variants are in the order of [`PARTS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operand {
    Query,
    Key,
    Value,
    /// P in O = P V.
    Probability,
    /// P in dV = P^T dO.
    ProbabilityAgain,
}

const PARTS: [&str; 5] = ["Q", "K", "V", "P of O = P V", "P of dV = P^T dO"];

/// Attn-QAT with its settings.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttnQatAnatomy {
    pub(super) settings: AttnQat,
}

impl AttnQatAnatomy {
    /// The factor by which V is multiplied before it is quantized.
    fn value_factor(&self, v: &[f64]) -> f64 {
        match self.settings.value_scale {
            ValueScale::Head => head_factor(largest(v)).into(),
            _ => 1.0,
        }
    }

    fn value_axis(&self) -> Axis {
        match self.settings.value_groups {
            ValueGroups::HeadDim => Axis::Channels,
            _ => Axis::Rows,
        }
    }
}

impl Anatomy for AttnQatAnatomy {
    fn parts(&self) -> &'static [&'static str] {
        &PARTS
    }

    fn compute(&self, inputs: &Inputs, low: QuantizedParts) -> candle_core::Result<Quantities> {
        let Inputs { rows: [_, _, v, dout], tokens: n, head_dim: d } = inputs;
        let (n, d, settings) = (*n, *d, &self.settings);
        let quantized = |operand: Operand| low.has(operand as usize);
        let of = |x: &[f64], axis: Axis, operand: Operand| {
            if quantized(operand) { values(&packed(x, d, axis), n) } else { x.to_vec() }
        };
        let [q, k] = self.smoothed(inputs);
        let v_mean = mean_if(self.settings.smoothing.of_values(), v, d);
        let v = &less(v, &v_mean);
        let (q_low, k_low) = (of(&q, Axis::Channels, Operand::Query), of(&k, Axis::Channels, Operand::Key));
        let factor = self.value_factor(&inputs.rows[2]);
        let v_low = times(&of(&times(v, factor), self.value_axis(), Operand::Value), 1.0 / factor);

        // Forward: the unnormalized probabilities are summed by row before they are quantized.
        let s = logits(&q_low, &k_low, n, d)?;
        let rows = SoftmaxRows::new(&s, n, settings.p_reference);
        let p_forward = match quantized(Operand::Probability) {
            true => rows.quantized(&rows.relative),
            false => rows.relative.clone(),
        };
        let output = |p: &[f64]| -> candle_core::Result<Vec<f64>> {
            let mut o = product(p, &v_low, (n, n, d), Order::Nn)?;
            o.chunks_mut(d).zip(&rows.sums).for_each(|(row, sum)| row.iter_mut().for_each(|x| *x /= sum));
            Ok(o)
        };
        let mut o = output(&p_forward)?;
        let high_precision = if settings.high_precision_output { output(&rows.relative)? } else { o.clone() };
        o.chunks_mut(d).for_each(|row| row.iter_mut().zip(&v_mean).for_each(|(x, m)| *x += m));

        // Backward: P is recomputed from Q, K and the forward's log-sum-exp.
        let given = |low: Vec<f64>, exact: Vec<f64>| if settings.matched_recomputation { low } else { exact };
        let (q, k, v) = (given(q_low, q), given(k_low, k), given(v_low.clone(), v.clone()));
        let p = rows.probabilities(&logits(&q, &k, n, d)?);
        let delta = row_dots(dout, &high_precision, d);
        let recomputed = match settings.requantized_p && quantized(Operand::ProbabilityAgain) {
            true => rows.quantized_again(&p, settings.p_reference),
            false => p.clone(),
        };
        let dv = product(&recomputed, dout, (n, n, d), Order::Tn)?;
        let mut dp = product(dout, &v, (n, d, n), Order::Nt)?;
        let ds = logit_gradient(&p, &dp, &delta);
        // `v` is V minus its mean. For dP and delta of V itself, add the dot products of dO and V's mean. They cancel
        // in dS.
        let of_mean = row_dots(dout, &v_mean.repeat(n), d);
        dp.chunks_mut(n).zip(&of_mean).for_each(|(row, m)| row.iter_mut().for_each(|x| *x += m));
        let delta = delta.iter().zip(&of_mean).map(|(x, m)| x + m).collect();
        let scale = 1.0 / (d as f64).sqrt();
        let scaled = |x: Vec<f64>| -> Vec<f64> { x.into_iter().map(|x| x * scale).collect() };
        let dq = scaled(product(&ds, &k, (n, n, d), Order::Nn)?);
        let dk = scaled(product(&ds, &q, (n, n, d), Order::Tn)?);
        Ok(Quantities { s, p, dp, delta, ds, o, gradients: [dq, dk, dv] })
    }

    fn smoothed(&self, inputs: &Inputs) -> [Vec<f64>; 2] {
        let Inputs { rows: [q, k, ..], head_dim: d, .. } = inputs;
        [q.clone(), less(k, &mean_if(self.settings.smoothing.of_keys(), k, *d))]
    }

    /// Attn-QAT has no tiles: each quantization group of Q and K lies within one token. Outlier tokens are found within
    /// blocks of 16 tokens.
    fn tiles(&self) -> [usize; 2] {
        [GROUP; 2]
    }

    fn out_of_range(&self, inputs: &Inputs, exact: &Quantities) -> Vec<(&'static str, OutOfRange)> {
        let (n, d, v) = (inputs.tokens, inputs.head_dim, &inputs.rows[2]);
        let [q, k] = self.smoothed(inputs);
        let v_smooth = less(v, &mean_if(self.settings.smoothing.of_values(), v, d));
        let v_scaled = times(&v_smooth, self.value_factor(v));
        let of = |x: &[f64], axis| {
            let maxima = match axis {
                Axis::Channels => maxima(x, d),
                Axis::Rows => maxima(&transposed(x, d), n),
            };
            shares(maxima.into_iter())
        };
        let rows = SoftmaxRows::new(&exact.s, n, self.settings.p_reference);
        let of_p = |p: &[f64]| shares(maxima(p, n).into_iter().filter(|max| *max > 0.0));
        vec![
            ("Q", of(&q, Axis::Channels)),
            ("K", of(&k, Axis::Channels)),
            ("V", of(&v_scaled, self.value_axis())),
            ("P of O = P V", of_p(&rows.relative)),
            ("P of dV = P^T dO", of_p(&rows.recomputed(&exact.p, self.settings.p_reference))),
        ]
    }
}

/// The largest magnitude of each group of 16 neighbouring values in a row.
fn maxima(x: &[f64], columns: usize) -> Vec<f32> {
    x.chunks(columns).flat_map(|row| row.chunks(GROUP)).map(largest).collect()
}

/// The fractions of groups that are out of NVFP4's range. `maxima` yields the largest magnitude of each group.
fn shares(maxima: impl Iterator<Item = f32>) -> OutOfRange {
    let (mut all, mut vanished, mut saturated) = (0usize, 0usize, 0usize);
    for max in maxima {
        all += 1;
        vanished += usize::from(Scale::of(max).dequant == 0.0);
        saturated += usize::from(max > E2M1_MAX * E4M3_MAX);
    }
    let of_all = |count: usize| count as f64 / all.max(1) as f64;
    OutOfRange { vanished: of_all(vanished), saturated: of_all(saturated) }
}

fn transposed(x: &[f64], columns: usize) -> Vec<f64> {
    (0..columns).flat_map(|c| x.iter().skip(c).step_by(columns).copied()).collect()
}

fn times(x: &[f64], factor: f64) -> Vec<f64> {
    x.iter().map(|x| x * factor).collect()
}

/// The token mean of rows, or zeros.
fn mean_if(smooth: bool, rows: &[f64], d: usize) -> Vec<f64> {
    if smooth { mean(rows, d) } else { vec![0.0; d] }
}

fn less(rows: &[f64], mean: &[f64]) -> Vec<f64> {
    rows.chunks(mean.len()).flat_map(|row| row.iter().zip(mean).map(|(x, m)| x - m)).collect()
}

/// Rounds values to f32, and packs the rounded values into NVFP4.
fn packed(x: &[f64], columns: usize, axis: Axis) -> Packed {
    let x: Vec<f32> = x.iter().map(|x| *x as f32).collect();
    Packed::new(&x, columns, axis)
}

fn values(packed: &Packed, rows: usize) -> Vec<f64> {
    packed.rows(0..rows).into_iter().map(f64::from).collect()
}

/// The softmax of a square matrix of logits, by rows.
struct SoftmaxRows {
    n: usize,
    /// `2^(logit * log2(e) - reference)`, where `reference` is the row's element of `references`.
    relative: Vec<f64>,
    /// By row: the result of [`PReference::of`].
    references: Vec<f64>,
    /// Sums of the rows of `relative`.
    sums: Vec<f64>,
}

impl SoftmaxRows {
    fn new(s: &[f64], n: usize, reference: PReference) -> Self {
        let (mut relative, mut references, mut sums) = (Vec::with_capacity(n * n), Vec::new(), Vec::new());
        for row in s.chunks(n) {
            let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max) * std::f64::consts::LOG2_E;
            let reference = f64::from(reference.of(largest as f32));
            let start = relative.len();
            relative.extend(row.iter().map(|x| (x * std::f64::consts::LOG2_E - reference).exp2()));
            sums.push(relative[start..].iter().sum());
            references.push(reference);
        }
        Self { n, relative, references, sums }
    }

    /// Like a softmax of the logits `s`, but with `self.references` and `self.sums`. So the rows of the result need not
    /// sum to 1.
    fn probabilities(&self, s: &[f64]) -> Vec<f64> {
        let row = |(row, (reference, sum)): (&[f64], (&f64, &f64))| -> Vec<f64> {
            row.iter().map(|x| (x * std::f64::consts::LOG2_E - reference).exp2() / sum).collect()
        };
        s.chunks(self.n).zip(self.references.iter().zip(&self.sums)).flat_map(row).collect()
    }

    /// The matrix P that the backward quantizes: each row of `p`, multiplied by the row's element of `sums`. With
    /// [`PReference::Literal`] it is `p` itself.
    fn recomputed(&self, p: &[f64], reference: PReference) -> Vec<f64> {
        let factors = self.factors(reference);
        p.chunks(self.n).zip(factors).flat_map(|(row, factor)| row.iter().map(move |x| x * factor)).collect()
    }

    fn quantized_again(&self, p: &[f64], reference: PReference) -> Vec<f64> {
        let quantized = self.quantized(&self.recomputed(p, reference));
        let rows = quantized.chunks(self.n).zip(self.factors(reference));
        rows.flat_map(|(row, factor)| row.iter().map(move |x| x / factor)).collect()
    }

    fn factors(&self, reference: PReference) -> impl Iterator<Item = f64> {
        let literal = reference == PReference::Literal;
        self.sums.iter().map(move |sum| if literal { 1.0 } else { *sum })
    }

    /// Fake-quantizes a matrix. In each row, groups of 16 adjacent values share a scale.
    fn quantized(&self, p: &[f64]) -> Vec<f64> {
        let group = |group: &[f64]| -> Vec<f64> {
            let scale = scale_of(group);
            group.iter().map(|x| f64::from(scale.fake_quantize(*x as f32))).collect()
        };
        p.chunks(self.n).flat_map(|row| row.chunks(GROUP).flat_map(group)).collect()
    }
}

fn largest(x: &[f64]) -> f32 {
    x.iter().fold(0f32, |most, x| most.max((*x as f32).abs()))
}

fn scale_of(group: &[f64]) -> Scale {
    Scale::of(largest(group))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::anatomy::tests::{by_the_op, distance, inputs};
    use candle_sage::Smoothing;

    fn compute(inputs: &Inputs, settings: AttnQat, low: QuantizedParts) -> Quantities {
        AttnQatAnatomy { settings }.compute(inputs, low).expect("memory")
    }

    /// f32 and f64 may round a value near a midpoint to different E2M1 values. The f64 results therefore differ from
    /// those of the f32 op, but by less than a tenth of the quantization error.
    #[test]
    fn with_every_operand_in_nvfp4_it_is_the_op() {
        for settings in [
            AttnQat::default(),
            AttnQat::default().smoothing(Smoothing::K).value_groups(ValueGroups::HeadDim),
            AttnQat::default().p_reference(PReference::TwoLevel).high_precision_output(false),
            AttnQat::default().matched_recomputation(false),
            AttnQat::default().smoothing(Smoothing::Kv),
            AttnQat::default().smoothing(Smoothing::Kv).value_scale(ValueScale::Head),
            AttnQat::drop_in(),
        ] {
            let inputs = inputs(200, 32, 1.5);
            let (low, exact) = (
                compute(&inputs, settings, QuantizedParts::All),
                compute(&inputs, settings, QuantizedParts::None),
            );
            let op = by_the_op(&inputs, settings);
            for (n, op) in op.iter().enumerate() {
                let [ours, exact] = [&low, &exact].map(|x| if n == 0 { &x.o } else { &x.gradients[n - 1] });
                let (apart, error) = (distance(ours, op), distance(op, exact));
                assert!(apart < 0.1 * error, "{settings}, result {n}: {apart} apart, error {error}");
            }
        }
    }

    #[test]
    fn exact_is_exact_and_each_operand_has_an_error_where_it_should() {
        let inputs = inputs(96, 16, 1.0);
        let exact = compute(&inputs, AttnQat::default(), QuantizedParts::None);
        for row in exact.ds.chunks(96) {
            assert!(row.iter().sum::<f64>().abs() < 1e-12);
        }
        let errors = |operand: Operand| {
            let got = compute(&inputs, AttnQat::default(), QuantizedParts::One(operand as usize));
            let results = |x: &Quantities| [vec![x.o.clone()], x.gradients.to_vec()].concat();
            let apart =
                results(&got).iter().zip(results(&exact)).map(|(a, b)| distance(a, &b) > 1e-9).collect();
            let apart: Vec<bool> = apart;
            apart
        };
        assert_eq!(errors(Operand::Query), [true; 4]);
        assert_eq!(errors(Operand::Key), [true; 4]);
        assert_eq!(errors(Operand::Value), [true, true, true, false]);
        // The gradients do not change: delta is computed from the high-precision output, for which P is not quantized.
        assert_eq!(errors(Operand::Probability), [true, false, false, false]);
        assert_eq!(errors(Operand::ProbabilityAgain), [false, false, false, true]);
    }

    /// With [`PReference::Literal`], the backward quantizes probabilities that sum to 1 in each row. In diffuse
    /// attention over many keys, most groups of these probabilities become zeros.
    #[test]
    fn small_probabilities_vanish_relative_to_the_sum() {
        let inputs = inputs(1024, 16, 0.1);
        let of = |reference| {
            let anatomy = AttnQatAnatomy { settings: AttnQat::default().p_reference(reference) };
            let exact = anatomy.compute(&inputs, QuantizedParts::None).expect("memory");
            let found = anatomy.out_of_range(&inputs, &exact);
            assert!(found[..3].iter().all(|(_, groups)| groups.vanished < 0.2), "{found:?}");
            assert!(found.iter().all(|(_, groups)| groups.saturated == 0.0), "{found:?}");
            found[4].1.vanished
        };
        assert!(of(PReference::Literal) > 0.6 && of(PReference::RowMax) == 0.0);
    }

    /// V times 1e-4 vanishes and V times 1e4 saturates, except with [`ValueScale::Head`].
    #[test]
    fn groups_of_values_out_of_range_are_counted() {
        for (factor, vanished, saturated) in [(1.0, 0.0, 0.0), (1e-4, 1.0, 0.0), (1e4, 0.0, 1.0)] {
            let mut inputs = inputs(64, 16, 1.0);
            inputs.rows[2].iter_mut().for_each(|x| *x *= factor);
            for scale in [ValueScale::None, ValueScale::Head] {
                let anatomy = AttnQatAnatomy { settings: AttnQat::default().value_scale(scale) };
                let exact = anatomy.compute(&inputs, QuantizedParts::None).expect("memory");
                let (_, groups) = anatomy.out_of_range(&inputs, &exact)[2];
                let expected = match scale {
                    ValueScale::Head => OutOfRange::default(),
                    _ => OutOfRange { vanished, saturated },
                };
                assert_eq!(groups, expected, "V times {factor}, scale {scale}");
            }
        }
    }
}
