"""Epsilon from the privacy loss distribution: dp-accounting's pessimistic grid, its step chosen and
its answer checked here.
"""

import dataclasses
import functools
import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from sfumato.accounting import formats
from sfumato.accounting.gaussian import epsilon_gaussian, mu_of
from sfumato.accounting.mechanism import Part

MAX_BYTES = 2e9
MAX_SECONDS = 10.0
# A first attempt costs at most this; it is refined only where its own check asks for it.
_FIRST_SECONDS = 1.0

# The step is halved until that changes the answer by less than the first, or becomes too slow; then
# less than the second is accepted. The error that is left is no larger than the last change.
_GOOD_CHANGE = 0.005
_LARGEST_CHANGE = 0.02

# What dp-accounting cuts off: e^-50 of each step's mass (ten standard deviations), 1e-15 of the
# composition's.
_TRUNCATION = 10.0
_TAIL_MASS = 1e-15
_WIDEST_INTERVAL = 100.0  # exp of several times that overflows
_MAX_STEPS_AT_ONCE = 10_000
# Kinds of steps that are put on one grid: so many take half a minute.
MOST_KINDS = 400
# Of one person: mixtures of more Gaussians take memory without bound.
MOST_IMAGES = 10_000
_BLOCK = 1_000


@dataclasses.dataclass(frozen=True)
class Tight:
    """An epsilon by PLD, or the reason why there is none.

    Attributes:
        epsilon: An upper bound within 2 % of the truth; None where that cannot be shown.
        reason: Empty when epsilon is a number; else one sentence.
    """

    epsilon: float | None
    reason: str = ""


def epsilon_pld(parts: Sequence[Part], delta: float, images: int = 1) -> Tight:
    """Epsilon of steps of the Poisson-subsampled Gaussian under add-or-remove, by PLD: losses add up, in each direction
    by itself.

    The answer is computed at two steps of the loss grid, one twice the other. Connect-the-dots is
    pessimistic (`Doroshenko et al. (2022) <https://arxiv.org/abs/2207.04380>`_), so refining lowers
    it; an answer that rises instead is rounding noise and is rejected, and one that still falls by
    over 2 % is too coarse.

    Guarantee: where there is a number, an upper bound, in whatever order the steps are taken; the FFT's rounding is
        taken from delta first.

    Args:
        parts: Of each kind of steps q in (0, 1], sigma > 0 and T >= 1; at least one. They share one grid; those with
            q = 1 are one Gaussian.
        delta: In (0, 1).
        images: k, how many images one unit of privacy owns, each Poisson sampled by itself (a
            mixture of Gaussians).

    Example:
        >>> round(epsilon_pld([(4096 / 50_000, 10.0, 875)], 1e-5).epsilon, 3)
        0.904
    """
    if all(q == 1 for q, _, _ in parts):
        return Tight(epsilon_gaussian(mu_of(parts, images), delta))
    if len(parts) > MOST_KINDS:
        return Tight(None, f"{len(parts)} kinds of steps are too many for PLD.")
    if images > MOST_IMAGES:
        return Tight(None, f"{images} images of one person are too many.")
    # The FFT's powers round by about T machine epsilons, which leaves noise in the tails. At ten
    # settings, T = 2,468 to 2 million, no tail's sum fell below zero by more than 0.02 T of them: a
    # measurement, not a proof. One T is taken off delta, and one epsilon for each further part.
    noise = _rounding(parts)
    if noise > delta / 20:
        return Tight(
            None,
            f"delta = {formats.delta_text(delta)} is too near the rounding error of PLD's "
            f"arithmetic over {sum(part[2] for part in parts)} steps.",
        )
    cost = Cost.together(parts, images)
    interval = cost.interval

    if not cost.affordable(interval):
        return Tight(None, cost.refusal(interval))

    def at(step: float) -> float:
        return _epsilon_on_grid(parts, delta - noise, images, step)

    coarse, fine = at(2 * interval), at(interval)
    while coarse - fine > _GOOD_CHANGE * fine and cost.affordable(interval / 2):
        interval /= 2
        coarse, fine = fine, at(interval)
    if not (math.isfinite(fine) and math.isfinite(coarse)):
        return Tight(None, "PLD gave no finite epsilon.")
    if fine > coarse * (1 + 1e-9):
        return Tight(None, "PLD's rounding noise shows: its epsilon rose on a finer grid.")
    if coarse - fine > _LARGEST_CHANGE * fine:
        return Tight(None, cost.refusal(interval / 2))
    return Tight(fine)


def deltas_pld(parts: Sequence[Part], epsilons: Sequence[float], images: int = 1) -> np.ndarray | None:
    """Delta at each epsilon, by PLD under add-or-remove: upper bounds, the FFT's rounding included.

    Args:
        parts, images: As in `epsilon_pld`, not all of q = 1.
        epsilons: At least 0.

    Returns:
        (len(epsilons),); None where PLD's grid would be too coarse, or it fails.
    """
    if images > MOST_IMAGES:
        return None
    cost = Cost.together(parts, images)
    if not cost.affordable(cost.interval):
        return None
    composed = _composed(parts, images, cost.interval)
    found = np.asarray(composed.get_delta_for_epsilon(list(epsilons)), dtype=np.float64)
    return np.minimum(found.clip(0) + _rounding(parts), 1) if np.isfinite(found).all() else None


def _rounding(parts: Sequence[Part]) -> float:
    """What the FFT's rounding may take from delta, at most."""
    sampled, gaussian = _split(parts)
    return (sum(part[2] for part in sampled) + len(sampled) - 1 + bool(gaussian)) * sys.float_info.epsilon


def _split(parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """Those that are sampled, and those of all examples."""
    return [part for part in parts if part[0] < 1], [part for part in parts if part[0] == 1]


def _epsilon_on_grid(parts: Sequence[Part], delta: float, images: int, interval: float) -> float:
    return float(_composed(parts, images, interval).get_epsilon_for_delta(delta))


def _composed(parts: Sequence[Part], images: int, interval: float) -> Any:
    sampled, gaussian = _split(parts)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # whatever overflows or is not finite is seen in the result and rejected there
        from dp_accounting.pld import privacy_loss_distribution as of

        losses = [_compose(_one_step(q, sigma, images, interval), num_steps) for q, sigma, num_steps in sampled]
        if gaussian:
            sigma = 1 / mu_of(gaussian, images)
            losses.append(of.from_gaussian_mechanism(sigma, value_discretization_interval=interval))
        return functools.reduce(lambda one, other: one.compose(other, _TAIL_MASS), losses)


@functools.lru_cache(maxsize=2)  # on two grids, for each of the numbers of steps that one run asks for
def _one_step(q: float, sigma: float, images: int, interval: float) -> Any:
    if images > 1:
        from sfumato.accounting.mixture import from_mixture

        return from_mixture(sigma, np.exp(_log_binomial(images, q)), interval)
    from dp_accounting.pld import privacy_loss_distribution as of

    return of.from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=interval)


def _compose(one_step, num_steps: int):
    """The sum of T losses. Past 10,000 steps by blocks of 1,000.

    dp-accounting first forms size^T, an integer of millions of digits, and its Chernoff orders suit
    at most some 28,000 terms: blocks avoid the first and keep the second tight.
    """
    if num_steps <= _MAX_STEPS_AT_ONCE:
        return one_step.self_compose(num_steps, _TAIL_MASS)
    blocks, rest = divmod(num_steps, _BLOCK)
    composed = one_step.self_compose(_BLOCK, _TAIL_MASS).self_compose(blocks, _TAIL_MASS)
    return composed.compose(one_step.self_compose(rest, _TAIL_MASS), _TAIL_MASS) if rest else composed


def _log_binomial(images: int, q: float) -> np.ndarray:
    """log P(i of the images are drawn), i = 0..k."""
    from scipy.special import gammaln

    i = np.arange(images + 1)
    return (
        gammaln(images + 1) - gammaln(i + 1) - gammaln(images - i + 1) + i * math.log(q) + (images - i) * math.log1p(-q)
    )


@dataclasses.dataclass(frozen=True)
class Cost:
    """What PLD would cost at a given step of its loss grid, known before anything is computed.

    Attributes:
        interval: The step to start from: a tenth of one step's standard deviation of the loss,
            about (q / sigma) / 10, where the relative error is 0.08 / 100; larger where that would
            be slow.
        loss_range: Width of one step's loss, in nats.
        composed_range: Width of the composed loss that dp-accounting keeps, by the Chernoff bounds
            that it uses.
    """

    interval: float
    loss_range: float
    composed_range: float

    @classmethod
    def together(cls, parts: Sequence[Part], images: int = 1) -> "Cost":
        """Of all parts on one grid, as fine as the one that needs the finest; not all of q = 1."""
        sampled, gaussian = _split(parts)
        costs = [cls._of(q, sigma, num_steps, images) for q, sigma, num_steps in sampled]
        of_gaussian = 2 * _TRUNCATION * mu_of(gaussian, images)  # whose loss is N(mu^2 / 2, mu^2)
        cost = cls(
            min(each.interval for each in costs),
            sum(each.loss_range for each in costs) + of_gaussian,
            sum(each.composed_range for each in costs) + of_gaussian,
        )
        return dataclasses.replace(
            cost, interval=max(cost.interval, cost.interval * cost.seconds(cost.interval) / _FIRST_SECONDS)
        )

    @classmethod
    @functools.lru_cache(maxsize=256)
    def _of(cls, q: float, sigma: float, num_steps: int, images: int) -> "Cost":
        x = np.linspace(-_TRUNCATION * sigma, _TRUNCATION * sigma + images, 2001)
        i = np.arange(images + 1)[:, None]
        # log mu(x) / mu_0(x), mu a binomial mixture of N(i, sigma^2)
        loss = np.logaddexp.reduce(_log_binomial(images, q)[:, None] + (i * x - i**2 / 2) / sigma**2, axis=0)
        log_density = -0.5 * (x / sigma) ** 2
        with_unit, without = np.exp(log_density + loss), np.exp(log_density)
        mean = np.average(loss, weights=with_unit)
        deviation = math.sqrt(np.average((loss - mean) ** 2, weights=with_unit))
        composed_range = max(_composed_range(loss, with_unit, num_steps), _composed_range(-loss, without, num_steps))
        return cls(deviation / 10, float(np.ptp(loss)), composed_range)

    def seconds(self, interval: float) -> float:
        """Time at this step and at twice it, about (measured on one core: 25 us per point before
        and 1.5 us after composition).
        """
        return 1.5 * (25e-6 * self.loss_range + 1.5e-6 * self.composed_range) / interval

    def bytes(self, interval: float) -> float:
        """Memory, about: Python dictionaries before, complex arrays after composition."""
        return (300 * self.loss_range + 120 * self.composed_range) / interval

    def affordable(self, interval: float) -> bool:
        """Whether time and memory suffice, and the grid is no wider than the library computes with."""
        return (
            self.seconds(interval) <= MAX_SECONDS and self.bytes(interval) <= MAX_BYTES and interval <= _WIDEST_INTERVAL
        )

    def refusal(self, interval: float) -> str:
        if interval > _WIDEST_INTERVAL:
            return "one step alone spends an epsilon beyond PLD's grid."
        return f"PLD's grid would need about {self.bytes(interval) / 1e9:.1f} GB and {self.seconds(interval):.0f} s."


def _composed_range(loss: np.ndarray, weight: np.ndarray, num_steps: int) -> float:
    """Width of what `_compose` keeps of the sum of T losses: outside, the mass is below 1e-15, by
    Chernoff at some of dp-accounting's orders.
    """
    from dp_accounting.pld.common import compute_self_convolve_bounds

    mass, edges = np.histogram(loss, 2000, weights=weight / weight.sum())
    width, size = float(edges[1] - edges[0]), len(mass)

    def after(steps: int, size: int) -> int:
        orders = np.array([1, 2, 3, 5, 8, 13, 20]) / size
        with np.errstate(all="ignore"):  # orders at which it overflows are left out there
            low, high = compute_self_convolve_bounds(mass.tolist(), steps, _TAIL_MASS, [*orders, *-orders])
        return max(size, high - low)

    if num_steps > _MAX_STEPS_AT_ONCE:
        size = after(_BLOCK, size)
    return after(num_steps, size) * width
