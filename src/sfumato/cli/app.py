"""All commands, by name."""

from typing import Annotated

import typer

from sfumato import __version__
from sfumato.cli import (
    audit,
    cache,
    calibrate,
    check,
    evaluate,
    figures,
    norms,
    output,
    plan,
    predict,
    recipes,
    resume,
    scaling_law,
    schema,
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
app.command("train")(train.train)
app.command("resume")(resume.resume)
app.command("plan")(plan.plan)
app.add_typer(recipes.app, name="recipes")
app.command("simulate")(simulate.simulate)
app.command("search")(search.search)
app.command("sweep")(sweep.sweep)
app.add_typer(figures.app, name="figures")
app.command("scaling-law")(scaling_law.scaling_law)
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("calibrate")(calibrate.calibrate)
app.command("check")(check.check)
app.command("norms")(norms.norms)
app.command("schema")(schema.schema)
app.add_typer(audit.app, name="audit")
app.add_typer(cache.app, name="cache")


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
