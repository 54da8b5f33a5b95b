"""Images a second through a frozen network: ours beside a bare loop over timm's, in turns.

python -m benchmarks.features [--images 2048] [--size 128] [--rounds 3]
"""

import argparse
import statistics
import tempfile
import time

import torch

from sfumato.data.images import ImageSet
from sfumato.models.trainable import Backbone
from sfumato.models.weights import fit, read_weights
from sfumato.training.features import ROWS, features_of


def main() -> None:
    """Prints both rates and their ratio."""
    import os

    import timm

    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("images", 2048), ("size", 128), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    pixels = torch.randint(0, 256, (asked.images, 3, 32, 32), dtype=torch.uint8)
    images = ImageSet(
        pixels,
        torch.zeros(asked.images, dtype=torch.int64),
        torch.ones(asked.images, dtype=torch.bool),
        (0.5,) * 3,
        (0.5,) * 3,
        image_size=asked.size,
    )
    model = timm.create_model("tf_efficientnet_lite0", pretrained=False).eval()
    fit(model, read_weights("efficientnet_lite0", "package"), "classifier")
    backbone = Backbone(model, "classifier", torch.zeros(1, 3, asked.size, asked.size))
    bare = timm.create_model("tf_efficientnet_lite0", pretrained=False, num_classes=0).eval()

    def ours() -> None:
        with tempfile.TemporaryDirectory() as cache:  # nothing is found there
            os.environ["XDG_CACHE_HOME"] = cache
            features_of(backbone, images, torch.device("cpu"), lambda line: None)

    @torch.inference_mode()
    def loop() -> None:
        for part in pixels.split(ROWS["cpu"]):
            batch = torch.nn.functional.interpolate(part / 255, (asked.size,) * 2, mode="bicubic", antialias=True)
            bare(batch.sub_(0.5).div_(0.5).contiguous(memory_format=torch.channels_last))

    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    for _ in range(asked.rounds):
        for name, run in (("ours", ours), ("bare", loop)):
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    rate = {name: asked.images / statistics.median(times) for name, times in seconds.items()}
    print(
        f"ours {rate['ours']:.0f} images/s, bare {rate['bare']:.0f} images/s, ratio {rate['ours'] / rate['bare']:.2f}"
    )


if __name__ == "__main__":
    main()
