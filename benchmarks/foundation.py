"""Cost of everything that is not the gradient, and of the gradient that the fast engine must beat.

    python -m benchmarks.foundation [startup overhead noise memory decoding engine update]

Prints one JSON object; seconds are medians of whole processes where a process is measured. Needs SFUMATO_DATA
for `overhead`, `memory` and `update`. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MNIST = "mnist-cnn-eps-2.93"
TABLE_12 = "plan --num-examples 50000 --delta 1e-5 --batch-size 4096 --noise-multiplier 3 --num-steps 2468".split()


def whole_process(arguments: list[str], runs: int = 5) -> dict[str, Any]:
    """Median seconds and peak memory of `sfumato ARGUMENTS` as a process."""
    seconds, peaks = [], []
    for _ in range(runs):
        code = (
            "import resource, subprocess, sys; status = subprocess.run([sys.executable, '-m', 'sfumato', "
            "*sys.argv[1:]], stdout=2).returncode; "
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(status)"
        )
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        seconds.append(time.perf_counter() - start)
        if done.returncode:
            raise SystemExit(done.stderr)
        peaks.append(int(done.stdout) / 1e6)
    return {"seconds": round(statistics.median(seconds), 3), "peak_gb": round(statistics.median(peaks), 3)}


def startup() -> dict[str, Any]:
    return {"help": whole_process(["--help"]), "plan_table_12": whole_process(TABLE_12)}


def train_briefly(*settings: str, steps: int = 20) -> tuple[dict[str, Any], Path, dict[str, Any]]:
    """A short run of the MNIST recipe: process figures, folder, last line of its private metrics."""
    folder = Path(tempfile.mkdtemp()) / "run"
    words = [
        "train",
        MNIST,
        "--output",
        str(folder),
        "--accountant",
        "rdp",
        "--set",
        f"training.num_steps={steps}",
        *settings,
    ]
    figures = whole_process(words, runs=1)
    return figures, folder, json.loads((folder / "owner" / "metrics_private.jsonl").read_text().splitlines()[-1])


def overhead() -> dict[str, Any]:
    """Sampling, noise, ledger and checkpoint, as a share of a run and per step."""
    from sfumato.accounting.mechanism import Mechanism
    from sfumato.data.views import Views
    from sfumato.evaluation.trained import load
    from sfumato.randomness import Streams
    from sfumato.training.step import Draws

    steps = 40
    _, folder, line = train_briefly(f"--set=training.evaluate_every={steps}", steps=steps)
    trained = load(folder)
    batch_size = trained.recipe.training.batch_size
    assert batch_size is not None
    draws = Draws(Mechanism(60_000, batch_size, 1.0, steps), Views.of(trained.recipe.augmentation), Streams())
    parts = {
        "sampling": median_seconds(lambda: draws.of_update(0), 50),
        "noise": noise_seconds(sum(value.numel() for value in trained.model.parameters())),
        "ledger": line["phases"]["ledger"] / steps,
        "checkpoint": line["phases"]["checkpoint"] / steps,
    }
    total, step_seconds = sum(parts.values()), line["seconds"] / steps
    return {
        "ms_a_step": {name: round(1e3 * value, 2) for name, value in {**parts, "all": total}.items()},
        "share": round(total / step_seconds, 4),
    }


def noise_seconds(num_parameters: int) -> float:
    """Of one update: keystream, transform and addition."""
    import torch

    from sfumato.randomness import Stream, new_key
    from sfumato.training.noise import add_noise

    grad_sum = {"weights": torch.randn(num_parameters)}
    return median_seconds(lambda: add_noise(grad_sum, 1.0, Stream(new_key())), 20)


def noise() -> dict[str, Any]:
    """Milliseconds that an update of WRN-16-4 spends on noise."""
    return {"ms": round(1e3 * noise_seconds(2_748_890), 1)}


def memory() -> dict[str, Any]:
    peaks = {}
    for batch_size in (512, 8192):
        settings = [f"--set=training.batch_size={batch_size}", "--set=training.microbatch_size=256"]
        peaks[str(batch_size)] = train_briefly(*settings, steps=4)[0]["peak_gb"]
    return {
        "recipe_peak_gb": train_briefly(steps=4)[0]["peak_gb"],
        "batch_peaks_gb": peaks,
        "growth": peaks["8192"] / peaks["512"] - 1,
    }


def decoding() -> dict[str, Any]:
    """512 x 512 JPEG files into the cache, once."""
    import numpy as np
    from PIL import Image

    root = Path(tempfile.mkdtemp())
    os.environ["XDG_CACHE_HOME"] = str(root / "cache")
    source, count = np.random.default_rng(0), 600
    for number in range(count):
        name = root / "images" / "ab"[number % 2]
        name.mkdir(parents=True, exist_ok=True)
        pattern = Image.fromarray(source.integers(0, 256, (24, 24, 3), dtype=np.uint8)).resize(
            (512, 512), Image.Resampling.BICUBIC
        )
        noisy = np.clip(np.asarray(pattern).astype(int) + source.integers(-8, 9, (512, 512, 3)), 0, 255).astype(
            np.uint8
        )
        Image.fromarray(noisy).save(name / f"{number}.jpg", quality=90)
    from sfumato.config import DataConfig
    from sfumato.data import loading as datasets

    rates = {}
    for size in (64, 224):
        start = time.perf_counter()
        datasets.load(DataConfig(name="folder", image_size=size, channels=3), root / "images", lambda text: None)
        rates[f"to_{size}"] = round(count / (time.perf_counter() - start))
    return {"images_a_second": rates}


def median_seconds(work: Callable[[], Any], rounds: int) -> float:
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def engine() -> dict[str, Any]:
    """torch.func against the ordinary step (forward and backward of the mean loss), WRN-16-4 with weight
    standardisation.
    """
    import torch

    from sfumato.clipping import clipped_grad
    from sfumato.models import build

    model = build("wide_resnet", image_size=32, channels=3, num_classes=10, options={"depth": 16, "width": 4}, seed=0)
    loss = torch.nn.functional.cross_entropy
    out = {}
    for examples, augmult in ((32, 1), (16, 4), (8, 16)):
        views, labels = torch.randn(examples, augmult, 3, 32, 32), torch.randint(10, (examples,))
        flat, repeated = views.flatten(0, 1), labels.repeat_interleave(augmult)
        grad_fn = clipped_grad(
            model,
            lambda o, y: loss(o, y, reduction="none"),
            clipping_norm=1.0,
            augmult=augmult,
            engine="func",
            microbatch_size=examples,
        )

        def private(grad_fn=grad_fn, views=views, labels=labels):
            grad_fn(views, labels)

        def ordinary(flat=flat, repeated=repeated):
            torch.autograd.grad(loss(model(flat), repeated), list(model.parameters()))

        seconds, plain = median_seconds(private, 5), median_seconds(ordinary, 5)
        out[f"{examples}x{augmult}"] = {
            "func_s": round(seconds, 3),
            "ordinary_s": round(plain, 3),
            "ratio": round(seconds / plain, 2),
        }
    return out


def update() -> dict[str, Any]:
    """One update of Table 12: 4,096 images x 16 views through WRN-16-4."""
    folder = Path(tempfile.mkdtemp()) / "run"
    words = [
        "train",
        "de2022/cifar10-wrn-16-4-eps-8",
        "--output",
        str(folder),
        "--accountant",
        "rdp",
        "--set",
        "training.num_steps=1",
    ]
    figures = whole_process(words, runs=1)
    line = json.loads((folder / "owner" / "metrics_private.jsonl").read_text().splitlines()[-1])
    return {"update_seconds": line["phases"]["gradient"], "evaluation_seconds": line["phases"]["evaluation"], **figures}


PARTS = {part.__name__: part for part in (startup, overhead, noise, memory, decoding, engine, update)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all but update")
    chosen = parser.parse_args().parts or [name for name in PARTS if name != "update"]
    from benchmarks.machine import machine

    print(json.dumps({"machine": machine(), **{name: PARTS[name]() for name in chosen}}, indent=1))
