"""Which method computes each site, and in which order images lie in memory: found by trying them on
made-up images.
"""

import time

import torch

from sfumato.clipping.graph.rules import GHOSTS, METHODS, SiteRecord
from sfumato.clipping.graph.weights import Weights

# A method this many times slower than the best so far is not tried again.
_HOPELESS = 1.5
# Seconds of a pass that methods are tried in: long enough for their order to be that of a whole
# microbatch.
TRIAL_SECONDS = 0.2
# What a method's time counts. Gradients that are written out take memory for each example, and
# those of a whole microbatch leave the processor's cache, while a ghost norm's one weight gradient
# then costs each example less. One grouped convolution holds them in the library's own order
# besides.
_PRICES = {name: 1.0 if name in GHOSTS else 1.3 for name in METHODS} | {"grouped": 1.4}


def fastest(names: list[str], record: SiteRecord, argument: str, weights: Weights, weight: str) -> str:
    """Times the methods on these very tensors: gradients, norms and weighted sum together."""
    coefficients = torch.ones(record.examples, device=record.grad.device)

    def seconds(name: str) -> float:
        start = now(record.grad)
        per_example = METHODS[name](record, argument)
        if weight in weights.directions:
            per_example.moments(weights.directions[weight], weights.values[weight])  # type: ignore[attr-defined]
        else:
            per_example.square_norms()
        per_example.weighted_sum(coefficients, None)
        return now(record.grad) - start

    took: dict[str, float] = {}
    for name in names:
        first = seconds(name)
        took[name] = first if took and first > _HOPELESS * min(took.values()) else min(first, seconds(name))
    return min(took, key=lambda name: took[name] * _PRICES[name])


def now(on: torch.Tensor) -> float:
    if on.is_cuda:
        torch.cuda.synchronize(on.device)
    # A thread that computes alone measures its own work, whatever else the machine does.
    return time.thread_time() if not on.is_cuda and torch.get_num_threads() == 1 else time.perf_counter()
