"""What updates draw from: images, features of them that are computed once, or people; and canaries behind them."""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from sfumato.data.canaries import WithCanaries, canary_images
from sfumato.data.examples import Dataset, Examples, FeatureSet
from sfumato.data.images import ImageSet
from sfumato.data.views import People
from sfumato.models.layers import centred
from sfumato.planning.resolve import Plan
from sfumato.training.features import features_of
from sfumato.training.network import Network


@dataclasses.dataclass(frozen=True)
class Source:
    """Examples of one run.

    Attributes:
        train: Of the training images.
        held_out: Of the held-out images.
        drawn_from: What updates draw from: `train` with canaries behind, or people.
    """

    train: Examples
    held_out: Examples
    drawn_from: Examples | WithCanaries | People

    def centre(self, centre: torch.Tensor) -> None:
        """Takes a centre off all features, in their own memory, once."""
        for features in (self.train, self.held_out):
            assert isinstance(features, FeatureSet)
            features.replace(lambda rows: centred(rows, centre.to(rows.device)))


def source_of(
    plan: Plan,
    dataset: Dataset,
    network: Network,
    device: torch.device,
    took_part: np.ndarray | None,
    report: Callable[[str], None],
) -> Source:
    """The examples of a run, once its network has its first weights.

    Args:
        took_part: (m,), bool: which canaries take part; None: there are none.
    """

    def seen(images: ImageSet) -> ImageSet | FeatureSet:
        if network.backbone is None:
            return images
        found = features_of(network.backbone, images, device, report)
        network.model.train()
        return found

    train, held_out = seen(dataset.train), seen(dataset.held_out)
    privacy = plan.recipe.privacy
    if privacy is not None and privacy.person_sampling == "persons":
        assert privacy.max_images_per_person is not None
        return Source(train, held_out, People(train, privacy.max_images_per_person))
    if took_part is None:
        return Source(train, held_out, train)
    images = canary_images(
        len(took_part),
        len(dataset.classes),
        mean=dataset.mean,
        std=dataset.std,
        image_size=dataset.image_size,
        stored_size=plan.recipe.data.stored_size(dataset.image_size),
    )
    return Source(train, held_out, WithCanaries(train, seen(images), took_part))
