"""One process at a time: a lock that a file has while its descriptor is open, and that dies with the process."""

import fcntl
from pathlib import Path

from sfumato.errors import MachineError


def lock(descriptor: int, path: Path) -> None:
    """Raises BlockingIOError if another has it, MachineError if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        raise MachineError(
            f"{path} cannot be locked: {error.strerror}. Two processes might write there; choose a folder on a disk "
            "whose file system has locks."
        ) from error
