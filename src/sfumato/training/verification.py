"""What can be told of a finished run without its key: whether its files are one run's, its claim that of its ledger."""

import json
from pathlib import Path
from typing import Any

from sfumato.accounting.ledger import spent_mechanism
from sfumato.errors import InputError
from sfumato.run_folder import Ledger, read_json

_OF_THE_LEDGER = ("num_examples", "batch_size", "noise_multiplier", "num_steps", "sampling")


def verify(folder: Path) -> dict[str, Any]:
    """Compares ledger, certificate, result and weights of a finished run with one another.

    Without a key this finds mistakes, mixed files and clumsy changes; whoever writes all files anew is not found.

    Returns:
        The certificate.

    Raises:
        InputError: Naming the file that does not belong, or that is missing or damaged.
    """
    lines = Ledger.open(folder / "ledger.jsonl")
    spent = spent_mechanism(lines.lines)
    claim = read_json(folder / "privacy.json")
    truth = {
        "run_id": lines.lines[0].get("run_id"),
        "ledger_lines": len(lines.lines),
        "ledger_head": lines.head,
        **{key: getattr(spent, key) for key in _OF_THE_LEDGER},
    }
    _compare(folder / "privacy.json", claim, truth)
    claimed = {key: claim.get(key) for key in ("run_id", "private", "epsilon", "delta")}
    _compare(folder / "result.json", read_json(folder / "result.json"), claimed)
    _compare(
        folder / "model.safetensors",
        _facts(folder / "model.safetensors"),
        {**claimed, **{key: truth[key] for key in ("ledger_lines", "ledger_head")}},
    )
    return claim


def _compare(path: Path, found: Any, expected: dict[str, Any]) -> None:
    stated = found if isinstance(found, dict) else {}
    wrong = next((key for key, value in expected.items() if key not in stated or stated[key] != value), None)
    if wrong is not None:
        raise InputError(
            f"{path} states another {wrong} than the rest of this run: it was altered, or is another run's. Restore the folder from a copy."
        )


def _facts(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return json.loads(file.metadata()["sfumato"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        raise InputError(f"{path} is missing or damaged. Restore it from a copy, or train again.") from None
