"""Which method computes each site, and in which order images lie in memory: found by trying them on
made-up images.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable

import torch

from sfumato.clipping.graph.rules import GHOSTS, METHODS
from sfumato.clipping.graph.rules.site import SiteRecord
from sfumato.clipping.graph.weights import Weights
from sfumato.errors import is_out_of_memory

# A method this many times slower than the best so far is not tried again.
_HOPELESS = 1.5
# Seconds of a pass that a CPU tries methods in: long enough for their order to be that of a whole
# microbatch.
TRIAL_SECONDS = 0.1
# What a method's time counts on a CPU. Gradients that are written out take memory for each example,
# and those of a whole microbatch leave the processor's cache, while a ghost norm's one weight
# gradient then costs each example less. One grouped convolution holds them in the library's own
# order besides. A GPU tries a whole microbatch.
_PRICES = {name: 1.0 if name in GHOSTS else 1.3 for name in METHODS} | {"grouped": 1.4}


def fastest(names: list[str], record: SiteRecord, argument: str, weights: Weights) -> str:
    """Times the methods on these very tensors: gradients, norms and weighted sum together."""
    direction = weights.directions.get(record.site.weight_of[argument])
    coefficients = torch.ones(record.examples, device=record.grad.device)

    def call(name: str) -> None:
        per_example = METHODS[name](record, argument)
        if direction is not None:
            per_example.moments(direction)  # type: ignore[attr-defined]
        else:
            per_example.square_norms()
        per_example.weighted_sum(coefficients)

    took: dict[str, float] = {}
    for name in names:
        hopeless = _HOPELESS * min(took.values(), default=math.inf)
        try:
            took[name] = warm_seconds(functools.partial(call, name), record.grad.device, hopeless)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or (name == names[-1] and not took):
                raise
    prices = _PRICES if record.grad.device.type == "cpu" else dict.fromkeys(names, 1.0)
    return min(took, key=lambda name: took[name] * prices[name])


def warm_seconds(call: Callable[[], object], device: torch.device, hopeless: float = math.inf) -> float:
    """Seconds of a call: the median of three, or the first if it is hopeless. One more goes before:
    libraries plan, and load kernels, when they first meet a shape.
    """
    call()
    times = [seconds(call, device)]
    while len(times) < 3 and times[0] <= hopeless:
        times.append(seconds(call, device))
    return statistics.median(times)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call, a GPU's work included."""
    if device.type == "cuda":
        with torch.cuda.device(device):  # whose events these are
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / 1000
    # A thread that computes alone measures its own work, whatever else the machine does.
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = now()
    call()
    return now() - began
