"""What a sweep found: `sweep.json`."""

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sfumato.json_record import Record
from sfumato.studies.statistics import Paired, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class CellRun(Record):
    """One run of a cell.

    Attributes:
        run: Its folder, below that of the sweep; cells that differ in their number of steps may share it.
        seed: Public; None: the run had a key of its own.
        accuracy: Of the averaged weights on held-out images.
        updates: Releases on its ledger that count for this cell.
    """

    run: str
    seed: int | None
    accuracy: float
    accuracy_last: float
    updates: int


class Cell(Summary):
    """One setting, and the held-out accuracies of its runs: `median`, `mean`, `std`, `standard_error`.

    Attributes:
        settings: What differs from the recipe.
        label: Its name, where cells were listed with names.
        seeds: How many runs it has.
        epsilon: Of the run that spent most, by itself; None: not private, or infinite.
        epsilon_if_private: What secret noise and Poisson sampling would have given.
        shares_runs: Whether another cell is a later or earlier moment of the same runs.
        paired: The difference to the first cell; None without --paired, and of the first cell.
    """

    settings: dict[str, Any]
    label: str | None
    seeds: int
    private: bool
    why_not_private: str | None
    epsilon: float | None
    epsilon_if_private: float | None
    delta: float | None
    noise_multiplier: float
    batch_size: int
    num_steps: int
    num_examples: int
    shares_runs: bool
    paired: Paired | None
    runs: list[CellRun]


class Sweep(Record):
    """All cells.

    Attributes:
        recipe: What it was called.
        keys: That differ between cells, the first one moving slowest.
        axes: The key of the plot's axis, then those that make its lines; none: the axis shows labels.
        held_out: The split that accuracies were measured on.
        private: Whether every cell is.
        epsilon_together: Of somebody who sees every run, or what was chosen by looking at all of them, at `delta`;
            runs by which these cells were chosen count too (a figure's tuning). None: not covered.
        updates_together: Releases that count in it, those of runs that had to be begun again elsewhere included.
        begun_again: Runs that were begun again in another folder, or since theirs was gone; both count.
        not_covered: What no epsilon here says anything about.
    """

    recipe: str
    output: str
    storage: str
    keys: list[str]
    axes: list[str]
    seeds: int
    paired: bool
    held_out: Literal["test", "valid"]
    private: bool
    epsilon_together: float | None
    delta: float | None
    updates_together: int | None
    begun_again: list[str]
    cells: list[Cell]
    not_covered: list[str]
    warnings: list[str]

    @property
    def records(self) -> list[dict[str, Any]]:
        """One flat dictionary for each run of each cell, as `pandas.DataFrame` takes them."""
        return [
            {
                "cell": number,
                "label": cell.label,
                **{key: cell.settings.get(key) for key in self.keys},
                "repetition": repetition,
                "seed": run.seed,
                "accuracy": run.accuracy,
                "accuracy_last": run.accuracy_last,
                "epsilon": cell.epsilon,
                "noise_multiplier": cell.noise_multiplier,
                "batch_size": cell.batch_size,
                "num_steps": cell.num_steps,
                "run": run.run,
            }
            for number, cell in enumerate(self.cells, start=1)
            for repetition, run in enumerate(cell.runs, start=1)
        ]

    def plot(self) -> "Figure":
        """Accuracy against the first key, a line for each value of the second."""
        from sfumato.studies.page import plot

        return plot(self)

    def as_csv(self) -> str:
        """One line for each cell."""
        written = io.StringIO()
        numbers = ("seeds", "median", "mean", "std", "standard_error", "epsilon", "noise_multiplier")
        names = [*self.keys, *numbers, "batch_size", "num_steps"]
        lines = csv.writer(written, lineterminator="\n")
        lines.writerow(names)
        for cell in self.cells:
            facts = dict(cell)
            settings = [cell.settings.get(key) for key in self.keys]
            lines.writerow([*settings, *(facts[name] for name in (*numbers, "batch_size", "num_steps"))])
        return written.getvalue()


def folder_of(sweep: Sweep, run: CellRun) -> Path:
    """Where a run lies."""
    return Path(sweep.output) / run.run
