//! One kind of chart: marks and lines over two axes, as inline SVG with its text as text.
//!
//! A mark is a link with a name, so that it can be reached by keyboard and read aloud. Series differ in shape and dash and
//! not by colour alone. Colours are the page's classes, so that they follow its light or dark scheme.

use std::fmt::Write as _;

use super::markup::Markup;

const WIDTH: f64 = 520.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 46.0;
/// Series that are told apart.
pub(super) const MAX_SERIES: usize = 8;
/// Most labels of one axis.
const MAX_TICKS: usize = 9;

/// How an axis counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scale {
    /// From zero.
    Linear,
    /// Powers of two, labelled at the values themselves.
    Log2,
    /// Powers of ten.
    Log10,
}

/// A point.
#[derive(Debug, Clone)]
pub(super) struct Mark {
    pub(super) x: f64,
    pub(super) y: f64,
    /// Ends of the interval of y.
    pub(super) interval: Option<(f64, f64)>,
    /// Where it leads.
    pub(super) href: String,
    /// What it says.
    pub(super) about: String,
    /// Drawn full; else as an outline.
    pub(super) full: bool,
}

/// Points under one name.
#[derive(Debug, Clone)]
pub(super) struct Series {
    pub(super) name: String,
    pub(super) marks: Vec<Mark>,
    /// Points of the line through it; empty for none.
    pub(super) line: Vec<(f64, f64)>,
}

/// A line without marks: a bound.
#[derive(Debug, Clone)]
pub(super) struct Bound {
    pub(super) name: String,
    pub(super) line: Vec<(f64, f64)>,
    /// Where its name ends, and whether it stands under the line; none for a name in the legend only.
    pub(super) label: Option<(f64, f64, bool)>,
}

/// A chart.
#[derive(Debug, Clone)]
pub(super) struct Chart {
    pub(super) title: String,
    pub(super) x: (String, Scale),
    pub(super) y: (String, Scale),
    pub(super) series: Vec<Series>,
    pub(super) bounds: Vec<Bound>,
}

/// An axis: which values it spans and where they stand.
struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    ticks: Vec<f64>,
}

impl Axis {
    fn of(scale: Scale, values: impl Iterator<Item = f64> + Clone) -> Axis {
        let values = values.filter(|value| value.is_finite() && (scale == Scale::Linear || *value > 0.0));
        let low = values.clone().fold(f64::INFINITY, f64::min);
        let high = values.clone().fold(0.0, f64::max);
        match scale {
            Scale::Linear => {
                let step = nice_step(high);
                let top = (high / step).ceil().max(1.0) * step;
                let ticks = (0..=(top / step).round() as usize).map(|n| n as f64 * step).collect();
                Axis { scale, low: 0.0, high: top, ticks }
            }
            Scale::Log2 => {
                let (low, high) = if low <= high { (low.log2(), high.log2()) } else { (0.0, 1.0) };
                let mut ticks: Vec<f64> = values.collect();
                ticks.sort_by(f64::total_cmp);
                ticks.dedup();
                let every = ticks.len().div_ceil(MAX_TICKS);
                let ticks = ticks.into_iter().step_by(every.max(1)).collect();
                let pad = if low < high { 0.04 * (high - low) } else { 1.0 };
                Axis { scale, low: low - pad, high: high + pad, ticks }
            }
            Scale::Log10 => {
                let (low, high) = if low <= high { (low.log10(), high.log10()) } else { (0.0, 1.0) };
                let (low, high) = (low.floor(), high.ceil().max(low.floor() + 1.0));
                let every = ((high - low) as usize).div_ceil(MAX_TICKS).max(1);
                let ticks = (0..=(high - low) as usize).step_by(every).map(|n| 10f64.powi(low as i32 + n as i32));
                Axis { scale, low, high, ticks: ticks.collect() }
            }
        }
    }

    /// Its place between 0 and 1.
    fn share(&self, value: f64) -> f64 {
        let at = match self.scale {
            Scale::Linear => value,
            Scale::Log2 => value.max(f64::MIN_POSITIVE).log2(),
            Scale::Log10 => value.max(f64::MIN_POSITIVE).log10(),
        };
        ((at - self.low) / (self.high - self.low)).clamp(-0.05, 1.05)
    }
}

/// A step of 1, 2 or 5 with at most six of them to `top`.
fn nice_step(top: f64) -> f64 {
    if !(top > 0.0 && top.is_finite()) {
        return 1.0;
    }
    let unit = 10f64.powf((top / 6.0).log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|factor| factor * unit).into_iter().find(|step| top / step <= 6.0).unwrap_or(10.0 * unit)
}

/// A tick's text: no more digits than it needs.
fn tick(value: f64) -> String {
    match value.abs() {
        v if v >= 1e9 => format!("{}G", trimmed(value / 1e9)),
        v if v >= 1e6 => format!("{}M", trimmed(value / 1e6)),
        v if v >= 1e5 => format!("{}k", trimmed(value / 1e3)),
        _ => trimmed(value),
    }
}

fn trimmed(value: f64) -> String {
    if value != 0.0 && value.abs() < 0.001 {
        return format!("{value:e}");
    }
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

impl Chart {
    /// The figure: the picture and, under it, what its series are.
    pub(super) fn figure(&self) -> Markup {
        let mut out = Markup::new();
        out.open("figure", &[("class", "chart")]).leaf("figcaption", &[], &self.title);
        self.svg(&mut out);
        if self.series.len() > 1 || self.series.iter().any(|series| !series.name.is_empty()) {
            out.open("ul", &[("class", "legend")]);
            for (slot, series) in self.series.iter().enumerate() {
                out.open("li", &[("class", CLASSES[slot % MAX_SERIES])]);
                out.open(
                    "svg",
                    &[("viewBox", "0 0 34 14"), ("width", "34"), ("height", "14"), ("aria-hidden", "true")],
                );
                if series.line.len() > 1 {
                    out.leaf("path", &[("class", "line"), ("d", "M0 7H34")], "");
                }
                out.leaf("path", &[("class", "mark full"), ("d", &shape(slot, 17.0, 7.0))], "");
                out.close("svg").text(&series.name).close("li");
            }
            for bound in &self.bounds {
                out.open("li", &[]);
                out.open(
                    "svg",
                    &[("viewBox", "0 0 34 14"), ("width", "34"), ("height", "14"), ("aria-hidden", "true")],
                );
                out.leaf("path", &[("class", "bound"), ("d", "M0 7H34")], "");
                out.close("svg").text(&bound.name).close("li");
            }
            out.close("ul");
        }
        out.close("figure").line();
        out
    }

    fn svg(&self, out: &mut Markup) {
        let points = || {
            let marks = self.series.iter().flat_map(|series| &series.marks);
            marks.flat_map(|mark| {
                let ends = mark.interval.map(|(low, high)| [(mark.x, low), (mark.x, high)]);
                std::iter::once((mark.x, mark.y)).chain(ends.into_iter().flatten())
            })
        };
        // Ticks of powers of two are those of marks; bounds never widen an axis of theirs.
        let x = Axis::of(self.x.1, points().map(|(x, _)| x));
        let bounds = self.bounds.iter().flat_map(|bound| bound.line.iter().copied());
        let y = Axis::of(self.y.1, points().chain(bounds.filter(|_| self.y.1 != Scale::Linear)).map(|(_, y)| y));
        let at_x = |value: f64| LEFT + x.share(value) * (WIDTH - LEFT - RIGHT);
        let at_y = |value: f64| HEIGHT - BOTTOM - y.share(value) * (HEIGHT - TOP - BOTTOM);
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);

        let view = format!("0 0 {WIDTH} {HEIGHT}");
        let about = format!("{}: {} over {}", self.title, self.y.0, self.x.0);
        out.open("svg", &[("class", "plot"), ("viewBox", &view), ("role", "group"), ("aria-label", &about)]);
        for value in &y.ticks {
            let at = at_y(*value);
            out.leaf("path", &[("class", "gridline"), ("d", &format!("M{LEFT} {at:.1}H{right}"))], "");
            let place =
                [("x", &*format!("{}", LEFT - 7.0)), ("y", &*format!("{:.1}", at + 4.0)), ("class", "tick end")];
            out.leaf("text", &place, &tick(*value));
        }
        for value in &x.ticks {
            let at = at_x(*value);
            out.leaf("path", &[("class", "gridline"), ("d", &format!("M{at:.1} {TOP}V{bottom}"))], "");
            let place = [("x", &*format!("{at:.1}")), ("y", &*format!("{}", bottom + 17.0)), ("class", "tick middle")];
            out.leaf("text", &place, &tick(*value));
        }
        out.leaf("path", &[("class", "axis"), ("d", &format!("M{LEFT} {TOP}V{bottom}H{right}"))], "");
        let middle = format!("{:.1}", (LEFT + right) / 2.0);
        out.leaf("text", &[("x", &middle), ("y", &format!("{}", HEIGHT - 8.0)), ("class", "name middle")], &self.x.0);
        let turned = format!("translate(13 {:.1}) rotate(-90)", (TOP + bottom) / 2.0);
        out.leaf("text", &[("transform", &turned), ("class", "name middle")], &self.y.0);

        for bound in &self.bounds {
            out.leaf("path", &[("class", "bound"), ("d", &path(&bound.line, at_x, at_y))], "");
        }
        for (slot, series) in self.series.iter().enumerate() {
            out.open("g", &[("class", CLASSES[slot % MAX_SERIES])]);
            if series.line.len() > 1 {
                out.leaf("path", &[("class", "line"), ("d", &path(&series.line, at_x, at_y))], "");
            }
            for mark in &series.marks {
                let (mark_x, mark_y) = (at_x(mark.x), at_y(mark.y));
                out.open("a", &[("href", &mark.href), ("class", "m")]).leaf("title", &[], &mark.about);
                if let Some((low, high)) = mark.interval {
                    let (low, high) = (at_y(low), at_y(high));
                    let d = format!(
                        "M{mark_x:.1} {high:.1}V{low:.1}M{:.1} {high:.1}h8M{:.1} {low:.1}h8",
                        mark_x - 4.0,
                        mark_x - 4.0
                    );
                    out.leaf("path", &[("class", "interval"), ("d", &d)], "");
                }
                let class = if mark.full { "mark full" } else { "mark" };
                out.leaf("path", &[("class", class), ("d", &shape(slot, mark_x, mark_y))], "");
                out.close("a");
            }
            out.close("g");
        }
        for bound in &self.bounds {
            let Some((label_x, label_y, under)) = bound.label else { continue };
            let place = [
                ("x", &*format!("{:.1}", at_x(label_x))),
                ("y", &*format!("{:.1}", at_y(label_y) + if under { 16.0 } else { -6.0 })),
                ("class", "bound-name end"),
            ];
            out.leaf("text", &place, &bound.name);
        }
        out.close("svg");
    }
}

const CLASSES: [&str; MAX_SERIES] = ["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"];

fn path(points: &[(f64, f64)], at_x: impl Fn(f64) -> f64, at_y: impl Fn(f64) -> f64) -> String {
    let mut d = String::new();
    for (at, (x, y)) in points.iter().enumerate() {
        let _ = write!(d, "{}{:.1} {:.1}", if at == 0 { 'M' } else { 'L' }, at_x(*x), at_y(*y));
    }
    d
}

/// The outline of a slot's mark around a point.
fn shape(slot: usize, x: f64, y: f64) -> String {
    let at = |points: &[(f64, f64)]| {
        points.iter().enumerate().fold(String::new(), |mut d, (n, (dx, dy))| {
            let _ = write!(d, "{}{:.1} {:.1}", if n == 0 { 'M' } else { 'L' }, x + dx, y + dy);
            d
        }) + "Z"
    };
    match slot % MAX_SERIES {
        0 => format!("M{:.1} {y:.1}a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0Z", x - 4.5),
        1 => at(&[(-4.2, -4.2), (4.2, -4.2), (4.2, 4.2), (-4.2, 4.2)]),
        2 => at(&[(0.0, -5.5), (5.2, 4.0), (-5.2, 4.0)]),
        3 => at(&[(0.0, -5.8), (5.8, 0.0), (0.0, 5.8), (-5.8, 0.0)]),
        4 => at(&[(0.0, 5.5), (5.2, -4.0), (-5.2, -4.0)]),
        5 => at(&[
            (-1.7, -5.0),
            (1.7, -5.0),
            (1.7, -1.7),
            (5.0, -1.7),
            (5.0, 1.7),
            (1.7, 1.7),
            (1.7, 5.0),
            (-1.7, 5.0),
            (-1.7, 1.7),
            (-5.0, 1.7),
            (-5.0, -1.7),
            (-1.7, -1.7),
        ]),
        6 => at(&[(-5.5, -2.6), (5.5, -2.6), (5.5, 2.6), (-5.5, 2.6)]),
        _ => at(&[(-2.6, -5.5), (2.6, -5.5), (2.6, 5.5), (-2.6, 5.5)]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(x: f64, y: f64) -> Mark {
        Mark { x, y, interval: Some((y * 0.9, y * 1.1)), href: "#c1".into(), about: "<b>".into(), full: true }
    }

    #[test]
    fn a_chart_has_its_text_as_text_and_a_name_for_every_mark() {
        let marks = vec![mark(512.0, 3.0), mark(8192.0, 12.0)];
        let line = marks.iter().map(|mark| (mark.x, mark.y)).collect();
        let chart = Chart {
            title: "Prefill <script>".into(),
            x: ("chunk".into(), Scale::Log2),
            y: ("tok/s".into(), Scale::Linear),
            series: vec![Series { name: "batch 1".into(), marks, line }],
            bounds: vec![Bound {
                name: "floor".into(),
                line: vec![(512.0, 1.0), (8192.0, 1.0)],
                label: Some((512.0, 1.0, false)),
            }],
        };
        let svg = chart.figure().finish();
        assert_eq!(svg.matches("<title>&lt;b&gt;</title>").count(), 2);
        assert!(svg.contains(">8192</text>") && svg.contains(">512</text>") && svg.contains("Prefill &lt;script&gt;"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn nothing_and_odd_values_make_no_broken_path() {
        for y in [0.0, f64::NAN, f64::INFINITY, 1e300] {
            for scale in [Scale::Linear, Scale::Log2, Scale::Log10] {
                let marks = vec![Mark { interval: None, ..mark(1.0, 1.0) }, Mark { interval: None, ..mark(4.0, 2.0) }];
                let line = vec![(1.0, 1.0), (4.0, y.clamp(0.0, 1e12))];
                let series = vec![Series { name: String::new(), marks, line }];
                let axes = (("x".into(), scale), ("y".into(), scale));
                let chart = Chart { title: "t".into(), x: axes.0, y: axes.1, series, bounds: Vec::new() };
                let svg = chart.figure().finish();
                assert!(!svg.contains("NaN") || y.is_nan(), "{svg}");
                assert!(!svg.contains("inf"), "{svg}");
            }
        }
        let axis = Axis::of(Scale::Linear, [0.0].into_iter());
        assert_eq!((axis.low, axis.high), (0.0, 1.0));
    }

    #[test]
    fn ticks_are_round_and_short() {
        assert_eq!([nice_step(50.0), nice_step(7.0), nice_step(0.3), nice_step(1.0)], [10.0, 2.0, 0.05, 0.2]);
        assert_eq!([0.0, 0.25, 8192.0, 2e6, 1e9, 131_072.0].map(tick), ["0", "0.25", "8192", "2M", "1G", "131.072k"]);
    }
}
