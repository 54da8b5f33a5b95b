"""Rows of numbers on disk, made once and mapped into memory: decoded images, features of images.

A store is a folder of `.npy` files: `values.npy` (N, ...), `digests.npy` (N, 32) with SHA-256 of
each row, `state.npy` (N,) with what is known of it, and `store.json`, which is written last. One
process fills it, part by part, and a process that is killed is gone on from. Whoever reads a row
compares it with its digest, so that a damaged file stops a run and never changes one.

It holds private images in plain numbers, so it is readable by its owner alone.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tokenize
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.data.images import sha256_of_each

_VALUES, _DIGESTS, _STATE, _INDEX = "values.npy", "digests.npy", "state.npy", "store.json"
_REASONS, _STARTED = "reasons.jsonl", "started.json"
_MISSING, _FILLED, _EMPTY = 0, 1, 2

# What damaged files raise when they are read; NumPy parses a header as Python.
_DAMAGED = (OSError, ValueError, KeyError, TypeError, EOFError, SyntaxError, tokenize.TokenError)


class Store:
    """Rows of one type and shape, of which some may be empty for a reason.

    Attributes:
        values: (N, *shape), mapped; zeros where a row is empty.
        digests: (N, 32), uint8; mapped.
        reasons: Why rows are empty, by their index.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], mode: str) -> None:
        self.folder, self.settings = folder, dict(settings)
        self.values, self.digests, self._state = (
            np.lib.format.open_memmap(folder / name, mode=mode) for name in (_VALUES, _DIGESTS, _STATE)
        )
        self.reasons: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._state)

    @property
    def filled(self) -> np.ndarray:
        """(N,), bool: which rows hold something."""
        return np.asarray(self._state == _FILLED)

    def missing(self) -> np.ndarray:
        """The indices of rows that nobody has put yet, ascending."""
        return np.flatnonzero(self._state == _MISSING)

    def put(self, indices: np.ndarray, values: np.ndarray, reasons: Mapping[int, str]) -> None:
        """Writes rows, then that they are there: a kill between the two loses them and no more.

        Args:
            indices: (b,), of the rows.
            values: (b, *shape).
            reasons: Why a row is empty, by its index.
        """
        self.values[indices] = values
        self.digests[indices] = sha256_of_each(values)
        self.values.flush()
        self.digests.flush()
        if reasons:
            lines = (f"\n{json.dumps([int(index), reason])}" for index, reason in reasons.items())
            write_private(self.folder / _REASONS, "".join(lines), os.O_APPEND)
        self._state[indices] = [_EMPTY if int(index) in reasons else _FILLED for index in indices]
        self._state.flush()

    def finish(self) -> None:
        """States that all rows are there."""
        assert not len(self.missing())
        temporary = self.folder / f"{_INDEX}.part"
        write_private(temporary, json.dumps({"settings": self.settings, "sha256": self._checksum()}))
        os.replace(temporary, self.folder / _INDEX)

    def _checksum(self) -> str:
        checksum = hashlib.sha256(self.digests.tobytes())
        checksum.update(self._state.tobytes())
        checksum.update(self.values.dtype.str.encode() + repr(self.values.shape).encode())
        return checksum.hexdigest()

    def _read_reasons(self) -> None:
        path = self.folder / _REASONS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        known = dict(json.loads(line) for line in lines if line.endswith("]"))  # one may be cut by a kill
        self.reasons = {int(index): known.get(int(index), "") for index in np.flatnonzero(self._state == _EMPTY)}


def read(folder: Path, settings: Mapping[str, Any]) -> Store | None:
    """The finished store of a folder; None where there is none of these settings, or a damaged one."""
    try:
        written = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        if written["settings"] != json.loads(json.dumps(dict(settings))):
            return None
        # "c": a tensor of torch wants to be written to; what is written to it stays in memory.
        store = Store(folder, settings, "c")
        if written["sha256"] != store._checksum() or len({len(store), len(store.values), len(store.digests)}) > 1:
            return None
        store._read_reasons()
        return store
    except _DAMAGED:
        return None


def begin(folder: Path, settings: Mapping[str, Any], count: int, shape: tuple[int, ...], dtype: np.dtype) -> Store:
    """An unfinished store to be filled: what another process left of one, or a new one. Call it
    within `alone`.

    Raises:
        OSError: If the disk has no room for it.
    """
    if not (folder / _INDEX).exists():  # one that was finished, and is not taken, is damaged
        try:
            started = json.loads((folder / _STARTED).read_text(encoding="utf-8"))
            left = Store(folder, settings, "r")  # refuses files that are too short
            sizes = (left.values.shape, left.values.dtype, left.digests.shape, left._state.shape)
            is_same = started == json.loads(json.dumps(dict(settings)))
            if is_same and sizes == ((count, *shape), dtype, (count, 32), (count,)):
                return Store(folder, settings, "r+")
        except _DAMAGED:
            pass
    clear(folder)
    for name, size, kind in (
        (_VALUES, (count, *shape), dtype),
        (_DIGESTS, (count, 32), "u1"),
        (_STATE, (count,), "u1"),
    ):
        np.lib.format.open_memmap(folder / name, mode="w+", dtype=kind, shape=size)
        (folder / name).chmod(0o600)
        with open(folder / name, "r+b") as file:  # a full disk is an error now, and would be a crash later
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    write_private(folder / _STARTED, json.dumps(dict(settings)))
    return Store(folder, settings, "r+")


def clear(folder: Path) -> None:
    """Removes what a store holds, and leaves its folder, and its lock."""
    for path in folder.iterdir():
        if path.name != "lock":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@contextlib.contextmanager
def alone(folder: Path, say_waiting: Callable[[], None]) -> Iterator[None]:
    """Within the block no other process fills the store; the folder is there, for its owner alone.

    Args:
        folder: Of the store.
        say_waiting: Called where another process is filling it just now.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    with os.fdopen(os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say_waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_private(path: Path, text: str, how: int = os.O_TRUNC) -> None:
    """Onto the disk, for the owner alone."""
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | how, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
