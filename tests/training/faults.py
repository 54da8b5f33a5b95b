"""Real processes that really die: each run is a forked process that receives real signals."""

import errno
import multiprocessing
import os
import secrets
import signal
import socket
import sys
from pathlib import Path

# The server imports the heavy libraries once and is forked for each run, so that a run
# costs its own time only. It never computes anything itself.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    (
        "PIL.PngImagePlugin cryptography.hazmat.primitives.ciphers dp_accounting.pld.privacy_loss_distribution "
        "dp_accounting.rdp matplotlib.backends.backend_svg matplotlib.figure networkx optuna.storages sklearn.datasets "
        "torch._dynamo torch._export.passes torch._export.serde torch._functorch.aot_autograd torch._inductor.codegen "
        "torch.export._trace torch.func sfumato.accounting.attacker sfumato.accounting.calibration sfumato.cli.app "
        "sfumato.data.folders sfumato.reporting.charts sfumato.studies.sweep sfumato.training.private_loop"
    ).split()
)


Death = tuple[str, int, float] | None


def start(
    arguments: list[str],
    die_at: Death = None,
    log: Path | None = None,
    modules: Path | None = None,
    watch=None,
    environment=(),
    edits=(),
) -> multiprocessing.Process:
    """Starts `sfumato ARGUMENTS` in a process of its own.

    Args:
        die_at: ("ledger" | "file", n, share): during the n-th append to a ledger, or n-th write of
            another file, write that share of the bytes and receive SIGKILL. ("full ledger" | "full file", n, share):
            write that share and find the disk full. ("full room", n, 0.0): find it full when room for the n-th
            checkpoint is held.
        log: Takes stdout and stderr.
        modules: A folder to import from, as on PYTHONPATH.
        watch: A folder that takes a file for each drawing of noise, before it is drawn.
        environment: Variables, as pairs.
        edits: Changes to the code (`tests.auditing.planted.plants`).
    """
    given = (arguments, die_at, str(log) if log else os.devnull, modules, watch, environment, edits)
    return fork(_run, *given)


def fork(function, *arguments) -> multiprocessing.Process:
    """Calls a function in a process of its own."""
    process = _context.Process(target=function, args=arguments)
    process.start()
    return process


def start_ranks(size: int, *arguments: list[str], **options) -> list[multiprocessing.Process]:
    """The ranks of a run as torchrun starts them, with the same arguments or each its own; options of `start`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": "test"}
    own = [[*(shared | {"RANK": rank, "LOCAL_RANK": rank}).items()] for rank in range(size)]
    return [start(arguments[rank % len(arguments)], environment=own[rank], **options) for rank in range(size)]


def join(processes: list[multiprocessing.Process]) -> list[int | None]:
    """Exit statuses."""
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


def run(arguments: list[str], *given, **options) -> int:
    """Runs to the end; returns the exit status, negative for a signal. Arguments as of `start`."""
    process = start(arguments, *given, **options)
    process.join(120)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def _run(
    arguments: list[str], die_at: Death, log: str, modules: Path | None, watch: Path | None, environment, edits
) -> None:
    import torch

    os.environ.update({name: str(value) for name, value in environment})
    torch.set_num_threads(1)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if modules is not None:
        sys.path.insert(0, str(modules))
    if watch is not None:
        _watch(watch)
    if die_at is not None:
        _plant(*die_at)
    from sfumato import cli
    from tests.auditing.planted.plants import planted

    with planted(*edits):
        sys.exit(cli.run(arguments))


def _watch(folder: Path) -> None:
    from sfumato.training import step

    real = step.with_noise
    folder.mkdir(exist_ok=True)

    def noted(*given):
        (folder / secrets.token_hex(8)).touch()
        return real(*given)

    step.with_noise = noted


def _plant(where: str, count: int, share: float) -> None:
    seen = 0
    is_full, where = where.startswith("full "), where.removeprefix("full ")

    def dies(write, descriptor, data):
        nonlocal seen
        seen += 1
        if seen == count:
            if share:
                write(descriptor, bytes(data)[: int(len(data) * share)])
            if is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.kill(os.getpid(), signal.SIGKILL)
        return write(descriptor, data)

    if where == "room":
        real_room = os.posix_fallocate
        os.posix_fallocate = lambda *given: dies(lambda *_: real_room(*given), given[0], b"")
        return
    if where == "ledger":
        real = os.write

        def written(descriptor, data):
            is_ledger = os.readlink(f"/proc/self/fd/{descriptor}").endswith("ledger.jsonl")  # others write to pipes
            return dies(real, descriptor, data) if is_ledger else real(descriptor, data)

        os.write = written
        return
    real_open = os.fdopen

    def opened(descriptor, *args, **kwargs):
        file = real_open(descriptor, *args, **kwargs)
        if args and args[0] in ("wb", "r+b"):
            file = _Dying(file, dies)
        return file

    os.fdopen = opened  # type: ignore[assignment]


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
