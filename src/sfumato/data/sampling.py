"""Which examples a step sees: the sampler that the accountant accounts for."""

import numpy as np

from sfumato.accounting.mechanism import Mechanism
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
    """
    assert mechanism.sampling == "poisson"
    # Integers, since q times 2^64 in floating point could round above q.
    threshold = (mechanism.batch_size << 64) // mechanism.num_examples
    words = stream.uint64(mechanism.num_examples)
    if threshold >= 1 << 64:
        return np.arange(mechanism.num_examples)
    return np.flatnonzero(words < np.uint64(threshold))


def shuffled_batch(mechanism: Mechanism, step: int, epoch_stream) -> np.ndarray:
    """The fixed-size batch of a step when each epoch visits the examples in random order.

    For ordinary training and for fidelity to papers that shuffled: no epsilon of a
    Poisson-sampled mechanism holds for it. Batches do not end at an epoch's end but
    go on with the next order, so that every batch has batch_size examples.

    Args:
        mechanism: N and the batch size.
        step: 1 for the first update.
        epoch_stream: ``epoch_stream(epoch) -> Stream``, the randomness of one epoch's order.

    Returns:
        Indices, shape (batch_size,), int64.
    """
    first = (step - 1) * mechanism.batch_size
    positions = np.arange(first, first + mechanism.batch_size)
    epochs, offsets = np.divmod(positions, mechanism.num_examples)
    indices = np.empty(mechanism.batch_size, dtype=np.int64)
    for epoch in np.unique(epochs):
        # Sorting random words is a uniform permutation, ties apart (probability N^2 / 2^65).
        order = np.argsort(epoch_stream(int(epoch)).uint64(mechanism.num_examples), kind="stable")
        indices[epochs == epoch] = order[offsets[epochs == epoch]]
    return indices
