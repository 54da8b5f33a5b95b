"""A named set as its files give it."""

import dataclasses
from pathlib import Path

import torch

from sfumato.data.images import Digests
from sfumato.errors import InputError


@dataclasses.dataclass(frozen=True)
class Raw:
    """All images of a named set, its training part first.

    Attributes:
        images: (N, C, H, W), uint8; may lie in a file that is mapped.
        labels: (N,), int64.
        readable: (N,), bool.
        digests: Of images that lie in a file.
    """

    images: torch.Tensor
    labels: torch.Tensor
    readable: torch.Tensor
    digests: Digests | None = None


def damaged(name: str, path: Path, reason: str) -> InputError:
    """The line that refuses a file of a named set."""
    reason = (" ".join(reason.split()) or "unreadable")[:200]
    return InputError(f"data set {name}: {path} is damaged ({reason}). Put the original file there.")
