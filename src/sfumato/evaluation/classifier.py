"""A trained model as something that names classes."""

import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch

from sfumato.data.folders import decode_files
from sfumato.data.listing import check_file, find_files
from sfumato.data.pixels import Picture
from sfumato.errors import InputError, refusal
from sfumato.evaluation.calibration import uncalibrated
from sfumato.evaluation.scores import evaluation_finding, predict_logits
from sfumato.evaluation.trained import load as load_trained
from sfumato.json_record import Record
from sfumato.run_folder import record
from sfumato.run_folder.files import OWNER, SUMS_FILE

_AT_ONCE = 512
"""Images that are held in memory."""


class Prediction(Record):
    """The class of one image; None where the image cannot be read.

    Attributes:
        labels: Of a model of several labels an image, in the place of a class: those that are named.
        probability, probabilities: None where nobody has calibrated them
            (`sfumato.evaluation.calibration`).
        why: It cannot be read.
    """

    image: str
    class_name: str | None
    labels: list[str] | None = None
    probability: float | None = None
    probabilities: dict[str, float] | None = None
    why: str | None = None


class Classifier:
    """Names the classes of images. From a run folder: `sfumato.load("runs/x")`.

    Attributes:
        trained: The network and what using it needs.

    Args:
        run: The run folder.
        trust: Modules that may be imported for the model, each by its full name.

    Raises:
        InputError: If the run is not there, or is damaged.

    Example:
        >>> classifier = sfumato.load("runs/xrays")  # doctest: +SKIP
        >>> classifier.predict("new.png").class_name  # doctest: +SKIP
        'NORMAL'
    """

    def __init__(self, run: str | Path, trust: Collection[str] = ()) -> None:
        self.folder = Path(run)
        self.trained = load_trained(self.folder, trust)

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names, in label order."""
        return self.trained.classes

    @functools.cached_property
    def certificate(self) -> record.Certificate:
        """What the run claims: privacy.json.

        Raises:
            InputError: If the file is missing or damaged.
        """
        return record.read(self.folder / record.CERTIFICATE_FILE, record.Certificate)

    @property
    def is_calibrated(self) -> bool:
        """Whether probabilities mean what they say."""
        return self.trained.calibration is not None

    @property
    def dependence(self) -> str | None:
        """Why answers depend on which images are judged together; None if they do not."""
        finding = evaluation_finding(self.trained.model, self.trained.row)
        return None if finding is None else str(finding)

    @property
    def missing_threshold(self) -> str | None:
        """What to say of a copy that names the likelier of two classes, or several labels: its owner may have fitted a
        threshold. None: one is there, what decides was fitted on a folder, the run is one's own, or it is an export,
        which has what its owner fitted.
        """
        fitted = self.trained.calibration
        several = self.trained.objective.is_multilabel
        is_fitted = fitted is not None and (fitted.all_thresholds or fitted.fitted_on == "folder")
        is_whole = (self.folder / OWNER).exists() or (self.folder / SUMS_FILE).exists()
        if is_fitted or is_whole or (len(self.classes) != 2 and not several):
            return None
        remedy = "If its owner fitted one, ask for a model with it (sfumato calibrate --publish)"
        named = "each label is named from 0.5 on" if several else "the likelier class is named"
        return f"no threshold came with {self.folder}: {named}. {remedy}"

    @overload
    def predict(self, images: list[Any] | tuple[Any, ...]) -> list[Prediction]: ...
    @overload
    def predict(self, images: Any) -> Prediction: ...
    def predict(self, images: Any) -> Prediction | list[Prediction]:
        """Names the class of each image.

        Args:
            images: One image, which gives one prediction: a file, a PIL image, an array or a tensor
                (`sfumato.data.pixels.Picture`); or a list of such, of folders and patterns.

        Raises:
            InputError: If there is no image, or the model's outputs are not finite.
        """
        if isinstance(images, (list, tuple)):
            return list(self.each(images))
        if isinstance(images, (str, Path)) and Path(images).is_dir():
            raise InputError(f"{images} is a folder: give it in a list, since it holds many images.")
        return self.predict([images])[0]

    def predict_proba(self, images: Any) -> np.ndarray:
        """(N, classes): the probabilities of each image, in label order; NaN where it cannot be read.

        Raises:
            InputError: As `predict`; or if nobody has calibrated them.
        """
        if not self.is_calibrated:
            raise InputError(
                f"the probabilities of {self.folder} are not calibrated: fewer than 50 images were held out. Fit them "
                f"on labelled images: sfumato calibrate {self.folder} FOLDER"
            )
        found = self.predict(images if isinstance(images, (list, tuple)) else [images])
        rows = [list((row.probabilities or dict.fromkeys(self.classes, np.nan)).values()) for row in found]
        return np.array(rows, dtype=np.float64)

    def each(
        self, images: Sequence[Any], report: Callable[[int, int], None] = lambda done, of: None
    ) -> Iterable[Prediction]:
        """One prediction after another, in the order of the files: memory holds some images at once.

        Args:
            images: As of `predict`, a list.
            report: Is told how many of how many are done.
        """
        files = files_of(images)
        for start in range(0, len(files), _AT_ONCE):
            yield from self._named(files[start : start + _AT_ONCE])
            report(min(start + _AT_ONCE, len(files)), len(files))

    def _named(self, files: Sequence[tuple[Path | Picture, str | None]]) -> Iterator[Prediction]:
        paths = [path for path, why in files if why is None]
        images, reasons = decode_files(paths, **self.trained.decoding)
        outputs = predict_logits(self.trained.model, images) if paths else torch.zeros(0, len(self.classes))
        answers = iter(zip(self.trained.objective.decision_logits(outputs).double(), reasons, strict=True))
        for path, refused in files:
            row, why = next(answers) if refused is None else (torch.empty(0), refused)
            yield self._prediction(str(path), row[None], why)

    def _prediction(self, image: str, logits: torch.Tensor, why: str | None) -> Prediction:
        if why is not None:
            return Prediction(image=image, class_name=None, why=why)
        if not logits.isfinite().all():
            raise InputError(
                f"the model of {self.folder} gives no finite outputs, so it names no class. Train again with "
                "a smaller optimizer.learning_rate."
            )
        several = self.trained.objective.is_multilabel
        calibration = self.trained.calibration or uncalibrated(several)
        shares = dict(zip(self.classes, calibration.probabilities(logits)[0].tolist(), strict=True))
        told, (decided,) = shares if self.is_calibrated else None, calibration.decided(logits, self.classes)
        if several:
            labels = [self.classes[place] for place in decided.nonzero()[:, 0]]
            return Prediction(image=image, class_name=None, labels=labels, probabilities=told)
        name = self.classes[int(decided)]
        probability = None if told is None else told[name]
        return Prediction(image=image, class_name=name, probability=probability, probabilities=told)


def predict(run: str | Path, images: Sequence[str | Path], *, trust: Collection[str] = ()) -> list[Prediction]:
    """Names the class of each image: `Classifier.predict` in one call.

    Args:
        run: The run folder.
        images: Files, and folders of images.
        trust: Modules that may be imported for the model, each by its full name.

    Raises:
        InputError: See `Classifier`.
    """
    return load(run, trust).predict(list(images))


def files_of(images: Sequence[Any]) -> list[tuple[Path | Picture, str | None]]:
    """Every image among files, folders, patterns (`scans/*.png`) and what is in memory, and why one cannot be one.

    Raises:
        InputError: If not one is an image.
    """
    paths: list[Path | Picture] = []
    for number, image in enumerate(images):
        if not isinstance(image, (str, Path)):
            paths.append(Picture(image, f"image {number}"))
            continue
        path = Path(image)
        if path.is_dir():
            within = find_files(path)
            paths += [path / name for name in sorted([*(file.name for file in within.images), *within.others])]
        elif any(sign in path.name for sign in "*?[") and not path.exists():
            paths += sorted(filter(Path.is_file, path.parent.glob(path.name))) or [path]
        else:
            paths.append(path)
    found = [(path, refusal(check_file, path) if isinstance(path, Path) else None) for path in paths]
    if not found:
        what = ", ".join(map(str, images)) or "an empty list"
        raise InputError(f"there is no image in {what}. Name image files, or folders of them.")
    if all(why is not None for _, why in found):
        raise InputError(str(found[0][1]))
    return found


def load(run: str | Path, trust: Collection[str] = ()) -> Classifier:
    """A finished run as a `Classifier`.

    Args:
        run: The run folder.
        trust: Modules that may be imported for the model, each by its full name.

    Raises:
        InputError: See `Classifier`.
    """
    classifier = Classifier(run, trust)
    if (missing := classifier.missing_threshold) is not None:
        warnings.warn(missing, stacklevel=2)
    return classifier
