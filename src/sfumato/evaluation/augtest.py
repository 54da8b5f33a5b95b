"""Testing with the views of training: AugTest (Sander et al. 2022, Section 4.2). These numbers are
not private.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.data.images import ImageSet
from sfumato.data.views import Views
from sfumato.evaluation.calibration import Calibration, uncalibrated
from sfumato.evaluation.scores import rows_at_once
from sfumato.randomness import derived, key_from_seed


@dataclasses.dataclass(frozen=True)
class WithViews:
    """Accuracies of a test with views, as result.json states them.

    Attributes:
        test_views: K; 0 where nothing was tested: none was asked for, or all views are alike.
        accuracy_augtest_vote: By the majority of the K decisions; None without a test.
        accuracy_augtest_mean: By the mean of the K probabilities; None without a test.
    """

    test_views: int
    accuracy_augtest_vote: float | None
    accuracy_augtest_mean: float | None


@torch.no_grad()
def augtest(
    model: nn.Module,
    images: ImageSet,
    views: Views,
    num_views: int,
    decide: Callable[[torch.Tensor], torch.Tensor],
    calibration: Calibration | None = None,
    classes: Sequence[str] = (),
    chosen: torch.Tensor | None = None,
    total: Callable[[float], float] = float,
) -> WithViews:
    """Accuracy when several random views of each image decide together, as they were made in
    training.

    The views come from a fixed public seed: the same images and model give the same numbers
    again, and the views of fewer are the first of more. To be read beside the plain
    accuracy, which needs one view an image and is what results are compared by.

    Args:
        model: Used in evaluation mode.
        images: Held-out images.
        views: The kind and the padding of training; its multiplicity is not used.
        num_views: K; 0 for no test.
        decide: From outputs to what a decision takes the largest of: (rows, classes) -> (rows,
            classes).
        calibration: How they become decisions; None: the largest is named.
        classes: Their names.
        chosen: The images that are looked at here; None: all.
        total: Adds up what was found here and by whoever looks at the others.
    """
    if num_views == 0 or views.kind == "none":
        return WithViews(0, None, None)
    device, was_training = next(model.parameters()).device, model.training
    bits = _public_bits(len(images), num_views)
    model.eval()
    known, correct = images.labels >= 0, torch.zeros(2, dtype=torch.int64)
    fitted = calibration or uncalibrated(is_multilabel=images.labels.ndim == 2)
    at_once = max(rows_at_once(images, device) // num_views, 1)
    for indices in (torch.arange(len(images)) if chosen is None else chosen).split(at_once):
        if not len(indices):
            continue
        inputs = views.of_bits(images, indices, bits[indices], device)
        outputs = model(inputs.flatten(0, 1)).float().cpu()
        decisions = decide_together(decide(outputs).view(len(indices), num_views, -1), fitted, classes)
        right = [((decision == images.labels[indices]) & known[indices]).sum() for decision in decisions]
        correct += torch.stack(right)
    model.train(was_training)
    vote, mean = (total(float(count)) / max(int(known.sum()), 1) for count in correct)
    return WithViews(num_views, vote, mean)


def decide_together(
    logits: torch.Tensor, calibration: Calibration, classes: Sequence[str] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """The class that most views choose, and the class of the largest mean probability; with a threshold
    the one that it chooses by the mean.

    Among classes with equally many votes the mean probability chooses. Of several labels an image each is decided so.

    Args:
        logits: (N, K, classes).
        calibration: How they become decisions. For classes a temperature alone changes nothing.
        classes: As in `augtest`.

    Returns:
        Two tensors (N,), int64; of several labels an image (N, classes), 1 where it is named.
    """
    if calibration.names_the_largest and not calibration.is_multilabel:
        calibration = uncalibrated(is_multilabel=False)
    each = logits.flatten(0, 1)
    mean, chosen = calibration.probabilities(each).view(logits.shape).mean(1), calibration.decided(each, classes)
    by_mean = calibration.named(mean, classes)
    if calibration.is_multilabel:
        votes = 2 * chosen.view(logits.shape).sum(1) - logits.shape[1]
        return torch.where(votes == 0, by_mean, (votes > 0).long()), by_mean
    votes = F.one_hot(chosen.view(logits.shape[:2]), logits.shape[2]).sum(1)  # (N, classes)
    # Together less than a vote: of equally many the one that the mean decides for, else the more probable.
    return (votes + mean / 4 + F.one_hot(by_mean, logits.shape[2]) / 2).argmax(1), by_mean


def _public_bits(num_images: int, num_views: int) -> torch.Tensor:
    """(N, K), int64 in [0, 2^32): the bits of a view depend on the number of images and the view's
    place alone.
    """
    words = derived(key_from_seed(0), "test views").uint32(num_views * num_images)
    return torch.from_numpy(words.reshape(num_views, num_images).T.astype(np.int64))
