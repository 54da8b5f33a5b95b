"""Pairs of MNIST digits side by side, each digit that is there a label: mean AUROC with and without privacy.

    python -m benchmarks.several_labels [--epsilon 3] [--steps 120] [--rates 1,4,16] [--output FILE]

30,000 pairs of training images, stretched to 28 x 28, ten labels; 5,000 pairs of test images; the small network with
its defaults. Four kinds of run: private; without privacy, at each of the rates times the default; private with a third
of the labels unknown; and private with a threshold for each label, fitted on a half of the test pairs for a sensitivity
of 0.9, of which the other half says how it holds. Prints JSON.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import sfumato
from benchmarks.machine import machine
from sfumato.config import DataConfig
from sfumato.data import loading
from sfumato.evaluation.evaluate import calibrate

SETTINGS = {
    "data.classes": [str(digit) for digit in range(10)],
    "data.task": "multilabel",
    "data.channels": 1,
    "data.image_size": 28,
    "data.resize": "stretch",
    "model.name": "small_cnn",
}


def pairs(images: np.ndarray, digits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(N / 2, 28, 56), uint8, and which digits each shows: (N / 2, 10)."""
    labels = np.zeros((len(images) // 2, 10), dtype=np.int64)
    for side in (0, 1):
        labels[np.arange(len(labels)), digits[side::2]] = 1
    return np.concatenate([images[::2], images[1::2]], axis=2), labels


def a_third_unknown(given: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    images, labels = given
    return images, np.where(np.random.default_rng(0).random(labels.shape) < 1 / 3, -1, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rates", default="1,4,16")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    dataset = loading.load(DataConfig(name="mnist"), None, print)
    train, test = (
        pairs(part.integers()[:, 0].numpy(), part.labels.numpy()) for part in (dataset.train, dataset.held_out_files)
    )
    settings = SETTINGS | {"training.num_steps": given.steps}
    folder = Path(tempfile.mkdtemp())

    def run(name: str, data: Any, **how: Any) -> dict[str, Any]:
        changed = settings | how.pop("changed", {})
        result = sfumato.train("image-folder", folder / name, settings=changed, data=data, test=test, **how)
        return {"run": name, "auroc": result.auroc, "accuracy": result.accuracy, "epsilon": result.epsilon}

    results = [run("private", train, epsilon=given.epsilon)]
    recipe = sfumato.config.read(folder / "private" / "recipe.toml")
    rate = recipe["optimizer"]["learning_rate"]
    for times in map(float, given.rates.split(",")):
        changed = {"optimizer.learning_rate": times * rate}
        without = run(f"without privacy, {times:g} x the rate", train, non_private=True, changed=changed)
        results.append(without)
    results.append(run("private, a third unknown", a_third_unknown(train), epsilon=given.epsilon))
    one, other = (tuple(part[side::2] for part in test) for side in (0, 1))
    calibrate(folder / "private", one, sensitivity=0.9)
    found = sfumato.evaluate(folder / "private", other)
    reached = [[each.sensitivity, each.specificity] for each in found.decisions or []]
    results.append({"run": "thresholds for a sensitivity of 0.9, on unseen images", "reached": reached})
    told = json.dumps({"machine": machine("cpu"), "results": results}, indent=1)
    print(told)
    if given.output is not None:
        given.output.write_text(told + "\n")


if __name__ == "__main__":
    main()
