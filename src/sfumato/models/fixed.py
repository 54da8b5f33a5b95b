"""Networks of which a linear classifier alone trains, on features that follow from a formula and a public seed: no
image of anybody made them.
"""

import math
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
_OPPONENT = F.normalize(torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [1.0, -2.0, 1.0]]))
"""Light, and red against blue, and green against both: colours of photographs vary most in light."""


Part = tuple[nn.Module, tuple[int, int, int]]
"""From images to maps; how many, their height and width."""


class FromFormula(nn.Module):
    """Features side by side, each of length 1, and a linear classifier, of zeros at first.

    Shape:
        (rows, channels, image_size, image_size) -> (rows, num_classes)
    """

    def __init__(self, parts: Sequence[Part], num_classes: int, image_size: int, channels: int) -> None:
        super().__init__()
        textures = textures_for(image_size, channels)
        self.parts = nn.ModuleList(_Centred(part, maps, textures) for part, (maps, _, _) in parts)
        self.classifier = nn.Linear(sum(math.prod(shape) for _, shape in parts), num_classes)
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.cat([part(images) for part in self.parts], 1))


class _Centred(nn.Module):
    """Mixed features of length 1, less their mean over textures and places, made as long again.

    Attributes:
        centre: (maps, 1, 1), a buffer.
    """

    centre: torch.Tensor

    @torch.no_grad()
    def __init__(self, part: nn.Module, maps: int, textures: torch.Tensor) -> None:
        super().__init__()
        mixed = _Mixed(torch.zeros(maps, maps))
        self.part = nn.Sequential(part, mixed)
        self.register_buffer("centre", torch.zeros(maps, 1, 1))
        if not textures.is_meta:
            of_textures = part(textures)
            mixed.matrix.copy_(_whitening(of_textures)[:, :, None, None])
            self.centre.copy_(_unit(mixed(of_textures)).mean((0, 2, 3))[:, None, None])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return centred(_unit(self.part(images)), self.centre)


def _unit(maps: torch.Tensor) -> torch.Tensor:
    """Each row's of length 1."""
    return F.normalize(maps.flatten(1)).view_as(maps)


class _Mixed(nn.Module):
    """Sums of maps: (rows, channels, ...) -> (rows, len(matrix), ...)."""

    matrix: torch.Tensor

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix[:, :, None, None])

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return F.conv2d(maps, self.matrix)


class _WithMirrorImage(nn.Module):
    """The maps of an image and of its mirror image, added, of which half a map says all.

    Args:
        mirrored: Which map of an image is that of its mirror image, mirrored, in each block of as many maps.

    Shape:
        (rows, channels, side, side) -> (rows, channels, side, side / 2 rounded up)
    """

    def __init__(self, mirrored: Sequence[int]) -> None:
        super().__init__()
        self.mirrored = mirrored

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        other = maps.unflatten(1, (-1, len(self.mirrored)))[:, :, self.mirrored].flatten(1, 2).flip(3)
        return (maps + other)[..., : (maps.shape[3] + 1) // 2]


@torch.no_grad()
def _whitening(maps: torch.Tensor) -> torch.Tensor:
    """What brings the variances of maps, (m, channels, ...), half as near to each other: (channels, channels). With all
    variances equal the noise of maps that hardly vary would be as loud as what images show.
    """
    rows = maps.double().transpose(0, 1).flatten(1)
    rows = rows - rows.mean(1, keepdim=True)
    values, vectors = torch.linalg.eigh(rows @ rows.T / rows.shape[1])
    return (vectors * (values + values.mean()) ** -0.25 @ vectors.T).float()


def _scattering(image_size: int, channels: int, J: int | None, mirror: bool) -> Part:
    """J: by default as many scales, two at least, as leave seven places of a side or more: so images of 224 pixels have
    but six times the features of 32.
    """
    transform = Scattering(image_size, max(2, int(math.log2(image_size / 7))) if J is None else J)
    maps = channels * transform.num_maps
    groups = next(maps // size for size in range(_GROUP, 0, -1) if transform.num_maps % size == 0)
    steps: list[nn.Module] = [_Mixed(_OPPONENT)] if channels == len(_OPPONENT) else []
    steps += [transform, *([_WithMirrorImage(transform.mirrored)] if mirror else [])]
    width = (transform.side + 1) // 2 if mirror else transform.side
    return nn.Sequential(*steps, nn.GroupNorm(groups, maps, affine=False)), (maps, transform.side, width)


def _dictionary(image_size: int, channels: int, mirror: bool) -> Part:
    part = Dictionary(image_size, channels, mirror)
    maps, side = len(part.mirrored), part.windows.shape[1]
    if not mirror:
        return part, (maps, side, side)
    return nn.Sequential(part, _WithMirrorImage(part.mirrored)), (maps, side, (side + 1) // 2)


def scattering(
    *, num_classes: int, image_size: int, channels: int, J: int | None = None, mirror: bool = False
) -> nn.Module:
    """On wavelets (`models.scattering`)."""
    return FromFormula([_scattering(image_size, channels, J, mirror)], num_classes, image_size, channels)


def dictionary(*, num_classes: int, image_size: int, channels: int, mirror: bool = False) -> nn.Module:
    """On patches of synthetic textures (`models.dictionary`)."""
    return FromFormula([_dictionary(image_size, channels, mirror)], num_classes, image_size, channels)


def scattering_and_dictionary(
    *, num_classes: int, image_size: int, channels: int, J: int | None = None, mirror: bool = False
) -> nn.Module:
    """On both, each of half the squared length."""
    parts = [_scattering(image_size, channels, J, mirror), _dictionary(image_size, channels, mirror)]
    return FromFormula(parts, num_classes, image_size, channels)
