"""Small real runs of the product, and all that nobody may see of them.

A run is `Trainer.run` on images in memory: recipe, sampler, clipping, noise, ledger, optimizer, averages, certificate
and weights are the product's own. The network is one layer on pictures of equal mean, so that gradients are known in
closed form; a black picture has none, for it is divided by zero.
"""

import contextlib
import dataclasses
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import nn

from sfumato.config import parse
from sfumato.data.examples import Dataset
from sfumato.data.images import ImageSet
from sfumato.training.state import State
from sfumato.training.step import Draws, PrivateStep
from sfumato.training.trainer import Trainer

SIDE, CLASSES = 32, 3
NUM_EXAMPLES, BATCH_SIZE, MICROBATCH, VIEWS = 61, 16, 8, 2  # the last microbatch of all examples is not full
SIGMA, CLIPPING_NORM, DELTA, NUM_STEPS = 0.7, 0.5, 1e-3, 40
LEARNING_RATE, MOMENTUM, DECAY = 0.5, 0.9, 0.8
BRIGHT, LONELY, BLACK, UNREADABLE, FIRST_OF_THE_LAST = 0, 1, 2, 3, 56
"""Examples that would show a fault: one pixel of one half alone, so that its views are far apart; the only one of its
class; one without a finite gradient; one that could not be read; one that a microbatch is filled up with."""
PUBLISHED = ("privacy.json", "recipe.toml", "ledger.jsonl")


class OneLayer(nn.Module):
    def __init__(self, num_classes: int, **options: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(SIDE * SIDE, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pixels = images.flatten(1)
        return self.layer(pixels / pixels.mean(1, keepdim=True))


class Mixing(OneLayer):
    """Batch normalisation in front."""

    def __init__(self, num_classes: int, **options: Any) -> None:
        super().__init__(num_classes)
        self.norm = nn.BatchNorm2d(1, track_running_stats=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(images).flatten(1))


def images() -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(1, 256, (NUM_EXAMPLES, 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, CLASSES - 1, (NUM_EXAMPLES,), generator=generator)
    pixels[BRIGHT] = 0
    pixels[BRIGHT, 0, 3, 2] = 255
    labels[LONELY] = CLASSES - 1
    pixels[BLACK] = 0
    readable = torch.arange(NUM_EXAMPLES) != UNREADABLE  # its pixels are set, so that they would show
    return ImageSet(pixels, labels, readable, mean=(0.0,), std=(1.0,))


def without(data: ImageSet, example: int) -> ImageSet:
    """The neighbour: the example keeps its place and contributes zero; nothing of it is known."""
    pixels, labels, readable = data.stored.clone(), data.labels.clone(), data.readable.clone()
    pixels[example], labels[example], readable[example] = 0, 0, False
    return dataclasses.replace(data, stored=pixels, labels=labels, readable=readable)


def dataset(train: ImageSet) -> Dataset:
    held_out = images().subset(range(4, 13))
    return Dataset("digits", ("a", "b", "c"), train, held_out, "test")


def recipe(network: str = "OneLayer", **changes: Any) -> dict[str, Any]:
    """Changes are of one key each: ``training_num_steps=1``."""
    sections: dict[str, dict[str, Any]] = {
        "data": {"name": "digits"},
        "model": {"name": f"{__name__}:{network}"},
        "augmentation": {"kind": "flip", "augmult": VIEWS},
        "privacy": {"noise_multiplier": SIGMA, "delta": DELTA, "clipping_norm": CLIPPING_NORM},
        "optimizer": {"name": "sgd", "learning_rate": LEARNING_RATE, "momentum": MOMENTUM},
        "ema": {"decay": DECAY},
        "training": {"batch_size": BATCH_SIZE, "num_steps": NUM_STEPS, "microbatch_size": MICROBATCH},
        "run": {},
    }
    for key, value in {"training_evaluate_every": NUM_STEPS, "training_engine": "graph", **changes}.items():
        section, _, name = key.partition("_")
        sections[section][name] = value
    return sections


@dataclasses.dataclass
class Seen:
    """One run.

    Attributes:
        before: The parameters before each update.
        samples: The indices drawn for each update.
        views: Of these, (b, K, 1, H, W).
        gradients: What the optimizer saw.
        weights: `model.safetensors`.
        certificate: `privacy.json`.
        ledger: Its lines.
        keys: Of the streams of random numbers.
        files: The text of each file that the run publishes besides, by name.
    """

    data: ImageSet
    before: list[dict[str, np.ndarray]] = dataclasses.field(default_factory=list)
    samples: list[np.ndarray] = dataclasses.field(default_factory=list)
    views: list[np.ndarray] = dataclasses.field(default_factory=list)
    gradients: list[dict[str, np.ndarray]] = dataclasses.field(default_factory=list)
    weights: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    certificate: dict[str, Any] = dataclasses.field(default_factory=dict)
    ledger: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    keys: list[bytes] = dataclasses.field(default_factory=list)
    files: dict[str, str] = dataclasses.field(default_factory=dict)


def run(data: ImageSet, recipe: dict[str, Any]) -> Seen:
    """Trains from the beginning to the end, in memory as far as the machine allows."""
    seen = Seen(data)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder, _watched(seen):
        path = Path(folder) / "run"
        Trainer(dataset(data), device="cpu", trust=[__name__]).run(parse(recipe), path)
        seen.weights = load_file(path / "model.safetensors")
        seen.certificate = json.loads((path / "privacy.json").read_text())
        seen.ledger = [json.loads(line) for line in (path / "ledger.jsonl").read_text().splitlines()]
        seen.files = {name: (path / name).read_text() for name in PUBLISHED}
    return seen


@contextlib.contextmanager
def _watched(seen: Seen) -> Iterator[None]:
    """Notes what passes between the parts of the product, and changes nothing."""
    collect, update, keyed = PrivateStep.collect, State.update, Draws.noise_key
    sampled = Draws.of_update

    def collecting(step, examples, parameters, randomness, *share):
        indices = torch.from_numpy(randomness.indices)
        seen.before.append(_copied(parameters))
        seen.samples.append(randomness.indices.copy())
        seen.views.append(step.views.make(examples, indices, randomness.view_bits, torch.device("cpu")).numpy())
        return collect(step, examples, parameters, randomness, *share)

    def updating(state, gradient, *numbers):
        seen.gradients.append(_copied(state.flat.split(gradient)))
        return update(state, gradient, *numbers)

    def keying(draws, release):
        key = keyed(draws, release)
        seen.keys.append(key)
        return key

    def sampling(draws, release):
        randomness = sampled(draws, release)
        seen.keys.append(randomness.model_key)
        return randomness

    with (
        mock.patch.object(PrivateStep, "collect", collecting),
        mock.patch.object(State, "update", updating),
        mock.patch.multiple(Draws, noise_key=keying, of_update=sampling),
    ):
        yield


def _copied(tensors: Any) -> dict[str, np.ndarray]:
    return {name: value.detach().double().numpy().copy() for name, value in tensors.items()}


def clipped_sum(seen: Seen, number: int) -> np.ndarray:
    """Eq. 3 of De et al. (2022) by hand, of the sample and the views of an update: the sum over its examples of
    g min(1 / C, 1 / |g|), g the mean gradient of the views; (d,). An example without a finite gradient adds nothing.
    """
    weight, bias = (seen.before[number][f"layer.{name}"] for name in ("weight", "bias"))
    total = np.zeros(weight.size + bias.size)
    for index, views in zip(seen.samples[number], seen.views[number].astype(np.float64), strict=True):
        if not seen.data.readable[index]:
            continue
        with np.errstate(invalid="ignore"):
            inputs = views.reshape(VIEWS, -1) / views.mean((1, 2, 3))[:, None]
        outputs = inputs @ weight.T + bias
        shares = np.exp(outputs - outputs.max(1, keepdims=True))
        by_output = shares / shares.sum(1, keepdims=True) - np.eye(CLASSES)[int(seen.data.labels[index])]
        gradient = np.concatenate([(by_output.T @ inputs / VIEWS).ravel(), by_output.mean(0)])
        norm = np.linalg.norm(gradient)
        if np.isfinite(norm):
            total += gradient / max(CLIPPING_NORM, norm)
    return total


def flat(tensors: dict[str, np.ndarray]) -> np.ndarray:
    """(d,), in the order of `clipped_sum`."""
    return np.concatenate([tensors["layer.weight"].ravel(), tensors["layer.bias"].ravel()]).astype(np.float64)


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """L2, over all parameters."""
    return math.sqrt(sum(float(np.square(one[name].astype(np.float64) - other[name]).sum()) for name in one))
