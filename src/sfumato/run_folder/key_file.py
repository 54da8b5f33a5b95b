"""The file that holds a run's secret key."""

import os
import re
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
            key = bytes.fromhex(path.read_bytes().decode("ascii").strip())
    except (*NO_FILE, ValueError) as error:
        if is_from_elsewhere(error):
            raise
        key = b""
    if len(key) != 32:
        raise InputError(
            f"{path} is missing or damaged: without the run's key its updates cannot be repeated. Start a "
            "new run; the epsilons of both add up."
        )
    return key


_KEY = re.compile(rb"[0-9a-f]{64}[\n0]")  # as `write_key` writes it, or as `delete_key` overwrote it before a crash
_ERASED = b"0" * 65


def has_key(folder: Path) -> bool:
    """Whether a run's key is there; one that was overwritten, but whose file a crash left, is not.

    Raises:
        MachineError: If it cannot be read.
    """
    path = folder / KEY_FILE
    with reading_faults(path):
        return is_there(path) and not (path.is_file() and path.read_bytes() == _ERASED)


def is_key(folder: Path) -> bool:
    """Whether what bears the key's name is a key that this tool wrote."""
    path = folder / KEY_FILE
    return path.is_file() and not path.is_symlink() and _KEY.fullmatch(path.read_bytes()) is not None


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
            held = file.read(len(_ERASED) + 1)
            is_own = key is None or held in (_ERASED, key.hex().encode() + b"\n")
            if not stat.S_ISREG(os.fstat(descriptor).st_mode) or not _KEY.fullmatch(held) or not is_own:
                raise no_key
            file.seek(0)
            file.write(_ERASED)
            file.flush()
            os.fsync(descriptor)
        path.unlink()
        sync_folder(folder)
