"""What a figure was measured on: hardware, versions and commit."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from sfumato import __version__


def machine(device: str = "cpu") -> dict[str, Any]:
    """Facts to keep beside results; "+" after the commit means that files had been changed since."""
    facts: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sfumato": __version__,
        "commit": _commit(),
    }
    if device == "cuda":
        facts |= {
            "gpu": torch.cuda.get_device_name(),
            "gpu_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30),
            "cuda": torch.version.cuda,
        }
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    vectors = torch.backends.cpu.get_cpu_capability()  # makers give processors of several ages one name
    return name if vectors == "DEFAULT" else f"{name}, {vectors}"


def _commit() -> str | None:
    if "SFUMATO_COMMIT" in os.environ:  # of a tree that was copied
        return os.environ["SFUMATO_COMMIT"]
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        return subprocess.run(
            [*git, "describe", "--always", "--abbrev=7", "--dirty=+"], check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # not a checkout
        return None
