"""What it costs to hold an engine to the law before its first batch, and what random numbers inside a model cost.

    python -m benchmarks.law [first draws]

Prints one JSON object. `first`: seconds of the first call, of the checks within it and of a later call. `draws`: images
a second of a private model with dropout, by one thread and by two workers, and without dropout. Nothing else should run
meanwhile.
"""

import argparse
import contextlib
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.machine import machine
from sfumato.clipping import GradFn, clipped_grad
from sfumato.clipping.engine_check import EngineCheck
from sfumato.clipping.grad_fn import Load
from sfumato.models import registry

ROUNDS = 7


def wide_resnet() -> nn.Module:
    return registry.build(
        "wide_resnet", image_size=32, channels=3, num_classes=10, options={"depth": 16, "width": 4}, seed=0
    )


def vision_transformer(**options: Any) -> nn.Module:
    import timm

    return timm.create_model("vit_tiny_patch16_224", num_classes=10, **options)


def grad_fn_of(model: nn.Module, microbatch_size: int, workers: int = 1) -> GradFn:
    return clipped_grad(
        model.train(), nn.CrossEntropyLoss(), clipping_norm=1.0, microbatch_size=microbatch_size, workers=workers
    )


def first() -> dict[str, Any]:
    """Seconds of a first call, of the checks in it, and of a second call."""
    out = {}
    for name, make, size, count in (
        ("WRN-16-4, 32 px", wide_resnet, 32, 32),
        ("ViT-tiny, 224 px", vision_transformer, 224, 8),
    ):
        torch.manual_seed(0)
        grad_fn, checks = grad_fn_of(make(), count), [0.0]
        places = ((EngineCheck, "expect"), (EngineCheck, "refuse"), (EngineCheck, "refuse_in_run"))
        held = [(place, attribute, getattr(place, attribute)) for place, attribute in places]
        for place, attribute, function in held:
            setattr(place, attribute, _timed(function, checks))
        try:
            batch = torch.randn(count, 3, size, size), torch.randint(10, (count,))
            seconds = [_seconds(lambda grad_fn=grad_fn, batch=batch: grad_fn(*batch)) for _ in range(2)]
        finally:
            for place, attribute, function in held:
                setattr(place, attribute, function)
        out[name] = {"first": round(seconds[0], 2), "checks": round(checks[0], 2), "second": round(seconds[1], 2)}
    return out


def draws() -> dict[str, Any]:
    """Images a second of ViT-tiny at 64 px, medians of rounds in turns."""
    images, labels, key = torch.randn(64, 3, 64, 64), torch.randint(10, (64,)), bytes(32)
    rates = {"drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.1}
    works: dict[str, Callable[[], Any]] = {}
    for name, options, count in (
        ("dropout, one thread", rates, 1),
        ("dropout, two workers", rates, 2),
        ("none, two workers", {}, 2),
    ):
        torch.manual_seed(0)
        grad_fn = grad_fn_of(vision_transformer(img_size=64, **options), 16, count)
        load: Load = lambda indices: [images[indices], labels[indices]]  # noqa: E731
        sum_all = functools.partial(grad_fn.sum_over, load, torch.arange(64), key=key)
        with _threads(1):  # a worker computes on one thread each
            grad_fn.prepare(images, labels)

        def work(sum_all: Any = sum_all, count: int = count) -> None:
            with _threads(1 if count == 1 else torch.get_num_threads()):
                sum_all()

        works[name] = work
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            seconds[name].append(_seconds(work))
    rates_of = {name: round(64 / statistics.median(values), 1) for name, values in seconds.items()}
    return {
        **rates_of,
        "two workers over one thread": round(rates_of["dropout, two workers"] / rates_of["dropout, one thread"], 2),
    }


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _timed(method: Callable[..., Any], total: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            total[0] += time.perf_counter() - start

    return timed


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["first", "draws"], choices=["first", "draws"])
    chosen = parser.parse_args().parts
    print(
        json.dumps(
            {"machine": machine(), **{name: {"first": first, "draws": draws}[name]() for name in chosen}}, indent=2
        )
    )
