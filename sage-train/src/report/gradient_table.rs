//! Tables and a plot of gradient errors.

use candle_sage::Result;

use super::chart::{Chart, Series, short};
use super::statistics::Mean;
use super::table::csv_cell;
use crate::metrics::{GradientErrors, Part, Squares};

/// The numbers that are shown for a parameter group, computed from its [`Sums`](crate::metrics::Sums).
struct Figures {
    /// `|G|`, the norm of the gradient without its noise.
    gradient: f64,
    /// Tokens per step at which the gradient's noise is as large as the gradient.
    noise_tokens: f64,
    /// `sqrt(V) / |G|`. `V` is the variance, over micro-batches, of the scheme's gradient minus the exact gradient.
    error_noise: f64,
    /// Estimate of `|B|^2 / |G|^2`, where `B` is the bias of the scheme's gradient.
    bias: f64,
    /// The half-width of the 95 % interval of `bias`, computed from several estimates, each from one block of
    /// micro-batches.
    half: Option<f64>,
    /// `B . G / |G|^2`: the component of the bias along the gradient.
    along: f64,
    /// Tokens per step at which the bias is as large as the gradient's noise. Computed three times: from the estimate of
    /// `|B|^2`, from the upper limit of its interval, and from the lower limit. `None` where this is not above zero.
    crossing: [Option<f64>; 3],
}

/// The square root of an estimate, or 0 if the estimate is negative.
fn root(x: f64) -> f64 {
    x.max(0.0).sqrt()
}

impl Figures {
    fn of(part: &Part, tokens: u64) -> Self {
        let (mean_squares, variances) = (part.whole.mean_squares(), part.whole.variances());
        let blocks: Vec<f64> = part.blocks.iter().map(|block| block.mean_squares().error).collect();
        let half = Mean::of(&blocks).and_then(|mean| mean.half);
        let noise = variances.exact * tokens as f64;
        let crossing = |bias: f64| (bias > 0.0).then(|| noise / bias);
        // The estimate of `|G|^2` can be below zero. Then ratios to the gradient are undefined.
        let gradient = if mean_squares.exact > 0.0 { mean_squares.exact } else { f64::NAN };
        Self {
            gradient: gradient.sqrt(),
            noise_tokens: noise / gradient,
            error_noise: root(variances.error) / gradient.sqrt(),
            bias: mean_squares.error / gradient,
            half: half.map(|half| half / gradient),
            along: (mean_squares.low - mean_squares.exact - mean_squares.error) / (2.0 * gradient),
            crossing: [0.0, 1.0, -1.0]
                .map(|halves| crossing(mean_squares.error + halves * half.unwrap_or(0.0))),
        }
    }
}

/// The cosine between the gradient errors of two groups of micro-batches, and the cosine between the groups' gradients.
/// The groups are disjoint and have equal size. `one` is the [`Squares`] of a group's mean gradient, averaged over
/// groups. `two` is the same for groups of twice the size. Each cosine is the mean dot product of two groups, divided
/// by the mean squared norm of a group.
fn cosines(one: &Squares, two: &Squares) -> [f64; 2] {
    // |(a + b) / 2|^2 = (|a|^2 + |b|^2 + 2 a . b) / 4.
    [2.0 * two.error / one.error - 1.0, 2.0 * two.exact / one.exact - 1.0]
}

/// Two tables: the error of the model's mean gradient over 1, 2, 4, ... micro-batches, and the error of the gradient of
/// each parameter group.
pub fn gradient_table(title: &str, errors: &GradientErrors) -> String {
    let heads = ["tokens", "|gradient|", "|error|", "error/gradient", "cos of errors", "cos of gradients"];
    let mut out = format!("{title}\n\n");
    heads.iter().for_each(|head| out += &format!("{head:>17}"));
    out.push('\n');
    let all = &errors.parts[0];
    for (n, (count, squares)) in all.curve.iter().enumerate() {
        let (gradient, error) = (root(squares.exact), root(squares.error));
        let of_halves = all.curve.get(n + 1).map(|(_, next)| cosines(squares, next));
        let cosine = |n: usize| of_halves.map_or("-".into(), |cosines| format!("{:.3}", cosines[n]));
        out += &format!(
            "{:>17}{gradient:>17.4e}{error:>17.4e}{:>17.4}{:>17}{:>17}\n",
            short((errors.tokens * *count as u64) as f64),
            error / gradient,
            cosine(0),
            cosine(1)
        );
    }
    out += "\ncos: between the means over two disjoint sets of this many tokens\n\n";
    let heads =
        ["|gradient|", "noise = gradient", "error's noise", "bias", "95 % interval", "along", "bias = noise"];
    out += &format!("{:<10}", "part");
    heads.iter().for_each(|head| out += &format!("{head:>18}"));
    out += &format!("{:>20}\n", "95 % interval");
    for part in &errors.parts {
        let figures = Figures::of(part, errors.tokens);
        let tokens = |tokens: Option<f64>| tokens.map_or("never".into(), short);
        let [crossing, low, high] = figures.crossing.map(tokens);
        let Figures { gradient, error_noise, bias, along, .. } = figures;
        let shares = match gradient.is_nan() {
            true => ["-"; 6].map(String::from),
            false => [
                format!("{gradient:.4e}"),
                short(figures.noise_tokens),
                format!("{error_noise:.4}"),
                format!("{:.5}", root(bias)),
                figures
                    .half
                    .map_or("-".into(), |half| format!("{:.5}-{:.5}", root(bias - half), root(bias + half))),
                format!("{along:.5}"),
            ],
        };
        out += &format!("{:<10}", part.name);
        shares.iter().for_each(|share| out += &format!("{share:>18}"));
        out += &format!("{crossing:>18}{:>20}\n", format!("{low} to {high}"));
    }
    out += &format!(
        "\nnoise = gradient, bias = noise: tokens per step at which both are equal; error's noise: noise of the error in {} \
         tokens,\nrelative to the gradient, which falls as the square root of the tokens; bias: the error that does not average \
         out, relative\nto the gradient, and its component along the gradient; -: noise hides the gradient; the interval is over \
         eight parts of the\ndata, and up to three times too wide where noise is larger than bias\n",
        short(errors.tokens as f64)
    );
    out
}

/// The errors of gradients as CSV: a row for each combination of scheme, parameter group, and number of tokens over
/// which the gradient is averaged.
pub fn gradient_csv(all: &[GradientErrors]) -> String {
    let mut out = String::from(
        "scheme,part,tokens,gradient,error,error_over_measured_gradient,error_noise,bias_squared,bias_squared_half,bias_along,noise_equals_gradient_tokens,bias_equals_noise_tokens,bias_equals_noise_low,bias_equals_noise_high\n",
    );
    for errors in all {
        for part in &errors.parts {
            let figures = Figures::of(part, errors.tokens);
            for (count, squares) in &part.curve {
                let (gradient, error) = (root(squares.exact), root(squares.error));
                out += &format!(
                    "{},{},{},{gradient},{error},{},{},{},{},{},{},{}\n",
                    csv_cell(&errors.scheme),
                    csv_cell(&part.name),
                    errors.tokens * *count as u64,
                    error / gradient,
                    figures.error_noise,
                    figures.bias,
                    figures.half.unwrap_or(f64::NAN),
                    figures.along,
                    figures.noise_tokens,
                    figures.crossing.map(|tokens| tokens.map_or(String::new(), |n| n.to_string())).join(","),
                );
            }
        }
    }
    out
}

/// A plot of two quantities against the number of tokens that a gradient averages over: the gradient's error under each
/// scheme, and its noise from the choice of data. Both are relative to the gradient's norm.
///
/// # Errors
/// When no value is finite.
pub fn gradient_plot(all: &[GradientErrors]) -> Result<String> {
    let logarithm = |tokens: u64, y: f64| ((tokens as f64).log10(), y.log10());
    let curve = |errors: &GradientErrors, y: &dyn Fn(&Figures, usize, &Squares) -> f64| {
        let figures = Figures::of(&errors.parts[0], errors.tokens);
        let points = errors.parts[0].curve.iter();
        let point = |(count, squares): &(usize, Squares)| {
            logarithm(errors.tokens * *count as u64, y(&figures, *count, squares))
        };
        points.map(point).collect()
    };
    let mut series: Vec<Series> = Vec::new();
    for (style, errors) in all.iter().enumerate() {
        let points = curve(errors, &|figures, _, squares| root(squares.error) / figures.gradient);
        series.push(Series { label: errors.scheme.clone(), style, points, ..Series::default() });
    }
    if let Some(errors) = all.first() {
        let noise = |figures: &Figures, count: usize, _: &Squares| {
            (figures.noise_tokens / (errors.tokens * count as u64) as f64).sqrt()
        };
        let points = curve(errors, &noise);
        series.push(Series {
            label: "noise of the data".into(),
            style: all.len(),
            points,
            ..Series::default()
        });
    }
    let y = "size relative to the gradient".into();
    Chart { y, series, logarithmic: true, ..Chart::default() }.to_svg()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Sums;

    /// The gradient has norm 3. Its noise in a micro-batch of 100 tokens has norm 4. The bias has norm .3, and its
    /// component along the gradient is .2.
    #[test]
    fn figures_follow_from_the_sums() {
        let sums = |count: usize| {
            let n = count as f64;
            // |B|^2 = .09; |G + B|^2 = 9 + .09 + 2 * 3 * .2 = 10.29.
            let mean_squares = Squares { exact: 9.0, low: 10.29, error: 0.09 };
            // One micro-batch's noise adds 16 to the squares of `exact` and `low`, and 1 to those of `error`.
            let each = Squares { exact: 25.0, low: 26.29, error: 1.09 };
            let sum = |mean_squares: f64, each: f64| mean_squares * n * (n - 1.0) + each * n;
            Sums {
                count,
                of_sum: Squares {
                    exact: sum(mean_squares.exact, each.exact),
                    low: sum(mean_squares.low, each.low),
                    error: sum(mean_squares.error, each.error),
                },
                of_each: Squares { exact: each.exact * n, low: each.low * n, error: each.error * n },
            }
        };
        let part = Part { name: "all".into(), curve: Vec::new(), whole: sums(64), blocks: vec![sums(8); 8] };
        let figures = Figures::of(&part, 100);
        let near = |got: f64, wanted: f64| assert!((got / wanted - 1.0).abs() < 1e-9, "{got} for {wanted}");
        near(figures.gradient, 3.0);
        // The noise of 100 tokens is 16, and `|G|^2` is 9.
        near(figures.noise_tokens, 1600.0 / 9.0);
        near(figures.error_noise, 1.0 / 3.0);
        near(figures.bias, 0.01);
        near(figures.along, 0.6 / 9.0);
        // 16 * 100 / tokens = .09.
        near(figures.crossing[0].expect("a bias"), 1600.0 / 0.09);
        let scattered = |by: f64| {
            let block = |n: usize| {
                let mut sums = sums(8);
                let sign = [1.0, -1.0][n % 2];
                sums.of_sum.error += sign * by * 56.0;
                sums
            };
            let part = Part { blocks: (0..8).map(block).collect(), ..part.clone() };
            Figures::of(&part, 100)
        };
        // In `scattered(0.04)`, the squared bias is .05 in four blocks and .13 in four others. Its standard deviation
        // is .04 sqrt(8 / 7). The interval of its mean has a half-width of 2.3646 standard errors (Student's t with
        // seven degrees of freedom).
        let half = 2.364_624 * 0.04 / 7f64.sqrt();
        let figures = scattered(0.04);
        assert!((figures.half.expect("an interval") * 9.0 / half - 1.0).abs() < 1e-6, "{:?}", figures.half);
        let [_, low, high] = figures.crossing.map(|tokens| tokens.expect("a bias"));
        assert!((low / (1600.0 / (0.09 + half)) - 1.0).abs() < 1e-6, "{low}");
        assert!((high / (1600.0 / (0.09 - half)) - 1.0).abs() < 1e-6, "{high}");
        // Here the interval of the squared bias has a lower limit below zero.
        assert_eq!(scattered(0.2).crossing[2], None);
        let [errors, gradients] = cosines(
            &Squares { exact: 25.0, low: 0.0, error: 1.09 },
            &Squares { exact: 9.0 + 8.0, low: 0.0, error: 0.09 + 0.5 },
        );
        near(errors, 0.09 / 1.09);
        near(gradients, 9.0 / 25.0);
    }

    /// If the estimate of `|G|^2` is below zero, every column that needs it shows `-`. The column "bias = noise" still
    /// has a number.
    #[test]
    fn a_gradient_that_noise_hides_has_no_shares() {
        let squares = |exact, error| Squares { exact, low: exact, error };
        let sums = Sums { count: 2, of_sum: squares(30.0, 3.0), of_each: squares(32.0, 2.0) };
        let part = Part { name: "norm".into(), curve: Vec::new(), whole: sums, blocks: vec![sums; 8] };
        // |G|^2 = -1 and |B|^2 = .5. The noise of 100 tokens is 32 / 2 - |G|^2 = 17.
        let errors = GradientErrors { scheme: String::new(), step: None, tokens: 100, parts: vec![part] };
        let crossing = Figures::of(&errors.parts[0], 100).crossing[0].expect("a bias");
        assert!((crossing - 1700.0 / 0.5).abs() < 1e-9, "{crossing}");
        let table = gradient_table("", &errors);
        let row = table.lines().find(|line| line.starts_with("norm")).expect("a row");
        assert_eq!(
            row.split_whitespace().collect::<Vec<_>>()[1..8],
            ["-", "-", "-", "-", "-", "-", "3.4K"],
            "{row}"
        );
    }
}
