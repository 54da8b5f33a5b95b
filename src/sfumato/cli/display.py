"""A live line on a terminal, plain lines elsewhere; always on stderr."""

import sys
import time
from typing import Any

from sfumato.cli import output
from sfumato.reporting import formats
from sfumato.training.loop import Progress, StepFacts


class Display:
    """Shows step, epsilon so far, held-out accuracy, images per second and time left."""

    def __init__(self) -> None:
        self.live: Any = None
        self.start = 0.0
        self.first_step: int | None = None
        self.progress = Progress(message=self.message, step=self.step)

    def __enter__(self) -> "Display":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self.live = Live(console=Console(stderr=True), refresh_per_second=4, transient=False)
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def message(self, text: str) -> None:
        if self.live is not None:
            self.live.console.print(output.plain(text), highlight=False, markup=False)
        else:
            output.note(text)

    def step(self, facts: StepFacts) -> None:
        if self.first_step is None:
            self.first_step, self.start = facts.step, time.perf_counter()
        text = self._line(facts)
        if self.live is not None:
            self.live.update(text)
        elif facts.evaluated:
            output.note(text)

    def _line(self, facts: StepFacts) -> str:
        done = facts.step - (self.first_step or 0)
        left = (time.perf_counter() - self.start) / max(done, 1) * (facts.num_steps - facts.step)
        epsilon = f"  epsilon {formats.epsilon(facts.epsilon)}" if facts.epsilon is not None else ""
        accuracy = f"  held-out {output.per_cent(facts.accuracy)}" if facts.accuracy is not None else ""
        minutes, seconds = divmod(int(left), 60)
        reached = f"step {facts.step}/{facts.num_steps}{epsilon}{accuracy}"
        return f"{reached}  {facts.images_per_second:,.0f} images/s  {minutes}:{seconds:02d} left"
