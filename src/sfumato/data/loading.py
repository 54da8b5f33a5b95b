"""Data sets by name: public benchmark images, or a user's folder."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from sfumato.config import DataConfig, Recipe
from sfumato.data import benchmarks, folders
from sfumato.data.catalogue import NAMED, Facts, NamedSet, public_facts
from sfumato.data.examples import Dataset, check_proportions
from sfumato.data.images import ImageSet, normalisation
from sfumato.data.splitting import hold_out
from sfumato.errors import InputError


class Listed(Protocol):
    """A data set of which names and numbers are known, and no image is read yet."""

    @property
    def facts(self) -> Facts:
        """Its public numbers."""

    def load(self, on_test: bool = False) -> Dataset:
        """Its images; with `on_test` the test images are held out, whatever the split.

        Raises:
            InputError: If a file is missing or damaged, or there are no such images.
        """


def list_images(
    config: DataConfig, data_root: Path | None, report: Callable[[str], None], limit: int | None = None
) -> Listed:
    """Lists the data set that a recipe asks for, once.

    Args:
        config: The recipe's `data` section.
        data_root: For a folder, the folder itself (else `config.path`); for a named data set
            the folder that holds it (else `config.path`, else SFUMATO_DATA). Digits need none.
        report: Takes lines for the user: progress, images that cannot be read.
        limit: Of more training images of one person the rest contributes nothing.

    Raises:
        InputError: If the recipe contradicts the data, or a file of a folder is refused.
    """
    if config.name == "folder":
        return folders.list_folder(config, _folder(config, data_root), report, limit)
    return _NamedListing(config, data_root, report)


def list_for(recipe: Recipe, data_root: Path | None, report: Callable[[str], None]) -> Listed:
    """The same for a run of this recipe."""
    return list_images(recipe.data, data_root, report, images_per_person(recipe))


def images_per_person(recipe: Recipe) -> int | None:
    """Of how many training images of a person the rest is left out; None: no limit."""
    return None if recipe.privacy is None else recipe.privacy.max_images_per_person


def is_judged_on_test(recipe: Recipe) -> bool:
    """Whether a run of this recipe holds out the test images: where the recipe asks for them, and where the
    validation images score under `privacy.score_noise`, since an exact accuracy on them would undo that noise.
    """
    is_scored = recipe.privacy is not None and recipe.privacy.score_noise is not None
    return is_scored or recipe.data.held_out == "test"


def facts(config: DataConfig, data_root: Path | None, report: Callable[[str], None], limit: int | None = None) -> Facts:
    """The public numbers of the data set; of a folder by its files' names, without decoding an
    image.

    Raises:
        InputError: As `list_images`.
    """
    return list_images(config, data_root, report, limit).facts


def load(
    config: DataConfig, data_root: Path | None, report: Callable[[str], None], limit: int | None = None
) -> Dataset:
    """The data set that a recipe asks for.

    Raises:
        InputError: As `list_images` and `Listed.load`.
    """
    return list_images(config, data_root, report, limit).load()


def load_for(recipe: Recipe, data_root: Path | None, report: Callable[[str], None]) -> Dataset:
    """The data set that a run of this recipe trains on, held out what its accuracies are measured on.

    Raises:
        InputError: As `list_images` and `Listed.load`.
    """
    return list_for(recipe, data_root, report).load(is_judged_on_test(recipe))


def _folder(config: DataConfig, data_root: Path | None) -> Path:
    """A folder is private data: it is named for each run, never found by SFUMATO_DATA."""
    if config.num_examples is not None:
        raise InputError(
            f"data.num_examples = {config.num_examples} does not fit a folder, whose images are "
            "counted. Take the key out."
        )
    if data_root is None and config.path is None:
        raise InputError(
            "the recipe trains on a folder of images and none is named. Give it by --data-root FOLDER or data.path."
        )
    return data_root if data_root is not None else Path(str(config.path))


@dataclasses.dataclass(frozen=True, eq=False)
class _NamedListing:
    """Public benchmark images, of which all numbers are known."""

    config: DataConfig
    data_root: Path | None
    report: Callable[[str], None]

    def __post_init__(self) -> None:
        _normalisation(self.config, NAMED[self.config.name])
        assert self.facts  # refuses more images than there are, before a file is read

    @property
    def facts(self) -> Facts:
        known = public_facts(self.config)
        assert known is not None
        return known

    def load(self, on_test: bool = False) -> Dataset:
        config, named = self.config, NAMED[self.config.name]
        everything = self._read()
        total = len(everything)
        if config.name == "digits":
            train, test = hold_out("digits test", total, named.num_test)
        else:
            train, test = list(range(named.num_train)), list(range(named.num_train, total))
        held_out = test
        num_examples = config.num_examples or named.num_train
        is_split = config.split == "train"
        on_test = on_test or (config.held_out == "test" and not named.num_valid)
        if is_split and named.num_valid:
            kept, valid = hold_out(f"{config.name} valid", len(train), named.num_valid)
            num_examples = min(num_examples, len(kept))
            held_out = test if on_test else [train[i] for i in valid]
        elif is_split and not on_test:
            raise InputError(
                f"data set {config.name} has no validation images. Set data.held_out=test: its test images."
            )
        # In one order for both splits: as many images as "train" has are those of "train".
        portion, _ = hold_out(f"{config.name} valid", len(train), len(train) - num_examples)
        return Dataset(
            config.name,
            named.classes,
            everything.subset([train[i] for i in portion]),
            everything.subset(held_out),
            "valid" if is_split and not on_test else "test",
        )

    def _read(self) -> ImageSet:
        """All images, the training part first."""
        config, named = self.config, NAMED[self.config.name]
        mean, std = _normalisation(config, named)
        seen = config.image_size or named.shape[1]
        size = config.stored_size(seen)
        root = self.data_root or (Path(config.path) if config.path else None)
        raw = benchmarks.read(config.name, named, _root(root), size, self.report)
        total = named.num_train + named.num_test
        expected = (total, *named.shape) if not named.folders else (total, *raw.images.shape[1:])
        if raw.images.shape != expected or raw.labels.shape != (total,):
            raise InputError(
                f"data set {config.name}: its files hold {tuple(raw.images.shape)}, not "
                f"{(total, *named.shape)}. Put the original files there."
            )
        return ImageSet(
            raw.images,
            raw.labels,
            raw.readable,
            mean,
            std,
            named.max_value,
            image_size=None if named.folders or size == named.shape[1] else size,
            crop=seen if size > seen else None,
            store=raw.store,
        )


def _normalisation(config: DataConfig, named: NamedSet) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of a recipe that agrees with the data set."""
    _check_agrees(config, named)
    channels = config.channels or named.shape[0]
    repeat = channels // named.shape[0]  # grey images as colour
    return normalisation(config.mean, config.std, channels, default=(named.mean * repeat, named.std * repeat))


def _check_agrees(config: DataConfig, named: NamedSet) -> None:
    """What only a folder lets one choose may be stated for a named data set, but not changed."""
    channels = named.shape[0]
    for key, given, truth in (
        ("classes", config.classes, list(named.classes)),
        ("channels", config.channels, 3 if config.channels == 3 else channels),
        ("group_by", config.group_by, None),
    ):
        if given is not None and given != truth:
            raise InputError(
                f"data.{key} = {given!r} does not fit data set {config.name}, where it is {truth!r}. Take the key out."
            )
    check_proportions(config, len(named.classes))


def _root(given: Path | None) -> Path | None:
    """The folder of the named data sets: as given, else the environment variable SFUMATO_DATA."""
    if given is not None:
        return given
    root = os.environ.get("SFUMATO_DATA")
    return Path(root) if root else None
