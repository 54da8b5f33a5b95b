"""A store of 1.28 million images of 64 x 64 pixels: memory, first step, gathering.

    python -m benchmarks.store FOLDER [--images 1280000] [--cold] [--model lenet] [--batch-size 4096]

Fills FOLDER/store with made-up images (15.7 GB) unless it is there, then trains two updates. With --cold nothing of
the store is in memory when they begin, as where it is larger than memory. Gathering is compared with the second update.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.config import parse
from sfumato.data import store
from sfumato.data.examples import Dataset
from sfumato.data.images import ImageSet
from sfumato.planning.resolve import resolve
from sfumato.training import logs, loop
from sfumato.training.learner import Learner

_PART, _SIZE, _CLASSES = 8192, 64, 1000


def _anonymous() -> float:
    """RssAnon in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e6


def main() -> None:
    """Fills the store, reads it, gathers, trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=1_280_000)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--batch-size", type=int, default=4096)
    asked = parser.parse_args()
    folder, settings = asked.folder / "store", {"made up": asked.images}
    start = time.perf_counter()
    byte = np.dtype(np.uint8)

    def fill(part: Path) -> None:
        shapes = {"values": ((3, _SIZE, _SIZE), byte), "digests": ((32,), byte)}
        rows, source = store.Filling(part, asked.images, shapes), np.random.default_rng(0)
        while rows.num_filled < asked.images:
            count = min(_PART, asked.images - rows.num_filled)
            values = source.integers(0, 256, (count, 3, _SIZE, _SIZE), dtype=np.uint8)
            rows.put(values=values, digests=store.sha256_of_each(values))
        print(f"filled in {time.perf_counter() - start:.0f} s", flush=True)

    made, _ = store.made(folder, settings, fill, print)
    if asked.cold:
        for path in made.glob("*.npy"):
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    found = store.read(made)
    everything = ImageSet(
        torch.from_numpy(found.columns["values"]),
        torch.arange(asked.images) % _CLASSES,
        torch.ones(asked.images, dtype=torch.bool),
        (0.5,) * 3,
        (0.5,) * 3,
        store=found,
    )
    held_out = list(range(1000))
    train = list(range(1000, asked.images))
    dataset = Dataset(
        "folder", tuple(map(str, range(_CLASSES))), everything.subset(train), everything.subset(held_out), "test"
    )
    print(f"read in {time.perf_counter() - start:.2f} s", flush=True)
    plan = resolve(
        parse(
            {
                "data": {"name": "folder", "image_size": _SIZE},
                "model": {"name": asked.model},
                "privacy": {"noise_multiplier": 1.0},
                "training": {"batch_size": asked.batch_size, "num_steps": 2, "evaluate_every": 1000},
            }
        ),
        dataset.facts,
    )

    ends, collect = [start], Learner.collect

    def begins(self: Learner, *arguments: Any, **options: Any) -> Any:
        if len(ends) == 1:
            print(f"update 1 begins after {time.perf_counter() - start:.1f} s", flush=True)
        return collect(self, *arguments, **options)

    Learner.collect = begins  # type: ignore[method-assign]

    def step(facts: logs.StepFacts) -> None:
        ends.append(time.perf_counter())
        print(f"update {facts.step} ends after {ends[-1] - start:.1f} s", flush=True)

    with tempfile.TemporaryDirectory() as output:
        progress = logs.Progress(print, step)
        loop.train(plan, dataset, Path(output) / "run", progress=progress)
    drawn = torch.from_numpy(np.sort(np.random.default_rng(1).choice(len(train), asked.batch_size, replace=False)))
    times = []
    for _ in range(3):
        drawn = (drawn + 7919) % len(train)
        begin = time.perf_counter()
        dataset.train.batch(drawn)
        times.append(time.perf_counter() - begin)
    part = 100 * sorted(times)[1] / (ends[2] - ends[1])
    print(
        f"a batch of {asked.batch_size} gathered and normalised in {min(times):.2f} to {max(times):.2f} s, "
        f"{part:.2f} % of the second update ({ends[2] - ends[1]:.1f} s)"
    )
    print(f"anonymous memory {_anonymous():.2f} GB")


if __name__ == "__main__":
    main()
