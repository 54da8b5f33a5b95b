"""Where a run computes: two environments that differ may round differently."""

import os
import platform
from importlib import metadata
from typing import Any

import torch

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
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f'--device "{name}" cannot be used: {reason}. Use "auto", "cpu" or "cuda".') from None
    return device


def describe(device: torch.device, *, engine: str, methods: dict[str, str], microbatch_size: int, precision: str, compile: bool) -> dict[str, Any]:
    """Everything on which the last bits of an update depend.

    Updates repeated in an equal environment are bit-identical, hence the same release.
    """
    return {
        "sfumato": metadata.version("sfumato"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "engine": engine,
        "methods": methods,
        "microbatch_size": microbatch_size,
        "precision": precision,
        "compile": compile,
    }


def _processor() -> str:
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    return f"{model} ({torch.backends.cpu.get_cpu_capability()})"
