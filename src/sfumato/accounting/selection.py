r"""What it costs to keep the best of a random number of private runs (Papernot and Steinke 2022).

Run K times, K random and never revealed, and publish only the best: that costs far less than
publishing all, and more than one. K is drawn once from a public distribution, every run has the
same budget, its configuration is drawn independently from a fixed distribution, and the score is
computed on public data, or is itself part of what the budget pays for.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np

from sfumato.accounting import rdp
from sfumato.accounting.mechanism import LEAST_NOISE, Mechanism
from sfumato.errors import InputError


@dataclasses.dataclass(frozen=True)
class Selection:
    """How one run is selected: the distribution of the number K of trials, public as K is not, and
    what their scores cost.

    Attributes:
        mean: E[K], at least 1.
        shape: eta of the truncated negative binomial, above -1: 0 is the logarithmic, 1 the
            geometric distribution.
        score_noise: Standard deviation of the Gaussian noise that is added to how many private
            images, held out from training, a trial judges right: its score. None where scores look
            at public images alone.

    Raises:
        InputError: If a number is out of range.
    """

    mean: float
    shape: float
    score_noise: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and self.mean >= 1):
            raise InputError(f"the mean number of trials must be finite and at least 1, not {self.mean}.")
        if not -1 < self.shape <= _LARGEST_SHAPE:
            raise InputError(
                f"the shape of the number of trials must lie above -1 and be at most {_LARGEST_SHAPE:g}, not "
                f"{self.shape:g}. 0 and 1 are usual."
            )
        if _log_mean(_LEAST_LOG_GAMMA, self.shape) < math.log(self.mean):
            raise InputError(
                f"the number of trials cannot have mean {self.mean:g} and shape {self.shape:g}: "
                "it would be 1 mostly, and now and then more than 1e15, which nobody can make. "
                "Choose a shape nearer to 0, or fewer trials."
            )
        if self.score_noise is not None and not self.score_noise > 0:
            raise InputError(
                f"the noise of scores must be above 0, not {self.score_noise}: without it nobody pays for them."
            )

    @functools.cached_property
    def log_gamma(self) -> float:
        """Log of the truncated negative binomial's parameter, which gives it its mean: at most 0,
        lower for more trials.
        """
        from scipy.optimize import brentq

        if self.mean == 1:
            return 0.0

        def excess(log_minus: float) -> float:
            return _log_mean(-math.exp(log_minus), self.shape) - math.log(self.mean)

        return -math.exp(brentq(excess, math.log(1e-30), math.log(-_LEAST_LOG_GAMMA), xtol=1e-13))

    @property
    def log_mean(self) -> float:
        """Log of the mean that the number of trials has; of what was asked for, up to rounding."""
        return _log_mean(self.log_gamma, self.shape)

    def draw(self, uniform: float) -> int:
        """K at one uniform number in [0, 1), by inverting the distribution; never capped.

        The uniform number must come from a key that nobody else has.
        """
        # P[K = 1] = eta (1 - gamma) / (gamma^-eta - 1)
        count, log_probability = 1, _log_relative(self.log_gamma) - _log_relative(-self.shape * self.log_gamma)
        below = math.exp(log_probability)
        while uniform >= below:
            # P[K = count + 1] / P[K = count]
            ratio = -math.expm1(self.log_gamma) * (count + self.shape) / (count + 1)
            if ratio < 1 and log_probability < _NOTHING:  # far in the tail: what is left adds nothing
                break
            log_probability += math.log(ratio)
            count += 1
            below += math.exp(log_probability)
        return count


# Beyond, the negative binomial is Poisson's, of which Theorem 6 would tell the price.
_LARGEST_SHAPE = 1e6
# Below it, a share of the mean comes from numbers of trials that nobody can make, nor a uniform
# number of 53 bits draw.
_LEAST_LOG_GAMMA = -34.0
# exp of less is 0.
_NOTHING = -745.0


def _log_mean(log_gamma: float, shape: float) -> float:
    """log E[K] of the truncated negative binomial (Definition 1), eta (1 - gamma) / (gamma (1 -
    gamma^eta)), any eta > -1.
    """
    return _log_relative(log_gamma) - _log_relative(shape * log_gamma) - log_gamma


def _log_relative(x: float) -> float:
    """log((e^x - 1) / x), 0 at 0; neither overflows nor cancels."""
    if abs(x) < 1e-3:
        return x / 2 + x**2 / 24
    return max(x, 0.0) + math.log(-math.expm1(-abs(x)) / abs(x))


# Orders to begin with, and those between the neighbours of the best two, so often: epsilon is then
# within 1e-6 of its least.
_ORDERS, _FINER, _TIMES = 200, 18, 3


@functools.lru_cache(maxsize=4096)
def epsilon_of_best(mechanism: Mechanism, delta: float, selection: Selection) -> float:
    r"""Epsilon of publishing the best of K runs of one mechanism, by RDP at real orders.

    For the truncated negative binomial (Theorem 2), at orders :math:`\lambda > 1` and any
    :math:`\hat\lambda \ge 1`,

    .. math:: \varepsilon'(\lambda) = \varepsilon(\lambda)
        + (1 + \eta) \Big( (1 - \tfrac1{\hat\lambda}) \varepsilon(\hat\lambda)
        + \frac{\ln(1/\gamma)}{\hat\lambda} \Big) + \frac{\ln E[K]}{\lambda - 1}.

    Guarantee: an upper bound for the published weights, which may depend on all the runs' scores; K
    itself, the other runs and the time that they took must stay secret.

    With a score noise it holds for the held-out images, too: replacing one by zero moves the number
    judged right by at most 1.

    Args:
        mechanism: Of each run.
        delta: In (0, 1).
        selection: How many runs there are, and how their scores are made.

    Returns:
        Infinity where there is no noise, or next to none.
    """
    if mechanism.num_steps == 0 and selection.score_noise is None:
        return 0.0
    q, sigma, steps = mechanism.sampling_prob, mechanism.noise_multiplier, mechanism.num_steps
    if (steps and sigma < LEAST_NOISE) or (selection.score_noise is not None and selection.score_noise < LEAST_NOISE):
        return math.inf
    # Without steps the score is all there is: a Gaussian mechanism of its own, as a step at q = 1.
    sampled = (q, sigma) if steps else (1.0, selection.score_noise or 0.0)
    # Every order gives an upper bound: they are tried evenly in log(order - 1), then more of them
    # around the best.
    price = max(selection.log_mean - math.log(delta), -selection.log_gamma)
    logs = np.linspace(math.log(1e-3), math.log(rdp.largest_order(*sampled, price)), _ORDERS)

    @functools.cache
    def moment(order: float) -> float:
        """(order - 1) times the Renyi divergence of a run."""
        trained = steps * rdp.log_moment(q, sigma, order) if steps else 0.0
        if selection.score_noise is None:
            return trained
        # An image is trained on or held out, never both; the score of the latter is a Gaussian mechanism of
        # sensitivity 1.
        return max(trained, (order - 1) * order / (2 * selection.score_noise**2))

    for _ in range(_TIMES):
        epsilons, helping = _epsilons(logs, moment, delta, selection)
        around = {int(epsilons.argmin()), helping}
        finer = [np.linspace(logs[max(i - 1, 0)], logs[min(i + 1, len(logs) - 1)], _FINER) for i in around]
        logs = np.unique(np.concatenate([logs, *finer]))
    return max(0.0, float(_epsilons(logs, moment, delta, selection)[0].min()))


def _epsilons(
    logs: np.ndarray, moment: Callable[[float], float], delta: float, selection: Selection
) -> tuple[np.ndarray, int]:
    """Epsilon at each log(order - 1), and at which of them the price of the others is least: the hat lambda."""
    orders = 1 + np.exp(logs)
    moments = np.array([moment(order) for order in orders.tolist()])
    each = (moments - selection.log_gamma) / orders
    helping = int(each.argmin())
    more = (1 + selection.shape) * min(-selection.log_gamma, each[helping])
    selected = moments / (orders - 1) + more + selection.log_mean / (orders - 1)
    return selected + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1), helping
