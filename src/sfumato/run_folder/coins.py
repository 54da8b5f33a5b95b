"""Which canaries of a run took part (`audit.canaries`): known to its owner alone."""

from pathlib import Path

import numpy as np

from sfumato.errors import InputError
from sfumato.json_record import Record
from sfumato.randomness import Stream
from sfumato.run_folder import record
from sfumato.run_folder.files import OWNER, write_json

COINS_FILE = f"{OWNER}/canaries.json"


class Coins(Record):
    """owner/canaries.json.

    Attributes:
        run_id: Whose they are.
        took_part: For each canary.
    """

    run_id: str
    took_part: list[bool]


def toss(folder: Path, run_id: str, count: int, stream: Stream) -> np.ndarray:
    """Fair coins of a run that begins, written into its folder: (m,), bool."""
    took_part = (stream.uint64(count) >> np.uint64(63)).astype(bool)
    write_json(folder / COINS_FILE, Coins(run_id=run_id, took_part=took_part.tolist()).as_json(), 0o600)
    return took_part


def read(folder: Path, run_id: str, count: int) -> np.ndarray:
    """(m,), bool: the coins of a run.

    Raises:
        InputError: If they are not there, or are another run's.
    """
    path = folder / COINS_FILE
    if not path.exists():
        raise InputError(
            f"{path} is not there: no copy for sharing says which canaries took part. Name the owner's own run folder."
        )
    found = record.read(path, Coins)
    if found.run_id != run_id or len(found.took_part) != count:
        raise InputError(f"{path} is another run's. Restore it from a copy.")
    return np.array(found.took_part, dtype=bool)
