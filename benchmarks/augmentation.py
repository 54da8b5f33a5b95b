"""Views per second, each kind, on one thread or on the accelerator, beside torchvision's transforms one image at a
time.

    python -m benchmarks.augmentation [--size 32] [--device cpu] [--views 2048]

Prints one JSON object; processor time on a CPU, so that other work matters less.
"""

import argparse
import json
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

from benchmarks.machine import machine  # noqa: E402
from sfumato.data.augmentation import augment  # noqa: E402
from sfumato.training.process import keep_freed_memory  # noqa: E402

KINDS = ("flip", "crop_flip", "rrc", "tan", "simclr")


def torchvisions(kind: str, size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    jitter, padding = v2.ColorJitter(0.8, 0.8, 0.8, 0.2), max(round(size * 20 / 224), 1)
    parts = {
        "flip": [v2.RandomHorizontalFlip()],
        "crop_flip": [v2.RandomCrop(size, 4, padding_mode="symmetric"), v2.RandomHorizontalFlip()],
        "rrc": [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()],
        "tan": [
            v2.RandomCrop(size, padding, padding_mode="reflect"),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([jitter], 0.3),
        ],
        "simclr": [
            v2.RandomResizedCrop(size),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([jitter], 0.8),
            v2.RandomGrayscale(0.2),
            v2.RandomApply([v2.GaussianBlur(2 * (size // 20) + 1, (0.1, 2.0))], 0.5),
        ],
    }
    return v2.Compose(parts[kind])


def seconds(work: Callable[[], object], device: str, rounds: int = 5) -> float:
    """The least of some rounds."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    work()
    times = []
    for _ in range(rounds):
        wait()
        start = clock()
        work()
        wait()
        times.append(clock() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--views", type=int, default=2048)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    images = torch.rand(options.views // 8, 3, options.size, options.size, device=options.device)
    bits = torch.randint(0, 2**32, (len(images), 8))
    constants, padding = (0.5, 0.5, 0.5), max(round(options.size * 20 / 224), 1)
    rates: dict[str, dict[str, int]] = {}
    for kind in KINDS:
        here = seconds(
            lambda kind=kind: augment(images, bits, kind, padding if kind == "tan" else 4, constants, constants),
            options.device,
        )
        rates[kind] = {"views_a_second": round(bits.numel() / here)}
        if options.device == "cpu":
            transform, some = torchvisions(kind, options.size), images[:64]
            there = seconds(
                lambda transform=transform, some=some: [transform(image) for image in some], options.device, 3
            )
            rates[kind]["torchvision_one_by_one"] = round(len(some) / there)
    facts = {"size": options.size, "device": options.device, "machine": machine(options.device)}
    print(json.dumps({**facts, "kinds": rates}))


if __name__ == "__main__":
    main()
