//! Line charts as SVG, in one style for all plots.
//!
//! The colours of Okabe and Ito can be distinguished with any colour vision; orange and sky blue are made darker.
//! Each series also has a marker: the pair of colour and marker repeats after 28 series. A page may restyle the colours
//! for dark mode: see [`STYLE`].

use candle_sage::{Error, Result};
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

/// The size of a chart without the legend below it, in pixels.
const SIZE: (u32, u32) = (860, 440);
/// The height of an entry of the legend below the chart, in pixels.
const LINE: u32 = 20;
const COLORS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(168, 112, 0),
    RGBColor(44, 130, 180),
    RGBColor(95, 95, 95),
];
/// Colour of axes and text.
const INK: RGBColor = RGBColor(34, 34, 34);
const GRID: RGBColor = RGBColor(226, 226, 226);

/// CSS for a page: charts scale with the width of the page, and dark mode changes their background, text, blue and
/// grey.
pub const STYLE: &str = r##"
svg { width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { @media screen {
  svg [fill="#FFFFFF"] { fill: #16181c; }
  svg [fill="#222222"] { fill: #e4e4e4; }
  svg [stroke="#222222"] { stroke: #b0b0b0; }
  svg [stroke="#E2E2E2"] { stroke: #33363c; }
  svg [stroke="#FFFFFF"] { stroke: none; }
  svg [fill="#0072B2"] { fill: #4aa8e0; }
  svg [stroke="#0072B2"] { stroke: #4aa8e0; }
  svg [fill="#5F5F5F"] { fill: #a8a8a8; }
  svg [stroke="#5F5F5F"] { stroke: #a8a8a8; }
} }
"##;

/// A curve.
#[derive(Debug, Clone, Default)]
pub struct Series {
    /// The label in the legend.
    pub label: String,
    /// Index of colour and marker.
    pub style: usize,
    /// Points of the curve, with markers.
    pub points: Vec<(f64, f64)>,
    /// A thin curve behind the curve of `points`.
    pub faint: Vec<(f64, f64)>,
    /// A filled band: x, low, high.
    pub band: Vec<(f64, f64, f64)>,
    /// Crosses, which mark spikes and failures. A cross outside the visible range is drawn at the edge of the range.
    pub crosses: Vec<(f64, f64)>,
}

type Axes<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

/// A chart over tokens.
#[derive(Debug, Clone, Default)]
pub struct Chart {
    /// Label of the vertical axis.
    pub y: String,
    /// The curves.
    pub series: Vec<Series>,
    /// A horizontal line, and its label.
    pub level: Option<(f64, String)>,
    /// Whether the vertical axis always includes 0.
    pub from_zero: bool,
    /// The visible range of the vertical axis, if it is not the range of the data.
    pub limits: Option<(f64, f64)>,
    /// Whether the points are decimal logarithms. If so, the labels of the axes show the original numbers.
    pub logarithmic: bool,
}

/// Larger values are not drawn, because they would flatten everything else.
const BEYOND: f64 = 1e9;

impl Chart {
    /// Draws the chart.
    ///
    /// # Errors
    /// When no point is finite.
    pub fn to_svg(&self) -> Result<String> {
        let mut svg = String::new();
        // The plotting library panics on some ranges.
        crate::unpanicked(|| self.draw(&mut svg).map_err(|error| error.to_string()))
            .map_err(|error| Error::new("cannot draw a chart").caused_by(error))?;
        // A title for screen readers.
        let curves: Vec<&str> = self.series.iter().map(|series| series.label.as_str()).collect();
        let title = format!("{} over tokens: {}", self.y, curves.join("; "));
        let title = title.replace('&', "&amp;").replace('<', "&lt;");
        Ok(svg.replacen(">\n", &format!(">\n<title>{title}</title>\n"), 1))
    }

    /// The visible ranges of the two axes.
    fn ranges(&self) -> std::result::Result<[(f64, f64); 2], Box<dyn std::error::Error>> {
        let mut x = if self.logarithmic { (f64::INFINITY, f64::NEG_INFINITY) } else { (0.0, 1.0) };
        let mut y = (f64::INFINITY, f64::NEG_INFINITY);
        let mut see = |(at, value): (f64, f64)| {
            if at.is_finite() && value.abs() < BEYOND {
                x = (x.0.min(at), x.1.max(at));
                y = (y.0.min(value), y.1.max(value));
            }
        };
        for series in &self.series {
            series.points.iter().chain(&series.faint).for_each(|&point| see(point));
            series
                .band
                .iter()
                .for_each(|&(x, low, high)| [(x, low), (x, high)].into_iter().for_each(&mut see));
        }
        if y.0 > y.1 {
            return Err("no losses".into());
        }
        if let Some((level, _)) = self.level.as_ref().filter(|(level, _)| level.abs() < BEYOND) {
            let level = *level;
            y = (y.0.min(level), y.1.max(level));
        }
        if self.from_zero {
            y = (y.0.min(0.0), y.1.max(0.0));
        }
        let limits = self.limits.filter(|(low, high)| low.abs() < BEYOND && high.abs() < BEYOND);
        let y = limits.unwrap_or(y);
        let margin = 0.05 * (y.1 - y.0).max(1e-3);
        let below = if self.from_zero && y.0 == 0.0 { 0.0 } else { margin };
        let beyond = 0.02 * (x.1 - x.0).max(1e-3);
        let before = if self.logarithmic { x.0 - beyond } else { 0.0 };
        Ok([(before, x.1 + beyond), (y.0 - below, y.1 + margin)])
    }

    fn draw(&self, svg: &mut String) -> Drawn {
        let [x, y] = self.ranges()?;
        let below = self.names_below();
        let size = (SIZE.0, SIZE.1 + LINE * below.len() as u32);
        let whole: DrawingArea<SVGBackend<'_>, Shift> =
            SVGBackend::with_string(svg, size).into_drawing_area();
        whole.fill(&WHITE)?;
        let (root, names) = whole.split_vertically(SIZE.1);
        let mut chart = ChartBuilder::on(&root)
            .margin(14)
            .x_label_area_size(42)
            .y_label_area_size(64)
            .build_cartesian_2d(x.0..x.1, y.0..y.1)?;
        let digits = (1.5 - (y.1 - y.0).log10()).ceil().clamp(0.0, 4.0) as usize;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .bold_line_style(GRID)
            .axis_style(INK)
            .x_desc("tokens")
            .y_desc(&self.y)
            .x_label_formatter(&|x| if self.logarithmic { short(10f64.powf(*x)) } else { short(*x) })
            .y_label_formatter(&|y| match self.logarithmic {
                true => one_digit(10f64.powf(*y)),
                false => format!("{y:.digits$}"),
            })
            .label_style(("sans-serif", 14).into_font().color(&INK))
            .draw()?;
        for series in &self.series {
            series.draw_band(&mut chart)?;
        }
        for series in &self.series {
            series.draw_curves(&mut chart, y)?;
        }
        if let Some((level, _)) = &self.level {
            let line = [(x.0, *level), (x.1, *level)];
            chart.draw_series(DashedLineSeries::new(line, 6, 4, INK.stroke_width(1)))?;
        }
        for (row, name) in below.into_iter().enumerate() {
            name.draw(&names, (LINE as usize * row + 4) as i32)?;
        }
        whole.present()?;
        drop(chart);
        drop((root, names, whole));
        Ok(())
    }

    fn names_below(&self) -> Vec<Name<'_>> {
        let level = self.level.iter().filter(|(_, name)| !name.is_empty()).map(|(_, name)| Name::Level(name));
        self.series.iter().map(Name::Of).chain(level).collect()
    }
}

impl Series {
    fn draw_band(&self, chart: &mut Axes<'_, '_>) -> Drawn {
        let upper = self.band.iter().map(|&(x, _, high)| (x, high));
        let outline: Vec<(f64, f64)> =
            upper.chain(self.band.iter().rev().map(|&(x, low, _)| (x, low))).collect();
        let filled = color(self.style).mix(0.15);
        chart.draw_series((!outline.is_empty()).then(|| Polygon::new(outline, filled)))?;
        Ok(())
    }

    /// Draws everything except the band. `y`: the visible range.
    fn draw_curves(&self, chart: &mut Axes<'_, '_>, y: (f64, f64)) -> Drawn {
        let Series { style, points, faint, crosses, .. } = self;
        let (style, color) = (*style, color(*style));
        let shown = |(_, value): &(f64, f64)| (y.0..=y.1).contains(value);
        for (points, stroke) in [(faint, color.mix(0.3).into()), (points, color.stroke_width(2))] {
            for line in visible(&finite(points).collect::<Vec<_>>(), y) {
                chart.draw_series(LineSeries::new(line, stroke))?;
            }
        }
        // Only some points have a marker, because too many markers would overlap.
        let every = points.len().div_ceil(24).max(1);
        let marked = finite(points).filter(shown).skip((every - 1) / 2).step_by(every);
        chart.draw_series(marked.map(|at| EmptyElement::at(at) + marker(style, (0, 0))))?;
        let at_edge = finite(crosses).map(|(at, value)| (at, value.clamp(y.0, y.1)));
        chart.draw_series(at_edge.map(|at| Cross::new(at, 6, color.stroke_width(3))))?;
        Ok(())
    }
}

/// An entry of the legend.
#[derive(Clone, Copy)]
enum Name<'a> {
    Of(&'a Series),
    Level(&'a str),
}

impl<'a> Name<'a> {
    fn text(self) -> &'a str {
        match self {
            Self::Of(series) => &series.label,
            Self::Level(name) => name,
        }
    }

    /// Draws this legend entry into the area below the chart, vertically centred at `middle`.
    fn draw(self, area: &DrawingArea<SVGBackend<'_>, Shift>, middle: i32) -> Drawn {
        let from = 78;
        match self {
            Name::Of(series) => {
                area.draw(&stroke((from, middle), 18, color(series.style).stroke_width(2)))?;
                area.draw(&marker(series.style, (from + 9, middle)))?;
            }
            Name::Level(_) => {
                for dash in [0, 10] {
                    area.draw(&stroke((from + dash, middle), 8, INK.stroke_width(1)))?;
                }
            }
        }
        let font = ("sans-serif", 14).into_font().color(&INK);
        area.draw(&Text::new(self.text().to_owned(), (from + 26, middle - 6), font))?;
        Ok(())
    }
}

/// A line in front of a legend entry.
fn stroke((x, y): (i32, i32), len: i32, style: ShapeStyle) -> PathElement<(i32, i32)> {
    PathElement::new([(x, y), (x + len, y)], style)
}

fn color(style: usize) -> RGBColor {
    COLORS[style % COLORS.len()]
}

fn finite(points: &[(f64, f64)]) -> impl Iterator<Item = (f64, f64)> {
    points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite())
}

/// The parts of a curve where y is between `low` and `high`. A segment that leaves this range ends at its edge.
fn visible(points: &[(f64, f64)], (low, high): (f64, f64)) -> Vec<Vec<(f64, f64)>> {
    let mut lines: Vec<Vec<(f64, f64)>> = Vec::new();
    for pair in points.windows(2) {
        let [from, to] = [pair[0], pair[1]];
        let at = |share: f64| (from.0 + share * (to.0 - from.0), from.1 + share * (to.1 - from.1));
        // The line through the segment reaches `low` and `high` at these fractions of the segment. The segment is
        // visible from the fraction `enters` to the fraction `leaves`.
        let edges = [low, high].map(|edge| (edge - from.1) / (to.1 - from.1));
        let (enters, leaves) = (edges[0].min(edges[1]).max(0.0), edges[0].max(edges[1]).min(1.0));
        let is_level = from.1 == to.1;
        if is_level && !(low..=high).contains(&from.1) || !is_level && enters >= leaves {
            continue;
        }
        let start = if is_level || enters == 0.0 { from } else { at(enters) };
        let end = if is_level || leaves == 1.0 { to } else { at(leaves) };
        match lines.last_mut() {
            Some(line) if line.last() == Some(&start) => line.push(end),
            _ => lines.push(vec![start, end]),
        }
    }
    lines
}

/// A filled marker; its shape depends on the style.
fn marker(style: usize, (x, y): (i32, i32)) -> Polygon<(i32, i32)> {
    let shapes: [&[(i32, i32)]; 4] = [
        &[(-1, -4), (1, -4), (4, -1), (4, 1), (1, 4), (-1, 4), (-4, 1), (-4, -1)],
        &[(-3, -3), (3, -3), (3, 3), (-3, 3)],
        &[(0, -5), (4, 3), (-4, 3)],
        &[(0, -5), (5, 0), (0, 5), (-5, 0)],
    ];
    let shape = shapes[style % shapes.len()].iter().map(|&(dx, dy)| (x + dx, y + dy));
    Polygon::new(shape.collect::<Vec<_>>(), color(style).filled())
}

/// A short form of a number: `1500000` as `1.5M`.
pub fn short(x: f64) -> String {
    let (value, unit) = match x {
        x if x >= 1e9 => (x / 1e9, "B"),
        x if x >= 1e6 => (x / 1e6, "M"),
        x if x >= 1e3 => (x / 1e3, "K"),
        x => (x, ""),
    };
    let text = format!("{value:.1}");
    format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
}

/// Rounds a number below 1 to one significant digit (`0.0316` to `0.03`), and a larger number to an integer.
fn one_digit(x: f64) -> String {
    format!("{x:.0$}", (-x.log10().floor()).clamp(0.0, 12.0) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_all_series_and_needs_points() -> Result<()> {
        let points: Vec<(f64, f64)> = (1..50).map(|n| (1000.0 * f64::from(n), 5.0 / f64::from(n))).collect();
        let series = |label: &str, style, points: &[(f64, f64)]| Series {
            label: label.into(),
            style,
            points: points.to_vec(),
            band: points.iter().map(|&(x, y)| (x, y - 0.1, y + 0.1)).collect(),
            crosses: points.last().copied().into_iter().collect(),
            ..Series::default()
        };
        let chart = Chart {
            y: "loss".into(),
            series: vec![series("one", 0, &points), series("two", 1, &points[..9])],
            level: Some((4.5, "unigram entropy".into())),
            ..Chart::default()
        };
        let svg = chart.to_svg()?;
        for text in [
            "<svg",
            "<title>loss over tokens: one; two</title>",
            ">\none\n<",
            ">\ntwo\n<",
            "unigram entropy",
            "tokens",
            "#0072B2",
            "#D55E00",
        ] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
        assert!(Chart::default().to_svg().is_err());
        Ok(())
    }

    /// The CSS for dark mode finds these colours in a chart by their hex codes.
    #[test]
    fn the_dark_theme_has_every_colour_of_the_light_theme() {
        let hex = |RGBColor(r, g, b): RGBColor| format!("#{r:02X}{g:02X}{b:02X}");
        for color in [INK, GRID, WHITE, COLORS[0], COLORS[6]] {
            assert!(STYLE.contains(&hex(color)), "{color:?}");
        }
    }

    #[test]
    fn a_curve_ends_at_the_edge() {
        let points = [(0.0, 9.0), (1.0, 5.0), (2.0, 4.0), (3.0, 12.0), (4.0, 0.0), (5.0, 6.0), (6.0, 6.0)];
        let lines = visible(&points, (2.0, 8.0));
        let expected: [&[(f64, f64)]; 3] = [
            &[(0.25, 8.0), (1.0, 5.0), (2.0, 4.0), (2.5, 8.0)],
            &[(3.0 + 1.0 / 3.0, 8.0), (3.0 + 5.0 / 6.0, 2.0)],
            &[(4.0 + 1.0 / 3.0, 2.0), (5.0, 6.0), (6.0, 6.0)],
        ];
        assert_eq!(lines.len(), expected.len());
        for (line, expected) in lines.iter().zip(expected) {
            let apart = |(a, b): (&(f64, f64), &(f64, f64))| (a.0 - b.0).abs().max((a.1 - b.1).abs());
            assert!(line.len() == expected.len() && line.iter().zip(expected).all(|pair| apart(pair) < 1e-9));
        }
        assert!(visible(&[(0.0, 9.0), (1.0, 9.0), (2.0, 10.0)], (2.0, 8.0)).is_empty());
    }

    #[test]
    fn short_numbers() {
        assert_eq!(
            ["0.003", "0.03", "0.3", "3", "32"],
            [3.16e-3, 3.16e-2, 0.316, 3.16, 31.6].map(one_digit).each_ref().map(String::as_str)
        );
        assert_eq!(
            ["0", "500", "1.5K", "2M", "1.2B"],
            [0.0, 500.0, 1500.0, 2e6, 1.2e9].map(short).each_ref().map(String::as_str)
        );
    }
}
