"""The claimed mechanism's own trade-off between two errors, against rates that were observed."""

import functools
import math

import numpy as np

from sfumato.accounting import accountants
from sfumato.accounting.attacker import curve
from sfumato.accounting.mechanism import LEAST_NOISE, Mechanism

_CLOSE = 1.005
"""The noise is found up to this factor."""
_MOST_DOUBLINGS = 20
_MORE = 4.0
_NUM_AMOUNTS = 18
"""Of noise between what is refuted and what is claimed, or `_MORE` times as much, that PLD is asked about."""


def epsilon(mechanism: Mechanism, delta: float, false_positives: float, true_positives: float) -> float:
    """The certificate's epsilon at the most noise that two rates leave possible; 0 where every amount
    of noise is possible.

    Only the noise may differ from what is claimed. Where it is above the epsilon of the claimed mechanism, the rates
    break its trade-off, as PLD states it; where they break it by so little that noise half a percent less would allow
    them, it may not be above. PLD's epsilon is at most about 2 % above the mechanism's own, mostly far closer. Minus
    infinity where PLD states none of the claimed mechanism, whatever the rates: another accountant's may be further
    above.

    Args:
        false_positives: Upper bound on the rate.
        true_positives: Lower bound on the rate.
    """
    rates = false_positives, true_positives
    if accountants.epsilon(mechanism, delta).note:
        return -math.inf
    if mechanism.num_steps == 0:  # a first release is all
        mechanism = mechanism.replace(noise_multiplier=1.0)
    if true_positives <= false_positives:
        return 0.0
    # Between the two lies the most noise that is possible; the larger is refuted.
    possible = refuted = mechanism.noise_multiplier
    for _ in range(_MOST_DOUBLINGS):
        if refutes(mechanism.replace(noise_multiplier=refuted), *rates):
            break
        possible, refuted = refuted, refuted * 2
    else:
        return 0.0
    while refutes(mechanism.replace(noise_multiplier=possible), *rates):
        refuted, possible = possible, possible / 2
        if possible < LEAST_NOISE:  # where a certificate states no epsilon
            break
    while refuted > possible * _CLOSE:
        middle = math.sqrt(refuted * possible)
        if refutes(mechanism.replace(noise_multiplier=middle), *rates):
            refuted = middle
        else:
            possible = middle
    return _least_epsilon(mechanism, delta, refuted)


def _least_epsilon(mechanism: Mechanism, delta: float, refuted: float) -> float:
    """What is spent by noise that is refuted: more noise spends less, so where PLD states no epsilon of it, which
    happens at single amounts and between others, that of more noise is a lower bound, too.
    """
    claimed, found = mechanism.noise_multiplier, 0.0
    for noise in np.geomspace(refuted, claimed if refuted < claimed else refuted * _MORE, _NUM_AMOUNTS)[:-1]:
        spent = accountants.epsilon(mechanism.replace(noise_multiplier=float(noise)), delta)
        if not spent.note:
            found = spent.epsilon
            break
    of_claim = accountants.epsilon(mechanism, delta).epsilon
    if refuted >= claimed:  # more noise spends less, whatever rounding says
        return min(found, of_claim)
    return max(found, math.nextafter(of_claim, math.inf)) if of_claim > 0 else found


def refutes(mechanism: Mechanism, false_positives: float, true_positives: float) -> bool:
    """Whether no attack on the mechanism has such rates, or better ones."""
    epsilons, deltas = _curve(mechanism)
    with np.errstate(over="ignore"):
        growth = np.exp(epsilons)
    most = (growth * false_positives + deltas).min()
    most_swapped = (growth * (1 - true_positives) + deltas).min()
    return bool(true_positives > most or 1 - false_positives > most_swapped)


@functools.lru_cache(maxsize=1024)
def _curve(mechanism: Mechanism) -> tuple[np.ndarray, np.ndarray]:
    return curve(mechanism)
