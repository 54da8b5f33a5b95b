"""What all runs of a sweep cost together."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from sfumato.accounting.accountants import epsilon_together as together
from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.json_record import finite
from sfumato.planning.resolve import Plan


@dataclasses.dataclass(frozen=True)
class Spent:
    """One run, or a part of one, as far as it may have been trained.

    Attributes:
        plan: Of the run.
        updates: Releases that count.
    """

    plan: Plan
    updates: int

    @property
    def mechanism(self) -> Mechanism:
        """Of all its releases, under Poisson sampling."""
        return self.plan.mechanism.replace(sampling="poisson", num_steps=self.updates)


def epsilon_of(spent: Spent) -> float | None:
    """Of one run, or what secret noise and Poisson sampling would have given; None: there is none."""
    privacy = spent.plan.recipe.privacy
    if privacy is None:
        return None
    if spent.mechanism.first_release_noise is not None and spent.updates > spent.plan.mechanism.num_steps:
        return None  # begun twice, with what it releases before its updates
    return _epsilon(spent.mechanism, spent.plan.delta, privacy.accountant)


def epsilon_together(runs: Sequence[Spent]) -> tuple[float | None, str | None]:
    """Epsilon of somebody who sees every run, at the delta of one; runs may differ in all that a mechanism has but
    its images.

    Returns:
        Epsilon and None, or None and why there is none.
    """
    if not all(run.plan.private for run in runs):
        return None, "not every cell is private"
    for facts, why_not in (
        (_images, "the cells do not train on the same images, and what is private of one is none of another"),
        (_unit, "the cells protect different units, one image or one person, which have no epsilon in common"),
        (lambda run: run.plan.delta, "the cells have different deltas: their epsilon together is computed at one"),
    ):
        if len({facts(run) for run in runs}) > 1:
            return None, why_not
    if any(run.mechanism.first_release_noise and run.updates > run.plan.mechanism.num_steps for run in runs):
        return None, "a run was begun twice, with what it releases before its updates"
    accountant: Accountant = "rdp" if all(run.plan.recipe.budget.accountant == "rdp" for run in runs) else "pld"
    found = finite(together([run.mechanism for run in runs], runs[0].plan.delta, accountant).epsilon)
    return found, None if found is not None else "no finite epsilon covers them"


@functools.cache  # many cells of a sweep have one mechanism
def _epsilon(mechanism: Mechanism, delta: float, accountant: Accountant) -> float | None:
    from sfumato.accounting.accountants import epsilon

    return finite(epsilon(mechanism, delta, accountant).epsilon)


def _images(run: Spent) -> tuple[Any, ...]:
    """Which images a run trains on, as its recipe says it."""
    data = run.plan.recipe.data
    classes = None if data.classes is None else tuple(data.classes)
    return run.plan.mechanism.num_examples, data.name, data.path, data.split, data.num_examples, classes


def _unit(run: Spent) -> tuple[Any, ...]:
    """Whose contribution its epsilon is for."""
    privacy = run.plan.recipe.budget
    if privacy.unit == "image":
        return ("image",)
    return "person", privacy.max_images_per_person, privacy.person_sampling, run.plan.recipe.data.group_by
