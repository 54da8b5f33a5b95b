"""sweep.html: one plot of the metric against the first key, with a line for each value of the second, and the table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sfumato.reporting import formats
from sfumato.reporting.markup import Html, element
from sfumato.reporting.page import whole_page
from sfumato.reporting.plots import INK, SERIES, at_most, drawn
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
    figure = drawn(lambda figure: _draw(figure, sweep), 400, "Accuracy of the cells", described)
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
        values += ["" if value is None else f"{100 * value:.2f}" for value in (cell.std, cell.standard_error)]
        values.append(formats.epsilon_text(cell.epsilon) if cell.private else "not private")
        if sweep.paired:
            found = cell.paired
            error = "" if found is None or found.standard_error is None else f" ({100 * found.standard_error:.2f})"
            values.append("" if found is None else f"{100 * found.difference:+.2f}{error}")
        rows.append(element("tr", *(element("td", value) for value in values)))
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in names)))
    note = element(
        "p", "Standard deviations, standard errors and differences in points of accuracy; also in sweep.csv."
    )
    table = element("table", head, element("tbody", *rows), class_="numbers")
    return element("section", element("h2", "The cells"), note, table)


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
    _draw(figure, sweep, colours=tuple(f"C{number}" for number in range(10)), ink="black")
    return figure


def _draw(figure: Any, sweep: Sweep, colours: Sequence[str] = SERIES, ink: str = INK) -> None:
    axes = figure.subplots()
    lines = lines_of(sweep)[:MOST_LINES]
    values = list(dict.fromkeys(_text(x) for _, line in lines for x, _ in line))
    numbers = all(type(x) in (int, float) for _, line in lines for x, _ in line)
    for number, (name, line) in enumerate(lines):
        colour = colours[number % len(colours)]
        style = "-" if number < len(colours) else "--"
        points = sorted(line, key=lambda point: point[0]) if numbers else line
        places = [x if numbers else values.index(_text(x)) for x, _ in points]
        means = [100 * cell.mean for _, cell in points]
        spread = [100 * (cell.std or 0.0) for _, cell in points]
        axes.plot(places, means, marker="o", color=colour, linestyle=style, label=name or None)
        if sweep.seeds > 1:
            low = [mean - std for mean, std in zip(means, spread, strict=True)]
            high = [mean + std for mean, std in zip(means, spread, strict=True)]
            axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    if numbers:
        _scale(axes, [x for _, line in lines for x, _ in line])
    else:
        axes.set_xticks(range(len(values)), [value if len(value) < 18 else value[:16] + "…" for value in values])
    axes.set_xlabel(sweep.axes[0] if sweep.axes else "")
    axes.set_title("Held-out accuracy")
    axes.yaxis.set_major_locator(at_most(6, below=100))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    if len(lines) > 1:
        axes.legend(frameon=False, labelcolor=ink, fontsize="small")


def _scale(axes: Any, values: Sequence[float]) -> None:
    """Logarithmic where values span much, with a tick at each."""
    if min(values) > 0 and max(values) >= _LOGARITHMIC_FROM * min(values):
        axes.set_xscale("log")
    axes.minorticks_off()
    ticks = sorted(set(values))
    if len(ticks) <= 10:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _text(value: Any) -> str:
    """A setting's value as one would write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)
