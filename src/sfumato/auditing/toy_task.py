"""What a membership audit learns: MNIST digits, and one example z that takes part or does not
(De et al. 2022, Appendix A.2 and Table 7).
"""

import dataclasses
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

from sfumato.config import DataConfig
from sfumato.data.images import ImageSet
from sfumato.data.loading import load
from sfumato.randomness import Stream, key_from_seed

Target = Literal["blank", "noise", "7 as 8", "6 as 7", "0 as 1"]
TARGETS: tuple[Target, ...] = get_args(Target)
"""The paper found the blank image best, so it comes first."""
NUM_EXAMPLES = 64, 60_000
"""A batch, and all digits."""
_LARGE = 8192
"""From so many examples on, Table 7's settings for 60,000 hold; below, those for 100."""


@dataclasses.dataclass(frozen=True, eq=False)
class ToyTask:
    """D, and what z may be.

    Attributes:
        images: D.
        candidates: Each z: its image, (C, H, W), and its label.
        batch_size: B, expected.
        num_steps: The T that are tried.
    """

    images: ImageSet
    candidates: dict[Target, tuple[torch.Tensor, int]]
    batch_size: int
    num_steps: tuple[int, ...]

    def with_target(self, target: Target) -> ImageSet:
        """D' = D + {z}, z last."""
        (pixels, label), images = self.candidates[target], self.images
        stored = torch.cat([images.integers(), pixels[None]])
        labels = torch.cat([images.labels, torch.tensor([label])])
        readable = torch.cat([images.readable, torch.tensor([True])])
        return ImageSet(stored, labels, readable, images.mean, images.std)


def mnist(num_examples: int, data_root: Path | None) -> ToyTask:
    """The first ``num_examples`` of MNIST's training digits in the product's own order.

    Raises:
        InputError: If MNIST is missing, or has no such number of digits.
    """
    config = DataConfig(name="mnist", split="train+valid", num_examples=num_examples)
    dataset = load(config, data_root, lambda text: None)
    batch_size, num_steps = (4096, (500, 1000)) if num_examples >= _LARGE else (64, (50, 100))
    return ToyTask(dataset.train, candidates(dataset.held_out_files), batch_size, num_steps)


def candidates(others: ImageSet) -> dict[Target, tuple[torch.Tensor, int]]:
    """Every z. A digit with a wrong label is the first of its class among ``others``, which are not in
    D; what shows no digit is labelled 0.
    """
    words = Stream(key_from_seed(0)).bytes(int(np.prod(others.stored.shape[1:])))
    noise = torch.from_numpy(np.frombuffer(words, dtype=np.uint8).copy()).view(others.stored.shape[1:])
    found: dict[Target, tuple[torch.Tensor, int]] = {"blank": (torch.zeros_like(noise), 0), "noise": (noise, 0)}
    for target in TARGETS[2:]:
        digit, label = (int(word) for word in target.split(" as "))
        first = int((others.labels == digit).nonzero()[0])
        found[target] = (others.integers(torch.tensor([first]))[0], label)
    return found
