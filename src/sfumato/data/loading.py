"""Data sets by name: public benchmark images, or a user's folder."""

import os
from pathlib import Path

from sfumato.config import DataConfig, PrivacyConfig, Recipe
from sfumato.data.benchmarks import NamedListing
from sfumato.data.catalogue import NAMED, Facts
from sfumato.data.examples import Dataset
from sfumato.data.folders import DEFAULT_CHANNELS, Listing
from sfumato.data.objects import Given
from sfumato.data.store import Report
from sfumato.errors import InputError

Listed = Listing | NamedListing
"""A data set of which names and numbers (`facts`) are known, and no image is read yet (`load`)."""


def list_images(
    config: DataConfig,
    data_root: Path | None,
    report: Report,
    privacy: PrivacyConfig | None = None,
    given: Given | None = None,
) -> Listed:
    """Lists the data set that a recipe asks for, once.

    Args:
        config: The recipe's `data` section.
        data_root: For a folder, the folder itself (else `config.path`); for a named data set
            the folder that holds it (else `config.path`, else SFUMATO_DATA). Digits need none.
        report: Takes lines for the user: progress, images that cannot be read.
        privacy: The recipe's section: of more training images of one person than it allows the rest contributes
            nothing. None: ordinary training.
        given: Images that the caller has, in the place of a folder.

    Raises:
        InputError: If the recipe contradicts the data, or a file of a folder is refused.
    """
    if config.name != "folder":
        return NamedListing(config, data_root, report)
    if config.num_examples is not None:
        what = f"data.num_examples = {config.num_examples} does not fit a folder, whose images are counted"
        raise InputError(f"{what}. Take the key out.")
    if given is not None:
        return Listing(config, Path(), report, privacy, given)
    root = data_root or config.path  # private data: named for each run, never found by SFUMATO_DATA
    if root is None:
        raise InputError(
            "a folder of images is trained on and none is named. Give --data-root FOLDER or data.path; or in Python "
            "data=, the images themselves."
        )
    return Listing(config, Path(root), report, privacy)


def list_for(recipe: Recipe, data_root: Path | None, report: Report, given: Given | None = None) -> Listed:
    """The same for a run of this recipe."""
    return list_images(_as_weights_took_them(recipe, report), data_root, report, recipe.privacy, given)


def _as_weights_took_them(recipe: Recipe, report: Report) -> DataConfig:
    """The `data` section, with the constants of a library's weights where the recipe starts from such and has none. A
    run's weights may have had others.
    """
    data, model = recipe.data, recipe.model
    if model.init_from is None or model.name is None or os.path.isdir(model.init_from):
        return data
    from sfumato.models.libraries import constants

    channels = data.channels or (DEFAULT_CHANNELS if data.name == "folder" else NAMED[data.name].shape[0])
    missing = {key: value for key, value in constants(model.name, channels).items() if getattr(data, key) is None}
    for key, value in missing.items():
        report(f"chosen: data.{key} = {value} (as the weights of {model.name} were made with)")
    return data.model_copy(update=missing)


def is_judged_on_test(recipe: Recipe) -> bool:
    """Whether a run of this recipe holds out the test images: where the recipe asks for them, and where the
    validation images score under `privacy.score_noise`, since an exact accuracy on them would undo that noise.
    """
    is_scored = recipe.privacy is not None and recipe.privacy.score_noise is not None
    return is_scored or recipe.data.held_out == "test"


def facts(config: DataConfig, data_root: Path | None, report: Report) -> Facts:
    """The public numbers of the data set; of a folder by its files' names. Of an image of each kind of file its owner
    is told (`report`) how much of it is seen.

    Raises:
        InputError: As `list_images`.
    """
    listed = list_images(config, data_root, report)
    listed.report_first()
    return listed.facts


def load(config: DataConfig, data_root: Path | None, report: Report, privacy: PrivacyConfig | None = None) -> Dataset:
    """The data set that a recipe asks for.

    Raises:
        InputError: As `list_images` and `Listing.load`.
    """
    return list_images(config, data_root, report, privacy).load()


def load_for(recipe: Recipe, data_root: Path | None, report: Report) -> Dataset:
    """The data set that a run of this recipe trains on, held out what its accuracies are measured on.

    Raises:
        InputError: As `list_images` and `Listing.load`.
    """
    return list_for(recipe, data_root, report).load(is_judged_on_test(recipe))
