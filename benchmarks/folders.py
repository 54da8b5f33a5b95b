"""Folders that nobody tuned for: two classes of Fashion-MNIST, 3:1, as PNG files.

    python -m benchmarks.folders DEST [--pair sneaker-boot ...]

writes DEST/<pair>/{train,test}/<class>/*.png: 3,000 + 1,000 training images and all test images of
the two classes. Then, for example,

    sfumato train image-folder --data-root DEST/sneaker-boot --epsilon 3 --delta 1e-5
"""

import argparse
from pathlib import Path

from PIL import Image

from sfumato.config import DataConfig
from sfumato.data import loading as datasets

PAIRS = {  # majority, minority
    "sneaker-boot": (7, 9),
    "tshirt-shirt": (0, 6),
    "pullover-coat": (2, 4),
    # The defaults were chosen on these:
    "trouser-dress": (1, 3),
    "dress-shirt": (3, 6),
    "sandal-sneaker": (5, 7),
}


def write(dest: Path, pair: str) -> None:
    data = datasets.load(DataConfig(name="fashion_mnist"), None, print)
    for part, images, counts in (("train", data.train, (3000, 1000)), ("test", data.held_out, (1000, 1000))):
        for label, count in zip(PAIRS[pair], counts, strict=True):
            name = data.classes[label].replace("/", "-").replace(" ", "-")
            folder = dest / pair / part / name
            folder.mkdir(parents=True, exist_ok=True)
            chosen = (images.labels == label).nonzero()[:count, 0].tolist()
            for number, pixels in enumerate(images.subset(chosen).integers().numpy()):
                Image.fromarray(pixels[0]).save(folder / f"{number:04d}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", type=Path)
    parser.add_argument("--pair", nargs="*", choices=list(PAIRS), default=list(PAIRS))
    arguments = parser.parse_args()
    for pair in arguments.pair:
        write(arguments.dest, pair)
