"""What stands between a trained classifier and a decision: calibrated probabilities, a threshold, and
epsilon for a person instead of an image.

    python -m benchmarks.decisions DEST [--pairs dress-shirt ...] [--epsilon 3] [--parts calibration persons speed]

calibration  two classes of Fashion-MNIST, 3,000 : 1,000, of which the run holds out a fifth by itself;
             calibration error on 3,000 : 1,000 unseen images, and, where both classes are as frequent,
             of a calibration and of a threshold for a sensitivity of 90 % that were fitted on one half
             of 6,000 unseen images and are judged on the other
persons      3,000 images of 1,000 people with 1 to 5 images, of whom 2 or 4 count, and of 250 people with
             12: epsilon for an image, and for a person with images drawn and with people drawn
speed        `sfumato evaluate` on 10,000 unseen PNG files

Prints one line of JSON for each measurement. What is finished in DEST is not done again.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.folders import PAIRS, write
from sfumato.config import DataConfig
from sfumato.data import loading


def sfumato(*words: object) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "sfumato", *map(str, words), "--json"], stdout=subprocess.PIPE, check=True, text=True
    )
    return dict(json.loads(done.stdout))


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def halves(folder: Path) -> tuple[Path, Path]:
    """A folder of classes as two, one image after the other."""
    parts = folder.with_name(f"{folder.name}-even"), folder.with_name(f"{folder.name}-odd")
    for path in sorted(folder.glob("*/*.png")):
        to = parts[int(path.stem) % 2] / path.parent.name / path.name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
    return parts


def unused(dest: Path, pair: str) -> tuple[Path, Path]:
    """Images of Fashion-MNIST's training set that `write` left: 3,000 : 1,000, and 3,000 of each."""
    folders = dest / pair / "unseen-3-1", dest / pair / "unseen-1-1"
    if all(folder.exists() for folder in folders):
        return folders
    data = loading.load(DataConfig(name="fashion_mnist"), None, print)
    for label, used in zip(PAIRS[pair], (3000, 1000), strict=True):
        chosen = (data.train.labels == label).nonzero()[used:, 0].tolist()[:3000]
        name = data.classes[label].replace("/", "-").replace(" ", "-")
        for number, pixels in enumerate(data.train.subset(chosen).integers().numpy()):
            for folder, most in zip(folders, (used, 3000), strict=True):
                if number < most:
                    (folder / name).mkdir(parents=True, exist_ok=True)
                    Image.fromarray(pixels[0]).save(folder / name / f"{number:04d}.png")
    return folders


def trained(run: Path, images: Path, *words: object) -> dict:
    if (run / "result.json").exists():
        return dict(json.loads((run / "result.json").read_text()))
    return sfumato("train", "image-folder", "--data-root", images, "--output", run, *words)


def calibration(dest: Path, pair: str, epsilon: float) -> None:
    if not (dest / pair).exists():
        write(dest, pair)
    run = dest / f"{pair}-run"
    result = trained(run, dest / pair / "train", "--epsilon", epsilon, "--set", "data.channels=1")
    (run / "calibration.json").unlink(missing_ok=True)
    alike, even = unused(dest, pair)
    by_held_out = sfumato("evaluate", run, alike)
    fitted_on, judged_on = halves(even)
    fitted = sfumato("calibrate", run, fitted_on, "--sensitivity", 0.9)
    found = sfumato("evaluate", run, judged_on)
    say(
        pair=pair,
        epsilon=result["epsilon"],
        accuracy=by_held_out["accuracy"],
        calibration_error=by_held_out["calibration_error"],
        images_unseen=by_held_out["num_images"],
        temperature_by_held_out=by_held_out["calibration"]["temperature"],
        temperature_by_unseen=fitted["temperature"],
        sensitivity_asked=0.9,
        sensitivity_reached=found["decision"]["sensitivity"],
        specificity=found["decision"]["specificity"],
        calibration_error_of_half=found["calibration_error"],
    )


def persons(dest: Path, pair: str, epsilon: float) -> None:
    """Of images and of people drawn, where at most 2, 4 and 12 images of a person count."""
    few, many = dest / f"{pair}-persons", dest / f"{pair}-many"
    draw = np.random.default_rng(0)
    counts = draw.integers(1, 6, 1000)
    while counts.sum() != 3000:
        person = draw.integers(1000)
        counts[person] = np.clip(counts[person] + np.sign(3000 - counts.sum()), 1, 5)
    of_people(few, pair, counts.tolist())
    of_people(many, pair, [12] * 250)
    for images, limit in ((few, 2), (few, 4), (many, 12)):
        common = ["--images-per-person", limit, "--set", r"data.group_by=/([pq]\d+)-", "--set", "data.channels=1"]
        common += ["--delta", 1e-5]
        ways: dict[str, list[object]] = {
            "image": ["--epsilon", epsilon],
            "person": ["--epsilon-per-person", epsilon, "--set", "privacy.person_sampling=images"],
            "people": ["--epsilon-per-person", epsilon, "--set", "privacy.person_sampling=persons"],
        }
        for way, words in ways.items():
            run = dest / f"{pair}-{limit}-{way}-run"
            result = trained(run, images, *words, *common)
            claim = json.loads((run / "privacy.json").read_text())
            say(
                pair=pair,
                limit=limit,
                unit=claim["unit"],
                drawn=claim["drawn"],
                epsilon=claim["epsilon"],
                epsilon_person=claim["epsilon_person"],
                noise_multiplier=claim["noise_multiplier"],
                batch_size=claim["batch_size"],
                balanced_accuracy=result["balanced_accuracy"],
                seconds=result["seconds"],
            )


def of_people(images: Path, pair: str, counts: list[int]) -> None:
    """<class>/<person>-<image>.png: people with so many images each, all of one class."""
    if images.exists():
        return
    data = loading.load(DataConfig(name="fashion_mnist"), None, print)
    for part, source, numbers in (("train", data.train, counts), ("test", data.held_out, [1] * 2000)):
        pixels = {}
        for label in PAIRS[pair]:
            chosen = (source.labels == label).nonzero()[:, 0].tolist()
            pixels[label] = iter(source.subset(chosen).integers().numpy())
        for person, count in enumerate(numbers):
            label = PAIRS[pair][person % 2]
            folder = images / part / data.classes[label].replace("/", "-").replace(" ", "-")
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                name = f"{'p' if part == 'train' else 'q'}{person:04d}-{number}.png"
                Image.fromarray(next(pixels[label])[0]).save(folder / name)


def speed(dest: Path, pair: str, epsilon: float) -> None:
    many = dest / "many"
    files = sorted((dest / pair / "test").glob("*/*.png"))
    for copy in range(5):
        for path in files:
            to = many / path.parent.name / f"{copy}-{path.name}"
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)
    started = time.perf_counter()
    found = sfumato("evaluate", dest / f"{pair}-run", many)
    say(measured="evaluate", images=found["num_images"], seconds=time.perf_counter() - started)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", type=Path)
    parser.add_argument(
        "--pairs", nargs="*", choices=list(PAIRS), default=["dress-shirt", "pullover-coat", "tshirt-shirt"]
    )
    parser.add_argument("--parts", nargs="*", default=["calibration", "persons", "speed"])
    parser.add_argument("--epsilon", type=float, default=3.0)
    arguments = parser.parse_args()
    parts = {"calibration": calibration, "persons": persons, "speed": speed}
    for name in arguments.parts:
        for pair in arguments.pairs if name == "calibration" else arguments.pairs[:1]:
            parts[name](arguments.dest, pair, arguments.epsilon)
