"""Trials that are private runs: one budget, one published, nothing in it that tells how many there were."""

import json
import math
import random
import stat
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from sfumato import config
from sfumato.accounting.selection import Selection
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError
from sfumato.planning.claims import claims
from sfumato.planning.resolve import Plan, resolve
from sfumato.run_folder import record
from sfumato.run_folder.files import write_json
from sfumato.run_folder.record import Result
from sfumato.searching import private
from sfumato.searching.private import draw, expected_cost, paid_recipe, paid_search
from sfumato.searching.space import STEPS, Range, Space
from sfumato.training.process import Interrupted
from tests.reporting import folders
from tests.searching.made_up_search import made_up_search

SPACE = Space({"g": {"optimizer.learning_rate": [1.0, 2.0, 4.0, 8.0], "ema.decay": Range(0.5, 0.9)}})


def paid(mean=6.0, **selection):
    return paid_recipe(made_up_search().recipe, SPACE, Selection(mean, 0.0, **selection))


class Trials:
    """Trials that train nothing: each is a finished run's files, whose recipe says what was drawn.

    Attributes:
        made: (folder's name, learning rate, decay, whether it was gone on with) of each trial, in order.
        ends: What becomes of the trial of that number: an exception, or how many updates were lost.
    """

    def __init__(self, ends=None):
        self.made, self.ends = [], ends or {}

    def train(self, trial, where, resume):
        end = self.ends.get(len(self.made), 0)
        self.made.append((where.name, trial.optimizer.learning_rate, trial.ema.decay, resume))
        if not resume:
            write_finished(where, trial)
        if isinstance(end, BaseException):
            (where / "result.json").unlink(missing_ok=True)
            raise end
        if resume:  # it was stopped before it had a result
            (where / "result.json").write_text(json.dumps(folders.finished(["a", "b"], run=str(where))))
        result = record.read(where / "result.json", Result)
        object.__setattr__(result, "num_lost", end)
        return result

    def search(self, folder, recipe=None, images="images", score=None):
        return paid_search(Plan(recipe or paid(), None, None), SPACE, folder, images, self.train, score or self.decay)

    def decay(self, where):
        return round(1e9 * decay_of(where))


def write_finished(folder, recipe):
    """What a finished run leaves."""
    claim = folders.private_certificate(finished_on="2026-01-02")
    result = folders.finished(["a", "b"], run=str(folder), seconds=98765.4321, images_per_second=87654.321)
    folders.write_run(folder, claim, result, folders.curve(2), config.to_toml(config.shareable(recipe)))
    (folder / "ledger.jsonl").write_text('{"kind": "run"}\n')
    (folder / "model.safetensors").write_bytes(b"weights")


def decay_of(folder):
    return config.parse(config.read(Path(folder) / "recipe.toml")).ema.decay


@pytest.fixture
def three_trials(monkeypatch):
    monkeypatch.setattr(Selection, "draw", lambda self, uniform: 3)


def test_the_best_trial_alone_is_left_and_nothing_tells_how_many_there_were(tmp_path, three_trials):
    folder, trials = tmp_path / "search", Trials()
    result = trials.search(folder)
    assert len(trials.made) == 3
    assert decay_of(result.run) == max(decay for _, _, decay, _ in trials.made)
    assert result.run == str(folder / "selected")
    assert sorted(path.name for path in folder.iterdir()) == ["paid-search.json", "selected"]
    assert {path.name for path in (folder / "selected").iterdir()} == {*private.PUBLISHED, "report.html"}
    left = "".join(str(path) + path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())
    assert not any(word in left for word in (*(made[0] for made in trials.made), "98765.4", "87654.3", "2026-01-02"))
    assert json.loads((folder / "selected" / "privacy.json").read_text())["finished_on"] is None
    again = Trials()
    assert again.search(folder) == result and again.made == []  # finished: told again


def test_a_killed_search_goes_on_with_the_same_trials_and_makes_the_one_that_was_cut_off_anew(tmp_path, three_trials):
    first, second = Trials({1: KeyboardInterrupt()}), Trials()
    with pytest.raises(KeyboardInterrupt):
        first.search(tmp_path)
    assert stat.S_IMODE((tmp_path / "owner").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "owner" / "progress.json").stat().st_mode) == 0o600
    second.search(tmp_path)
    assert [made[:3] for made in second.made[:1]] == [first.made[1][:3]]  # the same folder and settings
    assert len(second.made) == 2 and not any(resumed for *_, resumed in second.made)


def test_a_search_that_was_killed_before_it_drew_goes_on(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        Trials({0: KeyboardInterrupt()}).search(tmp_path)
    (tmp_path / "owner" / "selection.json").unlink()
    assert Trials().search(tmp_path).run == str(tmp_path / "selected")


def test_a_trial_that_was_stopped_with_a_checkpoint_goes_on(tmp_path, three_trials):
    first, second = Trials({1: Interrupted()}), Trials({0: KeyboardInterrupt()})
    with pytest.raises(Interrupted):
        first.search(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        second.search(tmp_path)
    assert [resumed for *_, resumed in second.made] == [True]
    third = Trials()
    third.search(tmp_path)  # it was killed after it had gone on
    assert [resumed for *_, resumed in third.made] == [False, False]


def test_a_trial_that_lost_updates_is_made_anew_with_the_same_settings(tmp_path, three_trials):
    trials = Trials({1: 4})
    trials.search(tmp_path)
    assert trials.made[1] == trials.made[2] and len(trials.made) == 4
    assert not any(resumed for *_, resumed in trials.made)


def test_a_search_of_other_images_or_another_recipe_is_not_gone_on_with(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        Trials({0: KeyboardInterrupt()}).search(tmp_path)
    with pytest.raises(InputError, match="the images changed since this search began") as refusal:
        Trials().search(tmp_path, images="imagez")
    assert "\n" not in str(refusal.value)
    with pytest.raises(InputError, match="another recipe or space"):
        Trials().search(tmp_path, paid(7.0))
    Trials().search(tmp_path)
    with pytest.raises(InputError, match="another recipe or space"):
        Trials().search(tmp_path, paid(7.0))  # nor told again


def test_a_folder_that_no_search_made_is_left_alone(tmp_path):
    mine = tmp_path / "owner" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(InputError, match="no paid search made"):
        Trials().search(tmp_path)
    assert mine.read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["owner"]


def test_one_process_at_a_time_makes_a_search(tmp_path):
    class Twice(Trials):
        def train(self, trial, where, resume):
            with pytest.raises(InputError, match="another process"):
                Trials().search(tmp_path / "search")
            return super().train(trial, where, resume)

    Twice().search(tmp_path / "search")


def test_a_search_whose_images_lie_elsewhere_now_is_the_same_and_no_file_tells_where(tmp_path):
    def at(path):
        found = paid()
        return found.model_copy(update={"data": found.data.model_copy(update={"path": path})})

    with pytest.raises(KeyboardInterrupt):
        Trials({0: KeyboardInterrupt()}).search(tmp_path, at("/here"))
    Trials().search(tmp_path, at("/there"))


def test_the_number_of_trials_follows_its_distribution(tmp_path):
    """Logarithmic of mean 3: P[K = 1] by its closed form, within four standard errors over 200 searches."""
    searches, counts = 200, Counter()
    for attempt in range(searches):
        owner = tmp_path / str(attempt)
        counts[len(private._drawn(paid(3.0), SPACE, owner, "images")[1])] += 1
    gamma = math.exp(Selection(3.0, 0.0).log_gamma)
    one = (1 - gamma) / math.log(1 / gamma)
    assert abs(counts[1] / searches - one) < 4 * math.sqrt(one * (1 - one) / searches)
    assert max(counts) > 8  # never capped


@pytest.mark.parametrize(
    ("choices", "distribution"),
    [
        ([1, 2, 3, 4], stats.randint(1, 5)),
        (Range(2, 5), stats.randint(2, 6)),  # whole numbers, both ends among them
        (Range(0, 0.8), stats.uniform(0, 0.8)),  # one end is not whole
        (Range(0.25, 16.0, log=True), stats.loguniform(0.25, 16.0)),
    ],
)
def test_settings_are_drawn_evenly(choices, distribution):
    """By the draw's own distribution: at the p-th part of all uniform numbers stands its p-quantile."""
    key = "optimizer.learning_rate"
    space, generator = Space({"g": {key: choices}}), random.Random(0)
    drawn = np.sort([draw(paid(), space, generator)[key] for _ in range(1000)])
    for p in (0.05, 0.3, 0.55, 0.8, 0.95):
        below = np.searchsorted(drawn, distribution.ppf(p), side="right") / 1000
        assert below == pytest.approx(distribution.cdf(distribution.ppf(p)), abs=4 * math.sqrt(p * (1 - p) / 1000))
    least, most = distribution.support()
    assert least <= drawn[0] and drawn[-1] <= most and drawn[-1] - drawn[0] > 0.95 * (most - least)


def test_a_score_on_private_images_has_the_noise_that_is_paid_for_and_is_a_whole_number(tmp_path, monkeypatch):
    """Of one search of 400 trials that each judge 1,000 images right: mean and spread of the scores."""
    monkeypatch.setattr(Selection, "draw", lambda self, uniform: 400)
    noisy, kept = paid(score_noise=20.0), {}

    def keep(path, value, mode=0o644):
        if path.name == private.PROGRESS:  # 800 times
            kept.update(value["scores"])
        else:
            write_json(path, value, mode)

    assert noisy.data.split == "train"  # the validation split scores
    monkeypatch.setattr(private, "write_json", keep)
    result = Trials().search(tmp_path, noisy, score=lambda where: 1000)
    scores = np.array(list(kept.values()))
    assert len(scores) == 400 and all(isinstance(score, int) for score in kept.values())
    assert result.score == scores.max() and isinstance(result.score, int)
    assert abs(scores.mean() - 1000) < 4 * 20 / math.sqrt(400)
    assert 20 * (1 - 4 / math.sqrt(800)) < scores.std(ddof=1) < 20 * (1 + 4 / math.sqrt(800))


def test_expected_cost_is_that_of_the_expected_number_of_trials():
    cost = expected_cost(paid(6.0), SPACE, 6.0)
    assert (cost.search_views, cost.search_fraction) == (6 * 512 * 60, 6.0)


def test_a_selected_run_is_never_certified_for_fewer_steps_than_the_others_may_have_taken():
    stated = paid()  # its noise, and no target
    stated = stated.model_copy(update={"privacy": stated.privacy.model_copy(update={"target_epsilon": None})})
    plan = resolve(stated, Facts(1437, 10, 8, 1))
    assert claims(plan, plan.mechanism.replace(num_steps=5)).epsilon == claims(plan, plan.mechanism).epsilon


def test_trials_that_could_not_be_alike_are_refused():
    searched = made_up_search().recipe
    for change, says in (({"seed": 1}, "run.seed"), ({"log": "csv"}, "run.log")):
        other = searched.model_copy(update={"run": searched.run.model_copy(update=change)})
        with pytest.raises(InputError, match=says):
            paid_recipe(other, SPACE, Selection(6.0, 0.0))
    with pytest.raises(InputError, match="one and the same budget"):
        paid_recipe(searched, Space({"g": {STEPS: [30, 60]}}), Selection(6.0, 0.0))
    contradiction = Space({"g": {"optimizer.learning_rate": [-1.0]}})
    with pytest.raises(InputError, match="no possible settings"):
        draw(paid(), contradiction, random.Random(0))
