"""The file that holds a run's secret key."""

import os
import stat
from pathlib import Path

from sfumato.errors import InputError, is_from_elsewhere
from sfumato.run_folder.files import (
    NO_FILE,
    is_there,
    machine_faults,
    reading_faults,
    sync_folder,
    write_atomically,
)

KEY_FILE = "key"


def write_key(folder: Path, key: bytes) -> None:
    """Puts the run's key on disk, readable by its owner alone."""
    write_atomically(folder / KEY_FILE, key.hex().encode() + b"\n", 0o600)


def read_key(folder: Path) -> bytes:
    """The run's key.

    Raises:
        InputError: If it is missing or damaged: the run cannot be continued without it.
        MachineError: If it cannot be read.
    """
    path = folder / KEY_FILE
    try:
        with reading_faults(path):
            key = _key_in(path.read_bytes())
    except NO_FILE as error:
        if is_from_elsewhere(error):
            raise
        key = None
    if key is None:
        raise InputError(
            f"{path} is missing or damaged: without the run's key its updates cannot be repeated. Start a "
            "new run; the epsilons of both add up."
        )
    return key


_NUM_DIGITS = 64
_NUM_BYTES = _NUM_DIGITS + 1  # as `write_key` writes it
_MOST_BYTES = 1000


def _is_erased(content: bytes) -> bool:
    """Whether `delete_key` overwrote a key, in a file that a crash left and an editor may have saved."""
    zeros = b"".join(content.split())
    return len(content) <= _MOST_BYTES and len(zeros) >= _NUM_DIGITS and not zeros.strip(b"0")


def _key_in(content: bytes) -> bytes | None:
    """The key in what a file holds, with a line's end or spaces as an editor leaves them; None where it holds none."""
    try:
        key = bytes.fromhex(content[:_MOST_BYTES].decode("ascii"))
    except ValueError as error:
        if is_from_elsewhere(error):
            raise
        return None
    return key if len(key) == 32 and any(key) and len(content) <= _MOST_BYTES else None


def has_key(folder: Path) -> bool:
    """Whether a run's key is there; one that was overwritten, but whose file a crash left, is not.

    Raises:
        MachineError: If it cannot be read.
    """
    path = folder / KEY_FILE
    with reading_faults(path):
        return is_there(path) and not (path.is_file() and _is_erased(path.read_bytes()))


def is_key(folder: Path) -> bool:
    """Whether what bears the key's name is a key that this tool wrote."""
    path = folder / KEY_FILE
    if not path.is_file() or path.is_symlink():
        return False
    content = path.read_bytes()
    return _is_erased(content) or _key_in(content) is not None


def delete_key(folder: Path, key: bytes | None = None) -> None:
    """Overwrites the key and removes it, so that the noise cannot be regenerated.

    Args:
        folder: Of the run.
        key: The run's own; None: whatever key is there.

    Raises:
        InputError: If what bears its name is no key, or another one: that is somebody's file, and is left as it is.
        MachineError: If it cannot be written.
    """
    path = folder / KEY_FILE
    if not is_there(path):
        return
    no_key = InputError(f"{path} is not the key that this run wrote, so it is not overwritten. Move it away.")
    with machine_faults(path):
        mode = os.lstat(path).st_mode
    if not stat.S_ISREG(mode):
        raise no_key
    with machine_faults(path):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "r+b") as file:
            content = file.read(_MOST_BYTES + 1)
            held = _key_in(content)
            is_key = _is_erased(content) or (held is not None if key is None else held == key)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode) or not is_key:
                raise no_key
            file.seek(0)
            file.write(b"0" * max(len(content), _NUM_BYTES))
            file.flush()
            os.fsync(descriptor)
        path.unlink()
        sync_folder(folder)
