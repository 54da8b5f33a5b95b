"""Whether a sweep shows what a paper states: one small rule for each statement, with a 95 % interval over its runs.

A statement "holds" where the whole interval agrees with it, is "opposite" where the whole interval contradicts it, and
"open" else. Each interval is one of Student's t: of a few runs, and for that statement alone.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, cast

import pydantic
from pydantic import Field

from sfumato.errors import InputError
from sfumato.json_record import Record
from sfumato.studies.result import Cell, Sweep

CONFIDENCE = 0.95
EPOCHS = "epochs"
"""Beside keys of a recipe: what `best` may be asked of."""


class Claim(pydantic.BaseModel):
    """A statement of a paper as a question to a sweep.

    Attributes:
        says: The statement, in our own words.
        rule: "above": accuracy at `these` less that at `those` is above 0. "near": it lies within `margin` of 0.
            "peak": some cell between the ends of `along` is above both ends. "best rises", "best falls", "best stays":
            how the value of `of` that is best for each run moves from `those` to `these`, in octaves; it stays where
            it moves by at most `margin`.
        these, those: Settings of a cell, or its label; for "best", of all cells among which one is best.
        along: The key of which "peak" is asked.
        of: The key, or "epochs", of which "best" is asked.
        margin: In fractions of accuracy, or octaves.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    says: str
    rule: Literal["above", "near", "peak", "best rises", "best falls", "best stays"]
    these: dict[str, Any] | str = Field(default_factory=dict)
    those: dict[str, Any] | str = Field(default_factory=dict)
    along: str | None = None
    of: str | None = None
    margin: float = 0.0

    @pydantic.model_validator(mode="after")
    def _ask_for_what_the_rule_needs(self) -> "Claim":
        needed = {"peak": self.along, "above": self.these, "near": self.margin}.get(self.rule, self.of)
        if not needed:
            raise ValueError(f"rule {self.rule!r} lacks what it is about")
        return self


class Interval(NamedTuple):
    """A mean and its interval; of a single run there is none."""

    value: float
    low: float | None
    high: float | None


Outcome = Literal["holds", "opposite", "open"]


class Verdict(Record):
    """What a sweep says of a claim.

    Attributes:
        value: The difference, of fractions of accuracy; or how far the best value moved, in octaves. Of a peak, over
            the higher end.
        low, high: Its interval; None of a single run.
        where: Which cell makes a peak.
    """

    says: str
    verdict: Outcome
    value: float
    low: float | None
    high: float | None
    unit: Literal["accuracy", "octaves"]
    where: dict[str, Any] | None = None


class Place(Protocol):
    """A cell, finished or planned."""

    @property
    def settings(self) -> Mapping[str, Any]: ...
    @property
    def label(self) -> str | None: ...


_Place = TypeVar("_Place", bound=Place)


def refuse_unanswerable(claim: Claim, cells: Sequence[Place]) -> None:
    """Looks, before anything runs, whether a sweep of these cells can answer a claim.

    Raises:
        InputError: If it names no cell of them, or several where one is meant, or values that have no octaves.
    """
    if claim.rule == "peak":
        _along(claim, cells)
    elif claim.rule in ("above", "near"):
        for where in (claim.these, claim.those):
            _one(claim, cells, where)
    else:
        for where in (claim.these, claim.those):
            for cell in _several(claim, cells, where):
                value = 1 if claim.of == EPOCHS else cell.settings.get(claim.of or "")
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                    raise InputError(f"the claim {claim.says!r} needs a number above 0 of {claim.of} in each cell.")


def judge(claim: Claim, sweep: Sweep) -> Verdict:
    """Asks one claim of a sweep.

    Raises:
        InputError: If it names no cell of this sweep, or several where one is meant.
    """
    if claim.rule == "peak":
        return _peak(claim, sweep)
    if claim.rule in ("above", "near"):
        found = difference(_one(claim, sweep.cells, claim.these), _one(claim, sweep.cells, claim.those), sweep.paired)
        return _said(claim, found, "accuracy")
    these, those = (_best(claim, sweep, where) for where in (claim.these, claim.those))
    return _said(claim, interval([math.log2(new / old) for new, old in zip(these, those, strict=True)]), "octaves")


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The mean of independent numbers, and Student's interval around it; None of a single number.

    Example:
        >>> [round(value, 3) for value in interval([1.0, 2.0, 3.0])]
        [2.0, -0.484, 4.484]
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, None, None)
    half = _quantile(len(values) - 1, confidence) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def difference(these: Cell, those: Cell, paired: bool, confidence: float = CONFIDENCE) -> Interval:
    """Mean accuracy of one cell less that of another, with its interval: of differences where runs are shared or
    paired, else Welch's.
    """
    ones, others = ([run.accuracy for run in cell.runs] for cell in (these, those))
    if paired or {run.run for run in these.runs} & {run.run for run in those.runs}:
        return interval([one - other for one, other in zip(ones, others, strict=True)], confidence)
    mean = statistics.fmean(ones) - statistics.fmean(others)
    if min(len(ones), len(others)) < 2:
        return Interval(mean, None, None)
    parts = [statistics.variance(values) / len(values) for values in (ones, others)]
    if sum(parts) == 0:
        return Interval(mean, mean, mean)
    weights = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (ones, others), strict=True))
    half = _quantile(sum(parts) ** 2 / weights, confidence) * math.sqrt(sum(parts))
    return Interval(mean, mean - half, mean + half)


def _quantile(freedom: float, confidence: float) -> float:
    from scipy.stats import t

    return float(t.ppf(0.5 + confidence / 2, freedom))


def _said(claim: Claim, found: Interval, unit: Literal["accuracy", "octaves"]) -> Verdict:
    stays, sign = claim.rule in ("near", "best stays"), -1 if claim.rule == "best falls" else 1
    verdict: Outcome = "open"
    if found.low is not None and found.high is not None:
        first, last = sorted((sign * found.low, sign * found.high))
        if stays and max(-first, last) <= claim.margin or not stays and first > 0:
            verdict = "holds"
        elif stays and max(first, -last) > claim.margin or not stays and last < 0:
            verdict = "opposite"
    return Verdict(says=claim.says, verdict=verdict, **found._asdict(), unit=unit)


def _peak(claim: Claim, sweep: Sweep) -> Verdict:
    """Any of the cells between may be the peak, so that each is asked at a smaller risk (Bonferroni); both ends must be
    below it, which needs no smaller one.
    """
    key = claim.along or ""
    first, *between, last = _along(claim, sweep.cells)
    confidence = 1 - (1 - CONFIDENCE) / len(between)
    over = [
        _less(*(difference(cell, end, sweep.paired, confidence) for end in (first, last)))  # over the higher end
        for cell in between
    ]
    best = max(range(len(between)), key=lambda n: _low(over[n]))
    found, verdict = over[best], cast(Outcome, "open")
    if found.low is not None and found.low > 0:
        verdict = "holds"
    elif all(each.high is not None and each.high < 0 for each in over):
        verdict = "opposite"
    where = {key: between[best].settings[key]}
    return Verdict(says=claim.says, verdict=verdict, **found._asdict(), unit="accuracy", where=where)


def _low(found: Interval) -> float:
    return found.value if found.low is None else found.low


def _less(one: Interval, other: Interval) -> Interval:
    """Of the lesser of two: the lesser value, and of the ends each the lesser one."""
    value = min(one.value, other.value)
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return Interval(value, None, None)
    return Interval(value, min(one.low, other.low), min(one.high, other.high))


def _best(claim: Claim, sweep: Sweep, where: dict[str, Any] | str) -> list[float]:
    """For each run of the cells the value of `of` in the cell with the best one: run n of all cells is one trial. Where
    several are equally good, as of few held-out images they often are, the middle of them in octaves.
    """
    cells, chosen = _several(claim, sweep.cells, where), []
    for number in range(sweep.seeds):
        reached = [cell.runs[number].accuracy for cell in cells]
        best = [cell for cell, accuracy in zip(cells, reached, strict=True) if accuracy == max(reached)]
        chosen.append(statistics.geometric_mean(_value(claim, cell) for cell in best))
    return chosen


def _value(claim: Claim, cell: Cell) -> float:
    return _epochs(cell) if claim.of == EPOCHS else float(cell.settings[claim.of or ""])


def _epochs(cell: Cell) -> float:
    return cell.num_steps * cell.batch_size / cell.num_examples


def _along(claim: Claim, cells: Sequence[_Place]) -> list[_Place]:
    """Of which a peak is asked, in their order."""
    key = claim.along or ""
    found = [cell for cell in cells if _fits(cell, claim.these) and key in cell.settings]
    values = [cell.settings[key] for cell in found]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if not numbers or len(found) < 3 or len(set(values)) < len(found):
        raise InputError(f"the claim {claim.says!r} needs one cell for each of three or more numbers of {key}.")
    return sorted(found, key=lambda cell: cell.settings[key])


def _several(claim: Claim, cells: Sequence[_Place], where: dict[str, Any] | str) -> list[_Place]:
    found = [cell for cell in cells if _fits(cell, where)]
    if len(found) < 2:
        raise InputError(f"the claim {claim.says!r} needs several cells at {where}.")
    return found


def _one(claim: Claim, cells: Sequence[_Place], where: dict[str, Any] | str) -> _Place:
    found = [cell for cell in cells if _fits(cell, where)]
    if len(found) != 1:
        raise InputError(f"the claim {claim.says!r} is about one cell at {where}, and the sweep has {len(found)}.")
    return found[0]


def _fits(cell: Place, where: dict[str, Any] | str) -> bool:
    if isinstance(where, str):
        return cell.label == where
    return all(key in cell.settings and cell.settings[key] == value for key, value in where.items())
