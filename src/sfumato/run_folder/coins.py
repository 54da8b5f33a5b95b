"""Which canaries took part: coins that follow from the run's key, kept for its owner after the key is gone."""

from pathlib import Path

import numpy as np
import pydantic

from sfumato.errors import InputError
from sfumato.json_record import Record
from sfumato.randomness import Streams
from sfumato.run_folder.files import NO_FILE, reading_faults, write_json
from sfumato.run_folder.session import COINS_FILE, Session


class Coins(Record):
    """audit_private.json, for the owner alone.

    Attributes:
        run_id: Whose they are.
        took_part: For each canary.
    """

    run_id: str
    took_part: list[bool]


def toss(session: Session, count: int) -> np.ndarray | None:
    """Fair coins of a run, written into its folder: the same in all its sessions, and known to nobody without
    the key.

    Args:
        session: Of the run.
        count: Its canaries, m.

    Returns:
        (m,), bool; None where m is 0.
    """
    if not count:
        return None
    words = Streams(session.key, session.context, {}).stream("coins of canaries").uint64(count)
    took_part = (words >> np.uint64(63)).astype(bool)
    kept = Coins(run_id=session.ledger.lines[0]["run_id"], took_part=took_part.tolist())
    write_json(session.folder / COINS_FILE, kept.as_json(), 0o600)
    return took_part


def read(folder: Path, run_id: str, count: int) -> np.ndarray:
    """(m,), bool: the coins of a run.

    Raises:
        InputError: If they are not there, or are another run's.
        MachineError: If they cannot be read.
    """
    path = folder / COINS_FILE
    try:
        with reading_faults(path):
            found = Coins.model_validate_json(path.read_bytes())
    except NO_FILE:
        raise InputError(
            f"{path} is not there, so nobody knows which canaries took part. It is for the run's owner alone and in no "
            "copy for sharing: name the folder that the run was trained in."
        ) from None
    except pydantic.ValidationError:
        raise InputError(f"{path} is damaged. Restore it from a copy.") from None
    if found.run_id != run_id or len(found.took_part) != count:
        raise InputError(f"{path} is another run's. Restore it from a copy.")
    return np.array(found.took_part, dtype=bool)
