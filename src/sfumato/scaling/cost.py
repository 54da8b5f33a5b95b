"""What a run costs besides privacy: time and money on many devices, computed on paper before it begins."""

import contextlib
import dataclasses
import timeit
from collections.abc import Collection
from typing import Any

from sfumato.accounting.mechanism import Mechanism
from sfumato.config import ResolvedRecipe
from sfumato.data.catalogue import Facts

_FLOAT_BYTES, _GB = 4, 1e9
_COORDINATES = 2**20
"""Whose noise is timed."""


@dataclasses.dataclass(frozen=True)
class Price:
    """What is known of the machines that train, and of what they move. None: not known, and its part is not counted.

    Attributes:
        views: Views of each image that are differentiated; 1 without augmentation.
        throughput: Views a second of one device.
        devices: D, how many of them share the work.
        per_hour: What one device costs an hour, in any currency.
        bandwidth: GB a second between devices. With it go `num_parameters` and `noise_seconds_per_million`.
        reading: GB a second of one device's share of the disk. With it goes `image_bytes`.
        num_parameters: P, how many train, as float32.
        noise_seconds_per_million: Seconds that the noise of a million of them takes.
        image_bytes: Of one image as it is stored.
    """

    views: int = 1
    throughput: float | None = None
    devices: int = 1
    per_hour: float | None = None
    bandwidth: float | None = None
    reading: float | None = None
    num_parameters: int = 0
    noise_seconds_per_million: float = 0.0
    image_bytes: int = 0

    def update_seconds(self, mechanism: Mechanism) -> dict[str, float | None]:
        """Seconds of each part of an update with the expected batch B; None: not counted.

        - arithmetic: of the largest share of the batch, B / D rounded up, at `throughput`.
        - reduction: each device gets its part of the clipped sum, and hands on what it releases of it. In a ring that
          moves 2 (D - 1) / D times 4 P bytes through each device.
        - noise: of P / D coordinates, rounded up, on each device.
        - reading: of the share's stored images.
        """
        share = -(-mechanism.batch_size // self.devices)
        parts: dict[str, float | None] = dict.fromkeys(("arithmetic", "reduction", "noise", "reading"))
        if self.throughput is not None:
            parts["arithmetic"] = share * self.views / self.throughput
        if self.bandwidth is not None:
            moved = 2 * (self.devices - 1) / self.devices * _FLOAT_BYTES * self.num_parameters
            drawn = -(-self.num_parameters // self.devices)
            parts["reduction"] = moved / (_GB * self.bandwidth)
            parts["noise"] = drawn * self.noise_seconds_per_million / 1e6 if mechanism.noise_multiplier else 0.0
        if self.reading is not None:
            parts["reading"] = share * self.image_bytes / (_GB * self.reading)
        return parts

    def of(self, mechanism: Mechanism) -> dict[str, Any]:
        """Epochs, images times views, and, where the throughput is known, time and cost of the whole run.

        Images are read while others are computed, so of arithmetic and reading the longer one counts. Reduction and
        noise are added to it, which is an upper bound: in truth they overlap in part. Evaluations are left out.

        Returns:
            `seconds` of the run and the same in `hours`; `device_hours`; `cost` in the currency of `per_hour`;
            `bound_by`, the largest part of an update; `update_seconds`, its parts. None: not known.
        """
        facts: dict[str, Any] = {
            "num_epochs": mechanism.num_steps * mechanism.sampling_prob,
            "views_processed": mechanism.batch_size * mechanism.num_steps * self.views,
        }
        if self.throughput is None:
            names = ("seconds", "hours", "device_hours", "cost", "bound_by", "update_seconds")
            return facts | dict.fromkeys(names)
        parts = self.update_seconds(mechanism)
        counted = {name: part or 0.0 for name, part in parts.items()}
        update = max(counted["arithmetic"], counted["reading"]) + counted["reduction"] + counted["noise"]
        seconds = mechanism.num_steps * update
        device_hours = seconds * self.devices / 3600
        return facts | {
            "seconds": seconds,
            "hours": seconds / 3600,
            "device_hours": device_hours,
            "cost": None if self.per_hour is None else self.per_hour * device_hours,
            "bound_by": max(counted, key=lambda name: counted[name]),
            "update_seconds": parts,
        }


def num_trainable(recipe: ResolvedRecipe, facts: Facts, trust: Collection[str] = ()) -> int:
    """How many parameters of a recipe's network train: counted without memory for them, but for a network from a module
    of the user's own.

    Raises:
        InputError: If it cannot be built.
    """
    import torch

    from sfumato.models import registry
    from sfumato.models.lora import add_low_rank
    from sfumato.models.trainable import named_classifier, select_trainable

    asked = recipe.model
    sizes = {"image_size": facts.image_size, "channels": facts.channels, "num_classes": facts.num_classes}
    with contextlib.nullcontext() if registry.imported_module(asked.name) else registry.shapes_alone():
        model = registry.build(asked.name, **sizes, options=asked.options, fix=asked.fix, seed=0, trust=trust)
        if asked.lora_rank is not None:
            row = torch.zeros(1, facts.channels, facts.image_size, facts.image_size)
            add_low_rank(model, asked.lora_rank, named_classifier(model, facts.num_classes), row, seed=0)
    select_trainable(model, asked.trainable, facts.num_classes)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def noise_seconds_per_million() -> float:
    """Seconds that the noise of a million coordinates takes on this machine, now, with as many threads as PyTorch has:
    the least of three trials.
    """
    import torch

    from sfumato.randomness import Stream, new_key
    from sfumato.training.noise import add_noise

    zeros = {"zeros": torch.zeros(_COORDINATES)}
    trials = timeit.repeat(lambda: add_noise(zeros, 1.0, Stream(new_key())), repeat=3, number=1)
    return min(trials) / _COORDINATES * 1e6
