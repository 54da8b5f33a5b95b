"""Several microbatches at once on a CPU: one thread each, instead of all threads on one after
another. With one worker (a GPU's), the next microbatch is loaded while the present one is computed.

Operations on a small microbatch leave a second core idle; two microbatches side by side do not.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Part = TypeVar("Part")
Loaded = TypeVar("Loaded")
Result = TypeVar("Result")


class Workers:
    """Applies a function to parts, and yields the results in the order of the parts.

    The results do not depend on which thread computed what, so that a sum of them taken in
    order has the same bits each time.

    Attributes:
        count: Threads; with one, everything happens in the caller's.

    Args:
        ahead: Whether, with one, a thread of its own loads the next part meanwhile.
    """

    def __init__(self, count: int, *, ahead: bool = True) -> None:
        self.count = count
        # Threads start with the first part that is theirs, and stay.
        self._pool: ThreadPoolExecutor | None
        if count > 1:
            self._pool = ThreadPoolExecutor(count, "microbatch", initializer=torch.set_num_threads, initargs=(1,))
        else:
            self._pool = ThreadPoolExecutor(1, "loading") if ahead else None

    def map(
        self, load: Callable[[Part], Loaded], function: Callable[[Part, Loaded], Result], parts: Iterable[Part]
    ) -> Iterator[Result]:
        """What the function gives for each part and what was loaded of it."""
        if self._pool is None:
            return (function(part, load(part)) for part in parts)
        if self.count == 1:
            return (function(part, loaded) for part, loaded in _one_ahead(self._pool, load, parts))
        return self._pool.map(lambda part: function(part, load(part)), parts)


def _one_ahead(
    pool: ThreadPoolExecutor, load: Callable[[Part], Loaded], parts: Iterable[Part]
) -> Iterator[tuple[Part, Loaded]]:
    """Each part with what was loaded of it, by a thread that is one part ahead; the first one by the caller."""
    waiting = iter(parts)
    for part in waiting:  # the first one
        loaded = load(part)
        for following in waiting:
            future = pool.submit(load, following)
            try:
                yield part, loaded
            finally:
                wait([future])  # nothing is loaded any more once the caller goes on
            part, loaded = following, future.result()
        yield part, loaded
