"""Which of noise, batch size and steps a budget leaves open, and what it allows: decided here
alone.
"""

import dataclasses
from typing import Any, Literal

from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.accounting.selection import Selection
from sfumato.errors import InputError

Solved = Literal["noise_multiplier", "batch_size", "num_steps"]


@dataclasses.dataclass(frozen=True)
class Budget:
    """What is known of a run in advance. None is what is to be solved for.

    Attributes:
        num_examples: N.
        delta: In (0, 1).
        target_epsilon: Never exceeded. None: there is no target, and nothing is solved for.
        batch_size: The expected batch qN.
        num_steps: T.
        noise_multiplier: sigma.
        accountant: Whose epsilon is held to the target.
        selection: How the run is selected from others, which epsilon then covers.
        images_per_unit: Whose epsilon it is: of one image, or of all of a person's.
        first_release_noise: Of the release before the steps; None: there is none.
    """

    num_examples: int
    delta: float
    target_epsilon: float | None
    batch_size: int | None
    num_steps: int | None
    noise_multiplier: float | None
    accountant: Accountant = "pld"
    selection: Selection | None = None
    images_per_unit: int = 1
    first_release_noise: float | None = None


def solve(budget: Budget) -> tuple[Mechanism, Solved | None]:
    """The Poisson-sampled mechanism of a budget of which at most one number is left open.

    Guarantee: what was solved for spends at most the target.

    Returns:
        The mechanism, and the name of the number that was solved for; None if all were given.

    Raises:
        InputError: If the budget is impossible, or leaves more open than can be solved for.
    """
    from sfumato.accounting import calibration

    n, target = budget.num_examples, budget.target_epsilon
    beside: dict[str, Any] = {
        "images_per_unit": budget.images_per_unit,
        "first_release_noise": budget.first_release_noise,
    }
    match budget.noise_multiplier, budget.batch_size, budget.num_steps:
        case (float() | int()) as sigma, int() as batch_size, int() as num_steps:
            return Mechanism(n, batch_size, sigma, num_steps, **beside), None
    if target is None:
        raise InputError(
            "without a target epsilon the batch size, the number of steps and the noise multiplier must all be given."
        )
    delta, accountant = budget.delta, budget.accountant
    match budget.noise_multiplier, budget.batch_size, budget.num_steps:
        case None, int() as batch_size, int() as num_steps:
            sigma = calibration.solve_noise_multiplier(
                num_examples=n,
                batch_size=batch_size,
                num_steps=num_steps,
                target_epsilon=target,
                delta=delta,
                accountant=accountant,
                selection=budget.selection,
                **beside,
            )
            return Mechanism(n, batch_size, sigma, num_steps, **beside), "noise_multiplier"
        case _ if budget.selection is not None:
            raise InputError(
                "for a run selected from others only the noise is solved for. Give "
                "training.batch_size and training.num_steps."
            )
        case (float() | int()) as sigma, None, int() as num_steps:
            batch_size = calibration.solve_batch_size(
                num_examples=n,
                num_steps=num_steps,
                noise_multiplier=sigma,
                target_epsilon=target,
                delta=delta,
                accountant=accountant,
                **beside,
            )
            return Mechanism(n, batch_size, sigma, num_steps, **beside), "batch_size"
        case (float() | int()) as sigma, int() as batch_size, None:
            num_steps = calibration.solve_num_steps(
                num_examples=n,
                batch_size=batch_size,
                noise_multiplier=sigma,
                target_epsilon=target,
                delta=delta,
                accountant=accountant,
                **beside,
            )
            return Mechanism(n, batch_size, sigma, num_steps, **beside), "num_steps"
    raise InputError("more than one of batch size, number of steps and noise multiplier is left out. Give all but one.")
