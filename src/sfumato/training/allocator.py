"""Memory that is freed and asked for again at every microbatch stays with the process."""

import ctypes
from typing import Any

# Numbers of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> None:
    """Tells glibc not to return large blocks to the system between microbatches.

    By default it does, and every microbatch pays for having its pages cleared anew: 8 to 17 %
    of the processor time of small networks (LOG.md). Elsewhere than on glibc nothing happens.
    """
    mallopt = _of_glibc("mallopt")
    mallopt(_ARENA_MAX, 1)  # threads share blocks
    mallopt(_MMAP_MAX, 0)  # what lies above 32 MiB would be mapped anew each time: no threshold is larger
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 16 << 20)


def give_freed_memory_back() -> None:
    """Returns to the system what `keep_freed_memory` kept: once training is over nobody asks for it
    again.
    """
    _of_glibc("malloc_trim")(0)


def _of_glibc(name: str) -> Any:
    """A function that other libraries of C lack, where it does nothing."""
    return getattr(ctypes.CDLL(None), name, lambda *given: None)
