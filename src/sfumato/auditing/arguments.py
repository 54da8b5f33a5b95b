"""What an audit is asked and given: its levels, its claim, and scores that somebody's own attack wrote down."""

import csv
import functools
import operator
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sfumato.accounting import calibration
from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError, refusing

Keep = Callable[[np.ndarray, np.ndarray], None]
"""Is given scores and membership of every game."""
LEAST_TARGET = 1e-9
"""The smallest epsilon that noise is solved for: below, nothing is learnt and no attack can show anything."""
_MOST_EPSILON = 100_000
_LEAST_DELTA = 1e-100
_MOST_BYTES = 2**28  # ten million games


def whole(name: str, value: int, least: int, most: int) -> int:
    """Raises InputError where it is out of range."""
    if not least <= operator.index(value) <= most:
        raise InputError(f"{name} must be a whole number, from {least:,} to {most:,}, not {value}.")
    return operator.index(value)


def require_levels(delta: float, confidence: float, epsilon: float | None, least: float = 0) -> None:
    """Raises InputError where delta, confidence or the claimed epsilon (None: nothing is claimed) is out of range."""
    if not _LEAST_DELTA <= delta < 1:
        because = ": no mechanism with Gaussian noise has a finite epsilon at 0" if delta == 0 else ""
        raise InputError(
            f"delta must lie between {_LEAST_DELTA} and 1, not {delta}{because}. Give the delta of the claim."
        )
    if not 0.5 < confidence < 1:
        raise InputError(f"confidence must lie between 0.5 and 1, not {confidence}. Usual are 0.95 and 0.999.")
    if epsilon is not None and not least <= epsilon <= _MOST_EPSILON:
        raise InputError(
            f"the claimed epsilon must be a number from {least} to {_MOST_EPSILON:,}, not {epsilon}: games could "
            "refute no larger one."
        )


@functools.cache
def calibrated(num_examples: int, batch_size: int, num_steps: int, epsilon: float, delta: float) -> Mechanism:
    """The mechanism of a run whose noise is calibrated to (epsilon, delta)."""
    mechanism = Mechanism(num_examples, batch_size, 1.0, num_steps)
    return calibration.solve(mechanism, "noise_multiplier", epsilon, delta)


def read_scores(path: Path) -> tuple[list[float], list[int]]:
    """The columns ``score`` and ``member`` of a CSV file whose first line names its columns; others are passed over.

    Returns:
        Scores, and 1 or 0 for each.

    Raises:
        InputError: If the file cannot be read, is larger than 256 MiB, lacks a column, or a line does not fit.
    """
    scores, members = [], []
    with (
        refusing(f"{path} is no CSV file in UTF-8", "Save it as one.", UnicodeDecodeError, csv.Error),
        refusing(f"{path} cannot be read", "Name a CSV file.", OSError),
    ):
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"{path} has more than {_MOST_BYTES:,} bytes. Leave the columns score and member alone.")
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            names = next(rows, [])
            if names.count("score") != 1 or names.count("member") != 1:
                raise InputError(
                    f"{path} must have one column score and one column member. Name them in its first line."
                )
            for cells in filter(None, rows):
                try:
                    row = dict(zip(names, cells, strict=True))
                    scores.append(float(row["score"]))
                    members.append(("0", "1").index(row["member"]))
                except ValueError:
                    raise InputError(
                        f"{path}, line {rows.line_num}: {','.join(cells)[:80]!r} does not fit. Each line needs "
                        f"{len(names)} cells: a number as score, as member 1 where the example took part, else 0."
                    ) from None
    return scores, members
