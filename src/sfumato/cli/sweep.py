"""`sfumato sweep`: a grid of settings times seeds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfumato.cli import options, output
from sfumato.cli.train import asked
from sfumato.reporting import formats

if TYPE_CHECKING:
    from sfumato.studies.result import Sweep


def sweep(
    recipe: str,
    *,
    grid: Annotated[list[str] | None, typer.Option(metavar="SECTION.KEY=V1,V2")] = None,
    cells: Path | None = None,
    seeds: options.Runs = None,
    paired: bool = False,
    workers: options.Workers = 1,
    epsilon: float | None = None,
    delta: float | None = None,
    set_: options.Set = None,
    output_: Path | None = None,
    data_root: Path | None = None,
    device: str = "auto",
    trust: options.Trust = None,
    json_: bool = False,
) -> None:
    """Trains a recipe under every setting of a grid, several times each: medians, means and spreads.

    Args:
        grid: Values of one key; may be repeated.
        cells: TOML file of whole settings to try: a [[cell]] table for each.
        seeds: Runs of each cell.
        output_: Default: runs/<recipe>-sweep; the same again goes on.
    """
    name, parsed, trusted = asked(recipe, {"target_epsilon": epsilon, "delta": delta}, set_, data_root, trust)

    from sfumato.studies.grid import parse_grid, read_cells
    from sfumato.studies.plan import SweepOptions
    from sfumato.studies.sweep import sweep_by

    wanted = SweepOptions(
        parsed,
        parse_grid(grid or []),
        [] if cells is None else read_cells(cells),
        seeds=1 if seeds is None else seeds,
        paired=paired,
        output=output_ or Path("runs") / f"{name.replace('/', '-')}-sweep",
        name=name,
        workers=workers,
        data_root=data_root,
        device=device,
        trust=trusted,
    )
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
