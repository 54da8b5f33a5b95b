r"""What one total amount of noise can be bought with (Sander et al. 2022, Sections 3.2 and 4.3,
Figure 2, Tables 5 and 6).

At constant steps S and eta_step = q / (sqrt 2 sigma), a larger batch with as much more noise costs
compute and, while sigma is small, saves epsilon: a small sigma is *overcharged*, it pays more than
the Gaussian limit of the same total noise.
"""

import bisect
import math
from typing import Any

from sfumato.accounting import accountants, gaussian
from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.errors import InputError
from sfumato.json_record import finite, pick
from sfumato.scaling.cost import Price

# Batch sizes of the table, as multiples, at constant steps; and steps, as multiples, at constant
# sigma.
_BATCHES = (0.25, 0.5, 1.0, 2.0, 4.0)
_STEPS = (0.25, 0.5, 2.0, 4.0)
# A larger sigma buys hardly any epsilon.
_ENOUGH = 4.0
# A batch is found to this share of the overcharge, in so many steps at most.
_NEAR, _REFINEMENTS = 0.03, 5
# and grows smaller by this factor at most at once.
_STRIDE = 4


def overcharge_estimate(mechanism: Mechanism, delta: float) -> float:
    """Overcharge with epsilon from the central limit theorem, mu = q sqrt(S (exp(1/sigma^2) - 1)):
    for planning.

    Within 3 % of PLD from sigma = 2 on; below that off by a tenth and more, either way (LOG.md). It
    starts searches and never certifies.
    """
    q, sigma, steps = mechanism.sampling_prob, mechanism.noise_multiplier, mechanism.num_steps
    exponent = sigma**-2
    if exponent > 500:
        return math.inf
    mu = q * math.sqrt(steps * math.expm1(exponent))
    limit = gaussian.epsilon_gaussian(math.sqrt(2) * gaussian.snr(mechanism), delta)
    return gaussian.epsilon_gaussian(mu, delta) / limit - 1 if limit > 0 else math.nan


def batch_size_for_overcharge(mechanism: Mechanism, delta: float, target: float) -> int | None:
    """A batch, at the same steps and eta, whose overcharge by PLD is below a fraction and near it;
    None if no batch up to N has that.
    """

    def by_pld(batch_size: int) -> float:
        there = at_batch_size(mechanism, batch_size)
        return gaussian.overcharge(there, delta, accountants.epsilon(there, delta, "pld").epsilon)

    def suffices(batch_size: int) -> bool:
        return overcharge_estimate(at_batch_size(mechanism, batch_size), delta) < target

    n = mechanism.num_examples
    if not suffices(n):
        return None
    batch_size = 1 + bisect.bisect_left(range(1, n), True, key=suffices)
    for _ in range(_REFINEMENTS):
        found = by_pld(batch_size)
        if not math.isfinite(found):
            return None
        if found < target and (found > (1 - 2 * _NEAR) * target or batch_size == 1):
            return batch_size
        # Overcharge falls as 1 / sigma^2, and sigma grows with the batch; by PLD it may be 0 and
        # less.
        batch_size = math.ceil(batch_size * math.sqrt(max(found / ((1 - _NEAR) * target), _STRIDE**-2)))
        if batch_size > n:
            return None
    return batch_size if by_pld(batch_size) < target else None


def at_batch_size(mechanism: Mechanism, batch_size: int) -> Mechanism:
    """The same steps and eta at another batch size: sigma follows."""
    return mechanism.replace(
        batch_size=batch_size, noise_multiplier=mechanism.noise_multiplier * batch_size / mechanism.batch_size
    )


def advice(mechanism: Mechanism, delta: float) -> dict[str, Any]:
    """Which way a run with noise may go at the same total amount of it: the batches that are not overcharged, and what
    half the compute costs where sigma is ample (None elsewhere). By the names of `sfumato.scaling.plan.Plan`.
    """
    costs = None
    if mechanism.noise_multiplier > _ENOUGH and mechanism.batch_size >= 2:
        half = overcharge_estimate(at_batch_size(mechanism, mechanism.batch_size // 2), delta)
        costs = (1 + half) / (1 + overcharge_estimate(mechanism, delta)) - 1
    return {
        "batch_size_overcharge_10_percent": batch_size_for_overcharge(mechanism, delta, 0.10),
        "batch_size_overcharge_1_percent": batch_size_for_overcharge(mechanism, delta, 0.01),
        "half_batch_costs": costs,
    }


def table(
    mechanism: Mechanism, delta: float, accountant: Accountant, price: Price, learning_rate: float | None
) -> list[dict[str, Any]]:
    """Runs of one total amount of noise: batch against noise at constant steps, and batch against
    steps at constant noise.

    At constant sigma, B ~ 1 / sqrt S and the learning rate ~ 1 / S (Section 4.3).

    Args:
        learning_rate: Of the run itself; None leaves the rates out.
    """
    runs = [
        ("steps constant", at_batch_size(mechanism, round(mechanism.batch_size * factor)), 1.0)
        for factor in _BATCHES
        if 1 <= round(mechanism.batch_size * factor) <= mechanism.num_examples
    ]
    for factor in _STEPS:
        batch_size, steps = round(mechanism.batch_size / math.sqrt(factor)), round(mechanism.num_steps * factor)
        if 1 <= batch_size <= mechanism.num_examples and steps >= 1:
            runs.append(("sigma constant", mechanism.replace(batch_size=batch_size, num_steps=steps), 1 / factor))
    return [
        {
            "kind": kind,
            **pick(run, "batch_size", "noise_multiplier", "num_steps"),
            "learning_rate": None if learning_rate is None else learning_rate * rate,
            "snr": gaussian.snr(run),
            "epsilon": finite(accountants.epsilon(run, delta, accountant).epsilon),
            **price.of(run),
        }
        for kind, run, rate in runs
    ]


def with_more_data(mechanism: Mechanism, delta: float, factor: float, accountant: Accountant = "pld") -> dict[str, Any]:
    """What factor times as many images buy at the same batch, sigma and steps (Tables 5 and 6): q,
    eta and delta fall by it.

    Raises:
        InputError: If the factor leaves fewer images than a batch, or is out of range.
    """
    num_examples = round(mechanism.num_examples * factor) if 1e-12 <= factor <= 1e12 else 0
    if num_examples < mechanism.batch_size or not 1e-100 <= delta / factor < 1:
        raise InputError(
            f"--more-data {factor:g}: so many times as many images hold no batch of {mechanism.batch_size}, or put "
            "delta out of [1e-100, 1). Choose a factor nearer to 1."
        )
    delta /= factor
    more = mechanism.replace(num_examples=num_examples)
    return {
        "delta": delta,
        **pick(more, "num_examples", "sampling_prob"),
        "snr": gaussian.snr(more),
        "epsilon": finite(accountants.epsilon(more, delta, accountant).epsilon),
        "epsilon_tan": None if more.images_per_unit > 1 else finite(gaussian.epsilon_tan(more, delta)),
    }
