"""What a run finds when it looks at images: nothing that is released as private depends on it."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from sfumato.clipping.probe import random_state_kept
from sfumato.data.examples import Dataset
from sfumato.evaluation.augtest import WithViews, augtest
from sfumato.evaluation.calibration import fit_temperature, with_offsets
from sfumato.evaluation.scores import Scores, interval, only_class, predict_logits, score
from sfumato.training.learner import Learner


@dataclasses.dataclass(frozen=True)
class HeldOutScores:
    """Of the averaged weights, and the accuracy of the last ones.

    Attributes:
        interval: Of their accuracy, 95 %.
        temperature: By which the averaged weights' outputs are best divided; None: not known.
        only_class: That the averaged weights name whatever they are shown; None: there are several.
    """

    averaged: Scores
    interval: list[float] | None
    accuracy_last: float
    temperature: float | None
    only_class: int | None


def held_out_scores(learner: Learner, dataset: Dataset) -> HeldOutScores:
    """Scores of the averaged weights, and the accuracy of the last ones."""
    decide, labels = learner.objective.decision_logits, learner.source.held_out.labels
    last = score(decide(predict_logits(learner.network.trained, learner.source.held_out)), labels)
    with learner.state.averaged_weights():
        logits = decide(predict_logits(learner.network.trained, learner.source.held_out))
    temperature = fit_temperature(with_offsets(logits, learner.objective.offsets), labels)
    return HeldOutScores(
        score(logits, labels),
        interval(logits.argmax(1) == labels, dataset.held_out.groups),
        last.accuracy,
        temperature,
        only_class(logits),
    )


def accuracy_on_training_images(learner: Learner) -> float | None:
    """Of the averaged weights on the training images that can be read, each as it is; None without any.

    The model keeps nothing of images: it was checked.
    """
    trained, images = learner.network.trained, learner.source.train
    with learner.state.averaged_weights(), random_state_kept(next(trained.parameters())):
        decided = learner.objective.decision_logits(predict_logits(trained, images)).argmax(1)
    right = (decided == images.labels)[images.readable]
    return float(right.double().mean()) if len(right) else None


def scores_with_views(learner: Learner, dataset: Dataset, num_views: int, say: Callable[[str], None]) -> WithViews:
    """Of the averaged weights, by views of each held-out image."""
    if num_views and learner.views.kind != "none":
        say(f"testing with {num_views} views of each held-out image")
    with learner.state.averaged_weights():
        return augtest(
            learner.state.model, dataset.held_out, learner.views, num_views, learner.objective.decision_logits
        )


def warning_of_chance(learner: Learner, classes: Sequence[str], scores: HeldOutScores) -> str | None:
    """Of a model that has learned nothing that shows."""
    labels, balanced, chance = learner.source.held_out.labels, scores.averaged.balanced_accuracy, 1 / len(classes)
    if len(labels.unique()) < 2:
        return None
    if scores.only_class is not None:
        what = f"the model names one class alone, {classes[scores.only_class]}, whatever it is shown"
    elif balanced < chance + 2 * math.sqrt(chance * (1 - chance) / len(labels)):
        what = f"a balanced accuracy of {100 * balanced:.2f} % is not above chance, {100 * chance:.2f} %"
    else:
        return None
    return f"warning: {what}. More images, a larger epsilon, or weights that others trained on public images help."
