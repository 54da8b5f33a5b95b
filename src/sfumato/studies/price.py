"""What all runs of a sweep cost together."""

import dataclasses
import functools
from collections.abc import Sequence

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
    """Epsilon of somebody who sees every run, at the delta of one, as of one mechanism's updates.

    Returns:
        Epsilon and None, or None and why there is none.
    """
    if not all(run.plan.private for run in runs):
        return None, "not every cell is private"
    kinds = {_kind(run) for run in runs}
    if len(kinds) > 1:
        return None, "the cells are of different mechanisms, whose epsilon together is not computed"
    [(mechanism, delta, accountant)] = kinds
    if mechanism.first_release_noise is not None:
        return None, "each run releases more than its updates, whose epsilon together is not computed"
    total = mechanism.replace(num_steps=sum(run.updates for run in runs))
    found = _epsilon(total, delta, accountant)
    return found, None if found is not None else "no finite epsilon covers them"


@functools.cache  # many cells of a sweep have one mechanism
def _epsilon(mechanism: Mechanism, delta: float, accountant: Accountant) -> float | None:
    from sfumato.accounting.accountants import epsilon

    return finite(epsilon(mechanism, delta, accountant).epsilon)


def _kind(run: Spent) -> tuple[Mechanism, float, Accountant]:
    return run.mechanism.replace(num_steps=0), run.plan.delta, run.plan.recipe.budget.accountant
