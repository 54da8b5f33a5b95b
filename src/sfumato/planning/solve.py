"""Which of noise, batch size and steps a budget leaves open, and what it allows: decided here
alone.
"""

import dataclasses

from sfumato.accounting import calibration
from sfumato.accounting.calibration import Unknown
from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.accounting.selection import Selection
from sfumato.config import FilledRecipe, PrivacyConfig
from sfumato.errors import InputError
from sfumato.json_record import pick

_ANY: dict[Unknown, int] = {"batch_size": 1, "num_steps": 1, "noise_multiplier": 1}
"""What stands in place of a number until it is solved for."""


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

    @property
    def open(self) -> list[Unknown]:
        """The numbers that are left out."""
        return [name for name in _ANY if getattr(self, name) is None]

    def mechanism(self, **numbers: float) -> Mechanism:
        """The Poisson-sampled mechanism of its numbers, with these in place of those left out, or of others."""
        own = pick(self, *_ANY)
        return Mechanism(self.num_examples, **(own | numbers), images_per_unit=self.images_per_unit)


def selection_of(privacy: PrivacyConfig | None) -> Selection | None:
    """How a run under this budget is selected from others; None where nothing is selected."""
    if privacy is None or privacy.selected_from is None:
        return None
    return Selection(privacy.selected_from, privacy.selection_shape, privacy.score_noise)


def budget_of(recipe: FilledRecipe, num_examples: int) -> Budget:
    """Of a filled recipe with a [privacy] section, for so many images or people."""
    privacy = recipe.privacy
    assert privacy is not None
    return Budget(
        num_examples=num_examples,
        selection=selection_of(privacy),
        **pick(privacy, "delta", "target_epsilon", "noise_multiplier", "accountant", "images_per_unit"),
        **pick(recipe.training, "batch_size", "num_steps"),
    )


def solve(budget: Budget) -> tuple[Mechanism, Unknown | None]:
    """The Poisson-sampled mechanism of a budget of which at most one number is left open.

    Guarantee: what was solved for spends at most the target.

    Returns:
        The mechanism, and the name of the number that was solved for; None if all were given.

    Raises:
        InputError: If the budget is impossible, or leaves more open than can be solved for.
    """
    target = budget.target_epsilon
    if not budget.open:
        return budget.mechanism(), None
    if target is None:
        raise InputError(
            "without a target epsilon the batch size, the number of steps and the noise multiplier must all be given."
        )
    if budget.selection is not None and budget.open != ["noise_multiplier"]:
        raise InputError(
            "for a run selected from others only the noise is solved for. Give training.batch_size and "
            "training.num_steps."
        )
    if len(budget.open) > 1:
        raise InputError(
            "more than one of batch size, number of steps and noise multiplier is left out. Give all but one."
        )
    (unknown,) = budget.open
    mechanism = budget.mechanism(**{unknown: _ANY[unknown]})
    found = calibration.solve(mechanism, unknown, target, budget.delta, budget.accountant, budget.selection)
    return found, unknown
