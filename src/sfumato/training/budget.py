"""How many releases a run may still make, and what all of them will have cost."""

from collections.abc import Callable

from sfumato.accounting.accountants import EpsilonCurve
from sfumato.accounting.mechanism import Mechanism
from sfumato.planning.claims import claims
from sfumato.planning.resolve import Plan
from sfumato.run_folder.entries import together
from sfumato.training.draws import Draws


class Budget:
    """Of a run that takes updates from ``first_step`` on.

    Args:
        plan: Of the run.
        draws: Know what is on the ledger.
        first_step: The first update that this session takes; earlier ones are in a checkpoint.
        lacks_first: Whether the run needs a release of all examples before update 1 and has not kept it.
    """

    def __init__(self, plan: Plan, draws: Draws, first_step: int, lacks_first: bool) -> None:
        self._plan, self._draws, self._first_step, self._lacks_first = plan, draws, first_step, lacks_first

    def covers(self, step: int) -> bool:
        """Whether an update is a repetition, or fits the target beside everything in the ledger."""
        if self._draws.is_recorded(step) or not self._is_bounded():
            return True
        return self._draws.num_updates < self._plan.mechanism.num_steps

    def covers_first(self) -> bool:
        """Whether the release of all examples is still to be made, for the first time or as a repetition, or again
        where no target forbids it.
        """
        may = self._draws.is_recorded(0) or self._draws.num_first_releases == 0 or not self._is_bounded()
        return self._lacks_first and may

    def planned_mechanism(self) -> Mechanism:
        """What will have been released at the end."""
        is_new = self.covers_first() and not self._draws.is_recorded(0)
        count = self._draws.num_first_releases + is_new
        noise = together(self._plan.mechanism.first_release_noise, count)
        return self._plan.mechanism.replace(num_steps=self._planned_updates(), first_release_noise=noise)

    def curve(self) -> Callable[[int], float | None]:
        """Epsilon after a step, counting releases that an earlier session spent besides."""
        plan, draws = self._plan, self._draws
        if not plan.private:
            return lambda step: None
        planned = self.planned_mechanism()
        if plan.selection is not None:  # what the best of all runs spends in the end bounds every step before
            total = claims(plan, planned).epsilon
            return lambda step: total
        curve = EpsilonCurve(planned, plan.delta, plan.recipe.budget.accountant)
        return lambda step: curve.at(max(draws.num_updates, step))

    def _planned_updates(self) -> int:
        """How many there will have been on the ledger at the end; all, where nothing is accounted."""
        num_steps = self._plan.mechanism.num_steps
        if self._plan.recipe.privacy is None:
            return num_steps
        steps = range(self._first_step, num_steps + 1)
        planned = self._draws.num_updates + sum(not self._draws.is_recorded(step) for step in steps)
        return min(planned, num_steps) if self._is_bounded() else planned

    def _is_bounded(self) -> bool:
        """Whether there may be no more releases than planned: under a target, and where others rely
        on it for their own epsilon.
        """
        privacy = self._plan.recipe.privacy
        return privacy is not None and (privacy.target_epsilon is not None or self._plan.selection is not None)
