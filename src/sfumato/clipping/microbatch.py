"""How many examples to differentiate at once: as many as memory holds and speed gains by. Results
do not depend on it, but for rounding. And what became of them, where some have no finite gradient.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from sfumato.clipping.protocol import Batch, ClippedGrad
from sfumato.errors import MachineError, is_out_of_memory

_MOST = 4096
# A doubled microbatch must be faster by this, or memory is spent for nothing.
_GAIN = 1.03
# What a GPU tries first: with fewer it waits for the processor that launches its work.
FIRST_ON_GPU = 64
# Numbers that written-out gradients of a microbatch may take (64 MiB in float32), and what is kept for
# the backward pass, by one microbatch (1 GiB) and by all that are computed at once (8 GiB). These leave
# most models alone; they keep large images and many views from filling the machine's memory.
_GRADIENTS, _SAVED, _SAVED_BY_ALL = 2**24, 2**28, 2**31
# At most so many where nothing is known of the batch.
_UNKNOWN = 32


def default_microbatch_size(written_out: int, values_saved: int, workers: int = 1) -> int:
    """A power of two between 8 and 128 by the size of the gradients, and less where the forward
    pass saves much.

    Args:
        written_out: Numbers of each example's gradients that are written out; 0 for ordinary training.
        values_saved: Numbers that are kept of one example, all its views, for the backward pass.
        workers: How many microbatches are computed at once.
    """
    fit, saved = _GRADIENTS // max(1, written_out), min(_SAVED, _SAVED_BY_ALL // workers)
    return min(max(8, min(128, _power_of_two(fit))), _power_of_two(saved // max(1, values_saved)))


def fits_batch(batch_size: int | None) -> int:
    """The largest power of two of which a batch has four: each microbatch is computed whole,
    however many examples there are for the last one. A batch of less than 8 is one microbatch.
    """
    if batch_size is None:
        return _UNKNOWN
    return max(_power_of_two(batch_size // 4), min(8, 2 * _power_of_two(batch_size - 1)))


def _power_of_two(value: int) -> int:
    """The largest that is not larger; 1 below."""
    return 2 ** max(0, value.bit_length() - 1)


@contextmanager
def count_saved() -> Iterator[list[int]]:
    """Counts in its one item the numbers that autograd keeps for the backward pass, parameters
    aside. What is computed within has no backward pass.
    """
    total = [0]

    def count(tensor: torch.Tensor) -> None:  # to return a tensor that its own graph keeps would never free both
        total[0] += 0 if isinstance(tensor, nn.Parameter) else tensor.numel()

    with torch.autograd.graph.saved_tensors_hooks(count, lambda nothing: nothing):
        yield total


def find_microbatch_size(
    attempt: Callable[[int], float], start: int, most: int = _MOST, batch_size: int | None = None
) -> int:
    """The size to use, found by trying: halved until it fits, then doubled while that is faster.
    The last microbatch of a batch is computed whole, which on average is half of one for nothing.

    Args:
        attempt: Computes a microbatch of that size; returns the seconds it took.
        start: Tried first.
        most: The largest that is.
        batch_size: Of a batch, expected; None: not known.

    Raises:
        MachineError: If memory does not hold one example.
    """

    def number(size: int) -> float:
        return 1 / size if batch_size is None else batch_size / size + 0.5

    def tried(size: int) -> float | None:
        """Seconds; None where memory does not hold it."""
        try:
            return attempt(size)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    size, most = start, min(most, _MOST)
    while (seconds := tried(size)) is None:
        if size == 1:
            raise MachineError("memory does not hold one example. Take a smaller model, images or augmult.")
        most = size = size // 2
    while 2 * size <= most:
        doubled = tried(2 * size)
        if doubled is None or number(size) * seconds < _GAIN * number(2 * size) * doubled:
            break
        size, seconds = 2 * size, doubled
    return size


class Summed:
    """A microbatch and what an engine made of it.

    Whether all norms and losses are finite is asked for at once, and read when it is needed: a GPU is not waited for
    meanwhile.
    """

    def __init__(self, batch: Batch, out: ClippedGrad) -> None:
        self.batch, self.out = batch, out
        self._finite = out.grad_norms.isfinite() & out.losses.isfinite()
        self._all, self._asked = self._finite.all().to("cpu", non_blocking=True), None
        if out.losses.is_cuda:
            self._asked = torch.cuda.Event()
            self._asked.record(torch.cuda.current_stream(out.losses.device))

    def _is_finite(self) -> bool:
        if self._asked is not None:
            self._asked.synchronize()
        return bool(self._all)

    def of_finite(self, clipped: Callable[[Batch], "Summed"]) -> dict[str, torch.Tensor]:
        """The sum over the examples that have a finite norm and loss: as it is, or computed again with others that do
        not count in the place of those that have not. A coefficient of zero would not silence them: 0 * NaN is NaN.
        """
        one, places = self, torch.arange(len(self._finite), device=self._finite.device)
        source, counts = places, torch.ones_like(self._finite)
        while not one._is_finite():
            counts[source[~one._finite]] = False
            if not counts.any():
                return {name: torch.zeros_like(value) for name, value in self.out.grad_sum.items()}
            source = torch.where(counts, places, counts.int().argmax())
            batch = self.batch.take(source)
            one = clipped(dataclasses.replace(batch, is_real=batch.is_real & counts))
        return one.out.grad_sum
