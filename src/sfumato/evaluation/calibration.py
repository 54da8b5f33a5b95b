"""Probabilities that are as often right as they say, and a threshold for an asked sensitivity: fitted
on images that the model was not trained on.

Networks are too sure of themselves. One number, the temperature by which their outputs are divided,
mends most of that (Guo et al. 2017, Section 4.2) and changes no decision: a run fits it on its
held-out images. Where classes are more or less frequent than in training, each needs a shift besides
(`Alexandari et al. (2020) <https://arxiv.org/abs/1901.06852>`_): `sfumato calibrate` fits both. What
is fitted says something of the images it was fitted on: it is not private with respect to them.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.nn import functional as F

from sfumato.errors import InputError, refusing
from sfumato.run_folder.record import CALIBRATION_FILE, CalibrationFacts, Threshold

Aim = Literal["sensitivity", "specificity"]
FEWEST_IMAGES = 50
"""Fewer say too little of how sure a model may be."""
_FEWEST_OF_A_CLASS = 20  # for a shift, or a threshold
_HALF = math.nextafter(0.5, 1.0)
_RANGE = (-5.0, 5.0)  # of the temperature's logarithm


class Calibration(CalibrationFacts):
    """How a run's outputs become probabilities and decisions; see `record.CalibrationFacts`."""

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """(N, classes) float64, of outputs as the decision takes them."""
        scaled = self.scaled(logits)
        return scaled.sigmoid() if self.is_multilabel else torch.softmax(scaled, 1)

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """(N, classes) float64: their logarithms, up to what an image's have in common."""
        scaled = with_offsets(logits, self.offsets) / self.temperature
        return scaled if self.shifts is None else scaled + torch.tensor(self.shifts, dtype=torch.float64)

    def decided(self, logits: torch.Tensor, classes: Sequence[str]) -> torch.Tensor:
        """(N,) int64: the class of each image, of outputs as the decision takes them; or (N, classes): 1 for each of
        several labels that is named, else 0.
        """
        if self.names_the_largest:
            return (logits > 0).long() if self.is_multilabel else logits.argmax(1)
        return self.named(self.probabilities(logits), classes)

    @property
    def names_the_largest(self) -> bool:
        """Whether the class of the largest output is named, or of several labels those above 0: no threshold and no
        shift is in between. With `offsets` that is the class that balanced classes ask for.
        """
        is_fitted = self.threshold is not None or self.thresholds is not None
        return not is_fitted and (self.shifts is None or self.offsets is not None)

    @property
    def all_thresholds(self) -> list[Threshold]:
        """The one of two classes, or those of labels."""
        return [each for each in (self.threshold, *(self.thresholds or ())) if each is not None]

    @property
    def boundaries(self) -> list[float]:
        """Of several labels with thresholds: from which probability on each is named. One half itself is not."""
        return [_HALF if each is None else each.probability for each in self.thresholds or []]

    def named(self, probabilities: torch.Tensor, classes: Sequence[str]) -> torch.Tensor:
        """What `decided` gives, of probabilities, where they decide."""
        if self.is_multilabel:
            return (probabilities >= torch.tensor(self.boundaries or _HALF, dtype=torch.float64)).long()
        if self.threshold is None:
            return probabilities.argmax(1)
        place = list(classes).index(self.threshold.positive)
        return torch.where(probabilities[:, place] >= self.threshold.probability, place, 1 - place)


def uncalibrated(is_multilabel: bool) -> Calibration:
    """Outputs as they are."""
    return Calibration(temperature=1.0, fitted_on="held-out", num_images=0, is_multilabel=is_multilabel)


def with_offsets(logits: torch.Tensor, offsets: Sequence[float] | None) -> torch.Tensor:
    """(N, classes) float64: outputs as probabilities take them, of those that the decision takes."""
    return logits.double() if offsets is None else logits.double() + torch.tensor(offsets, dtype=torch.float64)


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float | None:
    """The temperature of the least negative log-likelihood.

    Args:
        logits: (N, classes), as probabilities take them (`with_offsets`).
        labels: (N,), int64; or (N, classes), of several labels an image: 1, 0, or -1 where it is unknown.

    Returns:
        Between e^-5 and e^5; None for fewer than 50 images, images of one class, or outputs that are not finite.
    """
    from scipy.optimize import minimize_scalar

    if len(labels) < FEWEST_IMAGES or len(labels[labels >= 0].unique()) < 2 or not logits.isfinite().all():
        return None
    values, known = logits.double(), labels >= 0

    def loss(log_temperature: float) -> float:
        scaled = values * math.exp(-log_temperature)
        if labels.ndim == 2:
            return float(F.binary_cross_entropy_with_logits(scaled[known], labels[known].double()))
        return float(F.cross_entropy(scaled, labels))

    found = minimize_scalar(loss, bounds=_RANGE, method="bounded", options={"xatol": 1e-4})
    return math.exp(float(found.x))


def fit_temperature_and_shifts(logits: torch.Tensor, labels: torch.Tensor) -> tuple[float | None, list[float] | None]:
    """The same with a shift for each class, which sum to 0; without them if there is no temperature, or a class has
    fewer than 20 images.

    Args:
        logits: (N, classes).
        labels: (N,), int64.
    """
    from scipy.optimize import minimize

    temperature, classes = fit_temperature(logits, labels), logits.shape[1]
    if temperature is None or labels.ndim == 2 or min(labels.bincount(minlength=classes)) < _FEWEST_OF_A_CLASS:
        return temperature, None
    values = logits.double()

    def loss(numbers: np.ndarray) -> tuple[float, np.ndarray]:
        given = torch.tensor(numbers, requires_grad=True)
        found = F.cross_entropy(values * given[0].exp() + given[1:], labels)
        (gradient,) = torch.autograd.grad(found, given)
        return found.item(), gradient.numpy()

    start = np.array([-math.log(temperature), *[0.0] * classes])
    bounds = [_RANGE, *[(-10.0, 10.0)] * classes]
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    return math.exp(-found[0]), (found[1:] - found[1:].mean()).tolist()


def fit_thresholds(
    probabilities: torch.Tensor,
    labels: torch.Tensor,
    classes: Sequence[str],
    *,
    positive: str | None,
    aim: Aim,
    at: float,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Threshold]:
    """The threshold that reaches what is asked on these images, and gives away least beside it: of two classes one; of
    several labels one for each, among the images of which it is known.

    Args:
        probabilities: (N, classes).
        labels: (N,), int64; or (N, classes), of several labels an image: 1, 0, or -1 where it is unknown.
        classes: Their names.
        positive: The one that is looked for; None: the second of two classes, each of several labels.
        aim: "sensitivity": the share of positive images that are found; "specificity": the share of
            the others that are left alone.
        at: That share, above 0 and up to 1.
        report: Is told which labels get none, since too few images tell of them.

    Returns:
        By their names, at least one.

    Raises:
        InputError: If there are neither two classes nor several labels, there is no such class, or too few images of a
            side.
    """
    several = labels.ndim == 2
    if len(classes) != 2 and not several:
        raise InputError(f"a threshold is for two classes, and there are {len(classes)}. Leave it out.")
    if positive is not None and positive not in classes:
        raise InputError(f"there is no class {positive!r}: there are {', '.join(classes)}.")
    if not 0 < at <= 1:
        raise InputError(f"{aim} = {at} is no share. Give one above 0 and up to 1, for example 0.9.")
    found: dict[str, Threshold] = {}
    for name in [positive] if positive is not None else classes if several else classes[1:]:
        place = list(classes).index(name)
        of_it = labels[:, place] if several else (labels == place).long()
        is_positive, scores = of_it[of_it >= 0] == 1, probabilities[of_it >= 0, place].double()
        decisive, others = (is_positive, ~is_positive) if aim == "sensitivity" else (~is_positive, is_positive)
        if decisive.sum() >= _FEWEST_OF_A_CLASS and others.any():
            boundary = _between(scores, is_positive, aim, at)
            found[name] = Threshold(positive=name, probability=boundary, aim=aim, at=at)
            continue
        few = f"{int(decisive.sum())} images are too few to find a {aim} for {name} with"
        if not several or positive is not None:
            raise InputError(
                f"{few}, beside {int(others.sum())} others. Give {_FEWEST_OF_A_CLASS} or more of the first, and some "
                "of the others."
            )
        report(f"{few}: it is named from 0.5 on")
    if not found:
        raise InputError(f"no label has enough images. Give {_FEWEST_OF_A_CLASS} or more that have it, or have it not.")
    return found


def _between(scores: torch.Tensor, is_positive: torch.Tensor, aim: str, at: float) -> float:
    """Half way between two neighbouring scores. Of all that reach the aim the one that gives least away on the other
    side, and of those the one that gains most.
    """
    from sklearn.metrics import roc_curve

    false_alarms, sensitivity, thresholds = roc_curve(is_positive.numpy(), scores.numpy(), drop_intermediate=False)
    reached, other = (sensitivity, 1 - false_alarms) if aim == "sensitivity" else (1 - false_alarms, sensitivity)
    able = np.flatnonzero(reached >= at - 1e-12)
    able = able[other[able] == other[able].max()]
    best = able[reached[able].argmax()]
    if best == 0:  # no image is named
        return 1 + 1e-9
    if best == len(thresholds) - 1:  # every one
        return 0.0
    upper, lower = float(thresholds[best]), float(thresholds[best + 1])
    middle = (upper + lower) / 2
    return middle if middle > lower else upper  # no number lies between two neighbours


def read(folder: Path, of_weights: str | None) -> Calibration | None:
    """What a run's owner fitted, else what came with the weights; None: there is none.

    Args:
        folder: Of the run.
        of_weights: The JSON that model.safetensors carries.

    Raises:
        InputError: If it is damaged.
    """
    path = folder / CALIBRATION_FILE
    with refusing(f"{path} is damaged", "Remove it, or run `sfumato calibrate` again.", OSError, ValueError):
        text = path.read_text(encoding="utf-8") if path.exists() else of_weights
        return None if text is None else Calibration.model_validate_json(text)
