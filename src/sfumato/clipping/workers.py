"""Several microbatches at once on a CPU: one thread each, instead of all threads on one after
another.

Operations on a small microbatch leave a second core idle; two microbatches side by side do not.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")


class Workers:
    """Applies a function to parts, and yields the results in the order of the parts.

    The results do not depend on which thread computed what, so that a sum of them taken in
    order has the same bits each time.

    Attributes:
        count: Threads; with one, everything happens in the caller's.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = (
            ThreadPoolExecutor(count, "microbatch", initializer=torch.set_num_threads, initargs=(1,))
            if count > 1
            else None
        )

    def map(self, function: Callable[[Part], Result], parts: Iterable[Part]) -> Iterator[Result]:
        """What the function gives for each part."""
        return map(function, parts) if self._pool is None else self._pool.map(function, parts)
