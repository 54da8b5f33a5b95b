"""The one door to epsilon: what a mechanism spends, as an upper bound."""

import bisect
import dataclasses
import functools
import math

from sfumato.accounting.mechanism import Accountant, Mechanism, first_release_mu
from sfumato.accounting.pld import Cost, epsilon_pld
from sfumato.accounting.rdp import epsilon_rdp
from sfumato.accounting.selection import Selection, epsilon_of_best
from sfumato.accounting.user_level import epsilon_person
from sfumato.errors import InputError

_NO_NOISE = "without noise, or with next to none, no finite epsilon is stated."
_CURVE_POINTS = 30
# A curve takes PLD at every point where one costs at most this; else RDP before the last.
_CURVE_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class Spent:
    """The epsilon of a mechanism at one delta, for the contribution of one unit replaced by zero: of
    one image, or of all images of one person.

    Attributes:
        epsilon: PLD's, never above RDP's; RDP's where it was asked for or PLD cannot certify.
        epsilon_rdp: By Renyi DP at real orders, improved conversion; None for a person with several
            images.
        epsilon_pld: By privacy loss distributions; None where it was not computed or not certified.
        accountant: Which of the two ``epsilon`` is.
        note: Why it is not the one that was asked for; else "".
    """

    epsilon: float
    epsilon_rdp: float | None
    epsilon_pld: float | None
    accountant: Accountant
    note: str = ""


def epsilon(
    mechanism: Mechanism, delta: float, accountant: Accountant = "pld", selection: Selection | None = None
) -> Spent:
    """What a mechanism spends.

    Guarantee: each number is an upper bound on the epsilon of the mechanism's T steps, and of the
    release before them if there is one, at ``delta``, for one unit's contribution replaced by zero
    (the same as add-or-remove): one image's, or that of all ``mechanism.images_per_unit`` images of
    a person. What releases nothing spends 0, no noise spends infinity.

    Args:
        mechanism: Its sampling must be "poisson".
        delta: In (0, 1).
        accountant: "pld" computes both, "rdp" only RDP's; of a person with several images there is
            PLD's alone.
        selection: Where the run is the best of a random number of them: epsilon then covers the
            selection, by RDP.

    Raises:
        InputError: If the sampling is shuffled, delta is out of range, or no epsilon is known.

    Example:
        >>> spent = epsilon(Mechanism(50_000, 4096, noise_multiplier=3.0, num_steps=2468), delta=1e-5)
        >>> round(spent.epsilon_rdp, 2), round(spent.epsilon_pld, 2)
        (7.05, 6.54)
    """
    if mechanism.sampling != "poisson":
        raise InputError(
            "no epsilon is known for shuffled batches: they can leak several times what Poisson "
            "sampling does. Use "
            'privacy.sampling = "poisson".'
        )
    if not 0 < delta < 1:
        raise InputError(f"delta must lie between 0 and 1, not {delta}. A power of ten below 1/N is usual.")
    if selection is not None and mechanism.first_release_noise is not None:
        raise InputError(
            "no epsilon is known where a run with a first release beside its updates is selected from others. Leave "
            'privacy.selected_from out, or that release (model.classifier = "sgd", model.features = "unit").'
        )
    if min(mechanism.images_per_unit, mechanism.num_examples) > 1:
        if accountant == "rdp" or selection is not None:
            raise InputError(
                "no epsilon is known for a person with several images by RDP, or where a run is selected from others. "
                'Take privacy.accountant = "pld" and no privacy.selected_from, or privacy.unit = "image".'
            )
        return _epsilon_of_person(mechanism, delta)
    return (
        _epsilon(mechanism, delta, accountant) if selection is None else _epsilon_of_best(mechanism, delta, selection)
    )


@functools.lru_cache(maxsize=4096)
def _epsilon_of_person(mechanism: Mechanism, delta: float) -> Spent:
    if mechanism.releases_nothing:
        return Spent(0.0, None, 0.0, "pld")
    if not mechanism.has_noise:
        return Spent(math.inf, None, None, "pld", _NO_NOISE)
    images = min(mechanism.images_per_unit, mechanism.num_examples)  # nobody has more than there are
    found = epsilon_person(mechanism.replace(images_per_unit=images), delta)
    assert found.epsilon is not None
    note = (
        f"epsilon is that of all images of a person in every batch, far above: {found.reason}" if found.reason else ""
    )
    return Spent(found.epsilon, None, found.epsilon, "pld", note)


@functools.lru_cache(maxsize=4096)
def _epsilon_of_best(mechanism: Mechanism, delta: float, selection: Selection) -> Spent:
    best = epsilon_of_best(mechanism, delta, selection)
    if math.isinf(best):
        return Spent(best, best, None, "rdp", _NO_NOISE)
    return Spent(
        best, best, None, "rdp", "epsilon covers that this run was selected from others; that is accounted for by RDP."
    )


@functools.lru_cache(maxsize=4096)
def _epsilon(mechanism: Mechanism, delta: float, accountant: Accountant) -> Spent:
    if mechanism.releases_nothing:
        return Spent(0.0, 0.0, 0.0 if accountant == "pld" else None, accountant)
    if not mechanism.has_noise:
        return Spent(math.inf, math.inf, None, "rdp", _NO_NOISE)
    if mechanism.num_steps == 0:  # the first release alone: a step of all examples
        assert mechanism.first_release_noise is not None
        numbers, first_mu = (1.0, mechanism.first_release_noise, 1, delta), 0.0
    else:
        numbers = (mechanism.sampling_prob, mechanism.noise_multiplier, mechanism.num_steps, delta)
        first_mu = first_release_mu(mechanism.first_release_noise)
    by_rdp = epsilon_rdp(*numbers, first_mu)
    if accountant == "rdp":
        return Spent(by_rdp, by_rdp, None, "rdp")
    by_pld = epsilon_pld(*numbers, 1, first_mu)
    reason = by_pld.reason
    if by_pld.epsilon is not None and by_pld.epsilon <= by_rdp:
        return Spent(by_pld.epsilon, by_rdp, by_pld.epsilon, "pld")
    return Spent(
        by_rdp,
        by_rdp,
        None,
        "rdp",
        f"epsilon is RDP's: {reason or 'PLD is not below it here, so its grid is too coarse.'}",
    )


class EpsilonCurve:
    """Epsilon after any number of steps up to ``num_steps``, computed once at a few of them.

    Guarantee: an upper bound, since a value is read at the next computed step, never interpolated.
    It never falls as steps grow, and ends at exactly ``epsilon(mechanism, delta, accountant)``.

    Attributes:
        spent: What all steps spend.
    """

    def __init__(self, mechanism: Mechanism, delta: float, accountant: Accountant = "pld") -> None:
        self._mechanism, self._delta, self._accountant = mechanism, delta, accountant
        self.spent = epsilon(mechanism, delta, accountant)
        last = mechanism.num_steps
        # Epsilon grows about as the root of the steps: even steps of the root are even steps of
        # epsilon.
        self._steps = sorted({0, *(math.ceil(last * (i / _CURVE_POINTS) ** 2) for i in range(1, _CURVE_POINTS)), last})
        before: Accountant = "pld" if accountant == "pld" and _is_cheap(mechanism) else "rdp"
        if before == "rdp" and mechanism.images_per_unit > 1:  # of which there is no RDP
            self._steps = [0, last]
            before = "pld"
        values = [epsilon(mechanism.replace(num_steps=step), delta, before).epsilon for step in self._steps[:-1]]
        values.append(self.spent.epsilon)
        # Later steps spend at least as much, so a smaller bound found there holds before, too.
        self._values = [min(values[i:]) for i in range(len(values))]

    def at(self, step: int) -> float:
        """Upper bound on what the first ``step`` updates spend."""
        if step > self._steps[-1]:  # more than planned: steps that were drawn afresh count again
            return epsilon(self._mechanism.replace(num_steps=step), self._delta, self._accountant).epsilon
        return self._values[bisect.bisect_left(self._steps, step)]


def _is_cheap(mechanism: Mechanism) -> bool:
    if mechanism.sampling_prob == 1 or mechanism.num_steps == 0 or not mechanism.has_noise:
        return True
    images = min(mechanism.images_per_unit, mechanism.num_examples)
    first_mu = images * first_release_mu(mechanism.first_release_noise)
    part = (mechanism.sampling_prob, mechanism.noise_multiplier, mechanism.num_steps)
    cost = Cost.together([part], images, first_mu)
    return cost.seconds(cost.interval) <= _CURVE_SECONDS
