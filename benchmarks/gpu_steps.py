"""What the parts of `benchmarks.gpu` share: findings, networks, and the steps that are timed."""

import dataclasses
import gc
import json
import os
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import sfumato.clipping
from benchmarks.clipping import build, row_loss
from sfumato.models import build as build_model

Case = tuple[nn.Module, torch.Tensor, torch.Tensor]
"""A network; inputs (examples, ...) or (examples, views, ...); labels."""
# Some versions trace a loss at each call but where this says that it keeps nothing.
FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}


@dataclasses.dataclass(frozen=True)
class Findings:
    """Call it with what was found: a line of JSON, with the facts that hold, on disk at once."""

    path: Path
    device: str
    small: bool
    facts: dict[str, Any]

    def __call__(self, **found: Any) -> None:
        exact = json.dumps({"at": int(time.time()), **self.facts, **found})
        rounded = json.loads(exact, parse_float=lambda text: float(f"{float(text):.4g}"))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rounded) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def about(self, **facts: Any) -> Iterator["Findings"]:
        """Findings with these facts besides. What fails within leaves a finding that says why, and goes no further."""
        found, why = dataclasses.replace(self, facts={**self.facts, **facts}), None
        try:
            yield found
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]
        if why is not None:
            found(why=why)
            gc.collect()  # the frames of what failed may hold what filled the memory

    def size(self, usual: int, small: int) -> int:
        return small if self.small else usual

    def took(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """What a call gives, and its seconds, the device's work included."""
        if self.device == "cpu":
            began = time.perf_counter()
            return call(), time.perf_counter() - began
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        given = call()
        end.record()
        end.synchronize()
        return given, start.elapsed_time(end) / 1e3

    def cost(self, call: Callable[[], Any], beside: float | None = None) -> float:
        """Finds and returns the seconds of a call: on a GPU the median of up to nine, after two that do not count, with
        the seconds until it returns, which are the host's where it does not wait, and the peak of memory.
        """
        found = {"first_seconds": self.took(call)[1]}
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            call()
            found["returns_seconds"] = time.perf_counter() - began
        times = [self.took(call)[1]]
        while self.device == "cuda" and len(times) < 9 and sum(times) < 1:
            times.append(self.took(call)[1])
        seconds = statistics.median(times)
        found |= {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if self.device == "cuda" else {}
        found |= {"ratio": seconds / beside} if beside else {}
        self(seconds=seconds, **found)
        return seconds


def case(out: Findings, name: str, examples: int, views: int) -> Case:
    """A network and random images."""
    if name.startswith("conv"):
        channels, made, taps, size, stride = map(int, name.split("-")[1:])
        convolution = nn.Conv2d(channels, made, taps, stride, taps // 2, bias=False)
        model, shape = nn.Sequential(convolution, nn.AdaptiveAvgPool2d(1), nn.Flatten()), (channels, size, size)
    elif name.startswith("wrn"):
        options: dict[str, Any] = {"depth": int(name.split("-")[1]), "width": 4}
        options |= {"depth": 10, "width": 1} if out.small else {}
        options |= {"order": "norm-activation"} if name.endswith("norm-first") else {}
        model = build_model("wide_resnet", image_size=32, channels=3, num_classes=10, options=options, seed=0)
        shape = 3, 32, 32
        if name.endswith("smooth"):
            for module in list(model.modules()):
                for key, child in module.named_children():
                    setattr(module, key, nn.SiLU() if isinstance(child, nn.ReLU) else child)
    else:
        model, shape = build(name)
    rows = (examples, views, *shape) if views else (examples, *shape)
    inputs = torch.randn(rows, device=out.device, generator=torch.Generator(out.device).manual_seed(0))
    return model.train().to(out.device), inputs, torch.arange(examples, device=out.device) % 10


def prepared(out: Findings, held: Case, batch_size: int | None = None, **settings: Any) -> Any:
    """A private gradient that is ready; how it computes is found."""
    model, inputs, labels = held
    views, size = inputs.shape[1] if inputs.ndim == 5 else 0, None if batch_size else len(inputs)
    grad_fn = sfumato.clipped_grad(model, row_loss, clipping_norm=1.0, augmult=views, microbatch_size=size, **settings)
    _, seconds = out.took(partial(grad_fn.prepare, inputs, labels, batch_size=batch_size))
    taken = {"engine": grad_fn.engine, "refusal": grad_fn.refusal, "microbatch_size": grad_fn.microbatch_size}
    out(prepare_seconds=seconds, **taken, used=Counter(grad_fn.methods.values()))
    return grad_fn


def beside(out: Findings, held: Case, variants: list[dict[str, Any]]) -> None:
    """What the ordinary step costs in each memory format, then private ones as multiples of the faster."""
    precision, compiles = out.facts["precision"], out.facts.get("compile", False)
    ordinary_seconds = []
    for memory_format in list(FORMATS)[: 1 if compiles else 2]:  # a compiler lays images out itself
        with out.about(step="ordinary", memory_format=memory_format) as found:
            ordinary_seconds.append(found.cost(ordinary(held, memory_format, precision, compiles)))
    for settings in variants:
        with out.about(step="private", **settings) as found:
            grad_fn = prepared(found, held, precision=precision, **settings)
            if set(settings.get("methods", {}).values()) <= set(grad_fn.methods.values()):  # else another was put there
                found.cost(partial(grad_fn, *held[1:]), min(ordinary_seconds, default=None))


def ordinary(held: Case, memory_format: str, precision: str, compiles: bool) -> Callable[[], Any]:
    """Forward and backward of the mean loss; in bf16 parameters are rounded, and their gradients float32."""
    torch.backends.cudnn.allow_tf32 = precision == "tf32"  # the product sets this for itself
    model, inputs, labels = held
    rows = inputs.flatten(0, 1) if inputs.ndim == 5 else inputs
    targets = labels.repeat_interleave(len(rows) // len(labels))
    rows = rows.contiguous(memory_format=FORMATS[memory_format])
    parameters = dict(model.named_parameters())

    def loss(rows: torch.Tensor) -> torch.Tensor:
        if precision != "bf16":
            return row_loss(model(rows), targets).mean()
        low = {name: value.bfloat16() for name, value in parameters.items()}
        return row_loss(torch.func.functional_call(model, low, (rows.bfloat16(),)).float(), targets).mean()

    forward = torch.compile(loss, dynamic=False) if compiles else loss
    return lambda: torch.autograd.grad(forward(rows), list(parameters.values()))


def ordinary_off(held: Case, double: Case, precision: str) -> float:
    """How far the ordinary gradient lies from that in float64."""
    given, exact = (
        ordinary(*each, compiles=False)()
        for each in ((held, "contiguous", precision), (double, "contiguous", "float64"))
    )
    one, other = (torch.cat([part.flatten() for part in each]).cpu().double() for each in (given, exact))
    return float((one - other).norm() / other.norm())


def crops_and_flips(pixels: torch.Tensor, views: int) -> torch.Tensor:
    """(m, C, S, S) -> (m, views, C, S, S): shifted by up to 4 pixels, half of them mirrored."""
    padded, size = F.pad(pixels / 127.5 - 1, (4, 4, 4, 4), mode="reflect"), pixels.shape[-1]
    windows = padded.unfold(2, size, 1).unfold(3, size, 1)  # (m, C, 9, 9, S, S), without a copy
    image = torch.arange(len(pixels), device=pixels.device).repeat_interleave(views)
    down, right = torch.randint(9, (2, len(image)), device=pixels.device)
    crops = windows[image, :, down, right]
    mirrored = torch.rand(len(image), 1, 1, 1, device=pixels.device) < 0.5
    return torch.where(mirrored, crops.flip(3), crops).unflatten(0, (len(pixels), views))
