"""One helper of a sweep: python -m sfumato.studies.helper, told on stdin what to do. It stops when stdin is closed."""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from sfumato.errors import InputError, MachineError
from sfumato.reporting.lines import note
from sfumato.studies.plan import plan_sweep
from sfumato.studies.runs import work
from sfumato.studies.settled import settle
from sfumato.training.interrupt import Interrupted, stop_on_sigterm


def main() -> int:
    """The exit status: 0 once every run is made, by whomever."""
    with stop_on_sigterm():
        asked = json.loads(sys.stdin.buffer.readline())
        threading.Thread(target=_stop_with_who_asked, daemon=True).start()
        try:
            help_with(asked)
        except (Interrupted, KeyboardInterrupt):
            return 1
        except (InputError, MachineError) as error:
            note(f"a worker ended: {error}")
            return 1
    return 0


def _stop_with_who_asked() -> None:
    # Not through the buffer: its lock, held while the process ends, would be fatal.
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def help_with(asked: dict[str, Any]) -> None:
    """Makes runs of a sweep until all are made."""
    root = None if asked["data_root"] is None else Path(asked["data_root"])
    planned = plan_sweep(
        asked["recipe"],
        asked["grid"],
        asked["cells"],
        settings={},
        seeds=asked["seeds"],
        paired=asked["paired"],
        data_root=root,
        report=lambda line: None,
        first_seed=asked["first_seed"],
    )
    planned = settle(planned, asked["trust"])
    work(planned, Path(asked["folder"]), asked["storage"], root, asked["device"], asked["trust"], note)


if __name__ == "__main__":
    sys.exit(main())
