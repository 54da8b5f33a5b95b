"""What can be said of decisions beside their accuracy. An evaluator yields names and values.

One of your own is any function of an `Outcome` that does so; give it to `sfumato.evaluate`:

    >>> def errors(outcome):
    ...     yield "errors", int((outcome.decided != outcome.labels).sum())
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from sfumato.evaluation.calibration import Calibration
from sfumato.evaluation.scores import interval, wilson

Evaluator = Callable[["Outcome"], Iterator[tuple[str, Any]]]

BINS = 15
"""Of equal width, for the calibration error (Guo et al. 2017)."""
_RESAMPLES = 1000
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A model's answers for held-out images.

    Attributes:
        logits: (N, classes) float64, shifted as the decision demands.
        labels: (N,) int64.
        classes: Their names.
        calibration: How they become probabilities and decisions; None: as they are.
        people: (N,), whose each image is; None: nobody says, and intervals take them for independent.
    """

    logits: torch.Tensor
    labels: torch.Tensor
    classes: Sequence[str]
    calibration: Calibration | None = None
    people: Sequence[str] | None = None

    def interval(self, among: torch.Tensor | None = None) -> list[float] | None:
        """95 % interval for the share that is right, among all images or some (a mask)."""
        right = self.decided == self.labels
        if among is None:
            return interval(right, self.people)
        people = self.people and [self.people[place] for place in among.nonzero()[:, 0].tolist()]
        return interval(right[among], people)

    @functools.cached_property
    def probabilities(self) -> torch.Tensor:
        """(N, classes)."""
        if self.calibration is None:
            return torch.softmax(self.logits.double(), 1)
        return self.calibration.probabilities(self.logits)

    @functools.cached_property
    def decided(self) -> torch.Tensor:
        """(N,) int64."""
        if self.calibration is None or not self.is_finite:
            return self.logits.argmax(1)
        return self.calibration.decided(self.logits, self.classes)

    @property
    def is_finite(self) -> bool:
        return bool(self.logits.isfinite().all())


def confusion(outcome: Outcome) -> Iterator[tuple[str, Any]]:
    """How many images of each class (row) were taken for each class (column)."""
    count = len(outcome.classes)
    cells = torch.bincount(outcome.labels * count + outcome.decided, minlength=count * count)
    yield "confusion", cells.view(count, count).tolist()


def calibration_error(outcome: Outcome) -> Iterator[tuple[str, Any]]:
    """Expected calibration error: how far the probability of the named class lies from how often that
    class is right, over bins of that probability, weighted by their images (Guo et al. 2017, Eq. 3).
    """
    if not outcome.is_finite:
        yield "calibration_error", None
        return
    counts, sureness, right = _by_sureness(outcome)
    yield "calibration_error", float((right - sureness).abs().sum() / counts.sum())


def reliability(outcome: Outcome) -> Iterator[tuple[str, Any]]:
    """The same bins, those that have images: how probable the named class was called on average, and how
    often it was right, with its 95 % interval (Wilson).
    """
    if not outcome.is_finite:
        yield "reliability", None
        return
    bins = zip(*(column.tolist() for column in _by_sureness(outcome)), strict=True)
    yield (
        "reliability",
        [
            {
                "num_images": count,
                "probability": sureness / count,
                "right": right / count,
                "interval": wilson(round(right), count),
            }
            for count, sureness, right in bins
            if count
        ],
    )


def _by_sureness(outcome: Outcome) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(BINS,) each: images whose named class is about as probable, the sum of these probabilities, and how many of the
    images are named rightly.
    """
    sureness = outcome.probabilities.gather(1, outcome.decided[:, None])[:, 0]
    right = (outcome.decided == outcome.labels).double()
    bins = (sureness * BINS).ceil().long().clamp(1, BINS) - 1
    nothing = torch.zeros(BINS, dtype=torch.float64)
    counts = torch.bincount(bins, minlength=BINS)
    return counts, nothing.index_add(0, bins, sureness), nothing.index_add(0, bins, right)


def auroc_of_each(outcome: Outcome) -> Iterator[tuple[str, Any]]:
    """Area under the receiver operating characteristic of each class against the rest, by its
    probability; None where only one side occurs.
    """
    yield "auroc_per_class", [_of_class(outcome, place, _area) for place in range(len(outcome.classes))]


def sensitivity_at(specificity: float) -> Evaluator:
    """The share of a class's images that is found while at least ``specificity`` of all others are
    left alone: each class against the rest, by its probability.
    """

    def evaluator(outcome: Outcome) -> Iterator[tuple[str, Any]]:
        at = functools.partial(_sensitivity, specificity)
        yield "specificity", specificity
        yield "sensitivity_per_class", [_of_class(outcome, place, at) for place in range(len(outcome.classes))]

    return evaluator


def intervals(outcome: Outcome) -> Iterator[tuple[str, Any]]:
    """95 % intervals of the accuracy over all images, and of each class's (Wilson 1927), and of two
    classes' AUROC (percentile bootstrap), for images or people that are independent of each other; and
    how far the best class lies above the worst.
    """
    right = outcome.decided == outcome.labels
    masks = [outcome.labels == place for place in range(len(outcome.classes))]
    each = [right[mask] for mask in masks]
    yield (
        "intervals",
        {
            "accuracy": outcome.interval(),
            "per_class": [outcome.interval(mask) for mask in masks],
            "auroc": _area_interval_of(outcome) if len(outcome.classes) == 2 else None,
        },
    )
    shares = [float(part.double().mean()) for part in each if len(part)]
    yield "class_gap", max(shares) - min(shares)


def of_groups(values: Sequence[str]) -> Evaluator:
    """Accuracies of the images that share a value, the most frequent first, and how far the best group lies above the
    worst.

    Args:
        values: (N,), of each image; "" where nothing is stated.
    """

    def evaluator(outcome: Outcome) -> Iterator[tuple[str, Any]]:
        right, groups, shares = outcome.decided == outcome.labels, [], []
        for value, _ in collections.Counter(values).most_common():
            own = torch.tensor([other == value for other in values])
            each = [right[own & (outcome.labels == place)] for place in range(len(outcome.classes))]
            shares.append(float(right[own].double().mean()))
            groups.append(
                {
                    "value": value,
                    "num_images": int(own.sum()),
                    "accuracy": shares[-1],
                    "interval": outcome.interval(own),
                    "per_class": [float(part.double().mean()) if len(part) else None for part in each],
                }
            )
        yield "groups", groups
        yield "group_gap", max(shares) - min(shares)

    return evaluator


def decision_on_two(prevalence: float | None) -> Evaluator:
    """Of two classes: what decides, the four counts, and the shares that follow from them, with 95 %
    intervals (Wilson). The positive class is the threshold's, else the second.

    Args:
        prevalence: Share of positive images where the model will be used, for the predictive
            values; None: as among these images.
    """

    def evaluator(outcome: Outcome) -> Iterator[tuple[str, Any]]:
        if len(outcome.classes) != 2:
            return
        threshold = None if outcome.calibration is None else outcome.calibration.threshold
        place = 1 if threshold is None else list(outcome.classes).index(threshold.positive)
        is_positive, is_named = outcome.labels == place, outcome.decided == place
        found, missed = int((is_positive & is_named).sum()), int((is_positive & ~is_named).sum())
        alarms, left = int((~is_positive & is_named).sum()), int((~is_positive & ~is_named).sum())
        share = int(is_positive.sum()) / len(outcome.labels) if prevalence is None else prevalence
        sensitivity, specificity = _share(found, missed), _share(left, alarms)
        yield (
            "decision",
            {
                "positive": outcome.classes[place],
                "threshold": _boundary(outcome.calibration, place),
                "counts": {"found": found, "missed": missed, "false_alarms": alarms, "left_alone": left},
                "sensitivity": sensitivity,
                "sensitivity_interval": outcome.interval(is_positive),
                "specificity": specificity,
                "specificity_interval": outcome.interval(~is_positive),
                "prevalence": share,
                "positive_predictive_value": _predictive(sensitivity, specificity, share),
                "negative_predictive_value": _predictive(specificity, sensitivity, 1 - share),
            },
        )

    return evaluator


def _boundary(calibration: Calibration | None, place: int) -> float:
    """The probability of a class, of two, from which on it is named."""
    if calibration is None:
        return 0.5
    if calibration.threshold is not None:
        return calibration.threshold.probability
    if calibration.offsets is None:
        return 0.5
    return float(calibration.probabilities(torch.zeros(1, 2))[0, place])  # of outputs between which nothing decides


def _share(hits: int, misses: int) -> float | None:
    return hits / (hits + misses) if hits + misses else None


def _predictive(right: float | None, of_others: float | None, prevalence: float) -> float | None:
    """Bayes: the share of a side's decisions that are right."""
    if right is None or of_others is None:
        return None
    hits, alarms = right * prevalence, (1 - of_others) * (1 - prevalence)
    return hits / (hits + alarms) if hits + alarms else None


def _of_class(outcome: Outcome, place: int, measure: Callable[[torch.Tensor, torch.Tensor], T]) -> T | None:
    """Of a class's own scores and all others'."""
    own = outcome.labels == place
    if not outcome.is_finite or own.all() or not own.any():
        return None
    # Log odds tell apart what the probability rounds to 1; rounded, equal outputs in another order are ties.
    others = [other for other in range(len(outcome.classes)) if other != place]
    logits = outcome.logits.double() if outcome.calibration is None else outcome.calibration.scaled(outcome.logits)
    scores = logits[:, place] - logits[:, others].logsumexp(1)
    scores = scores.round(decimals=9)
    return measure(scores[own], scores[~own])


def _area(own: torch.Tensor, others: torch.Tensor) -> float:
    """The share of pairs in which the class's own image scores higher; ties count half."""
    ordered = others.sort().values
    below = torch.searchsorted(ordered, own, right=False) + torch.searchsorted(ordered, own, right=True)
    return float(below.double().mean() / (2 * len(others)))


def _area_interval_of(outcome: Outcome) -> list[float] | None:
    """Of two classes' AUROC."""
    if outcome.people is None:
        return _of_class(outcome, 1, _area_interval)
    whose = torch.from_numpy(np.unique(np.asarray(outcome.people), return_inverse=True)[1])
    own = outcome.labels == 1
    return _of_class(outcome, 1, functools.partial(_area_interval_of_people, whose[own], whose[~own]))


def _area_interval_of_people(
    of_own: torch.Tensor, of_others: torch.Tensor, own: torch.Tensor, others: torch.Tensor
) -> list[float]:
    """Of the area: the middle 95 % of 1,000 sets of people drawn anew, each with all their images."""
    source, count = np.random.default_rng(0), int(torch.cat([of_own, of_others]).max()) + 1
    values = torch.cat([own, others]).unique()
    places = [torch.searchsorted(values, side) for side in (own, others)]
    areas: list[float] = []
    for _ in range(_RESAMPLES):
        times = torch.from_numpy(source.multinomial(count, np.full(count, 1 / count)))
        hits, misses = (
            torch.bincount(place, times[whose].double(), len(values))
            for place, whose in zip(places, (of_own, of_others), strict=True)
        )
        if hits.sum() and misses.sum():
            below = misses.cumsum(0) - misses / 2
            areas.append(float((hits * below).sum() / (hits.sum() * misses.sum())))
    return [float(end) for end in np.quantile(areas, [0.025, 0.975])]


def _area_interval(own: torch.Tensor, others: torch.Tensor) -> list[float]:
    """Of the area: the middle 95 % of 1,000 sets drawn anew, each class from its own images."""
    source = np.random.default_rng(0)
    values = torch.cat([own, others]).unique()
    shares = [torch.bincount(torch.searchsorted(values, side), minlength=len(values)) for side in (own, others)]
    areas: list[float] = []
    for _ in range(_RESAMPLES):
        hits, misses = (source.multinomial(int(side.sum()), (side.double() / side.sum()).numpy()) for side in shares)
        below = np.cumsum(misses) - misses / 2
        areas.append(float((hits * below).sum() / (hits.sum() * misses.sum())))
    return [float(end) for end in np.quantile(areas, [0.025, 0.975])]


def _sensitivity(specificity: float, own: torch.Tensor, others: torch.Tensor) -> float:
    allowed = math.floor((1 - specificity) * len(others) + 1e-9)  # so many others may be taken for the class
    threshold = others.sort(descending=True).values[allowed] if allowed < len(others) else -math.inf
    return float((own > threshold).double().mean())
