//! SoftTop-k on rows of scores, in f64.

/// Number of bisection steps in [`weights`].
const HALVINGS: usize = 40;

fn sigmoid(x: f64) -> f64 {
    if x < 0.0 { x.exp() / (1.0 + x.exp()) } else { 1.0 / (1.0 + (-x).exp()) }
}

/// The weights `m_j = sigmoid(s_j / tau + shift)` of a row of scores s. The shift makes the weights sum to `count`.
/// Scores of minus infinity are not candidates, and have weight 0. If the row has at most `count` candidates, each has
/// weight 1.
pub(crate) fn weights(scores: &[f32], count: usize, tau: f64) -> Vec<f64> {
    let is_candidate = |score: &f32| *score != f32::NEG_INFINITY;
    let candidates = scores.iter().filter(|score| is_candidate(score)).count();
    let all = |weight: &dyn Fn(f64) -> f64| -> Vec<f64> {
        let of = |score: &f32| if is_candidate(score) { weight(f64::from(*score) / tau) } else { 0.0 };
        scores.iter().map(of).collect()
    };
    if candidates <= count {
        return all(&|_| 1.0);
    }
    if count == 0 {
        return vec![0.0; scores.len()];
    }
    let scaled = || scores.iter().filter(|score| is_candidate(score)).map(|&score| f64::from(score) / tau);
    let (least, most) = scaled().fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), x| (a.min(x), b.max(x)));
    // Finds `shift` by bisection. With `low` every weight `sigmoid(x + shift)` is at most count / candidates, with
    // `high` at least count / candidates.
    let share = count as f64 / candidates as f64;
    let middle = (share / (1.0 - share)).ln();
    let (mut low, mut high) = (middle - most, middle - least);
    for _ in 0..HALVINGS {
        let shift = 0.5 * (low + high);
        let sum: f64 = scaled().map(|x| sigmoid(x + shift)).sum();
        if sum < count as f64 { low = shift } else { high = shift }
    }
    let shift = 0.5 * (low + high);
    all(&|x| sigmoid(x + shift))
}

/// The gradient of a row's scores: `ds_j = w_j (dm_j - sum(w dm) / sum(w)) / tau`, where m are the row's `weights`, and
/// `w = m (1 - m)`. The term with the sums exists because the shift in [`weights()`] depends on all scores.
pub(crate) fn gradient(weights: &[f64], dm: &[f32], tau: f64) -> Vec<f64> {
    let slope = |m: f64| m * (1.0 - m);
    let sum: f64 = weights.iter().map(|&m| slope(m)).sum();
    let pull: f64 = weights.iter().zip(dm).map(|(&m, &dm)| slope(m) * f64::from(dm)).sum();
    let mean = if sum == 0.0 { 0.0 } else { pull / sum };
    weights.iter().zip(dm).map(|(&m, &dm)| slope(m) * (f64::from(dm) - mean) / tau).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCORES: [f32; 7] = [0.3, -1.25, 2.0, f32::NEG_INFINITY, 0.5, -0.75, 1.5];

    #[test]
    fn rows_add_up_to_the_count() {
        for tau in [1.0, 0.1, 0.01] {
            for count in 0..=6 {
                let weights = weights(&SCORES, count, tau);
                let sum: f64 = weights.iter().sum();
                // Forty bisection steps narrow the interval for `shift` from a width of at most 325 to 3e-10.
                assert!((sum - count as f64).abs() < 1e-8, "{tau} {count}: {sum}");
                assert_eq!(weights[3], 0.0);
            }
            assert_eq!(weights(&SCORES, 9, tau), [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]);
        }
    }

    /// As tau goes to 0, SoftTop-k selects the largest scores.
    #[test]
    fn a_small_tau_chooses() {
        let chosen = weights(&SCORES, 3, 1e-3);
        let expected = [0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0];
        assert!(chosen.iter().zip(expected).all(|(m, e): (&f64, f64)| (m - e).abs() < 1e-12), "{chosen:?}");
    }

    /// Gradients are compared with central differences. The step h is a power of two, so that a score plus or minus h
    /// is exact in f32.
    #[test]
    fn gradients_are_those_of_differences() {
        let (tau, h) = (0.5, 2f32.powi(-9));
        let dm: Vec<f32> = (0..7).map(|n| (n as f32 * 1.7).sin()).collect();
        let value = |scores: &[f32]| -> f64 {
            weights(scores, 3, tau).iter().zip(&dm).map(|(m, &dm)| m * f64::from(dm)).sum()
        };
        let got = gradient(&weights(&SCORES, 3, tau), &dm, tau);
        for n in [0, 1, 2, 4, 5, 6] {
            let moved = |by: f32| {
                let mut scores = SCORES;
                scores[n] += by;
                value(&scores)
            };
            let expected = (moved(h) - moved(-h)) / f64::from(2.0 * h);
            assert!((got[n] - expected).abs() < 2e-5, "{n}: {} {expected}", got[n]);
        }
        assert_eq!(got[3], 0.0);
    }
}
