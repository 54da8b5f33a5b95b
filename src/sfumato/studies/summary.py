"""From finished runs to what a sweep says of them, and what all of them cost together."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from sfumato.accounting import accountants
from sfumato.accounting.mechanism import Accountant
from sfumato.json_record import finite, pick
from sfumato.planning.claims import claims
from sfumato.planning.resolve import Plan
from sfumato.run_folder import record
from sfumato.run_folder.files import write_json
from sfumato.run_folder.record import PrivateMetrics
from sfumato.studies.plan import Planned
from sfumato.studies.result import Cell, CellRun, Sweep, paired, summarise

PRIVATE_FILE = "sweep_private.json"
_NEVER_COVERED = (
    "held-out images: accuracies on them are not private",
    f"accuracies on training images: {PRIVATE_FILE} and owner/ of each run are for the owner alone",
    "choosing the recipe and what is swept, and other runs on the same images: epsilons add up",
)


def summary(
    planned: Planned,
    reached: Mapping[str, Sequence[CellRun]],
    held_out: Literal["test", "valid"],
    before: Sequence[Plan] = (),
    not_covered: str | None = None,
) -> Sweep:
    """Everything that may be shown.

    Args:
        planned: Whose options have a name and a folder.
        reached: By every run for each of its cells, by its name.
        held_out: The split that accuracies were measured on.
        before: Runs of an earlier sweep, by which these cells were chosen: `epsilon_together` covers them, too.
        not_covered: Why nothing covers that choice; None: something does.
    """
    options, plans = planned.options, [*before, *planned.plans]
    private = all(plan.private for plan in plans)
    epsilon, why_not = epsilon_together(plans) if not_covered is None else (None, not_covered)
    cells: list[Cell] = []
    for number in range(len(planned.cells)):
        runs = [reached[run.name][run.cells.index(number)] for run in planned.runs if number in run.cells]
        cells.append(_cell(planned, number, runs, cells[0].runs if cells and options.paired else None))
    lines = list(_NEVER_COVERED)
    if private and epsilon is None:
        lines.insert(0, f"choosing among these cells, and seeing more than one run: {why_not}")
    elif not private:
        lines.insert(0, "choosing among these cells: not every one is private")
    keys = list(dict.fromkeys(key for cell in planned.cells for key in cell.settings))
    return Sweep(
        recipe=str(options.name),
        output=str(options.output),
        keys=keys,
        axes=keys if options.axes is None else list(options.axes),
        **pick(options, "seeds", "paired"),
        held_out=held_out,
        private=private,
        epsilon_together=epsilon,
        delta=plans[0].delta if epsilon is not None else None,
        updates_together=sum(plan.mechanism.num_steps for plan in plans) if private else None,
        cells=cells,
        not_covered=lines,
        warnings=_warnings(planned, cells, held_out),
    )


def _cell(planned: Planned, number: int, runs: list[CellRun], first: Sequence[CellRun] | None) -> Cell:
    """One cell; ``first`` are the runs that its own are paired with."""
    cell, labels = planned.cells[number], planned.options.labels
    mechanism, guarantee = cell.plan.mechanism, claims(cell.plan, cell.plan.mechanism)
    accuracies = [run.accuracy for run in runs]
    return Cell(
        **dict(summarise(accuracies)),
        settings=cell.settings,
        label=labels[number] if number < len(labels) else None,
        seeds=len(runs),
        **pick(guarantee, "private", "why_not_private", "epsilon", "epsilon_if_private", "delta"),
        noise_multiplier=finite(mechanism.noise_multiplier) or 0.0,
        **pick(mechanism, "batch_size", "num_steps", "num_examples"),
        shares_runs=any(len(run.cells) > 1 and number in run.cells for run in planned.runs),
        paired=None if first is None else paired(accuracies, [run.accuracy for run in first]),
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
            "cells are compared on test images: choosing among them makes test accuracy too good. Take --set "
            "data.split=train where there are validation images."
        )
    return list(dict.fromkeys([*warnings, *(warning for cell in planned.cells for warning in cell.plan.warnings)]))


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
    found = finite(accountants.epsilon_together([plan.mechanism for plan in plans], plans[0].delta, accountant).epsilon)
    return found, None if found is not None else "no finite epsilon covers them"


def _images(plan: Plan) -> tuple[Any, ...]:
    """Which images a run trains on, as its recipe says it."""
    stated = {"name", "path", "split", "num_examples", "classes"}
    return plan.mechanism.num_examples, plan.recipe.data.model_dump_json(include=stated)


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
        found = [_train_accuracy(Path(sweep.output) / run.run, cell.num_steps) for run in cell.runs]
        known = [value for value in found if value is not None]
        summed = summarise(known).as_json() if known else None
        cells.append({"settings": cell.settings, "train_accuracy": summed, "runs": found})
    facts = {"private": False, "of": "training images, averaged weights: for the owner alone", "cells": cells}
    write_json(Path(sweep.output) / PRIVATE_FILE, facts, 0o600)


def _train_accuracy(place: Path, step: int) -> float | None:
    """On training images after a step; None where it was not noted."""
    lines = record.read_lines(place / record.PRIVATE_METRICS_FILE, PrivateMetrics)
    return next((line.train_accuracy for line in lines if line.step == step), None)
