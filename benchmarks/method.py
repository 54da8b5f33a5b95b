"""Draws docs/method.svg: what each part of De et al.'s recipe adds, in the paper and in its small twin here; and
docs/tan.svg: runs of other batches at the same total amount of noise, what they cost and what they reach.

    python -m benchmarks.method

From benchmarks/results/figures, the paper's values in src/sfumato/figures and the accountant; no result is typed by
hand.
"""

import json
import re
import statistics
import tomllib
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.pairs import CELLS, at
from sfumato.accounting.accountants import epsilon
from sfumato.accounting.mechanism import Mechanism

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "figures"
PARTS = ["neither", "group norm", "large batch", "standardised\nweights", "several views", "averaged\nweights"]


def cells(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["cells"]
    return found


def of_the_paper() -> list[tuple[float, float]]:
    """Validation accuracy and standard deviation of each row of Table 2, in per cent."""
    told = tomllib.loads((ROOT / "src/sfumato/figures/de2022/table-2.toml").read_text())["paper"]
    rows = [re.search(r"([\d.]+) \(([\d.]+)\) /", line) for line in told]
    return [(float(row[1]), float(row[2])) for row in rows if row is not None]


def draw_steps(axes: Axes, rows: list[tuple[float, float]], title: str, colour: str) -> None:
    values, spreads = zip(*rows, strict=True)
    axes.errorbar(values, range(len(rows)), xerr=spreads, fmt="o-", color=colour, capsize=3)
    axes.set(yticks=range(len(rows)), xlabel="validation accuracy, %")
    axes.set_title(title, fontsize=10)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)


def save(figure: Figure, name: str) -> None:
    with matplotlib.rc_context({"svg.hashsalt": "sfumato", "svg.fonttype": "none"}):
        figure.savefig(ROOT / "docs" / name, metadata={"Date": None})


def draw_tan() -> None:
    """Epsilon against batch at a constant sigma / B and number of updates, and accuracies (benchmarks.pairs)."""
    runs: dict[int, list[float]] = {}
    for name in ("batches", "far-batches"):
        told = json.loads((RESULTS / f"pairs-{name}.json").read_text())
        for cell, values in zip(CELLS[name], told["per_cent"], strict=True):
            runs[int(cell["training.batch_size"])] = values
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    spent, reached = figure.subplots(1, 2)
    sizes = [2**power for power in range(6, 13)]
    cost = []
    for size in sizes:
        mechanism = Mechanism(
            50_000, size, noise_multiplier=at(size)["privacy.noise_multiplier"], num_steps=told["steps"]
        )
        cost.append(epsilon(mechanism, 1e-5).epsilon)
    spent.plot(sizes, cost, "o-", color="tab:red")
    spent.set_yscale("log")
    spent.set_title("epsilon of each, at delta 1e-5", fontsize=10)
    means, spreads = ([each(runs[size]) for size in sorted(runs)] for each in (statistics.fmean, statistics.stdev))
    reached.errorbar(sorted(runs), means, yerr=spreads, fmt="o-", color="tab:blue", capsize=3)
    reached.set_title("validation accuracy, %", fontsize=10)
    for axes in (spent, reached):
        axes.set_xscale("log", base=2)
        axes.set(xlim=(50, 5000), xlabel="expected batch, at the same total amount of noise")
        axes.grid(alpha=0.3)
    save(figure, "tan.svg")


def main() -> None:
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    paper, own, batches = figure.subplots(1, 3)
    draw_steps(paper, of_the_paper(), "WRN-40-4, CIFAR-10, epsilon 8 (the paper)", "tab:gray")
    paper.set_yticklabels(PARTS)
    rows = [(100 * cell["mean"], 100 * cell["std"]) for cell in cells("de2022-table-2")]
    draw_steps(own, rows, "a small network, here", "tab:blue")
    own.set_yticklabels([])
    found = cells("de2022-figure-2")
    sizes = [cell["settings"]["training.batch_size"] for cell in found]
    values, spreads = ([100 * cell[key] for cell in found] for key in ("mean", "std"))
    batches.errorbar(sizes, values, yerr=spreads, fmt="o-", color="tab:blue", capsize=3)
    batches.set_xscale("log", base=2)
    batches.set_title("one epsilon, other batches, here", fontsize=10)
    batches.set(xlabel="expected batch", ylabel="validation accuracy, %")
    batches.grid(alpha=0.3)
    save(figure, "method.svg")
    draw_tan()


if __name__ == "__main__":
    main()
