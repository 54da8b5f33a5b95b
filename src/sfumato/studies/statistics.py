"""What several runs say together."""

import math
import statistics
from collections.abc import Sequence

from sfumato.json_record import Record


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
    return Summary(
        median=float(statistics.median(values)),
        mean=statistics.fmean(values),
        std=std,
        standard_error=None if std is None else std / math.sqrt(len(values)),
    )


def paired(values: Sequence[float], first: Sequence[float]) -> Paired:
    """The difference of two cells whose runs share their seeds, in the same order."""
    found = summarise([value - other for value, other in zip(values, first, strict=True)])
    return Paired(difference=found.mean, standard_error=found.standard_error)
