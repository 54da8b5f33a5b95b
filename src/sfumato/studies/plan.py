"""A sweep as all its workers know it: every cell resolved, and the runs that serve them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from sfumato import config
from sfumato.config import Recipe
from sfumato.data import loading
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError
from sfumato.json_record import Record
from sfumato.planning.classifiers import with_updates_alone
from sfumato.planning.resolve import Plan, resolve
from sfumato.randomness import digest
from sfumato.recipes import recipe_of
from sfumato.searching.work import Key
from sfumato.studies.grid import NUM_STEPS, Settings, cells_of, for_sharing, in_words

MOST_RUNS = 10_000


@dataclasses.dataclass(frozen=True)
class PlannedCell:
    """One cell.

    Attributes:
        settings: What differs from the recipe, for sharing.
        plan: Of its runs; of paired ones, of that with seed 0.
        facts: Of its data.
    """

    settings: Settings
    plan: Plan
    facts: Facts


@dataclasses.dataclass(frozen=True)
class Run:
    """One run, which serves one cell, or several that differ in their number of steps.

    Attributes:
        cells: Their numbers from 0, the one with most steps last.
        settings: Of that cell.
        number: From 1 within each cell.
        seed: None: the run has a key of its own.
    """

    cells: tuple[int, ...]
    settings: Settings
    number: int
    seed: int | None
    kind: ClassVar[str] = "run"

    @property
    def name(self) -> str:
        """Also its folder, below the sweep's."""
        return f"cell-{self.cells[-1] + 1}/" + (f"run-{self.number}" if self.seed is None else f"seed-{self.seed}")

    @property
    def key(self) -> Key:
        """What it is known by."""
        return self.kind, self.name

    def facts(self) -> dict[str, Any]:
        """What the storage says of a trial of it."""
        return {"settings_asked": self.settings, "cells": list(self.cells), "seed": self.seed}


class Look(Record):
    """Held-out accuracies at one number of steps."""

    accuracy: float
    accuracy_last: float

    def is_possible(self) -> bool:
        """Whether they are fractions."""
        return all(0 <= value <= 1 for value in (self.accuracy, self.accuracy_last))


@dataclasses.dataclass(frozen=True)
class Reached:
    """What a finished run reached.

    Attributes:
        settings: Its own.
        updates: Releases on its ledger.
        looks: For each of its cells.
        held_out: The split that accuracies were measured on.
    """

    settings: Settings
    updates: int
    looks: tuple[Look, ...]
    held_out: Literal["test", "valid"]

    @property
    def score(self) -> float:
        """Of the whole run."""
        return self.looks[-1].accuracy

    def facts(self) -> dict[str, Any]:
        """What the storage keeps of it."""
        looks = [look.as_json() for look in self.looks]
        return {"updates": self.updates, "looks": looks, "held_out": self.held_out}


@dataclasses.dataclass(frozen=True)
class Runs:
    """An agenda that nothing changes: all runs, from the beginning."""

    slots: list[Run]
    complete: bool


@dataclasses.dataclass(frozen=True)
class Planned:
    """A sweep.

    Attributes:
        recipe: As it was asked for, without where files lie.
        cells: In the order of the grid.
        seeds: How many runs each cell has.
        paired: Whether run n of every cell has the public seed n - 1 (and as many more as `first_seed` says).
        runs: In the order in which they are begun: one of each cell first.
        first_seed: Of paired runs.
    """

    recipe: Recipe
    cells: tuple[PlannedCell, ...]
    seeds: int
    paired: bool
    runs: tuple[Run, ...]
    first_seed: int = 0
    noun: ClassVar[str] = "sweep"
    sampler: ClassVar[str] = "random"
    prune: ClassVar[bool] = False
    choices: ClassVar[dict[str, list[Any]]] = {}

    def offers(self, settings: Settings) -> bool:
        """Nothing is drawn."""
        return not settings

    def agenda(self, finished: Mapping[Key, Reached]) -> Runs:
        """All runs."""
        return Runs(list(self.runs), all(run.key in finished for run in self.runs))

    def as_json(self) -> dict[str, Any]:
        """What all workers must agree on."""
        return {
            "recipe": config.shareable(self.recipe).model_dump(mode="json"),
            "cells": [cell.settings for cell in self.cells],
            "weights": [cell.plan.recipe.model.init_sha256 for cell in self.cells],
            "seeds": self.seeds,
            "paired": self.paired,
            **({"first_seed": self.first_seed} if self.paired else {}),
            "num_examples": [cell.plan.mechanism.num_examples for cell in self.cells],
            "num_steps": [cell.plan.mechanism.num_steps for cell in self.cells],
            "batch_size": [cell.plan.mechanism.batch_size for cell in self.cells],
        }

    def digest(self) -> str:
        """Of `as_json`."""
        return digest(self.as_json())

    def read(self, facts: Mapping[str, Any], *, given_up: bool) -> Reached:
        """What a trial in the storage says it found.

        Raises:
            ValueError, KeyError, TypeError: If no run of a sweep finds that.
        """
        looks = tuple(Look.model_validate(look) for look in facts["looks"])
        updates, held_out = facts["updates"], facts["held_out"]
        if held_out not in ("test", "valid"):
            raise ValueError("not of a sweep")
        if given_up or type(updates) is not int or updates < 0 or not all(look.is_possible() for look in looks):
            raise ValueError("not of a sweep")
        return Reached(facts["settings"], updates, looks, held_out)

    def fits(self, task: Run, found: Reached) -> bool:
        """Whether that can be of this run."""
        return found.settings == task.settings and len(found.looks) == len(task.cells)

    def plan_of(self, run: Run) -> Plan:
        """Of a run, its seed included."""
        plan = self.cells[run.cells[-1]].plan
        if run.seed is None:
            return plan
        recipe = plan.recipe
        seeded = recipe.model_copy(update={"run": recipe.run.model_copy(update={"seed": run.seed})})
        return dataclasses.replace(plan, recipe=seeded)

    def steps_of(self, run: Run) -> list[int]:
        """The number of steps of each of a run's cells."""
        return [self.cells[number].plan.mechanism.num_steps for number in run.cells]


def plan_sweep(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    grid: Mapping[str, Sequence[Any]],
    listed: Sequence[Mapping[str, Any]] = (),
    *,
    settings: Mapping[str, Any],
    seeds: int,
    paired: bool,
    data_root: Path | None,
    report: Callable[[str], None],
    first_seed: int = 0,
) -> Planned:
    """Resolves every cell before anything runs.

    Args:
        recipe: As in `sfumato.train`.
        grid, listed: See `cells_of`.
        settings: What is set in every cell.
        seeds: Runs of each cell.
        paired: Give run n of every cell the public seed n - 1.
        first_seed: Of paired runs, in place of 0.

    Raises:
        InputError: Naming the cell and what is wrong with it.
    """
    if type(seeds) is not int or not 1 <= seeds <= 1000:
        raise InputError(f"--seeds is how many runs each cell has, from 1 to 1000, not {seeds!r}.")
    cells = cells_of(grid, listed)
    if len(cells) * seeds > MOST_RUNS:
        raise InputError(f"{len(cells)} cells of {seeds} runs are more than {MOST_RUNS} runs. Ask for fewer.")
    asked = recipe_of(recipe, settings)
    _refuse_recipe(asked)
    known: dict[str, Facts] = {}
    planned = [_resolved(asked, cell, paired, data_root, known, report) for cell in cells]
    runs = [
        Run(group, planned[group[-1]].settings, number, first_seed + number - 1 if paired else None)
        for number in range(1, seeds + 1)
        for group in groups(planned)
    ]
    return Planned(asked, tuple(planned), seeds, paired, tuple(runs), first_seed)


def _refuse_recipe(recipe: Recipe) -> None:
    if recipe.run.seed is not None:
        raise InputError(
            "equal seeds give equal runs, which say nothing of the spread: leave run.seed out. --paired gives the runs "
            "of every cell the seeds 0, 1, 2 and so on."
        )
    if recipe.privacy is not None and recipe.privacy.selected_from is not None:
        raise InputError(
            "no epsilon is known for several runs that were each selected from others: leave out privacy.selected_from."
        )


def _resolved(
    asked: Recipe,
    settings: Settings,
    paired: bool,
    data_root: Path | None,
    known: dict[str, Facts],
    report: Callable[[str], None],
) -> PlannedCell:
    try:
        recipe = recipe_of(asked, {**settings, **({"run.seed": 0} if paired else {})})
        if recipe.privacy is not None:
            recipe = with_updates_alone(
                recipe, "sweep"
            )  # what a first release that is begun again costs is not counted
        limit = loading.images_per_person(recipe)
        identity = digest([recipe.data.model_dump(mode="json"), limit])
        if identity not in known:
            known[identity] = loading.facts(recipe.data, data_root, report, limit)
        return PlannedCell(for_sharing(settings), resolve(recipe, known[identity]), known[identity])
    except InputError as error:
        raise InputError(f"the cell {in_words(settings)} cannot be: {error}") from None


def groups(cells: Sequence[PlannedCell]) -> list[tuple[int, ...]]:
    """Which cells one run serves, by their numbers, the longest last; in the order of their first cells.

    Cells share a run where their resolved recipes differ in `training.num_steps` alone and update t is the same
    whatever T is: the noise is given and no target cuts the steps; the learning rate follows no schedule of T (cosine);
    nothing but plain held-out accuracy is measured at the end (no `augmentation.test_views`); T is at least 1 and
    stated by the cell. EMA's decay follows the update, not T.
    """
    together: dict[str, list[int]] = {}
    for number, cell in enumerate(cells):
        together.setdefault(_shared_by(cell) or f"cell {number}", []).append(number)
    return [tuple(sorted(group, key=lambda number: _steps(cells[number]))) for group in together.values()]


def _steps(cell: PlannedCell) -> int:
    return cell.plan.mechanism.num_steps


def _shared_by(cell: PlannedCell) -> str | None:
    """Equal for cells that share a run; None for one that shares none."""
    recipe = cell.plan.recipe
    if NUM_STEPS not in cell.settings or _steps(cell) < 1:
        return None
    if recipe.privacy is not None and recipe.privacy.target_epsilon is not None:
        return None
    if recipe.optimizer.schedule == "cosine" or recipe.augmentation.test_views:
        return None
    values = recipe.model_dump(mode="json")
    values["training"]["num_steps"] = None
    return digest(values)
