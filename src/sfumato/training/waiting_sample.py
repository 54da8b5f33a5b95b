"""The sample of an own loop that waits for its release: on disk before anybody sees it, so that whoever goes on meets
the same one, and nobody chooses among samples by starting again.

The file is there from the first session to the end, so one that is missing was taken away.
"""

import dataclasses
import hmac
from pathlib import Path
from typing import Any

from sfumato.errors import InputError, is_from_elsewhere
from sfumato.randomness import canonical, subkey
from sfumato.run_folder.files import is_there, machine_faults, read_json, write_json

SAMPLE_FILE = "sample.json"
_FRESH = {"salt": None, "after": None}


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


def begin(folder: Path) -> None:
    """Of a loop that has released nothing, and drawn nothing unless the file is there."""
    if not is_there(folder / SAMPLE_FILE):
        write_json(folder / SAMPLE_FILE, _FRESH, 0o600)


def is_fresh(folder: Path) -> bool:
    """Whether there is none, nor the file of a loop that drew one."""
    path = folder / SAMPLE_FILE
    return not is_there(path) or _read(path) == _FRESH


def new(folder: Path, key: bytes, salt: str, last_release: str) -> WaitingSample:
    """One that comes after a release, given by its line's hash. Authenticated under the folder's key."""
    facts = {"salt": salt, "after": last_release, "mac": _mac(key, salt, last_release)}
    write_json(folder / SAMPLE_FILE, facts, 0o600)
    return WaitingSample(salt)


def kept(folder: Path, key: bytes, last_releases: list[str]) -> WaitingSample | None:
    """What another session drew and did not release.

    Args:
        key: The folder's.
        last_releases: The hashes of the last line of a release and of the one before, as far as there are any; that of
            the first line stands for the release before all.

    Raises:
        InputError: If the file is missing, damaged or another time's: what waits is not known then.
    """
    path = folder / SAMPLE_FILE
    found = _read(path)
    if found == _FRESH and len(last_releases) == 1:
        return None
    salt, after = found.get("salt"), found.get("after")
    if not isinstance(salt, str) or after not in last_releases or found.get("mac") != _mac(key, salt, after):
        raise InputError(
            f"{path} is missing, damaged or of another time, so it is not known whether a sample waits for its "
            "release. Begin in a new folder; the epsilons of both add up."
        )
    return WaitingSample(salt) if after == last_releases[-1] else None


def forget(folder: Path, releases: list[str]) -> None:
    """Of a loop that has finished, with these hashes. The file of another one is left as it is.

    Raises:
        MachineError: If it cannot be deleted.
    """
    path = folder / SAMPLE_FILE
    found = _read(path)
    if found == _FRESH or found.get("after") in releases:
        with machine_faults(path):
            path.unlink(missing_ok=True)


def _mac(key: bytes, salt: str, after: Any) -> str:
    return hmac.digest(subkey(key, "waiting sample"), canonical([salt, after]), "sha256").hex()


def _read(path: Path) -> dict[str, Any]:
    """Empty where it is missing or damaged."""
    try:
        found = read_json(path)
    except InputError as error:
        if is_from_elsewhere(error):
            raise
        found = None
    return found if isinstance(found, dict) else {}
