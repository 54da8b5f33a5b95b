"""How few images, and how small an epsilon, leave nothing to learn? The evidence behind the warning of `sfumato train`
that noise drowns the signal (docs/defaults.md).

    python -m benchmarks.small_sets DEST [--sets dress-shirt ... ten] [--counts 100 300 1000 3000]
                                         [--epsilons 0.1 0.3 1 3] [--model small_cnn]

Two classes of Fashion-MNIST or all ten, as many of each; the recipe `image-folder` with its defaults; balanced accuracy
on 2,000 unseen images. Prints one line of JSON for each run. What is finished in DEST is not done again.
"""

import argparse
import json
import math
from pathlib import Path

from PIL import Image

import sfumato
from benchmarks.folders import PAIRS
from sfumato.config import DataConfig
from sfumato.data import loading

UNSEEN = 2000
"""Of all classes together."""
SETS = {**PAIRS, "ten": tuple(range(10))}


def write(folder: Path, name_of_set: str, count: int) -> None:
    """train/ and test/ with the classes of a set."""
    data = loading.load(DataConfig(name="fashion_mnist"), None, lambda line: None)
    classes = SETS[name_of_set]
    for label in classes:
        chosen = (data.train.labels == label).nonzero()[:, 0].tolist()
        name = data.classes[label].replace("/", "-").replace(" ", "-")
        for part, some in (("train", chosen[: count // len(classes)]), ("test", chosen[-UNSEEN // len(classes) :])):
            (folder / part / name).mkdir(parents=True)
            for number, pixels in enumerate(data.train.subset(some).integers().numpy()):
                Image.fromarray(pixels[0]).save(folder / part / name / f"{number:04d}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dest", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--model", default="small_cnn")
    parser.add_argument("--counts", nargs="+", type=int, default=[100, 300, 1000, 3000])
    parser.add_argument("--epsilons", nargs="+", type=float, default=[0.1, 0.3, 1.0, 3.0])
    given = parser.parse_args()
    for name in given.sets:
        for count in given.counts:
            folder = given.dest / name / str(count)
            if not folder.exists():
                write(folder, name, count)
            for epsilon in given.epsilons:
                run = given.dest / f"{given.model}-{name}-{count}-{epsilon:g}"
                settings = {"model.name": given.model, "privacy.target_epsilon": epsilon}
                if given.model == "small_cnn":
                    settings["data.channels"] = 1
                result = sfumato.train(
                    "image-folder", run, settings=settings, data_root=folder, resume=(run / "recipe.toml").exists()
                )
                updates, sigma = result.num_steps, result.noise_multiplier
                signal = result.batch_size * math.sqrt(updates) / sigma if sigma else None
                facts = {"model": given.model, "set": name, "images": count, "epsilon": epsilon, "signal": signal}
                print(json.dumps({**facts, "balanced_accuracy": round(result.balanced_accuracy, 4)}), flush=True)


if __name__ == "__main__":
    main()
