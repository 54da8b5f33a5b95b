"""Which views of each image a step averages, and how they are made."""

import dataclasses

import numpy as np
import torch

from sfumato.config import AugmentationKind, ResolvedAugmentation
from sfumato.data.augmentation import augment
from sfumato.data.canaries import WithCanaries
from sfumato.data.examples import Examples
from sfumato.data.images import ImageSet


@dataclasses.dataclass(frozen=True)
class Views:
    """Which views of an image are averaged; ``augmult`` = K, 0 for the image as it is."""

    kind: AugmentationKind
    augmult: int
    padding: int

    @classmethod
    def of(cls, resolved: ResolvedAugmentation) -> "Views":
        return cls(resolved.kind, resolved.augmult, resolved.padding)

    def make(
        self, examples: Examples | WithCanaries, indices: torch.Tensor, view_bits: np.ndarray, device: torch.device
    ) -> torch.Tensor:
        """(b, K, C, H, W), or the images as they are, (b, C, H, W), where K is 0.

        Args:
            examples: All of them; images, where views are made.
            indices: (b,), which ones.
            view_bits: (N, K), uniform words: a view depends on (example, view) alone, whatever else
                is drawn.
            device: Where they are made.
        """
        if not self.augmult:
            return examples.batch(indices, device)
        bits = torch.from_numpy(view_bits[indices.numpy()].astype(np.int64))

        def views(images: object, indices: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            assert isinstance(images, ImageSet)
            return self.of_bits(images, indices, bits[chosen], device)

        if isinstance(examples, WithCanaries):
            return examples.of_each(indices, views)
        return views(examples, indices, torch.ones(len(indices), dtype=torch.bool))

    def of_bits(
        self, images: ImageSet, indices: torch.Tensor, bits: torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        """(b, K, C, H, W), from each view's own bits: (b, K), int64."""
        size = images.crop if self.kind in ("crop", "crop_flip") else None
        inputs = images.batch(indices, device) if size is None else images.whole(indices, device)
        return augment(inputs, bits.to(device), self.kind, self.padding, images.mean, images.std, size=size)

    def with_labels(
        self, examples: Examples | WithCanaries, indices: torch.Tensor, view_bits: np.ndarray, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `make` gives, and the (b,) labels."""
        return self.make(examples, indices, view_bits, device), examples.labels[indices].to(device)
