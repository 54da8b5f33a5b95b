"""The sample of an own loop that waits for its release: on disk before anybody sees it, so that whoever goes on meets
the same one, and nobody chooses among samples by starting again.
"""

import dataclasses
from pathlib import Path

from sfumato.errors import InputError
from sfumato.randomness import new_key
from sfumato.run_folder.files import read_json, write_json

_FILE = "sample.json"


@dataclasses.dataclass
class WaitingSample:
    """
    Attributes:
        salt: What it follows from, beside the folder's key.
        number: Of its update in this session; 0: of a session before, so far.
        size: How many examples it has.
    """

    salt: str
    number: int = 0
    size: int = 0


def new(folder: Path, last_release: str) -> WaitingSample:
    """One that comes after a release, given by its line's hash."""
    salt = new_key().hex()
    write_json(folder / _FILE, {"salt": salt, "after": last_release}, 0o600)
    return WaitingSample(salt)


def kept(folder: Path, last_release: str) -> WaitingSample | None:
    """What another session drew and did not release.

    Raises:
        InputError: If the file is damaged.
    """
    path = folder / _FILE
    if not path.exists():
        return None
    found = read_json(path)
    if not isinstance(found, dict) or not all(isinstance(found.get(key), str) for key in ("salt", "after")):
        raise InputError(f"{path} is damaged, so the sample that waits for its release is not known. Restore it.")
    return WaitingSample(found["salt"]) if found["after"] == last_release else None


def forget(folder: Path) -> None:
    """Of a loop that has finished."""
    (folder / _FILE).unlink(missing_ok=True)
