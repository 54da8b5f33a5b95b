"""The folder of a membership audit: what is trained already."""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sfumato.auditing.bounds import new_split_seed
from sfumato.errors import InputError
from sfumato.run_folder.files import lock, read_json, write_atomically

_SPLIT = "split_seed"


class AuditCache:
    """Losses by the name of their chunk, on disk if a folder is given.

    Several processes may work in one folder: each chunk is trained by one of them, and one that an interrupt cut short
    is trained anew with other randomness. All judge the same losses by the same split.

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
        path = folder / "settings.json"
        if folder.exists() and not path.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"{folder} holds something else, and no membership audit. Choose another --output.")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # of several processes one says which audit it is
            if path.stat().st_size == 0:
                file.write(json.dumps({**settings, _SPLIT: self.split_seed}))
        held = read_json(path)
        others = [key for key in settings if held.get(key) != settings[key]]
        if others or _SPLIT not in held:
            raise InputError(
                f"{folder} holds an audit with other settings ({', '.join(others)}). Give those again, or choose "
                "another --output."
            )
        self.split_seed = held[_SPLIT]

    def losses(self, name: str, count: int, train: Callable[[], list[float]]) -> list[float] | None:
        """Those of a chunk: as they were kept, or trained now; None while another process trains them.

        Raises:
            InputError: If its file is damaged.
        """
        if self.folder is None:
            return train()
        path, lock_file = self.folder / f"{name}.json", self.folder / f"{name}.lock"
        if not path.exists():
            with lock_file.open("w") as held:
                if not lock(held.fileno(), lock_file):
                    return None
                if not path.exists():  # another process may have ended between
                    # Python's own spelling of numbers that JSON has not: a model may diverge.
                    write_atomically(path, json.dumps(train()).encode(), 0o600)
        found: list[float] = read_json(path)
        if len(found) != count:
            raise InputError(f"{path} is damaged. Delete it: its models are then trained anew.")
        lock_file.unlink(missing_ok=True)
        return found
