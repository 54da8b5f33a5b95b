"""Which network suits a folder of so many images at an epsilon, and how few leave nothing to learn? The evidence behind
the default of `model.name` for folders, and behind the warning that noise drowns the signal (docs/defaults.md).

    python -m benchmarks.small_sets DEST [--sets cat-dog ... mnist] [--counts 300 1000 3000] [--epsilons 1 8]
                                         [--networks default small_cnn ...] [--runs 1] [--judge train] [--workers 2]

Pairs of classes or all ten of CIFAR-10, MNIST and Fashion-MNIST as PNG files, as many images of each class; the recipe
`image-folder`; balanced accuracy on images that no run trains on: 2,000 more training images, or with `--judge test`
1,000 test images. One line of JSON for each run in DEST/runs.jsonl; what stands there is not done again.
"""

import argparse
import json
import math
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import sfumato
from benchmarks.folders import PAIRS
from sfumato.config import DataConfig
from sfumato.data import loading

JUDGES = {"train": 2000, "test": 1000}
"""Images of all classes together."""
TEN = tuple(range(10))
OF_CIFAR10 = {
    "cat-dog": (3, 5),
    "deer-horse": (4, 7),
    "airplane-ship": (0, 8),
    "automobile-truck": (1, 9),
    "bird-frog": (2, 6),
    "bird-deer": (2, 4),
}
SETS = {
    **{name: ("cifar10", classes) for name, classes in OF_CIFAR10.items()},
    **{name: ("fashion_mnist", classes) for name, classes in PAIRS.items()},
    **{name: (name, TEN) for name in ("cifar10", "fashion_mnist", "mnist")},
}
BOTH = "scattering+dictionary"
NETWORKS: dict[str, dict[str, Any]] = {
    "default": {},
    "small_cnn": {"model.name": "small_cnn"},
    "small_cnn, grey": {"model.name": "small_cnn", "data.channels": 1},
    "scattering": {"model.name": "scattering"},
    BOTH: {"model.name": BOTH},
    f"{BOTH}, mirror": {"model.name": BOTH, "model.options.mirror": True},
    f"{BOTH}, grey": {"model.name": BOTH, "data.channels": 1},
}


def write(folder: Path, name_of_set: str, count: int, judge: str) -> None:
    """train/ and test/ with the classes of a set."""
    base, classes = SETS[name_of_set]
    data = loading.load(DataConfig(name=base), None, lambda line: None)
    judged = JUDGES[judge] // len(classes)
    for label in classes:
        train, other = ((images.labels == label).nonzero()[:, 0].tolist() for images in (data.train, data.held_out))
        unseen = (data.train, train[-judged:]) if judge == "train" else (data.held_out, other[:judged])
        trained = train[: count // len(classes)]
        assert judge == "test" or len(trained) + judged <= len(train), "an image would be trained on and judged by"
        for part, (images, some) in (("train", (data.train, trained)), ("test", unseen)):
            below = folder / part / data.classes[label].replace("/", "-").replace(" ", "-")
            below.mkdir(parents=True)
            for number, pixels in enumerate(images.subset(some).integers().numpy()):
                Image.fromarray(pixels.transpose(1, 2, 0).squeeze()).save(below / f"{number:04d}.png")


def run(folder: Path, network: str, epsilon: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    settings = {**NETWORKS[network], "privacy.target_epsilon": epsilon}
    with tempfile.TemporaryDirectory(dir=folder.parent) as output:
        result = sfumato.train("image-folder", Path(output, "run"), settings=settings, data_root=folder)
    sigma = result.noise_multiplier
    signal = round(result.batch_size * math.sqrt(result.num_steps) / sigma) if sigma else None
    return {"signal": signal, "balanced_accuracy": round(result.balanced_accuracy, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dest", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["default", "small_cnn"])
    parser.add_argument("--counts", nargs="+", type=int, default=[300, 1000, 3000])
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--judge", choices=JUDGES, default="train")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    given.dest.mkdir(parents=True, exist_ok=True)
    path = given.dest / "runs.jsonl"
    known = ("set", "images", "judge", "network", "epsilon")
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = Counter(tuple(line[key] for key in known) for line in lines)
    with ProcessPoolExecutor(given.workers) as pool, path.open("a") as file:
        waiting = []
        for name, count in product(given.sets, given.counts):
            folder = given.dest / f"{name}-{count}-{given.judge}"
            if not folder.exists():
                write(folder, name, count, given.judge)
            for network, epsilon in product(given.networks, given.epsilons):
                cell = name, count, given.judge, network, epsilon
                runs = range(done[cell], given.runs)
                waiting += [(cell, pool.submit(run, folder, network, epsilon)) for _ in runs]
        for cell, future in waiting:
            line = json.dumps({**dict(zip(known, cell, strict=True)), **future.result()})
            print(line, file=file, flush=True)
            print(line, flush=True)


if __name__ == "__main__":
    main()
