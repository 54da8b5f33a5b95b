r"""What one total amount of noise can be bought with (Sander et al. 2022, Sections 3.2 and 4.3,
Figure 2, Tables 5 and 6).

At constant steps S and eta_step = q / (sqrt 2 sigma), a larger batch with as much more noise costs
compute and, while sigma is small, saves epsilon: a small sigma is *overcharged*, it pays more than
the Gaussian limit of the same total noise.
"""

import dataclasses
import math
from typing import Any

from sfumato.accounting import accountants, gaussian, rounding
from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.errors import InputError
from sfumato.json_record import finite

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


@dataclasses.dataclass(frozen=True)
class Price:
    """What a run costs besides privacy.

    Attributes:
        views: Views of each image that are differentiated; 1 without augmentation.
        throughput: Views per second of one device; None where it is not known.
        devices: How many of them share the work.
    """

    views: int = 1
    throughput: float | None = None
    devices: int = 1

    def of(self, mechanism: Mechanism) -> dict[str, float | None]:
        """Epochs, images times views, and hours."""
        processed = mechanism.batch_size * mechanism.num_steps * self.views
        device_hours = None if self.throughput is None else processed / self.throughput / 3600
        return {
            "num_epochs": mechanism.num_steps * mechanism.sampling_prob,
            "views_processed": processed,
            "hours": None if device_hours is None else device_hours / self.devices,
            "device_hours": device_hours,
        }


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

    def overcharge(batch_size: int, by_pld: bool = False) -> float:
        there = at_batch_size(mechanism, batch_size)
        return (
            gaussian.overcharge(there, delta, accountants.epsilon(there, delta, "pld").epsilon)
            if by_pld
            else overcharge_estimate(there, delta)
        )

    low, high = 0, mechanism.num_examples
    if not overcharge(high) < target:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if overcharge(middle) < target else (middle, high)
    batch_size = high
    for _ in range(_REFINEMENTS):
        found = overcharge(batch_size, by_pld=True)
        if not math.isfinite(found):
            return None
        if (1 - 2 * _NEAR) * target < found < target or (found < target and batch_size == 1):
            return batch_size
        # Overcharge falls as 1 / sigma^2, and sigma grows with the batch; by PLD it may be 0 and
        # less.
        batch_size = math.ceil(batch_size * math.sqrt(max(found / ((1 - _NEAR) * target), _STRIDE**-2)))
        if batch_size > mechanism.num_examples:
            return None
    return batch_size if overcharge(batch_size, by_pld=True) < target else None


def at_batch_size(mechanism: Mechanism, batch_size: int) -> Mechanism:
    """The same steps and eta at another batch size: sigma follows."""
    return mechanism.replace(
        batch_size=batch_size, noise_multiplier=mechanism.noise_multiplier * batch_size / mechanism.batch_size
    )


@dataclasses.dataclass(frozen=True)
class Advice:
    """Which way to go from a run: the batches that are not overcharged, or half the compute where
    sigma is ample (None elsewhere).
    """

    batch_size_overcharge_10_percent: int | None
    batch_size_overcharge_1_percent: int | None
    half_batch_costs: float | None


def advice(mechanism: Mechanism, delta: float) -> Advice:
    """What a run with noise may do at the same total amount of it."""
    costs = None
    if mechanism.noise_multiplier > _ENOUGH and mechanism.batch_size >= 2:
        half = overcharge_estimate(at_batch_size(mechanism, mechanism.batch_size // 2), delta)
        costs = (1 + half) / (1 + overcharge_estimate(mechanism, delta)) - 1
    ten, one = (batch_size_for_overcharge(mechanism, delta, share) for share in (0.10, 0.01))
    return Advice(ten, one, costs)


def table(
    mechanism: Mechanism,
    delta: float,
    accountant: Accountant = "pld",
    price: Price = Price(),
    learning_rate: float | None = None,
) -> list[dict[str, Any]]:
    """Runs of one total amount of noise: batch against noise at constant steps, and batch against
    steps at constant noise.

    At constant sigma, B ~ 1 / sqrt S and the learning rate ~ 1 / S (Section 4.3).

    Args:
        learning_rate: Of the run itself; None leaves the rates out.
    """
    rows = []
    for factor in _BATCHES:
        batch_size = round(mechanism.batch_size * factor)
        if 1 <= batch_size <= mechanism.num_examples:
            rows.append(("steps constant", at_batch_size(mechanism, batch_size), 1.0))
    for factor in _STEPS:
        batch_size, steps = round(mechanism.batch_size / math.sqrt(factor)), round(mechanism.num_steps * factor)
        if 1 <= batch_size <= mechanism.num_examples and steps >= 1:
            rows.append(("sigma constant", mechanism.replace(batch_size=batch_size, num_steps=steps), 1 / factor))
    return [
        {
            "kind": kind,
            "batch_size": run.batch_size,
            "noise_multiplier": run.noise_multiplier,
            "num_steps": run.num_steps,
            "learning_rate": None if learning_rate is None else learning_rate * rate,
            "snr": gaussian.snr(run),
            "epsilon": finite(accountants.epsilon(run, delta, accountant).epsilon),
            **price.of(run),
        }
        for kind, run, rate in rows
    ]


def with_more_data(mechanism: Mechanism, delta: float, factor: float, accountant: Accountant = "pld") -> dict[str, Any]:
    """What factor times as many images buy at the same batch, sigma and steps (Tables 5 and 6): q,
    eta and delta fall by it.

    Raises:
        InputError: If the factor leaves fewer images than a batch, or is out of range.
    """
    if not 1e-12 <= factor <= 1e12:
        raise InputError(f"--more-data must lie between 1e-12 and 1e12, not {factor}: how many times as many images.")
    num_examples, delta = round(mechanism.num_examples * factor), delta / factor
    if not 1e-100 <= delta < 1 or num_examples < mechanism.batch_size:
        raise InputError(
            f"{factor:g} times as many images are {num_examples} at delta {rounding.delta_text(delta)}; delta lies in "
            f"[1e-100, 1), and the batch of {mechanism.batch_size} is of them. Choose a factor nearer to 1."
        )
    more = mechanism.replace(num_examples=num_examples)
    return {
        "num_examples": num_examples,
        "delta": delta,
        "sampling_prob": more.sampling_prob,
        "snr": gaussian.snr(more),
        "epsilon": finite(accountants.epsilon(more, delta, accountant).epsilon),
        "epsilon_tan": None if more.images_per_unit > 1 else finite(gaussian.epsilon_tan(more, delta)),
    }
