"""`sfumato sweep`: a grid of settings times seeds; `sfumato figures`: the papers' figures and tables."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sfumato.accounting import formats
from sfumato.cli import options, output
from sfumato.cli.train import asked
from sfumato.json_record import pick

if TYPE_CHECKING:
    from sfumato.studies.claims import Verdict
    from sfumato.studies.result import Sweep


def sweep(
    recipe: str,
    *,
    grid: Annotated[list[str] | None, typer.Option(metavar="SECTION.KEY=V1,V2")] = None,
    cells: Path | None = None,
    seeds: str | None = None,
    paired: bool = False,
    workers: options.Workers = 1,
    epsilon: float | None = None,
    delta: float | None = None,
    set_: options.Set = None,
    output_: Path | None = None,
    budget: Path | None = None,
    data_root: Path | None = None,
    device: str = "auto",
    trust: options.Trust = None,
    json_: bool = False,
) -> None:
    """Trains a recipe under every setting of a grid, several times each: medians, means and spreads.

    Args:
        grid: Values of one key; may be repeated.
        cells: TOML file of whole settings to try: a [[cell]] table for each.
        seeds: How many runs each cell has; or their public seeds from 0 on, 0-4, as --paired gives them.
        output_: Default: runs/<recipe>-sweep; the same again goes on.

    Example:
        sfumato sweep demo/digits --grid optimizer.learning_rate=1,2,4 --seeds 3 --output sweeps/rates
    """
    name, parsed, trusted = asked(recipe, {"target_epsilon": epsilon, "delta": delta}, set_, data_root, trust)

    from sfumato.studies.grid import parse_grid, read_cells
    from sfumato.studies.plan import SweepOptions
    from sfumato.studies.sweep import sweep_by

    runs, paired = options.runs_of_a_cell(seeds, paired)
    how: dict[str, Any] = {"paired": paired, "workers": workers, "data_root": data_root, "device": device}
    how |= {"seeds": 1 if runs is None else runs, "name": name, "trust": trusted, "budget": budget}
    folder = output_ or Path("runs") / f"{name.replace('/', '-')}-sweep"
    listed = [] if cells is None else read_cells(cells)
    wanted = SweepOptions(parsed, parse_grid(grid or []), listed, output=folder, **how)
    with output.interruptible():
        found, _ = sweep_by(wanted)
    output.answer(found, json_, show)


def show(found: "Sweep") -> None:
    """The cells in words, then what they cost."""
    from sfumato.studies.grid import in_words

    for cell in found.cells:
        spread = pair = ""
        if cell.std is not None:
            spread = f" (std {100 * cell.std:.2f}, standard error {_points(cell.standard_error)})"
        if cell.paired is not None:
            error = cell.paired.standard_error
            pair = f"; {100 * cell.paired.difference:+.2f} to the first"
            pair += "" if error is None else f" (standard error {_points(error)})"
        epsilon = f"epsilon {formats.epsilon_text(cell.epsilon)}" if cell.private else "not private"
        median, mean = output.per_cent(cell.median), output.per_cent(cell.mean)
        output.say(f"{in_words(cell.settings)}: median {median}, mean {mean}{spread}{pair}; {epsilon}")
    for warning in found.warnings:
        output.warn(warning)
    if found.epsilon_together is not None and found.delta is not None:
        together, delta = formats.epsilon_text(found.epsilon_together), formats.delta_text(found.delta)
        output.say(f"epsilon {together} of all runs together, at delta {delta}: it covers choosing among them")
    else:
        output.say(f"not covered: {found.not_covered[0]}")
    output.say(f"page        {Path(found.output) / 'sweep.html'}")


def _points(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.2f}"


def list_(*, json_: bool = False) -> None:
    """Names every figure and table, and how it is answered.

    Example:
        sfumato figures list
    """
    from sfumato.studies.figures import names, read_figure

    figures: list[dict[str, Any]] = []
    for name in names():
        figure = read_figure(name)
        scales = [scale for scale in ("full", "small") if getattr(figure, scale) is not None]
        facts = {"name": name, "source": figure.source, "caption": figure.caption, "scales": scales}
        figures.append({**facts, "instead": figure.instead, "not_stated": figure.not_stated})
        if not json_:
            output.say(f"{name:<24} {', '.join(scales) or figure.instead:<12} {figure.caption}")
    if json_:
        output.print_json({"figures": figures})


def run(
    name: str,
    *,
    scale: Literal["full", "small"] = "full",
    train: bool = False,
    seeds: str | None = None,
    paired: bool = False,
    workers: options.Workers = 1,
    output_: Path | None = None,
    data_root: Path | None = None,
    device: str = "auto",
    json_: bool = False,
) -> None:
    """Trains the small twin of a figure; plans the figure at full size, or trains it with --train.

    Keys that a figure tunes are tuned with one run of each cell; --seeds runs of the best are made then.

    Args:
        name: Of a figure (`sfumato figures list`), or the path of a TOML file.
        scale: small: the same question in minutes on two cores; or full.
        train: Trains the full size; without it, that is planned with its cost.
        seeds: How many runs each cell has; or their public seeds from 0 on, 0-4, as --paired gives them.
        output_: Default: runs/<figure>-<scale>; the same again goes on.

    Example:
        sfumato figures run de2022/figure-3 --scale small
    """
    from sfumato.studies import figures

    figure = figures.read_figure(name)
    study = figures.study_of(name, figure, scale)
    runs, paired = options.runs_of_a_cell(seeds, paired)
    planned = figures.plan_figure(study, seeds=runs, paired=paired)
    facts: dict[str, Any] = {"figure": name, "scale": scale, "caption": figure.caption, "not_stated": figure.not_stated}
    facts |= {"assumed": study.assumed, "needs": study.needs, "paper": figure.paper, "tuned": study.tuned}
    facts["cost"] = vars(figures.cost_at_most(study, planned, runs))
    if scale == "full" and not train:
        numbers = ("noise_multiplier", "batch_size", "num_steps")
        plans = [{"settings": cell.settings, **pick(cell.plan.mechanism, *numbers)} for cell in planned.cells]
        output.answer({**facts, "trained": False, "planned": plans}, json_, _show_plan)
        return
    how: dict[str, Any] = {"paired": paired, "workers": workers, "data_root": data_root, "device": device}
    how |= {"seeds": study.seeds if runs is None else runs, "name": f"{name} ({scale})"}
    folder = output_ or Path("runs") / f"{name.replace('/', '-')}-{scale}"
    wanted = figures.options_of(study, output=folder, **how)
    with output.interruptible():
        found, tuning, verdicts = figures.run_figure(study, wanted)
    if json_:
        beside = {"tuning": None if tuning is None else tuning.as_json(), "verdicts": [v.as_json() for v in verdicts]}
        output.print_json({**found.as_json(), **facts, "trained": True, **beside})
        return
    output.say(figure.caption)
    show(found)
    if tuning is not None:
        output.say(f"tuned       {', '.join(study.tuned)}, by one run each: {Path(tuning.output) / 'sweep.html'}")
    for verdict in verdicts:
        output.say(in_words(verdict))


def in_words(verdict: "Verdict") -> str:
    """What a sweep says of a paper's statement, on one line."""
    factor, unit = (100, "points") if verdict.unit == "accuracy" else (1, "octaves")
    ends = [None if end is None else f"{factor * end:+.2f}" for end in (verdict.low, verdict.high)]
    interval = f"95 % interval {ends[0]} to {ends[1]}" if None not in ends else "one run, so no interval"
    where = "" if verdict.where is None else " at " + " ".join(f"{k}={v}" for k, v in verdict.where.items())
    return f"{verdict.verdict:<9} {verdict.says}: {factor * verdict.value:+.2f} {unit}{where}, {interval}"


def _show_plan(facts: dict[str, Any]) -> None:
    output.say(facts["caption"])
    for plan in facts["planned"]:
        settings = " ".join(f"{key}={value}" for key, value in plan["settings"].items()) or "as the recipe is"
        sigma = f"{plan['noise_multiplier']:.4g}" if math.isfinite(plan["noise_multiplier"]) else "-"
        output.say(f"{settings}: sigma {sigma}, batch {plan['batch_size']}, {plan['num_steps']} updates")
    needs = [facts["needs"]] if facts["needs"] else []
    titles = {"the paper": facts["paper"], "not stated": facts["not_stated"], "assumed here": facts["assumed"]}
    for title, lines in (titles | {"needs": needs}).items():
        for line in lines:
            output.say(f"{title}: {line}")
    cost, most = facts["cost"], "at most " if facts["tuned"] else ""
    output.say(
        f"{most}{cost['runs']} runs, {cost['updates']:,} updates, {cost['view_gradients']:,} gradients of views; "
        f"--train trains them: sfumato figures run {facts['figure']} --train"
    )
