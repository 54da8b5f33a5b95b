"""What somebody who sees the model can tell of one image, at most: the mechanism's own trade-off
between two errors.

Who guesses whether an image took part makes two kinds of errors. For every epsilon, delta(epsilon)
bounds the rate of true positives at a rate alpha of false ones by e^epsilon alpha + delta(epsilon)
(`Kairouz et al. (2015) <https://arxiv.org/abs/1311.0776>`_); the least of them over all epsilon is
the mechanism's trade-off itself. One pair (epsilon, delta), as a guarantee states it, says far less:
where it allows 95 % right guesses the mechanism may allow 65 %.
"""

import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from sfumato.accounting.accountants import epsilon
from sfumato.accounting.gaussian import log_delta_gaussian, mu_of
from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.accounting.pld import deltas_pld
from sfumato.accounting.selection import Selection
from sfumato.json_record import Record

# Of epsilon; the bound at each holds, so that a coarse grid costs tightness alone.
_EPSILONS = np.concatenate([[0.0], np.geomspace(1e-3, 60, 600)])
_DELTAS = np.geomspace(0.5, 1e-12, 40)


class Attacker(Record):
    """Upper bounds for the best possible test of whether one unit (an image, or all images of one person) took part,
    both directions.

    Attributes:
        advantage: True positives less false ones, at the best threshold: total variation.
        accuracy: Of guesses at even odds: (1 + advantage) / 2.
        true_positives_at_1_percent: At that rate of false positives.
        candidates: Units that training may have used: N images, or as many people as N images belong to
            at least.
        singled_out: How often somebody names the one that took part among so many candidates, each as
            likely, where all else that was trained on is known. Blind guesses are right once in so many.
        source: "pld": the mechanism's own trade-off; "pairs": from several (epsilon, delta) by Renyi
            DP, where no PLD certifies.
    """

    advantage: float
    accuracy: float
    true_positives_at_1_percent: float
    true_positives_at_0_1_percent: float
    candidates: int
    singled_out: float
    source: Literal["pld", "pairs"]


@functools.lru_cache(maxsize=1024)
def attacker(mechanism: Mechanism, selection: Selection | None = None) -> Attacker:
    """What a mechanism lets an attacker tell of one unit: of one image, or of all images of one
    person.

    Args:
        mechanism: Poisson sampling.
        selection: Where the run is the best of several; of one image alone.

    Example:
        >>> bound = attacker(Mechanism(3801, 950, noise_multiplier=3.881, num_steps=150))
        >>> round(bound.accuracy, 3), bound.source
        (0.654, 'pld')
    """
    candidates = max(1, -(-mechanism.num_examples // mechanism.images_per_unit))
    at_1_percent, at_0_1_percent, singled_out = true_positive_rates(
        mechanism, (0.01, 0.001, 1 / candidates), selection
    ).tolist()
    epsilons, deltas, source = _trade_off(mechanism, selection)
    with np.errstate(over="ignore"):
        # Of (epsilon, delta) the advantage is (e^epsilon - 1 + 2 delta) / (e^epsilon + 1).
        advantage = float((1 - 2 * (1 - deltas) / (np.exp(epsilons) + 1)).min())
    return Attacker(
        advantage=advantage,
        accuracy=(1 + advantage) / 2,
        true_positives_at_1_percent=at_1_percent,
        true_positives_at_0_1_percent=at_0_1_percent,
        candidates=candidates,
        singled_out=singled_out,
        source=source,
    )


def true_positive_rates(
    mechanism: Mechanism, false_positives: Sequence[float], selection: Selection | None = None
) -> np.ndarray:
    """The whole curve: how often, at most, an attacker recognises a unit that took part, at each rate of false alarms.

    The one who has to name one of N candidates is covered at the rate 1 / N: where nobody took part, their N answers
    have probabilities that sum to 1, and the curve is concave (`Kulynych et al. (2025)
    <https://arxiv.org/abs/2507.06969>`_).

    Args:
        mechanism: Poisson sampling.
        false_positives: Rates, each in [0, 1].
        selection: As of `attacker`.

    Returns:
        (n,): upper bounds, in [0, 1].
    """
    rates = np.asarray(false_positives, dtype=np.float64)[:, None]
    epsilons, deltas, _ = _trade_off(mechanism, selection)
    epsilons = np.minimum(epsilons, 700.0)  # e^700 is finite, and bounds nothing
    # With the roles exchanged: true negatives are e^epsilon times the false ones and delta, at most.
    exchanged = 1 - np.exp(-epsilons) * (1 - rates - deltas)
    return np.minimum(np.exp(epsilons) * rates + deltas, exchanged).min(1).clip(0.0, 1.0)


@functools.lru_cache(maxsize=64)
def _trade_off(
    mechanism: Mechanism, selection: Selection | None
) -> tuple[np.ndarray, np.ndarray, Literal["pld", "pairs"]]:
    """Epsilons, a delta for each, and where they are from."""
    parts, images = mechanism.parts, mechanism.most_images
    if not parts and (selection is None or selection.score_noise is None):
        return _EPSILONS, np.zeros_like(_EPSILONS), "pld"
    if not mechanism.has_noise:
        return _EPSILONS, np.ones_like(_EPSILONS), "pairs"
    if selection is None and all(q == 1 for q, _, _ in parts):  # one Gaussian, in closed form
        mu = mu_of(parts, images)
        # Not `epsilon`, the function: Python 3.12.1 would take it for a local name below.
        deltas = np.exp([log_delta_gaussian(mu, at) for at in _EPSILONS.tolist()])
        return _EPSILONS, np.minimum(deltas * (1 + 1e-9), 1.0), "pld"
    if selection is None and (by_pld := deltas_pld(parts, _EPSILONS.tolist(), images)) is not None:
        return _EPSILONS, by_pld, "pld"
    accountant: Accountant = "rdp" if images == 1 else "pld"
    pairs = [(epsilon(mechanism, delta, accountant, selection).epsilon, delta) for delta in _DELTAS.tolist()]
    epsilons, deltas = np.array(pairs).T
    return epsilons, deltas, "pairs"
