"""`sfumato simulate`: the same run at a smaller batch and a constant total amount of noise."""

from pathlib import Path
from typing import Annotated

import typer

from sfumato.cli import options, output
from sfumato.cli.train import asked


def simulate(
    recipe: options.Recipe,
    batch_size: Annotated[int, typer.Option(help="B of the simulation; at most the recipe's own.")],
    seeds: Annotated[str, typer.Option(help="Comma-separated; one run for each.")] = "0",
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
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
    name, parsed, trusted = asked(
        recipe, epsilon=epsilon, delta=delta, assignments=set_, data_root=data_root, trust=trust
    )
    numbers = options.parse_seeds(seeds)

    from sfumato.run_folder import launch
    from sfumato.scaling.simulate import simulate as run_all

    folder = output_folder or launch.new_folder(f"{name}-b{batch_size}")
    with output.interruptible(*([] if output_folder else ["--output", str(folder)])):
        result = run_all(parsed, batch_size, numbers, output=folder, data_root=data_root, device=device, trust=trusted)
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
