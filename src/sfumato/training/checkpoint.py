"""Everything that a bit-exact resume needs, in one file that is whole or absent."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from sfumato.errors import InputError
from sfumato.run_folder import write_atomically

KEPT = 2


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The state after an update.

    Attributes:
        tensors: Parameters, buffers, averages and the optimizer's moments, by name.
        facts: step, session, ledger_lines, ledger_head, data_digest and what else is JSON.
    """

    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes the checkpoint of a step and removes all but the newest two.

    Raises:
        MachineError: If the disk fails; older checkpoints stay.
    """
    from safetensors.torch import save as to_bytes

    tensors = {name: value.detach().cpu().contiguous() for name, value in checkpoint.tensors.items()}
    facts = {**checkpoint.facts, "tensors_digest": _digest(tensors)}
    # A checkpoint depends on the unreleased state of the run: for its owner alone.
    write_atomically(_path(folder, checkpoint.facts["step"]), to_bytes(tensors, {"facts": json.dumps(facts)}), 0o600)
    for old in paths(folder)[:-KEPT]:
        old.unlink()


def paths(folder: Path) -> list[Path]:
    """All checkpoints of a run folder, the oldest first."""
    return sorted((folder / "checkpoints").glob("step-*.safetensors"))


def load_newest(folder: Path) -> Checkpoint:
    """Reads the newest checkpoint.

    Raises:
        InputError: If there is none, or it is damaged.
    """
    found = paths(folder)
    if not found:
        raise InputError(f"{folder} has no checkpoint, so there is nothing to resume. Start the run again with another --output.")
    return load(found[-1])


def load(path: Path) -> Checkpoint:
    """Reads one checkpoint and checks every byte of its tensors.

    Raises:
        InputError: If it is damaged; the line names it and the remedy.
    """
    from safetensors import SafetensorError, safe_open

    damaged = InputError(f"checkpoint {path} is damaged. Delete that file: --resume then goes on from the checkpoint before it, if there is one.")
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (safe_open is no mapping)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        raise damaged from None
    if facts.pop("tensors_digest", None) != _digest(tensors):
        raise damaged
    return Checkpoint(tensors, facts)


def _path(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:09d}.safetensors"


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    running = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        running.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        running.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return running.hexdigest()
