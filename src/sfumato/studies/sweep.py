"""A whole sweep: a grid of settings times seeds, whoever makes its runs and however often they are killed.

Each run has its own folder, where it is gone on with after a kill. Whoever holds the lock beside that folder makes it:
processes of this machine, or of others that share the folder.
"""

import dataclasses
import math
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sfumato import config
from sfumato.accounting.formats import note
from sfumato.config import Recipe
from sfumato.data import loading
from sfumato.data.examples import dataset_digest
from sfumato.errors import InputError, MachineError, first_line
from sfumato.json_record import pick
from sfumato.planning.resolve import Plan
from sfumato.recipes import name_of
from sfumato.reporting.page import write_report
from sfumato.run_folder import launch, record
from sfumato.run_folder.files import (
    lock,
    read_json,
    refuse_among_images,
    refuse_links,
    refuse_name,
    write_atomically,
    write_json,
)
from sfumato.run_folder.ledger import LEDGER_FILE
from sfumato.run_folder.record import Metrics, Result
from sfumato.studies.grid import in_words
from sfumato.studies.page import render
from sfumato.studies.plan import Planned, PlannedCell, Run, SweepOptions, images_of, plan_sweep, settle
from sfumato.studies.result import CellRun, Sweep
from sfumato.studies.summary import summary, write_for_owner
from sfumato.training.logs import Progress
from sfumato.training.process import Interrupted, end_with, stop_on_sigterm
from sfumato.training.trainer import Trainer

PLAN_FILE, SWEEP_FILE = "plan.json", "sweep.json"
OWNER, IMAGES_FILE = "owner", "images.json"


def sweep(
    recipe: Recipe | Mapping[str, Any] | str | Path, grid: Mapping[str, Sequence[Any]] | None = None, **options: Any
) -> Sweep:
    """Trains a recipe under every setting of a grid, several times each. The same call goes on with what is there,
    after a kill too; from another machine that shares the folder it helps.

    Runs are private where the recipe is, each with randomness of its own. With ``paired`` they have public seeds and
    are not private.

    Args:
        recipe: As in `sfumato.train`.
        grid: The values of each key, such as {"optimizer.learning_rate": [1.0, 2.0]}; None takes the key out.
        options: As `SweepOptions` takes them: ``seeds``, ``output`` and others. With ``workers`` above 1 a script needs
            `if __name__ == "__main__"` around the call, since each process imports it.

    Returns:
        What sweep.json holds.

    Raises:
        InputError: If the sweep cannot be; nothing has run then.
        MachineError: If the disk fails.
        Interrupted, KeyboardInterrupt: What was checkpointed is kept; the same call goes on.
    """
    return sweep_by(SweepOptions(recipe, {} if grid is None else grid, **options))[0]


def sweep_by(
    options: SweepOptions, *, before: Sequence[Plan] = (), not_covered: str | None = None
) -> tuple[Sweep, list[Plan]]:
    """As `sweep`, and the plans of all its runs.

    Args:
        before: Runs of an earlier sweep, by which these cells were chosen.
        not_covered: Why no epsilon covers that choice, where none does.
    """
    name = name_of(options.recipe) if options.name is None else options.name
    folder = launch.new_folder(f"{name}-sweep") if options.output is None else Path(options.output)
    planned = settle(plan_sweep(dataclasses.replace(options, name=name, output=folder)))
    for cell in planned.cells:
        refuse_among_images(folder, cell.plan.recipe.data, options.root)
    begun = {run.name for run in planned.runs if (folder / run.name / LEDGER_FILE).exists()}
    launch.require_room([planned.plan_of(run) for run in planned.runs if run.name not in begun])
    _begin(folder, planned)
    with stop_on_sigterm():
        reached = work(planned, folder)
    held_out = record.read(folder / planned.runs[0].name / record.RESULT_FILE, Result).held_out
    found = summary(planned, reached, held_out, before, not_covered)
    write_json(folder / SWEEP_FILE, found.as_json())
    write_for_owner(found)
    write_atomically(folder / "sweep.csv", found.as_csv().encode())
    write_atomically(folder / "sweep.html", render(found).encode())
    return found, [*before, *planned.plans]


def _begin(folder: Path, planned: Planned) -> None:
    """Makes the folder of a sweep, or finds it to be this sweep's.

    Raises:
        InputError: If something else is there.
    """
    refuse_name(folder)
    refuse_links(folder)
    path, mine = folder / PLAN_FILE, planned.as_json()
    # Listed before the file is looked for: another process of the same command writes it before all else.
    others = folder.exists() and (not folder.is_dir() or any(PLAN_FILE not in each.name for each in folder.iterdir()))
    if not path.exists():
        if others:
            raise InputError(f"{folder} is not empty and holds no sweep. Choose another --output.")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, mine)
    theirs = read_json(path)
    changed = [key for key in mine if not isinstance(theirs, dict) or theirs.get(key) != mine[key]]
    if changed:
        what = f"{folder} holds another sweep: its {changed[0]} is another"
        raise InputError(f"{what}. Give what it was begun with, or another --output.")


def work(planned: Planned, folder: Path) -> dict[str, list[CellRun]]:
    """Makes runs until all are made, by whomever: what each reached for each of its cells, by its name."""
    maker = Maker(planned, folder)
    for cell in planned.cells:  # before anything runs, and for a sweep that is finished
        maker.trainer_of(cell)
    if planned.options.workers > 1:
        _work_side_by_side(planned, folder)
    maker.make_all(may_wait=True)
    return {run.name: _reached(folder / run.name, run, planned.steps_of(run)) for run in planned.runs}


class Maker:
    """Makes the runs of a sweep below one folder."""

    def __init__(self, planned: Planned, folder: Path) -> None:
        self.planned, self.folder, self.options = planned, folder, planned.options
        self._trainer: tuple[str, Trainer] | None = None

    def make_all(self, *, may_wait: bool) -> None:
        """Makes the runs that nobody else makes; then waits for those, and makes what was left of them."""
        for waits in (False, True) if may_wait else (False,):
            for run in self.planned.runs:
                place = self.folder / run.name
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.with_name(f".{place.name}.lock").open("a") as file:
                    is_mine = lock(file.fileno(), place, patience=math.inf if waits else 0.0)
                    if is_mine and not (place / record.RESULT_FILE).exists():
                        self._make(run, place)

    def _make(self, run: Run, place: Path) -> None:
        """Trains a run, or goes on with it."""
        cell, looks = self.planned.cell_of(run), self.planned.steps_of(run)
        resume = place.is_dir() and any(place.iterdir())
        result = self.trainer_of(cell).run_plan(self.planned.plan_of(run), place, resume=resume, looks=looks)
        write_report(place)
        done = sum((self.folder / each.name / record.RESULT_FILE).exists() for each in self.planned.runs)
        reached = f"{100 * result.accuracy:.2f} %; {done} of {len(self.planned.runs)} runs are done"
        self.options.report(f"{run.name} {in_words(cell.settings)}: {reached}")

    def trainer_of(self, cell: PlannedCell) -> Trainer:
        """With the images of this cell; those of the last one are kept.

        Raises:
            InputError: If they are others than when the sweep began: its cells could not be compared.
        """
        recipe, identity = cell.plan.recipe, images_of(cell.plan.recipe)
        if self._trainer is None or self._trainer[0] != identity:
            self._trainer = None  # two data sets may not fit
            dataset = loading.load_for(recipe, self.options.root, self.options.report)
            stated = images_of(config.shareable(recipe))  # wherever they lie
            path, digest = self.folder / OWNER / IMAGES_FILE, dataset_digest(dataset)
            known = read_json(path) if path.exists() else {}
            if dataset.facts != cell.facts or known.get(stated, digest) != digest:
                raise InputError(f"{self.folder} was begun with other images. Give those, or another --output.")
            if stated not in known:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                write_json(path, {**known, stated: digest}, 0o600)
            progress = Progress(message=self.options.report)
            trainer = Trainer(dataset, device=self.options.device, trust=self.options.trust, progress=progress)
            self._trainer = identity, trainer
        return self._trainer[1]


def _work_side_by_side(planned: Planned, folder: Path) -> None:
    """Processes of this machine make what they can. One that fails leaves its run to whoever works next."""
    options = dataclasses.replace(planned.options, recipe=planned.recipe, report=note)
    asked, context = dataclasses.replace(planned, options=options), multiprocessing.get_context("spawn")
    helpers = [context.Process(target=_help, args=(asked, folder, os.getpid())) for _ in range(options.workers)]
    for helper in helpers:
        helper.start()
    try:
        for helper in helpers:
            helper.join()
    finally:
        for helper in helpers:
            helper.terminate()  # which tells one that still works to stop with a checkpoint
        for helper in helpers:
            helper.join()
    failed = sum(helper.exitcode != 0 for helper in helpers)
    if failed:
        planned.options.report(f"{failed} of {len(helpers)} workers ended early; what they left is done here")


def _help(planned: Planned, folder: Path, first: int) -> None:
    """What a process of its own does. It ends with the first one, which started it."""
    import torch

    os.setpgrp()  # Ctrl-C is for the first process, which then stops the others
    warnings.simplefilter("ignore")  # as on the command line
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // planned.options.workers))
    end_with(first, signal.SIGTERM)  # which then stops with a checkpoint
    try:
        with stop_on_sigterm():
            Maker(planned, folder).make_all(may_wait=False)
    except (Interrupted, KeyboardInterrupt, InputError, MachineError) as error:
        note(f"a worker ended: {first_line(error)}")
        sys.exit(1)


def _reached(place: Path, run: Run, steps: list[int]) -> list[CellRun]:
    """What a finished run reached after each of these steps; the last of them stands for its end."""
    result = record.read(place / record.RESULT_FILE, Result)
    lines = {line.step: line for line in record.read_lines(place / record.METRICS_FILE, Metrics)}
    facts: dict[str, Any] = {"run": run.name, "seed": run.seed, "num_lost": result.num_lost}
    looks = [*(lines[step] for step in steps[:-1]), result]
    return [CellRun(**facts, **pick(look, "accuracy", "accuracy_last")) for look in looks]
