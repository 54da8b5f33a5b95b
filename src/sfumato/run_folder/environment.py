"""Where a run computes: two environments that differ may round differently."""

import functools
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import torch

from sfumato import __version__
from sfumato.errors import InputError


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" takes a GPU where there is one.

    Raises:
        InputError: If there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f'--device "{name}" cannot be used: {reason}. Use "auto", "cpu" or "cuda".') from None
    return device


# What computes an update, below the package's folder. What speaks to people or reads and writes
# files is not among it: to reword a help text is no reason to draw updates afresh.
COMPUTES = (
    "accounting/mechanism.py",
    "clipping",
    "data/augmentation",
    "data/canaries.py",
    "data/examples.py",
    "data/features.py",
    "data/images.py",
    "data/people.py",
    "data/sampling.py",
    "data/views.py",
    "evaluation/objective.py",
    "models",
    "nn",
    "randomness.py",
    "run_folder/coins.py",
    "run_folder/tensor_mac.py",
    "torch_internals.py",
    *(
        f"training/{name}.py"
        for name in (
            "draws",
            "ema",
            "features",
            "first_release",
            "learner",
            "noise",
            "nonprivate",
            "state",
            "step",
        )
    ),
)


def describe(
    device: torch.device,
    *,
    model: str,
    engine: str,
    methods: dict[str, str],
    microbatch_size: int,
    precision: str,
    compile: bool,
) -> dict[str, Any]:
    """Everything that is known to decide the last bits of an update.

    Updates repeated in an equal environment should be bit-identical, hence the same release; where
    one is not after all, its sum shows it (`sfumato.training.draws`).

    Args:
        model: Digest of what is computed, from `sfumato.clipping.identity`.
    """
    return {
        "sfumato": f"{__version__} ({digest_of_code(Path(__file__).parents[1])})",
        "model": model,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "engine": engine,
        "methods": methods,
        "microbatch_size": microbatch_size,
        "precision": precision,
        "compile": compile,
    }


@functools.cache
def digest_of_code(package: Path) -> str:
    """Of the Python files that compute. A version alone would not tell two states of a checkout
    apart.
    """
    digest = hashlib.sha256()
    rooms = [package / room for room in COMPUTES]
    for path in sorted(path for room in rooms for path in (room.rglob("*.py") if room.is_dir() else [room])):
        digest.update(
            f"{path.relative_to(package).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
        )
    return digest.hexdigest()[:16]


def _processor() -> str:
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    return f"{model} ({torch.backends.cpu.get_cpu_capability()})"
