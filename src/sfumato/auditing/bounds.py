"""From scores and membership to lower bounds on epsilon: nothing else of an attack is looked at."""

import bisect
import dataclasses
import functools
import math
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np

from sfumato.accounting import accountants, formats
from sfumato.accounting.attacker import true_positive_rates
from sfumato.accounting.mechanism import Mechanism
from sfumato.auditing.arguments import require_levels
from sfumato.auditing.rates import (
    games_needed,
    gaussian_epsilon,
    gaussian_mu,
    log_ratio,
    lower_rate,
    perfect,
    power,
    stated,
    upper_rate,
)
from sfumato.auditing.record import AuditResult, Bound, BoundName
from sfumato.errors import InputError, refusing

SHARE = 0.2
"""Of the games of each side, those that choose thresholds. No bound uses them."""
_MOST_THRESHOLDS = 2000
_LARGEST = 1e300
_CAREFUL = 1e-3
"""Many thresholds show almost the same mu. Where few scores lie above, luck would decide, so that mu is
compared at a smaller error than it is stated at: the threshold then lies where the rates are known well."""
_IS_GAUSSIAN = "the mechanism's trade-off is that of a Gaussian mechanism without sampling"
_IS_OF_FAMILY = (
    "the mechanism is the claimed one but for its noise. That the claim itself is refuted needs no assumption"
)


@dataclasses.dataclass(frozen=True)
class Games:
    """Scores of the games of one part, sorted."""

    members: np.ndarray
    non_members: np.ndarray

    def counts(self, thresholds: Any) -> tuple[np.ndarray, np.ndarray]:
        """False and true positives of "took part from this score on"."""
        false, true = (len(side) - np.searchsorted(side, thresholds) for side in (self.non_members, self.members))
        return false, true

    def rates(self, thresholds: Any, error: float) -> tuple[np.ndarray, np.ndarray]:
        """Upper bound on the rate of false positives, lower bound on that of true ones, each of which
        fails with probability ``error`` at most.
        """
        false, true = self.counts(thresholds)
        return upper_rate(false, len(self.non_members), error), lower_rate(true, len(self.members), error)


def audit_scores(
    scores: Any,
    members: Any,
    *,
    delta: float,
    confidence: float = 0.95,
    nominal_epsilon: float | None = None,
    mechanism: Mechanism | None = None,
    split_seed: int | None = None,
) -> AuditResult:
    """Lower bounds on epsilon from anybody's attack.

    A fifth of the games of either side, drawn at random, chooses the thresholds. The other games give
    the rates there, each with a one-sided Clopper-Pearson interval at half the error, so that the two
    hold together with the confidence stated.

    Guarantee: if the games are independent, each bound by itself is above the mechanism's epsilon at
    ``delta`` with probability at most 1 - ``confidence``, under the assumption that it names; `trade-off` is above the
    epsilon that PLD states of it, which is at most about 2 % more.

    Args:
        scores: (G,), of G games: higher where the attacker believes more that the example took part.
        members: (G,), true or 1 where it did.
        delta: In (0, 1).
        confidence: In (0.5, 1).
        nominal_epsilon: That is claimed at ``delta``, if any.
        mechanism: That is claimed, if it is known: its trade-off gives one bound more, where PLD states an epsilon.
        split_seed: Of an audit that is computed once more: which games chose. None, for every new audit: from the
            operating system. Who tries several and takes one has no confidence left.

    Raises:
        InputError: If scores and members are no such arrays, an argument is out of range, or there
            are too few games for any bound above 0.

    Example:
        >>> result = audit_scores([0.0] * 1000 + [1.0] * 1000, [0] * 1000 + [1] * 1000, delta=0.01, confidence=0.999)
        >>> round(result.epsilon_lower_bound, 2)
        4.64
    """
    require_levels(delta, confidence, nominal_epsilon)
    inside, outside = sides(scores, members)
    require_enough(len(inside), len(outside), confidence, delta)
    split_seed = new_split_seed() if split_seed is None else split_seed
    chooses, used = _parted(inside, outside, split_seed)
    error = (1 - confidence) / 2
    candidates = _thresholds(chooses)
    for_ratio = float(candidates[np.argmax(log_ratio(*chooses.rates(candidates, error), delta=delta))])
    for_mu = float(candidates[np.argmax(gaussian_mu(*chooses.rates(candidates, error * _CAREFUL)))])
    bound = functools.partial(_bound, used, error)
    found = [
        bound("clopper-pearson", "none", for_ratio, lambda fpr, tpr: float(log_ratio(fpr, tpr, delta))),
        bound("gaussian", _IS_GAUSSIAN, for_mu, lambda fpr, tpr: gaussian_epsilon(float(gaussian_mu(fpr, tpr)), delta)),
    ]
    if mechanism is not None:
        found.append(bound("trade-off", _IS_OF_FAMILY, for_mu, functools.partial(trade_off_epsilon, mechanism, delta)))
        found = [each for each in found if each.name != "trade-off" or each.epsilon is not None]  # PLD states one
    # A Gaussian mechanism is an assumption about the mechanism, so its bound refutes no claim.
    shown = max(each.epsilon or 0.0 for each in found if each.name != "gaussian")
    return AuditResult(
        audit="bounds",
        epsilon_lower_bound=found[0].epsilon or 0.0,
        bounds=found,
        advantage=_advantage(chooses, used, candidates),
        power=power(len(used.members), len(used.non_members), confidence, delta, nominal_epsilon, SHARE),
        split_seed=split_seed,
        **stated(inside, outside, delta, confidence, nominal_epsilon, shown),
    )


def _bound(
    used: Games, error: float, name: BoundName, assumption: str, threshold: float, of: Callable[[float, float], float]
) -> Bound:
    """What the rates at one threshold show of epsilon."""
    (count_false, count_true), rates = used.counts(threshold), used.rates(threshold, error)
    false_positives, true_positives = (float(rate) for rate in rates)
    epsilon = of(false_positives, true_positives)
    return Bound(
        name=name,
        epsilon=None if epsilon == -math.inf else max(0.0, epsilon),
        assumption=assumption,
        threshold=threshold,
        false_positives=int(count_false),
        true_positives=int(count_true),
        num_non_members=len(used.non_members),
        num_members=len(used.members),
        false_positive_rate=false_positives,
        true_positive_rate=true_positives,
    )


def require_enough(num_members: int, num_non_members: int, confidence: float, delta: float) -> None:
    """Raises InputError where no attack could show anything; it says how many games could."""
    members, non_members = (count - _num_chosen(count) for count in (num_members, num_non_members))
    if min(members, non_members) >= 1 and perfect(members, non_members, confidence, delta) > 0:
        return
    remedy = "No number of games is enough: take a smaller delta"
    if needed := games_needed(0.0, confidence, delta, SHARE):
        # Of five games a side, or more, no larger share than SHARE chooses.
        remedy = f"Play at least {max(10, needed + needed % 2):,}, half of them with the example"
    raise InputError(
        f"{num_members:,} games with the example and {num_non_members:,} without are too few for confidence "
        f"{confidence:.12g} at delta {formats.delta_text(delta)}: an attack that is never wrong would show nothing. "
        f"{remedy}."
    )


def sides(scores: Any, members: Any) -> tuple[np.ndarray, np.ndarray]:
    """The sorted scores of either side."""
    values, took_part = as_numbers(scores), as_numbers(members)
    if values.ndim != 1 or values.shape != took_part.shape:
        shapes = f"scores of shape {values.shape} and members of shape {took_part.shape}"
        raise InputError(f"{shapes} do not belong together. Give one of each for every game.")
    if not np.isin(took_part, (0.0, 1.0)).all():
        raise InputError("members must be 1 where the example took part and 0 where it did not.")
    if np.isnan(values).any():
        raise InputError(f"score {int(np.isnan(values).argmax()) + 1} is not a number. Give every game a score.")
    values = np.clip(values, -_LARGEST, _LARGEST)  # infinite scores keep their order, and have a middle
    inside, outside = np.sort(values[took_part == 1]), np.sort(values[took_part == 0])
    for side, what in ((inside, "with"), (outside, "without")):
        if not len(side):
            raise InputError(f"there are no games {what} the example, so one of the two rates is unknown. Play both.")
    return inside, outside


def as_numbers(given: Any) -> np.ndarray:
    """In float64. Raises InputError where it has something else."""
    what = "scores and members must be numbers, one of each for every game"
    with refusing(what, "Give lists or arrays.", TypeError, ValueError, OverflowError):
        return np.asarray(given, dtype=np.float64)


def _num_chosen(count: int) -> int:
    return min(count, max(1, int(count * SHARE)))


def new_split_seed() -> int:
    return secrets.randbits(48)  # any JSON reader keeps it whole


def _parted(inside: np.ndarray, outside: np.ndarray, split_seed: int) -> tuple[Games, Games]:
    """The games that choose, and those that bounds use.

    Sorted scores are parted at random places: the order of the games does not matter. The places must be new in each
    audit. Where they are the same, or follow from scores of which many are equal, some counts of right answers always
    meet the same split, and bounds fail more often than is stated.
    """
    rng, sides = np.random.default_rng(split_seed), (inside, outside)
    chosen = [np.sort(rng.permutation(len(side))[: _num_chosen(len(side))]) for side in sides]
    chooses = [side[places] for side, places in zip(sides, chosen, strict=True)]
    return Games(*chooses), Games(*map(np.delete, sides, chosen))


def _thresholds(games: Games) -> np.ndarray:
    """What might be the best threshold: between two neighbouring scores; of many, densely at both ends."""
    distinct = np.unique(np.concatenate([games.members, games.non_members]))
    if len(distinct) == 1:
        return distinct
    between = distinct[:-1] / 2 + distinct[1:] / 2
    if len(between) > _MOST_THRESHOLDS:
        from_end = np.unique(np.geomspace(1, len(between), _MOST_THRESHOLDS // 3).astype(np.int64)) - 1
        evenly = np.linspace(0, len(between) - 1, _MOST_THRESHOLDS // 3).astype(np.int64)
        between = between[np.unique(np.concatenate([from_end, len(between) - 1 - from_end, evenly]))]
    return between


def _advantage(chooses: Games, used: Games, candidates: np.ndarray) -> float:
    def at(games: Games, thresholds: Any) -> np.ndarray:
        false_positives, true_positives = games.counts(thresholds)
        return true_positives / len(games.members) - false_positives / len(games.non_members)

    return float(at(used, candidates[np.argmax(at(chooses, candidates))]))


_STEP = 1.005
"""Between the amounts of noise that are tried, as a factor."""
_LEAST_NOISE = 0.01
"""That is tried: one step with less spends thousands, and PLD states little of it."""
_MOST_NOISE = 2.0**20
"""That is tried, in units of what is claimed."""
_MORE = (1.0, 1.1, 1.4, 2.0, 4.0)
"""How much more noise than is refuted may have an epsilon by PLD where that amount has none."""


def trade_off_epsilon(mechanism: Mechanism, delta: float, false_positives: float, true_positives: float) -> float:
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
    if mechanism.num_steps == 0:  # nothing is released, whatever the noise
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
