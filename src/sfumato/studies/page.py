"""sweep.html: one plot of the metric against the first key, with a line for each value of the second, and the table."""

from typing import Any

import numpy as np

from sfumato.accounting import formats
from sfumato.reporting import html
from sfumato.reporting.charts import COLOURS, LOGARITHMIC_FROM, Axis, Chart, Curve, Panel, accuracies, chart
from sfumato.studies.grid import in_words
from sfumato.studies.result import Cell, Sweep

MOST_LINES = 12


def render(sweep: Sweep) -> str:
    """The whole page as HTML text."""
    names, rows = _table(sweep)
    drawn, caption = _figure(sweep)
    facts = {"sweep": sweep, "chart": drawn, "caption": caption, "names": names, "rows": rows}
    return html.render("sweep.html", kicker="Sfumato sweep", title=sweep.recipe, **facts)


def _figure(sweep: Sweep) -> tuple[Chart, str]:
    """The plot, and what is said below it."""
    lines = lines_of(sweep)
    against = sweep.axes[0] if sweep.axes else "the cells"
    described = f"Mean accuracy against {against}: " + "; ".join(
        f"{name or 'all'}: " + ", ".join(f"{_text(x)} {formats.per_cent(cell.mean)}" for x, cell in line)
        for name, line in lines
    )
    caption = f"Mean accuracy against {against}"
    caption += f", a line for each {' and '.join(sweep.axes[1:])}" if len(sweep.axes) > 1 else ""
    caption += "; bands are one standard deviation between runs." if sweep.seeds > 1 else "; one run each."
    if len(lines) > MOST_LINES:
        caption += f" The first {MOST_LINES} of {len(lines)} lines."
    x, panel = panel_of(sweep)
    return chart(x, [panel], "Accuracy of the cells", described), caption


def _table(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """Names of columns, and a row for each cell."""
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
        rows.append(values)
    return names, rows


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


def panel_of(sweep: Sweep) -> tuple[Axis, Panel]:
    """The first lines, in per cent, over an axis that has a place for each value."""
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
    panel, label = Panel("Held-out accuracy", curves, accuracies(curves), 300), sweep.axes[0] if sweep.axes else ""
    if numbers:
        return _axis(sorted({x for _, line in lines for x, _ in line}), label), panel
    ticks = [(place, value if len(value) < 18 else value[:16] + "…") for place, value in enumerate(values)]
    return Axis(-0.5, len(values) - 0.5, ticks, label), panel


def _axis(values: list[float], label: str) -> Axis:
    """Logarithmic where values span much, with a tick at each, or at ten of them."""
    ticks = [(tick, f"{tick:g}") for tick in values[:: -(-len(values) // 10)]]
    low, high = values[0], values[-1]
    if low > 0 and high >= LOGARITHMIC_FROM * low:
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
