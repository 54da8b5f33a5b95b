"""What a search tries next follows from what has finished, and from nothing else; and what counts as a gain."""

import dataclasses
import random

import numpy as np
import pytest

from sfumato.accounting.accountants import epsilon
from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError
from sfumato.searching import search as final
from sfumato.searching.options import SearchOptions
from sfumato.searching.schedule import Outcome, gain, plan_search
from sfumato.searching.space import STEPS, Range, Space, apply
from tests.searching.made_up_search import accuracy, made_up_search


def complete(search, measure=accuracy):
    """Finishes slot after slot; returns the last agenda."""
    finished = {}
    for _ in range(100):
        agenda = search.agenda(finished)
        if agenda.complete:
            return agenda
        slot = next(slot for slot in agenda.slots if slot.name not in finished)
        settings = slot.settings if slot.settings is not None else {"optimizer.learning_rate": 1.0 + len(finished)}
        finished[slot.name] = Outcome(settings, tuple(measure(settings, slot, seed) for seed in slot.seeds))
    raise AssertionError("the agenda never ends")


def test_the_greedy_order_finds_the_best_of_each_group_on_top_of_the_one_before():
    agenda = complete(made_up_search())
    assert agenda.settings == {"optimizer.learning_rate": 8.0, "ema.decay": 0.9}
    assert [stage.name for stage in agenda.stages] == ["learning rate", "averaging"]
    assert agenda.stages[0].gain == pytest.approx(0.06)
    assert agenda.stages[1].gain == pytest.approx(0.1 * (0.9999 - 0.9))
    for stage, group in zip(agenda.stages, made_up_search().space.groups.values(), strict=True):
        of_stage = [found for name, found in agenda.finished.items() if name.startswith(f"candidate: {stage.name}")]
        assert stage.tried == [{key: found.settings[key] for key in group} for found in of_stage]
        assert stage.accuracies == pytest.approx([np.mean(found.accuracies) for found in of_stage])
    averaged = [found.settings for name, found in agenda.finished.items() if name.startswith("candidate: averaging")]
    assert averaged and all("optimizer.learning_rate" in settings for settings in averaged)


@pytest.mark.parametrize("trials", [1, 4])
def test_no_more_settings_are_tried_than_was_asked_for(trials):
    for sampler in ("greedy", "random"):
        agenda = complete(dataclasses.replace(made_up_search(), trials=trials, sampler=sampler))
        tried = [name for name in agenda.finished if not name.startswith("law")]
        assert len(tried) <= trials
        assert len(tried) == trials or sampler == "greedy"


@pytest.mark.parametrize("name", ["law", "candidate: a"])
def test_a_group_may_have_any_name(name):
    space = Space({name: {"optimizer.learning_rate": [1.0, 4.0, 8.0, 16.0, 32.0]}})
    search = dataclasses.replace(made_up_search(), batch_size=2, trials=6, space=space)
    agenda = complete(search)
    assert agenda.settings == {"optimizer.learning_rate": 8.0}
    assert len({slot.name for slot in agenda.slots}) == len(agenda.slots)
    assert final.summary(search, agenda, "a file", None)[0].trials == 6


def test_a_difference_within_the_spread_changes_nothing():
    def noisy(settings, slot, seed):
        return random.Random(f"{slot.name} {seed}").gauss(0.8, 0.02) + 0.001 * (settings != {})

    agenda = complete(dataclasses.replace(made_up_search(), seeds=(0, 1, 2)), noisy)
    assert agenda.settings == {}


def test_the_prediction_rests_on_seeds_that_chose_nothing():
    search = made_up_search()
    agenda = complete(search)
    law = [slot for slot in agenda.slots if slot.kind == "law"]
    assert [slot.batch_size for slot in law] == [8, 16, 32, 64]
    assert all(not set(slot.seeds) & set(search.seeds) and slot.settings == agenda.settings for slot in law)


def test_the_prediction_meets_the_law_that_the_accuracies_follow():
    search = made_up_search()
    agenda = complete(search)
    _, prediction = final.predicted(search, agenda)
    seeds = search.law_slots(agenda.settings)[0].seeds
    truth = 0.9 + 0.001 * sum(seeds) / len(seeds) - 0.1 / 512
    assert prediction.accuracy == pytest.approx(truth, abs=1e-9)
    assert prediction.low < truth < prediction.high


@pytest.mark.parametrize("settings", [{}, {STEPS: 30}])
def test_the_final_recipe_is_calibrated_to_the_budget_and_never_above_it(settings):
    search = made_up_search()
    recipe, spent = final.final_recipe(search, settings)
    reference = apply(search.recipe, settings)
    for key in ("batch_size", "num_steps"):
        assert getattr(recipe.training, key) == getattr(reference.training, key)
    mechanism = Mechanism(1437, recipe.training.batch_size, recipe.privacy.noise_multiplier, recipe.training.num_steps)
    assert spent == epsilon(mechanism, 1e-4).epsilon <= 3.0
    less = mechanism.replace(noise_multiplier=0.998 * mechanism.noise_multiplier)
    assert epsilon(less, 1e-4).epsilon > 3.0
    assert recipe.privacy.search_data == "private"
    assert recipe.run.seed is None


def test_a_recipe_that_states_its_noise_keeps_what_that_spends():
    search = made_up_search()
    privacy = search.recipe.privacy.model_copy(update={"target_epsilon": None})
    search = dataclasses.replace(search, recipe=search.recipe.model_copy(update={"privacy": privacy}))
    recipe, spent = final.final_recipe(search, {STEPS: 120})
    assert spent <= epsilon(Mechanism(1437, 512, 4.0, 60), 1e-4).epsilon == recipe.privacy.target_epsilon


def test_cost_counts_every_view_of_every_trial():
    search = made_up_search()
    agenda = complete(search)
    tried = sum(slot.kind != "law" for slot in agenda.slots)
    views = tried * 2 * 16 * 60 + 3 * 60 * (8 + 16 + 32 + 64)
    assert final.cost(search, agenda).as_json() == {
        "search_views": views,
        "search_fraction": pytest.approx(views / (512 * 60)),
        "final_views": 512 * 60,
    }


def test_what_could_not_be_made_costs_nothing():
    search = dataclasses.replace(made_up_search(), sampler="random", trials=3)
    agenda = complete(search)
    before = final.cost(search, agenda).search_views
    agenda.finished["candidate: sample/1"] = Outcome({"ema.decay": 2.0}, None)
    assert before - final.cost(search, agenda).search_views == 2 * 16 * 60


def planned(recipe=None, **changes):
    asked = {"space": made_up_search().space, "batch_size": 16, "seeds": (0, 1), **changes}
    recipe = recipe or made_up_search().recipe
    return plan_search(recipe, SearchOptions(recipe, 5, "nowhere", **asked), 1437)


def test_searches_that_cannot_be_are_refused_by_name():
    searched = made_up_search().recipe

    def with_privacy(**changes):
        return searched.model_copy(update={"privacy": searched.privacy.model_copy(update=changes)})

    a_range = Space({"g": {"ema.decay": Range(0.5, 0.9)}})
    for options, says in [
        ({"recipe": searched.model_copy(update={"privacy": None})}, "has no budget"),
        ({"recipe": with_privacy(sampling="shuffled")}, "no certificate"),
        ({"recipe": with_privacy(selected_from=5.0)}, "privacy.selected_from"),
        ({"sampler": "grid"}, "Known are greedy, tpe, random"),
        ({"prune": True}, "--prune"),
        ({"batch_size": 513}, "between 1 and the recipe's own 512"),
        ({"seeds": (1, 1)}, "each seed once"),
        ({"space": a_range}, "ema.decay is a range"),
    ]:
        with pytest.raises(InputError, match=says):
            planned(**options)
    assert planned(batch_size=None).batch_size == 16
    assert planned(sampler="tpe", space=a_range).prune


SEEDS, CANDIDATES = 3, 6


def studies(count, improvement, seed=0):
    """Accuracies of a current setting and of candidates, one of which is better, with a common level for each seed."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        levels = 0.8 + 0.02 * rng.standard_normal(SEEDS)
        table = levels + 0.004 * rng.standard_normal((CANDIDATES + 1, SEEDS))
        table[3] += improvement
        yield list(table[0]), [list(row) for row in table[1:]]


def test_chance_alone_counts_as_a_gain_in_at_most_five_of_a_hundred_searches():
    false = sum(gain(current, candidates).counts for current, candidates in studies(4000, 0.0))
    assert 0.005 < false / 4000 < 0.055


def test_a_gain_of_eight_times_the_spread_is_found_though_levels_of_seeds_differ_by_as_much():
    found = [gain(current, candidates) for current, candidates in studies(1000, 0.032)]
    assert sum(one.counts and one.best == 2 for one in found) > 950


@pytest.mark.parametrize(
    ("current", "candidates", "counts"),
    [
        ([0.8, 0.81], [[0.7, 0.72], [0.75, 0.6]], False),
        ([0.8, 0.81], [None, None], False),
        ([0.8, 0.81], [], False),
        # A candidate that fails does not hide the gain of another: its spread is fifty times that of the others.
        ([0.80, 0.81, 0.79], [[0.1, 0.5, 0.3], [0.83, 0.84, 0.821]], True),
        ([0.8], [[0.7], [0.81], None], True),  # one seed leaves the spread unknown, and the best mean wins
    ],
)
def test_nothing_better_is_no_gain_and_failures_hide_none(current, candidates, counts):
    found = gain(current, candidates)
    assert found.counts == counts
    if len(current) == 1:
        assert (found.best, found.needed, found.gain) == (1, None, pytest.approx(0.01))
