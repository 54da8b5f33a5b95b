"""Whether a sweep shows what a paper states: one small rule for each statement, with a 95 % interval over its runs.

A statement "holds" where the whole interval agrees with it, is "opposite" where the whole interval contradicts it, and
"open" else. Each interval is one of Student's t: of a few runs, and for that statement alone.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import pydantic
from pydantic import Field

from sfumato.errors import InputError
from sfumato.json_record import Record, finite
from sfumato.studies.result import Cell, Sweep

CONFIDENCE = 0.95
Answer = Literal["holds", "opposite", "open"]
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
    """A mean and its interval; that of a single run is everything."""

    value: float
    low: float = -math.inf
    high: float = math.inf


class Verdict(Record):
    """What a sweep says of a claim.

    Attributes:
        value: The difference, of fractions of accuracy; or how far the best value moved, in octaves. Of a peak, over
            the higher end.
        low, high: Its interval; None of a single run.
        where: Which cell makes a peak.
    """

    says: str
    verdict: Answer
    value: float
    low: float | None
    high: float | None
    unit: Literal["accuracy", "octaves"]
    where: dict[str, Any] | None = None


def judge(claim: Claim, sweep: Sweep) -> Verdict:
    """Asks one claim of a sweep.

    Raises:
        InputError: If it names no cell of this sweep, or several where one is meant, or values that have no octaves.
    """
    if claim.rule == "peak":
        return _peak(claim, sweep)
    if claim.rule in ("above", "near"):
        [these], [those] = (_cells(claim, sweep, where) for where in (claim.these, claim.those))
        found = difference(these, those, sweep.paired)
    else:
        moves = zip(_best(claim, sweep, claim.these), _best(claim, sweep, claim.those), strict=True)
        found = interval([math.log2(new / old) for new, old in moves])
    low, high = found.low, found.high
    if claim.rule in ("near", "best stays"):
        holds, contradicts = max(-low, high) <= claim.margin, max(low, -high) > claim.margin
    else:
        holds, contradicts = (high < 0, low > 0) if claim.rule == "best falls" else (low > 0, high < 0)
    return _said(claim, found, holds, contradicts)


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The mean of independent numbers, and Student's interval around it.

    Example:
        >>> [round(value, 3) for value in interval([1.0, 2.0, 3.0])]
        [2.0, -0.484, 4.484]
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean)
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
        return Interval(mean)
    parts = [statistics.variance(values) / len(values) for values in (ones, others)]
    if sum(parts) == 0:
        return Interval(mean, mean, mean)
    weights = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (ones, others), strict=True))
    half = _quantile(sum(parts) ** 2 / weights, confidence) * math.sqrt(sum(parts))
    return Interval(mean, mean - half, mean + half)


def _quantile(freedom: float, confidence: float) -> float:
    from scipy.stats import t

    return float(t.ppf(0.5 + confidence / 2, freedom))


def _said(claim: Claim, found: Interval, holds: bool, contradicts: bool) -> Verdict:
    verdict: Answer = "holds" if holds else "opposite" if contradicts else "open"
    low, high = finite(found.low), finite(found.high)
    unit: Literal["accuracy", "octaves"] = "octaves" if claim.rule.startswith("best") else "accuracy"
    return Verdict(says=claim.says, verdict=verdict, value=found.value, low=low, high=high, unit=unit)


def _peak(claim: Claim, sweep: Sweep) -> Verdict:
    """Any of the cells between may be the peak, so that each is asked at a smaller risk (Bonferroni); both ends must be
    below it, which needs no smaller one.
    """
    key = claim.along or ""
    cells = [cell for cell in sweep.cells if _fits(cell, claim.these) and key in cell.settings]
    values = [cell.settings[key] for cell in cells]
    if not all(type(value) in (int, float) for value in values) or len(cells) < 3 or len(set(values)) < len(cells):
        raise InputError(f"the claim {claim.says!r} needs one cell for each of three or more numbers of {key}.")
    first, *between, last = sorted(cells, key=lambda cell: float(cell.settings[key]))
    confidence = 1 - (1 - CONFIDENCE) / len(between)
    # Over the higher end: of both differences the lesser value, and of their ends each the lesser one.
    over = [
        Interval(*map(min, *(difference(cell, end, sweep.paired, confidence) for end in (first, last))))
        for cell in between
    ]
    best = max(range(len(between)), key=lambda n: (over[n].low, over[n].value))
    verdict = _said(claim, over[best], over[best].low > 0, all(each.high < 0 for each in over))
    return verdict.model_copy(update={"where": {key: between[best].settings[key]}})


def _best(claim: Claim, sweep: Sweep, where: dict[str, Any] | str) -> list[float]:
    """For each run of the cells the value of `of` in the cell with the best one: run n of all cells is one trial. Where
    several are equally good, as of few held-out images they often are, the middle of them in octaves.
    """
    cells, chosen = _cells(claim, sweep, where), []
    values: list[Any] = [_epochs(cell) if claim.of == EPOCHS else cell.settings.get(claim.of or "") for cell in cells]
    if not all(type(value) in (int, float) and 0 < value < math.inf for value in values):
        raise InputError(f"the claim {claim.says!r} needs a number above 0 of {claim.of} in each cell.")
    for number in range(sweep.seeds):
        reached = [cell.runs[number].accuracy for cell in cells]
        best = [value for value, accuracy in zip(values, reached, strict=True) if accuracy == max(reached)]
        chosen.append(statistics.geometric_mean(best))
    return chosen


def _epochs(cell: Cell) -> float:
    return cell.num_steps * cell.batch_size / cell.num_examples


def _cells(claim: Claim, sweep: Sweep, where: dict[str, Any] | str) -> list[Cell]:
    """The one cell that is meant, or several of which one is best."""
    found = [cell for cell in sweep.cells if _fits(cell, where)]
    is_one = claim.rule in ("above", "near")
    if is_one != (len(found) == 1) or not found:
        what = "one cell" if is_one else "several cells"
        raise InputError(f"the claim {claim.says!r} is about {what} at {where}, and the sweep has {len(found)}.")
    return found


def _fits(cell: Cell, where: dict[str, Any] | str) -> bool:
    return cell.label == where if isinstance(where, str) else where.items() <= cell.settings.items()
