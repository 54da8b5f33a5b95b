"""What is made once of private images and kept on disk: decoded images, their features, what archives hold.

Each slot is a folder in the user's cache directory, named by what it is made of. It is filled in `part`, which is
renamed to `made` when all of it is on the disk: what is half written is never read. One process fills a slot, and
the others wait. Rows of numbers are filled from the first to the last, and a process that is killed is gone on from.

It holds private images in plain numbers, so it is for its owner alone.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("images", "features", "unpacked")
_PART, MADE, _SETTINGS, _FILLED = "part", "made", "settings.json", "filled.json"
_is_off: ContextVar[bool] = ContextVar("cache_is_off", default=False)

Columns = Mapping[str, tuple[tuple[int, ...], np.dtype]]
"""Name -> shape and type of one row."""
Report = Callable[[str], None]
"""Takes lines for the user."""
FOR_OWNER = "For you alone: do not publish."
"""Ends a line that tells what private images show."""


def cache_folder() -> Path:
    """`sfumato` in the user's cache directory: XDG_CACHE_HOME, else ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "sfumato"


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Within, nothing is read from the cache or kept in it."""
    token = _is_off.set(True)
    try:
        yield
    finally:
        _is_off.reset(token)


def slot_of(settings: Mapping[str, Any], kind: str) -> Path | None:
    """The folder in which what is made of these settings is kept; None where the cache is switched off."""
    return None if _is_off.get() else cache_folder() / f"{digest(settings)[:32]}.{kind}"


def digest(value: Any) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def made(slot: Path, settings: Mapping[str, Any], fill: Callable[[Path], None], report: Report) -> tuple[Path, bool]:
    """The folder in a slot that was filled under these settings; where there is none it is filled now.

    Args:
        slot: Of `slot_of`.
        settings: As JSON. What was made under others is removed when the new folder is whole.
        fill: Fills a folder: an empty one, or one that a killed process left under the same settings. What was made
            under other settings lies beside it in `made` meanwhile.
        report: Is told where another process fills the slot, and is waited for.

    Returns:
        The folder, and whether it was there already.

    Raises:
        OSError: If the disk is full, or the folder cannot be had.
    """
    slot.mkdir(mode=0o700, parents=True, exist_ok=True)
    slot.parent.chmod(0o700)
    settings = json.loads(json.dumps(settings))
    part, whole = slot / _PART, slot / MADE
    with _alone(slot, report):
        if settings_of(whole) == settings:
            return whole, True
        if settings_of(part) != settings:
            _remove(part)
            part.mkdir(mode=0o700)
            write(part / _SETTINGS, json.dumps(settings))
        fill(part)
        for path in part.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        _remove(whole)
        os.rename(part, whole)
    return whole, False


def settings_of(folder: Path) -> Any:
    """Under which a folder was or is filled; None where it is not there, or is half removed."""
    return read_json(folder / _SETTINGS)


def _remove(folder: Path) -> None:
    """Its settings first, so that what a kill leaves of it is neither read nor gone on from."""
    (folder / _SETTINGS).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _alone(slot: Path, report: Report) -> Iterator[None]:
    with open(slot / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another process is filling {slot}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            why = f"its disk has no locks ({error.strerror}): name a folder on another by XDG_CACHE_HOME"
            raise OSError(error.errno, why, str(slot)) from None
        yield


def write(path: Path, text: str) -> None:
    """A small file, all of it or nothing."""
    temporary = path.with_name(f"{path.name}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    """What `write` wrote; None where it never did."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


class Filling:
    """Rows that are written to a slot's folder, from the first to the last.

    Attributes:
        num_filled: How many are there already.
        reasons: Why rows are empty, by their index.

    Args:
        folder: Where a process that was killed may have begun.
        count: N.
        columns: What each row holds; each column becomes a `.npy` file.
    """

    def __init__(self, folder: Path, count: int, columns: Columns) -> None:
        self._folder = folder
        filled: tuple[int, list[tuple[int, str]]] = read_json(folder / _FILLED) or (0, [])
        self.num_filled, self.reasons = filled[0], dict(filled[1])
        for name, (shape, dtype) in columns.items() if not self.num_filled else ():
            np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, (count, *shape))
        self._note()

    def put(self, reasons: Mapping[int, str] | None = None, **columns: np.ndarray) -> None:
        """The next rows of every column; then, when they are on the disk, that they are there.

        Args:
            reasons: Why rows of these are empty, by their index among all.
            columns: (b, *shape) each.
        """
        for name, values in columns.items():
            path = self._folder / f"{name}.npy"
            rows: Any = np.lib.format.open_memmap(path, "r")
            assert values.shape[1:] == rows.shape[1:] and values.dtype == rows.dtype
            with open(path, "r+b") as file:  # a full disk is an error of `write`; of a map it would end the process
                file.seek(rows.offset + self.num_filled * values[:1].nbytes)
                file.write(np.ascontiguousarray(values).data)
                file.flush()
                os.fsync(file.fileno())
        self.num_filled += len(values)
        self.reasons |= reasons or {}
        self._note()

    def _note(self) -> None:
        write(self._folder / _FILLED, json.dumps([self.num_filled, list(self.reasons.items())]))


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Finished rows, mapped into memory.

    Attributes:
        columns: (N, ...) each. What is written to them stays in memory.
        reasons: Why rows are empty, by their index.
    """

    columns: dict[str, np.memmap]
    reasons: dict[int, str]

    def bring(self, rows: list[int]) -> None:
        """Asks the system for rows of `values` that are read next, all at once: one after another, with what lies
        around each, they take many times longer (LOG.md). Advice: nothing is read differently.
        """
        values: Any = self.columns["values"]
        size = values[:1].nbytes
        for row in rows:
            start = values.offset + row * size
            page = start - start % mmap.PAGESIZE
            values._mmap.madvise(mmap.MADV_WILLNEED, page, start + size - page)


def read(folder: Path) -> Rows:
    """The rows of a folder that `made` gives."""
    columns = {path.stem: np.lib.format.open_memmap(path, mode="c") for path in folder.glob("*.npy")}
    return Rows(columns, dict(read_json(folder / _FILLED)[1]))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A slot of the cache.

    Attributes:
        kind: "images" (decoded), "features" or "unpacked" (from archives).
        root: The folder that they are of; None for features.
        num_bytes: On disk.
    """

    folder: Path
    kind: str
    root: str | None
    num_bytes: int


def entries() -> list[Entry]:
    """All that the cache holds, largest first."""
    found = []
    for kind in KINDS:
        for slot in sorted(cache_folder().glob(f"*.{kind}")):
            settings = settings_of(slot / MADE) or settings_of(slot / _PART) or {}
            sizes = [path.stat().st_size for path in slot.rglob("*") if path.is_file()]
            found.append(Entry(slot, kind, settings.get("root"), sum(sizes)))
    return sorted(found, key=lambda entry: -entry.num_bytes)


def clear(report: Report) -> list[Entry]:
    """Removes all that the cache holds, and says what it was. A process that is filling a part of it
    is waited for, but on a disk without locks, where nothing is filled.
    """
    removed = entries()
    for entry in removed:
        with contextlib.suppress(OSError), _alone(entry.folder, report):
            pass  # nobody fills it now; some disks keep the file of a lock while it is open
        shutil.rmtree(entry.folder)
    return removed


def sha256_of_each(values: np.ndarray) -> np.ndarray:
    """(N, ...) -> (N, 32), uint8: SHA-256 of each row's bytes."""
    digests = [hashlib.sha256(np.ascontiguousarray(row).data).digest() for row in values]
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 32)
