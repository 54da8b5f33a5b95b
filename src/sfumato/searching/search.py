"""A whole search, from a recipe to the recipe of the one private run."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sfumato.config import Recipe
from sfumato.data import loading
from sfumato.errors import InputError
from sfumato.planning.resolve import resolve
from sfumato.run_folder.files import refuse_among_images, refuse_links, write_atomically, write_json
from sfumato.run_folder.record import Result
from sfumato.scaling.simulate import simulations
from sfumato.searching import final_recipe as final
from sfumato.searching.options import SearchOptions
from sfumato.searching.result import SearchResult
from sfumato.searching.schedule import Outcome, Slot, plan_search
from sfumato.searching.space import Settings, apply, trial_of
from sfumato.searching.study import Watch, finished, open_study, parse_url, url_in, work
from sfumato.training.logs import Progress, StepFacts
from sfumato.training.process import stop_on_sigterm
from sfumato.training.trainer import Trainer


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
    url = parse_url(options.storage) if options.storage else url_in(folder)
    if url.get_backend_name() == "sqlite":
        refuse_among_images(Path(str(url.database)), parsed.data, options.root)
    if (folder / "ledger.jsonl").exists():
        raise InputError(f"{folder} is a run's folder. Name a folder for the search by --output.")
    plan = resolve(parsed, loading.facts(parsed.data, options.root, report))
    wanted = plan_search(plan.recipe, options, plan.mechanism.num_examples)
    trainer = Trainer(options.load(plan.recipe), device=options.device, trust=options.trust)
    refuse_links(folder)
    # What a trial leaves is in the storage; weights of simulations are not private, and nobody needs them.
    weights = folder / "owner"
    weights.mkdir(mode=0o700, parents=True, exist_ok=True)
    if url.get_backend_name() == "sqlite":
        Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)

    def evaluate(settings: Settings, slot: Slot, watch: Watch) -> Outcome:
        """The same settings simulated with each seed, on images that are held apart from the training images."""
        recipe = trial_of(wanted.recipe, settings, wanted.num_examples)
        if slot.kind == "law":  # held-out images are also judged by as many views as in training (AugTest)
            recipe = apply(recipe, {"augmentation.test_views": recipe.augmentation.augmult})
        if not wanted.prune:  # nobody looks at a trial before its end
            recipe = apply(recipe, {"training.evaluate_every": recipe.training.num_steps})
        recipe = recipe.model_copy(update={"data": options.looked_at(plan.recipe)})

        def step(facts: StepFacts) -> None:
            if facts.evaluated and facts.accuracy is not None:
                watch(facts.step, facts.accuracy)

        results: list[Result] = []
        for simulation in simulations(recipe, slot.batch_size, slot.seeds):
            # Whether a trial falls behind is judged by its first seed.
            progress = Progress() if results else Progress(step=step)
            with tempfile.TemporaryDirectory(dir=weights) as run:
                results.append(trainer.run(simulation, Path(run) / "run", progress=progress))
        voted = [result.accuracy_augtest_vote for result in results if result.accuracy_augtest_vote is not None]
        with_views = tuple(voted) if len(voted) == len(results) else None
        return Outcome(settings, tuple(result.accuracy for result in results), with_views)

    with stop_on_sigterm(), open_study(wanted, url, options.name) as study:
        agenda = work(wanted, study, evaluate, report)
        outcomes = finished(study)
    shutil.rmtree(weights, ignore_errors=True)  # what killed workers left, too
    path = None if options.worker else folder / "recipe.toml"
    found = final.summary(wanted, agenda, outcomes, storage=repr(url), path=None if path is None else str(path))
    if path is not None:
        write_atomically(path, final.as_toml(wanted, agenda, found, options.name).encode())
        write_json(folder / "search.json", found.as_json())
    return found
