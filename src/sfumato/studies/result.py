"""What a sweep found: `sweep.json`, and the statistics in it."""

import csv
import io
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from sfumato.json_record import Record, pick

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MECHANISM = ("noise_multiplier", "batch_size", "num_steps")


class Summary(Record):
    """Of numbers, one for each run.

    Attributes:
        std: Between runs, with n - 1; None of one run.
        standard_error: Of the mean, std / sqrt(n); None of one run.
    """

    median: float
    mean: float
    std: float | None
    standard_error: float | None


class Paired(Record):
    """The mean over seeds of a cell's accuracy less the first cell's at the same seed.

    Attributes:
        standard_error: Of that mean, from the spread of the differences; None of one seed.
    """

    difference: float
    standard_error: float | None


def summarise(values: Sequence[float]) -> Summary:
    """Median, mean, standard deviation and standard error.

    Args:
        values: At least one.

    Example:
        >>> round(summarise([0.5, 0.75, 0.25]).standard_error, 6)
        0.144338
    """
    std = statistics.stdev(values) if len(values) > 1 else None
    error = None if std is None else std / math.sqrt(len(values))
    median, mean = float(statistics.median(values)), statistics.fmean(values)
    return Summary(median=median, mean=mean, std=std, standard_error=error)


def paired(values: Sequence[float], first: Sequence[float]) -> Paired:
    """The difference of two cells whose runs share their seeds, in the same order."""
    found = summarise([value - other for value, other in zip(values, first, strict=True)])
    return Paired(difference=found.mean, standard_error=found.standard_error)


class CellRun(Record):
    """One run of a cell.

    Attributes:
        run: Its folder, below that of the sweep; cells that differ in their number of steps may share it.
        seed: Public; None: the run had randomness of its own.
        accuracy: Of the averaged weights on held-out images.
        num_lost: Updates that were counted and, after a kill, not applied.
    """

    run: str
    seed: int | None
    accuracy: float
    accuracy_last: float
    num_lost: int


class Cell(Summary):
    """One setting, and the held-out accuracies of its runs: `median`, `mean`, `std`, `standard_error`.

    Attributes:
        settings: What differs from the recipe.
        label: Its name, where cells were listed with names.
        seeds: How many runs it has.
        epsilon: Of one of its runs by itself; None: not private, or infinite.
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
        updates_together: Releases that count in it.
        not_covered: What no epsilon here says anything about.
    """

    recipe: str
    output: str
    keys: list[str]
    axes: list[str]
    seeds: int
    paired: bool
    held_out: Literal["test", "valid"]
    private: bool
    epsilon_together: float | None
    delta: float | None
    updates_together: int | None
    cells: list[Cell]
    not_covered: list[str]
    warnings: list[str]

    @property
    def records(self) -> list[dict[str, Any]]:
        """One flat dictionary for each run of each cell, as `pandas.DataFrame` takes them."""
        return [
            {
                **{"cell": number, "label": cell.label, "repetition": repetition},
                **{key: cell.settings.get(key) for key in self.keys},
                **pick(run, "run", "seed", "accuracy", "accuracy_last"),
                **pick(cell, "epsilon", *MECHANISM),
            }
            for number, cell in enumerate(self.cells, start=1)
            for repetition, run in enumerate(cell.runs, start=1)
        ]

    def plot(self) -> "Figure":
        """The page's plot as a figure of matplotlib's own."""
        from sfumato.reporting.charts import figure_of
        from sfumato.studies.page import panel_of

        return figure_of(*panel_of(self))

    def as_csv(self) -> str:
        """One line for each cell."""
        written = io.StringIO()
        numbers = ("seeds", "median", "mean", "std", "standard_error", "epsilon", *MECHANISM)
        lines = csv.writer(written, lineterminator="\n")
        lines.writerow([*self.keys, *numbers])
        for cell in self.cells:
            settings = [cell.settings.get(key) for key in self.keys]
            lines.writerow([*settings, *pick(cell, *numbers).values()])
        return written.getvalue()
