"""L2 norms of per-example gradients, accurate enough to rest a privacy bound on."""

from collections.abc import Iterable

import torch

_CHUNK = 512


def row_norms(rows: torch.Tensor) -> torch.Tensor:
    """The L2 norm of each row of an (m, n) matrix.

    PyTorch's float32 norm over one long row on CPU adds the squares one after another
    and is off by 4e-5 at 2.4 million random elements, by 1.5e-3 where all are alike; norms of
    short chunks, then the norm of those in the same way, are off by less than 1e-6 at the same
    speed.
    """
    if rows.shape[1] <= _CHUNK:
        return torch.linalg.vector_norm(rows, dim=1)
    whole = rows.shape[1] // _CHUNK * _CHUNK
    chunks = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, _CHUNK)), dim=2)  # (m, n // _CHUNK)
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True)  # (m, 1)
    return row_norms(torch.cat([chunks, rest], dim=1))


def global_norms(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """The L2 norm of each example's whole gradient, given its (m, n_p) parts, one for each
    parameter p.
    """
    return torch.linalg.vector_norm(torch.stack([row_norms(part) for part in parts]), dim=0)


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """What norms and sums are computed in: float32, or float64 where the model is."""
    return (
        tensor
        if tensor.dtype in (torch.float32, torch.float64)
        else tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    )
