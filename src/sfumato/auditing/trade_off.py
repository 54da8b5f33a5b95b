"""The claimed mechanism's own trade-off between two errors, against rates that were observed."""

import bisect
import math

from sfumato.accounting import accountants
from sfumato.accounting.attacker import true_positive_rates
from sfumato.accounting.mechanism import Mechanism

_STEP = 1.005
"""Between the amounts of noise that are tried, as a factor."""
_LEAST_NOISE = 0.01
"""That is tried: one step with less spends thousands, and PLD states little of it."""
_MOST_NOISE = 2.0**20
"""That is tried, in units of what is claimed."""
_MORE = (1.0, 1.1, 1.4, 2.0, 4.0)
"""How much more noise than is refuted may have an epsilon by PLD where that amount has none."""


def epsilon(mechanism: Mechanism, delta: float, false_positives: float, true_positives: float) -> float:
    """The certificate's epsilon at the most noise that two rates leave possible; 0 where every amount
    of noise is possible.

    Only the noise may differ from what is claimed. It is above the epsilon of the claimed mechanism exactly where the
    rates break its trade-off, as PLD states it. PLD's epsilon is at most about 2 % above the mechanism's own, mostly
    far closer. Minus infinity where PLD states none of the claimed mechanism, whatever the rates: another accountant's
    may be further above.

    Args:
        false_positives: Upper bound on the rate.
        true_positives: Lower bound on the rate.
    """
    claimed = accountants.epsilon(mechanism, delta)
    if claimed.note:
        return -math.inf
    if true_positives <= false_positives:
        return 0.0
    if mechanism.num_steps == 0:  # a first release is all
        mechanism = mechanism.replace(noise_multiplier=1.0)

    def noisy(power: int) -> Mechanism:
        return mechanism.replace(noise_multiplier=mechanism.noise_multiplier * _STEP**power)

    def is_refuted(power: int) -> bool:
        return refutes(noisy(power), false_positives, true_positives)

    # The more noise, the smaller the rates that it allows: the least amount that is refuted is looked for.
    is_claim_refuted = is_refuted(0)
    least = math.ceil(math.log(_LEAST_NOISE / mechanism.noise_multiplier, _STEP))
    powers = range(least, 0) if is_claim_refuted else range(1, math.ceil(math.log(_MOST_NOISE, _STEP)))
    found = bisect.bisect_left(powers, True, key=is_refuted)
    if found == len(powers) and not is_claim_refuted:
        return 0.0
    refuted = powers[found] if found < len(powers) else 0
    # More noise spends less, so where PLD states nothing of that amount, what it states of more is a lower bound, too.
    spent = (accountants.epsilon(noisy(refuted + round(math.log(more, _STEP))), delta) for more in _MORE)
    shown = next((each.epsilon for each in spent if not each.note), 0.0)
    if is_claim_refuted:
        return max(shown, math.nextafter(claimed.epsilon, math.inf))
    return min(shown, claimed.epsilon)


def refutes(mechanism: Mechanism, false_positives: float, true_positives: float) -> bool:
    """Whether no attack on the mechanism has such rates, or better ones."""
    return true_positives > float(true_positive_rates(mechanism, [false_positives])[0])
