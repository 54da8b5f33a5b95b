"""Sums of products whose rounding is bounded, whatever order the library underneath adds in.

A product of matrices adds up thousands of terms one after another. Where these are alike, as for an
image of one colour, every rounding goes the same way, and what they come to together would move a
squared norm that is a small difference of large numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sfumato.errors import InputError

# So many terms are added up by the library before their sum is added to that of those before.
_BLOCK = 192


def products(left: torch.Tensor, right: torch.Tensor, block: int = _BLOCK) -> torch.Tensor:
    """(m, a, b): matrices (m, a, k) times matrices (m, k, b), each term rounded at most
    `roundings(k, block)` times.
    """
    if left.shape[2] <= block:
        return torch.bmm(left, right)
    blocks = zip(left.split(block, 2), right.split(block, 1), strict=True)
    total = torch.bmm(*next(blocks))
    for one, other in blocks:
        total += torch.bmm(one, other)  # not `baddbmm`: of few rows MKL's goes on from the sum so far, term by term
    return total


def roundings(terms: int, block: int = _BLOCK) -> int:
    """How often at most a term is rounded on its way into a sum of so many: by `products`, or by
    PyTorch's own sums, which add in parallel lanes.
    """
    return min(terms, block) + -(-terms // block)


def unit(values: torch.Tensor) -> float:
    """The largest relative error of one rounding."""
    return torch.finfo(values.dtype).eps / 2


def hidden(terms: int, share: float, values: torch.Tensor) -> float:
    """What to add to a sum of so many squares so that its `share` bounds roundings even where
    squares vanish below the smallest number.
    """
    return terms * torch.finfo(values.dtype).tiny / share


@contextmanager
def convolutions(precision: str) -> Iterator[None]:
    """Within, convolutions of float32 round nothing to fewer digits, on any device, unless the
    precision is "tf32": then a GPU rounds what goes in to 10 bits, which it does by default in
    PyTorch.
    """
    backends: Any = torch.backends  # whose types do not know these
    gpu, recurrent, cpu = backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.conv
    held = gpu.fp32_precision, recurrent.fp32_precision, cpu.fp32_precision
    torch.backends.cudnn.allow_tf32 = precision == "tf32"  # PyTorch has two switches, and refuses to read unlike ones
    gpu.fp32_precision = recurrent.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    cpu.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = held[0] == "tf32"
        gpu.fp32_precision, recurrent.fp32_precision, cpu.fp32_precision = held


def refuse_missing_tf32(precision: str, device: torch.device) -> None:
    """Raises InputError for a precision that the device does not have."""
    if precision == "tf32" and device.type != "cuda":
        raise InputError(
            f'precision "tf32" needs a CUDA device, and this is "{device.type}". Take "float32", or --device cuda.'
        )


def are_exact(operation: str, device: torch.device) -> bool:
    """Whether a "matmul" or "conv" of float32 rounds nothing to fewer digits (TF32, bfloat16),
    which PyTorch can be told to do.
    """
    backend = {
        "cpu": torch.backends.mkldnn,
        "cuda": torch.backends.cuda if operation == "matmul" else torch.backends.cudnn,
    }.get(device.type)
    return backend is None or getattr(backend, operation).fp32_precision in ("none", "ieee")
