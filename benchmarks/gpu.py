"""The first minutes on a GPU: what matters most first, each part in a process of its own with a time limit.

    python -m benchmarks.gpu --minutes M --out DIR [--only agrees,sites] [--device cuda] [--small]
    python -m benchmarks.gpu train ... | unpack ...    (see benchmarks.gpu_train)

Each finding is a line of DIR/results.jsonl as soon as it is known; what parts print is in DIR/logs.txt. A part that
fails, hangs, is killed or runs out of memory loses its own later findings alone. `--small --device cpu` tries every
part on a CPU in a few minutes.
"""

import argparse
import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# The most seconds of each part, in order of value: what would make every other figure worthless comes first.
PARTS = dict(ceilings=20, agrees=90, update=150, sites=80, engines=100, compiled=120, func=30, places=25, audit=120)
PARTS |= dict(ranks=200)
# The parent imports for all parts, which takes ten seconds, and forks.
IMPORTS = ("torch._dynamo", "torch._inductor.compile_fx", "torch.export", "benchmarks.gpu_parts")


def main() -> int:
    if sys.argv[1:2] in (["train"], ["unpack"]):
        from benchmarks import gpu_train

        return gpu_train.main(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True, help="of all parts together")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="small networks and batches, to try the parts")
    options = parser.parse_args()
    if not set(options.only.split(",")) <= set(PARTS):
        parser.error(f"--only {options.only}: parts are {', '.join(PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:  # a part that is killed may leave half a compiled file
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        take_turns(options.only.split(","), options)
    return 0


def take_turns(wanted: list[str], options: argparse.Namespace) -> None:
    """Runs the parts one after another. One that begins when time is up ends at once."""
    until = time.monotonic() + 60 * options.minutes - 5
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to ask for a GPU must not touch it before a fork
    for module in IMPORTS:
        importlib.import_module(module)
    from benchmarks.gpu_steps import Findings

    methods, log = ["fork", "spawn"], options.out / "logs.txt"
    log.touch()
    for name in wanted:
        out = Findings(options.out / "results.jsonl", options.device, options.small, {"part": name})
        for method in methods.copy():
            began = time.monotonic()
            status = ended(method, max(0.0, min(until - began, PARTS[name])), name, out, log)
            last = log.read_text("utf-8", "replace")[-500:] if status else ""
            out(ended=status, process=method, seconds=time.monotonic() - began, last=last)
            if status in (0, "time") or method == "spawn" or name != wanted[0]:
                break
            methods.remove("fork")  # CUDA cannot be had after a fork, it seems: new processes from here on


def ended(method: str, seconds: float, *arguments: Any) -> int | str:
    """How a part ended in a process of its own: the exit status, or "time" where that ran out."""
    child: Any = multiprocessing.get_context(method).Process(target=run, args=arguments)  # type: ignore[attr-defined]
    child.start()
    child.join(seconds)
    status = "time" if child.exitcode is None else child.exitcode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # with all that it left running
    child.kill()  # where it leads no group yet
    child.join(10)
    return status


def run(name: str, out: Any, log: Path) -> None:
    """A part, in a process that leads a group."""
    os.setsid()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    print(f"==== {name}", flush=True)
    import torch

    from benchmarks import gpu_parts
    from benchmarks.machine import machine

    torch.zeros(1, device=out.device)  # fails where there is no such device, or none after a fork
    out(machine=machine(out.device))
    getattr(gpu_parts, name)(out)


if __name__ == "__main__":
    sys.exit(main())
