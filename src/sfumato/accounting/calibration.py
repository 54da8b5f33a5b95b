"""Solving for what a budget allows; the target is never exceeded.

Each solver searches whole numbers (for sigma: the ranks of the numbers of 4 significant digits) and
ends where the accountant certifies one and refuses its neighbour, so that the answer is the
accountant's own, whatever the search started from.
"""

import math
from collections.abc import Callable
from typing import Any

from sfumato.accounting import rounding
from sfumato.accounting.accountants import epsilon
from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.accounting.selection import Selection, epsilon_of_best
from sfumato.errors import InputError

SMALLEST_SIGMA, LARGEST_SIGMA = 0.05, 1e6
MOST_STEPS = 10**9
_EXACT_STEPS = 20_000


def solve_noise_multiplier(
    *,
    num_examples: int,
    batch_size: int,
    num_steps: int,
    target_epsilon: float,
    delta: float,
    accountant: Accountant = "pld",
    selection: Selection | None = None,
    images_per_unit: int = 1,
    first_release_noise: float | None = None,
) -> float:
    """The smallest noise multiplier of 4 significant digits within the target.

    Guarantee: ``epsilon`` at the answer is at most the target; 0.1 % less noise exceeds it,
    unless the answer is ``SMALLEST_SIGMA``, below which no budget means anything. With
    ``selection`` the target covers that the best of so many runs is published; with
    ``images_per_unit`` all images of a person. ``first_release_noise``, if given, is that of a
    release before the steps, for which the target pays as well; likewise below.

    Raises:
        InputError: If the budget is impossible.

    Example:
        >>> budget = {"target_epsilon": 1.0, "delta": 1e-5, "accountant": "rdp"}
        >>> solve_noise_multiplier(num_examples=50_000, batch_size=4096, num_steps=875, **budget)
        9.889
    """
    _check_budget(target_epsilon, delta)
    beside: dict[str, Any] = {"images_per_unit": images_per_unit, "first_release_noise": first_release_noise}
    mechanism = Mechanism(num_examples, batch_size, 1.0, num_steps, **beside)
    signal = math.sqrt(num_steps) * mechanism.sampling_prob / _gaussian_mu(target_epsilon, delta)
    found = _largest(
        lambda n: mechanism.replace(noise_multiplier=_sigma(-n)),
        low=-_rank(LARGEST_SIGMA),
        high=-_rank(SMALLEST_SIGMA),
        guess=-_rank(min(max(signal, SMALLEST_SIGMA), LARGEST_SIGMA)),
        budget=(target_epsilon, delta, accountant),
        nearer=lambda n, ratio: -_rank(min(max(_sigma(-n) * ratio, SMALLEST_SIGMA), LARGEST_SIGMA)),
        selection=selection,
    )
    if found is None:
        least = epsilon(mechanism.replace(noise_multiplier=LARGEST_SIGMA), delta, accountant, selection).epsilon
        raise InputError(
            f"epsilon {rounding.epsilon_text(target_epsilon)} at delta "
            f"{rounding.delta_text(delta)} over {num_steps} steps needs a noise_multiplier above "
            f"{LARGEST_SIGMA:g}. Ask for fewer steps, or for epsilon "
            f"{rounding.epsilon_text(least)} or more."
        )
    return _sigma(-found)


def solve_num_steps(
    *,
    num_examples: int,
    batch_size: int,
    noise_multiplier: float,
    target_epsilon: float,
    delta: float,
    accountant: Accountant = "pld",
    images_per_unit: int = 1,
    first_release_noise: float | None = None,
) -> int:
    """The most steps within the target, at most ``MOST_STEPS``.

    Guarantee: ``epsilon`` at the answer is at most the target; one step more (above 20,000 steps:
    0.1 % more) exceeds it.

    Raises:
        InputError: If the budget is impossible, or one step exceeds it.
    """
    _check_budget(target_epsilon, delta)
    beside: dict[str, Any] = {"images_per_unit": images_per_unit, "first_release_noise": first_release_noise}
    mechanism = Mechanism(num_examples, batch_size, noise_multiplier, 1, **beside)
    _check_noise(noise_multiplier)
    guess = (_gaussian_mu(target_epsilon, delta) * noise_multiplier / mechanism.sampling_prob) ** 2
    found = _largest(
        lambda n: mechanism.replace(num_steps=n),
        low=1,
        high=MOST_STEPS,
        guess=int(min(max(guess, 1), MOST_STEPS)),
        budget=(target_epsilon, delta, accountant),
        nearer=lambda n, ratio: int(n / ratio**2),
        gap=lambda n: n // 2000 if n > _EXACT_STEPS else 1,
    )
    if found is None:
        least = epsilon(mechanism, delta, accountant).epsilon
        raise InputError(
            f"one step already spends epsilon {rounding.epsilon_text(least)}, more than "
            f"{rounding.epsilon_text(target_epsilon)}, at noise_multiplier {noise_multiplier:g} "
            f"and batch_size {batch_size}. Raise the noise, take a smaller batch, or ask for "
            f"epsilon {rounding.epsilon_text(least)} or more."
        )
    return found


def solve_batch_size(
    *,
    num_examples: int,
    num_steps: int,
    noise_multiplier: float,
    target_epsilon: float,
    delta: float,
    accountant: Accountant = "pld",
    images_per_unit: int = 1,
    first_release_noise: float | None = None,
) -> int:
    """The largest expected batch within the target.

    Guarantee: ``epsilon`` at the answer is at most the target; one image more exceeds it, unless
    the answer is every image.

    Raises:
        InputError: If the budget is impossible, or a batch of one exceeds it.
    """
    _check_budget(target_epsilon, delta)
    beside: dict[str, Any] = {"images_per_unit": images_per_unit, "first_release_noise": first_release_noise}
    mechanism = Mechanism(num_examples, 1, noise_multiplier, num_steps, **beside)
    _check_noise(noise_multiplier)
    guess = _gaussian_mu(target_epsilon, delta) * noise_multiplier * num_examples / math.sqrt(max(num_steps, 1))
    found = _largest(
        lambda n: mechanism.replace(batch_size=n),
        low=1,
        high=num_examples,
        guess=int(min(max(guess, 1), num_examples)),
        budget=(target_epsilon, delta, accountant),
        nearer=lambda n, ratio: int(n / ratio),
    )
    if found is None:
        least = epsilon(mechanism, delta, accountant).epsilon
        raise InputError(
            f"even an expected batch of 1 spends epsilon {rounding.epsilon_text(least)}, more "
            f"than {rounding.epsilon_text(target_epsilon)}, at noise_multiplier "
            f"{noise_multiplier:g} over {num_steps} steps. Raise the noise, take fewer steps, or "
            f"ask for epsilon {rounding.epsilon_text(least)} or more."
        )
    return found


def _check_budget(target_epsilon: float, delta: float) -> None:
    """Refuses budgets that nothing can meet."""
    if not (math.isfinite(target_epsilon) and target_epsilon > 0):
        raise InputError(
            f"epsilon must be positive and finite, not {target_epsilon}: 0 would mean to learn "
            "nothing. 1 is strong, 3 usual, 8 weak."
        )
    if not 0 < delta < 1:
        raise InputError(f"delta must lie between 0 and 1, not {delta}. A power of ten below 1/N is usual.")


def _check_noise(noise_multiplier: float) -> None:
    if not noise_multiplier > 0:
        raise InputError(
            f"noise_multiplier {noise_multiplier:g} has no finite epsilon, so it cannot meet a "
            "target. Choose a positive one."
        )


def _gaussian_mu(epsilon: float, delta: float) -> float:
    """About the mu = sqrt(T) q / sigma that spends epsilon in the Gaussian limit: only ever a
    starting point.
    """
    tail = 2 * math.log(1 / delta)
    return math.sqrt(tail + 2 * epsilon) - math.sqrt(tail)


def _largest(
    mechanism_of: Callable[[int], Mechanism],
    *,
    low: int,
    high: int,
    guess: int,
    budget: tuple[float, float, Accountant],
    nearer: Callable[[int, float], int],
    gap: Callable[[int], int] = lambda n: 1,
    selection: Selection | None = None,
) -> int | None:
    """The largest n in [low, high] within the budget, for a mechanism that spends more as n grows;
    None if there is none.

    RDP takes milliseconds, PLD much longer. So RDP finds where to start, at targets raised by what
    PLD was seen to save. For a person, of whom there is no RDP, `nearer(n, spent / target)` does,
    as epsilon grows about as the signal.
    """
    target, delta, accountant = budget

    def search(start: int, target: float, by: Accountant) -> int | None:
        return _search(
            lambda n: epsilon(mechanism_of(n), delta, by, selection).epsilon <= target, low, high, start, gap
        )

    if selection is not None:
        guess = (
            _search(
                lambda n: epsilon_of_best(mechanism_of(n), delta, selection, refined=False) <= target,
                low,
                high,
                guess,
                gap,
            )
            or guess
        )
    elif mechanism_of(low).images_per_unit > 1:
        for _ in range(3):
            spent = epsilon(mechanism_of(guess), delta, accountant)
            if not 0 < spent.epsilon < math.inf:
                break
            guess = min(max(nearer(guess, spent.epsilon / target), low), high)
    elif accountant == "pld":
        relaxed = target
        for _ in range(2):
            by_rdp = search(guess, relaxed, "rdp")
            if by_rdp is None:
                break
            guess = by_rdp
            spent = epsilon(mechanism_of(guess), delta)
            if spent.epsilon <= 0 or spent.epsilon_rdp is None:
                break
            relaxed = target * spent.epsilon_rdp / spent.epsilon
    found = search(guess, target, accountant)
    assert found is None or epsilon(mechanism_of(found), delta, accountant, selection).epsilon <= target
    return found


def _search(within: Callable[[int], bool], low: int, high: int, start: int, gap: Callable[[int], int]) -> int | None:
    """A good n whose n + gap is bad (or n = high): growing strides from the start, then halving."""
    good, bad = (start, None) if within(start) else (None, start)
    stride = gap(start)
    while bad is None:
        assert good is not None
        if good == high:
            return high
        probe = min(good + stride, high)
        good, bad = (probe, None) if within(probe) else (good, probe)
        stride *= 2
    while good is None:
        if bad == low:
            return None
        probe = max(bad - stride, low)
        good, bad = (probe, bad) if within(probe) else (None, probe)
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
    decade = math.floor(math.log10(sigma) + 1e-9)
    return decade * 9000 + round(sigma / 10.0**decade * 1000) - 1000
