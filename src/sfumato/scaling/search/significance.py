"""Which difference between two settings is a gain, given how runs of different seeds spread."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

LEVEL = 0.95
_ALIKE = 1.25


@dataclasses.dataclass(frozen=True)
class Gain:
    """The best of some candidates against the current settings.

    Attributes:
        best: Which candidate; None without any.
        gain: Its mean accuracy less that of the current settings.
        needed: What chance alone exceeds in fewer than 5 of 100 searches like this; None where one
            seed leaves the spread unknown.
    """

    best: int | None
    gain: float
    needed: float | None

    @property
    def counts(self) -> bool:
        return self.best is not None and self.gain > (self.needed or 0.0)


def gain(current: Sequence[float], candidates: Sequence[Sequence[float] | None]) -> Gain:
    """Compares accuracies of the same seeds; seeds share initial weights and noise, so that their
    common level cancels.

    The spread is that of what is left of accuracies after settings and seeds (a two-way analysis of
    variance), over the current settings and the candidates that err at most a quarter more often:
    settings that fail spread more, and say nothing about those that do not. The bound on a
    difference is Student's t, shared among all candidates (Bonferroni), for the best one was
    picked.

    Args:
        current: Accuracy for each seed.
        candidates: The same for each candidate; None for one that was given up.
    """
    level = float(np.mean(current))
    means = [-math.inf if accuracies is None else float(np.mean(accuracies)) for accuracies in candidates]
    if not means or max(means) == -math.inf:
        return Gain(None, 0.0, None)
    best = int(np.argmax(means))
    compared = [i for i, mean in enumerate(means) if 1 - mean <= _ALIKE * (1 - level)] or [best]
    table = np.array([current, *(candidates[i] for i in compared)], dtype=np.float64)
    rows, seeds = table.shape
    if seeds < 2:
        return Gain(best, means[best] - level, None)
    rest = table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + table.mean()
    freedom = (rows - 1) * (seeds - 1)
    variance = float((rest**2).sum()) / freedom
    from scipy.stats import t

    bound = float(t.ppf(1 - (1 - LEVEL) / len(candidates), freedom))
    return Gain(best, means[best] - level, bound * math.sqrt(2 * variance / seeds))
