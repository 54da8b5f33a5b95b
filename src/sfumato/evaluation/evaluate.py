"""Scoring a trained model on its held-out images, or on a folder of others."""

import dataclasses
import datetime
import itertools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sfumato.config import DataConfig, Recipe
from sfumato.data import loading, tables
from sfumato.data.folders import labelled_images, labelled_objects
from sfumato.data.images import ImageSet
from sfumato.data.listing import PART_MEANT, part_said
from sfumato.data.views import Views
from sfumato.errors import InputError
from sfumato.evaluation import calibration
from sfumato.evaluation.augtest import augtest
from sfumato.evaluation.calibration import Calibration
from sfumato.evaluation.evaluators import (
    Evaluator,
    Outcome,
    Reliability,
    auroc_of_each,
    confusion,
    decisions,
    intervals,
    of_groups,
    reliability,
    sensitivity_at,
)
from sfumato.evaluation.scores import evaluation_finding, predict_logits, score
from sfumato.evaluation.trained import Trained, load
from sfumato.run_folder.files import (
    DATA_ROOT_FILE,
    OWNER,
    read_json,
    read_place,
    refuse_drawing,
    write_json,
    write_with_metadata,
)
from sfumato.run_folder.record import WEIGHTS_FILE
from sfumato.run_folder.tested import CHOSE, EVALUATION_FILE, FITTED_ON_FILE, TRAINED_ON_FILE, Tested
from sfumato.run_folder.verification import read_model_file

Report = Callable[[str], None]

FORMATS = (".svg", ".png", ".pdf")
_MOST_GROUPS = 100
_PROTECTED = "they are protected, and what a model says of them tells nothing of new ones."


class Evaluation(Tested):
    """How good a run's averaged weights are on its held-out images, or on a folder of others. Not private; see
    `sfumato.run_folder.record.Result`.
    """

    run: str
    held_out: Literal["test", "valid", "folder"]
    accuracy_top5: float | None
    calibration_error: float | None
    reliability: list[Reliability] | None
    """How often what was named is right, by how probable it was called."""
    auroc_per_class: list[float | None]
    """Each class against the rest."""
    specificity: float
    sensitivity_per_class: list[float | None]
    """Of each class against the rest, at that specificity."""
    class_gap: float
    """Accuracy of the best class less that of the worst."""
    group_gap: float | None = None
    """Accuracy of the best group less that of the worst."""
    test_views: int
    accuracy_augtest_vote: float | None
    accuracy_augtest_mean: float | None
    more: dict[str, Any]
    """What the caller's own evaluators yielded."""


def evaluate(
    run: str | Path,
    folder_of_images: Any = None,
    *,
    data_root: str | Path | None = None,
    test_views: int | None = None,
    specificity: float = 0.95,
    prevalence: float | None = None,
    by: str | None = None,
    publish: bool = False,
    evaluators: Sequence[Evaluator] = (),
    trust: Collection[str] = (),
    report: Report = lambda text: None,
) -> Evaluation:
    """Scores the averaged weights on the run's held-out images, or on a whole folder of others. These
    numbers are not private.

    Args:
        run: The run folder.
        folder_of_images: With labels, in any layout that training takes; its classes are among the
            run's. Or images and labels in Python, as `sfumato.train` takes them.
        data_root: Where the data lies; default as in training, where the run's owner has noted it.
        test_views: Random views of each image that decide together; default as in the recipe.
        specificity: At which each class's sensitivity is told.
        prevalence: Share of positive images where the model will be used, for the predictive values
            of two classes; None: as among these images.
        by: A column of that folder's table: accuracies are also told for each of its values.
        publish: Also writes evaluation.json into the run folder: what its report tells of this test set (`Tested`).
        evaluators: Your own (`sfumato.evaluation.evaluators`): what they yield stands under `more`.
        trust: Modules that may be imported for the model, each by its full name.
        report: Is told what the user should know.

    Raises:
        InputError: If the run or its images are not there, or are others; with `publish`, also where the guarantee
            covers them.
    """
    for name, share in (("specificity", specificity), ("prevalence", prevalence)):
        if share is not None and not 0 <= share <= 1:
            raise InputError(f"{name} = {share} is no share. Give one from 0 to 1.")
    if by is not None and not isinstance(folder_of_images, (str, Path)):
        raise InputError("groups are told for a folder of images with a table. Name the folder, or leave --by out.")
    folder = Path(run)
    trained = load(folder, trust)
    held_out, held_out_name, names = _judged(folder_of_images, trained, folder, data_root, report, refuse=publish)
    again = 0
    if trained.calibration is not None and (fitted_on := folder / OWNER / FITTED_ON_FILE).exists():
        known = read_json(fitted_on)
        if again := sum(digest in known for digest in held_out.digests()):
            report(f"warning: {again} of these {len(held_out)} images {CHOSE}")
    if (mixing := evaluation_finding(trained.model, trained.row)) is not None:
        report(f"warning: accuracies depend on which images are judged together: {mixing}")
    values = None if by is None else _values_of(by, Path(folder_of_images), names, trained.recipe.data)
    decide = trained.objective.decision_logits
    logits = decide(predict_logits(trained.model, held_out))
    outcome = Outcome(logits.double(), held_out.labels, trained.classes, trained.calibration, held_out.groups)
    told = [evaluator(outcome) for evaluator in (confusion, reliability, auroc_of_each, intervals)]
    told += [sensitivity_at(outcome, specificity), decisions(outcome, prevalence)]
    if values is not None:
        told.append(of_groups(outcome, values))
    views = Views.of(trained.recipe.augmentation)
    num_views = trained.recipe.augmentation.test_views if test_views is None else test_views
    together = augtest(trained.model, held_out, views, num_views, decide, trained.calibration, trained.classes)
    if test_views and not together.test_views:
        report("no test with views: this run was trained without augmentation")
    found = Evaluation(
        run=str(folder),
        held_out=held_out_name,
        test_set=_test_set(folder_of_images, held_out_name),
        evaluated_on=datetime.datetime.now(datetime.UTC).date().isoformat(),
        num_images=len(held_out),
        num_people=None if held_out.groups is None else len(set(held_out.groups)),
        num_fitted_on=again,
        classes=list(trained.classes),
        is_multilabel=outcome.is_multilabel,
        **dataclasses.asdict(score(logits, held_out.labels, outcome.decided)),
        **dict(itertools.chain(*told)),
        calibration=trained.calibration,
        by=by,
        **dataclasses.asdict(together),
        more=dict(pair for evaluator in evaluators for pair in evaluator(outcome)),
    )
    if publish:
        write_json(folder / EVALUATION_FILE, found.model_dump(mode="json", include=set(Tested.model_fields)))
    return found


def _test_set(images: Any, held_out_name: str) -> str:
    if images is None:
        return f"held out: {held_out_name}"
    return Path(images).resolve().name if isinstance(images, (str, Path)) else "given in Python"


def _judged(
    images: Any, trained: Trained, folder: Path, data_root: str | Path | None, report: Report, *, refuse: bool
) -> tuple[ImageSet, Literal["test", "valid", "folder"], list[str]]:
    """`_held_out`; images that were trained on are refused, or told."""

    def tell(reason: str | None) -> None:
        if reason is not None and refuse:
            raise InputError(reason)
        if reason is not None:
            report(f"warning: {reason}")

    tell(_trained_on(images, folder, trained.recipe))
    held_out, name, names = _held_out(images, trained, folder, data_root, report)
    if (path := folder / OWNER / TRAINED_ON_FILE).exists():
        known = read_json(path)
        count = sum(digest in known for digest in held_out.digests())
        tell(f"{count} of these {len(held_out)} images were trained on: {_PROTECTED} Give others." if count else None)
    return held_out, name, names


def _held_out(
    images: Any, trained: Trained, folder: Path, data_root: str | Path | None, report: Report
) -> tuple[ImageSet, Literal["test", "valid", "folder"], list[str]]:
    """The images that a run is judged by, and what they are: those of a folder, with their names, or
    its own held-out ones.
    """
    if images is not None:
        if data_root is not None:
            raise InputError("a folder to score, and --data-root, where the run's own images lie: give one of them.")
        how = {**trained.decoding, "data": trained.recipe.data}
        if not isinstance(images, (str, Path)):
            return labelled_objects(images, trained.classes, **how), "folder", []
        judged, names = labelled_images(Path(images), trained.classes, report=report, **how)
        return judged, "folder", names
    root = None if data_root is None else Path(data_root)
    if root is None and (noted := read_place(folder, DATA_ROOT_FILE)) is not None:
        report(f"images of {noted}, as {folder / DATA_ROOT_FILE} says")
        root = noted
    given = ("mean", "std") if trained.recipe.model.init_from else ()  # they may be those of a library's weights
    data = trained.recipe.data.model_copy(update={key: list(trained.decoding[key]) for key in given})
    if data.name == "folder":  # labels are numbered as the model numbers them
        if root is None:
            raise InputError(
                f"{folder} does not say where its images lie: only its owner's note {DATA_ROOT_FILE} does. Name the "
                "folder by --data-root; or, of images in Python, give those to judge by: sfumato.evaluate(run, images)."
            )
        data = data.model_copy(update={"classes": list(trained.classes), "path": str(root)})
    dataset = loading.load_for(trained.recipe.model_copy(update={"data": data}), root, report)
    if (len(dataset.classes), dataset.train.shape) != (len(trained.classes), trained.shape):
        raise InputError(
            f"{folder} judges other images or classes than data set {data.name} has. Give a run that was trained on it."
        )
    return dataset.held_out, dataset.held_out_name, []


def _values_of(by: str, root: Path, names: Sequence[str], data: DataConfig) -> list[str]:
    """What the folder's table states of each image in one column."""
    stated = tables.column(root, by, data)
    values = [stated[name] for name in names]
    if len(set(values)) > _MOST_GROUPS:
        raise InputError(
            f"column {by!r} has {len(set(values))} different values, and groups are told of at most {_MOST_GROUPS}. "
            "Put what belongs together under one name in a column of its own."
        )
    return values


def _trained_on(folder_of_images: Any, folder: Path, recipe: Recipe) -> str | None:
    """What to say where that is the folder which the owner's note says the run was trained on, one above it, or a part
    of it that is not held out under `data.split`, or scored trials under `privacy.score_noise`: an exact accuracy
    would undo that noise.
    """
    noted = read_place(folder, DATA_ROOT_FILE)
    if noted is None or not isinstance(folder_of_images, (str, Path)):
        return None
    root, images = noted.resolve(), Path(folder_of_images).resolve()
    if not (root.is_relative_to(images) or images.is_relative_to(root)):
        return None
    inside = images.relative_to(root).parts if images.is_relative_to(root) else ()
    part = PART_MEANT.get(inside[0].casefold(), "") if inside else ""
    if images.is_file():  # a shard of a folder of archives
        part = part or part_said(images.stem) or ""
    has_scored = recipe.privacy is not None and recipe.privacy.score_noise is not None
    if part == "test" or (part == "valid" and recipe.data.split == "train" and not has_scored):
        return None
    return (
        f"{folder_of_images} is where this run's training images lie, or images that chose it: {_PROTECTED} Leave the "
        "folder out for the run's held-out images."
    )


def calibrate(
    run: str | Path,
    folder_of_images: Any = None,
    *,
    positive: str | None = None,
    sensitivity: float | None = None,
    specificity: float | None = None,
    publish: bool = False,
    data_root: str | Path | None = None,
    trust: Collection[str] = (),
    report: Report = lambda text: None,
) -> Calibration:
    """Fits probabilities and a threshold, and leaves them in the run folder for `evaluate` and
    `predict`. What is fitted is not private with respect to the images.

    Args:
        run: The run folder.
        folder_of_images: As in `evaluate`.
        positive: The class of two that is looked for; None: the second. Of several labels an image the one that gets a
            threshold; None: each that enough images tell of.
        sensitivity: Share of positive images to find; or
        specificity: share of the others to leave alone. Neither: the more probable class is named.
        publish: Write what is fitted into model.safetensors too, so that it goes with every copy. Its tensors stay.
        data_root, trust, report: As in `evaluate`.

    Raises:
        InputError: If the run or its images are not there, are too few, or are others.
    """
    if sensitivity is not None and specificity is not None:
        raise InputError("a threshold reaches a sensitivity or a specificity. Give one of them.")
    aim: calibration.Aim = "specificity" if sensitivity is None else "sensitivity"
    at = specificity if sensitivity is None else sensitivity
    folder = Path(run)
    trained = load(folder, trust)
    if positive is not None and at is None:
        raise InputError("a positive class is for a threshold. Give --sensitivity or --specificity too.")
    held_out, name, _ = _judged(folder_of_images, trained, folder, data_root, report, refuse=True)
    logits = trained.objective.decision_logits(predict_logits(trained.model, held_out)).double()
    offsets = trained.objective.offsets
    probable = calibration.with_offsets(logits, offsets)
    temperature, shifts = calibration.fit_temperature_and_shifts(probable, held_out.labels)
    if temperature is None:
        raise InputError(
            f"{len(held_out)} images are too few to calibrate with, or of one class, or the model's outputs are not "
            f"finite. Give a folder of at least {calibration.FEWEST_IMAGES} images that were not trained on, of all "
            "classes."
        )
    fitted = Calibration(
        temperature=temperature,
        offsets=offsets,
        shifts=shifts,
        fitted_on="folder" if name == "folder" else "held-out",
        is_multilabel=trained.objective.is_multilabel,
        num_images=len(held_out),
    )
    if at is not None:
        answers = fitted.probabilities(logits), held_out.labels, trained.classes
        found = calibration.fit_thresholds(*answers, positive=positive, aim=aim, at=at, report=report)
        several = [found.get(each) for each in trained.classes]
        if fitted.is_multilabel and positive is not None:
            report(f"every label but {positive} is named from 0.5 on")
        own = {"thresholds": several} if fitted.is_multilabel else {"threshold": found.popitem()[1]}
        fitted = fitted.model_copy(update=own)
    write_json(folder / calibration.CALIBRATION_FILE, fitted.as_json())
    if (folder / OWNER).is_dir():
        write_json(folder / OWNER / FITTED_ON_FILE, dict.fromkeys(held_out.digests(), 1), mode=0o600)
    if (folder / EVALUATION_FILE).exists():  # of decisions that are no more
        (folder / EVALUATION_FILE).unlink()
        report("the test set is out of the report, since decisions are others now: evaluate with --report again")
    if publish:
        path = folder / WEIGHTS_FILE
        metadata = read_model_file(path)[3] | {"calibration": fitted.model_dump_json()}
        write_with_metadata(path, path.read_bytes(), metadata)
    return fitted


def draw_reliability(found: Evaluation, path: Path) -> None:
    """The reliability diagram (Guo et al. 2017, Figure 1): on the line, what is said is as often right as it says.

    Raises:
        InputError: If the file's ending is unknown, or the model's outputs are not finite.
    """
    refuse_drawing(path, "--plot", FORMATS)
    if found.reliability is None:
        raise InputError("the model's outputs are not finite, so there are no probabilities to draw. Train again.")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    points = [(each.probability, each.right, *each.interval) for each in found.reliability]
    sureness, right, low, high = np.array(points).T
    axes.plot([0, 1], [0, 1], color="tab:gray", linestyle="--", label="as often right as it says")
    label = f"{found.num_images} images, 95 %"
    axes.errorbar(sureness, right, yerr=[right - low, high - right], fmt="o", capsize=3, label=label)
    axes.set(xlabel="probability of the class that is named", ylabel="how often it is right")
    axes.set(xlim=(0, 1), ylim=(0, 1), title=f"calibration error {100 * (found.calibration_error or 0.0):.2f} %")
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path)
