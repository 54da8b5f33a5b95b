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
from sfumato.accounting.gaussian import mu_gaussian
from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.accounting.selection import Selection
from sfumato.errors import InputError

SMALLEST_SIGMA, LARGEST_SIGMA = 0.05, 1e6
MOST_STEPS = 10**9
_EXACT_STEPS = 20_000
_SECANTS = 6


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
    beside: dict[str, Any] = {"images_per_unit": images_per_unit, "first_release_noise": first_release_noise}
    mechanism = Mechanism(num_examples, batch_size, 1.0, num_steps, **beside)
    found = _largest(
        lambda sigma: mechanism.replace(noise_multiplier=sigma),
        low=-_rank(LARGEST_SIGMA),
        high=-_rank(SMALLEST_SIGMA),
        budget=(target_epsilon, delta, accountant, selection),
        power=-1.0,
        value=lambda n: _sigma(-n),
        place=lambda sigma: -_rank(sigma),
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
    _check_noise(noise_multiplier)
    beside: dict[str, Any] = {"images_per_unit": images_per_unit, "first_release_noise": first_release_noise}
    mechanism = Mechanism(num_examples, batch_size, noise_multiplier, 1, **beside)
    found = _largest(
        lambda n: mechanism.replace(num_steps=n),
        low=1,
        high=MOST_STEPS,
        budget=(target_epsilon, delta, accountant, None),
        power=0.5,
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
    _check_noise(noise_multiplier)
    beside: dict[str, Any] = {"images_per_unit": images_per_unit, "first_release_noise": first_release_noise}
    mechanism = Mechanism(num_examples, 1, noise_multiplier, num_steps, **beside)
    found = _largest(
        lambda n: mechanism.replace(batch_size=n),
        low=1,
        high=num_examples,
        budget=(target_epsilon, delta, accountant, None),
        power=1.0,
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


def _check_noise(noise_multiplier: float) -> None:
    if not noise_multiplier > 0:
        raise InputError(
            f"noise_multiplier {noise_multiplier:g} has no finite epsilon, so it cannot meet a "
            "target. Choose a positive one."
        )


def _largest(
    mechanism_of: Callable[[Any], Mechanism],
    *,
    low: int,
    high: int,
    budget: tuple[float, float, Accountant, Selection | None],
    power: float,
    value: Callable[[int], float] = lambda n: n,
    place: Callable[[float], int] = int,
    gap: Callable[[int], int] = lambda n: 1,
) -> int | None:
    """The largest n in [low, high] whose mechanism is within the budget; None if there is none. The mechanism spends
    more as n grows.

    In the Gaussian limit mu = sqrt(T) q / sigma is spent, a power of the number that is solved for. RDP takes
    milliseconds, PLD much longer. So a step along that power finds a first number, secants by RDP one near its answer,
    and few by the accountant that is asked one near the answer, where the search for it begins.
    """
    target, delta, accountant, selection = budget
    if not 0 < target < math.inf:
        raise InputError(
            f"epsilon must be positive and finite, not {target}: 0 would mean to learn "
            "nothing. 1 is strong, 3 usual, 8 weak."
        )
    if not 0 < delta < 1:
        raise InputError(f"delta must lie between 0 and 1, not {delta}. A power of ten below 1/N is usual.")

    def log_mu(spent: float) -> float:
        return math.log(mu_gaussian(min(spent, 1e100), delta))  # beyond, squares overflow

    goal = log_mu(target)

    def spent(n: int, by: Accountant) -> float:
        return epsilon(mechanism_of(value(n)), delta, by, selection).epsilon

    def toward(log_value: float) -> int:
        return min(max(place(math.exp(min(max(log_value, -700.0), 700.0))), low), high)

    first = mechanism_of(value(low))
    mu = first.most_images * first.sampling_prob * math.sqrt(max(first.num_steps, 1)) / first.noise_multiplier
    guess, slope = toward(math.log(value(low)) + (goal - math.log(mu)) / power), power
    has_rdp = accountant == "pld" and selection is None and first.most_images == 1
    for by in ("rdp", accountant) if has_rdp else (accountant,):
        before: tuple[float, float] | None = None
        for _ in range(2 if has_rdp and by == accountant else _SECANTS):
            found = spent(guess, by)
            if not 0 < found < math.inf:
                break
            here, reached = math.log(value(guess)), log_mu(found)
            if before is not None and (reached - before[1]) * (here - before[0]) * power > 0:
                slope = (reached - before[1]) / (here - before[0])
            before, following = (here, reached), toward(here + (goal - reached) / slope)
            if abs(following - guess) <= gap(guess):
                break
            guess = following
    answer = _search(lambda n: spent(n, accountant) <= target, low, high, guess, gap)
    assert answer is None or spent(answer, accountant) <= target
    return answer


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
