"""What a run finds when it looks at images, and the weights that it leaves. No accuracy is private, and nothing that is
released as private depends on one.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save as to_bytes

from sfumato import config
from sfumato.clipping.probe import random_state_kept
from sfumato.data.examples import Dataset
from sfumato.evaluation.augtest import WithViews, augtest
from sfumato.evaluation.calibration import Calibration, fit_temperature, with_offsets
from sfumato.evaluation.evaluators import Outcome
from sfumato.evaluation.scores import Scores, decided_labels, only_class, score
from sfumato.models.weights import Weights
from sfumato.planning.resolve import Plan
from sfumato.run_folder import files
from sfumato.run_folder.certificate import repeated
from sfumato.run_folder.record import Certificate, WeightsFacts
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
    objective, held_out = learner.objective, learner.held_out
    labels = held_out.labels
    last = score(objective.decision_logits(learner.logits(held_out)), labels)
    has_several = objective.is_multilabel
    with learner.state.averaged_weights():
        logits = objective.decision_logits(learner.logits(held_out))
    return HeldOutScores(
        averaged=score(logits, labels),
        interval=Outcome(logits, labels, dataset.classes, people=dataset.held_out.groups).interval(),
        accuracy_last=last.accuracy,
        temperature=fit_temperature(with_offsets(logits, objective.offsets), labels),
        only_class=None if has_several else only_class(logits),
    )


def accuracy_on_training_images(learner: Learner) -> float | None:
    """Of the averaged weights on the training images that can be read, each as it is; None without any.

    The model keeps nothing of images: it was checked.
    """
    trained, images = learner.network.trained, learner.train
    with learner.state.averaged_weights(), random_state_kept(next(trained.parameters())):
        decided = decided_labels(learner.objective.decision_logits(learner.logits(images)), images.labels)
    right = (decided == images.labels)[images.readable]
    right = right[images.labels[images.readable] >= 0]
    return float(right.double().mean()) if len(right) else None


def scores_with_views(learner: Learner, dataset: Dataset, num_views: int, say: Callable[[str], None]) -> WithViews:
    """Of the averaged weights, by views of each held-out image."""
    if num_views and learner.views.kind != "none":
        say(f"testing with {num_views} views of each held-out image")
    decide, model = learner.objective.decision_logits, learner.state.model
    world, held_out = learner.world, dataset.held_out
    with learner.state.averaged_weights():
        own = torch.arange(len(held_out)).tensor_split(world.size)[world.rank]
        return augtest(model, held_out, learner.views, num_views, decide, chosen=own, total=world.total)


def warning_of_chance(learner: Learner, classes: Sequence[str], scores: HeldOutScores) -> str | None:
    """Of a model that has learned nothing that shows."""
    labels, balanced, chance = learner.held_out.labels, scores.averaged.balanced_accuracy, 1 / len(classes)
    chance = 0.5 if learner.objective.is_multilabel else chance
    if len(labels.unique()) < 2:
        return None
    if scores.only_class is not None:
        what = f"the model names one class alone, {classes[scores.only_class]}, whatever it is shown"
    elif balanced < chance + 2 * math.sqrt(chance * (1 - chance) / len(labels)):
        what = f"a balanced accuracy of {100 * balanced:.2f} % is not above chance, {100 * chance:.2f} %"
    else:
        return None
    return f"warning: {what}"


def save_weights(
    path: Path,
    tensors: dict[str, torch.Tensor],
    plan: Plan,
    learner: Learner,
    claim: Certificate,
    temperature: float | None,
) -> str:
    """The averaged weights (`State.averaged_state_dict`), with what is needed to use and to judge them: equal ones
    give the same bytes.

    Returns:
        The digest of their tensors.
    """
    metadata = {
        "sfumato": repeated(WeightsFacts, claim).model_dump_json(),
        "recipe": config.to_toml(config.shareable(plan.recipe)),
    }
    if temperature is not None:
        fitted = Calibration(
            temperature=temperature,
            offsets=learner.objective.offsets,
            fitted_on="held-out",
            is_multilabel=learner.objective.is_multilabel,
            num_images=len(learner.held_out.labels),
        )
        metadata["calibration"] = fitted.model_dump_json()
    files.write_with_metadata(path, to_bytes(tensors), metadata)
    return Weights(tensors).digest
