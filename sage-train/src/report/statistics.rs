//! Means with confidence intervals, paired and unpaired differences, and verdicts on them.

use statrs::distribution::{ContinuousCDF, StudentsT};

/// A mean with its 95 % confidence interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mean {
    /// The mean.
    pub value: f64,
    /// Half the width of the 95 % confidence interval by Student's t; `None` for a single value.
    pub half: Option<f64>,
    /// Number of values.
    pub count: usize,
    error: f64,
    /// Degrees of freedom of the t distribution.
    freedom: f64,
}

impl Mean {
    /// The mean of some values; `None` without values.
    pub fn of(values: &[f64]) -> Option<Self> {
        let count = values.len();
        if count == 0 {
            return None;
        }
        let n = count as f64;
        let value = values.iter().sum::<f64>() / n;
        let variance = values.iter().map(|x| (x - value).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
        let error = (variance / n).sqrt();
        let half = (count > 1).then(|| quantile(0.975, n - 1.0) * error);
        Some(Self { value, half, count, error, freedom: n - 1.0 })
    }

    /// The difference of two means of unpaired values, with Welch's interval.
    pub fn difference(a: &Self, b: &Self) -> Self {
        let (of_a, of_b) = (a.error.powi(2), b.error.powi(2));
        let error = (of_a + of_b).sqrt();
        let (n_a, n_b) = (a.count as f64 - 1.0, b.count as f64 - 1.0);
        let freedom = match error > 0.0 {
            true => error.powi(4) / (of_a.powi(2) / n_a + of_b.powi(2) / n_b),
            false => n_a + n_b,
        };
        let half = (a.count > 1 && b.count > 1).then(|| quantile(0.975, freedom) * error);
        Self { value: a.value - b.value, half, error, freedom, count: a.count.min(b.count) }
    }

    /// The mean and its interval, multiplied by `factor`.
    #[must_use]
    pub fn scaled(self, factor: f64) -> Self {
        let Self { value, half, error, .. } = self;
        let size = factor.abs();
        Self { value: value * factor, half: half.map(|half| half * size), error: error * size, ..self }
    }

    /// Half the width of the interval, with `digits` decimals: ` ± 0.34`. Empty for a single value.
    pub fn plus_minus(&self, digits: usize) -> String {
        self.half.map_or(String::new(), |half| format!(" ± {half:.digits$}"))
    }

    /// The limits of the 95 % interval.
    pub fn interval(&self) -> Option<(f64, f64)> {
        self.half.map(|half| (self.value - half, self.value + half))
    }

    /// Half the width of the 90 % interval.
    pub fn half_of_90(&self) -> f64 {
        quantile(0.95, self.freedom) * self.error
    }

    /// The verdict on a mean difference, where a difference below `margin` does not matter.
    pub fn verdict(&self, margin: f64) -> Verdict {
        let Some((low, high)) = self.interval() else { return Verdict::OneSeed };
        // `Matches` if two one-sided tests (TOST) at 5 % reject a difference >= margin and a difference <= -margin.
        let within = self.value.abs() + self.half_of_90();
        match () {
            () if within < margin => Verdict::Matches,
            () if low > 0.0 => Verdict::Higher,
            () if high < 0.0 => Verdict::Lower,
            () => Verdict::Undecided,
        }
    }
}

fn quantile(p: f64, freedom: f64) -> f64 {
    StudentsT::new(0.0, 1.0, freedom).map_or(f64::NAN, |t| t.inverse_cdf(p))
}

/// The conclusion about a mean difference, from its confidence intervals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Equivalent: the 90 % interval is within the margin.
    Matches,
    /// The 95 % interval is above 0.
    Higher,
    /// The 95 % interval is below 0.
    Lower,
    /// None of the above: more seeds would decide.
    Undecided,
    /// A single seed: no interval exists.
    OneSeed,
}

impl Verdict {
    /// The verdict as text; `margin` is in percent.
    pub fn text(self, margin: f64) -> String {
        match self {
            Self::Matches => format!("matches within {margin} %"),
            Self::Higher => "higher".into(),
            Self::Lower => "lower".into(),
            Self::Undecided => "undecided".into(),
            Self::OneSeed => "one seed: no interval".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_students() {
        // t(0.975) with 2 degrees of freedom is 4.3027; the standard error of 1, 2, 3 is 1 / sqrt 3.
        let mean = Mean::of(&[1.0, 2.0, 3.0]).expect("values");
        assert!((mean.value - 2.0).abs() < 1e-12);
        assert!((mean.half.expect("three values") - 4.302_653 / 3f64.sqrt()).abs() < 1e-4, "{mean:?}");
        assert_eq!(Mean::of(&[1.0]).and_then(|mean| mean.half), None);
        assert_eq!(Mean::of(&[]), None);
    }

    #[test]
    fn means_that_are_no_pairs_have_welchs_interval() {
        let mean = |values: &[f64]| Mean::of(values).expect("values");
        // The standard errors are 1 / sqrt 3 and 2 / sqrt 3. With them, Welch's formula gives
        // (1/3 + 4/3)^2 / ((1/9 + 16/9) / 2) = 2.941 degrees of freedom.
        let difference = Mean::difference(&mean(&[3.0, 4.0, 5.0]), &mean(&[0.0, 2.0, 4.0]));
        assert!((difference.value - 2.0).abs() < 1e-12);
        assert!((difference.half.expect("values") - 4.154).abs() < 0.01, "{difference:?}");
        let same = Mean::difference(&mean(&[1.0, 1.0]), &mean(&[2.0, 2.0]));
        assert_eq!((same.half, same.verdict(0.5)), (Some(0.0), Verdict::Lower));
        assert_eq!(Mean::difference(&mean(&[1.0]), &mean(&[2.0, 3.0])).half, None);
    }

    /// The expected values are from scipy 1.17.1: the mean, half the width of its 95 % confidence interval, and the
    /// smallest margin that passes two one-sided t-tests at 5 % (`ttest_1samp`; `ttest_ind` with `equal_var=False` for
    /// differences).
    #[test]
    fn intervals_and_verdicts_are_those_of_scipy() {
        let mean = |values: &[f64]| Mean::of(values).expect("values");
        let difference = |a: &[f64], b: &[f64]| Mean::difference(&mean(a), &mean(b));
        for (got, [value, half, margin]) in [
            (mean(&[0.05, 0.11, 0.02]), [0.06, 0.113_837_491_008, 0.137_255_556_775]),
            (mean(&[0.06, 0.1, 0.02, 0.08, -0.01]), [0.05, 0.055_528_902_104, 0.092_636_935_727]),
            (mean(&[-0.5, -0.62]), [-0.56, 0.762_372_284_170, 0.938_825_090_881]),
            (
                mean(&[0.3, -0.1, 0.2, 0.15, -0.05, 0.22, 0.4, -0.2]),
                [0.115, 0.175_251_317_452, 0.255_414_442_732],
            ),
            (
                difference(&[4.1, 4.14, 4.09], &[4.05, 4.11, 4.02, 4.2]),
                [0.015, 0.120_179_894_012, 0.106_833_863_252],
            ),
            (
                difference(&[2.51, 2.47], &[2.5, 2.58, 2.61]),
                [-0.073_333_333_333, 0.123_571_024_709, 0.164_456_336_580],
            ),
            (
                difference(&[4.0, 4.5, 3.9, 4.2, 4.1], &[4.3, 4.8]),
                [-0.41, 1.887_242_628_127, 1.523_231_260_806],
            ),
        ] {
            let near = |got: f64, expected: f64| (got / expected - 1.0).abs() < 1e-9;
            assert!(near(got.value, value) && got.half.is_some_and(|got| near(got, half)), "{got:?}, {half}");
            assert_eq!(got.verdict(margin * (1.0 + 1e-6)), Verdict::Matches, "{got:?}");
            assert_ne!(got.verdict(margin * (1.0 - 1e-6)), Verdict::Matches, "{got:?}");
        }
    }

    #[test]
    fn a_verdict_follows_from_the_interval_and_the_margin() {
        let verdict = |values: &[f64], margin| Mean::of(values).expect("values").verdict(margin);
        assert_eq!(verdict(&[0.01, 0.02, -0.01], 0.2), Verdict::Matches);
        assert_eq!(verdict(&[0.01, 0.02, -0.01], 0.02), Verdict::Undecided);
        assert_eq!(verdict(&[0.5, 0.52, 0.51], 0.2), Verdict::Higher);
        assert_eq!(verdict(&[-0.5, -0.52, -0.51], 0.2), Verdict::Lower);
        // The difference is significant, but within the margin.
        assert_eq!(verdict(&[0.05, 0.052, 0.051], 0.2), Verdict::Matches);
        assert_eq!(verdict(&[0.5], 0.2), Verdict::OneSeed);
    }
}
