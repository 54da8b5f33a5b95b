"""`sfumato simulate`: the same run at a smaller batch and a constant total amount of noise."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfumato import config, recipes
from sfumato.cli import options, output
from sfumato.cli.train import override, trusted_modules
from sfumato.errors import InputError

if TYPE_CHECKING:
    pass


def simulate(
    recipe: options.Recipe,
    batch_size: Annotated[int, typer.Option(help="B of the simulation; at most the recipe's own.")],
    seeds: Annotated[str, typer.Option(help="Comma-separated; one run for each.")] = "0",
    epsilon: Annotated[float | None, typer.Option(help="Target epsilon of the run that is simulated.")] = None,
    delta: Annotated[float | None, typer.Option(help="Delta of that run.")] = None,
    set_: options.Set = None,
    output_folder: Annotated[
        Path | None, typer.Option("--output", help="Holds a run folder for each seed; default: runs/<recipe>-<time>.")
    ] = None,
    data_root: options.DataRoot = None,
    device: options.Device = "auto",
    trust: options.Trust = None,
    json_: options.Json = False,
) -> None:
    """Trains at a smaller batch with as much less noise: cheap, like the run it stands for, and
    never private.
    """
    name, values = recipes.read(recipe)
    override(values, epsilon=epsilon, delta=delta, accountant=None, assignments=set_ or [], data_root=data_root)
    parsed = config.parse(values)
    trusted = trusted_modules(parsed, set_ or [], trust or [])
    numbers = parse_seeds(seeds)

    from sfumato.run_folder import launch
    from sfumato.scaling.simulate import simulate as run_all
    from sfumato.training.interrupt import Interrupted

    folder = output_folder or launch.new_folder(f"{name}-b{batch_size}")

    try:
        result = run_all(
            parsed,
            batch_size,
            numbers,
            output=folder,
            data_root=data_root,
            device=device,
            trust=trusted,
        )
    except Interrupted as interrupted:
        output.note(
            f"{interrupted}; everything is kept. Go on with the same command and --output {shlex.quote(str(folder))}"
        )
        raise typer.Exit(1) from None
    if json_:
        output.print_json(result.as_json())
        return
    for run in result.runs:
        output.say(
            f"{run.run}: held-out accuracy {output.per_cent(run.accuracy)} (last weights "
            f"{output.per_cent(run.accuracy_last)})"
        )
    mean, fraction = output.per_cent(result.accuracy), output.per_cent(result.compute_fraction)
    output.say(f"mean {mean} of {len(numbers)}; each costs {fraction} of the run that it stands for")
    output.say("not private: simulations train on the images with a public seed")


def parse_seeds(text: str) -> list[int]:
    """Whole numbers with commas between them, or from one to another: 0,1,2 or 0..2."""
    seeds: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("..")
            seeds += [int(part)] if not last else range(int(first), int(last) + 1)
    except ValueError:
        raise InputError(
            f"--seeds takes whole numbers with commas between them, such as 0,1,2 or 0..2, not {text!r}."
        ) from None
    return seeds
