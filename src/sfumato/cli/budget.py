"""`sfumato budget`: what all private runs on the same images may spend together."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.accounting import formats
from sfumato.cli import options, output
from sfumato.cli.train import asked
from sfumato.json_record import pick

if TYPE_CHECKING:
    from sfumato.run_folder.budget import Budget


def new(
    file: Path,
    *,
    epsilon: float,
    delta: float | None = None,
    recipe: str = "image-folder",
    set_: options.Set = None,
    data_root: Path | None = None,
    json_: bool = False,
) -> None:
    """Begins a budget: an epsilon and a delta that all runs with --budget FILE share, composed.

    Args:
        file: A new file. It holds public numbers alone: no name, path or digest of images.
        epsilon: Of all runs together.
        delta: Of all runs together; default: the largest power of ten up to 1/(10 N).
        recipe: Says which images and whose epsilon; default: image-folder, with --data-root.

    Example:
        sfumato budget new xrays.budget --epsilon 3 --data-root xrays
    """
    from sfumato.data import loading
    from sfumato.planning.resolve import resolve
    from sfumato.run_folder import budget
    from sfumato.run_folder.files import refuse_among_images

    _, parsed, _ = asked(recipe, {"target_epsilon": epsilon, "delta": delta}, set_, data_root, None)
    refuse_among_images(file, parsed.data, data_root)
    plan = resolve(parsed, loading.list_for(parsed, data_root, output.note).facts)
    output.answer(_facts(budget.begin(file, plan)), json_, _show)


def show(file: Path, *, json_: bool = False) -> None:
    """Says what of a budget is reserved, and by which runs.

    Args:
        file: Of the budget.

    Example:
        sfumato budget show xrays.budget
    """
    from sfumato.run_folder import budget

    output.answer(_facts(budget.read(file)), json_, _show)


def _facts(found: "Budget") -> dict[str, Any]:
    numbers = ("run_id", "num_examples", "batch_size", "noise_multiplier", "num_steps")
    runs = [pick(line.run, *numbers) | {"epsilon_reserved": line.epsilon_reserved} for line in found.reserved.values()]
    return {**found.stated.as_json(), "epsilon_reserved": found.epsilon(), "runs": runs}


def _show(facts: dict[str, Any]) -> None:
    for run in facts["runs"]:
        what = f"{run['num_steps']} updates of about {run['batch_size']} of {run['num_examples']}"
        with_it = f"epsilon {formats.epsilon_text(run['epsilon_reserved'])} with it"
        output.say(f"{run['run_id']}  {what}, noise multiplier {run['noise_multiplier']:.4g}: {with_it}")
    reserved, of = map(formats.epsilon_text, (facts["epsilon_reserved"], facts["epsilon"]))
    whose = f"each {facts['unit']} of {facts['num_examples']}"
    output.say(f"epsilon {reserved} of {of} is reserved, at delta {formats.delta_text(facts['delta'])}, for {whose}")
