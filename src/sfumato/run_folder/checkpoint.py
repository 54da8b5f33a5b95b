"""Everything that a bit-exact resume needs, in one file that is whole or absent."""

import dataclasses
import hmac
import json
from pathlib import Path
from typing import Any

import torch

from sfumato.errors import InputError
from sfumato.randomness import subkey
from sfumato.run_folder.files import write_atomically
from sfumato.run_folder.tensor_mac import tensor_mac

KEPT = 2


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The state after an update.

    Attributes:
        tensors: Parameters, buffers, averages and the optimizer's moments, by name.
        facts: run_id, step, session, ledger_lines, ledger_head, data_digest and what else is JSON.
    """

    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint, key: bytes) -> None:
    """Writes the checkpoint of a step, authenticated under the run's key, and removes all but the
    newest two.

    Raises:
        MachineError: If the disk fails; older checkpoints stay.
    """
    from safetensors.torch import save as to_bytes

    tensors = {name: value.detach().cpu().contiguous() for name, value in checkpoint.tensors.items()}
    facts = {**checkpoint.facts, "mac": _mac(key, checkpoint.facts, tensors)}
    # A checkpoint depends on the unreleased state of the run: for its owner alone.
    write_atomically(_path(folder, checkpoint.facts["step"]), to_bytes(tensors, {"facts": json.dumps(facts)}), 0o600)
    for old in paths(folder)[:-KEPT]:
        old.unlink()


def paths(folder: Path) -> list[Path]:
    """All checkpoints of a run folder, the oldest first."""
    return sorted((folder / "checkpoints").glob("step-*.safetensors"))


def load_newest(folder: Path, key: bytes) -> Checkpoint:
    """Reads the newest checkpoint.

    Raises:
        InputError: If there is none, or it is damaged, altered, or another run's.
    """
    found = paths(folder)
    if not found:
        raise InputError(
            f"{folder} has no checkpoint, so there is nothing to resume. Start the run again with another --output."
        )
    return load(found[-1], key)


def load(path: Path, key: bytes) -> Checkpoint:
    """Reads one checkpoint and authenticates every bit of it under the run's key.

    Raises:
        InputError: If it is damaged, altered, or another run's; the line names it and the remedy.
    """
    from safetensors import SafetensorError, safe_open

    remedy = "Delete that file: --resume then goes on from the checkpoint before it, if there is one."
    damaged = InputError(f"checkpoint {path} is damaged. {remedy}")
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (safe_open is no mapping)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        raise damaged from None
    if not hmac.compare_digest(str(facts.pop("mac", "")), _mac(key, facts, tensors)):
        raise InputError(
            f"checkpoint {path} is damaged, altered or another run's: its code is not of this run's key. {remedy}"
        )
    return Checkpoint(tensors, facts)


def _path(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:09d}.safetensors"


def _mac(key: bytes, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    return tensor_mac(subkey(key, "checkpoint"), facts, dict(sorted(tensors.items())))
