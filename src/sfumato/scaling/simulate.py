"""The same run at a smaller batch and a constant total amount of noise (Sander et al. 2022, Section 3.3)."""

from collections.abc import Callable
from typing import Any

from sfumato.config import ResolvedRecipe, parse_resolved
from sfumato.errors import InputError
from sfumato.run_folder.record import Result

# From a recipe to its result, as `sfumato.train` gives it.
Train = Callable[[ResolvedRecipe], Result]


def simulated(recipe: ResolvedRecipe, batch_size: int, seed: int) -> ResolvedRecipe:
    """The recipe of one simulation: steps, learning rate and sigma / B as they are.

    Runs of equal seed share initial weights and noise whatever their batch size: the noise of sigma / B is the same.
    Never private: the seed is public.

    Args:
        recipe: Of the run that is simulated.

    Raises:
        InputError: If the recipe has no noise to scale, or the batch is not smaller than its own.
    """
    privacy, training = recipe.privacy, recipe.training
    if privacy is None or not privacy.noise_multiplier:
        raise InputError("a simulation scales the noise with the batch, but this recipe has none. Give it a [privacy] section with a budget.")
    if not 1 <= batch_size <= training.batch_size:
        raise InputError(
            f"--batch-size must lie between 1 and the recipe's own {training.batch_size}, not {batch_size}: a simulation is the cheaper run."
        )
    if training.batch_size == batch_size:
        sigma = privacy.noise_multiplier
    else:
        sigma = privacy.noise_multiplier * batch_size / training.batch_size
    values = recipe.model_dump()
    of_one_run = {"selected_from": None, "selection_shape": 0.0, "score_noise": None}  # nothing is selected
    values["privacy"] |= {"target_epsilon": None, "noise_multiplier": sigma, **of_one_run}
    values["training"]["batch_size"] = batch_size
    values["run"]["seed"] = seed
    return parse_resolved(values)


class Simulation(Result):
    """The result of the first seed, accuracies averaged over seeds.

    Attributes:
        runs: Each seed's own.
        compute_fraction: What one simulation computes, as a fraction of one run of the recipe.
    """

    seeds: list[int]
    runs: list[Result]
    compute_fraction: float

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "runs": [run.as_json() for run in self.runs]}


def simulate(recipe: ResolvedRecipe, batch_size: int, seeds: list[int], train: Train) -> Simulation:
    """One simulation for each seed.

    Raises:
        InputError: As `simulated`, or if seeds are repeated.
    """
    if not seeds or len(set(seeds)) != len(seeds):
        raise InputError("--seeds must name each seed once: equal seeds give equal runs, which say nothing about the spread.")
    simulations = [simulated(recipe, batch_size, seed) for seed in seeds]
    runs = [train(simulation) for simulation in simulations]
    averaged = [key for key in _ACCURACIES if getattr(runs[0], key) is not None]
    mean = {key: sum(getattr(run, key) for run in runs) / len(runs) for key in averaged}
    fraction = batch_size / recipe.training.batch_size
    return Simulation(**{**dict(runs[0]), **mean}, seeds=seeds, runs=runs, compute_fraction=fraction)


_ACCURACIES = ("accuracy", "accuracy_last", "test_accuracy", "test_accuracy_last", "accuracy_augtest_vote", "accuracy_augtest_mean")
