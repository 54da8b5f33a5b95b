"""search.html: what a search by simulations tried, what it chose, and what that costs."""

from typing import Any

from sfumato.accounting import formats
from sfumato.reporting import html
from sfumato.reporting.charts import COLOURS, Chart, Curve, Panel, accuracies, chart, linear
from sfumato.searching.result import SearchResult, Stage


def render(found: SearchResult) -> str:
    """The whole page as HTML text."""
    trials = [row for stage in found.stages for row in _trials(stage)]
    return html.render(
        "search.html",
        kicker="Sfumato search",
        title="A search for hyper-parameters",
        found=found,
        chart=_chart(found.stages),
        best=[[key, str(value)] for key, value in found.best.settings.items()],
        stages=[_stage(stage) for stage in found.stages],
        trials=trials,
    )


def in_words(settings: dict[str, Any]) -> str:
    """Settings on one line."""
    return ", ".join(f"{key} = {value}" for key, value in settings.items()) or "the recipe's own"


def _stage(stage: Stage) -> list[str]:
    verdict = "kept" if stage.counts else "not a gain, left as it was"
    gain, chance = (None if points is None else f"{100 * points:+.2f}" for points in (stage.gain, stage.needed))
    return [stage.name, str(len(stage.tried)), str(len(stage.untried)), gain or "", chance or "unknown", verdict]


def _trials(stage: Stage) -> list[list[str]]:
    rows = []
    for number, (settings, reached) in enumerate(zip(stage.tried, stage.accuracies, strict=True)):
        told = "given up" if reached is None else formats.per_cent(reached)
        rows.append([stage.name, in_words(settings), told, "kept" if stage.counts and number == stage.best else ""])
    return rows


def _chart(stages: list[Stage]) -> Chart | None:
    """Accuracies of the trials one after the other, a colour for each stage; None where all were given up."""
    curves, count = [], 0
    for number, stage in enumerate(stages):
        reached = [(count + i, 100 * value) for i, value in enumerate(stage.accuracies, 1) if value is not None]
        count += len(stage.accuracies)
        if reached:
            x, y = zip(*reached, strict=True)
            curves.append(Curve(stage.name, x, y, COLOURS[number % len(COLOURS)], markers=True, width=0))
    if not curves:
        return None
    told = "; ".join(f"{c.name} from {min(c.y):.2f} % to {max(c.y):.2f} %" for c in curves)
    x_axis = linear(0, count + 1, 8, lambda value: f"{value:g}", "trial", whole=True)
    panel = Panel("Accuracy in simulations", curves, accuracies(curves), 260)
    return chart(x_axis, [panel], "Scores of the trials", f"Accuracies by stage: {told}.", "trials")
