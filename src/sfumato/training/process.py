"""What a run asks of its process: signals end it after its current step, with a checkpoint; it ends with who started
it; freed memory is kept.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


class Interrupted(Exception):
    """The run was asked to stop; a checkpoint of its last step is on disk."""


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM. Where KeyboardInterrupt itself passes through text that ``exec`` runs, as in a library's
    import, Python ends by SIGINT later, whoever caught it, and not with status 1.
    """


def stop(number: int, frame: object) -> None:
    """A signal's handler."""
    raise Stopped


@contextlib.contextmanager
def watch_for_interrupts() -> Iterator[Callable[[], bool]]:
    """Yields ``interrupted()``; a second signal raises KeyboardInterrupt at once.

    Outside the main thread signals cannot be caught, and ``interrupted()`` stays False.
    """
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        if seen:
            raise Stopped
        seen.append(number)

    is_main = threading.current_thread() is threading.main_thread()
    with _handled(note, *((signal.SIGINT, signal.SIGTERM) if is_main else ())):
        yield lambda: bool(seen)


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise KeyboardInterrupt, as SIGINT does, between the runs of a longer piece of
    work.
    """
    with _handled(stop, signal.SIGTERM):
        yield


@contextlib.contextmanager
def _handled(handler: Callable[[int, object], None], *numbers: signal.Signals) -> Iterator[None]:
    """Within, signals have this handler."""
    with contextlib.ExitStack() as afterwards:
        for number in numbers:
            afterwards.callback(signal.signal, number, signal.signal(number, handler))
        yield


def end_with(parent: int, number: signal.Signals) -> None:
    """Sends this process a signal once the one that started it is dead: it would train on, and hold the run folder."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()


# Numbers of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> None:
    """Tells glibc not to return large blocks to the system between microbatches.

    By default it does, and every microbatch pays for having its pages cleared anew: 8 to 17 %
    of the processor time of small networks (LOG.md). Elsewhere than on glibc nothing happens.
    """
    mallopt = _of_glibc("mallopt")
    mallopt(_MMAP_MAX, 0)  # what lies above 32 MiB would be mapped anew each time: no threshold is larger
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 16 << 20)


def give_freed_memory_back() -> None:
    """Returns to the system what `keep_freed_memory` kept: once training is over nobody asks for it
    again.
    """
    _of_glibc("malloc_trim")(0)


def _of_glibc(name: str) -> Any:
    """A function that other libraries of C lack, where it does nothing."""
    return getattr(ctypes.CDLL(None), name, lambda *given: None)
