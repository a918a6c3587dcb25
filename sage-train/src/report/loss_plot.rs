//! The plot of the losses of one run.

use candle_sage::Result;

use super::chart::{Chart, Series};
use crate::metrics::Point;

/// Training loss (thin) and validation loss of a run over tokens, with the unigram entropy as a horizontal
/// line.
///
/// # Errors
/// When there is nothing to draw.
pub fn loss_plot(name: &str, points: &[Point], unigram_entropy: f64) -> Result<String> {
    let at = |loss: fn(&Point) -> Option<f64>| -> Vec<(f64, f64)> {
        points.iter().filter_map(|point| Some((point.tokens as f64, loss(point)?))).collect()
    };
    let validation = at(|point| point.val_loss);
    let last = validation.last().map_or(String::new(), |(_, loss)| format!(" {loss:.3}"));
    let series = Series {
        label: format!("{name}: validation{last}; thin: training"),
        points: validation,
        faint: at(|point| Some(point.loss)),
        ..Series::default()
    };
    Chart {
        y: "loss, nats a token".into(),
        series: vec![series],
        level: Some((unigram_entropy, format!("unigram entropy {unigram_entropy:.3}"))),
        ..Chart::default()
    }
    .to_svg()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_drawn_with_its_last_validation() -> Result<()> {
        let point = |n: u64| Point {
            step: n,
            tokens: n * 1000,
            loss: 5.0 / n as f64,
            val_loss: n.is_multiple_of(10).then_some(4.0 / n as f64),
            ..Point::default()
        };
        let points: Vec<Point> = (1..50).map(point).collect();
        let svg = loss_plot("one", &points, 4.5)?;
        for text in ["one: validation 0.100", "unigram entropy 4.500"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(loss_plot("none", &[], 4.5).is_err());
        Ok(())
    }
}
