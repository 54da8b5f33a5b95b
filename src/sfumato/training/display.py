"""A live line in a terminal or a notebook, plain lines elsewhere; always on stderr."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from sfumato.accounting import formats
from sfumato.training.loop import Progress, StepFacts


@contextlib.contextmanager
def watching(progress: Progress | None) -> Iterator[Progress]:
    """Who watches a run: whoever is given, else a `Display`."""
    if progress is not None:
        yield progress
        return
    display = Display()
    with contextlib.closing(display):
        yield Progress(message=display.message, step=display.step)


class Display:
    """Shows step, epsilon so far, held-out accuracy, images per second and time left."""

    def __init__(self) -> None:
        self._live: Any = None
        self._start = 0.0
        self._first_step: int | None = None
        if sys.stderr.isatty() or "ipykernel" in sys.modules:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=4, transient=False)
            self._live.start()

    def close(self) -> None:
        """Leaves the last line where it is."""
        if self._live is not None:
            self._live.stop()

    def message(self, text: str) -> None:
        """A line that stays."""
        if self._live is not None:
            self._live.console.print(formats.plain(text), highlight=False, markup=False)
        else:
            formats.note(text)

    def step(self, facts: StepFacts) -> None:
        """Shows where a run stands; as a line of its own only where it was evaluated."""
        if self._first_step is None:
            self._first_step, self._start = facts.step, time.perf_counter()
        text = self._line(facts)
        if self._live is not None:
            self._live.update(text)
        elif facts.evaluated:
            formats.note(text)

    def _line(self, facts: StepFacts) -> str:
        done = facts.step - (self._first_step or 0)
        left = (time.perf_counter() - self._start) / max(done, 1) * (facts.num_steps - facts.step)
        epsilon = "" if facts.epsilon is None else f"  epsilon {formats.epsilon_text(facts.epsilon)}"
        accuracy = "" if facts.accuracy is None else f"  held-out {formats.per_cent(facts.accuracy)}"
        minutes, seconds = divmod(int(left), 60)
        reached = f"step {facts.step}/{facts.num_steps}{epsilon}{accuracy}"
        return f"{reached}  {facts.images_per_second:,.0f} images/s  {minutes}:{seconds:02d} left"
