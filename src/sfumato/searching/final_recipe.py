"""The one private recipe that a search ends with, its certificate computed in advance, its
predicted accuracy and its price.
"""

import dataclasses
from collections.abc import Mapping

from sfumato import config
from sfumato.accounting import formats
from sfumato.config import ResolvedRecipe, parse_resolved
from sfumato.json_record import pick
from sfumato.planning.claims import unit_in_words
from sfumato.planning.solve import budget_of, solve
from sfumato.scaling.law import NOT_TOLD_APART, Fit, Point, Prediction, fit, predict, rivals
from sfumato.searching.result import Best, Cost, Predicted, SearchResult
from sfumato.searching.schedule import Agenda, Outcome, Search, accuracies_of
from sfumato.searching.space import Settings, apply, possible, views_of


def final_recipe(search: Search, settings: Settings, public: bool) -> tuple[ResolvedRecipe, float]:
    """The settings at the reference batch, the noise calibrated anew to the budget.

    Args:
        search: That found the settings.
        settings: The best.
        public: Whether the search looked at public images alone.

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
    values["privacy"]["search_data"] = "public" if public else "private"
    values["run"]["seed"] = None
    return parse_resolved(values), spent


def predicted(search: Search, agenda: Agenda, finished: Mapping[str, Outcome]) -> tuple[list[Fit], Prediction]:
    """The accuracy of the final run on the validation split, extrapolated from some batch sizes of
    the best settings.
    """
    fits = fit(
        [
            Point(slot.batch_size, seed, accuracy)
            for slot in search.law_slots(agenda.settings)
            for seed, accuracy in zip(slot.seeds, accuracies_of(finished[slot.name]), strict=True)
        ]
    )
    return fits, predict(fits, apply(search.recipe, agenda.settings).training.batch_size)


def cost(search: Search, agenda: Agenda, finished: Mapping[str, Outcome]) -> Cost:
    """Views differentiated by the simulations, and as a fraction of one run of the recipe that was
    searched.

    A trial that fell behind is counted as if it had been made whole; one that was impossible was
    not made.
    """
    views = 0
    for slot in agenda.slots:
        recipe = possible(search.recipe, finished[slot.name].settings, search.num_examples)
        views += 0 if recipe is None else views_of(recipe, slot.batch_size, len(slot.seeds))
    best = apply(search.recipe, agenda.settings)
    fraction = views / views_of(search.recipe, search.recipe.training.batch_size)
    return Cost(search_views=views, search_fraction=fraction, final_views=views_of(best, best.training.batch_size))


def summary(
    search: Search, agenda: Agenda, finished: Mapping[str, Outcome], *, storage: str, path: str | None
) -> SearchResult:
    """What was found.

    Args:
        storage: Where the trials are, as it may be shown.
        path: Where the final recipe will stand; None: nowhere.
    """
    public = search.data is not None
    recipe, epsilon = final_recipe(search, agenda.settings, public)
    laws, prediction = predicted(search, agenda, finished)
    found = [finished[slot.name] for slot in agenda.slots if slot.kind != "law"]
    made = [each for each in found if each.accuracies is not None]
    best = accuracies_of(next(each for each in made if each.settings == agenda.settings))
    last = finished[search.law_slots(agenda.settings)[-1].name]  # the largest batch; no part of the prediction
    views = last.augtest
    return SearchResult(
        best=Best(settings=dict(agenda.settings), accuracy=sum(best) / len(best)),
        stages=agenda.stages,
        trials=len(found),
        given_up=len(found) - len(made),
        epsilon_final=epsilon,
        **pick(recipe.budget, "delta", "noise_multiplier"),
        epsilon_search_inclusive=epsilon if public else None,
        predicted_accuracy=Predicted(value=prediction.accuracy, **pick(prediction, "low", "high")),
        augtest_gain=None if views is None else (sum(views) - sum(accuracies_of(last))) / len(views),
        law=laws[0].law,
        cost=cost(search, agenda, finished),
        warnings=[*laws[0].warnings, *NOT_TOLD_APART[: len(rivals(laws))]],
        storage=storage,
        search_data=search.data or "private",
        recipe=path,
    )


def as_toml(search: Search, agenda: Agenda, found: SearchResult, name: str) -> str:
    """The final recipe as a file, with where it comes from."""
    recipe, _ = final_recipe(search, agenda.settings, search.data is not None)
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
