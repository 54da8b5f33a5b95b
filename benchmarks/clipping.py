"""Cost of private gradients: every engine, and Opacus, against the ordinary step of the same network.

    python -m benchmarks.clipping [--model NAME --examples B --augmult K] [--engines ordinary,graph,...] [--rounds 7]
        [--json] [--device cpu|cuda] [--dtype float32|bf16] [--compile]

The ordinary step is forward and backward of the mean loss, in the faster of both memory formats, in the same mode:
compiled where the private step is compiled, in bfloat16 (parameters and their gradients in float32) where that is.
Methods take turns within one process, so that a busy moment meets them all; a method's time is its median, its ratio
the median over rounds of its time over the ordinary step's in that round. Peak memory is measured for each method in a
process of its own, as the growth over what the process held when model and images were there; on a GPU, of what its
allocator handed out. A method that does not agree with the loop over single images gets no time. Without a model the
whole table of issue-sized work runs. Nothing else should run meanwhile.
"""

import argparse
import copy
import ctypes
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.machine import machine
from sfumato.clipping import clipped_grad
from sfumato.training.process import keep_freed_memory

CLIPPING_NORM = 1.0
TABLE = [
    ("wrn-16-4", 32, 1),
    ("wrn-16-4", 16, 4),
    ("wrn-16-4", 8, 16),
    ("wrn-16-4-no-ws", 32, 1),
    ("vit-tiny-224", 8, 0),
    ("vit-tiny-64", 32, 0),
    ("vit-tiny-224-lora", 8, 0),
    ("wrn-16-4-last-layer", 32, 1),
    ("small-cnn", 256, 0),
]
CUDA_TABLE = [
    ("wrn-16-4", 1024, 1),
    ("wrn-16-4", 128, 16),
    ("nf-resnet-50", 64, 4),
    ("vit-b-16", 128, 0),
]
ENGINES = ["ordinary", "graph", "func", "opacus-hooks", "opacus-functorch", "opacus-ghost"]
# Largest distance from the loop over single images, relative to the whole sum, in float32: ReLU's
# kinks alone make up to 1e-2 (in float64, where tests compare, it is below 1e-9).
AGREEMENT = {"float32": 2e-2, "bf16": 1e-1}


@dataclasses.dataclass(frozen=True)
class Mode:
    """How every method computes."""

    device: str = "cpu"
    dtype: str = "float32"
    compile: bool = False


def build(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A network and the shape of its images."""
    torch.manual_seed(0)
    if name == "vit-b-16":
        import timm

        return timm.create_model("vit_base_patch16_224", num_classes=10), (3, 224, 224)
    if name.startswith("vit-tiny"):
        import timm

        size = int(name.removesuffix("-lora").rpartition("-")[2])
        model = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=size)
        return _with_low_rank(model, size) if name.endswith("lora") else model, (3, size, size)
    from sfumato.models import build as build_model

    if name == "nf-resnet-50":
        return build_model("nf_resnet50", image_size=224, channels=3, num_classes=10, seed=0), (3, 224, 224)
    if name == "small-cnn":
        return build_model("small_cnn", image_size=28, channels=1, num_classes=10, options={}, seed=0), (1, 28, 28)
    options = {"depth": 16, "width": 4, "weight_standardization": "no-ws" not in name}
    model = build_model("wide_resnet", image_size=32, channels=3, num_classes=10, options=options, seed=0)
    if name.endswith("last-layer"):
        model.requires_grad_(False)
        model.classifier.requires_grad_(True)
    return model, (3, 32, 32)


def _with_low_rank(model: nn.Module, size: int) -> nn.Module:
    """LoRA of rank 4 and the classifier train, as in a run under way: B is no longer zero."""
    from sfumato.models.lora import add_low_rank
    from sfumato.models.trainable import select_trainable

    for name in add_low_rank(model, 4, "head", torch.zeros(1, 3, size, size), seed=0):
        nn.init.normal_(model.get_submodule(name).lora_B, std=0.02)
    select_trainable(model, "lora", num_classes=10)
    return model


def row_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, labels, reduction="none")


class Work:
    """One network and one microbatch; makes a step function for each method."""

    def __init__(self, name: str, examples: int, augmult: int, mode: Mode) -> None:
        model, shape = build(name)
        self.model = model.train().to(mode.device)
        self.augmult, self.mode = augmult, mode
        views = (augmult,) if augmult else ()
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(examples, *views, *shape, generator=generator).to(mode.device)
        self.labels = torch.randint(10, (examples,), generator=generator).to(mode.device)
        self.parameters = {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    def step(self, engine: str) -> Callable[[], Any]:
        """A function that computes the sum once; the first call may prepare."""
        if engine == "ordinary":
            return self._ordinary()
        if engine.startswith("opacus"):
            return self._opacus(engine.partition("-")[2])
        grad_fn = clipped_grad(
            self.model,
            row_loss,
            clipping_norm=CLIPPING_NORM,
            augmult=self.augmult,
            engine=engine,
            precision=self.mode.dtype,
            compile=self.mode.compile,
        )
        return lambda: grad_fn(self.inputs, self.labels).grad_sum

    def _ordinary(self) -> Callable[[], Any]:
        rows = self.inputs.flatten(0, 1) if self.augmult else self.inputs
        labels = self.labels.repeat_interleave(max(1, self.augmult))

        def mean_loss(rows: torch.Tensor) -> torch.Tensor:
            if self.mode.dtype == "float32":
                return F.cross_entropy(self.model(rows), labels)
            low = {name: value.bfloat16() for name, value in self.parameters.items()}
            return F.cross_entropy(torch.func.functional_call(self.model, low, (rows.bfloat16(),)).float(), labels)

        forward = torch.compile(mean_loss, dynamic=False) if self.mode.compile else mean_loss

        def run(rows: torch.Tensor) -> dict[str, torch.Tensor]:
            loss = forward(rows)
            return dict(zip(self.parameters, torch.autograd.grad(loss, list(self.parameters.values())), strict=True))

        formats = [rows, rows.contiguous(memory_format=torch.channels_last)]
        times = []
        for candidate in formats:
            run(candidate)
            times.append(min(timed(functools.partial(run, candidate), self.mode) for _ in range(2)))
        fastest = formats[times.index(min(times))]
        return lambda: run(fastest)

    def _opacus(self, mode: str) -> Callable[[], Any]:
        if self.augmult > 1:
            raise RuntimeError("Opacus has no augmentation multiplicity")
        if self.mode.dtype != "float32" or self.mode.compile:
            raise RuntimeError("measured in float32 without a compiler only")
        if any(hasattr(module, "gain") for module in self.model.modules()):
            raise RuntimeError("Opacus does not know weight standardisation")
        from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping

        model = copy.deepcopy(self.model)
        rows = self.inputs.flatten(0, 1) if self.augmult else self.inputs
        names = list(self.parameters)
        if mode == "ghost":
            ghost = GradSampleModuleFastGradientClipping(
                model, max_grad_norm=CLIPPING_NORM, use_ghost_clipping=True, loss_reduction="sum"
            )

            def two_passes() -> dict[str, torch.Tensor]:
                ghost.zero_grad(set_to_none=True)
                losses = row_loss(ghost(rows), self.labels)
                losses.sum().backward(retain_graph=True)
                coefficients = ghost.get_clipping_coef()
                ghost.zero_grad(set_to_none=True)
                ghost.disable_hooks()
                (coefficients * losses).sum().backward()
                ghost.enable_hooks()
                return {
                    name: value.grad / CLIPPING_NORM for name, value in model.named_parameters() if value.requires_grad
                }

            return two_passes
        if mode == "functorch":
            wrapped: Any = GradSampleModule(model, loss_reduction="sum", force_functorch=True)
        else:
            wrapped = GradSampleModule(model, loss_reduction="sum")

        def one_pass() -> dict[str, torch.Tensor]:
            wrapped.zero_grad(set_to_none=True)
            row_loss(wrapped(rows), self.labels).sum().backward()
            samples = [value.grad_sample.flatten(1) for value in model.parameters() if value.requires_grad]
            norms = torch.stack([sample.norm(dim=1) for sample in samples]).norm(dim=0)
            coefficients = torch.clamp(1 / norms, max=1 / CLIPPING_NORM)
            return {
                name: (coefficients @ sample).view_as(self.parameters[name])
                for name, sample in zip(names, samples, strict=True)
            }

        return one_pass

    def distance(self, grad_sum: dict[str, torch.Tensor]) -> float:
        """From the loop over single images, relative to its length."""
        reference = clipped_grad(
            self.model, row_loss, clipping_norm=CLIPPING_NORM, augmult=self.augmult, engine="reference"
        )
        true = reference(self.inputs, self.labels).grad_sum
        gap = torch.stack([(grad_sum[name] - value).double().norm() for name, value in true.items()]).norm()
        return float(gap / torch.stack([value.double().norm() for value in true.values()]).norm())


def timed(step: Callable[[], Any], mode: Mode) -> float:
    """Seconds of one call, the device's work included."""
    if mode.device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if mode.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(
    name: str, examples: int, augmult: int, engines: list[str], rounds: int, mode: Mode
) -> list[dict[str, Any]]:
    """A row for each engine; the ordinary step is always among them."""
    work = Work(name, examples, augmult, mode)
    steps: dict[str, Callable[[], Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for engine in ["ordinary", *(engine for engine in engines if engine != "ordinary")]:
        row: dict[str, Any] = {"model": name, "engine": engine, "examples": examples, "augmult": augmult}
        rows[engine] = row
        try:
            step = work.step(engine)
            start = time.perf_counter()
            grad_sum = step()
            row["first_call_seconds"] = round(time.perf_counter() - start, 2)
            row["distance"] = None if engine == "ordinary" else work.distance(grad_sum)
        except Exception as error:  # a peer may fail in any way; that is a result
            row |= {"agrees": False, "why": str(error).splitlines()[0][:200]}
            continue
        row["agrees"] = row["distance"] is None or row["distance"] < AGREEMENT[mode.dtype]
        if row["agrees"]:
            steps[engine] = step
    seconds: dict[str, list[float]] = {engine: [] for engine in steps}
    for _ in range(rounds):
        for engine, step in steps.items():
            seconds[engine].append(timed(step, mode))
    peaks = {engine: peak_bytes(name, examples, augmult, engine, mode) for engine in steps}
    for engine in steps:
        ratios = [own / ordinary for own, ordinary in zip(seconds[engine], seconds["ordinary"], strict=True)]
        rows[engine] |= {
            "seconds": round(statistics.median(seconds[engine]), 4),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_of_best": round(min(seconds[engine]) / min(seconds["ordinary"]), 3),
            "peak_memory_ratio": round(peaks[engine] / peaks["ordinary"], 3),
        }
    return list(rows.values())


def peak_bytes(name: str, examples: int, augmult: int, engine: str, mode: Mode) -> int:
    """Growth of a fresh process's peak memory during steps."""
    command = [sys.executable, "-m", "benchmarks.clipping", "--peak", name, str(examples), str(augmult), engine]
    command += ["--device", mode.device, "--dtype", mode.dtype] + (["--compile"] if mode.compile else [])
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_peak(name: str, examples: str, augmult: str, engine: str, mode: Mode) -> None:
    work = Work(name, int(examples), int(augmult), mode)
    step = work.step(engine)
    step()
    if mode.device == "cuda":
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        print(torch.cuda.max_memory_allocated() - held)
        return
    # What preparing took is given back, and the kernel forgets the peak.
    ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    for _ in range(3):
        step()
    print(_resident("VmHWM") - before)


def _resident(what: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(what))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted({name for name, _, _ in TABLE + CUDA_TABLE}))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bf16"], default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--examples", type=int, default=32)
    parser.add_argument("--augmult", type=int, default=0)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    mode = Mode(options.device, options.dtype, options.compile)
    keep_freed_memory()
    if options.peak:
        print_peak(*options.peak, mode)
        return
    everything = TABLE if mode.device == "cpu" else CUDA_TABLE
    table = [(options.model, options.examples, options.augmult)] if options.model else everything
    results = []
    for name, examples, augmult in table:
        for row in measure(name, examples, augmult, options.engines.split(","), options.rounds, mode):
            results.append(row)
            if not options.json:
                print(json.dumps(row), file=sys.stderr, flush=True)
    allocator = "glibc, freed memory kept (sfumato.training.process), for all sides alike"
    facts = {**machine(mode.device), "allocator": allocator, "mode": dataclasses.asdict(mode)}
    print(json.dumps({"machine": facts, "results": results}, indent=1))


if __name__ == "__main__":
    main()
