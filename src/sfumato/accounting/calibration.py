"""Solving for what a budget allows; the target is never exceeded.

Each solver ends with the accountant's own word: the value that it returns was certified to
meet the target, and its neighbour was seen to exceed it.
"""

import math
from collections.abc import Callable

from sfumato.accounting.accountants import Accountant, epsilon
from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError

_SMALLEST_SIGMA, _LARGEST_SIGMA = 0.05, 1e6
_MOST_STEPS = 10**9
_EXACT_STEPS = 20_000  # above, steps are found to 0.1 %


def solve_noise_multiplier(
    *, num_examples: int, batch_size: int, num_steps: int, target_epsilon: float, delta: float, accountant: Accountant = "pld"
) -> float:
    """The smallest sigma of 4 significant digits within the target.

    Raises:
        InputError: If the budget is impossible.
    """
    check_budget(target_epsilon, delta)
    if num_steps == 0:
        return _SMALLEST_SIGMA
    mechanism = Mechanism(num_examples, batch_size, 1.0, num_steps)

    def spent(negative_rank: int, by: Accountant) -> float:
        return epsilon(mechanism.replace(noise_multiplier=_sigma(-negative_rank)), delta, by).epsilon

    lowest, highest = -_rank(_LARGEST_SIGMA), -_rank(_SMALLEST_SIGMA)
    # A Gaussian's signal sqrt(T) q / sigma gives epsilon of about signal sqrt(2 ln 1/delta).
    guess = math.sqrt(num_steps) * mechanism.sampling_prob * math.sqrt(2 * math.log(1 / delta) + 2 * target_epsilon) / target_epsilon
    start = -_rank(min(max(guess, _SMALLEST_SIGMA), _LARGEST_SIGMA))
    found = _largest(spent, target_epsilon, lowest, highest, start, accountant)
    if found is None:
        raise InputError(
            f"epsilon {target_epsilon:g} at delta {delta:g} cannot be met by any noise_multiplier up to {_LARGEST_SIGMA:g} "
            f"over {num_steps} steps. Ask for fewer steps or a larger epsilon."
        )
    return _sigma(-found)


def solve_num_steps(
    *, num_examples: int, batch_size: int, noise_multiplier: float, target_epsilon: float, delta: float, accountant: Accountant = "pld"
) -> int:
    """The most steps within the target; exact up to 20,000, above to 0.1 %.

    Raises:
        InputError: If the budget is impossible, or one step exceeds it.
    """
    check_budget(target_epsilon, delta)
    mechanism = Mechanism(num_examples, batch_size, noise_multiplier, 1)
    _check_noise(noise_multiplier)

    def spent(num_steps: int, by: Accountant) -> float:
        return epsilon(mechanism.replace(num_steps=num_steps), delta, by).epsilon

    signal = target_epsilon / math.sqrt(2 * math.log(1 / delta) + 2 * target_epsilon)
    start = int(min(max((signal * noise_multiplier / mechanism.sampling_prob) ** 2, 1), _MOST_STEPS))
    found = _largest(spent, target_epsilon, 1, _MOST_STEPS, start, accountant, slack=lambda n: n // 2000 if n > _EXACT_STEPS else 0)
    if found is None:
        raise InputError(
            f"one step already spends epsilon {spent(1, accountant):.4g}, more than {target_epsilon:g}, at noise_multiplier {noise_multiplier:g} "
            f"and batch_size {batch_size}. Raise the noise, or take a smaller batch."
        )
    return found


def solve_batch_size(
    *, num_examples: int, num_steps: int, noise_multiplier: float, target_epsilon: float, delta: float, accountant: Accountant = "pld"
) -> int:
    """The largest expected batch within the target.

    Raises:
        InputError: If the budget is impossible, or a batch of one exceeds it.
    """
    check_budget(target_epsilon, delta)
    mechanism = Mechanism(num_examples, 1, noise_multiplier, num_steps)
    _check_noise(noise_multiplier)

    def spent(batch_size: int, by: Accountant) -> float:
        return epsilon(mechanism.replace(batch_size=batch_size), delta, by).epsilon

    signal = target_epsilon / math.sqrt(2 * math.log(1 / delta) + 2 * target_epsilon)
    guess = signal * noise_multiplier * num_examples / math.sqrt(max(num_steps, 1))
    found = _largest(spent, target_epsilon, 1, num_examples, int(min(max(guess, 1), num_examples)), accountant)
    if found is None:
        raise InputError(
            f"even an expected batch of 1 spends epsilon {spent(1, accountant):.4g}, more than {target_epsilon:g}, at noise_multiplier "
            f"{noise_multiplier:g} over {num_steps} steps. Raise the noise, or take fewer steps."
        )
    return found


def check_budget(target_epsilon: float, delta: float) -> None:
    """Refuses budgets that nothing can meet."""
    if not (math.isfinite(target_epsilon) and target_epsilon > 0):
        raise InputError(f"epsilon must be positive and finite, not {target_epsilon:g}: 0 would mean to learn nothing. 1 is strong, 3 usual, 8 weak.")
    if not 0 < delta < 1:
        raise InputError(f"delta must lie between 0 and 1, not {delta:g}. A power of ten below 1/N is usual.")


def _check_noise(noise_multiplier: float) -> None:
    if not noise_multiplier > 0:
        raise InputError(f"noise_multiplier {noise_multiplier:g} has no finite epsilon, so it cannot meet a target. Choose a positive one.")


def _largest(
    spent: Callable[[int, Accountant], float],
    target: float,
    low: int,
    high: int,
    start: int,
    accountant: Accountant,
    slack: Callable[[int], int] = lambda n: 0,
) -> int | None:
    """The largest n in [low, high] with spent(n) <= target, for spent increasing in n; None if there is none.

    Searches by RDP first, since that takes milliseconds, and starts the accountant's own
    search from there.
    """
    if accountant != "rdp":
        by_rdp = _bracket(lambda n: spent(n, "rdp"), target, low, high, start, slack)
        start = by_rdp if by_rdp is not None else low
    return _bracket(lambda n: spent(n, accountant), target, low, high, start, slack)


def _bracket(spent: Callable[[int], float], target: float, low: int, high: int, start: int, slack: Callable[[int], int]) -> int | None:
    good: tuple[int, float] | None = None  # the largest n seen within the target
    bad: tuple[int, float] | None = None  # the smallest seen beyond it
    n, stride = start, max(abs(start) // 16, 1)
    while True:
        value = spent(n)
        if value <= target:
            good = (n, value)
            if n == high:
                return n
        else:
            bad = (n, value)
            if n == low:
                return None
        if good and bad:
            if bad[0] - good[0] <= 1 + slack(good[0]):
                return good[0]
            n = _between(good, bad, target)
        else:
            n = min(n + stride, high) if good else max(n - stride, low)
            stride *= 4


def _between(good: tuple[int, float], bad: tuple[int, float], target: float) -> int:
    """Regula falsi on log epsilon, kept at least an eighth of the gap (and one) away from either end."""
    gap = bad[0] - good[0]
    share = 0.5
    if 0 < good[1] < bad[1] < math.inf:
        share = math.log(target / good[1]) / math.log(bad[1] / good[1])
    if gap > 64:
        # Aim a little to one side of the estimate, so that both ends close in.
        share += 2 / gap if share < 0.5 else -2 / gap
        share = min(max(share, 1 / gap), 1 - 1 / gap)
    return min(max(good[0] + round(share * gap), good[0] + 1), bad[0] - 1)


def _sigma(rank: int) -> float:
    """The rank-th number of 4 significant digits: 9000 ranks a decade."""
    decade, digits = divmod(rank, 9000)
    return float(f"{1000 + digits}e{decade - 3}")


def _rank(sigma: float) -> int:
    """The rank of the smallest number of 4 significant digits that is at least sigma."""
    decade = math.floor(math.log10(sigma))
    rank = decade * 9000 + math.ceil(round(sigma / 10.0 ** (decade - 3), 6)) - 1000
    return rank
