"""metrics.csv and TensorBoard's event files, written while a run trains (`run.log`)."""

import csv
import importlib.util
import io
from pathlib import Path
from typing import Any, Literal

from sfumato.config import RunConfig
from sfumato.errors import InputError
from sfumato.run_folder import record
from sfumato.run_folder.files import OWNER, machine_faults, write_atomically
from sfumato.run_folder.record import Metrics, PrivateMetrics

CSV_FILE, PRIVATE_CSV_FILE, TENSORBOARD_FOLDER = "metrics.csv", f"{OWNER}/metrics_private.csv", f"{OWNER}/tensorboard"
_PUBLIC = ("epsilon", "accuracy", "accuracy_last")
_PRIVATE = ("loss", "clipped_fraction", "grad_norm")


def log_kinds(run: RunConfig) -> set[Literal["csv", "tensorboard"]]:
    """What a recipe asks for.

    Raises:
        InputError: If it asks for TensorBoard and that is not installed, or for statistics in no log.
    """
    kinds = set([run.log] if isinstance(run.log, str) else run.log or [])
    if "tensorboard" in kinds and importlib.util.find_spec("tensorboard") is None:
        raise InputError(
            "run.log = \"tensorboard\" needs TensorBoard, which is not installed: pip install 'sfumato[tensorboard]'. "
            'Or set run.log = "csv".'
        )
    if run.log_private and not kinds:
        raise InputError('run.log_private = true says what a log holds, and there is none. Set run.log = "csv" too.')
    return kinds


class Logs:
    """Repeats what metrics.jsonl says; with `run.log_private` also losses and gradient norms, for the owner alone: no
    guarantee covers them.

    Guarantee: without `run.log_private` a log holds what metrics.jsonl holds and nothing else: no time of any step,
        which would tell how many images it drew. An event's wall time is its step.

    Args:
        folder: Of the run.
        run: What is asked for.
    """

    def __init__(self, folder: Path, run: RunConfig) -> None:
        self._folder, self._kinds, self._with_private = folder, log_kinds(run), run.log_private
        self._writer: Any = None

    def go_on_from(self, first_step: int) -> None:
        """Begins, or drops what was logged of this step and later ones, which are made again."""
        if "csv" in self._kinds:
            before = record.read_lines(self._folder / record.METRICS_FILE, Metrics) if self._has_metrics() else []
            write_atomically(self._folder / CSV_FILE, _rows(("step", *_PUBLIC), before).encode())
            if self._with_private:
                path = self._folder / record.PRIVATE_METRICS_FILE
                lines = record.read_lines(path, PrivateMetrics) if path.exists() else []
                text = _rows(("step", *_PRIVATE), lines)
                write_atomically(self._folder / PRIVATE_CSV_FILE, text.encode(), 0o600)
        if "tensorboard" in self._kinds:
            from torch.utils.tensorboard import SummaryWriter

            self.close()
            place = self._folder / TENSORBOARD_FOLDER
            with machine_faults(place):
                place.mkdir(exist_ok=True)
            self._writer = SummaryWriter(str(place), purge_step=first_step)

    def _has_metrics(self) -> bool:
        return (self._folder / record.METRICS_FILE).exists()

    def public(self, line: Metrics) -> None:
        """What an evaluated step reached."""
        self._log(line, _PUBLIC, CSV_FILE, "")

    def private(self, line: PrivateMetrics) -> None:
        """Statistics of training images, where they are asked for."""
        if self._with_private:
            self._log(line, _PRIVATE, PRIVATE_CSV_FILE, "not_private/")

    def _log(self, line: Metrics | PrivateMetrics, names: tuple[str, ...], file: str, prefix: str) -> None:
        path = self._folder / file
        if "csv" in self._kinds:
            with machine_faults(path), path.open("a", encoding="ascii") as log:
                log.write(_row([line.step, *(getattr(line, name) for name in names)]))
        if self._writer is not None:
            for name in names:
                if (value := getattr(line, name)) is not None:
                    self._writer.add_scalar(prefix + name, value, line.step, walltime=float(line.step))
            self._writer.flush()  # whoever looks on sees it

    def close(self) -> None:
        """Nothing follows."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _rows(names: tuple[str, ...], lines: list[Any]) -> str:
    return _row(names) + "".join(_row([getattr(line, name) for name in names]) for line in lines)


def _row(values: Any) -> str:
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerow(values)
    return written.getvalue()
