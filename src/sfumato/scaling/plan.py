"""Three of batch size, steps, noise and epsilon give the fourth."""

from typing import Any

from sfumato import config
from sfumato.accounting import accountants, gaussian
from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.errors import InputError
from sfumato.json_record import Record, finite, pick
from sfumato.planning.advice import warnings_of_delta
from sfumato.planning.claims import unit_in_words
from sfumato.planning.defaults import DEFAULT_STEPS, default_batch_size, delta_default
from sfumato.planning.solve import Budget, solve
from sfumato.scaling import equal_noise as trade

# Images and steps: nobody has more, and beyond them rounding is no longer small beside q.
MOST = 10**12
_KEYS = {
    "--batch-size": "training.batch_size",
    "--num-steps": "training.num_steps",
    "--noise-multiplier": "privacy.noise_multiplier",
    "--epsilon": "privacy.target_epsilon",
}


class Plan(Record):
    """All four, and what they mean.

    Attributes:
        epsilon: By `accountant`; None: there is no finite one. Beside it by each.
        epsilon_tan: A guide, never a guarantee; None for a person.
        epsilon_image: Of one image alone, where the unit is a person.
        snr_per_step, snr: TAN's eta_step and eta.
        overcharge: What epsilon costs over the Gaussian limit of the same total noise; None for a person.
        batch_size_overcharge_10_percent, batch_size_overcharge_1_percent: From which batch on less is overcharged, at
            the same steps and eta; None: from none.
        half_batch_costs: The share of epsilon that half the compute would cost; None where noise is not ample.
    """

    epsilon: float | None
    epsilon_rdp: float | None
    epsilon_pld: float | None
    epsilon_tan: float | None = None
    epsilon_image: float | None = None
    unit: str
    images_per_person: int | None
    delta: float
    accountant: Accountant
    noise_multiplier: float
    batch_size: int
    num_examples: int
    sampling_prob: float
    num_steps: int
    num_epochs: float
    snr_per_step: float | None
    snr: float | None
    overcharge: float | None = None
    batch_size_overcharge_10_percent: int | None = None
    batch_size_overcharge_1_percent: int | None = None
    half_batch_costs: float | None = None
    warnings: list[str]

    @property
    def mechanism(self) -> Mechanism:
        """The public numbers of such a run."""
        numbers = pick(self, "num_examples", "batch_size", "noise_multiplier", "num_steps")
        return Mechanism(**numbers, images_per_unit=self.images_per_person or 1)


def plan(
    num_examples: int,
    delta: float | None = None,
    accountant: Accountant = "pld",
    *,
    batch_size: int | None = None,
    num_steps: int | None = None,
    noise_multiplier: float | None = None,
    epsilon: float | None = None,
    images_per_person: int | None = None,
) -> Plan:
    """Solves for the one of batch size, steps, noise and epsilon that is left out. Beside an epsilon
    without noise, batch and steps are by default those that training takes.

    Args:
        num_examples: N.
        delta: In (0, 1); None: the largest power of ten up to 1/(10 N).
        accountant: "pld" or "rdp".
        batch_size: The expected batch qN.
        num_steps: T.
        noise_multiplier: sigma.
        epsilon: The target, which is never exceeded.
        images_per_person: Every epsilon is for all of a person's images, so many at most; None: for
            one image.

    Raises:
        InputError: If not exactly one is left out, or the budget is impossible.
    """
    if not 1 <= num_examples <= MOST:
        raise InputError(f"--num-examples must lie between 1 and {MOST:g}, not {num_examples}.")
    if epsilon is not None and noise_multiplier is None:
        batch_size = default_batch_size(num_examples) if batch_size is None else batch_size
        num_steps = DEFAULT_STEPS if num_steps is None else num_steps
    delta = delta_default(num_examples) if delta is None else delta
    sizes = batch_size, num_steps, noise_multiplier
    budget = Budget(num_examples, delta, epsilon, *sizes, accountant, images_per_unit=images_per_person or 1)
    _refuse_impossible(budget, images_per_person)
    mechanism, _ = solve(budget)
    sigma, spent = mechanism.noise_multiplier, accountants.epsilon(mechanism, delta, accountant)
    by_each = pick(spent, "epsilon", "epsilon_rdp", "epsilon_pld")
    facts: dict[str, Any] = {name: finite(value) for name, value in by_each.items()}
    facts |= pick(mechanism, "noise_multiplier", "batch_size", "num_examples", "sampling_prob", "num_steps")
    if images_per_person is not None:
        of_image = mechanism.replace(images_per_unit=1)
        facts["epsilon_image"] = finite(accountants.epsilon(of_image, delta).epsilon)
    else:
        facts["epsilon_tan"] = finite(gaussian.epsilon_tan(mechanism, delta))
        facts["overcharge"] = finite(gaussian.overcharge(mechanism, delta, spent.epsilon))
        facts |= trade.advice(mechanism, delta) if sigma > 0 and mechanism.num_steps > 0 else {}
    warnings = warnings_of_delta(delta, num_examples)
    if 0 < sigma < 2:
        what = "below sigma = 0.5 no budget is meaningful" if sigma < 0.5 else "below sigma = 2 a budget costs too much"
        warnings.append(f"{what}: a larger batch with as much more noise spends less (TAN, Figure 2)")
    return Plan(
        unit=unit_in_words(images_per_person),
        images_per_person=images_per_person,
        delta=delta,
        accountant=spent.accountant,
        num_epochs=mechanism.num_steps * mechanism.sampling_prob,
        snr_per_step=finite(gaussian.snr_per_step(mechanism)),
        snr=finite(gaussian.snr(mechanism)),
        warnings=[*warnings, *([spent.note] if spent.note else [])],
        **facts,
    )


def _refuse_impossible(budget: Budget, images_per_person: int | None) -> None:
    given = {option: getattr(budget, key.partition(".")[2]) for option, key in _KEYS.items()}
    left_out = [option for option, value in given.items() if value is None]
    if len(left_out) != 1:
        without = ", ".join(left_out) or "none"
        raise InputError(f"of {', '.join(_KEYS)} one is solved for and left out, not {without}. Give three.")
    for option, key in _KEYS.items():
        reason = None if given[option] is None else config.why_impossible(key, given[option])  # as in a recipe
        if reason is not None:
            raise InputError(f"{option} {given[option]} is not possible: {reason}. Correct it.")
    steps, unmet = budget.num_steps, budget.noise_multiplier == 0 and budget.target_epsilon is not None
    no_image = images_per_person is not None and images_per_person < 1
    for cannot_be, what in (
        (steps is not None and steps > MOST, f"--num-steps must be at most {MOST:g}, not {steps}."),
        (not 1e-100 <= budget.delta < 1, f"--delta must lie in [1e-100, 1), and be below 1/N, not {budget.delta}."),
        (unmet, "--noise-multiplier 0 has no finite epsilon, so it cannot meet one. Choose a positive one."),
        (no_image, f"--images-per-person must be at least 1, not {images_per_person}."),
    ):
        if cannot_be:
            raise InputError(what)
