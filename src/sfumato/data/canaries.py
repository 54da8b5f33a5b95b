"""Canaries: made-up examples that stand behind a run's images, and of which a coin decides who takes part."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from sfumato.data.examples import Examples
from sfumato.data.images import ImageSet
from sfumato.randomness import derived, key_from_seed

_MOST_SIDE = 64
"""Of the noise that a canary is made of, in pixels: larger images are enlarged noise, which takes less memory."""


def canary_images(
    count: int, num_classes: int, *, mean: Sequence[float], std: Sequence[float], image_size: int, stored_size: int
) -> ImageSet:
    """Images that nobody owns, with labels at random: uniform noise in every pixel.

    Noise has little in common with real images, so a wrong label spoils little of what they teach. Coarse blocks,
    smooth noise and spots were not recognised better. Everybody can make these images, and the first of many are those
    of few. That an attacker knows them is what an audit is about; the coins are what it does not know.

    Args:
        count: m.
        num_classes: Labels are below.
        mean, std: As those of the run's images.
        image_size: Height and width in pixels, as a network sees them.
        stored_size: Of the images that these are the centres or random parts of.

    Returns:
        m images with labels, all readable.
    """
    key = key_from_seed(0)
    channels, side = len(mean), min(stored_size, _MOST_SIDE)
    pixels = np.frombuffer(derived(key, "canaries").bytes(count * channels * side**2), np.uint8)
    labels = derived(key, "labels of canaries").uint64(count) % np.uint64(num_classes)
    return ImageSet(
        stored=torch.from_numpy(pixels.copy()).view(count, channels, side, side),
        labels=torch.from_numpy(labels.astype(np.int64)),
        readable=torch.ones(count, dtype=torch.bool),
        mean=tuple(mean),
        std=tuple(std),
        image_size=stored_size,
        crop=image_size if image_size < stored_size else None,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class WithCanaries:
    """Examples of a run and, behind them, its canaries: what its updates draw from.

    A canary that takes no part is not readable: it keeps its index and contributes zero.

    Attributes:
        own: The run's.
        canaries: Of the same kind and shape.
        took_part: (m,), bool: how the coins fell.
    """

    own: Examples
    canaries: Examples
    took_part: np.ndarray

    def __len__(self) -> int:
        return len(self.own) + len(self.canaries)

    @functools.cached_property
    def labels(self) -> Tensor:
        """(N,), torch.int64."""
        return torch.cat([self.own.labels, self.canaries.labels])

    @functools.cached_property
    def readable(self) -> Tensor:
        """(N,), torch.bool."""
        return torch.cat([self.own.readable, torch.from_numpy(self.took_part)])

    def batch(self, indices: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """(B, *shape), float32; each row depends on its own example alone."""
        return self.of_each(indices, lambda examples, indices, _: examples.batch(indices, device))

    def of_each(self, indices: Tensor, of_part: Callable[[Examples, Tensor, Tensor], Tensor]) -> Tensor:
        """(B, ...): what is made of the run's own examples and of canaries, in the order of the indices.

        Args:
            indices: (B,), below N.
            of_part: Makes (b, ...) of either part, its indices there (b,), and which of the B they are, (B,), bool.
        """
        is_own = indices < len(self.own)
        of_own = of_part(self.own, indices[is_own], is_own)
        if is_own.all():
            return of_own
        rows = of_own.new_empty(len(indices), *of_own.shape[1:])
        rows[is_own] = of_own
        rows[~is_own] = of_part(self.canaries, indices[~is_own] - len(self.own), ~is_own)
        return rows
