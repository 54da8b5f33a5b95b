"""Networks of which a linear classifier alone trains, on features that follow from a formula and a public seed: no
image of anybody made them.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from sfumato.models.dictionary import Dictionary
from sfumato.models.layers import centred
from sfumato.models.scattering import Scattering
from sfumato.models.textures import textures_for

_GROUP = 9
"""Maps of a scattering that are normalised together, where their number allows it."""


class FromFormula(nn.Module):
    """Features side by side, each of length 1, and a linear classifier, of zeros at first.

    Args:
        parts: Each from images to maps.

    Shape:
        (rows, channels, image_size, image_size) -> (rows, num_classes)
    """

    def __init__(self, parts: Sequence[nn.Module], num_classes: int, image_size: int, channels: int) -> None:
        super().__init__()
        textures = textures_for(image_size, channels)
        self.parts = nn.ModuleList(_Centred(part, textures) for part in parts)
        with torch.no_grad():
            features = self._features(textures[:1])
        self.classifier = nn.Linear(features.shape[1], num_classes)
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def _features(self, images: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(images) for part in self.parts], 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self._features(images))


class _Centred(nn.Module):
    """What features of length 1 differ in from their mean over textures and places, made as long again.

    Attributes:
        centre: (maps, 1, 1), a buffer.
    """

    centre: torch.Tensor

    @torch.no_grad()
    def __init__(self, part: nn.Module, textures: torch.Tensor) -> None:
        super().__init__()
        self.part = part
        self.register_buffer("centre", self._unit(textures).mean((0, 2, 3))[:, None, None])

    def _unit(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.part(images)
        return F.normalize(maps.flatten(1)).view_as(maps)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return centred(self._unit(images), self.centre)


def _scattering(image_size: int, channels: int, J: int) -> nn.Module:
    transform = Scattering(image_size, J)
    maps = channels * transform.num_maps
    groups = next(maps // size for size in range(_GROUP, 0, -1) if transform.num_maps % size == 0)
    return nn.Sequential(transform, nn.GroupNorm(groups, maps, affine=False))


def scattering(*, num_classes: int, image_size: int, channels: int, J: int = 2) -> nn.Module:
    """On wavelets (`models.scattering`)."""
    return FromFormula([_scattering(image_size, channels, J)], num_classes, image_size, channels)


def dictionary(*, num_classes: int, image_size: int, channels: int) -> nn.Module:
    """On patches of synthetic textures (`models.dictionary`)."""
    return FromFormula([Dictionary(channels)], num_classes, image_size, channels)


def scattering_and_dictionary(*, num_classes: int, image_size: int, channels: int, J: int = 2) -> nn.Module:
    """On both, each of half the squared length."""
    parts = [_scattering(image_size, channels, J), Dictionary(channels)]
    return FromFormula(parts, num_classes, image_size, channels)
