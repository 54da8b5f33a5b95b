"""The page of a scaling law: its points, both laws, and predictions."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from sfumato.accounting import formats
from sfumato.reporting import html
from sfumato.reporting.charts import Axis, Curve, Panel, accuracies, chart
from sfumato.scaling.law import Run, fit, predict

_POINTS = 100


def render(runs: Sequence[Run], facts: dict[str, Any]) -> str:
    """The whole page as HTML text.

    Args:
        facts: From `sfumato.scaling.law.scaling_law`.
    """
    x, panel = drawn(runs, facts)
    of_size: dict[int, list[float]] = {}
    for run in sorted(runs, key=lambda run: run.batch_size):
        of_size.setdefault(run.batch_size, []).append(run.accuracy)
    means = {size: statistics.fmean(found) for size, found in of_size.items()}
    told = ", ".join(f"{formats.per_cent(mean)} at {formats.count(size)}" for size, mean in means.items())
    described = f"Mean accuracy by batch size: {told}."
    points = [
        [formats.count(size), str(len(found)), *map(formats.per_cent, (means[size], min(found), max(found)))]
        for size, found in of_size.items()
    ]
    laws = [
        [each["law"], f"{each['a']:.4f}", f"{each['b']:+.4g}", f"{100 * each['left_out_error']:.2f}", used]
        for each, used in zip(facts["laws"], ("used", "not used"), strict=True)
    ]
    predictions = [
        [formats.count(each["batch_size"]), *(formats.per_cent(each[key]) for key in ("accuracy", "low", "high"))]
        for each in facts["predictions"]
    ]
    return html.render(
        "law.html",
        kicker="Sfumato scaling law",
        title=f"Accuracy follows {facts['law']}",
        facts=facts,
        chart=chart(x, [panel], "Accuracy by batch size", described, "law"),
        predictions=predictions,
        laws=laws,
        points=points,
    )


def drawn(runs: Sequence[Run], facts: dict[str, Any]) -> tuple[Axis, Panel]:
    """Runs as dots, the law that is used with its interval, the other dashed, predictions in another colour."""
    batches, fits = [run.batch_size for run in runs], fit(runs)
    used, other = fits
    wanted = [(prediction["batch_size"], 100 * prediction["accuracy"]) for prediction in facts["predictions"]]
    sizes = [*batches, *(size for size, _ in wanted)]
    ticks = [(float(size), formats.count(size)) for size in sorted(set(sizes))]
    x = Axis(min(sizes) / 1.2, max(sizes) * 1.2, ticks, "batch size at a constant sigma / B", is_log=True)
    grid = np.unique(np.geomspace(x.low, x.high, _POINTS).round().astype(int))
    low, value, high = 100 * np.array([[p.low, p.accuracy, p.high] for p in (predict(fits, int(n)) for n in grid)]).T
    dashed = [100 * other.predict(int(size)).accuracy for size in grid]
    curves = [
        Curve(f"{used.law}, and 95 % of runs", grid, value, "first", band=(low, high)),
        Curve(f"{other.law} (not used)", grid, dashed, "muted", dashed=True, width=1.5),
        Curve("runs", batches, [100 * run.accuracy for run in runs], "second", markers=True, width=0),
    ]
    if wanted:
        at, reached = zip(*wanted, strict=True)
        curves.append(Curve("predictions", at, reached, "third", markers=True, width=0))
    return x, Panel("Held-out accuracy", curves, accuracies(curves), 300)
