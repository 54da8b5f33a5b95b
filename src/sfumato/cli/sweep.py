"""`sfumato sweep`: a grid of settings times seeds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfumato.cli import options, output
from sfumato.cli.train import asked
from sfumato.reporting import formats

if TYPE_CHECKING:
    from sfumato.studies.result import Sweep

Seeds = Annotated[int | None, typer.Option(min=1, help="Runs of each cell.")]
Paired = Annotated[
    bool, typer.Option("--paired", help="Run n of every cell has the public seed n - 1: to compare, not private.")
]
Workers = Annotated[int, typer.Option(min=1, max=1024, help="Processes on this machine.")]


def sweep(
    recipe: options.Recipe,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="SECTION.KEY=V1,V2", help="Values of one key; may be repeated."),
    ] = None,
    cells: Annotated[
        Path | None, typer.Option(help="TOML file of whole settings to try: a [[cell]] table for each.")
    ] = None,
    seeds: Seeds = None,
    paired: Paired = False,
    workers: Workers = 1,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    set_: options.Set = None,
    output_folder: Annotated[
        Path | None,
        typer.Option("--output", help="Default: runs/<recipe>-sweep; the same again goes on."),
    ] = None,
    data_root: options.DataRoot = None,
    device: options.Device = "auto",
    trust: options.Trust = None,
    json_: options.Json = False,
) -> None:
    """Trains a recipe under every setting of a grid, several times each: medians, means and spreads."""
    name, parsed, trusted = asked(
        recipe, epsilon=epsilon, delta=delta, assignments=set_, data_root=data_root, trust=trust
    )

    from sfumato.studies.grid import parse_grid, read_cells
    from sfumato.studies.plan import SweepOptions
    from sfumato.studies.sweep import sweep_by

    wanted = SweepOptions(
        parsed,
        parse_grid(grid or []),
        [] if cells is None else read_cells(cells),
        seeds=1 if seeds is None else seeds,
        paired=paired,
        output=output_folder or Path("runs") / f"{name.replace('/', '-')}-sweep",
        name=name,
        workers=workers,
        data_root=data_root,
        device=device,
        trust=trusted,
    )
    with output.interruptible():
        found, _ = sweep_by(wanted)
    if json_:
        output.print_json(found.as_json())
    else:
        show(found)


def show(found: "Sweep") -> None:
    """The cells in words, then what they cost."""
    from sfumato.studies.grid import in_words

    for cell in found.cells:
        spread = (
            "" if cell.std is None else f" (std {100 * cell.std:.2f}, standard error {_points(cell.standard_error)})"
        )
        epsilon = f"epsilon {formats.epsilon_text(cell.epsilon)}" if cell.private else "not private"
        pair = ""
        if cell.paired is not None:
            pair = f"; {100 * cell.paired.difference:+.2f} to the first"
            error = cell.paired.standard_error
            pair += "" if error is None else f" (standard error {_points(error)})"
        output.say(
            f"{in_words(cell.settings)}: median {output.per_cent(cell.median)}, mean {output.per_cent(cell.mean)}"
            f"{spread}{pair}; {epsilon}"
        )
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
