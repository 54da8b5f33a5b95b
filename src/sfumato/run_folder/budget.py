"""The budget of a data set: one file, which all runs on these images reserve their plans in.

It is append-only, as a ledger is. Its first line states the budget; then comes a line for each plan that was reserved,
on disk before its run's first release, or given back. Whoever appends holds the file's lock, so that what is reserved
never exceeds the budget, whatever runs at once and whoever is killed. It holds public numbers alone: no name, path or
digest of images.
"""

import bisect
import contextlib
import dataclasses
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from sfumato.accounting import formats
from sfumato.accounting.accountants import epsilon_together
from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError
from sfumato.json_record import Record, pick
from sfumato.planning.resolve import Plan
from sfumato.run_folder import ledger
from sfumato.run_folder.files import lock, machine_faults, sync_folder
from sfumato.run_folder.ledger import RunLine, append_line, whole_lines
from sfumato.run_folder.record import BudgetClaim


class BudgetLine(Record):
    """The first line: what all runs together may spend, and of whom.

    Attributes:
        budget_id: 128 random bits; public.
        epsilon, delta: Of all runs together.
        unit: Whose epsilon it is.
        num_examples, images_per_unit: As in a run's mechanism; no run has more examples.
    """

    kind: Literal["budget"] = "budget"
    format_version: Literal[1] = 1
    budget_id: str
    epsilon: Annotated[float, Field(gt=0)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    unit: Literal["image", "person"]
    num_examples: int
    images_per_unit: int


class ReservedLine(Record):
    """A plan that is reserved.

    Attributes:
        run: The first line of its run's ledger.
        epsilon_selected: Of a run that is selected from a random number of such runs: what all of them spend at
            `run.delta`, which is a part of the budget's; None of any other.
        epsilon_reserved: Of all that was reserved then, this plan included.
    """

    kind: Literal["reserved"] = "reserved"
    run: RunLine
    epsilon_selected: float | None = None
    epsilon_reserved: float


class ReturnedLine(Record):
    """A plan whose run has released nothing, given back."""

    kind: Literal["returned"] = "returned"
    run_id: str


_LINE: pydantic.TypeAdapter[ReservedLine | ReturnedLine] = pydantic.TypeAdapter(
    Annotated[ReservedLine | ReturnedLine, Field(discriminator="kind")]
)


@dataclasses.dataclass
class Budget:
    """What a budget's file says.

    Attributes:
        reserved: By the id of the run.
    """

    path: Path
    stated: BudgetLine
    reserved: dict[str, ReservedLine]

    def epsilon(self, more: Sequence[Mechanism] = (), selected: Sequence[tuple[float, float]] = ()) -> float:
        """What is reserved, and more, spend together: an upper bound. Runs are composed by PLD; of what is selected,
        (epsilon, delta) each, both add up, and the runs have what is left of delta.
        """
        lines, both = self.reserved.values(), list(selected)
        both += [(line.epsilon_selected, line.run.delta or 0.0) for line in lines if line.epsilon_selected is not None]
        alone = [line.run.mechanism for line in lines if line.epsilon_selected is None]
        left = self.stated.delta - sum(delta for _, delta in both)
        if left <= 0:
            return math.inf
        return epsilon_together([*alone, *more], left, parts_of_data=True).epsilon + sum(each for each, _ in both)

    def require(self, runs: Sequence[RunLine], epsilon_selected: float | None = None) -> float:
        """Epsilon of all that is reserved together with these runs, which fits; or with one run that is selected.

        Raises:
            InputError: If it does not, with what would; or a run is of another unit, or of more images.
        """
        for run in runs:
            self._refuse_unlike(run)
        mechanisms, most = [run.mechanism for run in runs], self.stated.epsilon
        selected = [] if epsilon_selected is None else [(epsilon_selected, run.delta or 0.0) for run in runs]
        total = self.epsilon(() if selected else mechanisms, selected)
        if total <= most:
            return total
        remedy = "Give a smaller --epsilon, and a --delta that is a part of the budget's."
        remedy = remedy if selected else self._remedy(mechanisms[-1])
        before, of, would = map(formats.epsilon_text, (self.epsilon(), most, total))
        raise InputError(
            f"{self.path} has epsilon {before} of {of} reserved, and {would} with {len(runs)} more, at delta "
            f"{formats.delta_text(self.stated.delta)}. {remedy}"
        )

    def _remedy(self, last: Mechanism) -> str:
        # To a hundredth of the plan. Each number that is named was computed to fit.
        steps = sorted({last.num_steps * share // 100 for share in range(100)})
        most, epsilon = self.stated.epsilon, lambda count: self.epsilon([last.replace(num_steps=count)])
        count = steps[bisect.bisect_right(steps, most, key=epsilon) - 1]
        numbers = f"training.batch_size={last.batch_size} and privacy.noise_multiplier={last.noise_multiplier!r}"
        if count == 0:
            return f"Not one update fits with {numbers}: take more noise, or a smaller batch."
        return f"One run of up to {count} updates fits, with {numbers}: plan no more, or take more noise."

    def _refuse_unlike(self, run: RunLine) -> None:
        own, only = self.stated, "Another budget on the same images does not count what is reserved in this one."
        if run.unit is None:
            raise InputError(f"{self.path} is for private runs, and this one claims nothing. Leave --budget out.")
        if run.num_examples > own.num_examples:
            raise InputError(
                f"{self.path} was begun for {own.num_examples} images, canaries among them, and this run has "
                f"{run.num_examples}. Train on those alone. {only}"
            )
        if (run.unit, run.images_per_unit) != (own.unit, own.images_per_unit):
            ours, theirs = (f"one {each.unit} with up to {each.images_per_unit} images" for each in (own, run))
            raise InputError(f"{self.path} is for {ours}, this run for {theirs}. Take the budget's unit. {only}")


def begin(path: Path, plan: Plan) -> Budget:
    """Begins a budget of a plan's images: the plan's target and delta are for all runs together.

    Raises:
        InputError: If the file is there already, or the plan is not private, has no target or is one of many.
        MachineError: If it cannot be written.
    """
    privacy = plan.recipe.privacy
    if not plan.private or privacy is None or privacy.target_epsilon is None or plan.selection is not None:
        raise InputError("a budget is for private runs with a target: give --epsilon, no run.seed and no selection.")
    stated = BudgetLine(
        budget_id=secrets.token_hex(16),
        epsilon=float(privacy.target_epsilon),
        **pick(privacy, "delta", "unit", "images_per_unit"),
        num_examples=plan.mechanism.num_examples,
    )
    if path.exists():
        raise InputError(f"{path} is there already. Go on with it, or name another file.")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent}. Make it, or name another file.")
    with machine_faults(path), open(path, "xb", buffering=0) as file:
        append_line(file.fileno(), stated)
        sync_folder(path.parent)
    return Budget(path, stated, {})


def read(path: Path) -> Budget:
    """What was reserved so far.

    Raises:
        InputError: If there is no such file, or it says something else than a budget does.
    """
    if not path.is_file():
        raise InputError(f"{path} is no file. Name that of a budget, or begin one: sfumato budget new.")
    return _parsed(path.read_bytes(), path)


def reserve(path: Path, run: RunLine, epsilon_selected: float | None = None) -> BudgetClaim:
    """Reserves a run's whole plan, unless it is reserved already. It is on disk once this returns.

    Guarantee: what is reserved, composed, never exceeds the budget, whichever processes reserve at once.

    Args:
        path: Of the budget.
        run: The first line of the run's ledger, which is on disk and names this budget.
        epsilon_selected: See `ReservedLine`; the run is then what all of them have in common.

    Raises:
        InputError: If it does not fit (`Budget.require`).
        MachineError: If it cannot be written; the run then releases nothing.
    """
    with _held(path) as (budget, append):
        assert run.budget == budget.stated.budget_id
        if run.run_id not in budget.reserved:
            total = budget.require([run], epsilon_selected)
            line = ReservedLine(run=run, epsilon_selected=epsilon_selected, epsilon_reserved=total)
            append(line)
            budget.reserved[run.run_id] = line
        reserved = budget.reserved[run.run_id].epsilon_reserved
        return BudgetClaim(**pick(budget.stated, "budget_id", "epsilon", "delta"), epsilon_reserved=reserved)


def give_back(path: Path, run: ledger.Ledger) -> None:
    """Gives a plan back whose run has released nothing, while the caller holds its ledger. Whoever goes on with the run
    reserves it anew, before its first release.
    """
    assert not run.lines.num_releases, "what was released stays reserved, the whole plan"
    with _held(path) as (budget, append):
        if run.lines.run.run_id in budget.reserved:
            append(ReturnedLine(run_id=run.lines.run.run_id))


@contextlib.contextmanager
def _held(path: Path) -> Iterator[tuple[Budget, Callable[[Record], int]]]:
    """A budget under its lock, and what appends a line to it that is on disk once that returns."""
    read(path)
    with machine_faults(path), open(path, "rb+", buffering=0) as file:
        lock(file.fileno(), path, patience=math.inf)
        content = whole_lines(file.read())
        file.truncate(len(content))  # a tail without a newline was being written when its process died
        file.seek(len(content))
        yield _parsed(content, path), lambda line: append_line(file.fileno(), line)


def _parsed(content: bytes, path: Path) -> Budget:
    try:
        first, *others = whole_lines(content).splitlines()
        found = Budget(path, BudgetLine.model_validate_json(first), {})
        for line in map(_LINE.validate_json, others):
            if isinstance(line, ReservedLine):
                found.reserved[line.run.run_id] = line
            else:
                del found.reserved[line.run_id]
    except (ValueError, KeyError):
        raise InputError(
            f"{path} is no whole budget of this version, so what was reserved is not known. Restore it from a copy."
        ) from None
    return found
