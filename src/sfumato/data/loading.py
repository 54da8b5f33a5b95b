"""Data sets by name: public benchmark images, or a user's folder."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import torch

from sfumato.config import DataConfig, Recipe
from sfumato.data import benchmarks, folders
from sfumato.data.catalogue import NAMED, Facts, NamedSet, public_facts
from sfumato.data.examples import Dataset, check_proportions
from sfumato.data.images import ImageSet, normalisation
from sfumato.data.splitting import hold_out
from sfumato.errors import InputError


def facts(config: DataConfig, data_root: Path | None, report: Callable[[str], None], limit: int | None = None) -> Facts:
    """The public numbers of the data set; of a folder by its files' names, without decoding an
    image.

    Raises:
        InputError: As `load` does for a folder.
    """
    if config.name in NAMED:
        _normalisation(config, NAMED[config.name])
    return public_facts(config) or folders.folder_facts(config, _folder(config, data_root), report, limit)


def images_per_person(recipe: Recipe) -> int | None:
    """Of how many training images of a person the rest is left out; None: no limit."""
    return None if recipe.privacy is None else recipe.privacy.max_images_per_person


def load(
    config: DataConfig, data_root: Path | None, report: Callable[[str], None], limit: int | None = None
) -> Dataset:
    """The data set that a recipe asks for.

    Args:
        config: The recipe's `data` section.
        data_root: For a folder, the folder itself (else `config.path`); for a named data set
            the folder that holds it (else `config.path`, else SFUMATO_DATA). Digits need none.
        report: Takes lines for the user: progress, images that cannot be read.
        limit: Of more training images of one person the rest contributes nothing.

    Raises:
        InputError: If a file is missing or damaged, or the recipe contradicts the data.
    """
    if torch.get_default_device().type != "cpu":
        raise InputError(
            f'torch.set_default_device("{torch.get_default_device()}") moves what belongs to the main memory. Leave '
            "it out: a run has a device of its own (device, --device)."
        )
    if config.name == "folder":
        return folders.load_folder(config, _folder(config, data_root), report, limit)
    return _load_named(config, data_root, report)


def load_for(recipe: Recipe, data_root: Path | None, report: Callable[[str], None]) -> Dataset:
    """The data set that a run of this recipe trains on, held out what its accuracies are measured
    on.

    Those are the test images where the recipe asks for them, and where the validation images score
    under `privacy.score_noise`: an exact accuracy on them would undo that noise.

    Raises:
        InputError: As `load`.
    """
    dataset = load(recipe.data, data_root, report, images_per_person(recipe))
    is_scored = recipe.privacy is not None and recipe.privacy.score_noise is not None
    if dataset.held_out_name == "test" or not (is_scored or recipe.data.held_out == "test"):
        return dataset
    return tested_on_test_images(dataset, recipe.data, data_root, report)


def tested_on_test_images(
    dataset: Dataset, config: DataConfig, data_root: Path | None, report: Callable[[str], None]
) -> Dataset:
    """The same training images, but the test images held out in place of the validation images.

    Raises:
        InputError: If there are none.
    """
    whole = load(config.model_copy(update={"split": "train+valid"}), data_root, report)
    if whole.held_out_name != "test":
        raise InputError(
            "accuracies are to be measured on test images, and the folder has valid/ but no test/. Add test/, or leave "
            'data.held_out = "test" and privacy.score_noise out.'
        )
    return dataclasses.replace(dataset, held_out_files=whole.held_out_files, held_out_name=whole.held_out_name)


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


def _load_named(config: DataConfig, data_root: Path | None, report: Callable[[str], None]) -> Dataset:
    named = NAMED[config.name]
    mean, std = _normalisation(config, named)
    public_facts(config)  # refuses more images than there are, before a file is read
    root = _root(data_root or (Path(config.path) if config.path else None))
    seen = config.image_size or named.shape[1]
    size = config.stored_size(seen)
    raw = benchmarks.read(config.name, named, root, size, report)
    total = named.num_train + named.num_test
    expected = (total, *named.shape) if not named.folders else (total, *raw.images.shape[1:])
    if raw.images.shape != expected or raw.labels.shape != (total,):
        raise InputError(
            f"data set {config.name}: its files hold {tuple(raw.images.shape)}, not "
            f"{(total, *named.shape)}. Put the original files there."
        )
    everything = ImageSet(
        raw.images,
        raw.labels,
        raw.readable,
        mean,
        std,
        named.max_value,
        image_size=None if named.folders or size == named.shape[1] else size,
        crop=seen if size > seen else None,
        digests=raw.digests,
    )
    if config.name == "digits":
        train, test = hold_out("digits test", total, named.num_test)
    else:
        train, test = list(range(named.num_train)), list(range(named.num_train, total))
    on_test = config.split == "train+valid"
    held_out = test
    num_examples = config.num_examples or named.num_train
    if not on_test and not named.num_valid:
        if config.held_out != "test":
            raise InputError(
                f"data set {config.name} has no validation images. Set data.held_out=test: its test images."
            )
    elif not on_test:
        kept, valid = hold_out(f"{config.name} valid", len(train), named.num_valid)
        held_out, num_examples = [train[i] for i in valid], min(num_examples, len(kept))
    # In one order for both splits: as many images as "train" has are those of "train".
    portion, _ = hold_out(f"{config.name} valid", len(train), len(train) - num_examples)
    train = [train[i] for i in portion]
    return Dataset(
        config.name,
        named.classes,
        everything.subset(train),
        everything.subset(held_out),
        "test" if on_test else "valid",
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
