"""Three of batch size, steps, noise and epsilon give the fourth."""

from typing import Any

from sfumato import config
from sfumato.accounting import accountants, gaussian
from sfumato.accounting.mechanism import Accountant
from sfumato.errors import InputError
from sfumato.json_record import finite
from sfumato.planning.advice import warnings_of_delta
from sfumato.planning.claims import unit_in_words
from sfumato.planning.defaults import DEFAULT_STEPS, default_batch_size, delta_default
from sfumato.planning.solve import Budget, solve
from sfumato.scaling import equal_noise as trade

# Images and steps: nobody has more, and beyond them rounding is no longer small beside q.
MOST = 10**12


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
) -> dict[str, Any]:
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

    Returns:
        JSON-ready: all four, epsilon by each accountant (epsilon_tan is a guide, never a
        guarantee), signal-to-noise ratios, epochs, overcharge and warnings.

    Raises:
        InputError: If not exactly one is left out, or the budget is impossible.
    """
    if not 1 <= num_examples <= MOST:
        raise InputError(f"--num-examples must lie between 1 and {MOST:g}, not {num_examples}.")
    if epsilon is not None and noise_multiplier is None:
        batch_size = default_batch_size(num_examples) if batch_size is None else batch_size
        num_steps = DEFAULT_STEPS if num_steps is None else num_steps
    given = {"batch_size": batch_size, "num_steps": num_steps, "noise_multiplier": noise_multiplier, "epsilon": epsilon}
    left_out = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is None]
    if len(left_out) != 1:
        verb = "all are given" if not left_out else f"{', '.join(left_out)} are left out"
        raise InputError(
            "three of --batch-size, --num-steps, --noise-multiplier and --epsilon give the "
            f"fourth, but {verb}. Leave out exactly one."
        )
    if num_steps is not None and num_steps > MOST:
        raise InputError(f"--num-steps must be at most {MOST:g}, not {num_steps}.")
    delta = delta_default(num_examples) if delta is None else delta
    if not 1e-100 <= delta < 1:
        raise InputError(
            f"--delta must lie between 0 and 1, and be 1e-100 at least, not {delta}. A power of ten below 1/N is usual."
        )
    keys = ("training.batch_size", "training.num_steps", "privacy.noise_multiplier", "privacy.target_epsilon")
    for (name, value), key in zip(given.items(), keys, strict=True):
        reason = None if value is None else config.why_impossible(key, value)  # as in a recipe
        if reason is not None:
            raise InputError(f"--{name.replace('_', '-')} {value} is not possible: {reason}. Correct it.")
    if noise_multiplier == 0 and epsilon is not None:
        raise InputError("--noise-multiplier 0 has no finite epsilon, so it cannot meet one. Choose a positive one.")
    if images_per_person is not None and images_per_person < 1:
        raise InputError(f"--images-per-person must be at least 1, not {images_per_person}.")
    of_persons = images_per_person is not None
    budget = Budget(
        num_examples=num_examples,
        delta=delta,
        target_epsilon=epsilon,
        batch_size=batch_size,
        num_steps=num_steps,
        noise_multiplier=noise_multiplier,
        accountant=accountant,
        images_per_unit=images_per_person or 1,
    )
    mechanism, _ = solve(budget)
    spent = accountants.epsilon(mechanism, delta, accountant)
    warnings = warnings_of_delta(delta, num_examples)
    if 0 < mechanism.noise_multiplier < 0.5:
        warnings.append(
            "below sigma = 0.5 no budget is meaningful: take a larger batch with more noise (TAN, Figure 2)"
        )
    elif 0 < mechanism.noise_multiplier < 2:
        warnings.append(
            "below sigma = 2 a budget is overcharged: a larger batch with as much more noise "
            "spends less (TAN, Figure 2)"
        )
    has_noise = mechanism.noise_multiplier > 0 and mechanism.num_steps > 0
    if spent.note:
        warnings.append(spent.note)

    return {
        "epsilon": finite(spent.epsilon),
        "epsilon_rdp": finite(spent.epsilon_rdp),
        "epsilon_pld": finite(spent.epsilon_pld),
        "epsilon_tan": None if of_persons else finite(gaussian.epsilon_tan(mechanism, delta)),
        "epsilon_image": finite(accountants.epsilon(mechanism.replace(images_per_unit=1), delta).epsilon)
        if of_persons
        else None,
        "unit": unit_in_words(images_per_person),
        "images_per_person": images_per_person,
        "delta": delta,
        "accountant": spent.accountant,
        "noise_multiplier": mechanism.noise_multiplier,
        "batch_size": mechanism.batch_size,
        "num_examples": num_examples,
        "sampling_prob": mechanism.sampling_prob,
        "num_steps": mechanism.num_steps,
        "num_epochs": mechanism.num_steps * mechanism.sampling_prob,
        "snr_per_step": finite(gaussian.snr_per_step(mechanism)),
        "snr": finite(gaussian.snr(mechanism)),
        "overcharge": None if of_persons else finite(gaussian.overcharge(mechanism, delta, spent.epsilon)),
        **(trade.advice(mechanism, delta) if has_noise and not of_persons else {}),
        "warnings": warnings,
    }
