"""What a paid search publishes: the selected run's public files, written anew, so that nothing
tells its place among the trials.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from sfumato.run_folder import weights_file
from sfumato.run_folder.files import read_json, write_atomically, write_json
from sfumato.run_folder.ledger import GENESIS, Ledger, chained_line


def write_anew(trial: Path, folder: Path, name: Path, score: int) -> None:
    """Writes the public files of a finished run into a new folder.

    Checkpoints, key and metrics_private.jsonl, which are for the owner alone, are left out. So are
    the day and how long the run took (what ran before it in the same process makes it faster) and the
    environment of its session (a search that moved to another machine did so at one of its trials).
    The ledger's hashes follow from what is left, and the certificate and the weights name its new
    head.

    Args:
        trial: The run.
        folder: Is made.
        name: Under which it will be found.
        score: By which the run was selected.
    """
    folder.mkdir()
    lines: list[dict[str, Any]] = []
    for line in Ledger.open(trial / "ledger.jsonl").lines:
        entry = {key: value for key, value in line.items() if key not in ("prev", "hash")}
        if "environment" in entry:
            entry["environment"] = {}
        lines.append(chained_line(entry, lines[-1]["hash"] if lines else GENESIS))
    head = {"ledger_head": lines[-1]["hash"]}
    write_atomically(
        folder / "ledger.jsonl", "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()
    )
    for copied in ("recipe.toml", "metrics.jsonl"):
        if (trial / copied).exists():  # a run without steps measures nothing
            write_atomically(folder / copied, (trial / copied).read_bytes())
    weights = (trial / "model.safetensors").read_bytes()
    metadata = weights_file.parts(weights)[0]["__metadata__"]
    facts = json.dumps({**json.loads(metadata["sfumato"]), **head}, allow_nan=False)
    weights = weights_file.with_metadata(weights, {**metadata, "sfumato": facts})
    write_atomically(folder / "model.safetensors", weights)
    of_weights = {"weights_sha256": hashlib.sha256(weights).hexdigest(), "finished_on": None}
    write_json(folder / "privacy.json", {**read_json(trial / "privacy.json"), **head, **of_weights})
    untold = {"run": str(name), "score": score, "images_per_second": None, "seconds": None}
    write_json(folder / "result.json", {**read_json(trial / "result.json"), **untold})


def set_times(folder: Path, nanoseconds: int) -> None:
    """Gives a folder and the files in it one time of access and modification."""
    for path in (*folder.iterdir(), folder):
        os.utime(path, ns=(nanoseconds, nanoseconds))
