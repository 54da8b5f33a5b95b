"""A network pre-trained on half of Fashion-MNIST's classes, fine-tuned privately on the other half.

    python -m benchmarks.halves DEST [--epsilon 1] [--seeds 1]

writes DEST/{public,private}/{train,test}/<class>/*.png (clothes for the upper body, and the rest),
pre-trains a small network on the public half without privacy, then trains four ways on the private
half: from scratch, and from the public weights all layers, scales and shifts of the normalisation
with the classifier, and the classifier alone. Prints one line of JSON for each.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image

from sfumato.config import DataConfig
from sfumato.data import loading as datasets

HALVES = {"public": (0, 2, 3, 4, 6), "private": (1, 5, 7, 8, 9)}
DATA = ["--set", "data.image_size=28", "--set", "data.channels=1"]
NETWORK = ["--set", "model.name=small_cnn", "--set", "model.options.width=32"]
WAYS = {
    "scratch": ["--set", "training.num_steps=150"],
    "all": ["--set", "model.trainable=all", "--set", "training.num_steps=150"],
    "norms": ["--set", "model.trainable=norms", "--set", "training.num_steps=150"],
    "classifier": ["--set", "model.trainable=classifier"],
}


def write(dest: Path) -> None:
    data = datasets.load(DataConfig(name="fashion_mnist"), None, print)
    for half, labels in HALVES.items():
        for part, images in (("train", data.train), ("test", data.held_out)):
            for label in labels:
                folder = dest / half / part / data.classes[label].replace("/", "-").replace(" ", "-")
                folder.mkdir(parents=True, exist_ok=True)
                chosen = (images.labels == label).nonzero()[:, 0].tolist()
                for number, pixels in enumerate(images.subset(chosen).integers().numpy()):
                    Image.fromarray(pixels[0]).save(folder / f"{number:05d}.png")


def train(*arguments: str, output: Path) -> dict[str, object]:
    start = time.perf_counter()
    command = [sys.executable, "-m", "sfumato", "train", *arguments, "--output", str(output), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return {**json.loads(done.stdout), "wall_seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", type=Path)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=1, help="private runs of each way")
    args = parser.parse_args()
    if not (args.dest / "private").is_dir():
        write(args.dest)
    public = args.dest / "pretrained"
    if not (public / "result.json").exists():
        steps = ["--set", "training.num_steps=1500", "--set", "training.batch_size=128"]
        optimizer = ["optimizer.learning_rate=0.02", "optimizer.momentum=0.9", "optimizer.schedule=cosine"]
        settings = [part for setting in optimizer for part in ("--set", setting)]
        facts = train(
            *("image-folder", "--data-root", str(args.dest / "public"), "--non-private", *DATA, *NETWORK),
            *(*steps, *settings),
            output=public,
        )
        print(json.dumps({"way": "pre-training", "accuracy": facts["accuracy"], "seconds": facts["wall_seconds"]}))
    weights = [f"model.init_from={public}", "model.pretrained_on=half of Fashion-MNIST's classes"]
    from_weights = [part for setting in weights for part in ("--set", setting)]
    for number in range(args.seeds):
        for way, settings in WAYS.items():
            facts = train(
                *("image-folder", "--data-root", str(args.dest / "private"), "--epsilon", str(args.epsilon)),
                *("--delta", "1e-5", *DATA, *NETWORK, *settings, *(from_weights if way != "scratch" else [])),
                output=args.dest / f"{way}-{number}-{time.time_ns()}",
            )
            found = {key: facts[key] for key in ("epsilon", "accuracy", "accuracy_last")}
            print(json.dumps({"way": way, **found, "seconds": facts["wall_seconds"]}), flush=True)


if __name__ == "__main__":
    main()
