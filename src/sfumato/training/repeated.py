"""The same recipe several times: how far accuracy differs from run to run, and what all runs cost together."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sfumato import config
from sfumato.accounting.accountants import epsilon_together
from sfumato.errors import InputError
from sfumato.json_record import Record, finite
from sfumato.recipes import name_of
from sfumato.run_folder import launch, ledger
from sfumato.run_folder.record import Result
from sfumato.training.trainer import recipe_of, train

_EQUAL = "equal seeds give equal runs, which say nothing of the spread"


class Repeated(Record):
    """Runs that differ in their randomness alone.

    Attributes:
        accuracy: Mean over the runs.
        accuracy_spread: Standard deviation between runs; None of one run.
        epsilon_together: Of somebody who sees every run, at the delta of one; None where the runs are not
            private.
    """

    folder: str
    runs: list[Result]
    accuracy: float
    accuracy_spread: float | None
    epsilon_together: float | None

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "runs": [run.as_json() for run in self.runs]}


def repeat(
    recipe: config.Recipe | Mapping[str, Any] | str | Path,
    output: Path | str | None = None,
    *,
    times: int | None = None,
    seeds: Sequence[int] | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Repeated:
    """Trains a recipe several times, each in a folder of its own below ``output``. What an earlier call
    with the same output left is gone on with.

    Args:
        recipe: As `sfumato.train` takes it.
        output: Takes the run folders; None: a new one in runs/.
        times: So many runs, each with random numbers of its own: private ones, whose epsilons add up; or
        seeds: one run for each, its seed public: not private.
        settings, options: As `sfumato.train` takes them.

    Raises:
        InputError, MachineError, Interrupted: As `sfumato.train`.
    """
    refuse_repeats(recipe_of(recipe, settings), times, seeds)
    if "resume" in options:
        raise InputError("runs that are repeated go on by themselves: give the same command again, without --resume.")
    folder = launch.new_folder(name_of(recipe)) if output is None else Path(output)
    if any((folder / name).exists() for name in ("recipe.toml", ledger.LEDGER_FILE)):
        raise InputError(f"{folder} is a run's folder. Name a folder for several runs by --output.")
    numbers = range(1, (times or 0) + 1) if seeds is None else seeds
    named = {f"{'run' if seeds is None else 'seed'}-{number}": number for number in numbers}
    others = [path.parent.name for path in folder.glob(f"*/{ledger.LEDGER_FILE}") if path.parent.name not in named]
    if others:
        raise InputError(
            f"{folder} holds {max(others)} too, whose updates count for who sees the folder. Repeat as often as "
            "before, or name a new folder by --output."
        )
    runs = []
    for name, number in named.items():
        place = folder / name
        own = settings if seeds is None else {**settings, "run.seed": number}
        runs.append(train(recipe, place, settings=own, resume=place.is_dir() and any(place.iterdir()), **options))
    accuracies = [run.accuracy for run in runs]
    return Repeated(
        folder=str(folder),
        runs=runs,
        accuracy=statistics.fmean(accuracies),
        accuracy_spread=statistics.stdev(accuracies) if len(runs) > 1 else None,
        epsilon_together=_together(runs),
    )


def refuse_repeats(recipe: config.Recipe, times: int | None, seeds: Sequence[int] | None) -> None:
    """Refuses what `repeat` cannot repeat, before anything is looked at.

    Raises:
        InputError: Saying why.
    """
    if (times is None) == (seeds is None):
        raise InputError("runs are repeated by their number or by their seeds. Give --repeat or --seeds.")
    if seeds is not None:
        if not isinstance(seeds, Sequence) or not seeds or len(set(seeds)) != len(seeds):
            raise InputError(f"--seeds must name each seed once: {_EQUAL}.")
        return
    if type(times) is not int or not 1 <= times <= 1000:
        raise InputError(f"--repeat takes a number from 1 to 1000, not {times}.")
    if recipe.run.seed is not None:
        raise InputError(f"{_EQUAL}: leave run.seed out, or give --seeds.")
    if recipe.privacy is not None and recipe.privacy.selected_from is not None:
        raise InputError(
            "no epsilon is known for several runs that were each selected from others: leave out privacy.selected_from."
        )


def _together(runs: Sequence[Result]) -> float | None:
    """Epsilon of somebody who sees all runs."""
    one = runs[0]
    if not all(run.private for run in runs) or one.delta is None or one.accountant is None:
        return None
    if len({(run.num_examples, run.delta, run.unit) for run in runs}) > 1:
        raise InputError("the runs in this folder are of other images, so that no one epsilon covers them. Name a new.")
    mechanisms = [ledger.read(Path(run.run) / ledger.LEDGER_FILE).run.mechanism for run in runs]
    return finite(epsilon_together(mechanisms, one.delta, one.accountant).epsilon)
