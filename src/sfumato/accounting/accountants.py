"""The one door to epsilon: what a mechanism spends, as an upper bound."""

import bisect
import dataclasses
import math
from typing import Literal

from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.pld import epsilon_pld
from sfumato.accounting.rdp import epsilon_rdp
from sfumato.errors import InputError

Accountant = Literal["pld", "rdp"]


@dataclasses.dataclass(frozen=True)
class Spent:
    """The epsilon of a mechanism at one delta, for one image's contribution replaced by zero.

    Attributes:
        epsilon: PLD's, capped by RDP's; RDP's where it was asked for or PLD cannot certify.
        epsilon_rdp: By Renyi DP at real orders, improved conversion.
        epsilon_pld: By privacy loss distributions, capped by RDP's; None where it was not computed.
        accountant: Which of the two ``epsilon`` is.
        note: Why it is not the one that was asked for; else "".
    """

    epsilon: float
    epsilon_rdp: float
    epsilon_pld: float | None
    accountant: Accountant
    note: str = ""


def epsilon(mechanism: Mechanism, delta: float, accountant: Accountant = "pld") -> Spent:
    """What a mechanism spends.

    Guarantee: each number is an upper bound on the epsilon of the mechanism's T steps at
    ``delta``, add-or-remove-one; no steps spend 0, no noise spends infinity.

    Args:
        mechanism: Its sampling must be "poisson".
        delta: In (0, 1).
        accountant: "pld" computes both, "rdp" only RDP's.

    Raises:
        InputError: If the sampling is shuffled, or delta is out of range.

    Example:
        >>> spent = epsilon(Mechanism(50_000, 4096, noise_multiplier=3.0, num_steps=2468), delta=1e-5)
        >>> round(spent.epsilon_rdp, 2), round(spent.epsilon_pld, 2)
        (7.05, 6.53)
    """
    if mechanism.sampling != "poisson":
        raise InputError(
            'no epsilon is known for shuffled batches: they can leak several times what Poisson sampling does. Use privacy.sampling = "poisson".'
        )
    if not 0 < delta < 1:
        raise InputError(f"delta must lie between 0 and 1, not {delta:g}. A power of ten below 1/N is usual.")
    if mechanism.num_steps == 0:
        return Spent(0.0, 0.0, 0.0 if accountant == "pld" else None, accountant)
    if mechanism.noise_multiplier == 0:
        return Spent(math.inf, math.inf, None, "rdp", "without noise no epsilon is finite")
    numbers = (mechanism.sampling_prob, mechanism.noise_multiplier, mechanism.num_steps, delta)
    by_rdp = epsilon_rdp(*numbers)
    if accountant == "rdp":
        return Spent(by_rdp, by_rdp, None, "rdp")
    tight = epsilon_pld(*numbers)
    if tight.epsilon is None:
        return Spent(by_rdp, by_rdp, None, "rdp", f"epsilon is RDP's: {tight.reason}")
    by_pld = min(tight.epsilon, by_rdp)
    return Spent(by_pld, by_rdp, by_pld, "pld")


class EpsilonCurve:
    """Epsilon after any number of steps, computed once at about twenty of them.

    A value is read at the next computed step, never interpolated, so it is an upper bound.
    """

    def __init__(self, mechanism: Mechanism, delta: float, accountant: Accountant = "pld") -> None:
        last = mechanism.num_steps
        self._steps = sorted({0, *(math.ceil(last * part / 20) for part in range(1, 21))})
        values = [epsilon(mechanism.replace(num_steps=step), delta, accountant).epsilon for step in self._steps]
        # Later steps spend at least as much, so a smaller bound found there holds before, too.
        self._values = [min(values[number:]) for number in range(len(values))]

    def at(self, step: int) -> float:
        """Upper bound on what the first ``step`` updates spend, step <= num_steps."""
        return self._values[bisect.bisect_left(self._steps, step)]
