"""A whole sweep: a grid of settings times seeds, whoever makes its runs and however often they are killed."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sfumato.config import Recipe
from sfumato.errors import InputError
from sfumato.recipes import name_of
from sfumato.reporting.lines import note
from sfumato.run_folder import launch
from sfumato.run_folder.files import (
    read_json,
    refuse_among_images,
    refuse_links,
    refuse_name,
    write_atomically,
    write_first_json,
    write_json,
)
from sfumato.scaling.search.storage import file_in, file_of, shown
from sfumato.studies import crew
from sfumato.studies.page import render
from sfumato.studies.plan import Planned, plan_sweep
from sfumato.studies.price import Spent
from sfumato.studies.result import Sweep
from sfumato.studies.runs import work
from sfumato.studies.settled import settle
from sfumato.studies.summary import spending, summary, write_for_owner
from sfumato.training.interrupt import stop_on_sigterm

PLAN_FILE, SWEEP_FILE = "plan.json", "sweep.json"


def sweep(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    grid: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    *,
    cells: Sequence[Mapping[str, Any]] = (),
    seeds: int = 1,
    paired: bool = False,
    output: Path | str | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    name: str | None = None,
    axes: Sequence[str] | None = None,
    labels: Sequence[str] = (),
    workers: int = 1,
    storage: str | None = None,
    data_root: Path | str | None = None,
    device: str = "auto",
    trust: Collection[str] = (),
    report: Callable[[str], None] = note,
) -> Sweep:
    """Trains a recipe under every setting of a grid, several times each. The same call goes on with what is there,
    after a kill too; from another machine with the same storage it helps.

    Runs are private where the recipe is, each with a key of its own. With ``paired`` they have public seeds and are not
    private.

    Args:
        recipe: As in `sfumato.train`.
        grid: The values of each key, such as {"optimizer.learning_rate": [1.0, 2.0]}; None takes the key out.
        cells: Whole settings to try, each with all of the grid.
        seeds: How many runs each cell has.
        paired: Run n of every cell has seed n - 1, so that cells differ by their settings alone.
        output: The folder of the sweep; None: a new one in runs/.
        settings: What is set in every cell.
        name: Of the recipe, for the page.
        axes: The key on the plot's axis, then those that make its lines; None: all keys in their order. Empty: labels.
        labels: Names of the cells, in their order.
        workers: Processes on this machine.
        storage: "sqlite:///FILE", "journal:FILE" or "postgresql://..."; default: a file in ``output``.
        data_root, device, trust: See `sfumato.train`.
        report: Takes lines about runs; default: stderr.

    Returns:
        What sweep.json holds.

    Raises:
        InputError: If the sweep cannot be; nothing has run then.
        MachineError: If the disk or the storage fails.
        Interrupted, KeyboardInterrupt: Every update is kept; the same call goes on.
    """
    return made(
        recipe,
        grid,
        cells=cells,
        seeds=seeds,
        paired=paired,
        output=output,
        settings=settings,
        name=name,
        axes=axes,
        labels=labels,
        workers=workers,
        storage=storage,
        data_root=data_root,
        device=device,
        trust=trust,
        report=report,
    )[0]


def made(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    grid: Mapping[str, Sequence[Any]],
    *,
    cells: Sequence[Mapping[str, Any]],
    seeds: int,
    paired: bool,
    output: Path | str | None,
    settings: Mapping[str, Any],
    name: str | None,
    axes: Sequence[str] | None,
    labels: Sequence[str],
    workers: int,
    storage: str | None,
    data_root: Path | str | None,
    device: str,
    trust: Collection[str],
    report: Callable[[str], None],
    first_seed: int = 0,
    before: Sequence[Spent] = (),
    not_covered: str | None = None,
) -> tuple[Sweep, list[Spent]]:
    """As `sweep`, and what its runs spent.

    Args:
        first_seed: Of paired runs.
        before: What an earlier sweep spent, by which these cells were chosen.
        not_covered: Why no epsilon covers that choice, where none does.
    """
    if type(workers) is not int or not 1 <= workers <= 1024:
        raise InputError(f"--workers is how many processes work here, from 1 to 1024, not {workers!r}.")
    root = None if data_root is None else Path(data_root)
    planned = plan_sweep(
        recipe,
        grid,
        cells,
        settings=settings,
        seeds=seeds,
        paired=paired,
        data_root=root,
        report=report,
        first_seed=first_seed,
    )
    planned = settle(planned, trust)
    name = name_of(recipe) if name is None else name
    folder = launch.new_folder(f"{name}-sweep") if output is None else Path(output)
    url = storage or file_in(folder)
    for written in (folder, file_of(url) or folder):
        for cell in planned.cells:
            refuse_among_images(written, cell.plan.recipe.data, root)
    prepare(folder, planned)
    place = None if root is None else str(root)
    asked = crew.Asked(planned.recipe, grid, cells, seeds, paired, first_seed, str(folder), url, place, device, trust)
    with stop_on_sigterm():
        if workers > 1:
            crew.work(asked, workers, report)
        finished, begun = work(planned, folder, url, root, device, trust, report)
    spent, _ = spending(planned, finished, begun)
    found = summary(
        planned,
        finished,
        begun,
        name=name,
        folder=folder,
        storage=shown(url),
        axes=axes,
        labels=labels,
        before=before,
        not_covered=not_covered,
    )
    write_json(folder / SWEEP_FILE, found.as_json())
    write_for_owner(planned, found)
    write_atomically(folder / "sweep.csv", found.as_csv().encode())
    write_atomically(folder / "sweep.html", render(found).encode())
    return found, [*before, *spent]


def prepare(folder: Path, planned: Planned) -> None:
    """Makes the folder of a sweep, or finds it to be this sweep's.

    Raises:
        InputError: If something else is there.
    """
    refuse_name(folder)
    path, mine = folder / PLAN_FILE, planned.as_json()
    write_first_json(path, mine, "sweep")
    refuse_links(folder)
    theirs = read_json(path)
    changed = [key for key in mine if not isinstance(theirs, dict) or theirs.get(key) != mine[key]]
    if changed:
        raise InputError(
            f"{folder} holds another sweep: its {changed[0]} is another. Give what it was begun with to go on with "
            "it, or another --output."
        )
