"""Trials that are private runs: one budget, one published, nothing that tells how many there were."""

import math
import stat
from collections import Counter

import pytest

from sfumato.accounting.accountants import epsilon
from sfumato.accounting.calibration import solve_noise_multiplier
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.selection import Selection, epsilon_of_best
from sfumato.errors import InputError
from sfumato.randomness import Streams
from sfumato.scaling.search.paid import draw, expected_cost, paid_recipe, paid_search
from sfumato.scaling.search.space import STEPS, Group, Range, Space
from tests.scaling.search.made_up_trials import Trials
from tests.scaling.search.one_worker import made_up_search

SPACE = Space((Group("g", {"optimizer.learning_rate": [1.0, 2.0, 4.0, 8.0], "ema.decay": Range(0.5, 0.9)}),))


def recipe(mean=6.0):
    return paid_recipe(made_up_search().recipe, SPACE, Selection(mean, 0.0))


def many_trials(folder, at_least=3):
    """Searches until one has that many trials."""
    for attempt in range(200):
        trials = Trials()
        result = paid_search(recipe(), SPACE, folder / str(attempt), trials)
        if len(trials.made) >= at_least:
            return folder / str(attempt), trials, result
    raise AssertionError("the number of trials is always small")


def test_the_best_trial_alone_is_left_and_nothing_tells_how_many_there_were(tmp_path):
    folder, trials, result = many_trials(tmp_path)
    assert result["decay"] == max(decay for _, _, decay in trials.made)
    assert sorted(path.name for path in folder.iterdir()) == ["paid-search.json", "selected"]
    left = "".join(str(path) + path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())
    assert not any(name in left for name, _, _ in trials.made)
    assert result["run"] == str(folder / "selected")


def test_a_killed_search_goes_on_with_the_same_trials_and_no_others(tmp_path):
    folder, whole, _ = None, None, None
    for attempt in range(200):
        folder = tmp_path / str(attempt)
        first = Trials(killed_at=2)
        try:
            paid_search(recipe(), SPACE, folder, first)
        except KeyboardInterrupt:
            whole = first
            break
    assert whole is not None
    secret = folder / "secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o700
    assert all(stat.S_IMODE((secret / name).stat().st_mode) == 0o600 for name in ("key",))
    second = Trials()
    paid_search(recipe(), SPACE, folder, second)
    assert second.made[:2] == first.made  # the same folders and settings
    assert len(second.made) > 2
    third = Trials()
    again = paid_search(recipe(), SPACE, folder, third)
    assert third.made == []
    assert again["decay"] == max(decay for _, _, decay in second.made)


def test_a_crash_between_selecting_and_forgetting_loses_nothing_and_forgets(tmp_path):
    folder, trials, result = many_trials(tmp_path)
    secret = folder / "secret"
    secret.mkdir()
    (secret / "aabb").mkdir()
    assert paid_search(recipe(), SPACE, folder, Trials()) == result
    assert not secret.exists()


def test_another_search_in_the_same_folder_is_refused(tmp_path):
    killed = Trials(killed_at=0)
    with pytest.raises(KeyboardInterrupt):
        paid_search(recipe(), SPACE, tmp_path, killed)
    with pytest.raises(InputError, match="another recipe or space"):
        paid_search(recipe(7.0), SPACE, tmp_path, killed)


def test_the_number_of_trials_follows_its_distribution(tmp_path):
    """Logarithmic of mean 3: P[K = 1] by its closed form, within four standard errors over 200 searches."""
    counts = Counter()
    searches = 200
    for attempt in range(searches):
        trials = Trials()
        paid_search(recipe(3.0), SPACE, tmp_path / str(attempt), trials)
        counts[len(trials.made)] += 1
    gamma = Selection(3.0, 0.0).gamma
    one = (1 - gamma) / math.log(1 / gamma)
    assert abs(counts[1] / searches - one) < 4 * math.sqrt(one * (1 - one) / searches)
    assert max(counts) > 10  # never capped


def test_settings_are_drawn_evenly_and_independently():
    streams = Streams(bytes(32), {}, {})
    drawn = [draw(recipe(), SPACE, streams.stream("settings", i)) for i in range(2000)]
    rates = Counter(settings["optimizer.learning_rate"] for settings in drawn)
    assert all(abs(count / 2000 - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 2000) for count in rates.values())
    decays = [settings["ema.decay"] for settings in drawn]
    assert abs(sum(decays) / 2000 - 0.7) < 4 * 0.4 / math.sqrt(12 * 2000)
    assert 0.5 <= min(decays) < 0.51 and 0.89 < max(decays) < 0.9


def test_expected_cost_is_that_of_the_expected_number_of_trials():
    assert expected_cost(recipe(6.0), SPACE) == {"search_views": 6 * 512 * 60, "search_fraction": 6.0}


def test_the_noise_is_calibrated_to_the_whole_search():
    numbers = {"num_examples": 1437, "batch_size": 512, "num_steps": 60, "target_epsilon": 3.0, "delta": 1e-4}
    selection = Selection(6.0, 0.0)
    sigma = solve_noise_multiplier(**numbers, selection=selection)
    mechanism = Mechanism(1437, 512, sigma, 60)
    assert epsilon(mechanism, 1e-4, selection=selection).epsilon == epsilon_of_best(mechanism, 1e-4, selection) <= 3.0
    assert epsilon_of_best(mechanism.replace(noise_multiplier=0.998 * sigma), 1e-4, selection) > 3.0
    assert sigma > solve_noise_multiplier(**numbers)


def test_trials_of_another_budget_are_refused():
    with pytest.raises(InputError, match="one and the same budget"):
        paid_recipe(made_up_search().recipe, Space((Group("g", {STEPS: [30, 60]}),)), Selection(6.0, 0.0))
    seeded = made_up_search().recipe
    seeded = seeded.model_copy(update={"run": seeded.run.model_copy(update={"seed": 1})})
    with pytest.raises(InputError, match="run.seed"):
        paid_recipe(seeded, SPACE, Selection(6.0, 0.0))
    contradiction = Space((Group("g", {"optimizer.learning_rate": [-1.0]}),))
    with pytest.raises(InputError, match="no possible settings"):
        draw(recipe(), contradiction, Streams(bytes(32), {}, {}).stream("settings"))


def test_a_score_on_private_images_has_the_noise_that_is_paid_for_and_is_a_whole_number(tmp_path):
    """Two hundred searches of one trial that judges 1,000 images right: mean and spread of the published score."""
    one = paid_recipe(made_up_search().recipe, SPACE, Selection(1.0, 0.0, 20.0))
    assert one.data.split == "train"  # the validation split scores
    scores = []
    for attempt in range(200):
        scores.append(paid_search(one, SPACE, tmp_path / str(attempt), Trials(score=lambda where: 1000))["score"])
    assert all(isinstance(score, int) for score in scores)
    mean = sum(scores) / 200
    spread = math.sqrt(sum((score - mean) ** 2 for score in scores) / 199)
    assert abs(mean - 1000) < 4 * 20 / math.sqrt(200)
    assert 20 * (1 - 4 / math.sqrt(400)) < spread < 20 * (1 + 4 / math.sqrt(400))  # rejects 2/3 and 3/2 of the scale


def test_a_finished_search_is_not_told_again_under_another_recipe(tmp_path):
    folder, trials, _ = many_trials(tmp_path, at_least=1)
    with pytest.raises(InputError, match="another recipe or space"):
        paid_search(recipe(7.0), SPACE, folder, trials)


@pytest.mark.parametrize("name", ["secret", "selected"])
def test_folders_that_no_search_made_are_left_alone(tmp_path, name):
    mine = tmp_path / name / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(InputError, match="no search made"):
        paid_search(recipe(), SPACE, tmp_path, Trials())
    assert mine.read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == [name]


def test_a_selected_run_is_never_certified_for_fewer_steps_than_the_others_may_have_taken():
    from sfumato.data.facts import Facts
    from sfumato.training.certificate import claims
    from sfumato.training.resolve import resolve

    stated = recipe()  # its noise, and no target
    stated = stated.model_copy(update={"privacy": stated.privacy.model_copy(update={"target_epsilon": None})})
    plan = resolve(stated, Facts(1437, 10, 8, 1))
    whole = claims(plan, plan.mechanism)["epsilon"]
    assert claims(plan, plan.mechanism.replace(num_steps=5))["epsilon"] == whole
    assert claims(plan, plan.mechanism.replace(num_steps=75))["epsilon"] > whole
