"""Ordinary training through the trainer beside a plain PyTorch loop: the same network, images, batches and optimizer.

    python -m benchmarks.ordinary [--batch 64] [--steps 10] [--rounds 4]

WRN-16-4 on CIFAR-10's images without random views, SGD with momentum 0.9 and weight decay. Both take turns in one
process; a round's first two updates are left out. A run writes 20 checkpoints, however long it is: none falls into
what is timed. Prints images per second of both and the median ratio as JSON.
Nothing else should run meanwhile.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.machine import machine
from sfumato.config import parse
from sfumato.data import loading
from sfumato.models import registry
from sfumato.planning.resolve import resolve
from sfumato.training.logs import Progress
from sfumato.training.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    num_steps = given.steps + 2
    recipe = parse(
        {
            "data": {"name": "cifar10"},
            "model": {"name": "wide_resnet", "options": {"depth": 16, "width": 4}},
            "augmentation": {"kind": "none", "augmult": 0},
            "optimizer": {"learning_rate": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
            "training": {
                "batch_size": given.batch,
                "num_steps": num_steps,
                "evaluate_every": num_steps,
                "checkpoint_every": num_steps,
            },
        }
    )
    dataset = loading.load_for(recipe, None, print)
    dataset = dataclasses.replace(dataset, held_out_files=dataset.held_out_files.subset(list(range(64))))
    plan = resolve(recipe, dataset.facts)

    def rate(stamps: list[float]) -> float:
        """Images a second between the first update and the last but one, which an evaluation follows."""
        return given.batch * (num_steps - 2) / (stamps[num_steps - 2] - stamps[0])

    def trainer() -> float:
        stamps: list[float] = []
        progress = Progress(step=lambda facts: stamps.append(time.perf_counter()))
        with tempfile.TemporaryDirectory() as folder:
            Trainer(dataset, progress=progress).run_plan(plan, Path(folder) / "run")
        return rate(stamps)

    def loop() -> float:
        model = registry.build(
            "wide_resnet", image_size=32, channels=3, num_classes=10, options={"depth": 16, "width": 4}, seed=0
        ).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        stamps = []
        order = torch.randperm(len(dataset.train))
        for step in range(num_steps):
            indices = order[step * given.batch : (step + 1) * given.batch]
            images = dataset.train.batch(indices)
            loss = F.cross_entropy(model(images), dataset.train.labels[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stamps.append(time.perf_counter())
        return rate(stamps)

    rounds = [(trainer(), loop()) for _ in range(given.rounds)]
    ratio = statistics.median(own / plain for own, plain in rounds)
    shown = [[round(rate, 2) for rate in pair] for pair in rounds]
    print(json.dumps({"machine": machine(), "images a second, trainer and loop": shown, "ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()
