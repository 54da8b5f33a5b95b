"""A whole search, from a recipe to the recipe of the one private run."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sfumato.config import DataConfig, Recipe, ResolvedRecipe
from sfumato.data import loading
from sfumato.errors import InputError
from sfumato.planning.resolve import resolve
from sfumato.run_folder.files import refuse_among_images, refuse_links, write_atomically, write_json
from sfumato.run_folder.record import Result
from sfumato.scaling.simulate import simulated
from sfumato.searching import final_recipe as final
from sfumato.searching.options import SearchOptions
from sfumato.searching.result import SearchResult
from sfumato.searching.schedule import Outcome, Search, Slot, plan_search
from sfumato.searching.space import Settings, apply, possible
from sfumato.searching.study import Watch, file_in, file_of, finished, open_study, shown, work
from sfumato.training import loop
from sfumato.training.interrupt import stop_on_sigterm
from sfumato.training.trainer import Trainer

# Trains a recipe and returns its result; is told each step with a held-out accuracy.
Train = Callable[[ResolvedRecipe, Watch], Result]


def search(recipe: Recipe | Mapping[str, Any] | str | Path, trials: int, **options: Any) -> SearchResult:
    """Searches hyper-parameters by cheap simulations, and writes one recipe for the single private
    run.

    Args:
        recipe: Of the expensive run; as in `sfumato.train`.
        trials: How many settings are tried.
        options: As `SearchOptions` takes them; ``output`` is needed.

    Returns:
        What search.json holds.

    Raises:
        InputError: If the search cannot be.
        Interrupted, KeyboardInterrupt: Every finished trial is kept; the same call goes on.
    """
    return search_by(SearchOptions(recipe, trials, **options))


def search_by(options: SearchOptions) -> SearchResult:
    """As `search`."""
    parsed, folder, report = options.parsed(), Path(options.output), options.report
    url = options.storage or file_in(folder)
    refuse_among_images(file_of(url) or folder, parsed.data, options.root)
    if (folder / "ledger.jsonl").exists():
        raise InputError(f"{folder} is a run's folder. Name a folder for the search by --output.")
    plan = resolve(parsed, loading.facts(parsed.data, options.root, report))
    looked_at = options.looked_at(plan.recipe)
    wanted = plan_search(plan.recipe, options, plan.mechanism.num_examples)
    dataset = loading.load(looked_at, options.looked_at_root(parsed), report, loading.images_per_person(parsed))
    trainer = Trainer(dataset, device=options.device, trust=options.trust)
    refuse_links(folder)
    # What a trial leaves is in the storage; weights of simulations are not private, and nobody needs them.
    weights = folder / "owner"
    weights.mkdir(mode=0o700, parents=True, exist_ok=True)

    def train(recipe: ResolvedRecipe, watch: Watch) -> Result:
        def step(facts: loop.StepFacts) -> None:
            if facts.evaluated and facts.accuracy is not None:
                watch(facts.step, facts.accuracy)

        with tempfile.TemporaryDirectory(dir=weights) as run:
            return trainer.run(recipe, Path(run) / "run", progress=loop.Progress(step=step))

    def evaluate(settings: Settings, slot: Slot, watch: Watch) -> Outcome:
        return simulate_settings(wanted, looked_at, settings, slot, train, watch)

    with stop_on_sigterm(), open_study(wanted, url, options.name) as study:
        agenda = work(wanted, study, evaluate, report)
        outcomes = finished(study)
    shutil.rmtree(weights, ignore_errors=True)  # what killed workers left, too
    path = None if options.worker else folder / "recipe.toml"
    found = final.summary(wanted, agenda, outcomes, storage=shown(url), path=None if path is None else str(path))
    if path is not None:
        write_atomically(path, final.as_toml(wanted, agenda, found, options.name).encode())
        write_json(folder / "search.json", found.as_json())
    return found


def simulate_settings(
    search: Search, data: DataConfig, settings: Settings, slot: Slot, train: Train, watch: Watch
) -> Outcome:
    """One trial: the same settings simulated with each seed, on images that are held apart from the training images.

    Raises:
        optuna.TrialPruned: If it is given up: such settings cannot be trained, or ``watch`` raised it.
    """
    import optuna

    try:
        recipe = apply(search.recipe, settings)
        if not possible(recipe, search.num_examples):
            raise optuna.TrialPruned("these settings contradict each other")
        if slot.kind == "law":  # held-out images are also judged by as many views as in training (AugTest)
            recipe = apply(recipe, {"augmentation.test_views": recipe.augmentation.augmult})
        if not search.prune:  # nobody looks at a trial before its end
            recipe = apply(recipe, {"training.evaluate_every": recipe.training.num_steps})
        recipe = recipe.model_copy(update={"data": data})
        # Whether a trial falls behind is judged by its first seed.
        watches = [watch, *([lambda step, accuracy: None] * (len(slot.seeds) - 1))]
        results = [
            train(simulated(recipe, slot.batch_size, seed), each)
            for seed, each in zip(slot.seeds, watches, strict=True)
        ]
    except InputError as error:
        raise optuna.TrialPruned(str(error)) from None
    voted = [result.accuracy_augtest_vote for result in results if result.accuracy_augtest_vote is not None]
    with_views = tuple(voted) if len(voted) == len(results) else None
    return Outcome(settings, tuple(result.accuracy for result in results), with_views)
