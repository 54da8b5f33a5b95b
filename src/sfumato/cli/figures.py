"""`sfumato figures`: the papers' figures and tables, planned or run."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato.cli import options, output
from sfumato.cli.sweep import Paired, Seeds, Workers, show
from sfumato.errors import InputError

if TYPE_CHECKING:
    from sfumato.studies.claims import Verdict

app = typer.Typer(no_args_is_help=True, help="The papers' figures and tables, planned or run.")


@app.command("list")
def list_(json_: options.Json = False) -> None:
    """Names every figure and table, and how it is answered."""
    from sfumato.studies.figures import names, read_figure

    figures: list[dict[str, Any]] = []
    for name in names():
        figure = read_figure(name)
        scales = [scale for scale in ("full", "small") if getattr(figure, scale) is not None]
        facts = {"name": name, "source": figure.source, "caption": figure.caption, "scales": scales}
        figures.append({**facts, "instead": figure.instead, "not_stated": figure.not_stated})
    if json_:
        output.print_json({"figures": figures})
        return
    for facts in figures:
        how = ", ".join(facts["scales"]) or facts["instead"]
        output.say(f"{facts['name']:<24} {how:<12} {facts['caption']}")


@app.command("run")
def run(
    name: Annotated[str, typer.Argument(help="Of a figure (`sfumato figures list`), or the path of a TOML file.")],
    scale: Annotated[str, typer.Option(help="small: the same question in minutes on two cores; or full.")] = "full",
    train: Annotated[
        bool, typer.Option("--train", help="Trains the full size; without it, that is planned with its cost.")
    ] = False,
    seeds: Seeds = None,
    paired: Paired = False,
    workers: Workers = 1,
    output_folder: Annotated[
        Path | None, typer.Option("--output", help="Default: runs/<figure>-<scale>; the same again goes on.")
    ] = None,
    data_root: options.DataRoot = None,
    device: options.Device = "auto",
    json_: options.Json = False,
) -> None:
    """Trains the small twin of a figure; plans the figure at full size, or trains it with --train.

    Keys that a figure tunes are tuned with one run of each cell; --seeds runs of the best are made then.
    """
    from sfumato.studies import figures

    if scale not in ("full", "small"):
        raise InputError(f"--scale is full or small, not {scale!r}.")
    figure = figures.read_figure(name)
    study = figures.study_of(name, figure, "small" if scale == "small" else "full")
    planned = figures.plan_figure(study, seeds=seeds, paired=paired)
    cost = figures.cost_at_most(study, planned, seeds)
    facts: dict[str, Any] = {
        "figure": name,
        "scale": scale,
        "caption": figure.caption,
        "not_stated": figure.not_stated,
        "assumed": study.assumed,
        "needs": study.needs,
        "paper": figure.paper,
        "cost": dataclasses.asdict(cost),
        "tuned": study.tuned,
    }
    if scale == "full" and not train:
        plans = [
            {
                "settings": cell.settings,
                "noise_multiplier": cell.plan.mechanism.noise_multiplier,
                "batch_size": cell.plan.mechanism.batch_size,
                "num_steps": cell.plan.mechanism.num_steps,
            }
            for cell in planned.cells
        ]
        if json_:
            output.print_json({**facts, "trained": False, "planned": plans})
        else:
            _show_plan(facts, plans, name)
        return
    wanted = figures.options_of(
        study,
        output=output_folder or Path("runs") / f"{name.replace('/', '-')}-{scale}",
        name=f"{name} ({scale})",
        seeds=study.seeds if seeds is None else seeds,
        paired=paired,
        workers=workers,
        data_root=data_root,
        device=device,
    )
    with output.interruptible():
        answered = figures.run_figure(study, wanted)
    found, tuning, verdicts = answered.found, answered.tuning, answered.verdicts
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


def _show_plan(facts: dict[str, Any], plans: list[dict[str, Any]], name: str) -> None:
    output.say(facts["caption"])
    for plan in plans:
        settings = " ".join(f"{key}={value}" for key, value in plan["settings"].items()) or "as the recipe is"
        sigma = f"{plan['noise_multiplier']:.4g}" if math.isfinite(plan["noise_multiplier"]) else "-"
        output.say(f"{settings}: sigma {sigma}, batch {plan['batch_size']}, {plan['num_steps']} updates")
    for title, lines in (
        ("the paper", facts["paper"]),
        ("not stated", facts["not_stated"]),
        ("assumed here", facts["assumed"]),
        ("needs", [facts["needs"]] if facts["needs"] else []),
    ):
        for line in lines:
            output.say(f"{title}: {line}")
    cost = facts["cost"]
    most = "at most " if facts["tuned"] else ""
    output.say(
        f"{most}{cost['runs']} runs, {cost['updates']:,} updates, {cost['view_gradients']:,} gradients of views; "
        f"--train trains them: sfumato figures run {name} --train"
    )
