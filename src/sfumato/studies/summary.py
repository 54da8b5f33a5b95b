"""From finished runs to what a sweep says of them, and what all of them cost together."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sfumato.accounting.accountants import epsilon_together as together
from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.json_record import finite
from sfumato.planning.resolve import Plan
from sfumato.run_folder.files import write_json
from sfumato.studies.plan import Planned, SweepOptions
from sfumato.studies.result import Cell, CellRun, Sweep, paired, summarise
from sfumato.studies.runs import Reached, train_accuracy

PRIVATE_FILE = "sweep_private.json"
_NEVER_COVERED = (
    "held-out images: accuracies on them are not private",
    f"accuracies on training images: {PRIVATE_FILE} and owner/ of each run are for the owner alone",
    "choosing the recipe and what is swept, and other runs on the same images: epsilons add up",
)


def plans_of(planned: Planned) -> list[Plan]:
    """Of every run of a sweep."""
    return [planned.plan_of(run) for run in planned.runs]


def summary(
    planned: Planned,
    finished: Mapping[str, Reached],
    options: SweepOptions,
    *,
    name: str,
    folder: Path,
    before: Sequence[Plan] = (),
    not_covered: str | None = None,
) -> Sweep:
    """Everything that may be shown.

    Args:
        finished: Every run, by its name.
        name: Of the recipe.
        before: Runs of an earlier sweep, by which these cells were chosen: `epsilon_together` covers them, too.
        not_covered: Why nothing covers that choice; None: something does.
    """
    plans = [*before, *plans_of(planned)]
    private = all(plan.private for plan in plans)
    epsilon, why_not = epsilon_together(plans) if not_covered is None else (None, not_covered)
    cells = [_cell(planned, finished, number) for number in range(len(planned.cells))]
    if planned.paired:
        first = [run.accuracy for run in cells[0].runs]
        others = [
            cell.model_copy(update={"paired": paired([run.accuracy for run in cell.runs], first)}) for cell in cells[1:]
        ]
        cells = [cells[0], *others]
    for number, label in enumerate(options.labels[: len(cells)]):
        cells[number] = cells[number].model_copy(update={"label": label})
    lines = list(_NEVER_COVERED)
    if private and epsilon is None:
        lines.insert(0, f"choosing among these cells, and seeing more than one run: {why_not}")
    elif not private:
        lines.insert(0, "choosing among these cells: not every one is private")
    keys = list(dict.fromkeys(key for cell in planned.cells for key in cell.settings))
    held_out = finished[planned.runs[0].name].held_out
    return Sweep(
        recipe=name,
        output=str(folder),
        keys=keys,
        axes=keys if options.axes is None else list(options.axes),
        seeds=planned.seeds,
        paired=planned.paired,
        held_out=held_out,
        private=private,
        epsilon_together=epsilon,
        delta=plans[0].delta if epsilon is not None else None,
        updates_together=sum(plan.mechanism.num_steps for plan in plans) if private else None,
        cells=cells,
        not_covered=lines,
        warnings=_warnings(planned, cells, held_out),
    )


def _cell(planned: Planned, finished: Mapping[str, Reached], number: int) -> Cell:
    cell = planned.cells[number]
    runs = []
    for run in planned.runs:
        if number in run.cells:
            reached = finished[run.name]
            look = reached.looks[run.cells.index(number)]
            runs.append(
                CellRun(
                    run=run.name,
                    seed=run.seed,
                    accuracy=look.accuracy,
                    accuracy_last=look.accuracy_last,
                    num_lost=reached.num_lost,
                )
            )
    mechanism, private, privacy = cell.plan.mechanism, cell.plan.private, cell.plan.recipe.privacy
    epsilon = None if privacy is None else _epsilon(_sampled(cell.plan), privacy.delta, privacy.accountant)
    return Cell(
        **dict(summarise([run.accuracy for run in runs])),
        settings=cell.settings,
        label=None,
        seeds=len(runs),
        private=private,
        why_not_private=cell.plan.why_not_private,
        epsilon=epsilon if private else None,
        epsilon_if_private=None if private else epsilon,
        delta=None if privacy is None else privacy.delta,
        noise_multiplier=finite(mechanism.noise_multiplier) or 0.0,
        batch_size=mechanism.batch_size,
        num_steps=mechanism.num_steps,
        num_examples=mechanism.num_examples,
        shares_runs=any(len(run.cells) > 1 and number in run.cells for run in planned.runs),
        paired=None,
        runs=runs,
    )


def _warnings(planned: Planned, cells: Sequence[Cell], held_out: str) -> list[str]:
    lost = {run.run: run.num_lost for cell in cells for run in cell.runs if run.num_lost}
    warnings = [
        f"{name} was killed and lost {count} updates, which count and were not applied: it compares with the others as "
        "a shorter run"
        for name, count in lost.items()
    ]
    if held_out == "test":
        warnings.append(
            "cells are compared on test images: choosing among them makes test accuracy too good. Set data.split = "
            '"train" where there are validation images.'
        )
    for cell in planned.cells:
        warnings += [warning for warning in cell.plan.warnings if warning not in warnings]
    return warnings


def epsilon_together(plans: Sequence[Plan]) -> tuple[float | None, str | None]:
    """Epsilon of somebody who sees every run, at the delta of one; runs may differ in all that a mechanism has but
    its images.

    Returns:
        Epsilon and None, or None and why there is none.
    """
    if not all(plan.private for plan in plans):
        return None, "not every cell is private"
    for facts, why_not in (
        (_images, "the cells do not train on the same images, and what is private of one is none of another"),
        (_unit, "the cells protect different units, one image or one person, which have no epsilon in common"),
        (lambda plan: plan.delta, "the cells have different deltas: their epsilon together is computed at one"),
    ):
        if len({facts(plan) for plan in plans}) > 1:
            return None, why_not
    accountant: Accountant = "rdp" if all(plan.recipe.budget.accountant == "rdp" for plan in plans) else "pld"
    found = finite(together([_sampled(plan) for plan in plans], plans[0].delta, accountant).epsilon)
    return found, None if found is not None else "no finite epsilon covers them"


def _sampled(plan: Plan) -> Mechanism:
    """Under Poisson sampling: of a plan that has another, what that would have given."""
    return plan.mechanism.replace(sampling="poisson")


@functools.cache  # many cells of a sweep have one mechanism
def _epsilon(mechanism: Mechanism, delta: float, accountant: Accountant) -> float | None:
    from sfumato.accounting.accountants import epsilon

    return finite(epsilon(mechanism, delta, accountant).epsilon)


def _images(plan: Plan) -> tuple[Any, ...]:
    """Which images a run trains on, as its recipe says it."""
    data = plan.recipe.data
    classes = None if data.classes is None else tuple(data.classes)
    return plan.mechanism.num_examples, data.name, data.path, data.split, data.num_examples, classes


def _unit(plan: Plan) -> tuple[Any, ...]:
    """Whose contribution its epsilon is for."""
    privacy = plan.recipe.budget
    if privacy.unit == "image":
        return ("image",)
    return "person", privacy.max_images_per_person, privacy.person_sampling, plan.recipe.data.group_by


def write_for_owner(sweep: Sweep) -> None:
    """Accuracies on training images, in a file that only the owner can read: no guarantee covers them."""
    cells: list[dict[str, Any]] = []
    for cell in sweep.cells:
        found = [train_accuracy(Path(sweep.output) / run.run, cell.num_steps) for run in cell.runs]
        known = [value for value in found if value is not None]
        summed = summarise(known).as_json() if known else None
        cells.append({"settings": cell.settings, "train_accuracy": summed, "runs": found})
    facts = {"private": False, "of": "training images, averaged weights: for the owner alone", "cells": cells}
    write_json(Path(sweep.output) / PRIVATE_FILE, facts, 0o600)
