//! The gradients of [`reference`], compared with central differences.

use candle_sage::{AttentionShape, Packing, reference};

use crate::support::{Case, f64s, relative_l2};

/// Gradient of `sum(out * dout)` by central differences. With step h = 1e-5, the truncation error (h^2 / 6 times the
/// third derivative) is about 1e-10, and the rounding error (1e-16 / h) is about 1e-11.
fn differences(
    shape: &AttentionShape,
    scale: f64,
    inputs: &mut [Vec<f64>; 3],
    which: usize,
    dout: &[f64],
) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let loss = |[q, k, v]: &[Vec<f64>; 3]| -> f64 {
        reference::forward(shape, scale, q, k, v).out.iter().zip(dout).map(|(o, g)| o * g).sum()
    };
    (0..inputs[which].len())
        .map(|n| {
            let x = inputs[which][n];
            inputs[which][n] = x + STEP;
            let up = loss(inputs);
            inputs[which][n] = x - STEP;
            let down = loss(inputs);
            inputs[which][n] = x;
            (up - down) / (2.0 * STEP)
        })
        .collect()
}

#[test]
fn gradients_match_central_differences() {
    let mut cases = vec![
        Case::new(1, (5, 5), (1, 1), 8, false),
        Case::new(2, (4, 6), (4, 2), 8, true),
        Case::new(1, (6, 3), (2, 1), 9, true),
        Case::new(1, (7, 9), (2, 2), 8, true),
    ];
    cases[3].packing = Some(Packing::new(vec![0, 3, 3, 7], vec![0, 4, 5, 9]));
    for case in cases {
        let shape = case.shape();
        let [q, k, v, dout] = case.data.each_ref().map(|x| f64s(x));
        let grads = reference::backward(&shape, 0.4, &q, &k, &v, &dout);
        let mut inputs = [q, k, v];
        for (which, grad) in [grads.dq, grads.dk, grads.dv].iter().enumerate() {
            let expected = differences(&shape, 0.4, &mut inputs, which, &dout);
            let error = relative_l2(grad, &expected);
            assert!(error < 1e-8, "{shape:?}, input {which}: {error:e}");
        }
    }
}

#[test]
fn log_sum_exp_is_natural_and_scaled() {
    let case = Case::new(1, (1, 2), (1, 1), 8, false);
    let shape = case.shape();
    let [q, k, v, _] = case.data.each_ref().map(|x| f64s(x));
    let logit = |j: usize| 0.5 * (0..8).map(|c| q[c] * k[j * 8 + c]).sum::<f64>();
    let expected = (logit(0).exp() + logit(1).exp()).ln();
    assert!((reference::forward(&shape, 0.5, &q, &k, &v).lse[0] - expected).abs() < 1e-12);
}
