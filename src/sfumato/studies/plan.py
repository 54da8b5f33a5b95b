"""A sweep as all its processes know it: every cell resolved, and the runs that serve them."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sfumato import config
from sfumato.accounting.formats import note
from sfumato.config import Recipe
from sfumato.data import loading
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError, naming
from sfumato.json_record import pick
from sfumato.planning.resolve import Plan, resolve
from sfumato.randomness import digest
from sfumato.recipes import recipe_of
from sfumato.run_folder import budget as budgets
from sfumato.studies.grid import NUM_STEPS, Settings, cells_of, for_sharing, in_words

MOST_RUNS = 10_000
_COMPARED = ("num_examples", "num_steps", "batch_size")


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """What a sweep is asked for.

    Attributes:
        recipe: As in `sfumato.train`.
        grid: The values of each key, such as {"optimizer.learning_rate": [1.0, 2.0]}; None takes the key out.
        cells: Whole settings to try, each with all of the grid.
        seeds: How many runs each cell has.
        paired: Run n of every cell has seed n - 1 (and as many more as `first_seed` says), so that cells differ by
            their settings alone.
        output: The folder of the sweep; None: a new one in runs/.
        settings: What is set in every cell.
        name: Of the recipe, for the page.
        axes: The key on the plot's axis, then those that make its lines; None: all keys in their order. Empty: labels.
        labels: Names of the cells, in their order.
        workers: Processes on this machine.
        data_root, device, budget, trust: See `sfumato.train`. All runs must fit the budget before the first is begun.
        report: Takes lines about runs; default: stderr.
        first_seed: Of paired runs.
    """

    recipe: Recipe | Mapping[str, Any] | str | Path
    grid: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    cells: Sequence[Mapping[str, Any]] = ()
    seeds: int = 1
    paired: bool = False
    output: Path | str | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    name: str | None = None
    axes: Sequence[str] | None = None
    labels: Sequence[str] = ()
    workers: int = 1
    data_root: Path | str | None = None
    device: str = "auto"
    budget: Path | str | None = None
    trust: Collection[str] = ()
    report: Callable[[str], None] = note
    first_seed: int = 0

    @property
    def root(self) -> Path | None:
        """Where the data lies."""
        return None if self.data_root is None else Path(self.data_root)


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

    @property
    def num_steps(self) -> int:
        """Of its runs, or the moment in them at which it looks."""
        return self.plan.mechanism.num_steps


@dataclasses.dataclass(frozen=True)
class Run:
    """One run, which serves one cell, or several that differ in their number of steps.

    Attributes:
        cells: Their numbers from 0, the one with most steps last.
        number: From 1 within each cell.
        seed: None: the run has randomness of its own.
    """

    cells: tuple[int, ...]
    number: int
    seed: int | None

    @property
    def name(self) -> str:
        """Also its folder, below the sweep's."""
        return f"cell-{self.cells[-1] + 1}/" + (f"run-{self.number}" if self.seed is None else f"seed-{self.seed}")


@dataclasses.dataclass(frozen=True)
class Planned:
    """A sweep.

    Attributes:
        options: What was asked for.
        recipe: Of these options.
        cells: In the order of the grid.
        runs: In the order in which they are begun: one of each cell first.
    """

    options: SweepOptions
    recipe: Recipe
    cells: tuple[PlannedCell, ...]
    runs: tuple[Run, ...]

    def as_json(self) -> dict[str, Any]:
        """What all processes must agree on."""
        asked, mechanisms = self.options, [cell.plan.mechanism for cell in self.cells]
        return {
            "recipe": config.shareable(self.recipe).model_dump(mode="json"),
            "cells": [cell.settings for cell in self.cells],
            "weights": [cell.plan.recipe.model.init_sha256 for cell in self.cells],
            **pick(asked, "seeds", "paired"),
            "budget": None if asked.budget is None else budgets.read(Path(asked.budget)).stated.budget_id,
            **({"first_seed": asked.first_seed} if asked.paired else {}),
            **{name: [getattr(each, name) for each in mechanisms] for name in _COMPARED},
        }

    def cell_of(self, run: Run) -> PlannedCell:
        """The one with most steps."""
        return self.cells[run.cells[-1]]

    def plan_of(self, run: Run) -> Plan:
        """Of a run, its seed included."""
        plan = self.cell_of(run).plan
        seeded = plan.recipe.run.model_copy(update={"seed": run.seed})
        return dataclasses.replace(plan, recipe=plan.recipe.model_copy(update={"run": seeded}))

    @property
    def plans(self) -> list[Plan]:
        """Of every run."""
        return [self.plan_of(run) for run in self.runs]

    def steps_of(self, run: Run) -> list[int]:
        """The number of steps of each of a run's cells."""
        return [self.cells[number].num_steps for number in run.cells]


def plan_sweep(options: SweepOptions) -> Planned:
    """Resolves every cell before anything runs.

    Raises:
        InputError: Naming the cell and what is wrong with it.
    """
    seeds = options.seeds
    if not 1 <= seeds <= 1000:
        raise InputError(f"--seeds is how many runs each cell has, from 1 to 1000, not {seeds}.")
    cells = cells_of(options.grid, options.cells)
    if len(cells) * seeds > MOST_RUNS:
        raise InputError(f"{len(cells)} cells of {seeds} runs are more than {MOST_RUNS} runs. Ask for fewer.")
    asked = recipe_of(options.recipe, options.settings)
    if asked.run.seed is not None:
        raise InputError("run.seed gives equal runs. Leave it out; --paired gives each cell's runs the seeds 0, 1, ...")
    if asked.privacy is not None and asked.privacy.selected_from is not None:
        raise InputError("no epsilon is known for runs each selected from others: leave out privacy.selected_from.")
    known: dict[str, Facts] = {}
    planned = [_resolved(asked, cell, options, known) for cell in cells]
    runs = [
        Run(group, number, options.first_seed + number - 1 if options.paired else None)
        for number in range(1, seeds + 1)
        for group in groups(planned)
    ]
    return Planned(options, asked, tuple(planned), tuple(runs))


def _resolved(asked: Recipe, settings: Settings, options: SweepOptions, known: dict[str, Facts]) -> PlannedCell:
    """A cell; ``known`` keeps the facts of data that several cells have."""
    with naming(f"the cell {in_words(settings)} cannot be"):
        recipe = recipe_of(asked, {**settings, **({"run.seed": 0} if options.paired else {})})
        identity = images_of(recipe)
        if identity not in known:
            known[identity] = loading.list_for(recipe, options.root, options.report).facts
        budget = None if options.budget is None else Path(options.budget)
        plan = dataclasses.replace(resolve(recipe, known[identity]), budget=budget)
        return PlannedCell(for_sharing(settings), plan, known[identity])


def images_of(recipe: Recipe) -> str:
    """Equal for recipes of the same images, as far as the recipes say."""
    return digest([recipe.data.model_dump(mode="json"), recipe.privacy and recipe.privacy.max_images_per_person])


def settle(planned: Planned) -> Planned:
    """The sweep with the digest of the weights that each cell starts from, once every network has been built.

    Raises:
        InputError: Naming a cell whose network cannot be built, or whose weights cannot be had.
    """
    from sfumato.models.weights import read_weights
    from sfumato.scaling.simulate import try_network

    @functools.cache
    def digest_of(name: str, source: str) -> str:
        return read_weights(name, source).digest

    built, cells = set(), []
    for cell in planned.cells:
        recipe = cell.plan.recipe
        model = recipe.model
        identity = digest([model.name, model.options, model.fix, dataclasses.asdict(cell.facts)])
        with naming(f"the cell {in_words(cell.settings)} cannot be"):
            if identity not in built:
                try_network(recipe, cell.facts, planned.options.trust)
            model.refuse_missing_weights()
            if model.init_from is not None and model.init_sha256 is None:
                model = model.model_copy(update={"init_sha256": digest_of(model.name, model.init_from)})
        built.add(identity)
        plan = dataclasses.replace(cell.plan, recipe=recipe.model_copy(update={"model": model}))
        cells.append(dataclasses.replace(cell, plan=plan))
    return dataclasses.replace(planned, cells=tuple(cells))


def groups(cells: Sequence[PlannedCell]) -> list[tuple[int, ...]]:
    """Which cells one run serves, by their numbers, the longest last; in the order of their first cells.

    Cells share a run where their resolved recipes differ in `training.num_steps` alone and update t is the same
    whatever T is: the noise is given and no target cuts the steps; the learning rate follows no schedule of T (cosine);
    nothing but plain held-out accuracy is measured at the end (no `augmentation.test_views`); T is at least 1 and
    stated by the cell. EMA's decay follows the update, not T.
    """
    together: dict[str, list[int]] = {}
    for number, cell in enumerate(cells):
        recipe = cell.plan.recipe
        has_target = recipe.privacy is not None and recipe.privacy.target_epsilon is not None
        depends = has_target or recipe.optimizer.schedule == "cosine" or recipe.augmentation.test_views > 0
        values = recipe.model_dump(mode="json")
        values["training"]["num_steps"] = None
        shares = NUM_STEPS in cell.settings and cell.num_steps > 0 and not depends
        together.setdefault(digest(values) if shares else f"cell {number}", []).append(number)
    return [tuple(sorted(group, key=lambda number: cells[number].num_steps)) for group in together.values()]
