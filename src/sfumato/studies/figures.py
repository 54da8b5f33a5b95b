"""The papers' figures and tables as files: which sweep answers them, at full size and as a small twin."""

import dataclasses
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pydantic
from pydantic import Field

from sfumato import config
from sfumato.errors import InputError, nearest
from sfumato.json_record import pick
from sfumato.planning.resolve import Plan
from sfumato.run_folder.files import write_json
from sfumato.studies.claims import Claim, Verdict, judge
from sfumato.studies.grid import cells_of, for_sharing, in_words
from sfumato.studies.plan import Planned, SweepOptions, plan_sweep
from sfumato.studies.result import MECHANISM, Cell, CellRun, Sweep

FIGURE_FILE, TUNING, BEST = "figure.json", "tuning", "best"
FOLDER = Path(__file__).parent.parent / "figures"
Scale = Literal["full", "small"]


class _Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class Study(_Closed):
    """One sweep that a figure shows."""

    recipe: str
    settings: dict[str, Any] = Field(default_factory=dict)
    """What is set in every cell."""
    unset: list[str] = Field(default_factory=list)
    """Keys that are taken out of the recipe, so that its budget decides them."""
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    """The values of each key."""
    cells: list[dict[str, Any]] = Field(default_factory=list)
    """Whole settings, each with all of the grid."""
    labels: list[str] = Field(default_factory=list)
    """Names of the listed cells, where there is no grid but of tuned keys."""
    axes: list[str] = Field(default_factory=list)
    """The key of the plot's axis, then those that make its lines; without any, labels stand on the axis."""
    seeds: int = Field(ge=1, le=1000)
    paired: bool = False
    """Whether its runs have public seeds in any case: simulations, whose noise is too small for any epsilon."""
    tuned: list[str] = Field(default_factory=list)
    """Keys of the grid of which each point shows the best value, by the held-out accuracy of one run of each cell;
    `seeds` runs of the best cell are then made anew."""
    claims: list[Claim] = Field(default_factory=list)
    """What the paper states of it, as questions to this sweep."""
    needs: str | None = None
    """What must be there first: weights, or images that are not public."""
    assumed: list[str] = Field(default_factory=list)
    """What the paper does not state and this file had to choose."""

    @pydantic.model_validator(mode="after")
    def _refuse_what_its_sweep_cannot_show(self) -> "Study":
        if not self.grid and not self.cells:
            return self  # `sweep` refuses it
        cells = cells_of(self.grid, [config.dotted(cell) for cell in self.cells])
        known = list(dict.fromkeys(key for cell in cells for key in cell))
        for name, keys in (("tuned", self.tuned), ("axes", self.axes)):
            other = next((key for key in keys if key not in known), None)
            if other is not None:
                raise ValueError(f"{name} names {other}, which is not swept. {nearest(other, known)}")
        run = CellRun(run="", seed=0, accuracy=0.5, accuracy_last=0.5, num_lost=0)
        facts: dict[str, Any] = {"runs": [run], "batch_size": 1, "num_steps": 1, "num_examples": 1}
        made_up = [Cell.model_construct(settings=settings, label=None, **facts) for settings in cells]
        shown = [found[0] for found in _by_point(made_up, self.tuned)]  # of tuned keys one value is left at each point
        for number, cell in enumerate(shown):
            kept = {key: cell.settings[key] for key in cell.settings if key not in self.tuned}
            label = self.labels[number] if number < len(self.labels) else None
            shown[number] = cell.model_copy(update={"settings": kept, "label": label})
        for claim in self.claims:  # refuses what these cells do not answer
            judge(claim, Sweep.model_construct(cells=shown, seeds=1, paired=True))
        return self


class Figure(_Closed):
    """A figure or table of a paper."""

    source: str
    caption: str
    """What it shows, in our own words."""
    not_stated: list[str] = Field(default_factory=list)
    """What of it the paper does not say."""
    paper: list[str] = Field(default_factory=list)
    """Its numbers, as far as they stand in the text."""
    instead: str | None = None
    """The command that answers it, where no sweep does."""
    full: Study | None = None
    small: Study | None = None


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a sweep computes.

    Attributes:
        runs: Cells that one run serves count once.
        updates: Of all runs.
        view_gradients: Images in expected batches times views, over all updates.
    """

    runs: int
    updates: int
    view_gradients: int


def names() -> list[str]:
    """Every figure, such as "de2022/figure-3"."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.toml"))


def read_figure(name: str) -> Figure:
    """A figure by its name, or from a TOML file.

    Raises:
        InputError: If there is none, or the file says something that no figure says.
    """
    path = FOLDER / f"{name}.toml" if name in names() else Path(name)
    if path.suffix != ".toml":
        raise InputError(f"there is no figure {name!r}. {nearest(name, names())} `sfumato figures list` names all.")
    values = config.read(path)
    try:
        return Figure.model_validate(values)
    except pydantic.ValidationError as error:
        raise InputError(_explain(path, error)) from None


def _explain(path: Path, error: pydantic.ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        model = Claim if "claims" in where else Study if len(where) > 1 else Figure
        return f"{path}: {'.'.join(where)} is no key of a figure. {nearest(where[-1], list(model.model_fields))}"
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    return f"{path}: {'.'.join(where)} is not possible: {message[0].lower()}{message[1:]}. Correct it."


def study_of(name: str, figure: Figure, scale: Scale) -> Study:
    """The sweep of a figure at a scale.

    Raises:
        InputError: If it has none.
    """
    sizes = {"full": figure.full, "small": figure.small}
    study, others = sizes[scale], [other for other, each in sizes.items() if each is not None]
    if study is None and others:
        raise InputError(f"{name} has no {scale} size. Ask for --scale {others[0]}.")
    if study is None:
        raise InputError(f"no sweep answers {name}: {figure.instead or 'it shows results of others'}.")
    return study


def options_of(study: Study, **options: Any) -> SweepOptions:
    """The sweep of a figure; ``options`` as `SweepOptions` takes them."""
    asked: dict[str, Any] = {"seeds": study.seeds} | options
    asked["paired"] = asked.get("paired", False) or study.paired
    cells = [config.dotted(cell) for cell in study.cells]
    return SweepOptions(study.recipe, study.grid, cells, settings=settings_of(study), axes=study.axes, **asked)


def plan_figure(study: Study, *, seeds: int | None = None, paired: bool = False) -> Planned:
    """Every cell of a figure's sweep, resolved; no image is read. Where keys are tuned, once each."""
    runs = study.seeds if seeds is None else seeds
    return plan_sweep(options_of(study, seeds=1 if study.tuned else runs, paired=paired))


def settings_of(study: Study) -> dict[str, Any]:
    """What is set, or taken out (None), in every cell."""
    return {**dict.fromkeys(study.unset), **config.dotted(study.settings)}


def cost(plans: Sequence[Plan]) -> Cost:
    """Of runs."""
    updates = [plan.mechanism.num_steps for plan in plans]
    views = [plan.mechanism.batch_size * max(1, plan.recipe.augmentation.augmult) for plan in plans]
    return Cost(len(plans), sum(updates), sum(map(operator.mul, updates, views)))


def cost_at_most(study: Study, planned: Planned, seeds: int | None = None) -> Cost:
    """Of a figure: where keys are tuned, of one run of each cell and of so many of the dearest at each point."""
    points = _by_point(planned.cells, study.tuned) if study.tuned else []
    dearest = [max((cell.plan for cell in cells), key=lambda plan: cost([plan]).view_gradients) for cells in points]
    return cost([*planned.plans, *(study.seeds if seeds is None else seeds) * dearest])


def best_cells(sweep: Sweep, tuned: list[str]) -> list[Cell]:
    """For each setting of the other keys the cell with the best mean held-out accuracy, in the order of the sweep.

    It is chosen by what it reports: a little too good, the more so the fewer runs.
    """
    return [max(cells, key=lambda cell: cell.mean) for cells in _by_point(sweep.cells, tuned)]


def why_not_covered(tuning: Sweep, tuned: list[str]) -> str | None:
    """Why no epsilon covers the tuning and the runs that were chosen by it; None where one does.

    Privacy losses add up for mechanisms that were fixed before anything was seen. Which batch, noise and length is run
    again must not depend on private runs, nor how many runs there are.
    """
    kinds = [{tuple(pick(cell, *MECHANISM).values()) for cell in cells} for cells in _by_point(tuning.cells, tuned)]
    if any(len(mechanisms) > 1 for mechanisms in kinds):
        return "which batch, noise or length is run again was chosen by looking at private runs"
    if any(cell.shares_runs for cell in tuning.cells):
        return "how many runs serve the chosen cells was decided by looking at private runs"
    return None


def _by_point(cells: Sequence[Any], tuned: list[str]) -> list[list[Any]]:
    """Cells that differ in the tuned keys alone, together; in the order of their first ones."""
    points: dict[str, list[Any]] = {}
    for cell in cells:
        point = repr(sorted((key, value) for key, value in cell.settings.items() if key not in tuned))
        points.setdefault(point, []).append(cell)
    return list(points.values())


class Answer(NamedTuple):
    """What a figure's sweep found.

    Attributes:
        found: Of every cell; where keys are tuned, of the best cell at each setting of the others, by runs that did
            not choose it.
        tuning: One run of every cell, by which the best were chosen; None: nothing is tuned.
        verdicts: Of the study's claims.
    """

    found: Sweep
    tuning: Sweep | None
    verdicts: list[Verdict]


def run_figure(study: Study, options: SweepOptions) -> Answer:
    """Makes the sweep of a figure, or goes on with it. Where keys are tuned there are two in its folder, `tuning` and
    `best`; each is gone on with after a kill.

    Guarantee: `epsilon_together` of what is found covers the runs of the tuning, too; it is None where what was chosen
        decides the mechanisms themselves.

    Args:
        options: From `options_of`, with name and output. Its seeds are the runs of each cell without that of the
            tuning. Paired ones have the seeds from 1, since seed 0 chose.

    Raises:
        InputError, MachineError, Interrupted: As `sweep`.
    """
    from sfumato.studies.sweep import PLAN_FILE, sweep_by

    folder, tuning = Path(options.output or ""), None
    before: list[Plan] = []
    if study.tuned:
        if (folder / PLAN_FILE).exists():
            raise InputError(f"{folder} holds another sweep, not this figure's two. Give another --output.")
        tuning, before = sweep_by(dataclasses.replace(options, seeds=1, output=folder / TUNING))
        asked = {in_words(for_sharing(each)): each for each in cells_of(options.grid, options.cells)}
        best = [asked[in_words(cell.settings)] for cell in best_cells(tuning, study.tuned)]
        options.report(f"tuned: {', '.join(study.tuned)}; {len(best)} of {len(tuning.cells)} cells are run again")
        options = dataclasses.replace(options, grid={}, cells=best, first_seed=1, output=folder / BEST)
    why_not = None if tuning is None else why_not_covered(tuning, study.tuned)
    found, _ = sweep_by(dataclasses.replace(options, labels=study.labels), before=before, not_covered=why_not)
    verdicts = [judge(claim, found) for claim in study.claims]
    facts = {
        "figure": found.recipe,
        "verdicts": [verdict.as_json() for verdict in verdicts],
        "tuning": None if tuning is None else tuning.as_json(),
        "found": found.as_json(),
    }
    write_json(folder / FIGURE_FILE, facts)
    return Answer(found, tuning, verdicts)
