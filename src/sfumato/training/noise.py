"""The noise of an update: Gaussian, of the claimed scale, from the run's key."""

import _thread
import collections
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from sfumato.errors import is_from_elsewhere
from sfumato.randomness import Stream

_GRID_BITS = 12
# Coordinates whose noise comes from consecutive words, half of them radii and half angles.
_BLOCK = 4096
# Coordinates that are computed at once: on a CPU few enough to stay in a core's cache, on a GPU
# enough to keep it busy.
_CPU_PIECE, _GPU_PIECE = 16 * _BLOCK, 1024 * _BLOCK


def standard_normal(words: np.ndarray, device: torch.device | str = "cpu") -> torch.Tensor:
    """Turns uniform words into independent standard normals by Box-Muller, on the device.

    In float64. A radius from 95 bits reaches 11.5 standard deviations, and up to 10.6 radii lie closer than the grid of
    what is released; 32 bits would cut the tails at 6.7, and with them the guarantee (`sfumato.accounting.reach`).

    Args:
        words: Uniform 64-bit words, shape (blocks, 2, count), uint64: of radii, and of angles with 32 more bits of the
            radii.

    Returns:
        float64, of the same shape.
    """
    uniform = torch.from_numpy(words.view(np.int64)).to(device)
    # 95 bits as an integer w >= 0: (w + 1/2) / 2^95 lies in (0, 1], and is exact where it is small.
    low = (uniform[:, 1] & (2**32 - 1)).double().add_(0.5).mul_(2.0**-32)
    radius = (uniform[:, 0] >> 1).bitwise_and_(2**63 - 1).double().add_(low).mul_(2.0**-63).log_().mul_(-2).sqrt_()
    angle = (uniform[:, 1] >> 32).double().mul_(2.0 * math.pi * 2.0**-32)
    return torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=1)


def _side_by_side(add: Callable[[int, torch.Tensor], None], firsts: Sequence[int], into: torch.Tensor) -> torch.Tensor:
    """Has every piece of a tensor filled in, by as many threads as PyTorch uses, each of which computes alone.

    This thread answers for every piece: what it did not see done it does itself. So nothing depends on threads that
    cannot be begun (an interpreter that ends, a full machine), die, or hang.

    Args:
        add: Is given a piece's first place and the tensor; it may fill in one piece several times, alike.
        firsts: Of all pieces.
        into: Which is given up to late threads if one does not end in time.

    Returns:
        The tensor, to which nobody writes any more.
    """
    left, done, count = collections.deque(firsts), set[int](), torch.get_num_threads()

    def take() -> None:
        with contextlib.suppress(IndexError):
            while True:
                first = left.popleft()
                add(first, into)
                done.add(first)

    def help_out() -> None:
        with contextlib.suppress(BaseException):  # what it did not do is done, or fails, in the thread that waits
            take()

    begun = time.perf_counter()
    try:
        torch.set_num_threads(1)  # in a forked process a library's threads are missing, and would be waited for
        for _ in range(min(count, len(firsts)) - 1):
            try:
                # Not by `threading`, which waits until the new thread tells that it runs.
                _thread.start_new_thread(help_out, ())
            except RuntimeError as error:
                if is_from_elsewhere(error):
                    raise
                break
        take()
        until = 2 * time.perf_counter() - begun  # what others began should not take longer than all until now
        while len(done) < len(firsts) and time.perf_counter() < until:
            time.sleep(1e-4)
        missing = [first for first in firsts if first not in done]
        if missing:
            into = into.clone()
        for first in missing:
            add(first, into)
    finally:
        left.clear()  # an interrupt: what is not begun yet stays so
        torch.set_num_threads(count)
    return into


def add_noise(grad_sum: Mapping[str, torch.Tensor], noise_stddev: float, stream: Stream) -> dict[str, torch.Tensor]:
    """Adds Gaussian noise to a sum of clipped gradients, once for the whole update.

    The sum is formed in float64 and rounded to a grid of about noise_stddev / 4096, so
    that the low bits of a float, which would tell which sums could have led to it
    (Mironov 2012), are not released. Rounding what is already noisy costs no privacy.

    Guarantee: every coordinate gets its own N(0, noise_stddev^2), given a stream that
    nobody else has and that is used for no other sum.

    Args:
        grad_sum: Parameter name -> sum of clipped gradients, float types.
        noise_stddev: noise_multiplier x sensitivity, > 0.
        stream: Read from its start.

    Returns:
        Parameter name -> float32 noisy sum, of the same shapes.
    """
    grid = 2.0 ** (math.floor(math.log2(noise_stddev)) - _GRID_BITS)
    flat = torch.cat([value.detach().flatten() for value in grad_sum.values()])
    # Not what lay in memory, which may be the sum.
    noisy = torch.full(flat.shape, math.nan, dtype=torch.float32, device=flat.device)

    # The caller's: a thread has a queue of the GPU and a mode of its own.
    queue = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
    inference = torch.is_inference_mode_enabled()

    def add(first: int, into: torch.Tensor) -> None:
        part = flat[first : first + piece]
        num_words = -(-len(part) // _BLOCK) * _BLOCK
        words = stream.words_at(first, num_words).reshape(-1, 2, _BLOCK // 2)
        with torch.inference_mode(inference), contextlib.nullcontext() if queue is None else torch.cuda.stream(queue):
            noise = standard_normal(words, flat.device).flatten()[: len(part)]
            into[first : first + piece] = noise.mul_(noise_stddev).add_(part).div_(grid).round_().mul_(grid)

    piece = _CPU_PIECE if flat.device.type == "cpu" else _GPU_PIECE
    # Which coordinate gets which noise does not depend on the number of threads.
    noisy = _side_by_side(add, range(0, len(flat), piece), noisy)
    parts = noisy.split([value.numel() for value in grad_sum.values()])
    return {name: part.view(value.shape) for (name, value), part in zip(grad_sum.items(), parts, strict=True)}
