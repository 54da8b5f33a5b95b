"""What an audit is asked, as Python's own numbers."""

import operator
import os
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.errors import InputError

_MOST_EPSILON = 100_000
_LEAST_TARGET, _LEAST_DELTA = 1e-9, 1e-100  # as a recipe has them


def number(name: str, value: Any) -> float:
    """Raises InputError where it is none: neither Python's nor NumPy's."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise InputError(f"{name} must be a number, not {_shown(value)}.")
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"{name} must be a number of fewer digits.") from None


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Raises InputError where it is no whole number of this range."""
    try:
        found = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        found = None
    if found is None or found < least or (most is not None and found > most):
        range_ = f"at least {least}" if most is None else f"from {least:,} to {most:,}"
        raise InputError(f"{name} must be a whole number, {range_}, not {_shown(value)}.")
    return found


def levels(delta: Any, confidence: Any, epsilon: Any) -> tuple[float, float, float]:
    """Delta, confidence and the claimed epsilon.

    Raises:
        InputError: Where one of them is out of range, or no number.
    """
    delta, confidence = number("delta", delta), number("confidence", confidence)
    epsilon = number("nominal_epsilon", epsilon)
    if not _LEAST_DELTA <= delta < 1:
        because = ": no mechanism with Gaussian noise has a finite epsilon at 0" if delta == 0 else ""
        least = "0" if delta <= 0 or delta >= 1 else _LEAST_DELTA
        raise InputError(f"delta must lie between {least} and 1, not {delta}{because}. Give the delta of the claim.")
    if not 0.5 < confidence < 1:
        raise InputError(f"confidence must lie between 0.5 and 1, not {confidence}. Usual are 0.95 and 0.999.")
    if not 0 <= epsilon <= _MOST_EPSILON:
        raise InputError(
            f"the claimed epsilon must be a number from 0 to {_MOST_EPSILON:,}, not {epsilon}: a larger one "
            "promises nothing that games could refute."
        )
    return delta, confidence, epsilon


def target(epsilon: Any) -> float:
    """An epsilon that noise is solved for. Raises InputError where it is none."""
    found = number("epsilon", epsilon)
    if not found >= _LEAST_TARGET:
        raise InputError(
            f"epsilon must be at least 1e-9, not {found}: noise is solved for it, and where nothing is "
            "learnt no attack can show anything."
        )
    return found


def path_of(name: str, value: Any) -> Path:
    """Raises InputError where it is no path that a file can have."""
    try:
        path = Path(value)
        too_long = any(len(os.fsencode(part)) > 255 for part in path.parts)
    except TypeError:
        raise InputError(f"{name} must be a path, not {_shown(value)}.") from None
    if too_long or "\0" in str(path):
        raise InputError(f"{name} = {str(path)[:40]!r}... is no path that a file can have. Choose a shorter one.")
    return path


def _shown(value: Any) -> str:
    is_long = isinstance(value, int) and abs(value) >= 10**40
    return "one of so many digits" if is_long else repr(value)[:40]
