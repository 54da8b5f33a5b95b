"""SIGINT and SIGTERM end a run after its current step, with a checkpoint."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


class Interrupted(Exception):
    """The run was asked to stop; a checkpoint of ``step`` is on disk."""

    def __init__(self, step: int, num_steps: int) -> None:
        super().__init__(f"interrupted after step {step} of {num_steps}")
        self.step = step


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
