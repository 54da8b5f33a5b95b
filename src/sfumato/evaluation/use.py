"""Using a trained model: scoring it on its held-out images, and naming the classes of others."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

import torch

from sfumato.data import loading
from sfumato.data.folders import decode_images
from sfumato.data.views import Views
from sfumato.errors import InputError
from sfumato.evaluation.augtest import augtest
from sfumato.evaluation.row_independence import evaluation_finding
from sfumato.evaluation.scores import predict_logits, score
from sfumato.evaluation.trained import load
from sfumato.json_record import Record
from sfumato.run_folder.files import DATA_ROOT_FILE, read_data_root

Report = Callable[[str], None]


class Evaluation(Record):
    """How good a run's averaged weights are on its held-out images. Not private; see
    `sfumato.run_folder.record.Result`.
    """

    run: str
    held_out: Literal["test", "valid"]
    num_images: int
    classes: list[str]
    accuracy: float
    accuracy_top5: float | None
    balanced_accuracy: float
    per_class: list[float | None]
    auroc: float | None
    majority_rate: float
    test_views: int
    accuracy_augtest_vote: float | None
    accuracy_augtest_mean: float | None


class Prediction(Record):
    """The class of one image; None where the image cannot be read."""

    image: str
    class_name: str | None
    probability: float | None
    probabilities: dict[str, float] | None


def evaluate(
    run: str | Path,
    *,
    data_root: str | Path | None = None,
    test_views: int | None = None,
    trust: Collection[str] = (),
    report: Report = lambda text: None,
) -> Evaluation:
    """Scores the averaged weights on the run's held-out images. These numbers are not private.

    Args:
        run: The run folder.
        data_root: Where the data lies; default as in training, where the run's owner has noted it.
        test_views: Random views of each image that decide together; default as in the recipe.
        trust: Modules that may be imported for the model, each by its full name.
        report: Is told what the user should know.

    Raises:
        InputError: If the run or its images are not there, or are others.
    """
    folder = Path(run)
    trained = load(folder, trust)
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
    if (mixing := evaluation_finding(trained.model, trained.row)) is not None:
        report(f"warning: accuracies depend on which images are judged together: {mixing}")
    held_out, decide = dataset.held_out, trained.objective.decision_logits
    found = score(decide(predict_logits(trained.model, held_out)), held_out.labels)
    num_views = recipe.augmentation.test_views if test_views is None else test_views
    together = augtest(trained.model, held_out, Views.of(recipe.augmentation), num_views, decide)
    if test_views and not together.views:
        report("no test with views: this run was trained without augmentation")
    return Evaluation(
        run=str(folder),
        held_out=dataset.held_out_name,
        num_images=len(held_out),
        classes=list(dataset.classes),
        **dataclasses.asdict(found),
        test_views=together.views,
        accuracy_augtest_vote=together.vote,
        accuracy_augtest_mean=together.mean,
    )


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
