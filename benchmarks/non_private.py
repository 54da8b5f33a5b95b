"""What `--non-private` reaches beside the best of nine rates of plain SGD: the same network, batch and steps.

    python -m benchmarks.non_private DEST [--sets digits ...] [--seeds 0 1 2 3 4] [--workers 2]

Digits, and 3,000 images of MNIST, Fashion-MNIST, CIFAR-10 and two pairs of their classes, as folders with the defaults
of `image-folder`; accuracy on 2,000 unseen images. One line of JSON for each run in DEST/runs.jsonl; what stands there
is not done again.
"""

import argparse
import dataclasses
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import torch
from PIL import Image

from sfumato.config import DataConfig, parse
from sfumato.data import loading
from sfumato.planning.resolve import resolve_without_privacy
from sfumato.training.logs import Progress
from sfumato.training.trainer import Trainer

TEN = tuple(range(10))
SETS = {
    "digits": ("digits", TEN),
    "mnist": ("mnist", TEN),
    "fashion": ("fashion_mnist", TEN),
    "cifar10": ("cifar10", TEN),
    "tshirt-shirt": ("fashion_mnist", (0, 6)),
    "cat-dog": ("cifar10", (3, 5)),
}
RATES = (None, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Of plain SGD; None: what `--non-private` takes."""
COUNTS = {"train": 3000, "test": 2000}


def write(folder: Path, name: str) -> None:
    """train/ and test/ with the classes of a set."""
    base, classes = SETS[name]
    data = loading.load(DataConfig(name=base), None, lambda line: None)
    for label, (part, images) in product(classes, (("train", data.train), ("test", data.held_out))):
        below = folder / part / data.classes[label].replace("/", "-")
        below.mkdir(parents=True)
        chosen = (images.labels == label).nonzero()[:, 0].tolist()[: COUNTS[part] // len(classes)]
        for number, pixels in enumerate(images.subset(chosen).integers().numpy()):
            Image.fromarray(pixels.transpose(1, 2, 0).squeeze()).save(below / f"{number:04d}.png")


def run(dest: Path, name: str, rate: float | None, seed: int) -> dict[str, object]:
    torch.set_num_threads(1)
    data = {"name": "digits"}
    if name != "digits":
        data = {"name": "folder", "path": str(dest / name), "channels": 3 if SETS[name][0] == "cifar10" else 1}
    recipe = parse({"data": data, "privacy": {}, "run": {"seed": seed}})
    dataset = loading.load_for(recipe, None, lambda line: None)
    plan = resolve_without_privacy(recipe, dataset.facts)
    if rate is not None:
        plain = plan.recipe.optimizer.model_copy(update={"learning_rate": rate, "max_grad_norm": None})
        plan = dataclasses.replace(plan, recipe=plan.recipe.model_copy(update={"optimizer": plain}))
    with tempfile.TemporaryDirectory() as folder:
        result = Trainer(dataset, progress=Progress()).run_plan(plan, Path(folder) / "run")
    return {"set": name, "rate": rate, "seed": seed, "accuracy": result.accuracy, "seconds": round(result.seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dest", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES[1:]))
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    given.dest.mkdir(parents=True, exist_ok=True)
    for name in given.sets:
        if name != "digits" and not (given.dest / name).exists():
            write(given.dest / name, name)
    log = given.dest / "runs.jsonl"
    log.touch()
    done = {(row["set"], row["rate"], row["seed"]) for row in map(json.loads, log.read_text().splitlines())}
    wanted = [each for each in product(given.sets, [None, *given.rates], given.seeds) if each not in done]
    with ProcessPoolExecutor(given.workers) as pool, log.open("a") as file:
        for found in pool.map(run, [given.dest] * len(wanted), *zip(*wanted, strict=True)):
            print(json.dumps(found), file=file, flush=True)


if __name__ == "__main__":
    main()
