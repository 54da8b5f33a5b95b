"""From a recipe to a finished run: data, plan, training."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from sfumato import config
from sfumato.data import loading as datasets
from sfumato.planning.resolve import resolve, without_privacy
from sfumato.run_folder import files
from sfumato.run_folder.record import Result
from sfumato.training import loop
from sfumato.training.loop import Progress


def train(
    recipe: config.Recipe | dict[str, Any],
    output: Path | str,
    *,
    data_root: Path | str | None = None,
    device: str = "auto",
    non_private: bool = False,
    resume: bool = False,
    trust: Collection[str] = (),
    progress: Progress = Progress(),  # noqa: B008  (immutable)
) -> Result:
    """Trains a classifier under a recipe's budget and writes the run folder ``output``.

    Args:
        recipe: A recipe, or its nested dictionaries.
        output: The run folder; with ``resume``, of the run to go on with.
        data_root: Where the data lies; for named data sets default: $SFUMATO_DATA.
        device: "auto", "cpu", "cuda" ...
        non_private: The same recipe without privacy, to show its price.
        resume: Go on with the run in ``output``; where its images lie may be left out, if the folder holds its owner's note.
        trust: Modules that may be imported for the recipe's model, each by its full name.
        progress: Who watches; what was chosen and every warning are messages.

    Returns:
        What result.json holds.

    Raises:
        InputError, MachineError, Interrupted: See `sfumato.training.loop.train`.
    """
    parsed = config.parse(recipe) if isinstance(recipe, dict) else recipe
    output, data_root = Path(output), None if data_root is None else Path(data_root)
    if resume and data_root is None and parsed.data.path is None:
        data_root = files.read_data_root(output)
    if parsed.data.name == "folder" and data_root is not None:
        parsed = parsed.model_copy(update={"data": parsed.data.model_copy(update={"path": str(data_root)})})
    files.refuse_among_images(output, parsed.data)
    dataset = datasets.load_for(parsed, data_root, progress.message)
    plan = resolve(parsed, dataset.facts)
    if non_private:
        plan = without_privacy(plan)
    for choice in [] if resume else plan.choices:
        progress.message(f"chosen: {choice.key} = {choice.value} ({choice.why})")
    for warning in plan.warnings:
        progress.message(f"warning: {warning}")
    return loop.train(plan, dataset, output, device=device, resume=resume, trust=trust, progress=progress)
