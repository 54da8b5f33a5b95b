"""What should a classifier on public features be given, and how fast should it learn? The evidence behind
`model.features`, the bias of `sfumato.models.layers.UnitLinear` and the rate (docs/defaults.md).

    python -m benchmarks.on_features [--runs 3] [--kinds rates given unequal]

Simulates the updates of a run (all images, momentum 0.9, average 0.9, C 0.5, noise of the stated epsilon at delta 1e-5)
on features of EfficientNet-Lite0 at 128 pixels, with noise that is drawn anew. Of CIFAR-10 it trains on the first of
16,000 training images and scores on the other 29,000 and the 5,000 of the validation split; of Fashion-MNIST (unequal:
one class has more images) it scores on 1,000 and more training images of each class: no test image chooses anything.
Prints one line of JSON for each setting.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from sfumato import config
from sfumato.accounting.gaussian import mu_gaussian
from sfumato.data import loading
from sfumato.data.catalogue import Facts
from sfumato.data.examples import Dataset
from sfumato.data.images import ImageSet
from sfumato.models.layers import UnitLinear, centred
from sfumato.models.trainable import named_classifier
from sfumato.models.weights import read_weights
from sfumato.planning.resolve import resolve
from sfumato.training.features import features_of
from sfumato.training.network import Network

STEPS, CLIPPING_NORM, DELTA = 100, 0.5, 1e-5
_TRAIN = 16_000
CASES = [  # images, epsilon, classes; None: all ten
    (1000, 1.0, None),
    (1000, 8.0, None),
    (4000, 0.1, None),
    (4000, 1.0, None),
    (4000, 8.0, None),
    (16_000, 1.0, None),
    (1000, 1.0, (3, 5)),
    (3000, 0.1, (3, 5)),
    (3000, 1.0, (3, 5)),
    (3000, 1.0, (4, 7)),
]
MORE = [  # of what is given: cat / dog and deer / horse, too, beside four other pairs
    (count, epsilon, classes)
    for count, epsilon in ((1000, 1.0), (3000, 1.0), (3000, 0.1))
    for classes in ((3, 5), (4, 7), (0, 8), (1, 9), (2, 6), (2, 4))
]
RATES = (0.06, 0.25, 1.0, 4.0, 16.0)


PAIRS, COUNTS = ((3, 6), (5, 7)), ((3000, 1000), (3000, 150))
"""Dress and shirt, sandal and sneaker; how many of them train."""


class Set(NamedTuple):
    """Features (m, D) of length 1 and labels (m,) to train and to score on, and their mean over textures (D,)."""

    x: torch.Tensor
    y: torch.Tensor
    x_scored: torch.Tensor
    y_scored: torch.Tensor
    public_centre: torch.Tensor


def features(name: str, part: Callable[[Dataset], Sequence[ImageSet]]) -> tuple[torch.Tensor, ...]:
    """Of images of a data set: (m, D), not centred; their labels (m,); the public centre (D,)."""
    values = {
        "data": {"name": name, "image_size": 128, "channels": 3, "split": "train"},
        "model": {"name": "efficientnet_lite0"},
        "privacy": {"target_epsilon": 1.0, "delta": DELTA},
    }
    recipe = config.parse(values)
    dataset = loading.load_for(recipe, None, print)
    weights, device = read_weights("efficientnet_lite0", "package"), torch.device("cpu")
    network = Network(resolve(recipe, dataset.facts), dataset, device, weights=weights)
    layer = network.model.get_submodule(named_classifier(network.model, len(dataset.classes)))
    centre = layer.get_buffer("centre").clone()
    layer.get_buffer("centre").zero_()
    assert network.backbone is not None
    found = [features_of(network.backbone, images, device, print) for images in part(dataset)]
    x = torch.cat([one.batch(torch.arange(len(one))) for one in found])
    return x, torch.cat([one.labels for one in found]), centre


def of_cifar10() -> Set:
    """All training and validation images."""
    x, y, centre = features("cifar10", lambda dataset: (dataset.train, dataset.held_out))
    return Set(x[:_TRAIN], y[:_TRAIN], x[_TRAIN:], y[_TRAIN:], centre)


def of_fashion_mnist() -> dict[tuple[int, int], Set]:
    """4,000 training images of each class of each pair, numbered anew; those to score on are the last 1,000."""

    def first(dataset: Dataset) -> list[ImageSet]:
        labels = dataset.train.labels
        return [dataset.train.subset((labels == k).nonzero()[:4000, 0].tolist()) for pair in PAIRS for k in pair]

    x, y, centre = features("fashion_mnist", first)
    found = {}
    for pair in PAIRS:
        places = [(y == label).nonzero()[:, 0] for label in pair]
        trained, scored = (torch.cat([each[part] for each in places]) for part in (slice(3000), slice(3000, None)))
        number = (y == pair[1]).long()
        found[pair] = Set(x[trained], number[trained], x[scored], number[scored], centre)
    return found


def unequal(found: Set, counts: tuple[int, int]) -> Set:
    """So many of each of two classes to train on."""
    places = torch.cat([(found.y == label).nonzero()[:count, 0] for label, count in enumerate(counts)])
    return found._replace(x=found.x[places], y=found.y[places])


def chosen(found: Set, count: int, classes: tuple[int, ...] | None) -> Set:
    """The first ``count`` images of these classes, which are numbered anew."""
    if classes is None:
        return found._replace(x=found.x[:count], y=found.y[:count])
    number = torch.full((10,), -1)
    number[list(classes)] = torch.arange(len(classes))
    some, scored = (number[y] >= 0 for y in (found.y, found.y_scored))
    x, y = found.x[some][:count], number[found.y[some]][:count]
    assert len(x) == count, f"only {len(x)} images of classes {classes}"
    return Set(x, y, found.x_scored[scored], number[found.y_scored[scored]], found.public_centre)


def accuracy(
    found: Set, epsilon: float, rate: float, seed: int, bias: float, share: float, textures: bool = False
) -> float:
    """Balanced, of the averaged weights.

    Args:
        bias: What the bias is multiplied by.
        share: Of the squared signal, for the mean of features; 0: it is not released.
        textures: Whether features are less their mean over textures.
    """
    draw = torch.Generator().manual_seed(seed)
    x, y, x_scored, y_scored, centre = found
    count, num_features = x.shape
    num_classes = int(y.max()) + 1
    mu = mu_gaussian(epsilon, DELTA)
    assert not (share and textures)
    if share:
        noise = torch.randn(num_features, generator=draw) / (mu * math.sqrt(share))
        centre = (x.sum(0) + noise) / count
    if share or textures:
        x, x_scored = centred(x, centre), centred(x_scored, centre)
    x, x_scored = (F.pad(rows, (0, 1), value=bias) for rows in (x, x_scored))
    sigma = math.sqrt(STEPS) / (mu * math.sqrt(1 - share))
    weight = torch.zeros(num_classes, num_features + 1)
    moved, average = torch.zeros_like(weight), torch.zeros_like(weight)
    truth, lengths = F.one_hot(y, num_classes).float(), x.norm(dim=1)
    for step in range(1, STEPS + 1):
        errors = torch.softmax(x @ weight.T, 1) - truth
        errors *= (CLIPPING_NORM / (errors.norm(dim=1) * lengths)).clamp(max=1)[:, None]
        noise = sigma * CLIPPING_NORM * torch.randn(weight.shape, generator=draw)
        moved = 0.9 * moved + (errors.T @ x + noise) / (count * CLIPPING_NORM)
        weight = weight - rate * moved
        average.lerp_(weight, 1 - min(0.9, step / (9 + step)))
    right = (x_scored @ average.T).argmax(1) == y_scored
    return statistics.fmean(right[y_scored == label].float().mean().item() for label in range(num_classes))


def settings(kind: str, count: int, epsilon: float) -> Iterator[dict[str, Any]]:
    """Rates, with all else by default; or what is given, at the default rate."""
    recipe = config.parse({"data": {"name": "folder"}, "model": {"trainable": "classifier"}})
    recipe = recipe.model_copy(update={"privacy": config.PrivacyConfig(target_epsilon=epsilon, delta=DELTA)})
    rate = resolve(recipe, Facts(count, 2, 128, 3)).recipe.optimizer.learning_rate
    tenth = {"bias": UnitLinear.BIAS_SCALE, "share": 0.0}
    if kind == "rates":
        for other in RATES:
            yield {"rate": other, **tenth, "textures": True}
        return
    for given in ({"bias": 1.0, "share": 0.0}, tenth, {**tenth, "share": 0.1}, {**tenth, "textures": True}):
        yield {"rate": rate, **given}


def print_scores(found: Set, facts: dict[str, Any], kind: str, runs: int) -> None:
    """Prints a line for each setting of one cell."""
    epsilon = facts["epsilon"]
    for setting in settings(kind, len(found.y), epsilon):
        scores = [accuracy(found, epsilon, seed=seed, **setting) for seed in range(runs)]
        means = {"mean": round(statistics.fmean(scores), 4), "scores": [round(score, 4) for score in scores]}
        print(json.dumps({**facts, **setting, **means}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    kinds = ("rates", "given", "unequal")
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=list(kinds))
    given = parser.parse_args()
    cells = {"rates": CASES, "given": [*CASES[:6], *MORE]}
    if of_equal := [kind for kind in given.kinds if kind in cells]:
        every = of_cifar10()
        for kind in of_equal:
            for count, epsilon, classes in cells[kind]:
                facts = {"images": count, "epsilon": epsilon, "classes": classes}
                print_scores(chosen(every, count, classes), facts, kind, given.runs)
    if "unequal" in given.kinds:
        for pair, found in of_fashion_mnist().items():
            for counts in COUNTS:
                facts = {"images": counts, "epsilon": 1.0, "pair": pair}
                print_scores(unequal(found, counts), facts, "unequal", given.runs)


if __name__ == "__main__":
    main()
