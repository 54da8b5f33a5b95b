"""Does a change of the code change what a run computes? Digests of the weights of five short seeded runs.

    python -m benchmarks.behaviour [--package FOLDER] [--compare FILE]

Each run takes 20 updates through the command line, from a public seed and at a fixed microbatch: on one machine, with
one number of threads, it ends in the same weights, bit for bit, until somebody changes what is computed or how it
rounds. FOLDER holds the package to run (default: this checkout's src), FILE what an earlier call printed: names that
differ are listed, and the status is 1.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.torch import load_file

from benchmarks.machine import machine

STEPS = ["--set", "training.num_steps=20"]
SEED = ["--set", "run.seed=1"]
RUNS = {
    "digits": ["train", "demo/digits", *STEPS, *SEED, "--set", "training.microbatch_size=64"],
    "Fashion-MNIST, epsilon 1": [
        *("train", "fashion-mnist-eps-1", *STEPS, *SEED),
        *("--set", "training.batch_size=256", "--set", "training.microbatch_size=16"),
    ],
    "a folder": [
        *("train", "image-folder", "--epsilon", "3", *STEPS, *SEED, "--set", "training.batch_size=16"),
        *(
            "--set",
            "training.microbatch_size=8",
            "--set",
            "augmentation.kind=crop_flip",
            "--set",
            "augmentation.augmult=2",
        ),
    ],
    "compiled": [
        "train",
        "demo/digits",
        *STEPS,
        *SEED,
        "--set",
        "training.microbatch_size=64",
        "--set",
        "training.compile=true",
    ],
    "a simulation": [
        "simulate",
        "demo/digits",
        "--batch-size",
        "64",
        "--seeds",
        "3",
        *STEPS,
        "--set",
        "training.microbatch_size=16",
    ],
}


def digest(weights: Path) -> str:
    """Of names, types, shapes and bits of all tensors in a file."""
    found = hashlib.sha256()
    for name, value in sorted(load_file(weights).items()):
        found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def write_images(folder: Path) -> None:
    """Eighty small coloured images of two classes, the same each time."""
    generator = np.random.default_rng(0)
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for i in range(40):
            pixels = generator.integers(0, 200, (20, 20, 3), dtype=np.uint8) + np.uint8(40 * label)
            Image.fromarray(pixels).save(folder / name / f"{i:02}.png")


def run(name: str, package: Path, work: Path) -> str:
    """The digest of one run's weights."""
    output = work / name
    arguments = [*RUNS[name], "--output", str(output)]
    if name == "a folder":
        write_images(work / "images")
        arguments += ["--data-root", str(work / "images")]
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    subprocess.run(
        [sys.executable, "-m", "sfumato", *arguments], env=environment, check=True, stdout=subprocess.DEVNULL
    )
    (weights,) = output.rglob("model.safetensors")
    return digest(weights)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=Path(__file__).parents[1] / "src")
    parser.add_argument("--compare", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found: dict[str, Any] = {name: run(name, arguments.package, Path(work)) for name in RUNS}
    print(json.dumps({**found, "machine": machine()}, indent=2))
    if arguments.compare is None:
        return 0
    before = json.loads(arguments.compare.read_text())
    different = [name for name in RUNS if before[name] != found[name]]
    print(f"other weights than in {arguments.compare}: {', '.join(different) or 'none'}", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
