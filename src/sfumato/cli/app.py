"""All commands, by name."""

import typer

from sfumato.cli import (
    cache,
    check,
    evaluate,
    norms,
    plan,
    predict,
    recipes,
    scaling_law,
    schema,
    search,
    simulate,
    train,
)

app = typer.Typer(
    name="sfumato",
    help="Trains image classifiers with differential privacy: from a folder of images and a budget to a classifier and "
    "its certificate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("train")(train.train)
app.command("plan")(plan.plan)
app.add_typer(recipes.app, name="recipes")
app.command("simulate")(simulate.simulate)
app.command("search")(search.search)
app.command("scaling-law")(scaling_law.scaling_law)
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("check")(check.check)
app.command("norms")(norms.norms)
app.command("schema")(schema.schema)
app.add_typer(cache.app, name="cache")


@app.callback()
def common() -> None:
    """Commands share: --json prints exactly one JSON object on stdout; progress goes to stderr."""
