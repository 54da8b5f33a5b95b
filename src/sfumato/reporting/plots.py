"""The figures of a report, as SVG that stands inside a page.

Drawn by matplotlib without pyplot and within its own settings, so that no figure,
setting or window of the caller is touched. Text stays text, in the page's font: it
can be selected and read aloud. Colours are the page's variables, so that one figure
serves light and dark. The same numbers give the same bytes.
"""

import io
import itertools
import re
from collections.abc import Callable
from typing import Any

from sfumato.reporting.formats import count, epsilon_text, per_cent
from sfumato.reporting.markup import Html, element
from sfumato.run_folder.record import Metrics

# Stand-ins that matplotlib accepts for the page's colours; `_into_page` swaps them.
INK, FAINT, FIRST, SECOND = "#000001", "#000002", "#000003", "#000004"
THIRD, FOURTH, FIFTH, SIXTH = "#000005", "#000006", "#000007", "#000008"
SERIES = (FIRST, SECOND, THIRD, FOURTH, FIFTH, SIXTH)
VARIABLES = {
    INK: "var(--muted)",
    FAINT: "var(--line)",
    FIRST: "var(--first)",
    SECOND: "var(--second)",
    THIRD: "var(--third)",
    FOURTH: "var(--fourth)",
    FIFTH: "var(--fifth)",
    SIXTH: "var(--sixth)",
}
MOST_MARKERS = 50

SETTINGS: Any = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",  # comes with matplotlib and is wide: what fits in it fits in the page's font
    "font.size": 13.0,
    "axes.titlesize": 13.0,
    "axes.titlelocation": "left",
    "axes.titlepad": 6.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": FAINT,
    "grid.linewidth": 1.0,
    "xtick.color": INK,
    "ytick.color": INK,
    "ytick.major.size": 0.0,
    "text.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.0,
}


def training_curves(
    metrics: list[Metrics], *, with_epsilon: bool, majority_rate: float | None = None, target: float | None = None
) -> Html:
    """Held-out accuracy over steps and, below it, epsilon over steps.

    Args:
        metrics: Lines of metrics.jsonl by step, at least one.
        with_epsilon: Whether epsilon is a guarantee of this run; otherwise it is not drawn.
        majority_rate: Accuracy of always naming the most frequent class, drawn as a reference.
        target: The epsilon that was asked for, drawn as a reference.

    Returns:
        One ``<svg>`` element with a title and a description of what is to be seen.
    """
    from matplotlib.ticker import MaxNLocator

    spent = [(line.step, line.epsilon) for line in metrics if line.epsilon is not None] if with_epsilon else []

    def draw(figure: Any) -> None:
        panels = figure.subplots(
            2 if spent else 1, 1, sharex=True, squeeze=False, height_ratios=[3, 2] if spent else None
        )[:, 0]
        _draw_accuracy(panels[0], metrics, majority_rate)
        if spent:
            _draw_epsilon(panels[1], spent, target)
        panels[-1].set_xlabel("step")
        panels[-1].set_xlim(0, max(line.step for line in metrics) * 1.02 or 1)
        panels[-1].xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
        panels[-1].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")

    return drawn(draw, 470 if spent else 300, "Training curves", describe(metrics, spent))


def drawn(draw: Callable[[Any], None], height: int, title: str, description: str, name: str = "curves") -> Html:
    """A figure as a part of a page.

    Args:
        draw: Draws into a matplotlib figure; colours are `INK`, `FAINT` and `SERIES`.
        height: In pixels.
        title: Of the figure.
        description: What is to be seen, for those who cannot.
        name: Of the figure, another for each on a page.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**SETTINGS, "svg.hashsalt": f"sfumato {name}"})
        # At 72 points an inch, one unit of the drawing is one pixel of a page 736 pixels wide.
        # The frame is fixed rather than fitted to the text, so that no font moves a curve.
        figure = Figure(figsize=(736 / 72, height / 72))
        FigureCanvasSVG(figure)
        figure.subplots_adjust(left=52 / 736, right=1 - 4 / 736, top=1 - 28 / height, bottom=46 / height, hspace=0.25)
        draw(figure)
        written = io.StringIO()
        figure.savefig(
            written,
            format="svg",
            transparent=True,
            metadata={"Creator": None, "Date": None, "Format": None, "Type": None},
        )
    return _into_page(written.getvalue(), title, description, name)


def describe(metrics: list[Metrics], spent: list[tuple[int, float]]) -> str:
    """What the curves show, for those who cannot see them."""
    first, last = metrics[0], metrics[-1]
    text = f"Held-out accuracy is {per_cent(first.accuracy)} at step {count(first.step)}"
    if len(metrics) > 1:
        text += f" and {per_cent(last.accuracy)} at step {count(last.step)}"
    if spent:
        text += f". Epsilon has then reached {epsilon_text(spent[-1][1])}"
    return text + "."


def _draw_accuracy(axes: Any, metrics: list[Metrics], majority_rate: float | None) -> None:
    steps = [line.step for line in metrics]
    series = {key: [100 * getattr(line, key) for line in metrics] for key in ("accuracy", "accuracy_last")}
    marker = "o" if len(steps) <= MOST_MARKERS else None
    axes.plot(
        steps, series["accuracy_last"], color=SECOND, marker=marker, markersize=4, linewidth=1.5, label="last weights"
    )
    axes.plot(steps, series["accuracy"], color=FIRST, marker=marker, label="averaged weights")
    shown = list(itertools.chain(*series.values()))
    if majority_rate is not None:
        shown.append(100 * majority_rate)
        axes.axhline(
            100 * majority_rate, color=INK, linestyle=(0, (2, 3)), linewidth=1.5, label="always the most frequent class"
        )
    margin = max(0.08 * (max(shown) - min(shown)), 1.0)
    axes.set_ylim(max(min(shown) - margin, 0 if min(shown) > 0 else -1), min(max(shown) + margin, 101))
    axes.yaxis.set_major_locator(at_most(6, below=100))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.set_title("Held-out accuracy")
    handles, labels = axes.get_legend_handles_labels()
    order = [1, 0, *range(2, len(handles))]  # the reported weights first
    legend = {
        "loc": "lower right",
        "bbox_to_anchor": (1.0, 0.99),
        "ncols": 3,
        "borderaxespad": 0.0,
        "handlelength": 1.6,
        "columnspacing": 1.6,
    }
    axes.legend([handles[i] for i in order], [labels[i] for i in order], **legend)


def _draw_epsilon(axes: Any, spent: list[tuple[int, float]], target: float | None) -> None:
    steps, values = [step for step, _ in spent], [epsilon for _, epsilon in spent]
    axes.plot(steps, values, color=FIRST, marker="o" if len(steps) <= MOST_MARKERS else None)
    highest = max(values)
    if target is not None:
        highest = max(highest, target)
        axes.axhline(
            target, color=INK, linestyle=(0, (2, 3)), linewidth=1.5, label=f"asked for: {epsilon_text(target)}"
        )
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), borderaxespad=0.0, handlelength=1.6)
    axes.set_ylim(0, 1.1 * highest or 1)
    axes.yaxis.set_major_locator(at_most(4))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title("Epsilon spent so far")


def at_most(intervals: int, below: float = float("inf")) -> Any:
    """Ticks at round numbers, none above ``below``."""
    from matplotlib.ticker import MaxNLocator

    class Ticks(MaxNLocator):
        def tick_values(self, vmin: float, vmax: float) -> Any:
            return [value for value in super().tick_values(vmin, vmax) if value <= below]

    return Ticks(intervals)


def _into_page(svg: str, title: str, description: str, name: str) -> Html:
    """Makes matplotlib's SVG file a part of a page: no prolog, no fixed size, no addresses, the
    page's colours and font.
    """
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    size = svg.partition('viewBox="')[2].partition('"')[0]
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href")
    body = re.sub(r" font-family: [^;\"]*;?", "", body)
    body = re.sub(
        r'<g id="[^"]*"(/?)>', r"<g\1>", body
    )  # only marks and clips are referred to; other names would meet those of the page
    for stand_in, variable in VARIABLES.items():
        body = body.replace(stand_in, variable)
    for refers in ('id="', 'href="#', "url(#"):  # figures of one page may share marks
        body = body.replace(refers, f"{refers}{name}-")
    labels = f"{name}-title {name}-description"
    names = element("title", title, id=f"{name}-title") + element("desc", description, id=f"{name}-description")
    return Html(f'<svg viewBox="{size}" role="img" aria-labelledby="{labels}">{names}{body.strip()}')
