"""Real processes that really die: each run is a forked process that receives real signals."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path

# The server imports the heavy libraries once and is forked for each run, so that a run
# costs its own time only. It never computes anything itself.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch._dynamo", "torch.func", "sfumato.training.loop", "sfumato.cli.train", "sfumato.cli.display", "sklearn.datasets", "sfumato.reporting.page"]
)


def start(arguments: list[str], die_at: tuple[str, int, float] | None = None, log: Path | None = None) -> multiprocessing.Process:
    """Starts `sfumato ARGUMENTS` in a process of its own.

    Args:
        die_at: ("ledger" | "file", n, share): during the n-th append to a ledger, or n-th atomic
            write, write that share of the bytes and receive SIGKILL.
        log: Takes stdout and stderr.
    """
    process = _context.Process(target=_run, args=(arguments, die_at, str(log) if log else os.devnull))
    process.start()
    return process


def run(arguments: list[str], die_at: tuple[str, int, float] | None = None, log: Path | None = None) -> int:
    """Runs to the end; returns the exit status, negative for a signal."""
    process = start(arguments, die_at, log)
    process.join(120)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def _run(arguments: list[str], die_at: tuple[str, int, float] | None, log: str) -> None:
    import torch

    torch.set_num_threads(1)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if die_at is not None:
        _plant(*die_at)
    from sfumato import cli

    sys.exit(cli.run(arguments))


def _plant(where: str, count: int, share: float) -> None:
    seen = 0

    def dies(write, descriptor, data):
        nonlocal seen
        seen += 1
        if seen == count:
            write(descriptor, bytes(data)[: int(len(data) * share)])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(descriptor, data)

    if where == "ledger":
        real = os.write
        os.write = lambda descriptor, data: dies(real, descriptor, data)
        return
    from sfumato import run_folder

    real_open = os.fdopen

    def opened(descriptor, *args, **kwargs):
        file = real_open(descriptor, *args, **kwargs)
        if args and args[0] == "wb":
            file = _Dying(file, dies)
        return file

    run_folder.os.fdopen = opened  # type: ignore[attr-defined]


class _Dying:
    """A file whose writes may end in SIGKILL, with what was written on disk."""

    def __init__(self, file, dies) -> None:
        self.file, self.dies = file, dies

    def write(self, data):
        def through(_, part):
            self.file.write(part)
            self.file.flush()
            os.fsync(self.file.fileno())
            return len(part)

        return self.dies(through, None, data)

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self.file, name)
