"""sweep.html: one plot of the metric against the first key, with a line for each value of the second, and the table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sfumato.accounting import formats
from sfumato.reporting.charts import COLOURS, Axis, Curve, Panel, chart, linear
from sfumato.reporting.html import Html, element, whole_page
from sfumato.studies.grid import in_words
from sfumato.studies.result import Cell, Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LINES = 12
_LOGARITHMIC_FROM = 8.0


def render(sweep: Sweep) -> str:
    """The whole page as HTML text."""
    many = f"{len(sweep.cells)} settings, {sweep.seeds} run{'s' if sweep.seeds > 1 else ''} each"
    header = element(
        "header",
        element("p", "Sfumato sweep", class_="kicker"),
        element("h1", sweep.recipe),
        element("p", f"{many}. Accuracies on held-out images ({sweep.held_out}), of averaged weights.", class_="lead"),
    )
    return whole_page(f"{sweep.recipe} · Sfumato sweep", header, _price(sweep), _figure(sweep), _table(sweep))


def _price(sweep: Sweep) -> Html:
    if sweep.private and sweep.epsilon_together is not None and sweep.delta is not None:
        epsilon, delta = formats.epsilon_text(sweep.epsilon_together), formats.delta_text(sweep.delta)
        text = f"Epsilon {epsilon} at delta {delta} covers all runs together, and so any choice among them."
    elif sweep.private:
        text = "Each cell's epsilon is that of one of its runs alone. No epsilon covers a choice among them."
    else:
        text = "Not every cell is private: no epsilon covers this sweep."
    warnings = [element("p", warning, class_="remark") for warning in sweep.warnings]
    points = element("ul", *(element("li", point) for point in sweep.not_covered))
    title = element("h2", "What it costs")
    return element("section", title, element("p", text), *warnings, element("p", "Not covered:"), points)


def _figure(sweep: Sweep) -> Html:
    lines = lines_of(sweep)
    against = sweep.axes[0] if sweep.axes else "the cells"
    described = f"Mean accuracy against {against}: " + "; ".join(
        f"{name or 'all'}: " + ", ".join(f"{_text(x)} {formats.per_cent(cell.mean)}" for x, cell in line)
        for name, line in lines
    )
    curves, x = _curves(sweep)
    ends = np.concatenate([part for curve in curves for part in (curve.y, *(curve.band or ()))])
    low, high = float(ends.min()), float(ends.max())
    margin = max(0.05 * (high - low), 0.5)
    y = linear(low - margin, high + margin, 6, lambda value: f"{value:g} %", below=100)
    figure = chart(x, [Panel("Held-out accuracy", curves, y, 300)], "Accuracy of the cells", described)
    caption = f"Mean accuracy against {against}"
    caption += f", a line for each {' and '.join(sweep.axes[1:])}" if len(sweep.axes) > 1 else ""
    caption += "; bands are one standard deviation between runs." if sweep.seeds > 1 else "; one run each."
    if len(lines) > MOST_LINES:
        caption += f" The first {MOST_LINES} of {len(lines)} lines."
    return element("section", element("h2", "Accuracy"), element("figure", figure, element("figcaption", caption)))


def _table(sweep: Sweep) -> Html:
    labelled = any(cell.label is not None for cell in sweep.cells)
    names = [*(["cell"] if labelled else []), *sweep.keys, "median", "mean", "std", "standard error", "epsilon"]
    names += ["difference to the first (standard error)"] if sweep.paired else []
    rows = []
    for cell in sweep.cells:
        values = [cell.label or ""] if labelled else []
        values += [_text(cell.settings.get(key)) for key in sweep.keys]
        values += [formats.per_cent(cell.median), formats.per_cent(cell.mean)]
        values += [_points(cell.std), _points(cell.standard_error)]
        values.append(formats.epsilon_text(cell.epsilon) if cell.private else "not private")
        if cell.paired is not None:
            error = _points(cell.paired.standard_error)
            values.append(f"{100 * cell.paired.difference:+.2f}" + (f" ({error})" if error else ""))
        elif sweep.paired:
            values.append("")
        rows.append(element("tr", *(element("td", value) for value in values)))
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in names)))
    what = "Standard deviations, standard errors and differences in points of accuracy; also in sweep.csv."
    table = element("table", head, element("tbody", *rows), class_="numbers")
    return element("section", element("h2", "The cells"), element("p", what), table)


def _points(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.2f}"


def lines_of(sweep: Sweep) -> list[tuple[str, list[tuple[Any, Cell]]]]:
    """The cells as lines: a name, which tells the values of the keys that make lines, and of each cell its place."""
    lines: dict[str, list[tuple[Any, Cell]]] = {}
    for cell in sweep.cells:
        name = ", ".join(f"{key.rpartition('.')[2]} {_text(cell.settings.get(key))}" for key in sweep.axes[1:])
        place = cell.settings.get(sweep.axes[0]) if sweep.axes else cell.label or in_words(cell.settings)
        lines.setdefault(name, []).append((place, cell))
    return list(lines.items())


def plot(sweep: Sweep) -> "Figure":
    """The page's plot as a figure of matplotlib's own."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    curves, x = _curves(sweep)
    for number, curve in enumerate(curves):
        colour, style = f"C{number % 10}", "--" if curve.dashed else "-"
        axes.plot(curve.x, curve.y, marker="o", color=colour, linestyle=style, label=curve.name or None)
        if curve.band is not None:
            axes.fill_between(curve.x, *curve.band, color=colour, alpha=0.15, linewidth=0)
    if x.is_log:
        axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(*zip(*x.ticks, strict=True))
    axes.set_xlabel(x.label)
    axes.set_title("Held-out accuracy")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize="small")
    return figure


def _curves(sweep: Sweep) -> tuple[list[Curve], Axis]:
    """Of the first lines, in per cent, over an axis that has a place for each value."""
    lines = lines_of(sweep)[:MOST_LINES]
    values = list(dict.fromkeys(_text(x) for _, line in lines for x, _ in line))
    numbers = all(type(x) in (int, float) for _, line in lines for x, _ in line)
    curves = []
    for number, (name, line) in enumerate(lines):
        points = sorted(line, key=lambda point: point[0]) if numbers else line
        places = [x if numbers else values.index(_text(x)) for x, _ in points]
        means = np.array([100 * cell.mean for _, cell in points])
        spread = np.array([100 * (cell.std or 0.0) for _, cell in points])
        band, dashed = (means - spread, means + spread) if sweep.seeds > 1 else None, number >= len(COLOURS)
        curves.append(Curve(name, places, means, COLOURS[number % len(COLOURS)], dashed, markers=True, band=band))
    label = sweep.axes[0] if sweep.axes else ""
    if numbers:
        return curves, _axis(sorted({x for _, line in lines for x, _ in line}), label)
    ticks = [(place, value if len(value) < 18 else value[:16] + "…") for place, value in enumerate(values)]
    return curves, Axis(-0.5, len(values) - 0.5, ticks, label)


def _axis(values: Sequence[float], label: str) -> Axis:
    """Logarithmic where values span much, with a tick at each, or at ten of them."""
    ticks = [(tick, f"{tick:g}") for tick in values[:: -(-len(values) // 10)]]
    low, high = values[0], values[-1]
    if low > 0 and high >= _LOGARITHMIC_FROM * low:
        return Axis(low / 1.1, high * 1.1, ticks, label, is_log=True)
    margin = 0.05 * (high - low) or 1.0
    return Axis(low - margin, high + margin, ticks, label)


def _text(value: Any) -> str:
    """A setting's value as one would write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)
