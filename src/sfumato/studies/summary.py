"""From finished runs to what a sweep says of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sfumato.json_record import finite
from sfumato.run_folder.files import write_json
from sfumato.searching.work import Key
from sfumato.searching.worker import Begun
from sfumato.studies.plan import Planned, Reached, Run
from sfumato.studies.price import Spent, epsilon_of, epsilon_together
from sfumato.studies.result import Cell, CellRun, Sweep
from sfumato.studies.runs import train_accuracy
from sfumato.studies.statistics import paired, summarise

PRIVATE_FILE = "sweep_private.json"
_NEVER_COVERED = (
    "held-out images: accuracies on them are not private",
    f"accuracies on training images: {PRIVATE_FILE} and metrics_private.jsonl are for the owner alone",
    "choosing the recipe and what is swept, and other runs on the same images: epsilons add up",
)


def summary(
    planned: Planned,
    finished: Mapping[Key, Reached],
    begun: Mapping[Key, Sequence[Begun]],
    *,
    name: str,
    folder: Path,
    storage: str,
    axes: Sequence[str] | None = None,
    labels: Sequence[str] = (),
    before: Sequence[Spent] = (),
    not_covered: str | None = None,
) -> Sweep:
    """Everything that may be shown.

    Args:
        finished: Every run.
        begun: Of each run, where it was begun (`Worker.begun`).
        before: Runs of an earlier sweep, by which these cells were chosen: `epsilon_together` covers them, too.
        not_covered: Why nothing covers that choice; None: something does.
        name: Of the recipe.
        axes: Of the plot; None: all keys that differ, in their order.
        labels: Names of the first cells.
    """
    mine, again = spending(planned, finished, begun)
    spent = [*before, *mine]
    private = all(each.plan.private for each in spent)
    together, why_not = epsilon_together(spent) if not_covered is None else (None, not_covered)
    cells = [_cell(planned, finished, number) for number in range(len(planned.cells))]
    if planned.paired:
        first = [run.accuracy for run in cells[0].runs]
        others = [
            cell.model_copy(update={"paired": paired([run.accuracy for run in cell.runs], first)}) for cell in cells[1:]
        ]
        cells = [cells[0], *others]
    lines = list(_NEVER_COVERED)
    if private and together is None:
        lines.insert(0, f"choosing among these cells, and seeing more than one run: {why_not}")
    elif not private:
        lines.insert(0, "choosing among these cells: not every one is private")
    held_out = finished[planned.runs[0].key].held_out
    keys = list(dict.fromkeys(key for cell in planned.cells for key in cell.settings))
    for number, label in enumerate(labels[: len(cells)]):
        cells[number] = cells[number].model_copy(update={"label": label})
    return Sweep(
        recipe=name,
        output=str(folder),
        storage=storage,
        keys=keys,
        axes=keys if axes is None else list(axes),
        seeds=planned.seeds,
        paired=planned.paired,
        held_out=held_out,
        private=private,
        epsilon_together=together,
        delta=spent[0].plan.delta if together is not None else None,
        updates_together=sum(each.updates for each in spent) if private else None,
        begun_again=again,
        cells=cells,
        not_covered=lines,
        warnings=_warnings(planned, again, private, held_out),
    )


def spending(
    planned: Planned, finished: Mapping[Key, Reached], begun: Mapping[Key, Sequence[Begun]]
) -> tuple[list[Spent], list[str]]:
    """Every run that was begun anywhere, and the names of those that were begun again: elsewhere, or here after their
    folder was taken away.
    """
    spent, again = [], []
    for run in planned.runs:
        plan = planned.plan_of(run)
        steps = plan.mechanism.num_steps
        # What a storage says can be anybody's: never fewer than were planned.
        spent.append(Spent(plan, max(steps, finished[run.key].updates)))
        trials = begun.get(run.key, [Begun("", anew=True)])
        privacy = plan.recipe.privacy
        bounded = privacy is not None and privacy.target_epsilon is not None
        for place in dict.fromkeys(trial.place for trial in trials):
            here = [trial for trial in trials if trial.place == place]
            times = max(1, sum(trial.anew for trial in here))
            if place == trials[-1].place:  # what is finished is the last of those begun here
                times -= 1
                here = here[: max((number for number, trial in enumerate(here) if trial.anew), default=0)]
            if not times:
                continue
            again.append(run.name)
            # Its ledger is not here. Under a target it has no more releases than planned; without one, each trial may
            # have gone on in another environment, or met a sum that changed, and drawn all updates afresh.
            spent.append(Spent(plan, steps * times if bounded else 2 * steps * max(times, len(here))))
    return spent, again


def _cell(planned: Planned, finished: Mapping[Key, Reached], number: int) -> Cell:
    cell = planned.cells[number]
    mechanism = cell.plan.mechanism
    runs = [
        CellRun(
            run=run.name,
            seed=run.seed,
            accuracy=reached.looks[run.cells.index(number)].accuracy,
            accuracy_last=reached.looks[run.cells.index(number)].accuracy_last,
            # Updates that were drawn afresh may lie before or after this cell's last one: all count.
            updates=max(mechanism.num_steps, reached.updates - planned.steps_of(run)[-1] + mechanism.num_steps),
        )
        for run, reached in _runs_of(planned, finished, number)
    ]
    epsilon = epsilon_of(Spent(cell.plan, max(run.updates for run in runs)))
    private = cell.plan.private
    privacy = cell.plan.recipe.privacy
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


def _runs_of(planned: Planned, finished: Mapping[Key, Reached], number: int) -> list[tuple[Run, Reached]]:
    return [(run, finished[run.key]) for run in planned.runs if number in run.cells]


def _warnings(planned: Planned, again: Sequence[str], private: bool, held_out: str) -> list[str]:
    warnings = [
        f"{name} was begun again, in another folder or since its own was gone: its first beginning counts in "
        "epsilon_together, too"
        for name in again
        if private
    ]
    if held_out == "test":
        warnings.append(
            "cells are compared on test images: choosing among them makes test accuracy too good. Set data.split = "
            '"train" where there are validation images.'
        )
    for cell in planned.cells:
        warnings += [warning for warning in cell.plan.warnings if warning not in warnings]
    return warnings


def write_for_owner(planned: Planned, sweep: Sweep) -> None:
    """Accuracies on training images, in a file that only the owner can read: no guarantee covers them."""
    cells: list[dict[str, Any]] = []
    for cell in sweep.cells:
        steps = cell.num_steps
        found = [train_accuracy(Path(sweep.output) / run.run, steps) for run in cell.runs]
        known = [value for value in found if value is not None]
        summed = summarise(known).as_json() if known else None
        cells.append({"settings": cell.settings, "train_accuracy": summed, "runs": found})
    facts = {"private": False, "of": "training images, averaged weights: for the owner alone", "cells": cells}
    write_json(Path(sweep.output) / PRIVATE_FILE, facts, 0o600)
