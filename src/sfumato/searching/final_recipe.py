"""The one private recipe that a search ends with, its certificate computed in advance, its
predicted accuracy and its price.
"""

import dataclasses
from collections.abc import Mapping

from sfumato import config
from sfumato.accounting import rounding
from sfumato.config import ResolvedRecipe, parse_resolved
from sfumato.errors import InputError
from sfumato.planning.claims import unit_in_words
from sfumato.planning.solve import budget_of, solve
from sfumato.scaling.law import NOT_TOLD_APART, Fit, Point, Prediction, fit, predict, rivals
from sfumato.searching.result import Best, Cost, Predicted, SearchResult
from sfumato.searching.schedule import Agenda, Outcome, Search, accuracies_of
from sfumato.searching.space import Settings, apply, views_of


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
    budget = dataclasses.replace(budget_of(recipe, n), target_epsilon=target, noise_multiplier=None)
    mechanism, _ = solve(budget)
    spent = epsilon(mechanism, privacy.delta, privacy.accountant).epsilon
    values = recipe.model_dump()
    values["privacy"] |= {
        "target_epsilon": target,
        "noise_multiplier": mechanism.noise_multiplier,
        "search_data": "public" if public else "private",
    }
    values["run"]["seed"] = None
    return parse_resolved(values), spent


def predicted(search: Search, agenda: Agenda, finished: Mapping[str, Outcome]) -> tuple[list[Fit], Prediction]:
    """The accuracy of the final run on the validation split, extrapolated from some batch sizes of
    the best settings.
    """
    points = []
    for slot in search.law_slots(agenda.settings):
        accuracies = accuracies_of(finished[slot.name])
        points += [
            Point(slot.batch_size, seed, accuracy) for seed, accuracy in zip(slot.seeds, accuracies, strict=True)
        ]
    fits = fit(points)
    reference = apply(search.recipe, agenda.settings).training.batch_size
    return fits, predict(fits, reference)


def cost(search: Search, agenda: Agenda, finished: Mapping[str, Outcome]) -> Cost:
    """Views differentiated by the simulations, and as a fraction of one run of the recipe that was
    searched.

    A trial that fell behind is counted as if it had been made whole; one that was impossible was
    not made.
    """
    views = 0
    for slot in agenda.slots:
        try:
            recipe = apply(search.recipe, finished[slot.name].settings)
        except InputError:
            continue
        views += views_of(recipe, slot.batch_size, len(slot.seeds))
    training = search.recipe.training
    reference = views_of(search.recipe, training.batch_size, 1)
    best = apply(search.recipe, agenda.settings)
    return Cost(
        search_views=views,
        search_fraction=views / reference,
        final_views=views_of(best, best.training.batch_size, 1),
    )


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
    tried = [slot.name for slot in agenda.slots if slot.kind != "law"]
    found = [finished[name] for name in tried]
    return SearchResult(
        best=Best(settings=dict(agenda.settings), accuracy=_accuracy_of(agenda.settings, found)),
        stages=agenda.stages,
        trials=len(found),
        given_up=sum(outcome.accuracies is None for outcome in found),
        epsilon_final=epsilon,
        delta=recipe.budget.delta,
        noise_multiplier=recipe.budget.noise_multiplier,
        epsilon_search_inclusive=epsilon if public else None,
        predicted_accuracy=Predicted(value=prediction.accuracy, low=prediction.low, high=prediction.high),
        augtest_gain=augtest_gain(search, agenda, finished),
        law=laws[0].law,
        cost=cost(search, agenda, finished),
        warnings=[*laws[0].warnings, *NOT_TOLD_APART[: len(rivals(laws))]],
        storage=storage,
        search_data=search.data or "private",
        recipe=path,
    )


def augtest_gain(search: Search, agenda: Agenda, finished: Mapping[str, Outcome]) -> float | None:
    """What the majority of several views adds at the largest batch simulated; None where training
    has no views. No part of the prediction.
    """
    last = finished[search.law_slots(agenda.settings)[-1].name]
    if last.augtest is None or last.accuracies is None:
        return None
    return (sum(last.augtest) - sum(last.accuracies)) / len(last.augtest)


def _accuracy_of(settings: Settings, outcomes: list[Outcome]) -> float | None:
    for outcome in outcomes:
        if outcome.settings == settings and outcome.accuracies is not None:
            return sum(outcome.accuracies) / len(outcome.accuracies)
    return None


def as_toml(search: Search, agenda: Agenda, found: SearchResult, name: str) -> str:
    """The final recipe as a file, with where it comes from."""
    recipe, _ = final_recipe(search, agenda.settings, search.data is not None)
    privacy, accuracy = recipe.privacy, found.predicted_accuracy
    of_persons = privacy is not None and privacy.unit == "person"
    limit = privacy.max_images_per_person if privacy is not None and of_persons else None
    looked_at = f"{search.data}, public images" if search.data else "the private images: no certificate covers that"
    head = [
        f"Found by a search from {name}: {found.trials} settings, simulated at batch "
        f"{search.batch_size} on {looked_at}.",
        f"Predicted accuracy on the validation split {accuracy.value:.4f} ({accuracy.low:.4f} to "
        f"{accuracy.high:.4f}, 95 %).",
        f"It will spend epsilon {rounding.epsilon_text(found.epsilon_final)} at delta "
        f"{rounding.delta_text(found.delta)}, for {unit_in_words(limit)}.",
    ]
    return "".join(f"# {line}\n" for line in head) + config.to_toml(config.shareable(recipe))
