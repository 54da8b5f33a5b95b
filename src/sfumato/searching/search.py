"""A whole search, from a recipe to the recipe of the one private run: its certificate computed in advance, its
predicted accuracy and its price.
"""

import dataclasses
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sfumato import config
from sfumato.accounting import formats
from sfumato.config import Recipe, ResolvedRecipe, parse_resolved
from sfumato.data import loading
from sfumato.errors import InputError
from sfumato.json_record import pick
from sfumato.planning.claims import unit_in_words
from sfumato.planning.resolve import resolve
from sfumato.planning.solve import budget_of, solve
from sfumato.run_folder.files import refuse_among_images, refuse_links, write_atomically, write_json
from sfumato.run_folder.record import Result
from sfumato.scaling.law import Fit, Point, Prediction, fit, predict
from sfumato.scaling.simulate import simulations
from sfumato.searching.options import SearchOptions
from sfumato.searching.page import render
from sfumato.searching.result import Best, Cost, Predicted, SearchResult
from sfumato.searching.schedule import Agenda, Outcome, Search, Slot, accuracies_of, plan_search
from sfumato.searching.space import Settings, apply, possible, trial_of, views_of
from sfumato.searching.study import Watch, open_study, parse_url, url_in, work
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
    shutil.rmtree(weights, ignore_errors=True)  # what killed workers left, too
    path = None if options.worker else folder / "recipe.toml"
    found, recipe = summary(wanted, agenda, repr(url), None if path is None else str(path))
    if path is not None:
        write_atomically(path, as_toml(wanted, recipe, found, options.name).encode())
        write_json(folder / "search.json", found.as_json())
        write_atomically(folder / "search.html", render(found).encode())
    return found


def final_recipe(search: Search, settings: Settings) -> tuple[ResolvedRecipe, float]:
    """The best settings of a search at the reference batch, the noise calibrated anew to the budget.

    Returns:
        The recipe, and the epsilon that it will spend: never above its target.
    """
    from sfumato.accounting.accountants import epsilon

    recipe = apply(search.recipe, settings)
    privacy, n = recipe.budget, search.num_examples
    target = privacy.target_epsilon
    if target is None:  # the recipe states its noise: what that spends is the budget
        stated, _ = solve(budget_of(search.recipe, n))
        target = epsilon(stated, privacy.delta, privacy.accountant).epsilon
    mechanism, _ = solve(dataclasses.replace(budget_of(recipe, n), target_epsilon=target, noise_multiplier=None))
    spent = epsilon(mechanism, privacy.delta, privacy.accountant).epsilon
    values = recipe.model_dump()
    values["privacy"] |= {"target_epsilon": target, "noise_multiplier": mechanism.noise_multiplier}
    values["privacy"]["search_data"] = "private" if search.data is None else "public"
    values["run"]["seed"] = None
    return parse_resolved(values), spent


def predicted(search: Search, agenda: Agenda) -> tuple[list[Fit], Prediction]:
    """The accuracy of the final run on the validation split, extrapolated from some batch sizes of
    the best settings.
    """
    fits = fit(
        [
            Point(slot.batch_size, seed, accuracy)
            for slot in search.law_slots(agenda.settings)
            for seed, accuracy in zip(slot.seeds, accuracies_of(agenda.finished[slot.name]), strict=True)
        ]
    )
    return fits, predict(fits, apply(search.recipe, agenda.settings).training.batch_size)


def cost(search: Search, agenda: Agenda) -> Cost:
    """Views differentiated by the simulations, and as a fraction of one run of the recipe that was
    searched.

    A trial that fell behind is counted as if it had been made whole; one that was impossible was
    not made.
    """
    views = 0
    for slot in agenda.slots:
        recipe = possible(search.recipe, agenda.finished[slot.name].settings, search.num_examples)
        views += 0 if recipe is None else views_of(recipe, slot.batch_size, len(slot.seeds))
    best = apply(search.recipe, agenda.settings)
    fraction = views / views_of(search.recipe, search.recipe.training.batch_size)
    return Cost(search_views=views, search_fraction=fraction, final_views=views_of(best, best.training.batch_size))


def summary(search: Search, agenda: Agenda, storage: str, path: str | None) -> tuple[SearchResult, ResolvedRecipe]:
    """What was found, and the final recipe.

    Args:
        storage: Where the trials are, as it may be shown.
        path: Where the final recipe will stand; None: nowhere.
    """
    recipe, epsilon = final_recipe(search, agenda.settings)
    laws, prediction = predicted(search, agenda)
    found = [agenda.finished[slot.name] for slot in agenda.slots if slot.kind != "law"]
    made = [each for each in found if each.accuracies is not None]
    best = accuracies_of(next(each for each in made if each.settings == agenda.settings))
    last = agenda.finished[search.law_slots(agenda.settings)[-1].name]  # the largest batch; no part of the prediction
    views = last.augtest
    told = SearchResult(
        best=Best(settings=dict(agenda.settings), accuracy=sum(best) / len(best)),
        stages=agenda.stages,
        trials=len(found),
        given_up=len(found) - len(made),
        epsilon_final=epsilon,
        **pick(recipe.budget, "delta", "noise_multiplier"),
        epsilon_search_inclusive=None if search.data is None else epsilon,
        predicted_accuracy=Predicted(value=prediction.accuracy, **pick(prediction, "low", "high")),
        augtest_gain=None if views is None else (sum(views) - sum(accuracies_of(last))) / len(views),
        law=laws[0].law,
        cost=cost(search, agenda),
        warnings=laws[0].warnings,
        storage=storage,
        search_data=search.data or "private",
        recipe=path,
    )
    return told, recipe


def as_toml(search: Search, recipe: ResolvedRecipe, found: SearchResult, name: str) -> str:
    """The final recipe as a file, with where it comes from."""
    privacy, accuracy = recipe.budget, found.predicted_accuracy
    limit = privacy.max_images_per_person if privacy.unit == "person" else None
    looked_at = f"{search.data}, public images" if search.data else "the private images: no certificate covers that"
    head = f"""\
# Found by a search from {name}: {found.trials} settings, simulated at batch {search.batch_size} on {looked_at}.
# Predicted accuracy on the validation split {accuracy.value:.4f} ({accuracy.low:.4f} to {accuracy.high:.4f}, 95 %).
# It will spend epsilon {formats.epsilon_text(found.epsilon_final)} at delta {formats.delta_text(found.delta)}, \
for {unit_in_words(limit)}.
"""
    return head + config.to_toml(config.shareable(recipe))
