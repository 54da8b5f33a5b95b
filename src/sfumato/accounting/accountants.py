"""The one door to epsilon: what a mechanism spends, as an upper bound."""

import bisect
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from sfumato.accounting.gaussian import epsilon_gaussian, mu_of
from sfumato.accounting.mechanism import Accountant, Mechanism, Part
from sfumato.accounting.pld import Cost, Tight, epsilon_pld
from sfumato.accounting.rdp import epsilon_rdp
from sfumato.accounting.selection import Selection, epsilon_of_best
from sfumato.errors import InputError

_NO_NOISE = "without noise, or with next to none, no finite epsilon is stated."
_OF_THE_BEST = "epsilon covers that this run was selected from others; that is accounted for by RDP."
_ONLY_PLD = (
    "no epsilon is known for a person with several images by RDP, or where a run is selected from others. "
    "Take --set privacy.accountant=pld and no privacy.selected_from, or --set privacy.unit=image."
)
# A curve has PLD at so many points, or at as many as take so long together.
_POINTS, _POINTS_SECONDS = 20, 5.0


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
    mechanism: Mechanism | Sequence[Mechanism],
    delta: float,
    accountant: Accountant = "pld",
    selection: Selection | None = None,
) -> Spent:
    """What a mechanism spends, or several on the same examples together (`epsilon_together`).

    Guarantee: each number is an upper bound on the epsilon of the mechanism's T steps at ``delta``,
    for one unit's contribution replaced by zero (the same as add-or-remove): one image's, or that of
    all ``mechanism.images_per_unit`` images of a person. What releases nothing spends 0, no noise spends infinity.

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
    if selection is None:
        return epsilon_together([mechanism] if isinstance(mechanism, Mechanism) else mechanism, delta, accountant)
    if not isinstance(mechanism, Mechanism):
        raise InputError("no epsilon is known for several runs, each selected from others: give one mechanism.")
    refuse_unknown(mechanism, delta)
    if mechanism.most_images > 1:
        raise InputError(_ONLY_PLD)
    best = epsilon_of_best(mechanism, delta, selection)
    return Spent(best, best, None, "rdp", _NO_NOISE if math.isinf(best) else _OF_THE_BEST)


def epsilon_together(
    mechanisms: Iterable[Mechanism], delta: float, accountant: Accountant = "pld", *, parts_of_data: bool = False
) -> Spent:
    """What somebody learns who sees all releases of all these runs.

    The losses of all updates add up (PLD, on one grid), or the divergences at each order (RDP). Releases of all
    examples without sampling are one Gaussian.

    Of k images of a person each is Poisson sampled by itself, so that what a step holds of the person is Binomial(k, q)
    clipped gradients, the worst case parallel ones: a mixture of Gaussians, composed under PLD. Where that is not to be
    had, it is bounded by its largest member alone: N(i, sigma^2) for i <= k is N(k, sigma^2) scaled down, with noise
    added. That is far above. A release of all examples moves by k sensitivities.

    Guarantee: as of `epsilon`, for one unit's contribution to all runs replaced by zero, in whatever order and however
    interleaved they are made.

    Args:
        mechanisms: On the same examples, each drawn by itself from the others ("poisson").
        delta: In (0, 1), of all together.
        accountant: As in `epsilon`.
        parts_of_data: Whether each may be on a part of the examples alone: who is in no more than some of them is
            covered all the more.

    Returns:
        As `epsilon`. Infinity where one has no noise.

    Raises:
        ValueError: If they have not the same number of examples and of images of a unit.
        InputError: As `epsilon`.

    Example:
        >>> large = Mechanism(50_000, 4096, noise_multiplier=3.0, num_steps=1000)
        >>> small = Mechanism(50_000, 256, noise_multiplier=1.0, num_steps=1000)
        >>> round(epsilon(large, 1e-5).epsilon, 2), round(epsilon_together([large, small], 1e-5).epsilon, 2)
        (3.89, 4.01)
    """
    mechanisms = list(mechanisms)
    for mechanism in mechanisms:
        refuse_unknown(mechanism, delta)
        if mechanism.most_images > 1 and accountant == "rdp":
            raise InputError(_ONLY_PLD)
    units = {(0 if parts_of_data else each.num_examples, each.images_per_unit) for each in mechanisms}
    if len(units) > 1:
        raise ValueError("the mechanisms are not of the same examples")
    images = max((mechanism.most_images for mechanism in mechanisms), default=1)
    if not all(mechanism.has_noise for mechanism in mechanisms):
        return Spent(math.inf, math.inf if images == 1 else None, None, "rdp" if images == 1 else "pld", _NO_NOISE)
    steps: Counter[tuple[float, float]] = Counter()
    for q, sigma, num_steps in (part for mechanism in mechanisms for part in mechanism.parts):
        steps[q, sigma] += num_steps
    return _epsilon(tuple((*kind, num_steps) for kind, num_steps in sorted(steps.items())), images, delta, accountant)


def refuse_unknown(mechanism: Mechanism, delta: float) -> None:
    """Raises InputError where no epsilon is known at that delta."""
    if mechanism.sampling != "poisson":
        raise InputError(
            "no epsilon is known for shuffled batches: they can leak several times what Poisson "
            "sampling does. Take --set privacy.sampling=poisson."
        )
    if not 0 < delta < 1:
        raise InputError(f"delta must lie between 0 and 1, not {delta}. A power of ten below 1/N is usual.")


@functools.lru_cache(maxsize=4096)
def _epsilon(parts: tuple[Part, ...], images: int, delta: float, accountant: Accountant) -> Spent:
    """Of kinds of steps, each with noise."""
    if not parts:
        return Spent(0.0, 0.0 if images == 1 else None, 0.0 if accountant == "pld" else None, accountant)
    if images > 1:  # of which there is no RDP
        by_gaussian = epsilon_gaussian(mu_of(parts, images), delta)
        tight = epsilon_pld(parts, delta, images) if by_gaussian else Tight(0.0)
        if tight.epsilon is None:
            note = f"epsilon is that of all images of a person in every batch, far above: {tight.reason}"
            return Spent(by_gaussian, None, by_gaussian, "pld", note)
        best = min(tight.epsilon, by_gaussian)
        return Spent(best, None, best, "pld")
    by_rdp = epsilon_rdp(parts, delta)
    if accountant == "rdp":
        return Spent(by_rdp, by_rdp, None, "rdp")
    tight = epsilon_pld(parts, delta)
    if tight.epsilon is not None and tight.epsilon <= by_rdp:
        return Spent(tight.epsilon, by_rdp, tight.epsilon, "pld")
    note = f"epsilon is RDP's: {tight.reason or 'PLD is not below it here, so its grid is too coarse.'}"
    return Spent(by_rdp, by_rdp, None, "rdp", note)


class EpsilonCurve:
    """Epsilon after any number of steps.

    Guarantee: an upper bound, at most ``spent``: by PLD that of the next of a few points, or RDP's of exactly those
    steps where that is less.

    Attributes:
        spent: What all steps spend.
    """

    def __init__(self, mechanism: Mechanism, delta: float, accountant: Accountant = "pld") -> None:
        self._mechanism, self._delta, self._accountant = mechanism, delta, accountant
        self.spent = epsilon(mechanism, delta, accountant)
        self._points: Sequence[int] = range(mechanism.num_steps + 1)
        if accountant == "pld":
            few = max(1, int(_POINTS_SECONDS / max(_seconds(mechanism), _POINTS_SECONDS / _POINTS)))
            # Evenly; of persons, for whom there is no RDP, evenly by epsilon, which grows as the root of the steps.
            power = 1 if mechanism.most_images == 1 else 2
            self._points = sorted({-(-mechanism.num_steps * point**power // few**power) for point in range(few + 1)})

    @functools.cache  # noqa: B019 (lives as long as its run)
    def at(self, step: int) -> float:
        """Upper bound on what the first ``step`` updates spend."""
        last, bounds = self._mechanism.num_steps, [self.spent.epsilon]
        if step >= last:  # more than planned: steps that were drawn afresh count again
            return self._of(step, self._accountant)
        read = self._points[bisect.bisect_left(self._points, step)]
        if read < last:
            bounds.append(self._of(read, self._accountant))
        if read > step and self._mechanism.most_images == 1:
            bounds.append(self._of(step, "rdp"))
        return min(bounds)

    def _of(self, step: int, accountant: Accountant) -> float:
        return epsilon(self._mechanism.replace(num_steps=step), self._delta, accountant).epsilon


def _seconds(mechanism: Mechanism) -> float:
    """How long PLD takes."""
    if not mechanism.has_noise or all(q == 1 for q, _, _ in mechanism.parts):
        return 0.0
    cost = Cost.together(mechanism.parts, mechanism.most_images)
    return cost.seconds(cost.interval)
