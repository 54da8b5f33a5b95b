"""How far do features that no image taught go, and at which rate? The evidence behind the recipes `cifar10-eps-1` to
`fashion-mnist-eps-2.7` (docs/defaults.md).

    python -m benchmarks.formula cifar10 scattering+dictionary --mirror [--images 15000] [--cells 1:8 3:20 8:50]

Simulates the updates of a run on the first training images with the noise that each of all of them has at an epsilon,
and scores on the validation images: no test image chooses anything. Prints one line of JSON for each epsilon and rate.
"""

import argparse
import json

import torch

from benchmarks.on_features import DELTA, Set, accuracy
from sfumato import config
from sfumato.data import loading
from sfumato.models.layers import UnitLinear
from sfumato.planning.resolve import resolve
from sfumato.training.features import features_of
from sfumato.training.network import Network


def features(name: str, model: str, mirror: bool, count: int) -> tuple[Set, int]:
    """Of the first training images and of all validation images; how many of the first there are in all."""
    values = {
        "data": {"name": name, "split": "train"},
        "model": {"name": model, "options": {"mirror": mirror}},
        "privacy": {"target_epsilon": 1.0, "delta": DELTA},
    }
    recipe = config.parse(values)
    dataset, device = loading.load_for(recipe, None, print), torch.device("cpu")
    backbone = Network(resolve(recipe, dataset.facts), dataset, device).backbone
    assert backbone is not None
    some = dataset.train.subset(range(min(count, len(dataset.train))))
    train, scored = (features_of(backbone, images, device, print) for images in (some, dataset.held_out))
    no_centre = torch.zeros(train.shape)
    return Set(train.stored, train.labels, scored.stored, scored.labels, no_centre), len(dataset.train)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("model")
    parser.add_argument("--mirror", action="store_true")
    parser.add_argument("--images", type=int, default=15_000)
    parser.add_argument("--cells", nargs="+", default=["1:8", "3:20", "8:50"], help="EPSILON:RATE")
    given = parser.parse_args()
    found, total = features(given.data, given.model, given.mirror, given.images)
    for cell in given.cells:
        epsilon, rate = (float(part) for part in cell.split(":"))
        as_noisy = epsilon * total / len(found.y)
        score = accuracy(found, as_noisy, rate, 0, UnitLinear.BIAS_SCALE, 0.0)
        line = {"data": given.data, "model": given.model, "mirror": given.mirror, "images": len(found.y)}
        print(json.dumps({**line, "epsilon": epsilon, "rate": rate, "accuracy": round(score, 4)}), flush=True)


if __name__ == "__main__":
    main()
