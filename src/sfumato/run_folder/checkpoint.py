"""Checkpoints: the state of a run after one of its updates, in a file that is whole or absent."""

import dataclasses
import errno
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sfumato.errors import InputError, refusing
from sfumato.run_folder.files import machine_faults, sync_folder

KEPT = 2
_CANNOT = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_ROOM_OF_THE_FIRST = 4
"""An optimizer remembers nothing yet when the first checkpoint is written: later ones may be so many times as large."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The state after an update.

    Attributes:
        run_id: Whose it is.
        num_lines: Of the ledger by then.
        num_releases: Updates that were released by then.
        step: Updates that the state has: fewer, where some were lost.
        state: Nested dictionaries of tensors and plain values.
        facts: What else is plain.
    """

    run_id: str
    num_lines: int
    num_releases: int
    step: int
    state: dict[str, Any]
    facts: dict[str, Any]


class Checkpoints:
    """The newest two checkpoints of a run, for its owner alone: they depend on what was not released, too.

    Room on the disk for the next one is held in a file of zeros, which becomes it: a disk that fills up stops a run
    right after a checkpoint, and not with updates that are released and cannot be kept.
    """

    def __init__(self, folder: Path, launch_id: str = "") -> None:
        self.folder = folder
        # A start that was frozen in the middle of writing, and whose folder another took, writes to a file of its own.
        self._room = folder / f".next-{launch_id}"

    def paths(self) -> list[Path]:
        """All, the oldest first."""
        return sorted(self.folder.glob("release-*.pt"))

    def newest(self) -> Checkpoint | None:
        """The newest one that is whole; None where none was ever written.

        Raises:
            InputError: If no file of them can be read.
        """
        paths = self.paths()
        for path in reversed(paths):
            try:
                return Checkpoint(**torch.load(path, map_location="cpu", weights_only=True))
            except (OSError, RuntimeError, EOFError, ValueError, TypeError, pickle.UnpicklingError):
                continue  # cut: the one before has all but the updates since
        if paths:
            raise InputError(f"no checkpoint in {self.folder} can be read. Restore one, or start a new run.")
        return None

    def save(self, checkpoint: Checkpoint, may_write: Callable[[], None] = lambda: None) -> None:
        """Writes a checkpoint, removes all but the newest two, and holds room for the next.

        Args:
            checkpoint: That is newer than all others.
            may_write: Raises where another start took the folder over; asked before each file.

        Raises:
            InputError: If the state has what could not be read again.
            MachineError: If the disk is full or fails; the last checkpoint stays.
        """
        buffer = io.BytesIO()
        torch.save(vars(checkpoint), buffer)
        with refusing("a checkpoint could not give back", "Keep tensors and plain numbers.", pickle.UnpicklingError):
            torch.load(io.BytesIO(buffer.getbuffer()), map_location="cpu", weights_only=True)
        path = self._path(checkpoint.num_releases)
        may_write()
        with machine_faults(path):
            with self._open_room() as file:
                file.write(buffer.getbuffer())
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
            may_write()
            os.replace(self._room, path)
            sync_folder(self.folder)
            for old in self.paths()[:-KEPT]:
                old.unlink()
        may_write()
        self.hold_room()

    def hold_room(self) -> None:
        """Before a start's first release, and after each checkpoint: room for the next one."""
        newest = self.paths()[-1]
        size = newest.stat().st_size * (_ROOM_OF_THE_FIRST if newest == self._path(0) else 1)
        with machine_faults(self._room), self._open_room() as file:
            missing = size - os.fstat(file.fileno()).st_size
            if missing <= 0:
                return
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except (AttributeError, OSError) as error:  # macOS has no such call, and some file systems cannot do it
                if isinstance(error, OSError) and error.errno not in _CANNOT:
                    raise
                file.seek(0, os.SEEK_END)
                file.write(bytes(missing))

    def remove_room(self) -> None:
        """No more checkpoints follow, or none of an earlier start."""
        for path in self.folder.glob(".next*"):
            path.unlink(missing_ok=True)

    def _path(self, num_releases: int) -> Path:
        return self.folder / f"release-{num_releases:09d}.pt"

    def _open_room(self) -> io.BufferedRandom:
        return os.fdopen(os.open(self._room, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
