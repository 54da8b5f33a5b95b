"""What an audit is asked and given: its levels, its claim, and scores that somebody's own attack wrote down."""

import csv
import io
import operator
from pathlib import Path

from sfumato.accounting import calibration
from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError

LEAST_TARGET = 1e-9
"""The smallest epsilon that noise is solved for: below, nothing is learnt and no attack can show anything."""
_MOST_EPSILON = 100_000
_LEAST_DELTA = 1e-100
_COLUMNS = ("score", "member")
_MOST_BYTES = 2**28  # ten million games


def whole(name: str, value: int, least: int, most: int) -> int:
    """Raises InputError where it is out of range."""
    found = operator.index(value)
    if not least <= found <= most:
        raise InputError(f"{name} must be a whole number, from {least:,} to {most:,}, not {value}.")
    return found


def levels(
    delta: float, confidence: float, epsilon: float | None, least: float = 0
) -> tuple[float, float, float | None]:
    """Delta, confidence and the claimed epsilon, None where nothing is claimed.

    Raises:
        InputError: Where one of them is out of range.
    """
    if not _LEAST_DELTA <= delta < 1:
        because = ": no mechanism with Gaussian noise has a finite epsilon at 0" if delta == 0 else ""
        raise InputError(
            f"delta must lie between {_LEAST_DELTA} and 1, not {delta}{because}. Give the delta of the claim."
        )
    if not 0.5 < confidence < 1:
        raise InputError(f"confidence must lie between 0.5 and 1, not {confidence}. Usual are 0.95 and 0.999.")
    if epsilon is not None and not least <= epsilon <= _MOST_EPSILON:
        raise InputError(
            f"the claimed epsilon must be a number from {least} to {_MOST_EPSILON:,}, not {epsilon}: a larger one "
            "promises nothing that games could refute."
        )
    return float(delta), float(confidence), None if epsilon is None else float(epsilon)


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
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}. Name a CSV file.") from None
    if len(data) > _MOST_BYTES:
        raise InputError(f"{path} has more than {_MOST_BYTES:,} bytes. Leave the columns score and member alone.")
    try:
        lines = io.StringIO(data.decode("utf-8-sig"))
        names = _cells(next(lines, ""))
    except (UnicodeDecodeError, csv.Error):
        raise InputError(f"{path} is no CSV file in UTF-8. Save it as one.") from None
    if any(names.count(name) != 1 for name in _COLUMNS):
        raise InputError(f"{path} must have one column score and one column member. Name them in its first line.")
    scores, members = [], []
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        try:
            row = dict(zip(names, _cells(line), strict=True))
            scores.append(float(row["score"]))
            members.append(("0", "1").index(row["member"]))
        except (csv.Error, ValueError):
            raise InputError(
                f"{path}, line {number}: {line.strip()[:80]!r} does not fit. Each line needs {len(names)} cells, a "
                "number as score, and as member 1 where the example took part, 0 where it did not."
            ) from None
    return scores, members


def _cells(line: str) -> list[str]:
    """Of one line alone, so that a quote that is not closed takes no other."""
    return next(csv.reader([line], strict=True), [])
