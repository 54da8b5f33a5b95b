"""What should a classifier on public features be given, and how fast should it learn? The evidence behind
`model.features`, the bias of `sfumato.models.layers.UnitLinear` and the rate (docs/defaults.md).

    python -m benchmarks.on_features [--runs 3] [--kinds rates given]

Simulates the updates of a run (all images, momentum 0.9, average 0.9, C 0.5, noise of the stated epsilon at delta 1e-5)
on features of EfficientNet-Lite0 of CIFAR-10 at 128 pixels, with noise that is drawn anew. Trains on the first of
16,000 training images, scores on the other 29,000 and the 5,000 of the validation split: no test image chooses
anything. Prints one line of JSON for each setting.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from sfumato import config
from sfumato.accounting.gaussian import mu_gaussian
from sfumato.data import loading
from sfumato.data.catalogue import Facts
from sfumato.models.layers import UnitLinear, centred
from sfumato.models.textures import dead_leaves
from sfumato.models.weights import read_weights
from sfumato.planning import classifiers
from sfumato.planning.resolve import resolve
from sfumato.training.features import ROWS
from sfumato.training.learner import Learner

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


_TEXTURES = 256
"""Of which the public centre is the mean."""


class Set(NamedTuple):
    """Features (m, D) and labels (m,) to train and to score on, and the mean of features of textures (D,)."""

    x: torch.Tensor
    y: torch.Tensor
    x_scored: torch.Tensor
    y_scored: torch.Tensor
    public_centre: torch.Tensor


def all_features() -> Set:
    """Of all training and validation images, and of textures."""
    values = {
        "data": {"name": "cifar10", "image_size": 128, "split": "train"},
        "model": {"name": "efficientnet_lite0", "features": "unit"},
        "privacy": {"target_epsilon": 1.0, "delta": DELTA},
    }
    recipe = config.parse(values)
    dataset = loading.load_for(recipe, None, print)
    weights = read_weights("efficientnet_lite0", "package")
    plan = resolve(recipe, dataset.facts)
    learner = Learner(plan, dataset, torch.device("cpu"), weights=weights, report=print)
    learner.initialise(np.zeros(1, np.uint64))
    backbone = learner.network.backbone
    assert backbone is not None
    with torch.inference_mode():
        textures = torch.tensor(dead_leaves(_TEXTURES, 128, 3))
        centre = torch.cat([backbone(part) for part in textures.split(ROWS)]).mean(0)
    train, scored = learner.source.train, learner.source.held_out
    x = torch.cat([part.batch(torch.arange(len(part))) for part in (train, scored)])
    y = torch.cat([train.labels, scored.labels])
    return Set(x[:_TRAIN], y[:_TRAIN], x[_TRAIN:], y[_TRAIN:], centre)


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
    default = resolve(recipe, Facts(count, 2, 128, 3)).recipe
    share = classifiers.SHARE_OF_FIRST_RELEASE if default.model.features == "centred" else 0.0
    rate, tenth = default.optimizer.learning_rate, UnitLinear.BIAS_SCALE
    if kind == "rates":
        for other in RATES:
            yield {"rate": other, "bias": tenth, "share": share}
        return
    for bias, some in ((1.0, 0.0), (tenth, 0.0), (tenth, 0.03), (tenth, 0.1)):
        yield {"rate": rate, "bias": bias, "share": some}
    yield {"rate": rate, "bias": tenth, "share": 0.0, "textures": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=("rates", "given"), default=["rates", "given"])
    given = parser.parse_args()
    every = all_features()
    for kind in given.kinds:
        for count, epsilon, classes in CASES if kind == "rates" else [*CASES[:6], *MORE]:
            found = chosen(every, count, classes)
            for setting in settings(kind, count, epsilon):
                scores = [accuracy(found, epsilon, seed=seed, **setting) for seed in range(given.runs)]
                facts = {"images": count, "epsilon": epsilon, "classes": classes, **setting}
                facts |= {"mean": round(statistics.fmean(scores), 4), "scores": [round(score, 4) for score in scores]}
                print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
