r"""What it costs to keep the best of a random number of private runs (Papernot and Steinke 2022).

Run K times, K random and never revealed, and publish only the best: that costs far less than
publishing all, and more than one. K is drawn once from a public distribution, every run has the same
budget, its configuration is drawn independently from a fixed distribution, and the score
is computed on public data, or is itself part of what the budget pays for.
"""

import dataclasses
import functools
import math

import numpy as np

from sfumato.accounting import rdp
from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError


@dataclasses.dataclass(frozen=True)
class Selection:
    """How one run is selected: the distribution of the number K of trials, public as K is not, and what their scores cost.

    Attributes:
        mean: E[K], at least 1 (above 0 for Poisson).
        shape: eta of the truncated negative binomial, above -1: 0 is the logarithmic, 1 the geometric
            distribution; infinity is Poisson, the only one where K may be 0, and then nothing is returned.
        score_noise: Standard deviation of the Gaussian noise that is added to how many private images, held out from
            training, a trial judges right: its score. None where scores look at public images alone.

    Raises:
        InputError: If a number is out of range.
    """

    mean: float
    shape: float
    score_noise: float | None = None

    def __post_init__(self) -> None:
        least = 0 if math.isinf(self.shape) else 1
        if not (math.isfinite(self.mean) and self.mean > 0 and self.mean >= least):
            raise InputError(f"the mean number of trials must be finite and at least 1, not {self.mean}.")
        if not self.shape > -1:
            raise InputError(f"the shape of the number of trials must lie above -1, not {self.shape}. 0, 1 and infinity (Poisson) are usual.")

    @functools.cached_property
    def gamma(self) -> float:
        """The truncated negative binomial's parameter in (0, 1], which gives it its mean; smaller for more trials."""
        from scipy.optimize import brentq

        if self.mean == 1:
            return 1.0

        def excess(log_gamma: float) -> float:
            return math.log(_mean(math.exp(log_gamma), self.shape)) - math.log(self.mean)

        lowest = -1.0
        while excess(lowest) < 0:
            lowest *= 2
        # Rounded down: more trials than are drawn, never fewer.
        return math.exp(brentq(excess, lowest, -1e-12, xtol=1e-13)) * (1 - 1e-9)

    def draw(self, uniform: float) -> int:
        """K at one uniform number in [0, 1), by inverting the distribution; never capped.

        The uniform number must come from a key that nobody else has.
        """
        count, probability = (0, math.exp(-self.mean)) if math.isinf(self.shape) else (1, self._of_one())
        below = probability
        while uniform >= below and probability > 0:
            probability *= self._next_over(count)
            count += 1
            below += probability
        return count

    def _of_one(self) -> float:
        gamma, shape = self.gamma, self.shape
        if gamma == 1:
            return 1.0
        if shape == 0:
            return (1 - gamma) / math.log(1 / gamma)
        return shape * (1 - gamma) / math.expm1(-shape * math.log(gamma))

    def _next_over(self, count: int) -> float:
        """P[K = count + 1] / P[K = count]."""
        if math.isinf(self.shape):
            return self.mean / (count + 1)
        return (1 - self.gamma) * (count + self.shape) / (count + 1)


def _mean(gamma: float, shape: float) -> float:
    """E[K] of the truncated negative binomial (Definition 1)."""
    if shape == 0:
        return (1 / gamma - 1) / math.log(1 / gamma)
    return shape * (1 - gamma) / (gamma * -math.expm1(shape * math.log(gamma)))


# Enough that a finer grid changes nothing that is printed.
_ORDERS = 1000


def epsilon_of_best(mechanism: Mechanism, delta: float, selection: Selection, num_orders: int = _ORDERS) -> float:
    r"""Epsilon of publishing the best of K runs of one mechanism, by RDP at real orders.

    For the truncated negative binomial (Theorem 2), at orders :math:`\lambda > 1` and any :math:`\hat\lambda \ge 1`,

    .. math:: \varepsilon'(\lambda) = \varepsilon(\lambda) + (1 + \eta) \Big( (1 - \tfrac1{\hat\lambda}) \varepsilon(\hat\lambda)
        + \frac{\ln(1/\gamma)}{\hat\lambda} \Big) + \frac{\ln E[K]}{\lambda - 1};

    for Poisson (Theorem 6), with :math:`e^{\hat\varepsilon} = 1 + \frac1{\lambda - 1}` and :math:`\hat\delta` what the runs cost at it,
    :math:`\varepsilon'(\lambda) = \varepsilon(\lambda) + E[K]\, \hat\delta + \frac{\ln E[K]}{\lambda - 1}`.

    Guarantee: an upper bound for the published weights, which may depend on all the runs' scores; K itself, the
    other runs and the time that they took must stay secret.

    With a score noise it holds for the held-out images, too: replacing one by zero moves the number judged right by at most 1.

    Args:
        mechanism: Of each run.
        delta: In (0, 1).
        selection: How many runs there are, and how their scores are made.
        num_orders: Orders that are tried; fewer give a looser bound, sooner.

    Returns:
        Infinity where nothing bounds it (no noise).
    """
    if mechanism.num_steps == 0 and selection.score_noise is None:
        return 0.0
    if mechanism.num_steps and mechanism.noise_multiplier == 0:
        return math.inf
    q, sigma, steps = mechanism.sampling_prob, mechanism.noise_multiplier, mechanism.num_steps
    # Without steps the score is all there is: a Gaussian mechanism of its own, as a step at q = 1.
    highest = _largest_order(q, sigma, delta) if steps else _largest_order(1.0, selection.score_noise or 0.0, delta)
    orders = 1 + np.exp(np.linspace(math.log(1e-3), math.log(highest), num_orders))
    moments = np.array([steps * rdp.log_moment(q, sigma, order) for order in orders])  # (order - 1) times RDP
    if selection.score_noise is not None:
        # An image is trained on or held out, never both; the score of the latter is a Gaussian mechanism of sensitivity 1.
        moments = np.maximum(moments, (orders - 1) * orders / (2 * selection.score_noise**2))
    divergences = moments / (orders - 1)
    if math.isinf(selection.shape):
        # Every order gives an upper bound on delta (Canonne, Kamath, Steinke 2020, Proposition 12).
        log_deltas = moments + (orders - 1) * np.log1p(-1 / orders) - np.log(orders)
        thresholds = np.log1p(1 / (orders - 1))
        hat_deltas = np.exp(np.minimum(0.0, (log_deltas[None] - (orders - 1)[None] * thresholds[:, None]).min(1)))
        more = selection.mean * hat_deltas
    else:
        log_inverse_gamma = -math.log(selection.gamma)
        more = (1 + selection.shape) * min(log_inverse_gamma, ((moments + log_inverse_gamma) / orders).min())
    selected = divergences + more + math.log(selection.mean) / (orders - 1)
    spent = selected + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(0.0, float(spent.min()))


def _largest_order(q: float, sigma: float, delta: float) -> float:
    return 2 + 4 * sigma**2 * math.log(1 / q) + 2 * sigma * math.sqrt(-2 * math.log(delta))
