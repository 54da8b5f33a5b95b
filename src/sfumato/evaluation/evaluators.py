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
from typing import Any

import numpy as np
import torch

from sfumato.evaluation.calibration import Calibration, uncalibrated
from sfumato.evaluation.scores import auroc, interval, score, wilson
from sfumato.json_record import Record, pick
from sfumato.run_folder.tested import Decision, Group, Intervals

Evaluator = Callable[["Outcome"], Iterator[tuple[str, Any]]]

BINS = 15
"""Of equal width, for the calibration error (Guo et al. 2017)."""
_RESAMPLES, _AT_ONCE = 1000, 50


class Reliability(Record):
    """Images whose named class was called about as probable: the mean of that, how often it was right, and of that the
    95 % interval (Wilson).
    """

    num_images: int
    probability: float
    right: float
    interval: list[float]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A model's answers for held-out images.

    Attributes:
        logits: (N, classes) float64, shifted as the decision demands.
        labels: (N,) int64; or (N, classes), of several labels an image: 1, 0, or -1 where it is unknown.
        classes: Their names.
        calibration: How they become probabilities and decisions; None: as they are.
        people: (N,), whose each image is; None: nobody says, and intervals take them for independent.
    """

    logits: torch.Tensor
    labels: torch.Tensor
    classes: Sequence[str]
    calibration: Calibration | None = None
    people: Sequence[str] | None = None

    @property
    def is_multilabel(self) -> bool:
        return self.labels.ndim == 2

    @property
    def is_finite(self) -> bool:
        return bool(self.logits.isfinite().all())

    @functools.cached_property
    def whose(self) -> np.ndarray:
        """(N,): whose each image is, as a number."""
        images = np.arange(len(self.labels))
        return images if self.people is None else np.unique(np.asarray(self.people), return_inverse=True)[1]

    def interval(self, among: np.ndarray | slice = slice(None)) -> list[float] | None:
        """95 % interval for the share of decisions that are right, among all images or some (a mask); of several labels
        an image, of those that are known: an image's are no more independent of each other than a person's images.
        """
        known, right = self.labels[among] >= 0, self.decided[among] == self.labels[among]
        return interval(right[known], self.whose[among][known.nonzero()[:, 0].numpy()])

    def sides(self, place: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(N,), bool: of which images it is known whether they are of a class; and of these whether they are, and
        whether they were taken for it.
        """
        if self.is_multilabel:
            known = self.labels[:, place] >= 0
            return known, self.labels[known, place] == 1, self.decided[known, place] == 1
        return torch.ones(len(self.labels), dtype=torch.bool), self.labels == place, self.decided == place

    @functools.cached_property
    def _taken(self) -> Calibration:
        return self.calibration or uncalibrated(self.is_multilabel)

    @functools.cached_property
    def probabilities(self) -> torch.Tensor:
        """(N, classes)."""
        return self._taken.probabilities(self.logits)

    @functools.cached_property
    def decided(self) -> torch.Tensor:
        """(N,) int64; of several labels an image (N, classes)."""
        taken = self._taken if self.is_finite else uncalibrated(self.is_multilabel)
        return taken.decided(self.logits, self.classes)

    def scores(self, place: int) -> torch.Tensor:
        """Of the images of which it is known whether they are of a class: log odds of it against the rest. They tell
        apart what the probability rounds to 1; rounded, equal outputs in another order are ties.
        """
        logits = self._taken.scaled(self.logits)
        if self.is_multilabel:
            return logits[self.labels[:, place] >= 0, place].round(decimals=9)
        others = [other for other in range(len(self.classes)) if other != place]
        return (logits[:, place] - logits[:, others].logsumexp(1)).round(decimals=9)


def confusion(outcome: Outcome) -> Iterator[tuple[str, Any]]:
    """How many images of each class (row) were taken for each class (column). Of several labels an image, for each
    label: left alone, false alarms, missed, found.
    """
    count = len(outcome.classes)
    if outcome.is_multilabel:
        yield "confusion", [_counts(outcome, place) for place in range(count)]
        return
    cells = torch.bincount(outcome.labels * count + outcome.decided, minlength=count * count)
    yield "confusion", cells.view(count, count).tolist()


def _counts(outcome: Outcome, place: int) -> list[int]:
    """Of one class: left alone, false alarms, missed, found."""
    _, own, named = outcome.sides(place)
    return torch.bincount(2 * own + named, minlength=4).tolist()


def reliability(outcome: Outcome) -> Iterator[tuple[str, Any]]:
    """How often what was named is right, by how probable it was called, over bins of that probability; and the
    expected calibration error, how far the two lie apart, weighted by images (Guo et al. 2017, Eq. 3).
    """
    if not outcome.is_finite:
        yield "calibration_error", None
        yield "reliability", None
        return
    is_right = outcome.decided == outcome.labels
    if outcome.is_multilabel:  # each label that is known of an image: how probable what is said of it was called
        known, probable = outcome.labels >= 0, outcome.probabilities
        sureness, is_right = torch.where(outcome.decided == 1, probable, 1 - probable)[known], is_right[known]
    else:
        sureness = outcome.probabilities.gather(1, outcome.decided[:, None])[:, 0]
    bins, error, found = (sureness * BINS).ceil().clamp(1, BINS), 0.0, []
    for place in bins.unique():
        inside = bins == place
        count, probability = int(inside.sum()), float(sureness[inside].mean())
        right = int(is_right[inside].sum())
        error += abs(right - count * probability) / len(bins)
        ends = wilson(right, count) or []
        found.append(Reliability(num_images=count, probability=probability, right=right / count, interval=ends))
    yield "calibration_error", error
    yield "reliability", found


def auroc_of_each(outcome: Outcome) -> Iterator[tuple[str, Any]]:
    """Area under the receiver operating characteristic of each class against the rest, by its
    probability; None where only one side occurs.
    """
    places = range(len(outcome.classes))
    yield "auroc_per_class", [auroc(outcome.sides(place)[1], outcome.scores(place)) for place in places]


def sensitivity_at(outcome: Outcome, specificity: float) -> Iterator[tuple[str, Any]]:
    """The share of a class's images that is found while at least ``specificity`` of all others are
    left alone: each class against the rest, by its probability.
    """
    found: list[float | None] = []
    for place in range(len(outcome.classes)):
        is_own, scores = outcome.sides(place)[1], outcome.scores(place)
        own, others = scores[is_own], scores[~is_own].sort(descending=True).values
        allowed = math.floor((1 - specificity) * len(others) + 1e-9)  # so many others may be taken for the class
        if not len(own) or not len(others) or not outcome.is_finite:
            found.append(None)
        else:
            found.append(float((own > others[allowed]).double().mean()) if allowed < len(others) else 1.0)
    yield "specificity", specificity
    yield "sensitivity_per_class", found


def intervals(outcome: Outcome) -> Iterator[tuple[str, Any]]:
    """95 % intervals of the accuracy over all images, and of each class's (Wilson 1927), and of two
    classes' AUROC (percentile bootstrap), for images or people that are independent of each other; and
    how far the best class lies above the worst. Of several labels an image, also of each AUROC and of their mean.
    """
    several, count = outcome.is_multilabel, len(outcome.classes)
    per_class, shares, areas = [], [], []
    for place in range(count):
        known, own, named = outcome.sides(place)
        among = torch.ones_like(own) if several else own
        right = (named == own)[among]
        per_class.append(interval(right, outcome.whose[known.numpy()][among.numpy()]))
        shares += [float(right.double().mean())] if len(right) else []
        areas.append(_resampled_areas(outcome, place) if several or (count == 2 and place == 1) else None)
    told = [each for each in areas if each is not None]
    yield (
        "intervals",
        Intervals(
            accuracy=outcome.interval() or [],
            per_class=per_class,
            auroc=_middle(np.ma.masked_invalid(told).mean(axis=0).filled(np.nan)) if told else None,
            auroc_per_class=[None if each is None else _middle(each) for each in areas] if several else None,
        ),
    )
    yield "class_gap", max(shares) - min(shares)


def of_groups(outcome: Outcome, values: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Accuracies of the images that share a value, the most frequent first, and how far the best group lies above the
    worst; of several labels an image AUROC, too.

    Args:
        outcome: Of N images.
        values: (N,), of each image; "" where nothing is stated.
    """
    groups = []
    for value, count in collections.Counter(values).most_common():
        own = torch.tensor([other == value for other in values])
        if not (outcome.labels[own] >= 0).any():  # of several labels none is known of these
            continue
        found = score(outcome.logits[own], outcome.labels[own], outcome.decided[own])
        area = found.auroc if outcome.is_multilabel else None
        told = pick(found, "accuracy", "per_class") | {"interval": outcome.interval(own.numpy()) or [], "auroc": area}
        groups.append(Group(value=value, num_images=count, **told))
    yield "groups", groups
    shares = [group.accuracy for group in groups]
    yield "group_gap", max(shares) - min(shares)


def decisions(outcome: Outcome, prevalence: float | None = None) -> Iterator[tuple[str, Any]]:
    """Of two classes, or of each of several labels an image: what decides, the four counts, and the shares that follow
    from them, with 95 % intervals (Wilson); of two classes the receiver operating characteristic, too. The positive one
    of two classes is the threshold's, else the second.

    Args:
        outcome: Of two classes or several labels; of others nothing is told.
        prevalence: Share of positive images where the model will be used, for the predictive
            values; None: as among these images.
    """
    from sklearn.metrics import roc_curve

    if outcome.is_multilabel:
        yield "decisions", [_decision(outcome, place, None) for place in range(len(outcome.classes))]
        return
    if len(outcome.classes) != 2:
        return
    threshold = None if outcome.calibration is None else outcome.calibration.threshold
    place = 1 if threshold is None else list(outcome.classes).index(threshold.positive)
    own, scores = outcome.labels == place, outcome.scores(place)
    has_both = outcome.is_finite and own.any() and not own.all()
    yield "decision", _decision(outcome, place, prevalence)
    yield "roc", np.stack(roc_curve(own.numpy(), scores.numpy())[:2], 1).tolist() if has_both else None


def _decision(outcome: Outcome, place: int, prevalence: float | None) -> Decision:
    known, own, named = outcome.sides(place)
    left, alarms, missed, found = _counts(outcome, place)
    people = outcome.whose[known.numpy()]
    share = _share(found + missed, left + alarms) if prevalence is None else prevalence
    sensitivity, specificity = _share(found, missed), _share(left, alarms)
    ends = [interval((named == own)[side], people[side.numpy()]) for side in (own, ~own)]
    return Decision(
        positive=outcome.classes[place],
        threshold=_boundary(outcome.calibration, place),
        counts={"found": found, "missed": missed, "false_alarms": alarms, "left_alone": left},
        sensitivity=sensitivity,
        sensitivity_interval=ends[0],
        specificity=specificity,
        specificity_interval=ends[1],
        prevalence=share,
        positive_predictive_value=_predictive(sensitivity, specificity, share),
        negative_predictive_value=_predictive(specificity, sensitivity, None if share is None else 1 - share),
    )


def _boundary(calibration: Calibration | None, place: int) -> float:
    """The probability of a class, of two, or of a label, from which on it is named."""
    if calibration is not None and calibration.thresholds is not None:
        return calibration.boundaries[place]
    if calibration is not None and calibration.threshold is not None:
        return calibration.threshold.probability
    if calibration is None or calibration.offsets is None:
        return 0.5
    return float(calibration.probabilities(torch.zeros(1, 2))[0, place])  # of outputs between which nothing decides


def _share(hits: int, misses: int) -> float | None:
    return hits / (hits + misses) if hits + misses else None


def _predictive(right: float | None, of_others: float | None, prevalence: float | None) -> float | None:
    """Bayes: the share of a side's decisions that are right."""
    if right is None or of_others is None or prevalence is None:
        return None
    hits, alarms = right * prevalence, (1 - of_others) * (1 - prevalence)
    return hits / (hits + alarms) if hits + alarms else None


def _middle(areas: np.ndarray) -> list[float]:
    return [float(end) for end in np.nanquantile(areas, [0.025, 0.975])]


def _resampled_areas(outcome: Outcome, place: int) -> np.ndarray | None:
    """The AUROC of a class of 1,000 sets of people drawn anew, the same for each class, each with all their images; of
    images where nobody says whose they are. NaN of sets with one side alone; None where all are of one side.
    """
    known, is_own, _ = outcome.sides(place)
    if is_own.all() or not is_own.any() or not outcome.is_finite:
        return None
    scores = outcome.scores(place)
    order = scores.argsort().numpy()
    starts = np.unique(scores.numpy()[order], return_index=True)[1]  # of equal scores
    whose, own = outcome.whose[known.numpy()][order], is_own.numpy()[order]
    source, count, areas = np.random.default_rng(0), int(outcome.whose.max()) + 1, []
    for _ in range(_RESAMPLES // _AT_ONCE):
        weights = source.multinomial(count, np.full(count, 1 / count), _AT_ONCE)[:, whose]
        hits, misses = (np.add.reduceat(weights * side, starts, axis=1) for side in (own, ~own))
        pairs = hits.sum(1) * misses.sum(1)
        right = (hits * (misses.cumsum(1) - misses / 2)).sum(1)
        areas.append(np.where(pairs > 0, right / np.maximum(pairs, 1), np.nan))
    return np.concatenate(areas)
