"""Solving for what a budget allows; the target is never exceeded.

A search is over whole numbers (for sigma: the ranks of the numbers of 4 significant digits) and
ends where the accountant certifies one and refuses its neighbour, so that the answer is the
accountant's own, whatever the search started from.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Literal

from sfumato.accounting import formats
from sfumato.accounting.accountants import epsilon, refuse_unknown
from sfumato.accounting.gaussian import mu_gaussian
from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.accounting.selection import Selection
from sfumato.errors import InputError

SMALLEST_SIGMA, LARGEST_SIGMA = 0.05, 1e6
MOST_STEPS = 10**9
_EXACT_STEPS = 20_000
_SECANTS = 6

Unknown = Literal["noise_multiplier", "batch_size", "num_steps"]


@dataclasses.dataclass(frozen=True)
class _Candidates:
    """Numbers n from low to high, of which more spend more.

    Attributes:
        power: In the Gaussian limit mu = sqrt(T) q / sigma is spent: this power of the number that n stands for.
        value: What n stands for.
        place: About the n that stands for a value.
        gap: How near the answer must be to the first n that spends too much.
        least: What n = low is, in words, and what else would spend less.
    """

    low: int
    high: int
    power: float
    least: tuple[str, str]
    value: Callable[[int], float] = lambda n: n
    place: Callable[[float], int] = int
    gap: Callable[[int], int] = lambda n: 1


def _candidates(unknown: Unknown, num_examples: int) -> _Candidates:
    match unknown:
        case "noise_multiplier":
            least = f"a noise_multiplier of {LARGEST_SIGMA:g}", "Take fewer steps"
            low, high = -_rank(LARGEST_SIGMA), -_rank(SMALLEST_SIGMA)
            return _Candidates(low, high, -1.0, least, lambda n: _sigma(-n), lambda sigma: -_rank(sigma))
        case "num_steps":
            least = "one step", "Raise the noise, take a smaller batch"
            return _Candidates(1, MOST_STEPS, 0.5, least, gap=lambda n: n // 2000 if n > _EXACT_STEPS else 1)
        case "batch_size":
            return _Candidates(1, num_examples, 1.0, ("a batch of 1", "Raise the noise, take fewer steps"))


def solve(
    mechanism: Mechanism,
    unknown: Unknown,
    target_epsilon: float,
    delta: float,
    accountant: Accountant = "pld",
    selection: Selection | None = None,
) -> Mechanism:
    """The mechanism with the least noise multiplier of 4 significant digits, the most steps or the largest expected
    batch within the target.

    Guarantee: ``epsilon`` of the answer is at most the target; 0.1 % less noise, one step (above 20,000 steps: 0.1 %)
    or one image more exceeds it, unless the answer is ``SMALLEST_SIGMA``, below which no budget means anything,
    ``MOST_STEPS``, or every image. With ``selection`` the target covers that the best of so many runs is published.

    Args:
        mechanism: Whose other numbers hold; what stands in place of the unknown one is not looked at.
        unknown: What is solved for.
        target_epsilon: Of all that the mechanism releases, for one unit of its.
        delta: In (0, 1).
        accountant: Whose epsilon is held to the target.
        selection: How the run is selected from others.

    Raises:
        InputError: If the budget is impossible.

    Example:
        >>> run = Mechanism(50_000, 4096, noise_multiplier=1.0, num_steps=875)
        >>> solve(run, "noise_multiplier", 1.0, 1e-5, "rdp").noise_multiplier
        9.889
    """
    if unknown != "noise_multiplier" and mechanism.noise_multiplier == 0:
        raise InputError("noise_multiplier 0 has no finite epsilon, so it cannot meet a target. Choose a positive one.")
    if not 0 < target_epsilon < math.inf:
        raise InputError(f"epsilon must be positive and finite, not {target_epsilon}. 1 is strong, 3 usual, 8 weak.")
    refuse_unknown(mechanism, delta)
    candidates = _candidates(unknown, mechanism.num_examples)

    def at(n: int) -> Mechanism:
        return mechanism.replace(**{unknown: candidates.value(n)})

    def spent(n: int, by: Accountant = accountant) -> float:
        return epsilon(at(n), delta, by, selection).epsilon

    tries: list[tuple[Accountant, int]] = [(accountant, _SECANTS)]
    if accountant == "pld" and selection is None and mechanism.most_images == 1:
        tries = [("rdp", _SECANTS), ("pld", 2)]
    start = _guess(candidates, at(candidates.low), spent, target_epsilon, delta, tries)
    found = _search(lambda n: spent(n) <= target_epsilon, candidates.low, candidates.high, start, candidates.gap)
    if found is None:
        least, (what, remedy) = formats.epsilon_text(spent(candidates.low)), candidates.least
        raise InputError(
            f"even {what} spends epsilon {least}, more than {formats.epsilon_text(target_epsilon)}, at delta "
            f"{formats.delta_text(delta)}. {remedy}, or ask for epsilon {least} or more."
        )
    assert spent(found) <= target_epsilon
    return at(found)


def _guess(
    candidates: _Candidates,
    first: Mechanism,
    spent: Callable[[int, Accountant], float],
    target_epsilon: float,
    delta: float,
    tries: Iterable[tuple[Accountant, int]],
) -> int:
    """An n near the answer, of few calls: RDP takes milliseconds, PLD much longer.

    A step along the power of the Gaussian limit finds a first number, and secants by each accountant of ``tries``, so
    many at most, one near its answer. ``first`` is the mechanism of the lowest n.
    """

    def log_mu(epsilon: float) -> float:
        return math.log(mu_gaussian(min(epsilon, 1e100), delta))  # beyond, squares overflow

    def toward(log_value: float) -> int:
        n = candidates.place(math.exp(min(max(log_value, -700.0), 700.0)))
        return min(max(n, candidates.low), candidates.high)

    goal, slope = log_mu(target_epsilon), candidates.power
    mu = first.most_images * first.sampling_prob * math.sqrt(max(first.num_steps, 1)) / first.noise_multiplier
    guess = toward(math.log(candidates.value(candidates.low)) + (goal - math.log(mu)) / candidates.power)
    for by, times in tries:
        before: tuple[float, float] | None = None
        for _ in range(times):
            found = spent(guess, by)
            if not 0 < found < math.inf:
                break
            here, reached = math.log(candidates.value(guess)), log_mu(found)
            if before is not None and (reached - before[1]) * (here - before[0]) * candidates.power > 0:
                slope = (reached - before[1]) / (here - before[0])
            before, following = (here, reached), toward(here + (goal - reached) / slope)
            if abs(following - guess) <= candidates.gap(guess):
                break
            guess = following
    return guess


def _search(within: Callable[[int], bool], low: int, high: int, start: int, gap: Callable[[int], int]) -> int | None:
    """A good n whose n + gap is bad, or n = high; None if low is bad. Growing strides from the start, then halving."""
    good, bad, probe, stride = low - 1, high + 1, start, gap(start)
    while good < low or bad > high:
        good, bad = (probe, bad) if within(probe) else (good, probe)
        if good == high or bad == low:
            return good if good == high else None
        probe = min(good + stride, high) if bad > high else max(bad - stride, low)
        stride *= 2
    while bad - good > gap(good):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if within(middle) else (good, middle)
    return good


def _sigma(rank: int) -> float:
    """The rank-th number of 4 significant digits: 9000 ranks a decade."""
    decade, digits = divmod(rank, 9000)
    return float(f"{1000 + digits}e{decade - 3}")


def _rank(sigma: float) -> int:
    """About the rank of sigma; exact for numbers of 4 significant digits."""
    digits, decade = f"{sigma:.3e}".split("e")
    return int(decade) * 9000 + int(digits.replace(".", "")) - 1000
