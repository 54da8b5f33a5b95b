"""Line charts as SVG that stands inside a page.

Text stays text, in the page's font: it can be selected and read aloud. Colours are the page's variables, so that one
chart serves light and dark. The same numbers give the same bytes.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from sfumato.reporting.html import Html, element

COLOURS = ("first", "second", "third", "fourth", "fifth", "sixth")
"""Of the page (page.css), besides "muted"."""
WIDTH, LEFT, RIGHT = 736, 64, 24
_ROW, _GAP, _LETTER = 20, 18, 6.8  # of text: height, between entries, width of a letter
_MARKER = 2.5

Numbers = Sequence[float] | np.ndarray


@dataclasses.dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Attributes:
        name: In the legend; "": not there.
        colour: One of `COLOURS`, or "muted".
        steps: x are the edges of bins (one more than there are y), and y their heights.
        band: Lower and upper ends of y, drawn faintly.
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


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot; those of a chart lie below each other and share the first one's x axis."""

    title: str
    curves: Sequence[Curve]
    y: Axis
    height: int


Text = Callable[[float], str]
"""How a value is written beside its tick."""


def linear(
    low: float, high: float, most: int, text: Text, label: str = "", *, whole: bool = False, below: float = math.inf
) -> Axis:
    """An axis with at most so many intervals between round numbers, none above ``below``."""
    rough = max((high - low) / most, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(min(high, below) / step + 1e-9)
    return Axis(low, high, [(step * n, text(step * n)) for n in range(first, last + 1)], label)


def logarithmic(low: float, text: Text, label: str = "") -> Axis:
    """An axis from ``low`` to 1 with a tick at each power of ten."""
    powers = range(math.ceil(math.log10(low) - 1e-9), 1)
    return Axis(low, 1.0, [(10.0**power, text(10.0**power)) for power in powers], label, is_log=True)


def chart(x: Axis, panels: Sequence[Panel], title: str, description: str, name: str = "curves") -> Html:
    """One ``<svg>`` element.

    Args:
        x: Of all panels.
        panels: From the top.
        title: Of the chart.
        description: What is to be seen, for those who cannot.
        name: Of the chart, another for each on a page.
    """
    parts: list[Html] = []
    top = 0.0
    for number, panel in enumerate(panels):
        drawn, top = _panel(x, panel, top, with_x=number == len(panels) - 1)
        parts += drawn
    names = element("title", title, id=f"{name}-title"), element("desc", description, id=f"{name}-description")
    labels = f"{name}-title {name}-description"
    return element("svg", *names, *parts, viewBox=f"0 0 {WIDTH} {top:g}", role="img", aria_labelledby=labels)


def _panel(x: Axis, panel: Panel, top: float, with_x: bool) -> tuple[list[Html], float]:
    """Its elements, and where the next one begins."""
    parts = [_text(LEFT, top + 14, panel.title)]
    legend, top = _legend(panel.curves, top + _ROW)
    parts += legend
    bottom = top + 8 + panel.height

    def across(values: Numbers) -> np.ndarray:
        return LEFT + (WIDTH - LEFT - RIGHT) * x.shares(values)

    def up(values: Numbers) -> np.ndarray:
        return bottom - panel.height * panel.y.shares(values)

    for value, text in panel.y.ticks:
        height = float(up([value])[0])
        parts.append(_line([LEFT, WIDTH - RIGHT], [height, height], "stroke: var(--line)"))
        parts.append(_text(LEFT - 8, height + 4, text, "end"))
    parts.append(_line([LEFT, WIDTH - RIGHT], [bottom, bottom], "stroke: var(--muted)"))
    for curve in panel.curves:
        parts += _curve(curve, across, up)
    if not with_x:
        return parts, bottom + _GAP
    for (_, text), place in zip(x.ticks, across([value for value, _ in x.ticks]).tolist(), strict=True):
        parts.append(_text(place, bottom + 17, text, "middle"))
    if x.label:
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom + 38, x.label, "middle"))
    return parts, bottom + (46 if x.label else 26)


def _legend(curves: Sequence[Curve], top: float) -> tuple[list[Html], float]:
    """Entries in rows, as many as are needed, and where they end."""
    parts: list[Html] = []
    left = float(LEFT)
    for curve in curves:
        if not curve.name:
            continue
        width = 28 + _LETTER * len(curve.name)
        if parts and left + width > WIDTH:
            left, top = float(LEFT), top + _ROW
        parts.append(_line([left, left + 22], [top + 10, top + 10], _stroke(curve)))
        parts.append(_text(left + 28, top + 14, curve.name))
        left += width + _GAP
    return parts, top + _ROW if parts else top


def _curve(curve: Curve, across: Callable[[Numbers], np.ndarray], up: Callable[[Numbers], np.ndarray]) -> list[Html]:
    each = 2 if curve.steps else 1
    xs, ys = np.repeat(across(curve.x), each), np.repeat(up(curve.y), each)
    xs = xs[1:-1] if curve.steps else xs
    parts = []
    if curve.band is not None:
        low, high = (np.repeat(up(ends), each) for ends in curve.band)
        faint = f"fill: var(--{curve.colour}); fill-opacity: 0.2; stroke: none"
        parts.append(_line([*xs, *xs[::-1]], [*low, *high[::-1]], faint))
    parts.append(_line(xs, ys, _stroke(curve), "curve"))
    if curve.markers:
        fill = f"fill: var(--{curve.colour})"
        radius = f"{_MARKER + curve.width / 2:g}"
        parts += [
            element("circle", cx=f"{a:.2f}", cy=f"{b:.2f}", r=radius, style=fill) for a, b in zip(xs, ys, strict=True)
        ]
    return parts


def _stroke(curve: Curve) -> str:
    dashes = f"; stroke-dasharray: {2 * curve.width:g} {3 * curve.width:g}" if curve.dashed else ""
    return f"stroke: var(--{curve.colour}); stroke-width: {curve.width:g}{dashes}"


def _line(xs: Numbers, ys: Numbers, style: str, kind: str = "rule") -> Html:
    points = " ".join(f"{x:.2f},{y:.2f}" for x, y in zip(xs, ys, strict=True))
    return element("polyline", points=points, style=style, class_=kind)


def _text(x: float, y: float, text: str, anchor: str = "start") -> Html:
    return element("text", text, x=f"{x:.2f}", y=f"{y:.2f}", text_anchor=anchor)
