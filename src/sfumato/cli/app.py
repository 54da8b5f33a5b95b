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
for command in (
    train.train,
    resume.resume,
    plan.plan,
    simulate.simulate,
    search.search,
    sweep.sweep,
    scaling_law.scaling_law,
    evaluate.evaluate,
    predict.predict,
    calibrate.calibrate,
    check.check,
    norms.norms,
    schema.schema,
):
    app.command()(command)
for name, group in {"recipes": recipes, "figures": figures, "audit": audit, "cache": cache}.items():
    app.add_typer(group.app, name=name)


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
