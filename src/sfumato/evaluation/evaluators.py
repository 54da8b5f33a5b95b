"""What can be said of decisions beside their accuracy. An evaluator yields names and values.

One of your own is any function of an `Outcome` that does so; give it to `sfumato.evaluate`:

    >>> def errors(outcome):
    ...     yield "errors", int((outcome.decided != outcome.labels).sum())
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Evaluator = Callable[["Outcome"], Iterator[tuple[str, Any]]]

BINS = 15
"""Of equal width, for the calibration error (Guo et al. 2017)."""
_Z = 1.959963984540054  # of a two-sided 95 % interval


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A model's answers for held-out images.

    Attributes:
        logits: (N, classes) float64, shifted as the decision demands.
        labels: (N,) int64.
        classes: Their names.
    """

    logits: torch.Tensor
    labels: torch.Tensor
    classes: Sequence[str]

    @functools.cached_property
    def probabilities(self) -> torch.Tensor:
        """(N, classes)."""
        return torch.softmax(self.logits.double(), 1)

    @functools.cached_property
    def decided(self) -> torch.Tensor:
        """(N,) int64."""
        return self.logits.argmax(1)

    @property
    def is_finite(self) -> bool:
        return bool(self.logits.isfinite().all())


def confusion(outcome: Outcome) -> Iterator[tuple[str, Any]]:
    """How many images of each class (row) were taken for each class (column)."""
    count = len(outcome.classes)
    cells = torch.bincount(outcome.labels * count + outcome.decided, minlength=count * count)
    yield "confusion", cells.view(count, count).tolist()


def calibration(outcome: Outcome) -> Iterator[tuple[str, Any]]:
    """Expected calibration error: how far the probability of the named class lies from how often that
    class is right, over bins of that probability, weighted by their images (Guo et al. 2017, Eq. 3).
    """
    if not outcome.is_finite:
        yield "calibration_error", None
        return
    sureness = outcome.probabilities.max(1).values
    right = (outcome.decided == outcome.labels).double()
    bins = (sureness * BINS).ceil().long().clamp(1, BINS) - 1
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, right - sureness)
    yield "calibration_error", float(gaps.abs().sum() / len(sureness))


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
    """95 % intervals of the accuracy over all images, and of each class's (Wilson 1927), for images
    that are independent of each other; and how far the best class lies above the worst.
    """
    right = outcome.decided == outcome.labels
    each = [right[outcome.labels == place] for place in range(len(outcome.classes))]
    yield (
        "intervals",
        {"accuracy": wilson(int(right.sum()), len(right)), "per_class": [wilson(int(r.sum()), len(r)) for r in each]},
    )
    shares = [float(part.double().mean()) for part in each if len(part)]
    yield "class_gap", max(shares) - min(shares)


def wilson(hits: int, count: int) -> list[float] | None:
    """Lower and upper end of a 95 % interval for a share; None of nothing."""
    if not count:
        return None
    share = hits / count
    centre = share + _Z**2 / (2 * count)
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    scale = 1 + _Z**2 / count
    low, high = (centre - half) / scale, (centre + half) / scale
    return [max(min(low, share), 0.0), min(max(high, share), 1.0)]  # roundings at 0 and 1


def _of_class(outcome: Outcome, place: int, measure: Callable[[torch.Tensor, torch.Tensor], float]) -> float | None:
    """Of a class's own scores and all others'."""
    own = outcome.labels == place
    if not outcome.is_finite or own.all() or not own.any():
        return None
    # Log odds tell apart what the probability rounds to 1; rounded, equal outputs in another order are ties.
    others = [other for other in range(len(outcome.classes)) if other != place]
    scores = outcome.logits[:, place].double() - outcome.logits[:, others].double().logsumexp(1)
    scores = scores.round(decimals=9)
    return measure(scores[own], scores[~own])


def _area(own: torch.Tensor, others: torch.Tensor) -> float:
    """The share of pairs in which the class's own image scores higher; ties count half."""
    ordered = others.sort().values
    below = torch.searchsorted(ordered, own, right=False) + torch.searchsorted(ordered, own, right=True)
    return float(below.double().mean() / (2 * len(others)))


def _sensitivity(specificity: float, own: torch.Tensor, others: torch.Tensor) -> float:
    allowed = math.floor((1 - specificity) * len(others) + 1e-9)  # so many others may be taken for the class
    threshold = others.sort(descending=True).values[allowed] if allowed < len(others) else -math.inf
    return float((own > threshold).double().mean())
