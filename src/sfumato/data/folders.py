"""A user's folder of images as a data set.

What is held out is decided by the folder's own test/ (valid/), else by a hash of each name (`layouts`); what is public
(classes, size, channels, normalisation) comes from the recipe and from folder names, never from pixels.
"""

import collections
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from sfumato.config import DataConfig, PrivacyConfig, Resize
from sfumato.data import decoding
from sfumato.data.catalogue import Facts
from sfumato.data.examples import Dataset, check_proportions
from sfumato.data.images import ImageSet, normalisation
from sfumato.data.layouts import (
    HELD_OUT_FRACTION,
    MOST_NAMED,
    beyond_limit,
    classes_of,
    holds_out_valid_alone,
    list_images,
    split,
    with_groups,
)
from sfumato.data.listing import ImageFile
from sfumato.data.objects import Given
from sfumato.data.pixels import Picture
from sfumato.data.store import FOR_OWNER, Report
from sfumato.errors import InputError

DEFAULT_IMAGE_SIZE = 32
DEFAULT_CHANNELS = 3
_LOOKED_AT = 1000
"""Images whose range is told."""


class Listing:
    """What the names in a folder say, all of it public but the images' own names; no image is opened yet.

    Attributes:
        root: The folder.
        files: All images, in the order of their names.
        classes: In label order.
        parts: The places of each part's files.
        held_out: The part that a run is judged by: "test" for `split = "train+valid"`, else "valid"; a folder with
            valid/ and no test/ holds out valid/ in either case.
        beyond: The places, among the training images, of those beyond the limit of their person.
        scale: Mean and standard deviation of each channel.
        facts: The public numbers. What is left out counts too.

    Args:
        config: The recipe's `data` section.
        root: The folder.
        report: Takes lines for the user (standard error).
        privacy: The recipe's section: of more training images of a group than `max_images_per_person` the rest is left
            out: marked as not readable. Which ones, a fixed hash of each name decides. None: ordinary training.
        given: Images that are in no folder.

    Raises:
        InputError: If a file is refused, a class has no training image, a group stands on
            both sides, or nothing is held out.
    """

    def __init__(
        self,
        config: DataConfig,
        root: Path,
        report: Report,
        privacy: PrivacyConfig | None = None,
        given: Given | None = None,
    ) -> None:
        self.config, self.root, self.report, self.privacy = config, root, report, privacy
        channels, half = config.channels or DEFAULT_CHANNELS, (0.5,)
        self.scale = normalisation(config.mean, config.std, channels, default=(half * channels, half * channels))
        size = config.image_size or DEFAULT_IMAGE_SIZE
        self._given: decoding.Decoded | None
        files, self._given = given.read(config, size, channels) if given else (list_images(config, root, report), None)
        self.files = with_groups(config, files, root, report)
        self.classes = classes_of(config, root, self.files)
        check_proportions(config, len(self.classes))
        self.parts = split(self.files, config.split)
        is_valid = config.split == "train" or holds_out_valid_alone(self.files)
        self.held_out: Literal["test", "valid"] = "valid" if is_valid else "test"
        train = [self.files[place] for place in self.parts["train"]]
        self.is_multilabel = any(item.findings is not None for item in self.files)
        missing = [name for name in self.classes if name not in {item.label for item in train}]
        if missing and not self.is_multilabel:
            remedy = "Add images of it, or take it out of data.classes and of the folder."
            raise InputError(f"class {missing[0]} has no training image. {remedy}")
        if not self.parts[self.held_out]:
            remedy = f"Add images, or put the classes into train/ and {self.held_out}/."
            raise InputError(f"not one image is held out ({self.held_out}). {remedy}")
        limit = None if privacy is None else privacy.max_images_per_person
        self.beyond = beyond_limit(train, limit)
        people = None if config.group_by is None else len({item.group for item in train})
        self.facts = Facts(len(train), len(self.classes), size, channels, people, self.is_multilabel)
        self._report_listing(train, limit)

    def judged_by(self, on_test: bool) -> tuple[Literal["valid", "test"], int]:
        """The part that accuracies are measured on, and how many images it has."""
        if on_test and holds_out_valid_alone(self.files):
            remedy = 'Add test/, or leave data.held_out = "test" and privacy.score_noise out.'
            raise InputError(
                f"accuracies are asked for on test images, and {self.root} has valid/ but no test/. {remedy}"
            )
        part: Literal["valid", "test"] = "test" if on_test else self.held_out
        return part, len(self.parts[part])

    def load(self, on_test: bool = False) -> Dataset:
        """The images, decoded.

        An image that cannot be decoded is named by `report`, keeps its place and is marked as not
        readable, so that N and the number of held-out files stay what they were.

        Args:
            on_test: Hold out the test images, whatever the split.

        Raises:
            InputError: If no image of a part can be decoded, or there are no test images to hold out.
        """
        held_out, _ = self.judged_by(on_test)
        everything = self._decoded()
        train, judged = everything.subset(self.parts["train"]), everything.subset(self.parts[held_out])
        for name, part in (("training", train), (f"held-out ({held_out})", judged)):
            if not part.readable.any():
                raise InputError(f"{self.root}: not one {name} image can be decoded. Convert them, for example to PNG.")
            _refuse_unknown(part, f"the {name} images")
        counted = train.readable.clone()
        counted[self.beyond] = False
        return Dataset("folder", self.classes, dataclasses.replace(train, readable=counted), judged, held_out)

    def _decoded(self) -> ImageSet:
        size, channels, resize = self.config.stored_size(self.facts.image_size), self.facts.channels, self.config.resize
        decoded = self._given or decoding.decode_cached(
            self.root, self.files, image_size=size, channels=channels, resize=resize, report=self.report
        )
        decoding.report_unreadable((str(self.root / file.name) for file in self.files), decoded.reasons, self.report)
        self._report_cut(decoded.kept, "images")
        self._report_copies(decoded)
        white = np.iinfo(decoding.stored_type(self.facts.channels)).max
        places = decoded.readable.nonzero()[:: max(1, len(decoded.images) // _LOOKED_AT), 0]
        some = decoded.images.numpy()[places]  # not all of what lies on disk
        if some.size and int(some.max()) - int(some.min()) <= white // 16:
            self.report(
                "warning: no two pixels of the images differ by more than a sixteenth of white. Are they of 12 bits in "
                "files of 16? Convert them, or let the files say so: PNG by sBIT, DICOM by its stored bits or a window "
                f"(WindowCenter, WindowWidth). {FOR_OWNER}"
            )
        groups = None if self.config.group_by is None else [str(item.group) for item in self.files]
        return decoded.seen(self.facts.image_size, self.scale, _labels(self.files, self.classes), groups)

    def report_first(self) -> None:
        """Says to the owner whether pictures lose much of their area, by the first file of each kind alone."""
        first = {Path(file.name).suffix.lower(): file for file in reversed(self.files)}
        decoded = decoding.decode_images(list(first.values()), image_size=DEFAULT_IMAGE_SIZE, channels=1)
        self._report_cut(decoded.kept, "images, one of each kind of file looked at,")

    def _report_cut(self, kept: np.ndarray, what: str) -> None:
        cut = int((kept < np.float32(2 / 3)).sum())
        if cut and self.config.resize == "crop":
            self.report(
                f"warning: {what} that lose more than a third of their area, since the centred square is taken: "
                f"{cut} of {len(kept)}. Take --set data.resize=pad, or stretch, to keep all of each. {FOR_OWNER}"
            )

    def _report_copies(self, decoded: decoding.Decoded) -> None:
        """Says to the owner how many files hold the same image: the guarantee is for each file alone, or for the files
        of each group, and of what was trained on no accuracy tells anything.
        """
        alike: dict[bytes, list[int]] = collections.defaultdict(list)
        for place, (row, reason) in enumerate(zip(decoded.digests, decoded.reasons, strict=True)):
            if reason is None:
                alike[row.tobytes()].append(place)
        train = set(self.parts["train"])
        judged = [same for same in alike.values() if train & set(same) and set(same) - train]
        beside, means = "files that are copies of others", "Each counts as an image of its own: take copies out."
        if self.privacy is not None and self.privacy.unit == "person":  # copies within a group are covered together
            alike = {row: list({self.files[at].group: at for at in same}.values()) for row, same in alike.items()}
            beside = "files that are copies of files of other groups (people)"
            means = "Epsilon holds for each group alone: take copies out, or give a person one group (data.group_by)."
        elif self.privacy is not None:
            means = (
                "Each counts as an image of its own, so an image with copies is protected less than epsilon says: take "
                "copies out, or group them and take people as the unit (data.group_by, --epsilon-per-person)."
            )
        copied = [same for same in alike.values() if len(same) > 1]
        if copied:
            count = sum(map(len, copied)) - len(copied)
            what = f"{beside}, the same pixels after resizing: {count} ({self._named(copied)})"
            self.report(f"warning: {what}. {means} {FOR_OWNER}")
        if judged:
            self.report(
                f"warning: held-out images that are copies of training images: {len(judged)} ({self._named(judged)}). "
                f"Accuracies on them tell nothing of new images: take them out. {FOR_OWNER}"
            )

    def _named(self, copied: list[list[int]]) -> str:
        shown = [[self.files[place].name for place in same[:MOST_NAMED]] for same in copied[:MOST_NAMED]]
        return "; ".join(" = ".join(names) for names in shown)

    def _report_listing(self, train: Sequence[ImageFile], limit: int | None) -> None:
        """Says to the owner what was found, and what counts."""
        config, report = self.config, self.report
        if config.classes is None:
            report(f"classes, public because folders are named so: {', '.join(self.classes)}")
        if config.class_proportions is not None and config.classes is None:
            report(f"data.class_proportions are taken in the order {', '.join(self.classes)}")
        how = f"{self.held_out}/"
        if self.held_out not in {item.part for item in self.files}:
            what = "image" if config.group_by is None else "group"
            how = f"{HELD_OUT_FRACTION:.0%}, by a fixed hash of each {what}'s name"
        counts = collections.Counter(item.label for item in train)
        if self.is_multilabel:
            columns = zip(*(item.findings or () for item in train), strict=True)
            counts = collections.Counter(dict(zip(self.classes, (each.count(1) for each in columns), strict=True)))
            report(f"an image may have several of {len(self.classes)} labels, or none (data.task = multilabel)")
        shown = ", ".join(f"{name} {counts[name]}" for name in self.classes[:MOST_NAMED])
        shown += ", ..." if len(self.classes) > MOST_NAMED else ""
        num_held_out = len(self.parts[self.held_out])
        kept = f", of which {len(train) - len(self.beyond)} contribute" if self.beyond else ""
        valid = sum(item.part == "valid" for item in train)
        kept += f", {valid} of them in valid/" if valid else ""
        report(f"{len(train)} images to train on{kept} ({shown}), {num_held_out} held out as {self.held_out} ({how})")
        if config.group_by is not None:
            sizes = collections.Counter(item.group for item in train).values()
            report(f"they are of {len(sizes)} groups (people) with {min(sizes)} to {max(sizes)} images each")
            if max(sizes) == 1:
                report(f"warning: no group has two images: does data.group_by = {config.group_by!r} read the person?")
        if self.beyond:
            people = len({train[place].group for place in self.beyond})
            report(
                f"{len(self.beyond)} of these beyond privacy.max_images_per_person = {limit} ({people} of the groups) "
                f"are left out: they contribute nothing. A fixed hash of names decides which. {FOR_OWNER}"
            )


def decode_files(
    files: Sequence[Path | ImageFile | Picture],
    *,
    image_size: int,
    channels: int,
    mean: Sequence[float],
    std: Sequence[float],
    resize_ratio: float = 1.0,
    resize: Resize = "crop",
) -> tuple[ImageSet, list[str | None]]:
    """Images to be classified. Nothing of them is cached.

    Args:
        files: Image files.
        image_size: What the model was trained with; `resize_ratio`, `resize`, `channels`, `mean` and `std` likewise.

    Returns:
        The images, with label 0 throughout; `readable` says which to believe, and why not the
        others.
    """
    size = round(resize_ratio * image_size)
    decoded = decoding.decode_images(files, image_size=size, channels=channels, resize=resize)
    return decoded.seen(image_size, (tuple(mean), tuple(std))), decoded.reasons


def labelled_images(
    root: Path, classes: Sequence[str], *, report: Report, data: DataConfig, **preprocessing: Any
) -> tuple[ImageSet, list[str]]:
    """All readable images of a folder, whatever part they lie in, with their labels, to judge a model
    by, and their names. Nothing of them is cached.

    Args:
        root: The folder, in any layout that training takes.
        classes: Of the model, in its order.
        report: Takes the names of images that cannot be decoded, and are left out.
        data: Of the model's recipe: what is left out, and whose each image is; where that says nothing of these images
            they have no groups, and `report` is told.
        preprocessing: What the model was trained with, as for `decode_files`.

    Raises:
        InputError: If a file is refused, an image is of another class, or none can be decoded.
    """
    stated = {"classes": list(classes), "layout": None, "task": data.task or "classes"}
    config = data.model_copy(update=stated)
    with tempfile.TemporaryDirectory(prefix="sfumato-") as own:  # for its owner alone
        files = list_images(config, root, report, needs_train=False, unpack_to=Path(own))
        classes_of(config, root, files)
        groups = None
        if config.group_by is not None:
            try:
                groups = [str(file.group) for file in with_groups(config, files, root, report)]
            except InputError as error:
                report(f"intervals take images to be of different people: {error}")
        images, reasons = decode_files(files, **preprocessing)
    decoding.report_unreadable((str(root / file.name) for file in files), reasons, report)
    images = dataclasses.replace(images, labels=_labels(files, classes), groups=groups)
    if not images.readable.any():
        raise InputError(f"{root}: not one image can be decoded. Convert the images, for example to PNG.")
    _refuse_unknown(images, "these images")
    kept = images.readable.nonzero()[:, 0].tolist()
    return images.subset(kept), [files[place].name for place in kept]


def labelled_objects(given: Any, classes: Sequence[str], *, data: DataConfig, **preprocessing: Any) -> ImageSet:
    """The same of what a caller has in Python, as `sfumato.train` takes it; refused if an image cannot be decoded.
    Whose each image is may be left out.

    Raises:
        InputError: If it is no data set of these classes.
    """
    size, channels, mean, std = (preprocessing[key] for key in ("image_size", "channels", "mean", "std"))
    config = data.model_copy(update={"classes": list(classes), "group_by": None})
    files, decoded = Given(given).read(config, size, channels)
    for file, reason in zip(files, decoded.reasons, strict=True):
        if reason is not None:
            raise InputError(f"{file.name} cannot be read: {reason}. Leave it out.")
    own = [str(file.group) for file in files] if all(file.group for file in files) else None
    images = decoded.seen(size, (tuple(mean), tuple(std)), _labels(files, classes), own)
    _refuse_unknown(images, "these images")
    return images


def _refuse_unknown(images: ImageSet, which: str) -> None:
    if not (images.labels[images.readable] >= 0).any():
        raise InputError(f"not one label is known of {which}. State some, or leave the images out.")


def _labels(files: Sequence[ImageFile], classes: Sequence[str]) -> torch.Tensor:
    if files and files[0].findings is not None:
        return torch.tensor([file.findings for file in files], dtype=torch.int64)
    places = {name: label for label, name in enumerate(classes)}
    return torch.tensor([places[file.label] for file in files], dtype=torch.int64)
