"""How many examples to differentiate at once: as many as memory holds and speed gains by. Results do not depend
on it.
"""

from collections.abc import Callable

from sfumato.clipping.protocol import is_out_of_memory
from sfumato.errors import MachineError

_MOST = 4096
# A doubled microbatch must be faster by this, or memory is spent for nothing.
_GAIN = 1.03


def default_microbatch_size(num_parameters: int, augmult: int) -> int:
    """So many examples that their gradients take about 64 MB, a power of two between 8 and 128."""
    fit = 2**26 // (4 * num_parameters) // max(1, augmult // 4)
    return 2 ** max(3, min(7, fit.bit_length() - 1))


def find_microbatch_size(attempt: Callable[[int], float], start: int, grows: bool) -> int:
    """The size to use, found by trying: halved until it fits, then doubled while that is faster.

    Args:
        attempt: Computes a microbatch of that size; returns the seconds it took.
        start: Tried first.
        grows: Whether larger sizes are tried.

    Raises:
        MachineError: If memory does not hold one example.
    """
    size, seconds, most = start, None, _MOST
    while seconds is None:
        try:
            seconds = attempt(size)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if size == 1:
                raise MachineError(
                    "memory does not hold one example of this model. Take a smaller model, images or augmult."
                ) from None
            size //= 2
            most = size
    while grows and 2 * size <= most:
        try:
            doubled = attempt(2 * size)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            break
        if 2 * seconds < _GAIN * doubled:
            break
        size, seconds = 2 * size, doubled
    return size
