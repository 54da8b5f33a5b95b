"""Which examples a step sees: the sampler that the accountant accounts for."""

import functools
from collections.abc import Callable

import numpy as np

from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError
from sfumato.randomness import Stream


def poisson_batch(mechanism: Mechanism, stream: Stream) -> np.ndarray:
    """Draws a batch: every example alone with probability q = batch_size / num_examples.

    Guarantee: each example's inclusion is independent of all others', with a
    probability between q - 2^-64 and q; at q = 1 every example is drawn. The size of
    the batch is random, sensitive, and may be zero.

    Args:
        mechanism: Its ``sampling`` must be "poisson".
        stream: 64 bits are read for each of the N examples.

    Returns:
        Ascending indices, shape (realised batch,), int64.

    Raises:
        InputError: If the mechanism's batches are shuffled.
    """
    if mechanism.sampling != "poisson":
        raise InputError('a Poisson batch is none of a mechanism with shuffled batches. State sampling = "poisson".')
    # Integers, since q times 2^64 in floating point could round above q. Up to the largest word that counts: at q = 1
    # it is 2^64 - 1, and all do.
    largest = (mechanism.batch_size << 64) // mechanism.num_examples - 1
    return np.flatnonzero(stream.uint64(mechanism.num_examples) <= np.uint64(largest))


class Shuffling:
    """Fixed-size batches when each epoch visits the examples in random order.

    For ordinary training and for fidelity to papers that shuffled: no epsilon of a
    Poisson-sampled mechanism holds for it. Batches do not end at an epoch's end but
    go on with the next order, so that every batch has batch_size examples.

    Args:
        num_examples: N.
        epoch_stream: ``epoch_stream(epoch) -> Stream``, the randomness of one epoch's order, from
            epoch 0 on.
    """

    def __init__(self, num_examples: int, epoch_stream: Callable[[int], Stream]) -> None:
        self.num_examples = num_examples
        self._epoch_stream = epoch_stream
        # A batch begins with the order that the one before ended with, and takes further ones in turn.
        self._order = functools.lru_cache(maxsize=1)(self._shuffle)

    def batch(self, batch_size: int, step: int) -> np.ndarray:
        """The indices of a step, 1 for the first update: shape (batch_size,), int64."""
        first = (step - 1) * batch_size
        epochs, offsets = np.divmod(np.arange(first, first + batch_size), self.num_examples)
        indices = np.empty(batch_size, dtype=np.int64)
        for epoch in np.unique(epochs):
            indices[epochs == epoch] = self._order(int(epoch))[offsets[epochs == epoch]]
        return indices

    def _shuffle(self, epoch: int) -> np.ndarray:
        # Sorting random words is a uniform permutation, ties apart (probability N^2 / 2^65).
        return np.argsort(self._epoch_stream(epoch).uint64(self.num_examples), kind="stable")
