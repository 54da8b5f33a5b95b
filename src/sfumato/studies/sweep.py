"""A whole sweep: a grid of settings times seeds, whoever makes its runs and however often they are killed."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sfumato.config import Recipe
from sfumato.errors import InputError
from sfumato.planning.resolve import Plan
from sfumato.recipes import name_of
from sfumato.run_folder import launch, record
from sfumato.run_folder.files import (
    read_json,
    refuse_among_images,
    refuse_links,
    refuse_name,
    write_atomically,
    write_json,
)
from sfumato.studies.page import render
from sfumato.studies.plan import Planned, SweepOptions, plan_sweep, settle
from sfumato.studies.result import Sweep
from sfumato.studies.runs import work
from sfumato.studies.summary import summary, write_for_owner
from sfumato.training.process import stop_on_sigterm

PLAN_FILE, SWEEP_FILE = "plan.json", "sweep.json"


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
    _begin(folder, planned)
    with stop_on_sigterm():
        reached = work(planned, folder)
    held_out = record.read(folder / planned.runs[0].name / record.RESULT_FILE, record.Result).held_out
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
