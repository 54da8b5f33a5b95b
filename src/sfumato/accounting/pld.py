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

from sfumato.accounting import rounding
from sfumato.accounting.gaussian import epsilon_gaussian
from sfumato.accounting.rdp import Part
from sfumato.errors import is_from_elsewhere

MAX_BYTES = 2e9
MAX_SECONDS = 10.0
# A first attempt costs at most this; it is refined only where its own check asks for it.
_FIRST_SECONDS = 1.0

# An answer that halving the step changed by less than the first is accepted at once; by less than
# the second, when refining would cost more than _SECOND_THOUGHTS seconds. The error that is left is
# no larger than the last change.
_GOOD_CHANGE = 0.005
_LARGEST_CHANGE = 0.02
_SECOND_THOUGHTS = 2.0
_CHEAP_SECONDS = 0.2

# What dp-accounting cuts off: e^-50 of each step's mass (ten standard deviations), 1e-15 of the
# composition's.
_TRUNCATION = 10.0
_TAIL_MASS = 1e-15
_MAX_STEPS_AT_ONCE = 10_000
# Kinds of steps that are put on one grid: so many take half a minute.
MOST_KINDS = 400
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


def epsilon_pld(
    sampling_prob: float,
    noise_multiplier: float,
    num_steps: int,
    delta: float,
    images: int = 1,
    first_mu: float = 0.0,
) -> Tight:
    """Epsilon of the composed Poisson-subsampled Gaussian under add-or-remove, by PLD.

    The answer is computed at two steps of the loss grid, one twice the other. Connect-the-dots is
    pessimistic (`Doroshenko et al. (2022) <https://arxiv.org/abs/2207.04380>`_), so refining lowers
    it; an answer that rises instead is rounding noise and is rejected, and one that still falls by
    over 2 % is too coarse.

    Guarantee: where there is a number, an upper bound; the FFT's rounding is taken from delta
        first.

    Args:
        sampling_prob: q in (0, 1].
        noise_multiplier: sigma > 0.
        num_steps: T >= 1.
        delta: In (0, 1).
        images: k, how many images one unit of privacy owns, each Poisson sampled by itself (a
            mixture of Gaussians).
        first_mu: Sensitivity / noise, for one unit, of a Gaussian release without sampling that is
            composed with the steps; 0: there is none.

    Example:
        >>> round(epsilon_pld(4096 / 50_000, 10.0, 875, 1e-5).epsilon, 3)
        0.904
    """
    return epsilon_pld_together([(sampling_prob, noise_multiplier, num_steps)], delta, images, first_mu)


def epsilon_pld_together(parts: Sequence[Part], delta: float, images: int = 1, first_mu: float = 0.0) -> Tight:
    """Epsilon of several kinds of steps together, by PLD: their losses add up, in each direction by itself.

    Guarantee: as of `epsilon_pld`, in whatever order the steps are taken.

    Args:
        parts: Of each kind q, sigma and T as above; at least one. They share one grid.
    """
    for q, sigma, num_steps in parts:
        if q == 1:  # without sampling: a Gaussian
            first_mu = math.hypot(images * math.sqrt(num_steps) / sigma, first_mu)
    parts = [part for part in parts if part[0] < 1]
    if not parts:
        return Tight(epsilon_gaussian(first_mu, delta))
    if len(parts) > MOST_KINDS:
        return Tight(None, f"{len(parts)} kinds of steps are too many for PLD.")
    # The FFT's powers round by about T machine epsilons, which leaves noise in the tails. At ten
    # settings, T = 2,468 to 2 million, no tail's sum fell below zero by more than 0.02 T of them: a
    # measurement, not a proof. One T is taken off delta, and one epsilon for each further part.
    num_steps = sum(part[2] for part in parts)
    noise = _rounding(parts, first_mu)
    if noise > delta / 20:
        return Tight(
            None,
            f"delta = {rounding.delta_text(delta)} is too near the rounding error of PLD's "
            f"arithmetic over {num_steps} steps.",
        )
    cost = Cost.together(parts, images, first_mu)
    interval = cost.interval

    def at(step: float) -> float:
        return _epsilon_on_grid(parts, delta - noise, images, first_mu, step)

    try:
        coarse, fine = at(2 * interval), at(interval)
        while (
            coarse - fine > _GOOD_CHANGE * fine
            and cost.affordable(interval / 2)
            and (coarse - fine > _LARGEST_CHANGE * fine or cost.seconds(interval / 2) <= _SECOND_THOUGHTS)
        ):
            interval /= 2
            coarse, fine = fine, at(interval)
    except (ValueError, ArithmeticError, MemoryError) as error:
        if is_from_elsewhere(error):
            raise
        return Tight(None, f"PLD failed ({type(error).__name__}).")
    if not (math.isfinite(fine) and math.isfinite(coarse)):
        return Tight(None, "PLD gave no finite epsilon.")
    if fine > coarse * (1 + 1e-9):
        return Tight(None, "PLD's rounding noise shows: its epsilon rose on a finer grid.")
    if coarse - fine > _LARGEST_CHANGE * fine:
        return Tight(None, f"PLD would need a finer grid: {cost.refusal(interval / 2)}")
    return Tight(fine)


def deltas_pld(
    sampling_prob: float,
    noise_multiplier: float,
    num_steps: int,
    epsilons: Sequence[float],
    images: int = 1,
    first_mu: float = 0.0,
) -> np.ndarray | None:
    """Delta at each epsilon, by PLD under add-or-remove: upper bounds, the FFT's rounding included.

    Args:
        sampling_prob: q in (0, 1).
        epsilons: At least 0.
        images, first_mu: As in `epsilon_pld`.

    Returns:
        (len(epsilons),); None where PLD's grid would be too coarse, or it fails.
    """
    parts = [(sampling_prob, noise_multiplier, num_steps)]
    cost = Cost.together(parts, images, first_mu)
    interval = cost.interval
    while cost.affordable(interval / 2) and cost.seconds(interval / 2) <= _CHEAP_SECONDS:
        interval /= 2
    if not cost.affordable(interval):
        return None
    try:
        composed = _composed(parts, images, first_mu, interval)
        found = np.asarray(composed.get_delta_for_epsilon(list(epsilons)), dtype=np.float64)
    except (ValueError, ArithmeticError, MemoryError) as error:
        if is_from_elsewhere(error):
            raise
        return None
    if not np.isfinite(found).all():
        return None
    return np.clip(found, 0, 1) + _rounding(parts, first_mu)


def _rounding(parts: Sequence[Part], first_mu: float) -> float:
    """What the FFT's rounding may take from delta, at most."""
    return (sum(part[2] for part in parts) + len(parts) - 1 + bool(first_mu)) * sys.float_info.epsilon


def _epsilon_on_grid(parts: Sequence[Part], delta: float, images: int, first_mu: float, interval: float) -> float:
    return float(_composed(parts, images, first_mu, interval).get_epsilon_for_delta(delta))


def _composed(parts: Sequence[Part], images: int, first_mu: float, interval: float) -> Any:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # whatever overflows or is not finite is seen in the result and rejected there
        from dp_accounting.pld import privacy_loss_distribution

        composed: Any = None
        for q, sigma, num_steps in parts:
            if images == 1:
                one_step = privacy_loss_distribution.from_gaussian_mechanism(
                    sigma, sampling_prob=q, value_discretization_interval=interval
                )
            else:
                one_step = privacy_loss_distribution.from_mixture_gaussian_mechanism(
                    sigma, range(images + 1), np.exp(_log_binomial(images, q)), value_discretization_interval=interval
                )
            of_part = _compose(one_step, num_steps)
            composed = of_part if composed is None else composed.compose(of_part, _TAIL_MASS)
        if not first_mu:
            return composed
        first = privacy_loss_distribution.from_gaussian_mechanism(1 / first_mu, value_discretization_interval=interval)
        return composed.compose(first, _TAIL_MASS)


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
    def together(cls, parts: Sequence[Part], images: int = 1, first_mu: float = 0.0) -> "Cost":
        """Of all parts on one grid, as fine as the one that needs the finest."""
        costs = [cls._of(q, sigma, num_steps, images) for q, sigma, num_steps in parts]
        of_first = 2 * _TRUNCATION * first_mu  # the loss of a first release is N(mu^2 / 2, mu^2)
        cost = cls(
            min(each.interval for each in costs),
            sum(each.loss_range for each in costs) + of_first,
            sum(each.composed_range for each in costs) + of_first,
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
        loss_range = float(loss[-1] - loss[0])
        log_density = -0.5 * (x / sigma) ** 2
        composed_range = max(
            _composed_range(loss, log_density + loss, num_steps, loss_range),
            _composed_range(-loss, log_density, num_steps, loss_range),
        )
        weight = np.exp(log_density + loss)
        mean = np.average(loss, weights=weight)
        deviation = math.sqrt(np.average((loss - mean) ** 2, weights=weight))
        return cls(deviation / 10, loss_range, composed_range)

    def seconds(self, interval: float) -> float:
        """Time at this step and at twice it, about (measured on one core: 25 us per point before
        and 1.5 us after composition).
        """
        return 1.5 * (25e-6 * self.loss_range + 1.5e-6 * self.composed_range) / interval

    def bytes(self, interval: float) -> float:
        """Memory, about: Python dictionaries before, complex arrays after composition."""
        return (300 * self.loss_range + 120 * self.composed_range) / interval

    def affordable(self, interval: float) -> bool:
        return self.seconds(interval) <= MAX_SECONDS and self.bytes(interval) <= MAX_BYTES

    def refusal(self, interval: float) -> str:
        return f"PLD's grid would need about {self.bytes(interval) / 1e9:.1f} GB and {self.seconds(interval):.0f} s."


def _composed_range(loss: np.ndarray, log_density: np.ndarray, num_steps: int, loss_range: float) -> float:
    """Width of what `_compose` keeps of the sum of T losses: outside, the mass is below 1e-15, by
    Chernoff at dp-accounting's orders.
    """
    log_density = log_density - np.logaddexp.reduce(log_density)
    if num_steps <= _MAX_STEPS_AT_ONCE:
        return _chernoff_width(loss, log_density, num_steps, loss_range)
    block_range = _chernoff_width(loss, log_density, _BLOCK, loss_range)
    return _chernoff_width(loss, log_density, num_steps, block_range)


def _chernoff_width(loss: np.ndarray, log_density: np.ndarray, num_steps: int, input_range: float) -> float:
    bounds: dict[int, list[float]] = {1: [num_steps * float(loss.max())], -1: [num_steps * float(loss.min())]}
    for k in (1, 2, 3, 5, 8, 13, 20):
        for sign in (1, -1):
            order = sign * k / input_range
            log_moment = float(np.logaddexp.reduce(log_density + order * loss))
            bounds[sign].append((num_steps * log_moment + math.log(2 / _TAIL_MASS)) / order)
    return max(input_range, min(bounds[1]) - max(bounds[-1]))
