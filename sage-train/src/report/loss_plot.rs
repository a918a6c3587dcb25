//! Loss curves as SVG.

use candle_sage::{Error, Result};
use plotters::prelude::*;

use crate::metrics::Point;

const SIZE: (u32, u32) = (860, 480);
const COLORS: [RGBColor; 5] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
    RGBColor(148, 103, 189),
    RGBColor(140, 86, 75),
];

/// Training loss (thin) and validation loss (thick, with dots) of runs over tokens; beside them the
/// unigram entropy, if given.
///
/// # Errors
/// When there is nothing to draw.
pub fn loss_plot(runs: &[(String, &[Point])], unigram_entropy: Option<f64>) -> Result<String> {
    let mut svg = String::new();
    draw(&mut svg, runs, unigram_entropy).map_err(|error| Error::new("cannot draw the loss").got(error))?;
    Ok(svg)
}

fn draw(
    svg: &mut String,
    runs: &[(String, &[Point])],
    entropy: Option<f64>,
) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let all = || runs.iter().flat_map(|(_, points)| points.iter());
    let tokens = all().map(|p| p.tokens as f64).fold(1.0, f64::max);
    let finite = |x: &f64| x.is_finite();
    let losses = || all().flat_map(|p| [Some(p.loss), p.val_loss]).flatten().chain(entropy).filter(finite);
    let (low, high) = losses().fold((f64::INFINITY, 0f64), |(low, high), x| (low.min(x), high.max(x)));
    if !low.is_finite() {
        return Err("no losses".into());
    }
    let margin = 0.05 * (high - low).max(0.1);
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..tokens * 1.02, low - margin..high + margin)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("tokens")
        .y_desc("loss, nats a token")
        .x_label_formatter(&|x| short(*x))
        .label_style(("sans-serif", 14))
        .draw()?;
    for (n, (name, points)) in runs.iter().enumerate() {
        let color = COLORS[n % COLORS.len()];
        let train = points.iter().map(|p| (p.tokens as f64, p.loss)).filter(|(_, loss)| finite(loss));
        chart.draw_series(LineSeries::new(train, color.mix(0.3)))?;
        let validation: Vec<(f64, f64)> =
            points.iter().filter_map(|p| p.val_loss.map(|loss| (p.tokens as f64, loss))).collect();
        let last = validation.last().map_or(String::new(), |(_, loss)| format!(" {loss:.3}"));
        chart
            .draw_series(LineSeries::new(validation.clone(), color.stroke_width(2)))?
            .label(format!("{name}: validation{last}"))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
        chart.draw_series(validation.into_iter().map(|at| Circle::new(at, 3, color.filled())))?;
    }
    if let Some(entropy) = entropy {
        let grey = RGBColor(110, 110, 110);
        chart
            .draw_series(DashedLineSeries::new(
                [(0.0, entropy), (tokens, entropy)],
                6,
                4,
                grey.stroke_width(1),
            ))?
            .label(format!("unigram entropy {entropy:.3}"))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], grey.stroke_width(1)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.9))
        .border_style(RGBColor(200, 200, 200))
        .label_font(("sans-serif", 14))
        .draw()?;
    root.present()?;
    drop(chart);
    drop(root);
    Ok(())
}

/// `1500000` as `1.5M`.
fn short(x: f64) -> String {
    let (value, unit) = match x {
        x if x >= 1e9 => (x / 1e9, "B"),
        x if x >= 1e6 => (x / 1e6, "M"),
        x if x >= 1e3 => (x / 1e3, "K"),
        x => (x, ""),
    };
    let text = format!("{value:.1}");
    format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_all_runs_and_needs_points() -> Result<()> {
        let points: Vec<Point> = (1..50)
            .map(|n| Point {
                step: n,
                tokens: n * 1000,
                loss: 5.0 / n as f64,
                val_loss: (n % 10 == 0).then_some(4.0 / n as f64),
                ..Point::default()
            })
            .collect();
        let svg = loss_plot(&[("one".into(), &points), ("two".into(), &points[..10])], Some(4.5))?;
        for text in
            ["<svg", "one: validation 0.100", "two: validation 0.400", "unigram entropy 4.500", "tokens"]
        {
            assert!(svg.contains(text), "{text}");
        }
        assert!(loss_plot(&[], None).is_err());
        Ok(())
    }

    #[test]
    fn short_numbers() {
        assert_eq!(
            ["0", "500", "1.5K", "2M", "1.2B"],
            [0.0, 500.0, 1500.0, 2e6, 1.2e9].map(short).each_ref().map(String::as_str)
        );
    }
}
