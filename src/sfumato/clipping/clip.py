"""Clipping: each example's gradient times s min(1, C / its norm) (De et al. 2022, Eq. 3); norms and sums that are
accurate enough to rest a privacy bound on, whatever order the library underneath adds in.

A product of matrices adds up thousands of terms one after another. Where these are alike, as for an
image of one colour, every rounding goes the same way, and what they come to together would move a
squared norm that is a small difference of large numbers.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sfumato.errors import InputError

# From (m,) gradient norms to what each gradient is multiplied by.
Coefficient = Callable[[torch.Tensor], torch.Tensor]
# Below, gradients of norm C have entries whose squares vanish in float32: they would be taken for
# zero, and not be clipped. Above, 1 / C times a gradient vanishes in float32.
_MIN_NORM, _MAX_NORM = 1e-12, 1e30
_CHUNK = 512


@dataclasses.dataclass(frozen=True)
class Clip:
    """What a gradient of each norm is multiplied by: s min(1, C / norm). Two that are equal are the
    same function.
    """

    clipping_norm: float
    rescale: bool

    def __post_init__(self) -> None:
        norm = self.clipping_norm
        if isinstance(norm, bool) or not isinstance(norm, (int, float)) or not _MIN_NORM <= norm <= _MAX_NORM:
            raise InputError(
                f"clipping_norm must be a number from {_MIN_NORM:g} to {_MAX_NORM:g}, not {norm!r}: beyond, float32 "
                "holds no squares. Choose another one, or scale the loss."
            )

    def __call__(self, norms: torch.Tensor) -> torch.Tensor:
        if self.rescale:
            scale = torch.clamp(1 / norms, max=1 / self.clipping_norm)
        else:
            scale = torch.clamp(self.clipping_norm / norms, max=1.0)
        # Below, float32 has few digits left and would round up: such a gradient is left out.
        return torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)


def row_norms(rows: torch.Tensor) -> torch.Tensor:
    """The L2 norm of each row of an (m, n) matrix.

    PyTorch's float32 norm over one long row on CPU adds the squares one after another
    and is off by 4e-5 at 2.4 million random elements, by 1.5e-3 where all are alike; norms of
    short chunks, then the norm of those in the same way, are off by less than 1e-6 at the same
    speed, and at a third of it where a row is no whole number of chunks.
    """
    length = rows.shape[1]
    if length <= _CHUNK:
        return torch.linalg.vector_norm(rows, dim=1)
    chunk = _chunk(length)
    whole = length // chunk * chunk
    norms = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, chunk)), dim=2)
    if whole < length:
        norms = torch.cat([norms, torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True)], dim=1)
    return row_norms(norms)


@functools.cache
def _chunk(length: int) -> int:
    """The longest chunk that divides a row, none so short that there would be too many."""
    return next((chunk for chunk in range(_CHUNK, _CHUNK // 8, -1) if length % chunk == 0), _CHUNK)


def global_norms(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """The L2 norm of each example's whole gradient, given its (m, n_p) parts, one for each
    parameter p.
    """
    return torch.linalg.vector_norm(torch.stack([row_norms(part) for part in parts]), dim=0)


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """What norms and sums are computed in: float32, or float64 where the model is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def clipped_rows(
    gradients: dict[str, torch.Tensor], losses: torch.Tensor, is_real: torch.Tensor, coefficient: Coefficient
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The clipped sum of gradients that are written out, and their norms: of exactly the values that are summed.

    Args:
        gradients: Each (m, *shape of the parameter).
        losses: (m,); an example whose loss or norm is not finite adds exactly zero.
        is_real: (m,).

    Returns:
        Name -> (*shape), float32 at least; (m,).
    """
    rows = {name: at_least_float32(gradient.reshape(len(losses), -1)) for name, gradient in gradients.items()}
    norms = global_norms(rows.values())
    counts = is_real & norms.isfinite() & losses.isfinite()
    coefficients = torch.where(counts, coefficient(norms), 0.0)
    # A coefficient of zero does not silence what is not finite: 0 * NaN is NaN.
    rows = {name: torch.where(counts[:, None], row, 0.0) for name, row in rows.items()}
    sums = {name: (coefficients.to(row.dtype) @ row).view(gradients[name].shape[1:]) for name, row in rows.items()}
    return sums, norms


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


# So many numbers one thread goes through before others, which sleep, have woken: 50 microseconds.
_ALONE = 2**20


@contextmanager
def one_thread(values: int) -> Iterator[None]:
    """Within, PyTorch's operations on a CPU keep to one thread, where they are on no more numbers than wake others."""
    threads = torch.get_num_threads()
    if threads == 1 or values > _ALONE:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
        raise InputError(f'precision "tf32" needs a CUDA device, and this is "{device.type}". Take "float32".')


def are_exact(operation: str, device: torch.device) -> bool:
    """Whether a "matmul" or "conv" of float32 rounds nothing to fewer digits (TF32, bfloat16),
    which PyTorch can be told to do.
    """
    gpu = torch.backends.cuda if operation == "matmul" else torch.backends.cudnn
    backend: Any = {"cpu": torch.backends.mkldnn, "cuda": gpu}.get(device.type)
    return backend is None or getattr(backend, operation).fp32_precision in ("none", "ieee")
