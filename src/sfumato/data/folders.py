"""A user's folder of images as a data set.

Four layouts: `<class>/*`, `{train,valid,test}/<class>/*`, a table of labels (its images in
{train,valid,test}/ or anywhere; `sfumato.data.tables`), or archives (`sfumato.data.archives`). What
is held out is decided by the folder's own test/ (valid/), else by `splitting`'s hash of each name;
what is public (classes, size, channels, normalisation) comes from the recipe and from folder names,
never from pixels.
"""

import collections
import dataclasses
import hashlib
import tempfile
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from sfumato.config import DataConfig
from sfumato.data import decoding
from sfumato.data.archives import unpacking
from sfumato.data.cache import decode_cached
from sfumato.data.catalogue import Facts
from sfumato.data.examples import Dataset, check_proportions
from sfumato.data.folder_labels import MOST_NAMED, classes_of, files_with_labels, of_archives
from sfumato.data.images import ImageSet, normalisation
from sfumato.data.listing import LabelledFile, find_notes
from sfumato.data.splitting import HELD_OUT_FRACTION, hash_fraction, is_held_out
from sfumato.errors import InputError

DEFAULT_IMAGE_SIZE = 32
DEFAULT_CHANNELS = 3

Part = Literal["train", "valid", "test"]


def load_folder(
    config: DataConfig, root: Path, report: Callable[[str], None], images_per_person: int | None = None
) -> Dataset:
    """Lists, splits and decodes a folder of images.

    An image that cannot be decoded is named by `report`, keeps its place and is marked as not
    readable, so that N and the number of held-out files stay what they were.

    Args:
        config: The recipe's `data` section.
        root: The folder.
        report: Takes lines for the user (standard error).
        images_per_person: Of more training images of a group the rest is left out: marked as not
            readable. Which ones, a fixed hash of each name decides. None: no limit.

    Returns:
        The data set. `split = "train+valid"` holds out "test": test/ if there is one, else
        20 %. `split = "train"` leaves those out and holds out "valid": valid/ if there is
        one, else 20 % of the rest. A folder with valid/ and no test/ holds out valid/ in
        either case.

    Raises:
        InputError: If a file is refused, a class has no training image, a group stands on
            both sides, or nothing is held out.
    """
    listing = _list(config, root, report)
    mean, std = _normalisation(config, listing.channels)
    chosen = [*listing.train, *listing.held_out]
    size = config.stored_size(listing.image_size)
    decoded = decode_cached(
        root, [item.file for item in chosen], image_size=size, channels=listing.channels, report=report
    )
    _report_unreadable([str(root / item.file.name) for item in chosen], decoded, report)
    _report_copies([item.file.name for item in chosen], decoded, report)
    counts = torch.ones(len(chosen), dtype=torch.bool)
    counts[_above(listing.train, images_per_person, report)] = False
    everything = ImageSet(
        stored=decoded.images,
        labels=torch.tensor([listing.classes.index(item.label) for item in chosen], dtype=torch.int64),
        readable=decoded.readable & counts,
        mean=mean,
        std=std,
        max_value=decoded.max_value,
        groups=None if config.group_by is None else [str(item.group) for item in chosen],
        crop=listing.image_size if size > listing.image_size else None,
        digests=decoded.digests,
    )
    train = everything.subset(list(range(len(listing.train))))
    held_out = everything.subset(list(range(len(train), len(chosen))))
    for name, part in (("training", train), (f"held-out ({listing.held_out_name})", held_out)):
        if not part.readable.any():
            raise InputError(
                f"{root}: not one {name} image can be decoded. See the reasons above, and convert "
                "the images, for example to PNG."
            )
    return Dataset("folder", listing.classes, train, held_out, listing.held_out_name)


def _normalisation(config: DataConfig, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return normalisation(config.mean, config.std, channels, default=((0.5,) * channels, (0.5,) * channels))


def _above(train: Sequence[LabelledFile], limit: int | None, report: Callable[[str], None]) -> list[int]:
    """The places of images beyond the limit of their group, all but those whose names' hashes are
    smallest: no pixel and no other group decides.
    """
    if limit is None or all(item.group is None for item in train):
        return []
    places: dict[str, list[int]] = collections.defaultdict(list)
    for place, item in enumerate(train):
        places[str(item.group)].append(place)
    above: list[int] = []
    for group in places.values():
        order = sorted(group, key=lambda place: hash_fraction("kept", train[place].hashed or train[place].file.name))
        above += order[limit:]
    if above:
        people = sum(len(group) > limit for group in places.values())
        report(
            f"{len(above)} of these beyond privacy.max_images_per_person = {limit} ({people} of the groups) are left "
            "out: they contribute nothing. A fixed hash of each name decides which. These numbers are private"
        )
    return above


def folder_facts(
    config: DataConfig, root: Path, report: Callable[[str], None], images_per_person: int | None = None
) -> Facts:
    """The public numbers of a folder, by the names of its files alone. What is left out counts too.

    Raises:
        InputError: As `load_folder` does for what it sees before decoding.
    """
    listing = _list(config, root, report)
    _normalisation(config, listing.channels)
    _above(listing.train, images_per_person, report)
    people = None if config.group_by is None else len({item.group for item in listing.train})
    return Facts(len(listing.train), len(listing.classes), listing.image_size, listing.channels, people)


def decode_files(
    files: Sequence[Path],
    *,
    image_size: int,
    channels: int,
    mean: Sequence[float],
    std: Sequence[float],
    resize_ratio: float = 1.0,
) -> tuple[ImageSet, list[str | None]]:
    """Images to be classified. Nothing of them is cached.

    Args:
        files: Image files.
        image_size: What the model was trained with; `resize_ratio`, `channels`, `mean` and
            `std` likewise.

    Returns:
        The images, with label 0 throughout; `readable` says which to believe, and why not the
        others.
    """
    size = round(resize_ratio * image_size)
    try:
        decoded = decoding.decode_images(files, image_size=size, channels=channels)
    except InputError:  # one file is too large, say: the others are read all the same
        each = [_decoded_alone(file, size, channels) for file in files]
        decoded = decoding.Decoded(torch.cat([one.images for one in each]), [one.reasons[0] for one in each])
    images = ImageSet(
        decoded.images,
        torch.zeros(len(files), dtype=torch.int64),
        decoded.readable,
        tuple(mean),
        tuple(std),
        decoded.max_value,
        crop=image_size if size > image_size else None,
    )
    return images, decoded.reasons


def _decoded_alone(file: Path, size: int, channels: int) -> decoding.Decoded:
    try:
        return decoding.decode_images([file], image_size=size, channels=channels)
    except InputError as error:
        blank = np.zeros((1, channels, size, size), decoding.stored_type(channels))
        return decoding.Decoded(torch.from_numpy(blank), [str(error)])


def labelled_images(
    root: Path,
    classes: Sequence[str],
    *,
    image_size: int,
    channels: int,
    mean: Sequence[float],
    std: Sequence[float],
    report: Callable[[str], None],
    resize_ratio: float = 1.0,
    group_by: str | None = None,
) -> tuple[ImageSet, list[str]]:
    """All readable images of a folder, whatever part they lie in, with their labels, to judge a model
    by, and their names. Nothing of them is cached.

    Args:
        root: The folder, in any layout that training takes.
        classes: Of the model, in its order.
        image_size: What the model was trained with; `resize_ratio`, `channels`, `mean` and
            `std` likewise.
        report: Takes the names of images that cannot be decoded, and are left out.
        group_by: As `data.group_by`, whose each image is; where that says nothing of these images they
            have no groups, and `report` is told.

    Raises:
        InputError: If a file is refused, an image is of another class, or none can be decoded.
    """
    config = DataConfig(name="folder", classes=list(classes), group_by=group_by)
    size = round(resize_ratio * image_size)
    found = unpacking.shards(root)
    with tempfile.TemporaryDirectory(prefix="sfumato-") as own:  # for its owner alone
        if found:
            unpacking.unpack(found, Path(own), report)

        def listed(config: DataConfig) -> list[LabelledFile]:
            if found:
                return of_archives(config, root, unpacking.labelled(Path(own)) or [], report)
            return files_with_labels(config, root, report, needs_train=False)

        try:
            files = listed(config)
        except InputError as error:
            if group_by is None:
                raise
            files = listed(config.model_copy(update={"group_by": None}))
            report(f"intervals take images to be of different people: {error}")
        classes_of(config, root, files)
        decoded = decoding.decode_images([item.file.path for item in files], image_size=size, channels=channels)
    _report_unreadable([str(root / item.file.name) for item in files], decoded, report)
    labels = torch.tensor([tuple(classes).index(item.label) for item in files], dtype=torch.int64)
    images = ImageSet(
        decoded.images,
        labels,
        decoded.readable,
        tuple(mean),
        tuple(std),
        decoded.max_value,
        crop=image_size if size > image_size else None,
        groups=[str(item.group) for item in files] if all(item.group for item in files) else None,
    )
    if not images.readable.any():
        raise InputError(f"{root}: not one image can be decoded. Convert the images, for example to PNG.")
    kept = images.readable.nonzero()[:, 0].tolist()
    return images.subset(kept), [files[place].file.name for place in kept]


def split(files: Sequence[LabelledFile], which: Literal["train", "train+valid"]) -> dict[Part, list[LabelledFile]]:
    """Which images train and which are held out, by the folder's parts or by the hash of each name
    alone.

    Args:
        files: The listed images; their groups, where given, are hashed instead of their paths.
        which: "train" sets "valid" apart from the training images; "train+valid" does not, unless
            the folder has valid/ and no test/: that is then its only held-out part.

    Raises:
        InputError: If a group would have images on both sides.
    """
    given = {item.part for item in files}
    valid_alone = _holds_out_valid_alone(files)
    parts: dict[Part, list[LabelledFile]] = {"train": [], "valid": [], "test": []}
    sides: dict[str, tuple[Part, LabelledFile]] = {}
    for item in files:
        name = item.group or item.hashed or item.file.name
        part: Part = "train"
        if valid_alone:
            part = "valid" if item.part == "valid" else "train"
        elif item.part == "test" if "test" in given else is_held_out("test", name):
            part = "test"
        elif which == "train" and (item.part == "valid" if "valid" in given else is_held_out("valid", name)):
            part = "valid"
        if item.group is not None:
            other, first = sides.setdefault(item.group, (part, item))
            if other != part:
                raise InputError(
                    f"group {item.group} has images on both sides: {first.file.name} ({other}) "
                    f"and {item.file.name} ({part}). Move all images of a group into one part."
                )
        parts[part].append(item)
    return parts


def _holds_out_valid_alone(files: Sequence[LabelledFile]) -> bool:
    """Whether the folder's owner held out valid/ and nothing else: training on it would surprise."""
    given = {item.part for item in files}
    return "valid" in given and "test" not in given


@dataclasses.dataclass(frozen=True)
class _Listing:
    """Everything about a folder that is public, and which file stands where."""

    classes: tuple[str, ...]
    train: list[LabelledFile]
    held_out: list[LabelledFile]
    held_out_name: Literal["test", "valid"]
    image_size: int
    channels: int


def _list(config: DataConfig, root: Path, report: Callable[[str], None]) -> _Listing:
    files = files_with_labels(config, root, report)
    classes = classes_of(config, root, files)
    check_proportions(config, len(classes))
    if config.classes is None:
        report(f"classes, public because folders are named so: {', '.join(classes)}")
    if config.group_by is not None:
        _warn_of_like_groups({str(item.group) for item in files}, report)
    notes = find_notes(root)
    if notes:
        more = f" and {len(notes) - 3} more" if len(notes) > 3 else ""
        report(f"passed over: {', '.join(notes[:3])}{more}")
    parts = split(files, config.split)
    on_valid = config.split == "train" or _holds_out_valid_alone(files)
    held_out_name: Literal["test", "valid"] = "valid" if on_valid else "test"
    train, held_out = parts["train"], parts[held_out_name]
    what = "image" if config.group_by is None else "group"
    how = (
        f"{held_out_name}/"
        if held_out_name in {item.part for item in files}
        else f"{HELD_OUT_FRACTION:.0%}, by a fixed hash of each {what}'s name"
    )
    counts = collections.Counter(item.label for item in train)
    shown = ", ".join(f"{name} {counts[name]}" for name in classes[:MOST_NAMED])
    shown += ", ..." if len(classes) > MOST_NAMED else ""
    report(f"{len(train)} images to train on ({shown}), {len(held_out)} held out as {held_out_name} ({how})")
    if config.group_by is not None:
        sizes = collections.Counter(str(item.group) for item in train)
        report(
            f"they are of {len(sizes)} groups (people) with {min(sizes.values())} to {max(sizes.values())} images each"
        )
        if max(sizes.values()) == 1:
            report(f"warning: no group has two images: does data.group_by = {config.group_by!r} read the person?")
    if config.class_proportions is not None and config.classes is None:
        report(f"data.class_proportions are taken in the order {', '.join(classes)}")
    present = {item.label for item in train}
    for name in classes:
        if name not in present:
            raise InputError(
                f"class {name} has no training image. Add images of it, or take it out of "
                "data.classes and of the folder."
            )
    if not held_out:
        raise InputError(f"not one image is held out ({held_out_name}). Add images, or a {held_out_name}/ folder.")
    return _Listing(
        classes,
        train,
        held_out,
        held_out_name,
        config.image_size or DEFAULT_IMAGE_SIZE,
        config.channels or DEFAULT_CHANNELS,
    )


def _report_unreadable(names: Sequence[str], decoded: decoding.Decoded, report: Callable[[str], None]) -> None:
    for name, reason in zip(names, decoded.reasons, strict=True):
        if reason is not None:
            report(f"unreadable image {name}: {reason}; it contributes nothing")


def _report_copies(names: Sequence[str], decoded: decoding.Decoded, report: Callable[[str], None]) -> None:
    """Says to the owner how many files hold the same image: the guarantee is for each file alone.
    The number is private.
    """
    alike: dict[bytes, list[str]] = {}
    for name, pixels, reason in zip(names, decoded.images.numpy(), decoded.reasons, strict=True):
        if reason is None:
            alike.setdefault(hashlib.sha256(pixels.tobytes()).digest(), []).append(name)
    copied = [same for same in alike.values() if len(same) > 1]
    if copied:
        shown = "; ".join(" = ".join(same[:MOST_NAMED]) for same in copied[:MOST_NAMED])
        count = sum(map(len, copied)) - len(copied)
        report(
            f"warning: files that are copies of others, the same pixels after resizing: {count} "
            f"({shown}). Each counts as an image of its own, so an image with copies is protected "
            "less than epsilon says: take copies out, or group them (data.group_by). This number "
            "is private."
        )


def _warn_of_like_groups(groups: set[str], report: Callable[[str], None]) -> None:
    """Says to the owner which groups are apart by case, width or the like alone: one person
    perhaps, counted as several.
    """
    alike: dict[str, list[str]] = {}
    for group in sorted(groups):
        alike.setdefault(unicodedata.normalize("NFKC", group).casefold(), []).append(group)
    same = [" / ".join(spellings) for spellings in alike.values() if len(spellings) > 1]
    if same:
        report(
            "warning: groups that differ by upper and lower case or the like are different "
            f"people here: {', '.join(same[:MOST_NAMED])}"
        )
