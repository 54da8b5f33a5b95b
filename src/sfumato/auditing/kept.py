"""The folder of a membership audit: what is trained already, and the keys of what is being trained."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sfumato.auditing.bounds import new_split_seed
from sfumato.errors import InputError
from sfumato.randomness import KEY_BYTES, new_key
from sfumato.run_folder.files import (
    NO_FILE,
    machine_faults,
    read_json,
    reading_faults,
    refuse_links,
    write_atomically,
    write_first_json,
)
from sfumato.run_folder.locks import lock

_SETTINGS, _SPLIT = "settings.json", "split_seed"


class Kept:
    """Losses by the name of their chunk, on disk if a folder is given.

    Keys come from the operating system before a chunk is trained, and stay in the folder until its losses are
    there. So whoever goes on after an interrupt trains the very same models, and has them judged by the same split.
    Several processes may work in one folder: each chunk is trained by one of them.

    Args:
        folder: Made with mode 0700; None: nothing outlives the process.
        settings: All that decides the losses.

    Raises:
        InputError: If the folder is that of an audit with other settings, or holds something else.
    """

    def __init__(self, folder: Path | None, settings: dict[str, Any]) -> None:
        self.folder, self.split_seed = folder, new_split_seed()
        if folder is None:
            return
        refuse_links(folder, below=False)
        first = {**settings, _SPLIT: self.split_seed}
        write_first_json(folder / _SETTINGS, first, "membership audit", 0o600)
        damaged = InputError(f"{folder / _SETTINGS} is damaged. Restore it, or choose another --output.")
        try:
            before = read_json(folder / _SETTINGS)
        except InputError:
            raise damaged from None
        split: Any = before.pop(_SPLIT, None) if isinstance(before, dict) else None
        if not isinstance(before, dict) or before == settings and (type(split) is not int or split < 0):
            raise damaged
        if before != settings:
            keys = [key for key in settings if not isinstance(before, dict) or before.get(key) != settings[key]]
            raise InputError(
                f"{folder} holds an audit with other settings ({', '.join(keys) or 'others'}). Give those again, or "
                "choose another --output."
            )
        with machine_faults(folder):
            folder.chmod(0o700)
        self.split_seed = split

    def losses(self, name: str, count: int, train: Callable[[Sequence[bytes]], list[float]]) -> list[float] | None:
        """Those of a chunk: as they were kept, or trained now; None while another process trains them.

        Args:
            name: Of the chunk.
            count: Its models.
            train: From a key for each model to the losses.

        Raises:
            InputError: If its file is damaged.
            MachineError: If the folder cannot be read or written, or its file system has no locks.
        """
        if self.folder is None:
            return train([new_key() for _ in range(count)])
        path, secret = self.folder / f"{name}.json", self.folder / f"{name}.keys"
        if not path.exists():
            with _alone(secret) as descriptor:
                if descriptor is None:
                    return None
                if not path.exists():  # another process may have ended between
                    found = {"chunk": name, "losses": train(_keys(descriptor, secret, count))}
                    # Python's own spelling of numbers that JSON has not: a model may diverge.
                    write_atomically(path, json.dumps(found).encode(), 0o600)
        try:
            with reading_faults(path):
                kept = json.loads(path.read_bytes())
        except (*NO_FILE, ValueError, RecursionError):  # lists within lists
            kept = None
        losses = kept.get("losses") if isinstance(kept, dict) else None
        if not isinstance(losses, list) or len(losses) != count or {type(loss) for loss in losses} - {float}:
            raise InputError(f"{path} is damaged. Delete it: its models are then trained anew.")
        if kept.get("chunk") != name:
            raise InputError(f"{path} holds the models of another part. Delete it: its own are then trained anew.")
        secret.unlink(missing_ok=True)
        return losses


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[int | None]:
    """A descriptor of a file, made if need be, that no other process has meanwhile; None if one has it."""
    with machine_faults(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(descriptor).st_nlink > 1:  # its bytes are those of another file, too; of one just deleted it is 0
            raise InputError(f"{path} has another name elsewhere. Copy the folder as a whole, and go on in the copy.")
        yield descriptor if lock(descriptor, path) else None
    finally:
        os.close(descriptor)


def _keys(descriptor: int, path: Path, count: int) -> list[bytes]:
    """Those in a chunk's file; new ones where a process died before it had written them all, and so trained nothing.

    A digest of them and of the file's name stands behind: a file that a power cut left as zeros would give all models
    one key, and a copy under another name the same keys to two parts.
    """

    def digest(keys: bytes) -> bytes:
        return hashlib.sha256(path.name.encode() + b"\0" + keys).digest()

    size = count * KEY_BYTES
    with machine_faults(path):
        held = os.pread(descriptor, size + 32, 0)
        keys = held[:size]
        if held[size:] != digest(keys):
            keys = b"".join(new_key() for _ in range(count))
            os.ftruncate(descriptor, 0)
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(keys + digest(keys))
                file.flush()
                os.fsync(descriptor)
    return [keys[first : first + KEY_BYTES] for first in range(0, size, KEY_BYTES)]
