"""All commands, by name."""

from typing import Annotated

import typer

from sfumato import __version__
from sfumato.cli import (
    audit,
    budget,
    check,
    evaluate,
    export,
    files,
    options,
    output,
    plan,
    recipes,
    search,
    simulate,
    sweep,
    train,
)

app = typer.Typer(
    name="sfumato",
    help="Trains image classifiers with differential privacy: from a folder of images and a budget to a classifier and "
    "its certificate.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
options.add(app, train.train, train.resume, plan.plan, simulate.simulate, search.search, sweep.sweep)
options.add(
    app, simulate.scaling_law, evaluate.evaluate, evaluate.predict, evaluate.calibrate, check.check, check.models
)
options.add(app, files.report, export.export, export.verify)
options.add(app, files.norms, files.epsilon, files.schema, recipes.keys)

shipped = typer.Typer(help="The recipes that are shipped: list, show NAME, verify.", no_args_is_help=True)
options.add(shipped, recipes.list_, recipes.show, recipes.verify)
papers = typer.Typer(help="The papers' figures and tables, planned or run.", no_args_is_help=True)
options.add(papers, sweep.list_, sweep.run)
attacks = typer.Typer(
    help="Lower bounds on epsilon from attacks: bounds (from your own scores), canary (on the product's own step), "
    "membership (on many models), one-run (on a run that was trained with canaries).",
    no_args_is_help=True,
)
options.add(attacks, audit.bounds, audit.canary, audit.membership, audit.one_run)
kept = typer.Typer(
    help="What is kept of your images, in plain numbers and for you alone: list, clear.", no_args_is_help=True
)
options.add(kept, files.list_, files.clear)
shared = typer.Typer(help="One budget for all private runs on the same images: new, show.", no_args_is_help=True)
options.add(shared, budget.new, budget.show)
for name, group in {"budget": shared, "recipes": shipped, "figures": papers, "audit": attacks, "cache": kept}.items():
    app.add_typer(group, name=name)


def _say_version(asked: bool) -> None:
    if asked:
        output.say(f"sfumato {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Says the version and ends.")
    ] = False,
) -> None:
    """Commands share: --json prints exactly one JSON object on stdout; progress goes to stderr."""
