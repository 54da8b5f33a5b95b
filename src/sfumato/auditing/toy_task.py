"""What a membership audit learns, and with which setting: MNIST digits, and one example z that takes part or does not
(De et al. 2022, Appendix A.2 and Table 7).

Phase I finds which setting tells best whether z took part, by successive halving: all settings get a few models, the
better half as many again, and so on. The blank image is first; at its best setting the other z are tried.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import NormalDist
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

SHARE = 0.2
"""Phase I has at most so many models for each one of phase II."""
_LEAST, _MOST = 4, 1000
"""Models a side and setting in the first round; the paper has 1,000 for each."""
# In the order in which they are left out where models are few, the last first.
_HYPERPARAMETERS = [(rate, norm) for norm in (1.0, 0.1, 10.0) for rate in (0.5, 1.0, 0.1)]


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


@dataclasses.dataclass(frozen=True)
class Setting:
    """What phase I chooses.

    Attributes:
        target: z.
        num_steps: T.
    """

    target: Target
    learning_rate: float
    clipping_norm: float
    num_steps: int


Losses = tuple[list[float], list[float]]
"""On z: of members, and of non-members."""
Try = tuple[Setting, int, int]
"""A setting, the round, and how many more models a side are trained for it."""


def settings_of(num_steps: Sequence[int]) -> list[Setting]:
    """Of the blank image, in the order of promise: all of Table 7."""
    return [Setting("blank", rate, norm, steps) for rate, norm in _HYPERPARAMETERS for steps in num_steps]


def choose(
    num_steps: Sequence[int], num_models: int, train: Callable[[Sequence[Try]], list[Losses]]
) -> tuple[Setting, int, float | None]:
    """The setting with the largest distance.

    Args:
        num_steps: T that are tried.
        num_models: Of phase II, on each side.
        train: Trains models; called once a round.

    Returns:
        The setting, how many models were trained for it, both sides, and its distance; 0 and None
        where models are too few for a choice: then it is the most promising setting.
    """
    settings = settings_of(num_steps)
    count, first = _plan(len(settings), int(SHARE * num_models))
    if count < 2:
        return settings[0], 0, None
    found: dict[Setting, Losses] = collections.defaultdict(lambda: ([], []))

    def add(chosen: Sequence[Setting], number: int, more: int) -> None:
        for setting, losses in zip(chosen, train([(setting, number, more) for setting in chosen]), strict=True):
            for side, values in zip(found[setting], losses, strict=True):
                side.extend(values)

    def best(chosen: Sequence[Setting]) -> list[Setting]:
        return sorted(chosen, key=lambda setting: -distance(*found[setting]))

    left = settings
    for number, (many, units) in enumerate(_rounds(count)):
        left = (best(left) if number else left)[:many]
        add(left, number, units * first)
    winner = best(left)[0]
    others = [dataclasses.replace(winner, target=target) for target in TARGETS[1:]]
    add(others, 0, 2 * first)
    winner = best([winner, *others])[0]
    return winner, 2 * sum(len(members) for members, _ in found.values()), distance(*found[winner])


def distance(members: Sequence[float], non_members: Sequence[float]) -> float:
    """The total variation distance between the Gaussians that are fitted to two samples (Nielsen and
    Sun 2018). A loss that is no number counts as the largest one.

    Example:
        >>> round(distance([-1.0, 1.0], [0.0, 2.0]), 3)  # two Gaussians of standard deviation 1.414, 1 apart
        0.276
    """
    both = np.nan_to_num(np.array([*members, *non_members], dtype=np.float64), nan=np.inf).clip(-1e100, 1e100)
    sides = both[: len(members)], both[len(members) :]
    floor = 1e-9 * max(1.0, float(np.abs(both).max()))  # equal losses have a Gaussian of no width
    mean, other_mean = (float(side.mean()) for side in sides)
    std, other_std = (max(float(side.std(ddof=1)), floor) for side in sides)
    # From the first mean on in units of the first width, which is exact where the two are far apart or narrow.
    return 1 - NormalDist().overlap(NormalDist((other_mean - mean) / std, other_std / std))


def _rounds(count: int) -> list[tuple[int, int]]:
    """(Settings, models a side of each in units of the first round), round by round."""
    found, units = [(count, 1)], 1
    while count > 3:
        count, units = count // 2, 2 * units
        found.append((count, units // 2))
    return found


def _plan(most: int, models: int) -> tuple[int, int]:
    """How many settings begin, and with how many models a side; (0, 0) where models are too few."""
    for count in range(most, 1, -1):
        units = sum(each * size for each, size in _rounds(count)) + 2 * (len(TARGETS) - 1)
        first = min(models // units, _MOST)
        if first >= _LEAST:
            return count, first
    return 0, 0
