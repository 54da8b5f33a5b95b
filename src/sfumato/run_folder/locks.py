"""One process at a time: a lock that a file has while its descriptor is open, and that dies with the process."""

import fcntl
from pathlib import Path

from sfumato.errors import MachineError


def lock(descriptor: int, path: Path) -> bool:
    """Whether nobody else has it, and it was taken. Raises MachineError if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):
            return False
        raise MachineError(
            f"{path} cannot be locked: {error.strerror}. Two processes might write there; choose a folder on a disk "
            "whose file system has locks."
        ) from error
    return True
