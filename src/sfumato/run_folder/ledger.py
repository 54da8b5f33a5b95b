"""The ledger: one line for each release of a run, on disk before its noise is drawn.

It counts. What a run may have released is never more than its whole lines, and never more than the plan in its first
line; so a crash at any moment leaves a count that is not too low. A last line without its newline was being written
when the process died: its noise was never drawn, and it is cut off when the file is opened to go on.
"""

import contextlib
import dataclasses
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from sfumato.accounting.mechanism import Mechanism, Sampling
from sfumato.errors import InputError, MachineError
from sfumato.json_record import Record
from sfumato.run_folder.files import lock, machine_faults, require_folder, sync_folder

LEDGER_FILE = "ledger.jsonl"
MOST_LOST = 0.05
"""Of the plan's updates: more that crashes cost the model end a run, unless its owner allows more."""
_FEW = 10
"""So many may be lost of a short plan."""


class RunLine(Record):
    """The first line: which run this is, and what it may release in all.

    Attributes:
        run_id: 128 random bits; public.
        unit: Of privacy; None of a run that claims nothing.
        delta: None where nothing is claimed.
        recipe_sha256: Of every key that decides what is released; None: a loop of one's own.
        budget: The id of the budget that it is reserved in; None: of none.
    """

    kind: Literal["run"] = "run"
    format_version: Literal[1] = 1
    run_id: str
    unit: Literal["image", "person"] | None
    num_examples: int
    batch_size: int
    noise_multiplier: float
    num_steps: int
    sampling: Sampling
    images_per_unit: int
    clipping_norm: float | None
    delta: float | None
    recipe_sha256: str | None
    budget: str | None = None

    @property
    def mechanism(self) -> Mechanism:
        """The whole plan."""
        return Mechanism(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Mechanism)})


class ReleaseLine(Record):
    """One release.

    Attributes:
        release: From 1, without gaps, whatever was lost.
        step: The update of the model that it is: lower than `release` where updates were lost.
        launch, launch_id: Which start of the run made it. None in a run selected from several, where starts would tell
            how many there were.
    """

    kind: Literal["release"] = "release"
    release: Annotated[int, Field(ge=1)]
    step: Annotated[int, Field(ge=0)]
    launch: int | None
    launch_id: str | None


Line = Annotated[RunLine | ReleaseLine, Field(discriminator="kind")]


@dataclasses.dataclass
class Lines:
    """What a ledger says."""

    run: RunLine
    releases: list[ReleaseLine]

    @property
    def count(self) -> int:
        """Lines, the first one included."""
        return 1 + len(self.releases)

    @property
    def num_releases(self) -> int:
        """Updates that count."""
        return len(self.releases)


def new_run_line(mechanism: Mechanism, **stated: Any) -> RunLine:
    """The first line of a run that begins, with an id of its own; ``stated`` is the rest of what it says."""
    return RunLine(run_id=secrets.token_hex(16), **dataclasses.asdict(mechanism), **stated)


def read(path: Path) -> Lines:
    """The whole lines of a ledger.

    Raises:
        InputError: If there is none, or it says something else than a ledger does.
    """
    require_folder(path.parent)
    if not path.is_file():
        raise InputError(f"{path} cannot be read, so what was spent is not known. Restore it from a copy.")
    return parse(path.read_bytes(), path)


def parse(content: bytes, path: Path) -> Lines:
    """The same of a file's bytes; a tail without a newline is left out."""
    try:
        first, *others = whole_lines(content).splitlines()
        found = Lines(RunLine.model_validate_json(first), [ReleaseLine.model_validate_json(line) for line in others])
        num_steps = found.run.mechanism.num_steps
    except ValueError:  # no line at all, or one of another kind
        raise InputError(
            f"{path} is no whole ledger of this version, so what was spent is not known. Restore it from a copy."
        ) from None
    numbers = [line.release for line in found.releases]
    if numbers != list(range(1, found.num_releases + 1)) or found.num_releases > num_steps:
        raise InputError(
            f"{path} does not count from 1 up to at most {num_steps}, its plan, so what was spent is not known. "
            "Restore it from a copy."
        )
    return found


def sha256_of(path: Path) -> str:
    """Of a ledger's whole lines, in hexadecimal."""
    return hashlib.sha256(whole_lines(path.read_bytes())).hexdigest()


def whole_lines(content: bytes) -> bytes:
    """Without what was being written when a process died: a tail without a newline."""
    return content[: content.rfind(b"\n") + 1]


def append_line(descriptor: int, line: Record) -> int:
    """Writes a line, which is on disk once this returns; its bytes."""
    left = data = (line.model_dump_json() + "\n").encode()
    while left:
        left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)
    return len(data)


class Ledger:
    """A run's ledger, open to append: by one process at a time, which holds its lock until it ends.

    Args:
        path: Of the file; made if it is not there.
        anonymous: Lines do not say which start made them.
        patience: Seconds to wait for another process that holds it.

    Attributes:
        launch_id: Of this start: 64 random bits.
        lines: What it says. Before `begin` of a new one there is nothing.

    Raises:
        InputError: If another process holds it, or it is damaged.
        MachineError: If it cannot be opened.
    """

    lines: Lines

    def __init__(self, path: Path, *, anonymous: bool = False, patience: float = 0.0) -> None:
        self.path, self.launch_id = path, secrets.token_hex(8)
        with machine_faults(path):
            self._file = open(path, "ab+", buffering=0)  # noqa: SIM115  (until `close`)
        with self.closed_on_error(), machine_faults(path):
            if not lock(self._file.fileno(), path, patience):
                raise InputError(f"another process, or a loop that was not closed, holds {path}. End it first.")
            whole = whole_lines(path.read_bytes())
            self._size, self.is_new = len(whole), not whole
            if whole:
                self.lines = parse(whole, path)
            self._file.truncate(self._size)
        before = [] if self.is_new else [line.launch or 0 for line in self.lines.releases]
        launch = {"launch": max(before, default=0) + 1, "launch_id": self.launch_id}
        self._launch: dict[str, Any] = dict.fromkeys(launch) if anonymous else launch

    def begin(self, run: RunLine) -> None:
        """Writes the first line, which lasts through a crash once this returns."""
        with self.closed_on_error(), machine_faults(self.path):
            self._write(run)
            sync_folder(self.path.parent)
            self.lines = Lines(run, [])

    def append(self, step: int) -> None:
        """Counts a release. Only once this has returned may its noise be drawn.

        Args:
            step: The update of the model that it is.

        Raises:
            MachineError: If it cannot be written, the plan has no release left, or something else wrote there; this
                process then counts no more.
        """
        number = self.lines.num_releases + 1
        line = ReleaseLine(release=number, step=step, **self._launch)
        # Whether a line whose writing failed is whole on disk is not known: the next start will see.
        with self.closed_on_error(), machine_faults(self.path):
            if number > self.lines.run.num_steps:
                raise MachineError(f"{self.path} counts all {number - 1} releases of its plan. Begin another run.")
            self._write(line)
            self.lines.releases.append(line)

    def _write(self, line: Record) -> None:
        if not self.is_open:
            raise MachineError(f"{self.path} was closed, so nothing more is released. Open its run again to go on.")
        if os.fstat(self._file.fileno()).st_size != self._size:
            raise MachineError(
                f"{self.path} was written to by something else, so nothing more is released. Stop the other start."
            )
        self._size += append_line(self._file.fileno(), line)

    def refuse_lost(self, step: int, most_lost: float) -> None:
        """Ends a run that crashes too often, before another release.

        Args:
            step: Updates that the model has; the others that were released are lost to it.
            most_lost: The share of the plan that may be.

        Raises:
            MachineError: Saying how it goes on all the same.
        """
        num_lost, num_steps = self.lines.num_releases - step, self.lines.run.num_steps
        if num_lost > max(_FEW, most_lost * num_steps):
            share = min(1.0, num_lost / num_steps + MOST_LOST)
            raise MachineError(
                f"{num_lost} of {num_steps} updates were lost in crashes: they count, and the model has not got them. "
                f"Go on with --max-lost {share:.2f}, or begin a new run; the epsilons of both add up."
            )

    def cut_back(self, count: int) -> None:
        """Keeps the first lines alone: for a run that claims nothing, whose updates are made again, bit for bit."""
        assert self.lines.run.unit is None
        with machine_faults(self.path):
            self._size = sum(map(len, self.path.read_bytes().splitlines(keepends=True)[:count]))
            self._file.truncate(self._size)
        del self.lines.releases[count - 1 :]

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Frees the lock if what follows fails, so that the same process may start again."""
        with contextlib.ExitStack() as unless_done:
            unless_done.callback(self.close)
            yield
            unless_done.pop_all()

    @property
    def is_open(self) -> bool:
        return not self._file.closed

    def close(self) -> None:
        """Frees the lock. Nothing can be appended any more."""
        self._file.close()
