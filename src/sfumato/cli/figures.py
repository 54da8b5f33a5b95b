"""`sfumato figures`: the papers' figures and tables, planned or run."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sfumato.cli import options, output, sweep

if TYPE_CHECKING:
    from sfumato.studies.claims import Verdict


def list_(*, json_: bool = False) -> None:
    """Names every figure and table, and how it is answered."""
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
    seeds: options.Runs = None,
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
        seeds: Runs of each cell.
        output_: Default: runs/<figure>-<scale>; the same again goes on.
    """
    from sfumato.studies import figures

    figure = figures.read_figure(name)
    study = figures.study_of(name, figure, scale)
    planned = figures.plan_figure(study, seeds=seeds, paired=paired)
    facts: dict[str, Any] = {"figure": name, "scale": scale, "caption": figure.caption, "not_stated": figure.not_stated}
    facts |= {"assumed": study.assumed, "needs": study.needs, "paper": figure.paper, "tuned": study.tuned}
    facts["cost"] = vars(figures.cost_at_most(study, planned, seeds))
    if scale == "full" and not train:
        keys = ("noise_multiplier", "batch_size", "num_steps")
        plans = [
            {"settings": cell.settings, **{key: getattr(cell.plan.mechanism, key) for key in keys}}
            for cell in planned.cells
        ]
        output.answer({**facts, "trained": False, "planned": plans}, json_, _show_plan)
        return
    wanted = figures.options_of(
        study,
        output=output_ or Path("runs") / f"{name.replace('/', '-')}-{scale}",
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
    sweep.show(found)
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
