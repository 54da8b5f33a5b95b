"""Using a trained model: scoring it on its held-out images, and naming the classes of others."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from sfumato.data import loading
from sfumato.data.folders import decode_images, labelled_images
from sfumato.data.images import ImageSet
from sfumato.data.views import Views
from sfumato.errors import InputError
from sfumato.evaluation.augtest import augtest
from sfumato.evaluation.evaluators import (
    Evaluator,
    Outcome,
    auroc_of_each,
    calibration,
    confusion,
    intervals,
    sensitivity_at,
)
from sfumato.evaluation.row_independence import evaluation_finding
from sfumato.evaluation.scores import predict_logits, score
from sfumato.evaluation.trained import Trained, load
from sfumato.json_record import Record
from sfumato.run_folder.files import DATA_ROOT_FILE, read_data_root

Report = Callable[[str], None]


class Intervals(Record):
    """95 % intervals (lower, upper) for independent images; None of a class that does not occur."""

    accuracy: list[float]
    per_class: list[list[float] | None]


class Evaluation(Record):
    """How good a run's averaged weights are on its held-out images. Not private; see
    `sfumato.run_folder.record.Result`.
    """

    run: str
    held_out: Literal["test", "valid", "folder"]
    num_images: int
    classes: list[str]
    accuracy: float
    accuracy_top5: float | None
    balanced_accuracy: float
    per_class: list[float | None]
    auroc: float | None
    majority_rate: float
    confusion: list[list[int]]
    """Images of each class (row) that were taken for each class (column)."""
    calibration_error: float | None
    auroc_per_class: list[float | None]
    """Each class against the rest."""
    specificity: float
    sensitivity_per_class: list[float | None]
    """Of each class against the rest, at that specificity."""
    intervals: Intervals
    class_gap: float
    """Accuracy of the best class less that of the worst."""
    test_views: int
    accuracy_augtest_vote: float | None
    accuracy_augtest_mean: float | None
    more: dict[str, Any]
    """What the caller's own evaluators yielded."""


class Prediction(Record):
    """The class of one image; None where the image cannot be read."""

    image: str
    class_name: str | None
    probability: float | None
    probabilities: dict[str, float] | None


def evaluate(
    run: str | Path,
    folder_of_images: str | Path | None = None,
    *,
    data_root: str | Path | None = None,
    test_views: int | None = None,
    specificity: float = 0.95,
    evaluators: Sequence[Evaluator] = (),
    trust: Collection[str] = (),
    report: Report = lambda text: None,
) -> Evaluation:
    """Scores the averaged weights on the run's held-out images, or on a whole folder of others. These
    numbers are not private.

    Args:
        run: The run folder.
        folder_of_images: With labels, in any layout that training takes; its classes are among the
            run's.
        data_root: Where the data lies; default as in training, where the run's owner has noted it.
        test_views: Random views of each image that decide together; default as in the recipe.
        specificity: At which each class's sensitivity is told.
        evaluators: Your own (`sfumato.evaluation.evaluators`): what they yield stands under `more`.
        trust: Modules that may be imported for the model, each by its full name.
        report: Is told what the user should know.

    Raises:
        InputError: If the run or its images are not there, or are others.
    """
    if not 0 <= specificity <= 1:
        raise InputError(f"specificity = {specificity} is no share. Give one from 0 to 1, for example 0.95.")
    folder = Path(run)
    trained = load(folder, trust)
    held_out, held_out_name = _held_out(folder_of_images, trained, folder, data_root, report)
    if (mixing := evaluation_finding(trained.model, trained.row)) is not None:
        report(f"warning: accuracies depend on which images are judged together: {mixing}")
    decide = trained.objective.decision_logits
    logits = decide(predict_logits(trained.model, held_out))
    found = score(logits, held_out.labels)
    outcome = Outcome(logits.double(), held_out.labels, trained.classes)
    own = (confusion, calibration, auroc_of_each, sensitivity_at(specificity), intervals)
    facts = dict(pair for evaluator in own for pair in evaluator(outcome))
    augmentation = trained.recipe.augmentation
    num_views = augmentation.test_views if test_views is None else test_views
    together = augtest(trained.model, held_out, Views.of(augmentation), num_views, decide)
    if test_views and not together.views:
        report("no test with views: this run was trained without augmentation")
    return Evaluation(
        run=str(folder),
        held_out=held_out_name,
        num_images=len(held_out),
        classes=list(trained.classes),
        **dataclasses.asdict(found),
        **{**facts, "intervals": Intervals(**facts["intervals"])},
        test_views=together.views,
        accuracy_augtest_vote=together.vote,
        accuracy_augtest_mean=together.mean,
        more=dict(pair for evaluator in evaluators for pair in evaluator(outcome)),
    )


def _held_out(
    images: str | Path | None,
    trained: Trained,
    folder: Path,
    data_root: str | Path | None,
    report: Report,
) -> tuple[ImageSet, Literal["test", "valid", "folder"]]:
    """The images that a run is judged by, and what they are: those of a folder, or its own held-out
    ones.
    """
    if images is not None:
        if data_root is not None:
            raise InputError("a folder to score, and --data-root, where the run's own images lie: give one of them.")
        judged = labelled_images(
            Path(images),
            trained.classes,
            image_size=trained.image_size,
            resize_ratio=trained.recipe.data.resize_ratio,
            channels=trained.channels,
            mean=trained.mean,
            std=trained.std,
            report=report,
        )
        return judged, "folder"
    root = None if data_root is None else Path(data_root)
    if root is None and (noted := read_data_root(folder)) is not None:
        report(f"images of {noted}, as {folder / DATA_ROOT_FILE} says")
        root = noted
    recipe, data = trained.recipe, trained.recipe.data
    if data.name == "folder":  # labels are numbered as the model numbers them
        if root is None:
            raise InputError(
                f"{folder} does not say where its images lie: only its owner's note "
                f"{DATA_ROOT_FILE} does. Name the folder by --data-root."
            )
        recipe = recipe.model_copy(
            update={"data": data.model_copy(update={"classes": list(trained.classes), "path": str(root)})}
        )
    dataset = loading.load_for(recipe, root, report)
    if (len(dataset.classes), dataset.shape) != (
        len(trained.classes),
        (trained.channels, trained.image_size, trained.image_size),
    ):
        raise InputError(
            f"{folder} judges other images or classes than data set {data.name} has. Give a run that was trained on it."
        )
    return dataset.held_out, dataset.held_out_name


def predict(
    run: str | Path, images: Sequence[str | Path], *, trust: Collection[str] = (), report: Report = lambda text: None
) -> list[Prediction]:
    """Names the class of each image, with the model's probabilities.

    Args:
        run: The run folder.
        images: Files, or folders of them.
        trust: Modules that may be imported for the model, each by its full name.
        report: Is told which images cannot be read.

    Raises:
        InputError: If the run or an image is not there, or the model's outputs are not finite.
    """
    trained = load(Path(run), trust)
    paths, decoded = decode_images(
        [Path(image) for image in images],
        image_size=trained.image_size,
        resize_ratio=trained.recipe.data.resize_ratio,
        channels=trained.channels,
        mean=trained.mean,
        std=trained.std,
        report=report,
    )
    if (mixing := evaluation_finding(trained.model, trained.row)) is not None:
        report(f"warning: answers depend on which images are judged together: {mixing}")
    logits = trained.objective.decision_logits(predict_logits(trained.model, decoded))
    if not logits[decoded.readable].isfinite().all():
        raise InputError(
            f"the model of {run} gives no finite outputs, so it names no class. Train again with "
            "a smaller optimizer.learning_rate."
        )
    return [
        _named(str(path), trained.classes, probabilities if readable else None)
        for path, readable, probabilities in zip(
            paths, decoded.readable.tolist(), torch.softmax(logits.double(), 1).tolist(), strict=True
        )
    ]


def _named(image: str, classes: Sequence[str], probabilities: list[float] | None) -> Prediction:
    if probabilities is None:
        return Prediction(image=image, class_name=None, probability=None, probabilities=None)
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    named = dict(zip(classes, probabilities, strict=True))
    return Prediction(image=image, class_name=classes[best], probability=probabilities[best], probabilities=named)
