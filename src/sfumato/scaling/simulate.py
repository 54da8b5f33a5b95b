"""The same run at a smaller batch and a constant total amount of noise (Sander et al. 2022, Section
3.4).
"""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sfumato.config import Recipe, ResolvedRecipe, parse_resolved
from sfumato.data import loading
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError
from sfumato.planning.resolve import resolve
from sfumato.recipes import recipe_of
from sfumato.reporting.page import write_report
from sfumato.run_folder.record import Result
from sfumato.training.logs import Progress, watching
from sfumato.training.trainer import Trainer

_ACCURACIES = ("accuracy", "accuracy_last", "accuracy_top5")
_WITH_VIEWS = ("accuracy_augtest_vote", "accuracy_augtest_mean")
_AVERAGED = (*_ACCURACIES, *(f"test_{name}" for name in _ACCURACIES), *_WITH_VIEWS, "balanced_accuracy", "auroc")


def simulated(recipe: ResolvedRecipe, batch_size: int, seed: int) -> ResolvedRecipe:
    """The recipe of one simulation: steps, learning rate and sigma / B as they are.

    Runs of equal seed share initial weights and noise whatever their batch size: the noise of sigma
    / B is the same. Never private: the seed is public.

    Args:
        recipe: Of the run that is simulated.

    Raises:
        InputError: If the recipe has no noise to scale, or the batch is not smaller than its own.
    """
    privacy, whole = recipe.budget, recipe.training.batch_size
    if not privacy.noise_multiplier:
        raise InputError("a simulation scales the noise with the batch, but this recipe has none. Give --epsilon E.")
    if not 1 <= batch_size <= whole:
        raise InputError(f"--batch-size must lie between 1 and the recipe's own {whole}, not {batch_size}.")
    values = recipe.model_dump()
    of_one_run = {"selected_from": None, "selection_shape": 0.0, "score_noise": None}  # nothing is selected
    sigma = privacy.noise_multiplier * (batch_size / whole)
    values["privacy"] |= {"target_epsilon": None, "noise_multiplier": sigma, **of_one_run}
    values["training"]["batch_size"] = batch_size
    values["run"]["seed"] = seed
    return parse_resolved(values)


class Simulation(Result):
    """The result of the first seed, with accuracies and `auroc` averaged over seeds; what is told class by class is the
    first one's, and of several seeds there is no `accuracy_interval`.

    Attributes:
        runs: Each seed's own.
        compute_fraction: What one simulation computes, as a fraction of one run of the recipe.
    """

    seeds: list[int]
    runs: list[Result]
    compute_fraction: float

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "runs": [run.as_json() for run in self.runs]}


def simulate(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    batch_size: int,
    seeds: Sequence[int] = (0,),
    *,
    output: Path | str,
    settings: Mapping[str, Any] = MappingProxyType({}),
    data_root: Path | str | None = None,
    device: str = "auto",
    trust: Collection[str] = (),
    progress: Progress | None = None,
) -> Simulation:
    """Trains one simulation for each seed. What an earlier call with the same output left is gone
    on with.

    Args:
        recipe: Of the run that is simulated; as in `sfumato.train`.
        batch_size: Of the simulations; at most the recipe's own.
        seeds: One run for each.
        output: Holds a run folder for each seed.
        settings, data_root, device, trust: See `sfumato.train`.
        progress: Who watches; None: a live line on stderr.

    Raises:
        InputError: As `simulated`, or if seeds are repeated.
        MachineError, Interrupted: See `sfumato.training.loop.train`.
    """
    parsed = recipe_of(recipe, settings)
    parsed.model.refuse_missing_weights()  # before any image is read
    with watching(progress) as watched:
        root = None if data_root is None else Path(data_root)
        dataset = loading.load(parsed.data, root, watched.message, parsed.privacy)
    trainer, resolved = Trainer(dataset, device=device, trust=trust), resolve(parsed, dataset.facts).recipe
    runs = []
    for simulation in simulations(resolved, batch_size, seeds):
        folder = Path(output) / f"seed-{simulation.run.seed}"
        with watching(progress) as watched:
            runs.append(trainer.run(simulation, folder, resume=folder.exists(), progress=watched))
        write_report(folder)
    scores = {key: [getattr(run, key) for run in runs] for key in _AVERAGED}
    mean = {key: None if None in found else sum(found) / len(found) for key, found in scores.items()}
    if len(runs) > 1:
        mean["accuracy_interval"] = None
    fraction = batch_size / resolved.training.batch_size
    return Simulation(**{**dict(runs[0]), **mean}, seeds=list(seeds), runs=runs, compute_fraction=fraction)


def simulations(recipe: ResolvedRecipe, batch_size: int, seeds: Sequence[int]) -> list[ResolvedRecipe]:
    """As `simulated`, one for each seed."""
    if not seeds or len(set(seeds)) != len(seeds):
        raise InputError("--seeds must name each seed once: equal seeds give equal runs.")
    return [simulated(recipe, batch_size, seed) for seed in seeds]


def try_network(recipe: ResolvedRecipe, facts: Facts, trust: Collection[str]) -> None:
    """Builds a recipe's network before many runs of it are begun: without memory, or, where it is a library's or the
    user's own, in earnest, and held to the laws of training and of evaluation on made-up images.

    Raises:
        InputError: If it cannot be built, or mixes images.
    """
    import torch

    from sfumato.clipping.model_check import require_private
    from sfumato.evaluation.scores import require_rows_apart
    from sfumato.models import registry

    asked, size, channels = recipe.model, facts.image_size, facts.channels
    sizes = {"image_size": size, "channels": channels, "num_classes": facts.num_classes}
    of_others = asked.name not in registry.MODELS
    with contextlib.nullcontext() if of_others else registry.shapes_alone():
        model = registry.build(asked.name, **sizes, options=asked.options, fix=asked.fix, seed=0, trust=trust)
    if of_others and recipe.privacy is not None:
        row = torch.zeros(1, channels, size, size)
        require_private(model, row)
        require_rows_apart(model, row)
