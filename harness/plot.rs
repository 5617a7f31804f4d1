//! One kind of picture: lines over a log2 axis, with what did not fit marked above them, as a self-contained SVG.
//!
//! The picture is laid out here in pixels (title, plot, legend beside it), so that no text depends on a font's measured
//! width: nothing is clipped or overlaps whatever sans-serif the viewer has. What is drawn is `charts`' choice.

use anyhow::{Result, anyhow};
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::table::shortened;

const WIDTH_PX: i32 = 960;
const HEIGHT_PX: i32 = 540;
/// Title and subtitle.
const HEAD_PX: i32 = 76;
/// The legend's column.
const LEGEND_PX: i32 = 190;
/// Left of the plot: tick labels and the axis' name.
const LEFT_PX: i32 = 84;
/// Under the plot.
const BOTTOM_PX: i32 = 64;
/// Longest subtitle that fits beside the plot's left edge.
const SUBTITLE_CHARS: usize = 132;
/// Between the picture's edge and the legend's line.
const GAP_PX: i32 = 18;
/// One series' line of marks in the lane of cells that did not fit, and most pixels of the lane.
const LANE_ROW_PX: i32 = 14;
const LANE_MAX_PX: i32 = 130;
/// Least distance between two labels under the x axis.
const X_LABEL_PX: f64 = 52.0;

const INK: RGBColor = RGBColor(0x22, 0x26, 0x2b);
const FAINT: RGBColor = RGBColor(0x5b, 0x63, 0x6c);
const GRID: RGBColor = RGBColor(0xe3, 0xe6, 0xea);
const LANE: RGBColor = RGBColor(0xfb, 0xee, 0xec);
const OOM: RGBColor = RGBColor(0xb4, 0x23, 0x18);
/// From the first series to the last: dark enough on white, apart in hue and in lightness.
const RAMP: [(u8, u8, u8); 6] = [
    (0x4a, 0x14, 0x8c),
    (0x1f, 0x6f, 0xc4),
    (0x0b, 0x86, 0x83),
    (0x4d, 0x8f, 0x12),
    (0xcc, 0x82, 0x00),
    (0xb8, 0x32, 0x0a),
];

/// A measured point, with an interval around it where there is one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Point {
    /// Position, at least 1.
    pub(crate) x: u64,
    /// Value, finite and not negative.
    pub(crate) y: f64,
    /// Lower and upper end of its interval.
    pub(crate) interval: Option<(f64, f64)>,
}

/// A line and the positions where it did not fit.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Series {
    /// In the legend.
    pub(crate) name: String,
    /// In ascending order of position.
    pub(crate) points: Vec<Point>,
    /// Positions of cells that did not fit.
    pub(crate) oom: Vec<u64>,
}

/// Lines of the same quantity.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Chart {
    /// What is shown.
    pub(crate) title: String,
    /// Of what, under which conditions.
    pub(crate) subtitle: String,
    /// The x axis, with its unit.
    pub(crate) x_label: String,
    /// The y axis, with its unit.
    pub(crate) y_label: String,
    /// What tells the series apart.
    pub(crate) legend: String,
    /// The lines.
    pub(crate) series: Vec<Series>,
}

/// A log2 axis: from `low` to `high` in powers of two, labelled where told to.
struct Axis {
    inner: RangedCoordf64,
    at: Vec<f64>,
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.inner.map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { Vec::new() } else { self.at.clone() }
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.inner.range()
    }
}

impl Chart {
    /// The picture as SVG text.
    pub(crate) fn svg(&self) -> Result<String> {
        let mut svg = String::new();
        {
            let root = SVGBackend::with_string(&mut svg, (WIDTH_PX as u32, HEIGHT_PX as u32)).into_drawing_area();
            self.draw(&root).map_err(|e| anyhow!("cannot draw `{}`: {e}", self.title))?;
            root.present().map_err(|e| anyhow!("cannot draw `{}`: {e}", self.title))?;
        }
        // A name for screen readers and for the browser's tooltip.
        let name = escape(&format!("{}: {}", self.title, self.subtitle));
        Ok(match svg.find("<svg ").and_then(|open| Some(open + svg[open..].find('>')? + 1)) {
            Some(end) => format!("{}\n<title>{name}</title>{}", &svg[..end], &svg[end..]),
            None => svg,
        })
    }

    fn draw<B: DrawingBackend>(&self, root: &DrawingArea<B, plotters::coord::Shift>) -> Drawn<B> {
        root.fill(&WHITE)?;
        text(root, &self.title, (LEFT_PX, 28), 22, INK)?;
        text(root, &shortened(&self.subtitle, SUBTITLE_CHARS), (LEFT_PX, 54), 14, FAINT)?;

        let top = nice_top(
            self.series.iter().flat_map(|s| &s.points).map(|p| p.interval.map_or(p.y, |(_, high)| high.max(p.y))),
        );
        let lane_rows = self.series.iter().filter(|s| !s.oom.is_empty()).count() as i32;
        let lane_px = if lane_rows == 0 { 0 } else { (lane_rows * LANE_ROW_PX + 8).clamp(26, LANE_MAX_PX) };
        let plot_px = HEIGHT_PX - HEAD_PX - BOTTOM_PX;
        // The lane lies above the largest value: the axis goes on past its last tick by the lane's share of the pixels.
        let y_end = top.unwrap_or(1.0) * f64::from(plot_px) / f64::from(plot_px - lane_px);
        let positions = self.positions();
        let (low, high) = match (positions.first(), positions.last()) {
            (Some(first), Some(last)) if first < last => (log2(*first), log2(*last)),
            (Some(only), _) => (log2(*only) - 1.0, log2(*only) + 1.0),
            _ => (0.0, 1.0),
        };
        let margin = (high - low) * 0.04;
        let plot_width_px = f64::from(WIDTH_PX - LEFT_PX - LEGEND_PX - GAP_PX);
        let labels = x_labels(&positions, plot_width_px / ((high - low) + 2.0 * margin));
        let y_ticks = top.map_or_else(Vec::new, ticks);

        let area = root.margin(HEAD_PX, 0, 0, LEGEND_PX + GAP_PX);
        let mut chart = ChartBuilder::on(&area)
            .set_label_area_size(LabelAreaPosition::Left, LEFT_PX)
            .set_label_area_size(LabelAreaPosition::Bottom, BOTTOM_PX)
            .build_cartesian_2d(
                Axis { inner: (low - margin..high + margin).into(), at: labels.iter().map(|x| log2(*x)).collect() },
                Axis { inner: (0.0..y_end).into(), at: y_ticks.clone() },
            )?;
        let (x_pixels, y_pixels) = chart.plotting_area().get_pixel_range();
        if lane_px > 0 {
            let lane = [(x_pixels.start, y_pixels.start), (x_pixels.end, y_pixels.start + lane_px)];
            root.draw(&Rectangle::new(lane, LANE.filled()))?;
        }
        chart
            .configure_mesh()
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .axis_style(FAINT)
            .x_label_formatter(&|x| position(x.exp2().round() as u64))
            .y_label_formatter(&|y| tick_text(*y, &y_ticks))
            .label_style(("sans-serif", 13).into_font().color(&INK))
            .draw()?;

        let middle = (x_pixels.start.midpoint(x_pixels.end), y_pixels.start.midpoint(y_pixels.end));
        let centred = |size: i32, colour: RGBColor| {
            let style = ("sans-serif", size).into_font().color(&colour);
            style.pos(Pos::new(HPos::Center, VPos::Center))
        };
        root.draw(&Text::new(self.x_label.as_str(), (middle.0, HEIGHT_PX - 20), centred(15, INK)))?;
        let upright = centred(15, INK).transform(FontTransform::Rotate270);
        root.draw(&Text::new(self.y_label.as_str(), (18, middle.1), upright))?;
        if self.series.iter().all(|s| s.points.is_empty()) {
            root.draw(&Text::new("nothing fits", middle, centred(16, FAINT)))?;
        }

        let pixel = |x: u64, y: f64| chart.backend_coord(&(log2(x), y));
        let mut lane_row = 0;
        for (at, series) in self.series.iter().enumerate() {
            let look = Look::of(at, self.series.len());
            root.draw(&PathElement::new(
                series.points.iter().map(|p| pixel(p.x, p.y)).collect::<Vec<_>>(),
                look.colour.stroke_width(2),
            ))?;
            for point in &series.points {
                if let Some((from, to)) = point.interval {
                    let ends = [pixel(point.x, from.max(0.0)), pixel(point.x, to)];
                    root.draw(&PathElement::new(ends, look.colour.stroke_width(1)))?;
                    for (x, y) in ends {
                        root.draw(&PathElement::new([(x - 4, y), (x + 4, y)], look.colour.stroke_width(1)))?;
                    }
                }
                look.mark(root, pixel(point.x, point.y))?;
            }
            if !series.oom.is_empty() {
                let row = (2 * lane_row + 1) * lane_px / (2 * lane_rows);
                for x in &series.oom {
                    cross(root, (pixel(*x, 0.0).0, y_pixels.start + row), look.colour)?;
                }
                lane_row += 1;
            }
        }
        if lane_px > 0 {
            text(root, "out of memory", (WIDTH_PX - LEGEND_PX, y_pixels.start + lane_px / 2), 14, OOM)?;
        }
        self.draw_legend(root, y_pixels.start + lane_px + 20)
    }

    fn draw_legend<B: DrawingBackend>(&self, root: &DrawingArea<B, plotters::coord::Shift>, top: i32) -> Drawn<B> {
        let left = WIDTH_PX - LEGEND_PX;
        let space = HEIGHT_PX - top - 40;
        let count = self.series.len().max(1) as i32;
        let step = (space / count).clamp(14, 24);
        let shown = self.series.len().min((space / step) as usize);
        text(root, &self.legend, (left, top), 14, FAINT)?;
        for (at, series) in self.series.iter().take(shown).enumerate() {
            let y = top + 28 + at as i32 * step;
            let look = Look::of(at, self.series.len());
            root.draw(&PathElement::new([(left, y), (left + 30, y)], look.colour.stroke_width(2)))?;
            look.mark(root, (left + 15, y))?;
            text(root, &series.name, (left + 40, y), 14.min(step - 1), INK)?;
        }
        if shown < self.series.len() {
            let more = format!("and {} more", self.series.len() - shown);
            text(root, &more, (left, top + 28 + shown as i32 * step), 13, FAINT)?;
        }
        Ok(())
    }

    /// Every position of every series, ascending, each once.
    fn positions(&self) -> Vec<u64> {
        let points = self.series.iter().flat_map(|s| s.points.iter().map(|p| p.x).chain(s.oom.iter().copied()));
        points.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
    }
}

type Drawn<B> = Result<(), DrawingAreaErrorKind<<B as DrawingBackend>::ErrorType>>;

/// How one series looks. Later ones have smaller marks, so that equal values stay visible one inside another.
struct Look {
    colour: RGBColor,
    shape: usize,
    size: i32,
}

impl Look {
    fn of(at: usize, count: usize) -> Look {
        let place = if count < 2 { 0.2 } else { at as f64 / (count - 1) as f64 } * (RAMP.len() - 1) as f64;
        let (from, to) = (RAMP[place.floor() as usize], RAMP[place.ceil() as usize]);
        let mix =
            |from: u8, to: u8| (f64::from(from) + (f64::from(to) - f64::from(from)) * place.fract()).round() as u8;
        Look {
            colour: RGBColor(mix(from.0, to.0), mix(from.1, to.1), mix(from.2, to.2)),
            shape: at % 4,
            size: (6 - at as i32).max(3),
        }
    }

    fn mark<B: DrawingBackend>(&self, root: &DrawingArea<B, plotters::coord::Shift>, (x, y): (i32, i32)) -> Drawn<B> {
        let (style, r) = (self.colour.filled(), self.size);
        match self.shape {
            0 => root.draw(&Circle::new((x, y), r, style)),
            1 => root.draw(&Rectangle::new([(x - r, y - r), (x + r, y + r)], style)),
            2 => root.draw(&Polygon::new([(x, y - r - 1), (x + r + 1, y + r), (x - r - 1, y + r)], style)),
            _ => root.draw(&Polygon::new([(x, y - r - 2), (x + r + 2, y), (x, y + r + 2), (x - r - 2, y)], style)),
        }
    }
}

fn cross<B: DrawingBackend>(
    root: &DrawingArea<B, plotters::coord::Shift>,
    (x, y): (i32, i32),
    colour: RGBColor,
) -> Drawn<B> {
    root.draw(&PathElement::new([(x - 4, y - 4), (x + 4, y + 4)], colour.stroke_width(2)))?;
    root.draw(&PathElement::new([(x - 4, y + 4), (x + 4, y - 4)], colour.stroke_width(2)))
}

/// Draws `text` to the right of a point, its middle at the point's height.
fn text<B: DrawingBackend>(
    root: &DrawingArea<B, plotters::coord::Shift>,
    text: &str,
    at: (i32, i32),
    size: i32,
    colour: RGBColor,
) -> Drawn<B> {
    let style = ("sans-serif", size).into_font().color(&colour).pos(Pos::new(HPos::Left, VPos::Center));
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    root.draw(&Text::new(text, at, style))
}

fn log2(x: u64) -> f64 {
    (x.max(1) as f64).log2()
}

/// A position as people write it: 8192, 128k.
fn position(x: u64) -> String {
    if x >= 100_000 && x.is_multiple_of(1024) { format!("{}k", x / 1024) } else { x.to_string() }
}

/// The positions to label: the last, the first, and those between with room around them.
fn x_labels(positions: &[u64], pixels_per_octave: f64) -> Vec<u64> {
    let Some((last, rest)) = positions.split_last() else { return Vec::new() };
    let apart = |a: u64, b: u64| (log2(b) - log2(a)) * pixels_per_octave >= X_LABEL_PX;
    let mut labels: Vec<u64> = Vec::new();
    for x in rest {
        if labels.last().is_none_or(|before| apart(*before, *x)) && apart(*x, *last) {
            labels.push(*x);
        }
    }
    labels.push(*last);
    labels
}

/// A round number at or above the largest value; `None` without values.
fn nice_top(values: impl Iterator<Item = f64>) -> Option<f64> {
    let largest =
        values.filter(|v| v.is_finite()).fold(None, |top: Option<f64>, v| Some(top.map_or(v, |t| t.max(v))))?;
    if largest <= 0.0 {
        return Some(1.0);
    }
    let step = tick_step(largest);
    Some((largest / step * 1.02).ceil() * step)
}

/// 1, 2 or 5 times a power of ten, four to ten of them to `top`.
fn tick_step(top: f64) -> f64 {
    let power = 10f64.powf((top / 4.0).log10().floor());
    [5.0, 2.0, 1.0].into_iter().map(|n| n * power).find(|step| *step <= top / 4.0).unwrap_or(power)
}

fn ticks(top: f64) -> Vec<f64> {
    let step = tick_step(top);
    (0..=(top / step).round() as u32).map(|n| f64::from(n) * step).collect()
}

/// A tick's value with as many decimals as the step between ticks needs.
fn tick_text(value: f64, ticks: &[f64]) -> String {
    let step = ticks.get(1).copied().unwrap_or(1.0);
    if value != 0.0 && (step < 1e-5 || ticks.last().is_some_and(|top| *top >= 1e6)) {
        return format!("{value:e}");
    }
    format!("{value:.*}", (-(step * 1.000_001).log10().floor()).max(0.0) as usize)
}

fn escape(text: &str) -> String {
    let clean = text.chars().filter(|c| !c.is_control());
    clean.fold(String::new(), |out, c| match c {
        '&' => out + "&amp;",
        '<' => out + "&lt;",
        '>' => out + "&gt;",
        c => out + c.encode_utf8(&mut [0; 4]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(series: Vec<Series>) -> Chart {
        Chart {
            title: "Transient bytes by chunk".into(),
            subtitle: "tiny@bf16, cpu".into(),
            x_label: "chunk, tokens".into(),
            y_label: "transient, MiB".into(),
            legend: "batch".into(),
            series,
        }
    }

    fn series(name: &str, points: &[(u64, f64)], oom: &[u64]) -> Series {
        let points = points.iter().map(|(x, y)| Point { x: *x, y: *y, interval: None }).collect();
        Series { name: name.into(), points, oom: oom.into() }
    }

    /// The texts of a picture.
    fn texts(svg: &str) -> Vec<String> {
        let inner = |part: &str| part.split_once('>').map(|(_, text)| text.trim().to_owned());
        svg.split("<text ").skip(1).filter_map(|part| inner(part.split("</text>").next()?)).collect()
    }

    #[test]
    fn a_picture_names_its_axes_ticks_and_series() {
        let svg = chart(vec![series("1", &[(512, 1.0), (2048, 4.0)], &[8192])]).svg().unwrap();
        let texts = texts(&svg);
        for text in [
            "Transient bytes by chunk",
            "chunk, tokens",
            "transient, MiB",
            "batch",
            "512",
            "2048",
            "8192",
            "out of memory",
        ] {
            assert!(texts.iter().any(|t| t == text), "{text} in {texts:?}");
        }
        assert!(svg.contains("<title>Transient bytes by chunk: tiny@bf16, cpu</title>"));
    }

    #[test]
    fn one_point_zero_values_nothing_and_all_oom_are_drawn() {
        let all = [
            vec![series("1", &[(512, 3.0)], &[])],
            vec![series("1", &[(512, 0.0), (1024, 0.0)], &[])],
            vec![series("1", &[], &[512, 1024]), series("2", &[], &[512, 1024])],
            vec![series("1", &[], &[512])],
            vec![],
            vec![series("1", &[(1, f64::MIN_POSITIVE)], &[])],
            vec![series("1", &[(1, 1e300), (u64::MAX, 1.0)], &[])],
            (0..200).map(|n| series(&n.to_string(), &[(1, f64::from(n))], &[2])).collect(),
        ];
        for series in all {
            let count = series.len();
            let svg = chart(series).svg().unwrap();
            assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"), "{count} series");
        }
    }

    #[test]
    fn a_hostile_name_stays_text() {
        let mut chart = chart(vec![series("<script>&", &[(1, 1.0)], &[])]);
        chart.subtitle = "a<b>&\"c\u{1}\nd".into();
        let svg = chart.svg().unwrap();
        assert!(!svg.contains("<script") && !svg.contains("<b>") && !svg.contains('\u{1}'));
    }

    #[test]
    fn ticks_are_round_and_cover_the_values() {
        assert_eq!(nice_top([3.0, 97.0].into_iter()), Some(100.0));
        assert_eq!(nice_top([100.0].into_iter()), Some(120.0));
        assert_eq!(nice_top(std::iter::empty()), None);
        assert_eq!(nice_top([0.0].into_iter()), Some(1.0));
        assert_eq!(ticks(100.0), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        let quarter = ticks(1.0);
        assert_eq!(
            quarter.iter().map(|t| tick_text(*t, &quarter)).collect::<Vec<_>>(),
            ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
        );
        assert_eq!(tick_text(2000.0, &[0.0, 1000.0]), "2000");
        assert_eq!([0.0, 5e6].map(|t| tick_text(t, &ticks(25e6))), ["0", "5e6"]);
    }

    #[test]
    fn labels_under_the_axis_never_crowd() {
        let all: Vec<u64> = (1..=64).collect();
        let labels = x_labels(&all, 100.0);
        assert_eq!((labels.first(), labels.last()), (Some(&1), Some(&64)));
        assert!(labels.windows(2).all(|w| (log2(w[1]) - log2(w[0])) * 100.0 >= X_LABEL_PX), "{labels:?}");
        assert_eq!(x_labels(&[512, 2048, 8192], 100.0), [512, 2048, 8192]);
        assert_eq!(x_labels(&[7], 100.0), [7]);
    }

    #[test]
    fn long_positions_are_short_labels() {
        assert_eq!([512, 8192, 65_536, 131_072, 1 << 20].map(position), ["512", "8192", "65536", "128k", "1024k"]);
    }
}
