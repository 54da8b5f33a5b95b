"""Line charts as marks, which a template writes as SVG inside a page (parts.html).

Text stays text, in the page's font: it can be selected and read aloud. Colours are the page's variables, so that one
chart serves light and dark. Each is drawn twice, for wide screens and for phones. The same numbers give the same marks.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("first", "second", "third", "fourth", "fifth", "sixth")
"""Of the page (page.css), besides "muted"."""
WIDTHS = {"wide": 736, "narrow": 340}
"""Of a drawing, in pixels; the page shows the one that fits."""
_LEFT, _RIGHT = 64, 24
_ROW, _GAP, _LETTER = 20, 18, 6.8  # of text: height, between entries, width of a letter
_MARKER = 2.5
LOGARITHMIC_FROM = 8.0
"""Times the lowest value: from there on axes of positive values are logarithmic."""

Numbers = Sequence[float] | np.ndarray


@dataclasses.dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Attributes:
        name: In the legend; "": not there.
        colour: One of `COLOURS`, or "muted".
        steps: x are the edges of bins (one more than there are y), and y their heights.
        band: Lower and upper ends of y, drawn faintly.
        width: Of the line; 0: there is none, but markers.
        labels: Beside each marker.
    """

    name: str
    x: Numbers
    y: Numbers
    colour: str
    dashed: bool = False
    markers: bool = False
    steps: bool = False
    band: tuple[Numbers, Numbers] | None = None
    width: float = 2.0
    labels: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Axis:
    """Where values lie between both ends, and what is written beside them. What lies beyond is drawn at the end."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    label: str = ""
    is_log: bool = False

    def shares(self, values: Numbers) -> np.ndarray:
        """From 0 at the lower end to 1 at the upper one."""
        found = np.clip(np.asarray(values, dtype=np.float64), self.low, self.high)
        if self.is_log:
            return np.log(found / self.low) / math.log(self.high / self.low)
        return (found - self.low) / (self.high - self.low)


Mark = dict[str, str]
"""What the template writes as one element of SVG, by names."""


@dataclasses.dataclass
class Drawing:
    """Marks from the back to the front: lines, dots, texts. A line is a "curve" or a "rule"."""

    kind: str
    width: int
    height: float = 0.0
    lines: list[Mark] = dataclasses.field(default_factory=list)
    dots: list[Mark] = dataclasses.field(default_factory=list)
    texts: list[Mark] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Chart:
    """What is drawn, with its name (another for each on a page), its title, and what is to be seen for those who
    cannot.
    """

    name: str
    title: str
    description: str
    drawings: list[Drawing]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot; those of a chart lie below each other and share the first one's x axis."""

    title: str
    curves: Sequence[Curve]
    y: Axis
    height: int


InWords = Callable[[float], str]
"""How a value is written beside its tick."""


def linear(
    low: float, high: float, most: int, text: InWords, label: str = "", *, whole: bool = False, below: float = math.inf
) -> Axis:
    """An axis with at most so many intervals between round numbers, none above ``below``."""
    rough = max((high - low) / most, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(min(high, below) / step + 1e-9)
    return Axis(low, high, [(step * n, text(step * n)) for n in range(first, last + 1)], label)


def logarithmic(
    low: float, text: InWords, label: str = "", *, high: float = 1.0, between: Sequence[int] = (1,)
) -> Axis:
    """An axis with a tick at each power of ten, or at these multiples of each."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [factor * 10.0**power for power in powers for factor in between]
    ticks = [(value, text(value)) for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
    return Axis(low, high, ticks, label, is_log=True)


def spanning(values: Sequence[float], text: InWords, label: str) -> Axis:
    """An axis for positive values, logarithmic where they span much."""
    low, high = min(values), max(values)
    if low > 0 and high >= LOGARITHMIC_FROM * low:
        return logarithmic(low / 1.2, text, label, high=high * 1.2, between=(1, 2, 5))
    margin = 0.08 * (high - low) or 0.1 * high or 1.0
    return linear(low - margin, high + margin, 6, text, label)


def accuracies(curves: Sequence[Curve]) -> Axis:
    """An axis for what curves show in per cent, with some space beyond."""
    shown = np.concatenate([part for curve in curves for part in (curve.y, *(curve.band or ()))])
    margin = max(0.08 * float(shown.max() - shown.min()), 1.0)
    low, high = max(float(shown.min()) - margin, 0), min(float(shown.max()) + margin, 101)
    return linear(low, high, 6, lambda value: f"{value:g} %", below=100)


def chart(x: Axis, panels: Sequence[Panel], title: str, description: str, name: str = "curves") -> Chart:
    """A chart at every width.

    Args:
        x: Of all panels.
        panels: From the top.
        title: Of the chart.
        description: What is to be seen, for those who cannot.
        name: Of the chart, another for each on a page.
    """
    drawings = [Drawing(kind, width) for kind, width in WIDTHS.items()]
    for drawing in drawings:
        for number, panel in enumerate(panels):
            _panel(drawing, x, panel, with_x=number == len(panels) - 1)
    return Chart(name, title, description, drawings)


def _panel(drawing: Drawing, x: Axis, panel: Panel, with_x: bool) -> None:
    """Adds it below what is there."""
    left, right = _LEFT, drawing.width - _RIGHT
    _text(drawing, left, drawing.height + 14, panel.title)
    bottom = _legend(drawing, panel.curves, drawing.height + _ROW) + 8 + panel.height

    def across(values: Numbers) -> np.ndarray:
        return left + (right - left) * x.shares(values)

    def up(values: Numbers) -> np.ndarray:
        return bottom - panel.height * panel.y.shares(values)

    for value, text in panel.y.ticks:
        height = float(up([value])[0])
        _line(drawing, [left, right], [height, height], "stroke: var(--line)")
        _text(drawing, left - 8, height + 4, text, "end")
    _line(drawing, [left, right], [bottom, bottom], "stroke: var(--muted)")
    for curve in panel.curves:
        _curve(drawing, curve, across, up)
    drawing.height = bottom + _GAP
    if with_x:
        drawing.height = bottom + (46 if x.label else 26)
        slot = _LETTER * max((len(text) for _, text in x.ticks), default=0) + _GAP / 2
        free = -math.inf
        for place, (_, text) in zip(across([value for value, _ in x.ticks]).tolist(), x.ticks, strict=True):
            if place >= free:  # what would stand in another's place is left out
                _text(drawing, place, bottom + 17, text, "middle")
                free = place + slot
        if x.label:
            _text(drawing, (left + right) / 2, bottom + 38, x.label, "middle")


def _legend(drawing: Drawing, curves: Sequence[Curve], top: float) -> float:
    """Entries in rows, as many as are needed; returns where they end."""
    left, named = float(_LEFT), [curve for curve in curves if curve.name]
    for curve in named:
        width = 28 + _LETTER * len(curve.name)
        if left > _LEFT and left + width > drawing.width:
            left, top = float(_LEFT), top + _ROW
        if curve.width:
            _line(drawing, [left, left + 22], [top + 10, top + 10], _stroke(curve))
        else:
            _dot(drawing, curve, left + 11, top + 10)
        _text(drawing, left + 28, top + 14, curve.name)
        left += width + _GAP
    return top + _ROW if named else top


def _curve(
    drawing: Drawing, curve: Curve, across: Callable[[Numbers], np.ndarray], up: Callable[[Numbers], np.ndarray]
) -> None:
    each = 2 if curve.steps else 1
    xs, ys = np.repeat(across(curve.x), each), np.repeat(up(curve.y), each)
    xs = xs[1:-1] if curve.steps else xs
    if curve.band is not None:
        low, high = (np.repeat(up(ends), each) for ends in curve.band)
        faint = f"fill: var(--{curve.colour}); fill-opacity: 0.2; stroke: none"
        _line(drawing, [*xs, *xs[::-1]], [*low, *high[::-1]], faint)
    if curve.width:
        _line(drawing, xs, ys, _stroke(curve), "curve")
    if curve.markers:
        for a, b in zip(xs, ys, strict=True):
            _dot(drawing, curve, a, b)
    for a, b, label in zip(xs, ys, curve.labels, strict=False):
        _text(drawing, a + 8, b + 4, label)


def _stroke(curve: Curve) -> str:
    dashes = f"; stroke-dasharray: {2 * curve.width:g} {3 * curve.width:g}" if curve.dashed else ""
    return f"stroke: var(--{curve.colour}); stroke-width: {curve.width:g}{dashes}"


def _line(drawing: Drawing, xs: Numbers, ys: Numbers, style: str, kind: str = "rule") -> None:
    points = " ".join(f"{x:.2f},{y:.2f}" for x, y in zip(xs, ys, strict=True))
    drawing.lines.append({"points": points, "style": style, "kind": kind})


def _dot(drawing: Drawing, curve: Curve, x: float, y: float) -> None:
    radius = f"{_MARKER + (curve.width or 4) / 2:g}"
    style = f"fill: var(--{curve.colour})"
    drawing.dots.append({"x": f"{x:.2f}", "y": f"{y:.2f}", "radius": radius, "style": style})


def _text(drawing: Drawing, x: float, y: float, text: str, anchor: str = "start") -> None:
    most = int((drawing.width - x) / _LETTER) if anchor == "start" else len(text)
    shown = text if len(text) <= most else text[: most - 1] + "…"
    drawing.texts.append({"x": f"{x:.2f}", "y": f"{y:.2f}", "text": shown, "anchor": anchor})


def figure_of(x: Axis, panel: Panel) -> "Figure":
    """The same as a figure of matplotlib's own."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for curve in panel.curves:
        colour = "tab:gray" if curve.colour == "muted" else f"C{COLOURS.index(curve.colour)}"
        style = ("--" if curve.dashed else "-") if curve.width else "none"
        marker = "o" if curve.markers else None
        axes.plot(curve.x, curve.y, marker=marker, color=colour, linestyle=style, label=curve.name or None)
        if curve.band is not None:
            axes.fill_between(curve.x, *curve.band, color=colour, alpha=0.15, linewidth=0)
    if x.is_log:
        axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(*zip(*x.ticks, strict=True))
    axes.set_xlabel(x.label)
    axes.set_title(panel.title)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    if len(panel.curves) > 1:
        axes.legend(frameon=False, fontsize="small")
    return figure
