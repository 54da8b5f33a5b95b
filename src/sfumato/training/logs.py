"""What a run says while it trains: to whoever watches it, and to the files that `run.log` asks for.

Who watches gets a live line in a terminal or a notebook, plain lines elsewhere; always on stderr. The files are
metrics.csv and TensorBoard's event files.
"""

import contextlib
import dataclasses
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from sfumato.accounting import formats
from sfumato.config import RunConfig
from sfumato.errors import InputError
from sfumato.run_folder import record
from sfumato.run_folder.files import OWNER, machine_faults, write_atomically
from sfumato.run_folder.record import Metrics, PrivateMetrics, RecordLines

TENSORBOARD_FOLDER = f"{OWNER}/tensorboard"
# Of lines of a kind: their file and its mode; what a log beside it repeats; how TensorBoard calls that.
_LINES: dict[type[Metrics | PrivateMetrics], tuple[str, int, tuple[str, ...], str]] = {
    Metrics: (record.METRICS_FILE, 0o644, ("epsilon", "accuracy", "accuracy_last"), ""),
    PrivateMetrics: (record.PRIVATE_METRICS_FILE, 0o600, ("loss", "clipped_fraction", "grad_norm"), "not_private/"),
}


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a run tells whoever watches it; every call may be ignored."""

    message: Callable[[str], None] = lambda text: None
    step: Callable[["StepFacts"], None] = lambda facts: None


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """Where a run stands after a step.

    Attributes:
        epsilon_after: Epsilon of the first so many steps, computed when asked for; None where the run is not private.
        accuracy: On held-out images when they were last looked at; None before.
        evaluated: Whether that was after this step.
    """

    step: int
    num_steps: int
    epsilon_after: Callable[[int], float | None]
    accuracy: float | None
    images_per_second: float
    evaluated: bool


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
        self._start = self._shown = 0.0
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
        is_due = facts.evaluated or time.perf_counter() - self._shown > 1
        if self._live is not None and is_due:
            self._shown = time.perf_counter()
            self._live.update(self._line(facts))
        elif facts.evaluated:
            formats.note(self._line(facts))

    def _line(self, facts: StepFacts) -> str:
        done = facts.step - (self._first_step or 0)
        left = (time.perf_counter() - self._start) / max(done, 1) * (facts.num_steps - facts.step)
        spent = facts.epsilon_after(facts.step)
        epsilon = "" if spent is None else f"  epsilon {formats.epsilon_text(spent)}"
        accuracy = "" if facts.accuracy is None else f"  held-out {formats.per_cent(facts.accuracy)}"
        minutes, seconds = divmod(int(left), 60)
        reached = f"step {facts.step}/{facts.num_steps}{epsilon}{accuracy}"
        return f"{reached}  {facts.images_per_second:,.0f} images/s  {minutes}:{seconds:02d} left"


def log_kinds(run: RunConfig) -> set[Literal["csv", "tensorboard"]]:
    """What a recipe asks for.

    Raises:
        InputError: If it asks for TensorBoard and that is not installed, or for statistics in no log.
    """
    kinds = set([run.log] if isinstance(run.log, str) else run.log or [])
    if "tensorboard" in kinds and importlib.util.find_spec("tensorboard") is None:
        raise InputError(
            'run.log = "tensorboard" needs TensorBoard, which is not installed: pip install tensorboard. '
            "Or take --set run.log=csv."
        )
    if run.log_private and not kinds:
        raise InputError("run.log_private = true says what a log holds, and there is none. Take --set run.log=csv too.")
    return kinds


class Logs:
    """The files of lines about steps, and what `run.log` asks for, which repeats metrics.jsonl; with `run.log_private`
    also losses and gradient norms, for the owner alone: no guarantee covers them.

    Guarantee: without `run.log_private` a log holds what metrics.jsonl holds and nothing else: no time of any step,
        which would tell how many images it drew. An event's wall time is its step.

    Args:
        folder: Of the run.
        run: What is asked for.
    """

    def __init__(self, folder: Path, run: RunConfig) -> None:
        self._folder, self._kinds = folder, log_kinds(run)
        self._lines = {kind: RecordLines(folder / file, kind, mode) for kind, (file, mode, *_) in _LINES.items()}
        self._logged = [kind for kind in _LINES if kind is Metrics or run.log_private]
        self._writer: Any = None

    def go_on_after(self, step: int) -> None:
        """Begins, or drops what was said of later steps, which are made again."""
        for lines in self._lines.values():
            lines.keep_up_to(step)
        for kind in self._logged if "csv" in self._kinds else []:
            path, (_, mode, names, _) = self._lines[kind].path, _LINES[kind]
            rows = [_row(line, names) for line in record.read_lines(path, kind)]
            write_atomically(path.with_suffix(".csv"), "".join([_text(("step", *names)), *rows]).encode(), mode)
        if "tensorboard" in self._kinds:
            from torch.utils.tensorboard import SummaryWriter

            place = self._folder / TENSORBOARD_FOLDER
            with machine_faults(place):
                place.mkdir(exist_ok=True)
            self._writer = SummaryWriter(str(place), purge_step=step + 1)

    def log(self, line: Metrics | PrivateMetrics) -> None:
        """What an evaluated step reached; or statistics of training images, which no log repeats unless asked to."""
        lines, (_, _, names, prefix) = self._lines[type(line)], _LINES[type(line)]
        lines.append(line)
        if type(line) not in self._logged:
            return
        path = lines.path.with_suffix(".csv")
        if "csv" in self._kinds:
            with machine_faults(path), path.open("a", encoding="ascii") as log:
                log.write(_row(line, names))
        if self._writer is not None:
            for name in names:
                if (value := getattr(line, name)) is not None:
                    self._writer.add_scalar(prefix + name, value, line.step, walltime=float(line.step))
            self._writer.flush()  # whoever looks on sees it

    def close(self) -> None:
        """Nothing follows."""
        if self._writer is not None:
            self._writer.close()


def _row(line: Metrics | PrivateMetrics, names: tuple[str, ...]) -> str:
    return _text([getattr(line, name) for name in ("step", *names)])


def _text(values: Iterable[Any]) -> str:
    return ",".join("" if value is None else str(value) for value in values) + "\n"
