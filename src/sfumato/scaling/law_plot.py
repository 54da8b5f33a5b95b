"""Accuracy against batch size, as Figures 1 and 4 of Sander et al. (2022) draw it."""

from pathlib import Path
from typing import Any

import numpy as np

from sfumato.errors import InputError
from sfumato.scaling.law import fit, predict
from sfumato.scaling.law_runs import Study

FORMATS = (".svg", ".png", ".pdf")


def draw(study: Study, facts: dict[str, Any], path: Path) -> None:
    """Runs as points, the law that is used with its interval, the other dashed, predictions as
    stars.

    Args:
        facts: From `sfumato.scaling.law_runs.scaling_law`.

    Raises:
        InputError: If the file's ending is unknown.
    """
    if path.suffix not in FORMATS:
        raise InputError(f"--plot writes {', '.join(FORMATS)}, not {path.name!r}.")
    from matplotlib.figure import Figure

    points = study.points
    fits = fit(points)
    used, other = fits
    sizes = [point.batch_size for point in points] + [prediction["batch_size"] for prediction in facts["predictions"]]
    grid = np.unique(np.geomspace(min(sizes) / 1.2, max(sizes) * 1.2, 200).round().astype(int))
    predicted = [predict(fits, int(size)) for size in grid]

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(
        grid,
        [100 * p.low for p in predicted],
        [100 * p.high for p in predicted],
        color="tab:blue",
        alpha=0.15,
        linewidth=0,
        label="95 % of runs",
    )
    axes.plot(grid, [100 * p.accuracy for p in predicted], color="tab:blue", label=used.law)
    axes.plot(
        grid,
        [100 * other.predict(int(size)).accuracy for size in grid],
        color="tab:gray",
        linestyle="--",
        label=f"{other.law} (not used)",
    )
    axes.plot(
        [point.batch_size for point in points],
        [100 * point.accuracy for point in points],
        "o",
        color="black",
        markersize=4,
        label="simulations",
    )
    for number, prediction in enumerate(facts["predictions"]):
        axes.plot(
            prediction["batch_size"],
            100 * prediction["accuracy"],
            "*",
            color="tab:red",
            markersize=14,
            label="prediction" if number == 0 else None,
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("batch size at a constant sigma / B")
    axes.set_ylabel("held-out accuracy, %")
    axes.legend(frameon=False)
    figure.savefig(path)
