"""One trial: the same settings simulated with each seed, on images that are held apart from the
training images.
"""

from collections.abc import Callable
from typing import Protocol

from sfumato.config import DataConfig, Recipe, ResolvedRecipe, parse
from sfumato.errors import InputError
from sfumato.run_folder.record import Result
from sfumato.scaling.search.schedule import Outcome, Search, Slot
from sfumato.scaling.search.space import Settings, apply, possible
from sfumato.scaling.search.worker import GivenUp
from sfumato.scaling.simulate import simulated

Watch = Callable[[int, float], None]
# Trial number, settings, slot, watch(step, accuracy) -> what was found.
Evaluate = Callable[[int, Settings, Slot, Watch], Outcome]


class Train(Protocol):
    """Trains a recipe in a folder of that name and returns its result; ``watch`` is told each step
    with a held-out accuracy.
    """

    def __call__(self, recipe: ResolvedRecipe, name: str, watch: Watch) -> Result: ...


def searched_data(recipe: Recipe, public: str | None) -> DataConfig:
    """The images of simulations: the validation split is held out, so that a final accuracy on test
    images says something.

    Args:
        recipe: Of the expensive run.
        public: A named data set in place of the recipe's own.
    """
    if public is None:
        return recipe.data.model_copy(update={"split": "train"})
    return parse({"data": {"name": public, "split": "train"}}).data


def evaluator(search: Search, data: DataConfig, train: Train) -> Evaluate:
    """What makes the trials of a search."""

    def evaluate(number: int, settings: Settings, slot: Slot, watch: Watch) -> Outcome:
        try:
            recipe = apply(search.recipe, settings)
            if not possible(recipe, search.num_examples):
                raise GivenUp("these settings contradict each other")
            if slot.tests_views:
                recipe = apply(recipe, {"augmentation.test_views": recipe.augmentation.augmult})
            if not search.prune:  # nobody looks at a trial before its end
                recipe = apply(recipe, {"training.evaluate_every": recipe.training.num_steps})
            recipe = recipe.model_copy(update={"data": data})
            results = []
            for seed in slot.seeds:
                # Whether a trial falls behind is judged by its first seed.
                first = seed == slot.seeds[0]
                results.append(
                    train(
                        simulated(recipe, slot.batch_size, seed), f"{number}-seed-{seed}", watch if first else _nobody
                    )
                )
        except InputError as error:
            raise GivenUp(str(error)) from None
        voted = [result.accuracy_augtest_vote for result in results if result.accuracy_augtest_vote is not None]
        with_views = tuple(voted) if len(voted) == len(results) else None
        return Outcome(settings, tuple(result.accuracy for result in results), with_views)

    return evaluate


def _nobody(step: int, accuracy: float) -> None:
    pass


def work(recipe: ResolvedRecipe, batch_size: int, num_runs: int) -> int:
    """Views that so many simulations differentiate."""
    return num_runs * batch_size * recipe.training.num_steps * max(1, recipe.augmentation.augmult)
